"""Tasks of real text: which examples and columns are taken, how they are encoded, and what is wrong with them."""

from __future__ import annotations

import csv
from pathlib import Path

import datasets
import pytest
import torch
from transformers import BertConfig

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.registry import TASKS
from isoloss.text.labeled_text import number_labels, read_rows
from isoloss.text.tokenizers import load_tokenizer
from isoloss.transfer.tasks import Coverage
from isoloss.transfer.text_sources import MNLI, TextTask, own_text_task, registered_text_task
from isoloss.transfer.text_tasks import as_read_by, encode_labeled_text, make_text_task, read_examples

ROWS = [
    ("au bu", "cu", "yes"),
    ("av", "bv cv", "no"),
    ("aw bw cw", "dw", "yes"),
    ("ax", "bx", "no"),
    ("ay by", "cy", "no"),
]


def write(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("one", "two", "gold"), *rows])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "train.csv", ROWS)
    write(tmp_path / "data" / "dev.csv", ROWS[1:4])
    return tmp_path / "data"


def pairs(folder: Path, **changes: object) -> TextTask:
    return TextTask(**{"name": "t", "train": str(folder), "text": "one", "pair": "two", "label": "gold", **changes})  # type: ignore[arg-type]


def test_the_examples_are_encoded_and_padded_to_one_length(folder: Path, vocab: Path) -> None:
    tokenizer = load_tokenizer(str(vocab))
    task = make_text_task(pairs(folder), tokenizer)
    assert task.classes == ("no", "yes")
    assert task.train_labels.tolist() == [1, 0, 1, 0, 0]
    assert task.test_labels.tolist() == [0, 1, 0]
    assert task.train.tokens.shape == (5, 7)  # [CLS] three words [SEP] one word [SEP]
    assert task.test.tokens.shape == (3, 7)
    for split, rows, sentences in (("train", ROWS, task.train), ("test", ROWS[1:4], task.test)):
        batch = task.batch(split)
        for index, (one, two, _) in enumerate(rows):
            words = ["[CLS]", *one.split(), "[SEP]", *two.split(), "[SEP]"]
            assert tokenizer.convert_ids_to_tokens(sentences.tokens[index, : len(words)].tolist()) == words
            assert int(sentences.lengths[index]) == len(words) == int(batch["attention_mask"][index].sum())
            assert set(sentences.tokens[index, len(words) :].tolist()) <= {tokenizer.pad_token_id}
            first = 2 + len(one.split())
            assert batch["token_type_ids"][index].tolist() == [int(first <= i < len(words)) for i in range(7)]
    assert task.inputs() == [(one, two) for one, two, _ in ROWS[1:4]]
    assert (task.majority_rate, task.overlap, task.bayes) == (2 / 3, 1.0, None)
    some = task.batch("train", slice(1, 3))
    assert {name: tensor.shape for name, tensor in some.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), (2, 7)
    )


@pytest.mark.parametrize(
    ("train", "test"), [(["0", "1", "-1"], ["1", "-1"]), (["1", "-1"], ["0", "1"])], ids=["test", "training"]
)
def test_a_missing_label_is_told_by_both_splits(folder: Path, vocab: Path, train: list[str], test: list[str]) -> None:
    for name, labels in (("train", train), ("dev", test)):
        write(folder / f"{name}.csv", [("au", "bu", label) for label in labels])
    with pytest.warns(IsolossWarning, match="-1, read as a missing label"):
        task = make_text_task(pairs(folder), load_tokenizer(str(vocab)))
    assert sorted(task.classes) == ["0", "1"]
    kept = [task.classes[label] for label in [*task.train_labels.tolist(), *task.test_labels.tolist()]]
    assert kept == [label for label in (*train, *test) if label != "-1"]


def test_a_test_label_that_training_lacks_is_a_class_of_its_own(folder: Path, vocab: Path, tmp_path: Path) -> None:
    unseen = write(tmp_path / "unseen.csv", [("au", "bu", "maybe"), ("au", "bu", "yes")])
    task = make_text_task(pairs(folder, test=str(unseen)), load_tokenizer(str(vocab)))
    assert task.classes == ("no", "yes", "maybe")
    assert [task.classes[label] for label in task.test_labels.tolist()] == ["maybe", "yes"]
    assert task.train_labels.tolist() == [1, 0, 1, 0, 0]


def test_a_model_without_token_types_gets_none_and_long_texts_are_cut(folder: Path, vocab: Path) -> None:
    task = make_text_task(pairs(folder), load_tokenizer(str(vocab)), token_types=1, max_length=6)
    assert task.train_types is None
    assert "token_type_ids" not in task.batch("test")
    assert int(task.train.lengths.max()) == 6
    with pytest.raises(IsolossError, match="train and test, not 'dev'"):
        task.batch("dev")


