"""Labeled texts: every kind of file, named datasets, what is wrong with them, and their encoding token by token."""

import csv
import json
from contextlib import nullcontext

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.text.labeled_text import LabeledText, number_labels, read_rows
from isoloss.text.tokenizers import load_tokenizer
from isoloss.transfer.text_tasks import encode_labeled_text


def read_labeled_text(source, *, text, pair=None, label="label", label_names=None, other_columns=(), **options):
    """The examples of one split."""
    return number_labels([read_rows(source, [(text, pair, label), *other_columns], **options)], label_names)[0]


CLS, SEP, PAD, MASK = 3, 4, 0, 64
ROWS = [('He said "no', "a, b", "yes"), ("x", '"quoted"', "no"), ("é\u2028y", "z", "yes")]
WANTED = LabeledText(
    texts=tuple(row[0] for row in ROWS),
    pairs=tuple(row[1] for row in ROWS),
    labels=(1, 0, 1),
    label_names=("no", "yes"),
)


def records():
    return [{"one": one, "id": 7, "two": two, "gold": gold} for one, two, gold in ROWS]


def write(folder, kind):
    path = folder / f"dev.{'json' if kind == 'object' else kind}"
    if kind == "tsv":
        lines = ["gold\tone\tid\ttwo", *(f"{gold}\t{one}\t7\t{two}" for one, two, gold in ROWS)]
        path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("gold", "one", "two"), *((gold, one, two) for one, two, gold in ROWS)])
    elif kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(record) for record in records()) + "\n")
    else:
        path.write_text(json.dumps(records() if kind == "json" else dict(enumerate(records()))))
    return path


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "json", "object"])
def test_every_kind_of_file_gives_the_same(tmp_path, kind):
    path = write(tmp_path, kind)
    assert read_labeled_text(path, text="one", pair="two", label="gold") == WANTED
    assert read_labeled_text(tmp_path, text="one", pair="two", label="gold", split="dev") == WANTED
    single = read_labeled_text(path, text="two", label="gold", label_names=("yes", "maybe", "no"))
    assert (single.texts, single.pairs, single.labels) == (WANTED.pairs, None, (0, 2, 0))
    assert len(single) == 3


def test_number_labels_are_in_order_of_value(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"t": "x", "label": label}) + "\n" for label in (10, 9, "-3", "b", "a")))
    data = read_labeled_text(path, text="t")
    assert data.label_names == ("-3", "9", "10", "a", "b")
    assert data.labels == (2, 1, 0, 4, 3)


@pytest.mark.parametrize(
    ("labels", "names", "kept", "said"),
    [
        (
            *(["yes", "-", "no", None, ""], ("no", "yes"), [0, 2]),
            r"3 rows are left out: 2 without a label \(first: .*a.jsonl, line 4\), "
            r"1 with the label -, read as a missing label \(a class needs another name\) \(first: .*a.jsonl, line 2\)",
        ),
        ([0, 1, -1, 2], ("0", "1", "2"), [0, 1, 3], "1 row is left out: 1 with the label -1, read as a missing label"),
        ([-1, 0, 1, -1], ("0", "1"), [1, 2], "2 rows are left out: 2 with the label -1, read as a missing label"),
        ([1.0, 0.0, float("nan")], ("0", "1"), [0, 1], "1 without a label"),
        ([True, False, True], ("false", "true"), [0, 1, 2], None),
        ([1, -1, 1], ("-1", "1"), [0, 1, 2], None),
        (["+", "-"], ("-", "+"), [0, 1], None),
        # as pandas writes numbers of which some are missing, and spaces around a name
        (["1.0", "0.0", "nan", "1"], ("0", "1"), [0, 1, 3], "1 without a label"),
        (["yes ", "no", "yes"], ("no", "yes"), [0, 1, 2], None),
        (
            ["a", "NA", "b", "NA"],
            ("a", "b"),
            [0, 2],
            "2 rows are left out: 2 with the label NA, read as a missing label",
        ),
        (
            ["a", "None", "<NA>", "null", "b"],
            ("a", "b"),
            [0, 4],
            "3 rows are left out: 1 with the label None, .*<NA>.*null",
        ),
        (["none", "NONE", "a"], ("none", "NONE", "a"), [0, 1, 2], None),
    ],
)
def test_rows_without_a_label_are_left_out_and_counted(tmp_path, labels, names, kept, said):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"t": f"x{i}", "label": label}) + "\n" for i, label in enumerate(labels)))
    with nullcontext() if said is None else pytest.warns(IsolossWarning, match=said):
        data = read_labeled_text(path, text="t")
    assert set(data.label_names) == set(names)
    assert data.texts == tuple(f"x{row}" for row in kept)
    assert data.num_unlabeled == len(labels) - len(kept)
    assert len(data.labels) == len(kept)


