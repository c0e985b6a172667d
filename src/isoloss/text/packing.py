"""Packed text: documents tokenized once, put end to end, cut to one length and kept on disk.

Shapes: n sequences, T tokens in each (`length`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.text import documents, tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT = 1  # of the cached tokens: raise it whenever the same text would give other ones
PARTS = ("training", "held_out")
_REPORT = 100  # documents between two calls of `progress`

Progress = Callable[[int, int], None]  # called with the documents tokenized and all there are


def pack(ids: Iterable[np.ndarray], length: int, *, first: int | None = None, last: int | None = None) -> Iterator[Any]:
    """Yield int64 arrays (n, length): the ids put end to end and cut, each row between `first` and `last` if given.

    What is left at the end, less than one row, is dropped.
    """
    body = length - (first is not None) - (last is not None)
    held: list[np.ndarray] = []
    size = 0
    for array in ids:
        held.append(array)
        size += len(array)
        if size < 1000 * body:  # join many short documents at a time
            continue
        yield from _rows(held, body, first, last)
        size = len(held[0])
    yield from _rows(held, body, first, last)


def boundary_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return `first` and `last` for `pack`: the ids of [CLS] and [SEP], or None where the tokenizer lacks either."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return {"first": None, "last": None} if first is None or last is None else {"first": first, "last": last}


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Which text is packed, and how.

    Attributes:
        paths: Names of the files and datasets, for messages.
        sources: The files and datasets.
        tokenizer: The tokenizer.
        content: SHA-256 over the text and the tokenizer.
        length: T.
        held_out: Fraction of the distinct documents that are held out.
        max_documents: How many documents are taken, from the first on; None: all.
    """

    paths: tuple[str, ...]
    sources: list[documents.Source]
    tokenizer: PreTrainedTokenizerFast
    content: str
    length: int
    held_out: float
    max_documents: int | None

    def write(self, root: Path, progress: Progress | None = None) -> Path:
        """Return the folder below `root` with the tokens, written first if they are not there.

        Two processes do not both write it. `open_tokens` reads a part of it.

        Raises:
            IsolossError: Less than one sequence in a part, unreadable text, or a folder that cannot be written.
        """
        identity = {
            "format": _FORMAT,
            "content": self.content,
            "max_documents": self.max_documents,
            "length": self.length,
            "held_out": self.held_out,
        }
        folder = root / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        tokens = folder / "tokens"
        if tokens.is_dir():
            return tokens
        with files.lock(folder, wait=True):
            files.remove_unfinished(folder)
            if not tokens.is_dir():
                try:
                    with files.new_directory(tokens) as unfinished:
                        meta = {**identity, "paths": self.paths, "counts": self._write_parts(unfinished, progress)}
                        files.write_json(unfinished / "meta.json", meta)
                except OSError as error:
                    raise IsolossError(
                        f"cannot write the tokens in {folder}: {error.strerror or error} (ISOLOSS_CACHE names another "
                        "folder for them)"
                    ) from error
        return tokens

    def _texts(self) -> Iterator[str]:
        return (text for _, text in documents.read(self.sources, self.max_documents))

    def _write_parts(self, folder: Path, progress: Progress | None) -> dict[str, Any]:
        """Write the training and the held-out sequences; return how many documents and sequences each has."""
        hashes = np.fromiter((_hash(text) for text in self._texts()), dtype=np.uint64)
        distinct = np.unique(hashes)
        if len(distinct) < 2:
            raise IsolossError(
                f"{', '.join(self.paths)} holds one distinct document (as is a .txt file of less than "
                f"{3 * documents.DOCUMENT_CHARACTERS:,} characters): it takes two, one to train on and one to hold out"
            )
        number = min(max(1, round(self.held_out * len(distinct))), len(distinct) - 1)
        last_held_out = distinct[number - 1]
        dtype = np.uint16 if len(tokenizers.vocabulary(self.tokenizer)) <= 1 << 16 else np.int32
        counts: dict[str, Any] = {}
        for part in PARTS:
            chosen = (hashes <= last_held_out) == (part == "held_out")
            taken = (text for take, text in zip(chosen, self._texts(), strict=True) if take)
            before = sum(count["documents"] for count in counts.values())
            ids = tokenizers.encode(self.tokenizer, _reported(taken, before, len(hashes), progress))
            rows = pack(ids, self.length, **boundary_token_ids(self.tokenizer))
            with (folder / f"{part}.npy").open("wb") as file:
                n = _stream(file, rows, self.length, np.dtype(dtype))
            if n == 0:
                raise IsolossError(
                    f"the {part.replace('_', '-')} part of {', '.join(self.paths)} has {chosen.sum()} of {len(hashes)} "
                    f"documents but not one sequence of {self.length} tokens: it takes more text, a shorter length or "
                    "another held-out fraction"
                )
            counts[part] = {"documents": int(chosen.sum()), "sequences": n}
        return counts


def open_tokens(path: Path, length: int) -> np.ndarray[Any, Any]:
    """Return the (n, length) tokens in a file of `PackedText.write`, mapped from disk.

    Raises:
        IsolossError: The file is damaged.
    """
    try:
        tokens: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise IsolossError(f"{path} is damaged ({error}): delete its folder, and it is written anew") from error
    if tokens.ndim != 2 or tokens.shape[1] != length:
        raise IsolossError(f"{path} is damaged (shape {tokens.shape}): delete its folder, and it is written anew")
    return tokens


def _rows(held: list[np.ndarray], body: int, first: int | None, last: int | None) -> Iterator[Any]:
    """Yield the whole rows in `held` and leave in it, as one array, what is left."""
    stream = np.concatenate([np.empty(0, np.int64), *held])
    n = len(stream) // body
    held[:] = [stream[n * body :]]
    columns = [stream[: n * body].reshape(n, body)]
    if first is not None:
        columns.insert(0, np.full((n, 1), first))
    if last is not None:
        columns.append(np.full((n, 1), last))
    if n:
        yield np.concatenate(columns, axis=1)


def _reported(texts: Iterable[str], before: int, total: int, progress: Progress | None) -> Iterator[str]:
    for number, text in enumerate(texts, before + 1):
        yield text
        if progress is not None and (number % _REPORT == 0 or number == total):
            progress(number, total)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _stream(file: BinaryIO, rows: Iterable[np.ndarray], length: int, dtype: np.dtype[Any]) -> int:
    """Write `rows` as one `.npy` array without holding them all; return how many there were."""

    def header(n: int) -> None:
        description = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": (n, length)})

    header(0)  # NumPy leaves room in it for any number of rows
    start, n = file.tell(), 0
    for array in rows:
        file.write(array.astype(dtype).tobytes())
        n += len(array)
    file.seek(0)
    header(n)
    assert file.tell() == start
    return n
