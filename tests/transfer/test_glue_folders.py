"""The folders that GLUE's usual download script writes, and other forms in which its tasks are passed on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isoloss.errors import IsolossWarning
from isoloss.text.labeled_text import split_files
from isoloss.transfer.text_sources import registered_text_task
from isoloss.transfer.text_tasks import TextExamples, read_examples

MNLI = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"]
MNLI += ["sentence1_parse", "sentence2_parse", "sentence1", "sentence2"]


def tsv(path: Path, *rows: list[str]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def read(name: str, folder: Path) -> TextExamples:
    source = registered_text_task(name, str(folder))
    assert source is not None
    return read_examples(source)


def rows(examples: TextExamples, split: str = "train") -> list[tuple[str, ...]]:
    """The texts of each example and the name of its label."""
    data = getattr(examples, split)
    texts = [data.texts] if data.pairs is None else [data.texts, data.pairs]
    return list(zip(*texts, (data.label_names[label] for label in data.labels), strict=True))


def test_cola_has_no_header_and_no_quoting(tmp_path: Path) -> None:
    tsv(
        tmp_path / "train.tsv",
        ["gj04", "1", "", 'He said "no.'],
        ["gj04", "0", "*", "Him said."],
        ["c", "1", "", "Yes."],
    )
    tsv(tmp_path / "dev.tsv", ["gj04", "1", "", "Fine."], ["gj04", "0"])
    tsv(tmp_path / "test.tsv", ["index", "sentence"], ["0", "Unlabeled."])
    with pytest.warns(IsolossWarning, match=r"1 row is left out: 1 with another number of fields .*dev.tsv, line 2"):
        examples = read("CoLA", tmp_path)
    assert rows(examples) == [('He said "no.', "1"), ("Him said.", "0"), ("Yes.", "1")]
    assert rows(examples, "test") == [("Fine.", "1")]
    tsv(tmp_path / "train.tsv", ["sentence", "label"], ["With a header.", "0"])
    tsv(tmp_path / "dev.tsv", ["source", "label", "star", "sentence"], ["gj04", "1", "", "With another."])
    assert rows(read("cola", tmp_path)) == [("With a header.", "0")]
    assert rows(read("cola", tmp_path), "test") == [("With another.", "1")]


MRPC = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]


def test_mrpc_by_the_script_and_as_it_was_published(tmp_path: Path) -> None:
    (tmp_path / "msr_paraphrase_train.txt").write_text(
        "\ufeff" + "\t".join(MRPC) + '\r\n1\t7\t8\t"A" said .\tA said .\r\n0\t9\t10\tB .\tC .\r\n'
    )
    (tmp_path / "msr_paraphrase_test.txt").write_text("\ufeff" + "\t".join(MRPC) + "\r\n1\t1\t2\tE .\tF .\r\n")
    examples = read("mrpc", tmp_path)
    assert rows(examples) == [('"A" said .', "A said .", "1"), ("B .", "C .", "0")]
    assert rows(examples, "test") == [("E .", "F .", "1")]
    # the script divides the training file in two, and leaves the published ones beside them
    tsv(
        tmp_path / "train.tsv",
        ["\ufeff" + MRPC[0], *MRPC[1:]],
        ["1", "7", "8", "A .", "A !"],
        ["0", "9", "1", "B", "C"],
    )
    tsv(tmp_path / "dev.tsv", MRPC, ["0", "7", "8", "G .", "H ."])
    tsv(tmp_path / "dev_ids.tsv", ["1089", "2"])
    tsv(tmp_path / "test.tsv", ["index", *MRPC[1:]], ["0", "7", "8", "I .", "J ."])
    examples = read("MRPC", tmp_path)
    assert rows(examples) == [("A .", "A !", "1"), ("B", "C", "0")]
    assert rows(examples, "test") == [("G .", "H .", "0")]


def test_qqp_leaves_out_and_counts_short_rows(tmp_path: Path) -> None:
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    tsv(
        tmp_path / "train.tsv",
        header,
        ["0", "1", "2", "a?", "b?", "0"],
        ["1", "3", "4", "short"],
        ["2"],
        ["3", "5", "6", "c?", "c", "1"],
    )
    tsv(tmp_path / "dev.tsv", header, ["9", "7", "8", "d?", "e?", "1"])
    with pytest.warns(IsolossWarning, match=r"2 rows are left out: .*train.tsv, line 3"):
        examples = read("QQP", tmp_path)
    assert rows(examples) == [("a?", "b?", "0"), ("c?", "c", "1")]
    assert (examples.train.num_incomplete, examples.test.num_incomplete) == (2, 0)


def test_mnli_has_two_dev_splits_and_unlabeled_rows(tmp_path: Path) -> None:
    def row(premise: str, hypothesis: str, *labels: str) -> list[str]:
        return [*"01234567", premise, hypothesis, *labels]

    tsv(
        tmp_path / "train.tsv",
        [*MNLI, "label1", "gold_label"],
        row("a", "b", "neutral", "neutral"),
        row("c", "d", "-", "-"),
        row("e", "f", "entailment", "entailment"),
    )
    labels = [f"label{i}" for i in range(1, 6)]
    for split, label in (("dev_matched", "contradiction"), ("dev_mismatched", "neutral")):
        tsv(tmp_path / f"{split}.tsv", [*MNLI, *labels, "gold_label"], row(split, "g", *["entailment"] * 5, label))
    with pytest.warns(IsolossWarning, match="1 row is left out: 1 with the label -, read as a missing label"):
        examples = read("mnli", tmp_path)
    assert rows(examples) == [("a", "b", "neutral"), ("e", "f", "entailment")]
    assert rows(examples, "test") == [("dev_matched", "g", "contradiction")]
    assert examples.train.num_unlabeled == 1


@pytest.mark.parametrize("name", ["SST-2", "RTE", "WNLI", "QNLI"])
def test_the_others_are_as_on_the_hub(tmp_path: Path, name: str) -> None:
    columns = {"SST-2": ["sentence"], "QNLI": ["question", "sentence"]}.get(name, ["sentence1", "sentence2"])
    header = [*([] if name == "SST-2" else ["index"]), *columns, "label"]
    examples = [[*([] if name == "SST-2" else ["0"]), *(f"{c} {i}" for c in columns), f"{i}"] for i in range(2)]
    for split in ("train", "dev"):
        tsv(tmp_path / f"{split}.tsv", header, *examples)
    tsv(tmp_path / "test.tsv", ["index", *columns], ["0", *columns])
    found = read(name, tmp_path)
    assert rows(found) == rows(found, "test") == [(*(f"{c} {i}" for c in columns), f"{i}") for i in range(2)]


def test_parts_of_a_split_are_read_together(tmp_path: Path) -> None:
    for part, label in (("1k", "entailment"), ("9k", "not_entailment")):
        document = {"0": {"text_a": f"q{part}?", "text_b": "s", "label": label}}
        (tmp_path / f"train_part_{part}.json").write_text(json.dumps(document))
    tsv(tmp_path / "dev.tsv", ["index", "question", "sentence", "label"], ["0", 'q "?', "s", "entailment"])
    examples = read("QNLI", tmp_path)
    assert rows(examples) == [("q1k?", "s", "entailment"), ("q9k?", "s", "not_entailment")]
    assert rows(examples, "test") == [('q "?', "s", "entailment")]
    tsv(tmp_path / "train.tsv", ["index", "question", "sentence", "label"], ["0", "whole", "s", "entailment"])
    assert [file.name for file in split_files(tmp_path)["train"]] == ["train.tsv"]


def test_real_qnli_in_parts(shared_data: Path) -> None:
    examples = read("qnli", shared_data / "glue-qnli")
    assert (len(examples.train), len(examples.test)) == (9_999, 5_463)
    assert examples.train.label_names == ("entailment", "not_entailment")
    assert sum(examples.train.labels) == 4_476 + 496
    assert sum(examples.test.labels) == 2_761
