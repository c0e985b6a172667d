"""Checkpoints that are compared: each is loaded once where their files are alike, and damage is told before any is."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import small_checkpoints as small
from isoloss import compare
from isoloss.errors import IsolossError
from isoloss.lab.evaluation import context
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.input_config import InputConfig

HOW = {"num_sequences": 20, "inputs": InputConfig(length=small.LENGTH)}
LIKE = ("a", "b", "c")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three checkpoints of one architecture, a wider one, their tokenizer and a text."""
    path = tmp_path_factory.mktemp("checkpoints")
    tokenizer = small.byte_level()
    models = {name: small.gpt2(len(tokenizer), seed) for seed, name in enumerate(LIKE)}
    for name, model in {**models, "wide": small.gpt2(len(tokenizer), width=12)}.items():
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in small.documents()))
    return path, models, tokenizer


@pytest.fixture
def loads(monkeypatch):
    """The names of the checkpoints that are loaded, in turn."""
    names = []

    def counted(name, **options):
        names.append(str(name).rpartition("/")[2])
        return load(name, **options)

    load = context.load_model
    monkeypatch.setattr(context, "load_model", counted)
    return names


def compared(folder, names, **options):
    return compare({name: str(folder / name) for name in names}, data=folder / "text.jsonl", **HOW, **options)


def test_checkpoints_that_are_alike_are_loaded_once_each(made, loads):
    folder, models, tokenizer = made
    found = compared(folder, LIKE, robustness=False)
    assert loads == ["a", "b", "c"]
    in_memory = compare(models, data=folder / "text.jsonl", tokenizer=tokenizer, robustness=False, **HOW)
    for name in LIKE:
        for of in ("loss", "trace", "minimal-trace"):
            assert found.models[name][of].value == in_memory.models[name][of].value


@pytest.mark.filterwarnings("ignore:.*parameters")
def test_one_of_another_kind_is_loaded_before_any_is_measured(made, loads):
    compared(made[0], ["a", "b", "wide"], robustness=False)
    assert loads == ["wide", "a", "b", "wide"]


def test_evaluation_loads_once_too(made, loads):
    folder, *_ = made
    with torch.inference_mode():  # parameters of this mode would have no gradients
        evaluate([str(folder / name) for name in LIKE], "trace", data=str(folder / "text.jsonl"), inputs=HOW["inputs"])
    assert loads == ["a", "b", "c"]


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def without_a_weight(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["transformer.ln_f.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def with_another_config(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_positions": 17}))


@pytest.mark.parametrize(
    ("spoil", "message", "loaded"),
    [
        (truncate, "the weights in .*last are damaged", []),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not a readable JSON file", []),
        (without_a_weight, "last lacks weights of GPT2LMHeadModel: transformer.ln_f.weight", ["last"]),
        (with_another_config, "last holds weights of another shape than its config.json says", ["last"]),
    ],
    ids=["truncated", "no config", "a weight less", "another config"],
)
def test_what_is_wrong_with_the_last_one_is_told_before_any_is_measured(spoil, message, loaded, made, loads, tmp_path):
    folder, *_ = made
    shutil.copytree(folder / "c", tmp_path / "last")
    spoil(tmp_path / "last")
    with pytest.raises(IsolossError, match=message):
        compare([str(folder / "a"), str(folder / "b"), str(tmp_path / "last")], data=folder / "text.jsonl", **HOW)
    assert loads == loaded
