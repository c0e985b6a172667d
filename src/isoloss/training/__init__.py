"""Pre-training: the loop knows no algorithm, an algorithm knows no loop, and a killed run goes on bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.training.algorithms.base import Examples
    from isoloss.training.throughput import Progress
    from isoloss.training.trainer import Interrupted, train

__all__ = ["Examples", "Interrupted", "Progress", "train"]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "Examples": "isoloss.training.algorithms.base",
        "Progress": "isoloss.training.throughput",
        "Interrupted": "isoloss.training.trainer",
        "train": "isoloss.training.trainer",
    },
)
