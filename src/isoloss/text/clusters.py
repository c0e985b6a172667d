"""Which sequences count as independent: what every error over sequences rests on.

Shapes: B sequences of a batch, T positions, N clusters of a stream, G blocks of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.sparse
import torch

from isoloss.errors import IsolossError
from isoloss.text.masking import IGNORED

_MIX = -7046029254386353131  # 2^64 over the golden ratio, odd, as a signed number: torch computes with no others
_FEWEST_TESTED = 10  # clusters: of fewer it cannot be told whether neighbors are alike
_ALIKE = 3.0  # standard errors; sequences in random order are as much alike once in 700 times
_FEWEST_BLOCKS = 5
_FEWEST_DOCUMENTS = 10  # that separators show, for an error over these


class Blocks(NamedTuple):
    """Clusters put together in blocks, over which an error is taken as well."""

    labels: torch.Tensor  # (N,) int64 the block of each cluster, from 0
    name: str  # what a block is called


class SequenceClusters:
    """The independent clusters of a stream of sequences, and whether even these depend on each other.

    Where batches have `documents`, a cluster is a document: the sequences of one id. Elsewhere equal sequences are one
    cluster, because a copy tells nothing new, and all others are a cluster each. That would be right for sequences
    drawn at random. Consecutive pieces of longer texts depend on each other, and `blocks` says so in either of two
    cases:

    - Separators show where documents begin: an end-of-text token inside sequences, or position ids that start again. A
      block is a document, with all sequences that begin in it.
    - Neighbors share more tokens than other sequences do. With x_i the set of tokens of cluster i as a unit vector over
      the vocabulary, less the mean, the products of neighbors `x_i x_{i+1}` have the mean `-sum_i x_i^2 / (N (N - 1))`
      in random order. Where theirs is above it by three standard errors, N clusters are cut into `max(5, sqrt(N) / 3)`
      blocks: batch means, whose blocks grow with N, so that dependence of any fixed reach ends up within them (Flegal
      and Jones 2010, "Batch means and spectral variance estimators in Markov chain Monte Carlo").

    Blocks cannot show how other texts differ from these.

    Example:
        >>> import torch
        >>> from isoloss.text.clusters import SequenceClusters
        >>> clusters = SequenceClusters()
        >>> clusters.add({"input_ids": torch.tensor([[5, 6], [7, 8], [5, 6]])})
        tensor([0, 1, 0])
        >>> len(clusters), clusters.sequences, clusters.name
        (2, 3, 'different sequences')
    """

    def __init__(self, config: Any = None, *, group_size: int = 1) -> None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._ends, self._begins = (_ids(getattr(text, f"{which}_token_id", None)) for which in ("eos", "bos"))
        # clusters in a row that count as one, where batches have no documents
        self._group_size = group_size
        # whether batches have `documents`; None before the first batch
        self.by_document: bool | None = None
        self.sequences = 0
        # the number of each cluster, by its document's id or the hash of its tokens
        self._numbers: dict[Hashable, int] = {}
        # the distinct tokens of each cluster, in the order of their numbers; where there are no documents
        self._tokens: list[np.ndarray[Any, Any]] = []
        # the document in which each cluster begins, as far as separators show
        self._documents: list[int] = []
        # documents that separators have shown
        self._begun = 0
        # whether the last sequence ends with a separator
        self._has_ended = False
        # whether a document has begun inside a sequence
        self._has_separators = False

    def __len__(self) -> int:
        return -(-len(self._numbers) // self._size)

    @property
    def _size(self) -> int:
        return 1 if self.by_document else self._group_size

    @property
    def name(self) -> str:
        """What clusters are called."""
        if self.by_document:
            return "documents" if len(self._numbers) < self.sequences else "sequences"
        kind = "sequences" if len(self._numbers) == self.sequences else "different sequences"
        return kind if self._size == 1 else f"groups of {self._size} {kind}"

    def add(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return (B,) int64: the cluster of each sequence, by its number in order of appearance."""
        documents, ids = batch.get("documents"), batch.get("input_ids")
        size = next(len(value) for value in (ids, batch.get("labels"), documents) if value is not None)
        first, self.sequences = self.sequences, self.sequences + size
        self.by_document = documents is not None
        if documents is not None:
            numbered = [self._number(key) for key in document_keys(documents, size)]
            return torch.tensor(numbered, dtype=torch.int64)
        # without token ids there is nothing to tell copies by: each sequence is a cluster
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return torch.tensor([self._number(-1 - row) for row in range(first, first + size)]) // self._size
        # copies of a text are one cluster whatever was masked in each
        ids, present = behind_masks(ids, batch.get("labels"), batch.get("attention_mask"))
        numbers = []
        inside, is_new = self._separators(ids, present, batch.get("position_ids"))
        for row, key in enumerate(sequence_hashes(ids, present).tolist()):
            # a document that begins at the start of a sequence is its own, one that begins inside is the next one's
            self._begun += int(is_new[row])
            number = self._number(key)
            numbers.append(number)
            # a new cluster, not a copy
            if number == len(self._tokens):
                self._tokens.append(np.unique(ids[row][present[row]].numpy()))
                self._documents.append(self._begun)
            self._begun += int(inside[row])
            self._has_separators |= bool(inside[row])
        return torch.tensor(numbers, dtype=torch.int64) // self._size

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _separators(
        self, ids: torch.Tensor, present: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B,) how many documents begin inside each sequence, and (B,) whether one begins at its start."""
        # 1 at the first token, on whichever side padding is
        places = present.cumsum(dim=1)
        has_positions = isinstance(positions, torch.Tensor) and positions.shape == ids.shape
        if has_positions:
            begins = (positions.cpu() == 0) & present  # type: ignore[union-attr]
        else:
            begins = torch.isin(ids, self._begins) & present
            # GPT-2 has one token for both, which counts once
            ends = torch.isin(ids, self._ends) & present & ~begins
            # what follows the end of a document begins another one
            begins[:, 1:] |= ends[:, :-1] & present[:, 1:]
        inside, at_start = (begins & (places > 1)).sum(dim=1), (begins & (places == 1)).any(dim=1)
        if has_positions:
            return inside, at_start
        is_last = present & (places == places[:, -1:])
        is_end = (torch.isin(ids, torch.cat([self._ends, self._begins])) & is_last).any(dim=1)
        before = torch.cat([torch.tensor([self._has_ended]), is_end[:-1]])
        self._has_ended = bool(is_end[-1]) if len(ids) else self._has_ended
        return inside, at_start | before

    def blocks(self) -> Blocks | None:
        """Return the blocks that the clusters depend on each other in; None where nothing says that they do."""
        if self._has_separators:
            labels = np.unique(self._documents[:: self._size], return_inverse=True)[1]
            # as many documents as clusters would be blocks of one cluster each
            if _FEWEST_DOCUMENTS <= labels[-1] + 1 < len(labels):
                return Blocks(torch.from_numpy(labels).long(), "documents found by their separators")
        return equal_blocks([len(self)]) if self.is_packed() else None

    def is_packed(self) -> bool:
        """Return whether neighbors share more tokens than other sequences do."""
        number = len(self._tokens)
        if number < _FEWEST_TESTED or self.by_document:
            return False
        sizes = np.array([len(tokens) for tokens in self._tokens])
        indices = np.unique(np.concatenate(self._tokens), return_inverse=True)[1]
        values = np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes)
        x = scipy.sparse.csr_matrix((values, indices, np.concatenate([[0], np.cumsum(sizes)])))
        mean = np.asarray(x.mean(axis=0)).ravel()
        # (x_i - mean) (x_j - mean) term by term, as x less its mean would not be sparse
        on_mean, square = x @ mean, float(mean @ mean)
        products = np.asarray(x[1:].multiply(x[:-1]).sum(axis=1)).ravel() - on_mean[1:] - on_mean[:-1] + square
        # the sum of (x_i - mean)^2, where x_i^2 is 1, or 0 without tokens
        total = float(((sizes > 0) - 2 * on_mean + square).sum())
        excess = products.mean() + total / (number * (number - 1))
        return bool(excess > _ALIKE * products.std(ddof=1) / math.sqrt(len(products)))


def behind_masks(ids: torch.Tensor, labels: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) the tokens behind the masks, which the labels have, and (B, T) whether each is present."""
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
        ids = torch.where(labels == IGNORED, ids, labels.to(ids.device))
    ids = ids.detach().cpu().long()
    is_plain = not isinstance(mask, torch.Tensor) or mask.shape != ids.shape
    return ids, torch.ones_like(ids, dtype=torch.bool) if is_plain else mask.cpu().bool()


