"""The tally: ratios with cross-fitted control variates, against a slow reference and against known answers."""

import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.measures import statistics
from isoloss.measures.flatness.tally import FOLDS, Tally


def random_rows(n, parameters=3, controls=2, seed=0):
    """Squared norms that lean on the controls, positions from 1 to 4, controls of mean 0."""
    generator = np.random.default_rng(seed)
    m = generator.integers(1, 5, n)
    d = generator.exponential(size=(n, controls)) - 1
    a = m[:, None] * generator.exponential(size=(n, parameters)) + np.abs(
        d @ generator.normal(size=(controls, parameters))
    )
    return torch.from_numpy(a), torch.from_numpy(m), torch.from_numpy(d)


def filled(a, m, d, documents=None, sizes=(7, 1, 20)):
    """A tally that was given the rows in batches of changing size."""
    tally = Tally(a.shape[1], d.shape[1])
    start, index = 0, 0
    while start < len(a):
        part = slice(start, start + sizes[index % len(sizes)])
        tally.add(a[part], m[part], d[part], None if documents is None else documents[part])
        start, index = part.stop, index + 1
    return tally


def reference(a, m, d):
    """The same, cluster by cluster: each fold's coefficients by lstsq over the clusters of all others."""
    a, m, d = (x.double().numpy() for x in (a, m, d))
    n = len(a)
    folds = np.arange(n) % FOLDS
    adjusted = a.copy()
    for fold in range(FOLDS):
        rest = folds != fold
        y = a[rest] - a[rest].sum(0) / m[rest].sum() * m[rest, None]
        beta = np.linalg.lstsq(d[rest], y, rcond=None)[0]
        adjusted[~rest] -= d[~rest] @ beta
    ratios = adjusted.sum(0) / m.sum()
    errors = [statistics.ratio(column, m)[1] for column in adjusted.T]
    value, stderr = statistics.ratio(adjusted.sum(1), m)
    return value, stderr, ratios, errors


def test_equals_the_reference():
    a, m, d = random_rows(101)
    shares = filled(a, m, d).shares()
    value, stderr, ratios, errors = reference(a, m, d)
    assert shares.value == pytest.approx(value, rel=1e-12)
    assert shares.stderr == pytest.approx(stderr, rel=1e-12)
    np.testing.assert_allclose(shares.by_parameter, ratios, rtol=1e-10)
    np.testing.assert_allclose(shares.by_parameter_stderr, errors, rtol=1e-9)
    assert shares.by_parameter.sum() == pytest.approx(shares.value, rel=1e-12)


def test_without_controls_and_with_few_clusters_it_is_the_plain_ratio():
    a, m, d = random_rows(101)
    for rows in ((a, m, d[:, :0]), (a[:31], m[:31], d[:31])):
        shares = filled(*rows).shares()
        assert (shares.value, shares.stderr) == pytest.approx(statistics.ratio(rows[0].sum(1), rows[1]), rel=1e-12)


def test_a_control_that_explains_everything_leaves_no_error():
    m = torch.ones(64)
    d = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).double()
    shares = filled(torch.cat([2 + 3 * d, 1 - d], dim=1), m, d).shares()
    # the mean of the other folds' controls is not 0, so that the fit is exact only up to it
    assert shares.stderr < 0.05 * statistics.ratio((3 + 2 * d)[:, 0], m)[1]
    assert shares.value == pytest.approx(3, abs=4 * shares.stderr)


def test_a_control_that_is_zero_or_said_twice_does_no_harm():
    a, m, d = random_rows(101, controls=1)
    once = filled(a, m, d).shares()
    again = filled(a, m, torch.cat([d, d, 0 * d], dim=1)).shares()
    assert again.value == pytest.approx(once.value, rel=1e-9)
    assert again.stderr == pytest.approx(once.stderr, rel=1e-9)


@pytest.mark.parametrize("clusters", [31, 32])
def test_a_control_that_is_zero_nearly_everywhere_is_left_out(clusters):
    a, m, d = random_rows(101)
    a[:, 0] += d @ torch.tensor([3.0, 2.0], dtype=torch.float64)
    d[clusters:, 1] = 0
    expected = reference(a, m, d[:, :1] if clusters == 31 else d)
    shares = filled(a, m, d).shares()
    assert (shares.value, shares.stderr) == pytest.approx(expected[:2], rel=1e-12)


@pytest.mark.parametrize(("clusters", "used"), [(79, 4), (80, 5)])
def test_there_is_one_control_for_16_clusters(clusters, used):
    a, m, d = random_rows(clusters, controls=6)
    a[:, 0] += d.sum(dim=1)
    d[:, 1] = 0  # not one of those that are counted
    expected = reference(a, m, d[:, [0, 2, 3, 4, 5][:used]])
    shares = filled(a, m, d).shares()
    assert (shares.value, shares.stderr) == pytest.approx(expected[:2], rel=1e-12)


def test_the_unit_of_a_control_does_not_matter():
    a, m, d = random_rows(101)
    a[:, 0] += d @ torch.tensor([3.0, 2.0], dtype=torch.float64)
    plain, scaled = filled(a, m, d).shares(), filled(a, m, d * torch.tensor([1e-9, 1e6])).shares()
    assert (scaled.value, scaled.stderr) == pytest.approx((plain.value, plain.stderr), rel=1e-9)
    assert plain.stderr < 0.8 * statistics.ratio(a.sum(1), m)[1]


