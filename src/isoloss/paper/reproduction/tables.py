"""The tables of the study: the paper's two, sizes and steps, and measures of flatness by what they predict."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from isoloss.errors import IsolossError
from isoloss.paper.design import Unit
from isoloss.paper.reproduction.compare import DatasetResults, by_dataset, interpolated_control, mean
from isoloss.paper.reproduction.design import BASELINES, Dataset, cooldown_run
from isoloss.paper.reproduction.scales import CORPUS
from isoloss.statistics.comparison import times
from isoloss.statistics.correlation import Kind, correlation, granulated_kendall
from isoloss.statistics.estimate import Estimate
from isoloss.studies.results import Checkpoint, CheckpointEstimate, Pair, Results, cka, difference
from isoloss.studies.summary import SummaryTable

MINUS = " minus control"  # after a measure, its difference from the control's
Row = tuple[tuple[str | int, ...], Mapping[str, Estimate]]

# --- what the paper reports of PCFG, at its own scale: text as printed, so that numbers keep their digits ----------

ENTROPY = "3.196"  # nats per predicted token, of the true conditionals
LOSSES = ("3.204", "3.208")  # of all models of figure 1, lowest and highest, nats per predicted token
PARAMETERS = "235M"  # of the model in tables 1 and 2
# tables 1 and 2: the value of each model, ± its standard deviation over seeds, by measure
BY_ALGORITHM: Mapping[str, Mapping[str, str]] = {
    "loss (nats)": {"AdamW": "3.204", "adversary": "3.206", "look-up table": "3.196"},
    "task A (%)": {"AdamW": "89.9 ± 0.3", "adversary": "83.1 ± 0.6", "look-up table": "71.2"},
    "task B (%)": {"AdamW": "49.2 ± 0.8", "adversary": "42.3 ± 1.5", "look-up table": "39.7"},
    "task C (%)": {"AdamW": "55.7 ± 0.6", "adversary": "50.2 ± 1.0"},
    "trace": {"AdamW": "8.01 ± 0.73", "adversary": "19.34 ± 0.92"},
}
ROWS = {"table 1": ("loss (nats)", "task A (%)", "task B (%)"), "table 2": ("task C (%)", "trace")}
# figure 5: the smallest model above 9M parameters and the largest, at about one loss
BY_SIZE: Mapping[str, tuple[str, str]] = {"trace": ("19.8", "12.6"), "probe accuracy (%)": ("40.4", "50.5")}


def by_algorithm(*measured: str) -> str:
    """Return these rows of the paper's tables 1 and 2 in words.

    Example:
        >>> from isoloss.paper.reproduction.tables import by_algorithm
        >>> by_algorithm("task C (%)", "trace")
        'task C (%): AdamW 55.7 ± 0.6, adversary 50.2 ± 1.0; trace: AdamW 8.01 ± 0.73, adversary 19.34 ± 0.92'
    """
    rows = ((name, ", ".join(f"{model} {value}" for model, value in BY_ALGORITHM[name].items())) for name in measured)
    return "; ".join(f"{name}: {values}" for name, values in rows)


def corresponds(*shown_in: str) -> str:
    """Return, as the beginning of a caption, which of the paper's figures and tables it is about; of none, nothing."""
    return f"Corresponds to the paper's {', '.join(shown_in)}. " if shown_in else ""


# --- the tables ------------------------------------------------------------------------------------------------------


def tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the tables of every dataset that has results."""
    return tuple(table for data in by_dataset(results) for table in _of_dataset(data) if table.rows)


def _of_dataset(data: DatasetResults) -> Iterator[SummaryTable]:
    dataset = data.dataset
    if data.models:
        yield _same_loss(data)
    yield _algorithms(data)
    yield _flatness(data)
    yield _tasks(data)
    yield _sizes(data)
    if dataset.cooldowns:
        yield _expansions(data)
        yield _interpolation(data)
    if dataset.arm_measures:
        yield from (_ranking(data, kind) for kind in ("pearson", "spearman", "kendall"))
        yield _granulated(data)
        yield _features(data)


def _table(
    data: DatasetResults, name: str, title: str, labels: tuple[str, ...], rows: Sequence[Row], *caption: str
) -> SummaryTable:
    dataset = data.dataset
    return SummaryTable(
        f"{dataset.name}_{name}", f"{dataset.title}: {title}", labels, rows, " ".join(filter(None, caption))
    )


def paired_by(dataset: Dataset) -> str:
    """Return in words what two models that are compared have in common."""
    several = {"language": len(dataset.languages) > 1, "seed": dataset.seeds > 1}
    common = " and ".join(what for what, are in several.items() if are)
    return f"paired by {common}" if common else "of one run each"


def _over(dataset: Dataset) -> str:
    if len(dataset.units) == 1:
        return "One model each; errors are those of the measurement."
    return f"Means ± standard errors over {'languages' if len(dataset.languages) > 1 else 'seeds'}."


def _after(dataset: Dataset) -> str:
    if not dataset.cooldowns:
        return ""
    after = f"After the cooldown of {dataset.cooldowns[0]:,} steps."
    return f"{after} Rows differ in KL; the claims compare models at the same KL."


# --- the paper's tables ----------------------------------------------------------------------------------------------


def _beside_control(data: DatasetResults, keys: Sequence[str]) -> list[Row]:
    """Return the main model, the control first, and every arm: means, and differences from the control."""
    dataset = data.dataset
    adamw, control = f"AdamW ({dataset.main})", data.ends(dataset.control)
    if dataset.cooldowns:
        # by run, so that where arms branch off at the last step there is one entry
        after = {dataset.control: dataset.start, cooldown_run(dataset.main, dataset.last): dataset.last}
        titles = {run: f"{adamw}, {steps:,} steps" for run, steps in after.items()}
    else:
        titles = {dataset.main: adamw}
    for name, arm in dataset.arms.items():
        if arm.stages or not dataset.cooldowns:
            titles[name] = arm.title
        else:
            titles[cooldown_run(name, dataset.start)] = f"{arm.title}, {dataset.start:,} steps"
    return [((title,), _cells(data, data.ends(run), control, keys)) for run, title in titles.items()]


def _cells(
    data: DatasetResults, models: Sequence[Checkpoint], control: Sequence[Checkpoint], keys: Sequence[str]
) -> dict[str, Estimate]:
    cells = {}
    for key in keys:
        cells[key] = data.mean(models, key)
        cells[f"{key}{MINUS}"] = data.difference(models, control, key)
    return cells


def _beside_table(dataset: Dataset, table: str) -> str:
    """Return which table of the paper this is beside, and its numbers where the study quotes them."""
    caption = (corresponds(table) if table in dataset.shown.main else "") + _over(dataset)
    caption += f" Differences from the control, {dataset.control} in the first row, are {paired_by(dataset)}."
    if dataset.name == "pcfg":
        caption += f" In the paper ({PARAMETERS} parameters; ± standard deviation): {by_algorithm(*ROWS[table])}."
    return caption


def _algorithms(data: DatasetResults) -> SummaryTable:
    """Return the paper's Table 1: transfer by training algorithm, with the look-up table."""
    dataset, loss, tasks = data.dataset, data.loss, list(data.dataset.tasks.values())
    rows = _beside_control(data, [loss, *tasks])
    if dataset.shown.baselines:
        control = rows[0][1][loss]  # the look-up table's KL is 0
        for kind in ("raw-lookup", "standardized-lookup", "log-lookup"):
            tables = [data.look_up(unit, kind) for unit in data.units]
            cells = _cells(data, tables, data.ends(dataset.control), tasks)
            rows.append(((BASELINES[kind],), {loss: times(control, 0), f"{loss}{MINUS}": times(control, -1), **cells}))
    caption = _beside_table(dataset, "table 1")
    return _table(data, "algorithms", "transfer by algorithm", ("model",), rows, _after(dataset), caption)


def _flatness(data: DatasetResults) -> SummaryTable:
    """Return the paper's Table 2: transfer and flatness by training algorithm."""
    dataset = data.dataset
    gap = [key for key in dataset.measures if key == "generalization-gap"]
    rows = _beside_control(data, [data.loss, *gap, *dataset.traces, *dataset.few_shot])
    caption = _beside_table(dataset, "table 2")
    if gap:
        caption += (
            " The gap is the loss on held-out documents minus the loss on training documents. In the paper (section 4) "
            "it rises to 0.13 nats without dropout and weight decay."
        )
        without = data.mean(data.ends("unregularized"), gap[0]).value
        if without > 0.13 and dataset.languages == (CORPUS,):
            caption += (
                " It is larger here: a text of two million characters has few documents, and the held-out ones are "
                "about other things."
            )
    return _table(data, "flatness", "flatness by algorithm", ("model",), rows, _after(dataset), caption)


