"""A measured number that carries its error: what every measure of isoloss returns."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isoloss.errors import IsolossError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Z95 = 1.959963984540054  # the 97.5 % point of the standard normal
_ROUNDING = 1e-15  # of a value, below which an error is the rounding of sums
_MOST_DECIMALS = 12
_EXACT = " (exact)"
_EXACT_DIGITS = 5  # significant ones of an exact value; JSON has all
_FEW = 32  # samples, of which one may well make up much of the error
# of a fraction that is printed in percent: the unit in print and the least value; the largest is 1
_FRACTIONS = {"accuracy": ("%", 0.0), "difference in accuracy": ("points", -1.0)}
_LEADING = 0.25  # of the squared error: more than one sample should make up


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """A value, its standard error and what it was measured on.

    Attributes:
        value: The estimate, in `unit`.
        stderr: Its standard error, in `unit`: the estimated standard deviation of `value` over fresh inputs and probes;
            0 for an exact value.
        samples: Number of independent samples that `stderr` rests on; 0 for an exact value.
        unit: E.g. `"nats per predicted token"`; `"accuracy"`, a fraction from 0 to 1, and `"difference in accuracy"`,
            from -1 to 1, are printed in percent and in points.
        num_predictions: Number of predictions (predicted positions, classified examples) that were averaged.
        num_probes: Random probes (or sampled labels) per input; 0 where the measure draws none.
        method: Which estimator ran.
        seconds: Wall-clock time, or None where it was not taken.
        by_parameter: Part of `value` by parameter name, in `unit`, where the measure splits.
        by_parameter_stderr: The standard error of each part, in `unit`.
        by_layer: Part of `value` by layer, in `unit`: sums of `by_parameter`.
        by_layer_stderr: Their standard errors, in `unit`.
        details: What else was decided: device, dtype, attention kernel, parameters counted, positions, seed.
        effective_samples: How many samples of one size the interval counts, where samples differ in size, as documents
            do; None: all of them. For sizes m it is (sum m)^2 / sum m^2
            (`isoloss.statistics.ratio.effective_samples`).
        influence: (n,) float64, n at least `samples`: what each sample adds to the error, and behind the samples what
            else does, such as the means of an auxiliary sample. `stderr` squared is the sum of the squares over
            `samples * (samples - 1)`, and two estimates on the same samples have a paired difference
            (`isoloss.statistics.comparison.paired_difference`). None where it is not known. It is not part of `to_dict`
            and does not count for `==`.

    Example:
        >>> from isoloss import Estimate
        >>> e = Estimate(value=34.08, stderr=0.52, samples=256, unit="nats per predicted token", num_predictions=2048,
        ...              num_probes=1, method="Fisher, exact expectation over labels")
        >>> print(e)
        34.08 ± 0.52 nats per predicted token
        >>> e
        Estimate(34.08 ± 0.52 nats per predicted token; Fisher, exact expectation over labels; 256 samples)
        >>> Estimate.from_dict(e.to_dict()) == e
        True
        >>> print(Estimate(value=8.5, stderr=0.0, samples=0, unit="bits", num_predictions=0, method="enumeration"))
        8.5 bits (exact)
    """

    value: float
    stderr: float
    samples: int
    unit: str
    num_predictions: int
    num_probes: int = 0
    method: str
    seconds: float | None = None
    by_parameter: Mapping[str, float] | None = None
    by_parameter_stderr: Mapping[str, float] | None = None
    by_layer: Mapping[str, float] | None = None
    by_layer_stderr: Mapping[str, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    effective_samples: float | None = None
    influence: NDArray[np.float64] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.stderr < 0:
            raise IsolossError(f"{self.method}: stderr is {self.stderr}; it must be at least 0")
        if not (math.isfinite(self.value) and math.isfinite(self.stderr)):
            raise IsolossError(f"{self.method}: the estimate is not finite (value {self.value}, stderr {self.stderr})")

    @property
    def is_exact(self) -> bool:
        """Whether the value was computed, not estimated from samples."""
        return self.stderr == 0 and self.samples == 0

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the error: `effective_samples` - 1, at least 1; without these, `samples` - 1."""
        # one text that dwarfs all others leaves hardly more than one effective sample, and t of 0 degrees of freedom
        # has no quantiles
        return self.samples - 1 if self.effective_samples is None else max(1.0, self.effective_samples - 1)

    @property
    def ci95(self) -> tuple[float, float]:
        """The 95 % confidence interval, by Student's t with `freedom` degrees of freedom.

        That of an accuracy ends at 0 and 1, and that of a difference of two at -1 and 1: few examples have a wider one.
        Where the value itself is beyond these, as in percent, nothing is cut.
        """
        half = student95(self.freedom) * self.stderr if self.stderr > 0 else 0.0
        low, high = self.value - half, self.value + half
        _, least = _FRACTIONS.get(self.unit, ("", math.inf))
        return (max(low, least), min(high, 1.0)) if least <= self.value <= 1 else (low, high)

    def row(self) -> dict[str, Any]:
        """Return the numbers of a row of a data frame: value, error, 95 % interval, unit and samples."""
        low, high = self.ci95
        numbers = {"value": self.value, "stderr": self.stderr, "low95": low, "high95": high}
        return {**numbers, "unit": self.unit, "samples": self.samples}

    def __str__(self) -> str:
        text = number(self).removesuffix(_EXACT)
        unit, _ = _FRACTIONS.get(self.unit, (self.unit, 0.0))
        return f"{text} {unit}{_EXACT * self.is_exact}"

    def __repr__(self) -> str:
        samples = "" if self.is_exact else f"; {samples_of(self)}"
        return f"Estimate({self}; {self.method}{samples})"

    def _repr_html_(self) -> str:
        """Return a small table for a notebook."""
        rows = {"value": str(self)}
        if self.samples > 1:
            rows |= {"95 % interval": interval(self), "over": samples_of(self)}
        return html_table([[name, text] for name, text in {**rows, "method": self.method}.items()])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, without `influence`."""
        # without the array first: `asdict` copies whatever it meets
        document = dataclasses.asdict(dataclasses.replace(self, influence=None))
        del document["influence"]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Estimate:
        """Return the estimate that `to_dict` wrote."""
        return cls(**document)


def number(estimate: Estimate) -> str:
    """Return an estimate's value and error without the unit; an accuracy's in percent."""
    scale = 100 if estimate.unit in _FRACTIONS else 1
    return rounded(scale * estimate.value, scale * estimate.stderr) + _EXACT * estimate.is_exact


def interval(estimate: Estimate) -> str:
    """Return the two ends of the 95 % interval, with as many digits as the error has; an accuracy's in percent."""
    scale = 100 if estimate.unit in _FRACTIONS else 1
    low, high = (rounded(scale * end, scale * estimate.stderr).split(" ±")[0] for end in estimate.ci95)
    return f"{low} to {high}"


