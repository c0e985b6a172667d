"""Paired and independent differences by hand, by scipy and over repeated draws; the chance of being the smallest."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics.comparison import (
    independent_difference,
    paired_difference,
    paired_log_ratio,
    probabilities_of_smallest,
    probability_above_zero,
    without_sample,
)
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio, ratio_estimate
from isoloss.statistics.significance import p_value


def two(generator, n=40):
    """Two ratios on common samples of different sizes."""
    sizes = torch.randint(1, 5, (n,), generator=generator).double()
    common = torch.rand(n, generator=generator, dtype=torch.float64)
    own = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return [
        ratio_estimate(sizes * (k + 1 + common + 0.2 * own[k]), sizes, unit="nats", method=f"ratio {k}") for k in (0, 1)
    ]


def test_the_difference_of_two_ratios_is_the_ratio_of_the_differences():
    generator = torch.Generator().manual_seed(0)
    sizes, a, b = 1 + torch.rand(3, 30, generator=generator, dtype=torch.float64)
    first, second = (ratio_estimate(x, sizes, unit="nats", method="ratio") for x in (a, b))
    difference = paired_difference(first, second)
    assert (difference.value, difference.stderr) == pytest.approx(ratio(a - b, sizes), rel=1e-12)
    assert difference.samples == 30
    again = paired_difference(difference, paired_difference(second, first))
    assert again.stderr == pytest.approx(2 * difference.stderr, rel=1e-12)


def test_the_errors_are_the_standard_deviations_over_fresh_samples():
    generator = torch.Generator().manual_seed(1)
    pairs = [two(generator) for _ in range(500)]
    for statistic in (paired_difference, paired_log_ratio):
        found = [statistic(*pair) for pair in pairs]
        deviation = float(np.std([e.value for e in found], ddof=1))
        stated = math.sqrt(sum(e.stderr**2 for e in found) / 500)
        assert 0.9 < deviation / stated < 1.1  # a standard deviation over 500 draws is right to 3.2 %
    assert stated < 0.5 * math.hypot(*(e.stderr / e.value for e in pairs[0]))


def test_without_a_sample_an_estimate_is_that_of_the_others():
    generator = torch.Generator().manual_seed(3)
    values, sizes = 1 + torch.rand(2, 12, generator=generator, dtype=torch.float64)
    others = torch.arange(12) != 4
    mean = without_sample(ratio_estimate(values, unit="nats", method="mean"), 4)
    expected = ratio_estimate(values[others], unit="nats", method="mean")
    assert (mean.value, mean.stderr, mean.samples) == pytest.approx((expected.value, expected.stderr, 11), rel=1e-12)
    assert mean.influence == pytest.approx(expected.influence, rel=1e-12)
    # of clusters of different sizes, the value is exact
    of_sizes = without_sample(ratio_estimate(values, sizes, unit="nats", method="ratio"), 4)
    expected = ratio_estimate(values[others], sizes[others], unit="nats", method="ratio")
    assert of_sizes.value == pytest.approx(expected.value, rel=1e-12)
    assert of_sizes.stderr == pytest.approx(expected.stderr, rel=0.1)


def test_an_error_beyond_the_influence_stays():
    first, second = two(torch.Generator().manual_seed(2))
    wider = Estimate(
        value=first.value,
        stderr=math.hypot(first.stderr, 0.3),
        samples=first.samples,
        unit="nats",
        num_predictions=9,
        method="m",
        influence=first.influence,
    )
    plain = paired_difference(first, second)
    assert paired_difference(wider, second).stderr == pytest.approx(math.hypot(plain.stderr, 0.3), rel=1e-9)
    expected = math.hypot(paired_log_ratio(first, second).stderr, 0.3 / first.value)
    assert paired_log_ratio(wider, second).stderr == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("samples", [2, 3, 9, 50])
def test_the_probability_is_that_of_the_interval(samples):
    one = Estimate(value=1.0, stderr=0.4, samples=samples, unit="nats", num_predictions=9, method="m")
    assert probability_above_zero(one) == pytest.approx(stats.t.cdf(2.5, samples - 1), abs=1e-9)
    low, high = one.ci95
    at_the_end = Estimate(**{**vars(one), "value": (high - low) / 2})
    assert probability_above_zero(at_the_end) == pytest.approx(0.975, abs=1e-9)


def test_the_probability_of_two_is_that_of_their_difference():
    first, second = two(torch.Generator().manual_seed(3))
    low = probability_above_zero(paired_difference(first, second))
    assert probabilities_of_smallest([first, second]) == [pytest.approx(1 - low), pytest.approx(low)]
    assert probabilities_of_smallest([first]) == [1.0]
    assert probabilities_of_smallest([first, first, first]) == pytest.approx([1 / 3] * 3, abs=1e-9)


def test_errors_outside_of_the_influences_count_for_three_estimates_as_for_two():
    generator = torch.Generator().manual_seed(4)
    rest = [0.3, 0.4]

    def estimate(value, rest):
        psi = torch.randn(40, generator=generator, dtype=torch.float64)
        psi = (psi - psi.mean()).numpy()
        stderr = math.sqrt(float((psi**2).sum()) / (40 * 39) + rest**2)
        counts = {"samples": 40, "num_predictions": 40}
        return Estimate(value=value, stderr=stderr, unit="nats", method="m", influence=psi, **counts)

    near = [estimate(value, error) for value, error in zip((1.0, 1.2), rest, strict=True)]
    two_of_them = probabilities_of_smallest(near)
    with_a_far_one = probabilities_of_smallest([*near, estimate(50.0, 0.1)])
    assert 0.55 < two_of_them[0] < 0.75
    assert with_a_far_one == pytest.approx([*two_of_them, 0.0], abs=4 * math.sqrt(0.25 / 200_000))


def chances_of(values, influences, n):
    return probabilities_of_smallest(
        [
            Estimate(value=v, stderr=0.0, samples=n, unit="nats", num_predictions=n, method="m", influence=psi.numpy())
            for v, psi in zip(values, influences, strict=True)
        ]
    )


@pytest.mark.parametrize("n", [4, 50])
def test_the_chance_of_two_models_is_students_and_draws_agree(n):
    generator = torch.Generator().manual_seed(0)
    influences = torch.randn(2, n, generator=generator, dtype=torch.float64) + torch.randn(
        1, n, generator=generator, dtype=torch.float64
    )
    influences -= influences.mean(dim=1, keepdim=True)
    deviation = float((influences[0] - influences[1]).square().sum() / (n * (n - 1))) ** 0.5
    chances = chances_of([1.0, 1.0 + 1.3 * deviation], influences, n)
    assert chances[0] == pytest.approx(stats.t.cdf(1.3, n - 1), abs=1e-6)
    assert sum(chances) == pytest.approx(1)
    far = torch.cat([influences, torch.zeros(1, n, dtype=torch.float64)])
    three = chances_of([1.0, 1.0 + 1.3 * deviation, 1e9], far, n)  # the third is out of the running
    # the binomial standard deviation over 200,000 draws is 0.0007
    assert three == pytest.approx([*chances, 0.0], abs=0.003)


def test_what_cannot_be_paired_is_refused():
    generator = torch.Generator().manual_seed(4)
    first, second = two(generator)
    with pytest.raises(IsolossError, match="needs the same samples on both sides, not 40 and 39"):
        paired_difference(first, two(generator, 39)[0])
    blind = Estimate.from_dict(second.to_dict())
    with pytest.raises(IsolossError, match="ratio 1: the influence of each sample is not known"):
        paired_difference(first, blind)
    negative = paired_difference(first, second)
    with pytest.raises(IsolossError, match="has no ratio to another"):
        paired_log_ratio(first, negative)


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
