"""The page of the study: a figure for each of the paper's, the first one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from isoloss.paper.reproduction import band, published
from isoloss.paper.reproduction.band import Model
from isoloss.paper.reproduction.compare import MIN_LANGUAGES, DatasetResults, by_dataset, look_up, mean
from isoloss.paper.reproduction.spec import BASELINES, FIGURE_1, SGD_SHOWN, Dataset, cooldown_run, paired_by
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
    same_loss = [_same_loss(data) for data in everything if band.models(data)]
    figures = [*same_loss, *(figure for data in everything for figure in _figures(data))]
    # all of these claims are about PCFG
    needs = next((_needs(data.dataset) for data in everything if data.dataset.name == "pcfg"), "")
    return PageParts(figures=figures, paper_claims=dict.fromkeys(PAPER_CLAIMS, needs))


def _needs(dataset: Dataset) -> str:
    """Return what a verdict on a dataset takes; empty: it has enough."""
    grammars = len(dataset.languages)
    if grammars >= MIN_LANGUAGES:
        return ""
    return f"it takes {MIN_LANGUAGES} languages or more, and here {'are' if grammars > 1 else 'is'} {grammars}"


def columns(dataset: Dataset) -> list[Column]:
    """Return the accuracies on a dataset's tasks."""
    return [column_of(key, "accuracy") for key in dataset.tasks.values()]


def _traces(dataset: Dataset) -> list[Column]:
    return [TRACE, *([MINIMAL_TRACE] if "minimal-trace" in dataset.measures else [])]


def _style(table: pl.DataFrame) -> Style:
    """Return the style of a table; where there are more sizes than markers, only colors tell them apart."""
    return Style.of(table) if table.get_column("size").n_unique() <= len(MARKERS) else _one_marker(table)


def _one_marker(table: pl.DataFrame) -> Style:
    """Return the style of a table whose sizes stand on an axis."""
    return Style.of(table.with_columns(pl.lit("any").alias("size")))


# --- figure 1 --------------------------------------------------------------------------------------------------------


def _same_loss(data: DatasetResults) -> Figure:
    """Return the paper's figure 1: transfer against the loss and against flatness, of models of about one loss."""
    dataset = data.dataset
    # the paper's figure is of task B alone
    tasks = [column_of(dataset.tasks["B"], "accuracy")] if FIGURE_1 in dataset.shown.sizes else columns(dataset)
    experiments, first = data.results.experiments, data.replicates[0]
    models = [(experiments[first.run(model.arm)].group, model) for model in band.models(data)]
    rows = _rows(data, models, [LOG_KL, *_traces(dataset), *tasks], band.control(data))
    chart = charts.magnified(
        rows,
        LOG_KL,
        _traces(dataset),
        tasks,
        band=band.mean_limits(data),
        baselines=_baselines(data),
        style=_style(rows),
    )
    title = f"{dataset.title}: models of about the same loss"
    return Figure(name=f"{dataset.name}-same-loss", title=title, chart=chart, caption=_caption(data))


