"""Features in a file, for those larger than memory: written once in blocks, read by rows.

The file is a safetensors file with one tensor, `features` (n, D), in float32 or bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from isoloss import files
from isoloss.errors import IsolossError

_BLOCK = 2**24  # numbers of features that are read at once
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_NAME = "features"


class StoredFeatures:
    """Features in a file: `features[rows]` reads rows, by a slice or by an int64 tensor of any shape of row numbers.

    Rows are read into memory of their own, not mapped, so that no more of the file than was asked for is ever resident.
    The file is one that `store` wrote, or any safetensors file with one tensor `features` (n, D) in float32 or
    bfloat16.

    Raises:
        IsolossError: There is no such file, or it holds something else.
    """

    ndim = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise IsolossError(f"cannot read the features {path}: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._file)
        try:
            size = int.from_bytes(os.pread(self._file, 8, 0), "little")
            entry = json.loads(os.pread(self._file, size, 8))[_NAME]
            self.shape: tuple[int, int] = (int(entry["shape"][0]), int(entry["shape"][1]))
            self.dtype = DTYPES[entry["dtype"]]
            self._row_bytes = self.shape[1] * self.dtype.itemsize
            self._start = 8 + size + int(entry["data_offsets"][0])
            complete = os.fstat(self._file).st_size >= self._start + self.shape[0] * self._row_bytes
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise IsolossError(
                f"{path} holds no features: a safetensors file with a tensor {_NAME} (n, D) of {', '.join(DTYPES)} is "
                "needed"
            ) from error
        if not complete:
            raise IsolossError(f"{path} ends before its last row: extract the features again")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return (..., D) in the file's dtype, on the CPU."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            assert step == 1
            features = torch.empty(max(last - first, 0), self.shape[1], dtype=self.dtype)
            self._read(features, first)
            return features
        features = torch.empty(*rows.shape, self.shape[1], dtype=self.dtype)
        for row, number in zip(features.view(-1, self.shape[1]), rows.flatten().tolist(), strict=True):
            if not 0 <= number < len(self):
                raise IndexError(f"row {number} of {len(self)}")
            self._read(row, number)
        return features

    def _read(self, into: torch.Tensor, first: int) -> None:
        left = into.view(torch.uint8).flatten().numpy().data
        offset = self._start + first * self._row_bytes
        while left:
            count = os.preadv(self._file, [left], offset)
            if count == 0:
                raise IsolossError(f"{self.path} was cut short while it was read")
            left, offset = left[count:], offset + count


def rows_at_once(width: int) -> int:
    """Return how many rows of features (n, width) are best read at once: not more than memory should hold."""
    return min(2048, max(64, _BLOCK // width))


def store(path: Path, blocks: Iterable[torch.Tensor], *, shape: tuple[int, int], dtype: torch.dtype) -> StoredFeatures:
    """Write blocks of rows, (B, D) each, one after another to `path`, whole or not at all, and open it.

    Raises:
        IsolossError: A type that is neither float32 nor bfloat16, blocks that do not add up to `shape`, or a file that
            cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stored = store(Path(folder, "x.safetensors"), [torch.ones(2, 3)], shape=(2, 3), dtype=torch.bfloat16)
        ...     stored[torch.tensor([1])].tolist()
        [[1.0, 1.0, 1.0]]
    """
    names = {known: name for name, known in DTYPES.items()}
    if dtype not in names:
        raise IsolossError(f"features are stored in float32 or bfloat16, not in {dtype}")
    entry = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [0, math.prod(shape) * dtype.itemsize]}
    header = json.dumps({_NAME: entry}).encode()
    header += b" " * (-len(header) % 8)
    rows = 0
    with files.new_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != shape[1]:
                raise IsolossError(f"a block of features has the shape {tuple(block.shape)}, not (B, {shape[1]})")
            file.write(block.to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
            rows += len(block)
        if rows != shape[0]:
            raise IsolossError(f"there are {rows} rows of features, not {shape[0]}")
    return StoredFeatures(path)
