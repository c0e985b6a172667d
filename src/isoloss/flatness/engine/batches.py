"""Batches one after another, checked for a model, and the independent clusters that their sequences belong to.

Shapes: B sequences of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.predictions import Batch


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """How far a stream of batches has been read."""

    batches: int = 0  # number of batches
    sequences: int = 0  # their sequences
    positions: int = 0  # their predicted positions
    skipped: int = 0  # batches that predict nothing
    by_document: bool | None = None  # whether they have `documents`; None before the first batch
    clusters: int = 0  # number of clusters, the last one included, which may go on
    document: int | None = None  # the id of the last document


@dataclass(frozen=True, kw_only=True)
class CheckedBatch:
    """A batch of a stream."""

    given: Mapping[str, Any]  # the batch as it came
    checked: Batch  # the same on the model's device, without its documents
    number: int  # the index of the batch in the stream
    first: int  # the index of its first sequence in the stream
    clusters: torch.Tensor  # (B,) ascending numbers: sequences of one number are not independent of each other
    after: StreamPosition  # where the stream stands behind it


def read_batches(
    batches: Iterable[Mapping[str, Any]],
    *,
    model: nn.Module,
    causal: bool,
    num_sequences: int | None = None,
    cluster_size: int = 1,
    start: StreamPosition | None = None,
) -> Iterator[CheckedBatch]:
    """Yield the batches of a stream, checked for a model; some may predict nothing.

    A cluster is `cluster_size` consecutive sequences, or, where batches have `documents` (B,), the consecutive
    sequences of one document, whatever their number. Clusters do not depend on how the stream is cut into batches.
    """
    if isinstance(batches, Mapping):
        raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
    if num_sequences is not None and num_sequences < 2:
        raise IsolossError(f"num_sequences is {num_sequences}; an error bar needs at least 2")
    stream, position = iter(batches), start or StreamPosition()
    while position.sequences != num_sequences and (batch := next(stream, None)) is not None:
        number = position.batches
        if not isinstance(batch, Mapping):
            raise IsolossError(f"batch {number} is a {type(batch).__name__}, not a mapping of input_ids, labels, ...")
        if num_sequences is not None:
            batch = _first_rows(batch, num_sequences - position.sequences)
        documents = batch.get("documents")
        if position.by_document is not None and position.by_document != (documents is not None):
            raise IsolossError(f"batch {number}: all batches have `documents`, or none has")
        try:
            inputs = {name: value for name, value in batch.items() if name != "documents"}
            checked = Batch.read(inputs, model, causal=causal)
        except IsolossError as error:
            raise IsolossError(f"batch {number}: {error}") from error
        first, size, before = position.sequences, len(checked.predicted), position.clusters
        if documents is None:
            last = None
            clusters = torch.arange(first, first + size) // cluster_size
        else:
            ids = [position.document, *documents.tolist()]
            last = ids[-1]
            clusters = before - 1 + torch.tensor([a != b for a, b in itertools.pairwise(ids)]).cumsum(dim=0)
        position = StreamPosition(
            batches=number + 1,
            sequences=first + size,
            positions=position.positions + len(checked.targets),
            skipped=position.skipped + (not checked.predicts),
            by_document=documents is not None,
            clusters=int(clusters[-1]) + 1 if size else before,
            document=last,
        )
        yield CheckedBatch(given=batch, checked=checked, number=number, first=first, clusters=clusters, after=position)


def _first_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return at most the first `rows` sequences of a batch."""
    return {name: value[:rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
