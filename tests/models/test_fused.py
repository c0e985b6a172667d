"""The fused pieces and blocks against plain torch in float64: values, gradients, dropout, and where they run."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM
from transformers.models.bert.modeling_bert import BertLayer

from isoloss.errors import IsolossError
from isoloss.languages.config import PRESETS
from isoloss.models import fused, fused_kernels
from isoloss.models.architectures import BERT
from isoloss.models.dropout import LEVELS, num_levels, random_bits
from isoloss.models.fused_blocks import computed_by, with_fused_blocks
from isoloss.models.make import make_model, predicted_states
from isoloss.run_config import ModelConfig

N, LENGTH, HEADS, WIDTH, INNER = 4, 5, 3, 12, 20
LANGUAGE = PRESETS["pcfg-varied"][0].build()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def perturbed(module, seed=1):
    """A module whose layer norms and biases are not at their initial 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def drawn(shape, p):
    """What a dropout of probability p multiplies values with, by the bits that the next call draws."""
    levels = num_levels(p)
    if not levels:
        return torch.ones(shape, dtype=torch.float64)
    kept = random_bits(int(np.prod(shape))).view(shape) >= levels - LEVELS // 2
    return kept.double() * LEVELS / (LEVELS - levels)


def compare(piece, reference, modules, inputs, cotangent):
    """Compare value and gradients of a piece in float32 with those of a reference in float64, both from one seed."""
    exact_modules = copy.deepcopy(modules).double()
    exact_inputs = [x.double().requires_grad_() for x in inputs]
    torch.manual_seed(7)
    expected = reference(exact_modules, *exact_inputs)
    parameters = [*exact_inputs, *exact_modules.parameters()]
    d_expected = torch.autograd.grad(expected, parameters, cotangent.double(), allow_unused=True)
    inputs = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(7)
    got = piece(modules, *inputs)
    d_got = torch.autograd.grad(got, [*inputs, *modules.parameters()], cotangent, allow_unused=True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert sum(g is not None for g in d_got) > len(inputs)
    for ours, theirs in zip(d_got, d_expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


def plain_attention(linears, x, mask, p):
    query, key, value = (linear(x).view(N, LENGTH, HEADS, -1).permute(2, 0, 1, 3) for linear in linears)
    scores = query @ key.transpose(2, 3) / (WIDTH / HEADS) ** 0.5
    weights = (scores if mask is None else scores + mask[:, 0].double()).softmax(dim=-1)
    return (weights * drawn(weights.shape, p) @ value).permute(1, 2, 0, 3).flatten(2)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("has_onednn", [True, False])
def test_attention(p, is_masked, has_onednn, monkeypatch):
    monkeypatch.setattr(fused, "_LARGE", 0)
    if not has_onednn:
        monkeypatch.setattr(fused, "_ONEDNN", None)
    linears = perturbed(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    present = torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4])[:, None]
    mask = torch.zeros(N, 1, LENGTH, LENGTH).masked_fill(~present[:, None, None], torch.finfo(torch.float32).min)
    mask = mask if is_masked else None
    compare(
        lambda m, x: fused.attention(x, mask, tuple(m), num_heads=HEADS, dropout=p),
        lambda m, x: plain_attention(m, x, mask, p),
        linears,
        [2 * normal(N, LENGTH, WIDTH)],
        normal(N, LENGTH, WIDTH, seed=3),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_linear_add_norm(p, rows):
    modules = perturbed(nn.ModuleList([nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH, eps=1e-6)]))
    compare(
        lambda m, x, residual: fused.linear_add_norm(x, m[0], residual, m[1], dropout=p),
        lambda m, x, residual: m[1](residual + m[0](x) * drawn((rows, WIDTH), p)),
        modules,
        [normal(rows, INNER), normal(rows, WIDTH, seed=2)],
        normal(rows, WIDTH, seed=3),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_feed_forward_add_norm(p, rows):
    layers = [nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH, eps=1e-6)]
    compare(
        lambda m, x: fused.feed_forward_add_norm(x, *m, dropout=p),
        lambda m, x: m[2](x + m[1](nn.functional.gelu(m[0](x))) * drawn((rows, WIDTH), p)),
        perturbed(nn.ModuleList(layers)),
        [normal(rows, WIDTH)],
        normal(rows, WIDTH, seed=3),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("padding", [None, 2])
def test_embed(p, padding):
    words = nn.Embedding(7, WIDTH, padding_idx=padding)
    modules = perturbed(nn.ModuleList([words, nn.Embedding(LENGTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-6)]))
    input_ids = torch.randint(0, 6, (N, LENGTH), generator=torch.Generator().manual_seed(4))
    input_ids[0, :2] = 2

    def reference(m):
        x = m[2](nn.functional.embedding(input_ids, m[0].weight, padding) + m[1].weight)
        return x * drawn((N, LENGTH, WIDTH), p)

    compare(
        lambda m: fused.embed(input_ids, m[0], m[1].weight, m[2], dropout=p),
        reference,
        modules,
        [],
        normal(N, LENGTH, WIDTH, seed=3),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_from_one(p, is_masked):
    linears = perturbed(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    positions = torch.tensor([4, 0, 0, 2])
    present = torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4])[:, None]
    mask = torch.zeros(N, LENGTH).masked_fill(~present, torch.finfo(torch.float32).min) if is_masked else None

    def reference(m, x):
        query, key, value = (linear(x).view(N, LENGTH, HEADS, -1) for linear in m)
        scores = torch.einsum("nhe,nthe->nht", query[range(N), positions], key) / (WIDTH / HEADS) ** 0.5
        weights = (scores if mask is None else scores + mask[:, None].double()).softmax(dim=-1)
        kept = nn.functional.dropout(torch.ones(weights.shape), p).double()
        return torch.einsum("nht,nthe->nhe", weights * kept, value).flatten(1)

    rows = positions + LENGTH * torch.arange(N)
    compare(
        lambda m, x: fused.attention_from_one(x, mask, rows, tuple(m), num_heads=HEADS, dropout=p),
        reference,
        linears,
        [2 * normal(N, LENGTH, WIDTH)],
        normal(N, WIDTH, seed=3),
    )


@pytest.mark.parametrize("has_bias", [False, True])
def test_cross_entropy(has_bias):
    bias, labels = normal(9, seed=1) if has_bias else None, torch.tensor([0, 8, 3, 3])
    logits = 5 * normal(4, 9)
    exact = (logits.double() + (0 if bias is None else bias.double())).requires_grad_()
    losses = nn.functional.cross_entropy(exact, labels, reduction="none")
    (d_exact,) = torch.autograd.grad(losses.sum(), [exact])
    got, sums = fused.cross_entropy(logits, bias, labels, 0.5)
    torch.testing.assert_close(got.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), 0.5 * d_exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sums.double(), 0.5 * d_exact.sum(dim=0), rtol=1e-6, atol=1e-6)
    for label in (-1, 9):
        with pytest.raises(IndexError, match="a label is not an id"):
            fused.cross_entropy(logits, bias, torch.full((4,), label), 0.5)


def test_rows_that_are_no_whole_block_of_memory():
    # a residual and a cotangent with strides
    modules = perturbed(nn.ModuleList([nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)]))
    x, wide = normal(6, INNER), normal(6, 2 * WIDTH, seed=2)
    torch.manual_seed(0)
    y = fused.linear_add_norm(x, modules[0], wide[:, ::2], modules[1], dropout=0.2)
    torch.manual_seed(0)
    again = fused.linear_add_norm(x, modules[0], wide[:, ::2].clone(), modules[1], dropout=0.2)
    assert torch.equal(y, again)
    (sparse,) = torch.autograd.grad(y, [modules[0].weight], torch.ones(()).expand(y.shape))
    (dense,) = torch.autograd.grad(again, [modules[0].weight], torch.ones_like(y))
    assert torch.equal(sparse, dense)


