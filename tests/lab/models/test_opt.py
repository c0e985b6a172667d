"""The OPT that is built: its parts, its seed, that it looks only back, and that transformers loads it and writes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import OPT
from isoloss.run_config import ModelConfig


def small(size="d32", seed=0, **changes):
    arguments = {"vocab_size": 12, "max_length": 6, "pad_id": 10, "start_id": 11, "end_id": None, **changes}
    return OPT.new_model(ModelConfig(architecture="opt", size=size), seed=seed, **arguments)


def test_the_weights_are_a_function_of_the_seed_alone():
    before = torch.get_rng_state()
    first = small(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = small(seed=3).state_dict(), small(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(0.02, rel=0.1)  # 1,024 draws: standard error 2 %


def test_what_is_built_is_a_pre_layer_norm_opt_with_a_tied_decoder():
    model = small("d128", end_id=3)
    assert model.training
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.lm_head.bias is None
    assert not model.model.decoder.embed_tokens.weight[10].any()
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 4, 2)
    assert (config.ffn_dim, config.max_position_embeddings, config.vocab_size) == (512, 6, 12)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (10, 11, 3)
    assert config.do_layer_norm_before
    assert config.dropout == config.attention_dropout == 0.1


def test_a_token_changes_no_prediction_before_it():
    model = small("d128").double().eval()
    ids = torch.tensor([[11, 1, 2, 3, 4, 5]])
    other = ids.clone()
    other[0, 3] = 9
    one, two = model(input_ids=ids).logits, model(input_ids=other).logits
    torch.testing.assert_close(one[:, :3], two[:, :3], rtol=0, atol=1e-14)
    assert (one[:, 3:] - two[:, 3:]).abs().amax(dim=-1).min() > 1e-6


def test_transformers_loads_what_is_saved_and_generates(tmp_path):
    model = small()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[11, 1, 2, 3]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    written = loaded.generate(max_length=6, do_sample=False)
    assert written.shape == (1, 6)
    assert written[0, 0] == 11


@pytest.mark.parametrize(
    ("config", "pad_id", "message"),
    [
        (ModelConfig(size="d7"), 10, "no model size 'd7'"),
        (ModelConfig(size="d16"), 12, "padding's id is 12; it must be one of the model's ids, 0 to 11"),
    ],
)
def test_bad_settings_are_refused(config, pad_id, message):
    with pytest.raises(IsolossError, match=message):
        OPT.new_model(config, vocab_size=12, max_length=6, pad_id=pad_id, start_id=11, end_id=None, seed=0)
