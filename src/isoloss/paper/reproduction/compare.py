"""What the study compares: models of one loss that differ in size, training time, algorithm or label noise."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.paper.reproduction.spec import SGD_EXACT, SGD_SAMPLED, Dataset, Replicate, Reproduction, cooldown_run
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Contrast
from isoloss.studies.results import Checkpoint, CheckpointEstimate, Pair, Results, loss_key

TRAJECTORY = "AdamW at the same loss"
PAIR = Callable[[Replicate], Pair | None]
CONTRASTS = {  # the names of contrasts, by dataset
    "pcfg": ("sgd", "label noise", "longer", "larger", "adversary", "helper", "pre-ln", "look-up table"),
    "hmm": ("sgd", "longer", "larger"),
    "generated": ("longer", "larger"),
    "web": ("longer",),
    "text": ("unregularized", "sam"),
}
MIN_LANGUAGES = 3  # of several, that have a pair; and at least half of the models
INTERPOLATED = (
    "The first model is interpolated, linearly in log KL, between two checkpoints {between} whose KLs bracket the "
    "second's, so both have the same KL by construction."
)
ALONG = (
    "Of {treated}: the last checkpoint whose loss is bracketed by two checkpoints of the other model. The other is "
    "interpolated between these two, linearly in log loss, so both have the same measured loss; their numbers of steps "
    "may differ."
)


@dataclass(frozen=True)
class DatasetResults:
    """The results on one dataset, by replicate and by arm: the part of a run's name that says what it is."""

    results: Results
    dataset: Dataset

    @functools.cached_property
    def replicates(self) -> list[Replicate]:
        """The replicates of the complete blocks."""
        return [one for one in self.dataset.replicates if one.run(self.dataset.main) in self.results.experiments]

    def at(self, replicate: Replicate, arm: str, step: int | None = None) -> Checkpoint:
        """Return what was measured of a run at a step, by default its last."""
        return self.results.at(replicate.run(arm), step)

    def end(self, replicate: Replicate, arm: str) -> Checkpoint:
        """Return the end of a size or arm: after its cooldown, where the scale has one."""
        # an arm that continues the main model has its cooldown as the last stage of its own run
        after_cooldown = cooldown_run(arm, self.dataset.last)
        is_run = replicate.run(after_cooldown) in self.results.experiments
        return self.at(replicate, after_cooldown if is_run else arm)

    def by_cooldown(self, replicate: Replicate, size: str) -> list[Checkpoint]:
        """Return a size after cooldowns of every length, shortest first, all from the step where arms branch off."""
        start, lengths = self.dataset.start, self.dataset.cooldown_lengths
        return [self.at(replicate, cooldown_run(size, start, length)) for length in lengths]

    def trained(self, replicate: Replicate, arm: str) -> list[Checkpoint]:
        """Return a size or arm at every watched step, in their order."""
        return [self.at(replicate, arm, step) for step in self.dataset.watched]

    def size_pair(self, replicate: Replicate, sizes: tuple[str, str]) -> Pair | None:
        """Return two sizes at the same loss, by cooldowns of different lengths; None where no two bracket the loss."""
        return _last(*(self.by_cooldown(replicate, size) for size in sizes))


def by_dataset(results: Results) -> list[DatasetResults]:
    """Return the results on each dataset that has any."""
    scale: Reproduction = results.scale
    return [data for dataset in scale.datasets if (data := DatasetResults(results, dataset)).replicates]


