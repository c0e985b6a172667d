"""Means over observations that are not independent: seeds within grammars, or grammars crossed with seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from isoloss.errors import IsolossError
from isoloss.statistics.checking import column, count, labels
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate


@dataclass(frozen=True, kw_only=True)
class VarianceComponents:
    """How much differences vary, in their unit.

    Attributes:
        between: Standard deviation of the clusters' true means.
        within: Standard deviation within a cluster.
    """

    between: float
    within: float

    def sd_of_means(self, per_cluster: int) -> float:
        """Return the standard deviation of the mean of a cluster's observations: what planning takes.

        Example:
            >>> round(VarianceComponents(between=0.5, within=1.0).sd_of_means(4), 3)
            0.707
        """
        count("per_cluster", per_cluster, 1)
        return math.hypot(self.between, self.within / math.sqrt(per_cluster))


def cluster_mean(values: ArrayLike, clusters: Sequence[Any], *, unit: str, method: str = "cluster mean") -> Estimate:
    """Return the mean of the clusters' means, with Student's t over clusters for the interval.

    With m_g the mean of cluster g of G, the error is the standard deviation of the m_g over sqrt(G), with G - 1 degrees
    of freedom. For clusters of one size this is the exact interval of a mixed model with a random cluster, by REML.
    Clusters count alike, whatever their sizes: the mean is that of a fresh cluster.

    Args:
        values: (N,) observations, e.g. paired differences.
        clusters: (N,) the cluster of each, e.g. its grammar. Clusters are independent, as grammars are not where all
            have the same seeds and a seed has an effect of its own: for these there is `crossed_mean`.
        unit: Of the values.
        method: What the estimate is called.

    Returns:
        An estimate with `influence` by cluster, in the order of `details["labels"]`.

    Raises:
        IsolossError: Values that are not finite, a label missing, or a single cluster.

    Example:
        >>> print(cluster_mean([1.0, 3.0, 4.0, 4.0, 7.0], ["a", "a", "b", "b", "c"], unit="points"))
        4.3 ± 1.5 points
    """
    values = column("values", values)
    names, codes = labels(clusters, len(values))
    means = np.bincount(codes, values) / np.bincount(codes)
    return dataclasses.replace(
        ratio_estimate(torch.from_numpy(means), unit=unit, method=method),
        num_predictions=len(values),
        details={"clusters": "clusters", "labels": names},
    )


def crossed_mean(values: torch.Tensor | Sequence[Sequence[float]], *, unit: str, method: str) -> Estimate:
    """Return the mean over rows and columns that are both samples, such as seeds and grammars.

    With R rows and C columns as crossed random effects, the variance of the mean is estimated without bias by
    `(M_rows + M_columns - M_rest) / (R C)`, the mean squares of the two-way analysis of variance. Where a large rest
    makes that smaller than one of the two effects alone says, the larger of `M_columns / (R C)` and `M_rows / (R C)` is
    taken. With one row it is that of the columns, and holds for that row alone.

    The interval is Student's t with the degrees of freedom f that Satterthwaite (1946) gives such a sum of mean
    squares, `V^2 / f = sum_i M_i^2 / f_i`, and `samples` is f + 1: C where the draw of the columns decides, and down to
    R where that of the rows does.

    Args:
        values: (R, C), at least 1 and 2.
        unit: Of the values.
        method: What the estimate is called.

    Raises:
        IsolossError: Not a table, too small, or values that are not finite.

    Example:
        >>> print(crossed_mean([[1.0, 2.0, 4.0], [2.0, 2.0, 5.0]], unit="points", method="two-way"))
        2.67 ± 0.97 points
    """
    try:
        table = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise IsolossError(f"values is not a table of numbers: {error}") from error
    if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 2:
        raise IsolossError(
            f"values has the shape {tuple(table.shape)}; it must be a table of at least 1 row, 2 columns"
        )
    if not table.isfinite().all():
        raise IsolossError("values has one that is not finite; a two-way mean needs all of them")
    rows, columns = table.shape
    mean, by_column, by_row = table.mean(), table.mean(dim=0), table.mean(dim=1)
    of_columns = rows * float(by_column.var()), columns - 1  # mean squares and their degrees of freedom
    parts = [of_columns]
    if rows > 1:
        rest = table - by_column - by_row[:, None] + mean
        freedom = (rows - 1) * (columns - 1)
        of_rows = columns * float(by_row.var()), rows - 1
        of_rest = -float(rest.square().sum()) / freedom, freedom
        parts = max([of_columns, of_rows, of_rest], [of_columns], [of_rows], key=_total)
    square, squares = _total(parts), sum(part**2 / freedom for part, freedom in parts)
    return Estimate(
        value=float(mean),
        stderr=math.sqrt(square / (rows * columns)),
        samples=1 + max(1, round(square**2 / squares)) if squares > 0 else columns,
        unit=unit,
        num_predictions=rows * columns,
        method=method,
    )


def variance_components(values: ArrayLike, clusters: Sequence[Any]) -> VarianceComponents:
    """Return how much values vary between clusters and within them, by the method of moments.

    With the mean squares M_between and M_within of the one-way analysis of variance, N observations in G clusters of
    sizes n_g, and n_0 = (N - sum n_g^2 / N) / (G - 1), the variances are M_within and
    max(0, (M_between - M_within) / n_0) (Searle, Casella and McCulloch, Variance Components, section 3.6). The
    arguments are those of `cluster_mean`.

    Raises:
        IsolossError: As for `cluster_mean`, or no cluster has two observations.

    Example:
        >>> variance_components([1.0, 3.0, 5.0, 7.0], ["a", "a", "b", "b"])
        VarianceComponents(between=2.6457513110645907, within=1.4142135623730951)
    """
    values = column("values", values)
    names, codes = labels(clusters, len(values))
    if len(values) == len(names):
        raise IsolossError(f"each of the {len(names)} clusters has one observation; how they vary within is not known")
    sizes = np.bincount(codes)
    means = np.bincount(codes, values) / sizes
    within = float(np.square(values - means[codes]).sum()) / (len(values) - len(names))
    between = float((sizes * np.square(means - values.mean())).sum()) / (len(names) - 1)
    size = (len(values) - float(np.square(sizes).sum()) / len(values)) / (len(names) - 1)
    return VarianceComponents(between=math.sqrt(max(0.0, (between - within) / size)), within=math.sqrt(within))


def _total(parts: list[tuple[float, int]]) -> float:
    return math.fsum(part for part, _ in parts)
