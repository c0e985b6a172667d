"""Squared gradient norms by sequence, of every architecture and every use of a parameter, by plain backward passes."""

import gc
import weakref

import peft
import pytest
import tiny_models
import torch
from plain_gradients import ARCHITECTURES, DEBERTA, VOCAB, assert_norms, batch_of, build, check_norms, make, reference
from tiny_models import VARIANTS
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from isoloss.errors import IsolossError
from isoloss.flatness._ghost import capture
from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.flatness._ghost.factors import Dense, Outer
from isoloss.flatness._ghost.rules import Layout

# peft asks transformers by a name that it is about to drop
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.slow,
]

# --- architectures ---------------------------------------------------------------------------------------------------

# where positions are selected: in the last of two layers, at what comes after its attention
_GATHERED = {
    "bert": "bert.encoder.layer.1.attention.output.dense",
    "roberta": "roberta.encoder.layer.1.attention.output.dense",
    "roberta-prelayernorm": "roberta_prelayernorm.encoder.layer.1.attention.output.dense",
    "distilbert": "distilbert.transformer.layer.1.attention.out_lin",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
    "electra": "electra.encoder.layer.1.attention.output.dense",
    "gpt2": "transformer.h.1.attn.c_proj",
    "opt": "model.decoder.layers.1.self_attn.out_proj",
    "gpt-neox": "gpt_neox.layers.1.mlp.dense_h_to_4h",  # at the same time as the attention
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma"), "model.layers.1.self_attn.o_proj"),
}


@pytest.mark.parametrize(
    ("name", "tied", "dtype"),
    [
        *((name, True, torch.float64) for name in ARCHITECTURES),
        *((name, False, torch.float64) for name in ("bert", "gpt2")),
        *((name, True, torch.float32) for name in ("bert", "qwen3", "gemma")),
    ],
)
def test_architectures(name, tied, dtype):
    causal, wide = ARCHITECTURES[name][3:]
    model = build(name, tied=tied, dtype=dtype)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    # some norms of transformers compute in float32 whatever the model's dtype
    rtol = 1e-10 if wide and dtype == torch.float64 else 1e-5
    predictor, _, norms = check_norms(model, batch_of(), causal=causal, rtol=rtol)
    assert str(predictor.selection) == f"before {_GATHERED[name]}"
    assert (norms[3] == 0).all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_norms_in_bfloat16_are_near_those_of_plain_gradients(name):
    model, causal = build(name, dtype=torch.bfloat16), ARCHITECTURES[name][3]
    with GhostNorms(model, causal=causal) as predictor:
        predictions = predictor.forward(batch_of())
        cotangent = torch.ones_like(predictions.logits)
        norms = predictor.squared_norms(predictions, cotangent).by_column
        assert predictor.slow_parameters == ()
    # a plain gradient is rounded to 8 bits after sums that this one takes in float32
    expected = reference(model, batch_of(), cotangent, causal=causal)[1]
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms.sum(1), expected.sum(1), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["roberta", "opt", "gpt2"])
def test_every_position_predicted(name):
    causal = ARCHITECTURES[name][3]
    check_norms(build(name), batch_of(every=True, causal=causal), causal=causal)


V3 = {"pooler_hidden_size": 16, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}


def deberta(kind="V2", **options):
    return make(f"Deberta{kind}Config", f"Deberta{kind}ForMaskedLM", {**DEBERTA, **options})


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ({"share_att_key": False}, ()),
        ({"share_att_key": False, "pos_att_type": ["c2p"]}, ()),
        ({"pos_att_type": ["p2c"]}, ()),
        ({"norm_rel_ebd": "none"}, ()),
        ({"position_buckets": -1}, ()),
        ({"conv_kernel_size": 3}, ("deberta.encoder.conv.conv.weight", "deberta.encoder.conv.conv.bias")),
        ({"position_biased_input": True}, ()),
    ],
    ids=str,
)
def test_positions_that_sequences_share(options, slow):
    check_norms(deberta(**V3 | options), batch_of(), slow=slow)