def test_some_of_the_examples_are_drawn_without_replacement(folder: Path, vocab: Path) -> None:
    tokenizer = load_tokenizer(str(vocab))
    whole = make_text_task(pairs(folder), tokenizer)
    rows = {tuple(row) for row in whole.train.tokens.tolist()}
    seen = set()
    for seed in range(20):
        task = make_text_task(pairs(folder), tokenizer, num_train=4, num_test=99, seed=seed)
        drawn = {tuple(row) for row in task.train.tokens.tolist()}
        assert len(drawn) == 4
        assert len(task.test_labels) == 3  # all there are
        if task.train.tokens.shape[1] == 7:
            assert drawn <= rows
        seen |= drawn
    assert len(seen) == 5


def test_a_single_file_keeps_one_example_in_five_for_testing(tmp_path: Path, vocab: Path) -> None:
    words = [f"{a}{b} {c}{d}" for a in "abcdefghij" for b in "uv" for c in "ab" for d in "u"]
    file = write(tmp_path / "all.csv", [(text, "au", "no" if i % 2 else "yes") for i, text in enumerate(words)])
    task = make_text_task(pairs(file), load_tokenizer(str(vocab)))
    assert (len(task.train_labels), len(task.test_labels)) == (32, 8)
    assert task.overlap == 0
    held_out = {text for text, _ in task.inputs()}
    assert len(held_out) == 8
    other = make_text_task(pairs(file), load_tokenizer(str(vocab)), seed=1)
    assert {text for text, _ in other.inputs()} != held_out
    two = make_text_task(pairs(file, test=str(file)), load_tokenizer(str(vocab)))
    assert (len(two.train_labels), len(two.test_labels), two.overlap) == (40, 40, 1.0)


def test_a_named_dataset(tmp_path: Path, vocab: Path) -> None:
    features = datasets.Features({"one": datasets.Value("string"), "gold": datasets.ClassLabel(names=["bad", "good"])})
    splits = {
        "train": [{"one": "au", "gold": 1}, {"one": "av", "gold": 0}],
        "validation": [{"one": "aw", "gold": 1}],
        "test": [{"one": "ax", "gold": -1}],
    }
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows, features=features) for name, rows in splits.items()}
    ).save_to_disk(tmp_path / "saved")
    source = TextTask(name="t", train=f"hf:{tmp_path / 'saved'}", text="one", label="gold")
    task = make_text_task(source, load_tokenizer(str(vocab)))
    assert task.classes == ("bad", "good")
    assert task.inputs() == [("aw",)]
    assert task.test_labels.tolist() == [1]


def test_glue_tasks_have_their_columns() -> None:
    source = TextTask(name="rte", train="hf:nyu-mll/glue:rte", text="sentence1", pair="sentence2")
    assert registered_text_task("rte") == source
    assert registered_text_task("sst2", "folder").train == "folder"
    assert (MNLI.test_split, registered_text_task("mnli", "folder").test_split) == ("validation_matched", None)
    glue = [name for name in TASKS if TASKS.summary(name).startswith("GLUE: ")]
    assert [registered_text_task(name).name for name in glue] == glue
    assert len(glue) == 8
    for name in ("stsb", "STS-B"):
        with pytest.raises(IsolossError, match=rf"^{name} is no classification task \(it is a regression\); .* cola,"):
            registered_text_task(name)
    for name in ("CoLA", "MNLI", "mnli", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "sst_2", "WNLI"):
        assert registered_text_task(name).name == name.lower().replace("-", "").replace("_", "")
    assert registered_text_task("imdb") is None


@pytest.mark.parametrize("name", ["sst2", "rte"])
def test_real_glue(shared_data: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(shared_data / "bert-uncased-vocab" / "vocab.txt"))
    folder = shared_data / f"glue-{name}"
    source = registered_text_task(name, str(folder))
    task = make_text_task(source, tokenizer, num_train=200, max_length=64)
    (dev,) = number_labels([read_rows(folder, [(source.text, source.pair, source.label)], split="dev")])
    assert task.classes == dev.label_names
    assert task.test_labels.tolist() == list(dev.labels)
    encoded = encode_labeled_text(tokenizer, dev, max_length=64)
    width = encoded["input_ids"].shape[1]
    assert task.test.tokens[:, :width].tolist() == encoded["input_ids"].tolist()
    assert int((task.test.tokens[:, width:] != tokenizer.pad_token_id).sum()) == 0
    majority = {"sst2": 444 / 872, "rte": 146 / 277}[name]
    assert task.majority_rate == majority


