"""Norms through the Fisher matrix against dense matrices, and what rescaling a network does to each."""

import itertools
import math

import pytest
import torch
from dense_curvature import VOCAB, batch_of, bert, dense_gauss_newton, dense_hessian, flat, gpt2, windows
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

CASES = [(lambda: bert(tied=False), False), (lambda: bert(attention="sdpa"), False), (gpt2, True)]


@pytest.mark.parametrize(("make", "causal"), CASES)
def test_the_fisher_rao_norm_is_the_quadratic_form(make, causal):
    model, batches = make(), [batch_of(4, seed=1, padded=True), batch_of(3, seed=2)]
    fisher = dense_gauss_newton(model, batches, causal=causal)
    theta = flat(dict(model.named_parameters()))
    found = fisher_rao_norm(model, batches)
    assert found.value == pytest.approx(float(theta @ fisher @ theta), rel=1e-9)
    assert (found.samples, found.num_predictions, found.num_probes) == (7, 11, 0)
    first = {name: p for name, p in model.named_parameters() if "wte" in name or "embeddings" in name}
    fisher = dense_gauss_newton(model, batches, causal=causal, parameters=first)
    found = fisher_rao_norm(model, batches, parameters=first)
    assert found.value == pytest.approx(float(flat(first) @ fisher @ flat(first)), rel=1e-9)


def of_decoder(model, batches, *, causal):
    """sum_{s,s'} <w_s, w_s'> Tr H_ss' by the dense Hessian of the decoder's weight, untied from the embeddings."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    (name,) = (name for name, value in model.named_parameters() if value is head.weight)
    hessian = dense_hessian(model, batches, causal=causal, parameters={name: head.weight})
    weight = head.weight.detach()
    return float(torch.einsum("sd,td,sete->", weight, weight, hessian.view(*weight.shape, *weight.shape)))


@pytest.mark.parametrize(("make", "causal"), CASES)
def test_relative_flatness_is_the_sum_over_blocks_of_the_decoders_hessian(make, causal, monkeypatch):
    model, batches = make(), [batch_of(4, seed=1, padded=True), batch_of(3, seed=2)]
    found = relative_flatness(model, batches)
    assert found.value == pytest.approx(of_decoder(make(), batches, causal=causal), rel=1e-9)
    assert (found.samples, found.num_predictions, found.num_probes) == (7, 11, 0)
    other_labels = [{**batch, "labels": batch["labels"].where(batch["labels"] < 0, 0)} for batch in batches]
    monkeypatch.setattr(norms, "_POSITIONS", 2)
    assert relative_flatness(model, other_labels).value == pytest.approx(found.value, rel=1e-12)


def test_relative_flatness_of_a_sure_prediction_is_near_zero_and_right():
    model, batch = bert(tied=False).float(), batch_of(4)
    with torch.no_grad():
        model.get_output_embeddings().bias[0] = 12
    value = of_decoder(bert_of(model), [batch], causal=False)
    assert value < 1e-3
    assert relative_flatness(model, [batch]).value == pytest.approx(value, rel=1e-4)


def bert_of(model):
    """The same in float64."""
    other = bert(tied=False)
    other.load_state_dict(model.state_dict())
    return other


def test_relative_flatness_needs_a_linear_map_at_the_end_and_no_parameters():
    with pytest.raises(IsolossError, match="the logits of Windows are not the output of its last linear map"):
        relative_flatness(windows(), [batch_of(3)], causal=False)
    model = bert()
    with pytest.raises(IsolossError, match="parameters are given, but relative flatness is of the last linear map"):
        relative_flatness(model, [batch_of(3)], parameters=dict(model.named_parameters()))


@pytest.mark.parametrize(("make", "causal"), CASES)
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


def test_several_positions_and_probes_agree_with_the_dense_diagonal():
    model, batch = windows(), batch_of(16)
    fisher = dense_gauss_newton(model, [batch], causal=False)
    truth = float((flat(dict(model.named_parameters())).square() * fisher.diagonal()).sum())
    # the inputs are the same in every copy, so only the probes vary
    copies = {**{name: value.repeat(20, 1) for name, value in batch.items()}, "documents": torch.arange(320) // 16}
    found = weighted_fisher_trace(model, [copies], causal=False, num_probes=3)
    assert abs(found.value - truth) < 4 * found.stderr
    assert found.stderr < 0.25 * truth / math.sqrt(20)
    assert (found.samples, found.num_predictions, found.num_probes) == (20, 20 * 24, 3)


def test_the_cut_into_batches_does_not_count():
    model, batch = bert(), batch_of(9)
    parts = [dict(zip(batch, part, strict=True)) for part in zip(*(v.split(4) for v in batch.values()), strict=True)]
    for measure in (weighted_fisher_trace, fisher_rao_norm, relative_flatness):
        whole, cut = (measure(model, batches, causal=False) for batches in ([batch], parts))
        assert cut.value == pytest.approx(whole.value, rel=1e-12)
        assert cut.stderr == pytest.approx(whole.stderr, rel=1e-10)
        assert measure(model, parts, causal=False, num_sequences=5).samples == 5
        for number, part in enumerate(parts):
            part["documents"] = torch.full((len(part["labels"]),), number)
        assert measure(model, parts, causal=False).samples == 3
        for part in parts:
            del part["documents"]


def test_the_error_is_the_spread_over_fresh_inputs_and_probes():
    found = [weighted_fisher_trace(windows(), [batch_of(16, seed=r)], causal=False, seed=r) for r in range(30)]
    spread = float(torch.tensor([e.value for e in found]).double().std())
    # a standard deviation over 30 repetitions is right to 13 %
    assert 0.6 < spread / math.sqrt(sum(e.stderr**2 for e in found) / 30) < 1.4


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
    with pytest.raises(IsolossError, match="num_probes is 0"):
        weighted_fisher_trace(windows(), [batch_of(3)], causal=False, num_probes=0)
    with pytest.raises(IsolossError, match="no trainable parameter"):
        squared_parameter_norm(windows().requires_grad_(False))
    model = windows()
    nn.init.constant_(model.mix.bias, float("nan"))
    with pytest.raises(IsolossError, match="not finite"):
        norms.squared_parameter_norm(model)
