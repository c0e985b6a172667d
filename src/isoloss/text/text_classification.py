"""Labeled texts and pairs of texts, as GLUE has them: read from files or named datasets, and encoded for a model.

Shapes: n examples, T tokens in the longest of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.text import documents, hub_datasets
from isoloss.text.tokenizers import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")

_Row = tuple[str, tuple[Any, ...]]  # its location, and its values in the order of the columns


@dataclass(frozen=True)
class LabeledText:
    """Examples of a classification task: n texts, perhaps n second ones, and n labels, as indices into their names.

    `num_unlabeled` rows beside them had no label and were left out.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    num_unlabeled: int = 0

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Coverage:
    """How much of some examples a tokenizer and a length let through."""

    num_examples: int
    num_cut: int  # examples that are longer than the length and lose tokens at the end
    num_tokens: int  # of their texts, before anything is cut, without special tokens
    num_unknown: int  # tokens that the tokenizer does not know
    num_unlabeled: int = 0  # rows without a label, which are none of the examples

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def read_labeled_text(
    source: str | Path,
    *,
    text: str,
    pair: str | None = None,
    label: str = "label",
    split: str = "train",
    label_names: Sequence[str] | None = None,
) -> LabeledText:
    r"""Return the labeled texts of one split.

    - `.tsv`: a line of column names, then a line for each example, columns divided by tabs. No quoting: a quotation
      mark is a character of the text, as in GLUE's own files.
    - `.csv`: the same with commas and quoting (RFC 4180).
    - `.jsonl`: a JSON object on each line. `.json`: a list of such objects, or an object that holds them by name.
    - A folder: its file with the split's name, e.g. `dev.tsv` for `split="dev"`.
    - `hf:NAME`, e.g. `hf:nyu-mll/glue:rte`: a named dataset (see `isoloss.text.hub_datasets`).

    Rows without a label are left out and counted: null, empty, NaN, `-` (as in SNLI) and -1 (as on the Hugging Face
    hub). `-` beside `+` alone, and -1 beside 1 alone, are classes. Booleans are the classes `false` and `true`.

    Args:
        source: A file, a folder or a dataset.
        text: Column of the first text.
        pair: Column of the second text, if there is one.
        label: Column of the label, a name or a whole number.
        split: Of a folder or a dataset; a file has one only, and the split is of no effect.
        label_names: The labels there are, in the order of their indices, so that the splits of a task agree; None:
            those that the dataset names, else those in this split, sorted (numbers by value).

    Raises:
        IsolossError: There is no such file, folder, dataset, split or column, or no row; a row, a text or a label is
            not as it must be, named by its location.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "dev.tsv").write_text('sentence\tlabel\nA "fine" film .\t1\nDull .\t0\n')
        ...     data = read_labeled_text(folder, text="sentence", split="dev")
        >>> data.texts, data.labels, data.label_names, data.num_unlabeled
        (('A "fine" film .', 'Dull .'), (1, 0), ('0', '1'), 0)
    """
    columns = [text, *([] if pair is None else [pair]), label]
    if len(set(columns)) < len(columns):
        raise IsolossError(f"the columns {', '.join(columns)} must differ")
    if hub_datasets.is_dataset(source):
        rows, known = _from_dataset(str(source), columns, split)
    else:
        rows, known = _from_file(_find(Path(source).expanduser(), split), columns), None
    texts: list[str] = []
    seconds: list[str] = []
    labels: list[str | None] = []  # None: there is none
    locations: list[str] = []
    for location, (*values, value) in rows:
        name = _label(value, label, location)
        labels.append(name)
        for column, item in zip(columns, values, strict=False):
            if name is None:
                break  # the row may lack its texts, too
            if not isinstance(item, str) or not documents.is_encodable(item):
                raise IsolossError(f"{location}: the column {column!r} holds no text but {item!r}")
        texts.append(values[0])
        seconds += values[1:]
        locations.append(location)
    absent = _absent(labels, () if label_names is None else label_names)
    rows_kept = [row for row, name in enumerate(labels) if name not in absent]
    if not rows_kept:
        left = f": all {len(labels):,} lack a label" if labels else ""
        raise IsolossError(f"{source} has no row with text and label{left}")
    num_unlabeled = len(labels) - len(rows_kept)
    texts, locations = ([column[row] for row in rows_kept] for column in (texts, locations))
    seconds = [seconds[row] for row in rows_kept] if pair is not None else []
    named = [str(labels[row]) for row in rows_kept]
    given = known if label_names is None else label_names
    names = tuple(sorted(set(named), key=_number_first) if given is None else given)
    index = {name: position for position, name in enumerate(names)}
    for location, name in zip(locations, named, strict=True):
        if name not in index:
            raise IsolossError(f"{location}: the label {name!r} is not one of {', '.join(names)}")
    return LabeledText(
        texts=tuple(texts),
        pairs=None if pair is None else tuple(seconds),
        labels=tuple(index[name] for name in named),
        label_names=names,
        num_unlabeled=num_unlabeled,
    )


