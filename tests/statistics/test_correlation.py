"""Correlations and the granulated coefficient by scipy and by definition, and how often intervals hold them."""

import itertools
import math

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.correlation import _correlations, correlation, granulated_kendall

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_bootstraps_interval_is_that_of_resamples_by_hand(kind):
    x, y, _, codes = data(7)
    found = correlation(x, y, codes, kind=kind, resamples=500)
    weights = np.random.default_rng(seeds.derive(0, "correlation")).multinomial(8, np.full(8, 1 / 8), size=500)
    indices = [np.concatenate([np.flatnonzero(codes == g).repeat(w) for g, w in enumerate(row)]) for row in weights]
    by_hand = [KINDS[kind](x[drawn], y[drawn])[0] for drawn in indices]
    assert found.bootstrap95 == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])), rel=1e-9)
    assert found.bootstrap95 != correlation(x, y, codes, kind=kind, resamples=500, seed=1).bootstrap95


def test_resamples_without_a_correlation_are_left_out():
    found = correlation([1, 2, 3, 5], [1, 3, 2, 5], range(4), resamples=5000)
    missing = 4 / 4**4  # of all resamples draw one cluster four times
    assert found.resamples == pytest.approx(5000 * (1 - missing), abs=3 * math.sqrt(5000 * missing))
    assert found.resamples < 5000
    assert all(math.isfinite(end) for end in found.bootstrap95)


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
        (8, 4, 0.8, 0.4, "pearson", True),
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
        (lambda: correlation([1, 2, 3], [1, 3, 2], ["a", "b", None]), r"clusters\[2\] is None; each"),
        (lambda: correlation([1, 2, 3, 4], [1, 3, 2, 4], [1, 2, math.nan, 3]), r"clusters\[2\] is nan"),
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


# --- the granulated coefficient --------------------------------------------------------------------------------------


def grid(arms=3, sizes=2, seeds=5):
    """A full grid of runs: the hyper-parameters by name."""
    runs = itertools.product([f"arm-{a}" for a in range(arms)], [64 << s for s in range(sizes)], range(seeds))
    return dict(zip(("arm", "size", "seed"), (list(values) for values in zip(*runs, strict=True)), strict=True))


def measured(hyperparameters, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(len(hyperparameters["seed"])) + np.array(hyperparameters["size"]) / 64
    y = x + rng.standard_normal(len(x)) + rng.standard_normal(20)[hyperparameters["seed"]]
    return (np.round(x), np.round(y)) if ties else (x, y)


def by_definition(x, y, hyperparameters, kept=None):
    """Each hyper-parameter's mean over the cells, by a loop over all pairs of each cell."""
    columns = list(hyperparameters.values())
    runs = [i for i in range(len(x)) if kept is None or kept[i]]
    found = {}
    for name, own in hyperparameters.items():
        cells = {}
        for i in runs:
            cells.setdefault(tuple(other[i] for other in columns if other is not own), []).append(i)
        taus = []
        for members in cells.values():
            pairs = [(i, j) for i, j in itertools.permutations(members, 2) if own[i] != own[j]]
            if pairs:
                taus.append(sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs) / len(pairs))
        found[name] = sum(taus) / len(taus)
    return found


def without(hyperparameters, dropped):
    """The same runs but for some, as of a grid that is not full."""
    return {name: [v for i, v in enumerate(values) if i not in dropped] for name, values in hyperparameters.items()}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "hyperparameters", [grid(), without(grid(), {0, 7, 8, 22}), {**grid(), "size": [64] * 15 + [128] * 15}]
)
def test_it_is_that_of_the_definition_with_the_jackknifes_error(hyperparameters, ties):
    x, y = measured(hyperparameters, ties=ties)
    found = granulated_kendall(x, y, hyperparameters, hyperparameters["seed"])
    expected = by_definition(x, y, hyperparameters)
    assert {name: each.value for name, each in found.by_hyperparameter.items()} == pytest.approx(expected, rel=1e-12)
    assert found.coefficient.value == pytest.approx(np.mean(list(expected.values())), rel=1e-12)
    others = [by_definition(x, y, hyperparameters, np.array(hyperparameters["seed"]) != seed) for seed in range(5)]
    for name, each in found.by_hyperparameter.items():
        off = np.array([other[name] for other in others]) - each.value
        assert each.stderr == pytest.approx(math.sqrt(4 / 5 * np.square(off).sum()), rel=1e-12)
    off = np.array([np.mean(list(other.values())) for other in others]) - found.coefficient.value
    half = stats.t.ppf(0.975, 4) * math.sqrt(4 / 5 * np.square(off).sum())
    center = found.coefficient.value
    assert found.coefficient.ci95 == pytest.approx((center - half, center + half), rel=1e-12)


