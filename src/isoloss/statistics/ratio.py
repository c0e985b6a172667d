"""Means and ratios of independent samples with their standard errors, all in float64: what every error bar rests on.

`ratio` and its like are of two numbers a sample. `ClusteredRatioEstimator`, by which a trace is computed, sums columns
over independent clusters of sequences, less control variates whose mean is known.

Shapes: n sequences of a batch, K columns (parameter tensors or blocks of them), C control variates, r of them with
means from an auxiliary sample, F folds, N clusters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from isoloss.errors import NOTHING_PREDICTED, IsolossError
from isoloss.statistics.estimate import Estimate

Values = torch.Tensor | Sequence[float]


def ratio(numerators: Values, denominators: Values) -> tuple[float, float]:
    """Return sum(a) / sum(b) over independent clusters, and its standard error by the jackknife.

    With r_i the ratio r without cluster i, the squared error is (n - 1) / n sum_i (r_i - r)^2, where
    r - r_i = (a_i - r b_i) / (sum(b) - b_i). Where every b_i is 1 this is the mean and s / sqrt(n). Of few unequal
    clusters it is larger than the delta method's (Cochran, Sampling Techniques, section 6.3), in which a large cluster
    pulls r towards itself, so that its residual is too small.

    Args:
        numerators: (n,) a: what each cluster adds up to, e.g. the nats of all predicted tokens of a sequence.
        denominators: (n,) b: how much it counts, e.g. the number of its predicted tokens.

    Raises:
        IsolossError: Fewer than two clusters with a denominator above 0, or unequal lengths.

    Example:
        >>> from isoloss.statistics.ratio import ratio
        >>> ratio([1.0, 5.0], [1, 2])  # 5 / 2 without the first, 1 without the second
        (2.0, 0.7905694150420949)
    """
    value, psi = influence(numerators, denominators)
    return value, _stderr(psi)


def _stderr(psi: torch.Tensor) -> float:
    return math.sqrt(float(psi.square().sum()) / (len(psi) * (len(psi) - 1)))


def influence(numerators: Values, denominators: Values) -> tuple[float, torch.Tensor]:
    """Return the ratio as `ratio` does, and its influences psi_i = (n - 1) (r - r_i), (n,) float64.

    The squared error is the sum of psi_i^2 over n (n - 1). The difference of two ratios over the same clusters has the
    influences psi_i - psi'_i.
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
    """Return (n, ...): the influences of ratios with residuals (n, ...) over clusters of these sizes (n,)."""
    # never 0: the callers refuse fewer than two clusters with a size above 0
    others = (sizes.sum() - sizes).view(-1, *[1] * (residuals.ndim - 1))
    return residuals * ((len(sizes) - 1) / others)


def effective_samples(sizes: torch.Tensor) -> float:
    """Return how many clusters of one size tell as much as clusters of these sizes (n,): (sum m)^2 / sum m^2.

    It is Kish's effective sample size (Survey Sampling, 1965), and one more than the degrees of freedom
    of the error: Satterthwaite's (1946), for clusters with a variance that grows with their size.
    """
    sizes = sizes.double()
    return float(sizes.sum() ** 2 / sizes.square().sum())