def test_what_a_task_names_as_a_class_is_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("t,label\nx,None\ny,some\nz,NA\n")
    with pytest.warns(IsolossWarning, match="1 row is left out: 1 with the label NA"):
        data = read_labeled_text(path, text="t", label_names=("some", "None"))
    assert (data.texts, data.labels, data.label_names) == (("x", "y"), (1, 0), ("some", "None"))
    named = datasets.ClassLabel(names=["None", "some"])
    features = datasets.Features({"t": datasets.Value("string"), "label": named})
    datasets.Dataset.from_dict({"t": ["x", "y"], "label": [0, 1]}, features=features).save_to_disk(tmp_path / "saved")
    assert read_labeled_text(f"hf:{tmp_path / 'saved'}", text="t").label_names == ("None", "some")


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("a.tsv", "t\tu\tlabel\nx\ty\t1\nshort\n\tz\t0\ntoo\tlong\t1\t1\n", [("x", "y"), ("", "z")]),
        ("a.csv", "t,u,label\nx,y,1\nshort\n,z,0\nnot, quoted,b,1\n", [("x", "y"), ("", "z")]),
        ("a.csv", 't,u,label\nx,y,1\n"  ",\t,1\n,,0\n', [("x", "y")]),
        (
            "a.jsonl",
            '{"t": null, "u": "a", "label": 1}\n{"t": "x", "u": "y", "label": 1}\n{"t": "b", "label": 0}\n',
            [("x", "y")],
        ),
    ],
)
def test_rows_without_all_fields_or_texts_are_left_out_and_counted(tmp_path, name, content, kept):
    (tmp_path / name).write_text(content)
    with pytest.warns(IsolossWarning, match="2 rows are left out: 2 with"):
        data = read_labeled_text(tmp_path / name, text="t", pair="u")
    assert list(zip(data.texts, data.pairs, strict=True)) == kept
    assert (data.num_incomplete, data.num_unlabeled) == (2, 0)


def test_files_of_a_split_have_the_same_texts(tmp_path):
    (tmp_path / "train_part_1.csv").write_text("t,u,label\nx,y,1\n")
    (tmp_path / "train_part_2.csv").write_text("t,label\nx,0\n")
    with pytest.raises(IsolossError, match="some of its files have two texts per row, and others have one"):
        read_labeled_text(tmp_path, text="t", pair="u", other_columns=[("t", None, "label")])


