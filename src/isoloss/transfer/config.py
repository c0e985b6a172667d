"""How a linear probe is fitted. Nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError

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
    schedule: Literal["constant", "linear"] = setting("constant", omit_default=True)
    """Of AdamW's learning rate after its warm-up: constant, or linear, to 0."""
    warmup_steps: int = setting(0, minimum=0, omit_default=True)
    """Steps in which AdamW's learning rate rises from 0."""
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
        unused = ("epochs", "batch_size", "learning_rate", "schedule", "warmup_steps", "weight_decay")
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
