"""Tests of a mean difference: is it 0, is it shown to be near 0; Holm's correction of several; McNemar's test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isoloss.errors import IsolossError
from isoloss.statistics.checking import fraction, positive
from isoloss.statistics.estimate import Estimate, rounded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LOSS_MARGIN = 0.01  # default margin within which two models have the same loss, per predicted token
MIN_RATIO = 1.05  # default of the smallest ratio of two traces that counts


def p_value(difference: Estimate) -> float:
    """Return the two-sided p-value of a difference against 0: `P(|T| > |value| / stderr)`.

    T is Student's with the difference's `freedom`, as the interval: it is below 0.05 just where `ci95` is without
    0. Without an error it is 0, and 1 for a difference of 0.

    Raises:
        IsolossError: Fewer than 2 samples.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.significance import p_value
        >>> d = Estimate(value=2.306, stderr=1.0, samples=9, unit="nats", num_predictions=9, method="paired difference")
        >>> round(p_value(d), 3)
        0.05
    """
    from scipy.special import stdtr

    if difference.stderr == 0:
        return float(difference.value == 0)
    if difference.samples < 2:
        raise IsolossError(f"a p-value needs at least 2 independent samples, not {difference.samples}")
    # the lower tail: 1 - stdtr would round small p-values to 0
    return 2 * float(stdtr(difference.freedom, -abs(difference.value) / difference.stderr))


def holm(
    p_values: Mapping[str, float], *, tests: int | None = None, exclusive: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return p-values adjusted for the number of tests by Holm's method (1979), in the order given.

    With p_(1) <= ... <= p_(k) of m tests, the adjusted p_(i) is the largest of min(1, (m - j + 1) p_(j)) over j <= i.
    Rejecting where it is at most alpha, the probability of rejecting any true hypothesis is at most alpha, however the
    tests depend on each other.

    Hypotheses that exclude each other, such as "no effect" and "an effect of 0.5 or more", count as one test until all
    of them are rejected, as at most one of them is true (Shaffer, 1986). They count for as long: where one is rejected,
    another may be the true one.

    Args:
        p_values: By the test's name.
        tests: m, if more were planned than were made: a test that was not made counts with p = 1.
        exclusive: For hypotheses that exclude each other, a name that they share.

    Raises:
        IsolossError: There is none, one is not between 0 and 1, or there are more than `tests`.

    Example:
        >>> from isoloss.statistics.significance import holm
        >>> holm({"flatter": 0.01, "transfers better": 0.04, "same loss": 0.03})
        {'flatter': 0.03, 'transfers better': 0.06, 'same loss': 0.06}
        >>> holm({"flatter": 0.01}, tests=5)
        {'flatter': 0.05}
    """
    if not p_values:
        raise IsolossError("Holm's correction needs at least one p-value")
    test_of = {name: (exclusive or {}).get(name, name) for name in p_values}
    unrejected = Counter(test_of.values())
    left, largest, adjusted = len(unrejected) if tests is None else tests, 0.0, {}
    if left < len(unrejected):
        raise IsolossError(f"there are p-values of {len(unrejected)} tests, of which {tests} were planned")
    for name, p in sorted(p_values.items(), key=lambda item: item[1]):
        if not 0 <= p <= 1:
            raise IsolossError(f"the p-value of {name} is {p}; it must be from 0 to 1")
        adjusted[name] = largest = max(largest, min(1.0, left * p))
        unrejected[test_of[name]] -= 1
        if unrejected[test_of[name]] == 0:
            left -= 1
    return {name: adjusted[name] for name in p_values}


