"""The page of the study: a figure for each of the paper's, the first one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import polars as pl

from isoloss.paper.reproduction import band, published
from isoloss.paper.reproduction.dataset import TABLES, Dataset, polished
from isoloss.paper.reproduction.reading import at_step, mean, replicates
from isoloss.paper.reproduction.scales import SGD_SHOWN, Scale
from isoloss.report import charts
from isoloss.report.data import KL, LOSS, MARKERS, MINIMAL_TRACE, TRACE, Column, Style, column_of
from isoloss.report.html import Figure
from isoloss.statistics.estimate import number
from isoloss.studies.page import PageParts
from isoloss.studies.results import Results

LOG_KL = dataclasses.replace(KL, log=True)  # as models of about one loss are compared with much worse ones
FIGURE_1 = "figure 1"
PAPER_SCALE = "paper"  # of a small model's embedding inside a large one


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    scale: Scale = results.scale
    found = [dataset for dataset in scale.datasets if replicates(results, dataset)]
    same_loss = [_same_loss(results, dataset) for dataset in found if band.models(results, dataset)]
    return PageParts(figures=[*same_loss, *(figure for dataset in found for figure in _figures(results, dataset))])


def columns(dataset: Dataset) -> list[Column]:
    """Return the accuracies on a dataset's tasks."""
    return [column_of(key, "accuracy") for key in dict.fromkeys(dataset.tasks.values())]


def _traces(dataset: Dataset) -> list[Column]:
    return [TRACE, *([MINIMAL_TRACE] if "minimal-trace" in dataset.measures else [])]


def _style(table: pl.DataFrame) -> Style:
    """Return the style of a table; where there are more sizes than markers, only colors tell them apart."""
    if table.get_column("size").n_unique() <= len(MARKERS):
        return Style.of(table)
    return dataclasses.replace(Style.of(table.with_columns(pl.lit("any").alias("size"))), markers={})


# --- figure 1 --------------------------------------------------------------------------------------------------------


def _same_loss(results: Results, dataset: Dataset) -> Figure:
    """Return the paper's figure 1: transfer against the loss and against flatness, of models of about one loss."""
    rows = _models(results, dataset)
    chart = charts.magnified(
        rows,
        LOG_KL,
        _traces(dataset),
        columns(dataset),
        band=band.mean_limits(results, dataset),
        baselines=_baselines(results, dataset),
        style=_style(rows),
    )
    title = f"{dataset.title}: models of about the same loss"
    return Figure(name=f"{dataset.name}-same-loss", title=title, chart=chart, caption=_caption(results, dataset))


def _models(results: Results, dataset: Dataset) -> pl.DataFrame:
    """Return a row for every model, with means over languages and the errors of their differences from the control."""
    first, middle = replicates(results, dataset)[0], band.control(results, dataset)
    rows = []
    for model in band.models(results, dataset):
        experiment = results.experiments[first.run(model.arm)]
        row = {
            "run": model.arm,
            "group": experiment.group,
            "size": experiment.size,
            "parameters": results.run(first.run(model.arm)).result()["num_parameters"],
            "step": model.step,
        }
        for column in (LOG_KL, *_traces(dataset), *columns(dataset)):
            value = band.average(results, dataset, model, column.name).value
            stderr = band.beyond(results, dataset, model, middle, column.name).stderr
            row |= {column.name: value, column.stderr_column: stderr / 100 if column.percent else stderr}
        rows.append(row)
    return pl.DataFrame(rows)


def _baselines(results: Results, dataset: Dataset) -> Mapping[str, Mapping[str, float]]:
    """Return the accuracies on features that need no model, by probe and by what the features are called."""
    if not dataset.shown.tables:
        return {}
    starts = [(one, at_step(results, one, dataset.main, 0)) for one in replicates(results, dataset)]

    def accuracy_of(kind: str, probe: str) -> float:
        return mean([(one, start[f"{kind}-{probe.removeprefix('probe-')}"].estimate) for one, start in starts]).value

    return {
        column.name: {title: accuracy_of(kind, column.name) for kind, title in TABLES.items()}
        for column in columns(dataset)
    }


def _caption(results: Results, dataset: Dataset) -> str:
    every, near = band.models(results, dataset), band.inside(results, dataset)
    spreads, control = band.spreads(results, dataset), dataset.control
    parts = [
        "Each point is a size, an arm or a polish at one step, the mean over languages and seeds; a line joins the "
        "steps of a run.",
        f"The rectangle holds the models whose KL is within {dataset.band:g} nats of that of the control, {control}: "
        f"{len(near)} of {len(every)}. The other panels show these alone.",
        f"Their KL differs by at most {spreads['kl'].difference.value:.2g} nats, and their accuracy by "
        + " and by ".join(
            f"{number(each.difference)} points on {key.removeprefix('probe-')} (from "
            f"{band.name(results, dataset, each.lowest)} to {band.name(results, dataset, each.highest)})"
            for key, each in spreads.items()
            if key != "kl"
        )
        + f". These are the extremes of {len(near)} models, and chance alone would spread them too.",
        f"Errors are those of the difference from {control}, paired by language and seed. Compare traces of one size "
        "only.",
    ]
    if FIGURE_1 in dataset.shown.sizes:
        parts = [_corresponds((FIGURE_1,)).strip(), *parts, _in_the_paper()]
    return " ".join(parts)


