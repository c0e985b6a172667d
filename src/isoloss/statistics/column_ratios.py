"""Ratios of columns of cluster sums with cross-fitted control variates, and of any weighted sum of the columns.

Shapes: K columns, C control variates, r of them with means from an auxiliary sample, F folds, n sequences, N clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from isoloss.statistics.ratio import by_leaving_out

FOLDS = 8
_ROWS_AT_ONCE = 4096  # of the clusters' sums, in a product with a sparse matrix
_SINGULAR = 1e-10  # of the largest eigenvalue of the controls' correlations


class FittedColumns(NamedTuple):
    """Estimates of columns over the same clusters."""

    beta: torch.Tensor  # (F, C, K) the coefficients of each fold, fitted on all others
    slopes: torch.Tensor  # (r, K) how far a ratio moves for each unit that a mean is wrong by
    ratios: torch.Tensor  # (K,)
    sums: torch.Tensor  # (F, K) of a - beta_f d over each fold's clusters; over the positions they add up to the ratios
    stderr: torch.Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ControlledClusters:
    """Clusters and their controls, by which ratios are estimated; see `ClusteredRatioEstimator` for the formulas."""

    clusters: torch.Tensor  # (n,) int64 the cluster of each sequence, from 0
    positions_by_sequence: torch.Tensor  # (n,) the positions of each sequence
    controls_by_sequence: torch.Tensor  # (n, C) d, with zeros where a control is not used
    covariance: torch.Tensor  # (r, r) of the errors of the last controls' means
    blocks: torch.Tensor | None = None  # (N,) int64 the block of each cluster; None: clusters are independent

    @cached_property
    def number(self) -> int:
        """N."""
        return int(self.clusters.max()) + 1

    @cached_property
    def folds(self) -> torch.Tensor:
        """(N,) int64 the fold of each cluster."""
        return torch.arange(self.number) % FOLDS

    @cached_property
    def positions(self) -> torch.Tensor:
        """(N,) m."""
        return self.summed(self.positions_by_sequence)

    @cached_property
    def controls(self) -> torch.Tensor:
        """(N, C) d."""
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
        """The sum of the positions."""
        return float(self.positions.sum())

    @cached_property
    def root(self) -> torch.Tensor:
        """(r, r), with root root^T the covariance."""
        variances, vectors = torch.linalg.eigh(self.covariance)
        root: torch.Tensor = vectors * variances.clamp(min=0).sqrt()
        return root

    @cached_property
    def by_fold(self) -> torch.Tensor:
        """(F,) the number of sequences."""
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

    def columns(self, a: torch.Tensor) -> FittedColumns:
        """Return the estimates of columns, given what each sequence adds to them, a (n, K)."""
        total, known = self.total, self.controls.shape[1] - len(self.covariance)
        beta = self._coefficients(a)
        residuals = self.summed(a).clone()
        sums = torch.zeros(FOLDS, a.shape[1], dtype=torch.float64)
        for fold in range(FOLDS):
            own = self.folds == fold
            residuals[own] -= self.controls[own] @ beta[fold]
            sums[fold] = residuals[own].sum(dim=0)
        ratios = sums.sum(dim=0) / total
        slopes = (self.by_fold[:, None, None] * beta[:, known:]).sum(dim=0) / total
        residuals -= ratios * self.positions[:, None]
        influence = self.influence_of(residuals, slopes)
        return FittedColumns(beta, slopes, ratios, sums, self.stderr(residuals, slopes, influence))

    def _coefficients(self, a: torch.Tensor) -> torch.Tensor:
        """Return (F, C, K): for each fold, the least-squares coefficients of a - R m on d over all other folds.

        Over sequences, whatever clusters they are in: of few clusters, no coefficients can be had.
        """
        folds = self.folds[self.clusters]

        def others(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            """Return the products (F, ., .) of columns, summed over all folds but each."""
            by_fold = torch.stack([left[folds == fold].T @ right[folds == fold] for fold in range(FOLDS)])
            return by_fold.sum(dim=0) - by_fold

        d, m = self.controls_by_sequence, self.positions_by_sequence[:, None]
        one = torch.ones(len(a), 1, dtype=torch.float64)
        ratios = others(one, a) / others(one, m)  # (F, 1, K)
        products = others(d, a) - ratios * others(d, m)
        moments = others(d, d)
        scales = moments.diagonal(dim1=1, dim2=2).sqrt()
        scales = torch.where(scales > 0, 1 / scales, 0.0)  # controls of any two units count alike
        inverse: torch.Tensor = torch.linalg.pinv(
            scales[:, :, None] * moments * scales[:, None, :], rtol=_SINGULAR, hermitian=True
        )
        return scales[:, :, None] * (inverse @ (scales[:, :, None] * products))

    def influence(
        self, sums: torch.Tensor, beta: torch.Tensor, slopes: torch.Tensor, value: float
    ) -> tuple[float, torch.Tensor]:
        """Return the error and the influence (G + r,) of a ratio with sums (N,), coefficients (F, C), slopes (r,)."""
        residuals = sums - (beta[self.folds] * self.controls).sum(dim=1) - value * self.positions
        influence = self.influence_of(residuals[:, None], slopes[:, None])
        return float(self.stderr(residuals[:, None], slopes[:, None], influence)), influence[:, 0]

    def influence_of(self, residuals: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        """Return (G + r, K): the influences of ratios with residuals (N, K) and slopes (r, K)."""
        g, of_blocks = self.samples, by_leaving_out(self._in_blocks(residuals), self.sizes)
        return torch.cat([of_blocks, self.root.T @ slopes * math.sqrt(g * (g - 1))])

    def stderr(self, residuals: torch.Tensor, slopes: torch.Tensor, influence: torch.Tensor) -> torch.Tensor:
        """Return (K,): the errors over the clusters or, where these are larger, over the blocks."""
        n, g = self.number, self.samples
        of_clusters = by_leaving_out(residuals, self.positions).square().sum(dim=0) / (n * (n - 1))
        of_clusters += (self.root.T @ slopes).square().sum(dim=0)
        return torch.maximum(influence.square().sum(dim=0) / (g * (g - 1)), of_clusters).sqrt()


class Weighted(NamedTuple):
    """The estimate of a weighted sum of columns."""

    value: float
    stderr: float
    influence: torch.Tensor  # (N + r,) float64, G for N where there are blocks; as that of a `ClusteredRatio`


@dataclass(frozen=True, eq=False)
class ColumnRatios:
    """The clusters' sums of every column, from which the estimate of any weighted sum of columns follows.

    With the coefficients beta_f of each fold f, the ratio of weights w is sum_b w (a_b - beta_{f(b)} d_b) / sum_b m_b.
    Least squares is linear in a, so the coefficients of the weighted sum are beta w.

    Example:
        >>> from isoloss.statistics.ratio_estimator import ClusteredRatioEstimator
        >>> estimator = ClusteredRatioEstimator(num_parameters=2, num_controls=0)
        >>> norms = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
        >>> estimator.add(norms, torch.tensor([1, 1, 1]), torch.zeros(3, 0))
        >>> columns = estimator.columns()
        >>> value, stderr, influence = columns.weighted(torch.tensor([1.0, 3.0]))
        >>> columns.ratios.tolist(), round(value, 4), round(stderr, 4)
        ([1.6666666666666667, 0.3333333333333333], 2.6667, 1.2019)
    """

    fit: ControlledClusters  # the clusters
    fitted: FittedColumns  # the columns' coefficients and ratios
    a: torch.Tensor  # (N, K) float64, the clusters' sums: most of the memory

    @property
    def ratios(self) -> torch.Tensor:
        """(K,) float64: the columns' ratios, which add up to that of all."""
        return self.fitted.ratios

    @property
    def total(self) -> float:
        """What `fold_sums` is divided by: the number of predicted positions."""
        return self.fit.total

    def weighted(self, weights: torch.Tensor) -> Weighted:
        """Return the estimate of the columns' sum with weights (K,), or with weights (F, K) for the clusters of a fold.

        Weights (F, K) are taken as given: where those of a fold depend on other folds alone, as weights that are fitted
        to `shares_without(fold)` do, the value has no bias by them.
        """
        by_fold = weights.double().expand(FOLDS, len(self.ratios))
        own = (self.a @ by_fold.T).gather(1, self.fit.folds[:, None])[:, 0]
        beta = torch.einsum("fck,fk->fc", self.fitted.beta, by_fold)
        known = beta.shape[1] - len(self.fit.covariance)
        slopes = self.fit.by_fold @ beta[:, known:] / self.total
        value = float((self.fold_sums() * by_fold).sum()) / self.total
        return Weighted(value, *self.fit.influence(own, beta, slopes, value))

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
            return sums + torch.from_numpy(weighted.numpy() @ responses[0]) @ responses[1]

        values = summed(self.fold_sums(), folds).sum(dim=0) / self.total
        beta = torch.zeros(*self.fitted.beta.shape[:2], number, dtype=torch.float64)
        for control in range(beta.shape[1]):
            beta[:, control] = summed(self.fitted.beta[:, control], folds)
        parts = zip(torch.split(self.a, _ROWS_AT_ONCE), torch.split(fit.folds, _ROWS_AT_ONCE), strict=True)
        residuals = torch.cat([summed(*part) for part in parts])
        residuals -= values * fit.positions[:, None]
        for fold in range(FOLDS):
            residuals[fit.folds == fold] -= fit.controls[fit.folds == fold] @ beta[fold]
        slopes = torch.einsum("f,frg->rg", fit.by_fold, beta[:, beta.shape[1] - len(fit.covariance) :]) / self.total
        return fit.influence_of(residuals, slopes)

    def fold_sums(self) -> torch.Tensor:
        """Return (F, K): the sums of a - beta_f d over each fold's clusters; over `total` they add up to the ratios."""
        return self.fitted.sums

    def shares_without(self, fold: int) -> torch.Tensor:
        """Return (K,): the ratios over all other folds, with the coefficients that are fitted on these."""
        others = self.fit.folds != fold
        a, d = self.a[others].sum(dim=0), self.fit.controls[others].sum(dim=0)
        return (a - d @ self.fitted.beta[fold]) / self.fit.positions[others].sum()

    def plus(self, other: ColumnRatios) -> ColumnRatios:
        """Return the columns' sums with those of another one over the same clusters and parts, without controls."""
        ratios, sums = self.fitted.ratios + other.fitted.ratios, self.fitted.sums + other.fitted.sums
        return replace(self, fitted=self.fitted._replace(ratios=ratios, sums=sums), a=self.a + other.a)