def ratio_estimate(numerators: Values, denominators: Values | None = None, *, unit: str, method: str) -> Estimate:
    """Return `ratio` as an `Estimate` with its influence; without denominators it is the mean.

    Example:
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> ratio_estimate([1.0, 2.0, 6.0], unit="nats", method="loss")
        Estimate(3.0 ± 1.5 nats; loss; 3 samples)
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.ones_like(a) if denominators is None else torch.as_tensor(denominators, dtype=torch.float64)
    value, psi = influence(a, b)
    found = from_influence(value, psi, b, unit=unit, method=method)
    return found if denominators is not None else replace(found, effective_samples=None)


def estimate_in_blocks(
    numerators: torch.Tensor, denominators: torch.Tensor, blocks: torch.Tensor | None, *, unit: str, method: str
) -> Estimate:
    """Return `ratio_estimate` over blocks of clusters, with the error over the clusters where that is the larger one.

    By chance the error over blocks, which are few, may be too small. `blocks` is (n,) int64, the block of each cluster;
    None: the clusters are independent.
    """
    over_clusters = ratio_estimate(numerators, denominators, unit=unit, method=method)
    if blocks is None:
        return over_clusters
    a, b = (x.new_zeros(int(blocks.max()) + 1).index_add_(0, blocks, x) for x in (numerators, denominators))
    value, psi = influence(a, b)
    stderr = max(_stderr(psi), over_clusters.stderr)
    return replace(from_influence(value, scaled_to(stderr, psi, len(psi)), b, unit=unit, method=method), stderr=stderr)


def from_influence(value: float, psi: torch.Tensor, sizes: torch.Tensor, *, unit: str, method: str) -> Estimate:
    """Return the estimate with these influences (n,) of clusters of these sizes (n,), such as predicted tokens."""
    return Estimate(
        value=value,
        stderr=_stderr(psi),
        samples=len(psi),
        unit=unit,
        num_predictions=int(sizes.sum()),
        method=method,
        effective_samples=effective_samples(sizes),
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
    # the means of rows and of columns both contain the noise, so it is counted twice and taken off once
    variance = max(of_rows + of_columns - of_noise, of_noise)  # s_rows and s_columns are at least 0
    # scaled from len(effect) to `samples`, so that the squares of both effects add up by one rule, as
    # `Estimate.influence` says
    parts = [effect * (scale / math.sqrt(len(effect) * (len(effect) - 1))) for effect in (by_row, by_column)]
    samples = min(n, columns)
    return ratio, math.sqrt(variance) * n / float(sizes.sum()), torch.cat(parts) * math.sqrt(samples * (samples - 1))


def subset_deviation(numerators: Values, denominators: Values, *, subsets: int = 5) -> tuple[float, int]:
    """Return the standard deviation of sum(a) / sum(b) over consecutive subsets, and the size of the smallest subset.

    The paper's own error bar (appendix A.5): the deviation of a value measured on one subset, sqrt(subsets) times the
    error of the mean over all of them.

    Raises:
        IsolossError: There are fewer than two samples for each subset.
    """
    a = torch.as_tensor(numerators, dtype=torch.float64)
    b = torch.as_tensor(denominators, dtype=torch.float64)
    if len(a) < 2 * subsets:
        raise IsolossError(f"{len(a)} samples cannot be split in {subsets} subsets; at least {2 * subsets} are needed")
    parts = zip(a.tensor_split(subsets), b.tensor_split(subsets), strict=True)
    values = torch.stack([part_a.sum() / part_b.sum() for part_a, part_b in parts])
    return float(values.std()), len(a) // subsets


# --- sums over clusters, with control variates -----------------------------------------------------------------------

FOLDS = 8
_ROWS_AT_ONCE = 4096  # of the clusters' sums, in a product with a sparse matrix
_SINGULAR = 1e-10  # of the largest eigenvalue of the controls' correlations
_FEWEST = 4 * FOLDS  # sequences in which a control is not 0, for a coefficient that is worth fitting
_HARMFUL = 2  # times the error without controls: more is chance, and none is used
_SEQUENCES_A_CONTROL = 14  # or more outside of each fold, as each coefficient that is fitted adds its own noise
_CLUSTERS_A_CONTROL = 16  # or more, of an auxiliary sample's, which say how clusters differ
_FEWEST_AUXILIARY = 2  # times the measured sequences: a mean over fewer is hardly better known
_MISMATCHED = 1e-9  # the chance that sequences drawn as the auxiliary sample was are as far from its mean


class _Fitted(NamedTuple):
    """Estimates of columns over the same clusters."""

    beta: torch.Tensor  # (F, C, K) the coefficients of each fold, fitted on all others
    slopes: torch.Tensor  # (r, K) how far a ratio moves for each unit that a mean is wrong by
    ratios: torch.Tensor  # (K,)
    sums: torch.Tensor  # (F, K) of a - beta_f d over each fold's clusters; over the positions they add up to the ratios
    stderr: torch.Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class _Clusters:
    """Clusters and their controls, by which ratios are estimated; see `ClusteredRatioEstimator` for the formulas."""

    clusters: torch.Tensor  # (n,) int64 the cluster of each sequence, from 0
    positions_by_sequence: torch.Tensor  # (n,)
    controls_by_sequence: torch.Tensor  # (n, C) d, with zeros where a control is not used
    covariance: torch.Tensor  # (r, r) of the errors of the last controls' means
    blocks: torch.Tensor | None = None  # (N,) int64 the block of each cluster; None: clusters are independent

    @cached_property
    def number(self) -> int:  # N
        return int(self.clusters.max()) + 1

    @cached_property
    def folds(self) -> torch.Tensor:  # (N,) int64, the fold of each cluster
        return torch.arange(self.number) % FOLDS

    @cached_property
    def positions(self) -> torch.Tensor:  # (N,) m
        return self.summed(self.positions_by_sequence)

    @cached_property
    def controls(self) -> torch.Tensor:  # (N, C) d
        return self.summed(self.controls_by_sequence)

    @cached_property
    def sizes(self) -> torch.Tensor:
        """(G,) the positions of each block; where there are none, of each cluster."""
        return self._in_blocks(self.positions)

    @property
    def samples(self) -> int:
        """G, the number of blocks; where there are none, N."""
        return len(self.sizes)

    @cached_property
    def total(self) -> float:
        return float(self.positions.sum())

    @cached_property
    def root(self) -> torch.Tensor:
        """(r, r), with root root^T the covariance."""
        # no Cholesky factor: an auxiliary sample of few clusters has a singular covariance, and rounding leaves
        # eigenvalues below 0
        variances, vectors = torch.linalg.eigh(self.covariance)
        root: torch.Tensor = vectors * variances.clamp(min=0).sqrt()
        return root

    @cached_property
    def by_fold(self) -> torch.Tensor:  # (F,) the number of sequences
        return self.folds[self.clusters].bincount(minlength=FOLDS).double()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return (N, ...): the clusters' sums of values (n, ...) of the sequences."""
        if self.number == len(values):  # each sequence is a cluster
            return values
        return values.new_zeros(self.number, *values.shape[1:]).index_add_(0, self.clusters, values)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        if self.blocks is None:
            return values
        sums = values.new_zeros(int(self.blocks.max()) + 1, *values.shape[1:])
        return sums.index_add_(0, self.blocks, values)

    def columns(self, a: torch.Tensor) -> _Fitted:
        """Return the estimates of columns, given what each sequence adds to them, a (n, K)."""
        total, known = self.total, self.controls.shape[1] - len(self.covariance)
        beta = self._coefficients(a)
        residuals = self.less_controls(self.summed(a), beta)
        sums = torch.stack([residuals[self.folds == fold].sum(dim=0) for fold in range(FOLDS)])
        ratios = sums.sum(dim=0) / total
        slopes = (self.by_fold[:, None, None] * beta[:, known:]).sum(dim=0) / total
        residuals -= ratios * self.positions[:, None]
        influence = self.influence_of(residuals, slopes)
        return _Fitted(beta, slopes, ratios, sums, self.stderr(residuals, slopes, influence))

    def less_controls(self, sums: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Return (N, K): sums of the clusters less the controls, with coefficients (F, C, K)."""
        residuals = sums.clone()
        for fold in range(FOLDS):
            inside = self.folds == fold
            residuals[inside] -= self.controls[inside] @ beta[fold]
        return residuals

    def _coefficients(self, a: torch.Tensor) -> torch.Tensor:
        """Return (F, C, K): for each fold, the least-squares coefficients of a - R m on d over all other folds.

        Over sequences, whatever clusters they are in: of few clusters, no coefficients can be had.
        """
        folds = self.folds[self.clusters]

        one, d, m = torch.ones(len(a), 1, dtype=torch.float64), self.controls_by_sequence, self.positions_by_sequence
        left, k, by_fold = torch.cat([one, d], dim=1), a.shape[1], []
        for own in (folds == fold for fold in range(FOLDS)):
            by_fold.append(left[own].T @ torch.cat([a[own], m[own, None], d[own]], dim=1))
        # the total less each fold: one pass over the rows, where a product for each complement would take seven
        products = torch.stack(by_fold)
        others = products.sum(dim=0) - products  # (F, 1 + C, K + 1 + C)
        # R from the other folds too: with coefficients that have seen their own clusters the estimate would be biased
        ratios = others[:, :1, :k] / others[:, :1, k : k + 1]  # (F, 1, K)
        products, moments = others[:, 1:, :k] - ratios * others[:, 1:, k : k + 1], others[:, 1:, k + 1 :]
        scales = moments.diagonal(dim1=1, dim2=2).sqrt()
        scales = torch.where(scales > 0, 1 / scales, 0.0)  # controls of any two units count alike
        # a pseudo-inverse: controls that are left out are zeros, and two controls may be proportional
        inverse: torch.Tensor = torch.linalg.pinv(
            scales[:, :, None] * moments * scales[:, None, :], rtol=_SINGULAR, hermitian=True
        )
        return scales[:, :, None] * (inverse @ (scales[:, :, None] * products))

    def influence(
        self, sums: torch.Tensor, beta: torch.Tensor, slopes: torch.Tensor, value: float
    ) -> tuple[float, torch.Tensor]:
        """Return the error and the influence (G + r,) of a ratio with sums (N,), coefficients (F, C), slopes (r,).

        Where the error is that over the clusters, the influence of the blocks is scaled to it. So a paired difference
        has the larger error, too, and that of a model and its copy is 0.
        """
        residuals = sums - (beta[self.folds] * self.controls).sum(dim=1) - value * self.positions
        influence = self.influence_of(residuals[:, None], slopes[:, None])
        stderr = float(self.stderr(residuals[:, None], slopes[:, None], influence))
        return stderr, scaled_to(stderr, influence[:, 0], self.samples)

    def influence_of(self, residuals: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        """Return (G + r, K): the influences of ratios with residuals (N, K) and slopes (r, K)."""
        g, of_blocks = self.samples, by_leaving_out(self._in_blocks(residuals), self.sizes)
        # sqrt(g (g - 1)) undoes the division by g (g - 1) that turns influences into a squared error: these are errors
        # already
        return torch.cat([of_blocks, self.root.T @ slopes * math.sqrt(g * (g - 1))])

    def stderr(self, residuals: torch.Tensor, slopes: torch.Tensor, influence: torch.Tensor) -> torch.Tensor:
        """Return (K,): the errors over the clusters or, where these are larger, over the blocks."""
        n, g = self.number, self.samples
        of_clusters = by_leaving_out(residuals, self.positions).square().sum(dim=0) / (n * (n - 1))
        of_clusters += (self.root.T @ slopes).square().sum(dim=0)
        return torch.maximum(influence.square().sum(dim=0) / (g * (g - 1)), of_clusters).sqrt()


def scaled_to(stderr: float, influence: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the influence of n samples, scaled so that its squares over n (n - 1) add up to the squared error."""
    own = math.sqrt(float(influence.square().sum()) / (samples * (samples - 1)))
    return influence * (stderr / own) if own > 0 else influence


class Weighted(NamedTuple):
    """The estimate of a weighted sum of columns."""

    value: float
    stderr: float
    influence: torch.Tensor  # (N + r,) float64, G for N where there are blocks; as that of a `ClusteredRatio`


@dataclass(frozen=True, eq=False)
class ColumnRatios:
    """The clusters' sums of every column, from which the estimate of any weighted sum of columns follows.

    Least squares is linear in a, so the coefficients of a weighted sum of columns are the weighted sum of
    the columns' coefficients.
    """

    fit: _Clusters  # the clusters
    fitted: _Fitted  # the columns' coefficients and ratios
    a: torch.Tensor  # (N, K) float64, the clusters' sums: most of the memory

    @property
    def ratios(self) -> torch.Tensor:
        """(K,) float64: the columns' ratios, which add up to the ratio of all."""
        return self.fitted.ratios

    def weighted(self, weights: torch.Tensor) -> Weighted:
        """Return the estimate of the columns' sum with weights (K,), or with weights (F, K) for the clusters of a fold.

        Weights (F, K) are taken as given: where the weights of a fold depend on other folds alone, as fitted to
        `shares_without(fold)`, the value has no bias by them.
        """
        by_fold = weights.double().expand(FOLDS, len(self.ratios))
        # (N, F), from which each cluster takes its own fold: gathering weights (N, K) first would need as much memory
        # as `a`
        sums = (self.a @ by_fold.T).gather(1, self.fit.folds[:, None])[:, 0]
        beta = torch.einsum("fck,fk->fc", self.fitted.beta, by_fold)
        known = beta.shape[1] - len(self.fit.covariance)
        slopes = self.fit.by_fold @ beta[:, known:] / self.fit.total
        value = float((self.fitted.sums * by_fold).sum()) / self.fit.total
        return Weighted(value, *self.fit.influence(sums, beta, slopes, value))

    def influences(
        self, weights: torch.Tensor, groups: torch.Tensor, number: int, responses: tuple[Any, torch.Tensor]
    ) -> torch.Tensor:
        """Return the influences (samples + r, G), as of a `ClusteredRatio`, of the weighted sums of groups of columns.

        Args:
            weights: (F, K), for the clusters of each fold.
            groups: (K,) the group of each column, from 0.
            number: G.
            responses: A scipy sparse matrix (K, R) and a tensor (R, G); their product is what each column adds to each
                group through the weights.
        """
        fit, folds = self.fit, torch.arange(FOLDS)

        def summed(values: torch.Tensor, folds: torch.Tensor) -> torch.Tensor:
            """Return (n, G) of values (n, K) of given folds (n,)."""
            weighted = values * weights[folds]
            sums = torch.zeros(len(values), number, dtype=torch.float64).index_add_(1, groups, weighted)
            # the sparse factor first: the product (K, G) of both would be dense
            return sums + torch.from_numpy(weighted.numpy() @ responses[0]) @ responses[1]

        values = summed(self.fitted.sums, folds).sum(dim=0) / fit.total
        beta = torch.zeros(*self.fitted.beta.shape[:2], number, dtype=torch.float64)
        for control in range(beta.shape[1]):
            beta[:, control] = summed(self.fitted.beta[:, control], folds)
        parts = zip(torch.split(self.a, _ROWS_AT_ONCE), torch.split(fit.folds, _ROWS_AT_ONCE), strict=True)
        residuals = fit.less_controls(torch.cat([summed(*part) for part in parts]), beta)
        residuals -= values * fit.positions[:, None]
        slopes = torch.einsum("f,frg->rg", fit.by_fold, beta[:, beta.shape[1] - len(fit.covariance) :]) / fit.total
        return fit.influence_of(residuals, slopes)

    def shares_without(self, fold: int) -> torch.Tensor:
        """Return (K,): the ratios over all other folds, with the coefficients that are fitted on these."""
        others, rows = torch.arange(FOLDS) != fold, self.fit.folds != fold
        controls = self.fit.controls[rows].sum(dim=0) @ self.fitted.beta[fold]
        return (self._by_fold[others].sum(dim=0) - controls) / self.fit.positions[rows].sum()

    @cached_property
    def _by_fold(self) -> torch.Tensor:  # (F, K) the sums of a over each fold's clusters
        return torch.stack([self.a[self.fit.folds == fold].sum(dim=0) for fold in range(FOLDS)])

    def positive(self) -> ColumnRatios:
        """Return these columns, without controls for those whose ratio is negative with them.

        Over all folds, or over all but one. The columns are squared norms, so there the controls add noise only.
        """
        lowest = torch.stack([self.ratios, *map(self.shares_without, range(FOLDS))]).amin(dim=0)
        if not (negative := lowest < 0).any():
            return self
        fitted = self.fitted._replace(
            beta=torch.where(negative, 0, self.fitted.beta),
            slopes=torch.where(negative, 0, self.fitted.slopes),
            ratios=torch.where(negative, self._by_fold.sum(dim=0) / self.fit.total, self.fitted.ratios),
            sums=torch.where(negative, self._by_fold, self.fitted.sums),
        )
        return replace(self, fitted=fitted)

    def plus(self, other: ColumnRatios) -> ColumnRatios:
        """Return the sum with the columns of another estimator over the same clusters and parts, without controls."""
        ratios, sums = self.fitted.ratios + other.fitted.ratios, self.fitted.sums + other.fitted.sums
        return replace(self, fitted=self.fitted._replace(ratios=ratios, sums=sums), a=self.a + other.a)


@dataclass(frozen=True)
class ClusteredRatio:
    """A ratio, its standard error, and both for each parameter; the parameters' values add up to `value`."""

    value: float
    stderr: float
    by_parameter: torch.Tensor  # (K,) float64
    by_parameter_stderr: torch.Tensor | None  # (K,) float64; None for a sum of two
    influence: torch.Tensor  # (n + r,) float64: as of an `Estimate`, of n samples and the auxiliary sample's means
    effective_samples: float  # as of an `Estimate`
    part: Weighted  # the sum of `by_parameter` over the parameters of the part
    by_group: torch.Tensor  # (G,) float64, the sums of `by_parameter` over the groups of parameters
    by_group_stderr: torch.Tensor | None  # (G,) float64; None for a sum of two
    samples: int  # n: the blocks, or where there are none the N clusters
    auxiliary_controls: tuple[bool, ...]  # (r,) which of the auxiliary sample's controls were used
    # whether the clusters are too far from the auxiliary sample's means to have been drawn alike, so that none was
    auxiliary_differs: bool

    @property
    def leading(self) -> float:
        """The largest sample's part of the squared error, from 0 to 1.

        Near 1 a single sample decides the error, and samples like it are too rare in these data for it to be right.
        """
        squares = self.influence.square()
        return float(squares[: self.samples].max() / squares.sum()) if bool(squares.any()) else 0.0

    def plus(self, other: ClusteredRatio) -> ClusteredRatio:
        """Return the sum with another one over the same clusters, with the error of the sum of their influences."""

        def summed(value: float, influence: torch.Tensor) -> Weighted:
            squares = float(influence.square().sum())
            return Weighted(value, math.sqrt(squares / (self.samples * (self.samples - 1))), influence)

        value, stderr, influence = summed(self.value + other.value, self.influence + other.influence)
        return replace(
            self,
            value=value,
            stderr=stderr,
            by_parameter=self.by_parameter + other.by_parameter,
            # columns have no influences, so that the error of a sum of two is not known
            by_parameter_stderr=None,
            by_group=self.by_group + other.by_group,
            by_group_stderr=None,
            influence=influence,
            part=summed(self.part.value + other.part.value, self.part.influence + other.part.influence),
        )


class AuxiliaryMeans(NamedTuple):
    """How well the means of the last r controls are known."""

    covariance: torch.Tensor  # (r, r) float64, of the errors of the means
    num_sequences: int  # the sequences that they were taken over
    # how many of the controls are used, the first ones; None: none, one or all, by which error is smallest
    number: int | None = None


class ClusteredRatioEstimator:
    r"""A running record of squared gradient norms by cluster, such as the sequences of a document.

    For a cluster b let a_b be its squared norms, m_b its predicted positions and d_b its controls: C numbers with
    expectation 0 whatever the data. For any coefficients beta that do not depend on cluster b, a_b - beta d_b has the
    expectation of a_b. The ratio is R = sum_b (a_b - beta_{f(b)} d_b) / sum_b m_b with the clusters dealt into F folds
    and beta_f the least-squares coefficients of a - R m on d over the sequences of all folds but f ("cross-fitting"),
    so that it is unbiased as the plain ratio is. Least squares is linear in a, so the same formula for each parameter
    tensor's part of a gives values that add up to R.

    The error is the jackknife's (`ratio`): with residuals r_b = a_b - beta_{f(b)} d_b - R m_b
    and M = sum_b m_b, R changes by r_b / (M - m_b) without cluster b, and the squared error is (N - 1) / N times the
    sum of these squares. For clusters of one size it is the delta method's.

    A control that is other than 0 in fewer than 32 sequences has the coefficient 0, and of the rest, all but the first
    n / 14 have, with n the sequences outside of the largest fold: N / 16 where each sequence is a cluster. Where the
    error is more than twice that without any control, or the sum over `part` is negative with controls, as a few
    clusters with enormous controls make them, all have.

    The last r controls may be measured from means that are estimates themselves, from an auxiliary sample
    (`isoloss.flatness._ghost.auxiliary.AuxiliarySample`). With n_b the sequences of cluster b, R moves by
    g = sum_b n_b beta_{f(b)} / sum_b m_b for each unit that a mean is wrong by, so that g^T C g with the covariance C
    of the means joins the squared error. These controls are left out beyond the first N / 16 of all, where the
    auxiliary sample has fewer than twice as many sequences as the clusters, and where Hotelling's T^2 says that the
    clusters were not drawn as the auxiliary sample was (chance below 1e-9). Else it is all of them, the first one or
    none, whichever has the smallest error, unless a number is given.

    Clusters that depend on each other are put together in blocks when the result is taken (`SequenceClusters.blocks`):
    the error is then the larger one of that over clusters and that over G blocks, whose residuals are the sums of their
    clusters', as their sizes are. The value does not change. All squared norms are kept: 8 bytes for each sequence and
    parameter.

    Args:
        num_parameters: K.
        num_controls: C - r, which may be 0.
        groups: The group of each parameter, from 0 to G - 1, or several such lists, each with groups of its own; None:
            there are no groups.
        auxiliary: How well the means of r further controls are known; None: there are none.
        part: Parameters, by their columns, whose sum is wanted with an influence of its own.

    Example:
        >>> import torch
        >>> from isoloss.statistics.ratio import ClusteredRatioEstimator
        >>> estimator = ClusteredRatioEstimator(num_parameters=2, num_controls=0)
        >>> norms = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
        >>> estimator.add(norms, torch.tensor([1, 1, 1]), torch.zeros(3, 0))
        >>> result = estimator.result()
        >>> result.value, result.by_parameter.tolist(), round(result.stderr, 4)
        (2.0, [1.6666666666666667, 0.3333333333333333], 0.5774)
        >>> estimator.columns().weighted(torch.tensor([1.0, 3.0])).value
        2.6666666666666665
    """

    def __init__(
        self,
        num_parameters: int,
        num_controls: int,
        groups: Sequence[int] | Sequence[Sequence[int]] | None = None,
        auxiliary: AuxiliaryMeans | None = None,
        part: Sequence[int] = (),
    ) -> None:
        self._part = torch.tensor(part, dtype=torch.int64)
        self._auxiliary = auxiliary or AuxiliaryMeans(torch.zeros(0, 0, dtype=torch.float64), 0)
        self._groups = torch.tensor(groups or [], dtype=torch.int64)
        self._num_parameters = num_parameters
        # a by parameter, m, d of each sequence, and its cluster
        width = num_parameters + 1 + num_controls + len(self._auxiliary.covariance)
        self._rows = [torch.zeros(0, width, dtype=torch.float64)]
        self._clusters = [torch.zeros(0, dtype=torch.int64)]

    def __len__(self) -> int:
        """Return the number of clusters."""
        return len(set(torch.cat(self._clusters).tolist()))

    def add(
        self,
        square_norms: torch.Tensor,
        positions: torch.Tensor,
        controls: torch.Tensor,
        clusters: torch.Tensor | None = None,
    ) -> None:
        """Add sequences with the numbers of their clusters; None: each is a cluster of its own."""
        if clusters is None:
            first = sum(len(known) for known in self._clusters)
            clusters = torch.arange(first, first + len(positions))
        values = square_norms.double().cpu(), positions.double()[:, None].cpu(), controls.double().cpu()
        self._rows.append(torch.cat(values, dim=1))
        self._clusters.append(clusters.cpu())

    @classmethod
    def merged(cls, parts: list[ClusteredRatioEstimator]) -> ClusteredRatioEstimator:
        """Return the estimator of several processes, none of which shares a cluster with another."""
        joined = copy.copy(parts[0])
        joined._rows = [rows for part in parts for rows in part._rows]
        first = 0
        joined._clusters = []
        for part in parts:
            clusters = torch.cat(part._clusters)
            joined._clusters.append(first + clusters)
            first += int(clusters.max()) + 1 if len(clusters) else 0
        return joined

    def result(self, blocks: torch.Tensor | None = None) -> ClusteredRatio:
        """Return the ratio, its error, and its split over the parameters; the clusters may lie in blocks (N,)."""
        return self._best(blocks)[0]

    def columns(self, blocks: torch.Tensor | None = None) -> ColumnRatios:
        """Return the columns' ratios, from which the estimate of any weighted sum of the parameters follows."""
        _, fit, fitted = self._best(blocks)
        return ColumnRatios(fit, fitted, fit.summed(torch.cat(self._rows)[:, : self._num_parameters]))

    def _best(self, blocks: torch.Tensor | None) -> tuple[ClusteredRatio, _Clusters, _Fitted]:
        """Return the result with as many of the auxiliary sample's controls as make its error smallest."""
        # kept in one piece: estimates are taken again and again with `rtol`, and would copy all batches each time
        self._rows, self._clusters = [torch.cat(self._rows)], [torch.cat(self._clusters)]
        (rows,), (given,) = self._rows, self._clusters
        _, index, sizes = torch.unique(given, return_inverse=True, return_counts=True)
        first = torch.full_like(sizes, len(rows)).scatter_reduce_(0, index, torch.arange(len(rows)), "amin")
        clusters = first.argsort().argsort()[index]  # in order of appearance
        k = self._num_parameters
        a, m, d = rows[:, :k], rows[:, k], rows[:, k + 1 :]
        predicting = len(torch.unique((clusters if blocks is None else blocks[clusters])[m > 0]))
        if len(a) and not predicting:
            raise IsolossError(NOTHING_PREDICTED)
        if predicting < 2:
            raise IsolossError(
                f"an error bar needs at least 2 independent sequences or documents, not {predicting} (with a label)"
            )
        used, mismatched = self._used(_Clusters(clusters, m, d, self._auxiliary.covariance))
        known = len(used) - len(self._auxiliary.covariance)
        available = int(used[known:].sum())
        wanted = (0, 1, available) if self._auxiliary.number is None else (self._auxiliary.number,)
        numbers = sorted({min(number, available) for number in wanted})
        order = torch.cat([torch.zeros(known, dtype=torch.int64), used[known:].cumsum(dim=0)])

        def clusters_of(used: torch.Tensor) -> _Clusters:
            return _Clusters(clusters, m, d * used, self._auxiliary.covariance, blocks)

        def error(fit: _Clusters) -> float:
            return float(fit.columns(a.sum(dim=1, keepdim=True)).stderr)

        def fitted(used: torch.Tensor) -> tuple[ClusteredRatio, _Clusters, _Fitted]:
            return self._fitted(a, clusters_of(used), used, mismatched=mismatched)

        choices = [used & (order <= number) for number in numbers]
        best = fitted(choices[0] if len(choices) == 1 else min(choices, key=lambda used: error(clusters_of(used))))
        if not bool(used.any()):
            return best
        nothing = _Clusters(clusters, m, d[:, :0], self._auxiliary.covariance[:0, :0], blocks)
        # a part of squared norms is no less than 0
        is_noise = _HARMFUL * error(nothing) < best[0].stderr or best[0].part.value < 0
        return fitted(torch.zeros_like(used)) if is_noise else best

    def _fitted(
        self, a: torch.Tensor, fit: _Clusters, used: torch.Tensor, *, mismatched: bool
    ) -> tuple[ClusteredRatio, _Clusters, _Fitted]:
        """Return the result of sequences' squared norms a (n, K) with these controls (C,)."""
        fitted = fit.columns(a)
        by_group = a.new_zeros(len(a), int(self._groups.max()) + 1 if len(self._groups) else 0)
        for groups in self._groups.view(-1, a.shape[1]):
            by_group.index_add_(1, groups, a)
        of_groups, sums = fit.columns(by_group), fit.summed(a)

        def summed(columns: torch.Tensor) -> Weighted:
            value = math.fsum(fitted.ratios[columns].tolist())
            beta, slopes = fitted.beta[:, :, columns].sum(dim=2), fitted.slopes[:, columns].sum(dim=1)
            return Weighted(value, *fit.influence(sums[:, columns].sum(dim=1), beta, slopes, value))

        value, stderr, influence = summed(torch.arange(len(fitted.ratios)))
        result = ClusteredRatio(
            value=value,
            stderr=stderr,
            by_parameter=fitted.ratios,
            by_parameter_stderr=fitted.stderr,
            influence=influence,
            effective_samples=effective_samples(fit.sizes),
            part=summed(self._part),
            by_group=of_groups.ratios,
            by_group_stderr=of_groups.stderr,
            samples=fit.samples,
            auxiliary_controls=tuple(used[len(used) - len(self._auxiliary.covariance) :].tolist()),
            auxiliary_differs=mismatched,
        )
        return result, fit, fitted

    def _used(self, fit: _Clusters) -> tuple[torch.Tensor, bool]:
        """Return which controls (C,) may have coefficients, and whether the auxiliary sample differs."""
        d, n = fit.controls_by_sequence, len(fit.clusters)
        known = d.shape[1] - len(self._auxiliary.covariance)
        used = (d != 0).sum(dim=0) >= _FEWEST
        used[known:] &= self._auxiliary.num_sequences >= _FEWEST_AUXILIARY * n
        most = torch.full((len(used),), fit.number // _CLUSTERS_A_CONTROL)
        most[:known] = (n - int(fit.by_fold.max())) // _SEQUENCES_A_CONTROL  # n / 16 where each is a cluster
        # controls come in the order of their worth (`Controls`, then the auxiliary sample): the first ones stay
        used &= used.cumsum(dim=0) <= most
        chosen = used[known:]
        features, covariance = fit.controls[:, known:][:, chosen], self._auxiliary.covariance[chosen][:, chosen]
        mismatched = _chance(fit.clusters.bincount().double(), features, covariance) < _MISMATCHED
        used[known:] &= not mismatched
        return used, mismatched


def _chance(sequences: torch.Tensor, d: torch.Tensor, of_auxiliary: torch.Tensor) -> float:
    """Return the chance that the mean of d (N, r) over the sequences is as far from 0 as it is; of r = 0 it is 1.

    `of_auxiliary` (r, r) is the covariance of the error of what was taken from d. By Hotelling's T^2, which is close to
    chi-squared where N is much more than r: there are at least 16 r clusters.
    """
    n, total, directions = len(d), float(sequences.sum()), d.shape[1]
    if not directions:
        return 1.0
    mean = d.sum(dim=0) / total
    residuals = d - sequences[:, None] * mean
    # the sum treats both means as independent; where the sample contains the measured sequences that is too large, and
    # the test only less strict
    covariance = residuals.T @ residuals * (n / (n - 1) / total**2) + of_auxiliary
    square = float(mean @ torch.linalg.solve(covariance, mean))
    # the upper tail of chi-squared with r degrees of freedom is Q(r / 2, T^2 / 2)
    half = torch.tensor([directions / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