def _tasks(data: DatasetResults) -> SummaryTable:
    """Return how hard the tasks are: accuracies of classifiers that need no model, beside the control's."""
    dataset, controls = data.dataset, data.ends(data.dataset.control)
    rows: list[Row] = []
    classes = []
    for name, key in dataset.tasks.items():
        models = [each[key] for each in controls]
        counts = {each.details.get("num_classes") for each in models}
        classes += [f"{number} in task {name}" for number in counts if number]
        # the Bayes rate of a task on text is unknown
        rates = {
            title: mean(data.units, [_exact_rate(each, rate) for each in models])
            for title, rate in (("majority", "majority_rate"), ("Bayes", "bayes_accuracy"))
            if all(rate in each.details for each in models)
        }
        tables = {
            title: data.mean([data.look_up(unit, kind) for unit in data.units], key)
            for kind, title in (BASELINES if dataset.shown.baselines else {}).items()
        }
        # what the paper calls it; a task that stands in for another says so
        task = key.rpartition("-")[2]
        is_own = dataset.name == "pcfg" or task == name.lower().replace("-", "")
        label = name if is_own else f"in place of {name}"
        rows.append(((label, key), {**rates, **tables, "control": data.mean(controls, key)}))
    shown = rows[0][1]
    how = [
        "of the most common class",
        *(["of the Bayes-optimal classifier, which knows the language"] if "Bayes" in shown else []),
        *(["of the probe on features that need no model"] if dataset.shown.baselines else []),
        f"of the control, {dataset.control}",
    ]
    end = "; in the paper 50 in each." if dataset.name == "pcfg" else "."
    return _table(
        *(data, "tasks", "tasks", ("task", "measure"), rows),
        *(f"Accuracy {', '.join(how[:-1])} and {how[-1]}.", _over(dataset)),
        f"Classes: {', '.join(classes)}{end}" if classes else "",
    )


def _exact_rate(one: CheckpointEstimate, rate: str) -> Estimate:
    """Return a rate that a measurement has among its details as an estimate."""
    about: Any = {"unit": one.unit, "num_predictions": one.num_predictions, "method": "exact"}
    return Estimate(value=one.details[rate], stderr=0.0, samples=0, **about)


def _sizes(data: DatasetResults) -> SummaryTable:
    dataset, shown = data.dataset, data.dataset.shown
    keys = dict.fromkeys((data.loss, *(key for key in dataset.measures if key != "loss"), *dataset.size_measures))
    rows: list[Row] = []
    for size in dataset.sizes:
        for step in dataset.steps_before_cooldown(size) or dataset.watched:
            models = data.ends(cooldown_run(size, step)) if dataset.cooldowns else data.ends(size, step)
            # what is measured only at the end, or only of some sizes, is left out of the other rows
            rows.append(((size, step), {key: data.mean(models, key) for key in keys if key in models[0]}))
    caption = corresponds(*dict.fromkeys((*shown.sizes, *shown.longer, *shown.expanded))) + _over(dataset)
    return _table(data, "sizes", "sizes and steps", ("size", "steps"), rows, _after(dataset), caption)


# --- models at the same loss -----------------------------------------------------------------------------------------


