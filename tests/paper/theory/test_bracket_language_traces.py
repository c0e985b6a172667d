"""Inputs, traces and solutions of the bracket language against enumeration, automatic differentiation and algebra."""

import itertools
import math

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.models.bracket_attention import Weights, attend
from isoloss.paper.theory import brackets
from isoloss.paper.theory.brackets import (
    bound,
    downstream_inputs,
    flatness,
    hessian_trace,
    own_flatness,
    parts,
    pretraining_inputs,
    two_neurons,
)


def random_model(length, width=5, key_width=2, seed=0):
    return brackets.initial(length, width, key_width=key_width, seed=seed)


def written_out(model, x):
    """f of encoded sentences (n, T, 2T), token by token, as the paper has it."""
    scores = torch.einsum("kd,nd,ke,nte->nt", model.query, x[:, 0], model.key, x)
    attended = torch.einsum("nt,ntd->nd", scores.exp() / scores.exp().sum(dim=1, keepdim=True), x)
    return (attended @ model.value.T).relu() @ model.output / len(model.output)


def tokens_of(z):
    """(n, T, 2T) single encodings from their sum, one by one."""
    n, dimensions = z.shape
    length = dimensions // 2
    x = torch.zeros(n, length, dimensions, dtype=torch.float64)
    for row, token in itertools.product(range(n), range(length)):
        for place in (token, token + length):
            x[row, token, place] = z[row, place]
    return x


@pytest.mark.parametrize("length", [4, 6])
def test_every_input_once(length):
    inputs = pretraining_inputs(length)
    expected = {}
    for sentence in itertools.product((1, -1), repeat=length):
        for place, sign in itertools.product(range(length), (1, -1)):
            if sum(sentence) == 0:
                hidden = [0] * length
                hidden[place] = sign
                visible = [0 if t == place else bracket for t, bracket in enumerate(sentence)]
                expected[tuple(visible + hidden)] = sentence[place]
    found = {tuple(int(value) for value in z): int(y) for z, y in zip(inputs.z.tolist(), inputs.y, strict=True)}
    assert found == expected
    assert len(inputs.y) == 2 * length * math.comb(length, length // 2)
    assert torch.equal(inputs.y, -inputs.z[:, :length].sum(dim=1))


def test_every_string_once():
    inputs = downstream_inputs(4)
    assert {tuple(z[:4]) for z in inputs.z.tolist()} == set(itertools.product((1.0, -1.0), repeat=4))
    assert not inputs.z[:, 4:].any()
    assert torch.equal(inputs.y, -inputs.z.sum(dim=1))


def test_outputs_are_the_sum_written_out():
    for inputs in (pretraining_inputs(4), downstream_inputs(4)):
        model, x = random_model(4), tokens_of(inputs.z)
        torch.testing.assert_close(parts(model, inputs.z).outputs, written_out(model, x), rtol=1e-12, atol=1e-14)
        assert torch.equal(attend(brackets.two_neurons(4, 2), inputs.z)[0], torch.full((len(x), 4), 0.25).double())


def test_squared_gradients_are_autograds():
    inputs = pretraining_inputs(4)
    model = Weights(*(each.requires_grad_() for each in random_model(4, seed=3)))
    outputs, found = written_out(model, tokens_of(inputs.z)), parts(model, inputs.z)
    assert found.attention.max() > 0.001
    for index in range(0, len(outputs), 5):
        gradients = torch.autograd.grad(outputs[index], model, retain_graph=True)
        size = {name: float(each.square().sum()) for name, each in zip(Weights._fields, gradients, strict=True)}
        assert float(found.neurons[index].detach()) == pytest.approx(size["output"] + size["value"], rel=1e-11)
        assert float(found.attention[index].detach()) == pytest.approx(size["query"] + size["key"], rel=1e-11)


def test_factors_multiply_to_the_ratio_and_are_the_inequalities(monkeypatch):
    monkeypatch.setattr(brackets, "_TRACE_BLOCK", 35)  # blocks change nothing
    model, inputs = random_model(6, seed=1), pretraining_inputs(6)
    found = flatness(model, inputs)
    product = found.heads * found.balance * found.cancellation * found.evenness
    assert found.ratio == pytest.approx(product, rel=1e-12)
    weights, h = attend(model, inputs.z)
    assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * len(weights))
    norms, u = h.norm(dim=1), model.output
    values = (h @ model.value.T).relu()
    with_signs = (norms * (values @ u).abs()).mean()
    assert found.cancellation == pytest.approx(float((norms * (values @ u.abs())).mean() / with_signs), rel=1e-12)
    assert found.cancellation > 1.01 < found.balance
    assert found.heads > 1.001
    assert found.evenness == pytest.approx(float(math.sqrt(6) * (norms * (values @ u).abs()).mean() / 5), rel=1e-12)