def test_deberta_of_other_versions():
    check_norms(deberta(pooler_hidden_size=16), batch_of())
    check_norms(deberta("", pooler_hidden_size=16), batch_of(), rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_outputs_that_are_zero_behind_shared_positions(variant):
    model = deberta(**V3)
    assert tiny_models.zero(model, variant)
    check_norms(model, batch_of())


@pytest.mark.parametrize("model", [lambda: deberta(**V3), lambda: build("bert")], ids=["deberta", "bert"])
@pytest.mark.parametrize(("sequences", "length"), [(1, 6), (2, 7), (4, 8), (6, 4), (8, 8), (16, 4)])
def test_any_number_of_sequences(model, sequences, length):
    """Also where it equals the number of tokens, of heads, of channels, or of the sequences that were checked."""
    check_norms(model(), batch_of(sequences=sequences, length=length))


def test_batches_of_other_sizes():
    check_norms(deberta(**V3), *(batch_of(sequences=n, length=8, seed=n) for n in (5, 2, 1, 8)))


# experts, latent attention, time before sequences, windows; and a kernel that returns a leaf of its own
SLICED = [
    *("MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM", "Llama4ForCausalLM"),
    *("XLNetLMHeadModel", "LongformerForMaskedLM"),
]


@pytest.mark.parametrize(
    ("name", "variant"), [(name, VARIANTS[0]) for name in SLICED] + [("GptOssForCausalLM", v) for v in VARIANTS[1:]]
)
def test_models_with_slices_or_time_first(name, variant):
    architecture = tiny_models.known()[name]
    model = tiny_models.build(architecture)
    assert tiny_models.zero(model, variant) or variant == VARIANTS[0]
    batch = batch_of(vocab=tiny_models.VOCABULARY, length=8)
    check_norms(model, batch, causal=architecture.causal, rtol=1e-4)  # routers and norms compute in float32


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_experts_whatever_computes_them(name, way):
    model = tiny_models.build(tiny_models.known()[name], dtype=torch.float32)
    model.set_experts_implementation(way)
    check_norms(model, batch_of(vocab=tiny_models.VOCABULARY, sequences=6), causal=True, rtol=1e-3)


class Recurrent(nn.Module):
    """An LSTM language model in plain torch: the embedding has a padding row, the decoder may be tied."""

    def __init__(self, *, tied, bidirectional=False, batch_first=True, projected=0, bias=True):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(VOCAB, 8, padding_idx=1)
        options = {"bidirectional": bidirectional, "proj_size": projected, "bias": bias, "batch_first": batch_first}
        self.lstm = nn.LSTM(8, 6, num_layers=2, **options)
        self.lift = nn.Linear((projected or 6) * (2 if bidirectional else 1), 8)
        self.decoder = nn.Linear(8, VOCAB)
        if tied:
            self.decoder.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        x = self.lstm(x if self.batch_first else x.transpose(0, 1))[0]
        return CausalLMOutput(logits=self.decoder(self.lift(x if self.batch_first else x.transpose(0, 1))))


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"tied": False, "bidirectional": True},
        {"tied": True, "batch_first": False},
        {"tied": False, "projected": 3, "bidirectional": True},
        {"tied": True, "bias": False},
    ],
    ids=str,
)
def test_lstms(options):
    torch.manual_seed(2)
    predictor, *_ = check_norms(Recurrent(**options).double(), batch_of(), causal=True)
    assert str(predictor.selection) == "before lift"


