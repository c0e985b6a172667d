"""The granulated Kendall coefficient against its definition, its error by hand, and how often the interval holds it."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.correlation import granulated_kendall


def grid(arms=3, sizes=2, seeds=5):
    """A full grid of runs: the hyper-parameters by name."""
    runs = itertools.product([f"arm-{a}" for a in range(arms)], [64 << s for s in range(sizes)], range(seeds))
    return dict(zip(("arm", "size", "seed"), (list(values) for values in zip(*runs, strict=True)), strict=True))


def measured(hyperparameters, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(len(hyperparameters["seed"])) + np.array(hyperparameters["size"]) / 64
    y = x + rng.standard_normal(len(x)) + rng.standard_normal(20)[hyperparameters["seed"]]
    return (np.round(x), np.round(y)) if ties else (x, y)


def slow(x, y, hyperparameters, kept=None):
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
    expected = slow(x, y, hyperparameters)
    assert {name: each.value for name, each in found.by_hyperparameter.items()} == pytest.approx(expected, rel=1e-12)
    assert found.coefficient.value == pytest.approx(np.mean(list(expected.values())), rel=1e-12)
    others = [slow(x, y, hyperparameters, np.array(hyperparameters["seed"]) != seed) for seed in range(5)]
    for name, each in found.by_hyperparameter.items():
        off = np.array([other[name] for other in others]) - each.value
        assert each.stderr == pytest.approx(math.sqrt(4 / 5 * np.square(off).sum()), rel=1e-12)
    off = np.array([np.mean(list(other.values())) for other in others]) - found.coefficient.value
    half = stats.t.ppf(0.975, 4) * math.sqrt(4 / 5 * np.square(off).sum())
    center = found.coefficient.value
    assert found.coefficient.ci95 == pytest.approx((center - half, center + half), rel=1e-12)


def test_without_ties_a_cell_has_scipys_tau():
    runs = grid()
    x, y = measured(runs, seed=1)
    found = granulated_kendall(x, y, runs, runs["seed"])
    of_cells = x.reshape(6, 5), y.reshape(6, 5)  # arm and size by seed
    expected = np.mean([stats.kendalltau(a, b)[0] for a, b in zip(*of_cells, strict=True)])
    assert found.by_hyperparameter["seed"].value == pytest.approx(expected, rel=1e-12)
    assert found.cells == {"arm": 10, "size": 15, "seed": 6}


def test_a_cell_that_is_all_tied_counts_as_zero():
    runs = {"arm": ["a", "b"] * 4, "seed": [0, 0, 1, 1, 2, 2, 3, 3]}
    x, y = [1, 2, 2, 3, 4, 4, 5, 6], [1, 2, 2, 3, 3, 4, 5, 6]  # x is tied in seed 2
    found = granulated_kendall(x, y, runs, runs["seed"])
    assert found.by_hyperparameter["arm"].value == pytest.approx(3 / 4)
    assert found.cells["arm"] == 4


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
    of = [[np.mean(list(slow(each, y, runs, seeds != g).values())) for g in range(6)] for each in (x, other)]
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
def test_the_interval_holds_the_truth_as_often_as_stated(arms, seeds, within, of_clusters):
    found, deviation = rate(arms, seeds, within, of_clusters, 400)
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
            "arm has labels that have no order .NoneType and int and str.",
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
