"""Perceptrons inside wider ones: the same outputs, and the same share of the trace for every parameter."""

import itertools

import pytest
import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.lab.models.expansion import expand_mlp


def perceptron(*, bias=True, activation=nn.ReLU, widths=(3, 4, 5, 2)):
    layers = []
    for few, many in itertools.pairwise(widths):
        layers += [nn.Linear(few, many, bias=bias), activation()]
    model = nn.Sequential(*layers[:-1]).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def inputs():
    return torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fisher_shares(model):
    """The trace of the Fisher by parameter, the outputs being logits: every label of every input visited."""
    named = dict(model.named_parameters())
    shares = dict.fromkeys(named, 0.0)
    for x in inputs():
        log_probs = model(x).log_softmax(dim=0)
        for log_prob in log_probs:
            gradients = torch.autograd.grad(log_prob, named.values(), retain_graph=True)
            for name, gradient in zip(named, gradients, strict=True):
                shares[name] += float(log_prob.detach().exp() * gradient.square().sum()) / len(inputs())
    return shares


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.LeakyReLU(0.1)], ids=["relu", "leaky"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_function_and_trace_are_kept(bias, activation, factor):
    small = perceptron(bias=bias, activation=activation)
    found = expand_mlp(small, factor)
    assert [layer.out_features for layer in found.model[::2]] == [4 * factor, 5 * factor, 2]
    torch.testing.assert_close(found.model(inputs()), small(inputs()), rtol=1e-12, atol=1e-12)
    before, after = fisher_shares(small), fisher_shares(found.model)
    assert after == pytest.approx(before, rel=1e-10)
    assert min(before.values()) > 1e-3
    assert [part.trace_factor for part in found.parts.values()] == pytest.approx([1] * len(before))
    assert set(found.parts) == set(before)
    assert found.added == ()


def test_the_small_one_is_left_as_it_is():
    small = perceptron()
    before = [parameter.clone() for parameter in small.parameters()]
    expand_mlp(small, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, small.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([nn.Linear(2, 2)], "Linear"),
        ([nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)], "Linear, GELU, Linear"),
        ([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()], "Linear, ReLU, Linear, ReLU"),
        ([nn.Linear(2, 2), nn.ReLU(), nn.Identity()], "Linear, ReLU, Identity"),
        ([], "nothing"),
    ],
)
def test_other_layers_are_refused(layers, found):
    with pytest.raises(IsolossError, match=f"the layers are {found}; they must be Linear layers with ReLU"):
        expand_mlp(nn.Sequential(*layers), 2)


def test_a_factor_below_one_is_refused():
    with pytest.raises(IsolossError, match="the factor is 0; it must be at least 1"):
        expand_mlp(perceptron(), 0)
