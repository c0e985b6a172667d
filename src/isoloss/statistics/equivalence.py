"""Whether a mean difference is shown to be equivalent to zero, and how large it could still be."""

from __future__ import annotations

from dataclasses import dataclass

from isoloss.errors import IsolossError
from isoloss.statistics.checking import fraction, positive
from isoloss.statistics.estimate import Estimate, rounded

SAME_LOSS_NATS = 0.01  # default margin within which two models have the same loss, per predicted token


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """The outcome of two one-sided tests.

    Attributes:
        difference: What was tested.
        margin: How far from 0 it may be, in its unit.
        alpha: The level of the test.
        p_value: The larger one of the two one-sided tests.
        interval: The confidence interval of level 1 - 2 alpha: 90 % for 0.05.
        smallest_margin: The smallest margin that would have been shown: the end of the interval farther from 0.
    """

    difference: Estimate
    margin: float
    alpha: float
    p_value: float
    interval: tuple[float, float]
    smallest_margin: float

    @property
    def shown(self) -> bool:
        """Whether the difference is shown to be within the margin."""
        return self.p_value < self.alpha

    def __str__(self) -> str:
        low, high, end = (
            rounded(value, self.difference.stderr).split(" ±")[0] for value in (*self.interval, self.smallest_margin)
        )
        return (
            f"{'within' if self.shown else 'not shown to be within'} ± {self.margin:g} {self.difference.unit} "
            f"(p = {self.p_value:.2g}, {100 - 200 * self.alpha:g} % interval {low} to {high}, smallest margin {end})"
        )


def equivalence(difference: Estimate, margin: float, *, alpha: float = 0.05) -> Equivalence:
    """Test whether a mean paired difference is 0 within a margin: two one-sided t tests (Schuirmann, 1987).

    With the value d, the standard error s and f = `samples` - 1 degrees of freedom, the p-values are
    P(T_f > (d + margin) / s) and P(T_f < (d - margin) / s); both have to be below alpha. That is so just when the
    interval d ± t(f, 1 - alpha) s lies within the margin. If the true difference is at the margin or beyond, this is
    wrongly shown with a probability of at most alpha. `isoloss.studies.verdicts.judge` asks for the 95 % interval,
    which is the same test with alpha 0.025.

    Args:
        difference: Its stderr is over independent samples, e.g. of `isoloss.statistics.clusters.cluster_mean`.
        margin: Above 0, chosen before the difference is seen; in its unit.
        alpha: The level, below 0.5.

    Raises:
        IsolossError: A margin of 0 or less, an alpha out of range, or fewer than 2 samples.

    Example:
        >>> d = Estimate(value=0.1, stderr=0.2, samples=10, unit="points", num_predictions=10, method="paired")
        >>> print(equivalence(d, 0.5))
        within ± 0.5 points (p = 0.038, 90 % interval -0.27 to 0.47, smallest margin 0.47)
    """
    positive("margin", margin)
    interval = _interval(difference, alpha)
    return Equivalence(
        difference=difference,
        margin=margin,
        alpha=alpha,
        p_value=_p_value(difference, margin),
        interval=interval,
        smallest_margin=max(map(abs, interval)),
    )


def largest_size(difference: Estimate, *, alpha: float = 0.05) -> float:
    """Return X such that the size of the true difference is below X with a confidence of at least 1 - alpha.

    X is the larger one of `|d - t s|` and `|d + t s|`, with t the 1 - alpha point of Student's t: the smallest
    margin that two one-sided tests would show. Arguments and errors are those of `equivalence`.

    Example:
        >>> d = Estimate(value=0.1, stderr=0.2, samples=10, unit="points", num_predictions=10, method="paired")
        >>> round(largest_size(d), 3)
        0.467
    """
    return max(map(abs, _interval(difference, alpha)))


def _interval(difference: Estimate, alpha: float) -> tuple[float, float]:
    from scipy.special import stdtrit

    fraction("alpha", alpha, below=0.5)
    if difference.stderr == 0:
        return difference.value, difference.value
    if difference.samples < 2:
        raise IsolossError(f"a test of equivalence needs at least 2 independent samples, not {difference.samples}")
    half = float(stdtrit(difference.freedom, 1 - alpha)) * difference.stderr
    return difference.value - half, difference.value + half


def _p_value(difference: Estimate, margin: float) -> float:
    from scipy.special import stdtr

    nearer = abs(difference.value) - margin
    if difference.stderr == 0:
        return float(nearer >= 0)
    return float(stdtr(difference.freedom, nearer / difference.stderr))