def interpolated_control(controls: Sequence[Checkpoint], treated: Checkpoint) -> Pair | None:
    """Return the control at the treated model's loss, and the treated model.

    The loss is the KL to the truth where it is known. The control is interpolated, linearly in the logarithm of the
    loss, between two neighbors whose losses enclose the treated model's, the last such two: values, and what each
    example adds to them. None if no two neighbors do.

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


def _by_example(one: CheckpointEstimate) -> CheckpointEstimate:
    """Return an accuracy on sampled examples with what each example adds to it, the mean over probes; others as is."""
    if not one.is_accuracy:
        return one
    # (S, n) predictions of S probes. Classes cannot be interpolated, fractions of probes that are right can
    correct = (one.examples["predictions"] == one.examples["labels"]).mean(axis=0)
    return dataclasses.replace(one, examples={"influence": correct - correct.mean()})


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


def mean(estimates: Sequence[tuple[Replicate, Estimate]]) -> Estimate:
    """Return the mean of an estimate over languages; of one language with one seed, the estimate itself."""
    if len(estimates) == 1:
        return estimates[0][1]
    clusters = [replicate.cluster for replicate, _ in estimates]
    # one language with several seeds
    if len(set(clusters)) == 1:
        clusters = [replicate.prefix for replicate, _ in estimates]
    return cluster_mean([each.value for _, each in estimates], clusters, unit=estimates[0][1].unit)


@functools.lru_cache(maxsize=1)  # many claims ask for them, one after the other
def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by dataset and name; none of what was not run."""
    # claims are about all of them, and a scale need not have all
    named: dict[str, Sequence[Contrast]] = {f"{name} {each}": () for name, all_ in CONTRASTS.items() for each in all_}
    for data in by_dataset(results):
        made = (_after_cooldown if data.dataset.cooldown_steps else _along_training)(data)
        named |= {f"{data.dataset.name} {name}": each for name, each in made.items()}
    return named


def _contrast(data: DatasetResults, names: tuple[str, str], pair: PAIR, where: str, **more: object) -> list[Contrast]:
    """Return a contrast of the replicates that have a pair; one that says why not, where too few have."""
    everyone = data.replicates
    pairs = [(one, each) for one in everyone if (each := pair(one)) is not None]
    clusters, all_clusters = ([one.cluster for one in ones] for ones in ([one for one, _ in pairs], everyone))
    clusters_are = "grammars" if data.dataset.name == "pcfg" else "languages"
    if len(everyone) == 1:
        # the error is then over the examples of the one pair
        clusters = []
    elif len(set(all_clusters)) == 1:
        clusters, clusters_are = [one.prefix for one, _ in pairs], "seeds"
        all_clusters = [one.prefix for one in everyone]
    if left_out := len(everyone) - len(pairs):
        where += f" {left_out} of {len(everyone)} pairs are left out: no two checkpoints bracket the loss."
    least = min(MIN_LANGUAGES, len(set(all_clusters)))
    if 2 * len(pairs) < len(everyone) or (clusters and len(set(clusters)) < least) or not pairs:
        more["not_tested"] = (
            f"{names[1]} vs. {names[0]}: only {len(pairs)} of {len(everyone)} pairs, from {len(set(clusters))} "
            f"{clusters_are}, could be matched in loss; at least half of them, from at least {least} "
            f"{clusters_are}, are needed."
        )
    about: dict[str, Any] = {"where": where, "clusters": clusters, "clusters_are": clusters_are, **more}
    return [Contrast(names=names, pairs=[each for _, each in pairs], **about)]


def _against_adamw(data: DatasetResults, name: str, arm: str, between: str, *, case: str = "") -> list[Contrast]:
    """Return the control at the loss of an arm against the arm."""
    # an arm from scratch, when it has trained for as long as the control
    cooled = cooldown_run(arm, data.dataset.start)

    def pair(one: Replicate) -> Pair | None:
        is_run = one.run(cooled) in data.results.experiments
        treated = data.at(one, cooled) if is_run else data.end(one, arm)
        return interpolated_control(data.by_cooldown(one, data.dataset.main), treated)

    return _contrast(
        data,
        (TRAJECTORY, name),
        pair,
        INTERPOLATED.format(between=between),
        case=case,
        needs_same_loss=False,
    )


