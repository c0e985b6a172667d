"""Differences between checkpoints: paired over the examples of one pair, or over seeds or clusters."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.statistics.comparison import paired_difference, times
from isoloss.statistics.estimate import Estimate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An estimate of one checkpoint, with the influence of each example."""

    estimate: Estimate  # the estimate
    inputs: str  # the SHA-256 of what it was measured on
    settings: Mapping[str, Any]  # of the measure. Estimates with the same inputs and settings can be paired
    # `influence`, or `predictions` and `labels`, and `gram` of features; see `isoloss.runs.Run.examples`
    examples: Mapping[str, np.ndarray[Any, Any]] = field(compare=False)
    weights: str = ""  # the SHA-256 of the checkpoint's weights; empty: not known

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the accuracy of probes on sampled examples, with a predicted class for each."""
        return "predictions" in self.examples

    @property
    def correct(self) -> torch.Tensor:
        """(S, n) bool: whether each probe classifies each test example correctly."""
        import torch

        return torch.from_numpy(self.examples["predictions"] == self.examples["labels"])

    @property
    def votes(self) -> torch.Tensor:
        """(n,) bool: whether the class that most probes predict for an example is correct."""
        import torch

        predictions = torch.from_numpy(self.examples["predictions"].astype(np.int64))
        return predictions.mode(dim=0).values == torch.from_numpy(self.examples["labels"].astype(np.int64))


OVER_SEEDS = "mean over pre-training seeds"  # the method of an estimate whose error is over seeds

Checkpoint = Mapping[str, Measured]  # what was measured of one checkpoint: kl, trace, probe-root, ...
Pair = tuple[Checkpoint, Checkpoint]  # what is compared: control and treated, or earlier and later


def measured(run: Run, measure: str, step: int) -> dict[str, Measured]:
    """Return the estimates of an evaluation by name; a missing evaluation is an error that names it."""
    evaluation = run.evaluation(measure, step)
    if evaluation is None:
        raise IsolossError(f"{run.path} has no evaluation {measure} at step {step}: run the study first")
    arrays = run.examples(evaluation)
    return {
        name: Measured(
            estimate=estimate,
            inputs=evaluation.inputs,
            settings=evaluation.settings,
            examples={k.removeprefix(f"{name}."): v for k, v in arrays.items() if k.startswith(f"{name}.")},
            weights=evaluation.weights,
        )
        for name, estimate in evaluation.estimates.items()
    }


def difference(later: Measured, earlier: Measured, *, factor: float = 1.0) -> Estimate:
    """Return later - factor * earlier, with the error of the difference on the same examples.

    Differences of accuracies are in percentage points; on sampled test examples, with the error of
    `isoloss.lab.transfer.compare.accuracy_difference` over examples and probes. Otherwise the squared error is the sum
    of (psi_i - factor psi'_i)^2 over n (n - 1), where psi_i and psi'_i are the influences of example i (or, for an
    accuracy over all sentences, of draw i) on later and earlier. The difference of exact values is exact.

    Raises:
        IsolossError: The two were not measured on the same examples with the same settings.
    """
    same_inputs = (later.inputs, later.settings) == (earlier.inputs, earlier.settings)
    is_exact = later.estimate.is_exact and earlier.estimate.is_exact
    if not same_inputs or later.examples.keys() != earlier.examples.keys() or not (later.examples or is_exact):
        raise IsolossError(
            "two evaluations were not made on the same examples under the same settings, so their difference has "
            "no paired error: measure both checkpoints again with one version of isoloss"
        )
    of_accuracy = later.estimate.unit == "accuracy"
    if of_accuracy and factor != 1:
        raise IsolossError(f"an accuracy is compared as it is, not with a factor of {factor:g}")
    if later.is_accuracy:
        from isoloss.lab.transfer.compare import accuracy_difference

        return _in_points(accuracy_difference(later.correct, earlier.correct))
    found = paired_difference(_by_example(later), times(_by_example(earlier), factor))
    return _in_points(found) if of_accuracy else found


def _by_example(one: Measured) -> Estimate:
    """Return an estimate with what each example adds to it, and the error that follows from that alone."""
    if "influence" not in one.examples:
        return one.estimate
    influence = one.examples["influence"].astype(np.float64)
    n = len(influence)
    stderr = math.sqrt(float(np.square(influence).sum()) / (n * (n - 1)))
    return dataclasses.replace(one.estimate, samples=n, stderr=stderr, influence=influence)


def _in_points(found: Estimate) -> Estimate:
    """Return a difference of accuracies in percentage points."""
    return dataclasses.replace(times(found, 100), unit="percentage points")


def cka(first: Measured, second: Measured) -> Estimate:
    """Return the linear CKA of the features of two checkpoints, by the measure `features` of each.

    See `isoloss.lab.transfer.similarity.linear_cka`: 1 where the features are the same up to rotation and scale, 0
    where they are uncorrelated. The error is over the draw of the sentences.

    Raises:
        IsolossError: One of the two is of another measure, or they are not of the same sentences.
    """
    from isoloss.lab.transfer.similarity import from_upper_triangle, linear_cka

    if not all("gram" in one.examples for one in (first, second)):
        raise IsolossError("CKA takes two evaluations by the measure features, which keep Gram matrices")
    if first.inputs != second.inputs:
        raise IsolossError(
            "the features of two checkpoints are not of the same sentences, so they have no CKA: measure both with the "
            "same feature_sentences and seed, on the same language or text"
        )
    return linear_cka(*(from_upper_triangle(one.examples["gram"]) for one in (first, second)))


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over runs of different seeds, with the standard error of their mean.

    It includes each run's own error of measurement where each is measured on sentences of its own.

    Raises:
        IsolossError: Fewer than two runs have no standard deviation.

    Example:
        >>> known = {"stderr": 0.1, "samples": 9, "unit": "nats", "num_predictions": 9, "method": "m"}
        >>> runs = [Estimate(value=v, **known) for v in (1, 2, 3)]
        >>> print(over_seeds(runs))
        2.00 ± 0.58 nats
    """
    if len(estimates) < 2:
        raise IsolossError("a mean over seeds needs at least two runs")
    values = [estimate.value for estimate in estimates]
    return Estimate(
        value=statistics.fmean(values),
        stderr=statistics.stdev(values) / math.sqrt(len(values)),
        samples=len(values),
        unit=estimates[0].unit,
        num_predictions=sum(estimate.num_predictions for estimate in estimates),
        num_probes=estimates[0].num_probes,
        method=OVER_SEEDS,
    )


def mean(estimates: Sequence[Estimate], *, clusters: Sequence[str] = ()) -> Estimate:
    """Return the mean over clusters or, without clusters, over seeds; of a single one, the estimate itself."""
    if not clusters:
        return estimates[0] if len(estimates) == 1 else over_seeds(estimates)
    from isoloss.statistics.clusters import cluster_mean

    return cluster_mean([estimate.value for estimate in estimates], clusters, unit=estimates[0].unit)


def change(pairs: Sequence[Pair], key: str, *, factor: float = 1.0, clusters: Sequence[str] = ()) -> Estimate:
    """Return second - factor * first of the estimate `key`: of one pair, or the mean over pairs.

    The error of one pair is that of the difference on the same examples; over several seeds it is that of the mean of
    the differences, which are paired by seed; over clusters it is that of the mean of the clusters' mean differences
    (`isoloss.statistics.clusters.cluster_mean`).

    Args:
        pairs: The pairs of checkpoints.
        key: The estimate.
        factor: What the first is multiplied by.
        clusters: The independent unit of each pair, such as its grammar; empty: each pair is one.
    """
    return mean([difference(second[key], first[key], factor=factor) for first, second in pairs], clusters=clusters)


def loss_key(pairs: Sequence[Pair]) -> str:
    """Return which estimate is the loss: the KL to the truth, or, if that is not known, the loss itself."""
    return "kl" if "kl" in pairs[0][0] else "loss"