def test_what_one_hyperparameter_moves_alone_does_not_decide():
    runs = grid(sizes=4, seeds=8)
    rng = np.random.default_rng(0)
    of_size = 10 * np.array(runs["size"])
    x, y = of_size + rng.standard_normal((2, len(of_size)))
    found = granulated_kendall(x, y, runs, runs["seed"])
    assert stats.kendalltau(x, y)[0] > 0.7
    assert found.by_hyperparameter["size"].value == 1
    assert found.by_hyperparameter["size"].stderr == 0
    assert "size 1.00," in str(found)
    low, high = found.by_hyperparameter["arm"].ci95
    assert low < 0 < high


def test_two_measures_have_a_paired_difference():
    runs = grid(seeds=6)
    x, y = measured(runs, seed=2)
    other = x + np.random.default_rng(9).standard_normal(len(x))
    first, second = (granulated_kendall(each, y, runs, runs["seed"]).coefficient for each in (x, other))
    found = paired_difference(first, second)
    seeds = np.array(runs["seed"])
    of = [[np.mean(list(by_definition(each, y, runs, seeds != g).values())) for g in range(6)] for each in (x, other)]
    off = np.subtract(*of) - (first.value - second.value)
    assert found.value == pytest.approx(first.value - second.value, rel=1e-12)
    assert found.stderr == pytest.approx(math.sqrt(5 / 6 * np.square(off).sum()), rel=1e-9)


def rate(arms, seeds, within, of_clusters, number):
    """How often the interval holds the truth, for normal x and y with a part for each seed."""
    runs, rng, held = grid(arms, 2, seeds), np.random.default_rng(0), []

    def both(count, r):
        first, second = rng.standard_normal((2, count))
        return np.stack([first, r * first + math.sqrt(1 - r * r) * second])

    correlations = within, within, (within + of_clusters) / 2  # of the differences by arm, size and seed
    truth = np.mean([2 / math.pi * math.asin(r) for r in correlations])
    for _ in range(number):
        x, y = both(len(runs["seed"]), within) + both(seeds, of_clusters)[:, runs["seed"]]
        low, high = granulated_kendall(x, y, runs, runs["seed"]).coefficient.ci95
        held.append(low < truth < high)
    return np.mean(held), 3 * math.sqrt(0.95 * 0.05 / number)


@pytest.mark.parametrize(
    ("arms", "seeds", "within", "of_clusters"),
    [(3, 6, 0.0, 0.0), (3, 6, 0.4, 0.8), pytest.param(3, 20, 0.9, 0.9, marks=pytest.mark.slow)],
)
def test_the_granulated_interval_holds_the_truth_as_often_as_stated(arms, seeds, within, of_clusters):
    found, deviation = rate(arms, seeds, within, of_clusters, 300)
    assert 0.93 - deviation < found < 0.97 + deviation


ARMS = {"arm": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2]}


@pytest.mark.parametrize(
    ("x", "hyperparameters", "clusters", "message"),
    [
        (range(6), {}, ARMS["seed"], "hyperparameters is empty"),
        (range(6), {**ARMS, "size": [1] * 6}, ARMS["seed"], "no two observations differ in 'size' alone"),
        (range(6), {**ARMS, "run": range(6)}, ARMS["seed"], "no two observations differ in 'arm' alone"),
        (range(6), {"arm": ["a"] * 5}, ARMS["seed"], "arm has the shape"),
        (
            range(6),
            {"arm": ["a", None, 2] * 2},
            range(6),
            "arm.1. is None; each observation needs a label",
        ),
        (range(5), ARMS, ARMS["seed"], "y has the shape"),
        ([0, 1, 2, 3, 4, math.nan], ARMS, ARMS["seed"], "all of x must be finite"),
        (range(6), ARMS, [0, 0, 0, 1, 1, 1], "number of clusters is 2"),
        (range(6), {"arm": [0, 1, 1, 1, 1, 1]}, range(6), "without the cluster 0 no two observations differ in 'arm'"),
        (range(6), ARMS, ARMS["seed"], "the coefficient is 1 without each cluster, so that its error is not known"),
    ],
)
def test_what_has_no_coefficient_is_refused(x, hyperparameters, clusters, message):
    with pytest.raises(IsolossError, match=message):
        granulated_kendall(x, range(6), hyperparameters, clusters)
