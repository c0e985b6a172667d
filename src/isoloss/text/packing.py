"""Packed text: tokens of documents put end to end and cut into rows of one length, in memory or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isoloss.errors import IsolossError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
        # many short documents are joined at a time: joining each one would copy what is held again
        if size < 1000 * body:
            continue
        yield from _rows(held, body, first, last)
        size = len(held[0])
    yield from _rows(held, body, first, last)


def boundary_token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return `first` and `last` for `pack`: the ids of [CLS] and [SEP], or None where the tokenizer lacks either."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return {"first": None, "last": None} if first is None or last is None else {"first": first, "last": last}


def write_rows(path: Path, rows: Iterable[np.ndarray], length: int, dtype: np.dtype[Any]) -> int:
    """Write (n, length) rows as one `.npy` array without holding them all; return how many there were."""
    with path.open("wb") as file:

        def header(n: int) -> None:
            description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n, length)}
            np.lib.format.write_array_header_1_0(file, description)

        # the number of rows is known only at the end; NumPy leaves room in the header for any number
        header(0)
        start, n = file.tell(), 0
        for array in rows:
            file.write(array.astype(dtype).tobytes())
            n += len(array)
        file.seek(0)
        header(n)
        assert file.tell() == start
    return n


def open_rows(path: Path, length: int) -> np.ndarray[Any, Any]:
    """Return the (n, length) rows that `write_rows` wrote, mapped from disk; a damaged file is an `IsolossError`."""
    try:
        tokens: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise IsolossError(f"{path} is damaged ({error}): delete its folder, and it is written anew") from error
    if tokens.ndim != 2 or tokens.shape[1] != length:
        raise IsolossError(f"{path} is damaged (shape {tokens.shape}): delete its folder, and it is written anew")
    return tokens


def _rows(held: list[np.ndarray], body: int, first: int | None, last: int | None) -> Iterator[Any]:
    """Yield the whole rows in `held` and leave in it, as one array, what is left."""
    # the empty array gives a type, and something to join where no text came
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
