"""A measured number that carries its error: what every measure of isoloss returns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isoloss.errors import IsolossError

Z95 = 1.959963984540054  # the 97.5 % point of the standard normal
_MANY = 200  # degrees of freedom from which the expansion of Student's t around the normal is exact to 1e-8


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value, its standard error and what it was measured on.

    Attributes:
        value: The estimate, in `unit`.
        stderr: Its standard error, in `unit`: the estimated standard deviation of `value` over fresh inputs and probes;
            0 for an exact value.
        samples: Number of independent samples that `stderr` rests on.
        unit: E.g. `"nats per predicted token"`, or `"accuracy"`: a share from 0 to 1, printed in percent.
        num_inputs: Number of inputs (predicted positions, examples) that were averaged.
        num_probes: Random probes (or sampled labels) per input; 0 where the measure draws none.
        method: Which estimator ran.
        seconds: Wall-clock time, or None where it was not taken.
        by_parameter: Share of `value` by parameter name, in `unit`, where the measure splits.
        by_parameter_stderr: The standard error of each share, in `unit`.
        by_layer: Share of `value` by layer, in `unit`: sums of `by_parameter`.
        by_layer_stderr: Their standard errors, in `unit`.
        details: What else was decided: device, dtype, attention kernel, parameters counted, positions, seed.

    Example:
        >>> e = Estimate(value=34.08, stderr=0.52, samples=256, unit="nats per predicted token", num_inputs=2048,
        ...              num_probes=1, method="fisher, labels integrated out")
        >>> print(e)
        34.08 ± 0.52 nats per predicted token
        >>> Estimate.from_dict(e.to_dict()) == e
        True
    """

    value: float
    stderr: float
    samples: int
    unit: str
    num_inputs: int
    num_probes: int = 0
    method: str
    seconds: float | None = None
    by_parameter: Mapping[str, float] | None = None
    by_parameter_stderr: Mapping[str, float] | None = None
    by_layer: Mapping[str, float] | None = None
    by_layer_stderr: Mapping[str, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.isfinite(self.stderr) and self.stderr >= 0):
            raise IsolossError(f"{self.method}: the estimate is not finite (value {self.value}, stderr {self.stderr})")

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % confidence interval, by Student's t with `samples` - 1 degrees of freedom."""
        half = student95(self.samples - 1) * self.stderr if self.stderr > 0 else 0.0
        return self.value - half, self.value + half

    def __str__(self) -> str:
        if self.unit == "accuracy":  # a share, which people read in percent
            return f"{rounded(100 * self.value, 100 * self.stderr)} %"
        return f"{rounded(self.value, self.stderr)} {self.unit}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Estimate:
        """Return the estimate that `to_dict` wrote."""
        return cls(**document)


@functools.cache
def student95(freedom: int) -> float:
    """Return the 97.5 % point of Student's t: half the width of a 95 % interval, in standard errors.

    Args:
        freedom: Degrees of freedom, at least 1.

    Raises:
        IsolossError: Fewer than 1: one sample says nothing about its own spread.

    Example:
        >>> round(student95(3), 4), round(student95(10**6), 4)
        (3.1824, 1.96)
    """
    if freedom < 1:
        raise IsolossError(f"an interval needs at least 2 independent samples, not {freedom + 1}")
    if freedom > _MANY:  # Abramowitz and Stegun 26.7.5
        z = Z95
        terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
    low, high = Z95, 13.0  # t is 12.7 at one degree of freedom
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _student_within(t: float, freedom: int) -> float:
    """Return Pr(|T| < t) for Student's T: a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):  # the terms' ratios are k cos^2 / (k + 1)
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def rounded(value: float, stderr: float) -> str:
    """Return `value ± stderr` with two significant digits of the error, and as many decimals of the value.

    Example:
        >>> rounded(0.0464321, 0.00118), rounded(1234.5, 120.0), rounded(3.0, 0.0)
        ('0.0464 ± 0.0012', '1230 ± 120', '3')
    """
    if stderr == 0:
        return f"{value:.10g}"
    decimals = 1 - math.floor(math.log10(stderr))
    if decimals > 0:
        return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
    return f"{round(value, decimals):.0f} ± {round(stderr, decimals):.0f}"
