"""Two one-sided tests against scipy and statsmodels, and how often they err over fresh samples."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from isoloss.errors import IsolossError
from isoloss.statistics.equivalence import equivalence, largest_size
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate
from isoloss.studies.verdicts import Verdict, judge


def estimate(value=0.1, stderr=0.2, samples=10):
    return Estimate(value=value, stderr=stderr, samples=samples, unit="points", num_predictions=9, method="paired")


@pytest.mark.parametrize("margin", [0.1, 0.3, 1.0])
@pytest.mark.parametrize(("mean", "alpha"), [(0.2, 0.05), (-0.2, 0.05), (0.0, 0.01)])
def test_it_is_the_test_of_scipy_and_of_statsmodels(margin, mean, alpha):
    pairs = np.random.default_rng(0).normal(mean, 0.5, size=12)
    found = equivalence(ratio_estimate(pairs.tolist(), unit="points", method="paired"), margin, alpha=alpha)
    one_sided = [
        stats.ttest_1samp(pairs, -margin, alternative="greater").pvalue,
        stats.ttest_1samp(pairs, margin, alternative="less").pvalue,
    ]
    assert found.p_value == pytest.approx(max(one_sided), rel=1e-9)
    assert found.p_value == pytest.approx(DescrStatsW(pairs).ttost_mean(-margin, margin)[0], rel=1e-9)
    assert found.interval == pytest.approx(DescrStatsW(pairs).tconfint_mean(2 * alpha), rel=1e-9)
    assert found.shown == (found.p_value < alpha)


@pytest.mark.parametrize("value", [0.1, -0.7, 0.0])
def test_the_smallest_margin_is_where_the_test_begins_to_show(value):
    margin = equivalence(estimate(value), 1.0).smallest_margin
    assert margin == largest_size(estimate(value))
    assert equivalence(estimate(value), margin * (1 + 1e-9)).shown
    assert not equivalence(estimate(value), margin * (1 - 1e-9)).shown
    assert equivalence(estimate(value), margin).p_value == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("value", np.linspace(-0.5, 0.5, 11))
def test_a_claim_of_no_change_is_shown_where_the_test_at_one_in_forty_shows(value):
    shown = judge(estimate(value), "no change within", 0.6) is Verdict.SHOWN
    assert shown == equivalence(estimate(value), 0.6, alpha=0.025).shown


def draws(mean, sd, n, number, seed=0):
    """Estimates of fresh samples."""
    pairs = np.random.default_rng(seed).normal(mean, sd, size=(number, n))
    errors = pairs.std(axis=1, ddof=1) / math.sqrt(n)
    return [estimate(float(v), float(s), n) for v, s in zip(pairs.mean(axis=1), errors, strict=True)]


def test_a_difference_at_the_margin_is_wrongly_shown_as_often_as_stated():
    number = 10_000
    deviation = math.sqrt(0.05 * 0.95 / number)
    sharp = np.mean([equivalence(d, 1.0).shown for d in draws(1.0, 0.2, 6, number)])
    assert sharp == pytest.approx(0.05, abs=3 * deviation)  # the other margin is out of reach
    blunt = np.mean([equivalence(d, 1.0).shown for d in draws(-1.0, 2.0, 6, number)])
    assert blunt < 0.05 + 3 * deviation


@pytest.mark.parametrize(("mean", "exact"), [(0.0, False), (0.3, False), (-3.0, True)])
def test_the_size_is_below_its_bound_as_often_as_stated(mean, exact):
    number = 10_000
    held = np.mean([abs(mean) < largest_size(d) for d in draws(mean, 0.8, 5, number)])
    deviation = math.sqrt(0.05 * 0.95 / number)
    assert held > 0.95 - 3 * deviation
    if exact:  # far from 0 only one end counts
        assert held < 0.95 + 3 * deviation


def test_a_difference_without_error_is_within_or_not():
    assert equivalence(estimate(0.1, 0.0), 0.2).p_value == 0
    assert equivalence(estimate(-0.2, 0.0), 0.2).p_value == 1
    assert equivalence(estimate(-0.3, 0.0, samples=0), 0.2).smallest_margin == 0.3


def test_it_prints_what_was_found():
    assert str(equivalence(estimate(), 0.4)).startswith("not shown to be within ± 0.4 points (p = 0.08")


@pytest.mark.parametrize("margin", [0, -1, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin):
    with pytest.raises(IsolossError, match=r"margin is .*; it must be finite and above 0"):
        equivalence(estimate(), margin)


def test_a_level_out_of_range_and_one_sample_are_refused():
    for alpha in (0, 0.5, 5, math.nan):
        with pytest.raises(IsolossError, match=r"alpha is .*; it must be above 0 and below 0.5"):
            equivalence(estimate(), 1, alpha=alpha)
    with pytest.raises(IsolossError, match="at least 2 independent samples, not 1"):
        largest_size(estimate(samples=1))
