"""Rescalings themselves: what they are called, what they act on, how they are applied, and what is refused."""

import copy
import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rescaling_models import FAMILIES, tokens
from torch import nn
from transformers import BertForPreTraining, DistilBertConfig, DistilBertForMaskedLM, LlamaForSequenceClassification

from isoloss.errors import IsolossError
from isoloss.flatness._rescaling.apply import block_sizes, check_rescaling, rescaled
from isoloss.flatness._rescaling.symmetries import Signals, rescalings_of
from isoloss.registry import RESCALINGS, Registry

FAMILY = {family.name: family for family in FAMILIES}
INPUTS = {"input_ids": tokens()}


def signals_of(**parameters):
    return Signals({id(value): name for name, value in parameters.items()}, units=())


def row_names(found):
    """The parameter of each row."""
    return [
        name
        for name in found.parameters
        for _ in range(found.parameter_blocks[name].num_blocks if name in found.parameter_blocks else 1)
    ]


def moved(found, generator):
    """The parameters that a generator multiplies, and those that it divides."""
    column, labels = found.actions[:, [generator]].toarray()[:, 0], row_names(found)
    assert set(np.unique(column)) <= {-1, 0, 1}
    return [labels[row] for row in np.flatnonzero(column > 0)], [labels[row] for row in np.flatnonzero(column < 0)]


def test_those_of_bert_are_the_known_ones():
    found = rescalings_of(FAMILY["bert"].build(tied=True))
    assert found.names == (
        "embeddings and head norm",
        "layer 0: attention input norm",
        "layer 0: queries and keys",
        "layer 0: values and attention output",
        "layer 0: feed-forward input norm",
        "layer 1: attention input norm",
        "layer 1: queries and keys",
        "layer 1: values and attention output",
        "layer 1: feed-forward input norm",
        "last hidden state",
    )
    embeddings, attention = "bert.embeddings.", "bert.encoder.layer.1.attention."
    block, head = "bert.encoder.layer.1.", "cls.predictions.transform."
    tables = [f"{embeddings}{name}_embeddings.weight" for name in ("word", "position", "token_type")]
    assert moved(found, 0) == (tables, [f"{head}LayerNorm.weight", f"{head}LayerNorm.bias"])
    before = [f"bert.encoder.layer.0.output.LayerNorm.{name}" for name in ("weight", "bias")]
    output = [f"{attention}output.dense.{name}" for name in ("weight", "bias")]
    read = [f"{attention}self.{name}.weight" for name in ("query", "key", "value")]
    assert moved(found, 5) == (before + output, read)
    query, key, value = (
        [f"{attention}self.{name}.{end}" for end in ("weight", "bias")] for name in ("query", "key", "value")
    )
    assert moved(found, 6) == (query, key)
    assert moved(found, 7) == (value, output[:1])
    norm = [f"{attention}output.LayerNorm.{name}" for name in ("weight", "bias")]
    second = [f"{block}output.dense.{name}" for name in ("weight", "bias")]
    assert moved(found, 8) == (norm + second, [f"{block}intermediate.dense.weight"])
    last = [f"{block}output.LayerNorm.{name}" for name in ("weight", "bias")]
    assert moved(found, 9) == (last, [f"{head}dense.weight"])
    assert found.features.toarray().tolist() == [[0] * 9 + [1]]
    for generator, rows in enumerate(found.writers):
        np.testing.assert_array_equal(rows, np.flatnonzero(found.actions[:, [generator]].toarray() > 0))


def test_names_of_a_llama():
    tied, untied = (
        rescalings_of(FAMILY["llama"].build(tied=tied, num_hidden_layers=1)).names for tied in (True, False)
    )
    layer = (
        "layer 0: attention input norm",
        "layer 0: queries and keys",
        "layer 0: values and attention output",
        "layer 0: feed-forward input norm",
        "layer 0: up and down projections",
    )
    assert tied == ("residual stream and final norm", *layer)
    assert untied == ("residual stream", *layer, "final norm")


def test_names_of_parts_of_signals():
    model = FAMILY["qwen3"].build(tied=True, num_hidden_layers=1)
    names = rescalings_of(model, granularity="head").names
    assert [name for name in names if "head" in name] == [
        *(f"layer 0: values and attention output, head {head}" for head in range(2)),
        *(f"layer 0: queries before their norm, head {head}" for head in range(4)),
        *(f"layer 0: keys before their norm, head {head}" for head in range(2)),
    ]
    assert [name for name in rescalings_of(model, granularity="channel").names if "pair" in name] == [
        f"layer 0: queries and keys, pair {pair}" for pair in range(2)
    ]
    assert "layer 0: up and down projections, neuron 9" in rescalings_of(model, granularity="neuron").names


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_are_all_different(family):
    model = family.build(tied=False)
    for granularity in ("channel", "neuron"):
        names = rescalings_of(model, granularity=granularity).names
        assert len(set(names)) == len(names)


