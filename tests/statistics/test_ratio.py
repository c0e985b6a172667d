"""Ratios and means against closed forms, a simulation, and ratios that leave out a cluster."""

import math

import pytest
import torch
from scipy.special import stdtrit

from isoloss.errors import IsolossError
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.estimate import Z95
from isoloss.statistics.ratio import ratio, ratio_estimate, subset_deviation


def test_a_mean_is_the_mean_with_s_over_root_n():
    values = [0.5, 2.0, -1.0, 4.5]
    expected = torch.tensor(values, dtype=torch.float64)
    mean = ratio_estimate(values, unit="nats", method="mean")
    assert (mean.value, mean.stderr) == pytest.approx((1.5, float(expected.std()) / 2), rel=1e-14)
    assert ratio(values, [1, 1, 1, 1]) == (mean.value, mean.stderr)
    assert mean.influence == pytest.approx((expected - 1.5).numpy())
    assert (mean.samples, mean.num_predictions) == (4, 4)


def test_a_ratio_by_hand():
    # r = 12 / 6 = 2; without each cluster 9 / 5, 10 / 4, 5 / 3; sqrt(2 / 3 * (1 / 25 + 1 / 4 + 1 / 9))
    value, stderr = ratio([3.0, 2.0, 7.0], [1, 2, 3])
    assert value == pytest.approx(2.0)
    assert stderr == pytest.approx(math.sqrt(361 / 1350))


def test_scale_and_repetition():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 50, generator=generator, dtype=torch.float64)
    value, stderr = ratio(a, b)
    assert ratio(3 * a, 2 * b) == pytest.approx((1.5 * value, 1.5 * stderr), rel=1e-12)
    # each cluster four times: the same value, the error of n (n - 1) -> 4n (4n - 1)
    value, stderr = ratio(a, torch.full((50,), 3))
    repeated = ratio(a.repeat(4), torch.full((200,), 3))
    assert repeated == pytest.approx((value, stderr * math.sqrt(49 / 199)), rel=1e-12)


def test_the_error_is_that_of_leaving_out_each_cluster():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.rand(9, generator=generator), torch.tensor([40, 1, 2, 7, 7, 0, 3, 12, 1])
    value, stderr = ratio(a * b, b)
    left_out = [ratio((a * b)[torch.arange(9) != i], b[torch.arange(9) != i])[0] for i in range(9)]
    assert stderr**2 == pytest.approx(8 / 9 * sum((each - value) ** 2 for each in left_out), rel=1e-6)
    residuals = a * b - value * b
    assert stderr > 1.5 * math.sqrt(9 / 8 * float(residuals.square().sum())) / 73  # the delta method's


def test_clusters_of_unequal_sizes_have_fewer_degrees_of_freedom():
    sizes = torch.tensor([8.0, 1.0, 1.0, 2.0])
    estimate = ratio_estimate(sizes * torch.arange(4), sizes, unit="nats", method="ratio")
    assert (estimate.samples, estimate.freedom) == (4, pytest.approx(144 / 70 - 1))
    half = (estimate.ci95[1] - estimate.ci95[0]) / 2
    assert half == pytest.approx(float(stdtrit(144 / 70 - 1, 0.975)) * estimate.stderr)
    assert paired_difference(estimate, estimate).freedom == estimate.freedom
    one = ratio_estimate([1.0, 2.0, 3.0], [100, 1, 1], unit="nats", method="ratio")
    assert one.freedom == 1  # fewer have no interval


def test_the_interval_covers_the_true_ratio():
    generator = torch.Generator().manual_seed(2)
    covered = 0
    for _ in range(1000):
        b = torch.randint(1, 5, (50,), generator=generator).double()
        a = b * torch.rand(50, generator=generator, dtype=torch.float64) + b.square()
        value, stderr = ratio(a, b)
        covered += abs(value - (0.5 + 7.5 / 2.5)) < Z95 * stderr
    # 95 % nominal; the normal quantile at n = 50 gives about 94.4 %, binomial standard deviation 0.7 points
    assert 0.92 < covered / 1000 < 0.965


def test_float32_input_is_summed_in_float64():
    values = torch.full((1000,), 0.1, dtype=torch.float32)
    assert ratio(values, torch.ones(1000))[0] == pytest.approx(float(torch.tensor(0.1)), rel=1e-14)


def test_the_deviation_of_subsets():
    values = torch.arange(10, dtype=torch.float64)  # subset means 0.5, 2.5, 4.5, 6.5, 8.5
    assert subset_deviation(values, torch.ones(10)) == (pytest.approx(math.sqrt(10)), 2)
    counts = torch.tensor([1, 3] * 5)
    expected = torch.tensor([(2 * i + 2 * i + 1) / 4 for i in range(5)], dtype=torch.float64).std()
    assert subset_deviation(values, counts) == (pytest.approx(float(expected)), 2)
    assert subset_deviation(torch.arange(13.0), torch.ones(13))[1] == 2
    with pytest.raises(IsolossError, match="9 samples cannot be split in 5 subsets; at least 10 are needed"):
        subset_deviation(torch.ones(9), torch.ones(9))


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        ([1.0], [1], "at least 2 independent samples, not 1"),
        ([], [], "at least 2 independent samples, not 0"),
        ([1.0, 2.0], [1], "2 numerators do not match 1 denominators"),
        ([1.0, 2.0], [0, 3], "at least 2 denominators above 0, not 1"),
    ],
)
def test_refusals(a, b, sentence):
    with pytest.raises(IsolossError, match=sentence):
        ratio(a, b)
