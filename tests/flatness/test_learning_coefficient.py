"""The local learning coefficient, against closed forms and quadrature of losses whose posterior is known."""

import math

import pytest
import torch
from dense_curvature import batch_of, gpt2
from quadratic_model import OfLosses, batch

from isoloss.errors import IsolossError
from isoloss.flatness import local_learning_coefficient
from isoloss.flatness.learning_coefficient import chain_mean

N = 64  # sequences
HEAT = N / math.log(N)


def measured(losses, start, **options):
    model = OfLosses(losses, torch.as_tensor(start, dtype=torch.float64))
    ids = torch.arange(N).chunk(options.pop("batches", 1))
    found = local_learning_coefficient(model, [batch(part) for part in ids], causal=False, **options)
    assert model.w.equal(torch.as_tensor(start, dtype=torch.float64))
    return found


CURVATURES = torch.logspace(-1, 2, 12, dtype=torch.float64)


def quadratic(w):
    """Twelve parameters; the gradients of single sequences differ, and their mean is that of the quadratic form."""
    tilt = torch.linspace(-0.05, 0.05, N, dtype=torch.float64)
    return (CURVATURES @ w.square()) / 2 + 1.0 + tilt * w.sum()


def test_a_quadratic_loss_has_the_coefficient_of_its_closed_form():
    gamma, step = 10.0, 2e-4
    found = measured(
        quadratic, torch.zeros(12), localization=gamma, step_size=step, num_draws=1500, burn_in=500, batches=4
    )
    force = HEAT * CURVATURES + gamma

    def exact(step):
        # of a step of finite length, the variance of each weight is this much larger than 1 over its force
        return float((HEAT * CURVATURES / (2 * force * (1 - step * force / 4))).sum())

    assert found.value == pytest.approx(exact(step), abs=3 * found.stderr)
    value, error = found.details["at_half_step"]
    assert value == pytest.approx(exact(step / 2), abs=3 * error)
    assert 0 < found.stderr < 0.05 * found.value
    assert found.details["inverse_temperature"] == HEAT
    assert str(found).startswith(f"{found.value:.2f}")


def test_a_singular_loss_has_the_coefficient_of_its_quadrature():
    """w1^2 w2^2: half of what a quadratic loss of two parameters has, and less."""
    gamma, line = 4.0, torch.linspace(-4, 4, 1601, dtype=torch.float64)
    loss = line.square()[:, None] * line.square()
    density = torch.exp(-HEAT * loss - gamma / 2 * (line.square()[:, None] + line.square()))
    exact = float(HEAT * (loss * density).sum() / density.sum())
    found = measured(
        lambda w: (w[0].square() * w[1].square() + 1.0).expand(N),
        [0.0, 0.0],
        localization=gamma,
        step_size=8e-3,
        num_draws=2000,
        burn_in=200,
    )
    assert found.value == pytest.approx(exact, abs=3 * found.stderr + 0.01)
    assert found.stderr < 0.1 * exact