@pytest.mark.parametrize("length", [4, 6, 8, 10])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_two_neurons_reach_the_bound(length, width):
    found = flatness(brackets.two_neurons(length, width), pretraining_inputs(length))
    assert found.loss < 1e-20
    assert found.trace == pytest.approx(4 / (width * math.sqrt(length)), rel=1e-12)
    assert found.bound == bound(length, width)
    assert found.kink == 0
    if width == 2:
        assert found.trace == pytest.approx(math.sqrt(4 / length), rel=1e-12)


def test_two_neurons_solve_the_downstream_task_and_one_cannot():
    strings = downstream_inputs(6)
    torch.testing.assert_close(parts(brackets.two_neurons(6, 5), strings.z).outputs, strings.y, rtol=1e-12, atol=1e-12)
    with pytest.raises(IsolossError, match="needs two neurons and the model has 1"):
        brackets.two_neurons(4, 1)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_any_other_scale_of_the_two_neurons_is_sharper(factor):
    inputs, model = pretraining_inputs(6), brackets.two_neurons(6, 2)
    scaled = brackets.with_even_attention(model.value * factor, model.output / factor)
    found = flatness(scaled, inputs)
    assert found.loss < 1e-20
    assert found.ratio == pytest.approx((factor**2 + factor**-2) / 2, rel=1e-12)
    assert found.balance == pytest.approx(found.ratio, rel=1e-12)
    assert flatness(brackets.balanced(scaled, inputs), inputs).ratio == pytest.approx(1, rel=1e-12)


def full_hessian_trace(model, inputs):
    x = tokens_of(inputs.z)

    def loss(flat):
        pieces = torch.split(flat, [each.numel() for each in model])
        weights = Weights(*(piece.view(each.shape) for piece, each in zip(pieces, model, strict=True)))
        return (written_out(weights, x) - inputs.y).square().mean()

    return float(torch.autograd.functional.hessian(loss, torch.cat([each.flatten() for each in model])).trace())


def test_the_trace_is_the_hessians_at_zero_loss_only():
    inputs = pretraining_inputs(4)
    features = brackets.random_features(inputs, 40, seed=1)
    for model in (features, brackets.two_neurons(4, 3)):
        found = flatness(model, inputs)
        assert found.loss < 1e-20
        assert found.trace == pytest.approx(full_hessian_trace(model, inputs), rel=1e-9)
        assert found.trace == pytest.approx(hessian_trace(model, inputs), rel=1e-9)
    other = random_model(4)
    assert hessian_trace(other, inputs) == pytest.approx(full_hessian_trace(other, inputs), rel=1e-10)
    assert abs(flatness(other, inputs).trace / hessian_trace(other, inputs) - 1) > 0.01


@pytest.mark.parametrize("length", [4, 6, 8])
def test_four_neurons_on_their_kinks(length):
    inputs, model = pretraining_inputs(length), brackets.on_the_kink(length)
    found = flatness(model, inputs)
    assert found.loss < 1e-20
    assert found.ratio == pytest.approx(1, rel=1e-12)
    assert found.kink == 1
    assert flatness(model, inputs, count_kink=True).ratio == pytest.approx(2, rel=1e-12)
    # the paper's conditions, written out
    h, u = inputs.z / length, model.output
    reads = h @ model.value.T
    scale = float(reads.abs().max())
    active = reads > 1e-9 * scale
    expected = u.abs() * h.norm(dim=1, keepdim=True)
    assert (reads - expected)[active].abs().max() < 1e-12 * scale  # (3)
    for i, j in itertools.product(range(4), repeat=2):
        if u[i] > 0 > u[j]:
            assert (reads[:, i] * reads[:, j]).max() < 1e-12 * scale**2  # (4)
    first = model.value[:, :length]
    assert (first - first.mean(dim=1, keepdim=True)).abs().max() > 0.1 * scale


