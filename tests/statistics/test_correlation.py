"""Correlations against scipy and regressions, resamples by hand, and how often the intervals hold the truth."""

import math

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.correlation import _correlations, correlation

KINDS = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}


def data(seed=0, groups=8, size=3, ties=False):
    """x, y, two covariates that go with both, and clusters of different sizes."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(groups), rng.integers(1, size + 1, groups))
    kl, width = rng.standard_normal((2, len(codes)))
    x = kl + 0.5 * width + rng.standard_normal(len(codes))
    y = x - kl + rng.standard_normal(len(codes)) + rng.standard_normal(groups)[codes]
    if ties:
        x, y = np.round(x), np.round(y)
    return x, y, {"kl": 1e3 + 1e-3 * kl, "width": 500 * width}, codes


def residuals(values, covariates):
    return sm.OLS(values, sm.add_constant(np.column_stack(covariates))).fit().resid


def slow(x, y, given, kind):
    """The correlation by scipy; given covariates, of the residuals of statsmodels' regressions, or the inverse's."""
    if kind == "kendall":
        variables = [x, y, *given]
        inverse = np.linalg.inv([[stats.kendalltau(a, b)[0] for b in variables] for a in variables])
        return -inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1]) if given else stats.kendalltau(x, y)[0]
    if kind == "spearman":
        x, y, *given = (stats.rankdata(values) for values in (x, y, *given))
    elif given:
        given = [(values - values.mean()) / values.std() for values in given]
    return stats.pearsonr(residuals(x, given), residuals(y, given))[0] if given else stats.pearsonr(x, y)[0]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_value_is_that_of_scipy(kind, ties):
    x, y, given, codes = data(ties=ties)
    assert correlation(x, y, codes, kind=kind).value == pytest.approx(KINDS[kind](x, y)[0], rel=1e-9)
    found = correlation(x, y, codes, kind=kind, given=given)
    assert found.value == pytest.approx(slow(x, y, list(given.values()), kind), rel=1e-7)
    assert (found.given, found.clusters, found.observations) == (("kl", "width"), 8, len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_is_students_over_correlations_without_a_cluster(kind):
    x, y, given, codes = data(1)
    found = correlation(x, y, codes, kind=kind, given=given)
    z = np.arctanh([slow(x[k], y[k], [v[k] for v in given.values()], kind) for k in (codes != g for g in range(8))])
    center = math.atanh(found.value)
    error = math.sqrt(7 / 8 * np.square(z - center).sum())
    half = stats.t.ppf(0.975, 7) * error
    assert found.interval95 == pytest.approx((math.tanh(center - half), math.tanh(center + half)), rel=1e-6)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(center) / error, 7), rel=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resample_counts_each_cluster_as_often_as_it_is_drawn(kind, ties):
    x, y, given, codes = data(2, ties=ties)
    values = np.stack([x, y, *given.values()])
    weights = np.random.default_rng(0).multinomial(8, np.full(8, 1 / 8), size=20).astype(float)
    found = _correlations(kind, codes, values)(weights)
    for row, value in zip(weights, found, strict=True):
        drawn = np.concatenate([np.flatnonzero(codes == g) for g in np.repeat(np.arange(8), row.astype(int))])
        assert value == pytest.approx(slow(x[drawn], y[drawn], [v[drawn] for v in given.values()], kind), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_within_groups_all_variables_are_less_their_means(kind):
    x, y, given, codes = data(2, size=6)
    groups = 2 * codes + np.arange(len(codes)) % 2  # two in each cluster
    centred = [values - [values[groups == g].mean() for g in groups] for values in (x, y, *given.values())]
    found = correlation(x, y, codes, kind=kind, given=given, within=groups)
    assert found.value == pytest.approx(slow(*centred[:2], centred[2:], kind), rel=1e-7)
    with pytest.raises(IsolossError, match=r"within has the shape \(2,\)"):
        correlation(x, y, codes, within=[0, 1])
    with pytest.raises(IsolossError, match="within has a group that spans two clusters"):
        correlation(x, y, codes, within=np.arange(len(codes)) % 3)


@pytest.mark.parametrize("kind", ["spearman", "kendall"])
def test_equal_deviations_from_means_are_ties(kind):
    rng, codes = np.random.default_rng(0), np.repeat(range(6), 3)
    for _ in range(20):
        x, y = rng.integers(0, 6, (2, 18))
        # three times the deviations, which are whole numbers
        exact = [3 * v - np.repeat(v.reshape(6, 3).sum(axis=1), 3) for v in (x, y)]
        found = correlation(x, y, codes, within=codes, kind=kind, resamples=100)
        assert found.value == pytest.approx(KINDS[kind](*exact)[0], abs=1e-9)
    with pytest.raises(IsolossError, match="x or y is constant"):
        correlation(0.1 * codes, y, codes, within=codes, kind=kind)


def test_as_an_estimate_it_has_the_error_of_its_interval_and_what_could_be_found():
    x, y, given, codes = data(3)
    found = correlation(x, y, codes, given=given)
    z, end = math.atanh(found.value), math.atanh(found.interval95[1])
    error = (end - z) / stats.t.ppf(0.975, 7)
    assert found.estimate().value == found.value
    assert found.estimate().stderr == pytest.approx(error * (1 - found.value**2), rel=1e-6)
    # as a t test with noncentrality z / error finds it
    shift = math.atanh(found.detectable()) / error
    critical = stats.t.ppf(0.975, 7)
    power = stats.nct.sf(critical, 7, shift) + stats.nct.cdf(-critical, 7, shift)
    assert power == pytest.approx(0.8, abs=1e-6)


def test_partial_tau_given_one_variable_is_kendalls():
    x, y, given, codes = data(5, ties=True)
    z = given["kl"]
    xy, xz, yz = (stats.kendalltau(a, b)[0] for a, b in [(x, y), (x, z), (y, z)])
    expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    assert correlation(x, y, codes, kind="kendall", given={"kl": z}).value == pytest.approx(expected, rel=1e-12)


def test_partial_tau_is_not_zero_for_what_is_independent_given_a_covariate():
    rng = np.random.default_rng(0)
    z = rng.standard_normal(2000)
    x, y = 0.9 * z + math.sqrt(1 - 0.9**2) * rng.standard_normal((2, 2000))
    found = {kind: correlation(x, y, np.arange(2000) % 20, kind=kind, given={"z": z}, resamples=100) for kind in KINDS}
    for kind, truth in {"pearson": 0, "spearman": 0.01, "kendall": 0.19}.items():
        low, high = found[kind].interval95
        assert low < truth < high
        assert high - low < 0.15


def test_tau_depends_on_the_order_alone():
    x, y, given, codes = data(6)
    found = correlation(x, y, codes, kind="kendall", given=given)
    assert correlation(np.exp(x), y**3, codes, kind="kendall", given=given) == found
    assert correlation(-x, y, codes, kind="kendall", given=given).value == pytest.approx(-found.value, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bootstraps_interval_is_that_of_resamples_by_hand(kind):
    x, y, _, codes = data(7)
    found = correlation(x, y, codes, kind=kind, resamples=500)
    weights = np.random.default_rng(seeds.derive(0, "correlation")).multinomial(8, np.full(8, 1 / 8), size=500)
    indices = [np.concatenate([np.flatnonzero(codes == g).repeat(w) for g, w in enumerate(row)]) for row in weights]
    by_hand = [KINDS[kind](x[drawn], y[drawn])[0] for drawn in indices]
    assert found.bootstrap95 == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])), rel=1e-9)


def test_the_bootstrap_is_that_of_scipy_and_a_function_of_the_seed():
    x, y, _, codes = data(3, groups=30, size=1)
    found = correlation(x, y, codes, resamples=20_000)
    other = stats.bootstrap(
        (x, y), lambda a, b: np.corrcoef(a, b)[0, 1], paired=True, vectorized=False, method="percentile", rng=0
    )
    assert found.bootstrap95 == pytest.approx(tuple(other.confidence_interval), abs=0.015)  # its own noise at the ends
    assert found == correlation(x, y, codes, resamples=20_000)
    assert found.bootstrap95 != correlation(x, y, codes, resamples=20_000, seed=1).bootstrap95


def test_resamples_without_a_correlation_are_left_out():
    found = correlation([1, 2, 3, 5], [1, 3, 2, 5], range(4), resamples=5000)
    missing = 4 / 4**4  # of all resamples draw one cluster four times
    assert found.resamples == pytest.approx(5000 * (1 - missing), abs=3 * math.sqrt(5000 * missing))
    assert found.resamples < 5000
    assert all(math.isfinite(end) for end in found.bootstrap95)


def test_indicators_of_clusters_compare_within_them():
    x, y, _, codes = data(4, groups=6, size=5)
    own = [values - (np.bincount(codes, values) / np.bincount(codes))[codes] for values in (x, y)]
    indicators = {str(g): codes == g for g in range(5)}
    found, expected = correlation(x, y, codes, given=indicators), correlation(*own, codes)
    assert found.value == pytest.approx(expected.value, rel=1e-9)
    assert found.interval95 == pytest.approx(expected.interval95, rel=1e-7)


def drawn(rng, groups, size, of_clusters, within):
    """x and y with a part for each cluster; the clusters; their correlation and that of their ranks."""
    codes = np.repeat(np.arange(groups), size)

    def both(number, r):
        first, second = rng.standard_normal((2, number))
        return np.stack([first, r * first + math.sqrt(1 - r * r) * second])

    pearson = (of_clusters + within) / 2
    return both(groups, of_clusters)[:, codes] + both(len(codes), within), codes, pearson


def of_normals(pearson, kind, covariate):
    """The correlation of normal variables; with a covariate z, that of x + 2 z and y - 2 z given z."""
    if kind == "spearman":
        return 6 / math.pi * math.asin(pearson / 2)
    if kind == "kendall" and covariate:
        # x and y have the variance 2, and z has 1
        xy, xz = (2 / math.pi * math.asin(r) for r in ((2 * pearson - 4) / 6, 2 / math.sqrt(6)))
        return (xy + xz**2) / (1 - xz**2)
    return 2 / math.pi * math.asin(pearson) if kind == "kendall" else pearson


def rates(groups, size, of_clusters, within, kind, number, covariate=False):
    """How often the interval and the bootstrap hold the truth."""
    rng, held = np.random.default_rng(0), []
    for _ in range(number):
        (x, y), codes, truth = drawn(rng, groups, size, of_clusters, within)
        given = None
        if covariate:
            given = {"kl": (kl := rng.standard_normal(len(codes)))}
            x, y = x + 2 * kl, y - 2 * kl
        truth = of_normals(truth, kind, covariate)
        found = correlation(x, y, codes, kind=kind, given=given, resamples=400)
        held.append([low < truth < high for low, high in (found.interval95, found.bootstrap95)])
    return np.mean(held, axis=0), 3 * math.sqrt(0.95 * 0.05 / number)


@pytest.mark.parametrize(
    ("groups", "size", "of_clusters", "within", "kind", "covariate"),
    [
        (6, 4, 0.0, 0.0, "pearson", False),
        (6, 4, 0.8, 0.4, "spearman", False),
        (15, 1, 0.8, 0.4, "pearson", False),
        (8, 4, 0.8, 0.4, "pearson", True),
        (6, 4, 0.0, 0.0, "kendall", False),
        (15, 1, 0.8, 0.4, "kendall", False),
        (12, 4, 0.8, 0.8, "kendall", True),
    ],
)
def test_the_interval_holds_the_truth_as_often_as_stated(groups, size, of_clusters, within, kind, covariate):
    (interval, _), deviation = rates(groups, size, of_clusters, within, kind, 250, covariate)
    assert 0.94 - deviation < interval < 0.985 + deviation


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("of_clusters", "within"), [(0.0, 0.0), (0.8, 0.4), (0.9, 0.9)])
@pytest.mark.parametrize(("groups", "size"), [(5, 4), (8, 4), (20, 1), (20, 4)])
def test_it_does_in_many_designs_and_the_bootstrap_does_not(groups, size, of_clusters, within, kind):
    (interval, bootstrap), deviation = rates(groups, size, of_clusters, within, kind, 1000)
    assert 0.94 - deviation < interval < 0.985 + deviation
    if groups <= 8 and kind == "pearson":
        assert bootstrap < 0.93


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: correlation([1, 2, 3], [1, 2, 3], range(2)), r"clusters has the shape \(2,\)"),
        (lambda: correlation([1, 2, 3], [1, 2, 4], [0, 0, 1]), "number of clusters is 2; .* at least 3"),
        (lambda: correlation([1, 2, 3], [1, 2], range(3)), "y has the shape"),
        (lambda: correlation([1, 2, math.nan], [1, 2, 3], range(3)), r"x\[2\] is nan"),
        (lambda: correlation([0.1] * 7, list(range(7)), range(7)), "x or y is constant, so that there is no correl"),
        (lambda: correlation([1, 2, 3, 4], [1, 2, 3, 5], range(4), kind="tau"), "kind is 'tau'; it must be"),
        (lambda: correlation([1, 2, 3, 4], [2, 1, 4, 3], range(4), kind="kendall"), "0.333 without each cluster"),
        (lambda: correlation([1, 2, 3, 4], [1, 2, 3, 5], range(4), kind="kendall"), "the correlation is 1, so that"),
        (lambda: correlation([1, 1, 1, 1], [1, 2, 3, 5], range(4), kind="kendall"), "x or y is constant"),
        (
            lambda: correlation([1, 2, 3, 4], [1, 3, 2, 4], range(4), kind="kendall", given={"kl": [1, 4, 9, 16]}),
            "given kl, nothing is left of x or y",
        ),
        (lambda: correlation([1, 2, 3], [1, 3, 2], ["a", 1, None]), "labels that have no order"),
        (lambda: correlation([1, 2, 3, 4], [1, 2, 3, 5], range(4), resamples=10), "resamples is 10"),
        (lambda: correlation([1, 2, 3, 4], [2, 4, 6, 8], range(4)), "the correlation is 1, so that its error"),
        (lambda: correlation([1, 1, 1, 4], [1, 2, 3, 5], range(4)), "is not defined without the cluster 3"),
        (lambda: correlation([1, 2, 4, 3], [1, 2, 3, 9], range(4), kind="spearman"), "is 1 without the cluster 2"),
        (
            lambda: correlation([1, 2, 3, 4], [1, 2, 3, 5], range(4), given={"kl": [2, 4, 6, 8]}),
            "given kl, nothing is left of x or y",
        ),
        (lambda: correlation([1, 2, 3], [1, 2, 3], range(3), given={"kl": [1, 2]}), "kl has the shape"),
    ],
)
def test_what_has_no_correlation_is_refused(call, message):
    with pytest.raises(IsolossError, match=message):
        call()
