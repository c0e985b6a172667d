"""Holm's correction against all intersections of hypotheses, statsmodels, and fresh p-values."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.multiple import holm, p_value
from isoloss.statistics.ratio import ratio_estimate


def named(p_values):
    return {str(index): p for index, p in enumerate(p_values)}


@pytest.mark.parametrize("seed", range(40))
def test_it_closes_bonferronis_test_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    p_values = np.round(rng.uniform(size=rng.integers(1, 6)) ** 3, 2).tolist()  # with ties, zeros and ones
    subsets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(range(len(p_values)), size)]
    expected = [
        max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in subsets if i in s) for i in range(len(p_values))
    ]
    found = holm(named(p_values))
    assert list(found) == list(named(p_values))
    assert list(found.values()) == pytest.approx(expected, rel=1e-12)
    assert list(found.values()) == pytest.approx(list(multipletests(p_values, method="holm")[1]), rel=1e-12)


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_a_true_hypothesis_is_rejected_as_rarely_as_stated(shared):
    number, tests, false = 10_000, 6, 2
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


def test_without_an_error_it_is_certain():
    sure = {"stderr": 0.0, "samples": 0, "unit": "nats", "num_predictions": 1, "method": "enumeration"}
    assert (p_value(Estimate(value=0.1, **sure)), p_value(Estimate(value=0.0, **sure))) == (0, 1)


def test_what_is_no_p_value_is_refused():
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(IsolossError, match=r"the p-value of b is .*; it must be from 0 to 1"):
            holm({"a": 0.5, "b": wrong, "c": 0.1})
    with pytest.raises(IsolossError, match="at least one p-value"):
        holm({})
    one = Estimate(value=1.0, stderr=0.1, samples=1, unit="nats", num_predictions=1, method="m")
    with pytest.raises(IsolossError, match="at least 2 independent samples, not 1"):
        p_value(one)
