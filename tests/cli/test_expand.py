"""`isoloss expand` as a user meets it: what it prints and writes, what reads that, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from speaking import call, trace_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
from isoloss.statistics.estimate import Estimate

COMMON = ("--num-sequences", "32", "--device", "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a d64 on brackets, of a few steps."""
    path = tmp_path_factory.mktemp("runs") / "small"
    words = ("--language", "brackets-8", "--size", "d64", "--steps", "5", "--batch-size", "16", "--device", "cpu")
    assert main(["train", str(path), *words]) == 0
    return path


def test_a_run_inside_a_larger_size(run, tmp_path, capsys):
    out = tmp_path / "new" / "large"
    printed = call(capsys, "expand", run, "--into", "d128", "--output", out, *COMMON)
    assert "small/checkpoints/step-5: BertForMaskedLM, masked; 32 sentences sampled from the language" in (printed.err)
    assert f"written: {out}" in printed.err
    lines = printed.out.splitlines()
    query = next(line for line in lines if line.startswith("bert.encoder.layer.*.attention.self.query.weight"))
    assert query.split()[1] == "4,096"
    assert query.split()[-2:] == ["1.0000", "1.0000"]
    bias = next(line for line in lines if line.startswith("bert.encoder.layer.*.output.dense.bias"))
    assert bias.split()[-2:] == ["0.5000", "0.5000"]
    small = AutoModelForMaskedLM.from_pretrained(run / "checkpoints" / "step-5").eval()
    large = AutoModelForMaskedLM.from_pretrained(out).eval()
    assert f"over {small.num_parameters():,} parameters" in printed.out
    after = Estimate.from_dict(json.loads((out / "expansion.json").read_text())["after"])
    assert f"trace of the Fisher in d128: {after}, over" in printed.out
    assert f"over {large.num_parameters():,} parameters" in printed.out
    assert printed.out.count("\nshown: ") == 3
    assert large.config.num_hidden_layers == 4
    tokens = torch.tensor([[0, 1, 0, 1], [0, 0, 3, 1]])
    few, many = (model(tokens).logits.detach() for model in (small, large))
    assert float((few - many).abs().max() / few.abs().max()) < 1e-5
    assert not list(out.parent.glob(".tmp-*"))


def test_what_is_written_is_what_is_printed_and_other_verbs_read_it(run, tmp_path, capsys):
    out = tmp_path / "large"
    out.mkdir()
    words = ("--into", "d128", "--embedding-scale", "balanced", "--dtype", "float64", "--json", "--output", out)
    document = json.loads(call(capsys, "expand", run / "checkpoints" / "step-5", *words, *COMMON).out)
    assert document == json.loads((out / "expansion.json").read_text())
    assert document["differences"]["logits"] < 1e-7
    assert [statement["verdict"] for statement in document["statements"]][1:] == ["shown", "shown"]
    assert sum(part["after"] for part in document["parameters"]) == pytest.approx(document["after"]["value"])
    assert load_model(out, dtype=torch.float64).model.num_parameters() == document["after"]["details"]["num_parameters"]
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 2, (16, 6)))
    data = ("--data", tmp_path / "ids.npy", "--mask-id", "3", "--device", "cpu", "--json")
    flatness = json.loads(call(capsys, "measure", out, *data).out)
    assert trace_of(flatness)["value"] > 0
    further = json.loads(call(capsys, "expand", out, "--into", "d256", *data).out)
    assert further["before"]["num_predictions"] == 16
    config = json.loads((run / "run.json").read_text())["config"]
    length = config["language"]["length"]
    train = ("--language", "brackets-8", "--size", "d128", "--steps", "1", "--batch-size", "8", "--device", "cpu")
    assert length == load_model(out).model.config.max_position_embeddings
    call(capsys, "train", tmp_path / "on", *train, "--init-from", out)


def test_the_tokenizer_goes_along(tmp_path, capsys):
    words = ["[PAD]", "[UNK]", "[MASK]", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 256}
    model = BertForMaskedLM(BertConfig(vocab_size=6, max_position_embeddings=8, **sizes))
    model.save_pretrained(tmp_path / "bert")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path / "bert")
    (tmp_path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(["a", "b", "c"], 120)))
    text = ("--data", tmp_path / "text.txt", "--length", "6", "--output", tmp_path / "large")
    call(capsys, "expand", tmp_path / "bert", "--into", "d128", *text, *COMMON)
    assert AutoTokenizer.from_pretrained(tmp_path / "large").mask_token_id == 2
