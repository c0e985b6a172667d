"""What a training algorithm is made from: a config for each kind. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isoloss.config import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class GradientConfig(AlgorithmConfig):
    """The gradient of the loss alone."""

    kind: Literal["gradient"] = "gradient"


@dataclass(frozen=True, kw_only=True)
class SAMConfig(AlgorithmConfig):
    """Sharpness-aware minimisation: the gradient at the point that the loss rises most towards."""

    kind: Literal["sam"] = "sam"
    rho: float = 0.05
    """Distance to that point."""
    batch: Literal["halves", "same"] = "halves"
    """One half of the batch finds the point and the other gives the gradient there, or all of it does both."""
    ascent: Literal["reduced", "per-rank"] = "reduced"
    """On several processes: one point, as on one process, or one for each process's share of the batch."""


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(AlgorithmConfig):
    """The loss minus a multiple of what a ridge regression on the features loses on a downstream task."""

    kind: Literal["adversarial"] = "adversarial"
    task: str = "root"
    """The downstream task that is spoiled, e.g. root, prefix-4, state-6."""
    weight: float = 0.1
    """The multiple."""
    ridge: float = 0.1
    """Penalty of the head's squared weights, on features whose mean squared norm is 1."""
    head_examples: int = 128
    """Examples a step that the head is fitted on."""
    loss_examples: int = 128
    """Other examples, that its loss is taken on."""
    task_examples: int = 4096
    """The training set of the task, from which both are drawn anew at each step."""
    ascent: Literal["reduced", "per-rank"] = "reduced"
    """On several processes: one head, as on one process, or one for each process, on examples of its own."""


@dataclass(frozen=True, kw_only=True)
class FisherPenaltyConfig(AlgorithmConfig):
    """The loss plus a multiple of an unbiased estimate of the trace of its Fisher matrix."""

    kind: Literal["fisher-penalty"] = "fisher-penalty"
    coefficient: float = 1e-3
    """The multiple."""
    sentences: int = 16
    """The first sentences of each batch: the trace is estimated on them."""
