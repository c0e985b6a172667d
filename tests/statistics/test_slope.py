"""Slopes within clusters against statsmodels, and how often intervals of adjusted differences hold the truth."""

import math

import numpy as np
import pytest
import statsmodels.api as sm

from isoloss.errors import IsolossError
from isoloss.statistics.clusters import adjusted_to_loss, cluster_mean, slope_within
from isoloss.statistics.estimate import Estimate

UNIT = {"unit": "points per nat"}


def clustered(rng, groups=6, size=5, *, slope=-3.0, spread=0.0, slopes=0.0):
    """Outcomes and losses whose spread and slope differ from cluster to cluster, and the clusters."""
    codes = np.repeat(np.arange(groups), size)
    scales = np.exp(spread * rng.standard_normal(groups))[codes]
    losses = 2 + rng.standard_normal(groups)[codes] + scales * rng.standard_normal(len(codes))
    each = (slope + slopes * rng.standard_normal(groups))[codes]
    outcomes = 9 * rng.standard_normal(groups)[codes] + each * losses + rng.standard_normal(len(codes))
    return outcomes, losses, codes


def test_it_is_the_mean_of_the_regressions_of_each_cluster():
    outcomes, losses, codes = clustered(np.random.default_rng(0), spread=1.0)
    slopes = [sm.OLS(outcomes[codes == g], sm.add_constant(losses[codes == g])).fit().params[1] for g in range(6)]
    found, expected = slope_within(outcomes, losses, codes, **UNIT), cluster_mean(slopes, range(6), **UNIT)
    assert (found.value, found.stderr) == pytest.approx((expected.value, expected.stderr), rel=1e-9)
    assert (found.samples, found.num_predictions, found.details["labels"]) == (6, 30, list(range(6)))


def test_groups_in_a_cluster_count_once_and_what_is_given_is_held():
    rng = np.random.default_rng(7)
    outcomes, losses, codes = clustered(rng, 4, 12, spread=0.5)
    seeds = np.tile(np.repeat([0, 1], 6), 4)  # the same names in each cluster
    other = losses + rng.standard_normal(len(losses))
    slopes = []
    for g in range(4):
        rows = [(codes == g) & (seeds == s) for s in (0, 1)]
        designs = [sm.add_constant(np.column_stack([losses[row], other[row]])) for row in rows]
        slopes.append(np.mean([sm.OLS(outcomes[row], x).fit().params[1] for row, x in zip(rows, designs, strict=True)]))
    found = slope_within(outcomes, losses, codes, within=seeds, given=[other], **UNIT)
    expected = cluster_mean(slopes, range(4), **UNIT)
    assert (found.value, found.stderr) == pytest.approx((expected.value, expected.stderr), rel=1e-9)


@pytest.mark.parametrize("given", [False, True])
def test_the_interval_of_slopes_of_24_clusters_holds_as_often_as_stated(given):
    """As in the study dose-response: two seeds in each of 24 grammars, seven doses, another measure beside them."""
    rng, held = np.random.default_rng(8), []
    for _ in range(600):
        codes, seeds = np.repeat(np.arange(24), 14), np.tile(np.repeat([0, 1], 7), 24)
        x = np.tile(np.linspace(-1, 1, 7), 48) * np.repeat(np.exp(0.4 * rng.standard_normal(48)), 7)
        x += 0.1 * rng.standard_normal(len(x))
        other = 0.5 * x + 0.3 * rng.standard_normal(len(x))
        slopes = np.repeat(0.6 + 0.6 * rng.standard_normal(24), 14) + np.repeat(0.4 * rng.standard_normal(48), 7)
        y = slopes * x + given * 2 * other + rng.standard_normal(len(x)) * np.repeat(rng.uniform(0.3, 2, 24), 14)
        low, high = slope_within(y, x, codes, within=seeds, given=[other] * given, **UNIT).ci95
        held.append(low < 0.6 < high)
    found, deviation = rate(held)
    assert 0.95 - deviation < found < 0.95 + deviation


def test_equal_outcomes_have_a_slope_of_exactly_0():
    rng = np.random.default_rng(9)
    flat = slope_within(
        np.repeat([0.1, 1 / 3, 70.7], 7), rng.standard_normal(21), np.repeat(["a", "b", "c"], 7), **UNIT
    )
    assert (flat.value, flat.stderr) == (0, 0)


