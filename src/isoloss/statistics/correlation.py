"""Correlations over clusters: Pearson's, Spearman's, and either one given covariates.

Shapes: N observations of p variables in G clusters; R sets of weights of the clusters (resamples, or one left out).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.checking import column, count, labels
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.multiple import p_value

Floats = NDArray[np.float64]
Kind = Literal["pearson", "spearman"]

_BATCH = 500  # resamples at a time, for memory
_NONE_LEFT = 1e-10  # of a variable's variance: what covariates leave of it counts as nothing
_CONSTANT = 1e-12  # of a variable's size: a deviation below it is rounding
_LEAST_BOOTSTRAP = 100


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """A correlation with its intervals.

    Attributes:
        kind: `pearson` or `spearman`.
        given: The covariates' names.
        value: The correlation.
        interval95: The 95 % interval by the jackknife over clusters, the one to report.
        p_value: Of no correlation, two-sided, from the same error.
        bootstrap95: The 95 % percentile interval over resamples of the clusters; too short for few clusters.
        observations: N.
        clusters: G.
        resamples: How many of the bootstrap's have a correlation; in the others a variable is constant.
    """

    kind: Kind
    given: tuple[str, ...]
    value: float
    interval95: tuple[float, float]
    p_value: float
    bootstrap95: tuple[float, float]
    observations: int
    clusters: int
    resamples: int

    def __str__(self) -> str:
        given = f" given {', '.join(self.given)}" if self.given else ""
        low, high = self.interval95
        return (
            f"{self.kind.capitalize()} correlation{given} {self.value:.2f}, 95 % interval {low:.2f} to {high:.2f} "
            f"({self.observations} observations in {self.clusters} clusters)"
        )


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    clusters: Sequence[Any],
    *,
    kind: Kind = "pearson",
    given: Mapping[str, ArrayLike] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Correlation:
    """Return the correlation of two variables over observations that are independent only between clusters.

    Given covariates it is the partial correlation: that of the residuals of x and y after least squares on the
    covariates and a constant. Spearman's is Pearson's of the ranks, ties counting with their mean rank; given
    covariates, of the ranks of all variables. All observations count alike, so that differences between clusters are
    part of the correlation: to compare within clusters, take x and y less their clusters' means, or give an indicator
    for each cluster but one.

    With z = artanh r and z_g the same without cluster g, the squared error of z is (G - 1) / G sum_g (z_g - z)^2 (the
    cluster jackknife; MacKinnon, Nielsen and Webb, 2023). The interval is tanh(z ± t s), with Student's t of G - 1
    degrees of freedom. The bootstrap draws G clusters with replacement and ranks anew in each resample. Its interval is
    too short for few clusters, and the correction BCa makes that no better: `docs/statistics.md` has how often each
    one holds the truth.

    Args:
        x: (N,).
        y: (N,).
        clusters: (N,) the cluster of each observation, at least 3; `range(N)` where all are independent.
        kind: `pearson` or `spearman`.
        given: Covariates (N,) by name, e.g. the KL and the width.
        resamples: Of the bootstrap, at least 100.
        seed: Of the bootstrap; the stream is `"correlation"`.

    Raises:
        IsolossError: Values that are not finite, a label missing, fewer than 3 clusters, a variable that is constant
            or that the covariates leave nothing of, with all observations or with one cluster left out, or a
            correlation of 1 or -1, which has no error.

    Example:
        >>> x, y, width = [1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 7, 5], [1, 2, 1, 2, 2, 1]
        >>> print(correlation(x, y, range(6), kind="spearman"))
        Spearman correlation 0.83, 95 % interval 0.60 to 0.93 (6 observations in 6 clusters)
        >>> round(correlation(x, y, range(6), given={"width": width}).value, 3)
        0.796
    """
    if kind not in ("pearson", "spearman"):
        raise IsolossError(f"kind is {kind!r}; it must be 'pearson' or 'spearman'")
    count("resamples", resamples, _LEAST_BOOTSTRAP)
    given = given or {}
    first = column("x", x)
    named = {"x": first, **{name: column(name, each, len(first)) for name, each in {"y": y, **given}.items()}}
    names, codes = labels(clusters, len(first), least=3)
    values, ranks, groups = np.stack(list(named.values())), kind == "spearman", len(names)
    value = float(_correlations(np.ones((1, groups)), codes, values, ranks=ranks)[0])
    if math.isnan(value):
        of = f"given {', '.join(given)}, nothing is left of x or y" if given else "x or y is constant"
        raise IsolossError(f"{of}, so that there is no correlation")
    without = _correlations(1 - np.eye(groups), codes, values, ranks=ranks)
    for name, each in zip([None, *names], [value, *without], strict=True):
        if not abs(each) < 1 - _NONE_LEFT:
            left = "" if name is None else f" without the cluster {name!r}"
            found = "not defined" if math.isnan(each) else f"{each:.0f}"
            raise IsolossError(f"the correlation is {found}{left}, so that its error is not known; take more clusters")
    off = np.arctanh(without) - math.atanh(value)
    z = Estimate(
        value=math.atanh(value),
        stderr=math.sqrt((groups - 1) / groups * float(np.square(off).sum())),
        samples=groups,
        unit="artanh of a correlation",
        num_predictions=len(first),
        method="jackknife over clusters",
    )
    drawn = _resampled(codes, values, groups, resamples, seed, ranks=ranks)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Correlation(
        kind=kind,
        given=tuple(given),
        value=value,
        interval95=(math.tanh(z.ci95[0]), math.tanh(z.ci95[1])),
        p_value=p_value(z),
        bootstrap95=(float(low), float(high)),
        observations=len(first),
        clusters=groups,
        resamples=len(drawn),
    )


def _resampled(codes: NDArray[np.intp], values: Floats, groups: int, number: int, seed: int, *, ranks: bool) -> Floats:
    """Return the correlations of resamples of the clusters, but for those without any."""
    rng = np.random.default_rng(seeds.derive(seed, "correlation"))
    weights = rng.multinomial(groups, np.full(groups, 1 / groups), size=number).astype(np.float64)
    batches = (weights[start : start + _BATCH] for start in range(0, number, _BATCH))
    drawn = np.concatenate([_correlations(batch, codes, values, ranks=ranks) for batch in batches])
    defined: Floats = drawn[np.isfinite(drawn)]
    return defined


def _correlations(by_cluster: Floats, codes: NDArray[np.intp], values: Floats, *, ranks: bool) -> Floats:
    """Return the correlations (R,) of the first two of p variables given the others.

    Args:
        by_cluster: (R, G) how often each cluster counts.
        codes: (N,) the cluster of each observation.
        values: (p, N).
        ranks: Whether values are replaced by their ranks among those that count.

    Returns:
        NaN where one of the two is constant, or nothing of it is left.
    """
    weights = by_cluster[:, codes]
    total = weights.sum(axis=1)[:, None]
    if ranks:
        taken = np.stack([_ranks(weights, each) for each in values], axis=1)
    else:
        taken = np.broadcast_to(values, (len(weights), *values.shape))
    centered = taken - (taken @ weights[:, :, None]) / total[:, :, None]
    products = (centered * weights[:, None]) @ centered.swapaxes(1, 2)
    scale = np.sqrt(np.einsum("rpp->rp", products))
    size = np.sqrt((np.square(taken) * weights[:, None]).sum(axis=2))
    inverse = np.where(scale > _CONSTANT * size, 1 / np.where(scale > 0, scale, 1.0), 0.0)
    unit = products * inverse[:, :, None] * inverse[:, None, :]
    own, others, between = unit[:, :2, :2], unit[:, 2:, 2:], unit[:, :2, 2:]
    left = own - between @ np.linalg.pinv(others, rcond=_NONE_LEFT, hermitian=True) @ between.swapaxes(1, 2)
    defined = (left[:, 0, 0] > _NONE_LEFT) & (left[:, 1, 1] > _NONE_LEFT)
    spread = np.sqrt(np.where(defined, left[:, 0, 0] * left[:, 1, 1], 1.0))
    found: Floats = np.where(defined, np.clip(left[:, 0, 1] / spread, -1, 1), np.nan)
    return found


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Return the mean ranks (R, N) of values (N,), of which each counts as often as weights (R, N) say."""
    distinct, codes = np.unique(values, return_inverse=True)
    counts = weights @ np.eye(len(distinct))[codes]
    return np.asarray((np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, codes])
