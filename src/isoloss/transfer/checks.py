"""What probes and fine-tuning refuse alike."""

from __future__ import annotations

import torch

from isoloss.errors import IsolossError


def check_labels(train_y: torch.Tensor, test_y: torch.Tensor, *, num_classes: int) -> None:
    """Raise an `IsolossError` unless the labels (n,) are classes, and each of the test labels occurs in training."""
    for split, y in (("training", train_y), ("test", test_y)):
        if y.numel() == 0:
            raise IsolossError(f"the {split} split is empty")
        if y.dtype != torch.int64:
            raise IsolossError(f"the {split} split needs int64 labels, not {y.dtype}")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= num_classes:
            raise IsolossError(
                f"the {split} labels go from {low} to {high}; with {num_classes} classes they are 0 to "
                f"{num_classes - 1}"
            )
    unseen = sorted(set(test_y.tolist()) - set(train_y.tolist()))
    if unseen:
        raise IsolossError(
            f"test labels {unseen} do not occur in the {len(train_y)} training labels: train on more examples"
        )