def test_random_features_solve_it_from_the_predicted_width_on():
    inputs = pretraining_inputs(6)
    width = brackets.full_width(6)
    assert width == 6 * 20 + 12
    model = brackets.random_features(inputs, width, seed=2)
    assert flatness(model, inputs).loss < 1e-9
    wide = brackets.random_features(inputs, 200, seed=2)
    found = flatness(wide, inputs)
    assert found.loss < 1e-20
    # least norm: by the normal equations of all inputs
    features = (inputs.z / 6 @ wide.value.T).relu() / 200
    expected = features.T @ torch.linalg.pinv(features @ features.T, rtol=1e-12, hermitian=True) @ inputs.y
    torch.testing.assert_close(wide.output, expected, rtol=1e-6, atol=1e-6)
    assert abs(float(wide.value.square().mean()) / 6 - 1) < 4 * math.sqrt(2 / wide.value.numel())
    with pytest.raises(IsolossError, match="the width is 131; random features fit every input of 6 from 132 on"):
        brackets.random_features(inputs, 131, seed=2)


def test_losses_by_width_are_least_squares():
    inputs = pretraining_inputs(4)
    losses = brackets.losses_by_width(inputs, seed=5)
    assert len(losses) == brackets.full_width(4) + 1
    value = brackets.random_features(inputs, brackets.full_width(4), seed=5).value
    for width in (0, 1, 7, 20, 31):
        features = (inputs.z @ value[:width].T).relu()
        left = inputs.y - features @ torch.linalg.pinv(features) @ inputs.y
        assert float(losses[width]) == pytest.approx(float(left.square().mean()), rel=1e-8)
    assert losses[-2] > 1e-7
    assert losses[-1] == 0


def test_balancing_is_the_best_scaling_of_every_neuron():
    inputs = pretraining_inputs(4)
    model = brackets.random_features(inputs, 40, seed=0)
    better = brackets.balanced(model, inputs)
    torch.testing.assert_close(parts(better, inputs.z).outputs, inputs.y, rtol=0, atol=1e-9)
    least = flatness(better, inputs)
    idle = brackets.two_neurons(4, 3)
    assert torch.equal(brackets.balanced(idle, inputs).value[2], idle.value[2])
    assert least.trace < flatness(model, inputs).trace
    assert least.cancellation == pytest.approx(flatness(model, inputs).cancellation, rel=1e-9)
    draws = torch.Generator().manual_seed(0)
    for _ in range(5):
        scale = (0.1 * torch.randn(40, generator=draws, dtype=torch.float64)).exp()
        other = brackets.with_even_attention(better.value * scale[:, None], better.output / scale)
        assert flatness(other, inputs).trace > least.trace


@pytest.mark.parametrize("k", [1, 2, 5])
def test_shifted_signs_give_every_basis_vector(k):
    """The proof of Lemma G.5: a row and its shift by k + 1 add up to twice a basis vector."""
    matrix = brackets.shifted_signs(k)
    size = 2 * k + 1
    assert torch.equal(matrix[0], torch.tensor([1.0] * (k + 1) + [-1.0] * k, dtype=torch.float64))
    sums = torch.stack([matrix[i] + matrix[(i + k + 1) % size] for i in range(size)])
    assert sorted(sums.argmax(dim=1).tolist()) == list(range(size))
    assert torch.equal(sums.abs().sum(dim=1), torch.full((size,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("length", [3, 2, 12])
def test_lengths_that_are_refused(length):
    for make in (pretraining_inputs, downstream_inputs):
        with pytest.raises(IsolossError, match=f"the length is {length}; it must be 4, 6, 8, 10"):
            make(length)


def test_a_model_of_ones_own_has_the_loss_and_trace_of_the_same_weights():
    inputs, weights = pretraining_inputs(4), two_neurons(4, 2)
    theta = torch.cat([weights.value.flatten(), weights.output])

    def answers(theta, z):
        value, output = theta[:-2].view(2, -1), theta[-2:]
        return (z @ value.T / 4).relu() @ output / 2

    loss, trace = own_flatness(answers, theta, inputs)
    # the gradients of Q and K are 0 there
    assert [float(loss), float(trace)] == pytest.approx([0, flatness(weights, inputs).trace])
    with pytest.raises(IsolossError, match=r"answers have the shape \(48, 1\); it must be \(48,\)"):
        own_flatness(lambda theta, z: answers(theta, z)[:, None], theta, inputs)
