"""Models of about the control's loss, as in the paper's figure 1: which they are, and how far their transfer spreads.

The rule is `Dataset.band`: of a replicate, the checkpoints whose KL is within it of the control's; of the means over
languages and seeds, those whose mean KL is within it of the control's mean KL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from isoloss.paper.reproduction.compare import DatasetResults, mean
from isoloss.paper.reproduction.spec import Dataset, Replicate
from isoloss.run_config import TrainConfig
from isoloss.statistics.estimate import Estimate
from isoloss.studies.results import Checkpoint, difference


class Model(NamedTuple):
    """A checkpoint that every replicate has."""

    arm: str  # the part of the run's name that says what it is
    step: int

    def at(self, data: DatasetResults, replicate: Replicate) -> Checkpoint:
        """Return what was measured of it."""
        return data.at(replicate, self.arm, self.step)


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


def models(data: DatasetResults) -> list[Model]:
    """Return all models of a dataset whose KL is known: every size, arm and cooldown at every measured step."""
    # all replicates have the same models
    prefix = data.replicates[0].run("")
    return [
        Model(run.removeprefix(prefix), step)
        for (run, step), checkpoint in data.results.checkpoints.items()
        if run.startswith(prefix) and "kl" in checkpoint
    ]


def name(data: DatasetResults, model: Model) -> str:
    """Return what a model is called: the end of a run by the run alone."""
    run = data.replicates[0].run(model.arm)
    is_end = model.step == data.results.experiments[run].last_step
    return model.arm if is_end else f"{model.arm} at step {model.step:,}"


def control(data: DatasetResults) -> Model:
    """Return the model around whose KL the band is."""
    run = data.replicates[0].run(data.dataset.control)
    return Model(data.dataset.control, data.results.experiments[run].last_step)


def limits(kl: float, dataset: Dataset) -> tuple[float, float]:
    """Return the lowest and the highest KL in the band around a control's, in nats per predicted token.

    Example:
        >>> from isoloss.paper.reproduction.band import limits
        >>> from isoloss.paper.reproduction.cpu_scales import EVENING
        >>> [round(limit, 4) for limit in limits(0.006, EVENING.datasets[0])]
        [0.0048, 0.0072]
    """
    return kl * (1 - dataset.band), kl * (1 + dataset.band)


def mean_limits(data: DatasetResults) -> tuple[float, float]:
    """Return the limits of the band of the means over languages and seeds."""
    return limits(average(data, control(data), "kl").value, data.dataset)


def average(data: DatasetResults, model: Model, key: str) -> Estimate:
    """Return the mean of an estimate of a model over languages and seeds, with its error over languages."""
    return mean([(one, model.at(data, one)[key]) for one in data.replicates])


def paired_difference(data: DatasetResults, model: Model, other: Model, key: str) -> Estimate:
    """Return what a model has more than another of the same language and seed, of an accuracy in percentage points."""
    pairs = [(one, model.at(data, one)[key], other.at(data, one)[key]) for one in data.replicates]
    return mean([(one, difference(later, earlier)) for one, later, earlier in pairs])


def in_band(data: DatasetResults) -> list[Model]:
    """Return the models whose mean KL is in the band."""
    low, high = mean_limits(data)
    return [model for model in models(data) if low <= average(data, model, "kl").value <= high]


def by_replicate(data: DatasetResults, size: str | None = None) -> list[tuple[Replicate, list[Checkpoint]]]:
    """Return the models of each replicate whose KL is in the band around its own control's.

    Args:
        data: The results on a dataset.
        size: Models of this size and of the control's architecture only; None: all.
    """
    near = []
    every, middle = models(data), control(data)
    experiments = data.results.experiments

    def architecture(run: str) -> str:
        config = experiments[run].config
        assert isinstance(config, TrainConfig)
        return config.model.architecture

    for one in data.replicates:
        low, high = limits(middle.at(data, one)["kl"].value, data.dataset)
        # pre-layer-norm models have the control's size, too, but their traces are sums over other functions
        of_size = [
            model
            for model in every
            if size is None
            or (
                experiments[one.run(model.arm)].size == size
                and architecture(one.run(model.arm)) == architecture(one.run(middle.arm))
            )
        ]
        checkpoints = [model.at(data, one) for model in of_size]
        near.append((one, [each for each in checkpoints if low <= each["kl"].value <= high]))
    return near


def spreads(data: DatasetResults) -> Mapping[str, Spread]:
    """Return how far the KL and the accuracy of each probe spread over the models in the band, by key."""
    near = in_band(data)
    by_key: dict[str, Spread] = {}
    for key in ("kl", *data.dataset.tasks.values()):
        means = [(model, average(data, model, key)) for model in near]
        ordered = sorted(means, key=lambda pair: pair[1].value)
        (lowest, low), (highest, high) = ordered[0], ordered[-1]
        more = paired_difference(data, highest, lowest, key)
        by_key[key] = Spread(lowest=lowest, highest=highest, ends=(low, high), difference=more)
    return by_key
