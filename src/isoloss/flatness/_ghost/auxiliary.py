"""Sequences whose tokens alone are read: control variates whose mean these give, without a forward pass.

Shapes: B sequences of a batch, T positions, V vocabulary, d the width of the embeddings, r of its directions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._batches import as_tensors
from isoloss.model_checks import architecture, input_embeddings
from isoloss.text.clusters import SequenceClusters, document_keys, mixed, sequence_hashes
from isoloss.text.masking import IGNORED

_DIRECTIONS = 16
_NONE = 1e-12  # of the mean square: a direction with less variance is rounding


_MOST = 1 << 22  # counts in a table: of a larger vocabulary several pairs share one
_PRIOR = 5.0  # how many tokens the frequencies of single ones count for, beside those that follow a token
_UNSEEN = 0.5  # occurrences of a token beyond those that were counted


class Bigrams:
    """Counts of tokens that follow each other, in two halves of some sequences.

    Which half a sequence belongs to is decided by its tokens, or by its document where it has one. It is scored by the
    counts of the other half, so that its own tokens are never among them: those that were counted and those that were
    not are scored alike.

    With c_ij how often j follows i there and u_j the frequency of j (each token once more by a half), the probability
    is (c_ij + 5 u_j) / (c_i + 5). Beyond 4 million pairs, several share a count.

    Example:
        >>> import torch
        >>> from isoloss.flatness._ghost.auxiliary import Bigrams
        >>> bigrams, ids = Bigrams(3), torch.tensor([[0, 1, 0, 1], [2, 2, 2, 2]])
        >>> for document in range(8):
        ...     bigrams.add(ids, None, torch.tensor([document, document]))
        >>> bigrams.log_probability(ids, None, torch.tensor([8, 8])).exp()
        tensor([0.4505, 0.6667], dtype=torch.float64)
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._size = min(vocabulary**2, _MOST)
        # of pairs, first and second tokens; the counts of the second half stand behind the counts of the first
        # float32 counts up to 2^24 exactly, in half of the memory that is largest here
        pairs = torch.zeros(2 * self._size)
        self._counts = [pairs, *(torch.zeros(2 * vocabulary, dtype=torch.float64) for _ in range(2))]

    def add(self, ids: torch.Tensor, present: torch.Tensor | None, documents: torch.Tensor | None) -> None:
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
        # which half must not depend on how the sequence is padded or in which order it is read, or the pool and the
        # measured sequences would be scored by other counts
        keys = sequence_hashes(ids, present) if documents is None else mixed(documents)
        # any bit will do: all are mixed
        return keys >> 40 & 1, ids[:, :-1], ids[:, 1:], present[:, :-1] & present[:, 1:]

    def _indices(
        self, halves: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where in the counts of pairs, first and second tokens those (B, T - 1) of these halves stand, flat."""
        pairs = first * self._vocabulary + second
        if self._size < self._vocabulary**2:
            # pairs that share a count make the score worse, not wrong: any function of the tokens is a control
            pairs %= self._size
        ends = halves[:, None] * self._vocabulary
        return (halves[:, None] * self._size + pairs).flatten(), (ends + first).flatten(), (ends + second).flatten()


@dataclass(frozen=True, eq=False)
class AuxiliarySample:
    """The mean features of an auxiliary sample of sequences, for control variates by two-phase sampling.

    A sequence's features are the mean log-probability of its tokens, each after the one before it
    (`Bigrams`), and its mean input embedding along the at most 16 directions of the
    largest variance between clusters. A masked token counts as the token that it was. Less the auxiliary sample's mean,
    the features are control variates: their expectation is 0 up to the error of that mean, which is known. This is the
    regression estimator of double sampling (Neyman 1938; Cochran, Sampling Techniques, chapter 12): the part of the
    variance that the features explain is divided by the size of the auxiliary sample, not by the number of measured
    sequences. Draw the auxiliary sample from the same distribution as the measured sequences, which it may contain.
    """

    embedding: torch.Tensor  # (V, d) the model's input embeddings
    bigrams: Bigrams  # counts of the auxiliary sample's pairs of tokens
    # (1 + d,) float64, the mean over the auxiliary sample's sequences: of the log-probability, and of the embedding
    mean: torch.Tensor
    directions: torch.Tensor  # (1 + d, 1 + r) float64, orthonormal, the log-probability first
    covariance: torch.Tensor  # (1 + r, 1 + r) float64, of the error of the mean along each direction
    num_sequences: int  # how many were read
    by_document: bool  # whether errors count documents as independent, not sequences
    seconds: float  # the time that it took
    # how many of the features are used, the first ones; None: as many as make the error smallest. It is the same for
    # models that are compared, so that what they have in common cancels
    number: int | None = None

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Self:
        """Read an auxiliary sample, twice; what can be iterated over only once is held in memory."""
        begun = time.perf_counter()
        if isinstance(batches, Mapping):
            raise IsolossError("the auxiliary sample is a single batch; pass an iterable of batches, e.g. [batch]")
        # counts first, then scores by them
        if isinstance(batches, Iterator):
            batches = list(batches)
        weight = input_embeddings(model)
        if weight is None:
            raise IsolossError(f"{type(model).__name__} has no input embeddings, by which an auxiliary sample is read")
        bigrams, kinds = Bigrams(len(weight)), set()
        clusters, numbers = SequenceClusters(getattr(architecture(model), "config", None)), []
        for batch in as_tensors(batches):
            tokens = _Tokens.of(batch, len(weight))
            bigrams.add(tokens.ids, tokens.present, tokens.documents)
            kinds.add(tokens.documents is not None)
            numbers.append(clusters.add(batch))
        if len(kinds) == 2:
            raise IsolossError("all batches of the auxiliary sample have `documents`, or none has")
        if len(clusters) < 2:
            raise IsolossError(
                f"the auxiliary sample has {len(clusters)} independent sequences or documents; it needs at least 2"
            )
        blocks = clusters.blocks()
        if blocks is not None:
            numbers = [blocks.labels[each] for each in numbers]
        sizes = torch.cat(numbers).bincount()
        number = len(sizes)
        values = (_values(_Tokens.of(batch, len(weight)), weight, bigrams) for batch in as_tensors(batches))
        sums, moments = _sums(zip(numbers, values, strict=True), sizes)
        mean = sums[:-1] / sums[-1]
        # the moments were summed before the mean was known
        centering = torch.cat([torch.eye(len(mean), dtype=torch.float64), -mean[None]])  # a cluster's sum less n means
        scatter = centering.T @ moments @ centering
        directions = _directions(scatter, float(moments.diagonal()[1:-1].sum()))
        return cls(
            embedding=weight,
            bigrams=bigrams,
            mean=mean,
            directions=directions,
            covariance=directions.T @ scatter @ directions * (number / (number - 1)) / sums[-1].square(),
            num_sequences=int(sums[-1]),
            by_document=kinds == {True},
            seconds=time.perf_counter() - begun,
        )

    def features(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return (B, 1 + r) float64 on the CPU: each sequence's features minus the auxiliary sample's mean."""
        tokens = _Tokens.of(batch, len(self.embedding))
        return (_values(tokens, self.embedding, self.bigrams) - self.mean) @ self.directions


@dataclass(frozen=True)
class _Tokens:
    """The tokens (B, T) of a batch on the CPU, which of them are no padding (None: all), and their documents (B,)."""

    ids: torch.Tensor
    present: torch.Tensor | None
    documents: torch.Tensor | None

    @classmethod
    def of(cls, batch: Mapping[str, Any], vocabulary: int) -> Self:
        """Return a batch's tokens, masked ones as the labels show them."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise IsolossError(
                "a batch has no `input_ids` of shape (sequences, positions), by which an auxiliary sample is read"
            )
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
            ids = torch.where(labels == IGNORED, ids, labels)
        ids = ids.cpu()
        if ids.numel() and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocabulary:
            outside = low if low < 0 else high
            raise IsolossError(f"a token is {outside}; the model has embeddings for 0 to {vocabulary - 1}")
        documents = batch.get("documents")
        if documents is not None:
            documents = torch.tensor([_number(key) for key in document_keys(documents, len(ids))], dtype=torch.int64)
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or bool(mask.all()):
            return cls(ids, None, documents)
        return cls(ids, mask.bool().cpu(), documents)


def _number(key: Hashable) -> int:
    """Return a document's id as a number: itself, or a hash that is the same in every process."""
    if isinstance(key, int) and key.bit_length() < 64:
        return key
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little", signed=True)


def _sums(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], sizes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums (1 + d + 1,) and products of the clusters' values and sizes, holding no more than open clusters.

    Args:
        batches: The cluster (B,) of each sequence, and its values (B, 1 + d).
        sizes: The sequences of each cluster, by which it is known when one is complete.
    """
    sums, moments = torch.zeros(1), torch.zeros(1)
    remaining = sizes.clone()
    open_clusters: dict[int, torch.Tensor] = {}
    for numbers, values in batches:
        clusters, index = torch.unique(numbers, return_inverse=True)
        rows = values.new_zeros(len(clusters), values.shape[1] + 1)
        rows.index_add_(0, index, F.pad(values, (0, 1), value=1.0))
        for row, cluster in enumerate(clusters.tolist()):
            if (before := open_clusters.pop(cluster, None)) is not None:
                rows[row] += before
        remaining[clusters] -= index.bincount()
        # moments are sums of squares of whole clusters, so those that later batches go on with are held back
        is_open = remaining[clusters] > 0
        open_clusters |= dict(zip(clusters[is_open].tolist(), rows[is_open], strict=True))
        rows = rows[~is_open]
        sums, moments = sums + rows.sum(dim=0), moments + rows.T @ rows
    return sums, moments


def _directions(scatter: torch.Tensor, square: float) -> torch.Tensor:
    """Return (1 + d, 1 + r): the first unit vector, and the directions of largest variance among the others."""
    variances, vectors = torch.linalg.eigh(scatter[1:, 1:])
    variances, vectors = variances.flip(0)[:_DIRECTIONS], vectors.flip(1)[:, :_DIRECTIONS]
    directions = F.pad(vectors[:, variances > _NONE * square], (1, 0, 1, 0))
    directions[0, 0] = 1
    return directions


@torch.no_grad()
def _values(tokens: _Tokens, weight: torch.Tensor, bigrams: Bigrams) -> torch.Tensor:
    """Return (B, 1 + d) float64 on the CPU: each sequence's log-probability and mean embedding."""
    ids, present = tokens.ids.to(weight.device), tokens.present
    if present is None:
        # a bag, so that no embeddings (B, T, d) are formed
        means = F.embedding_bag(ids, weight, mode="mean")
    else:
        counts = present.sum(dim=1)
        starts = (counts.cumsum(dim=0) - counts).to(weight.device)
        means = F.embedding_bag(ids[present.to(weight.device)], weight, starts, mode="mean")
    logs = bigrams.log_probability(tokens.ids, present, tokens.documents)
    return torch.cat([logs[:, None], means.cpu().double()], dim=1)  # in this order: not every device has float64
