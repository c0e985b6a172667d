"""Documents: the texts in files, folders and named datasets, one by one, each with its location."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isoloss import files
from isoloss.errors import IsolossError, warn
from isoloss.seeds import derive
from isoloss.text import hub_datasets

Blocks = Sequence[Sequence[int]]  # of each source

SUFFIXES = (".txt", ".jsonl")
_MODEL_FILES = ("config.json", "tokenizer_config.json")
_OTHER = (".gz", ".zst", ".bz2", ".xz", ".zip", ".json", ".parquet", ".arrow", ".csv", ".tsv")  # may hold text as well
_NO_TEXT = f"a text file ends in {' or '.join(SUFFIXES)}"
DOCUMENT_CHARACTERS = 10_000  # the least that a document cut out of a longer text file has

# where a long text is cut: preferably between paragraphs, else lines, else words
_BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))

BLOCK_BYTES = 1 << 16  # of a long text, that are drawn together


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the text files that `paths` name, in order; a folder stands for those in it, sorted, at any depth.

    In a folder only `.txt` and `.jsonl` files count, and names that begin with a dot do not.
    """
    files_by_path: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise IsolossError(f"there is no text file or folder {path}{files.nearest(path)}")
        if path.is_file() and path.suffix.lower() not in SUFFIXES:
            raise IsolossError(f"cannot read {path} as text: {_NO_TEXT}")
        there = (inner for inner in path.rglob("*") if inner.suffix.lower() in SUFFIXES and inner.is_file())
        shown = sorted(inner for inner in there if "/." not in f"/{inner.relative_to(path).as_posix()}")
        named = [path] if path.is_file() else shown
        if not named:
            raise IsolossError(f"the folder {path} holds no {' or '.join(SUFFIXES)} file")
        # a link and what it leads to are one file
        for file in named:
            if file.resolve() in files_by_path:
                raise IsolossError(f"{file} is named twice among the text files: name each once")
            files_by_path[file.resolve()] = file
    if not files_by_path:
        raise IsolossError("no text: name at least one file or folder")
    return list(files_by_path.values())


class Source(Protocol):
    """A file or a dataset with documents.

    `content` returns what these, or at least the `first` ones, depend on, wherever they lie; `read` yields pairs of
    location and text, blank texts and nulls included, of some of its `num_blocks` blocks in order, or of all of it.
    """

    @property
    def num_blocks(self) -> int: ...  # noqa: D102
    def content(self, first: int | None) -> str: ...  # noqa: D102
    def read(self, blocks: Sequence[int] | None = None) -> Iterator[tuple[str, str | None]]: ...  # noqa: D102


def open_sources(paths: Iterable[str | Path], *, column: str = "text", split: str | None = None) -> list[Source]:
    """Return the files and datasets that `paths` name, in order; see `read_documents` for the arguments and errors."""
    paths = list(paths)
    names = [str(path) for path in paths if hub_datasets.is_dataset(path)]
    if split is not None and not names:
        raise IsolossError(f"the split {split!r} is for datasets, and the text comes from files: leave it out")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise IsolossError(f"{twice} is named twice among the texts: name each once")
    if len(names) < len(paths) or not paths:
        # all at once, so that a file that is named twice is found, and before a dataset is downloaded
        in_files = find_files(path for path in paths if not hub_datasets.is_dataset(path))
        if column != "text" and not names and all(file.suffix.lower() == ".txt" for file in in_files):
            raise IsolossError(
                f"the column {column!r} is for JSON lines and datasets, and all the files are plain text"
            )
    sources: list[Source] = []
    for path in paths:
        if hub_datasets.is_dataset(path):
            sources.append(_Dataset(str(path), column, "train" if split is None else split))
        else:
            sources += [_File(file, column) for file in find_files([path])]
            others = [
                file
                for file in sorted(Path(path).rglob("*"))
                # a tokenizer or a model beside the text is no text that was forgotten
                if file.suffix.lower() in _OTHER and not any((file.parent / name).exists() for name in _MODEL_FILES)
            ]
            if others:
                warn(f"{path} also holds {len(others):,} files that are not read, such as {others[0].name}: {_NO_TEXT}")
    return sources


