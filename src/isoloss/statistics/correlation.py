"""Correlations over clusters: Pearson's, Spearman's and Kendall's, given covariates too, and the granulated Kendall's.

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
from isoloss.statistics.estimate import Estimate, number
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.statistics.significance import p_value

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Kind = Literal["pearson", "spearman", "kendall"]

_BATCH = 500  # resamples at a time, for memory
_NONE_LEFT = 1e-10  # of a variable's variance: what covariates leave of it counts as nothing
_CONSTANT = 1e-12  # of a variable's size: a deviation below it is rounding
_LEAST_BOOTSTRAP = 100
_SAME = 1e-12  # below it, differences of coefficients are rounding


def jackknife(
    value: float, without: ArrayLike, clusters: Sequence[Any], *, unit: str, num_observations: int
) -> Estimate:
    """Return a statistic of all observations with its error by the jackknife over G clusters.

    With t_g the statistic t without cluster g (`without`), the squared error is (G - 1) / G sum_g (t_g - t)^2, for
    Student's t with G - 1 degrees of freedom (the cluster jackknife; MacKinnon, Nielsen and Webb, 2023). The influences
    by cluster are (G - 1) (t - t_g), and the clusters' names are `details["labels"]`.
    """
    off = value - np.asarray(without, dtype=np.float64)
    number = len(clusters)
    return Estimate(
        value=value,
        stderr=math.sqrt((number - 1) / number * float(np.square(off).sum())),
        samples=number,
        unit=unit,
        num_predictions=num_observations,
        method="jackknife over clusters",
        details={"clusters": "clusters", "labels": list(clusters)},
        influence=(number - 1) * off,
    )


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
        z_stderr: The error of artanh r, in which the interval is symmetric.
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
    z_stderr: float

    def __str__(self) -> str:
        given = f" given {', '.join(self.given)}" if self.given else ""
        value, low, high = self.texts
        return (
            f"{self.kind.capitalize()} correlation{given} {value}, 95 % interval {low} to {high} "
            f"({self.observations} observations in {self.clusters} clusters)"
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """The value and the two ends of the interval with two decimals; none is -0."""
        return tuple(f"{round(each, 2) + 0.0:.2f}" for each in (self.value, *self.interval95))

    def estimate(self) -> Estimate:
        """Return it as an estimate, with the error in r: dr = (1 - r^2) d artanh r.

        Example:
            >>> from isoloss.statistics.correlation import correlation
            >>> print(correlation([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 7, 5], range(6)).estimate())
            0.792 ± 0.068 correlation
        """
        return Estimate(
            value=self.value,
            stderr=self.z_stderr * (1 - self.value**2),
            samples=self.clusters,
            unit="correlation",
            num_predictions=self.observations,
            method=f"{'partial ' if self.given else ''}{self.kind} correlation, jackknife over clusters",
        )

    def detectable(self, *, power: float = 0.8, alpha: float = 0.05) -> float:
        """Return the smallest size of a true correlation that a two-sided test at level alpha finds with this power.

        The error is taken to be the one that was found here.
        """
        sd = self.z_stderr * math.sqrt(self.clusters)
        return math.tanh(minimal_detectable_effect(sd, self.clusters, power=power, alpha=alpha))


def correlation(
    x: ArrayLike,
    y: ArrayLike,
    clusters: Sequence[Any],
    *,
    kind: Kind = "pearson",
    given: Mapping[str, ArrayLike] | None = None,
    within: Sequence[Any] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Correlation:
    """Return the correlation of two variables over observations that are independent only between clusters.

    Given covariates it is the partial correlation, of the residuals of x and y after least squares on the
    covariates and a constant. Spearman's is Pearson's of the ranks, ties counting with their mean rank; given
    covariates, of the ranks of all variables. All observations count alike, so that differences between clusters are
    part of the correlation; `within` first subtracts from every variable its mean over each group, such as a cluster.

    Kendall's is tau-b, tau_xy = sum_ij sign(x_i - x_j) sign(y_i - y_j) over the root of the numbers of ordered pairs
    that differ in x and that differ in y (Kendall, 1945). Given covariates it is -P_xy / sqrt(P_xx P_yy), where P is
    the inverse of the matrix of the tau-b of all pairs of variables, as in R's ppcor (Kim, 2015). With one covariate z
    this is Kendall's partial tau (1942), (tau_xy - tau_xz tau_yz) / sqrt((1 - tau_xz^2) (1 - tau_yz^2)). It need not be
    0 where x and y are independent given z: for normal ones that both correlate 0.9 with z, it is 0.19.

    With z = artanh r, the interval is tanh(z ± t s): s is the error of z by the `jackknife` over the G clusters, and t
    is Student's with G - 1 degrees of freedom. The bootstrap draws G clusters with
    replacement and ranks anew in each resample. Its interval is too short for few clusters, and the correction BCa
    makes that no better: `docs/method/statistics.md` has how often each one holds the truth.

    Args:
        x: (N,).
        y: (N,).
        clusters: (N,) the cluster of each observation, at least 3; `range(N)` where all are independent.
        kind: `pearson`, `spearman` or `kendall`.
        given: Covariates (N,) by name, e.g. the KL and the width.
        within: (N,) the group of each observation; no group spans two clusters. None: variables as they are.
        resamples: Of the bootstrap, at least 100.
        seed: Of the bootstrap; the stream is `"correlation"`.

    Raises:
        IsolossError: Values that are not finite, a label missing, a group that spans two clusters, fewer than 3
            clusters, a variable that is constant or that the covariates leave nothing of, with all observations or with
            one cluster left out, or a correlation of 1 or -1, or one that is the same without each cluster, which has
            no error.

    Example:
        >>> from isoloss.statistics.correlation import correlation
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
    if within is not None:
        _, blocks = labels(within, len(first), 1, "within")
        named = {name: _less_means(each, blocks, ranked=kind != "pearson") for name, each in named.items()}
    names, codes = labels(clusters, len(first), least=3)
    if within is not None and len({*zip(blocks.tolist(), codes.tolist(), strict=True)}) > blocks.max() + 1:
        raise IsolossError("within has a group that spans two clusters; each must be a part of one cluster")
    groups = len(names)
    correlations = _correlations(kind, codes, np.stack(list(named.values())))
    value = float(correlations(np.ones((1, groups)))[0])
    if math.isnan(value):
        of = f"given {', '.join(given)}, nothing is left of x or y" if given else "x or y is constant"
        raise IsolossError(f"{of}, so that there is no correlation")
    # leaving a cluster out is a resample that counts it 0 times: one function serves the jackknife and the bootstrap
    without = correlations(1 - np.eye(groups))
    for name, each in zip([None, *names], [value, *without], strict=True):
        # not `>=`, which NaN would pass
        if not abs(each) < 1 - _NONE_LEFT:
            where = "" if name is None else f" without the cluster {name!r}"
            shown = "not defined" if math.isnan(each) else f"{each:.0f}"
            raise IsolossError(f"the correlation is {shown}{where}, so that its error is not known; take more clusters")
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
        z_stderr=z.stderr,
    )


