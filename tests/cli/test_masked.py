"""Masked models of every architecture from the command line: trained, measured, probed, on grammars and on text."""

import json

import numpy as np
import pytest
import torch
from speaking import as_json, trace_of
from transformers import AutoModelForMaskedLM

from isoloss.cli.main import main
from isoloss.flatness import fisher_trace
from isoloss.runs import Run

MODELS = {"bert-pre-ln": "d16", "lstm": "h16"}
CLASSES = {"bert-pre-ln": "RobertaPreLayerNormForMaskedLM", "lstm": "LSTMForMaskedLM"}


def trained(path, architecture, *words):
    """A run of a tiny model."""
    model = ("--architecture", architecture, "--size", MODELS[architecture])
    small = ("--steps", "20", "--batch-size", "8", "--threads", "1")
    assert main(["train", str(path), *words, *model, *small]) == 0
    return Run(path)


@pytest.mark.parametrize("language", ["pcfg-laptop", "pcfg-varied"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_run_on_a_grammar_is_measured_and_probed(capsys, tmp_path, architecture, language):
    run = trained(tmp_path / "run", architecture, "--language", language)
    probe = ("--num-train", "200", "--num-test", "100", "--probe-epochs", "3")
    few = ("--loss-sentences", "64", "--num-sequences", "64")
    document = as_json(capsys, "measure", run.path, "--measures", "loss", "trace", "probe-root", *few, *probe)
    loss, trace, accuracy = (evaluation["estimates"] for evaluation in document["evaluations"])
    assert 0 < loss["kl"]["value"] < loss["loss"]["value"] < 4  # log 32 is 3.47
    assert trace["trace"]["details"]["parameters_by_autograd"] == []
    assert 0 < accuracy["accuracy"]["value"] <= 1
    folder = run.checkpoint(20)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert type(model).__name__ == CLASSES[architecture]
    assert model.num_parameters() == json.loads((run.path / "result.json").read_text())["num_parameters"]


@pytest.mark.parametrize("architecture", MODELS)
def test_a_run_on_text_is_measured(capsys, tmp_path, monkeypatch, vocab, words, architecture):
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, size)) for size in draw.integers(20, 61, 40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    text = ("--language", str(tmp_path / "text.jsonl"), "--tokenizer", str(vocab), "--length", "8")
    run = trained(tmp_path / "run", architecture, *text, "--masking", "fraction")
    document = as_json(capsys, "measure", run.path, "--measures", "loss", "trace", "--num-sequences", "32")
    loss, trace = (evaluation["estimates"] for evaluation in document["evaluations"])
    assert 3 < loss["loss"]["value"] < 5  # log 60 is 4.09
    assert trace["trace"]["value"] > 0
    document = as_json(capsys, "measure", run.checkpoint(20), "--num-sequences", "16", "--rtol", "1e-9")
    assert list(document["architectures"].values()) == [CLASSES[architecture]]
    assert trace_of(document)["details"]["parameters_by_autograd"] == []
    # what the command measures is the checkpoint that anyone loads
    tokens = run.config.language.build().held_out().tokens[:4]
    labels = tokens.masked_fill(torch.arange(8) != 3, -100)
    model = AutoModelForMaskedLM.from_pretrained(run.checkpoint(20)).eval()
    assert fisher_trace(model, [{"input_ids": tokens, "labels": labels}]).value > 0