def read_documents(
    paths: Iterable[str | Path], *, column: str = "text", split: str | None = None, max_documents: int | None = None
) -> Iterator[tuple[str, str]]:
    r"""Return the documents in `paths` as pairs of location (`file:line`) and text; blank ones and nulls are left out.

    - Each line of a `.jsonl` file is a document: the field `column` of its JSON object.
    - A `.txt` file of less than 30,000 characters is one document. A longer one, such as a book or a whole corpus, is
      cut into documents of 10,000 to 30,000 characters: at the first blank line after 10,000 characters or, where none
      comes within another 10,000, at the end of a line, else of a word.
    - Each row of a dataset (`hf:NAME`, see `isoloss.text.hub_datasets`) is a document: its column `column`. Rows
      count from 0.

    Files are UTF-8, with or without a byte order mark; all line ends are read as `\n`. Text is read as it is asked for,
    never a whole file at once.

    Args:
        paths: Files, folders (see `find_files`) and datasets.
        column: The field of JSON lines, or the column of datasets, that holds the text.
        split: Of datasets; None: `train`.
        max_documents: How many documents, from the first on; None: all.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss.text.documents import read_documents
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "two.jsonl")
        ...     _ = file.write_text('{"text": "One."}\n{"text": "Two.", "id": 7}\n')
        ...     [(source[-1:], text) for source, text in read_documents([file])]
        [('1', 'One.'), ('2', 'Two.')]
    """
    return read(open_sources(paths, column=column, split=split), max_documents)


def read(
    sources: list[Source], max_documents: int | None = None, blocks: Blocks | None = None
) -> Iterator[tuple[str, str]]:
    """Return the first `max_documents` documents of `sources`, all if None; as `read_documents` does.

    With the `blocks` of each source, only those that begin in them, and of a plain text file the text in them.
    """
    if max_documents is not None and max_documents < 1:
        raise IsolossError(f"the number of documents is {max_documents}; it must be at least 1")
    return itertools.islice(_documents(sources, blocks), max_documents)


