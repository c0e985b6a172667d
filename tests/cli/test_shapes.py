"""Free shapes on the command line: trained, resumed, measured, listed, and refused in one sentence."""

import pytest
from speaking import as_json, refusal

from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
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
