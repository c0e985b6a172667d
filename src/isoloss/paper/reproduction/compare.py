"""What the study compares: models of one loss that differ in size, training time, algorithm or label noise."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.paper.reproduction.spec import SGD_EXACT, SGD_SAMPLED, Dataset, Replicate, StudySize, cooldown_run
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Contrast
from isoloss.studies.results import Checkpoint, Measured, Pair, Results, loss_key

TRAJECTORY = "AdamW at the same loss"
PAIR = Callable[[Replicate], Pair | None]
CONTRASTS = {  # the names of claims.toml, after that of the dataset
    "pcfg": ("sgd", "label noise", "longer", "larger", "adversary", "helper", "pre-ln", "look-up table"),
    "hmm": ("sgd", "longer", "larger"),
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


def replicates(results: Results, dataset: Dataset) -> list[Replicate]:
    """Return the replicates of the complete blocks."""
    return [one for one in dataset.replicates if one.run(dataset.main) in results.experiments]


def at_step(results: Results, replicate: Replicate, arm: str, step: int) -> Checkpoint:
    """Return what was measured of a run at a step."""
    return results.at(replicate.run(arm), step)


def end(results: Results, dataset: Dataset, replicate: Replicate, arm: str) -> Checkpoint:
    """Return the end of a size or arm: after its cooldown, where the scale has one."""
    run = cooldown_run(arm, dataset.last) if dataset.cooldown_steps else arm
    name = replicate.run(run)
    return results.at(name if name in results.experiments else replicate.run(arm))


def by_cooldown(results: Results, dataset: Dataset, replicate: Replicate, size: str) -> list[Checkpoint]:
    """Return a size after cooldowns of every length, the shortest first, all from the step where arms branch off."""
    return [results.at(replicate.run(cooldown_run(size, dataset.start, length))) for length in dataset.cooldown_lengths]


def trained(results: Results, dataset: Dataset, replicate: Replicate, arm: str) -> list[Checkpoint]:
    """Return a size or arm at every watched step, in their order."""
    return [at_step(results, replicate, arm, step) for step in dataset.watched]


def at_same_loss(controls: Sequence[Checkpoint], treated: Checkpoint) -> Pair | None:
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
    for first, second in reversed(list(itertools.pairwise(controls))):
        ends = first[key].value, second[key].value
        if min(ends) <= loss <= max(ends) and ends[0] != ends[1]:
            fraction = math.log(loss / ends[0]) / math.log(ends[1] / ends[0])
            both = [name for name in first if name in second]
            mixed = {name: _mixed(first[name], second[name], fraction) for name in both}
            mixed[key] = dataclasses.replace(mixed[key], value=loss)
            return mixed, {name: _by_example(each) for name, each in treated.items()}
    return None


def _by_example(one: Measured) -> Measured:
    """Return an accuracy on sampled examples with what each example adds to it, the mean over probes; others as is."""
    if not one.is_accuracy:
        return one
    correct = (one.examples["predictions"] == one.examples["labels"]).mean(axis=0)
    return dataclasses.replace(one, examples={"influence": correct - correct.mean()})


def _mixed(first: Measured, second: Measured, fraction: float) -> Measured:
    """Return (1 - fraction) of one estimate and `fraction` of another, on the same examples."""
    first, second = _by_example(first), _by_example(second)

    def mix(a: Any, b: Any) -> Any:
        return (1 - fraction) * a + fraction * b

    return dataclasses.replace(
        first,
        value=mix(first.value, second.value),
        stderr=mix(first.stderr, second.stderr),
        examples={name: mix(values, second.examples[name]) for name, values in first.examples.items()},
    )


def mean(found: Sequence[tuple[Replicate, Estimate]]) -> Estimate:
    """Return the mean of an estimate over languages; of one language with one seed, the estimate itself."""
    if len(found) == 1:
        return found[0][1]
    clusters = [replicate.cluster for replicate, _ in found]
    if len(set(clusters)) == 1:  # one language with several seeds
        clusters = [replicate.prefix for replicate, _ in found]
    return cluster_mean([estimate.value for _, estimate in found], clusters, unit=found[0][1].unit)


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them; none of what was not run."""
    scale: StudySize = results.scale
    found: dict[str, Sequence[Contrast]] = {f"{name} {each}": () for name, all_ in CONTRASTS.items() for each in all_}
    for dataset in scale.datasets:
        if replicates(results, dataset):
            made = (_after_cooldown if dataset.cooldown_steps else _along_training)(_Contrasts(results, dataset))
            found |= {f"{dataset.name} {name}": each for name, each in made.items()}
    return found


