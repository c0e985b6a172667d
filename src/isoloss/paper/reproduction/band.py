"""Models of about the control's loss, as in the paper's figure 1: which they are, and how far their transfer spreads.

The rule is `Dataset.band`: of a replicate, the checkpoints whose KL is within it of the control's; of the means over
languages and seeds, those whose mean KL is within it of the control's mean KL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.paper.reproduction.compare import mean, replicates
from isoloss.paper.reproduction.spec import Dataset, Replicate
from isoloss.statistics.estimate import Estimate
from isoloss.studies.results import Checkpoint, Results, difference
from isoloss.studies.spec import Experiment


class Model(NamedTuple):
    """A checkpoint that every replicate has."""

    arm: str  # the part of the run's name that says what it is
    step: int

    def at(self, results: Results, replicate: Replicate) -> Checkpoint:
        """Return what was measured of it."""
        return results.at(replicate.run(self.arm), self.step)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far a measure spreads over models of about one loss.

    Attributes:
        lowest: The model with the lowest mean over languages.
        highest: The one with the highest.
        ends: The two means.
        difference: Highest minus lowest, paired by replicate; of an accuracy in percentage points. As the two are the
            extremes of several models, it is larger than the difference of two that were chosen beforehand.
    """

    lowest: Model
    highest: Model
    ends: tuple[Estimate, Estimate]
    difference: Estimate


def models(results: Results, dataset: Dataset) -> list[Model]:
    """Return all models of a dataset whose KL is known: every size, arm and cooldown at every measured step."""
    prefix = replicates(results, dataset)[0].run("")
    return [
        Model(run.removeprefix(prefix), step)
        for (run, step), checkpoint in results.checkpoints.items()
        if run.startswith(prefix) and "kl" in checkpoint
    ]


def name(results: Results, dataset: Dataset, model: Model) -> str:
    """Return what a model is called: the end of a run by the run alone."""
    run = replicates(results, dataset)[0].run(model.arm)
    is_end = model.step == results.experiments[run].last_step
    return model.arm if is_end else f"{model.arm} at step {model.step:,}"


def control(results: Results, dataset: Dataset) -> Model:
    """Return the model around whose KL the band is."""
    run = replicates(results, dataset)[0].run(dataset.control)
    return Model(dataset.control, results.experiments[run].last_step)


def limits(kl: float, dataset: Dataset) -> tuple[float, float]:
    """Return the lowest and the highest KL in the band around a control's, in nats per predicted token.

    Example:
        >>> from isoloss.paper.reproduction.spec import EVENING
        >>> [round(limit, 4) for limit in limits(0.006, EVENING.datasets[0])]
        [0.0048, 0.0072]
    """
    return kl * (1 - dataset.band), kl * (1 + dataset.band)


def mean_limits(results: Results, dataset: Dataset) -> tuple[float, float]:
    """Return the limits of the band of the means over languages and seeds."""
    return limits(average(results, dataset, control(results, dataset), "kl").value, dataset)


def average(results: Results, dataset: Dataset, model: Model, key: str) -> Estimate:
    """Return the mean of an estimate of a model over languages and seeds, with its error over languages."""
    return mean([(one, model.at(results, one)[key]) for one in replicates(results, dataset)])


def paired_difference(results: Results, dataset: Dataset, model: Model, other: Model, key: str) -> Estimate:
    """Return what a model has more than another of the same language and seed, of an accuracy in percentage points."""
    pairs = [(one, model.at(results, one)[key], other.at(results, one)[key]) for one in replicates(results, dataset)]
    return mean([(one, difference(later, earlier)) for one, later, earlier in pairs])


def in_band(results: Results, dataset: Dataset) -> list[Model]:
    """Return the models whose mean KL is in the band."""
    low, high = mean_limits(results, dataset)
    return [model for model in models(results, dataset) if low <= average(results, dataset, model, "kl").value <= high]


def by_replicate(
    results: Results, dataset: Dataset, size: str | None = None
) -> list[tuple[Replicate, list[Checkpoint]]]:
    """Return the models of each replicate whose KL is in the band around that of the replicate's own control.

    Args:
        results: The results.
        dataset: The dataset.
        size: Models of this size and of the control's architecture only; None: all.
    """
    found = []
    every, middle = models(results, dataset), control(results, dataset)

    def is_wanted(experiment: Experiment, like: Experiment) -> bool:
        kinds = [
            each.config.model.architecture
            for each in (experiment, like)
            if not isinstance(each.config, ExternalCheckpoint)
        ]
        return size is None or (experiment.size == size and len(set(kinds)) == 1)

    for one in replicates(results, dataset):
        low, high = limits(middle.at(results, one)["kl"].value, dataset)
        like = results.experiments[one.run(middle.arm)]
        of_size = [model for model in every if is_wanted(results.experiments[one.run(model.arm)], like)]
        checkpoints = [model.at(results, one) for model in of_size]
        found.append((one, [each for each in checkpoints if low <= each["kl"].value <= high]))
    return found


def spreads(results: Results, dataset: Dataset) -> Mapping[str, Spread]:
    """Return how far the KL and the accuracy of each probe spread over the models in the band, by key."""
    near = in_band(results, dataset)
    found: dict[str, Spread] = {}
    for key in dict.fromkeys(("kl", *dataset.tasks.values())):
        means = [(model, average(results, dataset, model, key)) for model in near]
        ordered = sorted(means, key=lambda pair: pair[1].value)
        (lowest, low), (highest, high) = ordered[0], ordered[-1]
        more = paired_difference(results, dataset, highest, lowest, key)
        found[key] = Spread(lowest=lowest, highest=highest, ends=(low, high), difference=more)
    return found
