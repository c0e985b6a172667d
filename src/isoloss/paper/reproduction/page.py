"""The page of the study: a figure for each figure of the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from isoloss.paper.reproduction import tables
from isoloss.paper.reproduction.compare import MIN_LANGUAGES, DatasetResults, Model, by_dataset, clusters_of
from isoloss.paper.reproduction.design import BASELINES, FIGURE_1, SGD_SHOWN, SHOWN, Dataset
from isoloss.paper.reproduction.tables import corresponds, paired_by
from isoloss.paper.tables import factor
from isoloss.report import charts
from isoloss.report.data import KL, LOSS, MARKERS, MINIMAL_TRACE, TRACE, Column, Style, column_of
from isoloss.report.study_page import Figure
from isoloss.statistics.estimate import number
from isoloss.studies import PageParts
from isoloss.studies.results import Results, change

# logarithmic, as models at about the same loss are compared with much worse ones
LOG_KL = dataclasses.replace(KL, title="KL = loss − entropy", log=True)
ALMOST_PERFECT = 0.95  # an accuracy above which models hardly differ
SATURATED = 0.1  # a loss is saturated once the KL falls by less than this fraction until the end
# what the paper reports: tables 1 and 2, then its figures
PAPER_CLAIMS = (
    *("adversary-transfer", "adversary-sharper", "lookup-transfer"),
    *("text-unregularized-transfer", "text-unregularized-sharper", "text-unregularized-gap"),
    *("text-sam-transfer", "text-sam-flatter"),
    *("longer-transfer", "sgd-flatter", "sgd-transfer", "larger-transfer", "larger-flatter"),
    *("hmm-sgd-flatter", "hmm-sgd-transfer", "hmm-larger-transfer"),
    *("generated-longer-transfer", "generated-larger-transfer", "generated-larger-flatter"),
    *("web-longer-transfer", "web-longer-flatter"),
)


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    everything = by_dataset(results)
    figures = [figure for data in everything for figure in _figures(data)]
    needs = {data.dataset.name: _needs(data) for data in everything}
    # a claim about another dataset than the grammars begins with its name
    of = {claim: next((name for name in SHOWN if claim.startswith(name)), "pcfg") for claim in PAPER_CLAIMS}
    return PageParts(figures=figures, paper_claims={claim: needs.get(name, "") for claim, name in of.items()})


def _needs(data: DatasetResults) -> str:
    """Return why the dataset is too small for a verdict, if it is."""
    count = len(set(clusters_of(data.units)))
    few = f"at least {MIN_LANGUAGES} languages or seeds are needed, not {count}"
    return few if count < MIN_LANGUAGES else ""


def _accuracies(dataset: Dataset) -> list[Column]:
    return [column_of(key, "accuracy") for key in dataset.tasks.values()]


def _with_room(data: DatasetResults) -> list[Column]:
    """Return the accuracies; of a task on which the control is almost perfect, with few examples."""
    columns = _accuracies(data.dataset)
    for place, key in enumerate(data.dataset.few_shot):
        if data.mean(data.ends(*data.control), columns[place].name).value > ALMOST_PERFECT:
            task = columns[place].title.rpartition(" ")[2]
            title = f"{key.rpartition('-')[2]}-shot accuracy, {task}"
            columns[place] = Column(key, title, "%", percent=True)
    return columns


def _across(data: DatasetResults) -> list[Column]:
    """Return the loss and the traces."""
    traces = [TRACE, MINIMAL_TRACE][: len(data.dataset.traces)]
    return [LOG_KL if data.models else LOSS, *traces]


def _style(table: pl.DataFrame) -> Style:
    """Return the style of a table; where there are more sizes than markers, only colors tell them apart."""
    return Style.of(table) if table.get_column("size").n_unique() <= len(MARKERS) else _one_marker(table)


def _one_marker(table: pl.DataFrame) -> Style:
    """Return the style of a table whose sizes stand on an axis."""
    return Style.of(table.with_columns(pl.lit("any").alias("size")))


def _averaged(dataset: Dataset) -> str:
    """Return what a point is averaged over, as the end of a sentence; nothing for one model."""
    several = {"languages": len(dataset.languages) > 1, "seeds": dataset.seeds > 1}
    over = [what for what, are in several.items() if are]
    return f", averaged over {' and '.join(over)}" if over else ""


def _rows(
    data: DatasetResults, models: Sequence[tuple[str, Model]], shown: Sequence[Column], middle: Model
) -> pl.DataFrame:
    """Return models, each with its group, as a chart takes them: means, with the errors of differences from `middle`.

    Not the errors of the means: languages differ more than models do, and would hide how the models differ.
    """
    controls, rows = data.ends(*middle), []
    for group, model in models:
        run = data.units[0].run(model.arm)  # all units have the same sizes and arms
        row: dict[str, Any] = {
            "run": model.arm,
            "group": group,
            "size": data.results.experiments[run].size,
            "parameters": data.results.run(run).result()["num_parameters"],
            "step": model.step,
        }
        for column in shown:
            ends = data.ends(*model)
            more = data.difference(ends, controls, column.name)
            row |= {
                column.name: data.mean(ends, column.name).value,
                column.stderr_column: more.stderr / 100 if column.percent else more.stderr,
                column.freedom_column: more.freedom,
            }
        rows.append(row)
    return pl.DataFrame(rows)


# --- figure 1 --------------------------------------------------------------------------------------------------------


def _same_loss(data: DatasetResults) -> Figure:
    """Return the paper's figure 1: transfer against the loss and against flatness, of models at about the same loss."""
    dataset, (loss, *traces) = data.dataset, _across(data)
    # the paper's figure is of task B alone
    tasks = [column_of(dataset.tasks["B"], "accuracy")] if FIGURE_1 in dataset.shown.sizes else _accuracies(dataset)
    experiments, first = data.results.experiments, data.units[0]
    models = [(experiments[first.run(model.arm)].group, model) for model in data.models]
    rows = _rows(data, models, [loss, *traces, *tasks], data.control)
    about: Any = {"band": data.band, "baselines": _baselines(data), "style": _style(rows)}
    return Figure(
        name=f"{dataset.name}-same-loss",
        title=f"{dataset.title}: models at about the same loss",
        chart=charts.magnified(rows, loss, traces, tasks, **about),
        caption=_caption(data),
    )


