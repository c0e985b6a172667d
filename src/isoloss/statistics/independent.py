"""Differences between estimates on independent samples, such as a study and its repetition with other seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate, rounded, student95


@dataclass(frozen=True, kw_only=True)
class IndependentDifference:
    """A second estimate minus a first one, which have no sample in common.

    Attributes:
        value: The difference, in `unit`.
        stderr: Its standard error, in `unit`.
        freedom: Degrees of freedom, not a whole number in general; infinite if both estimates are exact.
        unit: Of the difference.
    """

    value: float
    stderr: float
    freedom: float
    unit: str

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % confidence interval, by Student's t."""
        half = student95(self.freedom) * self.stderr if self.stderr > 0 else 0.0
        return self.value - half, self.value + half

    @property
    def p_value(self) -> float:
        """The two-sided p-value against 0: below 0.05 just where `ci95` is without 0."""
        from scipy.special import stdtr

        if self.stderr == 0:
            return float(self.value == 0)
        return 2 * float(stdtr(self.freedom, -abs(self.value) / self.stderr))

    def __str__(self) -> str:
        return f"{rounded(self.value, self.stderr)} {self.unit}"


def independent_difference(second: Estimate, first: Estimate) -> IndependentDifference:
    """Return second - first with the standard error sqrt(a^2 + b^2), for those of the two.

    The degrees of freedom are those of Welch (1938) and Satterthwaite (1946), (a^2 + b^2)^2 / (a^4 / f_a + b^4 / f_b),
    with f the `freedom` of each. For two means of independent samples it is Welch's t test. Accuracies become
    percentage points.

    Raises:
        IsolossError: The units differ, or an estimate with an error has fewer than 2 samples.

    Example:
        >>> known = {"unit": "nats", "num_predictions": 9, "method": "mean over seeds"}
        >>> a = Estimate(value=1.0, stderr=0.3, samples=3, **known)
        >>> b = Estimate(value=2.0, stderr=0.4, samples=3, **known)
        >>> d = independent_difference(b, a)
        >>> print(d, round(d.freedom, 2))
        1.00 ± 0.50 nats 3.71
    """
    if first.unit != second.unit:
        raise IsolossError(f"a difference needs two estimates of one unit, not {second.unit!r} and {first.unit!r}")
    for estimate in (first, second):
        if estimate.stderr > 0 and estimate.samples < 2:
            raise IsolossError(f"an error needs at least 2 independent samples, not {estimate.samples}")
    scale, unit = (100, "percentage points") if first.unit == "accuracy" else (1, first.unit)
    squares = [(estimate.stderr**2, estimate.freedom) for estimate in (first, second) if estimate.stderr > 0]
    total = math.fsum(square for square, _ in squares)
    return IndependentDifference(
        value=scale * (second.value - first.value),
        stderr=scale * math.sqrt(total),
        freedom=1 / sum((square / total) ** 2 / freedom for square, freedom in squares) if squares else math.inf,
        unit=unit,
    )