def _expansions(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    rows: list[Row] = []
    for smaller, larger in itertools.pairwise(dataset.sizes):
        pairs = [(unit, pair) for unit in data.units if (pair := data.size_pair(unit, smaller, larger))]
        if differences := _differences(pairs, dataset.when_expanded):
            rows.append(((smaller, larger), differences))
    return _table(
        *(data, "expansions", "larger models minus smaller ones, by expansion", ("smaller", "larger"), rows),
        f"Larger minus smaller at the same loss, both inside {dataset.largest}: by the paper's expansion, by the exact "
        "one, and by the minimal trace, which does not depend on the choice. No claim is about the exact expansion.",
        _over(dataset),
    )


def _interpolation(data: DatasetResults) -> SummaryTable:
    dataset, lengths = data.dataset, data.dataset.cooldown_lengths
    keys = dict.fromkeys((*dataset.tasks.values(), *dataset.traces, *dataset.size_measures, *dataset.few_shot))
    rows: list[Row] = []
    for size in dataset.sizes:
        paths = [(unit, data.path(unit, size)) for unit in data.units]
        # the first and the last have no two neighbors
        for place in range(1, len(lengths) - 1):
            pairs = [
                (unit, pair)
                for unit, path in paths
                if (pair := interpolated_control([path[place - 1], path[place + 1]], path[place]))
            ]
            if missed := _differences(pairs, keys):
                rows.append(((size, lengths[place] or dataset.cooldowns[0]), missed))
    return _table(
        *(data, "interpolation", "error of the interpolation", ("size", "cooldown"), rows),
        "Leave-one-out: each cooldown minus the value interpolated at its KL between the next shorter and the next "
        "longer cooldown. The comparisons interpolate between closer neighbors, so their error should be smaller.",
        _over(dataset),
    )


def _differences(pairs: Sequence[tuple[Unit, Pair]], keys: Iterable[str]) -> dict[str, Estimate]:
    """Return the mean second minus first over pairs, of each measure that they have; none for a single language."""
    if len({unit.cluster for unit, _ in pairs}) < 2:
        return {}
    units = [unit for unit, _ in pairs]
    # not all models have all measures; a measure that one pair lacks, all pairs lack
    has = pairs[0][1][0].keys() & pairs[0][1][1].keys()
    return {key: mean(units, [difference(b[key], a[key]) for _, (a, b) in pairs]) for key in keys if key in has}


# --- which measure of flatness predicts transfer ---------------------------------------------------------------------


def compared(dataset: Dataset) -> list[str]:
    """Return the runs of one language and seed whose flatness and transfer are correlated: the main model, its arms."""
    main, start, last = dataset.main, dataset.start, dataset.last
    if not dataset.cooldowns:
        return [main, *dataset.arms]
    return [
        *(cooldown_run(main, step) for step in dataset.watched),
        *(cooldown_run(main, start, length) for length in dataset.cooldowns[1:]),
        # an arm that continues the main model ends in its own cooldown, one from scratch has it in another run
        *(name if arm.stages else cooldown_run(name, last) for name, arm in dataset.arms.items()),
    ]


def _same_loss(data: DatasetResults) -> SummaryTable:
    dataset = data.dataset
    rows: list[Row] = []
    undefined, counts = [], []
    kinds: tuple[Kind, ...] = ("spearman", "pearson")
    for sizes, size in (("all sizes", None), (dataset.main, dataset.main)):
        models = data.near(size)
        numbers = [len(checkpoints) for checkpoints in models]
        counts.append(f"{min(numbers)} to {max(numbers)} of {sizes}")
        for kind, name in itertools.product(kinds, ("kl", *dataset.traces)):
            if cells := _correlations(data, models, name, kind):
                rows.append(((sizes, kind.capitalize(), name), cells))
            else:
                undefined.append(f"{kind.capitalize()}'s with {name} of {sizes}")
    return _table(
        *(
            data,
            "same_loss",
            "correlations among models at about the same loss",
            ("models", "correlation", "with"),
            rows,
        ),
        "Correlation of the accuracy of the probe with the KL and with flatness, within languages and seeds, over the "
        f"models whose KL is within {dataset.band:.0%} of the control's, {dataset.control}: "
        f"{' and '.join(counts)} for each language and seed. Errors by the jackknife over languages; the KL and the "
        "traces enter as logarithms. Traces of different sizes are not comparable, so for flatness read only the "
        f"rows of {dataset.main}, which include its arms of the control's architecture: a negative correlation there "
        "means that flatter models transfer better. These correlations do not control for the KL; the tables of what "
        "flatness predicts do.",
        f"Not defined, and left out: {', '.join(undefined)}." if undefined else "",
    )


def _ranking(data: DatasetResults, kind: Kind) -> SummaryTable:
    models = [[data.at(unit, run) for run in compared(data.dataset)] for unit in data.units]
    rows: list[Row] = []
    for name in data.dataset.ranked:
        if cells := _correlations(data, models, name, kind, given=data.loss):
            rows.append(((name,), cells))
    rows.sort(key=lambda row: sum(each.value for each in row[1].values()))
    title = f"what flatness predicts at the same loss ({kind.capitalize()})"
    return _table(
        *(data, f"ranking_{kind}", title, ("measure",), rows),
        f"Partial {kind.capitalize()} correlation of each measure with the accuracy of the probe, given the KL, within "
        "languages and seeds; errors by the jackknife over languages. The measures and the KL enter as logarithms. "
        "If flatter models transferred better at the same loss, it would be negative. Models: the main size after "
        "every number of steps and cooldown, and all its arms. Rows are ordered by these same data, without a "
        "correction for the number of measures. Measures with an undefined correlation are left out.",
        "Kendall's partial coefficient need not be 0 where the KL explains all." if kind == "kendall" else "",
    )


def _correlations(
    data: DatasetResults, models: Sequence[Sequence[Checkpoint]], name: str, kind: Kind, given: str | None = None
) -> dict[str, Estimate]:
    """Return the correlation of a measure with each probe within units, or nothing where one is not defined.

    Args:
        data: The results on the dataset.
        models: The models of each unit; a unit with a single model is left out.
        name: The measure, which enters as its logarithm.
        kind: The kind of correlation.
        given: The loss, for a partial correlation given its logarithm; None: no partial correlation.
    """
    groups = [(unit, some) for unit, some in zip(data.units, models, strict=True) if len(some) > 1]
    clusters = [unit.cluster for unit, some in groups for _ in some]
    # languages and seeds differ more than models do, and would decide the correlation
    within = [unit.prefix for unit, some in groups for _ in some]

    def logarithms(key: str) -> list[float]:
        return [each for _, some in groups for each in _logarithms([one[key].value for one in some])]

    cells = {}
    for probe in data.dataset.tasks.values():
        accuracies = [one[probe].value for _, some in groups for one in some]
        try:
            # the fewest resamples that there may be, as nothing here reads the bootstrap
            about: Any = {"kind": kind, "within": within, "resamples": 100}
            about["given"] = {given: logarithms(given)} if given else {}
            cells[probe] = correlation(logarithms(name), accuracies, clusters, **about).estimate()
        except IsolossError:
            # fewer than three languages, or a measure that is the same for all models
            return {}
    return cells


def _logarithms(values: Sequence[float]) -> list[float]:
    """Return logarithms of values; a value of 0 or below, by noise, counts as 1 % of the smallest positive one."""
    least = min((value for value in values if value > 0), default=1.0) / 100
    return [math.log(max(value, least)) for value in values]


def _granulated(data: DatasetResults) -> SummaryTable:
    dataset, probes = data.dataset, data.dataset.tasks.values()
    models = [(unit, run) for unit in data.units for run in compared(dataset)]
    ends = [data.at(unit, run) for unit, run in models]
    hyperparameters: dict[str, list[Any]] = {"model": [run for _, run in models]}
    if dataset.seeds > 1:
        hyperparameters["seed"] = [unit.seed % 100 for unit, _ in models]
    languages = [unit.cluster for unit, _ in models]
    # pairs agree in all others, so with the language among them no two languages are compared; its own tau is not shown
    within = {**hyperparameters, "language": languages}
    rows: list[Row] = []
    for name in dataset.ranked:
        cells: dict[str, Estimate] = {}
        for probe in probes:
            # too few languages, or an error that is not known
            with contextlib.suppress(IsolossError):
                flatness, accuracy = ([end[key].value for end in ends] for key in (name, probe))
                by_hyperparameter = granulated_kendall(flatness, accuracy, within, languages).by_hyperparameter
                cells |= {f"{probe}, {each}": by_hyperparameter[each] for each in hyperparameters}
        if len(cells) == len(probes) * len(hyperparameters):
            rows.append(((name,), cells))
    rows.sort(key=lambda row: sum(each.value for each in row[1].values()))
    return _table(
        *(data, "granulated", "granulated Kendall coefficients", ("measure",), rows),
        "Kendall's tau of each measure with the accuracy of the probe, over pairs that differ in one thing only "
        "(Jiang et al., 2020): two models of one seed, or two seeds of one model. The losses of "
        "these models differ, and nothing adjusts for that.",
        _over(dataset),
    )


def _features(data: DatasetResults) -> SummaryTable:
    """Return how alike features are: of the control and each of its variants, and of two seeds of the control."""
    dataset, control = data.dataset, data.dataset.control

    def features(unit: Unit, run: str) -> CheckpointEstimate:
        return data.at(unit, run)["effective-dimension"]

    pairs = {
        run: [(unit, cka(features(unit, control), features(unit, run))) for unit in data.units]
        for run in compared(dataset)
        if run != control
    }
    pairs[f"{control}, another seed"] = [
        (unit, cka(features(unit, control), features(other, control)))
        for unit, other in itertools.pairwise(data.units)
        if unit.language == other.language
    ]
    rows: list[Row] = [((run,), {"cka": mean(*zip(*some, strict=True))}) for run, some in pairs.items() if some]
    return _table(
        *(data, "features", f"similarity of features to those of {control}", ("model",), rows),
        f"Linear CKA (Kornblith et al., 2019; unbiased) of the last hidden states of {control} and of each other model "
        "on the same sentences: 1 where the features are the same up to rotation and scale.",
        _over(dataset),
    )
