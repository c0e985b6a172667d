"""Means and ratios of independent samples with their standard errors, all in float64: what every error bar rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

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


def ratio_estimate(numerators: Values, denominators: Values | None = None, *, unit: str, method: str) -> Estimate:
    """Return `ratio` as an `Estimate` with its influence; without denominators it is the mean.

    Example:
        >>> ratio_estimate([1.0, 2.0, 6.0], unit="nats", method="loss")
        Estimate(3.0 ± 1.5 nats; loss; 3 samples)
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.ones_like(a) if denominators is None else torch.as_tensor(denominators, dtype=torch.float64)
    value, psi = influence(a, b)
    return Estimate(
        value=value,
        stderr=math.sqrt(float(psi.square().sum()) / (len(psi) * (len(psi) - 1))),
        samples=len(a),
        unit=unit,
        num_predictions=int(b.sum()),
        method=method,
        influence=psi.cpu().numpy(),
    )


def crossed_ratio(values: torch.Tensor, sizes: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Return a ratio over rows and columns that are both samples, its error and its influence.

    The ratio is sum_ij values_ij / (R sum_i sizes_i). The residuals r_ij = values_ij - ratio * sizes_i are taken as a
    row's effect plus a column's plus noise (Searle, Casella and McCulloch, Variance Components, section 4.3), with the
    variance of their mean s_rows / n + s_columns / R + s_noise / (n R).

    Args:
        values: (n, R) float64, n and R at least 2.
        sizes: (n,) float64, how much each row counts.

    Returns:
        The ratio, its standard error, and (n + R,) what each row and each column adds to the error, as
        `Estimate.influence` for min(n, R) samples. As the noise counts with the rows and with the columns, the error
        that follows from the influence is the larger one.
    """
    n, columns = values.shape
    scale = n / float(sizes.sum())
    ratio = float(values.sum()) / (columns * float(sizes.sum()))
    residuals = values - ratio * sizes[:, None]
    by_row, by_column = residuals.mean(dim=1), residuals.mean(dim=0)
    neither = residuals - by_row[:, None] - by_column + residuals.mean()
    of_noise = float(neither.square().sum()) / ((n - 1) * (columns - 1)) / (n * columns)
    of_rows, of_columns = float(by_row.var()) / n, float(by_column.var()) / columns
    variance = max(of_rows + of_columns - of_noise, of_noise)  # s_rows and s_columns are at least 0
    parts = [effect * (scale / math.sqrt(len(effect) * (len(effect) - 1))) for effect in (by_row, by_column)]
    samples = min(n, columns)
    return ratio, math.sqrt(variance) * n / float(sizes.sum()), torch.cat(parts) * math.sqrt(samples * (samples - 1))


def subset_deviation(numerators: Values, denominators: Values, *, subsets: int = 5) -> tuple[float, int]:
    """Return the standard deviation of sum(a) / sum(b) over consecutive subsets, and the size of the smallest subset.

    The paper's own error bar (appendix A.5): the deviation of a value measured on one subset, sqrt(subsets) times the
    error of the mean over all of them.
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.as_tensor(denominators, dtype=torch.float64)
    if len(a) < 2 * subsets:
        raise IsolossError(f"{len(a)} samples cannot be split in {subsets} subsets; at least {2 * subsets} are needed")
    parts = zip(a.tensor_split(subsets), b.tensor_split(subsets), strict=True)
    values = torch.stack([part_a.sum() / part_b.sum() for part_a, part_b in parts])
    return float(values.std()), len(a) // subsets
