"""The smallest model with many minimizers: one answer of two, with logit a * b; all is closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from isoloss.errors import IsolossError
from isoloss.paper.theory.sgd_flow.model import Array, mean
from isoloss.statistics.estimate import Estimate

KICK = 0.5  # of the logit: how far from the minimizers the control starts


@dataclass(frozen=True)
class TwoParameters:
    r"""The loss `-p log s(ab) - (1 - p) log(1 - s(ab))`, s the logistic function, and a start on its minimizers.

    With v = p (1 - p) the trace of the Hessian at a minimizer is `v (a^2 + b^2)`. Its gradient `2v (a, b)`, projected
    on the tangent `(a, -b) / |(a, b)|`, moves `D = a^2 - b^2` at rate `-4 v D` under the flow `-grad Tr`.
    As `(a^2 + b^2)^2 = D^2 + 4 (ab)^2`, the flow is closed: `D(t) = D(0) exp(-4 v t)` and
    `Tr(t) = v sqrt(D(t)^2 + 4 logit(p)^2)`.

    Example:
        >>> model = TwoParameters(0.7, 2.0)
        >>> start, later = model.flow(0.0), model.flow(1.0)
        >>> [round(float(x), 4) for x in model.trace(np.stack([start, later]))]
        [0.8777, 0.4966]
        >>> round(float(later[0] * later[1] - model.logit), 12)
        0.0
    """

    probability: float  # p, of the first answer
    start: float  # a at the start; b is logit(p) / a

    name = "two parameters"
    unit = "nats per example"
    block = 4096

    def __post_init__(self) -> None:
        if not 1e-6 <= self.probability <= 1 - 1e-6:
            raise IsolossError(f"the probability is {self.probability}; it must lie between 1e-6 and 1 - 1e-6")
        if not (math.isfinite(self.start) and self.start != 0):
            raise IsolossError(f"the start is {self.start}; it must be a number other than 0")
        square = self.start * self.start
        if abs(square - abs(self.logit)) < 1e-3 * square:
            raise IsolossError(
                f"the start {self.start} is the flattest minimizer, where the flow rests: start elsewhere than at "
                f"{math.sqrt(abs(self.logit)):.4g}"
            )

    @property
    def logit(self) -> float:
        """The logarithm of p / (1 - p): a * b at every minimizer."""
        return math.log(self.probability / (1 - self.probability))

    @property
    def variance(self) -> float:
        """The variance of one answer, v = p (1 - p)."""
        return self.probability * (1 - self.probability)

    @property
    def minimizer(self) -> Array:
        """(2,) a and b at the start."""
        return np.array([self.start, self.logit / self.start])

    @property
    def beside(self) -> Array:
        """(1, 2) the start, with its logit off by `KICK`."""
        return np.array([[self.start, (self.logit + KICK) / self.start]])

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Step to `(a, b) - eta * (s(ab) - y) * (b, a)`, y the mean of `batch_size` answers; see `Model.move`."""
        p = self.probability
        answers: Array | float = p
        if not exact:
            # with u uniform, the number of first answers of B is the number of these bounds below u
            ways = [math.comb(batch_size, k) * p**k * (1 - p) ** (batch_size - k) for k in range(batch_size)]
            draws = generator.random(len(theta))
            answers = sum((draws > bound for bound in np.cumsum(ways)), np.zeros(len(theta))) / batch_size
        a, b = theta.T.copy()
        slope = step_size * (1 / (1 + np.exp(-a * b)) - answers)
        theta[:, 0] -= slope * b
        theta[:, 1] -= slope * a

    def trace(self, theta: Array) -> Array:
        """Return `s(ab) (1 - s(ab)) (a^2 + b^2)` at (n, 2) points; see `Model.trace`."""
        a, b = theta.T
        s = 1 / (1 + np.exp(-a * b))
        traces: Array = s * (1 - s) * (a * a + b * b)
        return traces

    def flow(self, time: float) -> Array:
        """Return a and b of the flow `-grad Tr` at a time."""
        a, b = (float(x) for x in self.minimizer)
        difference = (a * a - b * b) * math.exp(-4 * self.variance * time)  # a power would raise where this is infinite
        larger = math.sqrt((math.hypot(difference, 2 * self.logit) + abs(difference)) / 2)
        smaller = abs(self.logit) / larger
        sizes = (larger, smaller) if difference > 0 else (smaller, larger)
        return np.copysign(sizes, (a, b))

    def reached(self, theta: Array) -> Estimate:
        """Return the mean of `-log(D / D(0)) / (4 v)` over (n, 2) points.

        Gradient flow of the loss keeps D, so the oscillation around the minimizers does not matter.
        """
        a, b = self.minimizer
        differences = theta[:, 0] ** 2 - theta[:, 1] ** 2
        times = -np.log(differences / (a * a - b * b)) / (4 * self.variance)
        return mean(times, "", "-log(D / D(0)) / (4v)")
