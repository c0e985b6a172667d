"""The estimator: ratios with cross-fitted control variates, against a slow reference and against known answers."""

import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.statistics import ratio
from isoloss.statistics import ratio as estimators
from isoloss.statistics.ratio import FOLDS, AuxiliaryMeans, ClusteredRatioEstimator


def random_rows(n, parameters=3, controls=2, seed=0):
    """Squared norms that lean on the controls, positions from 1 to 4, controls of mean 0."""
    generator = np.random.default_rng(seed)
    m = generator.integers(1, 5, n)
    d = generator.exponential(size=(n, controls)) - 1
    a = m[:, None] * generator.exponential(size=(n, parameters)) + np.abs(
        d @ generator.normal(size=(controls, parameters))
    )
    return torch.from_numpy(a), torch.from_numpy(m), torch.from_numpy(d)


def filled(a, m, d, documents=None, sizes=(7, 1, 20), auxiliary=None, groups=None):
    """An estimator that was given the rows in batches; the last controls may be those of an auxiliary sample."""
    estimator = ClusteredRatioEstimator(
        a.shape[1], d.shape[1] - (0 if auxiliary is None else len(auxiliary.covariance)), groups, auxiliary
    )
    start, index = 0, 0
    while start < len(a):
        part = slice(start, start + sizes[index % len(sizes)])
        estimator.add(a[part], m[part], d[part], None if documents is None else documents[part])
        start, index = part.stop, index + 1
    return estimator


def summed(values, clusters):
    """The sums of each cluster's rows."""
    return np.stack([np.asarray(values)[np.asarray(clusters) == cluster].sum(0) for cluster in np.unique(clusters)])


def reference(a, m, d, clusters=None):
    """The same, slowly: each fold's coefficients by lstsq over the rows of all others' clusters."""
    clusters = np.arange(len(a)) if clusters is None else np.asarray(clusters)
    a, m, d = (x.double().numpy() for x in (a, m, d))
    folds = clusters % FOLDS
    adjusted = a.copy()
    for fold in range(FOLDS):
        rest = folds != fold
        y = a[rest] - a[rest].sum(0) / m[rest].sum() * m[rest, None]
        beta = np.linalg.lstsq(d[rest], y, rcond=None)[0]
        adjusted[~rest] -= d[~rest] @ beta
    adjusted, m = summed(adjusted, clusters), summed(m, clusters)
    ratios = adjusted.sum(0) / m.sum()
    errors = [ratio.ratio(column, m)[1] for column in adjusted.T]
    value, stderr = ratio.ratio(adjusted.sum(1), m)
    return value, stderr, ratios, errors


def test_equals_the_reference():
    a, m, d = random_rows(101)
    result = filled(a, m, d).result()
    value, stderr, ratios, errors = reference(a, m, d)
    assert result.value == pytest.approx(value, rel=1e-12)
    assert result.stderr == pytest.approx(stderr, rel=1e-12)
    np.testing.assert_allclose(result.by_parameter, ratios, rtol=1e-10)
    np.testing.assert_allclose(result.by_parameter_stderr, errors, rtol=1e-9)
    assert result.by_parameter.sum() == pytest.approx(result.value, rel=1e-12)


def test_without_controls_and_with_few_clusters_it_is_the_plain_ratio():
    a, m, d = random_rows(101)
    for rows in ((a, m, d[:, :0]), (a[:31], m[:31], d[:31])):
        result = filled(*rows).result()
        assert (result.value, result.stderr) == pytest.approx(ratio.ratio(rows[0].sum(1), rows[1]), rel=1e-12)


def test_a_control_that_explains_everything_leaves_no_error():
    m = torch.ones(64)
    d = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).double()
    result = filled(torch.cat([2 + 3 * d, 1 - d], dim=1), m, d).result()
    # the mean of the other folds' controls is not 0, so that the fit is exact only up to it
    assert result.stderr < 0.05 * ratio.ratio((3 + 2 * d)[:, 0], m)[1]
    assert result.value == pytest.approx(3, abs=4 * result.stderr)


def test_a_control_that_is_zero_or_said_twice_does_no_harm():
    a, m, d = random_rows(101, controls=1)
    once = filled(a, m, d).result()
    again = filled(a, m, torch.cat([d, d, 0 * d], dim=1)).result()
    assert again.value == pytest.approx(once.value, rel=1e-9)
    assert again.stderr == pytest.approx(once.stderr, rel=1e-9)