# --- uses of a parameter ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A language model with a tied head; `use` says what becomes of the embedded tokens before it."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(3)
        self.use = use
        self.embed, self.table = nn.Embedding(VOCAB, 8), nn.Embedding(7, 8)
        self.map, self.norm, self.rms = nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.gain, self.rate = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.positions, self.temperature = nn.Parameter(torch.randn(1, 16, 8)), nn.Parameter(torch.tensor(1.3))
        self.square, self.never = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3))
        self.experts, self.biases = nn.Parameter(torch.randn(3, 8, 8)), nn.Parameter(torch.randn(3, 8))
        self.heads, self.back = nn.Parameter(torch.randn(8, 2, 4)), nn.Parameter(torch.randn(8, 2, 4))
        self.scale = nn.Parameter(torch.randn(2, 4))

    def forward(self, input_ids, attention_mask=None):
        x = self.use(self, self.embed(input_ids), input_ids)
        return x if isinstance(x, CausalLMOutput) else CausalLMOutput(logits=F.linear(x, self.embed.weight))

    @property
    def rows(self):
        """A table of positions that all sequences share."""
        return self.norm(self.table.weight)


MAPPED = ("table.weight", "norm.weight", "norm.bias", "map.weight", "map.bias")


def in_place(model, x, ids):
    x *= 0.5
    x = model.map(x)
    x += 1.0
    return x.tanh_()


def without_a_gradient(model, x, ids):
    with torch.no_grad():
        scale = model.map(x).exp()
    return x * scale


def shared_without_a_gradient(model, x, ids):
    with torch.no_grad():
        rows = model.map(model.rows)
    return x + rows


def added_in_place(model, x, ids):
    x = 2.0 * x
    x += model.map(model.rows).tanh()[None]
    return x


def changed_in_place(model, x, ids):
    rows = model.map(model.rows)
    rows /= 3.0
    return x + rows.tanh_()


def used_twice(model, x, ids):
    rows = model.rows
    return x * rows + model.map(rows)[None] + (model.embed.weight[:1] * 2.0)[None]


def two_of_them(model, x, ids):
    rows = model.rows
    return x + (model.map(rows) * model.gain + rows).softmax(dim=-1) * model.rate.sigmoid()


def as_matrices(model, x, ids):
    number, keys = len(x), model.map(model.rows).view(7, 2, 4).transpose(0, 1)
    scores = x.view(number, 7, 2, 4).transpose(1, 2) @ keys.mT
    return x + (scores.tanh() @ (keys @ keys.mT @ keys)).transpose(1, 2).reshape(number, 7, 8)


def repeated(model, x, ids):
    keys = model.map(model.rows).view(7, 2, 4).permute(1, 0, 2).repeat(len(x), 1, 1)
    product = x.view(-1, 7, 2, 4).transpose(1, 2).flatten(0, 1) * keys
    return x + product.view(-1, 2, 7, 4).transpose(1, 2).flatten(2)


def routed(model, x, ids, compute):
    """Add what `compute(model, rows, experts, moved rows, order)` makes of the tokens sorted by their expert."""
    rows, expert = x.reshape(-1, 8), (ids % 3).reshape(-1)
    order = expert.argsort(stable=True)
    moved = compute(model, rows, expert, rows[order], order)
    return x + torch.zeros_like(rows).index_add_(0, order, moved).view_as(x)


def one_slice_for_each_row(model, x, ids):
    def compute(model, rows, expert, moved, order):
        return (moved[:, None] @ model.experts[expert[order]])[:, 0] * model.biases[expert[order]]

    return routed(model, x, ids, compute)


def slices_of_all_tokens(model, x, ids):
    def compute(model, rows, expert, moved, order):
        every = torch.cat([rows @ model.experts[i] * model.biases[i] for i in range(3)])
        return every[expert * len(rows) + torch.arange(len(rows))][order]

    return routed(model, x, ids, compute)


