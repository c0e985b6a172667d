"""SGD on two parameters: the closed forms against automatic differentiation and a solved flow, and the verdicts."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.theory.sgd_flow import Problem, Settings, judge, simulate, steps_until, study

PROBLEM = Problem(0.7, 2.0)
SMALL = Settings(trajectories=2048, batch_sizes=(1, 2), step_sizes=(0.1, 0.05, 0.025), times=(0.5, 2.0), seed=1)


@pytest.fixture(scope="module")
def found():
    return study(SMALL)


def loss(theta, p):
    return -(p * torch.nn.functional.logsigmoid(theta[0] * theta[1])) - (1 - p) * torch.nn.functional.logsigmoid(
        -theta[0] * theta[1]
    )


hessian = torch.func.jacrev(torch.func.jacrev(loss))  # torch.func.hessian warns of what it is made of


def hessian_trace(theta, p):
    return hessian(theta, p).trace()


@pytest.mark.parametrize(("p", "a", "b"), [(0.7, 2.0, 0.3), (0.2, -1.0, 2.5), (0.5, 0.4, 0.0)])
def test_trace_is_the_hessians(p, a, b):
    expected = hessian_trace(torch.tensor([a, b], dtype=torch.float64), p)
    assert Problem(p, 3.0).trace(np.array([a]), np.array([b]))[0] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("p", [0.7, 0.2, 0.5])
@pytest.mark.parametrize("start", [2.0, 0.3, -1.5])
def test_flow_is_the_projected_gradient_flow(p, start):
    """Runge-Kutta on -1/4 grad Tr with the Hessian's null space by its eigenvectors, against the closed form."""
    problem = Problem(p, start)

    def velocity(theta):
        gradient = torch.func.grad(hessian_trace)(theta, p)
        values, vectors = torch.linalg.eigh(hessian(theta, p))
        assert abs(values[0]) < 1e-6 * values[1]
        null = vectors[:, 0]
        return -0.25 * (null @ gradient) * null

    theta, step = torch.tensor([start, problem.logit / start], dtype=torch.float64), 0.02
    for _ in range(25):
        k1 = velocity(theta)
        k2 = velocity(theta + step / 2 * k1)
        k3 = velocity(theta + step / 2 * k2)
        k4 = velocity(theta + step * k3)
        theta = theta + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    assert problem.flow_trace(0.5) == pytest.approx(float(hessian_trace(theta, p)), rel=1e-6)
    # B examples a step: B times slower
    assert problem.flow_trace(1.5, batch_size=3) == pytest.approx(problem.flow_trace(0.5), rel=1e-14)


def test_retraction_is_gradient_flow_of_the_loss():
    """Gradient descent with a small step on the loss, without noise, to its end."""
    start, step = np.array([1.7]), 1e-3
    expected = PROBLEM.retracted_trace(start**2 - 0.9**2)
    ((a, b),) = simulate(PROBLEM, start, np.array([0.9]), step_size=step, times=[50_000 * step**2])
    assert a * b == pytest.approx(PROBLEM.logit, abs=1e-9)
    # Euler's steps change the difference by a share of the order of the step
    assert PROBLEM.trace(a, b) == pytest.approx(expected, rel=1e-4)