def samples_of(estimate: Estimate) -> str:
    """Return the samples that an error rests on in words, such as 64 sequences; nothing where the estimate is exact."""
    probes = "probes" if 0 < estimate.samples == estimate.num_probes else "samples"
    return "" if estimate.is_exact else f"{estimate.samples:,} {estimate.details.get('clusters', probes)}"


def adjustment(trace: Estimate) -> str:
    """Return how a trace is adjusted to an auxiliary sample, or that this differs from what was measured."""
    details = trace.details
    number = details.get("auxiliary_directions", 0)
    used = ["how probable each is after the one before"] if details.get("auxiliary_bigrams") else []
    used += [f"{number} direction{'s' if number > 1 else ''} of their mean embedding"] if number else []
    if used:
        tokens = f"adjusted with the tokens of all {details['auxiliary_sequences']:,} sequences, to lower the error"
        return f"{tokens} (control variates: {' and '.join(used)})"
    if details.get("auxiliary_differs"):
        return "not adjusted to the rest of the data by its tokens: those that were measured differ from them"
    return ""


def rarity(estimates: Mapping[str, Estimate], names: Sequence[str] = ()) -> str:
    """Return a warning that one sample makes up much of the error of an estimate; empty where none does.

    Of several, which are on the same samples, it is about the one of which this is most true, by what it is called. The
    samples may have `names`.

    Example:
        >>> import numpy as np
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.estimate import rarity
        >>> influence = np.array([9.0] + [1.0] * 39)
        >>> e = Estimate(value=9, stderr=1, samples=40, unit="", num_predictions=40, method="", influence=influence)
        >>> rarity({"a": e})
        'one of the inputs makes up 68 % of the squared error of a: with so few like it, the error is unreliable'
    """
    leading = rare(estimates)
    if not leading:
        return ""
    name = max(leading, key=leading.__getitem__)
    percent = f"{100 * leading[name]:.0f} %"
    part = f"over {percent}" if percent == "25 %" else percent
    samples = next(
        (e.details["clusters"] for e in estimates.values() if "clusters" in e.details),
        "documents" if names else "inputs",
    )
    return (
        f"one of the {samples}{leading_name(estimates[name], names)} makes up {part} of the "
        f"squared error{name and f' of {name}'}: with so few like it, the error is unreliable"
    )


