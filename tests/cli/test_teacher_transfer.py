"""From a teacher to tasks of text: a model is trained on what a causal model writes, then probed and fine-tuned."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from speaking import as_json, refusal
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from isoloss import files
from isoloss.checkpoints.loading import quiet
from isoloss.cli.main import main
from isoloss.lab.languages.teacher import Teacher

GOOD = ["a fine film", "fresh and funny", "warm , witty and wise", "the best of the year"]
BAD = ["a dull film", "stale and sad", "cold , clumsy and cheap", "the worst of the year"]
LENGTH, KEPT = 12, 60


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SST-2 and QNLI as GLUE has them, in small."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("glue")
    for task, header in (("sst2", "sentence\tlabel"), ("qnli", "index\tquestion\tsentence\tlabel")):
        (folder / task).mkdir()
        for split, n in (("train", 60), ("dev", 30)):
            lines = [header]
            for i in range(n):
                text = f"{rng.choice(BAD if i % 2 else GOOD)} , {rng.choice(['truly', 'really', '猫'])} . " * (
                    1 + i % 3
                )
                if task == "sst2":
                    lines.append(f"{text}\t{1 - i % 2}")
                else:
                    lines.append(f"{i}\tWas it good ?\t{text}\t{'not_entailment' if i % 2 else 'entailment'}")
            (folder / task / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return {task: folder / task for task in ("sst2", "qnli")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked model of the language of a tiny GPT-2 with a byte-level BPE of its own."""
    folder = tmp_path_factory.mktemp("teacher")
    text = [f"{line} , truly . Was it good ?" for line in (*GOOD, *BAD)]
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(text, vocab_size=330, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token="<|endoftext|>")
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    (folder / "text.txt").write_text("\n".join(text))
    (folder / "language.toml").write_text(
        f'kind = "teacher"\ncheckpoint = "{folder / "gpt2"}"\nvocab_size = {KEPT}\nlength = {LENGTH}\n'
        f'corpus = ["{folder / "text.txt"}"]\n'
    )
    train(folder / "run", folder / "language.toml")
    return folder / "run"


def train(run: Path, language: Path, *options: str) -> None:
    small = ["--size", "d16", "--steps", "3", "--batch-size", "8", "--threads", "1"]
    assert main(["train", str(run), "--language", str(language), *small, *options]) == 0


def transfer(capsys, run, task, folder, *options):
    words = ("--task", task, "--data", folder, "--seeds", "2", "--threads", "1", *options)
    (found,) = as_json(capsys, "transfer", run, *words)["models"].values()
    return found