@pytest.mark.parametrize("clusters", [31, 32])
def test_a_control_that_is_zero_nearly_everywhere_is_left_out(clusters):
    a, m, d = random_rows(101)
    a[:, 0] += d @ torch.tensor([3.0, 2.0], dtype=torch.float64)
    d[clusters:, 1] = 0
    expected = reference(a, m, d[:, :1] if clusters == 31 else d)
    result = filled(a, m, d).result()
    assert (result.value, result.stderr) == pytest.approx(expected[:2], rel=1e-12)


@pytest.mark.parametrize(("clusters", "used"), [(79, 4), (80, 5)])
def test_there_is_one_control_for_16_clusters(clusters, used):
    a, m, d = random_rows(clusters, controls=6)
    a[:, 0] += d.sum(dim=1)
    d[:, 1] = 0  # not one of those that are counted
    expected = reference(a, m, d[:, [0, 2, 3, 4, 5][:used]])
    result = filled(a, m, d).result()
    assert (result.value, result.stderr) == pytest.approx(expected[:2], rel=1e-12)


def test_the_unit_of_a_control_does_not_matter():
    a, m, d = random_rows(101)
    a[:, 0] += d @ torch.tensor([3.0, 2.0], dtype=torch.float64)
    plain, scaled = filled(a, m, d).result(), filled(a, m, d * torch.tensor([1e-9, 1e6])).result()
    assert (scaled.value, scaled.stderr) == pytest.approx((plain.value, plain.stderr), rel=1e-9)
    assert plain.stderr < 0.8 * ratio.ratio(a.sum(1), m)[1]


def test_coverage_and_bias_over_repetitions():
    """95 % intervals cover 95 %, less at most 1.5 % for few clusters, and the bias is within 4 standard errors of 0."""
    repetitions, n, truth = 200, 64, 2.0
    generator = np.random.default_rng(5)
    covered, errors, plain = 0, [], []
    for _ in range(repetitions):
        m = generator.integers(1, 4, n)
        d = generator.exponential(size=(n, 2)) - 1
        a = m * (1.6 + 0.4 * generator.exponential(size=n)) + 0.9 * d[:, 0] - 0.3 * d[:, 1]
        estimator = ClusteredRatioEstimator(1, 2)
        estimator.add(torch.from_numpy(a)[:, None], torch.from_numpy(m), torch.from_numpy(d))
        result = estimator.result()
        errors.append(result.value - truth)
        plain.append(a.sum() / m.sum() - truth)
        covered += abs(errors[-1]) < 2.0 * result.stderr  # Student's t with 63 degrees of freedom
    assert abs(covered / repetitions - 0.95) < 0.015 + 4 * math.sqrt(0.05 * 0.95 / repetitions)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(repetitions)
    left = 0.16 * 14 / 3  # variance of a cluster that the controls do not explain; they explain 0.81 + 0.09
    assert np.std(errors) / np.std(plain) == pytest.approx(math.sqrt(left / (left + 0.9)), rel=0.15)  # 3 of its errors


def test_documents_are_clusters_wherever_batches_end():
    a, m, d = random_rows(120)
    documents = torch.arange(120) // 3 * 7 % 41  # ids in no order; a document is three sequences
    result = filled(a, m, d, documents).result()
    value, stderr, _, errors = reference(a, m, d, torch.arange(120) // 3)
    assert (result.value, result.stderr) == pytest.approx((value, stderr), rel=1e-12)
    np.testing.assert_allclose(result.by_parameter_stderr, errors, rtol=1e-9)
    assert len(result.influence) == 40


def test_few_documents_have_the_coefficients_that_their_sequences_give():
    a, m, d = random_rows(360)
    a[:, 0] += d @ torch.tensor([3.0, 2.0], dtype=torch.float64)
    documents = torch.arange(360) // 30
    result = filled(a, m, d, documents).result()
    value, stderr, *_ = reference(a, m, d, documents)
    assert (result.value, result.stderr) == pytest.approx((value, stderr), rel=1e-12)
    assert stderr < 0.8 * filled(a, m, d[:, :0], documents).result().stderr


def test_a_long_document_does_not_take_more_coefficients_than_the_others_give():
    a, m, d = random_rows(360)
    documents = torch.cat([torch.zeros(320, dtype=torch.int64), torch.arange(1, 41)])
    # outside of the fold of the first document there are 35 sequences: two coefficients, not three
    expected = reference(a, m, d, documents)
    result = filled(a, m, torch.cat([d, d.flip(0)[:, :1]], dim=1), documents).result()
    assert (result.value, result.stderr) == pytest.approx(expected[:2], rel=1e-12)


def test_unequal_documents_have_the_error_of_leaving_out_each():
    a, m, d = random_rows(60)
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor([30, 2, 5, 12, 1, 10]))
    result = filled(a, m, d[:, :0], documents).result()
    left_out = torch.stack([a[documents != i].sum(0) / m[documents != i].sum() for i in range(6)])
    errors = (5 / 6 * (left_out - result.by_parameter).square().sum(0)).sqrt()
    np.testing.assert_allclose(result.by_parameter_stderr, errors, rtol=1e-10)
    assert result.stderr == pytest.approx(float((5 / 6 * (left_out.sum(1) - result.value).square().sum()).sqrt()))
    np.testing.assert_allclose(result.influence, 5 * (result.value - left_out.sum(1)), rtol=1e-9)
    sizes = torch.from_numpy(summed(m, documents)).double()
    assert result.effective_samples == pytest.approx(float(sizes.sum() ** 2 / sizes.square().sum()))