def _baselines(data: DatasetResults) -> Mapping[str, Mapping[str, float]]:
    dataset = data.dataset
    if not dataset.shown.baselines:
        return {}
    tables = {kind: [(one, look_up(data, one, kind)) for one in data.replicates] for kind in BASELINES}
    return {
        column.name: {
            title: mean([(one, each[column.name]) for one, each in tables[kind]]).value
            for kind, title in BASELINES.items()
        }
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
        "and the ± does not account for it. Wider models give the probe more features"
        + (
            ", and the adversary and the helper are trained to change transfer." if "adversary" in dataset.arms else "."
        ),
        f"Bars are those of each model's difference from {control}, {paired_by(dataset)}, so {control} has none. "
        "Compare traces only between models of one size.",
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
    wanted = (figures.sizes, figures.longer, figures.sgd, figures.algorithms, figures.expanded)
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
    def _knows_kl(self) -> bool:
        return bool(band.models(self.data))

    @property
    def _across(self) -> list[Column]:
        """The loss and the traces."""
        return [LOG_KL if self._knows_kl else LOSS, *_traces(self.dataset)]

    def _rows(self, models: Sequence[tuple[str, Model]], middle: Model) -> pl.DataFrame:
        return _rows(self.data, models, [*self._across, *self._tasks], middle)

    def _by_size(self, groups: Mapping[str, Sequence[Model]], shown: Sequence[Column]) -> pl.DataFrame:
        """Return models of several sizes in groups, each with the errors of differences from its group's first."""
        return pl.concat(
            _rows(self.data, [(group, model) for model in models], shown, models[0]) for group, models in groups.items()
        )

    def _figure(self, name: str, title: str, chart: Any, shown_in: Sequence[str], *caption: str) -> Figure:
        shown = published.corresponds(*(each for each in shown_in if each != FIGURE_1))
        cooldown = " Before any cooldown." if self.dataset.cooldown_steps and name != "expanded" else ""
        return Figure(
            name=f"{self.dataset.name}-{name}",
            title=f"{self.dataset.title}: {title}",
            chart=chart,
            caption=f"{shown}{' '.join(caption)}{cooldown}",
        )

    def sizes(self) -> Figure | None:
        """Return every size at its watched steps."""
        dataset = self.dataset
        if len(dataset.sizes) == 1:
            return None
        groups = {f"{step:,} steps": [Model(size, step) for size in dataset.sizes] for step in dataset.watched}
        shown = [self._across[0], *self._tasks]
        rows = self._by_size(groups, shown)
        saturated = _saturated(rows.filter(pl.col("step") == dataset.last), "parameters")
        chart = charts.sizes(rows, shown, saturated=saturated, style=_one_marker(rows))
        each = f"Each point is one size after a number of steps{averaged(dataset)}. {_smallest(dataset)}"
        loss = self._loss("size", saturated, where=" at the last step,")
        return self._figure("sizes", "larger models", chart, dataset.shown.sizes, each, loss)

    def longer(self) -> Figure | None:
        """Return the model whose training is followed over its steps."""
        dataset = self.dataset
        followed = dataset.followed or dataset.main
        first = Model(followed, dataset.watched[0])
        rows = self._rows([(followed, Model(followed, step)) for step in dataset.watched], first)
        saturated = _saturated(rows, "step")
        chart = charts.curves(rows, [*self._across, *self._tasks], saturated=saturated, style=_style(rows))
        others = (
            "The paper has no such figure of these models."
            if self._knows_kl
            else "An equivalent of the paper's figures 2c and 4 (right), on another text."
        )
        caption = (
            "" if dataset.shown.longer else others,
            f"The model {followed} during training with AdamW{averaged(dataset)}.",
            self._loss("step", saturated),
            _paired(dataset, first),
        )
        return self._figure("longer", "longer training", chart, dataset.shown.longer, *filter(None, caption))

    def sgd(self) -> Figure | None:
        """Return SGD over its steps, after AdamW."""
        dataset, start = self.dataset, Model(self.dataset.main, self.dataset.start)
        arms = {name: arm for name, arm in dataset.arms.items() if arm.shown_in == SGD_SHOWN}
        if not arms:
            return None
        # a curve joins the rows of one run, so each arm has the end of AdamW as a row of its own, at step 0
        starts = [
            self._rows([(arm.title, start)], start).with_columns(
                pl.lit(name).alias("run"), pl.lit(0, pl.Int64).alias("step")
            )
            for name, arm in arms.items()
        ]
        ends = [
            (arm.title, Model(name, step)) for name, arm in arms.items() for step in (*arm.watched, arm.stages[0].steps)
        ]
        rows = pl.concat([*starts, self._rows(ends, start)])
        chart = charts.curves(rows, [*self._across, *self._tasks], style=_style(rows))
        caption = (
            f"Training of {dataset.main} continues with SGD from step {start.step:,} of AdamW; the horizontal axis "
            f"counts the steps of SGD.",
            _paired(dataset, start),
        )
        return self._figure("sgd", "SGD after AdamW", chart, SGD_SHOWN, *caption)

    def algorithms(self) -> Figure | None:
        """Return the arms that are trained from scratch beside the main model."""
        dataset, middle = self.dataset, Model(self.dataset.main, self.dataset.last)
        arms = {name: arm for name, arm in dataset.arms.items() if not arm.stages}
        if not arms:
            return None
        titles = {dataset.main: f"AdamW ({dataset.main})", **{name: arm.title for name, arm in arms.items()}}
        models = [(title, Model(name, step)) for name, title in titles.items() for step in dataset.watched]
        rows = self._rows(models, middle)
        axes = [(column, task) for task in self._tasks for column in self._across]
        shown_in = dict.fromkeys(each for arm in arms.values() for each in arm.shown_in)
        caption = (f"Each point is one model at one training step{averaged(dataset)}.", _paired(dataset, middle))
        chart = charts.scatter(rows, axes, style=_style(rows))
        return self._figure("algorithms", "algorithms and architectures", chart, tuple(shown_in), *caption)

    def expanded(self) -> Figure | None:
        """Return sizes after their expansion into the largest."""
        dataset = self.dataset
        if not dataset.when_expanded:
            return None
        shown = [self._across[0], *map(column_of, dataset.when_expanded), *self._tasks]
        rows = self._by_size(_expanded(dataset), shown)
        caption = (
            f"Each point is one size{averaged(dataset)}. {_smallest(dataset)} Traces are those of the model expanded "
            f"into {dataset.largest}, by the paper's expansion, by the exact one, and the minimal trace, which does "
            "not depend on the choice. Accuracies are those of the model itself: wider models give the probe more "
            "features, so accuracies of different sizes are not comparable."
        )
        chart = charts.sizes(rows, shown, style=_one_marker(rows))
        return self._figure("expanded", "sizes expanded into the largest", chart, dataset.shown.expanded, caption)

    def _loss(self, what: str, saturated: float | None, *, where: str = "") -> str:
        """Return what a caption says of the loss: the entropy, and from which size or step on it is saturated."""
        if not self._knows_kl:
            return "The entropy of the text is not known, so the axis is the loss, and nobody knows where it saturates."
        entropy = mean([(one, self.data.at(one, self.dataset.main)["entropy"]) for one in self.data.replicates])
        if saturated is None:
            mark = (
                f"There is no mark of saturation:{where} the KL falls by {SATURATED:.0%} or more up to the last {what}."
            )
        else:
            first = f"{',' * bool(where)}{where} the first {what} after which"
            mark = f"The dashed line marks{first} the KL falls by less than {SATURATED:.0%}."
        return f"The loss is the KL plus the entropy, {number(entropy)} nats per token. {mark}"


def _expanded(dataset: Dataset) -> dict[str, list[Model]]:
    if not dataset.expands_cooled:
        return {f"{dataset.last:,} steps": [Model(size, dataset.last) for size in dataset.expanded]}
    lengths = {length: length or dataset.cooldown_steps for length in dataset.cooldown_lengths}
    return {
        f"Cooldown of {steps:,} steps": [
            Model(cooldown_run(size, dataset.start, length), steps) for size in dataset.sizes
        ]
        for length, steps in lengths.items()
    }


def _saturated(rows: pl.DataFrame, axis: str) -> float | None:
    """Return the first place on an axis after which the KL falls by less than `SATURATED`; None if only the last is."""
    if "kl" not in rows.columns:
        return None
    places, values = rows.sort(axis).select(axis, "kl").to_dict(as_series=False).values()
    saturated = (place for i, place in enumerate(places[:-1]) if min(values[i:]) > (1 - SATURATED) * values[i])
    return next(saturated, None)


def _paired(dataset: Dataset, middle: Model) -> str:
    """Return what the bars of a figure are."""
    return (
        f"Bars are those of the difference from {middle.arm} at step {middle.step:,}, {paired_by(dataset)}, so this "
        "one has none."
    )


def _smallest(dataset: Dataset) -> str:
    """Return what the bars of a figure of sizes are."""
    return (
        f"Bars are those of the difference from the smallest size of the same color, {paired_by(dataset)}, so this one "
        "has none."
    )


def averaged(dataset: Dataset) -> str:
    """Return what a point is the mean over, to go on a sentence; nothing for one model."""
    over = [
        what for what, several in (("languages", len(dataset.languages) > 1), ("seeds", dataset.seeds > 1)) if several
    ]
    return f", averaged over {' and '.join(over)}" if over else ""


def _rows(
    data: DatasetResults, models: Sequence[tuple[str, Model]], shown: Sequence[Column], middle: Model
) -> pl.DataFrame:
    """Return models, each with its group, as a chart takes them: means, with the errors of differences from `middle`.

    Not the errors of the means: languages differ more than models do, and would hide how models differ on them.
    """
    first, rows = data.replicates[0], []
    for group, model in models:
        run = first.run(model.arm)  # all replicates have the same sizes and arms
        row = {
            "run": model.arm,
            "group": group,
            "size": data.results.experiments[run].size,
            "parameters": data.results.run(run).result()["num_parameters"],
            "step": model.step,
        }
        for column in shown:
            more = band.paired_difference(data, model, middle, column.name)
            row |= {
                column.name: band.average(data, model, column.name).value,
                column.stderr_column: more.stderr / 100 if column.percent else more.stderr,
                column.freedom_column: more.freedom,
            }
        rows.append(row)
    return pl.DataFrame(rows)