def test_what_is_wrong_is_named(folder: Path, vocab: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(vocab))

    def refused(message: str, source: TextTask, **options: int) -> None:
        with pytest.raises(IsolossError, match=message):
            make_text_task(source, tokenizer, **options)

    refused("has no column 'three'; it has one, two, gold", pairs(folder, text="three"))
    refused("num_train is 0", pairs(folder), num_train=0)
    refused("num_test is -1", pairs(folder), num_test=-1)
    refused("does not have the split 'first'", pairs(folder, train_split="first"))
    refused("the split 'train' of .* would be used for training and for testing", pairs(folder, test_split="train"))
    empty = write(tmp_path / "empty.csv", [])
    refused("empty.csv has no row with text and label", pairs(folder, test=str(empty)))
    refused("empty.csv has no row with text and label", pairs(empty))
    refused("has 4 examples, too few to keep one in five", pairs(write(tmp_path / "four.csv", ROWS[:4])))
    one = write(tmp_path / "one.csv", [ROWS[0], ROWS[2]] * 5)
    refused("one.csv: all 10 examples have the label yes; a task needs two labels", pairs(one))
    alone = write(tmp_path / "alone" / "train.csv", ROWS)
    refused("none of the test splits dev, validation, .*; it has train", pairs(alone.parent))
    refused("max_length is 4; with 3 special tokens", pairs(folder), max_length=4)


@pytest.mark.parametrize(("kind", "divider"), [("csv", ","), ("tsv", "\t")])
def test_a_task_of_ones_own_has_text_and_label_and_perhaps_a_pair(tmp_path: Path, kind: str, divider: str) -> None:
    def task(*rows: str) -> TextTask:
        (tmp_path / f"mine.{kind}").write_text("\n".join(rows).replace(",", divider) + "\n")
        return own_text_task("mine", str(tmp_path / f"mine.{kind}"))

    one = read_examples(task("label,text", *(f"{i % 2},a{i}" for i in range(20))))
    assert (len(one.train), len(one.test), one.train.pairs) == (16, 4, None)
    assert sorted(one.train.texts + one.test.texts) == sorted(f"a{i}" for i in range(20))
    two = read_examples(task("text,pair,label", *(f"a{i},b{i},{i % 2}" for i in range(20))))
    assert two.test.texts == one.test.texts
    assert two.test.pairs == tuple(text.replace("a", "b") for text in two.test.texts)
    with pytest.raises(IsolossError, match=f"mine.{kind} has no column 'label'; it has text, class"):
        read_examples(task("text,class", "a,1"))


def test_an_id_behind_the_mask_need_not_be_the_models(tmp_path: Path, folder: Path, vocab: Path) -> None:
    tokenizer = load_tokenizer(str(vocab))
    examples = read_examples(pairs(folder))
    known = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[MORE]"})  # beyond the model's ids, as many give GPT-2 one
    task = as_read_by(BertConfig(vocab_size=known), None, examples, tokenizer)
    expected = make_text_task(pairs(folder), load_tokenizer(str(vocab)))
    for found, wanted in ((task.train, expected.train), (task.test, expected.test)):
        assert torch.equal(found.lengths, wanted.lengths)
        assert torch.equal(found.tokens[found.present()], wanted.tokens[wanted.present()])
        assert int(found.tokens.max()) < known
    with pytest.raises(IsolossError, match=r"hold the token id .* and b knows 5 ids: the tokenizer belongs to another"):
        as_read_by(BertConfig(vocab_size=5), None, examples, tokenizer, model="b")


def test_what_is_cut_and_what_is_unknown_is_counted(tmp_path: Path, vocab: Path) -> None:
    tokenizer = load_tokenizer(str(vocab))
    rows = [("au bu", "cu", "yes"), ("zz", "bv cv", "no"), ("aw bw cw", "nobody knows", "yes"), ("", "bx", "no")]
    source = pairs(tmp_path, train=str(write(tmp_path / "a.csv", rows)), test=str(write(tmp_path / "b.csv", rows[:2])))
    # with [CLS] and two [SEP]: 6, 6, 8 and 4 tokens, and 6, 6; in them zz, nobody, knows, and zz again are not known
    for max_length, cut in ((8, 0), (7, 1), (6, 1), (5, 5)):
        found = make_text_task(source, tokenizer, max_length=max_length).coverage
        assert found == Coverage(num_examples=6, num_cut=cut, num_tokens=18, num_unknown=4)