@dataclass(frozen=True)
class _Contrasts:
    """The pairs of one dataset, one of each replicate."""

    results: Results
    dataset: Dataset

    def make(self, names: tuple[str, str], pair: PAIR, where: str, **more: object) -> list[Contrast]:
        """Return a contrast of the replicates that have a pair; one that says why not, where too few have."""
        everyone = replicates(self.results, self.dataset)
        pairs = [(one, each) for one in everyone if (each := pair(one)) is not None]
        clusters, all_clusters = ([one.cluster for one in ones] for ones in ([one for one, _ in pairs], everyone))
        clusters_are = "grammars" if self.dataset.name == "pcfg" else "languages"
        if len(everyone) == 1:
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

    def against_adamw(self, name: str, arm: str, between: str) -> list[Contrast]:
        """Return the control at the loss of an arm against the arm."""
        results, dataset = self.results, self.dataset
        return self.make(
            (TRAJECTORY, name),
            lambda one: at_same_loss(by_cooldown(results, dataset, one, dataset.main), end(results, dataset, one, arm)),
            INTERPOLATED.format(between=between),
            at_same_loss=False,
        )


def _after_cooldown(make: _Contrasts) -> dict[str, list[Contrast]]:
    results, dataset, main = make.results, make.dataset, make.dataset.main
    between = f"of {main} after {dataset.start:,} steps and cooldowns of different lengths"
    made = {
        "sgd": make.against_adamw("SGD", SGD_SAMPLED, between),
        "label noise": make.make(
            ("SGD (exact labels)", "SGD (sampled labels)"),
            lambda one: (end(results, dataset, one, SGD_EXACT), end(results, dataset, one, SGD_SAMPLED)),
            "Both after the same cooldown.",
        ),
        "longer": make.make(
            (f"{dataset.start:,} steps", f"{dataset.last:,} steps"),
            lambda one: at_same_loss(by_cooldown(results, dataset, one, main), end(results, dataset, one, main)),
            INTERPOLATED.format(between=between),
            at_same_loss=False,
        ),
        "larger": [
            each
            for smaller, larger in itertools.pairwise(dataset.sizes)
            for each in make.make(
                (smaller, larger),
                lambda one, pair=(smaller, larger): size_pair(results, dataset, one, pair),  # type: ignore[misc]
                "The second model is interpolated, linearly in log KL, between cooldowns of different lengths; the "
                "first has had the longest cooldown that leaves its KL between the second's. So both have the same KL "
                "by construction.",
                case=f"{smaller} to {larger}",
                at_same_loss=False,
            )
        ],
    }
    if "adversary" in dataset.arms:
        for arm in ("adversary", "helper"):
            made[arm] = make.against_adamw(dataset.arms[arm].title, arm, between)
        made["look-up table"] = [
            each
            for kind, words in (("lookup", "probabilities"), ("log-lookup", "logarithms"))
            for each in make.make(
                ("Look-up table", main),
                lambda one, kind=kind: _against_table(results, dataset, one, kind),  # type: ignore[misc]
                f"{main} after {dataset.last:,} steps and the cooldown. The features of the look-up table are the true "
                f"conditionals, as {words}; its KL is 0.",
                case=words,
                at_same_loss=False,
            )
        ]
    if "pre-ln" in dataset.arms:
        made["pre-ln"] = make.make(
            ("Post-layer-norm", "Pre-layer-norm"),
            lambda one: at_same_loss(
                by_cooldown(results, dataset, one, main), results.at(one.run(cooldown_run("pre-ln", dataset.start)))
            ),
            INTERPOLATED.format(between=between),
            at_same_loss=False,
        )
    return made


