"""Linear CKA and the participation ratio: against their definitions, sentence by sentence, and known covariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.transfer import effective_dimension, effective_rank, gram_matrix, linear_cka
from isoloss.transfer.similarity import exact_features, from_upper_triangle, state_ranks, upper_triangle


def features(n: int, width: int, seed: int = 0) -> np.ndarray:
    """Correlated features of unequal scales, far from 0."""
    g = np.random.default_rng(seed)
    return g.normal(size=(n, width)) @ g.normal(size=(width, width)) + 5 * g.normal(size=width)


def pair(n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    x = features(n, 4)
    return x, np.hstack([x[:, :2], np.random.default_rng(9).normal(size=(n, 3))])


def mean_over_quadruples(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Unbiased |Cov(x, y)|^2 and tr(Cov x) tr(Cov y): means over all ordered quadruples of different rows."""
    squared, traces = [], []
    for i, j, k, m in itertools.permutations(range(len(x)), 4):
        # of four rows, (x_i - x_j)(y_i - y_j)^T / 2 and (x_k - x_m)(y_k - y_m)^T / 2 are independent covariances
        squared.append((x[i] - x[j]) @ (x[k] - x[m]) * ((y[i] - y[j]) @ (y[k] - y[m])) / 4)
        traces.append((x[i] - x[j]) @ (x[i] - x[j]) * ((y[k] - y[m]) @ (y[k] - y[m])) / 4)
    return float(np.mean(squared)), float(np.mean(traces))


def cka_from_features(x: np.ndarray, y: np.ndarray) -> float:
    """By U-centered inner products (Szekely and Rizzo 2014), whose mean product is the unbiased HSIC."""

    def centered(z: np.ndarray) -> np.ndarray:
        inner, n = z @ z.T, len(z)
        np.fill_diagonal(inner, 0)
        rows = inner.sum(axis=1) / (n - 2)
        inner = inner - rows - rows[:, None] + inner.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(inner, 0)
        return inner

    a, b = centered(x), centered(y)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def gram(x: np.ndarray) -> np.ndarray:
    return gram_matrix(torch.from_numpy(x))


def test_the_gram_matrix_is_that_of_centered_features():
    x = np.random.default_rng(0).normal(size=(9, 20_000))  # in several blocks
    centered = x - x.mean(axis=0)
    np.testing.assert_allclose(gram(x), centered @ centered.T, atol=1e-9)
    kept = upper_triangle(gram(x))
    assert (kept.dtype, kept.shape) == (np.float32, (45,))
    np.testing.assert_array_equal(from_upper_triangle(kept), gram(x).astype(np.float32))


def test_both_are_means_over_different_sentences():
    x, y = pair(7)
    both, own, other = (mean_over_quadruples(*two)[0] for two in ((x, y), (x, x), (y, y)))
    assert linear_cka(gram(x), gram(y)).value == pytest.approx(both / np.sqrt(own * other), rel=1e-9)
    squared, traces = mean_over_quadruples(x, x)
    assert effective_dimension(gram(x)).value == pytest.approx(traces / squared, rel=1e-9)


def test_cka_is_that_of_the_features_and_its_error_that_of_leaving_out_each_sentence():
    x, y = pair()
    found = linear_cka(gram(x), gram(y))
    assert found.value == pytest.approx(cka_from_features(x, y), rel=1e-9)
    assert linear_cka(x @ x.T, y @ y.T).value == pytest.approx(found.value, rel=1e-9)  # not centered
    left = [cka_from_features(np.delete(x, i, axis=0), np.delete(y, i, axis=0)) for i in range(len(x))]
    jackknife = np.sqrt((len(x) - 1) * np.var(left))
    assert found.stderr == pytest.approx(jackknife, rel=1e-7)
    assert (found.samples, found.unit) == (30, "CKA")
    assert np.sqrt((found.influence**2).sum() / (30 * 29)) == pytest.approx(found.stderr)


def test_the_error_of_the_effective_dimension_is_that_of_leaving_out_each_sentence():
    x, _ = pair(12)
    left = [effective_dimension(gram(np.delete(x, i, axis=0))).value for i in range(len(x))]
    assert effective_dimension(gram(x)).stderr == pytest.approx(np.sqrt(11 * np.var(left)), rel=1e-7)


