"""The tables of the study: the paper's two, sizes and steps, and measures of flatness by what they predict."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isoloss.errors import IsolossError
from isoloss.paper.reproduction import band, published
from isoloss.paper.reproduction.compare import DatasetResults, by_dataset, interpolated_control, look_up, mean
from isoloss.paper.reproduction.spec import BASELINES, FLATNESS, Dataset, Replicate, cooldown_run, paired_by
from isoloss.statistics.comparison import times
from isoloss.statistics.correlation import Kind, correlation, granulated_kendall
from isoloss.statistics.estimate import Estimate
from isoloss.studies.results import Checkpoint, CheckpointEstimate, Pair, Results, cka, difference
from isoloss.studies.summary import SummaryTable

MINUS = " minus control"  # after a measure, its difference from the control's
LOOKUPS = tuple(kind for kind in BASELINES if kind.endswith("lookup"))
Row = tuple[tuple[str | int, ...], Mapping[str, Estimate]]


def tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the tables of every dataset that has results."""
    made: list[SummaryTable] = []
    for data in by_dataset(results):
        if band.models(data):
            made.append(_same_loss(data))
        made += [_algorithms(data), _flatness(data), _tasks(data), _sizes(data)]
        if data.dataset.cooldown_steps:
            made += [_expansions(data), _interpolation(data)]
        if data.dataset.arm_measures:
            made += [_ranking(data, kind) for kind in ("pearson", "spearman", "kendall")]
            made += [_granulated(data), _features(data)]
    return tuple(table for table in made if table.rows)


def _over(dataset: Dataset) -> str:
    if len(dataset.replicates) == 1:
        return "One model each; errors are those of the measurement."
    return f"Means ± standard errors over {'languages' if len(dataset.languages) > 1 else 'seeds'}."


def _row(
    data: DatasetResults, labels: tuple[str | int, ...], run: str, keys: Sequence[str], step: int | None = None
) -> Row:
    return labels, {key: mean([(one, data.at(one, run, step)[key]) for one in data.replicates]) for key in keys}


def _arms(dataset: Dataset) -> dict[str, str]:
    adamw = f"AdamW ({dataset.main})"
    if not dataset.cooldown_steps:
        return {dataset.main: adamw, **{name: arm.title for name, arm in dataset.arms.items()}}
    # by run, so that where arms branch off at the last step there is one entry
    after = {dataset.control: dataset.start, cooldown_run(dataset.main, dataset.last): dataset.last}
    main = {run: f"{adamw}, {steps:,} steps" for run, steps in after.items()}
    arms = {
        name if arm.stages else cooldown_run(name, dataset.start): arm.title
        if arm.stages
        else f"{arm.title}, {dataset.start:,} steps"
        for name, arm in dataset.arms.items()
    }
    return main | arms


def _beside_control(data: DatasetResults, title: str, models: Sequence[Checkpoint], keys: Sequence[str]) -> Row:
    """Return a model, of each replicate, by its means and by its differences from the control, paired by replicate."""
    cells: dict[str, Estimate] = {}
    for key in keys:
        controls = [data.at(one, data.dataset.control)[key] for one in data.replicates]
        pairs = [(one, own[key], control) for one, own, control in zip(data.replicates, models, controls, strict=True)]
        cells[key] = mean([(one, own) for one, own, _ in pairs])
        cells[f"{key}{MINUS}"] = mean([(one, difference(own, control)) for one, own, control in pairs])
    return (title,), cells


def _arms_beside_control(data: DatasetResults, keys: Sequence[str]) -> list[Row]:
    """Return the main model, the control first, and every arm."""
    arms = _arms(data.dataset).items()
    return [_beside_control(data, title, [data.at(one, run) for one in data.replicates], keys) for run, title in arms]


