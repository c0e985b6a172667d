"""Checkpoints of Academic Budget BERT, the code that the paper trains with."""

import json

import pytest
import torch
from safetensors.torch import save_file

import academic_models
from academic_models import make_config, random_weights, save
from isoloss import load_model
from isoloss.errors import IsolossError

IDS = torch.tensor([[2, 7, 4, 9, 3, 0], [2, 11, 6, 4, 5, 3]])
MASK = (IDS != 0).long()
VARIANTS = [
    {},
    {"fused_linear_layer": False, "sparse_mask_prediction": False},
]


@pytest.mark.parametrize("mode", ["pre-ln", "post-ln"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_logits_are_those_of_the_definition(tmp_path, mode, variant):
    config = make_config(mode, **variant)
    weights = random_weights(config)
    folder = save(tmp_path / "model", config, weights)
    loaded = load_model(folder, device="cpu")
    assert loaded.kind == "masked"
    with torch.no_grad():
        found = loaded.model(input_ids=IDS, attention_mask=MASK).logits
    expected = academic_models.logits(weights, config, IDS, MASK)
    present = MASK.bool()
    torch.testing.assert_close(found[present], expected[present], rtol=0, atol=1e-5)
    # a parameter that its function has not is none of its flatness
    trainable = {name for name, value in loaded.model.named_parameters() if value.requires_grad}
    has_bias = bool(trainable & {"lm_head.bias", "cls.predictions.bias"})
    assert has_bias == (not config["sparse_mask_prediction"])


def test_safetensors_are_read_like_a_bin_file(tmp_path):
    config = make_config("pre-ln")
    weights = random_weights(config)
    one = load_model(save(tmp_path / "one", config, weights), device="cpu").model
    other = save(tmp_path / "other", config, weights)
    (other / "pytorch_model.bin").unlink()
    save_file({key: value.clone() for key, value in weights.items()}, other / "model.safetensors")
    for name, value in load_model(other, device="cpu").model.state_dict().items():
        assert torch.equal(value, one.state_dict()[name])


def missing(folder, weights):
    del weights["bert.encoder.layer.1.PreAttentionLayerNorm.bias"]


def unexpected(folder, weights):
    weights["bert.encoder.layer.1.attention.gate"] = torch.zeros(3)


def of_another_shape(folder, weights):
    weights["bert.embeddings.LayerNorm.bias"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_ln_mode": "deep-norm"}, "encoder_ln_mode 'deep-norm'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type 'rms_norm'"),
        ({"hidden_act": "relu"}, "the activation 'relu'"),
        (missing, "lacks weights of RobertaPreLayerNormForMaskedLM: .*layer.1.attention.LayerNorm.bias"),
        (unexpected, "has weights that a RobertaPreLayerNormForMaskedLM .* does not have: .*attention.gate"),
        (of_another_shape, "weights of another shape than its config.json says: .*LayerNorm.bias"),
    ],
)
def test_what_would_be_another_function_is_refused(tmp_path, change, message):
    config = make_config("pre-ln")
    weights = random_weights(config)
    if isinstance(change, dict):
        config |= change
    else:
        change(tmp_path, weights)
    with pytest.raises(IsolossError, match=message):
        load_model(save(tmp_path / "model", config, weights), device="cpu")


def test_a_bin_file_of_another_model_is_still_refused(tmp_path):
    config = make_config("post-ln")
    folder = save(tmp_path / "model", config, random_weights(config))
    del config["encoder_ln_mode"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(IsolossError, match="only as a pickle"):
        load_model(folder, device="cpu")
