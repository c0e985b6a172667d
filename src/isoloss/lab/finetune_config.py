"""How a model is fine-tuned. Nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from isoloss.config import setting
from isoloss.run_config import OptimizerConfig

PAPERS_WARMUP = 200  # steps


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(OptimizerConfig):
    """Fine-tuning as in the paper (appendix A.5), after Devlin et al. (2019).

    The learning rate, the warm-up, the epochs and the number of seeds are the paper's. What it leaves open is Devlin's:
    32 examples per step, a rate that falls linearly to 0, gradients of norm 1 at most, weight decay 0.01 and betas 0.9
    and 0.999.
    """

    learning_rate: float = setting(1e-4, above=0, below=math.inf)
    warmup_steps: int | None = setting(None, minimum=0)
    """Steps in which the learning rate rises from 0; default: 200, or 6 % of the steps where these are fewer."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: constant, or a decay that reaches 0 one step after the last: 1 - r (linear) or
    (1 + cos(pi r)) / 2 (cosine), with r the fraction of the decay that is done."""
    betas: tuple[float, float] = setting((0.9, 0.999), minimum=0, below=1)
    max_grad_norm: float | None = setting(1.0, above=0, below=math.inf)
    """Clip the gradient to this Euclidean norm."""
    epochs: int = setting(10, minimum=1)
    """Passes over the training examples."""
    batch_size: int = setting(32, minimum=1)
    """Examples in a step; the last step of an epoch takes what is left."""
    pooling: Literal["auto", "first", "last", "mean"] = "auto"
    """What the head reads: the last state of the `first` token ([CLS], where there is one), of the `last` one, or the
    `mean` over the tokens; `auto` is the last of a causal model, which alone has read the whole, else the first."""
    seeds: int = setting(5, minimum=1, exclude_from_fingerprint=True)
    """Classifiers, each with its own initial weights and order of the examples."""
    seed: int = 0
    """Decides the head's initial weights, the order of the examples and the dropout."""
    micro_batch_size: int = setting(0, minimum=0, note="0: the whole batch", exclude_from_fingerprint=True)
    """Examples whose gradient is computed at once, to save memory; 0: the whole batch."""
    save_every_seconds: float = setting(60.0, minimum=0, exclude_from_fingerprint=True)
    """Seconds between two states that are kept for resuming."""

    def num_warmup_steps(self, total: int) -> int:
        """Return how many of `total` steps warm up."""
        is_default = self.warmup_steps is None and self.warmup_proportion is None
        return PAPERS_WARMUP if is_default and total >= PAPERS_WARMUP else super().num_warmup_steps(total)