def _in_the_paper() -> str:
    (low, high), entropy = published.LOSSES, published.ENTROPY
    kl = " to ".join(f"{float(loss) - float(entropy):.3f}" for loss in (low, high))
    sizes = ", ".join(f"{what} from {' to '.join(ends)}" for what, ends in published.BY_SIZE.items())
    return (
        f"In the paper, on a larger grammar with other tasks, losses are {low} to {high} nats, a KL of {kl}. With "
        f"{published.PARAMETERS} parameters, {published.by_algorithm('task B (%)', 'trace')}; of sizes above 9M at "
        f"about one loss, {sizes}."
    )


# --- the other figures -----------------------------------------------------------------------------------------------


def _figures(results: Results, dataset: Dataset) -> list[Figure]:
    traces = _traces(dataset)
    tasks, loss = columns(dataset), KL if band.models(results, dataset) else LOSS
    watched = _means(
        results, dataset, [(size, size, dataset.watched) for size in dataset.sizes], [loss, *traces, *tasks]
    )
    shown = tuple(each for each in dataset.shown.sizes if each != FIGURE_1)  # which has a figure of its own
    figures = [
        Figure(
            name=f"{dataset.name}-sizes",
            title=f"{dataset.title}: sizes and steps",
            chart=charts.scatter(
                watched, [(across, task) for task in tasks for across in (loss, *traces)], style=_style(watched)
            ),
            caption=_corresponds(shown)
            + "Each point is a size after a number of steps, the mean over languages and seeds.",
        ),
    ]
    last = watched.filter(pl.col("step") == dataset.last)
    figures.append(
        Figure(
            name=f"{dataset.name}-last",
            title=f"{dataset.title}: sizes at the last step",
            chart=charts.sizes(last, [loss, *tasks], style=_style(last)),
            caption=_corresponds(shown) + "The last step of each size.",
        )
    )
    followed = dataset.followed or dataset.main
    alone = watched.filter(pl.col("group") == followed)
    figures.append(
        Figure(
            name=f"{dataset.name}-longer",
            title=f"{dataset.title}: training for longer",
            chart=charts.curves(alone, [loss, *traces, *tasks], style=_style(alone)),
            caption=_corresponds(dataset.shown.longer) + f"The model {followed} over the steps of AdamW.",
        )
    )
    sgd = [(arm.title, name, arm.watched) for name, arm in dataset.arms.items() if arm.shown_in == SGD_SHOWN]
    if sgd:
        rows = _means(results, dataset, sgd, [loss, *traces, *tasks])
        figures.append(
            Figure(
                name=f"{dataset.name}-sgd",
                title=f"{dataset.title}: SGD after the end of training",
                chart=charts.curves(rows, [*traces, *tasks], style=_style(rows)),
                caption=_corresponds(SGD_SHOWN) + f"The model {dataset.main} goes on with SGD.",
            )
        )
    inside = [key for key in dataset.inside if key.endswith(f"-{PAPER_SCALE}") or key.startswith("minimal-")]
    if inside:
        rows = _means(results, dataset, _expanded(dataset), [loss, *map(column_of, inside), *tasks])
        axes = [(across, task) for task in tasks for across in (loss, *map(column_of, inside))]
        polished_from = f" after {dataset.start:,} steps and a polish of one of the lengths" * bool(
            dataset.polish_steps
        )
        figures.append(
            Figure(
                name=f"{dataset.name}-inside",
                title=f"{dataset.title}: sizes inside the largest",
                chart=charts.scatter(rows, axes, style=_style(rows)),
                caption=_corresponds(dataset.shown.expanded) + f"Each point is a size{polished_from}, expanded into "
                f"{dataset.largest}, the mean over languages and seeds. Wider models have more features to probe.",
            )
        )
    return figures


def _expanded(dataset: Dataset) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the models that are compared inside the largest one, as `_means` takes them."""
    if not dataset.polish_steps:
        return [(size, size, (dataset.last,)) for size in dataset.expanded]
    lengths = {length: length or dataset.polish_steps for length in dataset.polish_lengths}
    return [
        (size, polished(size, dataset.start, length), (steps,))
        for size in dataset.sizes
        for length, steps in lengths.items()
    ]


def _corresponds(shown_in: tuple[str, ...]) -> str:
    return f"Corresponds to the paper's {' and '.join(shown_in)}. " if shown_in else ""


def _means(
    results: Results, dataset: Dataset, series: Sequence[tuple[str, str, tuple[int, ...]]], shown: list[Column]
) -> pl.DataFrame:
    """Return a row for each step of each series, the means over languages with their standard errors.

    A series is a group, the part of a run's name that says what it is, and steps.
    """
    rows = []
    for group, arm, steps in series:
        found = [one for one in replicates(results, dataset) if one.run(arm) in results.experiments]
        first = results.run(found[0].run(arm))
        for step in steps:
            row = {
                "run": arm,
                "group": group,
                "size": results.experiments[found[0].run(arm)].size,
                "parameters": first.result()["num_parameters"],
                "step": step,
            }
            for column in shown:
                value = mean([(one, at_step(results, one, arm, step)[column.name].estimate) for one in found])
                row |= {column.name: value.value, f"{column.name}_stderr": value.stderr}
            rows.append(row)
    return pl.DataFrame(rows)
