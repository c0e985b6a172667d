"""Means and ratios of independent samples with their standard errors, all in float64: what every error bar rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isoloss.errors import IsolossError

Values = torch.Tensor | Sequence[float]


def ratio(numerators: Values, denominators: Values) -> tuple[float, float]:
    """Return sum(a) / sum(b) over independent clusters, and its standard error by the delta method.

    With r = sum(a) / sum(b), the error is sqrt(n / (n - 1) * sum((a_i - r b_i)^2)) / sum(b) (Cochran, Sampling
    Techniques, section 6.3, for an infinite population). Where every b_i is 1 this is the mean and s / sqrt(n).

    Args:
        numerators: (n,) a: what each cluster adds up to, e.g. the nats of all predicted tokens of a sequence.
        denominators: (n,) b: how much it counts, e.g. the number of its predicted tokens.

    Raises:
        IsolossError: Fewer than two clusters, unequal lengths, or denominators that do not add up to more than 0.

    Example:
        >>> ratio([1.0, 5.0], [1, 2])
        (2.0, 0.6666666666666666)
    """
    value, psi = influence(numerators, denominators)
    return value, math.sqrt(float(psi.square().sum()) / (len(psi) * (len(psi) - 1)))


def influence(numerators: Values, denominators: Values) -> tuple[float, torch.Tensor]:
    """Return sum(a) / sum(b) as `ratio` does, and (n,) float64: what each cluster adds to its error.

    With n clusters, psi_i = n (a_i - r b_i) / sum(b): the squared error is the sum of psi_i^2 over n (n - 1), and that
    of the difference of two ratios over the same clusters is the same of psi_i - psi'_i.

    Example:
        >>> influence([1.0, 5.0], [1, 2])
        (2.0, tensor([-0.6667,  0.6667], dtype=torch.float64))
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.as_tensor(denominators, dtype=torch.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise IsolossError(f"{a.numel()} numerators do not match {b.numel()} denominators")
    n = len(a)
    if n < 2:
        raise IsolossError(f"an error bar needs at least 2 independent samples, not {n}")
    total = float(b.sum())
    if not total > 0:
        raise IsolossError(f"the denominators add up to {total}; they must add up to more than 0")
    value = float(a.sum()) / total
    return value, (a - value * b) * (n / total)


def mean(values: Values) -> tuple[float, float]:
    """Return the mean of independent values (n,) and its standard error s / sqrt(n); errors as for `ratio`."""
    samples = torch.as_tensor(values, dtype=torch.float64)
    return ratio(samples, torch.ones_like(samples))


def subset_deviation(numerators: Values, denominators: Values, *, subsets: int = 5) -> tuple[float, int]:
    """Return the standard deviation of sum(a) / sum(b) over consecutive subsets, and the size of the smallest subset.

    The paper's own error bar (appendix A.5): the deviation of a value measured on one subset, sqrt(subsets) times the
    error of the mean over all of them.

    Args:
        numerators: (n,) as for `ratio`.
        denominators: (n,) as for `ratio`.
        subsets: Number of equal subsets (the first ones are one longer where n is no multiple of it).

    Raises:
        IsolossError: Fewer than two values a subset.
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.as_tensor(denominators, dtype=torch.float64)
    if len(a) < 2 * subsets:
        raise IsolossError(f"{len(a)} samples cannot be split in {subsets} subsets; at least {2 * subsets} are needed")
    parts = zip(a.tensor_split(subsets), b.tensor_split(subsets), strict=True)
    values = torch.stack([part_a.sum() / part_b.sum() for part_a, part_b in parts])
    return float(values.std()), len(a) // subsets
