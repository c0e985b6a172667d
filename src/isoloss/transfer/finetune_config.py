"""How a model is fine-tuned. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from isoloss.run_config import OptimizerConfig

Pooling = Literal["auto", "first", "last", "mean"]


def _incidental(default: Any) -> Any:
    """A field that has no part in what one seed gives; see `isoloss.config`."""
    return field(default=default, metadata={"incidental": True})


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning as in the paper (appendix A.5), after Devlin et al. (2019).

    The learning rate, the warm-up, the epochs and the number of seeds are the paper's. What it leaves open is Devlin's:
    32 sentences a step, a rate that falls to 0 in a line, gradients of norm 1 at most, weight decay 0.01 and betas 0.9
    and 0.999.
    """

    epochs: int = 10
    """Passes over the training examples; the last one's model is scored, whatever came before."""
    batch_size: int = 32
    """Examples in a step; the last step of an epoch takes what is left."""
    optimizer: OptimizerConfig = field(
        default=OptimizerConfig(
            learning_rate=1e-4, warmup_steps=200, schedule="linear", max_grad_norm=1.0, betas=(0.9, 0.999)
        )
    )
    pooling: Pooling = "auto"
    """What the head reads: the last state of the `first` token ([CLS], where there is one), of the `last` one, or the
    `mean` over the tokens; `auto`: the last one of a causal model, which alone has read the whole, else the first."""
    seed: int = 0
    """Decides the head's initial weights, the order of the examples and the dropout."""
    seeds: int = _incidental(5)
    """Models, each with its own head, order and dropout; a folder keeps those that it has when there are to be more."""
    micro_batch: int = _incidental(0)
    """Examples whose gradient is computed at once, to save memory; 0: the whole batch."""
    save_every_seconds: float = _incidental(60.0)
    """Seconds between two states kept for resuming."""
