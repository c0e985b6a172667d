"""Named datasets: `hf:NAME` is a folder or a name on the Hugging Face hub, read with the library `datasets`.

`python:NAME` is one of the texts that come with Python (`isoloss.text.python_docs.rows`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from isoloss import files
from isoloss.errors import IsolossError, require_package
from isoloss.text import python_docs

PREFIX = "hf:"
PYTHON = "python:"  # of what comes with Python
FORM = "hf:NAME[:CONFIG][@REVISION], e.g. hf:Skylion007/openwebtext, or hf:FOLDER"

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(:(?P<config>[^:@\s]+))?(@(?P<revision>[\w./-]+))?", re.ASCII
)
_ROWS = 1000  # that are in memory at a time


class DatasetName(NamedTuple):
    """The parts of `hf:NAME[:CONFIG][@REVISION]` or `python:NAME`; of a folder, the name is its absolute path."""

    name: str
    config: str | None = None
    revision: str | None = None
    prefix: str = PREFIX

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on this machine."""
        return self.name.startswith("/")

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{self.prefix}{self.name}{config}" + (f"@{self.revision}" if self.revision else "")


def is_dataset(spec: str | Path) -> bool:
    """Return whether `spec` has the form of a dataset's name rather than of a path."""
    return str(spec).startswith((PREFIX, PYTHON))


def check_data(data: str | Path) -> None:
    """Refuse a path that holds neither text nor token ids, as there is nothing; a dataset's name may be any."""
    if str(data).startswith(PREFIX):
        require_package("datasets")
    if not (is_dataset(data) or Path(data).exists()):
        raise IsolossError(
            f"there is no data {data}{files.nearest(data) or ':'} give a .npy or .bin file of token ids, a .txt or "
            ".jsonl file, a folder, or a dataset hf:NAME"
        )


def parse(spec: str) -> DatasetName:
    """Return the parts of `spec`; a folder that exists comes before a name on the hub."""
    if spec.startswith(PYTHON):
        return DatasetName(spec.removeprefix(PYTHON), prefix=PYTHON)
    text = spec.removeprefix(PREFIX)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return DatasetName(str(folder.resolve()))
    match = _NAME.fullmatch(text)
    if match is None:
        raise IsolossError(f"there is no dataset {spec}: no such folder, and a name has the form {FORM}")
    return DatasetName(match["name"], match["config"], match["revision"])


@dataclass(frozen=True)
class Rows:
    """Some columns of a dataset: iterating gives its rows as tuples, any number of times.

    Attributes:
        read: Begins at the first row.
        label_names: The names of the labels, by column, of the columns that are of the library's type ClassLabel.
        num_rows: How many rows there are.
        num_bytes: How many bytes these columns take, roughly.
    """

    read: Callable[[range], Iterator[tuple[Any, ...]]]
    num_rows: int
    num_bytes: int
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.read(range(self.num_rows))

    def of_blocks(self, blocks: Iterable[int], of: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the rows, with their numbers, of some of so many blocks of rows."""
        for block in blocks:
            rows = range(block * self.num_rows // of, (block + 1) * self.num_rows // of)
            yield from zip(rows, self.read(rows), strict=True)


def load(spec: str, *, split: str, columns: Sequence[str]) -> Rows:
    """Return one split of a dataset with the given columns only.

    A folder is what `save_to_disk` wrote, or holds Parquet, Arrow, JSON lines, CSV or text files as `load_dataset`
    takes them. From the hub, the data is downloaded once, into the cache of `datasets` (`HF_HOME`); afterwards no
    network is needed. No code that comes with a dataset is run. What comes with Python needs no `datasets`.
    """
    name = parse(spec)
    if name.prefix == PYTHON:
        table = python_docs.rows(name.name, split)
        _check_columns(name, columns, list(table))
        given = list(zip(*(table[column] for column in columns), strict=True))
        size = sum(len(str(value)) for row in given for value in row)
        return Rows(lambda rows: iter(given[rows.start : rows.stop]), len(given), size)
    dataset = _loaded(name, split)
    _check_columns(name, columns, dataset.column_names)
    dataset = dataset.select_columns(list(columns))

    def read(rows: range) -> Iterator[tuple[Any, ...]]:
        part = dataset if len(rows) == len(dataset) else dataset.select(rows)
        for some in part.with_format("arrow").iter(batch_size=_ROWS):
            yield from zip(*(column.to_pylist() for column in some.columns), strict=True)

    kinds = {column: dataset.features[column] for column in columns}
    label_names = {column: tuple(kind.names) for column, kind in kinds.items() if hasattr(kind, "names")}
    # the table has all rows, also those that the dataset leaves out
    num_bytes = dataset.data.nbytes * len(dataset) // max(1, dataset.data.num_rows)
    return Rows(read, len(dataset), num_bytes, label_names)


def _check_columns(name: DatasetName, columns: Sequence[str], available: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in available]:
        raise IsolossError(f"{name} has no column {missing[0]!r}; it has {', '.join(available)}")


def _loaded(name: DatasetName, split: str) -> Any:
    require_package("datasets")
    import datasets

    from isoloss.checkpoints.places import hub_answers

    with _quiet():
        try:
            folder = Path(name.name)
            # `load_dataset` refuses what `save_to_disk` wrote
            is_saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
            if name.is_local and is_saved:
                return _from_saved(datasets.load_from_disk(name.name), name, split)
            if name.is_local or hub_answers(name.name, what="dataset", revision=name.revision):
                return datasets.load_dataset(name.name, name.config, split=split, revision=name.revision)
            return _from_cache(name, split)
        except IsolossError:
            raise
        except Exception as error:
            # datasets raises nearly anything on what it cannot read
            reason = " ".join(str(error).split()) or type(error).__name__
            raise IsolossError(f"cannot load the split {split!r} of {name}: {reason[:400]}") from error


def _from_saved(dataset: Any, name: DatasetName, split: str) -> Any:
    if isinstance(dataset, dict):
        if split not in dataset:
            raise IsolossError(f"{name} has no split {split!r}; it has {', '.join(dataset)}")
        return dataset[split]
    # a dataset that was made in memory and saved has no name of a split, and is taken for any
    saved_split = None if dataset.split is None else str(dataset.split)
    if saved_split not in (None, split):
        raise IsolossError(f"{name} has no split {split!r}; it has {saved_split}")
    return dataset


def _from_cache(name: DatasetName, split: str) -> Any:
    """Return what was downloaded before; the cache does not say of which revision, so none may be asked for."""
    from datasets.packaged_modules.cache.cache import Cache

    if name.revision is not None:
        raise IsolossError(f"the Hugging Face hub does not answer, so the revision of {name} cannot be checked")
    try:
        builder = Cache(
            dataset_name=name.name.split("/")[-1],
            repo_id=name.name,
            config_name=name.config,
            version="auto",
            hash="auto",
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise IsolossError(
            f"there is no dataset {name} on this machine, and the Hugging Face hub does not answer ({reason})"
        ) from error
    return builder.as_dataset(split=split)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's hints to itself, and its bars to a terminal."""
    import datasets

    logger = logging.getLogger("datasets")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