def encode_labeled_text(
    tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int, token_types: int = 2
) -> dict[str, torch.Tensor]:
    """Return what a classifier takes: [CLS] a [SEP], or [CLS] a [SEP] b [SEP], with the labels.

    Special tokens are those that the tokenizer itself puts around one and two texts. An example that is too long loses
    tokens from the end of the longer text, one at a time; while the two are equally long, from the one that was shorter
    at first (if neither was, the first). What a text spells is never a special token.

    Args:
        tokenizer: A tokenizer with a padding token.
        data: n examples.
        max_length: The most tokens of an example, the special ones included.
        token_types: Token types that the model knows (`type_vocab_size`).

    Returns:
        `input_ids` and `attention_mask` (n, T), padded on the right to the longest example; `token_type_ids` (n, T), 1
        at b and the [SEP] after it and 0 elsewhere, where the model has two types and the tokenizer gives them;
        `labels` (n,). All int64.

    Raises:
        IsolossError: The tokenizer has no padding token or nothing that divides two texts, or `max_length` leaves less
            than one token for each text.
    """
    is_pair = data.pairs is not None
    special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if is_pair and special == 0:
        raise IsolossError("the tokenizer puts nothing between two texts: it takes one with a [SEP] or its like")
    if tokenizer.pad_token_id is None:
        raise IsolossError("the tokenizer has no pad token, which is needed here")
    least = special + (2 if is_pair else 1)
    if max_length < least:
        raise IsolossError(f"max_length is {max_length}; with {special} special tokens it must be at least {least}")
    has_types = token_types >= 2 and "token_type_ids" in tokenizer.model_input_names
    encoded = tokenizer(
        list(data.texts),
        None if data.pairs is None else list(data.pairs),
        truncation="longest_first",
        max_length=max_length,
        padding="longest",
        padding_side="right",
        split_special_tokens=True,  # text is text
        return_attention_mask=True,
        return_token_type_ids=has_types,
        return_tensors="pt",
    )
    return {**encoded, "labels": torch.tensor(data.labels)}


def coverage(tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int) -> Coverage:
    """Return how many examples `encode_labeled_text` cuts, and how many of their tokens are unknown."""
    lengths = np.full(len(data), tokenizer.num_special_tokens_to_add(pair=data.pairs is not None))
    num_tokens = num_unknown = 0
    for texts in (data.texts, data.pairs or ()):
        for row, ids in enumerate(encode(tokenizer, texts)):
            lengths[row] += len(ids)
            num_tokens += len(ids)
            num_unknown += int((ids == tokenizer.unk_token_id).sum())
    return Coverage(len(data), int((lengths > max_length).sum()), num_tokens, num_unknown, data.num_unlabeled)


def _number_first(name: str) -> tuple[bool, int, str]:
    try:
        return False, int(name), name
    except ValueError:
        return True, 0, name


def _absent(labels: Sequence[str | None], names: Sequence[str]) -> set[str | None]:
    """Return what stands for a missing label among these: None, and `-` and -1 where they are not classes."""
    there = {name for name in labels if name is not None}
    opposite = {"-": "+", "-1": "1"}
    return {None, *(no for no, yes in opposite.items() if no not in names and there != {no, yes})}