def _baselines(data: DatasetResults) -> Mapping[str, Mapping[str, float]]:
    """Return the accuracies of probes on features that need no model, by probe."""
    if not data.dataset.shown.baselines:
        return {}
    found = {title: [data.look_up(unit, kind) for unit in data.units] for kind, title in BASELINES.items()}
    return {
        key: {title: data.mean(each, key).value for title, each in found.items()} for key in data.dataset.tasks.values()
    }


def _caption(data: DatasetResults) -> str:
    dataset, near, control = data.dataset, data.in_band, data.dataset.control

    def name(model: Model) -> str:
        is_end = model.step == data.results.experiments[data.units[0].run(model.arm)].last_step
        return model.arm if is_end else f"{model.arm} at step {model.step:,}"

    kls = " to ".join(f"{data.mean(data.ends(*model), 'kl').value:.3g}" for model in data.extremes("kl"))
    spreads = []
    for key in dataset.tasks.values():
        lowest, highest = data.extremes(key)
        # as the two are the extremes of several, it is larger than that of two that were chosen beforehand
        spread = number(data.difference(data.ends(*highest), data.ends(*lowest), key))
        spreads.append(f"{spread} points on {key.removeprefix('probe-')} (from {name(lowest)} to {name(highest)})")
    trained = ", and the adversary and the helper are trained to change transfer" if "adversary" in dataset.arms else ""
    baselines = "Horizontal lines: probes on features that need no model. " if dataset.shown.baselines else ""
    caption = (
        f"Each point is one checkpoint of a size, an arm or a cooldown{_averaged(dataset)}; lines join the checkpoints "
        f"of a run. {baselines}The rectangle holds the {len(near)} of "
        f"{len(data.models)} models whose KL is within {dataset.band:.0%} of the KL of the control, {control}. The "
        f"other panels show only these models. Their mean KL ranges from {kls} nats, and their accuracy differs by up "
        f"to {' and '.join(spreads)}. The lowest and the highest of {len(near)} models were chosen after the fact, so "
        "part of this is chance, which the ± ignores. Wider models give the probe more "
        f"features{trained}. Bars are for the difference from {control}, {paired_by(dataset)}, so "
        f"{control} has none. Compare traces only between models of one size."
    )
    return f"{corresponds(FIGURE_1)}{caption} {_in_the_paper(dataset)}" if FIGURE_1 in dataset.shown.sizes else caption


