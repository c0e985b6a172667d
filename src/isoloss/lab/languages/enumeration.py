"""Every sentence of a small language with its probability, for exact sums instead of estimates from a sample.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.api import Language, Sentences
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.text.masking import maskable

MOST_STRINGS = 1 << 16  # of tokens, sentences or not: the most that are enumerated
_BATCH = 8192  # strings whose probabilities are computed at once


def why_not_enumerable(language: Language) -> str | None:
    """Return why the sentences of a language cannot be enumerated, or None if they can."""
    name = type(language).__name__
    if isinstance(language, WithSpecialTokens):
        return why_not_enumerable(language.inner)
    if not language.is_exact:
        return f"{name} has no exact probabilities to sum over"
    count = sum(language.vocab_size**length for length in _possible_lengths(language))
    if count > MOST_STRINGS:
        told = f"{count:,}" if count < 10**9 else f"about 10^{math.log10(count):.0f}"
        return f"{name} has {told} strings of tokens, more than the {MOST_STRINGS:,} that can be enumerated"
    return None


def all_sentences(language: Language) -> tuple[Sentences, torch.Tensor]:
    """Return all n sentences with a probability above 0, and (n,) float64 their probabilities, which sum to 1.

    They are on the CPU, sorted by length and then by tokens. The language's `log_prob` may include the probability of
    the length or not: probabilities are normalized within each length, then multiplied by `length_probs`.

    Raises:
        IsolossError: The language has no exact probabilities, or more than 65,536 strings.

    Example:
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> sentences, probabilities = all_sentences(Brackets(2))
        >>> sentences.tokens.tolist(), probabilities.tolist()
        ([[0, 1], [1, 0]], [0.5, 0.5])
    """
    if reason := why_not_enumerable(language):
        raise IsolossError(reason)
    exact = language.exact().to("cpu", torch.float64)
    if isinstance(exact, WithSpecialTokens):
        inside, inner_probabilities = all_sentences(exact.inner)
        return exact.frame(inside), inner_probabilities
    possible, length_probs = _possible_lengths(exact), exact.length_probs
    all_tokens, all_lengths, probabilities = [], [], []
    for length in possible:
        tokens, logs = [], []
        places = exact.vocab_size ** torch.arange(length - 1, -1, -1)
        for codes in torch.split(torch.arange(exact.vocab_size**length), _BATCH):
            strings = codes[:, None] // places % exact.vocab_size
            strings = strings[exact.is_possible(strings, torch.full_like(codes, length))]
            if len(strings):
                tokens.append(strings)
                logs.append(exact.log_prob(strings, torch.full((len(strings),), length)))
        own = torch.cat(tokens)
        all_tokens.append(torch.nn.functional.pad(own, (0, possible[-1] - length), value=exact.pad_id))
        all_lengths.append(torch.full((len(own),), length))
        probabilities.append(length_probs[length] * torch.cat(logs).softmax(dim=0))
    return Sentences(torch.cat(all_tokens), torch.cat(all_lengths)), torch.cat(probabilities)


def masked_sentences(language: Language) -> tuple[Sentences, torch.Tensor, torch.Tensor]:
    """Return every distinct sentence with one masked token, with the probability of drawing it under `masking="one"`.

    A sentence x is drawn, then one of its k(x) non-special tokens, uniformly. So a masked sentence has the probability
    sum_x Pr(x) / k(x), over the sentences x that agree with it everywhere but at the masked token.

    Returns:
        The sentences, with the lowest possible token at the masked position; (n,) int64 masked positions; (n,) float64
        probabilities, which sum to 1.

    Raises:
        IsolossError: As for `all_sentences`.

    Example:
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> sentences, positions, probabilities = masked_sentences(Brackets(2))
        >>> sentences.tokens.tolist(), positions.tolist(), probabilities.tolist()
        ([[1, 0], [0, 1], [0, 1], [1, 0]], [0, 0, 1, 1], [0.25, 0.25, 0.25, 0.25])
    """
    if isinstance(language, WithSpecialTokens):
        inside, inner_positions, inner_probabilities = masked_sentences(language.inner)
        return language.frame(inside), inner_positions + 1, inner_probabilities
    sentences, probabilities = all_sentences(language)
    candidates = maskable(sentences, language)
    rows, positions = candidates.nonzero(as_tuple=True)
    width = sentences.tokens.shape[1]
    # a number for each string without its masked token, then one for each (length, position, string)
    values = sentences.tokens.masked_fill(~sentences.present(), 0)
    values *= language.vocab_size ** torch.arange(width - 1, -1, -1)
    others = values.sum(dim=1)[rows] - values[rows, positions]
    keys = (sentences.lengths[rows] * width + positions) * language.vocab_size**width + others
    _, first, group = np.unique(keys.numpy(), return_index=True, return_inverse=True)
    weights = torch.zeros(len(first), dtype=torch.float64)
    weights.index_add_(0, torch.from_numpy(group), (probabilities / candidates.sum(dim=1))[rows])
    kept = rows[first]
    return Sentences(sentences.tokens[kept], sentences.lengths[kept]), positions[first], weights


def _possible_lengths(language: Language) -> list[int]:
    lengths: list[int] = language.exact().length_probs.nonzero().flatten().tolist()
    return lengths
