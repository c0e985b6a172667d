"""Checkpoints of the study by what they are: a size at a step, an arm, a polish; and models at one loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from isoloss.paper.reproduction.dataset import Dataset, Replicate, polished
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.comparison import Checkpoint, Measured, Pair, loss_key
from isoloss.studies.results import Results


def replicates(results: Results, dataset: Dataset) -> list[Replicate]:
    """Return the replicates of the complete blocks."""
    return [one for one in dataset.replicates if one.run(dataset.main) in results.experiments]


def at_step(results: Results, replicate: Replicate, arm: str, step: int) -> Checkpoint:
    """Return what was measured of a run at a step."""
    return results.at(replicate.run(arm), step)


def end(results: Results, dataset: Dataset, replicate: Replicate, arm: str) -> Checkpoint:
    """Return the end of a size or arm: after its polish, where the scale has one."""
    run = polished(arm, dataset.last) if dataset.polish_steps else arm
    name = replicate.run(run)
    return results.at(name if name in results.experiments else replicate.run(arm))


def by_polish(results: Results, dataset: Dataset, replicate: Replicate, size: str) -> list[Checkpoint]:
    """Return a size after polishes of every length, the shortest first, all from the step where arms branch off."""
    return [results.at(replicate.run(polished(size, dataset.start, length))) for length in dataset.polish_lengths]


def trained(results: Results, dataset: Dataset, replicate: Replicate, arm: str) -> list[Checkpoint]:
    """Return a size or arm at every watched step, in their order."""
    return [at_step(results, replicate, arm, step) for step in dataset.watched]


def at_same_loss(controls: Sequence[Checkpoint], treated: Checkpoint) -> Pair | None:
    """Return the control at the treated model's loss, and the treated model.

    The loss is the KL to the truth where it is known. The control is interpolated, linearly in the logarithm of the
    loss, between two neighbors whose losses enclose the treated model's, the last such two: values, and what each
    example adds to them. None if no two neighbors do.

    Args:
        controls: Checkpoints of the control, in the order of their steps or of their polishes' lengths.
        treated: The checkpoint that the control is compared with.
    """
    key = loss_key([(treated, treated)])
    loss = treated[key].estimate.value
    for first, second in reversed(list(itertools.pairwise(controls))):
        ends = first[key].estimate.value, second[key].estimate.value
        if min(ends) <= loss <= max(ends) and ends[0] != ends[1]:
            fraction = math.log(loss / ends[0]) / math.log(ends[1] / ends[0])
            both = [name for name in first if name in second]
            mixed = {name: _mixed(first[name], second[name], fraction) for name in both}
            exactly = dataclasses.replace(mixed[key].estimate, value=loss)
            mixed[key] = dataclasses.replace(mixed[key], estimate=exactly)
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

    estimate = dataclasses.replace(
        first.estimate,
        value=mix(first.estimate.value, second.estimate.value),
        stderr=mix(first.estimate.stderr, second.estimate.stderr),
    )
    examples = {name: mix(values, second.examples[name]) for name, values in first.examples.items()}
    return dataclasses.replace(first, estimate=estimate, examples=examples)


def mean(found: Sequence[tuple[Replicate, Estimate]]) -> Estimate:
    """Return the mean of an estimate over languages; of one language with one seed, the estimate itself."""
    if len(found) == 1:
        return found[0][1]
    clusters = [replicate.cluster for replicate, _ in found]
    if len(set(clusters)) == 1:  # one language with several seeds
        clusters = [replicate.prefix for replicate, _ in found]
    return cluster_mean([estimate.value for _, estimate in found], clusters, unit=found[0][1].unit)
