"""Correlations over clusters: Pearson's, Spearman's and Kendall's, each one also given covariates.

Shapes: N observations of p variables in G clusters; R sets of weights of the clusters (resamples, or one left out).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.checking import column, count, labels
from isoloss.statistics.jackknife import jackknife
from isoloss.statistics.multiple import p_value

Floats = NDArray[np.float64]
Kind = Literal["pearson", "spearman", "kendall"]

_BATCH = 500  # resamples at a time, for memory
_NONE_LEFT = 1e-10  # of a variable's variance: what covariates leave of it counts as nothing
_CONSTANT = 1e-12  # of a variable's size: a deviation below it is rounding
_LEAST_BOOTSTRAP = 100


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """A correlation with its intervals.

    Attributes:
        kind: `pearson`, `spearman` or `kendall`.
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
    part of the correlation: to compare within clusters, take x and y less their clusters' means, or for Pearson's give
    an indicator for each cluster but one.

    Kendall's is tau-b, tau_xy = sum_ij sign(x_i - x_j) sign(y_i - y_j) over the root of the numbers of ordered pairs
    that differ in x and that differ in y (Kendall, 1945). Given covariates it is -P_xy / sqrt(P_xx P_yy), where P is
    the inverse of the matrix of the tau-b of all pairs of variables, as in R's ppcor (Kim, 2015). With one covariate z
    this is Kendall's partial tau (1942), (tau_xy - tau_xz tau_yz) / sqrt((1 - tau_xz^2) (1 - tau_yz^2)). It need not be
    0 where x and y are independent given z: for normal ones that both correlate 0.9 with z, it is 0.19.

    With z = artanh r and z_g the same without cluster g, the squared error of z is (G - 1) / G sum_g (z_g - z)^2 (the
    cluster jackknife; MacKinnon, Nielsen and Webb, 2023). The interval is tanh(z ± t s), with Student's t of G - 1
    degrees of freedom. The bootstrap draws G clusters with replacement and ranks anew in each resample. Its interval is
    too short for few clusters, and the correction BCa makes that no better: `docs/statistics.md` has how often each
    one holds the truth.

    Args:
        x: (N,).
        y: (N,).
        clusters: (N,) the cluster of each observation, at least 3; `range(N)` where all are independent.
        kind: `pearson`, `spearman` or `kendall`.
        given: Covariates (N,) by name, e.g. the KL and the width.
        resamples: Of the bootstrap, at least 100.
        seed: Of the bootstrap; the stream is `"correlation"`.

    Raises:
        IsolossError: Values that are not finite, a label missing, fewer than 3 clusters, a variable that is constant
            or that the covariates leave nothing of, with all observations or with one cluster left out, or a
            correlation of 1 or -1, or one that is the same without each cluster, which has no error.

    Example:
        >>> x, y, width = [1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 7, 5], [1, 2, 1, 2, 2, 1]
        >>> print(correlation(x, y, range(6), kind="spearman"))
        Spearman correlation 0.83, 95 % interval 0.60 to 0.93 (6 observations in 6 clusters)
        >>> round(correlation(x, y, range(6), given={"width": width}).value, 3)
        0.796
        >>> print(correlation(x, y, range(6), kind="kendall", given={"width": width}))
        Kendall correlation given width 0.61, 95 % interval 0.15 to 0.86 (6 observations in 6 clusters)
    """
    if kind not in get_args(Kind):
        raise IsolossError(f"kind is {kind!r}; it must be 'pearson', 'spearman' or 'kendall'")
    count("resamples", resamples, _LEAST_BOOTSTRAP)
    given = given or {}
    first = column("x", x)
    named = {"x": first, **{name: column(name, each, len(first)) for name, each in {"y": y, **given}.items()}}
    names, codes = labels(clusters, len(first), least=3)
    groups = len(names)
    correlations = _correlations(kind, codes, np.stack(list(named.values())))
    value = float(correlations(np.ones((1, groups)))[0])
    if math.isnan(value):
        of = f"given {', '.join(given)}, nothing is left of x or y" if given else "x or y is constant"
        raise IsolossError(f"{of}, so that there is no correlation")
    without = correlations(1 - np.eye(groups))
    for name, each in zip([None, *names], [value, *without], strict=True):
        if not abs(each) < 1 - _NONE_LEFT:
            left = "" if name is None else f" without the cluster {name!r}"
            found = "not defined" if math.isnan(each) else f"{each:.0f}"
            raise IsolossError(f"the correlation is {found}{left}, so that its error is not known; take more clusters")
    if np.ptp([value, *without]) < _NONE_LEFT:
        raise IsolossError(
            f"the correlation is {value:.3g} without each cluster, so that its error is not known; take more clusters"
        )
    z = jackknife(math.atanh(value), np.arctanh(without), names, unit="artanh", num_observations=len(first))
    drawn = _resampled(correlations, groups, resamples, seed)
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


def _resampled(correlations: Callable[[Floats], Floats], groups: int, number: int, seed: int) -> Floats:
    """Return the correlations of resamples of the clusters, but for those without any."""
    rng = np.random.default_rng(seeds.derive(seed, "correlation"))
    weights = rng.multinomial(groups, np.full(groups, 1 / groups), size=number).astype(np.float64)
    drawn = np.concatenate([correlations(weights[start : start + _BATCH]) for start in range(0, number, _BATCH)])
    defined: Floats = drawn[np.isfinite(drawn)]
    return defined


def _correlations(kind: Kind, codes: NDArray[np.intp], values: Floats) -> Callable[[Floats], Floats]:
    """Return the function from how often each cluster counts (R, G) to the correlations (R,).

    They are of the first two of p variables given the others, and NaN where one of the two is constant or nothing of it
    is left.

    Args:
        kind: Of the correlation.
        codes: (N,) the cluster of each observation.
        values: (p, N).
    """
    if kind != "kendall":
        return lambda by_cluster: _given_others(*_products(by_cluster[:, codes], values, ranks=kind == "spearman"))
    between = _concordances(codes, values)

    def taus(by_cluster: Floats) -> Floats:
        products = [[((by_cluster @ part) * by_cluster).sum(axis=1) for part in row] for row in between]
        return _given_others(np.moveaxis(np.array(products), 2, 0), 0.0)

    return taus


def _given_others(products: Floats, rounding: float | Floats) -> Floats:
    """Return the correlations (R,) of the first two of p variables given the others.

    Args:
        products: (R, p, p) inner products of the centered variables.
        rounding: (R, p) or one for all: the root of a variable's own product that counts as 0.
    """
    scale = np.sqrt(np.einsum("rpp->rp", products))
    inverse = np.where(scale > rounding, 1 / np.where(scale > 0, scale, 1.0), 0.0)
    unit = products * inverse[:, :, None] * inverse[:, None, :]
    own, others, between = unit[:, :2, :2], unit[:, 2:, 2:], unit[:, :2, 2:]
    left = own - between @ np.linalg.pinv(others, rcond=_NONE_LEFT, hermitian=True) @ between.swapaxes(1, 2)
    defined = (left[:, 0, 0] > _NONE_LEFT) & (left[:, 1, 1] > _NONE_LEFT)
    spread = np.sqrt(np.where(defined, left[:, 0, 0] * left[:, 1, 1], 1.0))
    found: Floats = np.where(defined, np.clip(left[:, 0, 1] / spread, -1, 1), np.nan)
    return found


def _products(weights: Floats, values: Floats, *, ranks: bool) -> tuple[Floats, Floats]:
    """Return the variables' products (R, p, p) about their means, and below which size each is rounding (R, p).

    Args:
        weights: (R, N) how often each observation counts.
        values: (p, N).
        ranks: Whether values are replaced by their ranks among those that count.
    """
    total = weights.sum(axis=1)[:, None]
    if ranks:
        taken = np.stack([_ranks(weights, each) for each in values], axis=1)
    else:
        taken = np.broadcast_to(values, (len(weights), *values.shape))
    centered = taken - (taken @ weights[:, :, None]) / total[:, :, None]
    products = (centered * weights[:, None]) @ centered.swapaxes(1, 2)
    return products, _CONSTANT * np.sqrt((np.square(taken) * weights[:, None]).sum(axis=2))


def _concordances(codes: NDArray[np.intp], values: Floats) -> Floats:
    """Return the pairs' products of signs, summed by the clusters of the two observations (p, p, G, G).

    Entry (a, b, g, h) is the sum of sign(a_i - a_j) sign(b_i - b_j) over i in g and j in h: where clusters count w
    times, tau's numerator is sum_gh w_g w_h of it, and a resample costs G^2 operations.
    """
    order = np.stack([np.unique(each, return_inverse=True)[1] for each in values]).astype(np.float64)
    members = np.eye(codes.max() + 1)[codes]
    rows = []
    for cluster in range(members.shape[1]):
        signs = np.sign(order[:, codes == cluster, None] - order[:, None, :])  # (p, cluster's size, N)
        products = signs.transpose(2, 0, 1) @ signs.transpose(2, 1, 0)  # (N, p, p), each summed over the cluster
        rows.append(np.tensordot(members, products, axes=(0, 0)))
    return np.array(rows).transpose(2, 3, 0, 1)


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Return the mean ranks (R, N) of values (N,), of which each counts as often as weights (R, N) say."""
    distinct, codes = np.unique(values, return_inverse=True)
    counts = weights @ np.eye(len(distinct))[codes]
    return np.asarray((np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, codes])