def test_looking_does_not_end_a_document():
    a, m, d = random_rows(120)
    documents = torch.arange(120) // 7
    straight = filled(a, m, d, documents).result()
    looked = ClusteredRatioEstimator(a.shape[1], d.shape[1])
    for part in torch.arange(120).split(5):
        looked.add(a[part], m[part], d[part], documents[part])
        if int(part[-1]) > 20:
            so_far = slice(int(part[-1]) + 1)
            assert looked.result().value == filled(a[so_far], m[so_far], d[so_far], documents[so_far]).result().value
    assert len(looked) == 18
    assert torch.equal(looked.result().influence, straight.influence)


def test_influence_gives_the_error_of_a_difference():
    a, m, d = random_rows(101)
    noise = 0.01 * random_rows(101, seed=1)[0]
    first, second = filled(a, m, d[:, :0]).result(), filled(a + noise, m, d[:, :0]).result()
    expected = ratio.ratio(noise.sum(1), m)
    difference = second.influence - first.influence
    assert second.value - first.value == pytest.approx(expected[0], rel=1e-9)
    for influence, stderr in ((difference, expected[1]), (first.influence, first.stderr)):
        assert math.sqrt(float(influence.square().sum()) / (101 * 100)) == pytest.approx(stderr, rel=1e-9)


def test_a_cluster_that_decides_the_error_is_seen():
    _, m, d = random_rows(101)
    a = m[:, None] * (1 + torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None] ** 3)
    assert filled(a, m, d).result().leading < 0.2
    a[17] *= 1000
    assert filled(a, m, d).result().leading > 0.9
    assert filled(torch.ones(10, 1), torch.ones(10), d[:10]).result().leading == 0.0


# --- controls with means from an auxiliary sample ---------------------------------------------------------------------


def auxiliary_of(covariance, num_sequences, number=None):
    """Means with these variances, or this covariance."""
    covariance = torch.tensor(covariance, dtype=torch.float64)
    return AuxiliaryMeans(covariance if covariance.ndim == 2 else torch.diag(covariance), num_sequences, number)


def auxiliary_rows(n, seed=0):
    """Rows whose norms lean on 3 controls, the last 2 of an auxiliary, and documents of two sequences."""
    a, m, d = random_rows(n, controls=3, seed=seed)
    a = a + 3 * (d[:, 1:].sum(dim=1, keepdim=True) + 2) * m[:, None]
    return a, m, d, torch.arange(n) // 2


def reference_with_auxiliary(a, m, d, documents, covariance):
    """The same as `reference`, and what the error of the auxiliary's means adds."""
    value, stderr, _, errors = reference(a, m, d, documents)
    folds = documents.numpy() % FOLDS
    slopes = 0
    for fold in range(FOLDS):
        rest = folds != fold
        y = (a[rest] - a[rest].sum(0) / m[rest].sum() * m[rest, None]).numpy()
        beta = np.linalg.lstsq(d[rest].numpy(), y, rcond=None)[0][-len(covariance) :]
        slopes = slopes + (~rest).sum() * beta / float(m.sum())
    total = slopes.sum(axis=1)
    squares = np.array([error**2 for error in errors]) + np.diag(slopes.T @ np.array(covariance) @ slopes)
    return value, math.sqrt(stderr**2 + float(total @ np.array(covariance) @ total)), np.sqrt(squares)