def _label(value: Any, column: str, location: str) -> str | None:
    if value is None or value == "" or value != value:  # NaN, too
        return None
    if isinstance(value, bool):
        return "true" if value else "false"  # as JSON has them
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of numbers some of which are missing is one of floats in pandas
    if not isinstance(value, str | int):
        raise IsolossError(
            f"{location}: the column {column!r} holds no label but {value!r}: it takes a name or a number"
        )
    return str(value)


def _from_dataset(spec: str, columns: list[str], split: str) -> tuple[Iterator[_Row], tuple[str, ...] | None]:
    dataset = hub_datasets.load(spec, split=split, columns=columns)
    names = getattr(dataset.features[columns[-1]], "names", None)  # of a ClassLabel

    def rows() -> Iterator[_Row]:
        for number, (*texts, label) in enumerate(hub_datasets.read_rows(dataset)):
            if names is not None and label is not None:  # GLUE's test sets have -1
                label = names[label] if label >= 0 else None
            yield f"{spec}, row {number}", (*texts, label)

    return rows(), None if names is None else tuple(names)


def _find(path: Path, split: str) -> Path:
    if path.is_dir():
        there = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
        named = [file for file in there if file.stem == split]
        if len(named) != 1:
            have = ", ".join(dict.fromkeys(file.stem for file in there)) or f"no {', '.join(SUFFIXES)} file"
            several = f" only once but as {', '.join(file.name for file in named)}" if named else ""
            raise IsolossError(f"the folder {path} does not have the split {split!r}{several}; it has {have}")
        return named[0]
    if not path.exists():
        raise IsolossError(f"there is no file or folder {path}{files.nearest(path)}")
    if path.suffix.lower() not in SUFFIXES:
        raise IsolossError(f"cannot read {path} as a table: its name must end in {', '.join(SUFFIXES)}")
    return path


def _from_file(path: Path, columns: list[str]) -> Iterator[_Row]:
    read = _table if path.suffix.lower() in (".tsv", ".csv") else _objects
    with documents.reading(path):
        try:
            yield from read(path, columns)
        except (json.JSONDecodeError, RecursionError, csv.Error) as error:
            raise IsolossError(f"{path} is not a readable {path.suffix} file: {error}") from error


def _table(path: Path, columns: list[str]) -> Iterator[_Row]:
    lines = _lines(path)
    _, header = next(lines, (0, []))
    _check_columns(f"{path}", columns, header)
    columns_at = [header.index(column) for column in columns]
    for number, fields in lines:
        if fields in ([], [""]):
            continue
        if len(fields) != len(header):
            raise IsolossError(f"{path}, line {number} has {len(fields)} fields and not {len(header)}, as the first")
        yield f"{path}, line {number}", tuple(fields[index] for index in columns_at)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    if path.suffix.lower() == ".tsv":
        with path.open(encoding="utf-8-sig") as file:  # only \n, \r\n and \r end a line, unlike for str.splitlines
            yield from enumerate((line.rstrip("\n").split("\t") for line in file), 1)
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader)


def _objects(path: Path, columns: list[str]) -> Iterator[_Row]:
    items: Iterator[tuple[str, Any]]
    if path.suffix.lower() == ".jsonl":
        items = ((f"line {number}", item) for number, item in documents.json_lines(path))
    else:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(document, dict | list):
            raise IsolossError(f"{path} holds neither a list of JSON objects nor an object of them")
        named = document.items() if isinstance(document, dict) else enumerate(document)
        items = ((f"item {name}", item) for name, item in named)
    for name, item in items:
        if not isinstance(item, dict):
            raise IsolossError(f"{path}, {name} is no JSON object")
        _check_columns(f"{path}, {name}", columns, list(item))
        yield f"{path}, {name}", tuple(item[column] for column in columns)


def _check_columns(location: str, columns: list[str], there: list[str]) -> None:
    missing = [column for column in columns if column not in there]
    if missing:
        raise IsolossError(f"{location} has no column {missing[0]!r}; it has {', '.join(there) or 'none'}")