def _less_means(values: Floats, groups: Integers, *, ranked: bool) -> Floats:
    """Return values less the mean of their group; for ranks, equal deviations are equal to the last bit."""
    off: Floats = values - (np.bincount(groups, values) / np.bincount(groups))[groups]
    grain = _CONSTANT * float(np.abs(values).max()) or 1.0
    # what is left of values that are constant in every group is rounding, too
    return np.round(off / grain) * grain if ranked or float(np.abs(off).max()) < grain else off


def _resampled(correlations: Callable[[Floats], Floats], groups: int, number: int, seed: int) -> Floats:
    """Return the correlations of resamples of the clusters, but for those without any."""
    rng = np.random.default_rng(seeds.derive(seed, "correlation"))
    weights = rng.multinomial(groups, np.full(groups, 1 / groups), size=number).astype(np.float64)
    drawn = np.concatenate([correlations(weights[start : start + _BATCH]) for start in range(0, number, _BATCH)])
    defined: Floats = drawn[np.isfinite(drawn)]
    return defined


def _correlations(kind: Kind, codes: Integers, values: Floats) -> Callable[[Floats], Floats]:
    """Return the function from how often each cluster counts (R, G) to the correlations (R,).

    They are of the first two of `values` (p, N) given the others, and NaN where nothing is left of one of the two.
    """
    if kind != "kendall":
        return lambda by_cluster: _given_others(*_products(by_cluster[:, codes], values, ranks=kind == "spearman"))
    between = _concordances(codes, values)

    def taus(by_cluster: Floats) -> Floats:
        products = [[((by_cluster @ part) * by_cluster).sum(axis=1) for part in row] for row in between]
        return _given_others(np.moveaxis(np.array(products), 2, 0), 0.0)

    return taus


