"""A study's page: what every page has, and what a study adds to it."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from isoloss import config as configs
from isoloss import files
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.report import charts
from isoloss.report.data import Column, Style, column_of
from isoloss.report.html import Section, interval_rows
from isoloss.report.html import table as html_table
from isoloss.report.save import save
from isoloss.report.study_page import Figure, render
from isoloss.studies.answer import Comparison, claim_rows, detail, setup, title_of, told
from isoloss.studies.claims import RULE, Claim, ClaimResult, Verdict, gates
from isoloss.studies.results import CheckpointEstimate, Results
from isoloss.studies.summary import VERDICT, Family, Summary, SummaryTable, claim_table, explanations

if TYPE_CHECKING:
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.spec import Study


@dataclass(frozen=True, kw_only=True)
class PageParts:
    """What a study adds to its page.

    Attributes:
        figures: The figures; the first is in the page's first screen.
        sections: More sections.
        paper_claims: The ids of the claims that the first table sets beside the paper's own results, each with what a
            verdict needs, for a scale without verdicts.
        settings: How the study was made, by name; listed before what every page says about that.
    """

    figures: Sequence[Figure]
    sections: Sequence[Section] = ()
    paper_claims: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


def write(folder: StudyFolder, results: Results, path: Path, formats: tuple[str, ...] = ("pdf", "png")) -> Path:
    """Write the page of a study's results to `path`, and its figures beside it; return `path`.

    The page of an unfinished study has tables and figures, but no answer and no claims.
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
    lede, *about = study.lead or (setup(results),)
    # one without a caption is that of every checkpoint, which any page has
    tables = [_table(table) for table in summary.tables if table.caption]
    document = render(
        title=study.title or study.name,
        lede=lede,
        banner=" ".join(filter(None, (summary.warning, interim))),
        cards=summary.answer,
        figures=figures,
        sections=[
            *_beside_the_paper(summary.claims, parts.paper_claims, folder.command),
            *_comparisons(results, summary, interim=bool(interim)),
            *parts.sections,
            *([Section(title="About this study", body="\n".join(about), folded=True)] if about else []),
            *([Section(title="Every test", body=_tests(summary.claims), folded=True)] if summary.claims else []),
            *([Section(title="Tables", body=Markup("\n").join(tables), folded=True)] if tables else []),
        ],
        table=results.table(),
        shown=shown(results),
        configs={
            name: configs.to_toml(without_folders(configs.to_dict(one.config)))
            for name, one in results.experiments.items()
        },
        command=folder.command,
        settings={
            "Scale": f"{folder.scale_name} ({folder.scale.description})",
            **_inputs(results),
            **parts.settings,
            **_seeds(folder.seed_offset, parts.settings),
            **_measuring(results),
            **_claiming(study.claims, summary.family),
            **_making(results),
        },
    )
    files.write_text(path, document)
    return path


def _comparisons(results: Results, summary: Summary, *, interim: bool) -> list[Section]:
    """Return the section with a row for each claim or, without claims, for each difference between runs."""
    if summary.claims:
        note = Markup("<p class=note>{}</p>").format(
            "± is one standard error. In the small plots the line is the 95 % interval, the shaded range what the "
            "claim states, and the dashed line no difference."
        )
        return [Section(title="Claims", body=interval_rows(claim_rows(summary.claims)) + note)]
    comparison = Comparison(results)
    rows = [] if interim else comparison.rows()
    if not rows:
        return []
    note = Markup("<p class=note>{}</p>").format(
        "± is one standard error of the difference; each interval is on its own, not adjusted for the number "
        "of rows. Each plot has its own axis; the dashed line is no difference. "
        + ("With one run of each kind, the error is not over training seeds. " if comparison.has_one_run_each else "")
        + (
            "Checkpoints without a seed count as independent, although checkpoints of one training are not: "
            "set ExternalCheckpoint(seed=...) to group them."
            if comparison.has_unknown_seeds
            else ""
        )
    )
    return [Section(title="Differences", body=interval_rows(rows) + note)]


_BREAK = Markup("<br>")


def _beside_the_paper(results: Sequence[ClaimResult], needs: Mapping[str, str], command: str) -> list[Section]:
    by_id = {result.claim.id: result for result in results}
    found = [by_id[each] for each in needs if each in by_id]
    first, *options = command.split(" --")
    made_by = _BREAK.join(Markup("<code>{}</code>").format(part) for part in (first, *(f"--{one}" for one in options)))
    rows = [(each.claim.statement, each.claim.paper, _found(each, needs[each.claim.id]), made_by) for each in found]
    columns = ("claim", "the paper says", "we find", "made by")
    note = Markup("<p class=note>{}</p>").format(
        "± is one standard error; in brackets the 95 % interval and, where the study asks for it, the smallest margin "
        "within which the difference is shown to lie, by two one-sided tests at 5 % each. Neither is adjusted for the "
        "number of tests, as verdicts are."
    )
    return [Section(title="The paper says, we find", body=html_table(columns, rows, left=4) + note)] if rows else []