def _algorithms(data: DatasetResults) -> SummaryTable:
    """Return the paper's Table 1: transfer by training algorithm, with the look-up table."""
    dataset, loss, tasks = data.dataset, _loss(data), list(data.dataset.tasks.values())
    rows = _arms_beside_control(data, [loss, *tasks])
    if dataset.shown.baselines:
        control = rows[0][1][loss]  # the look-up table's KL is 0
        for kind in LOOKUPS:
            tables = [look_up(data, one, kind) for one in data.replicates]
            labels, cells = _beside_control(data, BASELINES[kind], tables, tasks)
            rows.append((labels, {loss: times(control, 0), f"{loss}{MINUS}": times(control, -1), **cells}))
    caption = _after(dataset) + _beside_table(dataset, "table 1")
    return SummaryTable(
        f"{dataset.name}_algorithms", f"{dataset.title}: transfer by algorithm", ("model",), rows, caption
    )


def _tasks(data: DatasetResults) -> SummaryTable:
    """Return what the tasks take: the rates of classifiers that need no model, beside the control's."""
    dataset = data.dataset
    rows: list[Row] = []
    classes = []
    for name, key in dataset.tasks.items():
        models = [(one, data.at(one, dataset.control)[key]) for one in data.replicates]
        counts = {each.details.get("num_classes") for _, each in models}
        classes += [f"{number} of task {name}" for number in counts if number]
        # nobody knows the Bayes rate of a task on text
        rates = {
            title: mean([(one, _exact_rate(each, rate)) for one, each in models])
            for title, rate in (("majority", "majority_rate"), ("Bayes", "bayes_accuracy"))
            if all(rate in each.details for _, each in models)
        }
        tables = {
            title: mean([(one, look_up(data, one, kind)[key]) for one in data.replicates])
            for kind, title in (BASELINES if dataset.shown.baselines else {}).items()
        }
        rows.append(((_papers_name(dataset, name), key), {**rates, **tables, "control": mean(models)}))
    shown = rows[0][1]
    how = [
        "by always the most common class",
        *(["by the Bayes-optimal classifier, which knows the language"] if "Bayes" in shown else []),
        *(["by the same probe on features that need no model"] if dataset.shown.baselines else []),
        f"on the control, {dataset.control}",
    ]
    caption = f"Accuracy {', '.join(how[:-1])} and {how[-1]}. {_over(dataset)}"
    if classes:
        caption += f" Classes: {', '.join(classes)}"
        caption += "; in the paper 50 of each." if dataset.name == "pcfg" else "."
    return SummaryTable(f"{dataset.name}_tasks", f"{dataset.title}: tasks", ("task", "measure"), rows, caption)


def _papers_name(dataset: Dataset, name: str) -> str:
    """Return what the paper calls a task; one that stands in for it says so."""
    task = dataset.tasks[name].rpartition("-")[2]
    is_own = dataset.name == "pcfg" or task == name.lower().replace("-", "")
    return name if is_own else f"in place of {name}"


def _exact_rate(one: CheckpointEstimate, rate: str) -> Estimate:
    """Return a rate that a measurement has among its details as an estimate."""
    return Estimate(
        value=one.details[rate],
        stderr=0.0,
        samples=0,
        unit=one.unit,
        num_predictions=one.num_predictions,
        method="exact",
    )


def _beside_table(dataset: Dataset, table: str) -> str:
    """Return which table of the paper this is beside, and its numbers where the study quotes them."""
    caption = (published.corresponds(table) if table in dataset.shown.main else "") + _over(dataset)
    caption += f" Differences from the control, {dataset.control} in the first row, are {paired_by(dataset)}."
    if dataset.name == "pcfg":
        caption += (
            f" In the paper ({published.PARAMETERS} parameters; ± standard deviation): "
            f"{published.by_algorithm(*published.TABLES[table])}."
        )
    return caption


def _flatness(data: DatasetResults) -> SummaryTable:
    """Return the paper's Table 2: transfer and flatness by training algorithm."""
    dataset = data.dataset
    traces = [key for key in ("trace", "minimal-trace") if key in dataset.measures]
    rows = _arms_beside_control(data, [_loss(data), *traces, *dataset.few_shot])
    caption = _after(dataset) + _beside_table(dataset, "table 2")
    return SummaryTable(
        f"{dataset.name}_flatness", f"{dataset.title}: flatness by algorithm", ("model",), rows, caption
    )


