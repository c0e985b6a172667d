"""What SGD among the minimizers asks of a model, and SGD itself: many trajectories that move together.

Shapes: n trajectories, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from isoloss.statistics.estimate import Estimate

Array = np.ndarray[Any, np.dtype[np.float64]]


class Model(Protocol):
    """A model whose loss has many minimizers, and one of them to start from."""

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def unit(self) -> str:
        """The unit of the loss and of the trace of its Hessian."""

    @property
    def block(self) -> int:
        """Trajectories that move together, so that they stay in the cache; part of what a seed stands for."""

    @property
    def minimizer(self) -> Array:
        """(P,) where SGD and the flow start."""

    @property
    def beside(self) -> Array:
        """(n, P) points off the minimizers, from which the control without label noise starts."""

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Take one step of SGD, in place, on fresh examples; with `exact` the exact conditionals replace the answers.

        `theta` is (n, P), contiguous.
        """

    def trace(self, theta: Array) -> Array:
        """Return the (n,) traces of the Hessian of the loss at (n, P) points, minimizers or not."""

    def flow(self, time: float) -> Array:
        """Return the (P,) point of the projected flow `-grad Tr` at a time; the theorem's flow runs 1/(4B) as fast."""

    def reached(self, theta: Array) -> Estimate:
        """Return the time at which the flow `-grad Tr` is where the (n, P) trajectories are."""


def steps_until(time: float, step_size: float) -> int:
    """Return K / eta^2, rounded to whole steps."""
    return round(time / step_size**2)


def simulate(
    model: Model,
    theta: Array,
    *,
    step_size: float,
    times: Sequence[float],
    generator: np.random.Generator,
    batch_size: int = 1,
    exact: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Array]:
    """Return the (n, P) parameters of independent trajectories of SGD at each time.

    The loss is the population's: every example is fresh. `times` are K, increasing: K / eta^2 steps are taken.
    `progress` is called with each number of further steps.
    """
    theta, points, done = theta.copy(), [], 0
    for time in times:
        until = steps_until(time, step_size)
        for _ in range(until - done):
            model.move(theta, step_size, batch_size=batch_size, generator=generator, exact=exact)
        if progress is not None:
            progress(until - done)
        done = until
        points.append(theta.copy())
    return points


def mean(values: Array, unit: str, method: str) -> Estimate:
    """Return the mean of (n,) values, one for each trajectory, with its standard error."""
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std(ddof=1) / math.sqrt(len(values))),
        samples=len(values),
        unit=unit,
        num_predictions=len(values),
        method=method,
    )
