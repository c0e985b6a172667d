"""The page of a study: its answer, figures and claims, and how it was made."""

from __future__ import annotations

import dataclasses
import pkgutil
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from isoloss import config as configs
from isoloss import files
from isoloss.errors import naming_extras
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.evaluation.measures.base import used_settings
from isoloss.report import charts
from isoloss.report.data import Column, Style, column_of
from isoloss.report.html import Section, interval_rows
from isoloss.report.html import table as html_table
from isoloss.report.save import save
from isoloss.report.study_page import Figure, render
from isoloss.run_config import OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.answer import (
    Comparison,
    claim_rows,
    definition,
    definitions,
    detail,
    format_difference,
    setup,
    task_of,
    title_of,
)
from isoloss.studies.claims import CONTROL_SHOWN, RULE, ClaimResult, Verdict, gates
from isoloss.studies.folder import StudyFolder
from isoloss.studies.results import CheckpointEstimate, Results
from isoloss.studies.study import PageParts
from isoloss.studies.summary import (
    VERDICT,
    MissedTargets,
    Summary,
    SummaryTable,
    claim_table,
    explanations,
    of_the_highest,
)

_BREAK = Markup("<br>")
_MAX_TRAININGS = 8  # ways of training in one list; of more, each run's config says its own
_OF_TARGET = {"kl": "KL", "loss": "loss"}
_MAX_TOLD = 3  # texts of what was compared that stand beside the claims


@naming_extras()
def report(folder: StudyFolder, complete: Collection[int] | None = None) -> tuple[Path, Results, Summary]:
    """Write report/index.html and its figures, for the finished study or its complete blocks.

    Call it only while holding the folder's lock. What the page is made from is returned with it.
    """
    path = folder.path / "report" / "index.html"
    files.remove_unfinished(path.parent)
    results = folder.results(complete)
    summary = folder.summary(results)
    write(folder, results, summary, path)
    return path, results, summary


def write(
    folder: StudyFolder,
    results: Results,
    summary: Summary,
    path: Path,
    formats: tuple[str, ...] = ("pdf", "png", "csv"),
) -> None:
    """Write the page of a study's results to `path`, and its figures beside it.

    The page of an unfinished study has tables and figures, but no answer and no claims.
    """
    study, interim = folder.study, ""
    if results.blocks_done < results.blocks:
        blocks = f"blocks ({study.block_name})" if study.block_name else "blocks"
        interim = f"Partial: {results.blocks_done} of {results.blocks} {blocks} are done. {folder.follows}".rstrip()
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
        note=None if summary.missed is None else _missed(summary.missed),
        cards=summary.answer,
        figures=figures,
        sections=[
            *_beside_the_paper(summary.claims, parts.paper_claims),
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
        command=folder.command(),
        settings=_made(folder, results, parts.settings, summary),
    )
    files.write_text(path, document)


def _missed(missed: MissedTargets) -> Markup:
    """Return one line, which opens to the runs that missed their targets and the next step."""
    runs = "; ".join(f"{name}: {', '.join(each)}" for name, each in missed.runs.items())
    return Markup("<div class='note missed'><details><summary>{}</summary>\n<p>{}.</p>\n{}</details></div>").format(
        missed.line, runs, Markup("<p>{}</p>\n").format(missed.next_step) if missed.next_step else ""
    )


def _comparisons(results: Results, summary: Summary, *, interim: bool) -> list[Section]:
    """Return the section with a row for each claim or, without claims, for each difference between runs."""
    if summary.claims:
        note = Markup("<p class=note>{}</p>").format(
            "± is one standard error. In the small plots the line is the 95 % interval, the shaded range what the "
            "claim states, and the dashed line no difference."
        )
        # of a small study all that was compared; of a larger one it is beside every test
        told = dict.fromkeys(text for result in summary.claims for text in explanations(result))
        about = _notes([*(told if len(told) <= _MAX_TOLD else ()), *definitions(results)])
        body = _control(summary.claims) + interval_rows(claim_rows(summary.claims)) + Markup("\n").join([*about, note])
        return [Section(title="Claims", body=body)]
    comparison = Comparison(results)
    rows = [] if interim else comparison.rows()
    if not rows:
        return []
    note = Markup("<p class=note>{}</p>").format(
        "± is one standard error of the difference; intervals are not adjusted for the number of rows. Each plot has "
        "its own axis; the dashed line is no difference. "
        + ("With one run of each kind, the error is not over training seeds. " if comparison.has_one_run_each else "")
        + (
            "Checkpoints without a seed count as independent, although checkpoints of one training are not: "
            "set ExternalCheckpoint(seed=...) to group them."
            if comparison.has_unknown_seeds
            else ""
        )
    )
    body = interval_rows(rows) + Markup("\n").join([*_notes(definitions(results)), note])
    return [Section(title="Differences", body=body)]


def _notes(texts: Sequence[str]) -> list[Markup]:
    return [Markup("<p class=note>{}</p>").format(text) for text in texts]


