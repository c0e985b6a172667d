"""The trace that is minimal over rescalings, on ReLU networks: it is the minimum sharpness of Ibayashi et al. 2021.

"Minimum sharpness: scale-invariant parameter-robustness of neural networks" (arXiv 2106.12612) takes the trace of the
Hessian, minimized over factors of the layers (a weight times a_l, with the product of all a_l 1) or of the nodes (what
a hidden unit reads times a, what reads it by a). The reference here computes the network again for the factors and
differentiates through its dense trace; it knows no parts.
"""

import functools
import itertools
import types

import numpy as np
import pytest
import torch
from dense_curvature import dense_gauss_newton, dense_hessian
from torch import nn

from isoloss.flatness._rescaling.apply import block_sizes, rescaled
from isoloss.flatness._rescaling.solve import minimize
from isoloss.flatness._rescaling.symmetries import rescalings_of
from isoloss.registry import RESCALINGS

INPUTS, HIDDEN, CLASSES, POINTS = 4, (5, 3), 3, 12


class Perceptron(nn.Module):
    """A classifier of fixed points by ReLU layers without biases; an "input id" is the number of a point."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(model_type="perceptron", vocab_size=CLASSES)
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("points", torch.randn(POINTS, INPUTS, generator=generator))
        sizes = (INPUTS, *HIDDEN, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes))
        for layer in self.layers:
            nn.init.normal_(layer.weight, generator=generator)

    def get_output_embeddings(self):
        return self.layers[-1]

    def forward(self, input_ids):
        states = self.points[input_ids]
        for layer in self.layers[:-1]:
            states = layer(states).relu()
        return types.SimpleNamespace(logits=self.layers[-1](states))


def perceptron_signals(model, signals):
    """Declare the network for `isoloss.RESCALINGS`."""
    read = signals.fixed(INPUTS)
    for number, (layer, size) in enumerate(zip(model.layers[:-1], HIDDEN, strict=True)):
        written = signals.activated(f"hidden layer {number}", size, nn.ReLU())
        signals.linear(layer, read, written)
        read = written
    signals.linear(model.layers[-1], read, signals.fixed(CLASSES))
    return read


@pytest.fixture(scope="module")
def model():
    return Perceptron().double()


@pytest.fixture
def rescalings(model, monkeypatch):
    monkeypatch.setattr(RESCALINGS, "_entries", dict(RESCALINGS._entries))
    RESCALINGS.register("perceptron", perceptron_signals)
    return functools.partial(rescalings_of, model)


@functools.cache
def batch():
    labels = torch.randint(0, CLASSES, (POINTS, 1), generator=torch.Generator().manual_seed(1))
    return {"input_ids": torch.arange(POINTS)[:, None], "labels": labels}


def parts(model, found):
    """(K,) the parts of the trace, from the dense Fisher."""
    diagonal = dense_gauss_newton(model, [batch()], causal=False).diagonal()
    sizes, sums = [value.numel() for value in model.parameters()], []
    for name, values in zip(dict(model.named_parameters()), diagonal.split(sizes), strict=True):
        split = found.parameter_blocks.get(name)
        sums.append(values.sum()[None] if split is None else split.sums(values[None])[0])
    return torch.cat(sums).numpy()


def minimum(model, shares, found):
    """The minimum over rescalings, and its log-factors."""
    sizes, log_rms = block_sizes(model, found)
    smallest = minimize(shares, found.actions, log_rms=log_rms, sizes=sizes, writers=found.writers)
    assert not smallest.gauged
    return smallest.value, smallest.z


def trace_of(model, factors):
    """The trace of the network whose hidden units have factors, one tensor a hidden layer; with a graph of them."""
    weights = [layer.weight.detach() for layer in model.layers]
    for number, factor in enumerate(factors):
        weights[number] = factor[:, None] * weights[number]
        weights[number + 1] = weights[number + 1] / factor
    sizes = [weight.numel() for weight in weights]

    def logits(vector):
        states = model.points
        *hidden, last = (part.view(weight.shape) for part, weight in zip(vector.split(sizes), weights, strict=True))
        for weight in hidden:
            states = (states @ weight.T).relu()
        return states @ last.T

    theta = torch.cat([weight.reshape(-1) for weight in weights])
    jacobian = torch.autograd.functional.jacobian(logits, theta, create_graph=True)
    p = logits(theta).softmax(dim=-1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("mcp,mcd,mdp->", jacobian, inner, jacobian) / POINTS


def minimum_sharpness(model, sizes):
    """The minimum of that trace over factors, `sizes` of them in each hidden layer: all of its units, or one."""
    logs = [torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    optimizer = torch.optim.LBFGS(logs, max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = trace_of(model, [log.exp().expand(size) for log, size in zip(logs, HIDDEN, strict=True)])
        value.backward()
        return value

    optimizer.step(closure)
    return float(closure().detach())


def test_the_trace_of_the_hessian_is_that_of_the_fisher(model):
    """Logits are linear in each single weight of a ReLU network, so that the labels do not count on the diagonal."""
    hessian, fisher = (dense(model, [batch()], causal=False) for dense in (dense_hessian, dense_gauss_newton))
    torch.testing.assert_close(hessian.diagonal(), fisher.diagonal(), rtol=1e-9, atol=1e-12)
    assert float((hessian - fisher).abs().max()) > 1e-3
    ones = [torch.ones(size, dtype=torch.float64) for size in HIDDEN]
    assert float(trace_of(model, ones).detach()) == pytest.approx(float(hessian.trace()), rel=1e-9)


def test_layer_wise(model, rescalings):
    found = rescalings()
    shares = parts(model, found)
    value, _ = minimum(model, shares, found)
    # all three parts of the trace become equal: their geometric mean is what no factors change
    assert value == pytest.approx(3 * np.prod(shares) ** (1 / 3), rel=1e-9)
    assert value == pytest.approx(minimum_sharpness(model, [1, 1]), rel=1e-9)
    assert value < 0.95 * shares.sum()


def test_node_wise(model, rescalings):
    found = rescalings(granularity="neuron")
    assert found.exponents.shape[1] == sum(HIDDEN)
    shares = parts(model, found)
    value, z = minimum(model, shares, found)
    assert value == pytest.approx(minimum_sharpness(model, HIDDEN), rel=1e-8)
    assert value < 0.95 * minimum(model, parts(model, rescalings()), rescalings())[0]

    other = Perceptron().double()
    with torch.no_grad():
        for name, weight in rescaled(model, found, z).items():
            other.get_parameter(name).copy_(weight)
        ids = batch()["input_ids"]
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-11, atol=1e-11)
    moved = parts(other, found)
    assert moved.sum() == pytest.approx(value, rel=1e-9)
    # however the network was written before
    assert minimum(other, moved, found)[0] == pytest.approx(value, rel=1e-9)
