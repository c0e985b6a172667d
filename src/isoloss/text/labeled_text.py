"""Labeled texts and pairs of texts, as GLUE has them, read from files or named datasets."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss import files
from isoloss.errors import IsolossError, warn
from isoloss.text import documents, hub_datasets

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")

Columns = tuple[str, str | None, str]  # of the text, of the second text, of the label

# the files of labeled text: of a split, of a part of one, and those in which MRPC was first published
_FILE = re.compile(
    r"(?P<split>.+?)(?P<part>_part_.+)?\.(tsv|csv|jsonl|json)|msr_paraphrase_(?P<msr>train|test)\.txt", re.IGNORECASE
)
# how pandas, R and databases write a missing value, beside NaN; a class of such a name is one that the task declares
_MISSING = frozenset(("NA", "<NA>", "N/A", "n/a", "#N/A", "NaT", "None", "NULL", "null"))
_OPPOSITES = {"-": "+", "-1": "1"}  # a missing label, unless it is one of two classes beside its opposite
_WHOLE = re.compile(r"-?\d+\.0")  # a whole number as pandas writes it beside missing ones
_FIELDS, _NO_TEXT, _NO_LABEL = "with another number of fields than the first line", "without a text", "without a label"

# a row's place, and its values by column; None: it has not as many fields as there are columns
_Rows = Iterable[tuple[str, Sequence[Any] | None]]


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
class LabeledRows:
    """The rows of one split, before it is known which labels stand for a missing one.

    Attributes:
        source: Where they are from.
        known: The labels that the dataset itself names; None: it names none.
        rows: Of each row its place, its texts and its label.
        left_out: The places of rows that are left out, by the reason.
    """

    source: str
    known: tuple[str, ...] | None = None
    rows: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def read_rows(
    source: str | Path, choices: Sequence[Columns], *, split: str = "train", header: Sequence[str] = ()
) -> LabeledRows:
    r"""Return the rows of one split that have texts and a label; the others are counted.

    - `.tsv`: a line of column names, then a line for each example, columns divided by tabs. No quoting: a quotation
      mark is a character of the text, as in GLUE's own files.
    - `.csv`: the same with commas and quoting (RFC 4180).
    - `.jsonl`: a JSON object on each line. `.json`: a list of such objects, or an object that holds them by name.
    - A folder: its file with the split's name, e.g. `dev.tsv` for `split="dev"` (see `split_files`).
    - `hf:NAME`, e.g. `hf:nyu-mll/glue:rte`: a named dataset (see `isoloss.text.hub_datasets`).

    A label is missing where it is null, empty, NaN or -1 in a dataset that names its labels; booleans are `false` and
    `true`. A text is missing where it is null or nothing but blanks.

    Args:
        source: A file, a folder or a dataset.
        choices: What the columns of text, second text (None: there is none) and label may be called. A file's are the
            first that it has, a dataset's the first.
        split: Of a folder or a dataset; a file has one only, and the split is of no effect.
        header: Columns of a `.tsv` or `.csv` file whose first line is an example, as CoLA's.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss.text.labeled_text import number_labels, read_rows
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "dev.tsv").write_text('sentence\tlabel\nA "fine" film .\t1\nDull .\t0\n')
        ...     rows = read_rows(folder, [("sentence", None, "label")], split="dev")
        >>> (data,) = number_labels([rows])
        >>> data.texts, data.labels, data.label_names
        (('A "fine" film .', 'Dull .'), (1, 0), ('0', '1'))
    """
    columns = [[column for column in choice if column is not None] for choice in choices]
    if len(set(columns[0])) < len(columns[0]):
        raise IsolossError(f"the columns {', '.join(columns[0])} must differ")
    if hub_datasets.is_dataset(source):
        dataset = hub_datasets.load(str(source), split=split, columns=columns[0])
        found = LabeledRows(str(source), dataset.label_names.get(columns[0][-1]))
        _add(found, str(source), columns, columns[0], ((f"row {n}", values) for n, values in enumerate(dataset)))
    else:
        found = LabeledRows(str(source))
        for path in _find(Path(source).expanduser(), split):
            _add(found, str(path), columns, *_table(path, columns, header))
    if len({len(texts) for _, texts, _ in found.rows}) > 1:
        raise IsolossError(f"{source}: some of its files have two texts per row, and others have one")
    return found


def number_labels(splits: Sequence[LabeledRows], label_names: Sequence[str] | None = None) -> list[LabeledText]:
    """Return the examples of splits of one task, with one list of label names.

    Also left out are rows with what pandas and others write for a missing label (`NA`, `<NA>`, `N/A`, `None`, `NULL`,
    `null`), `-` (as in SNLI) and -1 (as on the Hugging Face hub). `-` beside `+` alone, and -1 beside 1 alone, in all
    splits together, are classes, and so is each of these that is among the names.

    Args:
        splits: The splits.
        label_names: The labels, in the order of their indices; None: those that the datasets name, else those of the
            first split, sorted (numbers by value), then those that only another one has.

    Warns:
        IsolossWarning: Rows are left out.
    """
    present = {name for split in splits for *_, name in split.rows}
    names: dict[str, None] = dict.fromkeys(label_names or ())
    if label_names is None:
        names = dict.fromkeys(name for split in splits for name in split.known or ())
    absent = {no for no, yes in _OPPOSITES.items() if no in present - names.keys() and present != {no, yes}}
    absent |= _MISSING & present - names.keys()
    if label_names is None:
        for split in splits:
            own = {name for *_, name in split.rows} - absent
            names |= dict.fromkeys(sorted(own, key=_number_first) if split.known is None else ())
    return [_labeled(split, tuple(names), absent) for split in splits]


def _labeled(split: LabeledRows, names: tuple[str, ...], absent: set[str]) -> LabeledText:
    kept, left_out = [], {why: [*places] for why, places in split.left_out.items()}
    for row in split.rows:
        place, _, name = row
        if name in absent:
            why = f"with the label {name}, read as a missing label (a class needs another name)"
            left_out.setdefault(why, []).append(place)
        elif name not in names:
            raise IsolossError(f"{place}: the label {name!r} is not one of {', '.join(names)}")
        else:
            kept.append(row)
    reasons = ", ".join(f"{len(places):,} {why} (first: {places[0]})" for why, places in left_out.items())
    if not kept:
        raise IsolossError(f"{split.source} has no row with text and label" + (f": {reasons}" if reasons else ""))
    if many := sum(map(len, left_out.values())):
        warn(f"{many:,} {'row is' if many == 1 else 'rows are'} left out: {reasons}")
    texts, *pairs = zip(*(texts for _, texts, _ in kept), strict=True)
    num_incomplete = sum(len(left_out.get(why, ())) for why in (_FIELDS, _NO_TEXT))
    return LabeledText(
        texts=texts,
        pairs=pairs[0] if pairs else None,
        labels=tuple(names.index(name) for *_, name in kept),
        label_names=names,
        num_unlabeled=many - num_incomplete,
        num_incomplete=num_incomplete,
    )


def _add(found: LabeledRows, source: str, choices: Sequence[list[str]], there: Sequence[str], rows: _Rows) -> None:
    """Add the rows of a table with the columns `there`, from the first of `choices` that it has."""
    columns = next((choice for choice in choices if set(choice) <= set(there)), None)
    if columns is None:
        # for the choice that is nearest to the columns there are
        missing = min(([column for column in choice if column not in there] for choice in choices), key=len)
        raise IsolossError(f"{source} has no column {missing[0]!r}; it has {', '.join(there) or 'none'}")
    at = [there.index(column) for column in columns]
    for where, values in rows:
        place, why = f"{source}, {where}", _FIELDS
        if values is not None:
            *texts, value = (values[index] for index in at)
            name = _label(value, found.known, columns[-1], place)
            is_blank = None in texts or not any(not isinstance(text, str) or text.strip() for text in texts)
            if name is not None and not is_blank:
                for column, text in zip(columns, texts, strict=False):
                    if not isinstance(text, str) or not documents.is_encodable(text):
                        raise IsolossError(f"{place}: the column {column!r} holds no text but {text!r}")
                found.rows.append((place, tuple(texts), name))
                continue
            why = _NO_LABEL if name is None else _NO_TEXT
        found.left_out.setdefault(why, []).append(place)


def _label(value: Any, known: Sequence[str] | None, column: str, place: str) -> str | None:
    """Return the name of a label; None: it is missing."""
    # `value != value` is NaN
    if value is None or value != value:
        return None
    if known is not None:
        # GLUE's test sets have -1, which would be the last name
        return known[value] if value >= 0 else None
    # before whole numbers: to Python a truth value is one. The names are JSON's
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        name = value.strip()
        if name.lower() in ("", "nan"):
            return None
        return name.removesuffix(".0") if _WHOLE.fullmatch(name) else name
    # a column of numbers some of which are missing is one of floats in pandas, and so in its CSV
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    raise IsolossError(f"{place}: the column {column!r} holds no label but {value!r}: it takes a name or a number")


def _number_first(name: str) -> tuple[bool, int, str]:
    try:
        return False, int(name), name
    except ValueError:
        return True, 0, name


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split of which a folder has labeled text.

    `dev.tsv` is the split dev. Where no file is a split by itself, `train_part_*.json` are it together, and
    `msr_paraphrase_train.txt` and `msr_paraphrase_test.txt` are MRPC as it was first published.
    """
    whole: dict[str, list[Path]] = {}
    parts: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if (match := _FILE.fullmatch(file.name)) and file.is_file():
            of = parts if match["part"] or match["msr"] else whole
            of.setdefault(match["split"] or match["msr"], []).append(file)
    # a whole file comes before parts of the same split
    return parts | whole


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


