"""What the study compares: models at the same loss that differ in size, training time, algorithm or label noise."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from isoloss.paper.design import Unit
from isoloss.paper.reproduction.design import SGD_EXACT, SGD_SAMPLED, SHOWN, Dataset, Reproduction, cooldown_run
from isoloss.statistics.estimate import Estimate
from isoloss.studies import results as study_results
from isoloss.studies.claims import Contrast
from isoloss.studies.results import Checkpoint, CheckpointEstimate, Pair, Results, difference, loss_key

# languages that must have a pair (all, if there are fewer); at least half of the units must have one, too
MIN_LANGUAGES = 3


class Model(NamedTuple):
    """A checkpoint that every language and seed has."""

    arm: str  # the part of the run's name that says what it is
    step: int


@dataclass(frozen=True)
class DatasetResults:
    """The results on one dataset, by language and seed, and by arm: the part of a run's name that says what it is."""

    results: Results
    dataset: Dataset

    @functools.cached_property
    def units(self) -> list[Unit]:
        """The languages and seeds of the complete blocks."""
        return [one for one in self.dataset.units if one.run(self.dataset.main) in self.results.experiments]

    def at(self, unit: Unit, arm: str, step: int | None = None) -> Checkpoint:
        """Return what was measured of a run at a step, by default its last."""
        return self.results.at(unit.run(arm), step)

    def ends(self, arm: str, step: int | None = None) -> list[Checkpoint]:
        """Return the run's checkpoint at a step, by default its last, for each unit."""
        return [self.at(unit, arm, step) for unit in self.units]

    def end(self, unit: Unit, arm: str, step: int | None = None) -> Checkpoint:
        """Return the end of a size or arm: after the cooldown of a step, by default the last, where there is one."""
        after_cooldown = cooldown_run(arm, step or self.dataset.last)
        is_run = unit.run(after_cooldown) in self.results.experiments
        # an arm that continues the main model has its cooldown as the last stage of its own run; a run of that name
        # follows an earlier step of its own
        continues = arm in self.dataset.arms and self.dataset.arms[arm].stages
        return self.at(unit, after_cooldown if is_run and not continues else arm)

    def cooled(self, arm: str, step: int, length: int = 0) -> Model:
        """Return the end of a cooldown after a step; `length` as for `cooldown_run`."""
        return Model(cooldown_run(arm, step, length), length or self.dataset.cooldowns[0])

    def before(self, size: str) -> Model:
        """Return a size after a usual cooldown from where arms branch off; of the main size: the control."""
        dataset = self.dataset
        return self.cooled(size, dataset.start) if dataset.cooldowns else Model(size, dataset.last)

    def path_models(self, arm: str) -> list[Model]:
        """Return models at falling losses: after cooldowns of every length or, without cooldowns, along training."""
        lengths = self.dataset.cooldown_lengths
        if lengths:
            return [self.cooled(arm, self.dataset.start, length) for length in lengths]
        return [Model(arm, step) for step in self.dataset.watched]

    def path(self, unit: Unit, arm: str) -> list[Checkpoint]:
        """Return the checkpoints of `path_models`."""
        return [self.at(unit, *model) for model in self.path_models(arm)]

    def beside(self, size: str, model: Model) -> Contrast:
        """Contrast a size, interpolated at a model's loss, with the model, over the units that have both."""

        def pair(data: DatasetResults, unit: Unit) -> Pair | None:
            return interpolated_control(data.path(unit, size), data.at(unit, *model))

        return _contrast(self, Comparison("", (size, model.arm), pair, ""))

    def size_pair(self, unit: Unit, smaller: str, larger: str) -> Pair | None:
        """Return two sizes at the same loss; None where no two checkpoints bracket the loss."""
        return last_enclosed(self.path(unit, smaller), self.path(unit, larger))

    def look_up(self, unit: Unit, kind: str) -> Checkpoint:
        """Return the accuracies of probes on features of a kind that need no model, by the keys of the tasks."""
        tables, of = self.at(unit, self.dataset.main, 0), self.dataset
        return {key: tables[name] for key, name in zip(of.tasks.values(), of.of_tasks(kind), strict=True)}

    @functools.cached_property
    def loss(self) -> str:
        """The key of the loss: the KL to the truth, where it is known."""
        first = self.at(self.units[0], self.dataset.main)
        return loss_key([(first, first)])

    def mean(self, checkpoints: Sequence[Checkpoint], key: str) -> Estimate:
        """Return the mean of an estimate over the units' checkpoints."""
        return mean(self.units, [each[key] for each in checkpoints])

    def difference(self, seconds: Sequence[Checkpoint], firsts: Sequence[Checkpoint], key: str) -> Estimate:
        """Return the mean second minus first, paired by unit; of an accuracy in percentage points."""
        return mean(self.units, [difference(b[key], a[key]) for a, b in zip(firsts, seconds, strict=True)])

    # --- models at about the control's loss: `Dataset.band` is the rule ----------------------------------------------

    @functools.cached_property
    def models(self) -> list[Model]:
        """All models whose KL is known: every size, arm and cooldown at every measured step."""
        prefix = self.units[0].run("")  # all units have the same models
        return [
            Model(run.removeprefix(prefix), step)
            for (run, step), checkpoint in self.results.checkpoints.items()
            if run.startswith(prefix) and "kl" in checkpoint
        ]

    @property
    def control(self) -> Model:
        """The model around whose KL the band is."""
        return self.before(self.dataset.main)

    def _limits(self, kl: float) -> tuple[float, float]:
        return kl * (1 - self.dataset.band), kl * (1 + self.dataset.band)

    @functools.cached_property
    def band(self) -> tuple[float, float]:
        """The lowest and the highest mean KL of models at about the control's loss, in nats per predicted token."""
        return self._limits(self.mean(self.ends(*self.control), "kl").value)

    @functools.cached_property
    def in_band(self) -> list[Model]:
        """The models whose mean KL is in the band."""
        low, high = self.band
        return [model for model in self.models if low <= self.mean(self.ends(*model), "kl").value <= high]

    def near(self, size: str | None = None) -> list[list[Checkpoint]]:
        """Return the models of each unit whose KL is in the band around its own control's.

        Args:
            size: Models of this size and of the control's architecture only; None: all.
        """
        experiments, first = self.results.experiments, self.units[0]

        def kind(arm: str) -> tuple[str, str]:
            # pre-layer-norm models have the control's size, too, but their traces are not comparable with its trace
            run: Any = experiments[first.run(arm)]
            return run.size, run.config.model.architecture

        wanted = (size, kind(self.control.arm)[1])
        models = [model for model in self.models if size is None or kind(model.arm) == wanted]
        found = []
        for unit in self.units:
            low, high = self._limits(self.at(unit, *self.control)["kl"].value)
            found.append([one for model in models if low <= (one := self.at(unit, *model))["kl"].value <= high])
        return found

    def extremes(self, key: str) -> tuple[Model, Model]:
        """Return the models in the band with the lowest and the highest mean of an estimate."""
        means = {model: self.mean(self.ends(*model), key).value for model in self.in_band}
        ordered = sorted(means, key=lambda model: means[model])
        return ordered[0], ordered[-1]


