"""Real text as a language: packed sequences of one length, served by position, whose probabilities nobody knows.

Shapes: n sequences, T tokens in each (`CorpusConfig.length`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isoloss import files
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Labeling, Language, Sentences, Stored
from isoloss.lab.languages.config import CorpusConfig, Progress, check_unchanged
from isoloss.seeds import generator
from isoloss.text import documents, hub_datasets, packing, tokenizers
from isoloss.text.masking import Start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FORMAT = 1  # of the cached tokens: raise it whenever the same text would give other ones
_PARTS = ("training", "held_out")
_REPORT = 100  # documents between two calls of `progress`


class Corpus(Language):
    """Real text, packed: all sentences have the same length.

    A fraction of the distinct documents, those whose content has the smallest hashes, is held out (at least one, and
    all but one at most); equal documents are in one part. The tokens of each part's documents are put end to end, in
    order, and cut into sequences of `length`: [CLS], length - 2 tokens, [SEP], where the tokenizer has these two, else
    `length` tokens. What is left at the end of a part, less than one sequence, is dropped, so no sentence is padded.

    Attributes:
        config: The resolved config.
        num_training: Sequences to train on.
        vocab_size: Number of the tokenizer's ids, the special ones included; the same as `model_vocab_size`.
        special_token_ids: All of the tokenizer's special tokens, the unknown one included.

    The other attributes are those of `Language`.
    """

    tokenizer: PreTrainedTokenizerFast
    has_numbered_sentences = True

    def __init__(self, config: CorpusConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self._config = config
        self.tokenizer = tokenizer
        self._training, self._held_out = (packing.open_rows(folder / f"{part}.npy", config.length) for part in _PARTS)
        self.num_training, self.num_held_out = len(self._training), len(self._held_out)
        self.vocabulary = tokenizers.vocabulary(tokenizer)
        self.vocab_size = self.model_vocab_size = len(self.vocabulary)
        self.max_length = config.length
        self.pad_id = int(tokenizer.pad_token_id)
        self.mask_id = int(tokenizer.mask_token_id)
        self.special_token_ids = tuple(sorted(set(tokenizer.all_special_ids)))
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    @classmethod
    def from_config(
        cls, config: CorpusConfig, *, cache: Path | None = None, progress: Progress | None = None
    ) -> Corpus:
        """Return the corpus, tokenized now or, if that was done before, from the cache.

        The tokens are written whole or not at all, a document at a time, and read by memory map.

        Args:
            config: Which text, tokenizer, length and held-out fraction.
            cache: Folder that keeps the tokens; default: the environment's `ISOLOSS_CACHE`, else `~/.cache/isoloss`.
            progress: Called with the numbers of documents tokenized and of all documents, every 100 documents.
        """
        text = _Text(config)
        check_unchanged(
            f"the text ({', '.join(config.paths)}) or the tokenizer ({config.tokenizer})",
            config.content,
            text.config.content,
        )
        root = cache or Path(os.environ.get("ISOLOSS_CACHE") or "~/.cache/isoloss").expanduser()
        return cls(text.config, text.tokenizer, text.write(root / "corpora", progress))

    @staticmethod
    def resolve(config: CorpusConfig) -> CorpusConfig:
        """Return `config` with absolute paths and with `content` filled in, so that it means the same text anywhere."""
        return _Text(config).config

    @property
    def start(self) -> Start:
        """[CLS] (and [SEP] at the end) of the packed sequences; without them the tokenizer's bos, else the mask."""
        around = packing.boundary_token_ids(self.tokenizer)
        if around["first"] is not None:
            return Start(around["first"], around["last"], is_in_sentences=True)
        if self.tokenizer.bos_token_id is not None:
            return Start(int(self.tokenizer.bos_token_id), None, is_in_sentences=False)
        return super().start

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` training sequences drawn uniformly, with replacement; nobody knows their latent."""
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
        # A batch may end one epoch and begin the next, or be longer than an epoch.
        while n > 0:
            epoch, start = divmod(position, self.num_training)
            rows.append(self._permutation(seed, epoch)[start : start + n])
            position, n = position + len(rows[-1]), n - len(rows[-1])
        return self._take(self._training, torch.cat(rows))

    def sentences_at(self, numbers: torch.Tensor, *, seed: int) -> Sentences:
        """Return the training sequences with these numbers, in the order of the text, whatever the seed."""
        return self._take(self._training, numbers)

    def held_out(self, n: int | None = None) -> Sentences:
        """Return `n` held-out sequences, evenly spaced over all of them; all, where there are no more or n is None."""
        if n is not None and n < 1:
            raise IsolossError(f"cannot take {n} held-out sequences: it must be at least 1")
        total = self.num_held_out
        n = total if n is None else min(n, total)
        # Evenly spaced rather than drawn: the same for every run and checkpoint, and over all documents.
        return self._take(self._held_out, torch.arange(n) * total // n)

    def describe(self) -> str:
        """Return the number of ids, the length, and how many sequences there are."""
        return (
            f"text in {self.vocab_size:,} token ids; sequences of {self.max_length} tokens, "
            f"{self.num_training:,} to train on and {self.num_held_out:,} held out"
        )

    def labeling(self, name: str) -> Labeling:
        """Raise an `IsolossError`: tasks of text are about labeled text."""
        raise IsolossError(
            f"task {name!r} is about what produced a sentence, which is unknown for text; for a task of text give "
            "isoloss transfer --task sst2 --data FOLDER, or a name of yours and --data FILE"
        )

    def tables(self) -> Stored:
        """Raise an `IsolossError`: the text and the tokenizer are files already."""
        paths, tokenizer = ", ".join(self.config.paths), self.config.tokenizer
        raise IsolossError(
            f"a corpus is not stored as one file: keep its text ({paths}) and its tokenizer ({tokenizer})"
        )

    def _permutation(self, seed: int, epoch: int) -> torch.Tensor:
        # Kept for the epoch: a permutation of millions of rows takes longer than a step.
        if self._order is None or self._order[0] != (seed, epoch):
            order = torch.randperm(self.num_training, generator=generator(seed, "corpus order", epoch))
            self._order = (seed, epoch), order
        return self._order[1]

    def _take(self, part: np.ndarray[Any, Any], rows: torch.Tensor) -> Sentences:
        # Of the memory map, only the pages of these rows are read.
        tokens = torch.from_numpy(part[rows.numpy()].astype(np.int64))
        return Sentences(tokens, torch.full((len(rows),), self.max_length))


class _Text:
    """The text and the tokenizer that a config names, and the config with its content filled in."""

    def __init__(self, config: CorpusConfig) -> None:
        check(config)
        number = tokenizers.trained_size(config.tokenizer)
        if number is None:
            self.tokenizer = tokenizers.load_tokenizer(config.tokenizer, needs=("mask", "pad"))
        paths = tuple(_absolute(path) for path in config.paths)
        self._sources = documents.open_sources(paths, column=config.column, split=config.split)
        if number is not None:
            texts = (text for _, text in documents.read(self._sources, config.max_documents))
            self.tokenizer = tokenizers.train_tokenizer(texts, vocab_size=number)
        # The texts themselves and not the files: a copy elsewhere, or in another format, is the same corpus.
        content = hashlib.sha256(tokenizers.serialized(self.tokenizer))
        for source in self._sources:
            content.update(source.content(config.max_documents).encode())
        local = Path(config.tokenizer).expanduser()
        tokenizer = str(local.resolve()) if local.exists() else config.tokenizer
        self.config = dataclasses.replace(config, paths=paths, tokenizer=tokenizer, content=content.hexdigest())

    def write(self, root: Path, progress: Progress | None) -> Path:
        """Return the folder below `root` with the tokens, written first, by one process, if they are not there."""
        names = ("content", "max_documents", "length", "held_out")
        identity = {"format": _FORMAT, **{name: getattr(self.config, name) for name in names}}
        folder = root / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        tokens = folder / "tokens"
        # Complete if there: it is renamed into place whole, so readers need no lock.
        if tokens.is_dir():
            return tokens
        with files.lock(folder, wait=True):
            # Left by a writer that was killed: under the lock, nobody else is writing.
            files.remove_unfinished(folder)
            # Another process may have written it while this one waited for the lock.
            if not tokens.is_dir():
                try:
                    with files.new_directory(tokens) as unfinished:
                        counts = self._write_parts(unfinished, progress)
                        meta = {**identity, "paths": self.config.paths, "counts": counts}
                        files.write_json(unfinished / "meta.json", meta)
                except OSError as error:
                    raise IsolossError(
                        f"cannot write the tokens in {folder}: {error.strerror or error} (ISOLOSS_CACHE names another "
                        "folder for them)"
                    ) from error
        return tokens

    def _texts(self) -> Iterator[str]:
        return (text for _, text in documents.read(self._sources, self.config.max_documents))

    def _write_parts(self, folder: Path, progress: Progress | None) -> dict[str, Any]:
        """Write the training and the held-out sequences; return how many documents and sequences each has."""
        names, length = ", ".join(self.config.paths), self.config.length
        # The content alone decides what is held out: equal documents are on one side, and one more moves few others.
        # Only hashes are kept: texts, which need not fit into memory, are read again for each part.
        digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in self._texts())
        hashes = np.fromiter((int.from_bytes(digest, "big") for digest in digests), dtype=np.uint64)
        # Sorted: the first are the smallest.
        distinct = np.unique(hashes)
        if len(distinct) < 2:
            raise IsolossError(
                f"{names} holds one distinct document (as is a .txt file of less than "
                f"{3 * documents.DOCUMENT_CHARACTERS:,} characters): it takes two, one to train on and one to hold out"
            )
        number = min(max(1, round(self.config.held_out * len(distinct))), len(distinct) - 1)
        last_held_out = distinct[number - 1]
        # Half the disk up to 65,536 ids, which most tokenizers stay below.
        dtype = np.dtype(np.uint16 if len(tokenizers.vocabulary(self.tokenizer)) <= 1 << 16 else np.int32)
        counts: dict[str, Any] = {}
        for part in _PARTS:
            chosen = (hashes <= last_held_out) == (part == "held_out")
            taken = (text for take, text in zip(chosen, self._texts(), strict=True) if take)
            before = sum(count["documents"] for count in counts.values())
            ids = tokenizers.encode(self.tokenizer, _reported(taken, before, len(hashes), progress))
            rows = packing.pack(ids, length, **packing.boundary_token_ids(self.tokenizer))
            n = packing.write_rows(folder / f"{part}.npy", rows, length, dtype)
            if n == 0:
                raise IsolossError(
                    f"the {part.replace('_', '-')} part of {names} has {chosen.sum()} of {len(hashes)} "
                    f"documents but not one sequence of {length} tokens: it takes more text, a shorter length or "
                    "another held-out fraction"
                )
            counts[part] = {"documents": int(chosen.sum()), "sequences": n}
        return counts


def _absolute(path: str) -> str:
    return str(hub_datasets.parse(path)) if hub_datasets.is_dataset(path) else str(Path(path).expanduser().resolve())


def _reported(texts: Iterable[str], before: int, total: int, progress: Progress | None) -> Iterator[str]:
    for number, text in enumerate(texts, before + 1):
        yield text
        if progress is not None and (number % _REPORT == 0 or number == total):
            progress(number, total)
