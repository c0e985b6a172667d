"""Linear probes on features: several seeds trained side by side with AdamW, or the minimum of the convex loss.

Shape letters: S seeds, B examples of a step, D features, C classes, n examples, R regularization strengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.transfer.config import ClassifierConfig
from isoloss.transfer.fits import convex
from isoloss.transfer.results import absent_classes
from isoloss.transfer.stored_features import StoredFeatures, rows_at_once

_FOLDS = 5  # of the training examples, to choose a regularization strength by
_RowReader = Callable[[slice | torch.Tensor], torch.Tensor]  # float32 features of these rows, centered and scaled


@dataclass(frozen=True)
class Probe:
    """Linear classifiers, one per seed, of centered and scaled features."""

    weight: torch.Tensor  # (S, C, D)
    bias: torch.Tensor  # (S, 1, C), minus infinity for a class that no training example has
    center: torch.Tensor  # (D,), or a single 0
    scale: float
    details: Mapping[str, Any]  # how they were fitted

    def predict(self, x: torch.Tensor | StoredFeatures) -> torch.Tensor:
        """Return (S, n): the class of the largest logit of each of n examples; x (n, D) is not yet centered."""
        stacked = self.weight.flatten(0, 1).T
        classes = []
        for first in range(0, len(x), size := rows_at_once(x.shape[1])):
            rows = (x[first : first + size].to(self.center) - self.center) / self.scale
            logits = (rows @ stacked).view(-1, *self.weight.shape[:2]) + self.bias[:, 0]
            classes.append(logits.argmax(dim=2))
        return torch.cat(classes).T.contiguous()


def fit_probe(
    train_x: torch.Tensor | StoredFeatures, train_y: torch.Tensor, num_classes: int, config: ClassifierConfig
) -> Probe:
    """Return the probe of `fit_linear_probe`, on the labels' device, of checked features (n, D) and labels (n,)."""
    where = train_y.device
    center, scale = torch.zeros((), device=where), 1.0
    if config.standardize and bool((train_y != train_y[0]).any()):  # else the prediction is known
        center, scale = _center_and_scale(train_x, where)
    if config.solver == "convex":
        weight, bias, details = _fit_convex(
            train_x, train_y, num_classes, config.regularization, center, scale, config.seed
        )
        weight, bias = weight.expand(config.seeds, -1, -1), bias.repeat(config.seeds, 1, 1)
    else:
        used = ("epochs", "learning_rate", "weight_decay", "batch_size", "seed")
        details = {name: getattr(config, name) for name in used}
        rows = _standardized(train_x, center, scale)
        weight, bias = _fit_adamw(rows, train_y, config, num_features=train_x.shape[1], num_classes=num_classes)
    bias[..., absent_classes(train_y, num_classes)] = -math.inf  # the random start may have left them likely
    probe = Probe(weight, bias, center, scale, {})
    train_accuracy = (probe.predict(train_x) == train_y).double().mean()
    known = {
        "solver": config.solver,
        "standardize": config.standardize,
        **details,
        "train_accuracy": float(train_accuracy),
        "num_train": len(train_y),
        "num_features": train_x.shape[1],
        "features": "in memory" if isinstance(train_x, torch.Tensor) else "in a file",
        "num_classes": num_classes,
        "device": where.type,
    }
    return replace(probe, details=known)


def _center_and_scale(x: torch.Tensor | StoredFeatures, device: torch.device | str) -> tuple[torch.Tensor, float]:
    """Return the mean (D,) of the features and the root mean square of the centered features."""
    n, width = x.shape
    total = torch.zeros(width, dtype=torch.float64, device=device)
    largest = 0.0
    for block in _blocks(x, device):
        total += block.sum(dim=0, dtype=torch.float64)
        largest = max(largest, float(block.abs().amax()))
    center = total / n
    squares = sum(float((block - center.float()).square().sum(dtype=torch.float64)) for block in _blocks(x, device))
    scale = math.sqrt(squares / (n * width))
    if scale <= 1e-6 * largest:
        raise IsolossError("the training features are the same for every example, so there is nothing to classify by")
    return center.float(), scale


def _blocks(x: torch.Tensor | StoredFeatures, device: torch.device | str) -> Iterator[torch.Tensor]:
    """Yield the features in float32, (B, D)."""
    for first in range(0, len(x), size := rows_at_once(x.shape[1])):
        yield x[first : first + size].to(device, torch.float32)


def _standardized(x: torch.Tensor | StoredFeatures, center: torch.Tensor, scale: float) -> _RowReader:
    """Return a function that reads rows of `(x - center) / scale`; features in memory are copied once."""
    if isinstance(x, torch.Tensor):
        return ((x.to(center) - center) / scale).__getitem__
    return lambda rows: (x[rows].to(center) - center) / scale