def test_the_check_sees_every_exponent_that_is_wrong():
    model = FAMILY["bert"].build(tied=True, num_hidden_layers=1)
    found = rescalings_of(model)
    unseen = []
    for row, generator in zip(*found.actions.nonzero(), strict=True):
        wrong = found.actions.tolil()
        wrong[row, generator] *= -1
        if check_rescaling(model, replace(found, actions=wrong.tocsr()), INPUTS) < 1e-6:
            unseen.append(found.parameters[row])
    assert unseen == ["bert.encoder.layer.0.attention.self.key.bias"]  # it adds the same to all scores of a query


def test_sizes_of_parts():
    model = FAMILY["gemma3_text"].build(tied=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    found = rescalings_of(model, granularity="neuron")
    sizes, log_rms = block_sizes(model, found)
    row = 0
    for name in found.parameters:
        gain = model.get_parameter(name).detach() + ("norm" in name)
        split = found.parameter_blocks.get(name)
        for part in range(split.num_blocks if split else 1):
            entries = gain
            if split:
                entries = gain[split.rows == part // split.num_columns][:, split.columns == part % split.num_columns]
            assert sizes[row] == entries.numel()
            expected = -np.inf if "0.self_attn.q_proj" in name else float(entries.square().mean().sqrt().log())
            assert log_rms[row] == pytest.approx(expected, rel=1e-12)
            row += 1
    assert row == len(sizes)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_parameters_that_are_not_measured_are_rescaled_too(granularity):
    model = FAMILY["llama"].build(tied=True)
    whole = rescalings_of(model, granularity=granularity)
    chosen = {name: value for name, value in model.named_parameters() if "v_proj" in name or "norm" in name}
    found = rescalings_of(model, granularity=granularity, parameters=chosen)
    assert found.names == whole.names
    assert found.measured == found.parameters[: len(chosen)] == tuple(chosen)
    assert found.measured_blocks.keys() == chosen.keys() & whole.parameter_blocks.keys()
    kept = [number for number, name in enumerate(row_names(whole)) if name in chosen]
    np.testing.assert_array_equal(found.exponents.toarray(), whole.exponents.toarray()[kept])
    z = np.random.default_rng(0).normal(size=len(found.names))
    one, other = rescaled(model, found, z), rescaled(model, whole, z)
    acted = {name for name, value in other.items() if not torch.equal(value, model.get_parameter(name))}
    assert acted <= one.keys() <= other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)
    for name, value in model.named_parameters():
        value.requires_grad_(name in chosen)
    assert rescalings_of(model, granularity=granularity).parameters == found.parameters


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_a_wrapped_model():
    model = FAMILY["gpt2"].build(tied=True)
    found, z = rescalings_of(model), np.full(9, 0.3)
    expected = rescaled(model, found, z)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        again = rescalings_of(wrapped)
        assert (again.names, again.parameters) == (found.names, found.parameters)
        assert check_rescaling(wrapped, again, INPUTS) < 1e-12
        assert rescaled(wrapped, again, z).keys() == expected.keys()
    model.transformer.h[0] = torch.compile(model.transformer.h[0])
    assert rescalings_of(model).parameters == found.parameters
    assert check_rescaling(model, found, INPUTS) < 1e-12
    assert "transformer.h.0._orig_mod.ln_1.weight" in rescaled(model, found, z)


def test_the_model_is_left_as_found():
    model = FAMILY["qwen3"].build(tied=True).bfloat16()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    eps = [getattr(module, "variance_epsilon", None) for module in model.modules()]
    found = rescalings_of(model)
    assert check_rescaling(model, found, INPUTS) < 1e-12  # the check is in float64 whatever the model's type
    new = rescaled(model, found, np.ones(len(found.names)))
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    assert [getattr(module, "variance_epsilon", None) for module in model.modules()] == eps
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_padding_with_an_embedding_of_zeros():
    model = FAMILY["llama"].build(tied=True)
    mask = torch.ones_like(tokens())
    mask[1, 4:] = mask[2, :2] = 0
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    batch = {"input_ids": tokens() * mask, "attention_mask": mask, "labels": tokens(), "documents": torch.arange(4)}
    assert check_rescaling(model, rescalings_of(model), batch) < 1e-12


def test_a_family_of_ones_own(monkeypatch):
    path = Path(__file__).parents[1] / "plugin" / "mylab" / "rescalings.py"
    spec = importlib.util.spec_from_file_location("mylab_rescalings", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=11, dim=12, n_layers=2, n_heads=4, hidden_dim=10, max_position_embeddings=16)
    model = DistilBertForMaskedLM(config).eval()
    with pytest.raises(IsolossError, match=r"distilbert.*DistilBertForMaskedLM.*bert, gemma.*RESCALINGS.register"):
        rescalings_of(model)
    monkeypatch.setattr(RESCALINGS, "_entries", dict(RESCALINGS._entries))
    RESCALINGS.register("distilbert", module.distilbert)
    found = rescalings_of(model)
    assert len(found.names) == 10
    assert found.features.nnz == 1
    assert check_rescaling(model, found, INPUTS) < 1e-12
    assert isinstance(RESCALINGS, Registry)


# peft asks transformers by a name that it is about to drop
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_parameter_that_the_rules_do_not_know():
    model = get_peft_model(FAMILY["llama"].build(tied=True), LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(IsolossError, match=r"LlamaForCausalLM has adapters \(model.*: merge them"):
        rescalings_of(model)
    merged = model.merge_and_unload().requires_grad_()
    assert len(rescalings_of(merged).names) == 11


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FAMILY["bert"].build(tied=True).bert, "BertModel has no language-model head"),
        (
            lambda: BertForPreTraining(FAMILY["bert"].config(tied=True)),
            "BertForPreTraining has bert.pooler.dense.weight",
        ),
        (
            lambda: LlamaForSequenceClassification(FAMILY["llama"].config(tied=True)),
            "LlamaForSequenceClassification has no language-model head",
        ),
        (lambda: nn.Linear(2, 2), "no rescalings are known for the module Linear"),
    ],
)
def test_a_model_that_has_no_rescalings(build, message):
    with pytest.raises(IsolossError, match=message):
        rescalings_of(build())