def document_keys(documents: Any, size: int) -> Sequence[Hashable]:
    """Return the document id of each of `size` sequences; refuse anything else."""
    keys = documents.tolist() if hasattr(documents, "tolist") else documents
    is_row = isinstance(keys, Sequence) and not isinstance(keys, str) and len(keys) == size
    # `key != key` is NaN
    if not is_row or any(isinstance(key, list) or key is None or key != key for key in keys):
        raise IsolossError(f"`documents` must have one document id for each of the {size} sequences")
    return cast("Sequence[Hashable]", keys)


def equal_blocks(numbers: list[int]) -> Blocks:
    """Return blocks of consecutive clusters; of several streams, blocks at one place are one.

    Args:
        numbers: The clusters of each stream; of N in all, there are `max(5, sqrt(N) / 3)` blocks.
    """
    total = sum(numbers)
    count = max(_FEWEST_BLOCKS, round(math.sqrt(total) / 3))
    labels = torch.cat([torch.arange(number) * count // number for number in numbers])
    sizes = sorted({*labels.bincount().tolist()})
    words = " or ".join(f"{size:,}" for size in sizes) if len(sizes) < 3 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return Blocks(labels, f"blocks of {words} consecutive sequences ({total:,} in all), given these texts")


def sequence_hashes(ids: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return (B,) int64 hashes of the tokens (B, T) that are present; the same whatever padding there is."""
    # a token's place counts from the first that is present, so that padding on the left changes nothing. Products wrap
    indices = present.cumsum(dim=1) * _MIX
    return mixed((mixed(ids + indices) * present).sum(dim=1))


def mixed(keys: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers whose bits depend on all of the keys', by the steps of splitmix64."""
    # unlike in splitmix64, >> repeats the sign: the top bit is always 0, and a key and its complement give one number
    keys = (keys ^ (keys >> 30)) * -4658895280553007687
    keys = (keys ^ (keys >> 27)) * -7723592293110705685
    return keys ^ (keys >> 31)


def _ids(ids: int | list[int] | None) -> torch.Tensor:
    return torch.tensor([] if ids is None else [ids] if isinstance(ids, int) else list(ids), dtype=torch.int64)
