"""Means over clusters against scipy and statsmodels, and how often their intervals hold the truth."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from statsmodels.formula.api import mixedlm, ols
from statsmodels.stats.anova import anova_lm

from isoloss.errors import IsolossError
from isoloss.statistics.clusters import VarianceComponents, cluster_mean, crossed_mean, variance_components

UNIT = {"unit": "points"}
CROSSED = {"unit": "points", "method": "two-way"}


def nested(seed, sizes, between=1.0, within=1.0, mean=0.0):
    """Values in clusters of these sizes, and the clusters."""
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    values = mean + between * rng.standard_normal(len(sizes))[clusters] + within * rng.standard_normal(len(clusters))
    return values, clusters


def test_it_is_the_t_interval_of_the_clusters_means():
    values, clusters = nested(0, [1, 4, 2, 7])
    order = np.random.default_rng(1).permutation(len(values))
    names = np.array(["d", "a", "c", "b"])[clusters]
    found = cluster_mean(values[order], names[order], **UNIT)
    means = [values[names == name].mean() for name in "abcd"]
    expected = stats.ttest_1samp(means, 0)
    assert found.ci95 == pytest.approx(expected.confidence_interval(0.95), rel=1e-7)
    assert (found.samples, found.num_predictions, found.details["labels"]) == (4, 14, list("abcd"))
    np.testing.assert_allclose(found.influence, np.array(means) - np.mean(means))


def test_it_and_the_components_are_those_of_a_mixed_model_by_reml():
    values, clusters = nested(2, [5] * 8, between=1.5)
    fitted = mixedlm("y ~ 1", pd.DataFrame({"y": values, "g": clusters}), groups="g").fit(reml=True)
    found, components = cluster_mean(values, clusters, **UNIT), variance_components(values, clusters)
    assert (found.value, found.stderr) == pytest.approx((fitted.params.iloc[0], fitted.bse.iloc[0]), rel=1e-4)
    assert components.within**2 == pytest.approx(fitted.scale, rel=1e-4)
    assert components.between**2 == pytest.approx(float(fitted.cov_re.iloc[0, 0]), rel=1e-3)
    assert components.sd_of_means(5) == pytest.approx(found.stderr * math.sqrt(8), rel=1e-9)


def coverage(held, at_least=0.0, below=1.0):
    """Check a rate of intervals of 95 % that hold the truth, between bounds widened by three standard errors."""
    deviation = 3 * math.sqrt(0.95 * 0.05 / len(held))
    assert at_least - deviation < np.mean(held) < below + deviation


@pytest.mark.parametrize("between", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (1, 2, 9, 1, 5)])
def test_the_interval_over_clusters_holds_the_truth_as_often_as_stated(sizes, between):
    held = []
    for seed in range(1000):
        low, high = cluster_mean(*nested(seed, list(sizes), between, mean=2.0), **UNIT).ci95
        held.append(low < 2.0 < high)
    even = len(set(sizes)) == 1  # unequal variances of the means make it wider than needed
    coverage(held, 0.95, 0.95 if even or between else 0.99)


@pytest.mark.parametrize("shape", [(3, 4), (2, 2), (5, 9)])
def test_the_two_way_error_is_that_of_the_mean_squares(shape):
    rng = np.random.default_rng(0)
    table = 2 * rng.standard_normal((shape[0], 1)) + 2 * rng.standard_normal(shape[1]) + rng.standard_normal(shape)
    rows, columns = (index.ravel() for index in np.indices(shape))
    frame = pd.DataFrame({"y": table.ravel(), "row": rows, "column": columns})
    of_rows, of_columns, of_rest = anova_lm(ols("y ~ C(row) + C(column)", frame).fit())["mean_sq"]
    square, (r, c) = of_rows + of_columns - of_rest, shape
    freedom = square**2 / (of_rows**2 / (r - 1) + of_columns**2 / (c - 1) + of_rest**2 / ((r - 1) * (c - 1)))
    found = crossed_mean(table.tolist(), **CROSSED)
    assert found.stderr == pytest.approx(math.sqrt(square / (r * c)), rel=1e-9)
    assert found.samples == 1 + max(1, round(freedom))
    assert found.value == pytest.approx(table.mean(), rel=1e-12)
    turned = crossed_mean(torch.from_numpy(table.T.copy()), **CROSSED)
    assert (turned.stderr, turned.samples) == (pytest.approx(found.stderr), found.samples)


@pytest.mark.parametrize(
    ("shape", "of_rows", "of_columns", "bounds"),
    [
        ((5, 6), 1.0, 1.0, (0.94, 0.97)),
        ((3, 4), 0.5, 1.0, (0.94, 0.99)),
        ((5, 6), 0.0, 0.0, (0.95, 0.995)),  # the larger effect alone is taken: too wide
    ],
)
def test_the_two_way_interval_holds_the_truth_about_as_often_as_stated(shape, of_rows, of_columns, bounds):
    rng, held, by_column = np.random.default_rng(0), [], []
    for _ in range(1000):
        table = of_rows * rng.standard_normal((shape[0], 1)) + of_columns * rng.standard_normal(shape[1])
        table = table + rng.standard_normal(shape)
        low, high = crossed_mean(torch.from_numpy(table), **CROSSED).ci95
        held.append(low < 0 < high)
        low, high = cluster_mean(table.mean(axis=0), range(shape[1]), **UNIT).ci95
        by_column.append(low < 0 < high)
    coverage(held, *bounds)
    if of_rows == 1:  # rows that have an effect of their own are not seen by an error over columns
        coverage(by_column, below=0.88)


def test_one_row_is_a_mean_over_columns():
    values = [1.0, 2.0, 5.0]
    one, plain = crossed_mean([values], **CROSSED), cluster_mean(values, list("abc"), **UNIT)
    assert (one.value, one.stderr, one.samples) == pytest.approx((plain.value, plain.stderr, plain.samples))


@pytest.mark.parametrize("table", [[[1, 0], [0, 1]], [[3, 1, 2], [1, 3, 2]], [[5, -5, 0], [-5, 5, 0], [0, 0, 0]]])
def test_where_rows_and_columns_have_one_mean_the_error_is_that_of_the_interaction(table):
    """By the analysis of variance of statsmodels; with an error of 0, a true 0 would have been refuted."""
    cells = [(row, column, value) for row, line in enumerate(table) for column, value in enumerate(line)]
    frame = pd.DataFrame(cells, columns=["row", "column", "y"])
    of_rest = anova_lm(ols("y ~ C(row) + C(column)", frame).fit()).loc["Residual"]
    found = crossed_mean(table, **CROSSED)
    assert found.stderr == pytest.approx(math.sqrt(of_rest["mean_sq"] / len(cells)))
    assert found.samples == 1 + of_rest["df"]
    low, high = stats.t.interval(0.95, of_rest["df"], frame.y.mean(), found.stderr)
    assert found.ci95 == pytest.approx((low, high))


def test_the_components_are_without_bias_in_clusters_of_any_size():
    found = [variance_components(*nested(seed, [1, 2, 6, 3, 3], between=2.0, within=1.0)) for seed in range(1000)]
    squares = np.array([(each.between**2, each.within**2) for each in found])
    errors = squares.std(axis=0) / math.sqrt(len(squares))
    np.testing.assert_array_less(np.abs(squares.mean(axis=0) - [4.0, 1.0]), 3.5 * errors + [0.02, 0])


def test_components_that_would_be_negative_are_zero():
    assert variance_components([1.0, -1.0, 1.0, -1.0], [0, 0, 1, 1]).between == 0
    assert VarianceComponents(between=0.0, within=2.0).sd_of_means(4) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster_mean([1.0, 2.0], ["a", "a"], **UNIT), "number of clusters is 1; .* needs at least 2"),
        (lambda: cluster_mean([], [], **UNIT), "number of clusters is 0"),
        (
            lambda: cluster_mean([1.0, math.nan], ["a", "b"], **UNIT),
            r"values\[1\] is nan; all of values must be finite",
        ),
        (lambda: cluster_mean([[1.0]], ["a"], **UNIT), r"values has the shape \(1, 1\)"),
        (lambda: cluster_mean(["x"], ["a"], **UNIT), "values is not a list of numbers"),
        (lambda: cluster_mean([1.0, 2.0], ["a"], **UNIT), r"clusters has the shape \(1,\); it must be 2 labels"),
        (lambda: cluster_mean([1.0, 2.0], [("a", 1), ("b", 1)], **UNIT), r"clusters has the shape \(2, 2\)"),
        (lambda: cluster_mean([1, 2, 3, 4], [1, math.nan, 2, math.nan], **UNIT), r"clusters\[1\] is nan; .* a label"),
        (lambda: cluster_mean([1, 2, 3], np.array([1, 2, math.nan]), **UNIT), r"clusters\[2\] is nan"),
        (lambda: cluster_mean([1, 2, 3], ["a", math.nan, "nan"], **UNIT), r"clusters\[1\] is nan"),
        (lambda: cluster_mean([1, 2, 3], ["a", "b", None], **UNIT), r"clusters\[2\] is None; .* needs a label"),
        (lambda: cluster_mean([1, 2, 3, 4], [1, "1", 2, "2"], **UNIT), r"labels of different types \(int and str\)"),
        (lambda: crossed_mean([[1.0], [2.0]], **CROSSED), r"shape \(2, 1\); .* at least 1 row, 2 columns"),
        (lambda: crossed_mean([[1.0, 2.0], [2.0]], **CROSSED), "values is not a table of numbers"),
        (lambda: crossed_mean([[1.0, math.inf]], **CROSSED), "a number that is not finite"),
        (lambda: variance_components([1.0, 2.0], ["a", "b"]), "each of the 2 clusters has one observation"),
        (lambda: VarianceComponents(between=1.0, within=1.0).sd_of_means(0), "per_cluster is 0"),
    ],
)
def test_what_has_no_error_over_clusters_is_refused(call, message):
    with pytest.raises(IsolossError, match=message):
        call()
