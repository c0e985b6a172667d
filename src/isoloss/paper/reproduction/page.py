"""The page of the study: a figure for each of the paper's, the first one first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from isoloss.paper.reproduction import band, published
from isoloss.paper.reproduction.compare import DatasetResults, by_dataset, mean
from isoloss.paper.reproduction.spec import BASELINES, FIGURE_1, SGD_SHOWN, Dataset, cooldown_run
from isoloss.report import charts
from isoloss.report.data import KL, LOSS, MARKERS, MINIMAL_TRACE, TRACE, Column, Style, column_of
from isoloss.report.study_page import Figure
from isoloss.statistics.estimate import number
from isoloss.studies.page import PageParts
from isoloss.studies.results import Results

LOG_KL = dataclasses.replace(KL, log=True)  # as models of about one loss are compared with much worse ones
Series = tuple[str, str, tuple[int, ...]]  # a group, the part of a run's name that says what it is, and steps
# the paper's main results: size, time, SGD, the adversary, the look-up table
PAPER_CLAIMS = (
    *("larger-transfer", "longer-transfer", "sgd-flatter", "sgd-transfer"),
    *("adversary-transfer", "lookup-transfer"),
)
PAPER_SCALE = "paper"  # of a small model's embedding inside a large one


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    everything = by_dataset(results)
    same_loss = [_same_loss(data) for data in everything if band.models(data)]
    figures = [*same_loss, *(figure for data in everything for figure in _figures(data))]
    return PageParts(figures=figures, paper_claims=PAPER_CLAIMS)


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


def _same_loss(data: DatasetResults) -> Figure:
    """Return the paper's figure 1: transfer against the loss and against flatness, of models of about one loss."""
    dataset = data.dataset
    rows = _models(data)
    chart = charts.magnified(
        rows,
        LOG_KL,
        _traces(dataset),
        columns(dataset),
        band=band.mean_limits(data),
        baselines=_baselines(data),
        style=_style(rows),
    )
    title = f"{dataset.title}: models of about the same loss"
    return Figure(name=f"{dataset.name}-same-loss", title=title, chart=chart, caption=_caption(data))


def _models(data: DatasetResults) -> pl.DataFrame:
    dataset = data.dataset
    first, middle = data.replicates[0], band.control(data)
    rows = []
    for model in band.models(data):
        experiment = data.results.experiments[first.run(model.arm)]
        row = {
            "run": model.arm,
            "group": experiment.group,
            "size": experiment.size,
            "parameters": data.results.run(first.run(model.arm)).result()["num_parameters"],
            "step": model.step,
        }
        for column in (LOG_KL, *_traces(dataset), *columns(dataset)):
            value = band.average(data, model, column.name).value
            # not the value's own error: languages differ more than models do, and would hide how models differ on them
            stderr = band.paired_difference(data, model, middle, column.name).stderr
            row |= {column.name: value, column.stderr_column: stderr / 100 if column.percent else stderr}
        rows.append(row)
    return pl.DataFrame(rows)


def _baselines(data: DatasetResults) -> Mapping[str, Mapping[str, float]]:
    dataset = data.dataset
    if not dataset.shown.baselines:
        return {}
    starts = [(one, data.at(one, dataset.main, 0)) for one in data.replicates]

    def accuracy_of(kind: str, probe: str) -> float:
        return mean([(one, start[f"{kind}-{probe.removeprefix('probe-')}"]) for one, start in starts]).value

    return {
        column.name: {title: accuracy_of(kind, column.name) for kind, title in BASELINES.items()}
        for column in columns(dataset)
    }


def _caption(data: DatasetResults) -> str:
    dataset = data.dataset
    every, near = band.models(data), band.in_band(data)
    spreads, control = band.spreads(data), dataset.control
    parts = [
        f"Each point is one checkpoint of a size, an arm or a cooldown{averaged(dataset)}; lines join the checkpoints "
        "of a run. Horizontal lines: probes on features that need no model.",
        f"The rectangle holds the models whose KL is within {dataset.band:.0%} of that of the control, {control}: "
        f"{len(near)} of {len(every)}. The other panels show these alone.",
        f"Their mean KL ranges from {' to '.join(f'{end.value:.3g}' for end in spreads['kl'].ends)} nats, and their "
        "accuracy by "
        + " and by ".join(
            f"{number(each.difference)} points on {key.removeprefix('probe-')} (from "
            f"{band.name(data, each.lowest)} to {band.name(data, each.highest)})"
            for key, each in spreads.items()
            if key != "kl"
        )
        + f". The lowest and the highest of {len(near)} models were picked after the fact, so part of this is chance, "
        "and the ± does not account for it. Wider models give the probe more features, and the adversary and the "
        "helper are trained to change transfer.",
        f"Bars are those of each model's difference from {control}, paired by language and seed, so {control} has "
        "none. Compare traces only between models of one size.",
    ]
    if FIGURE_1 in dataset.shown.sizes:
        parts = [published.corresponds(FIGURE_1).strip(), *parts, _in_the_paper()]
    return " ".join(parts)


