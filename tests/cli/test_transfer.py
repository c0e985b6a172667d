"""`isoloss transfer`: tasks of a language and of text, several models, saved predictions, and what is refused."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import polars as pl
import pytest
import torch
from speaking import as_json
from transformers import BertConfig, BertForMaskedLM

from isoloss.cli.main import main
from isoloss.text.tokenizers import load_tokenizer
from isoloss.transfer.compare import accuracy_difference
from isoloss.transfer.results import TransferResult

SMALL = ("--num-train", "120", "--num-test", "80", "--epochs", "2", "--seeds", "2", "--threads", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two untrained runs on one language, and one on another."""
    folder = tmp_path_factory.mktemp("runs")
    made = []
    for name, language, seed in (("a", "pcfg-laptop", "0"), ("b", "pcfg-laptop", "1"), ("c", "hmm-laptop", "0")):
        words = ["train", str(folder / name), "--language", language, "--size", "d16", "--steps", "2", "--seed", seed]
        assert main([*words, "--batch-size", "8", "--threads", "1"]) == 0
        made.append(folder / name)
    return made


@pytest.fixture
def bert(tmp_path: Path, vocab: Path) -> Path:
    """A masked model of text with its tokenizer."""
    tokenizer = load_tokenizer(str(vocab))
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **shape)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def mails(tmp_path: Path, words: list[str]) -> Path:
    """Labeled text: spam begins with another word than ham."""
    path = tmp_path / "mails.csv"
    with path.open("w", newline="") as file:
        rows = [(f"{'bv' if i % 2 else 'cw'} {words[i]}", "spam" if i % 2 else "ham") for i in range(60)]
        csv.writer(file).writerows([("body", "kind"), *rows])
    return path


def test_two_models_are_compared_on_the_same_sentences(capsys, runs, tmp_path):
    out = tmp_path / "out"
    words = ("transfer", runs[0], runs[1], "--task", "prefix-4", *SMALL, "--output", out)
    document = as_json(capsys, *words)
    assert (document["task"], document["method"]) == ("prefix-4", "probe")
    results = {name: TransferResult.from_dict(found) for name, found in document["models"].items()}
    assert list(results) == [f"{run} at step 2" for run in runs[:2]]
    first, second = results.values()
    assert torch.equal(first.labels, second.labels)
    assert first.predictions.shape == (2, 80)
    (comparison,) = document["comparisons"]
    expected = accuracy_difference(first.correct, second.correct)
    assert (comparison["first"], comparison["second"]) == tuple(results)
    assert comparison["difference"]["value"] == pytest.approx(expected.value)
    assert comparison["difference"]["stderr"] == pytest.approx(expected.stderr)
    assert comparison["bootstrap95"][0] <= expected.value <= comparison["bootstrap95"][1]
    assert 0 <= comparison["mcnemar"]["p_value"] <= 1

    files = sorted(out.iterdir())
    assert [path.suffix for path in files] == [".json", ".jsonl"] * 2
    saved = json.loads(files[0].read_text())
    assert saved["predictions"] == first.predictions.tolist()
    table = pl.read_ndjson(files[1])
    assert table.height == 80
    assert table["label"].to_list() == [first.classes[label] for label in first.labels.tolist()]
    assert len(table["text"][0].split()) == 8
    before = [path.read_bytes() for path in files]
    assert as_json(capsys, *words) == document
    assert [path.read_bytes() for path in files] == before


def test_the_bounds_stand_beside_the_accuracy(capsys, runs):
    assert main(["transfer", *map(str, runs[:2]), "--task", "root-latent", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.count("accuracy ") == 3  # of each model, and the heading of the differences
    assert len(re.findall(r"^  majority class \d", out, re.MULTILINE)) == 2
    assert out.count(", Bayes ") == 2
    assert "McNemar" in out
    assert main(["measure", str(runs[0]), "--measures", "probe-root", "--num-train", "100", "--num-test", "50"]) == 0
    out = capsys.readouterr().out
    assert "majority class" in out
    assert "Bayes 100 %" in out


def test_the_look_up_table_needs_no_model_and_convex_probes_no_seed(capsys):
    words = ("--method", "lookup", "--solver", "convex", "--num-train", "300", "--num-test", "200", "--threads", "1")
    document = as_json(capsys, "transfer", "--language", "hmm-laptop", "--task", "task-3-latent", *words)
    (found,) = document["models"].values()
    assert document["task"] == "state-3-latent"
    assert found["accuracy"]["details"]["seed_std"] == 0
    assert found["majority_rate"] < found["accuracy"]["value"] < found["bayes"]["value"] + 0.1


def test_your_own_text_probed_and_fine_tuned(capsys, bert, mails, tmp_path):
    task = ("--task", "spam", "--data", mails, "--text", "body", "--label", "kind", "--threads", "1")
    document = as_json(capsys, "transfer", bert, *task, "--solver", "convex", "--regularization", "1e-3", "1e-2")
    found = document["models"][str(bert)]
    assert (found["classes"], found["bayes"]) == (["ham", "spam"], None)
    assert found["accuracy"]["value"] == 1.0  # the first word tells
    assert "bayes_accuracy" not in found["accuracy"]["details"]

    out = tmp_path / "out"
    words = ("--method", "finetune", "--epochs", "3", "--seeds", "2", "--warmup-steps", "1", "--learning-rate", "0.01")
    tuned = as_json(capsys, "transfer", bert, *task, *words, "--output", out)["models"][str(bert)]
    assert tuned["labels"] == found["labels"]
    assert len(tuned["predictions"]) == 2
    table = pl.read_ndjson(next(out.glob("*.jsonl")))
    assert table["text"][0].split()[0] in ("bv", "cw")
    states = {path: path.stat().st_mtime_ns for path in next(out.glob("*.state")).iterdir()}
    again = as_json(capsys, "transfer", bert, *task, *words, "--output", out)["models"][str(bert)]
    assert again == tuned
    assert all(path.stat().st_mtime_ns == time for path, time in states.items() if path.name.startswith("seed"))


@pytest.mark.parametrize("options", [("--epochs", "2"), ("--solver", "convex")])
def test_a_label_that_training_lacks_is_a_warning(capsys, bert, tmp_path, words, options):
    for split, kinds in (("train", ("a", "b")), ("dev", ("a", "c"))):
        lines = ["text\tlabel", *(f"{words[i]} {words[i + 1]}\t{kinds[i % 2]}" for i in range(6))]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    command = ["transfer", str(bert), "--task", "t", "--data", str(tmp_path), "--text", "text", *options]
    capsys.readouterr()
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "isoloss transfer: warning: 3 of the 6 test examples have a label that none of the 6 training examples has "
        "(c): they count as errors"
    ]
    assert out.startswith(f"t, probe of {bert}: accuracy ")
