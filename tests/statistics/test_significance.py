"""Tests of a difference against scipy, statsmodels and all intersections of hypotheses, and how often they err."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate
from isoloss.statistics.significance import equivalence, holm, largest_size, p_value
from isoloss.studies.claims import Verdict, judge


def named(p_values):
    return {str(index): p for index, p in enumerate(p_values)}


def test_it_closes_bonferronis_test_over_all_subsets():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        p_values = np.round(rng.uniform(size=rng.integers(1, 6)) ** 3, 2).tolist()  # with ties, zeros and ones
        tests = range(len(p_values))
        subsets = [s for size in tests for s in itertools.combinations(tests, size + 1)]
        expected = [max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in subsets if i in s) for i in tests]
        found = holm(named(p_values))
        assert list(found) == list(named(p_values))
        assert list(found.values()) == pytest.approx(expected, rel=1e-12)
        if seed == 0:  # statsmodels takes a fifth of a second
            assert list(found.values()) == pytest.approx(list(multipletests(p_values, method="holm")[1]), rel=1e-12)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_a_true_hypothesis_is_rejected_as_rarely_as_stated(shared):
    number, tests, false = 4_000, 6, 2
    rng = np.random.default_rng(0)
    z = math.sqrt(1 - shared) * rng.standard_normal((number, tests)) + math.sqrt(shared) * rng.standard_normal(
        (number, 1)
    )
    z[:, :false] += 4  # these two hypotheses are false
    p_values = 2 * stats.norm.sf(np.abs(z))
    adjusted = np.array([list(holm(named(row)).values()) for row in p_values])
    rate = (adjusted[:, false:] <= 0.05).any(axis=1).mean()
    deviation = math.sqrt(0.05 * 0.95 / number)
    assert rate < 0.05 + 3 * deviation
    assert (p_values[:, false:] <= 0.05).any(axis=1).mean() > 0.05 + 3 * deviation  # without the correction
    if shared == 0:  # where the false two are nearly always rejected, the four others are tested at 1 / 4 each
        assert rate == pytest.approx(1 - (1 - 0.05 / 4) ** 4, abs=0.1 * 0.05 + 3 * deviation)
    assert (adjusted <= 0.05).sum() > (tests * p_values <= 0.05).sum()  # more than Bonferroni finds


def test_the_p_value_is_that_of_the_t_test_and_of_the_interval():
    pairs = np.random.default_rng(0).normal(0.4, 1, size=9)
    difference = ratio_estimate(pairs.tolist(), unit="points", method="paired")
    assert p_value(difference) == pytest.approx(stats.ttest_1samp(pairs, 0).pvalue, rel=1e-9)
    low, high = difference.ci95
    at_the_end = Estimate(**{**vars(difference), "value": (high - low) / 2})
    assert p_value(at_the_end) == pytest.approx(0.05, rel=1e-9)
    assert (p_value(estimate(0.1, 0.0, 0)), p_value(estimate(0.0, 0.0, 0))) == (0, 1)


def test_what_is_no_p_value_is_refused():
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(IsolossError, match=r"the p-value of b is .*; it must be from 0 to 1"):
            holm({"a": 0.5, "b": wrong, "c": 0.1})
    with pytest.raises(IsolossError, match="at least one p-value"):
        holm({})
    one = Estimate(value=1.0, stderr=0.1, samples=1, unit="nats", num_predictions=1, method="m")
    with pytest.raises(IsolossError, match="at least 2 independent samples, not 1"):
        p_value(one)


# --- equivalence ------------------------------------------------------------------------------------------------------


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
    exact = equivalence(estimate(value, 0.0), 0.2)
    assert (exact.p_value, exact.smallest_margin) == (abs(value) > 0.2, abs(value))


def test_a_claim_of_no_change_is_shown_where_the_test_at_one_in_forty_shows():
    for value in np.linspace(-0.5, 0.5, 11):
        shown = judge(estimate(value), "no change within", 0.6) is Verdict.SHOWN
        assert shown == equivalence(estimate(value), 0.6, alpha=0.025).shown


def draws(mean, sd, n, number, seed=0):
    """Estimates of fresh samples."""
    pairs = np.random.default_rng(seed).normal(mean, sd, size=(number, n))
    errors = pairs.std(axis=1, ddof=1) / math.sqrt(n)
    return [estimate(float(v), float(s), n) for v, s in zip(pairs.mean(axis=1), errors, strict=True)]


def test_a_difference_at_the_margin_is_wrongly_shown_as_often_as_stated():
    number = 2_000
    deviation = math.sqrt(0.05 * 0.95 / number)
    sharp = np.mean([equivalence(d, 1.0).shown for d in draws(1.0, 0.2, 6, number)])
    assert sharp == pytest.approx(0.05, abs=3 * deviation)  # the other margin is out of reach
    blunt = np.mean([equivalence(d, 1.0).shown for d in draws(-1.0, 2.0, 6, number)])
    assert blunt < 0.05 + 3 * deviation


@pytest.mark.parametrize(("mean", "exact"), [(0.0, False), (0.3, False), (-3.0, True)])
def test_the_size_is_below_its_bound_as_often_as_stated(mean, exact):
    number = 2_000
    held = np.mean([abs(mean) < largest_size(d) for d in draws(mean, 0.8, 5, number)])
    deviation = math.sqrt(0.05 * 0.95 / number)
    assert held > 0.95 - 3 * deviation
    if exact:  # far from 0 only one end counts
        assert held < 0.95 + 3 * deviation


def test_a_margin_or_a_level_out_of_range_and_one_sample_are_refused():
    for margin in (0, -1, math.nan, math.inf):
        with pytest.raises(IsolossError, match=r"margin is .*; it must be finite and above 0"):
            equivalence(estimate(), margin)
    for alpha in (0, 0.5, 5, math.nan):
        with pytest.raises(IsolossError, match=r"alpha is .*; it must be above 0 and below 0.5"):
            equivalence(estimate(), 1, alpha=alpha)
    with pytest.raises(IsolossError, match="at least 2 independent samples, not 1"):
        largest_size(estimate(samples=1))


def test_holm_counts_what_was_planned_and_hypotheses_that_exclude_each_other_once():
    assert holm({"a": 0.01, "b": 0.02}, tests=4) == pytest.approx({"a": 0.04, "b": 0.06})
    both = {"small": "a", "large": "a"}
    # of a, one hypothesis may be the true one until both are rejected
    found = holm({"small": 0.001, "b": 0.02, "large": 0.03, "c": 0.04}, exclusive=both)
    assert found == pytest.approx({"small": 0.003, "b": 0.06, "large": 0.06, "c": 0.06})
    with pytest.raises(IsolossError, match=r"p-values of 1 tests, of which 0 were planned"):
        holm({"a": 0.01}, tests=0)
    with pytest.raises(IsolossError, match=r"p-values of 2 tests, of which 1 were planned"):
        holm({"small": 0.1, "large": 0.1, "b": 0.1}, tests=1, exclusive=both)
