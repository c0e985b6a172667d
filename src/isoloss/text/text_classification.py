"""Labeled texts and pairs of texts, as GLUE has them: read from files or named datasets, and encoded for a model.

Shapes: n examples, T tokens in the longest of them.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from isoloss import files
from isoloss.errors import IsolossError, warn
from isoloss.text import documents, hub_datasets
from isoloss.text.tokenizers import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")

Columns = tuple[str, str | None, str]  # of the text, of the second text, of the label

# the files of labeled text: of a split, of a part of one, and those in which MRPC was first published
_FILE = re.compile(
    r"(?P<split>.+?)(?P<part>_part_.+)?\.(tsv|csv|jsonl|json)|msr_paraphrase_(?P<msr>train|test)\.txt", re.IGNORECASE
)
# how pandas, R and databases write a missing value, beside NaN; a class of such a name is one that the task declares
_MISSING = frozenset(("NA", "<NA>", "N/A", "n/a", "#N/A", "NaT", "None", "NULL", "null"))
_WHOLE = re.compile(r"-?\d+\.0")  # a whole number as pandas writes it beside missing ones
_FIELDS, _NO_TEXT, _NO_LABEL = "with another number of fields than the first line", "without a text", "without a label"

# its location, and its values in the order of the columns; None: it has not the header's fields
_Row = tuple[str, tuple[Any, ...] | None]


@dataclass(frozen=True)
class LabeledText:
    """Examples of a classification task: n texts, perhaps n second ones, and n labels, as indices into their names.

    Rows beside them were left out: `num_unlabeled` that had no label, and `num_incomplete` that lacked a text or had
    other fields than the header.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: tuple[int, ...]
    label_names: tuple[str, ...]
    num_unlabeled: int = 0
    num_incomplete: int = 0

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
    num_incomplete: int = 0  # rows without all texts, or with other fields than the header, which are none either

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
    other_columns: Sequence[Columns] = (),
    header: Sequence[str] = (),
) -> LabeledText:
    r"""Return the labeled texts of one split.

    - `.tsv`: a line of column names, then a line for each example, columns divided by tabs. No quoting: a quotation
      mark is a character of the text, as in GLUE's own files.
    - `.csv`: the same with commas and quoting (RFC 4180).
    - `.jsonl`: a JSON object on each line. `.json`: a list of such objects, or an object that holds them by name.
    - A folder: its file with the split's name, e.g. `dev.tsv` for `split="dev"` (see `split_files`).
    - `hf:NAME`, e.g. `hf:nyu-mll/glue:rte`: a named dataset (see `isoloss.text.hub_datasets`).

    Rows without a label are left out and counted: null, empty, NaN, what pandas writes for these (`NA`, `<NA>`, `N/A`,
    `None`, `NULL`, `null`), `-` (as in SNLI) and -1 (as on the Hugging Face hub). `-` beside `+` alone, and -1 beside 1
    alone, are classes, and so is any of these that is among `label_names` or the dataset's own names. Booleans are the
    classes `false` and `true`. Rows with a null for a text, with nothing but blanks, or with more or fewer fields than
    the header, are left out and counted, too.

    Args:
        source: A file, a folder or a dataset.
        text: Column of the first text.
        pair: Column of the second text, if there is one.
        label: Column of the label, a name or a whole number.
        split: Of a folder or a dataset; a file has one only, and the split is of no effect.
        label_names: The labels there are, in the order of their indices, so that the splits of a task agree; None:
            those that the dataset names, else those in this split, sorted (numbers by value).
        other_columns: What files may call `text`, `pair` and `label` instead; a file's are the first that it has.
            Those without a `pair` are of examples of one text.
        header: Columns of a `.tsv` or `.csv` file whose first line is an example, as CoLA's.

    Raises:
        IsolossError: There is no such file, folder, dataset, split or column, or no row; a text or a label is not as it
            must be, named by its location.

    Warns:
        IsolossWarning: Rows are left out.

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
        choices = [columns, *([column for column in other if column is not None] for other in other_columns)]
        paths = _find(Path(source).expanduser(), split)
        rows, known = itertools.chain(*(_from_file(path, choices, header) for path in paths)), None
    texts: list[str] = []
    seconds: list[str] = []
    labels: list[str] = []
    locations: list[str] = []
    left_out: Counter[str] = Counter()
    first_left_out: dict[str, str] = {}

    def leave_out(location: str, why: str) -> None:
        left_out[why] += 1
        first_left_out.setdefault(why, location)

    for location, fields in rows:
        if fields is None:
            leave_out(location, _FIELDS)
            continue
        *values, value = fields
        name = _label(value, label, location)
        if name is None or None in values or not any(map(_is_not_blank, values)):
            leave_out(location, _NO_LABEL if name is None else _NO_TEXT)
            continue
        # the label's column is the last, and has no item here
        for column, item in zip(columns, values, strict=False):
            if not isinstance(item, str) or not documents.is_encodable(item):
                raise IsolossError(f"{location}: the column {column!r} holds no text but {item!r}")
        texts.append(values[0])
        seconds += values[1:]
        labels.append(name)
        locations.append(location)
    wanted = known if label_names is None else label_names
    absent = missing_labels(set(labels), wanted or ()) | (_MISSING & set(labels) - set(wanted or ()))
    # only all labels together show whether `-` and -1 are classes, so these rows are left out last
    for location, name in zip(locations, labels, strict=True):
        if name in absent:
            leave_out(location, f"with the label {name}, read as a missing label (a class needs another name)")
    rows_kept = [row for row, name in enumerate(labels) if name not in absent]
    reasons = ", ".join(f"{n:,} {why} (first: {first_left_out[why]})" for why, n in left_out.items())
    if not rows_kept:
        raise IsolossError(f"{source} has no row with text and label" + (f": {reasons}" if reasons else ""))
    if left_out:
        many = left_out.total()
        warn(f"{many:,} {'row is' if many == 1 else 'rows are'} left out: {reasons}")
    num_incomplete = left_out[_FIELDS] + left_out[_NO_TEXT]
    num_unlabeled = left_out.total() - num_incomplete
    texts, locations, named = ([column[row] for row in rows_kept] for column in (texts, locations, labels))
    if len(seconds) not in (0, len(labels)):
        raise IsolossError(f"{source}: some of its files have two texts per row, and others have one")
    seconds = [seconds[row] for row in rows_kept] if seconds else []
    names = tuple(sorted(set(named), key=_number_first) if wanted is None else wanted)
    index = {name: position for position, name in enumerate(names)}
    for location, name in zip(locations, named, strict=True):
        if name not in index:
            raise IsolossError(f"{location}: the label {name!r} is not one of {', '.join(names)}")
    return LabeledText(
        texts=tuple(texts),
        pairs=tuple(seconds) or None,
        labels=tuple(index[name] for name in named),
        label_names=names,
        num_unlabeled=num_unlabeled,
        num_incomplete=num_incomplete,
    )


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split of which a folder has labeled text.

    `dev.tsv` is the split dev. Where no file is a split by itself, `train_part_*.json` are it together, and
    `msr_paraphrase_train.txt` and `msr_paraphrase_test.txt` are MRPC as it was first published.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("train_part_2.json", "train_part_1.json", "dev.tsv", "README.md"):
        ...         _ = Path(folder, name).write_text("")
        ...     {split: [file.name for file in files] for split, files in split_files(Path(folder)).items()}
        {'train': ['train_part_1.json', 'train_part_2.json'], 'dev': ['dev.tsv']}
    """
    whole: dict[str, list[Path]] = {}
    parts: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if (match := _FILE.fullmatch(file.name)) and file.is_file():
            of = parts if match["part"] or match["msr"] else whole
            of.setdefault(match["split"] or match["msr"], []).append(file)
    # a whole file comes before parts of the same split
    return parts | whole


