"""A finite training set: each epoch in a new order, each sentence with masks of its own.

It has a language's first so many sentences; of a text, as many sequences, evenly spaced.

Nothing of it is stored where a language draws any sentence by its number: the order of an epoch is a permutation that
is computed at each position, and a fixed mask is a function of the sentence's number.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import NamedTuple

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.run_config import TrainConfig
from isoloss.text.masking import Batch, corrupt_by, mask_by

MOST_TOKENS = 1 << 27  # of a set that is held in memory: 1 GiB

# sets of languages whose sentences have no numbers, by (sentences, seed); freed with their language
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
    from isoloss.lab.training.permutation import shuffled

    num, copies = config.num_sentences or language.num_training, max(1, config.masked_copies)
    positions = np.arange((step - 1) * config.batch_size, step * config.batch_size)
    order = seeds.derive(config.seed, "training order")
    numbers = torch.from_numpy(shuffled(positions, num * copies, seed=order))
    seed = seeds.derive(config.seed, "training set")
    # a sentence has `copies` numbers in a row, one for each of its fixed masks
    wanted = numbers // copies
    if language.num_training:
        # evenly spaced over a text, whose first sequences are of a few documents
        wanted = wanted * language.num_training // num
    if language.has_numbered_sentences:
        return Examples(language.sentences_at(wanted, seed=seed), numbers)
    held = _held.setdefault(language, {})
    if (num, seed) not in held:
        drawn = language.sample(num, generator=torch.Generator().manual_seed(seed))
        held[num, seed] = Sentences(drawn.tokens.cpu(), drawn.lengths.cpu())
    lengths = held[num, seed].lengths[wanted]
    return Examples(Sentences(held[num, seed].tokens[wanted, : int(lengths.max())], lengths), numbers)


def sentences(language: Language, config: TrainConfig, n: int) -> Sentences | None:
    """Return `n` sentences of the training set, in the order of an epoch; all, where there are no more.

    None where there is no training set: every step draws new sentences.
    """
    if not (num := config.num_sentences or language.num_training):
        return None
    once = dataclasses.replace(config, num_sentences=num, masked_copies=0, batch_size=min(n, num))
    return examples(language, once, 1).sentences


def masked_copy(drawn: Examples, language: Language, config: TrainConfig) -> Batch:
    """Return the sentences with their fixed masks, as `isoloss.text.masking.mask` and `corrupt` would make them."""
    from isoloss.lab.languages.alias_sampling import uniforms

    def draws(what: str) -> torch.Tensor:
        seed = seeds.derive(config.seed, "masked copies", what)
        return uniforms(seed, drawn.numbers.numpy(), drawn.sentences.tokens.shape[1])

    batch = mask_by(drawn.sentences, language, config.objective, draws("masks"))
    if config.objective.corruption == "mask":
        return batch
    return corrupt_by(batch, language, config.objective, draws("shown"), draws("others"))