def test_coverage_and_bias_over_repetitions():
    """95 % intervals cover 95 %, less at most 1.5 % for few clusters, and the bias is within 4 standard errors of 0."""
    repetitions, n, truth = 2000, 64, 2.0
    generator = np.random.default_rng(5)
    covered, errors, plain = 0, [], []
    for _ in range(repetitions):
        m = generator.integers(1, 4, n)
        d = generator.exponential(size=(n, 2)) - 1
        a = m * (1.6 + 0.4 * generator.exponential(size=n)) + 0.9 * d[:, 0] - 0.3 * d[:, 1]
        tally = Tally(1, 2)
        tally.add(torch.from_numpy(a)[:, None], torch.from_numpy(m), torch.from_numpy(d))
        shares = tally.shares()
        errors.append(shares.value - truth)
        plain.append(a.sum() / m.sum() - truth)
        covered += abs(errors[-1]) < 2.0 * shares.stderr  # Student's t with 63 degrees of freedom
    assert abs(covered / repetitions - 0.95) < 0.015 + 4 * math.sqrt(0.05 * 0.95 / repetitions)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(repetitions)
    left = 0.16 * 14 / 3  # variance of a cluster that the controls do not explain; they explain 0.81 + 0.09
    assert np.std(errors) / np.std(plain) == pytest.approx(math.sqrt(left / (left + 0.9)), rel=0.05)


def test_documents_are_clusters_wherever_batches_end():
    a, m, d = random_rows(120)
    documents = torch.arange(120) // 3 * 7 % 41  # ids in no order; a document is three sequences
    shares = filled(a, m, d, documents).shares()
    summed = [x.reshape(40, 3, *x.shape[1:]).sum(1) for x in (a, m, d)]
    whole = filled(*summed).shares()
    assert shares.value == pytest.approx(whole.value, rel=1e-12)
    assert shares.stderr == pytest.approx(whole.stderr, rel=1e-12)
    assert len(shares.influence) == 40


def test_influence_gives_the_error_of_a_difference():
    a, m, d = random_rows(101)
    noise = 0.01 * random_rows(101, seed=1)[0]
    first, second = filled(a, m, d[:, :0]).shares(), filled(a + noise, m, d[:, :0]).shares()
    expected = statistics.ratio(noise.sum(1), m)
    difference = second.influence - first.influence
    assert second.value - first.value == pytest.approx(expected[0], rel=1e-9)
    assert float(difference.std() / math.sqrt(101)) == pytest.approx(expected[1], rel=1e-9)
    assert float(first.influence.std() / math.sqrt(101)) == pytest.approx(first.stderr, rel=1e-12)


def test_a_cluster_that_decides_the_error_is_seen():
    _, m, d = random_rows(101)
    a = m[:, None] * (1 + torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None] ** 3)
    assert filled(a, m, d).shares().leading < 0.2
    a[17] *= 1000
    assert filled(a, m, d).shares().leading > 0.9
    assert filled(torch.ones(10, 1), torch.ones(10), d[:10]).shares().leading == 0.0


def test_groups_are_sums_of_parameters_with_errors_of_their_own():
    a, m, d = random_rows(101, parameters=4)
    grouped, summed = Tally(4, 2, [1, 0, 1, 0]), Tally(2, 2)
    for part in (slice(0, 40), slice(40, 101)):
        grouped.add(a[part], m[part], d[part])
        summed.add(torch.stack([a[part, 1] + a[part, 3], a[part, 0] + a[part, 2]], dim=1), m[part], d[part])
    found, expected = grouped.shares(), summed.shares()
    np.testing.assert_allclose(found.by_group, expected.by_parameter, rtol=1e-10)
    np.testing.assert_allclose(found.by_group_stderr, expected.by_parameter_stderr, rtol=1e-9)
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    again = Tally.from_state({name: value.clone() for name, value in grouped.state().items()}).shares()
    assert torch.equal(again.by_group_stderr, found.by_group_stderr)
    halves = [Tally(4, 2, [1, 0, 1, 0]) for _ in range(2)]
    for half, part in zip(halves, (slice(0, 48), slice(48, 101)), strict=True):
        half.add(a[part], m[part], d[part])
    np.testing.assert_allclose(Tally.merged(halves).shares().by_group, found.by_group, rtol=1e-10)


def test_goes_on_from_its_state():
    a, m, d = random_rows(101)
    documents = torch.arange(101) // 2
    straight = filled(a, m, d, documents).shares()
    begun = filled(a[:51], m[:51], d[:51], documents[:51])  # document 25 is open
    resumed = Tally.from_state({name: value.clone() for name, value in begun.state().items()})
    resumed.add(a[51:], m[51:], d[51:], documents[51:])
    shares = resumed.shares()
    assert shares.value == straight.value
    assert shares.stderr == straight.stderr
    assert torch.equal(shares.by_parameter_stderr, straight.by_parameter_stderr)


def test_processes_add_up():
    a, m, d = random_rows(128)
    whole = filled(a, m, d).shares()
    merged = Tally.merged([filled(a[:64], m[:64], d[:64]), filled(a[64:], m[64:], d[64:])]).shares()
    assert merged.value == pytest.approx(whole.value, rel=1e-12)
    assert merged.stderr == pytest.approx(whole.stderr, rel=1e-12)
    np.testing.assert_allclose(merged.by_parameter_stderr, whole.by_parameter_stderr, rtol=1e-9)


def test_one_cluster_is_refused():
    tally = Tally(1, 0)
    tally.add(torch.ones(3, 1), torch.ones(3), torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(IsolossError, match="at least 2 independent sequences or documents, not 1"):
        tally.shares()