def encode_labeled_text(
    tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int, token_types: int = 2
) -> dict[str, torch.Tensor]:
    """Return what a classifier takes, with the labels: [CLS] a [SEP], or [CLS] a [SEP] b [SEP].

    Special tokens are those that the tokenizer itself puts around one and two texts; GPT-2's puts none. Where it puts
    none between two texts, a newline separates them. An example that is too long loses tokens from the end of the
    longer text, one at a time; while the two are equally long, from the one that was shorter at first (if neither was,
    the first). What a text spells is never a special token.

    Args:
        tokenizer: Any tokenizer. Without a padding token, the padding is id 0, hidden by the attention mask.
        data: n examples.
        max_length: The most tokens of an example, the special ones included.
        token_types: Token types that the model knows (`type_vocab_size`).

    Returns:
        `input_ids` and `attention_mask` (n, T), padded on the right to the longest example; `token_type_ids` (n, T), 1
        at b and the [SEP] after it and 0 elsewhere, where the model has two types and the tokenizer gives them;
        `labels` (n,). All int64.

    Raises:
        IsolossError: `max_length` leaves less than one token for each text, or an example has no token.
    """
    pairs = _second_texts(tokenizer, data)
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    # a newline before the second text takes a token of its own
    least = special + (1 if pairs is None else 2 + (pairs != data.pairs))
    if max_length < least:
        raise IsolossError(f"max_length is {max_length}; with {special} special tokens it must be at least {least}")
    has_types = token_types >= 2 and "token_type_ids" in tokenizer.model_input_names
    # whatever side its config says: models are compared on the same part of a text
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
    try:
        encoded = tokenizer(
            list(data.texts),
            None if pairs is None else list(pairs),
            truncation="longest_first",
            max_length=max_length,
            # what a text spells is never a special token
            split_special_tokens=True,
            return_attention_mask=True,
            return_token_type_ids=has_types,
        )
    finally:
        tokenizer.truncation_side = side
    for text, ids in zip(data.texts, encoded["input_ids"], strict=True):
        if not ids:
            raise IsolossError(f"the tokenizer makes no token of the text {text!r}: leave this example out")
    padding = {"input_ids": tokenizer.pad_token_id or 0}
    padded = {
        name: pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding.get(name, 0))
        for name, rows in encoded.items()
    }
    return {**padded, "labels": torch.tensor(data.labels)}


