"""Observations in clusters, such as seeds within grammars: their mean, their variances, their slope on the loss."""

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
from isoloss.statistics.comparison import paired_difference, times
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate

_NOTHING = 1e-12  # the share of a variance that is left by rounding alone


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
        """Return the standard deviation of the mean of a cluster's observations: what planning takes."""
        count("per_cluster", per_cluster, 1)
        return math.hypot(self.between, self.within / math.sqrt(per_cluster))


def cluster_mean(values: ArrayLike, clusters: Sequence[Any], *, unit: str, method: str = "cluster mean") -> Estimate:
    """Return the mean of the clusters' means, with Student's t over clusters for the interval.

    With m_g the mean of cluster g of G, the error is the standard deviation of the m_g over sqrt(G), with G - 1 degrees
    of freedom. For clusters of one size this is the exact interval of a mixed model with a random cluster, by REML.
    All clusters have equal weight, whatever their sizes: the mean estimates the mean of a new cluster.

    Args:
        values: (N,) observations, e.g. paired differences.
        clusters: (N,) the cluster of each, e.g. its grammar. Clusters must be independent. Grammars with the same seeds
            are not, if a seed has an effect of its own: take `crossed_mean`.
        unit: Of the values.
        method: What the estimate is called.

    Returns:
        An estimate with `influence` by cluster, in the order of `details["labels"]`.

    Example:
        >>> from isoloss.statistics.clusters import cluster_mean
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
    `(M_rows + M_columns - M_rest) / (R C)`, the mean squares of the two-way analysis of variance. Where a large
    `M_rest` makes this smaller than one effect alone gives, the largest of `M_columns / (R C)`, `M_rows / (R C)` and,
    of the interaction, `M_rest / (R C)` is taken: values that differ have an error even where all rows and all columns
    have one mean. With one row it is the variance over the columns, and holds for that row alone.

    The interval is Student's t with the degrees of freedom f that Satterthwaite (1946) gives such a sum of mean
    squares, `V^2 / f = sum_i M_i^2 / f_i`, and `samples` is f + 1: C if most of the variance is between the columns,
    and down to R if it is between the rows.

    Args:
        values: (R, C) finite numbers, R at least 1 and C at least 2.
        unit: Of the values.
        method: What the estimate is called.

    Example:
        >>> from isoloss.statistics.clusters import crossed_mean
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
        raise IsolossError("values has a number that is not finite; a two-way mean needs all of them")
    rows, columns = table.shape
    mean, by_column, by_row = table.mean(), table.mean(dim=0), table.mean(dim=1)
    of_columns = rows * float(by_column.var()), columns - 1  # mean squares and their degrees of freedom
    parts = [of_columns]
    if rows > 1:
        rest = table - by_column - by_row[:, None] + mean
        freedom = (rows - 1) * (columns - 1)
        of_rows = columns * float(by_row.var()), rows - 1
        of_rest = float(rest.square().sum()) / freedom, freedom
        together = [of_columns, of_rows, (-of_rest[0], freedom)]
        parts = max(together, [of_columns], [of_rows], [of_rest], key=_total)
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
    max(0, (M_between - M_within) / n_0) (Searle, Casella and McCulloch, Variance Components, section 3.6).

    Example:
        >>> from isoloss.statistics.clusters import variance_components
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


# --- the slope on the loss --------------------------------------------------------------------------------------------


def slope_within(
    outcomes: ArrayLike,
    along: ArrayLike,
    clusters: Sequence[Any],
    *,
    within: Sequence[Any] | None = None,
    given: Sequence[ArrayLike] = (),
    unit: str,
) -> Estimate:
    """Return the slope of an outcome on the loss, or on another measure, within groups: the mean of their own slopes.

    b_g = sum_i (x_i - mean x)(y_i - mean y) / sum_i (x_i - mean x)^2 over group g. The slopes of the groups in a
    cluster are averaged, with Student's t over the clusters' means for the interval. It holds for unequal errors, for
    errors that go together within a cluster and for slopes that differ from cluster to cluster, down to few clusters:
    with unequal variances the t test errs on the safe side (Ibragimov and Müller, 2010). One slope fitted to all
    clusters, with the usual cluster-robust error, does not: in a simulation with 6 clusters whose losses spread
    unequally its 95 % interval covered the slope in 71 to 93 % of cases. Where all groups spread alike, the two agree.

    The slope is an association: it includes the effect of everything else that changes together with x within a
    group, such as the step, except the measures in `given`. With them, b_g is the coefficient of x in the group's
    regression on x and on these measures.

    Args:
        outcomes: (N,) y.
        along: (N,) x, which is constant in no group.
        clusters: (N,) the cluster of each observation, such as its grammar: errors are over these.
        within: (N,) the group in its cluster in which each is compared, such as the seed; None: the cluster.
        given: Further measures, (N,) each, that are held constant.
        unit: Of the slope, e.g. "points per nat".

    Returns:
        An estimate with `influence` by cluster, in the order of `details["labels"]`.

    Raises:
        IsolossError: A group has no slope: x is constant in it, or is determined by the given measures.

    Example:
        >>> from isoloss.statistics.clusters import slope_within
        >>> slope = slope_within([3, 1, 6, 2], [1.0, 2.0, 1.0, 2.0], ["a", "a", "b", "b"], unit="points per nat")
        >>> print(slope)
        -3.0 ± 1.0 points per nat
    """
    x = column("along", along)
    y = column("outcomes", outcomes, len(x))
    held = np.array([column("given", each, len(x)) for each in given]).reshape(len(given), len(x))
    names, codes = labels(clusters, len(x))
    _, inner = labels(codes.tolist() if within is None else within, len(x), least=1, what="within")
    slopes, own = [], []
    # one name in two clusters is two groups, as seeds are that count from 0 in each
    for cluster, group in np.unique(np.stack([codes, inner]), axis=1).T:
        inside, name = (codes == cluster) & (inner == group), names[cluster]
        # the range: it is exactly 0 for equal numbers, where the variance about a rounded mean need not be
        if np.ptp(x[inside]) == 0:
            raise IsolossError(f"along is constant in the cluster {name!r}, which therefore has no slope")
        centered = x[inside] - x[inside].mean()
        others = held[:, inside].T - held[:, inside].mean(axis=1)
        # what the others leave of x: the slope on it is the coefficient of x beside them
        rest = centered - others @ np.linalg.lstsq(others, centered, rcond=None)[0] if given else centered
        if rest @ rest <= _NOTHING * (centered @ centered):
            raise IsolossError(f"the given measures determine along in the cluster {name!r}, which leaves no slope")
        # equal outcomes have no slope but the rounding's
        varies = np.ptp(y[inside]) > _NOTHING * float(np.abs(y[inside]).max())
        slopes.append(float(rest @ y[inside] / (rest @ rest)) if varies else 0.0)
        own.append(name)
    return dataclasses.replace(
        cluster_mean(slopes, own, unit=unit, method="mean slope within clusters"), num_predictions=len(x)
    )


def adjusted_to_loss(
    difference: Estimate, loss_difference: Estimate, slope: Estimate, *, same_clusters: bool
) -> Estimate:
    """Return a difference of outcomes minus the part that the loss explains, with the error of the slope.

    The value is D - b L, for the difference D, the difference in loss L and the slope b; by the delta method its
    influence by cluster is psi_D - b psi_L - L psi_b. Where the slope is from other data, its L^2 s_b^2 is added to the
    squared error of D - b L, and the degrees of freedom are Satterthwaite's. The adjustment is as good as the slope is
    the effect of the loss on the outcome.

    Args:
        difference: D, of `cluster_mean`.
        loss_difference: L, of `cluster_mean` over the same pairs.
        slope: b, of `slope_within`, in units of D over those of L.
        same_clusters: Whether the slope is from the same clusters as the differences; otherwise it is independent.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.clusters import adjusted_to_loss, cluster_mean
        >>> runs = ["a", "b", "c"]
        >>> difference = cluster_mean([2.0, 3.0, 4.0], runs, unit="points")
        >>> losses = cluster_mean([-0.1, 0.0, -0.2], runs, unit="nats")
        >>> slope = Estimate(value=-10, stderr=2, samples=9, unit="points per nat", num_predictions=9, method="slope")
        >>> print(adjusted_to_loss(difference, losses, slope, same_clusters=False))
        2.00 ± 0.61 points
    """
    _check_labels([difference, loss_difference, slope] if same_clusters else [difference, loss_difference])
    together = paired_difference(difference, times(loss_difference, slope.value))
    about: dict[str, Any] = {"method": "difference at the same loss", "details": difference.details}
    if same_clusters:
        # b L moves by b psi_L, which is in `together`, and by L psi_b, which is this
        of_slope = dataclasses.replace(times(slope, loss_difference.value), value=0.0)  # its error alone
        return dataclasses.replace(paired_difference(together, of_slope), **about)
    parts = [(together.stderr**2, together.freedom), ((loss_difference.value * slope.stderr) ** 2, slope.freedom)]
    square = math.fsum(part for part, _ in parts)
    squares = math.fsum(part**2 / freedom for part, freedom in parts if part > 0)
    return dataclasses.replace(
        together,
        stderr=math.sqrt(square),
        samples=1 + round(square**2 / squares) if squares > 0 else together.samples,
        effective_samples=None,
        influence=None,
        **about,
    )


def _check_labels(estimates: Sequence[Estimate]) -> None:
    for estimate in estimates:
        if "labels" not in estimate.details:
            raise IsolossError(f"{estimate.method}: it is not over clusters; make it with cluster_mean or slope_within")
    first, *others = (estimate.details["labels"] for estimate in estimates)
    for other in others:
        if other != first:
            raise IsolossError(f"the estimates are not over the same clusters: {first} and {other}")
