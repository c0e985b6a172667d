"""Convex probes on several draws of training sentences, or on several random projections of the features.

Shape letters: R draws or projections, n examples, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.transfer.config import ClassifierConfig
from isoloss.transfer.features import projection_matrix
from isoloss.transfer.fits.probe import Probe, fit_probe, refuse_nonfinite
from isoloss.transfer.results import absent_classes

Fitted = tuple[torch.Tensor, dict[str, Any]]  # predictions (R, n_test), and how the classifiers were fitted


def over_draws(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    config: ClassifierConfig,
    *,
    classes: int,
    draws: int,
) -> Fitted:
    """Return the predictions of one probe per draw, where the draws are equal slices of the training examples.

    Each probe is that of `isoloss.transfer.linear_probing.fit_linear_probe` on its slice; a single draw can have a
    probe per seed. A class missing from the slice is never predicted.

    Args:
        train_x: (R n_train, D) features, the first n_train of them the first draw.
        train_y: (R n_train,) labels.
        test_x: (n_test, D) features.
        config: How a probe is fitted.
        classes: Number of classes.
        draws: R; 1 if the config has several seeds.

    Returns:
        (R, n_test) predictions, or one row per seed of a single draw; and details of the fits.

    Raises:
        IsolossError: A feature is not finite.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0], [1.0], [-1.0]])
        >>> config = ClassifierConfig(solver="convex", seeds=1)
        >>> over_draws(x, torch.tensor([0, 1, 0, 1]), x[:2], config, classes=2, draws=2)[0].tolist()
        [[0, 1], [1, 0]]
    """
    train_y = _checked(train_x, train_y, test_x)
    pairs = zip(train_x.chunk(draws), train_y.chunk(draws), strict=True)
    probes = [fit_probe(x, y, classes, config) for x, y in pairs]
    return torch.cat([probe.predict(test_x) for probe in probes]).cpu(), _told(probes, train_y.chunk(draws), classes)


def over_projections(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    config: ClassifierConfig,
    *,
    classes: int,
    width: int,
    projections: int,
    seed: int,
) -> Fitted:
    """Return the predictions of one probe per random projection of the features to `width` columns.

    The matrices are those of `isoloss.transfer.features.projection_matrix`, the same for all models of one width.

    Args:
        train_x: (n_train, D) features.
        train_y: (n_train,) labels.
        test_x: (n_test, D) features.
        config: How a probe is fitted, with one seed.
        classes: Number of classes.
        width: Columns of a projection.
        projections: R.
        seed: Seed of the matrices.

    Returns:
        (R, n_test) predictions, and details of the fits.

    Raises:
        IsolossError: The features have fewer columns than `width`, or one is not finite.
    """
    if width > train_x.shape[1]:
        raise IsolossError(
            f"the width is {width}, but the model has {train_x.shape[1]} features: choose at most that many"
        )
    train_y = _checked(train_x, train_y, test_x)
    predictions, probes = [], []
    for number in range(projections):
        matrix = projection_matrix(train_x.shape[1], width, seed, number).to(train_x.device)
        probes.append(fit_probe(train_x @ matrix, train_y, classes, config))
        predictions.append(probes[-1].predict(test_x @ matrix))
    details = _told(probes, [train_y], classes) | {"width_before_projection": train_x.shape[1]}
    return torch.cat(predictions).cpu(), details


def _checked(train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor) -> torch.Tensor:
    """Refuse features that are not finite, and return the labels on their device."""
    for split, x in (("training", train_x), ("test", test_x)):
        refuse_nonfinite(x, split, x.device)
    return train_y.to(train_x.device)


def _told(probes: Sequence[Probe], labels: Sequence[torch.Tensor], classes: int) -> dict[str, Any]:
    """Return the details of the fits, a single value where all agree, and how many classes each draw lacks."""
    told = {}
    for name, first in probes[0].details.items():
        values = [probe.details[name] for probe in probes]
        told[name] = first if all(value == first for value in values) else values
    return {**told, "absent_classes": [len(absent_classes(y, classes)) for y in labels]}
