"""Checks of labels that probes and fine-tuning share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isoloss.errors import IsolossError, warn


def absent_classes(train_y: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the classes that no training label (n,) has."""
    return (train_y.bincount(minlength=num_classes) == 0).nonzero()[:, 0]


def check_labels(train_y: torch.Tensor, test_y: torch.Tensor, classes: Sequence[str]) -> None:
    """Raise an `IsolossError` unless the labels (n,) are classes, and warn of classes without training examples."""
    num_classes = len(classes)
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
    seen = sorted(set(train_y.tolist()))
    unseen = sorted(set(test_y.tolist()) - set(seen))
    if unseen:
        count = int(torch.isin(test_y, torch.tensor(unseen, device=test_y.device)).sum())
        warn(
            f"{count:,} of the {len(test_y):,} test examples have a label that none of the {len(train_y):,} training "
            f"examples has ({', '.join(classes[label] for label in unseen)}): they count as errors"
        )
    if len(seen) == 1:
        label = classes[seen[0]]
        warn(f"all {len(train_y):,} training examples have the label {label}, so every prediction is that label")