def _in_the_paper() -> str:
    (low, high), entropy = published.LOSSES, published.ENTROPY
    kl = " to ".join(f"{float(loss) - float(entropy):.3f}" for loss in (low, high))
    sizes = " and ".join(f"{what} from {' to '.join(ends)}" for what, ends in published.BY_SIZE.items())
    return (
        f"In the paper, on a larger grammar with other tasks, losses are {low} to {high} nats, a KL of {kl}. With "
        f"{published.PARAMETERS} parameters (± standard deviation), {published.by_algorithm('task B (%)', 'trace')}; "
        f"between 9M parameters and its largest model, at about the same loss, {sizes}."
    )


# --- the other figures -----------------------------------------------------------------------------------------------


def _figures(data: DatasetResults) -> list[Figure]:
    figures = _Figures(data)
    wanted = (figures.sizes, figures.last, figures.longer, figures.sgd, figures.algorithms, figures.expanded)
    return [figure for make in wanted if (figure := make()) is not None]


@dataclass(frozen=True)
class _Figures:
    """The figures of a dataset besides the first; None for one that it has no runs for."""

    data: DatasetResults

    @property
    def dataset(self) -> Dataset:
        """The dataset."""
        return self.data.dataset

    @property
    def _tasks(self) -> list[Column]:
        return columns(self.dataset)

    @property
    def _across(self) -> list[Column]:
        """The loss and the traces."""
        loss = KL if band.models(self.data) else LOSS
        return [loss, *_traces(self.dataset)]

    @functools.cached_property
    def _watched(self) -> pl.DataFrame:
        return self._means([(size, size, self.dataset.watched) for size in self.dataset.sizes])

    def _means(self, series: Sequence[Series]) -> pl.DataFrame:
        return _means(self.data, series, [*self._across, *self._tasks])

    def _figure(self, name: str, title: str, chart: Any, shown_in: Sequence[str], caption: str) -> Figure:
        return Figure(
            name=f"{self.dataset.name}-{name}",
            title=f"{self.dataset.title}: {title}",
            chart=chart,
            caption=published.corresponds(*(each for each in shown_in if each != FIGURE_1)) + caption,
        )

    def _against_tasks(self, rows: pl.DataFrame, across: Sequence[Column]) -> Any:
        axes = [(column, task) for task in self._tasks for column in across]
        return charts.scatter(rows, axes, style=_style(rows))

    def _each(self, what: str) -> str:
        return f"Each point is one {what} at one training step{averaged(self.dataset)}.{self._uncooled}"

    @property
    def _uncooled(self) -> str:
        return " Before any cooldown." if self.dataset.cooldown_steps else ""

    def sizes(self) -> Figure | None:
        """Return every size at its watched steps."""
        chart = self._against_tasks(self._watched, self._across)
        return self._figure("sizes", "sizes and steps", chart, self.dataset.shown.sizes, self._each("size"))

    def last(self) -> Figure | None:
        """Return every size at the end of its training."""
        if len(self.dataset.sizes) == 1:
            return None
        rows = self._watched.filter(pl.col("step") == self.dataset.last)
        chart = charts.sizes(rows, [self._across[0], *self._tasks], style=_style(rows))
        caption = f"Each size at the end of training.{self._uncooled}"
        return self._figure("last", "sizes at the last step", chart, self.dataset.shown.sizes, caption)

    def longer(self) -> Figure | None:
        """Return the model whose training is followed over its steps."""
        followed = self.dataset.followed or self.dataset.main
        rows = self._watched.filter(pl.col("group") == followed)
        chart = charts.curves(rows, [*self._across, *self._tasks], style=_style(rows))
        caption = f"The model {followed} during training with AdamW{averaged(self.dataset)}.{self._uncooled}"
        return self._figure("longer", "training for longer", chart, self.dataset.shown.longer, caption)

    def sgd(self) -> Figure | None:
        """Return SGD over its steps, after AdamW."""
        dataset = self.dataset
        arms = {name: arm for name, arm in dataset.arms.items() if arm.shown_in == SGD_SHOWN}
        if not arms:
            return None
        # a curve joins the rows of one run, so each arm has the end of AdamW as a row of its own, at step 0
        starts = [
            self._means([(arm.title, dataset.main, (dataset.start,))]).with_columns(
                pl.lit(name).alias("run"), pl.lit(0, pl.Int64).alias("step")
            )
            for name, arm in arms.items()
        ]
        ends = [(arm.title, name, (*arm.watched, arm.stages[0].steps)) for name, arm in arms.items()]
        rows = pl.concat([*starts, self._means(ends)])
        chart = charts.curves(rows, [*self._across, *self._tasks], style=_style(rows))
        caption = (
            f"Training of {dataset.main} continues with SGD from step {dataset.start:,} of AdamW; the horizontal axis "
            f"counts the steps of SGD.{self._uncooled}"
        )
        return self._figure("sgd", "SGD after AdamW", chart, SGD_SHOWN, caption)

    def algorithms(self) -> Figure | None:
        """Return the arms that are trained from scratch beside the main model."""
        dataset = self.dataset
        arms = {name: arm for name, arm in dataset.arms.items() if not arm.stages}
        if not arms:
            return None
        main = (f"AdamW ({dataset.main})", dataset.main, dataset.watched)
        rows = self._means([main, *((arm.title, name, dataset.watched) for name, arm in arms.items())])
        shown_in = dict.fromkeys(each for arm in arms.values() for each in arm.shown_in)
        chart = self._against_tasks(rows, self._across)
        return self._figure("algorithms", "algorithms and architectures", chart, tuple(shown_in), self._each("model"))

    def expanded(self) -> Figure | None:
        """Return sizes after their expansion into the largest."""
        dataset = self.dataset
        keys = [key for key in dataset.when_expanded if key.endswith(f"-{PAPER_SCALE}") or key.startswith("minimal-")]
        if not keys:
            return None
        traces = [column_of(key) for key in keys]
        rows = _means(self.data, _expanded(dataset), [self._across[0], *traces, *self._tasks])
        cooldown = f" after {dataset.start:,} steps and a cooldown of some length" if dataset.expands_cooled else ""
        caption = (
            f"Each point is one size{cooldown}{averaged(dataset)}. Traces are those of the model expanded into "
            f"{dataset.largest}, accuracies those of the model itself: wider models give the probe more features, so "
            "accuracies of different sizes are not comparable."
        )
        chart = self._against_tasks(rows, [self._across[0], *traces])
        return self._figure("expanded", "sizes expanded into the largest", chart, dataset.shown.expanded, caption)


