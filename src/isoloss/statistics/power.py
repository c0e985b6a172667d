"""How many pairs a study needs, and what it can find with those that it has.

A pair is one independent difference. Where differences come in clusters, such as the seeds of one grammar, the pairs
are the clusters and the deviation is taken over their means (`isoloss.statistics.clusters.variance_components`).
For one of m tests under Holm's correction, planning with alpha / m is safe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from isoloss.errors import IsolossError
from isoloss.statistics.checking import count, fraction, positive

_MOST_PAIRS = 1_000_000
_TAIL = 1e-14  # of the distribution of the standard deviation, which is left out at either end
_STEP = 6.0  # beyond which the normal distribution function is flat


def paired_power(effect: float, sd: float, pairs: int, *, alpha: float = 0.05) -> float:
    """Return the power of the two-sided paired t test: how likely an effect of this size is found.

    `P(|T| > t)` for T of a noncentral t distribution with n - 1 degrees of freedom and noncentrality effect sqrt(n) /
    sd, and t the 1 - alpha / 2 point of Student's t (Cohen, 1988, section 2.5).

    Args:
        effect: The true mean of the differences; its sign does not matter. 0 gives alpha.
        sd: The standard deviation of the differences over pairs, in the unit of the effect.
        pairs: n, at least 2.
        alpha: The level of the test.

    Example:
        >>> from isoloss.statistics.power import paired_power
        >>> round(paired_power(1.0, sd=1.0, pairs=10), 4)
        0.8031
    """
    from scipy.special import ndtr, stdtrit

    _check(effect, sd, pairs)
    fraction("alpha", alpha)
    shift, t = effect / sd * math.sqrt(pairs), float(stdtrit(pairs - 1, 1 - alpha / 2))
    # given the measured deviation u, the test finds an effect where a normal number with the mean `shift` is beyond t u
    return _mean_over_sd(pairs - 1, lambda u: float(ndtr(shift - t * u) + ndtr(-shift - t * u)), t, [abs(shift)])


def equivalence_power(margin: float, sd: float, pairs: int, *, effect: float = 0.0, alpha: float = 0.05) -> float:
    """Return how likely two one-sided paired t tests show a true mean difference to be within the margin.

    With u the measured sd over the true one, (n - 1) u^2 chi-squared, it is the mean over u, where this is above 0, of
    Phi((margin - effect) sqrt(n) / sd - t u) - Phi(-(margin + effect) sqrt(n) / sd + t u), and t the 1 - alpha point
    of Student's t: exact (Phillips, 1990, by Owen's Q; here by quadrature). Arguments and errors are as for
    `paired_power`, and the margin is above 0 and alpha below 0.5.

    Example:
        >>> from isoloss.statistics.power import equivalence_power
        >>> round(equivalence_power(1.0, sd=1.0, pairs=10), 4), round(equivalence_power(1.0, 1.0, 10, effect=0.5), 4)
        (0.7952, 0.424)
    """
    from scipy.special import ndtr, stdtrit

    positive("margin", margin)
    _check(effect, sd, pairs)
    fraction("alpha", alpha, below=0.5)
    scale, t = math.sqrt(pairs) / sd, float(stdtrit(pairs - 1, 1 - alpha))
    above, below = (margin - effect) * scale, (margin + effect) * scale
    most = (above + below) / (2 * t)  # the largest u for which any mean shows equivalence
    return _mean_over_sd(
        pairs - 1, lambda u: float(ndtr(above - t * u) - ndtr(t * u - below)), t, [above, below], most=most
    )


def pairs_for_power(effect: float, sd: float, *, power: float = 0.8, alpha: float = 0.05) -> int:
    """Return the smallest number of pairs with which `paired_power` is at least `power`; over a million are refused.

    Arguments and errors are as for `paired_power`.

    Example:
        >>> from isoloss.statistics.power import pairs_for_power
        >>> pairs_for_power(0.5, sd=1.0), pairs_for_power(0.5, sd=1.0, power=0.95)
        (34, 54)
    """
    if effect == 0:
        raise IsolossError("effect is 0; no number of pairs finds it, so name the smallest one worth finding")
    return _least_pairs(lambda pairs: paired_power(effect, sd, pairs, alpha=alpha), power)


def pairs_for_equivalence(
    margin: float, sd: float, *, effect: float = 0.0, power: float = 0.8, alpha: float = 0.05
) -> int:
    """Return the smallest number of pairs with which `equivalence_power` is at least `power`; at most a million.

    Arguments and errors are as for `equivalence_power`.

    Example:
        >>> from isoloss.statistics.power import pairs_for_equivalence
        >>> pairs_for_equivalence(1.0, sd=1.0), pairs_for_equivalence(1.0, sd=1.0, effect=0.5)
        (11, 27)
    """
    positive("margin", margin)
    if abs(effect) >= margin:
        raise IsolossError(f"effect is {effect}, at or beyond the margin of {margin}; equivalence is then not true")
    return _least_pairs(lambda n: equivalence_power(margin, sd, n, effect=effect, alpha=alpha), power)


def minimal_detectable_effect(sd: float, pairs: int, *, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest effect that the two-sided paired t test finds with this power.

    Where a study does not find an effect, it does not exclude one below this: to state what it excludes, take
    `isoloss.statistics.significance.largest_size` of what it measured. Arguments and errors are as for `paired_power`.

    Example:
        >>> from isoloss.statistics.power import minimal_detectable_effect
        >>> round(minimal_detectable_effect(1.0, 10), 3)
        0.996
    """
    _check(0.0, sd, pairs)
    fraction("alpha", alpha)
    fraction("power", power)
    if power <= alpha:
        raise IsolossError(f"power is {power}, not above alpha, {alpha}; an effect of 0 has that already")
    return sd * _detectable_in_sd(pairs, power, alpha)


