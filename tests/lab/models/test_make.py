"""A model for a language by its architecture, and its predictions against those of the whole forward pass."""

import dataclasses
import types

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    ModernBertForMaskedLM,
    OPTForCausalLM,
    RobertaPreLayerNormForMaskedLM,
)

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.models.architectures import BERT, Shape
from isoloss.lab.models.lstm import LSTMForMaskedLM
from isoloss.lab.models.make import make_model, predicted_logits, predicted_states
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.masking import objective_batch

LANGUAGE = PRESETS["pcfg-varied"][0].build()  # up to 8 of 32 tokens
KINDS = {
    **dict.fromkeys(("bert", "bert-pre-ln", "lstm", "modernbert"), "masked"),
    **dict.fromkeys(("opt", "llama"), "causal"),
}


def settings(architecture, *, large=False):
    size = "h64" if large else "h16"
    return ModelConfig(architecture=architecture, size=size if architecture == "lstm" else "d128" if large else "d16")


def batch_of(architecture):
    sentences = LANGUAGE.sample(20, generator=generator(0, "sentences"))
    objective = ObjectiveConfig(kind=KINDS[architecture])
    return objective_batch(sentences, LANGUAGE, objective, generator=generator(0, "masks"))


@pytest.mark.parametrize(
    ("architecture", "kind", "positions"),
    [
        ("bert", BertForMaskedLM, 8),
        ("bert-pre-ln", RobertaPreLayerNormForMaskedLM, 41),  # the first belongs to the id 33
        ("lstm", LSTMForMaskedLM, None),
        ("modernbert", ModernBertForMaskedLM, 8),
        ("opt", OPTForCausalLM, 9),
        ("llama", LlamaForCausalLM, 9),
    ],
)
def test_what_is_built_for_a_language(architecture, kind, positions):
    model = make_model(dataclasses.replace(settings(architecture, large=True), dropout=0.2), LANGUAGE, seed=0)
    assert type(model) is kind
    assert model.training
    config = model.config
    assert (config.vocab_size, config.pad_token_id, config._attn_implementation) == (34, 32, "eager")
    assert getattr(config, "max_position_embeddings", None) == positions
    assert getattr(config, "bos_token_id", None) == (33 if KINDS[architecture] == "causal" else None)
    embedding = model.get_input_embeddings().weight
    assert not embedding[32].any()
    assert model.get_output_embeddings().weight is embedding
    assert {value for name, value in config.to_dict().items() if "dropout" in name and value} == {0.2}
    bert = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    own = {"bert": bert, "bert-pre-ln": bert, "opt": {"do_layer_norm_before": True}}.get(architecture, {})
    assert own.items() <= config.to_dict().items()
    assert getattr(model.base_model, "pooler", None) is None


