"""The page of the study: a figure for each of the paper's, the first one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from isoloss.paper.reproduction import tables
from isoloss.paper.reproduction.compare import MIN_LANGUAGES, DatasetResults, Model, by_dataset
from isoloss.paper.reproduction.design import BASELINES, FIGURE_1, SGD_SHOWN, Dataset, cooldown_run
from isoloss.paper.reproduction.tables import corresponds, paired_by
from isoloss.report import charts
from isoloss.report.data import KL, LOSS, MARKERS, MINIMAL_TRACE, TRACE, Column, Style, column_of
from isoloss.report.study_page import Figure
from isoloss.statistics.estimate import number
from isoloss.studies import PageParts
from isoloss.studies.results import Results

# on a logarithmic axis, as models of about one loss are compared with much worse ones
LOG_KL = dataclasses.replace(KL, title="KL = loss − entropy", log=True)
SATURATED = 0.1  # a loss is saturated once the KL falls by less than this fraction of it until the end
# the paper's main results: size, time, SGD, the adversary (tables 1 and 2), the look-up table
PAPER_CLAIMS = (
    *("larger-transfer", "longer-transfer", "sgd-flatter", "sgd-transfer"),
    *("adversary-transfer", "adversary-sharper", "lookup-transfer"),
)


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    everything = by_dataset(results)
    same_loss = [_same_loss(data) for data in everything if data.models]
    figures = [*same_loss, *(figure for data in everything for figure in _figures(data))]
    # all of these claims are about PCFG
    grammars = next((len(data.dataset.languages) for data in everything if data.dataset.name == "pcfg"), MIN_LANGUAGES)
    has = f"here {'are' if grammars > 1 else 'is'} {grammars}"
    needs = f"it takes {MIN_LANGUAGES} languages or more, and {has}" if grammars < MIN_LANGUAGES else ""
    return PageParts(figures=figures, paper_claims=dict.fromkeys(PAPER_CLAIMS, needs))


def _accuracies(dataset: Dataset) -> list[Column]:
    return [column_of(key, "accuracy") for key in dataset.tasks.values()]


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
    """Return what a point is the mean over, to go on a sentence; nothing for one model."""
    several = {"languages": len(dataset.languages) > 1, "seeds": dataset.seeds > 1}
    over = [what for what, are in several.items() if are]
    return f", averaged over {' and '.join(over)}" if over else ""


def _rows(
    data: DatasetResults, models: Sequence[tuple[str, Model]], shown: Sequence[Column], middle: Model
) -> pl.DataFrame:
    """Return models, each with its group, as a chart takes them: means, with the errors of differences from `middle`.

    Not the errors of the means: languages differ more than models do, and would hide how models differ on them.
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
    """Return the paper's figure 1: transfer against the loss and against flatness, of models of about one loss."""
    dataset, (loss, *traces) = data.dataset, _across(data)
    # the paper's figure is of task B alone
    tasks = [column_of(dataset.tasks["B"], "accuracy")] if FIGURE_1 in dataset.shown.sizes else _accuracies(dataset)
    experiments, first = data.results.experiments, data.units[0]
    models = [(experiments[first.run(model.arm)].group, model) for model in data.models]
    rows = _rows(data, models, [loss, *traces, *tasks], data.control)
    about: Any = {"band": data.band, "baselines": _baselines(data), "style": _style(rows)}
    return Figure(
        name=f"{dataset.name}-same-loss",
        title=f"{dataset.title}: models of about the same loss",
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
    caption = (
        f"Each point is one checkpoint of a size, an arm or a cooldown{_averaged(dataset)}; lines join the checkpoints "
        "of a run. Horizontal lines: probes on features that need no model. The rectangle holds the models whose KL is "
        f"within {dataset.band:.0%} of that of the control, {control}: {len(near)} of {len(data.models)}. The other "
        f"panels show these alone. Their mean KL ranges from {kls} nats, and their accuracy by "
        f"{' and by '.join(spreads)}. The lowest and the highest of {len(near)} models were picked after the fact, so "
        "part of this is chance, and the ± does not account for it. Wider models give the probe more "
        f"features{trained}. Bars are those of each model's difference from {control}, {paired_by(dataset)}, so "
        f"{control} has none. Compare traces only between models of one size."
    )
    return f"{corresponds(FIGURE_1)}{caption} {_in_the_paper()}" if FIGURE_1 in dataset.shown.sizes else caption


def _in_the_paper() -> str:
    (low, high), entropy = tables.LOSSES, tables.ENTROPY
    kl = " to ".join(f"{float(loss) - float(entropy):.3f}" for loss in (low, high))
    sizes = " and ".join(f"{what} from {' to '.join(ends)}" for what, ends in tables.BY_SIZE.items())
    return (
        f"In the paper, on a larger grammar with other tasks, losses are {low} to {high} nats, a KL of {kl}. With "
        f"{tables.PARAMETERS} parameters (± standard deviation), {tables.by_algorithm('task B (%)', 'trace')}; "
        f"between 9M parameters and its largest model, at about the same loss, {sizes}."
    )


# --- the other figures -----------------------------------------------------------------------------------------------


def _figures(data: DatasetResults) -> Iterator[Figure]:
    """Return the figures of a dataset besides the first, of what it has runs for."""
    dataset = data.dataset
    if len(dataset.sizes) > 1:
        yield _sizes(data)
    yield _longer(data)
    if any(arm.shown_in == SGD_SHOWN for arm in dataset.arms.values()):
        yield _sgd(data)
    if any(not arm.stages for arm in dataset.arms.values()):
        yield _algorithms(data)
    if dataset.when_expanded:
        yield _expanded(data)


def _figure(data: DatasetResults, name: str, title: str, chart: Any, shown_in: Sequence[str], *caption: str) -> Figure:
    before = "Before any cooldown." if data.dataset.cooldowns and name != "expanded" else ""
    return Figure(
        name=f"{data.dataset.name}-{name}",
        title=f"{data.dataset.title}: {title}",
        chart=chart,
        caption=corresponds(*(each for each in shown_in if each != FIGURE_1))
        + " ".join(filter(None, (*caption, before))),
    )


def _bars(dataset: Dataset, middle: Model | None = None) -> str:
    """Return what the bars of a figure are: of the difference from a model or, in a figure of sizes, from the first."""
    of = f"{middle.arm} at step {middle.step:,}" if middle else "the smallest size of the same color"
    return f"Bars are those of the difference from {of}, {paired_by(dataset)}, so this one has none."


def _by_size(data: DatasetResults, groups: Mapping[str, Sequence[Model]], shown: Sequence[Column]) -> pl.DataFrame:
    """Return models of several sizes in groups, each with the errors of differences from its group's first."""
    return pl.concat(
        _rows(data, [(group, model) for model in models], shown, models[0]) for group, models in groups.items()
    )


def _sizes(data: DatasetResults) -> Figure:
    """Return every size at its watched steps."""
    dataset, shown = data.dataset, [_across(data)[0], *_accuracies(data.dataset)]
    groups = {f"{step:,} steps": [Model(size, step) for size in dataset.sizes] for step in dataset.watched}
    rows = _by_size(data, groups, shown)
    saturated = _saturated(rows.filter(pl.col("step") == dataset.last), "parameters")
    return _figure(
        *(data, "sizes", "larger models"),
        charts.sizes(rows, shown, saturated=saturated, style=_one_marker(rows)),
        dataset.shown.sizes,
        f"Each point is one size after a number of steps{_averaged(dataset)}. {_bars(dataset)}",
        _loss(data, "size", saturated, where=" at the last step,"),
    )


def _longer(data: DatasetResults) -> Figure:
    """Return the model whose training is followed over its steps."""
    dataset, shown = data.dataset, [*_across(data), *_accuracies(data.dataset)]
    models = [Model(dataset.followed or dataset.main, step) for step in dataset.watched]
    rows = _rows(data, [(model.arm, model) for model in models], shown, models[0])
    saturated = _saturated(rows, "step")
    others = (
        "The paper has no such figure of these models."
        if data.models
        else "An equivalent of the paper's figures 2c and 4 (right), on another text."
    )
    return _figure(
        *(data, "longer", "longer training"),
        charts.curves(rows, shown, saturated=saturated, style=_style(rows)),
        dataset.shown.longer,
        "" if dataset.shown.longer else others,
        f"The model {models[0].arm} during training with AdamW{_averaged(dataset)}.",
        _loss(data, "step", saturated),
        _bars(dataset, models[0]),
    )


def _sgd(data: DatasetResults) -> Figure:
    """Return SGD over its steps, after AdamW."""
    dataset, shown = data.dataset, [*_across(data), *_accuracies(data.dataset)]
    start = Model(dataset.main, dataset.start)
    arms = {name: arm for name, arm in dataset.arms.items() if arm.shown_in == SGD_SHOWN}
    # a curve joins the rows of one run, so each arm has the end of AdamW as a row of its own, at step 0
    starts = [
        _rows(data, [(arm.title, start)], shown, start).with_columns(
            pl.lit(name).alias("run"), pl.lit(0, pl.Int64).alias("step")
        )
        for name, arm in arms.items()
    ]
    ends = [
        (arm.title, Model(name, step)) for name, arm in arms.items() for step in (*arm.watched, arm.stages[0].steps)
    ]
    rows = pl.concat([*starts, _rows(data, ends, shown, start)])
    return _figure(
        *(data, "sgd", "SGD after AdamW"),
        charts.curves(rows, shown, style=_style(rows)),
        SGD_SHOWN,
        f"Training of {dataset.main} continues with SGD from step {start.step:,} of AdamW; the horizontal axis counts "
        "the steps of SGD.",
        _bars(dataset, start),
    )


def _algorithms(data: DatasetResults) -> Figure:
    """Return the arms that are trained from scratch beside the main model."""
    dataset, middle, across = data.dataset, Model(data.dataset.main, data.dataset.last), _across(data)
    arms = {name: arm for name, arm in dataset.arms.items() if not arm.stages}
    titles = {dataset.main: f"AdamW ({dataset.main})", **{name: arm.title for name, arm in arms.items()}}
    models = [(title, Model(name, step)) for name, title in titles.items() for step in dataset.watched]
    tasks = _accuracies(dataset)
    rows = _rows(data, models, [*across, *tasks], middle)
    return _figure(
        *(data, "algorithms", "algorithms and architectures"),
        charts.scatter(rows, [(column, task) for task in tasks for column in across], style=_style(rows)),
        tuple(dict.fromkeys(each for arm in arms.values() for each in arm.shown_in)),
        f"Each point is one model at one training step{_averaged(dataset)}.",
        _bars(dataset, middle),
    )


def _expanded(data: DatasetResults) -> Figure:
    """Return sizes after their expansion into the largest."""
    dataset = data.dataset
    if dataset.expands_cooled:
        groups = {
            f"Cooldown of {steps:,} steps": [
                Model(cooldown_run(size, dataset.start, length), steps) for size in dataset.sizes
            ]
            for length in dataset.cooldown_lengths
            for steps in [length or dataset.cooldowns[0]]
        }
    else:
        groups = {f"{dataset.last:,} steps": [Model(size, dataset.last) for size in dataset.expanded]}
    shown = [_across(data)[0], *map(column_of, dataset.when_expanded), *_accuracies(dataset)]
    rows = _by_size(data, groups, shown)
    return _figure(
        *(data, "expanded", "sizes expanded into the largest"),
        charts.sizes(rows, shown, style=_one_marker(rows)),
        dataset.shown.expanded,
        f"Each point is one size{_averaged(dataset)}. {_bars(dataset)} Traces are those of the model expanded into "
        f"{dataset.largest}, by the paper's expansion, by the exact one, and the minimal trace, which does not depend "
        "on the choice. Accuracies are those of the model itself: wider models give the probe more features, so "
        "accuracies of different sizes are not comparable.",
    )


def _loss(data: DatasetResults, what: str, saturated: float | None, *, where: str = "") -> str:
    """Return what a caption says of the loss: the entropy, and from which size or step on it is saturated."""
    if not data.models:
        return "The entropy of the text is not known, so the axis is the loss, and nobody knows where it saturates."
    entropy = data.mean(data.ends(data.dataset.main), "entropy")
    if saturated is None:
        mark = f"There is no mark of saturation:{where} the KL falls by {SATURATED:.0%} or more up to the last {what}."
    else:
        first = f"{',' * bool(where)}{where} the first {what} after which"
        mark = f"The dashed line marks{first} the KL falls by less than {SATURATED:.0%}."
    return f"The loss is the KL plus the entropy, {number(entropy)} nats per token. {mark}"


def _saturated(rows: pl.DataFrame, axis: str) -> float | None:
    """Return the first place on an axis after which the KL falls by less than `SATURATED`; None if only the last is."""
    if "kl" not in rows.columns:
        return None
    places, values = rows.sort(axis).select(axis, "kl").to_dict(as_series=False).values()
    saturated = (place for i, place in enumerate(places[:-1]) if min(values[i:]) > (1 - SATURATED) * values[i])
    return next(saturated, None)