def _second_texts(tokenizer: PreTrainedTokenizerFast, data: LabeledText) -> tuple[str, ...] | None:
    """Return the second texts of pairs, after a newline where the tokenizer does not separate them from the first."""
    if data.pairs is None:
        return None
    one, both = (tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return data.pairs if both > one else tuple(f"\n{text}" for text in data.pairs)


def coverage(tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int) -> Coverage:
    """Return how many examples `encode_labeled_text` cuts, and how many of their tokens are unknown."""
    lengths = np.full(len(data), tokenizer.num_special_tokens_to_add(pair=data.pairs is not None))
    num_tokens = num_unknown = 0
    for texts in (data.texts, _second_texts(tokenizer, data) or ()):
        for row, ids in enumerate(encode(tokenizer, texts)):
            lengths[row] += len(ids)
            num_tokens += len(ids)
            num_unknown += int((ids == tokenizer.unk_token_id).sum())
    num_cut = int((lengths > max_length).sum())
    return Coverage(len(data), num_cut, num_tokens, num_unknown, data.num_unlabeled, data.num_incomplete)


def _is_not_blank(text: Any) -> bool:
    return not isinstance(text, str) or bool(text.strip())


def _number_first(name: str) -> tuple[bool, int, str]:
    try:
        return False, int(name), name
    except ValueError:
        return True, 0, name


def missing_labels(labels: set[str], names: Sequence[str] = ()) -> set[str]:
    """Return which of these stand for a missing label: `-` and -1, where they are not classes.

    Example:
        >>> missing_labels({"entailment", "neutral", "-"}), missing_labels({"+", "-"})
        ({'-'}, set())
    """
    opposite = {"-": "+", "-1": "1"}
    return {no for no, yes in opposite.items() if no in labels and no not in names and labels != {no, yes}}


def _label(value: Any, column: str, location: str) -> str | None:
    # `value != value` is NaN
    if value is None or value != value:
        return None
    # before whole numbers: to Python a truth value is one
    if isinstance(value, bool):
        # as JSON has them
        return "true" if value else "false"
    if isinstance(value, str):
        value = value.strip()
        if not value or value.lower() == "nan":
            return None
        if _WHOLE.fullmatch(value):
            value = value.removesuffix(".0")
    if isinstance(value, float) and value.is_integer():
        # a column of numbers some of which are missing is one of floats in pandas, and so in its CSV
        value = int(value)
    if not isinstance(value, str | int):
        raise IsolossError(
            f"{location}: the column {column!r} holds no label but {value!r}: it takes a name or a number"
        )
    return str(value)


def _from_dataset(spec: str, columns: list[str], split: str) -> tuple[Iterator[_Row], tuple[str, ...] | None]:
    dataset = hub_datasets.load(spec, split=split, columns=columns)
    names = dataset.label_names.get(columns[-1])

    def rows() -> Iterator[_Row]:
        for number, (*texts, label) in enumerate(dataset):
            # GLUE's test sets have -1, which would be the last name
            if names is not None and label is not None:
                label = names[label] if label >= 0 else None
            yield f"{spec}, row {number}", (*texts, label)

    return rows(), names


def _find(path: Path, split: str) -> list[Path]:
    if path.is_dir():
        by_split = split_files(path)
        of_split = by_split.get(split, [])
        # of dev.tsv and dev.csv it is not clear which one is meant
        if not of_split or len({file.stem for file in of_split}) < len(of_split):
            have = ", ".join(by_split) or f"no {', '.join(SUFFIXES)} file"
            several = f" only once but as {', '.join(file.name for file in of_split)}" if of_split else ""
            raise IsolossError(f"the folder {path} does not have the split {split!r}{several}; it has {have}")
        return of_split
    if not path.exists():
        raise IsolossError(f"there is no file or folder {path}{files.nearest(path)}")
    if _FILE.fullmatch(path.name) is None:
        raise IsolossError(f"cannot read {path} as a table: its name must end in {', '.join(SUFFIXES)}")
    return [path]


def _from_file(path: Path, choices: list[list[str]], header: Sequence[str]) -> Iterator[_Row]:
    with documents.reading(path):
        try:
            yield from _objects(path, choices) if "json" in path.suffix.lower() else _table(path, choices, header)
        except (json.JSONDecodeError, RecursionError, csv.Error) as error:
            raise IsolossError(f"{path} is not a readable {path.suffix} file: {error}") from error


def _table(path: Path, choices: list[list[str]], header: Sequence[str]) -> Iterator[_Row]:
    lines = _lines(path)
    first = next(lines, (0, []))
    names = first[1]
    # a first line that is an example has as many fields as the header, and none of the columns' names
    if len(names) == len(header) and not any(set(columns) <= set(names) for columns in choices):
        names, lines = list(header), itertools.chain([first], lines)
    columns_at = [names.index(column) for column in _columns(path, choices, names)]
    for number, fields in lines:
        # a blank line is no row: nothing to csv, one empty field where it is divided by tabs
        if fields not in ([], [""]):
            is_whole = len(fields) == len(names)
            yield f"{path}, line {number}", tuple(fields[index] for index in columns_at) if is_whole else None


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    if path.suffix.lower() == ".csv":
        # csv finds the ends of lines itself, as those inside quotes end no row; strict, or it would guess at bad quotes
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader)
    else:
        # only \n, \r\n and \r end a line, unlike for str.splitlines
        with path.open(encoding="utf-8-sig") as file:
            yield from enumerate((line.rstrip("\n").split("\t") for line in file), 1)