def _control(results: Sequence[ClaimResult]) -> Markup:
    """Return what the positive control says of every claim that is not shown; empty unless it is shown."""
    if all(answer.positive_control != CONTROL_SHOWN for result in results for answer in result.answers):
        return Markup()
    return Markup("<p>The positive control is shown: the study finds an effect that is known to be there.</p>\n")


def _beside_the_paper(results: Sequence[ClaimResult], needs: Mapping[str, str]) -> list[Section]:
    by_id = {result.claim.id: result for result in results}
    found = [by_id[each] for each in needs if each in by_id]
    rows = [(each.claim.statement, each.claim.paper, _found(each, needs[each.claim.id])) for each in found]
    columns = ("claim", "the paper says", "we find")
    note = Markup("<p class=note>{}</p>").format(
        "± is one standard error; in parentheses the 95 % interval and, where the study asks for it, the smallest "
        "margin within which the difference is shown to lie, by two one-sided tests at 5 % each. Neither is adjusted "
        "for the number of tests, as verdicts are."
    )
    return [Section(title="The paper says, we find", body=html_table(columns, rows, left=3) + note)] if rows else []


def _found(result: ClaimResult, needs: str) -> Markup:
    """Return each verdict, with a line for each case that has it: the difference or, where there is none, why."""
    by_verdict: dict[str, list[str]] = {}
    order = list(Verdict)
    for answer in sorted(result.answers, key=lambda answer: order.index(answer.verdict)):
        difference, verdict = answer.difference, result.words(answer)
        if difference is None:
            text = answer.explanation
        else:
            bound = "" if answer.below is None else f"; within ± {answer.below:.2g}"
            text = f"{format_difference(difference)} ({detail(difference)}{bound})"
        if answer.verdict is Verdict.NO_VERDICT and needs:
            verdict += f" ({needs})"
        case = f"{title_of(answer.case)} {text}".strip()
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
        parts += _notes(explanations(result))
    parts.append(Markup("<h3>How verdicts are reached</h3>"))
    parts += _notes(RULE)
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


def default_parts(results: Results) -> PageParts:
    """Return the figures of a study that draws none of its own: each estimate against the loss, and over the steps."""
    table = results.table()
    style, measures = Style.of(table), _with_baselines(results, shown(results))
    figures = []
    loss = next((column for column in measures if column.name == results.loss_key), None)
    others = [column for column in measures if column != loss]
    if loss and others:
        figures.append(
            Figure(
                name="against-loss",
                title="Every checkpoint against its loss",
                chart=charts.scatter(table, [(loss, other) for other in others], style=style),
                caption="Further left is a better language model. Compare other measures between checkpoints with "
                "about the same loss."
                + " Dashed: the accuracy of the same probe on the tokens themselves."
                * any(column.reference is not None for column in others),
            )
        )
    if len(results.checkpoints) > len(results.experiments):
        chart = charts.curves(table, measures, style=style)
        caption = "Each run over the steps of pre-training."
        figures.append(Figure(name="over-time", title="Over the steps of training", chart=chart, caption=caption))
    return PageParts(figures=figures)


def _with_baselines(results: Results, columns: Sequence[Column]) -> list[Column]:
    """Return the columns without probes on the tokens themselves, which are lines of reference beside other probes.

    Such a probe is a line where it has one accuracy for all checkpoints, and as many training sentences as the other.
    """
    lines: dict[str, tuple[str, float]] = {}  # the probe on the tokens and its accuracy, by the other and its sentences
    for column in columns:
        found = {(each.value, each.settings.get("num_train")) for each in _having(results, column.name)}
        if column.name.startswith("one-hot-") and len(found) == 1:
            ((accuracy, examples),) = found
            task = column.name.removeprefix("one-hot-")
            lines[f"few-shot-{task}-{examples}"] = lines[f"probe-{task}-{examples}"] = column.name, 100 * accuracy
    drawn, baselines = [], set()
    for column in columns:
        examples = _having(results, column.name)[0].settings.get("num_train")
        of_few = column.name.startswith("few-shot-")  # they are in its name
        baseline, reference = lines.get(column.name if of_few else f"{column.name}-{examples}", ("", None))
        baselines.add(baseline)
        drawn.append(dataclasses.replace(column, reference=reference))
    return [column for column in drawn if column.name not in baselines]


def shown(results: Results) -> tuple[Column, ...]:
    """Return how to show the estimates that most checkpoints have."""
    return tuple(column_of(key, _having(results, key)[0].unit) for key in results.columns)


def _having(results: Results, key: str) -> list[CheckpointEstimate]:
    """Return an estimate of each checkpoint that has it."""
    return [each[key] for each in results.checkpoints.values() if key in each]


