"""Checkpoints without sdpa attention, and sequences as long as a model takes, through the commands."""

import numpy as np
import pytest
import tiny_models
import torch
from speaking import as_json, refusal, trace_of

from isoloss.checkpoints.loading import quiet
from isoloss.cli.main import main
from isoloss.flatness import fisher_trace


@pytest.fixture
def save(tmp_path):
    """Saves a tiny model of a class and token ids of a length; returns the model and the words that name the two."""

    def to_folder(name, length):
        model = tiny_models.build(tiny_models.known()[name], dtype=torch.float32)
        with quiet():
            model.save_pretrained(tmp_path / "model")
        np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(3, 12, (12, length)))
        return model, [str(tmp_path / "model"), "--data", str(tmp_path / "ids.npy")]

    return to_folder


def test_every_command_takes_a_model_without_sdpa_attention(save, tmp_path, capsys):
    model, words = save("GPTNeoForCausalLM", 6)
    tokens = torch.from_numpy(np.load(words[-1]))
    expected = fisher_trace(model, [{"input_ids": tokens, "labels": tokens}]).value
    assert main(["measure", *words]) == 0
    out, err = capsys.readouterr()
    assert "GPTNeoForCausalLM, causal, attention eager; all 12 sequences" in err
    assert "cpu, float32, attention eager" in out
    assert trace_of(as_json(capsys, "measure", *words))["value"] == pytest.approx(expected, rel=1e-5)
    loss, trace = as_json(capsys, "measure", *words)["evaluations"]
    with torch.no_grad():
        assert loss["estimates"]["loss"]["value"] == pytest.approx(float(model(tokens, labels=tokens).loss), rel=1e-5)
    assert trace["estimates"]["trace"]["value"] == pytest.approx(expected, rel=1e-5)
    (tmp_path / "teacher.toml").write_text(f'kind = "teacher"\ncheckpoint = "{words[0]}"\nlength = 4\n')
    assert main(["sample", str(tmp_path / "teacher.toml")]) == 0
    assert "does not support" in refusal(capsys, "measure", *words, "--attention", "sdpa")
    sentence = refusal(capsys, "measure", *words, "--attention", "fastest")
    assert "--attention is 'fastest'; it must be one of auto, sdpa, eager" in sentence


@pytest.mark.parametrize(("name", "longest"), [("EsmForMaskedLM", 31), ("MPNetForMaskedLM", 30)])
def test_sequences_may_be_as_long_as_the_model_takes(save, capsys, name, longest):
    _, words = save(name, longest)
    assert trace_of(as_json(capsys, "measure", *words, "--mask-id", "12"))["value"] > 0
    _, words = save(name, longest + 1)
    sentence = refusal(capsys, "measure", *words, "--mask-id", "12")
    assert f"have {longest + 1} tokens and {words[0]} takes {longest} at most" in sentence
