"""Token ids in files: `.npy`, the `.bin` of nanoGPT, llm.c, lit-gpt and Megatron-LM, masked ones in `.hdf5`.

Shapes: n sequences, T tokens in each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from isoloss.errors import IsolossError, naming_extras
from isoloss.text.masking import IGNORED

Ids = np.ndarray[Any, np.dtype[np.int64]]
_Array = np.ndarray[Any, np.dtype[Any]]

MASKED = (".hdf5", ".h5")
SUFFIXES = (".npy", ".bin", *MASKED)
_OF_MASKED = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")

# llm.c: 256 int32, of which the first three are a magic number, a version and the number of tokens
_LLMC_HEADER = 1024  # bytes
_LLMC = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
_LLMC_OTHERS = (20240326, 20240327, 20240328, 20240522)  # a model, its gradients, a tokenizer, questions
# lit-gpt and TinyLlama: this, a version (8 bytes), a code of the type (1 byte) and the number of tokens (8 bytes)
_LITGPT, _LITGPT_HEADER = b"LITPKDS", 24
# Megatron-LM: the beginning of the .idx file beside it, then a version (8 bytes), a code of the type (1 byte), the
# number of sequences (8 bytes) and of documents (8 bytes), and the length of each sequence (int32)
_MEGATRON, _MEGATRON_HEADER = b"MMIDIDX\x00\x00", 34
# the codes of both; those for floats are no types of tokens
_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_MAX_UPPER_HALF = 15  # of the upper halves of 32-bit ids: no vocabulary has a million tokens


def read_token_ids(data: Path, length: int) -> Ids:
    """Return the sequences in a file of token ids, (n, T); negative ids are padding.

    - `.npy`: integers (n, T), a sequence a row, or (tokens,), cut into rows of `length`.
    - `.bin`: (tokens,), cut likewise. The header says the type of those of llm.c (16 or 32 bits) and lit-gpt, a `.idx`
      file beside it that of Megatron-LM's. Without either it is uint16, as nanoGPT writes them.

    Args:
        data: The file.
        length: Tokens in a row, for ids in one dimension.
    """
    try:
        array = _read_bin(data) if data.suffix.lower() == ".bin" else np.load(data, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise IsolossError(f"{data} is not a readable {data.suffix} file: {error}") from error
    if not np.issubdtype(array.dtype, np.integer):
        raise IsolossError(f"{data} holds {array.dtype}, not integers: token ids are integers")
    if array.ndim == 1:
        rows = array[: len(array) // length * length].reshape(-1, length)
    elif array.ndim == 2:
        rows = array
    else:
        raise IsolossError(f"{data} has {array.ndim} dimensions; token ids have 1 (a stream) or 2 (a sequence a row)")
    if rows.size == 0:
        raise IsolossError(f"{data} (shape {array.shape}) does not hold one sequence of {rows.shape[1] or 1} tokens")
    # a larger uint64 would become a negative number, which is padding
    if int(rows.max()) > np.iinfo(np.int64).max:
        raise IsolossError(f"{data} holds {rows.max()}, which is not a token id")
    ids: Ids = rows.astype(np.int64)
    return ids


@naming_extras()
def read_masked_ids(data: Path) -> tuple[Ids, Ids]:
    """Return the masked sequences in an HDF5 file of Academic Budget BERT, and their labels, (n, T) each.

    In the file, a position of 0 ends the masked positions of a row. Negative ids are padding.
    """
    import h5py

    try:
        with h5py.File(data) as file:
            columns = [np.asarray(file[name]) for name in _OF_MASKED]
        if not all(np.issubdtype(column.dtype, np.integer) for column in columns):
            raise ValueError(f"it holds {', '.join(str(column.dtype) for column in columns)}, not integers")
        ids, mask, segments, positions, originals = (column.astype(np.int64) for column in columns)
        if {ids.shape, mask.shape, segments.shape} != {(len(positions), *ids.shape[1:])} or not ids.size:
            raise ValueError("its shapes are " + ", ".join(str(column.shape) for column in columns))
        if segments.any():
            raise ValueError("pairs of sentences (segment_ids) cannot be read")
        rows, places = np.logical_and.accumulate(positions != 0, axis=1).nonzero()
        positions, originals = positions[rows, places], originals[rows, places]
        if min(positions.min(initial=0), originals.min(initial=0)) < 0 or not mask[rows, positions].all():
            raise ValueError("it has a masked position in the padding, or a negative number")
        labels = np.full_like(ids, IGNORED)
        labels[rows, positions] = originals
        ids = np.where(mask > 0, ids, -1)
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise IsolossError(f"{data} is not a readable HDF5 file of {', '.join(_OF_MASKED)}: {error}") from error
    return ids, labels


def _read_bin(path: Path) -> _Array:
    with path.open("rb") as file:
        start = file.read(_LITGPT_HEADER)
    magic, version, number = np.frombuffer(start[:12].ljust(12, b"\0"), dtype="<i4").tolist()
    index = path.with_suffix(".idx")
    if (magic, version) in _LLMC:
        return _tokens(path, _LLMC[magic, version], number, offset=_LLMC_HEADER)
    if magic in (*_LLMC_OTHERS, *(known for known, _ in _LLMC)):
        raise IsolossError(f"{path} is an llm.c file (number {magic}, version {version}), but not of tokens")
    if start.startswith(_LITGPT):
        number = int.from_bytes(start[16:24], "little")
        return _tokens(path, _dtype(start[15], path), number, offset=_LITGPT_HEADER)
    if start.startswith(b"PK\x03\x04"):
        raise IsolossError(f"{path} is a file of torch.save, such as a model's weights, and holds no token ids")
    if index.exists():
        dtype, number = _megatron_index(index)
        return _tokens(path, dtype, number)
    array = np.memmap(path, dtype="<u2", mode="r")
    low, high = (int(half.max(initial=0)) for half in (array[::2], array[1::2]))
    # the upper halves of larger integers are 0 or small numbers; tokens of a small vocabulary are all small
    if high == 0 < low or high <= _MAX_UPPER_HALF < low:
        raise IsolossError(
            f"{path} has no header, so its ids would be read as 16 bits, but every second 16-bit number in it is "
            f"{'0' if high == 0 else f'at most {high}'}, as in ids of 32 or 64 bits: write it as .npy, with "
            f'np.save("{path.stem}.npy", np.fromfile("{path.name}", dtype=np.int32)) if they have 32'
        )
    return array


def _megatron_index(path: Path) -> tuple[type, int]:
    """Return the type and the number of the tokens in the `.bin` file beside an `.idx` file."""
    with path.open("rb") as file:
        start = file.read(_MEGATRON_HEADER)
        if not start.startswith(_MEGATRON) or len(start) < _MEGATRON_HEADER:
            raise IsolossError(
                f"{path} is not a Megatron-LM index, so the type of the token ids in the .bin file beside it is not "
                "known: write these as .npy, or move the .idx file away if they are uint16"
            )
        sequences = int.from_bytes(start[18:26], "little")
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
    if len(lengths) < sequences:
        raise IsolossError(f"{path} is cut off: it should have {sequences:,} sequences, and has {len(lengths):,}")
    return _dtype(start[17], path), int(lengths.sum(dtype=np.int64))


def _dtype(code: int, path: Path) -> type:
    if code not in _CODES:
        raise IsolossError(f"{path} has the type code {code}, which is not an integer type: token ids are integers")
    return _CODES[code]


def _tokens(path: Path, dtype: type, number: int, *, offset: int = 0) -> _Array:
    """Return the tokens after a header, which must be as many as the header says."""
    stored = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size - offset
    if size != number * stored.itemsize:
        raise IsolossError(
            f"{path} should have {number:,} tokens of {stored.itemsize} bytes and has {max(0, size):,} bytes for them: "
            "it is damaged or was not written to its end"
        )
    return np.memmap(path, dtype=stored, mode="r", offset=offset)