def _trainings(results: Results) -> list[str]:
    """Return each way in which models were trained: group, size, optimizers with their rates, and how far."""
    found: dict[str, list[int]] = {}  # the steps that its runs took to a target
    decays: dict[str, list[float]] = {}  # the last learning rates of those whose decay had not ended
    for name, experiment in results.experiments.items():
        config = experiment.config
        if not isinstance(config, TrainConfig):
            continue
        parts = [experiment.group or name, f"size {config.model.size}"]
        for stage in config.stages or (StageConfig(steps=config.steps),):
            optimizer = stage.optimizer or config.optimizer
            target = f"until a {_OF_TARGET[stage.target[0]]} of {stage.target[1]:g}, at most " if stage.target else ""
            batch = stage.batch_size or config.batch_size
            parts.append(
                f"{optimizer.name} with learning rate {optimizer.learning_rate:g}{_decay(optimizer)}, {batch} "
                "sentences a step, "
                f"{target}{stage.steps:,} steps"
            )
        way = ", ".join(parts)
        taken = found.setdefault(way, [])
        if any(stage.target for stage in config.stages) and results.of_run(name):
            taken.append(results.last_step(name))
            decays.setdefault(way, []).extend(results.run(name).unfinished_decays(config).values())
    ways = []
    for way, taken in found.items():
        so_far = way
        if taken:
            so_far += f"; its runs took {min(taken):,} to {max(taken):,} (mean {statistics.mean(taken):,.0f})"
        if at := decays.get(way):
            so_far += f"; {len(at)} met a target before the decay had ended, {of_the_highest(at)}"
        ways.append(so_far)
    return ways


def _decay(optimizer: OptimizerConfig) -> str:
    """Return how the learning rate decays, in words; empty: it is constant."""
    if optimizer.schedule == "constant":
        return ""
    last = f" over the last {optimizer.decay_steps:,} steps" if optimizer.decay_steps else ""
    return f" ({optimizer.schedule} decay to 0{last})"


def _made(folder: StudyFolder, results: Results, own: Mapping[str, str], summary: Summary) -> dict[str, str]:
    """Return how a study was made, by name; `own` are the settings that the study itself names."""
    languages, external = dict[str, None](), list[str]()
    for name, experiment in results.experiments.items():
        config = experiment.config
        if isinstance(config, ExternalCheckpoint):
            about = results.run(name).result()
            weights = f"{about['architecture']}, weights SHA-256 {about['weights'][:12]}"
            external.append(f"{name}: {config.name} ({weights}), measured on {config.measured_on}")
        if config.language is not None:
            languages[words(config.language)] = None
    made = {"Scale": f"{folder.scale_name} ({folder.scale.description})"}
    made |= {"Language": "; ".join(languages)} if languages else {}
    trained = _trainings(results)
    made |= {"Training": "; ".join(trained)} if len(trained) <= _MAX_TRAININGS else {}
    made |= {"External checkpoints": "; ".join(external)} if external else {}
    made |= own
    if folder.seed_offset:
        made["Seeds"] = "; ".join([f"offset {folder.seed_offset}", *filter(None, [own.get("Seeds")])])
    measures = {m for each in results.experiments.values() for part in each.measurements for m in part.measures}
    for key in results.columns:
        # more than one way where languages differ in it
        ways: dict[str, None] = {}
        for one in _having(results, key):
            used = used_settings(key, one.settings) if key in measures else one.settings
            settings = without_folders({name: value for name, value in used.items() if name != "seed"})
            parts = [f"{name.replace('_', ' ')} {_in_words(value)}" for name, value in settings.items()]
            told = [definition(key, one.settings)] if task_of(key) else []
            ways["; ".join([*told, one.method, *parts])] = None
        made[column_of(key).title] = "; or ".join(ways)
    if (family := summary.family) is not None:
        claims = gates(folder.study.claims)
        first = [f"{each.role}: {' for '.join(filter(None, (each.id, each.case)))}" for each in claims]
        made |= {
            "Claims": f"SHA-256 {family.claims_sha256}",
            "Tested first, in order": "; ".join(first) or "none: all tests are secondary",
            "Family": f"{family.secondary_tests} secondary tests, as planned before the runs",
        }
        tested = f"mean difference shown to be within {family.loss_margin:g} nats by two one-sided tests at 5 %, unless"
        made["Same loss"] = (
            f"{tested} a claim sets another margin"
            if any(each.loss_rule == "tested" for each in folder.study.claims)
            else "every claim is judged by the difference adjusted to the same loss"
        )
    records = [results.run(name).record for name in results.experiments]
    code = {name: sha256 for record in records for name, sha256 in record.get("code_sha256", {}).items()}
    if code:
        made["Code of other packages"] = "; ".join(f"{name}: SHA-256 {sha256[:12]}" for name, sha256 in code.items())
    record = records[0]
    devices = {each.details.get("device") for one in results.checkpoints.values() for each in one.values()}
    return made | {
        "Measured on": " and ".join(sorted(filter(None, devices))),
        "Versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "Commit": record["commit"] or "unknown",
    }


def words(config: Any) -> str:
    """Return a config as its kind and its settings in words, e.g. `dyck: kinds 2, ...`."""
    settings = without_folders(configs.to_dict(config))
    kind = settings.pop("kind")
    return f"{kind}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())


def _in_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " or ".join(map(_in_words, value)) or "none"
    if value is None:
        return "by default"
    return value if isinstance(value, str) else f"{value:,}"
