"""A study's page: what every page has, and what a study adds to it."""

from __future__ import annotations

import dataclasses
import pkgutil
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.report import charts
from isoloss.report.data import Column, Style, column_of
from isoloss.report.save import save
from isoloss.report.study_page import Figure, Finding, render
from isoloss.studies.claims import ClaimResult, ClaimsFile
from isoloss.studies.results import Measured, Results
from isoloss.studies.summary import SummaryTable, claim_figures, claim_table, explanations
from isoloss.studies.verdicts import RULE

if TYPE_CHECKING:
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.spec import Study


@dataclass(frozen=True, kw_only=True)
class PageParts:
    """What a study adds to its page.

    Attributes:
        figures: The figures.
        findings: The key findings, the most important first.
        settings: How the study was made, by name; listed before what every page says about that.
    """

    figures: Sequence[Figure]
    findings: Sequence[Finding] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


def write(folder: StudyFolder, results: Results, path: Path, formats: tuple[str, ...] = ("pdf", "png")) -> Path:
    """Write the page of a study's results to `path`, and its figures beside it; return `path`.

    The page of an unfinished study has tables and figures, but no findings and no claims.
    """
    study, interim = folder.study, _interim(folder.study, results)
    summary = folder.summary(results)
    show: Any = study.page or default_parts
    parts: PageParts = (pkgutil.resolve_name(show) if isinstance(show, str) else show)(results)
    figures = [dataclasses.replace(figure, formats=formats) for figure in parts.figures]
    drawn = {path.parent / file: figure.chart for figure in figures for file in figure.files.values()}
    for file, chart in drawn.items():
        save(chart, file)
    for file in {file for place in {file.parent for file in drawn} for file in place.iterdir()} - drawn.keys():
        # figures of an earlier page would otherwise seem to belong to this one
        file.unlink()
    document = render(
        title=f"{study.title or study.name} ({study.name} at {folder.scale_name} scale)",
        interim=interim,
        lead=study.lead,
        findings=() if interim else parts.findings,
        claims=[_claim(result) for result in summary.claims],
        rule=RULE,
        warning=summary.warning,
        answer=summary.answer,
        figures=figures,
        tables={each.title[0].upper() + each.title[1:]: _table(each) for each in summary.tables if each.caption},
        table=results.table(),
        shown=shown(results),
        configs={
            name: configs.to_toml(without_folders(configs.to_dict(one.config)))
            for name, one in results.experiments.items()
        },
        command=shlex.join(["isoloss", "study", "run", study.name, *folder.options]),
        settings={
            "Scale": f"{folder.scale_name} ({folder.scale.description})",
            **_inputs(results),
            **parts.settings,
            **_seeds(folder.seed_offset, parts.settings),
            **_measuring(results),
            **_claiming(summary.claims_file),
            **_making(results),
        },
    )
    files.write_text(path, document)
    return path


def without_folders(value: Any) -> Any:
    """Return JSON types with the name alone of each absolute path: a page may be read on another machine.

    Example:
        >>> without_folders({"checkpoint": "/home/me/models/first", "task_data": ["sst2=/data/SST-2"], "seed": 0})
        {'checkpoint': 'first', 'task_data': ['sst2=SST-2'], 'seed': 0}
    """
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each) for each in value]
    if not isinstance(value, str):
        return value
    name, equals, path = ("", "", value) if value.startswith("/") else value.partition("=")
    return f"{name}{equals}{Path(path).name}" if path.startswith("/") and Path(path).name else value


def _inputs(results: Results) -> dict[str, str]:
    """Return the languages that runs were trained on, and the external checkpoints with what they were measured on."""
    languages, external = dict[str, None](), list[str]()
    for name, experiment in results.experiments.items():
        config = experiment.config
        if isinstance(config, ExternalCheckpoint):
            record = results.run(name).result()
            what = f"{record['architecture']}, weights SHA-256 {record['weights'][:12]}"
            external.append(f"{name}: {config.name} ({what}), measured on {config.measured_on}")
        if config.language is not None:
            languages[words(config.language)] = None
    lines = {"Language": "; ".join(languages), "External checkpoints": "; ".join(external)}
    return {key: text for key, text in lines.items() if text}