def test_the_error_of_the_means_joins_that_of_the_clusters():
    a, m, d, documents = auxiliary_rows(202)
    covariance = [[0.002, 0.001], [0.001, 0.004]]
    result = filled(a, m, d, documents, auxiliary=auxiliary_of(covariance, 404, 2), groups=[0, 1, 1]).result()
    value, stderr, errors = reference_with_auxiliary(a, m, d, documents, covariance)
    assert stderr > 1.05 * reference(a, m, d, documents)[1]
    assert (result.value, result.stderr) == pytest.approx((value, stderr), rel=1e-11)
    np.testing.assert_allclose(result.by_parameter_stderr, errors, rtol=1e-9)
    by_group = torch.stack([a[:, 0], a[:, 1:].sum(1)], 1)
    grouped = reference_with_auxiliary(by_group, m, d, documents, covariance)
    np.testing.assert_allclose(result.by_group_stderr, grouped[2], rtol=1e-9)
    assert (result.samples, result.auxiliary_controls, result.auxiliary_differs) == (101, (True, True), False)
    assert result.influence.shape == (103,)
    assert float(result.influence.square().sum()) / (101 * 100) == pytest.approx(stderr**2, rel=1e-11)


def test_a_difference_of_values_has_the_difference_of_their_slopes():
    a, m, d, _ = auxiliary_rows(202)
    auxiliary = auxiliary_of([0.01, 0.02], 404, 2)
    first, second = filled(a, m, d, auxiliary=auxiliary).result(), filled(3 * a, m, d, auxiliary=auxiliary).result()
    both = filled(2 * a, m, d, auxiliary=auxiliary).result()  # what is measured is linear, so this is the difference
    difference = second.influence - first.influence
    assert second.value - first.value == pytest.approx(both.value, rel=1e-11)
    assert math.sqrt(float(difference.square().sum()) / (202 * 201)) == pytest.approx(both.stderr, rel=1e-11)


@pytest.mark.parametrize(("num_sequences", "used"), [(403, False), (404, True)])
def test_a_auxiliary_of_less_than_twice_the_sequences_is_left_out(num_sequences, used):
    a, m, d, documents = auxiliary_rows(202)
    result = filled(a, m, d, documents, auxiliary=auxiliary_of([1e-3, 1e-3], num_sequences)).result()
    without = filled(a, m, d[:, :1], documents).result()
    assert (result.auxiliary_controls, result.auxiliary_differs) == ((used, used), False)
    assert ((result.value, result.stderr) == (without.value, without.stderr)) == (not used)


def test_clusters_that_were_not_drawn_as_the_auxiliary_sample_are_told():
    a, m, d, documents = auxiliary_rows(202)
    without = filled(a, m, d[:, :1], documents).result()
    d[:, 2] += 0.6
    result = filled(a, m, d, documents, auxiliary=auxiliary_of([1e-3, 1e-3], 10_000)).result()
    assert (result.auxiliary_controls, result.auxiliary_differs) == ((False, False), True)
    assert (result.value, result.stderr) == (without.value, without.stderr)
    # two means that are wrong alike are no reason, where their errors are known to be
    d[:, 1] += 0.6
    alike = [[1.0, 0.999], [0.999, 1.0]]
    assert not filled(a, m, d, documents, auxiliary=auxiliary_of(alike, 10_000)).result().auxiliary_differs
    d[:, 1] -= 1.2
    assert filled(a, m, d, documents, auxiliary=auxiliary_of(alike, 10_000)).result().auxiliary_differs
    # nor is a mean that is known no better than that
    d[:, 1] += 0.6
    assert not filled(a, m, d, documents, auxiliary=auxiliary_of([1e-3, 1.0], 10_000)).result().auxiliary_differs


@pytest.mark.parametrize(("slopes", "used"), [((0.0, 0.0), 0), ((1.0, 0.0), 1), ((0.0, 1.0), 2), ((1.0, 1.0), 2)])
def test_as_much_of_an_auxiliary_sample_is_used_as_makes_the_error_smallest(slopes, used):
    draws = torch.Generator().manual_seed(0)
    a, d = (torch.randn(256, k, generator=draws, dtype=torch.float64) for k in (1, 2))
    a, m = 10 + a + d @ torch.tensor(slopes, dtype=torch.float64)[:, None], torch.ones(256)
    fixed = [filled(a, m, d, auxiliary=auxiliary_of([1e-3, 1e-3], 1000, number)).result() for number in range(3)]
    assert [sum(result.auxiliary_controls) for result in fixed] == [0, 1, 2]
    assert fixed[0].stderr == filled(a, m, d[:, :0]).result().stderr
    result = filled(a, m, d, auxiliary=auxiliary_of([1e-3, 1e-3], 1000)).result()
    assert result.auxiliary_controls == (used > 0, used > 1)
    assert result.stderr == fixed[used].stderr == min(each.stderr for each in fixed)