def _found(result: ClaimResult, needs: str) -> Markup:
    """Return each verdict, with a line for each case that has it: the difference or, where there is none, why."""
    by_verdict: dict[str, list[str]] = {}
    order = list(Verdict)
    for answer in sorted(result.answers, key=lambda answer: order.index(answer.verdict)):
        difference, verdict = answer.difference, result.words(answer)
        if difference is None:
            told_of = answer.explanation
        else:
            bound = "" if answer.below is None else f"; within ± {answer.below:.2g}"
            told_of = f"{told(difference)} ({detail(difference)}{bound})"
        if answer.verdict is Verdict.NO_VERDICT and needs:
            verdict += f" ({needs})"
        case = f"{title_of(answer.case)} {told_of}".strip()
        # a line of numbers stays together, and the table scrolls instead
        by_verdict.setdefault(verdict, []).append(case.replace(" ", "\N{NO-BREAK SPACE}") if difference else case)
    return _BREAK.join(
        _BREAK.join([Markup("<b>{}</b>").format(verdict), *dict.fromkeys(cases)])
        for verdict, cases in by_verdict.items()
    )


def _tests(results: Sequence[ClaimResult]) -> Markup:
    """Return the numbers behind each verdict, what was compared, and the rule."""
    parts = []
    for result in results:
        parts.append(Markup("<h3>{}</h3>").format(result.claim.statement))
        if result.claim.paper:
            parts.append(Markup("<p class=note>The paper: {}</p>").format(result.claim.paper))
        if any(answer.numbers for answer in result.answers):
            columns, rows = claim_table(result)
            parts.append(html_table(columns, rows, left=columns.index(VERDICT) + 1))
        parts += [Markup("<p class=note>{}</p>").format(each) for each in explanations(result)]
    parts.append(Markup("<h3>How verdicts are reached</h3>"))
    parts += [Markup("<p class=note>{}</p>").format(each) for each in RULE]
    return Markup("\n").join(parts)


def _table(table: SummaryTable) -> Markup:
    title = table.title[0].upper() + table.title[1:]
    body = html_table(*table.cells(), left=table.left, caption=table.caption)
    return Markup("<details><summary>{}</summary>\n{}</details>").format(title, body)


def without_folders(value: Any) -> Any:
    """Return JSON types with the name alone of each absolute path: a page may be read on another machine.

    Example:
        >>> from isoloss.studies.page import without_folders
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
    return f"Partial: {results.blocks_done} of {results.blocks} {blocks} are done. Verdicts follow when all are."


def _seeds(offset: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the seed offset, followed by what the study says about its seeds; nothing for offset 0."""
    return {"Seeds": "; ".join([f"offset {offset}", *filter(None, [settings.get("Seeds")])])} if offset else {}


def default_parts(results: Results) -> PageParts:
    """Return the figures of a study that draws none of its own: each estimate against the loss, and over the steps."""
    table = results.table()
    style, measures = Style.of(table), shown(results)
    figures = []
    loss = next((column for column in measures if column.name == results.loss_key), None)
    others = [column for column in measures if column != loss]
    if loss and others:
        figures.append(
            Figure(
                name="against-loss",
                title="Every checkpoint against its loss",
                chart=charts.scatter(table, [(loss, other) for other in others], style=style),
                caption="To the left: a better language model. Compare other measures between checkpoints of about the "
                "same loss.",
            )
        )
    if len(results.checkpoints) > len(results.experiments):
        chart = charts.curves(table, measures, style=style)
        caption = "Each run over the steps of pre-training."
        figures.append(Figure(name="over-time", title="Over the steps of training", chart=chart, caption=caption))
    return PageParts(figures=figures)


def shown(results: Results) -> tuple[Column, ...]:
    """Return how to show the estimates that most checkpoints have."""
    return tuple(column_of(key, _having(results, key)[0].unit) for key in results.columns)


def _having(results: Results, key: str) -> list[CheckpointEstimate]:
    """Return an estimate of each checkpoint that has it."""
    return [each[key] for each in results.checkpoints.values() if key in each]


def words(config: Any) -> str:
    """Return a config as its kind and its settings in words.

    Example:
        >>> from isoloss.lab.languages.config import DyckConfig
        >>> from isoloss.studies.page import words
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


def _claiming(claims: Sequence[Claim], family: Family | None) -> dict[str, str]:
    """Return the hash of the claims and the settings that hold for all of them."""
    if family is None:
        return {}
    first = [f"{claim.role}: {' for '.join(filter(None, (claim.id, claim.case)))}" for claim in gates(claims)]
    return {
        "Claims": f"SHA-256 {family.claims_sha256}",
        "Tested first, in order": "; ".join(first) or "none: all tests are secondary",
        "Family": f"{family.secondary_tests} secondary tests, as planned before the runs",
        "Same loss": f"mean difference shown to be within {family.loss_margin:g} nats by two one-sided tests at 5 %, "
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
