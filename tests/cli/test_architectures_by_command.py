"""Architectures through the commands: shapes of one's own, other attention, other lengths, weights too many."""

import json

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from speaking import as_json, refusal, trace_of
from transformers import AutoModelForMaskedLM

from isoloss.checkpoints.loading import load_model, quiet
from isoloss.cli.main import main
from isoloss.flatness import fisher_trace
from isoloss.runs import Run

QUICK = ("--batch-size", "8", "--device", "cpu", "--threads", "1")


def train(path, *words, steps=3):
    assert main(["train", str(path), "--language", "pcfg-laptop", "--steps", str(steps), *words, *QUICK]) == 0


def test_four_heads_at_width_64_learn(tmp_path):
    path = tmp_path / "run"
    train(path, "--size", "d64", "--heads", "4", "--learning-rate", "0.003", steps=150)
    model = load_model(path / "checkpoints" / "step-150").model
    assert (model.config.hidden_size, model.config.num_attention_heads) == (64, 4)
    losses = [line["loss_nats"] for line in Run(path).metrics()]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize(
    "words",
    [
        ("--architecture", "bert-pre-ln", "--size", "d16", "--layers", "2", "--heads", "2"),
        ("--architecture", "opt", "--width", "24", "--heads", "3", "--ffn", "20"),
        ("--architecture", "lstm", "--width", "6", "--layers", "3", "--directions", "1"),
    ],
)
def test_every_architecture_trains_and_resumes_and_is_measured(tmp_path, words, capsys):
    path = tmp_path / "run"
    train(path, *words)
    train(path, *words)  # complete: the config is the same
    assert main(["measure", str(path), "--measures", "trace", "--num-sequences", "64", "--device", "cpu"]) == 0
    capsys.readouterr()
    [listed] = as_json(capsys, "ls", "runs", "--folder", tmp_path)["runs"]
    assert listed["model"].startswith(words[1])
    for name, value in zip(words[2::2], words[3::2], strict=True):
        assert f"{name.removeprefix('--')} {value}".replace("size ", "") in listed["model"]


@pytest.mark.parametrize("what", ["models", "sizes"])
def test_the_lists_tell_of_free_shapes(capsys, what):
    assert main(["ls", what]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "For any other shape, give isoloss train a size and --layers, --width, --heads or --ffn" in printed


def test_a_free_shape_inside_a_free_shape(tmp_path, capsys):
    path = tmp_path / "run"
    train(path, "--size", "d16", "--heads", "2")
    common = ("--num-sequences", "32", "--device", "cpu")
    assert "its heads have 8 dimensions, and those have 32" in refusal(capsys, "expand", path, "--into", "d32", *common)
    large = ("--into", "d32", "--heads", "4", "--layers", "3", "--output", tmp_path / "large")
    document = as_json(capsys, "expand", path, *large, *common)
    assert document["into"] == "d32, layers 3, heads 4"
    assert document["shape"] == {"d_model": 32, "num_heads": 4, "num_layers": 3, "intermediate": 128}
    assert [statement["verdict"] for statement in document["statements"][:2]] == ["shown", "shown"]
    assert load_model(tmp_path / "large").model.config.num_attention_heads == 4


@pytest.mark.parametrize(
    ("architecture", "size", "kind"),
    [("bert-pre-ln", "d16", "RobertaPreLayerNormForMaskedLM"), ("lstm", "h16", "LSTMForMaskedLM")],
)
def test_a_masked_run_is_measured_probed_and_a_checkpoint_for_anyone(capsys, tmp_path, architecture, size, kind):
    run = Run(tmp_path / "run")
    words = ("--language", "pcfg-varied", "--architecture", architecture, "--size", size, "--steps", "20", *QUICK)
    assert main(["train", str(run.path), *words]) == 0
    few = ("--num-train", "200", "--num-test", "100", "--probe-epochs", "3", "--loss-sentences", "64")
    document = as_json(
        capsys, "measure", run.path, "--measures", "loss", "trace", "probe-root", *few, "--num-sequences", "64"
    )
    loss, trace, accuracy = (evaluation["estimates"] for evaluation in document["evaluations"])
    assert 0 < loss["kl"]["value"] < loss["loss"]["value"] < 4  # log 32 is 3.47
    assert trace["trace"]["details"]["parameters_by_autograd"] == []
    assert 0 < accuracy["accuracy"]["value"] <= 1
    document = as_json(capsys, "measure", run.checkpoint(20), "--num-sequences", "16", "--rtol", "1e-9")
    assert list(document["architectures"].values()) == [kind]
    model = AutoModelForMaskedLM.from_pretrained(run.checkpoint(20))
    assert type(model).__name__ == kind
    assert model.num_parameters() == json.loads((run.path / "result.json").read_text())["num_parameters"]


@pytest.mark.parametrize(
    ("command", "options"), [("measure", ("--measures", "trace")), ("expand", ("--into", "d32", "--device", "cpu"))]
)
def test_weights_that_the_model_has_not_are_refused_or_left_out_when_asked(trained, tmp_path, capsys, command, options):
    load_model(trained / "checkpoints" / "step-30").model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 32, (8, 6)))
    words = (command, tmp_path / "model", *options, "--data", tmp_path / "tokens.npy", "--mask-id", "33")
    plain = as_json(capsys, *words)
    path, name = tmp_path / "model" / "model.safetensors", "bert.encoder.layer.0.attention.self.query_norm.weight"
    save_file({**load_file(path), name: torch.ones(16)}, path, metadata={"format": "pt"})
    assert f"does not have: {name}; without them it is another function" in refusal(capsys, *words)
    assert as_json(capsys, *words, "--ignore-unexpected-weights") == plain


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