def test_where_all_clusters_spread_alike_it_is_the_regression_with_clustered_errors():
    groups, size = 7, 4
    rng = np.random.default_rng(1)
    codes = np.repeat(np.arange(groups), size)
    losses = rng.standard_normal(groups)[codes] + np.tile([-1.0, 1.0, 0.0, 2.0], groups)
    outcomes = rng.standard_normal(groups)[codes] + 2 * losses + rng.standard_normal(len(codes))
    design = np.column_stack([losses, np.eye(groups)[codes]])
    fitted = sm.OLS(outcomes, design).fit(cov_type="cluster", cov_kwds={"groups": codes, "use_correction": False})
    found = slope_within(outcomes, losses, codes, **UNIT)
    assert found.value == pytest.approx(fitted.params[0], rel=1e-9)
    assert found.stderr == pytest.approx(fitted.bse[0] * math.sqrt(groups / (groups - 1)), rel=1e-9)


def pooled_held(outcomes, losses, codes, truth):
    """Whether the interval of one slope for all clusters, with the usual cluster-robust error, holds the truth."""
    design = np.column_stack([losses, np.eye(codes.max() + 1)[codes]])
    kwds = {"groups": codes, "df_correction": True}
    low, high = sm.OLS(outcomes, design).fit(cov_type="cluster", cov_kwds=kwds, use_t=True).conf_int()[0]
    return low < truth < high


def rate(held):
    return float(np.mean(held)), 3 * math.sqrt(0.95 * 0.05 / len(held))


@pytest.mark.parametrize("groups", [3, 6])
@pytest.mark.parametrize(("spread", "slopes", "most"), [(0.0, 0.0, 0.98), (0.0, 2.0, 0.95), (1.0, 0.0, 0.995)])
def test_the_interval_holds_the_mean_slope_as_often_as_stated(groups, spread, slopes, most):
    rng = np.random.default_rng(2)
    held = []
    for _ in range(400):
        low, high = slope_within(*clustered(rng, groups, spread=spread, slopes=slopes), **UNIT).ci95
        held.append(low < -3 < high)
    found, deviation = rate(held)
    assert 0.95 - deviation < found < most + deviation


@pytest.mark.slow
def test_one_slope_for_all_clusters_holds_it_less_often():
    # what the docstring of slope_within says of 6 clusters
    rates = []
    for spread, slopes in ((0.5, 0.0), (0.5, 0.5), (1.0, 0.5)):
        rng = np.random.default_rng(3)
        draws = (clustered(rng, spread=spread, slopes=slopes) for _ in range(1000))
        rates.append(rate([pooled_held(*drawn, -3) for drawn in draws])[0])
    assert 0.65 < min(rates) < max(rates) < 0.935


def pairs(rng, groups=6, *, slope=-3.0, change=0.2, effect=1.0):
    """Differences of outcome and of loss in pairs, of which the loss explains a part."""
    codes = np.repeat(np.arange(groups), 3)
    changes = change + 0.1 * rng.standard_normal(len(codes))
    own = effect + 0.3 * rng.standard_normal(groups)[codes] + 0.3 * rng.standard_normal(len(codes))
    return own + slope * changes, changes, codes


@pytest.mark.parametrize("change", [0.0, 0.5])
@pytest.mark.parametrize("same", [True, False])
def test_the_interval_of_an_adjusted_difference_holds_the_truth_as_often_as_stated(same, change):
    rng, held, naive = np.random.default_rng(4), [], []
    for _ in range(400):
        differences, changes, codes = pairs(rng, change=change)
        slope = slope_within(*clustered(rng, 6 if same else 9, slopes=1.0), **UNIT)
        means = cluster_mean(differences, codes, unit="points"), cluster_mean(changes, codes, unit="nats")
        adjusted = adjusted_to_loss(*means, slope, same_clusters=same)
        low, high = adjusted.ci95
        held.append(low < 1 < high)
        fixed = cluster_mean(differences - slope.value * changes, codes, unit="points")
        assert adjusted.value == pytest.approx(fixed.value, rel=1e-9)
        low, high = fixed.ci95
        naive.append(low < 1 < high)
    found, deviation = rate(held)
    assert 0.94 - deviation < found < 0.97 + deviation
    if change:
        assert np.mean(naive) < 0.93  # an error that takes the slope as known is too small


