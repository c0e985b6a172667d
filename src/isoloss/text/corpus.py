"""Real text as a language: documents tokenised once, packed to one length, kept on disk and served by position.

Shapes: n sequences, T tokens in each (`CorpusConfig.length`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.api import Sentences
from isoloss.languages.config import CorpusConfig
from isoloss.seeds import generator
from isoloss.text import documents, hub_datasets, tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT = 1  # of the cached tokens: raise it whenever the same text would give other ones
_PARTS = ("training", "held_out")
_REPORT = 100  # documents between two calls of `progress`

Progress = Callable[[int, int], None]  # called with the documents tokenised and all there are


def resolve(config: CorpusConfig) -> CorpusConfig:
    """Return `config` with absolute paths and with `content` filled in, so that it means the same text anywhere.

    Raises:
        IsolossError: A file, a dataset or the tokenizer is not there, or a number is out of range.
    """
    return _resolve(config)[0]


class Corpus:
    """Real text, packed: a `Language` whose sentences all have the same length and whose probabilities nobody knows.

    A share of the distinct documents, those whose content has the smallest hashes, is held out (at least one, and all
    but one at most); equal documents are on one side. The tokens of each part's documents are put end to end, in order,
    and cut into sequences of `length`: [CLS], length - 2 tokens, [SEP], where the tokenizer has these two, else
    `length` tokens. What is left at the end of a part, less than one sequence, is dropped, so no sentence is padded.

    Attributes:
        config: The resolved config.
        tokenizer: The tokenizer, to be kept with checkpoints.
        num_training: Sequences to train on.
        num_held_out: Sequences held out.
        vocab_size: Number of the tokenizer's ids, the special ones included; the same as `model_vocab_size`.
        special_ids: All of the tokenizer's special tokens, the unknown one included.

    The other attributes are those of `isoloss.languages.api.Language`.
    """

    def __init__(self, config: CorpusConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._training, self._held_out = (_open(folder / f"{part}.npy", config.length) for part in _PARTS)
        self.num_training, self.num_held_out = len(self._training), len(self._held_out)
        self.vocabulary = tokenizers.vocabulary(tokenizer)
        self.vocab_size = self.model_vocab_size = len(self.vocabulary)
        self.max_length = config.length
        self.pad_id = int(tokenizer.pad_token_id)
        self.mask_id = int(tokenizer.mask_token_id)
        self.special_ids = tuple(sorted(set(tokenizer.all_special_ids)))
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    @classmethod
    def from_config(
        cls, config: CorpusConfig, *, cache: Path | None = None, progress: Progress | None = None
    ) -> Corpus:
        """Return the corpus, tokenised now or, if that was done before, from the cache.

        The tokens are written whole or not at all, a document at a time, and read by memory map.

        Args:
            config: Which text, tokenizer, length and held-out share.
            cache: Folder that keeps the tokens; default: the environment's `ISOLOSS_CACHE`, else `~/.cache/isoloss`.
            progress: Called with the number of documents tokenised and that of all, every 100 documents.

        Raises:
            IsolossError: Missing or unreadable text; text or a tokenizer other than those that `config.content`
                was taken from; a tokenizer without mask or padding token; less than one sequence to train on or to
                hold out.
        """
        resolved, tokenizer, sources = _resolve(config)
        if config.content not in ("", resolved.content):
            raise IsolossError(
                f"the text ({', '.join(config.paths)}) or the tokenizer ({config.tokenizer}) has changed since the run "
                f"began: the content was {config.content[:16]} and is {resolved.content[:16]}; bring the former back, "
                "or begin a new run"
            )
        root = cache or Path(os.environ.get("ISOLOSS_CACHE") or "~/.cache/isoloss").expanduser()
        return cls(resolved, tokenizer, _cached(resolved, tokenizer, sources, root / "corpora", progress))

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` training sequences drawn uniformly, with replacement.

        Raises:
            IsolossError: `latent` is asked for: nobody knows what produced real text.
        """
        if latent:
            raise IsolossError("a corpus has no known latent structure: latent must be false")
        return self._take(self._training, torch.randint(self.num_training, (n,), generator=generator))

    def batch(self, step: int, n: int, *, seed: int) -> Sentences:
        """Return the `n` sequences of training step `step`, which counts from 1.

        Step s takes positions (s - 1) n to s n - 1 of an endless row of epochs, each of which is a permutation of the
        training sequences that follows from `seed` and the epoch's number alone.
        """
        if step < 1 or n < 1:
            raise IsolossError(f"there is no batch of {n} sequences at step {step}: both must be at least 1")
        position, rows = (step - 1) * n, []
        while n > 0:
            epoch, start = divmod(position, self.num_training)
            rows.append(self._permutation(seed, epoch)[start : start + n])
            position, n = position + len(rows[-1]), n - len(rows[-1])
        return self._take(self._training, torch.cat(rows))

    def held_out(self, n: int | None = None) -> Sentences:
        """Return `n` held-out sequences, spread evenly over all of them; all, where there are no more or n is None."""
        if n is not None and n < 1:
            raise IsolossError(f"cannot take {n} held-out sequences: it must be at least 1")
        total = self.num_held_out
        n = total if n is None else min(n, total)
        return self._take(self._held_out, torch.arange(n) * total // n)

    def _permutation(self, seed: int, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != (seed, epoch):
            order = torch.randperm(self.num_training, generator=generator(seed, "corpus order", epoch))
            self._order = (seed, epoch), order
        return self._order[1]

    def _take(self, part: np.ndarray[Any, Any], rows: torch.Tensor) -> Sentences:
        tokens = torch.from_numpy(part[rows.numpy()].astype(np.int64))
        return Sentences(tokens, torch.full((len(rows),), self.config.length))


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


def brackets(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """Return `first` and `last` for `pack`: the ids of [CLS] and [SEP], or None where the tokenizer lacks either."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return {"first": None, "last": None} if first is None or last is None else {"first": first, "last": last}


def _resolve(config: CorpusConfig) -> tuple[CorpusConfig, PreTrainedTokenizerFast, list[documents.Source]]:
    if config.length < 3:
        raise IsolossError(f"the length of packed sequences is {config.length}; it must be at least 3")
    if not 0 < config.held_out < 1:
        raise IsolossError(f"the held-out share is {config.held_out}; it must be above 0 and below 1")
    if config.max_documents is not None and config.max_documents < 2:
        raise IsolossError(f"max_documents is {config.max_documents}; it must be at least 2: one is held out")
    tokenizer = tokenizers.load_tokenizer(config.tokenizer, needs=("mask", "pad"))
    local = Path(config.tokenizer).expanduser()
    resolved = dataclasses.replace(
        config,
        paths=tuple(_absolute(path) for path in config.paths),
        tokenizer=str(local.resolve()) if local.exists() else config.tokenizer,
    )
    sources = documents.open_sources(resolved.paths, column=config.column, split=config.split)
    content = hashlib.sha256(tokenizers.serialised(tokenizer))
    for source in sources:
        content.update(source.content(config.max_documents).encode())
    return dataclasses.replace(resolved, content=content.hexdigest()), tokenizer, sources


def _absolute(path: str) -> str:
    return str(hub_datasets.parse(path)) if hub_datasets.is_dataset(path) else str(Path(path).expanduser().resolve())


def _cached(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerFast,
    sources: list[documents.Source],
    root: Path,
    progress: Progress | None,
) -> Path:
    """Return the folder of the tokens, written first if it is not there; two processes do not both write it."""
    identity = {
        "format": _FORMAT,
        "content": config.content,
        "max_documents": config.max_documents,
        "length": config.length,
        "held_out": config.held_out,
    }
    folder = root / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    tokens = folder / "tokens"
    if not tokens.is_dir():
        with files.lock(folder, wait=True):
            files.remove_unfinished(folder)
            if not tokens.is_dir():
                try:
                    with files.new_directory(tokens) as unfinished:
                        counts = _write(config, tokenizer, sources, unfinished, progress)
                        meta = {**identity, "paths": config.paths, "counts": counts}
                        files.write_json(unfinished / "meta.json", meta)
                except OSError as error:
                    raise IsolossError(
                        f"cannot write the tokens in {folder}: {error.strerror or error} (ISOLOSS_CACHE names another "
                        "place for them)"
                    ) from error
    return tokens


def _write(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerFast,
    sources: list[documents.Source],
    folder: Path,
    progress: Progress | None,
) -> dict[str, Any]:
    def texts() -> Iterator[str]:
        return (text for _, text in documents.read(sources, config.max_documents))

    hashes = np.fromiter((_hash(text) for text in texts()), dtype=np.uint64)
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise IsolossError(
            f"{', '.join(config.paths)} holds one distinct document (as is a .txt file of less than "
            f"{3 * documents.DOCUMENT_CHARACTERS:,} characters): it takes two, one to train on and one to hold out"
        )
    share = min(max(1, round(config.held_out * len(distinct))), len(distinct) - 1)
    last_held_out = distinct[share - 1]
    dtype = np.uint16 if len(tokenizers.vocabulary(tokenizer)) <= 1 << 16 else np.int32
    counts: dict[str, Any] = {}
    for part in _PARTS:
        chosen = (hashes <= last_held_out) == (part == "held_out")
        taken = (text for take, text in zip(chosen, texts(), strict=True) if take)
        before = sum(count["documents"] for count in counts.values())
        ids = tokenizers.encode(tokenizer, _reported(taken, before, len(hashes), progress))
        rows = pack(ids, config.length, **brackets(tokenizer))
        with (folder / f"{part}.npy").open("wb") as file:
            n = _stream(file, rows, config.length, np.dtype(dtype))
        if n == 0:
            raise IsolossError(
                f"the {part.replace('_', '-')} part of {', '.join(config.paths)} has {chosen.sum()} of {len(hashes)} "
                f"documents but not one sequence of {config.length} tokens: it takes more text, a shorter length or "
                "another held-out share"
            )
        counts[part] = {"documents": int(chosen.sum()), "sequences": n}
    return counts


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


def _open(path: Path, length: int) -> np.ndarray[Any, Any]:
    try:
        tokens: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise IsolossError(f"{path} is damaged ({error}): delete its folder, and it is made anew") from error
    if tokens.ndim != 2 or tokens.shape[1] != length:
        raise IsolossError(f"{path} is damaged (shape {tokens.shape}): delete its folder, and it is made anew")
    return tokens
