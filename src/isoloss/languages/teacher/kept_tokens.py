"""What a teacher's language is made of: the checkpoint's most frequent tokens, where a sentence starts, the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.config import TeacherConfig
from isoloss.languages.teacher.scores import Scorer
from isoloss.text import documents, tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DRAWN = 256  # sequences drawn together for counting
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of a config.json: decide no probability


def vocab_size(model: Any) -> int:
    """Return the number of token ids that the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def special_token_ids(model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> frozenset[int]:
    """Return the ids that the model's config and the tokenizer call special: begin, end, padding, unknown, ..."""
    ids: list[int] = [] if tokenizer is None else list(tokenizer.all_special_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        ids += _ids(model, name)
    return frozenset(ids)


def find_start(model: Any, start_id: int | None, source: str) -> int:
    """Return the id that sentences begin after: the one given, else the config's bos, eos or decoder start."""
    size = vocab_size(model)
    if start_id is None:
        named = [*_ids(model, "bos_token_id"), *_ids(model, "eos_token_id"), *_ids(model, "decoder_start_token_id")]
        if not named:
            raise IsolossError(
                f"{source} names no token that a text begins with: give its id as start_id, from 0 to {size - 1}"
            )
        start_id = named[0]
    if not 0 <= start_id < size:
        raise IsolossError(f"{source}: start_id is {start_id}; the model's ids are from 0 to {size - 1}")
    return start_id


def choose(
    model: Any, tokenizer: PreTrainedTokenizerFast | None, start_id: int, config: TeacherConfig
) -> tuple[int, ...]:
    """Return the ids that are most frequent in the config's text or, where it names none, in samples of the model."""
    if config.corpus:
        assert tokenizer is not None
        counts = count_text(config.corpus, tokenizer, vocab_size(model))
    else:
        counts = count_samples(model, start_id, sequences=config.samples, length=config.length, seed=config.seed)
    return most_frequent(counts, special_token_ids(model, tokenizer), config.vocab_size)


def count_text(paths: Iterable[str], tokenizer: PreTrainedTokenizerFast, size: int) -> np.ndarray:
    """Return (size,) int64: how often each id occurs in text files, as the tokenizer reads them."""
    counts = np.zeros(size, dtype=np.int64)
    for ids in tokenizers.encode(tokenizer, (text for _, text in documents.read_documents(paths))):
        if len(ids) and ids.max() >= size:
            raise IsolossError(f"the tokenizer gives the id {ids.max()}; the teacher's ids are from 0 to {size - 1}")
        counts += np.bincount(ids, minlength=size)
    return counts


def count_samples(model: Any, start_id: int, *, sequences: int, length: int, seed: int) -> np.ndarray:
    """Return (V,) int64: how often each id occurs in sequences that the unrestricted model draws."""
    size = vocab_size(model)
    scorer = Scorer(model, start_id, torch.arange(size))
    counts = np.zeros(size, dtype=np.int64)
    for first in range(0, sequences, _DRAWN):
        generator = seeds.generator(seed, "teacher tokens", first)
        uniforms = torch.rand(min(_DRAWN, sequences - first), length, generator=generator, dtype=torch.float64)
        counts += np.bincount(scorer.draw(uniforms).flatten().numpy(), minlength=size)
    return counts


def most_frequent(counts: np.ndarray, specials: Iterable[int], most: int) -> tuple[int, ...]:
    """Return the ids of the `most` largest counts, largest first, smaller ids first among equals.

    Special ids and those that do not occur are left out, so that there may be fewer.

    Example:
        >>> most_frequent(np.array([9, 2, 5, 2, 0]), {0}, 3)
        (2, 1, 3)
    """
    counts = counts.copy()
    counts[[index for index in specials if 0 <= index < len(counts)]] = 0
    order = np.argsort(-counts, kind="stable")[:most]
    return tuple(int(index) for index in order if counts[index] > 0)


def content(model: Any, checkpoint: str) -> str:
    """Return the SHA-256 of a checkpoint that was just loaded: its weights, and what its config.json decides.

    The weights count as loaded, by name, in float32: a checkpoint in one file or in several gives the same.
    """
    from transformers.utils import cached_file

    document = json.loads(Path(cached_file(checkpoint, "config.json")).read_text(encoding="utf-8"))
    kept = {key: value for key, value in document.items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _ids(model: Any, name: str) -> list[int]:
    """Return the ids that a config gives under a name: none, one or several."""
    value = getattr(model.config, name, None)
    return [] if value is None else [int(index) for index in value] if isinstance(value, list) else [int(value)]
