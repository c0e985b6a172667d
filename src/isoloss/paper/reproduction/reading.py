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
from isoloss.studies.comparison import Checkpoint, Measured
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


def at_kl(checkpoints: Sequence[Checkpoint], kl: float) -> Checkpoint | None:
    """Return what a model with this KL would measure, between two checkpoints that enclose it.

    Linear interpolation in the logarithm of the KL, of values and of what each example adds to them; None if no two
    neighbors enclose the KL.

    Args:
        checkpoints: In the order of their polishes' lengths.
        kl: In nats per predicted token.
    """
    for first, second in itertools.pairwise(checkpoints):
        ends = first["kl"].estimate.value, second["kl"].estimate.value
        if min(ends) <= kl <= max(ends) and ends[0] != ends[1]:
            fraction = math.log(kl / ends[0]) / math.log(ends[1] / ends[0])
            both = [key for key in first if key in second]
            mixed = {key: _mixed(first[key], second[key], fraction) for key in both}
            exactly = dataclasses.replace(mixed["kl"].estimate, value=kl)
            return mixed | {"kl": dataclasses.replace(mixed["kl"], estimate=exactly)}
    return None


def _mixed(first: Measured, second: Measured, fraction: float) -> Measured:
    """Return (1 - fraction) of one estimate and `fraction` of another, on the same examples."""

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
