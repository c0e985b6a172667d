"""Means and ratios of independent samples with their standard errors, all in float64: what every error bar rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

Values = torch.Tensor | Sequence[float]


def ratio(numerators: Values, denominators: Values) -> tuple[float, float]:
    """Return sum(a) / sum(b) over independent clusters, and its standard error by the jackknife.

    With r = sum(a) / sum(b) and r_i the same without cluster i, the squared error is (n - 1) / n sum_i (r_i - r)^2,
    where r - r_i = (a_i - r b_i) / (sum(b) - b_i). Where every b_i is 1 this is the mean and s / sqrt(n). Of few
    unequal clusters it is larger than the delta method's (Cochran, Sampling Techniques, section 6.3), in which a large
    cluster pulls r towards itself and so has too small a residual.

    Args:
        numerators: (n,) a: what each cluster adds up to, e.g. the nats of all predicted tokens of a sequence.
        denominators: (n,) b: how much it counts, e.g. the number of its predicted tokens.

    Raises:
        IsolossError: Fewer than two clusters with a denominator above 0, or unequal lengths.

    Example:
        >>> ratio([1.0, 5.0], [1, 2])  # 5 / 2 without the first, 1 without the second
        (2.0, 0.7905694150420949)
    """
    value, psi = influence(numerators, denominators)
    return value, math.sqrt(float(psi.square().sum()) / (len(psi) * (len(psi) - 1)))


def influence(numerators: Values, denominators: Values) -> tuple[float, torch.Tensor]:
    """Return sum(a) / sum(b) as `ratio` does, and (n,) float64: what each cluster adds to its error.

    With n clusters, psi_i = (n - 1) (r - r_i): the squared error is the sum of psi_i^2 over n (n - 1), and that of the
    difference of two ratios over the same clusters is the same of psi_i - psi'_i.

    Example:
        >>> influence([1.0, 5.0], [1, 2])
        (2.0, tensor([-0.5000,  1.0000], dtype=torch.float64))
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.as_tensor(denominators, dtype=torch.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise IsolossError(f"{a.numel()} numerators do not match {b.numel()} denominators")
    n = len(a)
    if n < 2:
        raise IsolossError(f"an error bar needs at least 2 independent samples, not {n}")
    if (positive := int((b > 0).sum())) < 2:
        raise IsolossError(f"an error bar needs at least 2 denominators above 0, not {positive}")
    value = float(a.sum()) / float(b.sum())
    return value, by_leaving_out(a - value * b, b)


def by_leaving_out(residuals: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return (n, ...): the influences of ratios with residuals (n, ...) over clusters of these sizes (n,).

    n - 1 times what the ratio changes by with each cluster: `residuals * n / sum(sizes)` where all are of one size.
    """
    others = (sizes.sum() - sizes).view(-1, *[1] * (residuals.ndim - 1))
    return residuals * ((len(sizes) - 1) / others)


def effective_samples(sizes: torch.Tensor) -> float:
    """Return how many clusters of one size tell as much as clusters of these sizes (n,): (sum m)^2 / sum m^2.

    It is Kish's effective sample size (Survey Sampling, 1965), and one more than the degrees of freedom
    of the error: Satterthwaite's (1946), for clusters with a variance that grows with their size.

    Example:
        >>> effective_samples(torch.tensor([3.0, 3.0, 3.0])), effective_samples(torch.tensor([8.0, 1.0, 1.0]))
        (3.0, 1.5151515151515151)
    """
    sizes = sizes.double()
    return float(sizes.sum() ** 2 / sizes.square().sum())


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
        effective_samples=None if denominators is None else effective_samples(b),
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