def test_gelu_and_its_derivative_everywhere():
    x = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    values = x.float()[None].numpy().copy()
    y = np.empty_like(values)
    fused_kernels.gelu(values, np.zeros(values.shape[1], np.float32), y)
    exact = x.float().double().requires_grad_()
    expected = nn.functional.gelu(exact)
    (slope,) = torch.autograd.grad(expected.sum(), [exact])
    assert float((torch.from_numpy(y)[0] - expected.detach()).abs().max()) < 2e-6
    assert float((torch.from_numpy(values)[0] - slope).abs().max()) < 1e-6


def test_softmax_of_scores_far_apart():
    scores = torch.tensor([[0.0, -1e30, 5.0], [300.0, 200.0, 299.0], [-3e38, -3e38, -3e38]])
    p, weights = scores.clone().numpy(), np.empty((3, 3), np.float32)
    nothing = np.empty((0, 3), np.int16), np.int16(-(1 << 15)), np.float32(1)
    fused_kernels.softmax(p, np.float32(1), *nothing, weights)
    np.testing.assert_array_equal(p, weights)
    torch.testing.assert_close(torch.from_numpy(p).double(), scores.double().softmax(dim=1), rtol=1e-6, atol=1e-30)


ROWS, WIDE = 8, 16  # WIDE values fill vector registers
ONE, EPS, TOKENS = np.float32(1), np.float32(1e-12), np.arange(ROWS) % 3
KERNELS = {  # called on arrays by name, some of which they change, and on a dropout
    "add_norm": lambda a, dropped: fused_kernels.add_norm(
        a["x"], a["bias"], a["residual"], *dropped, a["weight"], a["shift"], EPS, a["inverse"], a["y"]
    ),
    "add_norm_backward": lambda a, dropped: fused_kernels.add_norm_backward(
        a["y"], a["x"], a["inverse"], *dropped, a["weight"], a["d_x"], a["residual"], a["sums"]
    ),
    "softmax": lambda a, dropped: fused_kernels.softmax(a["x"], ONE, *dropped, a["y"]),
    "softmax_backward": lambda a, dropped: fused_kernels.softmax_backward(a["x"], a["y"], ONE, *dropped),
    "embed_norm": lambda a, dropped: fused_kernels.embed_norm(
        a["x"], a["places"], *dropped, a["weight"], a["shift"], EPS, a["inverse"], a["y"]
    ),
    "embed_norm_backward": lambda a, dropped: fused_kernels.embed_norm_backward(
        a["y"], a["x"], a["inverse"], *dropped, a["weight"], TOKENS, 0, a["d_x"], a["places"], a["sums"]
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sum_does_not_depend_on_where_arrays_lie(kernel):
    """Arrays one behind another, in 40 orders, and among them the memory behind the bits that are not read."""
    generator = np.random.default_rng(0)
    sizes = dict.fromkeys(("x", "y", "residual", "d_x"), (ROWS, WIDE))
    sizes |= {"places": (4, WIDE), "sums": (3, WIDE), "bias": (WIDE,), "weight": (WIDE,), "shift": (WIDE,)}
    sizes["inverse"] = (ROWS,)
    values = {name: generator.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    unread, *nothing_dropped = fused._drawn(ROWS, WIDE, 0.0)
    assert unread.base.nbytes == WIDE * unread.itemsize  # a whole row
    expected = {name: value.copy() for name, value in values.items()}
    KERNELS[kernel](expected, (np.empty((ROWS, WIDE), np.int16), *nothing_dropped))
    assert any(not np.array_equal(values[name], expected[name]) for name in values)
    for _ in range(40):
        memory, at, placed = np.zeros(1024, np.float32), 0, {}
        for name in generator.permutation([*values, "bits"]):
            value = unread.base.view(np.float32) if name == "bits" else values[name]
            placed[name] = memory[at : at + value.size].reshape(value.shape)
            placed[name][:] = value
            at += value.size
        bits = placed.pop("bits").view(np.int16)[:0].reshape(unread.shape)
        KERNELS[kernel](placed, (bits, *nothing_dropped))
        for name in values:
            np.testing.assert_array_equal(placed[name], expected[name], err_msg=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value):
    linears = perturbed(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    layers = perturbed(nn.ModuleList([nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)]))
    x = normal(N, LENGTH, WIDTH)
    x[1, 2, 3] = value
    mixed = fused.attention(x, None, tuple(linears), num_heads=HEADS, dropout=0.0)
    assert bool(mixed[1].isnan().any(dim=1).all())
    assert bool(mixed[0].isfinite().all())
    y = fused.feed_forward_add_norm(x.flatten(0, 1), *layers, dropout=0.0)
    assert bool(y[LENGTH + 2].isnan().any())


def batch(is_one_each):
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(0, LANGUAGE.vocab_size, (6, LANGUAGE.max_length), generator=generator)
    lengths = torch.randint(3, LANGUAGE.max_length + 1, (6,), generator=generator)
    lengths[0] = LANGUAGE.max_length
    present = torch.arange(LANGUAGE.max_length) < lengths[:, None]
    labels = torch.full_like(input_ids, -100)
    labels[:, 1] = 3
    if not is_one_each:
        labels[:3, 0] = 2
    return {"input_ids": input_ids, "attention_mask": present.long(), "labels": labels}


@pytest.mark.parametrize("architecture", ["bert", "bert-pre-ln"])
@pytest.mark.parametrize("is_one_each", [True, False])
@pytest.mark.parametrize("is_padded", [True, False])
def test_a_model_in_training_has_the_values_and_gradients_of_transformers_own(architecture, is_one_each, is_padded):
    config = ModelConfig(architecture=architecture, size="d128", dropout=0.0)
    model = perturbed(make_model(config, LANGUAGE, seed=0))
    exact = copy.deepcopy(model).double()  # float64 goes through the plain modules
    inputs = batch(is_one_each)
    if not is_padded:
        del inputs["attention_mask"]
    got, expected = (predicted_states(m, inputs) for m in (model, exact))
    cotangent = normal(*got.shape, seed=5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    got.backward(cotangent)
    expected.backward(cotangent.double())
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        scale = float(theirs.grad.abs().max())
        assert float((ours.grad.double() - theirs.grad).abs().max()) <= 1e-4 * scale + 1e-4, name


def test_a_block_that_attends_from_one_position_drops_what_the_plain_modules_drop(monkeypatch):
    # one layer: every dropout of it is drawn in one way by both
    model, inputs = perturbed(make_model(ModelConfig(size="d64", dropout=0.2), LANGUAGE, seed=0)), batch(True)
    results = []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(fused, "is_usable", lambda _: False)
        torch.manual_seed(3)
        states = predicted_states(model, inputs)
        states.backward(normal(*states.shape, seed=5))
        results.append([states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    assert len(results[0]) > 15
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def in_training(model, seed=0):
    torch.manual_seed(seed)
    return predicted_states(model, batch(False))


def test_a_step_repeats_bit_for_bit():
    model = make_model(ModelConfig(size="d128"), LANGUAGE, seed=0)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        in_training(model).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert not torch.equal(in_training(model), in_training(model, seed=1))


def test_the_gradient_is_the_same_when_it_is_taken_twice():
    model = make_model(ModelConfig(size="d128"), LANGUAGE, seed=0)
    loss, parameters = in_training(model).square().sum(), list(model.bert.encoder.parameters())
    first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_there_is_no_second_derivative_in_training_and_there_is_one_in_evaluation():
    model = make_model(ModelConfig(size="d16", dropout=0.0), LANGUAGE, seed=0)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight

    def twice():
        loss = in_training(model).pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [weight])[0]

    with pytest.raises(IsolossError, match="training mode have no second derivative on one thread"):
        twice()
    torch.set_num_threads(2)
    in_plain_training = twice()
    model.eval()
    torch.testing.assert_close(twice(), in_plain_training)
    assert float(in_plain_training.abs().max()) > 0


@pytest.mark.parametrize("where", ["evaluation", "two threads", "float64", "autocast", "sdpa"])
def test_elsewhere_the_blocks_are_transformers_own_bit_for_bit(where):
    plain = BERT.new_model(
        ModelConfig(size="d128", dropout=0.0),
        vocab_size=LANGUAGE.model_vocab_size,
        max_length=LANGUAGE.max_length,
        pad_id=LANGUAGE.pad_id,
        seed=0,
    )
    other = copy.deepcopy(plain)
    with_fused_blocks(other)
    assert isinstance(other.bert.encoder.layer[0], BertLayer)
    fast = in_training(other)
    assert computed_by(other, "float32") == "fused"
    assert computed_by(other, "bfloat16") == computed_by(plain, "float32") == "torch"
    for model in (plain, other):
        model.train(where != "evaluation")
        model.to(torch.float64 if where == "float64" else torch.float32)
        if where == "sdpa":
            model.set_attn_implementation("sdpa")
    if where == "two threads":
        torch.set_num_threads(2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "autocast"):
        ours, theirs = in_training(other), in_training(plain)
        if where == "sdpa":  # the rest of a block is fused
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(ours, theirs)
    assert not torch.equal(fast, ours.to(fast.dtype)) or where == "evaluation"
    if where in ("two threads", "float64"):
        assert computed_by(other, "float32") == "torch"


def test_checkpoints_are_transformers_own(tmp_path):
    model = make_model(ModelConfig(size="d32"), LANGUAGE, seed=0)
    in_training(model).sum().backward()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded.bert.encoder.layer[0]) is BertLayer
    own, others = model.state_dict(), loaded.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)
    outputs = model.eval()(**batch(True), output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 2
    assert outputs.attentions[0].shape[-1] == LANGUAGE.max_length
