"""Critical sharpness, against losses that are quadratic in the weights, whose curvature is known."""

import math
import types

import numpy as np
import pytest
import torch
from dense_curvature import batch_of, bert, flat, on_vector
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness import critical_sharpness
from isoloss.statistics.ratio import ratio

SIZE = 4


class Quadratic(nn.Module):
    """Predicts token 0 or 1 after a token x so that the loss of token 0 is c + b_x'w + w'A_x w / 2 for x from 2 on."""

    def __init__(self, sequences=0, seed=0, spread=0.3):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.ones(SIZE, dtype=torch.float64))
        self.slopes = torch.randn(sequences, SIZE, generator=draw).double() * spread + torch.tensor([1.0, 0.5, 0, 0])
        roots = torch.randn(sequences, SIZE, SIZE, generator=draw).double() * spread + torch.eye(SIZE)
        self.curvatures = roots @ roots.mT

    def losses(self, x):
        linear, square = self.slopes[x] @ self.weight, ((self.curvatures[x] @ self.weight) * self.weight).sum(-1)
        return 20 + linear + square / 2

    def forward(self, input_ids):
        # -log softmax of (z, 0) at 0 is log(1 + e^-z), which is q for z = -log(e^q - 1)
        first = -torch.log(torch.expm1(self.losses(input_ids[:, 0] - 2)))
        logits = torch.stack([first, torch.zeros_like(first)], dim=-1)[:, None]
        return types.SimpleNamespace(logits=logits.expand(-1, 2, 2))


def quadratic(sequences, **options):
    """A model of a quadratic loss, and a batch of its sequences."""
    ids = torch.stack([torch.arange(sequences) + 2, torch.zeros(sequences, dtype=torch.int64)], dim=1)
    labels = torch.tensor([-100, 0]).repeat(sequences, 1)
    return Quadratic(sequences, **options), [{"input_ids": ids, "labels": labels, "documents": torch.arange(sequences)}]


def along_gradient(model, kept):
    """g'Hg / g'g of the mean of some losses."""
    a = model.curvatures[kept].mean(dim=0)
    g = model.slopes[kept].mean(dim=0) + a @ model.weight.detach()
    return float(g @ a @ g / (g @ g))


@pytest.fixture(scope="module")
def measured():
    model, batches = quadratic(400)
    return model, critical_sharpness(model, batches, causal=False)


def test_of_a_quadratic_loss_it_is_the_curvature_along_the_gradient(measured):
    model, found = measured
    assert found.value == pytest.approx(along_gradient(model, torch.arange(400)), rel=1e-5)
    assert found.value == 2 / found.details["step"]
    assert found.details["forward_passes"] <= 20
    assert torch.equal(model.weight, torch.ones(SIZE, dtype=torch.float64))


def test_the_error_is_that_of_leaving_out_each_input(measured):
    model, found = measured
    without = [along_gradient(model, torch.arange(400) != i) for i in range(400)]
    exact = 399 * (found.value - np.array(without))
    np.testing.assert_allclose(found.influence, exact, atol=0.02 * np.abs(exact).max())
    assert found.stderr == pytest.approx(math.sqrt((exact**2).sum() / (400 * 399)), rel=0.01)


def test_along_a_given_direction_the_step_is_minus_two_slopes_over_the_curvature():
    model, batches = quadratic(60)
    v = torch.tensor([-0.3, -0.1, 0.05, 0.0], dtype=torch.float64)
    found = critical_sharpness(model, batches, direction={"weight": v}, causal=False)
    slopes = (model.slopes + model.curvatures @ model.weight.detach()) @ v
    curvatures = torch.einsum("nij,i,j->n", model.curvatures, v, v)
    value, stderr = ratio(curvatures, -slopes)
    assert (found.value, found.stderr) == pytest.approx((value, stderr), rel=0.02)
    assert found.value == pytest.approx(value, rel=1e-5)


def test_of_a_model_the_loss_is_back_at_its_start():
    model, batches = bert(), [batch_of(30)]
    named = dict(model.named_parameters())
    before = flat(named)
    found = critical_sharpness(model, batches)
    assert torch.equal(flat(named), before)
    logits, targets = on_vector(model, batches, causal=False)
    weights = before.clone().requires_grad_()
    start = nn.functional.cross_entropy(logits(weights), targets)
    (gradient,) = torch.autograd.grad(start, weights)
    shares = [before - share * found.details["step"] * gradient for share in (0.25, 0.5, 0.75, 1.0, 1.05)]
    with torch.no_grad():
        rises = [float(nn.functional.cross_entropy(logits(moved), targets) - start) for moved in shares]
    assert all(rise < -1e-3 for rise in rises[:3])
    assert abs(rises[3]) < 1e-5
    assert rises[4] > 1e-3


def test_what_has_no_critical_step_is_refused():
    model, batches = quadratic(6)
    up = {"weight": torch.ones(SIZE, dtype=torch.float64)}
    with pytest.raises(IsolossError, match="the loss does not fall along the direction"):
        critical_sharpness(model, batches, direction=up, causal=False)
    model.curvatures.zero_()
    model.slopes[:] = torch.tensor([1e-9, 0.0, 0.0, 0.0])
    with pytest.raises(IsolossError, match="the loss does not rise along the direction, however far"):
        critical_sharpness(model, batches, causal=False)
    assert torch.equal(model.weight, torch.ones(SIZE, dtype=torch.float64))
