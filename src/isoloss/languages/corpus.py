"""Real text as a language: packed sequences of one length, served by position, whose probabilities nobody knows.

Shapes: n sequences, T tokens in each (`CorpusConfig.length`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.languages.api import Labeling, Language, Sentences, Stored
from isoloss.languages.config import CorpusConfig
from isoloss.seeds import generator
from isoloss.text import documents, hub_datasets, tokenizers
from isoloss.text.packing import PARTS, PackedText, Progress, boundary_token_ids, open_tokens
from isoloss.text.sentences import Start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Corpus(Language):
    """Real text, packed: all sentences have the same length.

    A fraction of the distinct documents, those whose content has the smallest hashes, is held out (at least one, and
    all but one at most); equal documents are in one part. The tokens of each part's documents are put end to end, in
    order, and cut into sequences of `length`: [CLS], length - 2 tokens, [SEP], where the tokenizer has these two, else
    `length` tokens. What is left at the end of a part, less than one sequence, is dropped, so no sentence is padded.

    Attributes:
        config: The resolved config.
        tokenizer: The tokenizer, to be kept with checkpoints.
        num_training: Sequences to train on.
        num_held_out: Sequences held out.
        vocab_size: Number of the tokenizer's ids, the special ones included; the same as `model_vocab_size`.
        special_token_ids: All of the tokenizer's special tokens, the unknown one included.

    The other attributes are those of `Language`.
    """

    tokenizer: PreTrainedTokenizerFast

    def __init__(self, config: CorpusConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self._config = config
        self.tokenizer = tokenizer
        self._training, self._held_out = (open_tokens(folder / f"{part}.npy", config.length) for part in PARTS)
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
            progress: Called with the number of documents tokenized and that of all, every 100 documents.

        Raises:
            IsolossError: Missing or unreadable text; text or a tokenizer other than those that `config.content`
                was taken from; a tokenizer without mask or padding token; less than one sequence to train on or to
                hold out.
        """
        resolved, text = _open(config)
        if config.content not in ("", resolved.content):
            raise IsolossError(
                f"the text ({', '.join(config.paths)}) or the tokenizer ({config.tokenizer}) has changed since the run "
                f"began: the content was {config.content[:16]} and is {resolved.content[:16]}; bring the former back, "
                "or begin a new run"
            )
        root = cache or Path(os.environ.get("ISOLOSS_CACHE") or "~/.cache/isoloss").expanduser()
        return cls(resolved, text.tokenizer, text.write(root / "corpora", progress))

    @staticmethod
    def resolve(config: CorpusConfig) -> CorpusConfig:
        """Return `config` with absolute paths and with `content` filled in, so that it means the same text anywhere."""
        return _open(config)[0]

    @property
    def start(self) -> Start:
        """[CLS] (and [SEP] at the end) of the packed sequences; without them the tokenizer's bos, else the mask."""
        around = boundary_token_ids(self.tokenizer)
        if around["first"] is not None:
            return Start(around["first"], around["last"], is_in_sentences=True)
        if self.tokenizer.bos_token_id is not None:
            return Start(int(self.tokenizer.bos_token_id), None, is_in_sentences=False)
        return super().start

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
        """Return `n` held-out sequences, evenly spaced over all of them; all, where there are no more or n is None."""
        if n is not None and n < 1:
            raise IsolossError(f"cannot take {n} held-out sequences: it must be at least 1")
        total = self.num_held_out
        n = total if n is None else min(n, total)
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
            f"task {name!r} is about what produced a sentence, which nobody knows of text; for a task of text give "
            "isoloss transfer --task sst2 --data FOLDER, or a name of yours and --data FILE"
        )

    def tables(self) -> Stored:
        """Raise an `IsolossError`: the text and the tokenizer are files already."""
        paths, tokenizer = ", ".join(self.config.paths), self.config.tokenizer
        raise IsolossError(
            f"a corpus is not stored as one file: keep its text ({paths}) and its tokenizer ({tokenizer})"
        )

    def _permutation(self, seed: int, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != (seed, epoch):
            order = torch.randperm(self.num_training, generator=generator(seed, "corpus order", epoch))
            self._order = (seed, epoch), order
        return self._order[1]

    def _take(self, part: np.ndarray[Any, Any], rows: torch.Tensor) -> Sentences:
        tokens = torch.from_numpy(part[rows.numpy()].astype(np.int64))
        return Sentences(tokens, torch.full((len(rows),), self.max_length))


def _open(config: CorpusConfig) -> tuple[CorpusConfig, PackedText]:
    check(config)
    tokenizer = tokenizers.load_tokenizer(config.tokenizer, needs=("mask", "pad"))
    local = Path(config.tokenizer).expanduser()
    paths = tuple(_absolute(path) for path in config.paths)
    sources = documents.open_sources(paths, column=config.column, split=config.split)
    content = hashlib.sha256(tokenizers.serialized(tokenizer))
    for source in sources:
        content.update(source.content(config.max_documents).encode())
    resolved = dataclasses.replace(
        config,
        paths=paths,
        tokenizer=str(local.resolve()) if local.exists() else config.tokenizer,
        content=content.hexdigest(),
    )
    return resolved, PackedText(
        paths=paths,
        sources=sources,
        tokenizer=tokenizer,
        content=resolved.content,
        length=config.length,
        held_out=config.held_out,
        max_documents=config.max_documents,
    )


def _absolute(path: str) -> str:
    return str(hub_datasets.parse(path)) if hub_datasets.is_dataset(path) else str(Path(path).expanduser().resolve())