def _table(path: Path, choices: Sequence[list[str]], header: Sequence[str]) -> tuple[Sequence[str], _Rows]:
    """Return the columns of a file, and its rows."""
    with documents.reading(path):
        try:
            return _objects(path) if "json" in path.suffix.lower() else _lines(path, choices, header)
        except (json.JSONDecodeError, RecursionError, csv.Error) as error:
            raise IsolossError(f"{path} is not a readable {path.suffix} file: {error}") from error


def _lines(path: Path, choices: Sequence[list[str]], header: Sequence[str]) -> tuple[Sequence[str], _Rows]:
    is_csv = path.suffix.lower() == ".csv"
    # csv finds the ends of lines itself, as those inside quotes end no row; of other tables only \n, \r\n and \r do
    with path.open(encoding="utf-8-sig", newline="" if is_csv else None) as file:
        if is_csv:
            reader = csv.reader(file, strict=True)  # else it would guess at bad quotes
            lines = [(reader.line_num, fields) for fields in reader]
        else:
            lines = [(number, line.rstrip("\n").split("\t")) for number, line in enumerate(file, 1)]
    names = lines[0][1] if lines else []
    # a first line that is an example has as many fields as the header, and none of the columns' names
    if len(names) == len(header) and not any(set(columns) <= set(names) for columns in choices):
        names = list(header)
    else:
        del lines[:1]
    # a blank line is no row: nothing to csv, one empty field where it is divided by tabs
    rows = [(number, fields) for number, fields in lines if fields not in ([], [""])]
    return names, [(f"line {number}", fields if len(fields) == len(names) else None) for number, fields in rows]


def _objects(path: Path) -> tuple[Sequence[str], _Rows]:
    items: list[tuple[str, Any]]
    if path.suffix.lower() == ".jsonl":
        items = [(f"line {number}", item) for number, item in documents.json_lines(path)]
    else:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(document, dict | list):
            raise IsolossError(f"{path} holds neither a list of JSON objects nor an object of them")
        named = document.items() if isinstance(document, dict) else enumerate(document)
        items = [(f"item {name}", item) for name, item in named]
    for where, item in items:
        if not isinstance(item, dict):
            raise IsolossError(f"{path}, {where} is no JSON object")
    # a key that an object lacks is a null, as long as others have it
    names = list(dict.fromkeys(key for _, item in items for key in item))
    return names, [(where, [item.get(name) for name in names]) for where, item in items]