def _in_the_paper(dataset: Dataset) -> str:
    (low, high), entropy = tables.LOSSES, tables.ENTROPY
    kl = " to ".join(f"{float(loss) - float(entropy):.3f}" for loss in (low, high))
    sizes = " and ".join(f"{what} from {' to '.join(ends)}" for what, ends in tables.BY_SIZE.items())
    # the scales with the sizes of Table 4 have the paper's grammar and tasks
    where = "" if dataset.expanded else " on a larger grammar with other tasks,"
    return (
        f"In the paper,{where} losses are {low} to {high} nats, the KL is {kl} nats. "
        f"With {tables.PARAMETERS} parameters (± standard deviation), {tables.by_algorithm('task B (%)', 'trace')}; "
        f"between 9M parameters and its largest model, at about the same loss, {sizes}."
    )


# --- the other figures -----------------------------------------------------------------------------------------------


def _figures(data: DatasetResults) -> Iterator[Figure]:
    """Return the figures that the runs of a dataset allow, the paper's message first."""
    dataset = data.dataset
    if dataset.cooldowns or dataset.shown.longer:
        yield _longer(data)
    if data.models:
        yield _same_loss(data)
    if len(dataset.sizes) > 1:
        yield from _sizes(data)
    if any(arm.shown_in == SGD_SHOWN for arm in dataset.arms.values()):
        yield _sgd(data)


def _figure(data: DatasetResults, name: str, title: str, chart: Any, shown_in: Sequence[str], *caption: str) -> Figure:
    return Figure(
        name=f"{data.dataset.name}-{name}",
        title=f"{data.dataset.title}: {title}",
        chart=chart,
        caption=corresponds(*(each for each in shown_in if each != FIGURE_1)) + " ".join(filter(None, caption)),
    )


def _longer(data: DatasetResults) -> Figure:
    """Return the model whose training is followed over its steps."""
    dataset, size = data.dataset, data.dataset.followed or data.dataset.main
    models = [
        (size, step, data.cooled(size, step) if dataset.cooldowns else Model(size, step)) for step in dataset.watched
    ]
    rows, shown = _over_steps(data, size, models)
    saturated = _saturated(rows, "step")
    return _figure(
        *(data, "longer", "longer training"),
        charts.curves(rows, shown, saturated=saturated, style=_style(rows)),
        dataset.shown.longer,
        f"The model {size} at different steps of AdamW{_averaged(dataset)}.",
        _compared(data, size),
        _loss(data, saturated),
    )


def _sgd(data: DatasetResults) -> Figure:
    """Return SGD over its steps, after AdamW."""
    dataset = data.dataset
    cooldown = sum(dataset.cooldowns[:1])
    models = []
    for name, arm in dataset.arms.items():
        if arm.shown_in == SGD_SHOWN:
            steps = arm.stages[0].steps
            watched = [data.cooled(name, step) if cooldown else Model(name, step) for step in arm.watched]
            ends = [data.control, *watched, Model(name, steps + cooldown)]
            models += [(arm.title, *each) for each in zip((0, *arm.watched, steps), ends, strict=True)]
    rows, shown = _over_steps(data, dataset.main, models)
    return _figure(
        *(data, "sgd", "SGD after AdamW"),
        charts.curves(rows, shown, style=_style(rows)),
        SGD_SHOWN,
        f"Training of {dataset.main} continues with SGD from step {dataset.start:,} of AdamW{_averaged(dataset)}; the "
        "horizontal axis counts the steps of SGD.",
        _compared(data, dataset.main),
    )


def _over_steps(
    data: DatasetResults, size: str, models: Sequence[tuple[str, int, Model]]
) -> tuple[pl.DataFrame, list[Column]]:
    """Return models, each with its line and step, as `curves` takes them, and the columns that it draws.

    With cooldowns, these are the loss and the differences from the control, the size interpolated at the model's own
    loss: of accuracies in points, of traces as factors. Where too few languages have such a control, a model has no
    differences.
    """
    (loss, *traces), control = _across(data), data.before(size)
    if not data.dataset.cooldowns:
        shown = [loss, *_accuracies(data.dataset), *traces]
        rows = [_rows(data, [(line, model)], shown, control).row(0, named=True) for line, _, model in models]
        return _with_steps(rows, models), shown
    traces = [dataclasses.replace(each, unit="times the control's", reference=1.0) for each in traces]
    tasks = [
        dataclasses.replace(each, title=f"{each.title}, minus control", unit="points", percent=False, reference=0.0)
        for each in _with_room(data)
    ]
    rows = []
    for line, _, model in models:
        row = _rows(data, [(line, model)], [loss], control).row(0, named=True)
        found = data.beside(size, model)
        for column in (*tasks, *traces):
            make = factor if column in traces else change
            more = None if found.not_tested else make(found.pairs, column.name, clusters=found.clusters)
            row |= {
                column.name: more and more.value,
                column.stderr_column: more and more.stderr,
                column.freedom_column: more and more.freedom,
            }
        rows.append(row)
    return _with_steps(rows, models), [loss, *tasks, *traces]