def test_the_chance_of_being_as_far_from_the_auxiliary_sample_is_uniform():
    generator = np.random.default_rng(3)
    chances = []
    covariance = torch.tensor([[0.01, 0.002], [0.002, 0.0025]], dtype=torch.float64)
    for _ in range(400):
        rows = torch.from_numpy(generator.normal(size=(256, 2)) @ np.array([[1.0, 0.5], [0.0, 2.0]]))
        means = torch.linalg.cholesky(covariance) @ torch.from_numpy(generator.normal(size=2))
        chances.append(estimators._chance(torch.ones(256, dtype=torch.float64), rows - means, covariance))
    for quantile in (0.01, 0.1, 0.5):
        deviation = math.sqrt(quantile * (1 - quantile) / 400)
        assert abs(np.mean(np.array(chances) < quantile) - quantile) < 4 * deviation


@pytest.mark.parametrize(("size", "within"), [(2, True), (8, False)])
def test_coverage_and_bias_with_an_auxiliary_sample(size, within):
    """As without one, over fresh pools of `size` times the clusters, the measured ones among them or not."""
    repetitions, n, truth = 100, 128, 2.0
    generator = np.random.default_rng(7)
    errors, squares, unlike = [], [], 0
    for _ in range(repetitions):
        features = generator.exponential(size=(size * n, 2)) @ np.array([[1.0, 0.3], [-0.5, 1.0]])
        mean = features.mean(axis=0)
        covariance = np.cov(features.T) / (size * n)
        measured = features[:n] if within else generator.exponential(size=(n, 2)) @ np.array([[1.0, 0.3], [-0.5, 1.0]])
        m = generator.integers(1, 4, n)
        a = m * (1.7 + 0.3 * generator.exponential(size=n)) + (measured - [0.5, 1.3]) @ [0.8, 0.6]
        summed = ClusteredRatioEstimator(1, 0, auxiliary=AuxiliaryMeans(torch.from_numpy(covariance), size * n))
        d = torch.from_numpy(measured - mean)
        summed.add(torch.from_numpy(a)[:, None], torch.from_numpy(m), d)
        result = summed.result()
        errors.append(result.value - truth)
        squares.append((errors[-1] / result.stderr) ** 2)
        unlike += result.auxiliary_differs
    assert unlike == 0
    assert np.mean(np.array(squares) < 1.98**2) > 0.95 - 0.015 - 4 * math.sqrt(0.05 * 0.95 / repetitions)
    # 1, to 14 %; it would be 2.2 of twice the clusters, and 1.3 of eight times, if the means were taken as known
    assert np.mean(squares) == pytest.approx(1, abs=0.42)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(repetitions)
    slope = np.array([[1.0, 0.3], [-0.5, 1.0]]) @ [0.8, 0.6]  # of a by each exponential
    explained, left = float(slope @ slope), 0.09 * 14 / 3
    expected = math.sqrt((left + explained / size) / n) / 2
    assert np.std(errors) == pytest.approx(expected, rel=0.21)  # 3 of its errors


def test_auxiliary_samples_of_processes_join():
    a, m, d, documents = auxiliary_rows(256)
    auxiliary = auxiliary_of([[0.002, 0.001], [0.001, 0.004]], 1000, number=2)
    whole = filled(a, m, d, documents, auxiliary=auxiliary).result()
    halves = [filled(a[i], m[i], d[i], documents[i], auxiliary=auxiliary) for i in (slice(0, 128), slice(128, 256))]
    merged = ClusteredRatioEstimator.merged(halves).result()
    assert (merged.value, merged.stderr) == pytest.approx((whole.value, whole.stderr), rel=1e-11)
    assert merged.auxiliary_controls == (True, True)


def test_a_cluster_is_whatever_has_its_number_wherever_it_stands():
    a, m, d = random_rows(120)
    numbers = torch.arange(120) % 40
    found = filled(a, m, d, numbers).result()
    value, stderr, ratios, errors = reference(a, m, d, numbers)
    assert (found.value, found.stderr, found.samples) == pytest.approx((value, stderr, 40), rel=1e-12)
    np.testing.assert_allclose(found.by_parameter, ratios, rtol=1e-10)
    np.testing.assert_allclose(found.by_parameter_stderr, errors, rtol=1e-9)