def _given_others(products: Floats, rounding: float | Floats) -> Floats:
    """Return the correlations (R,), given the inner products (R, p, p) of the centered variables.

    `rounding` (R, p), or one for all, is the root of a variable's own product that counts as 0.
    """
    scale = np.sqrt(np.einsum("rpp->rp", products))
    # `np.where` computes both branches, so the division needs a guard of its own
    inverse = np.where(scale > rounding, 1 / np.where(scale > 0, scale, 1.0), 0.0)
    unit = products * inverse[:, :, None] * inverse[:, None, :]
    # the Schur complement: the covariance of the two that least squares on the others leaves, and of tau-b the entry of
    # P. Covariates may be collinear, as settings that change together are: hence the pseudo-inverse
    pair, others, between = unit[:, :2, :2], unit[:, 2:, 2:], unit[:, :2, 2:]
    partial = pair - between @ np.linalg.pinv(others, rcond=_NONE_LEFT, hermitian=True) @ between.swapaxes(1, 2)
    defined = (partial[:, 0, 0] > _NONE_LEFT) & (partial[:, 1, 1] > _NONE_LEFT)
    spread = np.sqrt(np.where(defined, partial[:, 0, 0] * partial[:, 1, 1], 1.0))
    coefficients: Floats = np.where(defined, np.clip(partial[:, 0, 1] / spread, -1, 1), np.nan)
    return coefficients


def _products(weights: Floats, values: Floats, *, ranks: bool) -> tuple[Floats, Floats]:
    """Return the products (R, p, p) of values (p, N) about their means, and below which size each is rounding (R, p).

    Observations count as often as weights (R, N) say; with `ranks`, values are their ranks among those that count.
    """
    total = weights.sum(axis=1)[:, None]
    if ranks:
        taken = np.stack([_ranks(weights, each) for each in values], axis=1)
    else:
        taken = np.broadcast_to(values, (len(weights), *values.shape))
    centered = taken - (taken @ weights[:, :, None]) / total[:, :, None]
    products = (centered * weights[:, None]) @ centered.swapaxes(1, 2)
    return products, _CONSTANT * np.sqrt((np.square(taken) * weights[:, None]).sum(axis=2))