def _along_training(make: _Contrasts) -> dict[str, list[Contrast]]:
    """Return the contrasts of a dataset without a cooldown: of models at one loss in the course of their training."""
    results, dataset = make.results, make.dataset

    def enclosed(one: Replicate, treated: str, control: str) -> Pair | None:
        return _last(*(trained(results, dataset, one, arm) for arm in (treated, control)))

    made: dict[str, list[Contrast]] = {}
    for name, arm in dataset.arms.items():
        if arm.stages:  # goes on where the control ends, so the control never has its loss
            continue
        kind, _, task = name.rpartition("-")  # adversary-C is the adversary of task C
        kind, case = (kind, task) if task in dataset.tasks else (name, "")
        control = "unregularized" if name == "sam" else dataset.main
        names = (dataset.arms[control].title if control in dataset.arms else "AdamW", arm.title)

        def pair(one: Replicate, treated: str = name, control: str = control) -> Pair | None:
            found = enclosed(one, treated, control)
            return None if found is None else (found[1], found[0])

        where = ALONG.format(treated=arm.title)
        made.setdefault(kind, []).extend(make.make(names, pair, where, case=case, at_same_loss=False))
    for smaller, larger in itertools.pairwise(dataset.sizes):
        made.setdefault("larger", []).extend(
            make.make(
                (smaller, larger),
                lambda one, pair=(smaller, larger): enclosed(one, *pair),  # type: ignore[misc]
                ALONG.format(treated=smaller),
                case=f"{smaller} to {larger}",
                at_same_loss=False,
            )
        )
    return made


def size_pair(results: Results, dataset: Dataset, one: Replicate, sizes: tuple[str, str]) -> Pair | None:
    """Return two sizes at the same loss, by cooldowns of different lengths; None where no two bracket the loss."""
    return _last(*(by_cooldown(results, dataset, one, size) for size in sizes))


def _last(firsts: Sequence[Checkpoint], seconds: Sequence[Checkpoint]) -> Pair | None:
    for first in reversed(firsts):
        if (pair := at_same_loss(seconds, first)) is not None:
            return pair[1], pair[0]
    return None


def _against_table(results: Results, dataset: Dataset, one: Replicate, kind: str) -> Pair | None:
    tables = at_step(results, one, dataset.main, 0)
    probes = {key: tables[f"{kind}-{key.removeprefix('probe-')}"] for key in dataset.tasks.values()}
    return probes, end(results, dataset, one, dataset.main)


def measures(scale: StudySize) -> Mapping[str, Mapping[str, str]]:
    """Return what can be measured of two models, by what claims.toml calls it."""
    found: dict[str, Mapping[str, str]] = {}
    for name in CONTRASTS:
        dataset = scale.dataset(name)
        if dataset is None:
            continue
        probes = {_case(key): key for key in dataset.tasks.values()}
        few_shot = [key for key in dataset.end_measures if key.startswith("few-shot-")]
        projected = [key for key in dataset.end_measures if key.startswith("projected-")]
        found |= {
            f"{name} transfer": {**probes, **{_case(key): key for key in few_shot}},
            f"{name} probes": probes,
            f"{name} projected probes": {_case(key): key for key in projected},
            f"{name} flatness": {key: key for key in ("trace", "minimal-trace") if key in dataset.measures},
            f"{name} flatness in one architecture": {
                key: key for key in dataset.when_expanded if not key.endswith("-exact")
            },
        }
    return found


def _case(key: str) -> str:
    """Return a measure of accuracy in words.

    Example:
        >>> _case("few-shot-prefix-4-100"), _case("probe-prefix-4")
        ('prefix-4 (100 examples)', 'prefix-4')
    """
    if key.startswith("few-shot-"):
        task, _, number = key.removeprefix("few-shot-").rpartition("-")
        return f"{task} ({int(number):,} examples)"
    if key.startswith("projected-"):
        return key.removeprefix("projected-").rpartition("-")[0]
    kind, _, task = key.partition("-")
    return f"{task} (fine-tuned)" if kind == "finetune" else task
