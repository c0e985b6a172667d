"""Configuration of the pre-training algorithms: what is predicted, the step rule, the optimizer and its schedule.

`isoloss.config` has these names too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens are predicted, and from what."""

    kind: Literal["masked", "causal"] = "masked"
    """`masked`: tokens that are hidden, from all others; `causal`: every token, from those before it."""
    masking: Literal["one", "fraction"] = "one"
    """`one` token of each sentence, or each token with probability `fraction` (at least one a sentence)."""
    fraction: float = 0.15
    """Share of masked tokens where masking is `fraction`."""
    corruption: Literal["mask", "bert"] = "mask"
    """In training, a hidden token is always the mask, or as in BERT: 80 % mask, 10 % a random token, 10 % itself."""
    labels: Literal["sampled", "exact"] = "sampled"
    """In training, learn from the tokens that were hidden, or from their exact conditionals: no label noise."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient becomes an update: the optimizer, clipping, and the schedule of the learning rate."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    """The highest, which the warm-up ends at."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to 0 in a line or half a cosine, to be reached one step after the last."""
    warmup_steps: int = 1000
    """Steps of the linear warm-up from 0; not looked at where `warmup_proportion` is given."""
    warmup_proportion: float | None = None
    """Share of all steps that warm up, instead of a number of them; rounded to a whole step."""
    weight_decay: float = 0.01
    """Decoupled (AdamW), or added to the gradient (SGD); biases and layer norms have none."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates."""
    momentum: float = 0.0
    """SGD's momentum."""
    max_grad_norm: float | None = None
    """A gradient of a larger Euclidean norm is scaled down to this one; None: never."""


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """The gradient of the loss alone."""

    kind: Literal["gradient"] = "gradient"


@dataclass(frozen=True, kw_only=True)
class SAMConfig:
    """Sharpness-aware minimisation: the gradient at the point that the loss rises most towards."""

    kind: Literal["sam"] = "sam"
    rho: float = 0.05
    """Distance to that point."""
    batch: Literal["halves", "same"] = "halves"
    """One half of the batch finds the point and the other gives the gradient there, or all of it does both."""
    ascent: Literal["reduced", "per-rank"] = "reduced"
    """On several processes: one point, as on one process, or one for each process's share of the batch."""


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig:
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
class FisherPenaltyConfig:
    """The loss plus a multiple of an unbiased estimate of the trace of its Fisher matrix."""

    kind: Literal["fisher-penalty"] = "fisher-penalty"
    coefficient: float = 1e-3
    """The multiple."""
    sentences: int = 16
    """The first sentences of each batch: the trace is estimated on them."""


RuleConfig = GradientConfig | SAMConfig | AdversarialConfig | FisherPenaltyConfig
