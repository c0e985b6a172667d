"""How probable a sequence is to a bigram model of the other half of many sequences.

Shapes: B sequences of a batch, T positions, V vocabulary.
"""

from __future__ import annotations

import torch

_MOST = 1 << 22  # counts in a table: of a larger vocabulary several pairs share one
_PRIOR = 5.0  # how many tokens the frequencies of single ones count for, beside those that follow a token
_UNSEEN = 0.5  # occurrences of a token beyond those that were counted
_MIX = -7046029254386353131  # 2^64 over the golden ratio, odd, as a signed number


class Bigrams:
    """Counts of tokens that follow each other, in two halves of some sequences.

    Which half a sequence belongs to is decided by its tokens, or by its document where it has one. It is scored by the
    counts of the other half, so that its own tokens are never among them: those that were counted and those that were
    not are scored alike.

    With c_ij how often j follows i there and u_j the frequency of j (each token once more by a half), the probability
    is (c_ij + 5 u_j) / (c_i + 5). Beyond 4 million pairs, several share a count.

    Example:
        >>> bigrams, ids = Bigrams(3), torch.tensor([[0, 1, 0, 1], [2, 2, 2, 2]])
        >>> for document in range(8):
        ...     bigrams.add(ids, None, torch.tensor([document, document]))
        >>> bigrams.log_probability(ids, None, torch.tensor([8, 8])).exp()
        tensor([0.4505, 0.6667], dtype=torch.float64)
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._size = min(vocabulary**2, _MOST)
        # of pairs, first and second tokens, those of the second half behind those of the first
        pairs = torch.zeros(2 * self._size)
        self._counts = [pairs, *(torch.zeros(2 * vocabulary, dtype=torch.float64) for _ in range(2))]

    def add(self, ids: torch.Tensor, present: torch.Tensor | None, documents: torch.Tensor | None) -> None:
        """Count the pairs of sequences."""
        halves, first, second, both = self._split(ids, present, documents)
        for counts, indices in zip(self._counts, self._indices(halves, first, second), strict=True):
            counts.index_add_(0, indices, both.to(counts.dtype).flatten())

    def log_probability(
        self, ids: torch.Tensor, present: torch.Tensor | None, documents: torch.Tensor | None
    ) -> torch.Tensor:
        """Return (B,) float64: the mean over pairs of the log-probability of the second token; 0 where there is none.

        Arguments as for `add`.
        """
        halves, first, second, both = self._split(ids, present, documents)
        pairs, firsts, seconds = self._counts
        frequency = (seconds + _UNSEEN).view(2, -1)
        frequency = (_PRIOR * frequency / frequency.sum(dim=1, keepdim=True)).flatten()
        of_pair, of_first, of_second = self._indices(1 - halves, first, second)
        logs = torch.log(pairs.index_select(0, of_pair) + frequency.index_select(0, of_second))
        logs -= torch.log(firsts + _PRIOR).index_select(0, of_first)
        return (logs.view(both.shape) * both).sum(dim=1) / both.sum(dim=1).clamp(min=1)

    def _split(
        self, ids: torch.Tensor, present: torch.Tensor | None, documents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return halves (B,), first and second tokens (B, T - 1) of pairs, and which pairs there are."""
        if present is None:
            present = torch.ones_like(ids, dtype=torch.bool)
        ids = ids * present
        if documents is None:
            indices = present.cumsum(dim=1) * _MIX  # wraps around; the same whatever padding there is
            keys = (_mixed(ids + indices) * present).sum(dim=1)
        else:
            keys = documents.cpu()
        return _mixed(keys) >> 40 & 1, ids[:, :-1], ids[:, 1:], present[:, :-1] & present[:, 1:]

    def _indices(
        self, halves: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where in the counts of pairs, first and second tokens those (B, T - 1) of these halves stand, flat."""
        pairs = first * self._vocabulary + second
        if self._size < self._vocabulary**2:
            pairs %= self._size
        ends = halves[:, None] * self._vocabulary
        return (halves[:, None] * self._size + pairs).flatten(), (ends + first).flatten(), (ends + second).flatten()


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers whose bits depend on all of the keys', by the steps of splitmix64."""
    keys = (keys ^ (keys >> 30)) * -4658895280553007687
    keys = (keys ^ (keys >> 27)) * -7723592293110705685
    return keys ^ (keys >> 31)
