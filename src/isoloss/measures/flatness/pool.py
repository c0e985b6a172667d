"""Sequences whose tokens alone are read: control variates whose mean these give, without a forward pass.

Shapes: B sequences of a batch, T positions, V vocabulary, d the width of the embeddings, r directions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from isoloss.errors import IsolossError
from isoloss.languages.masking import IGNORED
from isoloss.measures.flatness.tally import Clusters

_DIRECTIONS = 16
_NONE = 1e-12  # of the mean square: a direction with less variance is rounding


@dataclass(frozen=True, eq=False)
class Pool:
    """What sequences of a pool say on average, so that measured ones can be told from the average by their tokens.

    A sequence's features are the mean input embedding of its tokens, those that are hidden from the model included,
    along the r <= 16 directions in which it varies most from cluster to cluster of the pool. Less the pool's mean they
    are control variates: their expectation is 0, up to the error of that mean, which is known too. This is the
    regression estimator of double sampling (Neyman 1938; Cochran, Sampling Techniques, chapter 12): the part of a
    quantity's variance that a sequence's subject and words explain is divided by the size of the pool and no longer by
    the number of measured sequences. The measured sequences may be in the pool or not; they must be drawn alike.

    Attributes:
        embedding: (V, d) the model's input embeddings.
        mean: (d,) float64, the mean over the pool's sequences.
        directions: (d, r) float64, orthonormal.
        variances: (r,) float64, of the error of the mean along each direction; these errors are uncorrelated.
        num_sequences: How many were read.
        by_document: Whether errors count documents as independent, not sequences.
        seconds: The time that it took.
        required: Whether it is used even where the error without it is smaller: of several models all use it, or none
            does, so that what they have in common cancels.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> batch = {"input_ids": torch.randint(0, 8, (64, 4))}
        >>> pool = Pool.read(BertForMaskedLM(config), [batch])
        >>> features = pool.features(batch)
        >>> features.shape, bool(features.mean(dim=0).abs().max() < 1e-7)
        (torch.Size([64, 7]), True)
    """

    embedding: torch.Tensor
    mean: torch.Tensor
    directions: torch.Tensor
    variances: torch.Tensor
    num_sequences: int
    by_document: bool
    seconds: float
    required: bool = False

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Self:
        """Read a pool.

        Args:
            model: A Hugging Face model, for its input embeddings.
            batches: Mappings of `input_ids` (B, T); optionally `labels` (B, T), which show what hidden tokens were,
                `attention_mask` (B, T) and `documents` (B,), as the measured batches have them.

        Raises:
            IsolossError: The model has no input embeddings, a batch has no `input_ids` or a token that has no
                embedding, or there are fewer than two sequences or documents.
        """
        begun = time.perf_counter()
        if isinstance(batches, Mapping):
            raise IsolossError("the pool is a single batch; pass an iterable of batches, e.g. [batch]")
        weight = input_embeddings(model)
        if weight is None:
            raise IsolossError(f"{type(model).__name__} has no input embeddings, by which a pool is read")
        width = weight.shape[1] + 1
        clusters = Clusters(width)
        sums, moments = torch.zeros(width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
        number, kinds = 0, set()

        def record(rows: torch.Tensor) -> int:
            nonlocal sums, moments
            sums, moments = sums + rows.sum(dim=0), moments + rows.T @ rows
            return len(rows)

        for batch in batches:
            means = _mean_embeddings(weight, batch)
            documents = batch.get("documents")
            kinds.add(documents is not None)
            number += record(clusters.add(torch.cat([means, means.new_ones(len(means), 1)], dim=1), documents))
        number += record(clusters.close())
        if len(kinds) == 2:
            raise IsolossError("all batches of the pool have `documents`, or none has")
        if number < 2:
            raise IsolossError(f"the pool has {number} independent sequences or documents; it needs at least 2")
        mean = sums[:-1] / sums[-1]
        centring = torch.cat([torch.eye(width - 1, dtype=torch.float64), -mean[None]])  # a cluster's sum less n means
        scatter, directions = torch.linalg.eigh(centring.T @ moments @ centring)
        scatter, directions = scatter.flip(0)[:_DIRECTIONS], directions.flip(1)[:, :_DIRECTIONS]
        kept = scatter > _NONE * moments.diagonal()[:-1].sum()
        return cls(
            embedding=weight,
            mean=mean,
            directions=directions[:, kept],
            variances=scatter[kept] * (number / (number - 1)) / sums[-1].square(),
            num_sequences=int(sums[-1]),
            by_document=kinds == {True},
            seconds=time.perf_counter() - begun,
        )

    def features(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return (B, r) float64 on the CPU: each sequence's features less the pool's mean.

        Raises:
            IsolossError: The batch has no `input_ids`, or a token that has no embedding.
        """
        return (_mean_embeddings(self.embedding, batch) - self.mean) @ self.directions

    def __str__(self) -> str:
        """Return what tells it from another one."""
        return f"{self.num_sequences} sequences, variances {[float(f'{v:.6g}') for v in self.variances.tolist()]}"


def input_embeddings(model: nn.Module) -> torch.Tensor | None:
    """Return a Hugging Face model's input embeddings (V, d), detached; None where it has none to ask for.

    Example:
        >>> input_embeddings(nn.Linear(2, 2)) is None
        True
    """
    holder: Any = model
    try:
        weight = getattr(holder.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None
    return weight.detach() if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


@torch.no_grad()
def _mean_embeddings(weight: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return (B, d) float64 on the CPU: the mean embedding of each sequence's tokens."""
    ids, present = _tokens(batch)
    outside = ids[(ids < 0) | (ids >= len(weight))]
    if len(outside):
        raise IsolossError(f"a token is {int(outside[0])}; the model has embeddings for 0 to {len(weight) - 1}")
    ids = ids.to(weight.device)
    if present is None:
        means = F.embedding_bag(ids, weight, mode="mean")
    else:
        counts, present = present.sum(dim=1), present.to(weight.device)
        starts = (counts.cumsum(dim=0) - counts).to(weight.device)
        means = F.embedding_bag(ids[present], weight, starts, mode="mean")
    return means.cpu().double()  # in this order: not every device has float64


def _tokens(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens (B, T), hidden ones as the labels show them, and which are no padding; None: all."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise IsolossError("a batch has no `input_ids` of shape (sequences, positions), by which a pool is read")
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
        ids = torch.where(labels == IGNORED, ids, labels)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or bool(mask.all()):
        return ids, None
    return ids, mask.bool()