def _concordances(codes: Integers, values: Floats) -> Floats:
    """Return the pairs' products of signs, summed by the clusters of the two observations (p, p, G, G).

    Entry (a, b, g, h) is the sum of sign(a_i - a_j) sign(b_i - b_j) over i in g and j in h: where clusters count w
    times, tau's numerator is sum_gh w_g w_h of it, and a resample costs G^2 operations.
    """
    order = np.stack([np.unique(each, return_inverse=True)[1] for each in values]).astype(np.float64)
    members = np.eye(codes.max() + 1)[codes]
    rows = []
    # one cluster at a time: the signs of all pairs at once would be (p, N, N)
    for cluster in range(members.shape[1]):
        signs = np.sign(order[:, codes == cluster, None] - order[:, None, :])  # (p, cluster's size, N)
        products = signs.transpose(2, 0, 1) @ signs.transpose(2, 1, 0)  # (N, p, p), each summed over the cluster
        rows.append(np.tensordot(members, products, axes=(0, 0)))
    return np.array(rows).transpose(2, 3, 0, 1)


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Return the mean ranks (R, N) of values (N,), of which each counts as often as weights (R, N) say."""
    distinct, codes = np.unique(values, return_inverse=True)
    counts = weights @ np.eye(len(distinct))[codes]
    # c equal values that end at rank n have the mean rank n - (c - 1) / 2
    return np.asarray((np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, codes])


# --- in cells of hyper-parameters -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GranulatedKendall:
    """A granulated Kendall coefficient and its parts, each with its error over clusters.

    Attributes:
        coefficient: The mean of `by_hyperparameter`.
        by_hyperparameter: For each hyper-parameter the mean of tau over its cells. The error is 0 where it is the same
            without each cluster, and so not known.
        cells: How many cells each of these is a mean of.
    """

    coefficient: Estimate
    by_hyperparameter: Mapping[str, Estimate]
    cells: Mapping[str, int]

    def __str__(self) -> str:
        whole, parts = self.coefficient, self.by_hyperparameter.items()
        return (
            f"granulated Kendall coefficient {number(whole)} ({whole.num_predictions} observations in {whole.samples} "
            f"clusters): "
            + ", ".join(f"{name} {number(each) if each.stderr > 0 else f'{each.value:.2f}'}" for name, each in parts)
        )


@dataclass(frozen=True)
class _Pairs:
    """The pairs of observations that differ in one hyper-parameter alone: signs, cells, and both clusters (P,)."""

    signs: Floats
    cells: Integers
    first: Integers
    second: Integers

    def mean(self, without: int = -1) -> float:
        """Return the mean over cells of the mean sign, without a cluster; NaN where no pair is left."""
        used = (self.first != without) & (self.second != without)
        numbers = np.bincount(self.cells[used])
        some = numbers > 0
        sums = np.bincount(self.cells[used], self.signs[used])
        return float((sums[some] / numbers[some]).mean()) if some.any() else float("nan")


def granulated_kendall(
    x: ArrayLike, y: ArrayLike, hyperparameters: Mapping[str, Sequence[Any]], clusters: Sequence[Any]
) -> GranulatedKendall:
    """Return the granulated Kendall coefficient of two variables (Jiang et al., 2020, section 2).

    A correlation over all runs is high where a single hyper-parameter moves both variables. Here only runs are compared
    that differ in one hyper-parameter and agree in all others. With n hyper-parameters, the coefficient is

        Psi = 1/n sum_i psi_i, psi_i = 1/m_i sum_cells tau(cell).

    A cell of hyper-parameter i is all observations with the same values of the others; m_i is the number of cells with
    at least two values of i. The tau of a cell is the mean over its pairs of sign(x_j - x_k) sign(y_j - y_k). As in the
    paper, a tied pair counts as 0 (tau-a), so that a cell in which all are tied has a tau of 0 and counts like any
    other. Where observations repeat all hyper-parameters, only pairs with different values of i are taken.

    The error is by the jackknife over clusters, and two measures x over the same runs have a paired difference:
    `paired_difference(first.coefficient, second.coefficient)`.

    Args:
        x: (N,) such as the flatness.
        y: (N,) such as the transfer.
        hyperparameters: (N,) values of each by name, e.g. of the arm, the size and the seed. Repetitions may be one of
            them, which asks whether x and y go together where nothing but chance differs.
        clusters: (N,) the cluster of each observation, at least 3; observations of different clusters are independent.

    Raises:
        IsolossError: Values that are not finite, a label missing, fewer than 3 clusters, a hyper-parameter in which
            alone no two observations differ, with all clusters or without one, or a coefficient that is the same
            without each cluster, so that its error is not known.

    Example:
        Two arms, each with the same four seeds. In 3 of 4 seeds the arms' order agrees: psi is (3 - 1) / 4. Of the 6
        pairs of seeds all agree in arm a and 5 in arm b: (6 / 6 + 4 / 6) / 2 = 5 / 6. Their mean is 2 / 3.

        >>> from isoloss.statistics.correlation import granulated_kendall
        >>> runs = {"arm": ["a"] * 4 + ["b"] * 4, "seed": [0, 1, 2, 3] * 2}
        >>> sharpness, error = [1, 3, 6, 7, 2, 4, 5, 8], [1, 2, 3, 4, 2, 5, 4, 6]
        >>> found = granulated_kendall(sharpness, error, runs, clusters=runs["seed"])
        >>> print(found)
        granulated Kendall coefficient 0.67 ± 0.35 (8 observations in 4 clusters): arm 0.50 ± 0.50, seed 0.83 ± 0.29
        >>> {name: round(each.value, 3) for name, each in found.by_hyperparameter.items()}
        {'arm': 0.5, 'seed': 0.833}
    """
    x = column("x", x)
    y = column("y", y, len(x))
    names, groups = labels(clusters, len(x), least=3)
    if not hyperparameters:
        raise IsolossError("hyperparameters is empty; it must have the values of at least one")
    codes = {name: labels(values, len(x), least=1, what=name)[1] for name, values in hyperparameters.items()}
    pairs = {name: _pairs(x, y, name, codes, groups) for name in codes}
    without = np.array([[each.mean(without=g) for each in pairs.values()] for g in range(len(names))])
    missing = np.argwhere(np.isnan(without))
    if len(missing):
        g, i = missing[0]
        raise IsolossError(
            f"without the cluster {names[g]!r} no two observations differ in {list(pairs)[i]!r} alone, so that its "
            "error is not known; take more clusters, or leave it out"
        )
    values = np.array([each.mean() for each in pairs.values()])
    # so that a tau that is the same without each cluster has the error 0, which is printed as not known, and not one of
    # rounding
    without = np.where(np.abs(without - values) < _SAME, values, without)
    overall, of_others = float(values.mean()), without.mean(axis=1)
    if np.abs(of_others - overall).max() < _SAME:
        raise IsolossError(
            f"the coefficient is {overall:.3g} without each cluster, so that its error is not known; take more clusters"
        )

    def estimate(value: float, others: Floats) -> Estimate:
        return jackknife(value, others, names, unit="Kendall's tau", num_observations=len(x))

    return GranulatedKendall(
        coefficient=estimate(overall, of_others),
        by_hyperparameter=dict(zip(pairs, map(estimate, values.tolist(), without.T), strict=True)),
        cells={name: len(np.unique(each.cells)) for name, each in pairs.items()},
    )


def _pairs(x: Floats, y: Floats, name: str, codes: Mapping[str, Integers], groups: Integers) -> _Pairs:
    """Return the pairs of observations that differ in the hyper-parameter `name` alone."""
    # the zeros are for a single hyper-parameter, which has no others: all runs are then one cell
    others = np.stack([np.zeros_like(groups), *(each for other, each in codes.items() if other != name)], axis=1)
    cells = np.unique(others, axis=0, return_inverse=True)[1].reshape(-1)
    values = codes[name]
    first, second = np.nonzero(np.triu((cells[:, None] == cells) & (values[:, None] != values)))
    if not len(first):
        raise IsolossError(f"no two observations differ in {name!r} alone; leave it out of the hyper-parameters")
    signs = np.sign(x[first] - x[second]) * np.sign(y[first] - y[second])
    return _Pairs(signs, cells[first], groups[first], groups[second])