def _interim(study: Study, results: Results) -> str:
    """Return the note at the top of an unfinished study's page; empty when all blocks are done."""
    if results.blocks_done == results.blocks:
        return ""
    blocks = f"blocks ({study.block_name})" if study.block_name else "blocks"
    return f"Interim: {results.blocks_done} of {results.blocks} {blocks} are done. Verdicts follow when all are."


def _seeds(offset: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the seed offset, followed by what the study says about its seeds; nothing for offset 0."""
    return {"Seeds": "; ".join([f"offset {offset}", *filter(None, [settings.get("Seeds")])])} if offset else {}


def default_parts(results: Results) -> PageParts:
    """Return the figures of a study that draws none of its own: over the steps, and each estimate against the loss."""
    table = results.table()
    style, measures = Style.of(table), shown(results)
    figures = [
        Figure(
            name="over-time",
            title="Over time",
            chart=charts.curves(table, measures, style=style),
            caption="Each run over the steps of pre-training.",
        )
    ]
    loss = next((column for column in measures if column.name == results.loss_key), None)
    others = [column for column in measures if column != loss]
    if loss and others:
        chart = charts.scatter(table, [(loss, other) for other in others], style=style)
        caption = f"Every checkpoint: each other measure against its {loss.title}."
        figures.append(Figure(name="against-loss", title="At the same loss", chart=chart, caption=caption))
    return PageParts(figures=figures)


def shown(results: Results) -> tuple[Column, ...]:
    """Return how to show the estimates that most checkpoints have."""
    return tuple(column_of(key, _having(results, key)[0].unit) for key in results.columns)


def _having(results: Results, key: str) -> list[Measured]:
    """Return an estimate of each checkpoint that has it."""
    return [each[key] for each in results.checkpoints.values() if key in each]


def _claim(result: ClaimResult) -> dict[str, Any]:
    columns, rows = claim_table(result)
    return {
        "result": result,
        "columns": columns if any(answer.numbers for answer in result.answers) else (),
        "rows": rows,
        "explanations": explanations(result),
        "figures": claim_figures(result),
    }


def _table(table: SummaryTable) -> dict[str, Any]:
    columns, texts = table.cells()
    rows = []
    for row, (labels, estimates) in zip(texts, table.rows, strict=True):
        numbers = [*(x if isinstance(x, int) else None for x in labels), *(e.value for e in estimates.values())]
        rows.append([(text, number, None) for text, number in zip(row, numbers, strict=True)])
    return {"caption": table.caption, "columns": columns, "rows": rows}


def words(config: Any) -> str:
    """Return a config as its kind and its settings in words.

    Example:
        >>> from isoloss.lab.languages.config import DyckConfig
        >>> words(DyckConfig(kinds=2)).split(",")[0]
        'dyck: kinds 2'
    """
    settings = without_folders(configs.to_dict(config))
    kind = settings.pop("kind")
    return f"{kind}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())


def _measuring(results: Results) -> dict[str, str]:
    """Return how checkpoints were measured, by measure; more than one way where languages differ in it."""
    lines = {}
    for key in results.columns:
        ways: dict[str, None] = {}
        for one in _having(results, key):
            settings = without_folders({name: value for name, value in one.settings.items() if name != "seed"})
            words = [f"{name.replace('_', ' ')} {_told(value)}" for name, value in settings.items()]
            ways["; ".join([one.method, *words])] = None
        lines[column_of(key).title] = "; or ".join(ways)
    return lines


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " or ".join(map(_told, value)) or "none"
    if value is None:
        return "by default"
    return value if isinstance(value, str) else f"{value:,}"


def _claiming(file: ClaimsFile | None) -> dict[str, str]:
    """Return the claims file and its settings that hold for all claims."""
    if file is None:
        return {}
    return {
        "Claims": str(file),
        "Primary test": " for ".join(filter(None, (file.primary, file.primary_case))) or "none: all p are adjusted",
        "Same loss": f"mean difference shown to be within {file.same_loss_nats:g} nats by two one-sided tests at 5 %, "
        "unless a claim sets another margin",
    }


def _making(results: Results) -> dict[str, str]:
    """Return the device, versions and commit of the runs, the last two from the first of them."""
    record = results.run(next(iter(results.experiments))).record
    devices = {each.details.get("device") for one in results.checkpoints.values() for each in one.values()}
    return {
        "Measured on": " and ".join(sorted(filter(None, devices))),
        "Versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "Commit": record["commit"] or "unknown",
    }
