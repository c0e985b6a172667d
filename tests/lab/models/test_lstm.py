"""The LSTM that is built: its parts, its seed and its refusals."""

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import LSTM
from isoloss.run_config import ModelConfig


def small(size="h32", seed=0, dropout=0.1):
    return LSTM.new_model(
        ModelConfig(architecture="lstm", size=size, dropout=dropout), vocab_size=12, max_length=6, pad_id=10, seed=seed
    )


def test_the_weights_are_a_function_of_the_seed_alone():
    before = torch.get_rng_state()
    first = small(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = small(seed=3).state_dict(), small(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lstm.forwards.0.weight_hh_l0"], other["lstm.forwards.0.weight_hh_l0"])
    assert not torch.equal(first["lstm.forwards.0.weight_hh_l0"], first["lstm.backwards.0.weight_hh_l0"])


def test_what_is_built_is_a_bidirectional_lstm_with_a_tied_decoder():
    model = small("h128", dropout=0.2)
    assert model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.lstm.embeddings.weight[10].any()
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.pad_token_id) == (128, 4, 12, 10)
    assert [len(model.lstm.forwards), len(model.lstm.backwards)] == [4, 4]
    assert model.lstm.dropout.p == 0.2
    assert model.config._attn_implementation == "eager"
    weight = model.lstm.forwards[1].weight_ih_l0
    bound = (6 / (512 + 256)) ** 0.5  # Glorot's, of a map from 256 to 4 * 128
    assert 0.99 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize(
    ("config", "pad_id", "message"),
    [
        (ModelConfig(architecture="lstm", size="d64"), 10, "lstm has no model size 'd64'; its sizes are h16, h32, .*"),
        (ModelConfig(architecture="lstm", size="h16"), 12, "padding's id is 12; it must be one of the model's ids"),
    ],
)
def test_bad_settings_are_refused(config, pad_id, message):
    with pytest.raises(IsolossError, match=message):
        LSTM.new_model(config, vocab_size=12, max_length=6, pad_id=pad_id, seed=0)
