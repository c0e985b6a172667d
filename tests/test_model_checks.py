"""How many tokens a model takes, by running it, and what it is taken for by its class."""

import pytest
import tiny_models
import torch
from transformers import LlamaConfig

from isoloss.model_checks import is_causal_class, max_length, run_on_ids


def takes(model, length):
    try:
        return run_on_ids(model, torch.full((1, length), 5)).shape[1] == length
    except (RuntimeError, IndexError):
        return False


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("BertForMaskedLM", 32),
        ("GPT2LMHeadModel", 32),
        ("OPTForCausalLM", 32),  # whose table has two rows more
        ("RobertaForMaskedLM", 31),  # the first position is the padding id + 1
        ("EsmForMaskedLM", 31),
        ("MPNetForMaskedLM", 30),  # whatever its padding id is
        ("LongformerForMaskedLM", 31),  # which pads its sequences
        ("ProphetNetForCausalLM", 30),  # which looks one token ahead
        ("MptForCausalLM", 32),  # without a table, and its config has another name for it
        ("WhisperForCausalLM", 32),
    ],
)
def test_the_longest_sequence_is_what_the_model_takes(name, longest):
    model = tiny_models.build(tiny_models.known()[name], dtype=torch.float32)
    assert max_length(model) == longest
    assert takes(model, longest)
    assert not takes(model, longest + 1)


def test_where_padding_starts_does_not_matter():
    for padding in (1, 3):
        architecture = tiny_models.known()["EsmForMaskedLM"]
        config = tiny_models.tiny_config(architecture)
        config.pad_token_id = padding
        model = architecture.model(config).eval()
        assert max_length(model) == 31 - padding
        assert takes(model, 31 - padding)
        assert not takes(model, 32 - padding)


@pytest.mark.parametrize("name", ["XLNetLMHeadModel", "BloomForCausalLM", "MambaForCausalLM"])
def test_some_models_have_no_longest_sequence(name):
    model = tiny_models.build(tiny_models.known()[name], dtype=torch.float32)
    assert max_length(model) is None
    assert takes(model, 100)


def test_positions_that_are_computed_end_where_the_config_says():
    model = tiny_models.build(tiny_models.known()["LlamaForCausalLM"], dtype=torch.float32)
    assert max_length(model) == 32


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("OwnForMaskedLM", False),
        ("BertForPreTraining", False),
        ("OwnForCausalLM", True),
        ("GPT2LMHeadModel", True),
        ("Gemma3ForConditionalGeneration", True),
        ("LlavaForConditionalGeneration", True),
        ("BertModel", None),
        ("T5ForConditionalGeneration", None),
    ],
)
def test_a_class_is_known_by_its_name_or_by_what_transformers_lists(name, causal):
    assert is_causal_class(name, LlamaConfig()) is causal
