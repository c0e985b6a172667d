"""Norms of parameters behind tensors that all sequences share, against one plain backward pass a sequence."""

import pytest
import tiny_models
import torch
from plain_gradients import DEBERTA, VOCAB, assert_norms, batch_of, make, measure, reference
from tiny_models import VARIANTS
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from isoloss.flatness._ghost.engine import GhostNorms

V3 = {**DEBERTA, "pooler_hidden_size": 16, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
CONFIGS = {
    "v3": {},
    "maps of their own": {"share_att_key": False},
    "content to position": {"share_att_key": False, "pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": ["p2c"]},
    "no norm": {"norm_rel_ebd": "none"},
    "no buckets": {"position_buckets": -1},
    "convolution": {"conv_kernel_size": 3},
    "position in the input": {"position_biased_input": True},
}
LOST = {"convolution": {"deberta.encoder.conv.conv.weight", "deberta.encoder.conv.conv.bias"}}


def deberta(**options):
    return make("DebertaV2Config", "DebertaV2ForMaskedLM", {**V3, **options})


@pytest.mark.parametrize(
    ("name", "variant"), [(name, VARIANTS[0]) for name in CONFIGS] + [("v3", variant) for variant in VARIANTS[1:]]
)
def test_deberta(name, variant):
    model = deberta(**CONFIGS[name])
    assert tiny_models.zero(model, variant) or variant == VARIANTS[0]
    norms, expected, predictor, _ = measure(model, batch_of(), causal=False)
    assert set(predictor.slow_parameters) == LOST.get(name, set())
    assert_norms(norms.by_column, expected, rtol=1e-10)


@pytest.mark.parametrize(("sequences", "length"), [(1, 6), (2, 7), (4, 8), (8, 8), (16, 4)])
def test_as_many_sequences_as_heads_or_positions(sequences, length):
    """Two heads, four or eight rows of positions, sixteen channels."""
    batch = batch_of(sequences=sequences, length=length)
    norms, expected, predictor, _ = measure(deberta(), batch, causal=False)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-10)


def test_batches_of_other_sizes():
    model, found = deberta(), []
    batches = [batch_of(sequences=sequences, length=8, seed=sequences) for sequences in (5, 2, 1, 8)]
    with GhostNorms(model, causal=False) as predictor:
        for batch in batches:
            predictions = predictor.forward(batch)
            cotangent = torch.ones_like(predictions.logits)
            found.append((batch, cotangent, predictor.squared_norms(predictions, cotangent).by_column))
        assert predictor.slow_parameters == ()
    for batch, cotangent, norms in found:
        assert_norms(norms, reference(model, batch, cotangent, causal=False)[1], rtol=1e-10)


class Sharer(nn.Module):
    """A table of positions that `kind` changes before the sequences use it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.embed, self.table = nn.Embedding(VOCAB, 8), nn.Embedding(7, 8)
        self.norm, self.rms, self.map = nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 8)
        self.gain, self.rate = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.square, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        x, places, number = self.embed(input_ids), self.table.weight, len(input_ids)
        rows = self.norm(places)
        if self.kind == "added":
            x = x + self.map(rows)
        elif self.kind == "added in place":
            x = 2.0 * x
            x += self.map(rows).tanh()[None]
        elif self.kind == "changed in place":
            rows = self.map(rows)
            rows /= 3.0
            x = x + rows.tanh_()
        elif self.kind == "looked up":
            x = x * self.rms(self.table(torch.arange(7)))
        elif self.kind == "used twice":
            x = x * rows + self.map(rows)[None] + (self.embed.weight[:1] * 2.0)[None]
        elif self.kind == "two of them":
            x = x + (self.map(rows) * self.gain + rows).softmax(dim=-1) * self.rate.sigmoid()
        elif self.kind == "as matrices":
            keys = self.map(rows).view(7, 2, 4).transpose(0, 1)
            scores = x.view(number, 7, 2, 4).transpose(1, 2) @ keys.mT
            x = x + (scores.tanh() @ (keys @ keys.mT @ keys)).transpose(1, 2).reshape(number, 7, 8)
        elif self.kind == "expanded":
            x = x + self.map(rows)[None, 1:].expand(number, -1, -1).sum(dim=1, keepdim=True)
        elif self.kind == "expanded like":
            x = x.tanh() * self.map(rows)[None].expand_as(x)
        elif self.kind == "repeated":
            keys = self.map(rows).view(7, 2, 4).permute(1, 0, 2).repeat(number, 1, 1)
            x = x + (x.view(number, 7, 2, 4).transpose(1, 2).flatten(0, 1) * keys).view(number, 2, 7, 4).transpose(
                1, 2
            ).flatten(2)
        elif self.kind == "a rate":
            x = x * (-torch.exp(self.rate)).exp()
        elif self.kind == "repeated for heads":
            keys = self.map(rows)[None].repeat(2, 1, 1)
            x = x + (x[:, None].tanh() * keys).sum(dim=1)
        elif self.kind == "an unknown function":
            x = x + self.map(rows.flip(0))
        elif self.kind == "rows of all sequences":
            x = self.map(rows)[input_ids.reshape(-1) % 7].view_as(x)
        elif self.kind == "a packed lookup":
            x = self.embed(torch.cat([input_ids.reshape(1, -1), input_ids[:1]], dim=1))[:, :-7].view(x.shape)
        elif self.kind == "a product of weights":
            x = F.linear(x, self.square @ self.square)
        elif self.kind == "without gradient":
            with torch.no_grad():
                rows = self.map(rows)
            x = x + rows
        return CausalLMOutput(logits=self.head(x))


KINDS = {
    "added": (),
    "added in place": (),
    "changed in place": (),
    "looked up": (),
    "used twice": (),
    "two of them": (),
    "as matrices": (),
    "expanded": (),
    "expanded like": (),
    "repeated": (),
    "a rate": (),
    "repeated for heads": ("table.weight", "norm.weight", "norm.bias", "map.weight", "map.bias"),
    "an unknown function": ("table.weight", "norm.weight", "norm.bias", "map.weight", "map.bias"),
    "rows of all sequences": ("table.weight", "norm.weight", "norm.bias", "map.weight", "map.bias"),
    "a packed lookup": ("embed.weight",),
    "a product of weights": ("square",),
    "without gradient": ("table.weight", "norm.weight", "norm.bias", "map.weight", "map.bias"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_sequences_share(kind):
    for sequences in (1, 2, 5, 7, 8):  # as many as heads, as positions, as channels
        model = Sharer(kind).double()
        norms, expected, predictor, _ = measure(model, batch_of(sequences=sequences, every=True), causal=False)
        assert_norms(norms.by_column, expected, rtol=1e-10)
        if sequences > 1:  # one alone shares with no other
            assert set(predictor.slow_parameters) == set(KINDS[kind])
