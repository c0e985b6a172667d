"""Where positions are selected, in models whose weights or units hide that positions meet: the trace by parameter
against enumeration of all labels by plain automatic differentiation in float64."""

import functools
import itertools
import math
import re
import types

import pytest
import torch
from plain_gradients import ARCHITECTURES, batch_of, build, check_norms, packed
from small_models import exact
from torch import nn

from isoloss.flatness import fisher_trace
from isoloss.flatness._ghost import controls, engine
from isoloss.flatness._ghost.engine import GhostNorms

VOCAB = 4

# the outputs of attention, of feed-forward blocks and of the head, in all layers
ZEROED = {
    "attention": r"attention\.(output\.)?dense\.|attn\.(c_proj|out_proj)\.|out_lin\.|o_proj\.",
    "feed-forward": (
        r"(?<!attention\.)output\.dense\.|ffn_output\.|lin2\.|mlp\.c_proj\.|fc2\.|dense_4h_to_h\.|down_proj\."
    ),
    "head": r"lm_head\.|predictions\.decoder\.|vocab_projector\.|embed_out\.",
}


@functools.cache
def vectors(count):
    return torch.tensor(list(itertools.product((-1, 1), repeat=count)))


@pytest.fixture
def all_signs(monkeypatch):
    """Let probe i of each sequence have the i-th of all sign vectors, so that the mean over probes is exact."""

    def signs(streams, device, seed, *, copies=1):
        return packed([vectors(count)[name[-1]] for count, name in streams], copies)

    monkeypatch.setattr(controls, "packed_probes", signs)


def assert_exact(model, batch, *, causal, vocab=VOCAB, rtol=1e-9, reference=None):
    """The traces are the enumerated labels'; return where positions are selected, and what takes the slow path."""
    found = fisher_trace(model, [batch], num_probes=2**vocab, causal=causal)
    _, split = exact(reference or model, batch, causal=causal)
    torch.testing.assert_close(
        torch.tensor(list(found.by_parameter.values()), dtype=torch.float64), split, rtol=rtol, atol=rtol * 1e-3
    )
    return found.details["positions_selected"], found.details["parameters_by_autograd"]


def sentences(causal):
    """Three sequences that predict one position each."""
    tokens = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(1))
    labels = torch.full_like(tokens, -100)
    for row, position in enumerate((2, 6, 4)):
        labels[row, position] = tokens[row, position]
    return {"input_ids": tokens, "labels": labels}


def zero(model, pattern):
    """Set the parameters to 0 whose names match."""
    found = [value for name, value in model.named_parameters() if re.search(pattern, name)]
    assert found
    with torch.no_grad():
        for value in found:
            value.zero_()
    return model


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, "attention") for name in ("bert", "albert", "gpt-neox", "qwen3")),
        *(("opt", "feed-forward"), ("gpt2", "head")),
    ],
)
def test_outputs_that_are_zero_hide_nothing(name, part, all_signs):
    causal, wide = ARCHITECTURES[name][3:]
    selected = []
    for pattern in ("^$", ZEROED[part]):
        model = build(name, tied=False, vocab=VOCAB)
        model = model if pattern == "^$" else zero(model, pattern)
        selected.append(assert_exact(model, sentences(causal), causal=causal, rtol=1e-9 if wide else 1e-5))
    assert selected[0] == selected[1] != ("after the head", [])


class Gate(nn.Module):
    """What a block's output goes through before it is added, and a parameter that shuts it."""

    def __init__(self, start, function):
        super().__init__()
        self.parameter, self.function = nn.Parameter(torch.tensor(start)), function

    def forward(self, x, y):
        return x + self.function(self.parameter, y)


GATES = {
    "ReZero (Bachlechner et al. 2020)": lambda: Gate([0.0], torch.mul),
    "LayerScale": lambda: Gate([0.0] * 8, torch.mul),
    "saturated": lambda: Gate([-1000.0] * 8, lambda bias, y: torch.sigmoid(y + bias) * y),
    "dead": lambda: Gate([-1000.0] * 8, lambda bias, y: torch.relu(y + bias)),
}


class Block(nn.Module):
    """Attention and a feed-forward block, each of whose outputs goes through `gate` before it is added."""

    def __init__(self, gate):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.enter, self.leave = nn.Linear(8, 12), nn.Linear(12, 8)
        self.gate = gate

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        x = self.gate(x, self.out(nn.functional.scaled_dot_product_attention(query, key, value)))
        return self.gate(x, self.leave(torch.relu(self.enter(x))))