# --- equivalence ------------------------------------------------------------------------------------------------------


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
    wrongly shown with a probability of at most alpha. `isoloss.studies.claims.judge` asks for the 95 % interval,
    which is the same test with alpha 0.025.

    Args:
        difference: Its stderr is over at least 2 independent samples.
        margin: Above 0, chosen before the difference is seen; in its unit.
        alpha: The level, below 0.5.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.significance import equivalence
        >>> d = Estimate(value=0.1, stderr=0.2, samples=10, unit="points", num_predictions=10, method="paired")
        >>> print(equivalence(d, 0.5))
        within ± 0.5 points (p = 0.038, 90 % interval -0.27 to 0.47, smallest margin 0.47)
    """
    from scipy.special import stdtr

    positive("margin", margin)
    interval = _interval(difference, alpha)
    # the larger of the two p-values is at the end of the margin that the value is nearer to
    nearer = abs(difference.value) - margin
    exact = difference.stderr == 0
    p = float(nearer >= 0) if exact else float(stdtr(difference.freedom, nearer / difference.stderr))
    return Equivalence(
        difference=difference,
        margin=margin,
        alpha=alpha,
        p_value=p,
        interval=interval,
        smallest_margin=max(map(abs, interval)),
    )


def is_beyond(difference: Estimate, margin: float) -> bool:
    """Return whether the 95 % interval of a difference is outside of `-margin` to `margin`."""
    low, high = difference.ci95
    return low > margin or high < -margin


def all_within(differences: Mapping[str, Estimate], margin: float) -> tuple[bool | None, str]:
    """Return whether all differences are within a margin, and the name of one that decides it.

    True: `equivalence` is shown of each. False: the 95 % interval of one is beyond the margin, however uncertain a
    larger difference is. None: neither is shown. Of several that decide it, the name is that of the largest.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.significance import all_within
        >>> known = {"samples": 99, "unit": "nats", "num_predictions": 99, "method": "paired difference"}
        >>> differences = {"sure": Estimate(value=0.02, stderr=0.001, **known)}
        >>> differences["wide"] = Estimate(value=0.03, stderr=0.1, **known)
        >>> all_within(differences, 0.01), all_within(differences, 0.03), all_within(differences, 1.0)
        ((False, 'sure'), (None, 'wide'), (True, 'wide'))
    """
    open_ones = {name: each for name, each in differences.items() if not equivalence(each, margin).shown}
    beyond = {name: each for name, each in open_ones.items() if is_beyond(each, margin)}
    decisive = beyond or open_ones or differences
    name = max(decisive, key=lambda name: abs(decisive[name].value))
    return (False if beyond else None if open_ones else True), name


def largest_size(difference: Estimate, *, alpha: float = 0.05) -> float:
    """Return X such that the size of the true difference is below X with a confidence of at least 1 - alpha.

    It is the larger of `abs(d - t s)` and `abs(d + t s)`, with t the 1 - alpha point of Student's t: the smallest
    margin for which `equivalence` would be shown. Arguments are as for `equivalence`.
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


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """The exact test of whether two classifiers err equally often (McNemar, 1947)."""

    only_first: int  # examples that the first classifies correctly and the second does not
    only_second: int  # the reverse
    p_value: float  # two-sided probability, if both err equally often, of a split of these at least as uneven


def mcnemar(correct_a: NDArray[np.bool_], correct_b: NDArray[np.bool_]) -> McNemar:
    """Return McNemar's test of two classifiers, from which of the same n examples each gets right.

    Given that the two disagree on m examples, the number that only the first gets right is binomial (m, 1/2) if both
    err equally often. The probability is exact, not from the chi-squared approximation.

    Raises:
        IsolossError: The shapes differ.

    Example:
        >>> import numpy as np
        >>> from isoloss.statistics.significance import mcnemar
        >>> mcnemar(np.array([True] * 6), np.array([False] * 5 + [True]))
        McNemar(only_first=5, only_second=0, p_value=0.0625)
    """
    from scipy.special import bdtr

    if correct_a.shape != correct_b.shape or correct_a.ndim != 1:
        raise IsolossError(
            f"McNemar's test needs two (examples,) arrays of one shape, not {correct_a.shape} and {correct_b.shape}"
        )
    only_a, only_b = int((correct_a & ~correct_b).sum()), int((correct_b & ~correct_a).sum())
    # scipy.stats.binomtest gives the same, and takes long to import
    p_value = 2 * float(bdtr(min(only_a, only_b), only_a + only_b, 0.5))
    # where the split is even, both tails have the middle, and twice the probability is above 1
    return McNemar(only_first=only_a, only_second=only_b, p_value=min(1.0, p_value))