def drawn_blocks(sources: list[Source], most_bytes: int, seed: int) -> Blocks | None:
    """Return blocks of each source, of about so many bytes in all, drawn uniformly; None where there are no more."""
    numbers = [source.num_blocks for source in sources]
    if sum(numbers) * BLOCK_BYTES <= most_bytes:
        return None
    chosen = np.random.default_rng(derive(seed, "blocks")).choice(
        sum(numbers), max(1, most_bytes // BLOCK_BYTES), replace=False
    )
    ends = np.cumsum(numbers)
    of = np.searchsorted(ends, chosen := np.sort(chosen), side="right")
    return [(chosen[of == i] - ends[i] + numbers[i]).tolist() for i in range(len(sources))]


def _documents(sources: list[Source], blocks: Blocks | None = None) -> Iterator[tuple[str, str]]:
    empty = True
    nulls: list[str] = []
    try:
        for source, own in zip(sources, blocks or itertools.repeat(None), strict=False):
            for location, text in source.read(own):
                if text is None:
                    nulls.append(location)
                elif text and not text.isspace():
                    empty = False
                    yield location, text
    finally:
        # also where only the first documents are read
        if nulls:
            warn(f"{len(nulls):,} null{'s' * (len(nulls) > 1)} in place of a text left out (first: {nulls[0]})")
    if empty and blocks is not None:
        # all documents are so long that none begins in these blocks
        yield from _documents(sources)
    elif empty:
        names = ", ".join(map(str, sources[:3])) + (" ..." if len(sources) > 3 else "")
        raise IsolossError(f"there is no text in {names}")


@dataclass(frozen=True)
class _File:
    """A `.txt` or `.jsonl` file."""

    path: Path
    column: str

    def __str__(self) -> str:
        return str(self.path)

    def content(self, first: int | None) -> str:
        suffix = self.path.suffix.lower()
        return f"{suffix} {self.column if suffix == '.jsonl' else ''} {files.sha256(self.path)}"

    @property
    def num_blocks(self) -> int:
        return -(-self.path.stat().st_size // BLOCK_BYTES)

    def read(self, blocks: Sequence[int] | None = None) -> Iterator[tuple[str, str | None]]:
        is_json = self.path.suffix.lower() == ".jsonl"
        with reading(self.path):
            parts: Iterator[tuple[int, str | None]]
            if is_json:
                parts = _field(self.path, self.column, blocks)
            else:
                parts = _text_parts(self.path) if blocks is None else _text_blocks(self.path, blocks)
            for place, text in parts:
                yield f"{self.path}:{'' if blocks is None else 'byte '}{place}", text


class _Dataset:
    """One column of a split of a named dataset, opened once."""

    def __init__(self, spec: str, column: str, split: str) -> None:
        self.name = hub_datasets.parse(spec)
        self.rows = hub_datasets.load(spec, split=split, columns=[column])
        self.column = column

    def __str__(self) -> str:
        return str(self.name)

    def content(self, first: int | None) -> str:
        # over the texts, not over what datasets keeps them in: this differs between machines and versions
        digest = hashlib.sha256()
        for _, text in itertools.islice(_documents([self]), first):
            data = text.encode()
            # the length goes first, or texts of the same characters divided elsewhere would have one digest
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
        return f"dataset {digest.hexdigest()}"

    @property
    def num_blocks(self) -> int:
        return -(-self.rows.num_bytes // BLOCK_BYTES)

    def read(self, blocks: Sequence[int] | None = None) -> Iterator[tuple[str, str | None]]:
        rows = enumerate(self.rows) if blocks is None else self.rows.of_blocks(blocks, self.num_blocks)
        for number, (text,) in rows:
            if not isinstance(text, str | None):
                raise IsolossError(f"{self.name}, row {number}: the column {self.column!r} holds no text but {text!r}")
            yield f"{self.name}:{number}", text


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an `IsolossError` where a file cannot be read as UTF-8 text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise IsolossError(f"{path} is not UTF-8 text ({error.reason}): convert it, e.g. with iconv") from error
    except OSError as error:
        raise IsolossError(f"cannot read {path}: {error.strerror or error}") from error


def json_lines(path: Path, blocks: Sequence[int] | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not blank; with `blocks`, of those that begin there.

    With `blocks`, the number of a line is that of its last byte, as the lines before it are not counted.
    """
    for number, line in _lines(path, blocks):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise IsolossError(f"{path}, {_place(number, blocks)} is not JSON: {error}") from error
        yield number, value


def _lines(path: Path, blocks: Sequence[int] | None) -> Iterator[tuple[int, str]]:
    if blocks is None:
        with path.open(encoding="utf-8-sig") as lines:
            yield from enumerate(lines, 1)
        return
    with path.open("rb") as file:
        for block in blocks:
            if block:
                # a line that begins before the block is of another one, and may end with the byte before it
                file.seek(block * BLOCK_BYTES - 1)
                file.readline()
            while file.tell() < (block + 1) * BLOCK_BYTES and (line := file.readline()):
                yield file.tell(), line.decode("utf-8-sig")


def _place(number: int, blocks: Sequence[int] | None) -> str:
    return f"line {number}" if blocks is None else f"the line that ends at byte {number:,}"


def _field(path: Path, column: str, blocks: Sequence[int] | None) -> Iterator[tuple[int, str | None]]:
    for number, document in json_lines(path, blocks):
        # a field that is absent is no null
        text = document.get(column, ...) if isinstance(document, dict) else ...
        where = f"{path}, {_place(number, blocks)}"
        if not isinstance(text, str | None):
            raise IsolossError(f'{where} is not a JSON object with a string field "{column}"')
        if text is not None and not is_encodable(text):
            raise IsolossError(f"{where} holds half a surrogate pair, which is not a character")
        yield number, text


def is_encodable(text: str) -> bool:
    """Return whether `text` is Unicode text: a string from JSON may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_parts(file: Path) -> Iterator[tuple[int, str]]:
    line, rest = 1, ""
    with file.open(encoding="utf-8-sig") as stream:
        while chunk := stream.read(1 << 20):
            rest += _checked(chunk, file)
            # a cut takes 2 parts of these 3 at most, so that no document is shorter than one
            while len(rest) >= 3 * DOCUMENT_CHARACTERS:
                end = _boundary(rest)
                yield line, rest[:end]
                line += rest.count("\n", 0, end)
                rest = rest[end:]
    yield line, rest


def _text_blocks(file: Path, blocks: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the whole words of each block, and where it begins."""
    with file.open("rb") as stream:
        for block in blocks:
            stream.seek(start := block * BLOCK_BYTES)
            part = stream.read(BLOCK_BYTES)
            is_last = stream.tell() == file.stat().st_size
            words = re.compile(rb"\s")
            first = 0 if block == 0 or not (space := words.search(part)) else space.end()
            spaces = [] if is_last else [each.start() for each in words.finditer(part, first)]
            text = part[first : spaces[-1] if spaces else None].decode("utf-8-sig")
            yield start, _checked(re.sub("\r\n?", "\n", text), file)


def _checked(text: str, file: Path) -> str:
    if 4 * text.count("\0") > len(text):
        raise IsolossError(
            f"{file} is not UTF-8 text (many of its bytes are 0, as in UTF-16): convert it, e.g. with iconv"
        )
    return text


def _boundary(text: str) -> int:
    """Return where the first document of `text` ends: from 1 to 2 times `DOCUMENT_CHARACTERS`, at the best boundary."""
    for boundary in _BOUNDARIES:
        if match := boundary.search(text, DOCUMENT_CHARACTERS, 2 * DOCUMENT_CHARACTERS):
            return match.end()
    return 2 * DOCUMENT_CHARACTERS