def refuse_nonfinite(x: torch.Tensor | StoredFeatures, split: str, device: torch.device | str) -> None:
    """Raise an `IsolossError` where features (n, D) of the `split`, e.g. training, are NaN or infinite."""
    rows = sum(int((~block.isfinite()).any(dim=1).sum()) for block in _blocks(x, device))
    if rows:
        raise IsolossError(f"{rows} of the {len(x)} {split} examples have features that are NaN or infinite")


def _fit_adamw(
    read: _RowReader, y: torch.Tensor, config: ClassifierConfig, *, num_features: int, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C) after the last step.

    A seed decides the initial weights (uniform within ±1/sqrt(D), as in `torch.nn.Linear`) and the order of the
    examples in each epoch. The labels y (n,) are on the device to compute on.
    """
    generators = [seeds.generator(config.seed, "probe", index) for index in range(config.seeds)]
    weight, bias = _initial(generators, num_features, num_classes, y.device)
    optimizer = torch.optim.AdamW([weight, bias], lr=config.learning_rate, weight_decay=config.weight_decay)
    for _ in range(config.epochs):
        orders = torch.stack([torch.randperm(len(y), generator=g) for g in generators]).to(y.device)
        for start in range(0, len(y), config.batch_size):
            rows = orders[:, start : start + config.batch_size]
            weight.grad, bias.grad = _gradients(weight, bias, read(rows), y[rows])
            optimizer.step()
    return weight, bias


def _initial(
    generators: list[torch.Generator], num_features: int, num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C), each seed's from its own generator."""
    bound = num_features**-0.5
    drawn = [torch.rand(num_classes, num_features + 1, generator=g) * (2 * bound) - bound for g in generators]
    stacked = torch.stack(drawn).to(device)
    return stacked[:, :, :-1].contiguous(), stacked[:, None, :, -1].contiguous()


def _gradients(
    weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of each seed's mean cross-entropy on its batch: x (S, B, D), y (S, B).

    The gradient at the logits is (softmax - one-hot) / B; written out, a step takes 0.6 of autograd's time.
    """
    residual = torch.baddbmm(bias, x, weight.transpose(1, 2)).softmax(dim=2)
    residual.scatter_add_(2, y[:, :, None], residual.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
    residual /= y.shape[1]
    return residual.transpose(1, 2) @ x, residual.sum(dim=1, keepdim=True)


def _fit_convex(
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

    A class of which there is no training example has a bias of minus infinity; where all are of one class, that is all
    there is.

    Returns:
        Weights (1, C, D) and biases (1, 1, C), both in float32; `regularization`, `objective_nats` and `gap_nats`, and
        of several strengths also `regularization_strengths` and `held_out_accuracies`.
    """
    # of the features as they are, whose penalty is `scale` squared times that of scaled ones
    strengths = list(regularization)
    present = torch.tensor(sorted(set(y.tolist())), device=y.device)
    weight = torch.zeros(1, num_classes, x.shape[1], dtype=torch.float64, device=y.device)
    bias = torch.full((1, 1, num_classes), -math.inf, dtype=torch.float64, device=y.device)
    if len(present) == 1:
        bias[..., present] = 0.0
        return weight.float(), bias.float(), {"regularization": max(strengths), "objective_nats": 0.0, "gap_nats": 0.0}
    targets = torch.searchsorted(present, y)
    folds = _folds(targets.cpu(), seeds.generator(seed, "probe", "folds")) if len(strengths) > 1 else None
    splits = [torch.ones(len(y), dtype=torch.bool)] + ([] if folds is None else [folds != k for k in range(_FOLDS)])
    fits = convex.fit(
        x,
        targets,
        classes=len(present),
        regularization=[strength * scale**2 for strength in strengths],
        splits=splits,
        device=y.device,
    )
    details: dict[str, Any] = {}
    best = 0
    if folds is not None:
        right = fits.predict(x)[1:] == targets  # (folds, R, n)
        held_out = torch.stack([folds == k for k in range(_FOLDS)])[:, None].to(right.device)
        accuracies = ((right & held_out).sum(dim=(0, 2)).double() / held_out.sum().clamp(min=1)).tolist()
        best = max(range(len(strengths)), key=lambda index: (accuracies[index], strengths[index]))
        details = {"regularization_strengths": strengths, "held_out_accuracies": accuracies}
    weight[0, present] = fits.weights[0, best].T
    bias[0, 0, present] = fits.intercepts[0, best]
    reached = {"objective_nats": float(fits.objectives[0, best]), "gap_nats": float(fits.gaps[0, best])}
    # and so of centered and scaled ones
    bias = bias + (weight @ center.double().expand(weight.shape[2])[:, None]).transpose(1, 2)
    return (weight * scale).float(), bias.float(), {"regularization": strengths[best], **details, **reached}


def _folds(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the fold of each example (n,), stratified by class; -1 for a class's only example, never held out."""
    folds = torch.full_like(y, -1)
    for label in sorted(set(y.tolist())):
        members = (y == label).nonzero()[:, 0]
        if len(members) > 1:
            folds[members[torch.randperm(len(members), generator=generator)]] = torch.arange(len(members)) % _FOLDS
    return folds
