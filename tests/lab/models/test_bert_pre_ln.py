"""The pre-layer-norm BERT against its equations written out, its positions, and its states where it predicts."""

import math

import pytest
import torch
from transformers import AutoModelForMaskedLM

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.lab.models.architectures import PRE_LAYER_NORM_BERT
from isoloss.lab.models.bert import states
from isoloss.run_config import ModelConfig

LENGTHS = (6, 3, 1, 6, 4)


def small(size="d128", seed=0, **changes):
    arguments = {"vocab_size": 12, "max_length": 6, "pad_id": 10, **changes}
    return PRE_LAYER_NORM_BERT.new_model(ModelConfig(architecture="bert-pre-ln", size=size), seed=seed, **arguments)


def perturbed(size="d128", dtype=torch.float64):
    """A model whose layer norms and biases are not at their initial 1 and 0."""
    model = small(size).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def padded():
    ids = torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
    return ids.masked_fill(mask == 0, 10), mask


def normed(layer_norm, h):
    centered = h - h.mean(dim=-1, keepdim=True)
    return (
        centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-12).sqrt() * layer_norm.weight + layer_norm.bias
    )


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(block, h):
    parts = [linear(h).view(len(h), 2, 64) for linear in (block.self.query, block.self.key, block.self.value)]
    q, k, v = (part.transpose(0, 1) for part in parts)
    weights = (q @ k.transpose(1, 2) / 8).softmax(dim=-1)  # heads of 64
    return block.output.dense((weights @ v).transpose(0, 1).reshape(len(h), 128))


def logits_of(model, tokens):
    """The logits of one sentence without padding, by the equations of a pre-layer-norm BERT."""
    base, head = model.roberta_prelayernorm, model.lm_head
    embeddings = base.embeddings
    words = embeddings.word_embeddings.weight
    h = words[tokens] + embeddings.position_embeddings.weight[11 : 11 + len(tokens)]
    h = normed(embeddings.LayerNorm, h + embeddings.token_type_embeddings.weight[0])
    for layer in base.encoder.layer:
        h = h + attention(layer.attention, normed(layer.attention.LayerNorm, h))
        inner = gelu(layer.intermediate.dense(normed(layer.intermediate.LayerNorm, h)))
        h = h + layer.output.dense(inner)
    h = normed(base.LayerNorm, h)
    return normed(head.layer_norm, gelu(head.dense(h))) @ words.T + head.bias


def test_the_logits_are_those_of_the_equations():
    model = perturbed()
    ids, mask = padded()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, tokens, length in zip(logits, ids.tolist(), LENGTHS, strict=True):
            torch.testing.assert_close(row[:length], logits_of(model, tokens[:length]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("is_one_each", [True, False])
def test_states_at_predicted_positions_give_the_whole_models_logits_and_gradients(is_padded, is_one_each):
    model = perturbed()
    ids, attention_mask = padded()
    mask = attention_mask if is_padded else None
    positions = (torch.rand(5, 6, generator=torch.Generator().manual_seed(3)) < 0.5) & attention_mask.bool()
    if is_one_each:
        positions = torch.zeros_like(positions).scatter_(1, positions.int().argmax(dim=1, keepdim=True), True)
    whole = model(input_ids=ids, attention_mask=mask).logits[positions]
    ours = model.get_output_embeddings()(states(model, ids, mask, positions))
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    for got, expected in zip(
        torch.autograd.grad(ours.square().mean(), parameters),
        torch.autograd.grad(whole.square().mean(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[positions], whole, rtol=0, atol=0)


def test_position_rows_of_no_token_have_no_gradient_and_the_others_do():
    model = perturbed("d32")
    ids, mask = padded()
    loss = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].square().mean()
    gradient = torch.autograd.grad(loss, model.roberta_prelayernorm.embeddings.position_embeddings.weight)[0]
    assert gradient.abs().amax(dim=1).gt(0).tolist() == [False] * 11 + [True] * 6


def test_the_trace_knows_a_rule_for_every_parameter():
    ids, mask = padded()
    labels = ids.masked_fill(torch.arange(6) != 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert list(fisher_trace(perturbed("d32"), [batch], seed=0).details["parameters_by_autograd"]) == []


def test_what_is_built_has_a_tied_decoder_and_no_pooler():
    model = small(seed=3)
    base, config = model.roberta_prelayernorm, model.config
    assert model.training
    assert base.pooler is None
    assert model.lm_head.decoder.weight is base.embeddings.word_embeddings.weight
    assert model.lm_head.decoder.bias is model.lm_head.bias
    assert not base.embeddings.word_embeddings.weight[10].any()
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 4, 2)
    assert (config.intermediate_size, config.max_position_embeddings, config.vocab_size) == (512, 17, 12)
    assert (config.layer_norm_eps, config.pad_token_id, config.hidden_act) == (1e-12, 10, "gelu")
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1
    assert config.type_vocab_size == 2
    again, other = small(seed=3).state_dict(), small(seed=4).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    assert not torch.equal(other["lm_head.dense.weight"], again["lm_head.dense.weight"])


def test_transformers_loads_what_is_saved(tmp_path):
    model = perturbed("d32", torch.float32)
    model.save_pretrained(tmp_path)
    ids, mask = padded()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask).logits, expected)


def test_bad_settings_are_refused():
    with pytest.raises(IsolossError, match="padding's id is 12; it must be one of the model's ids, 0 to 11"):
        small(pad_id=12)
    with pytest.raises(IsolossError, match="no model size 'h16'"):
        small("h16")