def _sizes(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    keys = [
        *dict.fromkeys((_loss(data), *(key for key in dataset.measures if key != "loss"))),
        *dataset.size_measures,
    ]
    rows: list[Row] = []
    for size in dataset.sizes:
        for step in dataset.steps_before_cooldown(size) or dataset.watched:
            run, at_step = (cooldown_run(size, step), None) if dataset.cooldown_steps else (size, step)
            # what is measured at the end alone, or of some sizes, is no cell of the other rows
            measured = data.at(data.replicates[0], run, at_step)
            rows.append(_row(data, (size, step), run, [key for key in keys if key in measured], at_step))
    shown = dict.fromkeys((*dataset.shown.sizes, *dataset.shown.longer, *dataset.shown.expanded))
    caption = _after(dataset) + published.corresponds(*shown) + _over(dataset)
    return SummaryTable(f"{dataset.name}_sizes", f"{dataset.title}: sizes and steps", ("size", "steps"), rows, caption)


def _expansions(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    rows: list[Row] = []
    for smaller, larger in itertools.pairwise(dataset.sizes):
        pairs = [(one, pair) for one in data.replicates if (pair := data.size_pair(one, (smaller, larger)))]
        if differences := _differences(pairs, dataset.when_expanded):
            rows.append(((smaller, larger), differences))
    caption = (
        f"Larger minus smaller at the same loss, both inside {dataset.largest}: by the paper's expansion, by the exact "
        "one, and by the minimal trace, which does not depend on the choice. No claim is about the exact expansion. "
        + _over(dataset)
    )
    title = f"{dataset.title}: larger models minus smaller ones, by expansion"
    return SummaryTable(f"{dataset.name}_expansions", title, ("smaller", "larger"), rows, caption)


def _interpolation(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    traces = [key for key in ("trace", "minimal-trace") if key in dataset.measures]
    keys = dict.fromkeys((*dataset.tasks.values(), *traces, *dataset.size_measures, *dataset.few_shot))
    rows: list[Row] = []
    lengths = dataset.cooldown_lengths
    for size in dataset.sizes:
        # the first and the last are between no two
        for place in range(1, len(lengths) - 1):
            pairs = []
            for one in data.replicates:
                cooldowns = data.by_cooldown(one, size)
                if pair := interpolated_control([cooldowns[place - 1], cooldowns[place + 1]], cooldowns[place]):
                    pairs.append((one, pair))
            if missed := _differences(pairs, keys):
                rows.append(((size, lengths[place] or dataset.cooldown_steps), missed))
    caption = (
        "By leaving one out: each cooldown minus the value interpolated, at its KL, from the next shorter and the next "
        "longer one. The comparisons interpolate between closer neighbors, so their error should be smaller. "
        + _over(dataset)
    )
    title = f"{dataset.title}: error of the interpolation"
    return SummaryTable(f"{dataset.name}_interpolation", title, ("size", "cooldown"), rows, caption)


def _differences(pairs: Sequence[tuple[Replicate, Pair]], keys: Iterable[str]) -> dict[str, Estimate]:
    """Return the mean second minus first over pairs, of each measure that they have; none for a single language."""
    if len({one.cluster for one, _ in pairs}) < 2:
        return {}
    # not all measures are of all models, and those that some pairs lack are lacked by all
    has = pairs[0][1][0].keys() & pairs[0][1][1].keys()
    return {key: mean([(one, difference(b[key], a[key])) for one, (a, b) in pairs]) for key in keys if key in has}


def _after(dataset: Dataset) -> str:
    if not dataset.cooldown_steps:
        return ""
    after = f"After the cooldown of {dataset.cooldown_steps:,} steps. "
    return after + "Rows differ in KL; the claims compare models at the same KL. "


def _loss(data: DatasetResults) -> str:
    first = data.at(data.replicates[0], data.dataset.main)
    return "kl" if "kl" in first else "loss"


# --- which measure of flatness predicts transfer ---------------------------------------------------------------------


def compared(dataset: Dataset) -> list[str]:
    """Return the runs of one replicate whose flatness and transfer are correlated: the main model and its arms."""
    if not dataset.cooldown_steps:
        return [dataset.main, *dataset.arms]
    main = dataset.main
    lengths = [cooldown_run(main, dataset.start, length) for length in dataset.other_cooldowns]
    return [
        *(cooldown_run(main, step) for step in dataset.watched),
        *lengths,
        # an arm that continues the main model ends in its own cooldown, one from scratch has it in another run
        *(name if arm.stages else cooldown_run(name, dataset.last) for name, arm in dataset.arms.items()),
    ]


def _same_loss(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    probes = list(dataset.tasks.values())
    measures = ["kl", *(key for key in ("trace", "minimal-trace") if key in dataset.measures)]
    rows: list[Row] = []
    undefined, counts = [], []
    kinds: tuple[Kind, ...] = ("spearman", "pearson")
    for sizes, size in (("all sizes", None), (dataset.main, dataset.main)):
        models = band.by_replicate(data, size)
        numbers = [len(checkpoints) for _, checkpoints in models]
        counts.append(f"{min(numbers)} to {max(numbers)} of {sizes}")
        for kind in kinds:
            for name in measures:
                by_probe = {probe: _correlation(models, name, probe, kind, None) for probe in probes}
                if all(by_probe.values()):
                    cells = {key: each for key, each in by_probe.items() if each}
                    rows.append(((sizes, kind.capitalize(), name), cells))
                else:
                    undefined.append(f"{kind.capitalize()}'s with {name} of {sizes}")
    caption = (
        "Correlation of the accuracy of the probe with the KL and with flatness, within languages and seeds, over the "
        f"models whose KL is within {dataset.band:.0%} of the control's, {dataset.control}: "
        f"{' and '.join(counts)} for each language and seed. Errors by the jackknife over languages; the KL and the "
        "traces are taken as logarithms. Traces of different sizes are not comparable, so for flatness read only the "
        f"rows of {dataset.main}, which include its arms of the control's architecture: a negative correlation there "
        "means that flatter models transfer better. These correlations do not control for the KL; the tables of what "
        "flatness predicts do." + (f" Not defined, and left out: {', '.join(undefined)}." if undefined else "")
    )
    title = f"{dataset.title}: correlations among models of about the same loss"
    return SummaryTable(f"{dataset.name}_same_loss", title, ("models", "correlation", "with"), rows, caption)


def _ranking(data: DatasetResults, kind: Kind) -> SummaryTable:
    dataset = data.dataset
    probes, loss = list(dataset.tasks.values()), _loss(data)
    models = [(one, [data.at(one, run) for run in compared(dataset)]) for one in data.replicates]
    rows: list[Row] = []
    for name in (key for key in FLATNESS if key in (*dataset.measures, *dataset.arm_measures)):
        by_probe = {probe: _correlation(models, name, probe, kind, loss) for probe in probes}
        if all(by_probe.values()):
            rows.append(((name,), {probe: each for probe, each in by_probe.items() if each}))
    rows.sort(key=lambda row: sum(each.value for each in row[1].values()))
    caption = (
        f"Partial {kind.capitalize()} correlation of each measure with the accuracy of the probe, given the KL, within "
        "languages and seeds; errors by the jackknife over languages. The measures and the KL are taken as logarithms. "
        "If flatter models transferred better at the same loss, it would be negative. Models: the main size after "
        "every number of steps and cooldown, and all its arms. The order is by these same data, without a correction "
        "for the number of measures; a measure whose correlation is undefined is left out."
        + (" Kendall's partial coefficient need not be 0 where the KL explains all." if kind == "kendall" else "")
    )
    return SummaryTable(
        f"{dataset.name}_ranking_{kind}",
        f"{dataset.title}: what flatness predicts at the same loss ({kind.capitalize()})",
        ("measure",),
        rows,
        caption,
    )


def _granulated(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    probes = list(dataset.tasks.values())
    models = [(one, run) for one in data.replicates for run in compared(dataset)]
    ends = [data.at(one, run) for one, run in models]
    hyperparameters: dict[str, list[Any]] = {"model": [run for _, run in models]}
    if dataset.seeds > 1:
        hyperparameters["seed"] = [one.index for one, _ in models]
    languages = [one.cluster for one, _ in models]
    # pairs agree in all others, so with the language among them no two languages are compared; its own tau is not shown
    within = {**hyperparameters, "language": languages}
    rows: list[Row] = []
    for name in (key for key in FLATNESS if key in (*dataset.measures, *dataset.arm_measures)):
        cells: dict[str, Estimate] = {}
        for probe in probes:
            # too few languages, or an error that is not known
            with contextlib.suppress(IsolossError):
                accuracy = [end[probe].value for end in ends]
                flatness = [end[name].value for end in ends]
                by_hyperparameter = granulated_kendall(flatness, accuracy, within, languages).by_hyperparameter
                cells |= {f"{probe}, {each}": by_hyperparameter[each] for each in hyperparameters}
        if len(cells) == len(probes) * len(hyperparameters):
            rows.append(((name,), cells))
    rows.sort(key=lambda row: sum(each.value for each in row[1].values()))
    caption = (
        "Kendall's tau of each measure with the accuracy of the probe, over pairs that differ in one thing alone and "
        "agree in all others (Jiang et al., 2020): two models of one seed, or two seeds of one model. The losses of "
        "these models differ, and nothing adjusts for that. " + _over(dataset)
    )
    title = f"{dataset.title}: granulated Kendall coefficients"
    return SummaryTable(f"{dataset.name}_granulated", title, ("measure",), rows, caption)


def _features(data: DatasetResults) -> SummaryTable:
    """Return how alike features are: of the control and each of its variants, and of two seeds of the control."""
    dataset, ones = data.dataset, data.replicates
    control = dataset.control

    def features(one: Replicate, run: str) -> CheckpointEstimate:
        return data.at(one, run)["effective-dimension"]

    pairs = {
        run: [(one, cka(features(one, control), features(one, run))) for one in ones]
        for run in compared(dataset)
        if run != control
    }
    pairs[f"{control}, another seed"] = [
        (one, cka(features(one, control), features(other, control)))
        for one, other in itertools.pairwise(ones)
        if one.language == other.language
    ]
    rows: list[Row] = [((run,), {"cka": mean(some)}) for run, some in pairs.items() if some]
    caption = (
        f"Linear CKA (Kornblith et al., 2019; unbiased) of the last hidden states of {control} and of each other model "
        "on the same sentences: 1 where the features are the same up to rotation and scale. " + _over(dataset)
    )
    title = f"{dataset.title}: similarity of features to those of {control}"
    return SummaryTable(f"{dataset.name}_features", title, ("model",), rows, caption)


def _logarithms(values: Sequence[float]) -> list[float]:
    """Return the logarithms of values, which noise may have taken to 0 or below: then of 1 % of the smallest other."""
    least = min((value for value in values if value > 0), default=1.0) / 100
    return [math.log(max(value, least)) for value in values]


def _correlation(
    models: Sequence[tuple[Replicate, Sequence[Checkpoint]]], name: str, probe: str, kind: Kind, given: str | None
) -> Estimate | None:
    """Return a correlation within replicates as an estimate, or None where it is not defined.

    Args:
        models: Those of each replicate; one by itself says nothing of its replicate, and is left out.
        name: The measure, which is taken as its logarithm.
        probe: The probe.
        kind: Of the correlation.
        given: The loss, for a partial correlation given its logarithm; None: not a partial one.
    """
    columns: dict[str, list[float]] = {name: [], probe: [], **({given: []} if given else {})}
    clusters: list[str] = []
    within: list[str] = []  # languages and seeds differ more than models do: it would be between languages
    for one, checkpoints in models:
        if len(checkpoints) < 2:
            continue
        for key, column in columns.items():
            values = [each[key].value for each in checkpoints]
            column += values if key == probe else _logarithms(values)
        clusters += [one.cluster] * len(checkpoints)
        within += [one.prefix] * len(checkpoints)
    try:
        covariates = {given: columns[given]} if given else {}
        # the fewest resamples that there may be, as nothing here reads the bootstrap
        some: Any = {"kind": kind, "given": covariates, "within": within, "resamples": 100}
        return correlation(columns[name], columns[probe], clusters, **some).estimate()
    except IsolossError:
        # fewer than three languages, or a measure that is the same for all models
        return None
