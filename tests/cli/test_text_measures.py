"""`isoloss measure` on tasks of text: accuracies of `isoloss transfer`, pairs of checkpoints, refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from speaking import as_json
from transformers import AutoModelForMaskedLM

from isoloss import fisher_trace
from isoloss.cli.main import main
from isoloss.lab.evaluation.context import language_inputs
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.loss import held_out_batch
from isoloss.runs import Run
from isoloss.studies.results import difference, measured
from isoloss.text.tokenizers import load_tokenizer
from isoloss.transfer.text_sources import registered_text_task
from isoloss.transfer.text_tasks import make_text_task, read_examples

GOOD, BAD = ("au", "bv", "cw"), ("dx", "ey", "fz")
FEW = ("--num-train", "30", "--num-test", "20")
TRAIN = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    """A vocabulary, a corpus, SST-2 and RTE in small: good texts have other words than bad ones."""
    path, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    tokens = ["[PAD]", "au", "[UNK]", "[CLS]", "[SEP]", *words[1:], "[MASK]", "##u"]
    (path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    texts = [" ".join(rng.choices(words, k=rng.randint(20, 60))) for _ in range(80)]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for task, header in (("sst2", "sentence\tlabel"), ("rte", "sentence1\tsentence2\tlabel")):
        (path / task).mkdir()
        for split, n in (("train", TRAIN), ("dev", 40)):
            lines = [header]
            for i in range(n):
                text = " ".join([*rng.choices(words, k=rng.randint(1, 9)), rng.choice(BAD if i % 2 else GOOD)])
                lines.append("\t".join([text, *(["gu hv"] if task == "rte" else []), str(i % 2)]))
            (path / task / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(folder: Path) -> Iterator[None]:
    """Keep the tokens of the corpus with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOSS_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def run(folder: Path, request: pytest.FixtureRequest) -> Path:
    return trained(folder, request.param)


def trained(folder: Path, architecture: str) -> Path:
    """A run on the corpus with two checkpoints."""
    words = ["train", str(folder / architecture), "--language", str(folder / "text.jsonl"), "--tokenizer"]
    words += [str(folder / "vocab.txt"), "--length", "12", "--architecture", architecture]
    words += ["--size", "h16" if architecture == "lstm" else "d16", "--steps", "4", "--checkpoints", "2"]
    assert main([*words, "--batch-size", "8", "--threads", "1"]) == 0
    return folder / architecture


def found(capsys, run, measure, task, *options):
    where = ("--task-data", f"{task.name}={task}", "--threads", "1")
    (evaluation,) = as_json(capsys, "measure", run, "--measures", measure, *where, "--steps", "4", *options)[
        "evaluations"
    ]
    return evaluation


def transferred(capsys, run, task, *options):
    where = ("--task", task.name, "--data", task, "--threads", "1")
    (result,) = as_json(capsys, "transfer", run, *where, *options)["models"].values()
    return result


@pytest.mark.parametrize(
    ("run", "kind"),
    [("bert-pre-ln", "RobertaPreLayerNormForMaskedLM"), ("lstm", "LSTMForMaskedLM")],
    indirect=["run"],
)
def test_loss_and_trace_on_text_are_those_of_the_checkpoint_that_anyone_loads(capsys, run, kind):
    words = ("--steps", "4", "--num-sequences", "32", "--threads", "1")
    found = as_json(capsys, "measure", run, "--measures", "loss", "trace", *words)["evaluations"]
    loss, trace = (evaluation["estimates"] for evaluation in found)
    language, objective = Run(run).config.language.build(), Run(run).config.objective
    model = AutoModelForMaskedLM.from_pretrained(Run(run).checkpoint(4))
    assert type(model).__name__ == kind
    batch = held_out_batch(language, num_sequences=32, objective=objective, seed=0)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"])
    assert loss["loss"]["value"] == pytest.approx(float(expected), rel=1e-5)
    assert 3 < loss["loss"]["value"] < 5  # log 60 is 4.09
    traced = language_inputs(language, objective, num_sequences=32, seed=0).batches
    assert trace["trace"]["value"] == pytest.approx(fisher_trace(model, traced).value, rel=1e-4)
    assert trace["trace"]["details"]["parameters_by_autograd"] == []


