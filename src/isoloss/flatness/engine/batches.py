"""Batches one after another, checked, and the numbers of the independent clusters that their sequences belong to.

Shapes: B sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.predictions import Batch
from isoloss.flatness.engine.run import first_rows


@dataclass(frozen=True)
class Reading:
    """A batch of a stream.

    Attributes:
        given: The batch as it came, without its documents.
        checked: The same on the model's device.
        first: The place of its first sequence in the stream.
        clusters: (B,) ascending numbers: sequences of one number are not independent of each other.
    """

    given: dict[str, Any]
    checked: Batch
    first: int
    clusters: torch.Tensor


def read_batches(
    batches: Iterable[Mapping[str, Any]],
    *,
    model: nn.Module,
    causal: bool,
    num_sequences: int | None = None,
    cluster_size: int = 1,
) -> Iterator[Reading]:
    """Yield the batches of a stream, checked for a model; some may predict nothing.

    A cluster is `cluster_size` consecutive sequences, or, where batches have `documents` (B,), the consecutive
    sequences of one document, whatever their number. Clusters do not depend on how the stream is cut into batches.

    Raises:
        IsolossError: `batches` is a single batch, a batch does not fit, or some have documents.
    """
    if isinstance(batches, Mapping):
        raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
    if num_sequences is not None and num_sequences < 2:
        raise IsolossError(f"num_sequences is {num_sequences}; an error bar needs at least 2")
    first, cluster, document, by_document = 0, -1, None, None
    for number, batch in enumerate(batches):
        if first == num_sequences:
            return
        if not isinstance(batch, Mapping):
            raise IsolossError(f"batch {number} is a {type(batch).__name__}, not a mapping of input_ids, labels, ...")
        if num_sequences is not None:
            batch = first_rows(batch, num_sequences - first)
        given = {name: value for name, value in batch.items() if name != "documents"}
        documents = batch.get("documents")
        if by_document is not None and by_document != (documents is not None):
            raise IsolossError(f"batch {number}: all batches have `documents`, or none has")
        by_document = documents is not None
        try:
            checked = Batch.read(given, model, causal=causal)
        except IsolossError as error:
            raise IsolossError(f"batch {number}: {error}") from error
        size = len(checked.predicted)
        if documents is None:
            clusters = torch.arange(first, first + size) // cluster_size
        else:
            numbers = []
            for name in documents.tolist():
                cluster += name != document
                document = name
                numbers.append(cluster)
            clusters = torch.tensor(numbers)
        yield Reading(given, checked, first, clusters)
        first += size