def _kind(dataset: Dataset, arm: str) -> tuple[str, str]:
    """Return what an arm is, and of which task it is where its name says so: adversary-C is the adversary of task C."""
    kind, _, task = arm.rpartition("-")
    return (kind, task) if task in dataset.tasks else (arm, "")


def _after_cooldown(data: DatasetResults) -> dict[str, list[Contrast]]:
    dataset, main = data.dataset, data.dataset.main
    between = f"of {main} after {dataset.start:,} steps and cooldowns of different lengths"
    made = {
        "longer": _contrast(
            data,
            (f"{dataset.start:,} steps", f"{dataset.last:,} steps"),
            lambda one: interpolated_control(data.by_cooldown(one, main), data.end(one, main)),
            INTERPOLATED.format(between=between),
            needs_same_loss=False,
        ),
        "larger": [
            each
            for smaller, larger in itertools.pairwise(dataset.sizes)
            for each in _contrast(
                data,
                (smaller, larger),
                lambda one, pair=(smaller, larger): data.size_pair(one, pair),  # type: ignore[misc]
                "The second model is interpolated, linearly in log KL, between cooldowns of different lengths; the "
                "first has had the longest cooldown that leaves its KL between the second's. So both have the same KL "
                "by construction.",
                case=f"{smaller} to {larger}",
                needs_same_loss=False,
            )
        ],
    }
    if SGD_SAMPLED in dataset.arms:
        made["sgd"] = _against_adamw(data, "SGD", SGD_SAMPLED, between)
        made["label noise"] = _contrast(
            data,
            ("SGD (exact labels)", "SGD (sampled labels)"),
            lambda one: (data.end(one, SGD_EXACT), data.end(one, SGD_SAMPLED)),
            "Both after the same cooldown.",
        )
    for name, arm in dataset.arms.items():
        kind, case = _kind(dataset, name)
        if kind in ("adversary", "helper"):
            made.setdefault(kind, []).extend(_against_adamw(data, arm.title, name, between, case=case))
    if dataset.shown.baselines:
        made["look-up table"] = [
            each
            for kind, words in ((dataset.look_up, "probabilities"), ("log-lookup", "logarithms"))
            for each in _contrast(
                data,
                ("Look-up table", main),
                lambda one, kind=kind: (look_up(data, one, kind), data.end(one, main)),  # type: ignore[misc]
                f"{main} after {dataset.last:,} steps and the cooldown. The features of the look-up table are the true "
                f"conditionals, as {words}; its KL is 0.",
                case=words,
                needs_same_loss=False,
            )
        ]
    if "pre-ln" in dataset.arms:
        made["pre-ln"] = _contrast(
            data,
            ("Post-layer-norm", "Pre-layer-norm"),
            lambda one: interpolated_control(
                data.by_cooldown(one, main), data.at(one, cooldown_run("pre-ln", dataset.start))
            ),
            INTERPOLATED.format(between=between),
            needs_same_loss=False,
        )
    return made


def _along_training(data: DatasetResults) -> dict[str, list[Contrast]]:
    """Return the contrasts of a dataset without a cooldown: of models at one loss in the course of their training."""
    dataset = data.dataset

    def enclosed(one: Replicate, treated: str, control: str) -> Pair | None:
        return _last(*(data.trained(one, arm) for arm in (treated, control)))

    made: dict[str, list[Contrast]] = {}
    for name, arm in dataset.arms.items():
        # it continues where the control ends, so no two of the control's checkpoints enclose its loss
        if arm.stages:
            continue
        kind, case = _kind(dataset, name)
        control = "unregularized" if name == "sam" else dataset.main
        names = (dataset.arms[control].title if control in dataset.arms else "AdamW", arm.title)

        # names as defaults: otherwise all closures would share the names of the last arm
        def pair(one: Replicate, treated: str = name, control: str = control) -> Pair | None:
            at_one_loss = enclosed(one, treated, control)
            return None if at_one_loss is None else (at_one_loss[1], at_one_loss[0])

        where = ALONG.format(treated=arm.title)
        made.setdefault(kind, []).extend(_contrast(data, names, pair, where, case=case, needs_same_loss=False))
    if dataset.shown.longer:
        made["longer"] = _contrast(
            data,
            ("Fewer steps", f"{dataset.last:,} steps"),
            lambda one: interpolated_control(data.trained(one, dataset.main)[:-1], data.end(one, dataset.main)),
            "The first model is interpolated, linearly in log loss, between two checkpoints of the same run whose "
            "losses bracket that of the last step.",
            needs_same_loss=False,
        )
    for smaller, larger in itertools.pairwise(dataset.sizes):
        made.setdefault("larger", []).extend(
            _contrast(
                data,
                (smaller, larger),
                lambda one, pair=(smaller, larger): enclosed(one, *pair),  # type: ignore[misc]
                ALONG.format(treated=smaller),
                case=f"{smaller} to {larger}",
                needs_same_loss=False,
            )
        )
    return made


