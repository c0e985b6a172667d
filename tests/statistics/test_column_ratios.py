"""Weighted sums of columns, against the cluster-by-cluster reference and the estimator's own parts."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch

from isoloss.statistics.ratio import FOLDS, AuxiliaryMeans, ClusteredRatioEstimator, ratio

SIZES = (7, 1, 20)
COVARIANCE = torch.tensor([[0.002, 0.001], [0.001, 0.004]], dtype=torch.float64)


def rows_of(n, columns=5, controls=4, seed=0):
    """Terms that lean on the controls, positions and documents of two sequences."""
    generator = np.random.default_rng(seed)
    m, d = generator.integers(1, 5, n), generator.exponential(size=(n, controls)) - 1
    a = m[:, None] * generator.exponential(size=(n, columns)) + np.abs(d @ generator.normal(size=(controls, columns)))
    a += 3 * (d[:, -1:] + 2) * m[:, None]
    return torch.from_numpy(a), torch.from_numpy(m), torch.from_numpy(d), torch.arange(n) // 2


def estimator_of(columns, controls, auxiliary, **options):
    means = AuxiliaryMeans(COVARIANCE, 10_000, 2) if auxiliary else None
    return ClusteredRatioEstimator(columns, controls - 2 * auxiliary, auxiliary=means, **options)


def filled(a, m, d, documents, *, auxiliary=True, **options):
    estimator = estimator_of(a.shape[1], d.shape[1], auxiliary, **options)
    start, index = 0, 0
    while start < len(a):
        part = slice(start, start + SIZES[index % len(SIZES)])
        estimator.add(a[part], m[part], d[part], documents[part])
        start, index = part.stop, index + 1
    return estimator


class Slow:
    """Everything from the stored rows: the coefficients by lstsq, for one weighted sum at a time."""

    def __init__(self, a, m, d, documents, *, auxiliary=True):
        self.a, self.m, self.d = (values.double().numpy() for values in (a, m, d))
        self.documents = documents.numpy()
        self.folds = self.documents % FOLDS
        self.covariance = COVARIANCE.numpy() if auxiliary else np.zeros((0, 0))

    def by_document(self, values):
        return np.bincount(self.documents, values)

    def coefficients(self, sums, fold):
        rest = self.folds != fold
        y = sums[rest] - sums[rest].sum() / self.m[rest].sum() * self.m[rest]
        return np.linalg.lstsq(self.d[rest], y, rcond=None)[0]

    def adjusted(self, sums):
        return np.array(
            [value - d @ self.coefficients(sums, fold) for value, d, fold in zip(sums, self.d, self.folds, strict=True)]
        )

    def estimate(self, by_fold):
        """Value, error, influence; the clusters of fold f have the weights by_fold[f]."""
        total, m, r = self.m.sum(), self.by_document(self.m), len(self.covariance)
        each = [self.adjusted(self.a @ weights) for weights in by_fold]
        adjusted = np.array([each[fold][b] for b, fold in enumerate(self.folds)])
        value = adjusted.sum() / total
        slopes = sum(
            (self.folds == fold).sum() * self.coefficients(self.a @ by_fold[fold], fold)[len(self.d[0]) - r :]
            for fold in range(FOLDS)
        )
        count, moves = len(m), (self.by_document(adjusted) - value * m) / (total - m)
        of_means = slopes @ self.covariance @ slopes / total**2
        stderr = math.sqrt((moves**2).sum() * (count - 1) / count + of_means)
        return value, stderr, moves * (count - 1)

    def without(self, fold, column):
        rest = self.folds != fold
        beta = self.coefficients(self.a[:, column], fold)
        return (self.a[rest, column] - self.d[rest] @ beta).sum() / self.m[rest].sum()


@pytest.mark.parametrize("auxiliary", [True, False])
def test_any_weights_have_the_estimate_of_their_sum(auxiliary):
    rows = rows_of(203)
    columns, slow = filled(*rows, auxiliary=auxiliary).columns(), Slow(*rows, auxiliary=auxiliary)
    generator = np.random.default_rng(1)
    same, other = generator.exponential(size=5), generator.exponential(size=(FOLDS, 5))
    for weights, by_fold in ((same, [same] * FOLDS), (other, other)):
        found = columns.weighted(torch.from_numpy(weights))
        value, stderr, influence = slow.estimate(by_fold)
        assert (found.value, found.stderr) == pytest.approx((value, stderr), rel=1e-9)
        np.testing.assert_allclose(found.influence[: len(influence)], influence, rtol=1e-7, atol=1e-8)
        n = len(influence)
        assert len(found.influence) == n + 2 * auxiliary
        assert float(found.influence.square().sum()) / (n * (n - 1)) == pytest.approx(stderr**2, rel=1e-9)


@pytest.mark.parametrize("auxiliary", [True, False])
def test_ones_give_the_result_and_an_indicator_a_part(auxiliary):
    rows = rows_of(203)
    estimator = filled(*rows, auxiliary=auxiliary, groups=[[0, 1, 1, 0, 2], [3, 3, 4, 4, 4]], part=[3, 1])
    columns, result = estimator.columns(), estimator.result()
    found = columns.weighted(torch.ones(5))
    assert (found.value, found.stderr) == pytest.approx((result.value, result.stderr), rel=1e-12)
    torch.testing.assert_close(found.influence, result.influence, rtol=1e-9, atol=1e-10)
    found = columns.weighted(torch.tensor([0, 1, 0, 1, 0]))
    assert found[:2] == pytest.approx(result.part[:2], rel=1e-12)
    torch.testing.assert_close(found.influence, result.part.influence, rtol=1e-9, atol=1e-10)
    values, errors = result.by_group.tolist(), result.by_group_stderr.tolist()
    for group, members in enumerate([[0, 3], [1, 2], [4], [0, 1], [2, 3, 4]]):
        found = columns.weighted(torch.zeros(5).index_fill_(0, torch.tensor(members), 1.0))
        assert found[:2] == pytest.approx((values[group], errors[group]), rel=1e-9)
    assert torch.equal(columns.ratios, result.by_parameter)


@pytest.mark.parametrize("auxiliary", [True, False])
def test_influences_of_groups_are_those_of_weights_that_move_with_the_columns(auxiliary):
    columns, rng = filled(*rows_of(203), auxiliary=auxiliary).columns(), np.random.default_rng(2)
    weights, groups = torch.from_numpy(rng.exponential(size=(FOLDS, 5))), torch.tensor([0, 1, 1, 0, 2])
    exponents = scipy.sparse.csr_array(rng.integers(-2, 3, size=(5, 4)).astype(float))
    moved = torch.from_numpy(rng.normal(size=(4, 3)))
    found = columns.influences(weights, groups, 3, (exponents, moved))
    for group in range(3):
        of_group = (groups == group) + torch.from_numpy(exponents.toarray()) @ moved[:, group]
        expected = columns.weighted(weights * of_group).influence
        torch.testing.assert_close(found[:, group], expected, rtol=1e-9, atol=1e-10)


def test_sums_by_fold_and_ratios_without_one():
    rows = rows_of(203)
    columns, slow = filled(*rows).columns(), Slow(*rows)
    expected = np.zeros((FOLDS, 5))
    for column in range(5):
        np.add.at(expected[:, column], slow.folds, slow.adjusted(slow.a[:, column]))
    np.testing.assert_allclose(columns.fitted.sums, expected, rtol=1e-9)
    torch.testing.assert_close(columns.fitted.sums.sum(dim=0) / columns.fit.total, columns.ratios, rtol=1e-12, atol=0)
    for fold in (0, 5):
        without = [slow.without(fold, column) for column in range(5)]
        np.testing.assert_allclose(columns.shares_without(fold), without, rtol=1e-9)


def test_columns_stay_as_they_were_when_more_is_added():
    a, m, d, _ = rows_of(203)
    estimator = estimator_of(5, 4, auxiliary=False)
    estimator.add(a, m, d)
    columns, weights = estimator.columns(), torch.ones(5)
    sums, before = columns.fitted.sums, columns.weighted(weights)
    estimator.add(a, m, d)
    torch.testing.assert_close(columns.fitted.sums, sums, rtol=0, atol=0)
    assert columns.weighted(weights)[:2] == before[:2]


def test_the_ratios_without_a_fold_do_not_depend_on_it():
    a, m, d, documents = rows_of(203)
    before = filled(a, m, d, documents).columns().shares_without(2)
    in_fold = documents % FOLDS == 2
    moved = torch.where(in_fold[:, None], a.flip(0) * 7, a), torch.where(in_fold, m + 3, m)
    after = filled(*moved, torch.where(in_fold[:, None], d * 3, d), documents).columns().shares_without(2)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


def test_kept_rows_of_processes_join():
    rows = rows_of(204)
    weights = torch.linspace(0.1, 2, 5)
    whole = filled(*rows)
    expected = whole.columns().weighted(weights)
    halves = [filled(*(values[part] for values in rows)) for part in (slice(0, 96), slice(96, 204))]
    joined = ClusteredRatioEstimator.merged(halves).columns()
    assert torch.equal(joined.a, torch.cat([half.columns().a for half in halves]))
    # 48 documents are 6 rounds of the folds, so that each document has the fold that it has among all
    found = joined.weighted(weights)
    assert found[:2] == pytest.approx(expected[:2], rel=1e-12)
    torch.testing.assert_close(found.influence, expected.influence, rtol=1e-9, atol=1e-10)
    result = whole.result()
    torch.testing.assert_close(
        ClusteredRatioEstimator.merged(halves).result().by_parameter_stderr, result.by_parameter_stderr
    )


def test_a_sum_of_two_without_controls_for_the_second():
    a, m, d, documents = rows_of(203)
    second = torch.rand(203, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = filled(second, m, d[:, :0], documents, auxiliary=False)
    first = filled(a, m, d, documents, auxiliary=False)
    both, result = first.columns().plus(plain.columns()), first.result().plus(plain.result())
    found = both.weighted(torch.ones(5))
    assert found[:2] == pytest.approx((result.value, result.stderr), rel=1e-12)
    torch.testing.assert_close(found.influence, result.influence, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(both.ratios, result.by_parameter)


def test_a_part_that_controls_make_negative_goes_without_them():
    a, m, d, documents = rows_of(203)
    a[:, 4] = 0.1 * (d[:, 0] + 2)
    d[0, 0] = 1000  # an input unlike all others, by which only the other columns are as large as the control says
    a[:, :4] += 20 * (d[:, :1] + 2)
    columns = filled(a, m, d, documents, auxiliary=False).columns()
    assert (columns.ratios < 0).tolist() == [False] * 4 + [True]
    positive = columns.positive()
    assert torch.equal(positive.ratios[:4], columns.ratios[:4])
    sums = [torch.bincount(documents, values.double()) for values in (a[:, 4], m)]
    found = positive.weighted(torch.tensor([0, 0, 0, 0, 1.0]))
    assert found[:2] == pytest.approx(ratio(*sums), rel=1e-9)
    rest = documents % FOLDS != 3
    assert float(positive.shares_without(3)[4]) == pytest.approx(float(a[rest, 4].sum() / m[rest].sum()), rel=1e-12)
    assert positive.positive() is positive