def by_dataset(results: Results) -> list[DatasetResults]:
    """Return the results on each dataset that has any: of the languages that are done alone, as captions say."""
    scale: Reproduction = results.scale
    found = []
    for dataset in scale.datasets:
        units = DatasetResults(results, dataset).units
        # a text is named after its place among the languages, which stays
        if any(hasattr(unit.language, "seed") for unit in units):
            dataset = dataclasses.replace(dataset, languages=tuple(dict.fromkeys(unit.language for unit in units)))
        found += [DatasetResults(results, dataset)] if units else []
    return found


def clusters_of(units: Sequence[Unit]) -> list[str]:
    """Return what errors are over: languages or, of one language, seeds."""
    clusters = [unit.cluster for unit in units]
    return clusters if len(set(clusters)) > 1 else [unit.prefix for unit in units]


def mean(units: Sequence[Unit], estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of an estimate over units; of one, the estimate itself."""
    return study_results.mean(estimates, clusters=clusters_of(units) if len(units) > 1 else ())


# --- one loss by interpolation ---------------------------------------------------------------------------------------


def interpolated_control(controls: Sequence[Checkpoint], treated: Checkpoint) -> Pair | None:
    """Return the control at the treated model's loss, and the treated model.

    The loss is the KL to the truth where it is known. Values of the control and what each example adds to them are
    interpolated, linearly in the logarithm of the loss, between the last two neighbors whose losses enclose the
    treated model's. None if no two neighbors do.

    Args:
        controls: Checkpoints of the control, in the order of their steps or of their cooldowns' lengths.
        treated: The checkpoint that the control is compared with.
    """
    key = loss_key([(treated, treated)])
    loss = treated[key].value
    # losses need not fall from one to the next, so that several neighbors may enclose it
    for first, second in reversed(list(itertools.pairwise(controls))):
        ends = first[key].value, second[key].value
        if min(ends) <= loss <= max(ends) and ends[0] != ends[1]:
            fraction = math.log(loss / ends[0]) / math.log(ends[1] / ends[0])
            both = [name for name in first if name in second]
            mixed = {name: _mixed(first[name], second[name], fraction) for name in both}
            # the fraction is linear in the logarithm, so the mixture of the losses themselves is a little off
            mixed[key] = dataclasses.replace(mixed[key], value=loss)
            return mixed, {name: _by_example(each) for name, each in treated.items()}
    return None


def last_enclosed(firsts: Sequence[Checkpoint], seconds: Sequence[Checkpoint]) -> Pair | None:
    """Return the last of `firsts` whose loss lies between two neighbors in `seconds`, and these interpolated there."""
    for first in reversed(firsts):
        if (pair := interpolated_control(seconds, first)) is not None:
            return pair[1], pair[0]
    return None


def _by_example(one: CheckpointEstimate) -> CheckpointEstimate:
    """Return an accuracy on sampled examples with what each example adds to it, averaged over probes; others as is."""
    if not one.is_accuracy:
        return one
    # (S, n) predictions of S probes. Classes cannot be interpolated, but fractions of correct probes can
    correct = (one.examples["predictions"] == one.examples["labels"]).mean(axis=0)
    return dataclasses.replace(one, samples=len(correct), examples={"influence": correct - correct.mean()})


def _mixed(first: CheckpointEstimate, second: CheckpointEstimate, fraction: float) -> CheckpointEstimate:
    """Return (1 - fraction) of one estimate and `fraction` of another, on the same examples."""
    first, second = _by_example(first), _by_example(second)

    def mix(a: Any, b: Any) -> Any:
        return (1 - fraction) * a + fraction * b

    return dataclasses.replace(
        first,
        value=mix(first.value, second.value),
        # as if the two errors were fully correlated, an upper bound; paired differences use `examples` instead
        stderr=mix(first.stderr, second.stderr),
        examples={name: mix(values, second.examples[name]) for name, values in first.examples.items()},
    )


# --- the comparisons -------------------------------------------------------------------------------------------------

KINDS = (
    *("sgd", "label noise", "longer", "larger", "adversary", "helper", "pre-ln", "look-up table"),
    *("unregularized", "sam"),
)


class Comparison(NamedTuple):
    """Two models of each language and seed that claims compare."""

    kind: str
    names: tuple[str, str]
    pair: Callable[[DatasetResults, Unit], Pair | None]
    where: str  # which checkpoints these are
    case: str = ""
    needs_same_loss: bool = False  # whether the losses must be shown to be the same


def comparisons(dataset: Dataset) -> Iterator[Comparison]:
    """Return what is compared on a dataset, in the order of its page."""
    main, start, last, cooled = dataset.main, dataset.start, dataset.last, bool(dataset.cooldowns)
    followed = dataset.followed or main
    at_control = (
        "The first model is interpolated, linearly in log KL, between two checkpoints of {size} after "
        f"{start:,} steps and cooldowns of different lengths. Their KLs bracket the second model's KL, so both have "
        "the same KL by construction."
    )
    if cooled:
        yield Comparison(
            "longer",
            (f"{start:,} steps", f"{last:,} steps"),
            lambda data, unit: interpolated_control(data.path(unit, followed), data.end(unit, followed)),
            at_control.format(size=followed),
        )
    elif dataset.shown.longer:
        yield Comparison(
            "longer",
            ("Fewer steps", f"{last:,} steps"),
            lambda data, unit: interpolated_control(data.path(unit, followed)[:-1], data.end(unit, followed)),
            "The first model is interpolated, linearly in log loss, between two checkpoints of the same run whose "
            "losses bracket the last step's loss.",
        )
    for smaller, larger in itertools.pairwise(dataset.sizes):
        yield Comparison(
            "larger",
            (smaller, larger),
            functools.partial(DatasetResults.size_pair, smaller=smaller, larger=larger),
            "The first model is taken after its longest cooldown whose KL two cooldowns of the second model bracket. "
            "The second is interpolated between these two, linearly in log KL, so both have the same KL by "
            "construction."
            if cooled
            else _along(smaller),
            f"{smaller} to {larger}",
        )
    for name, arm in dataset.arms.items():
        # adversary-C is the adversary of task C
        kind, _, task = name.rpartition("-")
        kind, case = (kind, task) if task in dataset.tasks else (name, "")
        if kind == SGD_EXACT:
            continue
        if cooled:
            kind, title = ("sgd", "SGD") if kind == SGD_SAMPLED else (kind, arm.title)
            names = ("Post-layer-norm", title) if kind == "pre-ln" else ("AdamW at the same loss", title)
            yield Comparison(
                kind, names, functools.partial(_control_of_arm, arm=name), at_control.format(size=main), case
            )
        # no two checkpoints of the control enclose the loss of an arm that continues where the control ends
        elif not arm.stages:
            control = "unregularized" if kind == "sam" else main
            names = (dataset.arms[control].title if control in dataset.arms else "AdamW", arm.title)
            pair = functools.partial(_at_one_loss, control=control, arm=name)
            yield Comparison(kind, names, pair, _along(arm.title), case)
    if cooled and SGD_SAMPLED in dataset.arms:
        yield Comparison(
            "label noise",
            ("SGD (exact labels)", "SGD (sampled labels)"),
            lambda data, unit: (data.end(unit, SGD_EXACT), data.end(unit, SGD_SAMPLED)),
            "Both after the same cooldown.",
            needs_same_loss=True,
        )
    if dataset.shown.baselines:
        for features, words in ((dataset.look_up, "probabilities"), ("log-lookup", "logarithms")):
            yield Comparison(
                "look-up table",
                ("Look-up table", main),
                functools.partial(_look_up_table, features=features),
                f"{main} after {last:,} steps{' and the cooldown' * cooled}. The features of the look-up table are the "
                f"true conditionals, as {words}; its KL is 0.",
                words,
            )


def _along(treated: str) -> str:
    return (
        f"The last checkpoint of {treated} whose loss is bracketed by two checkpoints of the other model. The other "
        "model is interpolated between these two, linearly in log loss. So both have the same measured loss; their "
        "numbers of steps may differ."
    )


def _control_of_arm(data: DatasetResults, unit: Unit, *, arm: str) -> Pair | None:
    # an arm from scratch, when it has trained for as long as the control
    treated = data.end(unit, arm, data.dataset.start)
    return interpolated_control(data.path(unit, data.dataset.main), treated)


def _at_one_loss(data: DatasetResults, unit: Unit, *, control: str, arm: str) -> Pair | None:
    pair = last_enclosed(data.path(unit, arm), data.path(unit, control))
    return pair and (pair[1], pair[0])


def _look_up_table(data: DatasetResults, unit: Unit, *, features: str) -> Pair:
    return data.look_up(unit, features), data.end(unit, data.dataset.main)


@functools.lru_cache(maxsize=1)  # many claims ask for them, one after the other
def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by dataset and kind; none of what was not run."""
    # claims are about all of them, and a scale need not have all
    named: dict[str, list[Contrast]] = {f"{name} {kind}": [] for name in SHOWN for kind in KINDS}
    for data in by_dataset(results):
        for each in comparisons(data.dataset):
            named[f"{data.dataset.name} {each.kind}"].append(_contrast(data, each))
    return named


def _contrast(data: DatasetResults, comparison: Comparison) -> Contrast:
    """Return the contrast of the units that have a pair; if too few have one, it says why it is not tested."""
    units, names = data.units, comparison.names
    pairs = {unit.prefix: pair for unit in units if (pair := comparison.pair(data, unit)) is not None}
    by_unit = dict(zip([unit.prefix for unit in units], clusters_of(units), strict=True))
    # the error of a single pair is over its examples
    clusters = [by_unit[prefix] for prefix in pairs] if len(units) > 1 else []
    clusters_are = "grammars" if data.dataset.name == "pcfg" else "languages"
    if len(units) > 1 and len({unit.cluster for unit in units}) == 1:
        clusters_are = "seeds"
    where, not_tested = comparison.where, ""
    if left_out := len(units) - len(pairs):
        where += f" {left_out} of {len(units)} pairs are left out: no two checkpoints bracket the loss."
    least = min(MIN_LANGUAGES, len(set(by_unit.values())))
    if 2 * len(pairs) < len(units) or (clusters and len(set(clusters)) < least) or not pairs:
        not_tested = (
            f"{names[1]} vs. {names[0]}: only {len(pairs)} of {len(units)} pairs, from {len(set(clusters))} "
            f"{clusters_are}, could be matched in loss; at least half of them, from at least {least} "
            f"{clusters_are}, are needed."
        )
    return Contrast(
        names=names,
        pairs=list(pairs.values()),
        where=where,
        case=comparison.case,
        needs_same_loss=comparison.needs_same_loss,
        # the claim says that the architectures differ
        needs_same_parameters=comparison.kind != "pre-ln",
        clusters=clusters,
        clusters_are=clusters_are,
        not_tested=not_tested,
    )


# --- what claims are about -------------------------------------------------------------------------------------------


def compared(results: Results, *, name: str) -> Sequence[Contrast]:
    """Return the contrasts of a name."""
    return contrasts(results)[name]


def cases(scale: Reproduction, *, name: str) -> Sequence[str]:
    """Return the cases of the contrasts of a name."""
    of_dataset, _, kind = name.partition(" ")
    dataset = scale.dataset(of_dataset)
    planned = comparisons(dataset) if dataset else ()
    return [each.case for each in planned if each.kind == kind] or [""]


def measured(scale: Reproduction, *, dataset: str, name: str) -> Mapping[str, str]:
    """Return the keys of what is measured of two models of a dataset, by case."""
    of = scale.dataset(dataset)
    if of is None:
        return {}
    keys: dict[str, Sequence[str]] = {
        "transfer": (*of.tasks.values(), *of.few_shot),
        "probes": tuple(of.tasks.values()),
        "projected probes": of.projected_probes,
        "flatness": of.traces,
        "gap": [key for key in of.measures if key == "generalization-gap"],
        # the claims are about the paper's expansion; the exact one is only in a table
        "flatness in one architecture": [key for key in of.when_expanded if not key.endswith("-exact")],
    }
    is_accuracy = name in ("transfer", "probes", "projected probes")
    return {_case(of, key) if is_accuracy else key: key for key in keys[name]}


def _case(dataset: Dataset, key: str) -> str:
    """Return a measure of accuracy in words.

    Example:
        >>> from isoloss.paper.reproduction.compare import _case
        >>> from isoloss.paper.reproduction.scales import LAPTOP
        >>> [_case(LAPTOP.datasets[0], key) for key in ("few-shot-prefix-4-100", "probe-prefix-4")]
        ['B (100 examples)', 'B']
    """
    more = ""
    kind, _, task = key.replace("few-shot", "few_shot").partition("-")
    if kind in ("few_shot", "projected"):
        task, _, number = task.rpartition("-")
        more = f" ({int(number):,} examples)" if kind == "few_shot" else ""
    elif kind == "finetune":
        more = " (fine-tuned)"
    # the tasks of a grammar are the paper's, with the same names at every scale; others stand in for the paper's
    names = {probe.partition("-")[2]: name for name, probe in dataset.tasks.items()} if dataset.name == "pcfg" else {}
    return names.get(task, task) + more