def rank_me(x: np.ndarray, weights: np.ndarray | None = None) -> float:
    weights = np.full(len(x), 1 / len(x)) if weights is None else weights
    singular = np.linalg.svd(np.sqrt(weights)[:, None] * (x - weights @ x), compute_uv=False)
    p = singular[singular > 1e-9 * singular[0]] / singular.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize(("n", "width"), [(40, 6), (12, 30)])
def test_the_effective_rank_is_that_of_the_singular_values_and_its_error_by_the_weight_of_each_sentence(n, width):
    x = features(n, width)
    found = effective_rank(gram(x))
    assert found.value == pytest.approx(rank_me(x), rel=1e-10)
    assert effective_rank(x @ x.T).value == pytest.approx(found.value, rel=1e-8)  # not centered
    step, influence = 1e-5, []
    for k in range(n):
        moved = [rank_me(x, (1 - e) / n + e * np.eye(n)[k]) for e in (step, -step)]
        influence.append((moved[0] - moved[1]) / (2 * step))
    np.testing.assert_allclose(found.influence, influence, atol=1e-5 * np.abs(influence).max())
    assert found.stderr == pytest.approx(np.sqrt(np.square(influence).sum() / (n * (n - 1))), rel=1e-5)


def test_the_error_of_the_effective_rank_covers_that_of_all_sentences():
    scales = np.array([2.0, 1.5, 1.0, 0.5])
    truth = np.exp(-(scales / 5 * np.log(scales / 5)).sum())
    found = [effective_rank(gram(np.random.default_rng(seed).normal(size=(200, 4)) * scales)) for seed in range(200)]
    values, errors = (np.array([getattr(each, name) for each in found]) for name in ("value", "stderr"))
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(values.std(), rel=0.2)
    assert np.mean([low <= truth <= high for low, high in (each.ci95 for each in found)]) > 0.9


def test_over_all_sentences_all_three_are_those_of_weighted_features():
    (x, y), weights = pair(), np.random.default_rng(3).dirichlet(np.ones(30))
    exact = exact_features(*(torch.from_numpy(each) for each in (x, weights, y)))
    assert exact["effective-rank"].value == pytest.approx(rank_me(x, weights), rel=1e-10)
    covariance = np.cov(np.hstack([x, y]).T, aweights=weights, ddof=0)
    own, other, cross = covariance[:4, :4], covariance[4:, 4:], covariance[:4, 4:]
    assert exact["effective-dimension"].value == pytest.approx(np.trace(own) ** 2 / (own**2).sum(), rel=1e-10)
    norms = [np.linalg.norm(each) for each in (own, other, cross)]
    assert exact["cka-truth"].value == pytest.approx(norms[2] ** 2 / (norms[0] * norms[1]), rel=1e-10)
    assert all(each.is_exact for each in exact.values())
    with pytest.raises(IsolossError, match="the same for all sentences"):
        exact_features(torch.ones(30, 2), torch.from_numpy(weights), torch.from_numpy(y))


def test_cka_does_not_change_under_rotation_and_scale():
    x, y = pair()
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    moved = -3 * x @ rotation + np.arange(4)
    before, after = linear_cka(gram(x), gram(y)), linear_cka(gram(moved), gram(y))
    assert (after.value, after.stderr) == pytest.approx((before.value, before.stderr), rel=1e-9)
    assert linear_cka(gram(y), gram(x)).value == pytest.approx(before.value, rel=1e-12)
    assert linear_cka(gram(x), gram(moved)).value == pytest.approx(1, abs=1e-12)
    assert before.value < 0.95
    stretched = x * np.array([1, 1, 1, 100.0])
    assert linear_cka(gram(stretched), gram(x)).value < 0.95


def test_equal_features_have_a_cka_of_exactly_1():
    for n, width, seed in ((5, 3, 0), (40, 2, 1), (64, 300, 2)):
        own = gram(features(n, width, seed))
        found = linear_cka(own, own.copy())
        assert (found.value, found.stderr) == (1.0, 0.0)


def test_independent_features_of_many_dimensions_have_a_cka_of_about_0():
    values, errors = [], []
    for seed in range(100):
        g = np.random.default_rng(seed)
        x, y = g.normal(size=(40, 200)), g.normal(size=(40, 200))
        found = linear_cka(gram(x), gram(y))
        values.append(found.value)
        errors.append(found.stderr)
        plain = (gram(x) * gram(y)).sum() / np.sqrt((gram(x) ** 2).sum() * (gram(y) ** 2).sum())
        assert plain > 0.7  # what the plain estimator says
    assert abs(np.mean(values)) < 4 * np.std(values) / 10
    assert np.mean(np.abs(values)) < 0.1
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.5)