def _with_steps(rows: Sequence[dict[str, Any]], models: Sequence[tuple[str, int, Model]]) -> pl.DataFrame:
    named = [row | {"run": line, "step": step} for row, (line, step, _) in zip(rows, models, strict=True)]
    return pl.DataFrame(named, infer_schema_length=None)


def _compared(data: DatasetResults, size: str) -> str:
    """Return how the models of a figure over steps are compared."""
    dataset, control = data.dataset, data.before(size)
    if not dataset.cooldowns:
        return f"Bars are for the difference from {control.arm} at step {control.step:,}, {paired_by(dataset)}."
    return (
        f"Each model has had a cooldown of {dataset.cooldowns[0]:,} steps. All panels but the first compare it "
        f"with the control at the same loss: {size} after {dataset.start:,} steps, interpolated between cooldowns of "
        f"different lengths. Dashed: no difference. Bars are for the difference from the control, {paired_by(dataset)}."
    )


def _sizes(data: DatasetResults) -> Iterator[Figure]:
    """Yield every size against its loss, and every size inside the largest."""
    dataset = data.dataset
    trained = [(size, model) for size in dataset.sizes for model in data.path_models(size)]
    of_each = "after cooldowns of different lengths" if dataset.cooldowns else "during training"
    probes, features = _accuracies(dataset), "Wider models give the probe more features."
    if dataset.cooldowns and dataset.projected:
        probes = [
            Column(key, f"Projected probe, {task}", "%", percent=True)
            for task, key in zip(dataset.tasks, dataset.projected_probes, strict=True)
        ]
        features = f"The probe reads a random projection to {dataset.projected} features at every size."
    yield _against_loss(data, "sizes", "larger models", trained, probes, dataset.shown.sizes, of_each, features)
    if dataset.when_expanded:
        expanded = [(size, Model(size, dataset.last)) for size in dataset.expanded]
        yield _against_loss(
            *(data, "expanded", f"sizes expanded into {dataset.largest}", expanded or trained),
            *(list(map(column_of, dataset.when_expanded)), dataset.shown.expanded),
            "at the end of training, without a cooldown" if expanded else of_each,
            "The paper's expansion changes the function of a post-layer-norm model; the exact expansion does not. The "
            "minimal trace does not depend on the choice.",
        )


def _against_loss(
    data: DatasetResults,
    name: str,
    title: str,
    models: Sequence[tuple[str, Model]],
    shown: Sequence[Column],
    shown_in: Sequence[str],
    of_each: str,
    about: str,
) -> Figure:
    dataset, loss, middle = data.dataset, _across(data)[0], models[0][1] if data.dataset.expanded else data.control
    rows = _rows(data, models, [loss, *shown], middle).with_columns(pl.col("group").alias("run"))
    return _figure(
        *(data, name, f"{title}, against the loss"),
        charts.scatter(rows, [(loss, each) for each in shown], style=_one_marker(rows)),
        shown_in,
        f"A line for each size {of_each}{_averaged(dataset)}. To compare sizes at the same loss, compare the heights "
        f"of their lines there. {about} Bars are for the difference from {middle.arm}, {paired_by(dataset)}.",
    )


def _loss(data: DatasetResults, saturated: float | None) -> str:
    """Return what a caption says of the loss: the entropy, and from which step on it is saturated."""
    if not data.models:
        return "The entropy of the text is unknown, so the axis is the loss, with no mark of saturation."
    entropy = data.mean(data.ends(data.dataset.main), "entropy")
    if saturated is None:
        mark = f"There is no mark of saturation: the KL falls by {SATURATED:.0%} or more up to the last step."
    else:
        mark = f"The dashed line marks the first step after which the KL falls by less than {SATURATED:.0%}."
    return f"The loss is the KL plus the entropy, {number(entropy)} nats per token. {mark}"


def _saturated(rows: pl.DataFrame, axis: str) -> float | None:
    """Return the first place on an axis after which the KL falls by less than `SATURATED`; None if only the last is."""
    if "kl" not in rows.columns:
        return None
    places, values = rows.sort(axis).select(axis, "kl").to_dict(as_series=False).values()
    saturated = (place for i, place in enumerate(places[:-1]) if min(values[i:]) > (1 - SATURATED) * values[i])
    return next(saturated, None)
