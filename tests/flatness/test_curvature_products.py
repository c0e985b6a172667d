"""Products of the Hessian and the Gauss-Newton matrix against dense matrices, one derivative a parameter."""

import types

import pytest
import torch
from dense_curvature import MODELS, batch_of, bert, dense, flat, on_vector, windows
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_dense_matrices(name):
    make, causal = MODELS[name]
    model = make()
    batches = [batch_of(3, seed=1, padded=name != "windows"), batch_of(2, seed=2, padded=name != "windows")]
    loss = MeanLoss(model, batches, causal=causal)
    hessian, gauss_newton = dense(model, batches, causal=causal)
    vector = torch.randn(len(hessian), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert loss.num_parameters == len(hessian) == sum(p.numel() for p in model.parameters())
    for product, matrix in ((loss.hessian_product, hessian), (loss.gauss_newton_product, gauss_newton)):
        assert float((product(vector) - matrix @ vector).norm()) <= 1e-9 * float((matrix @ vector).norm())
    # the two differ, so that neither passes for the other
    assert float((hessian - gauss_newton).norm()) > 0.05 * float(hessian.norm())


def test_the_loss_and_its_gradient():
    model, batches = bert(), [batch_of(3, seed=1), batch_of(2, seed=2)]
    logits, targets = on_vector(model, batches, causal=False)
    theta = flat(dict(model.named_parameters())).requires_grad_()
    expected = nn.functional.cross_entropy(logits(theta), targets)
    (gradient,) = torch.autograd.grad(expected, theta)
    loss = MeanLoss(model, batches)
    assert (loss.num_sequences, loss.num_positions) == (5, len(targets))
    assert loss.value() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(loss.gradient(), gradient, rtol=1e-10, atol=1e-13)


def test_a_parameter_that_is_not_used_has_zeros():
    model = windows()
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    loss = MeanLoss(model, [batch_of(3)], causal=False)
    vector = torch.ones(loss.num_parameters, dtype=torch.float64)
    place = list(loss.parameters).index("unused")
    for result in (loss.gradient(), loss.hessian_product(vector), loss.gauss_newton_product(vector)):
        assert bool((loss.split(result)[place] == 0).all())
        assert float(result.norm()) > 0


class Flash(nn.Module):
    """Attention by torch's flash kernel, which has a first derivative only."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)

    def forward(self, input_ids):
        states = self.embedding(input_ids)[:, None]
        mixed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(states, states, states)[0]
        return types.SimpleNamespace(logits=mixed[:, 0] @ self.embedding.weight.T)


class Powers(nn.Module):
    """A derivative of 0 and a second derivative of infinity."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, input_ids):
        return types.SimpleNamespace(logits=(self.weight**1.5).expand(*input_ids.shape, 5))


def test_what_is_refused():
    loss = MeanLoss(Flash(), [batch_of(3)], causal=False)
    vector = torch.ones(loss.num_parameters)
    assert float(loss.gradient().norm()) > 0
    for product in (loss.hessian_product, loss.gauss_newton_product):
        with pytest.raises(IsolossError, match='no second derivative: load it with attention="eager"'):
            product(vector)
    with pytest.raises(IsolossError, match=r"shape \(3,\) does not fit 40 parameters"):
        loss.hessian_product(torch.ones(3))
    with pytest.raises(IsolossError, match="Hessian's product is not finite; use a wider dtype"):
        MeanLoss(Powers(), [batch_of(3)], causal=False).hessian_product(torch.ones(5))


def test_an_error_of_the_model_itself_is_passed_on():
    loss = MeanLoss(windows(), [{**batch_of(3), "input_ids": torch.full((3, 4), 9)}], causal=False)
    with pytest.raises(IndexError):
        loss.hessian_product(torch.ones(loss.num_parameters))