def test_other_errors():
    model = FAMILY["opt"].build(tied=True)
    with pytest.raises(IsolossError, match="granularity is 'row'; it is one of tensor, head, channel, neuron"):
        rescalings_of(model, granularity="row")
    with pytest.raises(IsolossError, match="parameters has mine, which is not the name"):
        rescalings_of(model, parameters={"mine": model.lm_head.weight})
    found = rescalings_of(model)
    for z in (np.zeros(3), np.full(11, np.nan)):
        with pytest.raises(IsolossError, match="it has 11 finite log-factors"):
            rescaled(model, found, z)
    with pytest.raises(IsolossError, match=r"BertForMaskedLM has no parameter model.decoder.embed_tokens.weight"):
        rescaled(FAMILY["bert"].build(tied=True), found, np.zeros(11))
    with pytest.raises(IsolossError, match="dropout"):
        check_rescaling(model.train(), found, INPUTS)


def test_quantized_layers():
    model = FAMILY["llama"].build(tied=False)
    packed = copy.deepcopy(model)
    chosen = {"model.norm.weight": packed.model.norm.weight}
    projection = packed.model.layers[1].self_attn.o_proj
    projection.weight = nn.Parameter(torch.zeros(projection.weight.numel() // 2, 1, dtype=torch.uint8), False)
    with pytest.raises(
        IsolossError, match=r"1.self_attn.o_proj.weight has the shape \(96, 1\) and the type torch.uint8"
    ):
        rescalings_of(packed, parameters=chosen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own remarks on its quantization
        model = torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear})
    with pytest.raises(IsolossError, match=r"the weight of a map is a method.*is it quantized"):
        rescalings_of(model, parameters={"model.norm.weight": model.model.norm.weight})


def test_a_parameter_used_twice_with_fractions():
    """y = W x, z = W y with x fixed and z twice the log-factor of another signal: all are solved exactly."""
    weight, other = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    signals = signals_of(weight=weight, other=other)
    x, y, z, u = signals.fixed(3), signals.channels("y", 3), signals.channels("z", 3), signals.channels("u", 3)
    signals.factors(weight, y, -x)
    signals.factors(weight, z, -y)  # so z = 2 y
    assert np.array_equal(signals.product(u, u)[:1] != 0, [True])
    signals.factors(other, u, -x)
    assert list(signals.generators().values()) == ["y and z", "u"]
    assert signals.groups(z)[1] == [{int(y[0]): 2}]
