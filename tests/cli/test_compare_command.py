"""`isoloss compare` as a user meets it: its files agree, what fails leaves the rest, and what it refuses."""

import csv
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import speaking
import torch
from speaking import as_json
from transformers import GPT2LMHeadModel

import small_checkpoints as small
from isoloss.cli import compare
from isoloss.comparison.models import TITLES
from isoloss.errors import IsolossError
from isoloss.lab.evaluation import context
from isoloss.statistics.comparison import times
from isoloss.statistics.estimate import Estimate, number


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2s a, b, c with one tokenizer, others that do not fit, and texts."""
    path = tmp_path_factory.mktemp("checkpoints")
    tokenizer, other = small.byte_level(), small.byte_level(special=small.SPECIAL[::-1])
    size = len(tokenizer)
    made = {name: (small.gpt2(size, seed), tokenizer) for seed, name in enumerate("abc")}
    made |= {"wide": (small.gpt2(size, width=12), tokenizer), "bert": (small.bert(size), tokenizer)}
    made |= {"more": (small.gpt2(size + 3), tokenizer), "other": (small.gpt2(size), other)}
    broken = small.gpt2(size, 3)
    with torch.no_grad():
        broken.transformer.wpe.weight[0, 0] = math.nan
    made["broken"] = (broken, tokenizer)
    for name, (model, its_tokenizer) in made.items():
        model.save_pretrained(path / name)
        its_tokenizer.save_pretrained(path / name)
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in small.documents()))
    (path / "one.txt").write_text(" ".join(small.documents()))
    (path / "empty.txt").touch()
    (path / "short.txt").write_text("the house")
    (path / "labels").mkdir()
    (path / "labels" / "dev.csv").touch()
    (path / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(path / "a")}
    (path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    return path


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


DATA = ("--data", "text.jsonl", "--length", str(small.LENGTH), "--threads", "1")


def call(capsys, *words, status=0):
    return speaking.call(capsys, "compare", *words, status=status)


def test_all_that_it_writes_agrees(capsys, tmp_path):
    files = {kind: tmp_path / "new" / f"ab.{kind}" for kind in ("html", "csv", "parquet")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", file)]
    out, err = call(capsys, "a", "b", *DATA, *options)
    assert [line.partition(": ")[2] for line in err.splitlines()[-3:]] == [str(file) for file in files.values()]
    document = as_json(capsys, "compare", "a", "b", *DATA)
    frame = pl.read_parquet(files["parquet"])
    with files["csv"].open() as lines:
        rows = list(csv.DictReader(lines))
    assert frame.height == len(rows) == 3 * len(document["models"]["a"])
    page = files["html"].read_text().replace("\u00a0", " ")  # between a value and its error
    shown = {re.split(r"  |, \d|, m", line)[0]: line for line in out.splitlines() if "±" in line}
    for row, from_frame in zip(rows, frame.iter_rows(named=True), strict=True):
        assert {name: str(value) for name, value in from_frame.items()} == row
        name = row["measure"]
        if row["minus"]:
            (pair,) = [pair for pair in document["pairs"] if pair["estimate"] == name]
            assert float(row["value"]) == pytest.approx(-pair["difference"]["value"])
            assert float(row["stderr"]) == pytest.approx(pair["difference"]["stderr"])
        else:
            estimate = Estimate.from_dict(document["models"][row["model"]][name])
            assert (float(row["value"]), float(row["stderr"])) == (estimate.value, estimate.stderr)
            if (title := TITLES.get(name)) is not None:
                estimate = times(estimate, 1e3 if "millinats" in shown[title] else 1)
                assert number(estimate) in shown[title]
                assert number(estimate) in page
    verdict = document["verdict"]["text"]
    # on a terminal, what was asked for says what there is more of
    held = re.match(r"all (\d+) sequences ", document["inputs"])[1]
    verdict = verdict.replace("more inputs", f"more text in --data (all {held} sequences of it are used)")
    assert verdict in " ".join(out.split())
    assert verdict.replace("'", "&#39;") in page
    assert "isoloss compare a b --data text.jsonl" in page
    assert document["inputs"] in page
    assert document["inputs"] in out


def test_other_measures_are_rows_and_the_figure_is_drawn(capsys, tmp_path):
    words = ("--num-sequences", "12", "--measures", "fisher-rao", "squared-norm", "int4-rise", "noise-rise")
    out, err = call(capsys, "a", "b", *DATA, *words, "--figure", tmp_path / "ab.svg")
    (paired,) = (line for line in out.splitlines() if line.startswith("fisher-rao "))
    (exact,) = (line for line in out.splitlines() if line.startswith("squared-norm "))
    assert (paired.count("±"), exact.count("±")) == (3, 0)
    # these two are rows in any case, by other names
    assert not any(line.startswith(("int4-rise", "noise-rise")) for line in out.splitlines())
    assert out.count("rise with 4-bit weights") == out.count("rise with 10 % noise") == 1
    assert (tmp_path / "ab.svg").read_bytes().startswith(b"<svg")
    assert f"figure: {tmp_path / 'ab.svg'}" in err


def test_many_checkpoints_of_a_trainer(capsys, tmp_path):
    model = GPT2LMHeadModel.from_pretrained("a")
    for step in range(10, 130, 10):
        with torch.no_grad():
            model.transformer.wte.weight.mul_(1.001)
        shutil.copytree("a", tmp_path / f"checkpoint-{step}")
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
    out, err = call(capsys, tmp_path, *DATA, "--num-sequences", "12")
    assert f"12 checkpoints, {tmp_path}/checkpoint-10 to {tmp_path}/checkpoint-120" in err
    table = [line.split()[0] for line in out.splitlines() if line.startswith("checkpoint-")]
    assert table[:12] == [f"checkpoint-{step}" for step in range(10, 130, 10)]
    assert f"{tmp_path.name}, from step 10 to 120: loss " in " ".join(out.split())
    # the page has no chart of the rises
    assert "the other measures are in --csv and --json\n" in err


@pytest.mark.parametrize("names", [("a", "broken", "b"), ("a", "b", "broken")], ids="-".join)
def test_what_was_measured_before_a_checkpoint_fails_is_printed_and_written(capsys, tmp_path, names):
    files = {kind: tmp_path / f"part.{kind}" for kind in ("html", "csv", "parquet")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", file)]
    out, err = call(capsys, *names, *DATA, *options, status=2)
    before = list(names[: names.index("broken")])
    *_, sentence = err.strip().splitlines()
    count = "one model that was" if len(before) == 1 else "2 models that were"
    assert sentence == (
        "isoloss compare: broken: batch 0: the model's logits are NaN or infinite (sequence 0 of the batch); the "
        f"numbers are of the {count} measured before"
    )
    assert pl.read_parquet(files["parquet"])["model"].unique(maintain_order=True).to_list() == before
    with files["csv"].open() as lines:
        assert {row["model"] for row in csv.DictReader(lines)} == set(before)
    page = files["html"].read_text().replace("\u00a0", " ")  # between a value and its error
    assert ("How flat is a?" if len(before) == 1 else "Which is flatter: a or b?") in page
    assert "broken" not in page.replace(" a broken b", "").replace(" a b broken", "")  # but in the command
    assert "loss" in out
    document = json.loads(call(capsys, *names, *DATA, "--json", status=2)[0])
    assert list(document["models"]) == before


def test_ctrl_c_leaves_what_was_measured(capsys, monkeypatch):
    def stop(name, **options):
        if name == "c":
            raise KeyboardInterrupt
        return load(name, **options)

    load = context.load_model
    monkeypatch.setattr(context, "load_model", stop)
    out, err = call(capsys, "a", "b", "c", *DATA, status=130)
    assert "second minus first" in out
    told = "interrupted while c was measured; the numbers are of the 2 models that were measured before"
    assert err.endswith(f"{told}\n")
    _, err = call(capsys, "a", "b", "c", *DATA, "--output", "kept", status=130)
    assert err.endswith(f"{told}; they are kept, and the same command goes on\n")


def test_a_run_by_itself_is_told_what_names_all_its_checkpoints(capsys):
    for step in (1, 2):
        shutil.copytree("a", f"steps/step-{step}")
    _, err = call(capsys, "steps/step-2", *DATA, status=2)
    assert "name another; steps names all 2 in it, or see isoloss measure" in err


def test_what_is_next_can_be_pasted(capsys):
    shutil.copytree("c", "the second")  # at a loss that all of the text does not tell from a's
    out, _ = call(capsys, "a", "the second", *DATA, "--num-sequences=2")
    more, task = (shlex.split(line) for line in out.splitlines() if line.startswith("  isoloss "))
    words = ["isoloss", "compare", "a", "the second", *DATA]
    assert (more, task) == ([*words, "--num-sequences", "8"], [*words, "--num-sequences=2", "--task", "sst2"])
    out, _ = call(capsys, *more[2:])
    assert "8 sequences of 12 tokens" in out
    # there are no other sequences
    out, _ = call(capsys, "a", "the second", *DATA, "--num-sequences", "4000")
    assert "--num-sequences" not in out.replace("--num-sequences 4000 --task", "")
    held = re.search(r"all (\d+) sequences ", out)[1]
    out, _ = call(capsys, "a", "the second", *DATA, "--num-sequences", held)
    assert "--num-sequences" not in out.replace(f"--num-sequences {held} --task", "")
    assert f"take more text in --data (all {held} sequences of it are used)" in " ".join(out.split())
    shutil.copytree("a", "copy of a")
    assert "To paste" not in call(capsys, "a", "copy of a", *DATA)[0]


def test_at_other_losses_the_steps_of_both_runs_are_what_is_next(capsys, tmp_path):
    for run, checkpoint, factor in (("one run", "a", 4), ("two", "b", 25)):
        model = GPT2LMHeadModel.from_pretrained(checkpoint)
        for step in (10, 20):
            with torch.no_grad():
                model.transformer.wte.weight.mul_(factor)
            shutil.copytree(checkpoint, f"{run}/step-{step}")
            model.save_pretrained(f"{run}/step-{step}")
    words = (*DATA, "--num-sequences=12")
    files = ("--html", tmp_path / "page.html", "--csv", tmp_path / "all.csv", "--figure", tmp_path / "figure.svg")
    out, _ = call(capsys, "one run/step-20", "two/step-10", *words, *files)
    # not more sequences, though the errors of the traces are too large as well
    assert "The errors are too large to tell. The losses differ by more than 0.01 nats" in " ".join(out.split())
    assert "take more sequences" not in " ".join(out.split())
    series, task = (shlex.split(line) for line in out.splitlines() if line.startswith("  isoloss "))
    assert series == ["isoloss", "compare", "one run/step-*", "two/step-*", *words]
    assert task == ["isoloss", "compare", "one run/step-20", "two/step-10", *words, "--task", "sst2"]
    assert "one run, from step 10 to 20" in " ".join(call(capsys, *series[2:])[0].split())


def test_one_document_is_said(capsys):
    out, _ = call(capsys, "a", "b", "--data", "one.txt", "--length", "12", "--threads", "1")
    assert "(a folder of texts or a .jsonl file has more): errors are for these texts alone" in " ".join(out.split())
    assert "standard error over" in out


def test_what_there_is_more_of_is_said(capsys):
    few = ("--num-sequences", "8", "--loss-margin", "0.3")
    out, _ = call(capsys, "a", "c", "--data", "one.txt", "--length", "12", "--threads", "1", *few)
    assert "Next: take more sequences (--num-sequences), or" in " ".join(out.split())
    early = ("--rtol", "0.99", "--batch-size", "8")
    out, _ = call(capsys, "a", "c", "--data", "one.txt", "--length", "12", "--threads", "1", *early)
    assert "take a smaller --rtol, or" in " ".join(out.split())


def test_documents_are_what_there_must_be_more_of_where_one_decides_the_error(capsys):
    words = np.random.default_rng(0).choice(small.WORDS, (40, 24))
    texts = [" ".join(row) for row in words]
    texts[22] = " ".join(["the"] * 600)
    Path("rare.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    scaled = GPT2LMHeadModel.from_pretrained("a")
    with torch.no_grad():
        scaled.transformer.wte.weight.mul_(1.5)
    shutil.copytree("a", "scaled")
    scaled.save_pretrained("scaled")
    how = ("--data", "rare.jsonl", *DATA[2:], "--num-sequences", "120", "--loss-margin", "30")
    out = " ".join(call(capsys, "a", "scaled", *how)[0].split())
    assert "without it" in out.lower()
    assert "Next: take more documents in --data (nearly all of its documents are used), or" in out
    assert "--num-sequences 1" not in out.replace("--num-sequences 120", "")


def test_the_same_weights_and_other_architectures_have_no_flattest(capsys):
    shutil.copytree("a", "copy")
    out, _ = call(capsys, "a", "copy", *DATA)
    assert "a and copy have identical weights. There is nothing to compare." in " ".join(out.split())
    out, err = call(capsys, "a", "wide", *DATA, "--loss-margin", "100")
    assert "No verdict on which is flatter. a and wide have different parameters" in " ".join(out.split())
    assert "is flatter:" not in out
    assert err.count("warning: a and wide have different parameters") == 1


def test_a_page_of_series_without_polars_is_refused_before_anything_is_measured(capsys, monkeypatch):
    for step, name in enumerate("abc"):
        shutil.copytree(name, f"course/step-{step}")

    def require(package):
        raise IsolossError(f"no {package}")

    monkeypatch.setattr(compare, "require_package", require)
    words = ("course", *DATA, "--html", "page.html")
    assert call(capsys, *words, status=2)[1].endswith("isoloss compare: no polars\n")


def test_series_end_with_the_checkpoints_of_the_nearest_losses(capsys):
    one = (("one/checkpoint-1", "a", 1), ("one/checkpoint-6", "b", 6))
    other = (("other/step-2", "a", 1.05), ("other/step-4", "c", 4))
    for step, checkpoint, factor in (*one, *other):
        model = GPT2LMHeadModel.from_pretrained(checkpoint)
        with torch.no_grad():
            model.transformer.wte.weight.mul_(factor)
        shutil.copytree(checkpoint, step)
        model.save_pretrained(step)
    out, _ = call(capsys, "one", "--output", "kept series", "other/*", *DATA, "--num-sequences=40", "--html=page.html")
    assert "one between steps 1 and 6  other at step 4  no verdict: the interpolation between two steps" in out
    (two,) = (shlex.split(line) for line in out.splitlines() if line.startswith("  isoloss "))
    assert two[2:-2] == ["one/checkpoint-1", "other/step-2", *DATA, "--num-sequences=40"]
    assert shlex.join(two) in Path("page.html").read_text().partition("Commands to try next</h2>")[2]
    few, _ = call(capsys, "one", "c", *DATA, "--loss-margin", "1", "--num-sequences=4")
    more = next(line for line in few.splitlines() if line.startswith("  isoloss "))
    assert shlex.split(more)[2:] == ["one", "c", *DATA, "--loss-margin", "1", "--num-sequences", "16"]
    out, _ = call(capsys, *two[2:])
    assert "More robust at 4 bits? No difference that matters" in out
