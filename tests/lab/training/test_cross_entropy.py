"""Cross-entropy in chunks, against torch's on all the logits at once."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from isoloss.errors import IsolossError
from isoloss.lab.training import objectives as module
from isoloss.lab.training.objectives import linear_cross_entropy


def drawn(k=23, d=5, v=11, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    states, weight, bias = (
        (scale * torch.randn(shape, generator=generator, dtype=dtype)).requires_grad_()
        for shape in ((k, d), (v, d), (v,))
    )
    return states, weight, bias, torch.randint(0, v, (k,), generator=generator)


@pytest.mark.parametrize(
    "chunk", [1, 11 * 4, 11 * 22, 1 << 22]
)  # logits at a time: below one row, rows, all but one, all
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_and_gradients_are_torchs(monkeypatch, chunk, has_bias, dtype, tolerance):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    states, weight, bias, labels = drawn(dtype=dtype)
    inputs = [states, weight, bias] if has_bias else [states, weight]
    logits = states @ weight.T + (bias if has_bias else 0)
    expected = cross_entropy(logits, labels)
    got = linear_cross_entropy(states, weight, bias if has_bias else None, labels)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=0)
    # of three times the loss, so that the incoming gradient counts
    for ours, theirs in zip(
        torch.autograd.grad(3 * got, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 11 * 4, 1 << 22])
@pytest.mark.parametrize("num_classes", [11, 8])  # as many as there are ids, and fewer
@pytest.mark.parametrize("total", [1.0, 0.7])
def test_probabilities_as_labels(monkeypatch, chunk, num_classes, total):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    *inputs, _ = drawn()
    states, weight, bias = inputs
    q = total * torch.rand(23, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(1)
    expected = -(q * (states @ weight.T + bias).log_softmax(1)[:, :num_classes]).sum(1).mean()
    got = linear_cross_entropy(states, weight, bias, q)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(3 * got, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_large_logits_neither_overflow_nor_lose_the_label():
    states, weight, bias, labels = drawn(dtype=torch.float32, scale=100.0)  # logits of about 20,000
    got = linear_cross_entropy(states, weight, bias, labels)
    expected = cross_entropy((states.double() @ weight.double().T + bias.double()), labels)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got, [states, weight, bias]))


def test_there_is_no_second_derivative():
    states, weight, bias, labels = drawn()
    loss = linear_cross_entropy(states, weight, bias, labels)
    with pytest.raises(IsolossError, match="the loss of training has no second derivative"):
        torch.autograd.grad(loss, states, create_graph=True)
