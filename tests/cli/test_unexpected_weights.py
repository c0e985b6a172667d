"""Weights that a checkpoint has and its model does not, from the command line."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speaking import as_json, refusal

from isoloss.checkpoints.loading import quiet
from isoloss.lab.models.architectures import BERT
from isoloss.run_config import ModelConfig

NAME = "bert.encoder.layer.0.attention.self.query_norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with quiet():
        model = BERT.new_model(ModelConfig(size="d16"), vocab_size=12, max_length=6, pad_id=10, seed=0)
        model.save_pretrained(folder / "plain")
        model.save_pretrained(folder / "more")
    weights = load_file(folder / "more" / "model.safetensors")
    save_file({**weights, NAME: torch.ones(16)}, folder / "more" / "model.safetensors", metadata={"format": "pt"})
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 10, (8, 6)))
    return folder


@pytest.mark.parametrize(
    ("command", "options", "ignored"),
    [
        ("measure", ("--measures", "trace"), {"model", "architectures"}),
        ("expand", ("--into", "d32", "--device", "cpu"), {"model"}),
    ],
)
def test_they_are_refused_or_left_out_when_asked(command, options, ignored, folder, capsys):
    words = (*options, "--data", folder / "tokens.npy", "--mask-id", "11", "--threads", "1")
    message = refusal(capsys, command, folder / "more", *words)
    assert f"does not have: {NAME}; without them it is another function" in message
    left_out = as_json(capsys, command, folder / "more", *words, "--ignore-unexpected-weights")
    assert_same(left_out, as_json(capsys, command, folder / "plain", *words), ignored)


def assert_same(one, other, ignored):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - ignored:
            assert_same(one[key], other[key], ignored)
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_same(*pair, ignored)
    else:
        assert one == other