class Gated(nn.Module):
    """A masked language model of two blocks."""

    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList([Block(gate()), Block(gate())])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return types.SimpleNamespace(logits=self.head(x))


@pytest.mark.parametrize("gate", GATES)
def test_gates_that_are_shut_hide_nothing(gate, all_signs):
    assert assert_exact(Gated(GATES[gate]).double(), sentences(False), causal=False) == ("before blocks.1.out", [])


class Lora(nn.Module):
    """A frozen linear map with the update B A, B = 0 (Hu et al. 2022)."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 2, bias=False)
        self.b = nn.Linear(2, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


def test_adapters_at_their_start_hide_nothing(all_signs):
    model = Gated(lambda: Gate([1.0], torch.mul))
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.zero_()
            block.out, block.leave = Lora(block.out), Lora(block.leave)
    place, slow = assert_exact(model.double(), sentences(False), causal=False)
    assert place.startswith("before blocks.1.out.")
    assert slow == []


class Moved(nn.Module):
    """A term for each position behind the last mixing, times a gain of zero; as many positions as are selected."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)
        self.places = nn.Parameter(torch.randn(1, 8, 8))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids):
        x = self.mix(self.embed(input_ids).cumsum(dim=1))
        return types.SimpleNamespace(logits=self.head(torch.tanh(x + self.gain * self.places)))


def test_what_belongs_to_the_positions_of_a_sequence_is_not_given_to_the_gathered_ones():
    """Two sequences of eight positions have eight with an odd number."""
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    predictor, *_ = check_norms(Moved().double(), {"input_ids": tokens, "labels": tokens})
    assert str(predictor.selection) == "before head"


class Veiled(nn.Module):
    """Positions mix behind the first linear map, but the mean goes through a gain of zero and loses what is NaN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)
        self.gain = nn.Parameter(torch.zeros(8))

    def forward(self, input_ids):
        x = self.mix(self.embed(input_ids))
        mean = torch.nan_to_num(x).mean(dim=1, keepdim=True).expand_as(x)
        return types.SimpleNamespace(logits=self.head(torch.tanh(x + self.gain * mean)))


def test_a_wrong_place_is_seen_in_gradients_of_all_positions(all_signs, monkeypatch):
    """No search can see it by the values, and no gradient that is taken behind the place."""
    model, selected = Veiled().double(), []
    check = GhostNorms._check
    monkeypatch.setattr(GhostNorms, "_check", lambda self, b: (selected.append(str(self.selection)), check(self, b)))
    assert assert_exact(model, sentences(False), causal=False) == ("after the head", [])
    assert selected == ["before mix"]  # what the search takes it for


@pytest.mark.parametrize("size", [1, 4, 5, 100])
def test_results_are_compared_whatever_the_blocks(size, monkeypatch):
    monkeypatch.setattr(engine, "_PART", size)
    first = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for place in range(20):
        for change, is_same in ((0.0, True), (1e-14, True), (1e-3, False), (math.nan, False)):
            second = first.clone()
            second.view(-1)[place] += change
            assert engine.agree(first, second) is engine.agree(second, first) is is_same
    assert not engine.agree(first, first[:, :4])


def test_the_search_leaves_weights_and_random_state_as_they_are():
    model = zero(build("gpt2"), ZEROED["attention"])
    weights = {name: (value, value.clone(), value._version) for name, value in model.named_parameters()}
    state = torch.get_rng_state()
    with GhostNorms(model, causal=True) as predictor:
        predictor.forward(batch_of())
        assert str(predictor.selection) == "before transformer.h.1.attn.c_proj"
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.named_parameters():
        kept, copy, version = weights[name]
        assert value is kept
        assert torch.equal(value, copy)
        assert value._version == version


class Drawing(nn.Module):
    """Draws random numbers in each forward pass, as attention by random hashes does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        x = self.mix(self.embed(input_ids).cumsum(dim=1) + torch.randn(8, dtype=torch.float64))
        return types.SimpleNamespace(logits=self.head(x.tanh()))


def test_a_model_that_draws_random_numbers_is_checked_on_the_same_ones():
    with GhostNorms(Drawing().double().eval(), causal=False) as predictor:
        predictor.forward(batch_of(vocab=VOCAB))
    assert str(predictor.selection) == "before mix"
    assert predictor.slow_parameters == ()
