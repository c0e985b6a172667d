"""Norms of gradients by sequence and mean squares by weight, against plain automatic differentiation."""

import math

import pytest
import torch
from dense_curvature import MODELS, batch_of, dense_gauss_newton
from plain_gradients import packed
from scipy.linalg import hadamard
from small_models import MODELS as DEEPER
from small_models import cut, rows
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness import diagonal_fisher, per_sequence_grad_norms
from isoloss.flatness._ghost import controls


@pytest.mark.parametrize("name", DEEPER)
def test_norms_are_those_of_a_loop_over_sequences(name):
    build, causal = DEEPER[name]
    model = build(vocab=5)
    batch = rows(5, 6, 5, predicted=((1,), (2, 4), (), (1, 2, 3, 5)))
    found = per_sequence_grad_norms(model, cut(batch, [3, 2]))
    expected = []
    for row in range(5):
        one = {key: value[row, None] for key, value in batch.items()}
        labels = one.pop("labels")[0]
        logits = model(**one).logits[0]
        predicted = (labels != -100).nonzero()[:, 0]
        if not len(predicted):
            expected.append(math.nan)
            continue
        loss = nn.functional.cross_entropy(logits[predicted - int(causal)], labels[predicted])
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        expected.append(math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None)))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), equal_nan=True, rtol=1e-9, atol=0)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert len(per_sequence_grad_norms(model, cut(rows(1, 6, 5), [1]))) == 1
    with pytest.raises(IsolossError, match="there are no batches"):
        per_sequence_grad_norms(model, [])


@pytest.mark.parametrize("name", ["windows", "bert", "gpt2, sdpa"])
def test_the_diagonal_is_that_of_the_fisher_with_all_labels_enumerated(name, monkeypatch):
    """Rows of a Hadamard matrix are orthogonal, so that 16 of them integrate the signs of up to 16 logits out."""
    build, causal = MODELS[name]
    model, batches = build(), [batch_of(4, seed=0), batch_of(3, seed=1)]
    signs = torch.from_numpy(hadamard(16))

    def chosen(streams, device, seed, *, copies=1):
        return packed([signs[probe][:count] for count, (_, _, probe) in streams], copies)

    monkeypatch.setattr(controls, "packed_probes", chosen)
    found, trace = diagonal_fisher(model, batches, num_probes=16, causal=causal)
    parameters = dict(model.named_parameters())
    assert list(found) == list(parameters)  # tied ones once
    dense = dense_gauss_newton(model, batches, causal=causal).diagonal().split([p.numel() for p in parameters.values()])
    for (key, entries), expected in zip(found.items(), dense, strict=True):
        torch.testing.assert_close(entries, expected.view(parameters[key].shape), rtol=1e-8, atol=1e-12)
        assert trace.by_parameter[key] == pytest.approx(float(expected.sum()), rel=1e-8, abs=1e-12)


def test_the_error_of_the_sum_is_over_documents():
    build, _ = MODELS["windows"]
    batch = batch_of(12)
    _, trace = diagonal_fisher(build(), [{**batch, "documents": torch.arange(12) // 3}], causal=False)
    assert (trace.samples, trace.details["clusters"], len(trace.influence)) == (4, "documents", 4)
    assert trace.stderr > 0
