"""How a linear probe is fitted and how a model is fine-tuned. Nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.run_config import OptimizerConfig

Solver = Literal["adamw", "convex"]
Pooling = Literal["concatenate", "mean", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """How a linear classifier is fitted to features.

    The paper's probe (section 2.1 and appendix A.5) is trained with AdamW at a constant 1e-3 for 100 epochs, with 5
    seeds. So is this one, but on standardized features: the paper names no such step, and its preset
    (`isoloss.lab.presets`) has `standardize=False`. The batch size and the weight decay, which the paper does not give,
    are 256 and AdamW's default.
    """

    solver: Solver = "adamw"
    """How a probe is fitted: `adamw`, the paper's training, or `convex`, the minimum of the regularized loss."""
    epochs: int = setting(100, minimum=1)
    """Passes over the training examples."""
    batch_size: int = setting(256, minimum=1)
    """Examples in a step; the last step of an epoch takes what is left."""
    learning_rate: float = setting(1e-3, above=0, below=math.inf)
    """AdamW's learning rate."""
    weight_decay: float = setting(0.01, minimum=0, below=math.inf)
    """AdamW's weight decay."""
    regularization: tuple[float, ...] = setting((1e-3,), above=0, below=math.inf)
    """The convex probe's regularization strength; of several, the best on held-out training examples. The strength of
    scikit-learn is `C = 1 / (regularization * num_train)`."""
    standardize: bool = True
    """Whether features are centered at their training mean and divided by one number, the root mean square of what
    remains; False takes them as they are, as the paper does."""
    seeds: int = setting(5, minimum=1)
    """Classifiers, each with its own initial weights and order of the examples."""
    seed: int = 0
    """Decides the initial weights and the order of the examples."""

    def __post_init__(self) -> None:
        value: Any = self.regularization  # also a single number
        object.__setattr__(self, "regularization", (value,) if isinstance(value, float | int) else tuple(value))

    def check_fields(self) -> None:
        """Refuse a setting that the solver does not use.

        Raises:
            IsolossError: There is one, or there is no regularization strength.
        """
        unused = ("epochs", "batch_size", "learning_rate", "weight_decay")
        for name in unused if self.solver == "convex" else ("regularization",):
            if getattr(self, name) != getattr(ClassifierConfig, name):
                raise IsolossError(f"{name} has no effect with the solver {self.solver}: leave it out")
        if not self.regularization:
            raise IsolossError("regularization is empty; a convex probe needs at least one strength")


@dataclass(frozen=True, kw_only=True)
class LinearProbeConfig(ClassifierConfig):
    """What a linear probe reads of a model, and how it is fitted."""

    pooling: Pooling = "concatenate"
    """Which token states are read: all side by side (`concatenate`), their `mean`, or those of one token; [CLS] is the
    first."""
    layer: int = -1
    """Which hidden states are read: 0 is the embeddings, -1 the model's last hidden state."""
    projection: int | None = setting(None, minimum=1)
    """Project the features at random to this many; the paper has 512. Default: no projection."""


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
