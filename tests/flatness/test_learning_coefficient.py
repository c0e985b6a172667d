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


CURVATURES = torch.logspace(0, 1.5, 12, dtype=torch.float64)


def quadratic(w):
    """Twelve parameters; the gradients of single sequences differ, and their mean is that of the quadratic form."""
    tilt = torch.linspace(-0.005, 0.005, N, dtype=torch.float64)
    return (CURVATURES @ w.square()) / 2 + 1.0 + tilt * w.sum()


def test_a_quadratic_loss_has_the_coefficient_of_its_closed_form():
    gamma, step = 100.0, 1e-3
    options = {"localization": gamma, "step_size": step, "num_draws": 300, "burn_in": 50}
    found = measured(quadratic, torch.zeros(12), batches=4, **options)
    force = HEAT * CURVATURES + gamma

    def exact(step):
        # of a step of finite length, the variance of each weight is this much larger than 1 over its force
        return float((HEAT * CURVATURES / (2 * force * (1 - step * force / 4))).sum())

    value, error = found.details["at_step"]
    assert value == pytest.approx(exact(step), abs=3 * error)
    assert found.value == pytest.approx(exact(step / 2), abs=3 * found.stderr)
    assert 0 < found.stderr < 0.1 * found.value
    assert found.details["inverse_temperature"] == HEAT


def test_a_singular_loss_has_the_coefficient_of_its_quadrature():
    """The sum of 50 losses w1^2 w2^2, each of which has at most half the coefficient of two free parameters."""
    gamma, line = 8.0, torch.linspace(-4, 4, 1601, dtype=torch.float64)
    loss = line.square()[:, None] * line.square()
    density = torch.exp(-HEAT * loss - gamma / 2 * (line.square()[:, None] + line.square()))
    exact = 50 * float(HEAT * (loss * density).sum() / density.sum())
    found = measured(
        lambda w: (w[:50].square() @ w[50:].square() + 1.0).expand(N),
        torch.zeros(100),
        localization=gamma,
        step_size=1e-2,
        num_draws=900,
        burn_in=30,
    )
    assert found.value == pytest.approx(exact, abs=2 * found.stderr)
    assert found.stderr < 0.1 * exact


def test_chains_that_have_not_converged_are_refused():
    still = {"localization": 1.0, "step_size": 1e-6, "num_draws": 50, "burn_in": 0}
    message = r"not converged: at the step size 1e-06 and half of it, the values are \S+ and \S+, R-hat \S+ and \S+ "
    message += r"\(at most 1\.05\), and the effective draws \d+ and \d+ \(at least 100\): take more draws and a longer"
    with pytest.raises(IsolossError, match=message):
        measured(quadratic, torch.zeros(12), **still)
    # chains that mix at once, and a step so long that the value is twice what it should be
    large = 2 / (HEAT * float(CURVATURES[-1]) + 10.0)
    with pytest.raises(IsolossError, match=r"R-hat 1\.0\d+ and 1\.0\d+ .*: take a smaller step"):
        measured(
            lambda w: (CURVATURES[-1] * w.square().sum() / 2 + 1).expand(N),
            torch.zeros(12),
            localization=10.0,
            step_size=large,
            num_draws=150,
            burn_in=20,
        )
    with pytest.raises(IsolossError, match=r"a chain's loss is not finite at the step size 0\.1: take a smaller one"):
        measured(quadratic, torch.zeros(12), step_size=0.1)


def test_the_effective_draws_are_those_of_an_autoregression():
    generator, rho = torch.Generator().manual_seed(0), 0.8
    noise = torch.randn(4, 6000, generator=generator, dtype=torch.float64)
    for step in range(1, noise.shape[1]):
        noise[:, step] = rho * noise[:, step - 1] + math.sqrt(1 - rho**2) * noise[:, step]
    found = chain_mean(noise)
    assert found.effective_draws == pytest.approx(noise.numel() * (1 - rho) / (1 + rho), rel=0.15)
    assert found.stderr == pytest.approx(math.sqrt(1 / found.effective_draws), rel=0.05)
    assert found.r_hat < 1.01
    # a chain elsewhere, by three deviations: 3 / 2 is the deviation of the means of halves, of which two are there
    apart = noise + 3 * (torch.arange(4) == 0)[:, None]
    found = chain_mean(apart)
    assert found.r_hat == pytest.approx(math.sqrt(1 + 9 * 6 * 2 / (8 * 7)), rel=0.05)
    assert found.effective_draws < 20


def test_the_same_seed_gives_the_same_bits():
    options = {"localization": 1000.0, "step_size": 3e-4, "num_draws": 200, "burn_in": 10, "batches": 4}
    first, second = (measured(quadratic, torch.zeros(12), seed=3, **options) for _ in range(2))
    assert (first.value, first.stderr, first.details) == (second.value, second.stderr, second.details)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"localization": 0.0}, r"localization is 0\.0; it must be more than 0"),
        ({"step_size": math.inf}, "step_size is inf"),
        ({"num_chains": 1}, "num_chains is 1; it must be at least 2"),
        ({"num_draws": 3}, "num_draws is 3; it must be at least 4"),
        ({"burn_in": -1}, "burn_in is -1"),
        ({"batches": [batch_of(1)]}, "needs at least 2 sequences"),
    ],
)
def test_what_is_no_chain_is_refused(options, message):
    with pytest.raises(IsolossError, match=message):
        local_learning_coefficient(gpt2(), **{"batches": [batch_of(4)], **options})
