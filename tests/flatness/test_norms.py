"""Norms through the Fisher matrix against dense matrices, and what rescaling a network does to each."""

import itertools

import pytest
import torch
from dense_curvature import VOCAB, batch_of, bert, dense_gauss_newton, flat, gpt2, windows
from plain_gradients import packed
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness import (
    fisher_rao_norm,
    norms,
    relative_flatness,
    squared_parameter_norm,
    weighted_fisher_trace,
)
from isoloss.flatness._ghost import controls
from isoloss.statistics.ratio import ratio


def test_relative_flatness_needs_a_linear_map_at_the_end_and_no_parameters():
    with pytest.raises(IsolossError, match="the logits of Windows are not the output of its last linear map"):
        relative_flatness(windows(), [batch_of(3)], causal=False)
    model = bert()
    with pytest.raises(IsolossError, match="parameters are given, but relative flatness is of the last linear map"):
        relative_flatness(model, [batch_of(3)], parameters=dict(model.named_parameters()))


def test_relative_flatness_does_not_depend_on_labels_and_on_how_many_positions_are_taken_at_a_time(monkeypatch):
    model, batches = bert(), [batch_of(4, seed=1, padded=True), batch_of(3, seed=2)]
    found = relative_flatness(model, batches)
    other_labels = [{**batch, "labels": batch["labels"].where(batch["labels"] < 0, 0)} for batch in batches]
    monkeypatch.setattr(norms, "_POSITIONS", 2)
    assert relative_flatness(model, other_labels).value == pytest.approx(found.value, rel=1e-12)


def test_relative_flatness_of_a_sure_prediction_is_near_zero_and_right():
    model, wide, batch = bert(tied=False).float(), bert(tied=False), batch_of(4)
    for each in (model, wide):
        with torch.no_grad():
            each.get_output_embeddings().bias[0] = 12
    value = relative_flatness(wide, [batch]).value
    assert value < 1e-3
    assert relative_flatness(model, [batch]).value == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(("make", "causal"), [(lambda: bert(attention="sdpa"), False), (gpt2, True)])
def test_the_weighted_trace_is_exact_over_all_signs(make, causal, monkeypatch):
    model = make()
    batch = batch_of(2)
    batch["labels"][:, 2] = -100  # one position each
    fisher = dense_gauss_newton(model, [batch], causal=causal)
    weighted = flat(dict(model.named_parameters())).square() * fisher.diagonal()
    chosen = []
    monkeypatch.setattr(controls, "packed_probes", lambda streams, *_: packed([chosen[0]] * len(streams)))
    values, splits = [], []
    for signs in itertools.product((-1, 1), repeat=VOCAB - 1):  # v and -v give the same
        chosen[:] = [torch.tensor([1, *signs])]
        found = weighted_fisher_trace(model, [batch])
        values.append(found.value)
        splits.append(list(found.by_parameter.values()))
    assert sum(values) / len(values) == pytest.approx(float(weighted.sum()), rel=1e-9)
    sizes = [p.numel() for p in model.parameters()]
    truth = torch.stack([part.sum() for part in weighted.split(sizes)])
    torch.testing.assert_close(torch.tensor(splits, dtype=torch.float64).mean(0), truth, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("measure", [fisher_rao_norm, relative_flatness])
def test_the_error_is_that_of_exact_values_by_sequence(measure):
    model, batch = bert(), batch_of(12)
    sums, counts = [], (batch["labels"] != -100).sum(dim=1)
    for row in range(12):
        one = {name: value[[row, row]] for name, value in batch.items()}
        given = {**one, "documents": torch.arange(2)}
        sums.append(measure(model, [given], causal=False).value * float(counts[row]))
    found = measure(model, [{**batch, "documents": torch.arange(12)}], causal=False)
    assert (found.value, found.stderr) == pytest.approx(ratio(sums, counts), rel=1e-9)


def test_the_squared_norm_counts_tied_parameters_once():
    model = bert()
    found = squared_parameter_norm(model)
    assert found.value == pytest.approx(float(flat(dict(model.named_parameters())).square().sum()), rel=1e-12)
    assert found.stderr == 0
    assert sum(found.by_parameter.values()) == pytest.approx(found.value, rel=1e-12)
    untied = bert(tied=False)
    # the decoder's own weight and bias
    assert squared_parameter_norm(untied).details["num_parameters"] == found.details["num_parameters"] + 5 * VOCAB


def test_what_is_refused():
    with pytest.raises(IsolossError, match="no trainable parameter"):
        squared_parameter_norm(windows().requires_grad_(False))
    model = windows()
    nn.init.constant_(model.mix.bias, float("nan"))
    with pytest.raises(IsolossError, match="not finite"):
        norms.squared_parameter_norm(model)