def test_estimates_are_right_on_average_and_so_are_their_errors():
    """Features of two models that share some of four Gaussian dimensions, with a known CKA and dimension."""
    scales, noise = np.array([2.0, 1.5, 1.0, 0.5]), 0.8
    own, other = scales**2, scales**2 + noise**2
    true = (own**2).sum() / np.sqrt((own**2).sum() * (other**2).sum())
    dimension = own.sum() ** 2 / (own**2).sum()
    ckas, dimensions = [], []
    for seed in range(200):
        g = np.random.default_rng(seed)
        x = g.normal(size=(200, 4)) * scales
        ckas.append(linear_cka(gram(x), gram(x + noise * g.normal(size=(200, 4)))))
        dimensions.append(effective_dimension(gram(x)))
    for found, truth in ((ckas, true), (dimensions, dimension)):
        values, errors = (np.array([getattr(each, name) for each in found]) for name in ("value", "stderr"))
        assert values.mean() == pytest.approx(truth, abs=4 * values.std() / np.sqrt(200) + 0.01)
        assert np.sqrt(np.mean(errors**2)) == pytest.approx(values.std(), rel=0.2)
        inside = [low <= truth <= high for low, high in (each.ci95 for each in found)]
        assert np.mean(inside) > 0.9


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.eye(4), np.eye(4), "the first Gram matrix is of 4 sentences; it takes at least 5"),
        (np.eye(6), np.eye(7), "is of 6 sentences and the second of 7"),
        (np.eye(6), np.eye(6)[:4], r"the second Gram matrix has the shape \(4, 6\); it must be square"),
        (np.eye(6), np.full((6, 6), np.nan), "the second Gram matrix has a number that is not finite"),
        (np.triu(np.ones((6, 6))), np.eye(6), "the first Gram matrix is not symmetric"),
        (np.ones((6, 6)), np.ones((6, 6)), "the features of 6 sentences are too few or too similar"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(first, second, message):
    with pytest.raises(IsolossError, match=message):
        linear_cka(first, second)


def test_features_that_do_not_vary_have_no_dimension():
    with pytest.raises(IsolossError, match="too few or too similar"):
        effective_dimension(np.zeros((6, 6)))
    with pytest.raises(IsolossError, match="too few or too similar"):
        effective_rank(np.zeros((6, 6)))


def test_the_ranks_of_token_states_are_those_of_a_known_spectrum():
    """States whose covariance has the given eigenvalues exactly; the error is the jackknife's by leaving out."""
    draw = np.random.default_rng(0)
    deviations = np.array([3.0, 2.0, 2.0, 1.0, 0.5])
    x = draw.normal(size=(600, 5))
    x -= x.mean(axis=0)
    whitened = x @ np.linalg.inv(np.linalg.cholesky(x.T @ x / 600)).T
    rotation = np.linalg.qr(draw.normal(size=(5, 5)))[0]
    states = torch.from_numpy((whitened * deviations) @ rotation + 4)
    clusters = torch.arange(600) // 10
    found = state_ranks(states, clusters)
    p = deviations / deviations.sum()
    assert found["effective-rank"].value == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-10)
    v = deviations**2
    assert found["participation-ratio"].value == pytest.approx(v.sum() ** 2 / (v**2).sum(), rel=1e-10)
    number = int(clusters.max()) + 1
    without = [
        {name: each.value for name, each in state_ranks(states[clusters != i], clusters[clusters != i]).items()}
        for i in range(number)
    ]
    for name, estimate in found.items():
        off = np.array([each[name] - estimate.value for each in without])
        assert estimate.stderr == pytest.approx(np.sqrt((number - 1) / number * (off**2).sum()), rel=0.1)
    with pytest.raises(IsolossError, match="the states of all tokens are the same"):
        state_ranks(torch.ones(6, 3), torch.arange(6))
    with pytest.raises(IsolossError, match="an error bar needs at least 2 independent sequences or documents"):
        state_ranks(torch.randn(6, 3), torch.zeros(6, dtype=torch.int64))
