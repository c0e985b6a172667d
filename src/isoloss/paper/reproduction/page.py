"""The page of the study: a figure for each of the paper's."""

from __future__ import annotations

import polars as pl

from isoloss.paper.reproduction.dataset import Dataset
from isoloss.paper.reproduction.reading import at_step, mean, replicates
from isoloss.paper.reproduction.scales import SGD_SHOWN, Scale
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, Column, Style, accuracy
from isoloss.report.html import Figure
from isoloss.studies.page import PageParts
from isoloss.studies.results import Results


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    scale: Scale = results.scale
    figures = []
    for dataset in scale.datasets:
        if replicates(results, dataset):
            figures += _figures(results, dataset)
    return PageParts(figures=figures)


def columns(dataset: Dataset) -> list[Column]:
    """Return the accuracies on a dataset's tasks."""
    return [accuracy(key.removeprefix("probe-")) for key in dict.fromkeys(dataset.tasks.values())]


def _figures(results: Results, dataset: Dataset) -> list[Figure]:
    traces = [TRACE, *([MINIMAL_TRACE] if "minimal-trace" in dataset.measures else [])]
    tasks = columns(dataset)
    watched = _means(results, dataset, {size: (size, dataset.watched) for size in dataset.sizes}, [KL, *traces, *tasks])
    figures = [
        Figure(
            name=f"{dataset.name}-sizes",
            title=f"{dataset.title}: sizes and steps",
            chart=charts.scatter(
                watched, [(across, task) for task in tasks for across in (KL, *traces)], style=Style.of(watched)
            ),
            caption=_corresponds(dataset, dataset.shown.sizes)
            + "Each point is a size after a number of steps, the mean over languages and seeds.",
        ),
    ]
    last = watched.filter(pl.col("step") == dataset.last)
    figures.append(
        Figure(
            name=f"{dataset.name}-last",
            title=f"{dataset.title}: sizes at the last step",
            chart=charts.sizes(last, [KL, *tasks], style=Style.of(last)),
            caption=_corresponds(dataset, dataset.shown.sizes) + "The last step of each size.",
        )
    )
    followed = dataset.followed or dataset.main
    alone = watched.filter(pl.col("group") == followed)
    figures.append(
        Figure(
            name=f"{dataset.name}-longer",
            title=f"{dataset.title}: training for longer",
            chart=charts.curves(alone, [KL, *tasks], style=Style.of(alone)),
            caption=_corresponds(dataset, dataset.shown.longer) + f"The model {followed} over the steps of AdamW.",
        )
    )
    sgd = {arm.title: (name, arm.watched) for name, arm in dataset.arms.items() if arm.shown_in == SGD_SHOWN}
    if sgd:
        rows = _means(results, dataset, sgd, [KL, *traces, *tasks])
        figures.append(
            Figure(
                name=f"{dataset.name}-sgd",
                title=f"{dataset.title}: SGD after the end of training",
                chart=charts.curves(rows, [*traces, *tasks], style=Style.of(rows)),
                caption=_corresponds(dataset, SGD_SHOWN) + f"The model {dataset.main} goes on with SGD.",
            )
        )
    return figures


def _corresponds(dataset: Dataset, shown_in: tuple[str, ...]) -> str:
    return f"Corresponds to the paper's {' and '.join(shown_in)}. " if shown_in else ""


def _means(
    results: Results, dataset: Dataset, series: dict[str, tuple[str, tuple[int, ...]]], shown: list[Column]
) -> pl.DataFrame:
    """Return a row for each series and step, the means over languages with their standard errors."""
    rows = []
    for group, (arm, steps) in series.items():
        found = [one for one in replicates(results, dataset) if one.run(arm) in results.experiments]
        first = results.run(found[0].run(arm))
        for step in steps:
            row = {
                "run": group,
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
