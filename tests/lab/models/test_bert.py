"""The BERT that is built, and its logits at predicted positions against those of the whole forward pass."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import BERT
from isoloss.lab.models.bert import states
from isoloss.run_config import ModelConfig


def small(size="d32", seed=0, **changes):
    arguments = {"vocab_size": 12, "max_length": 6, "pad_id": 10, **changes}
    return BERT.new_model(ModelConfig(size=size), seed=seed, **arguments)


def masked_logits(model, input_ids, mask, positions):
    return model.get_output_embeddings()(states(model, input_ids, mask, positions))


def perturbed(size, dtype):
    """A model whose layer norms and biases are not at their initial 1 and 0."""
    model = small(size).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def one_each(positions):
    """One position of each sentence: the first of the given ones, or the first of all."""
    first = positions.int().argmax(dim=1, keepdim=True)
    return torch.zeros_like(positions).scatter_(1, first, True)


def padded_batch():
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(0, 12, (5, 6), generator=generator)
    lengths = torch.tensor([6, 3, 1, 6, 4])
    present = torch.arange(6) < lengths[:, None]
    positions = (torch.rand(5, 6, generator=generator) < 0.5) & present
    return input_ids, present.long(), positions


@pytest.mark.parametrize("size", ["d32", "d128"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("is_one_each", [True, False])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_masked_logits_are_the_whole_models_logits(size, dtype, tolerance, is_padded, is_one_each, kernel):
    model = perturbed(size, dtype)
    model.set_attn_implementation(kernel)
    input_ids, attention_mask, positions = padded_batch()
    positions = one_each(positions) if is_one_each else positions
    mask = attention_mask if is_padded else None
    whole = model(input_ids=input_ids, attention_mask=mask).logits[positions]
    ours = masked_logits(model, input_ids, mask, positions)
    assert ours.shape == (int(positions.sum()), 12)
    torch.testing.assert_close(ours, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_one_each", [True, False])
def test_masked_logits_have_the_whole_models_gradients(is_one_each):
    model = perturbed("d128", torch.float64)
    input_ids, mask, positions = padded_batch()
    positions = one_each(positions) if is_one_each else positions
    parameters = list(model.parameters())
    whole = model(input_ids=input_ids, attention_mask=mask).logits[positions].square().mean()
    ours = masked_logits(model, input_ids, mask, positions).square().mean()
    for expected, got in zip(
        torch.autograd.grad(whole, parameters), torch.autograd.grad(ours, parameters), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_one_each", [True, False])
def test_masked_logits_leave_the_model_as_it_was(is_one_each):
    model = small().eval()
    input_ids, mask, positions = padded_batch()
    positions = one_each(positions) if is_one_each else positions
    before = model(input_ids=input_ids, attention_mask=mask).logits
    masked_logits(model, input_ids, mask, positions)
    with pytest.raises(IndexError):
        masked_logits(model, input_ids, mask, positions[:, :4])
    torch.testing.assert_close(model(input_ids=input_ids, attention_mask=mask).logits, before, rtol=0, atol=0)


def test_nothing_predicted_gives_no_logits():
    input_ids, mask, positions = padded_batch()
    assert masked_logits(small(), input_ids, mask, torch.zeros_like(positions)).shape == (0, 12)


def test_the_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = small(seed=3).state_dict()
    torch.manual_seed(2)
    again, other = small(seed=3).state_dict(), small(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(0.02, rel=0.1)  # 1,024 draws: standard error 2 %


def test_building_leaves_the_callers_random_state_alone():
    before = torch.get_rng_state()
    small()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_built_is_a_post_layer_norm_bert_with_a_tied_decoder_and_no_pooler():
    model = small("d128")
    assert model.training
    assert model.bert.pooler is None
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 4, 2)
    assert (config.intermediate_size, config.max_position_embeddings, config.vocab_size) == (512, 6, 12)
    assert (config.layer_norm_eps, config.pad_token_id, config.hidden_act) == (1e-12, 10, "gelu")
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1


def test_transformers_loads_what_is_saved(tmp_path):
    model = perturbed("d32", torch.float32)
    model.save_pretrained(tmp_path)
    input_ids, mask, _ = padded_batch()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        loaded(input_ids=input_ids, attention_mask=mask).logits, model(input_ids=input_ids, attention_mask=mask).logits
    )


@pytest.mark.parametrize(
    ("config", "pad_id", "message"),
    [
        (ModelConfig(size="d7"), 10, "no model size 'd7'"),
        (ModelConfig(size="d16"), 12, "padding's id is 12; it must be one of the model's ids, 0 to 11"),
    ],
)
def test_bad_settings_are_refused(config, pad_id, message):
    with pytest.raises(IsolossError, match=message):
        BERT.new_model(config, vocab_size=12, max_length=6, pad_id=pad_id, seed=0)


def test_dropout_of_attention_is_the_same_in_law_where_one_position_is_predicted():
    # with dropout in attention alone, the mean over many draws is that of the whole model's own passes
    model = perturbed("d32", torch.float64).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.bert.encoder.layer[-1].attention.self.dropout.p = 0.3
    n = 4000
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]]).expand(n, 6)
    positions = torch.zeros(n, 6, dtype=torch.bool)
    positions[:, 2] = True
    torch.manual_seed(0)
    with torch.no_grad():
        ours = masked_logits(model, ids, None, positions)
        whole = model(input_ids=ids).logits[positions]
    assert float(ours.std(dim=0).min()) > 0
    error = (ours.var(dim=0) / n + whole.var(dim=0) / n).sqrt()
    assert bool(((ours.mean(dim=0) - whole.mean(dim=0)).abs() < 4 * error).all())
    spread = ours.var(dim=0) / whole.var(dim=0)
    assert bool(((spread - 1).abs() < 0.2).all())
