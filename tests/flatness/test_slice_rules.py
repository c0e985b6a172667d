"""Norms by the rules of slices and of gathered rows, against one plain backward pass a sequence."""

import pytest
import tiny_models
import torch
from plain_gradients import VOCAB, assert_norms, batch_of, measure
from tiny_models import VARIANTS
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from isoloss.flatness._ghost import capture
from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.flatness._ghost.rules import Layout

MODELS = [
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "Llama4ForCausalLM",
    "XLNetLMHeadModel",
    "DebertaForMaskedLM",
    "LongformerForMaskedLM",
]


@pytest.mark.parametrize(
    ("name", "variant"), [(name, VARIANTS[0]) for name in MODELS] + [(MODELS[1], variant) for variant in VARIANTS[1:]]
)
def test_norms_of_a_model_with_slices_or_time_first(name, variant):
    model = tiny_models.build(tiny_models.known()[name])
    assert tiny_models.zero(model, variant) or variant == VARIANTS[0]
    batch = batch_of(vocab=tiny_models.VOCABULARY, length=8)
    norms, expected, predictor, _ = measure(model, batch, causal=tiny_models.known()[name].causal)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-4)  # routers and norms compute in float32


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_experts_whatever_computes_them(name, way):
    model = tiny_models.build(tiny_models.known()[name], dtype=torch.float32)
    model.set_experts_implementation(way)
    batch = batch_of(vocab=tiny_models.VOCABULARY, sequences=6)
    norms, expected, predictor, _ = measure(model, batch, causal=True)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-3)


class Routed(nn.Module):
    """Experts that each get the tokens of one remainder, in an order of `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 8, 8)), nn.Parameter(torch.randn(3, 8))
        self.map, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        rows, expert = x.reshape(-1, 8), (input_ids % 3).reshape(-1)
        order = expert.argsort(stable=True)
        moved, chosen = rows[order], expert[order]
        if self.kind == "one slice for each row":
            y = (moved[:, None] @ self.weight[chosen])[:, 0] * self.bias[chosen]
        elif self.kind == "a map of all rows":  # as many as there are tokens
            y = self.norm(self.map(moved).tanh())
        elif self.kind == "an unknown function before the map":
            y = self.map(F.pad(moved, (0, 0)))
        elif self.kind == "slices of all tokens":
            every = torch.cat([rows @ self.weight[i] * self.bias[i] for i in range(3)])
            y = every[expert * len(rows) + torch.arange(len(rows))]
            y = y[order]
        elif self.kind == "a slice from behind":
            y = F.linear(moved, self.weight[-1].mT, self.bias[-1])
        back = torch.zeros_like(rows).index_add_(0, order, y).view_as(x)
        return CausalLMOutput(logits=F.linear(x + back, self.embed.weight))


ROUTED = {
    "one slice for each row": (),
    "a map of all rows": (),
    "an unknown function before the map": ("map.weight", "map.bias"),
    "slices of all tokens": (),
    "a slice from behind": (),
}


@pytest.mark.parametrize("sequences", [2, 5, 7])  # 7: as many as positions
@pytest.mark.parametrize("kind", ROUTED)
def test_rows_in_another_order_are_never_taken_for_other_sequences(kind, sequences):
    torch.manual_seed(3)
    model = Routed(kind).double()
    norms, expected, predictor, _ = measure(model, batch_of(sequences=sequences, every=True), causal=False)
    assert set(predictor.slow_parameters) == set(ROUTED[kind])
    assert_norms(norms.by_column, expected, rtol=1e-10)


def test_a_later_batch_in_which_rows_are_moved_by_an_unknown_function():
    model = Routed("an unknown function before the map").double()
    first, later = batch_of(every=True), batch_of(every=True, seed=1)
    first["input_ids"] = first["input_ids"] // 3 * 3  # one expert: the rows stay in order
    with GhostNorms(model, causal=False) as predictor:
        predictor.forward(first)
        assert predictor.slow_parameters == ()
        predictor.forward(later)
        assert set(predictor.slow_parameters) == {"map.weight", "map.bias"}


class TimeFirst(nn.Module):
    """Activations (T, B, d), with maps by einsum."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.heads, self.back = nn.Parameter(torch.randn(8, 2, 4)), nn.Parameter(torch.randn(8, 2, 4))
        self.scale, self.map, self.norm = nn.Parameter(torch.randn(2, 4)), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids.T)
        y = torch.einsum("ibh,hnd->ibnd", x, self.heads) * self.scale
        x = self.norm(x + torch.einsum("hnd,ibnd->bih", self.back, y).transpose(0, 1))
        return CausalLMOutput(logits=F.linear(self.map(x.tanh()), self.embed.weight).transpose(0, 1))


@pytest.mark.parametrize("sequences", [2, 5, 7, 14])
def test_time_first(sequences):
    torch.manual_seed(3)
    norms, expected, predictor, _ = measure(TimeFirst().double(), batch_of(sequences=sequences), causal=False)
    assert_norms(norms.by_column, expected, rtol=1e-10)
    # with as many sequences as positions no shape says which axis is which
    assert bool(predictor.slow_parameters) == (sequences == 7)


def test_owners_go_where_values_go():
    """The owners of what comes out are the marks that go in, for all ways of moving values that are followed."""
    marks = torch.arange(4.0).repeat_interleave(3)[:, None].expand(12, 4).clone().requires_grad_()
    index = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    followed, layout = capture.SequenceIds(), Layout(4, 3)

    def step(function, *args, **kwargs):
        output = function(*args, **kwargs)
        followed.follow(function, args, kwargs, output, layout)
        return output

    def check(value):
        owners = followed.get(value)
        assert owners is not None
        torch.testing.assert_close(owners.double(), value.double())

    x = step(torch.Tensor.__getitem__, marks, index)
    check(x)
    check(step(torch.Tensor.repeat_interleave, x, 2, dim=0))
    check(step(torch.Tensor.index_select, x, 0, index[:5]))
    first, second = step(torch.Tensor.chunk, x, 2, dim=-1)
    check(second)
    check(step(torch.Tensor.view, first, 3, 4, 2))
    check(step(torch.cat, [first, second], dim=0))
    check(step(torch.Tensor.sum, step(torch.Tensor.unsqueeze, x, 1), dim=1))
    check(step(torch.Tensor.__getitem__, x, (index[:3], slice(1, 3))))
    unknown = step(torch.Tensor.flip, x, 0)
    assert unknown in followed
    assert followed.get(unknown) is None
    back = step(torch.Tensor.__getitem__, x, index.argsort())
    assert back not in followed  # its shape says it again
