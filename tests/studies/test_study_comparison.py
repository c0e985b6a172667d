"""Differences, means over seeds and what they say to a claim, on known numbers and against scipy."""

import known_estimates as known
import pytest
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.report.claims import Claim, Verdict
from isoloss.studies.comparison import change, compared, difference, over_seeds, same_loss

FLATTER = Claim(id="flatter", statement="Flatter.", paper="", direction="decrease")


def at(kl=0.04, trace=40.0, root=0.5):
    return known.found(("root",), kl, trace, (root,))


def test_differences_of_accuracies_are_in_points():
    moved = difference(known.estimate(0.55, 0.003, "accuracy"), known.estimate(0.5, 0.004, "accuracy"))
    assert moved.value == pytest.approx(5.0)
    assert moved.stderr == pytest.approx(0.5)
    assert moved.unit == "percentage points"


def test_a_mean_over_seeds_is_that_of_a_paired_t_test():
    before, after = [40.0, 43.5, 38.0], [36.0, 41.0, 33.0]
    pairs = [(at(trace=a), at(trace=b)) for a, b in zip(before, after, strict=True)]
    moved = change(pairs, "trace")
    theirs = stats.ttest_rel(after, before)
    assert moved.value / moved.stderr == pytest.approx(theirs.statistic, rel=1e-9)
    interval = theirs.confidence_interval(0.95)
    assert moved.ci95 == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert moved.samples == 3


def test_one_pair_is_its_difference():
    pair = at(root=0.5), at(root=0.53)
    assert change([pair], "root") == difference(pair[1]["root"], pair[0]["root"])


def test_accuracies_keep_their_unit_in_a_mean():
    shares = over_seeds([at(root=share)["root"] for share in (0.5, 0.52, 0.54)])
    assert str(shares) == "52.0 ± 1.2 %"


def test_one_run_shows_no_spread():
    with pytest.raises(IsolossError, match="at least two runs"):
        over_seeds([known.estimate(1.0)])


@pytest.mark.parametrize(
    ("moves", "same"),
    [
        ((0.0, 0.0, 0.0), True),
        ((0.008, -0.008, 0.008), True),
        # the error of a difference is 0.0007: 0.0086 and two of it reach 0.01
        ((0.0, 0.0, 0.0088), False),
        ((0.0, -0.02, 0.02), False),  # equal on average, but no pair of the same loss
    ],
)
def test_every_pair_needs_the_same_loss(moves, same):
    assert same_loss([(at(), at(kl=0.04 + move)) for move in moves]) is same


def test_a_claim_is_judged_by_the_spread_over_seeds():
    steady = [(at(trace=40.0), at(trace=37.0 - seed / 10)) for seed in range(3)]
    result = compared(FLATTER, "trace", ("plain", "other"), steady, where="All last.")
    assert result.verdict is Verdict.SHOWN
    assert result.explanation == (
        "Trace of the Fisher of other against plain, paired over 3 seeds: 53.7 standard errors. All last."
    )
    assert result.lines[-1] == ("difference", "-3.100 ± 0.058 nats per predicted token")
    assert [name for name, _ in result.lines] == ["plain", "other", "difference"]
    # the same mean, and 2.7 standard errors: with three seeds that is no 95 % interval
    spread = [(at(trace=40.0), at(trace=38.9 - 2 * seed)) for seed in range(3)]
    result = compared(FLATTER, "trace", ("plain", "other"), spread)
    assert ": 2.7 standard errors." in result.explanation
    assert result.verdict is Verdict.NOT_SHOWN
    assert compared(FLATTER, "trace", ("plain", "other"), [p[::-1] for p in steady]).verdict is Verdict.CONTRADICTED


def test_models_of_different_loss_are_not_compared():
    pairs = [(at(), at(trace=1.0)), (at(), at(kl=0.06, trace=1.0))]
    result = compared(FLATTER, "trace", ("plain", "other"), pairs, where="All last.")
    assert result.verdict is Verdict.NOT_TESTED
    assert "the KL of other minus that of plain is 0.00000 ± 0.00071" in result.explanation
    assert result.explanation.endswith("0.02000 ± 0.00071 nats per predicted token for each seed. All last.")