def rare(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the largest part that a sample has in the squared error, of the estimates where it is above a quarter."""
    leading = {name: _leading(estimate) for name, estimate in estimates.items() if estimate.samples >= _FEW}
    return {name: part for name, part in leading.items() if part > _LEADING}


def leading_name(estimate: Estimate, names: Sequence[str]) -> str:
    """Return the name of the sample with the largest part in the squared error, in brackets; empty without names."""
    return f" ({names[leading_sample(estimate)]})" if names and estimate.influence is not None else ""


def leading_sample(estimate: Estimate) -> int:
    """Return the number of the sample with the largest part in the squared error."""
    assert estimate.influence is not None
    return int((estimate.influence[: estimate.samples] ** 2).argmax())


def _leading(estimate: Estimate) -> float:
    """Return the largest part that a sample has in the squared error."""
    if "leading_cluster" in estimate.details or estimate.influence is None:
        return float(estimate.details.get("leading_cluster", 0))
    squares = estimate.influence**2
    return float(squares[: estimate.samples].max() / squares.sum()) if squares.any() else 0.0


def html_table(rows: list[list[str]], header: list[str] | None = None) -> str:
    """Return an HTML table of text."""
    cells = [("th", header)] if header else []
    cells += [("td", row) for row in rows]
    lines = ["".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) for tag, row in cells]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@functools.cache
def student95(freedom: float) -> float:
    """Return half the width of a 95 % interval in standard errors, by Student's t with at least 1 degree of freedom.

    Example:
        >>> from isoloss.statistics.estimate import student95
        >>> round(student95(3), 4), round(student95(10**6), 4)
        (3.1824, 1.96)
    """
    from scipy.special import stdtrit  # what scipy.stats.t calls; scipy.stats takes a second to import

    if freedom < 1:
        raise IsolossError(f"an interval needs at least 2 independent samples, not {freedom + 1}")
    return float(stdtrit(freedom, 0.975))


def rounded(value: float, stderr: float) -> str:
    """Return `value ± stderr` with two significant digits of the error, and as many decimals of the value.

    An exact value has five significant digits, and all those before its decimal point.

    Example:
        >>> from isoloss.statistics.estimate import rounded
        >>> rounded(0.0464321, 0.00118), rounded(1234.5, 120.0), rounded(1e-16, 2e-15)
        ('0.0464 ± 0.0012', '1230 ± 120', '1.0e-16 ± 2.0e-15')
        >>> rounded(3.0, 0.0), rounded(2.659364291, 0.0), rounded(1234567.8, 0.0)
        ('3', '2.6594', '1234568')
        >>> rounded(-0.0004, 0.12)
        '0.00 ± 0.12'
    """
    if stderr <= _ROUNDING * abs(value):  # exact, but for the rounding of sums
        nearest = float(f"{value:.{_EXACT_DIGITS}g}" if abs(value) < 10**_EXACT_DIGITS else f"{value:.0f}")
        return f"{nearest + 0.0:.10g}"  # no -0
    # below 0 for errors from 100 on, where the digits before the point are rounded too
    decimals = 1 - math.floor(math.log10(stderr))
    if decimals > _MOST_DECIMALS:  # rounding, in a difference of two that are the same
        return f"{value + 0.0:.1e} ± {stderr:.1e}"
    places = max(decimals, 0)
    nearest, error = (round(number, decimals) + 0.0 for number in (value, stderr))  # no -0
    return f"{nearest:.{places}f} ± {error:.{places}f}"


def accuracy_bounds(details: Mapping[str, Any]) -> str:
    """Return the accuracies of the majority class and, where it is known, of the Bayes classifier, from `details`."""
    text = f"majority class {100 * details['majority_rate']:.2f} %"
    if "bayes_accuracy" in details:
        text += f", Bayes {rounded(100 * details['bayes_accuracy'], 100 * details['bayes_stderr'])} %"
    return text