# what becomes of the tokens, and the parameters that take the slow path
USES = {
    "in place": (in_place, ()),
    "raw positions": (lambda model, x, ids: model.rms(x + model.positions[:, : x.shape[1]]), ("positions",)),
    "whole raw positions": (
        lambda model, x, ids: model.rms(F.pad(x, (0, 0, 0, 16 - x.shape[1])) + model.positions)[:, : x.shape[1]],
        (),
    ),
    "a scalar": (lambda model, x, ids: model.rms(x) * model.temperature, ()),
    "experts": (lambda model, x, ids: model.rms(x @ model.experts[0] + x.tanh() @ model.experts[1]), ()),
    "time first": (lambda model, x, ids: model.map(model.norm(x).transpose(0, 1)).tanh().transpose(0, 1), ()),
    "mixed over sequences": (
        lambda model, x, ids: (
            model.map(x.transpose(0, 1).reshape(-1, 8)).reshape(x.shape[1], -1, 8).transpose(0, 1).tanh()
        ),
        (
            "map.weight",
            "map.bias",
        ),
    ),
    "without a gradient": (
        without_a_gradient,
        (
            "map.weight",
            "map.bias",
        ),
    ),
    "shared without a gradient": (shared_without_a_gradient, MAPPED),
    "keywords": (lambda model, x, ids: F.linear(x, weight=model.map.weight, bias=model.map.bias), ()),
    "a product of weights": (lambda model, x, ids: F.linear(x, model.square @ model.square), ("square",)),
    "scaled logits": (lambda model, x, ids: CausalLMOutput(logits=3.0 * (model.map(x) @ model.embed.weight.t())), ()),
    "scaled logits in place": (
        lambda model, x, ids: CausalLMOutput(logits=F.linear(x, model.embed.weight).mul_(3.0)),
        (),
    ),
    "added in place": (added_in_place, ()),
    "changed in place": (changed_in_place, ()),
    "looked up": (lambda model, x, ids: x * model.rms(model.table(torch.arange(7))), ()),
    "used twice": (used_twice, ()),
    "two of them": (two_of_them, ()),
    "as matrices": (as_matrices, ()),
    "expanded": (
        lambda model, x, ids: x + model.map(model.rows)[None, 1:].expand(len(x), -1, -1).sum(dim=1, keepdim=True),
        (),
    ),
    "expanded like": (lambda model, x, ids: x.tanh() * model.map(model.rows)[None].expand_as(x), ()),
    "repeated": (repeated, ()),
    "a rate": (lambda model, x, ids: x * (-torch.exp(model.rate)).exp(), ()),
    "repeated for heads": (
        lambda model, x, ids: x + (x[:, None].tanh() * model.map(model.rows)[None].repeat(2, 1, 1)).sum(dim=1),
        MAPPED,
    ),
    "an unknown function": (lambda model, x, ids: x + model.map(model.rows.flip(0)), MAPPED),
    "rows of all sequences": (
        lambda model, x, ids: x.tanh() + model.map(model.rows)[ids.reshape(-1) % 7].view_as(x),
        MAPPED,
    ),
    "a packed lookup": (
        lambda model, x, ids: model.embed(torch.cat([ids.reshape(1, -1), ids[:1]], dim=1))[:, :-7].view(x.shape),
        ("embed.weight",),
    ),
    "one slice for each row": (one_slice_for_each_row, ()),
    "a map of moved rows": (
        lambda model, x, ids: routed(
            model, x, ids, lambda model, rows, expert, moved, order: model.norm(model.map(moved).tanh())
        ),
        (),
    ),
    "rows moved by an unknown function": (
        lambda model, x, ids: routed(
            model, x, ids, lambda model, rows, expert, moved, order: model.map(F.pad(moved, (0, 0)))
        ),
        (
            "map.weight",
            "map.bias",
        ),
    ),
    "slices of all tokens": (slices_of_all_tokens, ()),
    "a slice from behind": (
        lambda model, x, ids: routed(
            model,
            x,
            ids,
            lambda model, rows, expert, moved, order: F.linear(moved, model.experts[-1].mT, model.biases[-1]),
        ),
        (),
    ),
}


@pytest.mark.parametrize("kind", USES)
def test_every_use_is_exact_and_only_unknown_ones_are_slow(kind):
    function, slow = USES[kind]
    # as many as heads, as channels, as positions: where time comes first, no shape says then which axis is which
    for sequences in (2, 5, 8, *([] if kind == "time first" else [7])):
        model = Model(function).double()
        predictor, predictions, _ = check_norms(model, batch_of(sequences=sequences, every=True), slow=slow)
        assert "never" in predictor.unreached
        assert "embed.weight" not in predictor.unreached
        assert (predictions.decoder is None) == ("scaled" in kind)
    check_norms(Model(function).double(), batch_of(), slow=slow)
    one = batch_of(sequences=1, every=True)  # it shares with no other
    with GhostNorms(model, causal=False) as predictor:
        predictions = predictor.forward(one)
        found = predictor.squared_norms(predictions, torch.ones_like(predictions.logits)).by_column
    assert_norms(found, reference(model, one, torch.ones_like(predictions.logits), causal=False)[1], rtol=1e-10)


