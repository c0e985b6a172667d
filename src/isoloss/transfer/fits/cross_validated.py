"""The convex linear probe: the minimum of the regularized cross-entropy, its regularization strength chosen by folds.

Shape letters: D features, C classes, n examples, R regularization strengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from isoloss import seeds as streams
from isoloss.transfer.fits.convex import fit
from isoloss.transfer.stored_features import StoredFeatures

FOLDS = 5  # of the training examples, to choose a regularization strength by


def fit_convex(
    x: torch.Tensor | StoredFeatures,
    y: torch.Tensor,
    num_classes: int,
    regularization: Sequence[float],
    center: torch.Tensor,
    scale: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the weights and biases of the convex probe on centered and scaled features, and how it was fitted.

    The features x (n, D) are as they are; scaled ones are centered at `center`, (D,) or a single 0, and divided by
    `scale`. Of several regularization strengths one is chosen by five folds, from a stream of `seed`.

    Returns:
        Weights (1, C, D) and biases (1, 1, C), both in float32; `regularization`, `objective_nats` and `gap_nats`, and
        of several strengths also `regularization_strengths` and `held_out_accuracies`.

    Example:
        >>> x, y = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        >>> weight, bias, details = fit_convex(x, y, 2, [1e-3], torch.zeros(()), 1.0, seed=0)
        >>> (x @ weight[0].T + bias[0]).argmax(dim=1).tolist()
        [0, 0, 1, 1]
    """
    weight, bias, details = _minimum(x, y, num_classes, list(regularization), scale, seed)
    # of the features as they are, and so of centered and scaled ones
    bias = bias + (weight @ center.double().expand(weight.shape[2])[:, None]).transpose(1, 2)
    return (weight * scale).float(), bias.float(), details


def _minimum(
    x: torch.Tensor | StoredFeatures,
    y: torch.Tensor,
    num_classes: int,
    strengths: list[float],
    scale: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return weights (1, C, D) and biases (1, 1, C) of the convex probe in float64, and how it was fitted.

    They are of the features as they are, whose penalty is `scale` squared times that of scaled ones. A class of which
    there is no training example has a bias of minus infinity; where all are of one class, that is all there is.
    """
    present = torch.tensor(sorted(set(y.tolist())), device=y.device)
    weight = torch.zeros(1, num_classes, x.shape[1], dtype=torch.float64, device=y.device)
    bias = torch.full((1, 1, num_classes), -math.inf, dtype=torch.float64, device=y.device)
    if len(present) == 1:
        bias[..., present] = 0.0
        return weight, bias, {"regularization": max(strengths), "objective_nats": 0.0, "gap_nats": 0.0}
    targets = torch.searchsorted(present, y)
    folds = _folds(targets.cpu(), streams.generator(seed, "probe", "folds")) if len(strengths) > 1 else None
    splits = [torch.ones(len(y), dtype=torch.bool)] + ([] if folds is None else [folds != k for k in range(FOLDS)])
    fits = fit(
        x,
        targets,
        classes=len(present),
        regularization=[strength * scale**2 for strength in strengths],
        splits=splits,
        device=y.device,
    )
    best, details = 0, {}
    if folds is not None:
        right = fits.predict(x)[1:] == targets  # (folds, R, n)
        held_out = torch.stack([folds == k for k in range(FOLDS)])[:, None].to(right.device)
        accuracies = ((right & held_out).sum(dim=(0, 2)).double() / held_out.sum()).tolist()
        best = max(range(len(strengths)), key=lambda index: (accuracies[index], strengths[index]))
        details = {"regularization_strengths": strengths, "held_out_accuracies": accuracies}
    weight[0, present] = fits.weights[0, best].T
    bias[0, 0, present] = fits.intercepts[0, best]
    reached = {"objective_nats": float(fits.objectives[0, best]), "gap_nats": float(fits.gaps[0, best])}
    return weight, bias, {"regularization": strengths[best], **details, **reached}


def _folds(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the fold of each example (n,), stratified by class; -1 for a class's only example, never held out."""
    folds = torch.full_like(y, -1)
    for label in sorted(set(y.tolist())):
        members = (y == label).nonzero()[:, 0]
        if len(members) > 1:
            folds[members[torch.randperm(len(members), generator=generator)]] = torch.arange(len(members)) % FOLDS
    return folds
