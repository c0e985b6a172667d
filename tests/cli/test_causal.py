"""A causal run from the command line: trained on text, measured against transformers' own loss, and made to write."""

import json

import numpy as np
import pytest
import torch
from speaking import as_json, trace_of
from transformers import AutoModelForCausalLM

from isoloss.cli.main import main
from isoloss.flatness import fisher_trace
from isoloss.runs import Run
from isoloss.text.masking import IGNORED

SMALL = ("--architecture", "opt", "--size", "d16", "--steps", "20", "--batch-size", "8", "--threads", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory, words):
    """A causal model of random words, 8 ids a sequence: [CLS], six words, [SEP]."""
    folder = tmp_path_factory.mktemp("causal")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, size)) for size in draw.integers(20, 61, 40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    path = folder / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOSS_CACHE", str(folder / "cache"))
        text = ("--language", str(folder / "text.jsonl"), "--tokenizer", str(folder / "vocab.txt"), "--length", "8")
        assert main(["train", str(path), *text, *SMALL]) == 0
        yield path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A causal model of a grammar."""
    path = tmp_path_factory.mktemp("causal") / "drawn"
    assert main(["train", str(path), "--language", "pcfg-varied", *SMALL]) == 0
    return path


def held_out(run):
    """The held-out sequences and their labels: everything but [CLS] and [SEP]."""
    tokens = Run(run).config.language.build().held_out().tokens
    return tokens, tokens.masked_fill((tokens == 2) | (tokens == 3), IGNORED)


def test_the_loss_is_transformers_own_and_the_trace_that_of_its_labels(capsys, run):
    document = as_json(capsys, "measure", run, "--num-sequences", "64")
    loss, trace = (e["estimates"][e["measure"]] for e in document["evaluations"])
    model = AutoModelForCausalLM.from_pretrained(Run(run).checkpoint(20)).eval()
    tokens, labels = held_out(run)
    with torch.no_grad():
        losses = torch.stack(
            [model(input_ids=t[None], labels=y[None]).loss for t, y in zip(tokens, labels, strict=True)]
        )
    assert loss["num_predictions"] == 6 * len(tokens)
    assert loss["samples"] == len(tokens)
    assert loss["value"] == pytest.approx(float(losses.double().mean()), rel=1e-6)
    assert loss["stderr"] == pytest.approx(float(losses.double().std()) / len(losses) ** 0.5, rel=1e-5)
    assert loss["details"]["predicts"] == trace["details"]["predicts"] == "next token"
    expected = fisher_trace(model, [{"input_ids": tokens, "labels": labels}], causal=True)
    assert trace["value"] == pytest.approx(expected.value, rel=1e-4)


def test_measure_takes_a_causal_checkpoint_on_its_own_text(capsys, run):
    document = as_json(capsys, "measure", Run(run).checkpoint(20), "--num-sequences", "16", "--rtol", "1e-9")
    assert list(document["architectures"].values()) == ["OPTForCausalLM"]
    assert trace_of(document)["num_predictions"] == 6 * min(16, len(held_out(run)[0]))
    assert trace_of(document)["value"] > 0


def test_the_checkpoint_starts_from_cls_and_writes(run):
    model = AutoModelForCausalLM.from_pretrained(Run(run).checkpoint(20))
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (2, 3, 0)
    torch.manual_seed(0)
    written = model.generate(max_length=8, do_sample=True, num_return_sequences=3)
    assert written.shape[0] == 3
    assert (written[:, 0] == 2).all()


def test_loss_trace_and_probe_of_a_causal_model(capsys, drawn):
    words = ("--num-train", "200", "--num-test", "100", "--probe-epochs", "3", "--num-sequences", "16")
    document = as_json(capsys, "measure", drawn, "--measures", "loss", "trace", "probe-root", *words)
    loss, trace, probe = (evaluation["estimates"] for evaluation in document["evaluations"])
    assert loss["loss"]["details"]["predicts"] == trace["trace"]["details"]["predicts"] == "next token"
    assert loss["kl"]["value"] > 0
    assert loss["loss"]["value"] == pytest.approx(loss["entropy"]["value"] + loss["kl"]["value"])
    assert 0 < probe["accuracy"]["value"] <= 1


def test_a_causal_model_reads_a_task_from_the_start(drawn):
    from isoloss.lab.tasks import make_task, read_from_start
    from isoloss.transfer.features import extract

    language = Run(drawn).config.language.build()
    task = make_task(language, "root", num_train=20, num_test=5, seed=0)
    read = read_from_start(task, language)
    model = AutoModelForCausalLM.from_pretrained(Run(drawn).checkpoint(20)).eval()
    states = extract(model, read.test).view(*read.test.tokens.shape, 16)
    for got, tokens, length in zip(states, task.test.tokens, task.test.lengths.tolist(), strict=True):
        ids = torch.tensor([[33, *tokens[:length].tolist()]])
        with torch.no_grad():
            expected = model.model(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(got[: length + 1], expected, rtol=1e-4, atol=1e-5)
        assert not got[length + 1 :].any()
    assert read.inputs() == task.inputs()


def test_ls_lists_the_architectures(capsys):
    listed = {row["architecture"]: row for row in as_json(capsys, "ls", "models")["models"]}
    masked = dict.fromkeys(("bert", "bert-pre-ln", "lstm", "modernbert", "bracket-attention"), "masked")
    objectives = {**masked, "opt": "causal", "llama": "causal"}
    assert {name: row["objective"] for name, row in listed.items()} == objectives
    # d1920 for 30,522 ids and 128 positions: 1920 (30,522 + 130) + 20 * 44,256,000 + 2 * 1920; 16 bytes each
    assert (listed["opt"]["sizes"][0], listed["opt"]["sizes"][-1]) == ("d16", "d1920")
    assert listed["opt"]["parameters"] == [493_744, 944_090_880]
    assert [round(n / 1e9, 2) for n in listed["opt"]["training_memory_bytes"]] == [0.01, 15.11]
    sizes = {row["size"]: row for row in as_json(capsys, "ls", "sizes")["sizes"]}
    # d16: 16 (30,522 + 130) + 3,280 in the layer + 32; h16: 33 * 30,522 + 24 * 256 + 16 * 16
    assert (sizes["d16"]["parameters"]["opt"], sizes["d16"]["parameters"]["lstm"]) == (493_744, None)
    assert (sizes["h16"]["parameters"]["lstm"], sizes["h16"]["parameters"]["bert"]) == (1_013_626, None)
    assert (sizes["h16"]["heads"], sizes["h16"]["training_memory_bytes"]) == (None, 16 * 1_013_626)
    capsys.readouterr()
    assert main(["ls", "sizes"]) == 0
    table = capsys.readouterr().out
    assert "parameters for 30,522 tokens and a length of 128" in table
    assert "None" not in table
