"""The minimal trace as a convex program, against closed forms, gradient descent and a linear program for each part."""

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from rescaling_programs import pre_norm, program_of, rescaled, writers_of

from isoloss.errors import IsolossError
from isoloss.flatness._rescaling import solve
from isoloss.flatness._rescaling.solve import minimize, responses


def simple(shares, exponents, log_rms=None, sizes=None, **more):
    """Minimize with RMS 1 and size 1 unless given."""
    exponents = np.asarray(exponents)
    log_rms = np.zeros(len(exponents)) if log_rms is None else log_rms
    sizes = np.ones(len(exponents)) if sizes is None else sizes
    return minimize(shares, exponents, log_rms=log_rms, sizes=sizes, writers=writers_of(exponents), **more)


def descended(shares, exponents, basis=None):
    """The smallest sum by autograd and steepest descent with memory (L-BFGS), over z in a basis."""
    basis = torch.eye(exponents.shape[1], dtype=torch.float64) if basis is None else torch.as_tensor(basis)
    y = torch.zeros(basis.shape[1], dtype=torch.float64, requires_grad=True)
    t, e = torch.as_tensor(shares), torch.as_tensor(exponents).double()
    optimizer = torch.optim.LBFGS(
        [y], max_iter=5000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        value = (t * torch.exp(-2 * (e @ (basis @ y)))).sum()
        value.log().backward()
        return value.log().detach()

    optimizer.step(closure)
    return float(closure().exp())


def test_two_parts_and_one_generator():
    found = simple([9.0, 4.0], [[1], [-1]])
    assert found.value == pytest.approx(2 * np.sqrt(9 * 4), rel=1e-14)
    assert found.weights * [9, 4] == pytest.approx([6, 6], rel=1e-14)
    assert found.infimum == found.value
    assert found.gauged == ()
    assert not found.vanishing.any()


def test_exponents_of_different_sizes():
    # t e^(-4 z) + u e^(2 z) is smallest where 2 t e^(-4 z) = u e^(2 z)
    found = simple([3.0, 5.0], [[2], [-1]])
    z = np.log(2 * 3 / 5) / 6
    assert found.z == pytest.approx([z], abs=1e-10)
    assert found.value == pytest.approx(3 * np.exp(-4 * z) + 5 * np.exp(2 * z), rel=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_against_gradient_descent(seed):
    rng = np.random.default_rng(seed)
    half = rng.integers(-1, 2, size=(12, 6))
    exponents = np.concatenate([half, -half[rng.permutation(12)[:8]], np.eye(6), -np.eye(6)])  # has a minimum
    shares = np.exp(2 * rng.normal(size=len(exponents)))
    found = simple(shares, exponents)
    assert found.gauged == ()
    assert found.value == pytest.approx(descended(shares, exponents), rel=1e-10)
    gradient = -2 * exponents.T @ (shares * found.weights)
    assert np.abs(gradient).max() < 1e-9 * found.value


def test_equalities_against_gradient_descent():
    rng = np.random.default_rng(0)
    exponents = np.concatenate([rng.integers(-1, 2, size=(8, 5)), np.eye(5), -np.eye(5)])
    rows = np.array([[1, 1, 0, 0, 0], [0, 1, -1, 2, 0], [1, 2, -1, 2, 0]])  # the last is the sum of the others
    shares = np.exp(rng.normal(size=len(exponents)))
    found = simple(shares, exponents, equalities=rows)
    basis = np.linalg.svd(rows)[2][2:].T
    assert np.abs(rows @ found.z).max() < 1e-12
    assert found.value == pytest.approx(descended(shares, exponents, basis), rel=1e-10)
    assert found.value > simple(shares, exponents).value


def test_one_sided_generator_takes_its_gauge():
    found = simple([3.0, 5.0, 2.0], [[1], [1], [0]], log_rms=[np.log(0.1), np.log(10), 4], sizes=[3, 1, 7])
    assert found.gauged == (0,)
    assert found.infimum == pytest.approx(2)
    assert found.vanishing.tolist() == [True, True, False]
    mean = (3 * np.log(0.1) + np.log(10)) / 4
    assert found.z == pytest.approx([-mean], abs=1e-12)
    assert found.value == pytest.approx(8 * np.exp(2 * mean) + 2, rel=1e-13)
    assert found.gauges.toarray() == pytest.approx(np.array([[0.75, 0.25, 0]]))


def test_only_the_diagonal_recedes():
    # parts 0 and 1 hold both together; part 2 lets them go
    exponents = [[1, -1], [-1, 1], [1, 0]]
    found = simple([4.0, 9.0, 5.0], exponents, log_rms=[0.3, 0.1, -1.0], sizes=[2, 3, 5])
    assert found.vanishing.tolist() == [False, False, True]
    assert found.infimum == pytest.approx(2 * np.sqrt(4 * 9), rel=1e-13)
    assert found.gauged == (0,)
    mean = np.array([2, 0, 5]) / 7
    assert found.gauges.toarray()[0] == pytest.approx(mean)

    # what is left of z is one number: the difference d; 2 (0.3 + d) + 5 (-1 + z_0) = 0
    def value(d):
        return 4 * np.exp(-2 * d) + 9 * np.exp(2 * d) + 5 * np.exp(-2 * (1 - 2 * (0.3 + d) / 5))

    assert found.value == pytest.approx(scipy.optimize.minimize_scalar(value).fun, rel=1e-12)


def test_residual_stream_before_norms_recedes():
    parts = pre_norm(3, neurons=2)
    shares, program, names = program_of(parts)
    found = minimize(shares, **program)
    # the writers, and what feeds them through maps that scale by any factor: each may grow by less than its reader
    words = ("stream", "value", "second norm", "neuron")
    receding = [any(word in name for name in part for word in words) for part in parts]
    assert found.vanishing.tolist() == receding
    assert found.gauged == (names.index("stream"),)
    stay, exponents = ~found.vanishing, program["exponents"].toarray()
    assert found.infimum == pytest.approx(descended(shares[stay], exponents[stay]), rel=1e-10)
    assert found.value > found.infimum
    # a point far along the way: all of these are gone, and the rest has not changed
    pace = {"stream": 4, "value": 2, "second": 1, "neuron": 2}
    far = found.z + 10 * np.array([pace.get(name.split()[0], 0) for name in names])
    terms = shares * np.exp(-2 * exponents @ far)
    assert terms[found.vanishing].sum() < 1e-6
    assert terms[stay] == pytest.approx((shares * found.weights)[stay], rel=1e-9)


def test_normalized_queries_and_keys_take_a_gauge_each():
    # weights before a norm of their own, in two layers; both are divided by the gain of the norm that enters
    parts = [
        part
        for i in range(2)
        for part in ({f"norm {i}": 1}, {f"norm {i}": -1, f"query {i}": 1}, {f"norm {i}": -1, f"key {i}": 1})
    ]
    shares, program, _ = program_of(parts)
    found = minimize(shares, **program)
    assert found.vanishing.all()  # all may grow, as queries and keys grow by more than the gain
    assert found.infimum == 0
    assert found.gauges.shape[0] == len(found.gauged) == 6
    fixed = program["log_rms"] + program["exponents"] @ found.z
    assert fixed == pytest.approx(np.zeros(6), abs=1e-10)
    assert found.value == pytest.approx(shares @ np.exp(2 * program["log_rms"]), rel=1e-10)


def test_parts_that_are_all_zero():
    # a map that starts at zero: its reader has no share, and its own share vanishes as the reader's scale falls
    found = simple([0.0, 3.0, 2.0], [[1], [-1], [0]], log_rms=[np.log(4), -np.inf, 0])
    assert found.gauged == (0,)
    assert found.value == pytest.approx(3 / 4**2 + 2, rel=1e-13)
    assert found.infimum == pytest.approx(2)
    with pytest.raises(IsolossError, match="no gauge can fix the scale"):
        simple([3.0, 2.0], [[1], [0]], log_rms=[-np.inf, 0])


def all_kinds():
    """Programs with a minimum, without one, with equalities, with parts that have no share or are all zero."""
    rng = np.random.default_rng(0)
    yield program_of(pre_norm(2, neurons=3))[:2], None
    shares, program, names = program_of(pre_norm(2, neurons=3, tied=True))
    shares[[3, 7]] = 0, -1e-3
    yield (shares, program), np.array([[name in ("stream", "norm 1") for name in names]], dtype=float)
    for _ in range(6):
        exponents = rng.integers(-1, 2, size=(9, 5)) * (rng.random((9, 5)) < 0.6)
        program = {"log_rms": rng.normal(size=9), "sizes": rng.integers(1, 99, 9), "writers": writers_of(exponents)}
        yield (np.exp(rng.normal(size=9)), {"exponents": exponents, **program}), None


@pytest.mark.parametrize("scale", [1, 4])
def test_value_does_not_depend_on_how_the_model_was_rescaled(scale):
    rng = np.random.default_rng(1)
    gauges = 0
    for (shares, program), rows in all_kinds():
        z = scale * rng.normal(size=len(program["writers"]))
        if rows is not None:
            z = z - np.linalg.pinv(rows) @ (rows @ z)
        before = minimize(shares, **program, equalities=rows)
        others, after = rescaled(shares, program, z)
        after = minimize(others, **after, equalities=rows)
        assert after.value == pytest.approx(before.value, rel=1e-9)
        assert after.infimum == pytest.approx(before.infimum, rel=1e-9)
        assert after.gauged == before.gauged
        assert after.vanishing.tolist() == before.vanishing.tolist()
        assert others * after.weights == pytest.approx(shares * before.weights, rel=1e-6)
        gauges += len(before.gauged)
    assert gauges > 0


def test_shares_over_twenty_orders_of_magnitude():
    shares, exponents = np.array([2.0, 3, 5, 7]), np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
    z = np.array([11.5, -11.5])
    spread = shares * np.exp(-2 * exponents @ z)
    assert spread.max() > 1e19 * spread.min()
    found = simple(spread, exponents, log_rms=exponents @ z)
    assert found.value == pytest.approx(2 * np.sqrt(6) + 2 * np.sqrt(35), rel=1e-12)
    # and apart from each other, as one of them is of no account beside the other
    far = spread * [1, 1, 1e-9, 1e-9]
    found = simple(far, exponents, log_rms=exponents @ z)
    assert far * found.weights == pytest.approx([6**0.5] * 2 + [1e-9 * 35**0.5] * 2, rel=1e-9)


def test_shares_of_rounding_count_as_zero():
    found = simple([1.0, 1e-26, -1e-3], [[1], [-1], [-1]], log_rms=[0.5, 0, 0])
    assert found.gauged == (0,)
    assert found.vanishing.tolist() == [True, False, False]
    assert found.value == pytest.approx(np.exp(1), rel=1e-13)


def test_nothing_to_rescale():
    assert simple([3.0], np.zeros((1, 0))).value == pytest.approx(3)
    assert simple([3.0], np.zeros((1, 2))).z.tolist() == [0, 0]
    empty = simple([0.0, -1.0], [[1, 0], [-1, 1]])
    assert (empty.value, empty.infimum, empty.gauged, empty.z.tolist()) == (0, 0, (), [0, 0])


def test_directions_that_move_nothing_stay():
    # the sum of all generators moves no part, nor does the last generator, as its part has no share
    exponents = np.array([[1, -1, 0, 0], [-1, 1, 0, 0], [0, 1, -1, 0], [0, -1, 1, 0], [0, 0, 0, 1]])
    found = simple([1.0, 5, 8, 3, 0], exponents, log_rms=[1, 2, 3, 4, 5])
    one, other = np.log(1 / 5) / 4, np.log(8 / 3) / 4  # z0 - z1 and z1 - z2
    z = np.array([one, 0, -other])
    assert found.z == pytest.approx([*(z - z.mean()), 0], abs=1e-10)


def test_random_programs_against_a_linear_program_for_each_part():
    rng = np.random.default_rng(3)
    gauged = 0
    for _ in range(30):
        parts, generators = rng.integers(1, 14), rng.integers(1, 7)
        exponents = rng.choice([-1, 0, 0, 1], size=(parts, generators))
        shares = np.exp(2 * rng.normal(size=parts)) * (rng.random(parts) < 0.9)
        log_rms, sizes = rng.normal(size=parts), rng.integers(1, 1000, size=parts)
        rows = rng.choice([-1, 0, 1], size=(rng.integers(0, 2), generators))
        found = simple(shares, exponents, log_rms, sizes, equalities=rows)
        active = shares > 0
        fixed = {"A_eq": rows, "b_eq": np.zeros(len(rows))} if len(rows) else {}
        for p in range(parts):
            furthest = (
                scipy.optimize.linprog(
                    -exponents[p], A_ub=-exponents[active], b_ub=np.zeros(active.sum()), bounds=(-1, 1), **fixed
                )
                if active[p]
                else None
            )
            assert found.vanishing[p] == (furthest is not None and furthest.fun < -1e-6)
        assert bool(found.gauged) == found.vanishing.any()
        # no direction that is left leads downward: the smallest slope over the directions in a box is zero
        gauges = found.gauges.toarray() @ exponents
        assert np.abs(found.gauges @ log_rms + gauges @ found.z).max(initial=0) < 1e-8
        slopes = -2 * exponents.T @ (np.where(active, shares, 0) * found.weights)
        both = np.concatenate([rows, gauges])
        steepest = scipy.optimize.linprog(slopes, A_eq=both, b_eq=np.zeros(len(both)), bounds=(-1, 1))
        assert -steepest.fun <= 1e-7 * found.value
        gauged += bool(found.gauged)
    assert gauged >= 5


@pytest.mark.parametrize("solver", ["dense", "dense curvature", "sparse"])
def test_all_solvers_agree(solver, monkeypatch):
    shares, program, _ = program_of(pre_norm(3, neurons=20))
    expected = minimize(shares, **program)
    small, dense = {"dense": (10**9, 0), "dense curvature": (0, 0), "sparse": (0, 1)}[solver]
    monkeypatch.setattr(solve, "_SMALL", small)
    monkeypatch.setattr(solve, "_DENSE", dense)
    found = minimize(shares, **program)
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    assert found.infimum == pytest.approx(expected.infimum, rel=1e-12)
    assert found.z == pytest.approx(expected.z, abs=1e-7)


def test_thousands_of_generators():
    shares, program, names = program_of(pre_norm(4, neurons=500))
    assert program["exponents"].shape == (4027, 2018)
    found = minimize(shares, **program)
    assert found.gauged == (names.index("stream"),)
    # the gradient is a combination of the gauge alone
    slopes = -2 * program["exponents"].T @ (shares * found.weights)
    gauge = (found.gauges @ program["exponents"]).toarray()[0]
    left = slopes - gauge * (gauge @ slopes) / (gauge @ gauge)
    assert np.abs(left).max() < 1e-9 * found.value
    z = np.random.default_rng(0).normal(size=len(names))
    others, after = rescaled(shares, program, z)
    assert minimize(others, **after).value == pytest.approx(found.value, rel=1e-9)


def test_another_minimum_lends_its_gauge():
    exponents = [[1], [1], [-1]]
    first = simple([3.0, 1, 0], exponents, log_rms=[0.3, 0, 0], sizes=[2, 1, 1])
    second = simple([4.0, 0, 1], exponents, log_rms=[0.3, 0, 0], sizes=[2, 1, 1], like=first)
    assert first.gauged == second.gauged == (0,)
    assert second.z == pytest.approx([-0.2], abs=1e-12)  # where it would be at log(4) / 4 otherwise
    assert simple([4.0, 0, 1], exponents).gauged == ()


def test_a_share_that_another_minimum_has_and_these_lack_takes_a_gauge_of_its_own():
    first = simple([3.0, 1.0], [[1], [-1]])
    second = simple([4.0, 0.0], [[1], [-1]], log_rms=[0.3, 0], like=first)
    assert (first.gauged, second.gauged) == ((), (0,))
    assert second.z == pytest.approx([-0.3], abs=1e-12)


def test_the_same_parts_take_the_directions_of_another_minimum(monkeypatch):
    shares, program, _ = program_of(pre_norm(2))
    others = shares * np.exp(np.random.default_rng(1).normal(size=len(shares)) / 4)
    first, expected = minimize(shares, **program), minimize(others, **program)
    assert first.gauged == expected.gauged != ()
    monkeypatch.setattr(scipy.optimize, "linprog", None)
    found = minimize(others, **program, like=first)
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-8)
    assert np.array_equal(found.vanishing, expected.vanishing)
    assert (found.infimum, found.gauged) == (None, first.gauged)


def test_sums_over_groups_follow_the_shares_as_responses_say():
    shares, program, _ = program_of(pre_norm(2, 3))
    groups = scipy.sparse.csr_array(np.eye(4)[np.arange(len(shares)) % 4])

    def sums(t):
        found = minimize(t, **program)
        return groups.T @ (t * found.weights), found

    found = sums(shares)[1]
    assert found.gauged == (0,)
    terms = scipy.sparse.csr_array((shares * found.weights)[:, None] * groups.toarray())
    moved = responses(found, program["exponents"], terms)
    step, rng = 1e-5, np.random.default_rng(0)
    for change in rng.normal(size=(3, len(shares))) * shares:
        slope = (sums(shares + step * change)[0] - sums(shares - step * change)[0]) / (2 * step)
        fixed = groups.T @ (change * found.weights)
        through_z = 2 * moved.T @ (program["exponents"].T @ (change * found.weights))
        assert fixed + through_z == pytest.approx(slope, rel=1e-6, abs=1e-7)
        assert np.abs(through_z).max() > 0.1 * np.abs(fixed).max()
        assert through_z.sum() == pytest.approx(0, abs=1e-7)  # the minimum itself is stationary


def test_shares_that_are_not_finite_are_refused():
    with pytest.raises(IsolossError, match="part 1 has a share"):
        simple([1.0, np.nan], [[1], [-1]])