def test_named_datasets_know_their_labels(tmp_path):
    features = datasets.Features(
        {
            "one": datasets.Value("string"),
            "two": datasets.Value("large_string"),
            "gold": datasets.ClassLabel(names=["yes", "no"]),
        }
    )
    columns = {"one": [row[0] for row in ROWS], "two": [row[1] for row in ROWS], "gold": [0, 1, 0]}
    splits = {
        "validation": datasets.Dataset.from_dict(columns, features=features),
        "test": datasets.Dataset.from_dict({**columns, "gold": [0, 1, -1]}, features=features),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    name = f"hf:{tmp_path / 'saved'}"
    data = read_labeled_text(name, text="one", pair="two", label="gold", split="validation")
    assert (data.texts, data.pairs) == (WANTED.texts, WANTED.pairs)
    assert (data.labels, data.label_names) == ((0, 1, 0), ("yes", "no"))
    flipped = read_labeled_text(name, text="one", label="gold", split="validation", label_names=("no", "yes"))
    assert flipped.labels == (1, 0, 1)
    with pytest.warns(IsolossWarning, match="1 row is left out: 1 without a label"):
        test = read_labeled_text(name, text="one", label="gold", split="test")
    assert (test.labels, test.texts, test.num_unlabeled) == ((0, 1), WANTED.texts[:2], 1)
    with pytest.raises(IsolossError, match="no split 'train'; it has validation, test"):
        read_labeled_text(name, text="one", label="gold")
    with pytest.raises(IsolossError, match="no column 'label'; it has one, two, gold"):
        read_labeled_text(name, text="one", split="validation")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "t\tgold\nx\t1\n", r"a.tsv has no column 'label'; it has t, gold"),
        ("a.tsv", "", r"a.tsv has no column 't'; it has none"),
        ("a.tsv", "t\tlabel\n", "has no row with text and label"),
        ("a.tsv", "t\tlabel\nx\t\n", "no row with text and label: 1 without a label"),
        ("a.csv", 't,label\n"x,1\n', "not a readable .csv file"),
        ("a.csv", "t,label\nx,1,2\n", "1 with another number of fields than the first line .*line 2"),
        ("a.jsonl", '{"t": "x"}\n', r"a.jsonl has no column 'label'; it has t"),
        ("a.jsonl", '{"t": "x", "label": 1}\n{"t": 3, "label": 1}\n', r"line 2: the column 't' holds no text but 3"),
        ("a.jsonl", '{"t": "\\ud800", "label": 1}\n', r"line 1: the column 't' holds no text"),
        ("a.jsonl", '{"t": "x", "label": 0.5}\n', r"line 1: the column 'label' holds no label but 0.5"),
        ("a.jsonl", '{"t": "x", "label": null}\n', "no row with text and label: 1 without a label"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.json", "3", "neither a list of JSON objects nor an object"),
        ("a.json", '{"k": 3}', "item k is no JSON object"),
        ("a.txt", "x", "must end in .tsv, .csv, .jsonl, .json"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(IsolossError, match=message):
        read_labeled_text(tmp_path / name, text="t")


def test_bad_names_splits_and_labels(tmp_path):
    write(tmp_path, "tsv")
    (tmp_path / "bad.tsv").write_bytes(b"t\tlabel\ncaf\xe9\t1\n")
    with pytest.raises(IsolossError, match=r"does not have the split 'train'; it has bad, dev"):
        read_labeled_text(tmp_path, text="one")
    write(tmp_path, "csv")
    with pytest.raises(IsolossError, match=r"split 'dev' only once but as dev.csv, dev.tsv"):
        read_labeled_text(tmp_path, text="one", split="dev")
    with pytest.raises(IsolossError, match=r"there is no file or folder .*nowhere"):
        read_labeled_text(tmp_path / "nowhere", text="one")
    with pytest.raises(IsolossError, match=r"bad.tsv is not UTF-8"):
        read_labeled_text(tmp_path / "bad.tsv", text="t")
    with pytest.raises(IsolossError, match=r"dev.tsv, line 2: the label 'yes' is not one of no, maybe"):
        read_labeled_text(tmp_path / "dev.tsv", text="one", label="gold", label_names=("no", "maybe"))
    with pytest.raises(IsolossError, match="columns one, one, gold must differ"):
        read_labeled_text(tmp_path / "dev.tsv", text="one", pair="one", label="gold")


# --- encoding


def by_hand(tokenizer, first, second, max_length):
    """Ids and types of one example by the documented rule, a token at a time."""
    a, b = (tokenizer(text, add_special_tokens=False).input_ids for text in (first, second or ""))
    shorter = b if len(a) > len(b) else a
    while len(a) + len(b) + (2 if second is None else 3) > max_length:
        (shorter if len(a) == len(b) else max(a, b, key=len)).pop()
    ids, types = [CLS, *a, SEP], [0] * (len(a) + 2)
    return (ids, types) if second is None else ([*ids, *b, SEP], types + [1] * (len(b) + 1))


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("max_length", [5, 6, 9, 40])
def test_encoding_by_hand(vocab, words, is_pair, max_length):
    tokenizer = load_tokenizer(str(vocab))
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 12, (60, 2))
    first, second = ([" ".join(draw.choice(words, size)) for size in column] for column in sizes.T)
    labels = tuple(draw.integers(0, 3, 60).tolist())
    data = LabeledText(tuple(first), tuple(second) if is_pair else None, labels, ("a", "b", "c"))
    tokenizer.truncation_side = "left"  # where it would cut by itself makes no difference, and stays
    batch = encode_labeled_text(tokenizer, data, max_length=max_length)
    assert tokenizer.truncation_side == "left"
    seconds = second if is_pair else [None] * 60
    expected = [by_hand(tokenizer, a, b, max_length) for a, b in zip(first, seconds, strict=True)]
    longest = max(len(ids) for ids, _ in expected)
    assert longest == max_length or max_length == 40
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (60, longest), "attention_mask": (60, longest), "token_type_ids": (60, longest), "labels": (60,),
    }  # fmt: skip
    assert all(value.dtype == torch.int64 for value in batch.values())
    assert batch["labels"].tolist() == list(labels)
    for row, (ids, types) in enumerate(expected):
        rest = longest - len(ids)
        assert batch["input_ids"][row].tolist() == ids + [PAD] * rest
        assert batch["attention_mask"][row].tolist() == [1] * len(ids) + [0] * rest
        assert batch["token_type_ids"][row].tolist() == types + [0] * rest


