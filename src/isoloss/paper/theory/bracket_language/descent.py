"""Gradient descent on the trace among the solutions of the pre-training task, over all of Q, K, V and u."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isoloss import seeds
from isoloss.paper.theory.bracket_language.attention import BracketAttention
from isoloss.paper.theory.bracket_language.inputs import Inputs
from isoloss.paper.theory.bracket_language.trace import bound, squares

RATE = 0.05  # of Adam; it falls to 0 over the second half of the steps
WEIGHTS = (10.0, 1e5)  # of the loss beside trace / bound, at the first and the last step
KEPT = 60  # points of the path that are kept


@dataclass(frozen=True, kw_only=True)
class PathPoint:
    """Where the descent is.

    Attributes:
        step: Steps taken.
        ratio: Trace as a multiple of the bound.
        loss: Mean squared error.
    """

    step: int
    ratio: float
    loss: float


def initial(length: int, width: int, *, seed: int) -> BracketAttention:
    """Return random weights with variance 1 / (2 T) for Q, K and V and 1 for u, in float64."""
    return BracketAttention(length=length, width=width, seed=seeds.derive(seed, "brackets", "start", length)).double()


def descend(
    model: BracketAttention, inputs: Inputs, *, steps: int, progress: Callable[[], None] | None = None
) -> list[PathPoint]:
    """Minimize `trace / bound + weight * loss` in place, the weight growing with the steps; return the path.

    The trace is `2 E |grad f|^2`, differentiated once more; the relu's kinks, where it jumps, have no derivative.

    Args:
        model: Where to start; it need not solve the task.
        inputs: All inputs of the pre-training task, each seen at every step.
        steps: Steps of Adam.
        progress: Called after every step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    least, path = bound(inputs.length, len(model.output)), []
    first, last = map(math.log, WEIGHTS)
    for step in range(steps):
        fraction = step / steps
        optimizer.param_groups[0]["lr"] = RATE * min(1, 2 * (1 - fraction))
        at = squares(model, inputs.z)
        ratio = 2 * (at.neurons + at.attention).mean() / least
        loss = (at.outputs - inputs.y).square().mean()
        if step % max(1, steps // KEPT) == 0:
            path.append(PathPoint(step=step, ratio=float(ratio.detach()), loss=float(loss.detach())))
        optimizer.zero_grad()
        (ratio + math.exp(first + fraction * (last - first)) * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress()
    return path
