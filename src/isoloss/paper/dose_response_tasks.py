"""A pair of tasks: what the conditionals of later tokens need of a sentence's beginning, and what they do not.

The tokens after the first L depend on these only through `Pr(rest | first L)`. Two beginnings with the same such
distribution are twins: no conditional of a later token tells them apart.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import UNDEFINED, Labeling, Language, Sentences
from isoloss.lab.languages.exact import all_sentences

Array = NDArray[np.float64]


def needed(language: Language, length: str) -> Labeling:
    """Return the task `needed-L`: on which side of a cut the distribution of what follows the first L tokens lies.

    The cut is across the first principal axis of the distributions, where it halves the sentences as nearly as
    possible. The label is a function of what the conditionals of later tokens need.

    Args:
        language: A language that can be enumerated.
        length: L, from 1, below the length of a sentence.

    Raises:
        IsolossError: The language cannot be enumerated, or no sentence is longer than L.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.config import PCFGConfig
        >>> from isoloss.paper.dose_response_tasks import needed
        >>> language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=6).build()
        >>> needed(language, "2").label(language.sample(4, generator=torch.Generator().manual_seed(0))).tolist()
        [0, 0, 1, 1]
    """
    known = _beginnings(language, int(length))
    weights = known.probabilities
    centered = known.rest - weights @ known.rest
    axis = np.linalg.svd(np.sqrt(weights)[:, None] * centered, full_matrices=False)[2][0]
    scores = centered @ (axis * np.sign(axis[np.abs(axis).argmax()]))
    order = scores.argsort(kind="stable")
    half = 1 + int(np.abs(weights[order].cumsum()[:-1] - 0.5).argmin())
    labels = np.zeros(len(scores), np.int64)
    labels[order[half:]] = 1
    return known.labeling(("low", "high"), labels)


def spare(language: Language, length: str) -> Labeling:
    """Return the task `spare-L`: which of two twins the first L tokens are.

    Beginnings are paired with the nearest other one by the total variation between the distributions of what follows,
    the nearest pair first. The label is which of the two comes later in the order of tokens, which begins at the token
    that makes the classes most equal. No conditional of a later token needs it, but for the rest of that distance.
    Arguments and errors as for `needed`.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.config import PCFGConfig
        >>> from isoloss.paper.dose_response_tasks import spare
        >>> language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=6).build()
        >>> spare(language, "2").label(language.sample(4, generator=torch.Generator().manual_seed(0))).tolist()
        [0, 1, 1, 1]
    """
    known = _beginnings(language, int(length))
    pairs = np.array(twins(known.rest))

    def later(start: int) -> NDArray[np.int64]:
        place = np.lexsort((known.tokens - start).T[::-1] % language.vocab_size).argsort()
        labels = np.full(len(place), UNDEFINED)
        labels[pairs] = place[pairs].argsort(axis=1).argsort(axis=1)
        return labels

    def imbalance(labels: NDArray[np.int64]) -> float:
        return abs(float(known.probabilities[labels == 1].sum() - known.probabilities[labels == 0].sum()))

    return known.labeling(("first", "second"), min(map(later, range(language.vocab_size)), key=imbalance))


def twins(rest: Array) -> list[tuple[int, int]]:
    """Return pairs of different rows of distributions (n, m), the nearest first; of an odd number one is left out.

    Example:
        >>> import numpy as np
        >>> from isoloss.paper.dose_response_tasks import twins
        >>> twins(np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]))
        [(0, 2), (1, 3)]
    """
    first, second = np.triu_indices(len(rest), 1)
    distances = np.array([np.abs(rest[i + 1 :] - rest[i]).sum(axis=1) for i in range(len(rest) - 1)], dtype=object)
    free, pairs = np.ones(len(rest), bool), []
    for place in np.concatenate(distances).round(12).argsort(kind="stable"):
        i, j = int(first[place]), int(second[place])
        if free[i] and free[j]:
            free[[i, j]] = False
            pairs.append((i, j))
    return pairs


class _Beginnings(NamedTuple):
    """All n beginnings of sentences."""

    tokens: NDArray[np.int64]  # (n, L), sorted
    probabilities: Array  # (n,)
    rest: Array  # (n, m) the distribution of what follows each

    def labeling(self, classes: tuple[str, ...], labels: NDArray[np.int64]) -> Labeling:
        """Return the task whose label is a function of the beginning."""
        by_beginning = {tokens.tobytes(): int(label) for tokens, label in zip(self.tokens, labels, strict=True)}

        def label(sentences: Sentences) -> torch.Tensor:
            beginnings = np.ascontiguousarray(sentences.tokens[:, : self.tokens.shape[1]].cpu().numpy())
            return torch.tensor([by_beginning.get(tokens.tobytes(), UNDEFINED) for tokens in beginnings])

        return Labeling(classes=classes, label=label)


@functools.lru_cache(maxsize=1)  # a task is made several times, and the two tasks one after the other
def _beginnings(language: Language, length: int) -> _Beginnings:
    sentences, probabilities = all_sentences(language)
    longer = (sentences.lengths > length).numpy()
    if length < 1 or not longer.any():
        raise IsolossError(f"L is {length}; it must be at least 1 and below the number of tokens of a sentence")
    tokens = sentences.tokens.numpy()[longer]
    beginnings, row = np.unique(tokens[:, :length], axis=0, return_inverse=True)
    _, column = np.unique(tokens[:, length:], axis=0, return_inverse=True)
    joint = np.zeros((len(beginnings), column.max() + 1))
    joint[row, column] = probabilities.numpy()[longer]
    marginal = joint.sum(axis=1)
    return _Beginnings(beginnings, marginal / marginal.sum(), joint / marginal[:, None])