@pytest.mark.parametrize("sequences", [2, 5, 7, 14])
def test_all_of_a_model_time_first(sequences):
    class TimeFirst(Model):
        def forward(self, input_ids, attention_mask=None):
            x = self.embed(input_ids.T)
            y = torch.einsum("ibh,hnd->ibnd", x, self.heads) * self.scale
            x = self.norm(x + torch.einsum("hnd,ibnd->bih", self.back, y).transpose(0, 1))
            return CausalLMOutput(logits=F.linear(self.map(x.tanh()), self.embed.weight).transpose(0, 1))

    batch = batch_of(sequences=sequences)
    if sequences != 7:
        check_norms(TimeFirst(None).double(), batch)
        return
    # with as many sequences as positions no shape says which axis is which
    with GhostNorms(TimeFirst(None).double(), causal=False) as predictor:
        predictor.forward(batch)
        assert predictor.slow_parameters


def test_a_later_batch_in_which_rows_are_moved_by_an_unknown_function():
    model = Model(USES["rows moved by an unknown function"][0]).double()
    first, later = batch_of(every=True), batch_of(every=True, seed=1)
    first["input_ids"] = first["input_ids"] // 3 * 3  # one expert: the rows stay in order
    with GhostNorms(model, causal=False) as predictor:
        predictor.forward(first)
        assert predictor.slow_parameters == ()
        predictor.forward(later)
        assert set(predictor.slow_parameters) == {"map.weight", "map.bias"}


@pytest.mark.parametrize("known", [True, False])
def test_a_parameter_that_a_later_batch_reaches_first_is_checked_on_a_sequence_that_reaches_it(known):
    def late(model, x, ids):
        if not bool((ids == 39).any()):
            return x
        total = x.sum(dim=1).flip(0)  # as many rows as sequences, but sequence b's are not in row b
        mapped = model.map(total) if known else torch.einsum("bi,oi->bo", total, model.map.weight)
        return x + torch.where((ids == 39).any(dim=1)[:, None], mapped.flip(0), 0.0)[:, None]

    first, later = batch_of(vocab=39), batch_of(vocab=39, seed=1)
    later["input_ids"][4, 0] = 39
    reached = ("map.weight", "map.bias")[: 1 + known]
    predictor, *_ = check_norms(Model(late).double(), first, later, slow=reached)
    assert set(reached).isdisjoint(predictor.unreached)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_whose_gradient_is_no_derivative_are_refused(options):
    model = Model(USES["a scalar"][0])
    model.embed = nn.Embedding(VOCAB, 8, **options)
    [(name, value)] = options.items()
    with pytest.raises(IsolossError, match=f"{name}={value}"), GhostNorms(model, causal=False) as predictor:
        predictor.forward(batch_of())


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


# --- leaves of the graph that a model makes --------------------------------------------------------------------------