def sd_upper_bound(sd: float, pairs: int, *, confidence: float = 0.8) -> float:
    """Return an upper bound of the true standard deviation, from the standard deviation of a pilot.

    For n pairs of normal differences it is sd sqrt((n - 1) / c), with c the 1 - confidence point of chi-squared with
    n - 1 degrees of freedom. With this confidence, the true one is below it, and a study planned with it has at least
    the stated power (Browne, 1995); planned with the pilot's own sd it has that power in no more than about half of all
    cases.

    Args:
        sd: The standard deviation of the differences in the pilot.
        pairs: n, the pilot's pairs, at least 2.
        confidence: Above 0 and below 1.

    Example:
        >>> from isoloss.statistics.power import sd_upper_bound
        >>> round(sd_upper_bound(1.0, 3), 2), round(sd_upper_bound(1.0, 30), 2)
        (2.12, 1.14)
    """
    from scipy.special import chdtri

    _check(0.0, sd, pairs)
    fraction("confidence", confidence)
    return sd * math.sqrt((pairs - 1) / float(chdtri(pairs - 1, confidence)))


def _check(effect: float, sd: float, pairs: int) -> None:
    if not math.isfinite(effect):
        raise IsolossError(f"effect is {effect}; it must be finite")
    positive("sd", sd)
    count("pairs", pairs, 2)


@functools.cache
def _detectable_in_sd(pairs: int, power: float, alpha: float) -> float:
    from scipy.optimize import brentq

    high = 1.0
    while paired_power(high, 1.0, pairs, alpha=alpha) < power:
        high *= 2
    return float(brentq(lambda size: paired_power(size, 1.0, pairs, alpha=alpha) - power, 0, high, xtol=1e-10))


def _least_pairs(power_of: Callable[[int], float], power: float) -> int:
    """Return the smallest n with the power, which grows with n."""
    fraction("power", power)
    low, high = 1, 2
    while power_of(high) < power:
        low, high = high, 2 * high
        if low > _MOST_PAIRS:
            raise IsolossError(f"a power of {power} takes more than {_MOST_PAIRS:,} pairs")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= power else (middle, high)
    return high


def _mean_over_sd(
    freedom: int, function: Callable[[float], float], t: float, steps: Sequence[float], *, most: float = math.inf
) -> float:
    """Return the mean of a function of u up to `most`, where freedom u^2 is chi-squared.

    The function is smooth in t u, apart from steps down at the values `steps` of t u. scipy's noncentral t gives NaN
    for noncentralities that occur here (effect 0.1 sd, 100,000 pairs).
    """
    from scipy.integrate import quad
    from scipy.special import chdtri, gammaln

    half = freedom / 2
    # in logarithms: the power of half and the gamma function overflow from a few hundred pairs on
    constant = math.log(2) + half * math.log(half) - float(gammaln(half))

    def density(u: float) -> float:
        return math.exp(constant + (freedom - 1) * math.log(u) - half * u * u)

    # chdtri inverts the upper tail, so the low end comes first
    low, high = (math.sqrt(float(chdtri(freedom, p)) / freedom) for p in (1 - _TAIL, _TAIL))
    high = min(high, most)
    if high <= low:
        return 0.0
    # the range is split at the bulk of the density and at the steps, so that quadrature overlooks neither
    width = 3 / math.sqrt(2 * freedom)
    points = [1 - width, 1.0, 1 + width, *((step + off) / t for step in steps for off in (-_STEP, 0, _STEP))]
    ends = [low, *sorted(point for point in points if low < point < high), high]
    parts = (quad(lambda u: density(u) * function(u), *ends, epsabs=1e-12, epsrel=1e-10)[0] for ends in pairwise(ends))
    return min(1.0, max(0.0, math.fsum(parts)))