@pytest.mark.parametrize("architecture", KINDS)
def test_the_weights_are_a_function_of_the_seed_alone(architecture):
    before = torch.get_rng_state()
    first = make_model(settings(architecture, large=True), LANGUAGE, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = (make_model(settings(architecture, large=True), LANGUAGE, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name, value in first.items() if value.ndim == 2 and value.numel() >= 4096]
    assert matrices
    for name in matrices:
        assert not torch.equal(first[name], other[name])
        rows, columns = first[name].shape
        if architecture == "modernbert":  # its normal distributions are cut off, and of several widths
            continue
        # an LSTM's are Glorot's: uniform up to the root of 6 / (rows + columns)
        deviation = (2 / (rows + columns)) ** 0.5 if "_l0" in name else 0.02
        assert first[name].std() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("architecture", KINDS)
def test_transformers_loads_what_is_saved(tmp_path, architecture):
    causal = KINDS[architecture] == "causal"
    model = make_model(settings(architecture), LANGUAGE, seed=0).eval()
    model.save_pretrained(tmp_path)
    loaded = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_pretrained(tmp_path).eval()
    inputs = {name: tensor for name, tensor in batch_of(architecture).items() if name != "labels"}
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    if causal:
        written = loaded.generate(max_length=6, do_sample=False)
        assert written.shape == (1, 6)
        assert written[0, 0] == 33


@pytest.mark.parametrize("architecture", ["opt", "llama"])
def test_a_token_changes_no_prediction_before_it(architecture):
    model = make_model(settings(architecture, large=True), LANGUAGE, seed=0).double().eval()
    ids = torch.tensor([[33, 1, 2, 3, 4, 5]])
    other = ids.clone()
    other[0, 3] = 9
    one, two = model(input_ids=ids).logits, model(input_ids=other).logits
    torch.testing.assert_close(one[:, :3], two[:, :3], rtol=0, atol=1e-14)
    assert (one[:, 3:] - two[:, 3:]).abs().amax(dim=-1).min() > 1e-6


def test_what_cannot_be_built_is_refused():
    with pytest.raises(IsolossError, match="lstm has no model size 'd16'"):
        make_model(ModelConfig(architecture="lstm", size="d16"), LANGUAGE, seed=0)
    with pytest.raises(IsolossError, match="3 dimensions; the rotary positions of llama need an even number"):
        make_model(ModelConfig(architecture="llama", size="d16", width=24, heads=8), LANGUAGE, seed=0)
    for name in KINDS:
        with pytest.raises(IsolossError, match="padding's id is 12; it must be one of the model's ids, 0 to 11"):
            MODELS.load(name).new_model(settings(name), vocab_size=12, max_length=6, pad_id=12, seed=0)


FREE = {
    **{name: {"width": 24, "heads": 4, "layers": 2, "ffn": 20} for name in KINDS if name != "lstm"},
    "lstm": {"width": 7, "layers": 3, "directions": 1},
}


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("is_free", [True, False])
def test_predictions_are_those_of_the_whole_model(architecture, is_padded, is_free):
    config = settings(architecture, large=True)
    config = dataclasses.replace(config, **FREE[architecture]) if is_free else config
    model = make_model(config, LANGUAGE, seed=0).double().eval()
    batch = batch_of(architecture)
    if not is_padded:
        whole = batch["attention_mask"].all(dim=1)
        batch = {name: value[whole] for name, value in batch.items() if name != "attention_mask"}
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    causal = KINDS[architecture] == "causal"
    expected = []
    for i, row in enumerate(batch["labels"].tolist()):
        expected += [logits[i, t - 1 if causal else t] for t, label in enumerate(row) if label >= 0]
    got = predicted_logits(model, batch, causal=causal)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-12, atol=1e-12)
    output = model.get_output_embeddings()
    states = predicted_states(model, batch)
    torch.testing.assert_close(torch.nn.functional.linear(states, output.weight, output.bias), got, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_any_module_with_logits_will_do(causal):
    class Position(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return types.SimpleNamespace(logits=torch.arange(input_ids.shape[1])[None, :, None].expand(2, -1, 3))

    labels = torch.tensor([[-100, 1, -100, 2], [-100, -100, 0, -100]])
    got = predicted_logits(Position(), {"input_ids": labels, "labels": labels}, causal=causal)
    assert got[:, 0].tolist() == ([0, 2, 1] if causal else [1, 3, 2])


def test_an_architecture_from_outside_is_registered_built_and_checked(monkeypatch):
    class Deep(type(BERT)):
        default_size = "two"
        sizes = {"two": Shape(8, 1, 2, 16)}  # noqa: RUF012

        def build(self, config, language, *, seed):
            shape = self.shape(config)
            own = BertConfig(
                vocab_size=language.model_vocab_size,
                hidden_size=shape.d_model,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                intermediate_size=shape.intermediate,
                max_position_embeddings=language.max_length,
            )
            return BertForMaskedLM(own)

    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    MODELS.register("deep", Deep())
    config = ModelConfig(architecture="deep")
    assert str(config) == "deep two"
    configs.check(config)
    model = make_model(config, LANGUAGE, seed=0)
    assert model.num_parameters() == MODELS.load("deep").num_parameters(
        Shape(8, 1, 2, 16), LANGUAGE.model_vocab_size, LANGUAGE.max_length
    )
    assert predicted_logits(model, batch_of("bert"), causal=False).shape[1] == LANGUAGE.model_vocab_size
    with pytest.raises(IsolossError, match="deep has no model size 'd64'; its sizes are two"):
        configs.check(ModelConfig(architecture="deep", size="d64"))


def test_states_of_a_class_that_is_not_registered_are_refused():
    with pytest.raises(IsolossError, match="Linear is the class of no registered architecture"):
        predicted_states(torch.nn.Linear(1, 1), {"labels": torch.zeros(1, 1)})
