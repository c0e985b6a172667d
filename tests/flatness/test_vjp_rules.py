"""Norms by rule of every use of a parameter, against one plain backward pass a sequence."""

import pytest
import torch
from plain_gradients import VOCAB, assert_norms, batch_of, measure, reference
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from isoloss.errors import IsolossError
from isoloss.flatness._ghost.engine import GhostNorms


class Recurrent(nn.Module):
    """An LSTM language model in plain torch: the embedding has a padding row, the decoder may be tied."""

    def __init__(self, *, tied, bidirectional=False, batch_first=True, projected=0, bias=True):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, 8, padding_idx=1)
        self.lstm = nn.LSTM(
            8, 6, num_layers=2, batch_first=batch_first, bidirectional=bidirectional, proj_size=projected, bias=bias
        )
        self.lift = nn.Linear((projected or 6) * (2 if bidirectional else 1), 8)
        self.decoder = nn.Linear(8, VOCAB)
        if tied:
            self.decoder.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        x = self.lstm(x if self.batch_first else x.transpose(0, 1))[0]
        return CausalLMOutput(logits=self.decoder(self.lift(x if self.batch_first else x.transpose(0, 1))))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"batch_first": False}, {"projected": 3, "bidirectional": True}, {"bias": False}],
    ids=str,
)
def test_norms_of_an_lstm(tied, options):
    torch.manual_seed(2)
    model = Recurrent(tied=tied, **options).double()
    norms, expected, predictor, _ = measure(model, batch_of(), causal=True)
    assert predictor.slow_parameters == ()
    assert str(predictor.selection) == "before lift"
    assert_norms(norms.by_column, expected, rtol=1e-10)


class Odd(nn.Module):
    """RuleContext of parameters that common models lack; `kind` says which."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, 8)
        self.map = nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.positions = nn.Parameter(torch.randn(1, 16, 8))
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.expert = nn.Parameter(torch.randn(2, 8, 8))
        self.never = nn.Parameter(torch.randn(3))
        self.table = nn.Embedding(16, 8)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        if self.kind == "in place":
            x += self.table(torch.arange(x.shape[1])[None])
            x *= 0.5
            x = self.map(x)
            x += 1.0
            x.tanh_()
        elif self.kind == "raw positions":
            x = self.norm(x + self.positions[:, : x.shape[1]])
        elif self.kind == "table without batch":
            x = self.norm(x + self.table(torch.arange(x.shape[1])))
        elif self.kind == "whole raw positions":
            x = self.norm(torch.nn.functional.pad(x, (0, 0, 0, 16 - x.shape[1])) + self.positions)[:, : x.shape[1]]
        elif self.kind == "scalar":
            x = self.norm(x) * self.temperature
        elif self.kind == "experts":
            x = self.norm(x @ self.expert[0] + x.tanh() @ self.expert[1])
        elif self.kind == "time first":
            x = self.map(self.norm(x).transpose(0, 1)).tanh().transpose(0, 1)
        elif self.kind == "mixed over sequences":
            x = self.map(x.transpose(0, 1).reshape(-1, 8)).reshape(x.shape[1], -1, 8).transpose(0, 1).tanh()
        elif self.kind == "product of weights":
            x = x @ (self.map.weight @ self.map.weight)
        elif self.kind == "no gradient":
            with torch.no_grad():
                scale = self.map(x).exp()
            x = x * scale
        elif self.kind == "keywords":
            x = torch.nn.functional.linear(x, weight=self.map.weight, bias=self.map.bias)
        elif self.kind == "logits scaled in place":
            return CausalLMOutput(logits=torch.nn.functional.linear(x, self.embed.weight).mul_(3.0))
        elif self.kind == "scaled logits":
            return CausalLMOutput(logits=3.0 * (self.map(x) @ self.embed.weight.t()))
        return CausalLMOutput(logits=torch.nn.functional.linear(x, self.embed.weight))


ODD = {
    "in place": (),
    "raw positions": ("positions",),
    "whole raw positions": (),
    "table without batch": (),
    "scalar": (),
    "experts": (),
    "time first": (),
    "mixed over sequences": ("map.weight", "map.bias"),
    "product of weights": ("map.weight",),
    "no gradient": ("map.weight", "map.bias"),
    "keywords": (),
    "scaled logits": (),
    "logits scaled in place": (),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_uses_are_exact_and_only_unknown_ones_are_slow(kind):
    torch.manual_seed(3)
    model = Odd(kind).double()
    norms, expected, predictor, predictions = measure(model, batch_of(), causal=False)
    assert set(predictor.slow_parameters) == set(ODD[kind])
    assert_norms(norms.by_column, expected, rtol=1e-10)
    assert "never" in predictor.unreached
    assert "embed.weight" not in predictor.unreached
    assert (predictions.decoder is None) == ("scaled" in kind)


@pytest.mark.parametrize("known", [True, False])
def test_a_parameter_that_a_later_batch_reaches_first_is_checked(known):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 8)
            self.late = nn.Linear(8, 8)

        def forward(self, input_ids, attention_mask=None):
            x = self.embed(input_ids)
            if bool((input_ids == 39).any()):  # as many rows as sequences, but sequence b's are not in row b
                total = x.sum(dim=1).flip(0)
                mapped = self.late(total) if known else torch.einsum("bi,oi->bo", total, self.late.weight)
                x = x + mapped.flip(0)[:, None]
            return CausalLMOutput(logits=x @ self.embed.weight.T)

    model = Late().double()
    first, later = batch_of(vocab=39), batch_of()
    later["input_ids"][0, 0] = 39
    with GhostNorms(model, causal=False) as predictor:
        predictor.forward(first)
        assert predictor.slow_parameters == ()
        assert predictor.unreached == ("late.weight", "late.bias")
        predictions = predictor.forward(later)
        cotangent = torch.ones_like(predictions.logits)
        norms = predictor.squared_norms(predictions, cotangent).by_column
    assert predictor.slow_parameters == (("late.weight", "late.bias") if known else ("late.weight",))
    assert predictor.unreached == (() if known else ("late.bias",))
    assert_norms(norms, reference(model, later, cotangent, causal=False)[1], rtol=1e-10)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_whose_gradient_is_no_derivative_are_refused(options):
    model = Odd("scalar")
    model.embed = nn.Embedding(VOCAB, 8, **options)
    [(name, value)] = options.items()
    with pytest.raises(IsolossError, match=f"{name}={value}"), GhostNorms(model, causal=False) as predictor:
        predictor.forward(batch_of())
