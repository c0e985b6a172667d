"""What becomes of the trace of a small model inside a large one, held against every label of every context."""

import dataclasses
import itertools

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

from isoloss.lab.models.architectures import Shape
from isoloss.lab.models.expansion import expand
from isoloss.paper.theory.expansion import ADDED, differences, judge_expansion

TOKENS, LENGTH = 3, 3
MASK, PAD = 3, 4
LARGE = Shape(d_model=12, num_heads=3, num_layers=3, intermediate=12)

# of the added blocks: what writes into the residual stream, and the layer norms on it
WITH_A_PART = {
    "bert": {
        f"{block}.{vector}"
        for block in ("attention.output", "output")
        for vector in ("dense.bias", "LayerNorm.weight", "LayerNorm.bias")
    },
    "pre-ln": {"attention.output.dense.bias", "output.dense.bias"},
    "opt": {"self_attn.out_proj.bias", "fc2.bias"},
}


def built(kind, dtype=torch.float64):
    """A model of width 4 with one head and one layer, whose parameters are all random."""
    common = {
        "vocab_size": 5,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    inner = {"intermediate_size": 4, "layer_norm_eps": 1e-12}
    with torch.random.fork_rng():
        if kind == "bert":
            model = BertForMaskedLM(BertConfig(max_position_embeddings=LENGTH, **common, **inner))
        elif kind == "pre-ln":
            config = RobertaPreLayerNormConfig(max_position_embeddings=PAD + 1 + LENGTH, **common, **inner)
            model = RobertaPreLayerNormForMaskedLM(config)
        else:
            config = OPTConfig(ffn_dim=4, word_embed_proj_dim=4, max_position_embeddings=LENGTH, **common)
            model = OPTForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def contexts(kind):
    """Every sentence with each of its tokens hidden in turn; for a causal model every sentence, the last predicted."""
    rows, labels = [], []
    for sentence in itertools.product(range(TOKENS), repeat=LENGTH):
        for place in range(LENGTH) if kind != "opt" else [LENGTH - 1]:
            labels.append([token if t == place else -100 for t, token in enumerate(sentence)])
            rows.append([MASK if t == place and kind != "opt" else token for t, token in enumerate(sentence)])
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}


def enumerated(model, batch, causal):
    """The Fisher's trace by parameter: every label of every context, each weighed by its probability."""
    named = dict(model.named_parameters())
    parts = dict.fromkeys(named, 0.0)
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        place = int((labels != -100).nonzero()) - causal
        log_probs = model(input_ids=ids[None]).logits[0, place].log_softmax(dim=0)
        for log_prob in log_probs:
            gradients = torch.autograd.grad(log_prob, named.values(), retain_graph=True, allow_unused=True)
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    parts[name] += float(log_prob.detach().exp() * gradient.square().sum()) / len(batch["labels"])
    return parts


WIDER_HEAD = Shape(d_model=12, num_heads=1, num_layers=2, intermediate=12)


@pytest.mark.parametrize(
    ("kind", "scale", "shape"),
    [
        *(("bert", "exact", LARGE), ("bert", "balanced", LARGE), ("bert", "paper", LARGE)),
        *(("pre-ln", "balanced", LARGE), ("opt", "exact", LARGE)),
        *(("bert", "exact", WIDER_HEAD), ("pre-ln", "exact", WIDER_HEAD), ("opt", "exact", WIDER_HEAD)),
    ],
)
def test_parts_of_the_enumerated_trace_change_by_the_factors(kind, scale, shape):
    small, batch = built(kind), contexts(kind)
    batch = {name: value[::9] for name, value in batch.items()}
    result = expand(small, shape, embedding_scale=scale)
    before, after = (enumerated(model, batch, kind == "opt") for model in (small, result.model))
    trace = sum(before.values())
    # OPT's softmax is in float32 whatever the weights are
    tolerance = 1e-6 if kind == "opt" else 1e-9
    for name, part in result.parts.items():
        assert after[part.name] == pytest.approx(part.trace_factor * before[name], abs=tolerance * trace), name
    moving = {name.split(".", 4)[-1] for name in result.added if after[name] > 1e-9 * trace}
    assert moving == WITH_A_PART[kind]
    factors = {name.split(".")[-2]: part.trace_factor for name, part in result.parts.items() if name.endswith("weight")}
    # one head becomes three, or one that is three times as wide
    in_query = factors["q_proj" if kind == "opt" else "query"]
    assert in_query == pytest.approx(3**0.5 if shape is WIDER_HEAD else 1.0)


