"""A finite training set: a language's first so many sentences, each epoch in a new order, each with masks of its own.

Nothing of it is stored where a language draws any sentence by its number: the order of an epoch is a permutation that
is computed at each position, and a fixed mask is a function of the sentence's number.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.api import Language, Sentences
from isoloss.languages.vectorized_sampler import uniforms
from isoloss.run_config import TrainConfig
from isoloss.text.masking import Batch, corrupt_by, mask_by

MOST_TOKENS = 1 << 27  # of a set that is held in memory: 1 GiB

_ROUNDS = 8  # of the Feistel network
_LEAST_BITS = 3  # of half a position: a network on fewer is far from all permutations

_Numbers = npt.NDArray[np.uint64]

# sets of languages whose sentences have no numbers, by (sentences, seed)
_held: weakref.WeakKeyDictionary[Language, dict[tuple[int, int], Sentences]] = weakref.WeakKeyDictionary()


class Examples(NamedTuple):
    """Sentences of a finite training set; `numbers` (n,) tells the fixed masks of each sentence apart."""

    sentences: Sentences
    numbers: torch.Tensor


def is_finite(config: TrainConfig) -> bool:
    """Return whether a run goes through a finite training set; a corpus without settings for that does so by itself."""
    return config.num_sentences > 0 or config.masked_copies > 0


def check_training_set(config: TrainConfig, language: Language) -> None:
    """Raise an `IsolossError` if `language` does not have the training set that `config` asks for."""
    num = config.num_sentences
    if language.num_training and num > language.num_training:
        raise IsolossError(
            f"num_sentences is {num:,}, and there are {language.num_training:,} sequences to train on: give at most "
            "these, or 0 for all"
        )
    if config.masked_copies and not num and not language.num_training:
        raise IsolossError(
            f"masked_copies is {config.masked_copies}, and {type(language).__name__} draws new sentences at every "
            "step: give num_sentences"
        )
    if not language.has_numbered_sentences and num * language.max_length > MOST_TOKENS:
        raise IsolossError(
            f"num_sentences is {num:,}, and {type(language).__name__} draws its sentences one after the other, so that "
            f"they are held in memory: at most {MOST_TOKENS // language.max_length:,} of {language.max_length} tokens"
        )


def examples(language: Language, config: TrainConfig, step: int) -> Examples:
    """Return the sentences of training step `step`, from 1: a pure function of the arguments.

    With B sentences in a step, step s takes the positions (s - 1) B to s B - 1 of an endless row of epochs. Each epoch
    has every sentence of the set once, or once with each of its fixed masks, in an order of its own.
    """
    num, copies = config.num_sentences or language.num_training, max(1, config.masked_copies)
    positions = np.arange((step - 1) * config.batch_size, step * config.batch_size)
    order = seeds.derive(config.seed, "training order")
    numbers = torch.from_numpy(shuffled(positions, num * copies, seed=order))
    seed = seeds.derive(config.seed, "training set")
    wanted = numbers // copies
    if language.has_numbered_sentences:
        return Examples(language.sentences_at(wanted, seed=seed), numbers)
    held = _held.setdefault(language, {})
    if (num, seed) not in held:
        drawn = language.sample(num, generator=torch.Generator().manual_seed(seed))
        held[num, seed] = Sentences(drawn.tokens.cpu(), drawn.lengths.cpu())
    lengths = held[num, seed].lengths[wanted]
    return Examples(Sentences(held[num, seed].tokens[wanted, : int(lengths.max())], lengths), numbers)


def masked_copy(drawn: Examples, language: Language, config: TrainConfig) -> Batch:
    """Return the sentences with their fixed masks, as `isoloss.text.masking.mask` and `corrupt` would make them."""
    width = drawn.sentences.tokens.shape[1]
    parts = ("masks", "shown", "others")  # which tokens, what is shown for them, and which other one
    masks, shown, others = (
        uniforms(seeds.derive(config.seed, "masked copies", part), drawn.numbers, width) for part in parts
    )
    batch = mask_by(drawn.sentences, language, config.objective, masks)
    return corrupt_by(batch, language, config.objective, shown, others)


def shuffled(positions: npt.NDArray[np.int64], size: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return (n,) int64: the numbers at (n,) positions of an endless row of permutations of 0 to size - 1.

    Epoch e, the positions e size to (e + 1) size - 1, has each number once. Its permutation is a Feistel network (Luby
    and Rackoff 1988) of 8 rounds on the next larger domain of 4^b numbers, keyed by the seed and e; a result beyond
    `size` is put in again until it is not (cycle walking, Black and Rogaway 2002). No table is made.

    Args:
        positions: At least 0, in any order.
        size: Numbers in an epoch, at least 1.
        seed: Decides the permutations.

    Example:
        >>> row = shuffled(np.arange(12), 6, seed=0)
        >>> sorted(row[:6]) == sorted(row[6:]) == [0, 1, 2, 3, 4, 5]
        True
    """
    half = np.uint64(max(_LEAST_BITS, ((size - 1).bit_length() + 1) // 2))
    epochs, found = (part.astype(np.uint64) for part in np.divmod(positions, size))
    keys = [_mixed(epochs ^ np.uint64(seeds.derive(seed, "round", index))) for index in range(_ROUNDS)]
    left = np.arange(len(found))
    while len(left):
        found[left] = _permuted(found[left], half, [key[left] for key in keys])
        left = left[found[left] >= size]
    return found.astype(np.int64)


def _permuted(numbers: _Numbers, half: np.uint64, keys: list[_Numbers]) -> _Numbers:
    """Return a permutation of the numbers of twice `half` bits, at (n,) of them, by the (n,) keys of each round."""
    low = (np.uint64(1) << half) - np.uint64(1)
    upper, lower = numbers >> half, numbers & low
    for key in keys:
        upper, lower = lower, upper ^ (_mixed(lower ^ key) & low)
    return (upper << half) | lower


def _mixed(numbers: _Numbers) -> _Numbers:
    """Return 64 well-mixed bits of each number: the finalizer of SplitMix64 (Steele et al. 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