@pytest.mark.parametrize("run", ["bert", "opt", "lstm"], indirect=True)
def test_accuracies_are_those_of_isoloss_transfer(capsys, folder, run):
    cases = [
        ("probe", (*FEW, "--probe-seeds", "2", "--probe-epochs", "3"), (*FEW, "--seeds", "2", "--epochs", "3")),
        ("probe", (*FEW, "--probe-solver", "convex", "--seed", "3"), (*FEW, "--solver", "convex", "--seed", "3")),
        ("probe", ("--probe-solver", "convex", "--num-train", "all", "--num-test", "all"), ("--solver", "convex")),
        ("probe", ("--probe-solver", "convex", "--task-length", "6"), ("--solver", "convex", "--max-length", "6")),
        (
            "finetune",
            (*FEW, "--finetune-seeds", "2", "--finetune-epochs", "1", "--finetune-warmup-steps", "0"),
            (*FEW, "--method", "finetune", "--seeds", "2", "--epochs", "1", "--warmup-steps", "0"),
        ),
    ]
    one_of_each = [cases[0], cases[-1]]  # the other settings do not depend on the model
    for how, options, same in cases if run.name == "bert" else one_of_each:
        for task in (folder / "sst2", folder / "rte"):
            evaluation = found(capsys, run, f"{how}-{task.name}", task, *options)
            expected = transferred(capsys, run, task, *same)
            estimate = evaluation["estimates"]["accuracy"]
            assert (estimate["value"], estimate["stderr"]) == tuple(
                expected["accuracy"][key] for key in ("value", "stderr")
            )
            assert estimate["details"]["text"] == expected["text"]
            assert estimate["details"]["num_train"] == min(TRAIN, expected["accuracy"]["details"]["num_train"])
            arrays = Run(run).examples(Run(run).evaluation(f"{how}-{task.name}", 4))
            predictions = arrays["accuracy.predictions"].tolist()
            assert all(row in predictions for row in expected["predictions"])  # a convex probe's is kept once
            assert arrays["accuracy.labels"].tolist() == expected["labels"]


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_checkpoints_of_all_architectures_are_paired_example_by_example(capsys, folder, run):
    settings = {"num_train": 40, "num_test": "all", "probe_seeds": 2, "probe_epochs": 20, "task_length": 12}
    settings |= {"task_data": (f"sst2={folder / 'sst2'}",)}
    evaluate([run, trained(folder, "lstm")], ["probe-sst2"], settings=settings, device="cpu")
    early, late = (measured(Run(run), "probe-sst2", step)["accuracy"] for step in (2, 4))
    other = measured(Run(folder / "lstm"), "probe-sst2", 4)["accuracy"]
    for second in (late, other):
        moved = difference(second, early)
        right = [one.examples["predictions"] == one.examples["labels"] for one in (second, early)]
        assert moved.value == pytest.approx(100 * (right[0].mean() - right[1].mean()))
        assert moved.stderr > 0
    lines = (folder / "sst2" / "dev.tsv").read_text().splitlines()[1:]
    assert early.examples["labels"].tolist() == [int(line.split("\t")[1]) for line in lines]


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_other_examples_are_other_inputs(capsys, folder, run, tmp_path):
    copy = tmp_path / "sst2"
    copy.mkdir()
    for split in ("train", "dev"):
        (copy / f"{split}.tsv").write_text((folder / "sst2" / f"{split}.tsv").read_text())
    quick = (*FEW, "--probe-solver", "convex")
    first = found(capsys, run, "probe-sst2", folder / "sst2", *quick)
    assert found(capsys, run, "probe-sst2", copy, *quick)["inputs"] == first["inputs"]
    text = (copy / "train.tsv").read_text()
    (copy / "train.tsv").write_text(text.replace(" dx", " ey"))  # the same lengths and labels
    (tmp_path / "renamed").mkdir()
    copy.rename(tmp_path / "renamed" / "sst2")
    assert found(capsys, run, "probe-sst2", tmp_path / "renamed" / "sst2", *quick)["inputs"] != first["inputs"]


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_only_what_is_about_a_task_is_among_its_settings(capsys, folder, run):
    both = ("--task-data", f"rte={folder / 'rte'}", f"sst2={folder / 'sst2'}", "--threads", "1", "--steps", "4")
    words = ("measure", run, "--measures", "probe-sst2", "probe-rte", *both, *FEW, "--probe-epochs", "1")
    kept = {each["measure"]: each["settings"] for each in as_json(capsys, *words)["evaluations"]}
    assert [settings["task_data"] for settings in kept.values()] == [
        [f"sst2={folder / 'sst2'}"],
        [f"rte={folder / 'rte'}"],
    ]
    (again,) = as_json(
        capsys, "measure", run, "--measures", "probe-SST-2", "--task-data", f"SST-2={folder / 'sst2'}", *both[3:], *FEW
    )["evaluations"]
    assert again["inputs"] == Run(run).evaluation("probe-sst2", 4).inputs
    path = Run(run).evaluation_path("probe-sst2", 4)
    written = path.stat().st_mtime_ns
    found(capsys, run, "probe-sst2", folder / "sst2", *FEW, "--probe-epochs", "1")  # there is no need to measure it
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_rows_that_are_left_out_are_counted_and_said(capsys, folder, run, tmp_path):
    for split, extra in (("train", "au bu\nau\t\n"), ("dev", "av\tbv\t1\n")):
        (tmp_path / f"{split}.tsv").write_text((folder / "sst2" / f"{split}.tsv").read_text() + extra)
    words = ("--task", "SST-2", "--data", str(tmp_path), "--solver", "convex", "--threads", "1")
    assert main(["transfer", str(run), *words]) == 0
    out, err = capsys.readouterr()
    assert "sst2, probe of" in out
    assert "rows left out: 1 without a label, 2 incomplete" in " ".join(out.split())
    assert "2 rows are left out: 1 with another number of fields than the first line" in err
    assert f"1 without a label (first: {tmp_path / 'train.tsv'}, line 73)" in err
    assert (
        f"1 row is left out: 1 with another number of fields than the first line (first: {tmp_path / 'dev.tsv'}" in err
    )