def test_a_step_is_sgd_by_autograd():
    """One trajectory, step by step, with the answers drawn from the same generator."""
    eta, batch_size, steps = 0.1, 3, 20
    ((a, b),) = simulate(
        PROBLEM,
        np.array([2.0]),
        np.array([0.4]),
        step_size=eta,
        times=[steps * eta**2],
        batch_size=batch_size,
        generator=np.random.default_rng(5),
    )
    draws = np.random.default_rng(5).random(steps)
    below = [sum(math.comb(3, j) * 0.7**j * 0.3 ** (3 - j) for j in range(k + 1)) for k in range(3)]
    theta = torch.tensor([2.0, 0.4], dtype=torch.float64)
    for draw in draws:
        share = sum(draw > bound for bound in below) / batch_size
        theta = theta - eta * torch.func.grad(loss)(theta, share)
    assert [a[0], b[0]] == pytest.approx(theta.tolist(), abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_mean_gradient_noise_is_the_answers(batch_size):
    """One step from a minimiser: its mean is 0 and its variance v b^2 / B."""
    n, b = 200_000, PROBLEM.logit / 2
    ((a, _),) = simulate(
        PROBLEM,
        np.full(n, 2.0),
        np.full(n, b),
        step_size=0.1,
        times=[0.01],
        batch_size=batch_size,
        generator=np.random.default_rng(0),
    )
    noise = (2.0 - a) / 0.1 / b
    variance = PROBLEM.variance / batch_size
    assert abs(noise.mean()) < 4 * math.sqrt(variance / n)
    fourth = ((noise - noise.mean()) ** 4).mean()
    assert abs(noise.var() - variance) < 4 * math.sqrt((fourth - variance**2) / n) + 1 / n


def test_without_noise_a_minimiser_does_not_move():
    starts = np.array([2.0, 0.5, -3.0])
    ((a, b),) = simulate(PROBLEM, starts, PROBLEM.logit / starts, step_size=0.05, times=[4.0])
    assert a == pytest.approx(starts, abs=1e-10)
    assert b == pytest.approx(PROBLEM.logit / starts, abs=1e-10)


def test_everything_is_shown(found):
    # the errors at the smallest step are bounded by 1 %, so the verdicts hold for few trajectories too
    assert [statement.verdict for statement in found.statements] == ["shown"] * 5
    assert len(found.rows) == 2 * 3 * 2


def test_rows_are_the_simulation(found):
    row = next(row for row in found.rows if (row.batch_size, row.step_size, row.time) == (2, 0.05, pytest.approx(2)))
    assert row.flow_trace == pytest.approx(PROBLEM.flow_trace(2.0, batch_size=2), rel=1e-12)
    assert abs(row.trace.value / row.flow_trace - 1) < 0.02
    assert abs(row.coefficient.value - 0.25) < 0.01
    assert row.trace.samples == SMALL.trajectories
    assert row.retracted_trace.stderr < row.trace.stderr


def test_extrapolation_is_the_parabola_through_three_step_sizes(found):
    last = [row.coefficient.value for row in found.rows if row.batch_size == 1 and row.time == pytest.approx(2)]
    at_zero = np.polyval(np.polyfit(SMALL.step_sizes, last, 2), 0)
    assert found.coefficients[1].value == pytest.approx(at_zero, rel=1e-9)
    assert abs(found.coefficients[1].value - 0.25) < 4 * found.coefficients[1].stderr < 0.02


def test_extrapolation_from_two_step_sizes_is_a_line():
    settings = dataclasses.replace(SMALL, trajectories=16, step_sizes=(0.2, 0.1), times=(0.5,))
    found = study(settings)
    large, small = (row.coefficient.value for row in found.rows if row.batch_size == 1)
    assert found.coefficients[1].value == pytest.approx(2 * small - large, rel=1e-9)


def test_blocks_draw_different_answers():
    settings = dataclasses.replace(SMALL, step_sizes=(0.2, 0.1), times=(0.5,), batch_sizes=(1,))
    one, two = (study(dataclasses.replace(settings, trajectories=n)).rows[0].trace.value for n in (4096, 8192))
    assert abs(two / one - 1) > 1e-9  # the same answers twice would give the same mean


def test_the_same_seed_gives_the_same_numbers():
    settings = dataclasses.replace(SMALL, trajectories=16, step_sizes=(0.2, 0.1))
    assert study(settings).rows == study(settings).rows
    assert study(settings).rows != study(dataclasses.replace(settings, seed=2)).rows


def test_more_trajectories_than_a_block():
    done = []
    settings = dataclasses.replace(SMALL, trajectories=4097, step_sizes=(0.2, 0.1), times=(0.5,), batch_sizes=(1,))
    found = study(settings, progress=done.append)
    assert [row.trace.samples for row in found.rows] == [4097, 4097]
    assert done[-1] == settings.num_steps == 2 * (steps_until(0.5, 0.2) + steps_until(0.5, 0.1))


@pytest.mark.parametrize("coefficient", [0.5, 0.125, 0.26])
def test_a_wrong_coefficient_is_not_shown(coefficient):
    settings = dataclasses.replace(SMALL, coefficient=coefficient)
    verdicts = [statement.verdict for statement in study(settings).statements]
    assert verdicts[2:] == ["not shown", "not shown", "shown"]
    if coefficient != 0.26:  # which is too near for the traces at these step sizes to tell
        assert verdicts[:2] == ["not shown", "not shown"]


def test_the_batch_size_must_slow_the_flow(found):
    wrong = {1: found.coefficients[1], 2: dataclasses.replace(found.coefficients[1], value=0.125)}
    verdicts = [statement.verdict for statement in judge(SMALL, found.rows, wrong, found.control)]
    assert verdicts == ["shown", "shown", "shown", "not shown", "shown"]


def test_a_control_that_drifts_is_not_shown(found):
    control = (found.control[0], found.control[0] * 1.01)
    assert judge(SMALL, found.rows, found.coefficients, control)[-1].verdict == "not shown"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"probability": 1.0}, "the probability is 1.0"),
        ({"probability": math.nan}, "the probability is nan"),
        ({"start": 0.0}, "the start is 0.0"),
        ({"start": 1e200}, "the step size 0.1 is too large"),
        ({"start": 10.0}, "the step size 0.1 is too large for a Hessian of trace 21"),
        ({"start": math.sqrt(math.log(0.7 / 0.3))}, "is the flattest minimiser"),
        ({"step_sizes": (0.1,)}, "the step sizes are 0.1; give at least 2"),
        ({"step_sizes": (0.05, 0.1)}, "from large to small"),
        ({"step_sizes": (0.1, math.nan, 0.05)}, "the step sizes are 0.1, nan, 0.05"),
        ({"times": ()}, "the times are none"),
        ({"times": (1.0, 0.5)}, "must be positive and increase"),
        ({"times": (0.001,)}, "less than one step"),
        ({"batch_sizes": (0, 1)}, "the batch sizes are 0, 1"),
        ({"trajectories": 1}, "trajectories is 1"),
        ({"coefficient": -0.25}, "the coefficient is -0.25"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(IsolossError, match=message):
        _ = dataclasses.replace(SMALL, **wrong)