@pytest.mark.parametrize("kind", ["bert", "opt"])
def test_study(kind):
    small, batch = built(kind), contexts(kind)
    expanded = expand(small, LARGE)
    done = []
    result = judge_expansion(small, expanded, [batch], causal=kind == "opt", seed=0, progress=done.append)
    exact = sum(enumerated(small, batch, kind == "opt").values())
    # the inputs are all of them, so that only the signs make the estimate differ from enumeration
    assert result.before.value == pytest.approx(exact, rel=0.2)
    assert result.before.details["num_parameters"] == small.num_parameters()
    assert result.after.details["num_parameters"] == expanded.model.num_parameters()
    assert result.change.value == pytest.approx(result.after.value - result.before.value)
    assert 0 < result.change.stderr < result.before.stderr
    assert [part.after for part in result.contributions if part.factor is None] == [result.contributions[-1].after]
    assert sum(part.before for part in result.contributions) == pytest.approx(result.before.value)
    assert sum(part.after for part in result.contributions) == pytest.approx(result.after.value)
    assert result.contributions[-1].name == ADDED
    assert sum(part.parameters for part in result.contributions[:-1]) == small.num_parameters()
    assert done == sorted(done)
    assert done[-1] == 3 * len(batch["labels"])
    assert max(result.differences.logits, result.differences.hidden) < 1e-9
    same, factors, most = result.statements
    assert (same.shown, factors.shown) == (True, True)
    matrices = 6 * 16 + 16 * (kind == "bert") + 5 * (kind == "bert")
    kept = f"{matrices:,} ({100 * matrices / small.num_parameters():.1f} %"
    assert kept in most.evidence
    assert most.shown == (2 * matrices > small.num_parameters())


def test_another_function_is_not_shown():
    small, batch = built("bert"), contexts("bert")
    expanded = expand(small, LARGE)
    with torch.no_grad():
        expanded.model.bert.encoder.layer[2].output.dense.bias[0] += 0.5
    result = judge_expansion(small, expanded, [batch], causal=False)
    assert [statement.shown for statement in result.statements[:2]] == [False, False]


def test_differences_are_relative_to_the_largest():
    small, batch = built("bert"), contexts("bert")
    expanded = expand(small, Shape(4, 1, 1, 4))
    with torch.no_grad():
        expanded.model.cls.predictions.bias[2] += 0.25
        expanded.model.bert.encoder.layer[0].output.LayerNorm.bias[0] += 0.125
    logits = small(input_ids=batch["input_ids"]).logits.detach()
    last = small.bert(input_ids=batch["input_ids"]).last_hidden_state.detach()
    half = expand(small, Shape(4, 1, 1, 4))
    with torch.no_grad():
        half.model.cls.predictions.bias[2] += 0.25
    assert differences(small, half, [batch]).logits == pytest.approx(0.25 / float(logits.abs().max()))
    assert differences(small, half, [batch]).hidden == 0
    result = differences(small, expanded, [{name: value[:40] for name, value in batch.items()}, batch])
    assert result.hidden == pytest.approx(0.125 / float(last.abs().max()))


def sentences(kind, n=192):
    """Random sentences with one predicted token in some and two in the others; for a causal model, all but the first.

    They are many enough for control variates to be fitted, and have cross terms between positions.
    """
    ids = torch.randint(0, TOKENS, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "opt":
        return {"input_ids": ids, "labels": ids}
    hidden = torch.nn.functional.one_hot(torch.arange(n) % LENGTH, LENGTH).bool()
    hidden[:, 0] = True
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


@pytest.mark.parametrize(
    ("kind", "ratio", "dtype"),
    [
        *(("bert", 3, torch.float32), ("bert", 2, torch.float64), ("opt", 6, torch.float32), ("opt", 4, torch.float64)),
        ("pre-ln", 3, torch.float64),
    ],
)
def test_the_factors_are_shown_at_every_width(kind, ratio, dtype):
    """Although the large model's layers, and so the control variates it would have by itself, are other ones."""
    small = built(kind, dtype)
    result = judge_expansion(
        small, expand(small, Shape(4 * ratio, ratio, 3, 4 * ratio)), [sentences(kind)], causal=kind == "opt"
    )
    assert [statement.shown for statement in result.statements[:2]] == [True, True]
    rounding = 100 * torch.finfo(dtype).eps + 1e-10  # and what eps of the layer norms leaves
    for part in result.contributions[:-1]:
        assert part.after == pytest.approx(part.factor * part.before, abs=rounding * result.before.value), part.name


@pytest.mark.parametrize(("kind", "dtype"), [("bert", torch.float64), ("opt", torch.float32)])
def test_a_wrong_rule_is_not_shown(kind, dtype):
    """c^2 / n with one copy too many in n, for one parameter of the right expansion."""
    small = built(kind, dtype)
    expanded = expand(small, LARGE)
    name = next(name for name in expanded.parts if name.endswith(("query.weight", "q_proj.weight")))
    part = expanded.parts[name]
    assert part.copies == 9
    miscounted = dataclasses.replace(part, divisor=part.divisor * (9 / 10) ** 0.5)  # c^2 / 10 for c^2 / 9
    wrong = dataclasses.replace(expanded, parts={**expanded.parts, name: miscounted})
    result = judge_expansion(small, wrong, [sentences(kind)], causal=kind == "opt")
    assert [statement.shown for statement in result.statements[:2]] == [True, False]
    assert f"({name.replace('.0.', '.*.')})" in result.statements[1].evidence


def test_another_expansion_with_the_same_function_is_not_shown():
    """Blocks W and 0 in a row add up to W h as W/2 and W/2 do, but the gradients are not equal."""
    small = built("bert")
    expanded = expand(small, Shape(8, 2, 1, 8))
    part = expanded.parts["cls.predictions.transform.dense.weight"]
    with torch.no_grad():
        weight = expanded.model.get_parameter(part.name)
        weight[:, :4] *= 2
        weight[:, 4:] = 0
    result = judge_expansion(small, expanded, [sentences("bert")], causal=False)
    assert [statement.shown for statement in result.statements[:2]] == [True, False]
