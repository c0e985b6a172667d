"""Power against statsmodels, scipy and a published value, and against fresh samples."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from isoloss.errors import IsolossError
from isoloss.statistics.power import (
    equivalence_power,
    minimal_detectable_effect,
    paired_power,
    pairs_for_equivalence,
    pairs_for_power,
    sd_upper_bound,
)


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("pairs", [2, 3, 12, 1000])
@pytest.mark.parametrize("effect", [0.0, 0.1, -0.5, 1.0, 2.0])
def test_the_power_is_that_of_statsmodels(effect, pairs, alpha):
    expected = TTestPower().power(effect, pairs, alpha)
    found = paired_power(3 * effect, 3.0, pairs, alpha=alpha)
    if math.isnan(expected):  # for some noncentralities, of a power of nearly 1
        assert found > 0.9999
    else:
        assert found == pytest.approx(expected, abs=1e-9)


def test_there_is_a_number_where_the_noncentral_t_of_scipy_has_none():
    assert paired_power(50, 1, 2) > 0.999
    assert paired_power(0.1, 1, 100_000) == pytest.approx(1)
    normal = stats.norm.sf(1.95996 - 1) + stats.norm.cdf(-1.95996 - 1)
    assert paired_power(1e-3, 1, 1_000_000) == pytest.approx(normal, abs=1e-5)
    assert paired_power(0, 1, 2, alpha=1e-6) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(("effect", "power"), [(0.5, 0.8), (1.0, 0.95), (3.0, 0.8), (0.05, 0.9)])
def test_the_pairs_are_the_fewest_that_do(effect, power):
    pairs = pairs_for_power(effect, 1.0, power=power)
    assert paired_power(effect, 1.0, pairs) >= power > paired_power(effect, 1.0, pairs - 1)
    expected = TTestPower().solve_power(effect, power=power, alpha=0.05)
    assert pairs == math.ceil(float(np.squeeze(expected)))


@pytest.mark.parametrize("pairs", [2, 5, 40])
def test_the_minimal_detectable_effect_has_the_power(pairs):
    effect = minimal_detectable_effect(0.7, pairs, power=0.9, alpha=0.01)
    assert paired_power(effect, 0.7, pairs, alpha=0.01) == pytest.approx(0.9, abs=1e-8)


def test_equivalence_has_the_published_power():
    # PowerTOST's vignette: CV 0.3, ratio 0.95, limits 0.8 to 1.25, 40 subjects crossed over: 38 degrees of freedom
    within = math.sqrt(math.log(1 + 0.3**2))
    sd = within * math.sqrt(2 / 40) * math.sqrt(39)
    assert equivalence_power(math.log(1.25), sd, 39, effect=math.log(0.95)) == pytest.approx(0.815845, abs=1e-6)


@pytest.mark.parametrize(("pairs", "effect"), [(3, 90.0), (8, 99.5), (50, 99.9)])
def test_with_one_margin_out_of_reach_it_is_a_one_sided_test(pairs, effect):
    t = stats.t.ppf(0.95, pairs - 1)
    expected = stats.nct.sf(t, pairs - 1, (100 - effect) * math.sqrt(pairs) / 2)
    assert equivalence_power(100, 2.0, pairs, effect=effect) == pytest.approx(expected, abs=1e-8)
    assert equivalence_power(100, 2.0, pairs, effect=-effect) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("pairs", "margin", "effect"), [(2, 2.0, 0.0), (5, 1.0, 0.0), (5, 1.0, 0.4), (20, 0.5, -0.1)])
def test_the_stated_power_is_that_over_fresh_samples(pairs, margin, effect):
    number = 200_000
    drawn = np.random.default_rng(0).normal(effect, 1.0, size=(number, pairs))
    means, errors = drawn.mean(axis=1), drawn.std(axis=1, ddof=1) / math.sqrt(pairs)
    shown = np.abs(means) + stats.t.ppf(0.95, pairs - 1) * errors < margin
    found = np.abs(means) > stats.t.ppf(0.975, pairs - 1) * errors
    for rate, stated in (
        (shown.mean(), equivalence_power(margin, 1.0, pairs, effect=effect)),
        (found.mean(), paired_power(effect, 1.0, pairs)),
    ):
        assert rate == pytest.approx(stated, abs=3.5 * math.sqrt(stated * (1 - stated) / number))


def test_equivalence_at_the_margin_is_shown_with_at_most_alpha():
    assert equivalence_power(1.0, 0.1, 10, effect=1.0) == pytest.approx(0.05, abs=1e-9)
    assert equivalence_power(1.0, 2.0, 10, effect=1.0) < 0.05
    assert equivalence_power(0.01, 1.0, 10) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("effect", [0.0, 0.3, -0.3])
def test_the_pairs_for_equivalence_are_the_fewest_that_do(effect):
    pairs = pairs_for_equivalence(0.5, 0.6, effect=effect, power=0.9)
    low, enough = (equivalence_power(0.5, 0.6, n, effect=effect) for n in (pairs - 1, pairs))
    assert low < 0.9 <= enough
    assert pairs_for_equivalence(1e3, 1.0) == pairs_for_power(100, 1.0) == 2  # the fewest that have an error


@pytest.mark.parametrize("pairs", [2, 4, 15])
def test_the_true_sd_is_below_its_bound_as_often_as_stated(pairs):
    assert sd_upper_bound(2.0, pairs, confidence=0.9) == pytest.approx(
        2 * math.sqrt((pairs - 1) / stats.chi2.ppf(0.1, pairs - 1)), rel=1e-9
    )
    number = 20_000
    pilots = np.random.default_rng(1).normal(0, 3.0, size=(number, pairs)).std(axis=1, ddof=1)
    factor = sd_upper_bound(1.0, pairs)  # the bound grows with the sd
    assert np.mean(pilots * factor > 3.0) == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / number))
    assert np.mean(pilots > 3.0) < 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_power(1, 1, 1), "pairs is 1; it must be a whole number of at least 2"),
        (lambda: paired_power(1, 1, 2.5), "pairs is 2.5"),
        (lambda: paired_power(1, 1, math.nan), "pairs is nan"),
        (lambda: paired_power(1, 0, 5), "sd is 0; it must be finite and above 0"),
        (lambda: paired_power(math.nan, 1, 5), "effect is nan; it must be finite"),
        (lambda: paired_power(1, 1, 5, alpha=1), "alpha is 1; it must be above 0 and below 1"),
        (lambda: equivalence_power(0, 1, 5), "margin is 0; it must be finite and above 0"),
        (lambda: equivalence_power(1, 1, 5, alpha=0.5), "alpha is 0.5; it must be above 0 and below 0.5"),
        (lambda: pairs_for_power(1, 1, power=80), "power is 80; it must be above 0 and below 1"),
        (lambda: pairs_for_power(0, 1), "effect is 0; no number of pairs finds it"),
        (lambda: pairs_for_power(1e-6, 1), "takes more than 1,000,000 pairs"),
        (lambda: pairs_for_equivalence(1, 1, effect=-1), "effect is -1, at or beyond the margin of 1"),
        (lambda: minimal_detectable_effect(1, 5, power=0.05), "power is 0.05, not above alpha, 0.05"),
        (lambda: minimal_detectable_effect(-1, 5), "sd is -1"),
        (lambda: sd_upper_bound(1, 1), "pairs is 1"),
        (lambda: sd_upper_bound(1, 5, confidence=80), "confidence is 80"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(IsolossError, match=message):
        call()
