"""Differences of independent estimates: against scipy's Welch test, by hand, and how often the interval is right."""

import math

import numpy as np
import pytest
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics.comparison import independent_difference, paired_difference
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate
from isoloss.statistics.significance import p_value


def mean(values, unit="nats"):
    values = np.asarray(values, float)
    stderr = values.std(ddof=1) / math.sqrt(len(values))
    return Estimate(
        value=values.mean(), stderr=stderr, samples=len(values), unit=unit, num_predictions=1, method="mean"
    )


@pytest.mark.parametrize(("m", "n"), [(3, 3), (2, 12), (40, 5)])
def test_it_is_welchs_test(m, n):
    g = np.random.default_rng(m)
    a, b = g.normal(0, 1, m), g.normal(0.7, 5, n)
    found, theirs = independent_difference(mean(b), mean(a)), stats.ttest_ind(b, a, equal_var=False)
    assert found.freedom == pytest.approx(theirs.df, rel=1e-9)
    assert p_value(found) == pytest.approx(theirs.pvalue, rel=1e-9)
    interval = theirs.confidence_interval(0.95)
    assert found.ci95 == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_by_hand():
    first, second = (
        Estimate(value=v, stderr=s, samples=k, unit="accuracy", num_predictions=1, method="")
        for v, s, k in ((0.50, 0.03, 5), (0.56, 0.04, 11))
    )
    found = independent_difference(second, first)
    assert (found.value, found.stderr, found.unit) == (pytest.approx(6), pytest.approx(5), "percentage points")
    assert found.freedom == pytest.approx(25**2 / (9**2 / 4 + 16**2 / 10))
    assert str(found) == "6.0 ± 5.0 percentage points"


def test_what_is_exact_adds_no_error():
    exact = Estimate(value=1.0, stderr=0.0, samples=0, unit="nats", num_predictions=1, method="enumeration")
    sampled = mean([1.0, 2.0, 4.0])
    found = independent_difference(sampled, exact)
    assert (found.stderr, found.freedom) == (pytest.approx(sampled.stderr), pytest.approx(2))
    same = independent_difference(exact, exact)
    assert (same.ci95, p_value(same), same.is_exact) == ((0, 0), 1, True)
    other = Estimate(value=2.0, stderr=0.0, samples=0, unit="nats", num_predictions=1, method="enumeration")
    assert p_value(independent_difference(other, exact)) == 0


def test_differences_of_the_same_two_samples_can_be_paired():
    g = np.random.default_rng(0)
    one, other = g.normal(size=(2, 7)), g.normal(size=(2, 30))
    gaps = [
        independent_difference(*(ratio_estimate(list(values), unit="nats", method="loss") for values in (a, b)))
        for a, b in zip(one, other, strict=True)
    ]
    squared = sum(np.var(pair[0] - pair[1], ddof=1) / pair.shape[1] for pair in (one, other))
    found = paired_difference(*gaps)
    assert found.value == pytest.approx(gaps[0].value - gaps[1].value)
    assert found.stderr == pytest.approx(math.sqrt(squared))
    # the samples of the second, and of the first with their sign turned, as its mean is
    assert np.sign(gaps[0].influence).tolist() == [
        *np.sign(one[0] - one[0].mean()),
        *-np.sign(other[0] - other[0].mean()),
    ]
    assert independent_difference(gaps[0], mean([1, 2])).influence is None


def test_what_has_no_difference_is_refused():
    with pytest.raises(IsolossError, match="one unit, not 'bits' and 'nats'"):
        independent_difference(mean([1, 2], "bits"), mean([1, 2]))
    alone = Estimate(value=1.0, stderr=0.5, samples=1, unit="nats", num_predictions=1, method="")
    with pytest.raises(IsolossError, match="at least 2 independent samples, not 1"):
        independent_difference(alone, mean([1, 2]))


@pytest.mark.parametrize(("sizes", "sds"), [((12, 12), (1.0, 1.0)), ((6, 12), (2.0, 1.0)), ((40, 40), (1.0, 3.0))])
def test_one_in_twenty_differences_of_the_same_is_outside(sizes, sds):
    g, draws = np.random.default_rng(7), 4000
    samples = [g.normal(0, sd, (draws, size)) for size, sd in zip(sizes, sds, strict=True)]
    outside = 0
    for a, b in zip(*samples, strict=True):
        low, high = independent_difference(mean(b), mean(a)).ci95
        outside += not low <= 0 <= high
    assert abs(outside / draws - 0.05) < 3.5 * math.sqrt(0.05 * 0.95 / draws)