def test_draws_are_disjoint_and_the_first_is_that_of_a_single_one(folder):
    source = registered_text_task("sst2", str(folder / "sst2"))
    single = read_examples(source, num_train=20, seed=1).train.texts
    drawn = read_examples(source, num_train=20, draws=3, seed=1).train.texts
    assert drawn[:20] == single
    everything = read_examples(source).train.texts
    assert len(set(everything)) == len(everything)
    assert len(set(drawn)) == len(drawn) == 60
    for draw in (drawn[:20], drawn[20:40], drawn[40:]):
        places = [everything.index(text) for text in draw]
        assert places == sorted(places)
        assert max(places) - min(places) > TRAIN / 2  # from the whole file


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_few_shot_and_projected_probes_and_those_of_the_tokens(capsys, folder, run):
    task, rest = folder / "sst2", ("--num-test", "all", "--probe-draws", "3")
    several = found(capsys, run, "few-shot-sst2-20", task, *rest)["estimates"]["accuracy"]
    one = transferred(capsys, run, task, "--num-train", "20", "--solver", "convex")["accuracy"]
    assert several["details"]["accuracies"][0] == one["value"]
    assert several["details"]["draws"] == 3
    projected = found(capsys, run, "projected-sst2-8", task, *rest, "--num-train", "all")["estimates"]["accuracy"]
    assert projected["details"]["num_train"] == TRAIN
    assert projected["details"]["projections"] == 3

    convex = ("--num-train", "all", "--num-test", "all", "--probe-solver", "convex")
    tokens = found(capsys, run, "one-hot-sst2", task, *convex)["estimates"]["accuracy"]
    from isoloss.transfer.probe import fit_linear_probe

    tokenizer = load_tokenizer(str(folder / "vocab.txt"))
    data = make_text_task(registered_text_task("sst2", str(task)), tokenizer, max_length=12)
    rows = {}
    for split, sentences in (("train", data.train), ("test", data.test)):
        rows[split] = np.zeros((len(sentences.tokens), sentences.tokens.shape[1], len(tokenizer)), dtype=np.float32)
        for i, (ids, length) in enumerate(zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)):
            for t in range(length):
                rows[split][i, t, ids[t]] = 1
    x, y = (torch.from_numpy(rows[split]).flatten(1) for split in ("train", "test"))
    expected = fit_linear_probe(x, data.train_labels, y, data.test_labels, classes=data.classes, solver="convex")
    assert tokens["value"] == expected.accuracy.value


@pytest.mark.parametrize("run", ["bert"], indirect=True)
def test_a_checkpoint_from_elsewhere_reads_with_its_tokenizer(capsys, folder, run, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(["au bv cw dx"] * 40))
    quick = (*FEW, "--probe-solver", "convex", "--task-data", f"sst2={folder / 'sst2'}", "--threads", "1")
    checkpoint = run / "checkpoints" / "step-4"
    data = ("--data", tmp_path / "text.txt", "--tokenizer", folder / "vocab.txt")
    (elsewhere,) = as_json(capsys, "measure", checkpoint, *data, "--measures", "probe-sst2", *quick)["evaluations"]
    own = found(capsys, run, "probe-sst2", folder / "sst2", *FEW, "--probe-solver", "convex")
    assert elsewhere["inputs"] == own["inputs"]
    assert elsewhere["estimates"]["accuracy"]["value"] == own["estimates"]["accuracy"]["value"]