def lora(name, *, trained):
    """An adapted model, its adapters as PEFT makes them, or as after some training."""
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "qwen3": ["q_proj", "v_proj", "down_proj"]}[name]
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name == "gpt2", lora_dropout=0.0)
    adapted = peft.get_peft_model(build(name, dtype=torch.float32), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if trained and parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return adapted.double().eval()


@pytest.mark.parametrize(
    ("name", "trained", "hooked"),
    [("bert", False, False), ("bert", True, True), ("gpt2", True, False), ("gpt2", False, True), ("qwen3", True, True)],
)
def test_adapters_of_peft(name, trained, hooked):
    model = lora(name, trained=trained)
    if hooked:
        model.enable_input_require_grads()
    rtol = 1e-10 if name != "qwen3" else 1e-5
    predictor, _, norms = check_norms(model, batch_of(), causal=name != "bert", rtol=rtol)
    assert predictor.selection.is_early
    assert (norms > 0).any()


def test_a_kernel_that_returns_a_leaf_of_its_own():
    """On a CPU, MRA's attention is zeros that require a gradient: its output projection leads nowhere else."""
    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = make("MraConfig", "MraForMaskedLM", {**options, "max_position_embeddings": 64}, dtype=torch.float32)
    predictor, _, norms = check_norms(model, batch_of(length=32), rtol=1e-5)
    biases = [place for place, name in enumerate(predictor.names) if name.endswith("attention.output.dense.bias")]
    assert len(biases) == 2
    assert (norms[:3, biases] > 0.01).all()


def test_parameters_above_and_below_leaves():
    """A use between two leaves of the model's own, and one of which a part leads to a leaf only."""

    def leaves(model, x, ids):
        y = model.norm(model.rms(x).detach().requires_grad_().cumsum(dim=1)).tanh()
        return CausalLMOutput(logits=F.linear(y + model.map(torch.ones_like(y).requires_grad_()), model.embed.weight))

    predictor, *_ = check_norms(Model(leaves).double(), batch_of())
    assert "rms.weight" in predictor.unreached  # behind `detach`
    assert {"norm.weight", "map.weight", "map.bias"}.isdisjoint(predictor.unreached)


def test_leaves_of_a_model_are_left_to_it():
    """A backward pass of the measurement adds to no `grad`, not even to that of a leaf."""
    model, seen = build("gpt2").requires_grad_(False), []
    model.transformer.h[1].mlp.c_fc.weight.requires_grad_()
    model.get_input_embeddings().register_forward_hook(lambda _m, _a, output: seen.append(output.requires_grad_()))
    with GhostNorms(model, causal=True) as predictor:
        predictions = predictor.forward(batch_of())
        predictor.squared_norms(predictions, torch.ones_like(predictions.logits))
    assert len(seen) > 1
    assert all(value.grad is None for value in seen)
    assert predictor.unreached == ()


# --- what is left ----------------------------------------------------------------------------------------------------


def test_only_the_parameters_asked_for():
    model, batch = build("bert"), batch_of()
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    names, expected, _ = reference(model, batch, torch.ones(12, VOCAB), causal=False)
    predictor, *_ = check_norms(model, batch)
    assert "bert.embeddings.position_embeddings.weight" not in predictor.names
    wanted = {name: value for name, value in model.named_parameters() if "layer.1" in name}
    with GhostNorms(model, causal=False, parameters=wanted) as predictor:
        predictions = predictor.forward(batch)
        found = predictor.squared_norms(predictions, torch.ones_like(predictions.logits)).by_column
    assert_norms(found, expected[:, [names.index(name) for name in wanted]], rtol=1e-10)


def test_the_model_is_left_as_found_even_after_an_error():
    model = build("gpt2")
    flags = [value.requires_grad for value in model.parameters()]
    broken = batch_of() | {"input_ids": torch.full((5, 7), VOCAB)}
    with pytest.raises(IsolossError, match="the model knows ids 0 to"), GhostNorms(model, causal=True) as predictor:  # noqa: PT012
        predictor.forward(batch_of())
        assert not any(value.requires_grad for value in model.parameters())
        predictor.forward(broken)
    assert [value.requires_grad for value in model.parameters()] == flags
    assert all(value.grad is None for value in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "forward" not in vars(model)


def test_nothing_outlives_its_use():
    model = build("bert")
    with GhostNorms(model, causal=False) as predictor:
        predictions = predictor.forward(batch_of())
        for _ in range(2):
            predictor.squared_norms(predictions, torch.ones_like(predictions.logits))
        assert not any(type(held) in (Outer, Dense) for held in gc.get_objects())
        logits = weakref.ref(predictions.logits)
        del predictions
        gc.collect()
        assert logits() is None