def _expanded(dataset: Dataset) -> list[Series]:
    if not dataset.expands_cooled:
        return [(size, size, (dataset.last,)) for size in dataset.expanded]
    lengths = {length: length or dataset.cooldown_steps for length in dataset.cooldown_lengths}
    return [
        (size, cooldown_run(size, dataset.start, length), (steps,))
        for size in dataset.sizes
        for length, steps in lengths.items()
    ]


def averaged(dataset: Dataset) -> str:
    """Return what a point is the mean over, to go on a sentence; nothing for one model."""
    over = [
        what for what, several in (("languages", len(dataset.languages) > 1), ("seeds", dataset.seeds > 1)) if several
    ]
    return f", averaged over {' and '.join(over)}" if over else ""


def _means(data: DatasetResults, series: Sequence[Series], shown: list[Column]) -> pl.DataFrame:
    rows = []
    for group, arm, steps in series:
        # all replicates have the same sizes and arms
        first = data.replicates[0].run(arm)
        for step in steps:
            row = {
                "run": arm,
                "group": group,
                "size": data.results.experiments[first].size,
                "parameters": data.results.run(first).result()["num_parameters"],
                "step": step,
            }
            for column in shown:
                value = mean([(one, data.at(one, arm, step)[column.name]) for one in data.replicates])
                row |= {column.name: value.value, f"{column.name}_stderr": value.stderr}
            rows.append(row)
    return pl.DataFrame(rows)