def test_an_error_over_blocks_is_that_of_the_sums_of_residuals_where_it_is_the_larger():
    a, m, _ = random_rows(60)
    plain, none = filled(a, m, torch.zeros(60, 0)).result(), torch.zeros(60, 0)
    residuals = a - plain.by_parameter * m[:, None]
    # one block has the largest residuals, another the smallest
    order = torch.empty(60, dtype=torch.int64)
    order[residuals.sum(dim=1).argsort()] = torch.arange(60) // 6
    for labels, is_larger in ((order, True), (torch.arange(60) % 2, False)):
        blocks = int(labels.max()) + 1
        found = filled(a, m, none).result(labels)
        sums, sizes = (torch.from_numpy(summed(values, labels)) for values in (residuals, m))
        moves = sums / (m.sum() - sizes)[:, None]  # of the ratios, without each block
        expected = ((blocks - 1) / blocks * moves.sum(dim=1).square().sum()).sqrt()
        assert (float(expected) > plain.stderr) == is_larger
        assert (found.value, found.samples) == (plain.value, blocks)
        assert found.stderr == pytest.approx(max(float(expected), plain.stderr), rel=1e-12)
        by_parameter = ((blocks - 1) / blocks * moves.square().sum(dim=0)).sqrt()
        expected = torch.maximum(by_parameter, plain.by_parameter_stderr)
        np.testing.assert_allclose(found.by_parameter_stderr, expected, rtol=1e-10)
        # scaled to the error that is stated, so that a difference has that error, too, and a copy none
        scale = found.stderr / ((blocks - 1) / blocks * moves.sum(dim=1).square().sum()).sqrt()
        torch.testing.assert_close(found.influence, scale * moves.sum(dim=1) * (blocks - 1))
        columns = filled(a, m, none).columns(labels).weighted(torch.ones(3))
        assert columns[:2] == pytest.approx((found.value, found.stderr), rel=1e-12)


def test_one_cluster_is_refused():
    estimator = ClusteredRatioEstimator(1, 0)
    estimator.add(torch.ones(3, 1), torch.ones(3), torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(IsolossError, match="at least 2 independent sequences or documents, not 1"):
        estimator.result()


def test_controls_that_make_a_part_of_squared_norms_negative_are_dropped():
    n = 640
    control = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    control[7] = 2 * n
    # the first column follows the control everywhere, the second one not where the control is enormous
    norms = torch.stack([1e4 + 10 * control, 1 + control], dim=1)
    norms[7, 1] = 0
    results = {}
    for name, controls, part in (("whole", 1, ()), ("part", 1, (1,)), ("plain", 0, (1,))):
        estimator = ClusteredRatioEstimator(2, controls, part=part)
        estimator.add(norms, torch.ones(n), control[:, None][:, :controls])
        results[name] = estimator.result()
    assert results["whole"].by_parameter[1] < 0
    assert results["whole"].stderr < 0.2 * results["plain"].stderr
    assert results["part"].by_parameter.tolist() == pytest.approx(results["plain"].by_parameter.tolist(), rel=1e-12)
    assert results["part"].part.value == pytest.approx(float(norms[:, 1].mean()), rel=1e-12)
    assert results["part"].stderr == pytest.approx(results["plain"].stderr, rel=1e-12)


def test_controls_that_a_few_clusters_make_harmful_are_dropped():
    rng = np.random.default_rng(0)
    n, outlier = 256, 3
    control = rng.normal(size=n)
    norms = 5 + control + rng.normal(size=n) / 2
    results = {}
    for name, largest in (("plain", None), ("helpful", 1.0), ("harmful", 1e6)):
        estimator = ClusteredRatioEstimator(num_parameters=1, num_controls=0 if largest is None else 1)
        d = control.copy()
        d[outlier] = (largest or 1.0) * control[outlier]
        estimator.add(
            torch.from_numpy(norms)[:, None],
            torch.ones(n, dtype=torch.int64),
            torch.from_numpy(d)[:, None][:, : 0 if largest is None else 1],
        )
        results[name] = estimator.result()
    assert results["helpful"].stderr < 0.6 * results["plain"].stderr
    assert results["harmful"].value == pytest.approx(results["plain"].value, rel=1e-12)
    assert results["harmful"].stderr == pytest.approx(results["plain"].stderr, rel=1e-12)
