"""Squared gradient norms by sequence and parameter, against one plain backward pass a sequence."""

import gc
import weakref

import pytest
import torch
from plain_gradients import ARCHITECTURES, DEBERTA, VOCAB, assert_norms, batch_of, build, make, measure, reference

from isoloss.errors import IsolossError
from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.flatness._ghost.factors import Dense, Outer

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
    ("name", "tied"), [(name, True) for name in ARCHITECTURES] + [("bert", False), ("gpt2", False)]
)
def test_norms_are_those_of_one_backward_pass_a_sequence(name, tied):
    causal, wide = ARCHITECTURES[name][3:]
    model = build(name, tied=tied)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    norms, expected, predictor, _ = measure(model, batch_of(), causal=causal)
    assert predictor.slow_parameters == ()
    assert str(predictor.selection) == f"before {_GATHERED[name]}"
    # some norms of transformers compute in float32 whatever the model's dtype
    assert_norms(norms.by_column, expected, rtol=1e-10 if wide else 1e-5)
    assert (norms.by_column[3] == 0).all()


@pytest.mark.parametrize("name", ["bert", "qwen3", "gemma"])
def test_norms_in_float32(name):
    causal = ARCHITECTURES[name][3]
    model = build(name, dtype=torch.float32)
    norms, expected, predictor, _ = measure(model, batch_of(), causal=causal)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_norms_in_bfloat16_are_near_those_of_plain_gradients(name):
    model = build(name, dtype=torch.bfloat16)
    norms, expected, predictor, _ = measure(model, batch_of(), causal=ARCHITECTURES[name][3])
    assert norms.by_column.dtype == torch.float64
    assert predictor.slow_parameters == ()
    # a plain gradient is rounded to 8 bits after sums that this one takes in float32
    torch.testing.assert_close(norms.by_column.sum(1), expected.sum(1), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", ["roberta", "opt", "gpt2"])
def test_every_position_predicted(name):
    causal = ARCHITECTURES[name][3]
    norms, expected, _, _ = measure(build(name), batch_of(every=True, causal=causal), causal=causal)
    assert_norms(norms.by_column, expected, rtol=1e-10)


@pytest.mark.parametrize(("sequences", "length"), [(1, 6), (4, 4), (2, 2), (6, 3), (2, 7)])
def test_any_number_of_sequences(sequences, length):
    """Also where it equals the number of tokens, of heads, or of the sequences that were checked."""
    batch = batch_of(sequences=sequences, length=max(length, 4))
    norms, expected, predictor, _ = measure(build("bert"), batch, causal=False)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-10)


@pytest.mark.parametrize("kind", ["", "V2"])  # V3 is in test_sharing
def test_positions_that_sequences_share_and_those_behind_a_layer_norm(kind):
    options = {**DEBERTA, "pooler_hidden_size": 16}
    model = make(f"Deberta{kind}Config", f"Deberta{kind}ForMaskedLM", options)
    norms, expected, predictor, _ = measure(model, batch_of(), causal=False)
    assert predictor.slow_parameters == ()
    assert any("intermediate.dense.weight" in name for name in predictor.names)
    assert not any("intermediate" in name or "word_embeddings" in name for name in predictor.slow_parameters)
    assert_norms(norms.by_column, expected, rtol=1e-10 if kind else 1e-5)


def test_only_the_parameters_asked_for():
    model = build("bert")
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    names, expected, _ = reference(model, batch := batch_of(), torch.ones(12, VOCAB), causal=False)
    _, _, predictor, _ = measure(model, batch, causal=False)
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
