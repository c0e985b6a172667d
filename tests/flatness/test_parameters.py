"""What a measure is of: embeddings apart, quantized layers that it misses, and parameters that are given."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from flatness_measures import MEASURES, STREAMS
from plain_gradients import batch_of, build, reference
from torch import nn

from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import (
    empirical_fisher_trace,
    fisher_trace,
)
from isoloss.flatness._parameters import embeddings, quantized_weights

# torch's own remarks on its quantization, and on what it cannot differentiate
QUANTIZING = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:quantized.*an autograd kernel was not registered:UserWarning",
    "ignore:.*TypedStorage is deprecated:UserWarning",
)


def quantized(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


def batches(count=2):
    return [batch_of(seed=seed) for seed in range(count)]


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tied", "expected"),
    [
        ("bert", True, {"word_embeddings", "position_embeddings", "token_type_embeddings"}),
        ("bert", False, {"word_embeddings", "position_embeddings", "token_type_embeddings"}),
        ("gpt2", True, {"wte", "wpe"}),
        ("llama", False, {"embed_tokens"}),
    ],
)
def test_embeddings_are_those_of_tokens_positions_and_types(name, tied, expected):
    model = build(name, tied=tied)
    found = embeddings(model, dict(model.named_parameters()))
    assert {part.split(".")[-2] for part in found} == expected
    owned = {id(dict(model.named_parameters())[key]) for key in found}
    assert (id(head_of(model)) in owned) is tied


def head_of(model):
    return model.get_output_embeddings().weight


@pytest.mark.parametrize("sequences", [5, 60])  # too few for control variates, and enough
def test_the_trace_without_embeddings_is_that_of_the_other_parameters(sequences):
    model = build("bert")
    inputs = [batch_of(sequences=sequences, seed=3)]
    whole = fisher_trace(model, inputs)
    others = {name: value for name, value in model.named_parameters() if name not in whole.details["embeddings"]}
    alone = fisher_trace(model, inputs, parameters=others)
    assert whole.details["embeddings"] == embeddings(model, dict(model.named_parameters()))
    assert whole.details["without_embeddings"] == pytest.approx(alone.value, rel=1e-9)
    assert whole.details["without_embeddings_stderr"] == pytest.approx(alone.stderr, rel=1e-9)
    assert 0 < alone.value < whole.value
    assert alone.details["without_embeddings"] == alone.value
    assert alone.details["embeddings"] == []


def test_a_comparison_pairs_what_is_left_without_embeddings():
    models = {"a": build("bert"), "b": build("bert")}
    with torch.no_grad():
        for parameter in models["b"].parameters():
            parameter.mul_(1.02)
    inputs = [batch_of(sequences=60, seed=3)]
    found = compare_traces(models, inputs)
    measured = []
    for model in models.values():
        named = dict(model.named_parameters())
        others = {name: value for name, value in named.items() if name not in embeddings(model, named)}
        measured.append(fisher_trace(model, inputs, causal=False, parameters=others))
    a, b = measured
    assert [part.value for part in found.of("without-embeddings").values()] == pytest.approx(
        [a.value, b.value], rel=1e-9
    )
    pair = found.difference("without-embeddings", "a", "b")
    n = a.samples
    expected = float(((a.influence - b.influence) ** 2).sum() / (n * (n - 1))) ** 0.5
    assert (pair.value, pair.stderr) == pytest.approx((a.value - b.value, expected), rel=1e-8)
    assert pair.stderr < 0.5 * (a.stderr**2 + b.stderr**2) ** 0.5  # paired


# --- quantized layers ------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """A linear map as libraries for 8 bits keep it: integers and scales, through which activations have gradients."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scales).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, values):
        return F.linear(values, self.weight.to(values) * self.scales.to(values), self.bias)


@QUANTIZING
@pytest.mark.parametrize("measure", [*STREAMS, "eigenvalue"])
def test_layers_that_pass_no_gradient_are_refused(measure):
    model = build("bert", tied=False, dtype=torch.float32)
    model.bert.encoder.layer[1] = quantized(model.bert.encoder.layer[1])
    with pytest.raises(IsolossError, match="6 quantized layers of BertForMaskedLM pass no gradient"):
        MEASURES[measure](model, batches())


@QUANTIZING
@pytest.mark.parametrize("measure", [*STREAMS, "eigenvalue"])
def test_a_model_none_of_whose_predictions_depends_on_a_measured_parameter_is_refused(measure):
    model = quantized(build("bert", tied=False, dtype=torch.float32))
    before = {"word": model.bert.embeddings.word_embeddings.weight}
    with pytest.raises(IsolossError, match=r"gradient|reaches its logits"):
        MEASURES[measure](model, batches(), parameters=before)


@QUANTIZING
def test_the_refusal_says_what_stands_in_the_way():
    model = quantized(build("bert", tied=False, dtype=torch.float32))
    number = sum(part.in_features * part.out_features for part in model.modules() if hasattr(part, "in_features"))
    expected = f"{number:,} weights are quantized, and only floating-point ones are measured"
    with pytest.raises(IsolossError, match=expected):
        fisher_trace(model, batches(), parameters={"word": model.bert.embeddings.word_embeddings.weight})


@QUANTIZING
def test_parameters_after_a_quantized_layer_can_be_measured():
    model = build("bert", tied=False, dtype=torch.float32)
    layer = model.bert.encoder.layer[1].output
    number = layer.dense.weight.numel()
    layer.dense = quantized(nn.Sequential(layer.dense))[0]
    after = dict(model.cls.named_parameters())
    trace = fisher_trace(model, batches(), parameters=after)
    assert trace.details["quantized_weights"] == number == quantized_weights(model)
    assert trace.details["parameters_without_gradient"] == ["predictions.bias"]  # an untied head does not use it


def test_a_model_with_8_bit_weights_is_right_in_the_others_and_says_what_it_leaves_out():
    model = build("bert", dtype=torch.float64)
    number = 0
    for layer in model.bert.encoder.layer:
        number += layer.intermediate.dense.weight.numel()
        layer.intermediate.dense = Int8Linear(layer.intermediate.dense)
    inputs = batch_of()
    with pytest.warns(IsolossWarning, match=f"{number:,} weights of 2 quantized layers") as said:
        found = empirical_fisher_trace(model, [one_position(inputs)])
    assert len(said) == 1
    assert found.details["quantized_weights"] == number
    one = one_position(inputs)
    logits = model(input_ids=one["input_ids"], attention_mask=one["attention_mask"]).logits.detach()
    chosen = one["labels"] != -100
    cotangent = logits[chosen].softmax(dim=-1) - F.one_hot(one["labels"][chosen], logits.shape[-1])
    names, norms, _ = reference(model, one, cotangent, causal=False)
    expected = norms.sum(dim=0) / int(chosen.sum())
    assert list(found.by_parameter) == names
    assert list(found.by_parameter.values()) == pytest.approx(expected.tolist(), rel=1e-8, abs=1e-14)


def one_position(batch):
    """The batch with the first label of each sequence alone."""
    first = (batch["labels"] != -100).int().cumsum(dim=1) == 1
    return {**batch, "labels": batch["labels"].masked_fill(~(first & (batch["labels"] != -100)), -100)}


def test_a_model_without_quantized_layers_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fisher_trace(build("bert"), batches()).details["quantized_weights"] == 0