def _last(firsts: Sequence[Checkpoint], seconds: Sequence[Checkpoint]) -> Pair | None:
    """Return the last of the first whose loss two neighbors among the second enclose, and these, interpolated."""
    for first in reversed(firsts):
        if (pair := interpolated_control(seconds, first)) is not None:
            return pair[1], pair[0]
    return None


def look_up(data: DatasetResults, one: Replicate, kind: str) -> Checkpoint:
    """Return the accuracies of the probe on features of a kind that need no model, by the keys of a model's."""
    tables = data.at(one, data.dataset.main, 0)
    return {key: tables[f"{kind}-{key.removeprefix('probe-')}"] for key in data.dataset.tasks.values()}


# --- what claims are about -------------------------------------------------------------------------------------------


def compared(results: Results, *, name: str) -> Sequence[Contrast]:
    """Return the contrasts of a name."""
    return contrasts(results)[name]


def cases(scale: Reproduction, *, name: str) -> Sequence[str]:
    """Return the cases of the contrasts of a name."""
    of_dataset, _, kind = name.partition(" ")
    if (dataset := scale.dataset(of_dataset)) is None:
        return ("",)
    if kind == "larger":
        return [f"{smaller} to {larger}" for smaller, larger in itertools.pairwise(dataset.sizes)]
    if kind == "look-up table" and dataset.shown.baselines:
        return ["probabilities", "logarithms"]
    if kind in ("adversary", "helper"):
        return [task for other, task in (_kind(dataset, arm) for arm in dataset.arms) if other == kind] or ("",)
    return ("",)


def measured(scale: Reproduction, *, dataset: str, name: str) -> Mapping[str, str]:
    """Return the keys of what is measured of two models of a dataset, by case."""
    of = scale.dataset(dataset)
    if of is None:
        return {}
    probes = {_case(of, key): key for key in of.tasks.values()}
    keys: dict[str, dict[str, str]] = {
        "transfer": {**probes, **{_case(of, key): key for key in of.few_shot}},
        "probes": probes,
        "projected probes": {_case(of, key): key for key in of.size_measures if key.startswith("projected-")},
        "flatness": {key: key for key in ("trace", "minimal-trace") if key in of.measures},
        "gap": {key: key for key in ("generalization-gap",) if key in of.measures},
        # the claims are about the paper's expansion; the exact one is in a table alone
        "flatness in one architecture": {key: key for key in of.when_expanded if not key.endswith("-exact")},
    }
    return keys[name]


def _case(dataset: Dataset, key: str) -> str:
    """Return a measure of accuracy in words.

    Example:
        >>> from isoloss.paper.reproduction.compare import _case
        >>> from isoloss.paper.reproduction.cpu_scales import LAPTOP
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
    # a task of a grammar is the paper's own, whose name is the same at every scale; others stand in for the paper's
    names = {probe.partition("-")[2]: name for name, probe in dataset.tasks.items()} if dataset.name == "pcfg" else {}
    return names.get(task, task) + more
