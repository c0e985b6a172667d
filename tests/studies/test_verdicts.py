"""The rule of the verdicts, against the intervals that it stands for."""

import numpy as np
import pytest
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import equivalence
from isoloss.studies.claims import Verdict, judge, p_value


def estimate(value, stderr):
    return Estimate(value=value, stderr=stderr, samples=10**6, unit="points", num_predictions=1000, method="difference")


# 1.96 standard errors: [value - 1.96, value + 1.96] for a standard error of 1
@pytest.mark.parametrize(
    ("value", "stderr", "direction", "margin", "shown"),
    [
        (-3.0, 1.0, "decrease", 0.0, True),
        (-1.9, 1.0, "decrease", 0.0, False),
        (3.0, 1.0, "decrease", 0.0, False),
        (-3.0, 1.0, "decrease", 1.0, True),
        (-3.0, 1.0, "decrease", 1.1, False),
        (3.0, 1.0, "increase", 0.0, True),
        (1.9, 1.0, "increase", 0.0, False),
        (-3.0, 1.0, "increase", 0.0, False),
        (3.0, 1.0, "increase", 1.0, True),
        (3.0, 1.0, "increase", 1.1, False),
        (0.0, 1.0, "no change within", 2.0, True),
        (0.0, 1.0, "no change within", 1.9, False),
        (0.5, 1.0, "no change within", 2.0, False),
        (-0.5, 1.0, "no change within", 2.0, False),
        (5.0, 0.1, "no change within", 2.0, False),
        (0.0, 0.0, "decrease", 0.0, False),
        (0.0, 0.0, "increase", 0.0, False),
        (2.0, 0.0, "no change within", 2.0, True),
    ],
)
def test_the_rule(value, stderr, direction, margin, shown):
    assert (judge(estimate(value, stderr), direction, margin) is Verdict.SHOWN) == shown


@pytest.mark.parametrize(
    ("value", "direction", "margin", "verdict"),
    [
        (3.0, "decrease", 0.0, "contradicted"),
        (-1.0, "decrease", 3.0, "contradicted"),  # it falls, but surely by less than claimed
        (-1.0, "decrease", 2.9, "not shown"),
        (-3.0, "increase", 0.0, "contradicted"),
        (1.0, "increase", 3.0, "contradicted"),
        (1.9, "decrease", 0.0, "not shown"),
        (5.0, "no change within", 3.0, "contradicted"),
        (-5.0, "no change within", 3.0, "contradicted"),
        (-4.9, "no change within", 3.0, "not shown"),
    ],
)
def test_what_contradicts_a_claim(value, direction, margin, verdict):
    assert judge(estimate(value, 1.0), direction, margin).value == verdict


@pytest.mark.parametrize("direction", ["decrease", "increase"])
def test_no_difference_at_all_shows_and_contradicts_nothing(direction):
    assert judge(estimate(0.0, 0.0), direction) is Verdict.NOT_SHOWN


def test_few_samples_make_a_wide_interval():
    three = Estimate(value=-4.0, stderr=1.0, samples=3, unit="points", num_predictions=3, method="difference")
    assert judge(three, "decrease") is Verdict.NOT_SHOWN  # Student's t with two degrees of freedom: 4.3
    assert judge(estimate(-4.0, 1.0), "decrease") is Verdict.SHOWN


@pytest.mark.parametrize(
    ("direction", "margin", "message"),
    [
        ("increase", -1.0, "at least 0, not -1"),
        ("increase", float("nan"), "at least 0, not nan"),
        ("decrease", float("inf"), "at least 0, not inf"),
        ("no change within", 0.0, "needs a margin above 0"),
    ],
)
def test_bad_margins_are_refused(direction, margin, message):
    with pytest.raises(IsolossError, match=message):
        judge(estimate(1.0, 0.1), direction, margin)


def by_interval(difference, direction, margin, level):
    """The rule in terms of the interval of level 1 - `level`, written out."""
    half = stats.t.ppf(1 - level / 2, difference.samples - 1) * difference.stderr
    low, high = difference.value - half, difference.value + half
    if direction == "decrease":
        shown, contradicted = high < -margin, low > -margin
    elif direction == "increase":
        shown, contradicted = low > margin, high < margin
    else:
        shown, contradicted = -margin <= low and high <= margin, low > margin or high < -margin
    return Verdict.SHOWN if shown else Verdict.CONTRADICTED if contradicted else Verdict.NOT_SHOWN


@pytest.mark.parametrize("direction", ["decrease", "increase", "no change within"])
def test_p_is_below_a_level_just_where_the_interval_of_that_level_gives_a_verdict(direction):
    g = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        value, stderr, margin = g.normal(0, 3), g.exponential(1.0), g.exponential(1.5)
        samples = int(g.integers(2, 30))
        one = Estimate(value=value, stderr=stderr, samples=samples, unit="", num_predictions=1, method="")
        p = p_value(one, direction, margin)
        assert 0 <= p <= 1
        around = (p * (1 - 1e-6), p * (1 + 1e-6)) if 1e-9 < p < 0.99 else ()
        for level in (1e-4, 0.001, 0.01, 0.05, 0.1, 0.3, 0.7, 0.95, *around):
            verdict = by_interval(one, direction, margin, level)
            assert (p < level) == (verdict is not Verdict.NOT_SHOWN)
        assert judge(one, direction, margin) is by_interval(one, direction, margin, 0.05)
        seen.add(judge(one, direction, margin))
    assert seen == {Verdict.SHOWN, Verdict.NOT_SHOWN, Verdict.CONTRADICTED}


def test_p_of_no_change_is_twice_the_smaller_of_being_within_and_outside():
    for value in (-3.0, -1.0, 0.0, 0.5, 1.9, 2.0, 2.5, 6.0):
        one = Estimate(value=value, stderr=0.7, samples=9, unit="", num_predictions=9, method="")
        within = equivalence(one, 2.0).p_value
        outside = stats.t.sf((abs(value) - 2.0) / 0.7, 8)
        assert p_value(one, "no change within", 2.0) == pytest.approx(2 * min(within, outside))


@pytest.mark.parametrize(
    ("value", "p_adjusted", "verdict"),
    [
        (3.0, 0.049, "shown"),
        (3.0, 0.05, "not shown"),
        (-3.0, 0.049, "contradicted"),
        (0.1, 0.001, "shown"),  # whatever the difference by itself says
    ],
)
def test_an_adjusted_p_decides(value, p_adjusted, verdict):
    assert judge(estimate(value, 1.0), "increase", p_adjusted=p_adjusted).value == verdict


@pytest.mark.parametrize(
    ("value", "direction", "margin", "p"),
    [
        (1.0, "increase", 0.0, 0.0),
        (1.0, "decrease", 0.0, 0.0),
        (0.0, "increase", 0.0, 1.0),
        (2.0, "no change within", 2.0, 0.0),
        (2.1, "no change within", 2.0, 0.0),
    ],
)
def test_an_exact_difference_is_sure(value, direction, margin, p):
    exact = Estimate(value=value, stderr=0.0, samples=0, unit="points", num_predictions=0, method="enumeration")
    assert p_value(exact, direction, margin) == p