def test_eval_leaves_out_a_loss_with_too_many_hidden_tokens(capsys, run, monkeypatch):
    folder = run.parent / "fraction"
    train(folder, run.parent / "language.toml", "--masking", "fraction", "--fraction", "0.5")
    capsys.readouterr()
    assert main(["measure", str(folder), "--num-sequences", "16", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [e["measure"] for e in json.loads(out)["evaluations"]] == ["trace"]
    reason = "Teacher gives exact conditionals with up to 2 masked tokens per sentence, and masking a fraction of 0.5"
    assert err.startswith(f"isoloss measure: warning: loss is left out: {reason} masks up to")
    drawn: list[int] = []  # by name it is refused before a sentence is drawn
    monkeypatch.setattr(Teacher, "sample", lambda self, n, **options: drawn.append(n))
    assert reason in refusal(capsys, "measure", folder, "--measures", "loss", "trace", alone=True)
    assert drawn == []


@pytest.mark.parametrize("task", ["sst2", "qnli"])
def test_probe_and_fine_tuning(capsys, run, glue, task):
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints" / "step-3")
    rows = [
        line.split("\t") for s in ("train", "dev") for line in (glue[task] / f"{s}.tsv").read_text().splitlines()[1:]
    ]
    texts = [(row[0],) if task == "sst2" else (row[1], row[2]) for row in rows]
    encoded = [tokenizer(*text)["input_ids"] for text in texts]
    special = [2 if task == "qnli" else 1] * len(rows)
    unknown = sum(ids.count(tokenizer.mask_token_id) for ids in encoded) - sum(special)
    counts = {"num_examples": 90, "num_cut": sum(len(ids) > LENGTH for ids in encoded)}
    counts |= {"num_tokens": sum(map(len, encoded)) - sum(special), "num_unknown": unknown, "num_unlabeled": 0}
    counts["num_incomplete"] = 0
    assert 0 < counts["num_cut"] < 91
    assert 0 < unknown < counts["num_tokens"] / 2

    probed = transfer(capsys, run, task, glue[task], "--epochs", "30", "--learning-rate", "0.01")
    assert probed["text"] == counts
    assert probed["accuracy"]["value"] == 1.0  # the kept tokens of the first sentence tell
    tuning = ["--method", "finetune", "--epochs", "2", "--warmup-steps", "1", "--batch-size", "8"]
    tuned = transfer(capsys, run, task, glue[task], *tuning)
    assert tuned["text"] == counts
    assert len(tuned["predictions"]) == 2


def test_what_is_cut_and_what_is_unknown_is_said(capsys, run, glue):
    words = ["transfer", str(run), "--task", "qnli", "--data", str(glue["qnli"]), "--epochs", "1", "--seeds", "1"]
    assert main([*words, "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    (warning,) = (line for line in err.splitlines() if "warning" in line)
    assert warning.startswith(
        "isoloss transfer: warning: 90 of the 90 examples of qnli are longer than the 12 tokens that "
    )
    assert "90 of these 90 examples are truncated; " in out
    assert "% of the " in out
    assert main([*words, "--max-length", "9", "--threads", "1"]) == 0  # the length was asked for
    assert "warning" not in capsys.readouterr().err


def test_a_checkpoint_that_was_written_without_its_tokenizer(capsys, run, glue, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    expected = transfer(capsys, run, "sst2", glue["sst2"], "--epochs", "1")
    step = tmp_path / "run" / "checkpoints" / "step-3"
    trainer = files.read_sealed(step / "trainer.json", "")
    for name in ("tokenizer_config.json", "source_tokenizer.json"):
        (step / name).unlink()
        del trainer["sha256"][name]
    files.write_sealed(step / "trainer.json", trainer)
    again = transfer(capsys, tmp_path / "run", "sst2", glue["sst2"], "--epochs", "1")
    assert again["predictions"] == expected["predictions"]


def test_the_checkpoint_is_measured_on_text(capsys, run, tmp_path):
    (tmp_path / "text.txt").write_text((run.parent / "text.txt").read_text() * 3 + "猫" * 40)
    checkpoint = run / "checkpoints" / "step-3"
    assert main(["measure", str(checkpoint), "--data", str(tmp_path / "text.txt"), "--num-sequences", "20"]) == 0
    out, err = capsys.readouterr()
    assert "trace: " in out
    assert "sequences of unknown tokens alone left out" in err
    assert "% of the tokens unknown to the tokenizer" in err


def test_a_causal_model_begins_texts_with_its_start(capsys, run, glue, tmp_path):
    train(tmp_path / "run", run.parent / "language.toml", "--architecture", "opt")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    tokenizer, config = AutoTokenizer.from_pretrained(checkpoint), OPTConfig.from_pretrained(checkpoint)
    assert tokenizer("Was it good ?")["input_ids"][0] == config.bos_token_id
    assert (len(tokenizer), tokenizer.pad_token_id) == (config.vocab_size, config.pad_token_id)
    assert 0 <= transfer(capsys, tmp_path / "run", "qnli", glue["qnli"], "--epochs", "1")["accuracy"]["value"] <= 1


def test_a_teacher_without_a_tokenizer_has_no_text(capsys, glue, tmp_path):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "ffn_dim": 8, "word_embed_proj_dim": 8}
    with torch.random.fork_rng(devices=[]), quiet():
        OPTForCausalLM(OPTConfig(vocab_size=20, max_position_embeddings=16, **shape)).save_pretrained(tmp_path / "opt")
    (tmp_path / "language.toml").write_text(f'kind = "teacher"\ncheckpoint = "{tmp_path / "opt"}"\nlength = 4\n')
    train(tmp_path / "run", tmp_path / "language.toml")
    capsys.readouterr()
    words = ("--task", "sst2", "--data", glue["sst2"])
    assert "has no usable tokenizer" in refusal(capsys, "transfer", tmp_path / "run", *words, alone=True)
