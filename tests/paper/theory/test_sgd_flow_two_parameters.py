"""SGD on two parameters: the closed forms against automatic differentiation and a solved flow."""

import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory.sgd_flow import TwoParameters, simulate

MODEL = TwoParameters(0.7, 2.0)


def loss(theta, p):
    return -(p * torch.nn.functional.logsigmoid(theta[0] * theta[1])) - (1 - p) * torch.nn.functional.logsigmoid(
        -theta[0] * theta[1]
    )


hessian = torch.func.jacrev(torch.func.jacrev(loss))  # torch.func.hessian warns of what it is made of


def hessian_trace(theta, p):
    return hessian(theta, p).trace()


def flow_trace(model, time):
    return float(model.trace(model.flow(time)[None])[0])


def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(("p", "a", "b"), [(0.7, 2.0, 0.3), (0.2, -1.0, 2.5), (0.5, 0.4, 0.0)])
def test_trace_is_the_hessians(p, a, b):
    expected = hessian_trace(torch.tensor([a, b], dtype=torch.float64), p)
    assert TwoParameters(p, 3.0).trace(np.array([[a, b]]))[0] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(("p", "start"), [(0.7, 2.0), (0.2, -1.5), (0.5, 0.3)])
def test_flow_is_the_projected_gradient_flow(p, start):
    """Runge-Kutta on -grad Tr with the Hessian's null space by its eigenvectors, against the closed form."""
    model = TwoParameters(p, start)

    def velocity(theta):
        gradient = torch.func.grad(hessian_trace)(theta, p)
        values, vectors = torch.linalg.eigh(hessian(theta, p))
        assert abs(values[0]) < 1e-6 * values[1]
        null = vectors[:, 0]
        return -(null @ gradient) * null

    theta, step = torch.tensor(model.minimizer), 0.005
    for _ in range(25):
        k1 = velocity(theta)
        k2 = velocity(theta + step / 2 * k1)
        k3 = velocity(theta + step / 2 * k2)
        k4 = velocity(theta + step * k3)
        theta = theta + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    assert model.flow(0.125) == pytest.approx(theta.numpy(), rel=1e-6, abs=1e-6)
    assert model.flow(0.0) == pytest.approx(model.minimizer, rel=1e-12, abs=1e-12)


def test_reached_is_where_gradient_flow_of_the_loss_leads():
    """Gradient descent with a small step on the loss, without noise, to its end."""
    start, step = np.array([[1.7, 0.9]]), 1e-3
    (end,) = simulate(MODEL, start, step_size=step, times=[50_000 * step**2], generator=rng(), exact=True)
    assert end[0, 0] * end[0, 1] == pytest.approx(MODEL.logit, abs=1e-9)
    time = MODEL.reached(np.repeat(start, 2, axis=0)).value
    # Euler's steps change the difference by a share of the order of the step
    assert flow_trace(MODEL, time) == pytest.approx(MODEL.trace(end)[0], rel=1e-4)


def test_a_step_is_sgd_by_autograd():
    """One trajectory, step by step, with the answers drawn from the same generator."""
    eta, batch_size, steps = 0.1, 3, 20
    (end,) = simulate(
        MODEL,
        np.array([[2.0, 0.4]]),
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
    assert end[0] == pytest.approx(theta.numpy(), abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_mean_gradient_noise_is_the_answers(batch_size):
    """One step from a minimizer: its mean is 0 and its variance v b^2 / B."""
    n, (a, b) = 200_000, MODEL.minimizer
    starts = np.tile(MODEL.minimizer, (n, 1))
    (end,) = simulate(MODEL, starts, step_size=0.1, times=[0.01], batch_size=batch_size, generator=rng())
    noise = (a - end[:, 0]) / 0.1 / b
    variance = MODEL.variance / batch_size
    assert abs(noise.mean()) < 4 * math.sqrt(variance / n)
    fourth = ((noise - noise.mean()) ** 4).mean()
    assert abs(noise.var() - variance) < 4 * math.sqrt((fourth - variance**2) / n) + 1 / n


@pytest.mark.parametrize(
    ("p", "start", "message"),
    [
        (1.0, 2.0, "the probability is 1.0"),
        (math.nan, 2.0, "the probability is nan"),
        (0.7, 0.0, "the start is 0.0"),
        (0.7, math.sqrt(math.log(0.7 / 0.3)), "is the flattest minimizer"),
    ],
)
def test_what_is_refused(p, start, message):
    with pytest.raises(IsolossError, match=message):
        TwoParameters(p, start)