def test_a_slope_of_the_same_clusters_counts_with_its_covariance_and_another_one_without():
    rng = np.random.default_rng(5)
    differences, changes, codes = pairs(rng, change=0.4)
    slope = slope_within(*clustered(rng), **UNIT)
    means = cluster_mean(differences, codes, unit="points"), cluster_mean(changes, codes, unit="nats")
    by_cluster = [np.array([values[codes == g].mean() for g in range(6)]) for values in (differences, changes)]
    together = by_cluster[0] - slope.value * by_cluster[1]
    of_slope = changes.mean() * (slope.influence + slope.value)
    same, other = (adjusted_to_loss(*means, slope, same_clusters=is_same) for is_same in (True, False))
    assert same.value == other.value == pytest.approx(together.mean(), rel=1e-9)
    assert same.stderr == pytest.approx((together - of_slope).std(ddof=1) / math.sqrt(6), rel=1e-9)
    assert other.stderr == pytest.approx(math.hypot(together.std(ddof=1), of_slope.std(ddof=1)) / math.sqrt(6))
    assert (same.samples, same.unit, same.influence is None) == (6, "points", False)
    assert 6 <= other.samples <= 11
    assert (other.unit, other.influence) == ("points", None)


def test_the_error_that_dominates_gives_the_degrees_of_freedom():
    differences, changes, codes = pairs(np.random.default_rng(6), change=0.4)
    means = cluster_mean(differences, codes, unit="points"), cluster_mean(changes, codes, unit="nats")
    known = {"value": -3.0, "num_predictions": 9, "method": "slope", **UNIT}
    assert adjusted_to_loss(*means, Estimate(stderr=1e3, samples=3, **known), same_clusters=False).samples == 3
    sure = adjusted_to_loss(*means, Estimate(stderr=0.0, samples=0, **known), same_clusters=False)
    fixed = cluster_mean(differences + 3 * changes, codes, unit="points")
    assert (sure.value, sure.stderr, sure.samples) == (pytest.approx(fixed.value), pytest.approx(fixed.stderr), 6)


def test_what_has_no_slope_or_other_clusters_is_refused():
    runs = ["a", "a", "b", "b"]
    with pytest.raises(IsolossError, match="constant in the cluster 'b', which therefore has no slope"):
        slope_within([1, 2, 3, 4], [1.0, 2.0, 1.5, 1.5], runs, **UNIT)
    with pytest.raises(IsolossError, match="the given measures determine along in the cluster 'a'"):
        slope_within([1, 2, 3, 4], [1.0, 2.0, 1.5, 2.5], runs, given=[[2.0, 4.0, 0.0, 9.0]], **UNIT)
    with pytest.raises(IsolossError, match="number of clusters is 1"):
        slope_within([1, 2], [1.0, 2.0], ["a", "a"], **UNIT)
    with pytest.raises(IsolossError, match=r"outcomes has the shape \(3,\); it must be 4 numbers"):
        slope_within([1, 2, 3], [1.0, 2.0, 1.5, 2.5], runs, **UNIT)
    slope = slope_within([1, 2, 3, 4], [1.0, 2.0, 1.5, 2.5], runs, **UNIT)
    difference, change = (cluster_mean([1.0, 2.0], names, unit="points") for names in (["a", "b"], ["a", "c"]))
    with pytest.raises(IsolossError, match=r"not over the same clusters: \['a', 'b'\] and \['a', 'c'\]"):
        adjusted_to_loss(difference, change, slope, same_clusters=False)
    with pytest.raises(IsolossError, match=r"not over the same clusters"):
        adjusted_to_loss(change, change, slope, same_clusters=True)
    plain = Estimate(value=1.0, stderr=0.1, samples=2, num_predictions=2, method="loss", unit="nats")
    with pytest.raises(IsolossError, match="loss: it is not over clusters"):
        adjusted_to_loss(difference, plain, slope, same_clusters=False)