def test_text_is_text_and_types_follow_the_model(vocab):
    tokenizer = load_tokenizer(str(vocab))
    data = LabeledText(("av [MASK] [SEP]",), ("aw",), (0,), ("a",))
    ids = encode_labeled_text(tokenizer, data, max_length=50)["input_ids"][0].tolist()
    assert MASK not in ids
    assert ids.count(SEP) == 2
    assert "token_type_ids" not in encode_labeled_text(tokenizer, data, max_length=50, token_types=1)
    assert tokenizer("av [MASK]").input_ids == [CLS, 5, MASK, SEP]  # the tokenizer is as before


def test_unfit_tokenizers_and_lengths(vocab):
    tokenizer = load_tokenizer(str(vocab))
    one, two = LabeledText(("av",), None, (0,), ("a",)), LabeledText(("av",), ("aw",), (0,), ("a",))
    for data, least in ((one, 3), (two, 5)):
        with pytest.raises(IsolossError, match=f"max_length is {least - 1}; .* at least {least}"):
            encode_labeled_text(tokenizer, data, max_length=least - 1)
        assert encode_labeled_text(tokenizer, data, max_length=least)["input_ids"].shape == (1, least)


def bytes_alone(template=None):
    """A tokenizer of bytes without a padding token and with nothing between two texts, as GPT-2's and Pythia's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({"<s>": 0} | {letter: 1 + i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if template is not None:
        single, pair = template
        backend.post_processor = processors.TemplateProcessing(single, pair, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


PAIRS = LabeledText(("Rain fell.", "No"), ("It was wet.", "It rained all day"), (0, 1), ("no", "yes"))


@pytest.mark.parametrize(
    ("template", "read", "least"),
    [
        (None, "{}\n{}", 3),
        (("<s> $A", "<s> $A $B"), "<s>{}\n{}", 4),
        (("<s> $A", "<s> $A <s> $B"), "<s>{}<s>{}", 4),  # as Llama's: what divides two texts is the tokenizer's own
    ],
    ids=["nothing", "a start alone", "a start before each"],
)
def test_two_texts_without_a_separator_are_divided_by_a_newline(template, read, least):
    tokenizer = bytes_alone(template)

    def ids(one, two):
        return tokenizer(read.format(one, two), add_special_tokens=False).input_ids

    batch = encode_labeled_text(tokenizer, PAIRS, max_length=99)
    for row, texts in enumerate(zip(PAIRS.texts, PAIRS.pairs, strict=True)):
        length = int(batch["attention_mask"][row].sum())
        assert batch["attention_mask"][row, :length].all()  # padding is on the right
        assert batch["input_ids"][row, :length].tolist() == ids(*texts)
        assert not batch["input_ids"][row, length:].any()
    cut = encode_labeled_text(tokenizer, PAIRS, max_length=least)["input_ids"]
    assert cut.tolist() == [ids("R", "I"), ids("N", "I")]
    with pytest.raises(IsolossError, match=f"max_length is {least - 1}; with . special tokens it must be at least"):
        encode_labeled_text(tokenizer, PAIRS, max_length=least - 1)


def test_a_text_of_no_token_is_named():
    backend = Tokenizer(models.BPE({"a": 0}, []))  # what it does not know, it leaves out
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert encode_labeled_text(tokenizer, LabeledText(("a", "aa"), None, (0, 1), ("n", "y")), max_length=9)
    with pytest.raises(IsolossError, match="makes no token of the text 'b': leave this example out"):
        encode_labeled_text(tokenizer, LabeledText(("a", "b"), None, (0, 1), ("n", "y")), max_length=9)


# --- real data: the row counts are those of the data's own description


@pytest.mark.parametrize(
    ("file", "columns", "counts"),
    [
        ("glue-sst2/dev.tsv", ("sentence", None), {"0": 428, "1": 444}),
        ("glue-rte/dev.tsv", ("sentence1", "sentence2"), {"entailment": 146, "not_entailment": 131}),
        ("glue-qnli/train_part_1k.json", ("text_a", "text_b"), {"entailment": 504, "not_entailment": 496}),
    ],
)
def test_real_glue_rows(shared_data, file, columns, counts):
    data = read_labeled_text(shared_data / file, text=columns[0], pair=columns[1])
    found = np.bincount(data.labels).tolist()
    assert dict(zip(data.label_names, found, strict=True)) == counts
    assert all(text.strip() for text in data.texts)
    assert (data.pairs is None) == (columns[1] is None)