def _objects(path: Path, choices: list[list[str]]) -> Iterator[_Row]:
    items: list[tuple[str, Any]]
    if path.suffix.lower() == ".jsonl":
        items = [(f"line {number}", item) for number, item in documents.json_lines(path)]
    else:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(document, dict | list):
            raise IsolossError(f"{path} holds neither a list of JSON objects nor an object of them")
        named = document.items() if isinstance(document, dict) else enumerate(document)
        items = [(f"item {name}", item) for name, item in named]
    for name, item in items:
        if not isinstance(item, dict):
            raise IsolossError(f"{path}, {name} is no JSON object")
    # a key that an object lacks is a null, as long as others have it
    columns = _columns(path, choices, list(dict.fromkeys(key for _, item in items for key in item)))
    for name, item in items:
        yield f"{path}, {name}", tuple(item.get(column) for column in columns)


def _columns(path: Path, choices: list[list[str]], there: Sequence[str]) -> list[str]:
    """Return the first of `choices` that a file has."""
    for columns in choices:
        if set(columns) <= set(there):
            return columns
    # for the choice that is nearest to the columns there are
    missing = min(([column for column in columns if column not in there] for columns in choices), key=len)
    raise IsolossError(f"{path} has no column {missing[0]!r}; it has {', '.join(there) or 'none'}")
