"""Ratios of columns of cluster sums with cross-fitted control variates, and of any weighted sum of the columns.

Shapes: K columns, C control variates, r of them with means from an auxiliary sample, F folds, N clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

FOLDS = 8
_SINGULAR = 1e-10  # of the largest eigenvalue of the controls' correlations


class FittedColumns(NamedTuple):
    """Estimates of columns over the same clusters."""

    beta: torch.Tensor  # (F, C, K) the coefficients of each fold, fitted on all others
    slopes: torch.Tensor  # (r, K) how far a ratio moves for each unit that a mean is wrong by
    ratios: torch.Tensor  # (K,)
    stderr: torch.Tensor  # (K,)


@dataclass(frozen=True, eq=False)
class ControlledClusters:
    """Clusters and their controls, by which ratios are estimated; see `ClusteredRatioEstimator` for the formulas."""

    folds: torch.Tensor  # (N,) int64
    positions: torch.Tensor  # (N,) m
    controls: torch.Tensor  # (N, C) d, with zeros where a control is not used
    sequences: torch.Tensor  # (N,)
    covariance: torch.Tensor  # (r, r) of the errors of the last controls' means

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
        return torch.zeros(FOLDS, dtype=torch.float64).index_add_(0, self.folds, self.sequences)

    def columns(self, moments: torch.Tensor) -> FittedColumns:
        """Return the estimates of columns, given the moments (F, 3 + C, K): sums by fold of a, a^2, a m and a d."""
        n, total, known = len(self.folds), self.total, self.controls.shape[1] - len(self.covariance)
        sums = _Sums.of(self.folds, self.positions, self.controls, moments)
        beta = _coefficients(sums)
        ratios = (sums.a - (beta * sums.d[:, :, None]).sum(dim=1)).sum(dim=0) / total
        slopes = (self.by_fold[:, None, None] * beta[:, known:]).sum(dim=0) / total
        squares = n / (n - 1) * sums.square_residuals(beta, ratios) / total**2
        return FittedColumns(beta, slopes, ratios, (squares + (self.root.T @ slopes).square().sum(dim=0)).sqrt())

    def influence(
        self, sums: torch.Tensor, beta: torch.Tensor, slopes: torch.Tensor, value: float
    ) -> tuple[float, torch.Tensor]:
        """Return the error and the influence (N + r,) of a ratio with sums (N,), coefficients (F, C), slopes (r,)."""
        n = len(self.folds)
        residuals = sums - (beta[self.folds] * self.controls).sum(dim=1) - value * self.positions
        of_means = self.root.T @ slopes
        influence = torch.cat([residuals * (n / self.total), of_means * math.sqrt(n * (n - 1))])
        return math.sqrt(float(influence.square().sum()) / (n * (n - 1))), influence


class Weighted(NamedTuple):
    """The estimate of a weighted sum of columns."""

    value: float
    stderr: float
    influence: torch.Tensor  # (N + r,) float64, as that of a `ClusteredRatio`


@dataclass(frozen=True, eq=False)
class ColumnRatios:
    """The clusters' sums of every column, from which the estimate of any weighted sum of columns follows.

    With the coefficients beta_f of each fold f, the ratio of weights w is sum_b w (a_b - beta_{f(b)} d_b) / sum_b m_b.
    Least squares is linear in a, so the coefficients of the weighted sum are beta w.

    Example:
        >>> from isoloss.statistics.ratio_estimator import ClusteredRatioEstimator
        >>> estimator = ClusteredRatioEstimator(num_parameters=2, num_controls=0, keep_rows=True)
        >>> norms = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
        >>> estimator.add(norms, torch.tensor([1, 1, 1]), torch.zeros(3, 0))
        >>> columns = estimator.columns()
        >>> value, stderr, influence = columns.weighted(torch.tensor([1.0, 3.0]))
        >>> columns.ratios.tolist(), round(value, 4), round(stderr, 4)
        ([1.6666666666666667, 0.3333333333333333], 2.6667, 1.2019)
    """

    fit: ControlledClusters  # the clusters
    fitted: FittedColumns  # the columns' coefficients and ratios
    by_fold: torch.Tensor  # (F, K) float64, the sums of a over each fold's clusters
    rows: tuple[torch.Tensor, ...]  # (n, K) each, float64, together the N clusters' a, most of the memory: not copied

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
        own = torch.cat([rows @ by_fold.T for rows in self.rows])
        own = own.gather(1, self.fit.folds[:, None])[:, 0]
        beta = torch.einsum("fck,fk->fc", self.fitted.beta, by_fold)
        known = beta.shape[1] - len(self.fit.covariance)
        slopes = self.fit.by_fold @ beta[:, known:] / self.total
        value = float((self.fold_sums() * by_fold).sum()) / self.total
        return Weighted(value, *self.fit.influence(own, beta, slopes, value))

    def influences(
        self, weights: torch.Tensor, groups: torch.Tensor, number: int, responses: tuple[Any, torch.Tensor]
    ) -> torch.Tensor:
        """Return the influences (N + r, G), as that of a `ClusteredRatio`, of the weighted sums of groups of columns.

        Args:
            weights: (F, K), for the clusters of each fold.
            groups: (K,) the group of each column, from 0.
            number: G.
            responses: A scipy sparse matrix (K, R) and a tensor (R, G); their product is what each column adds to each
                group through the weights.
        """
        fit, n, folds = self.fit, len(self.fit.folds), torch.arange(FOLDS)

        def summed(values: torch.Tensor, folds: torch.Tensor) -> torch.Tensor:
            """Return (n, G) of values (n, K) of given folds (n,)."""
            weighted = values * weights[folds]
            sums = torch.zeros(len(values), number, dtype=torch.float64).index_add_(1, groups, weighted)
            return sums + torch.from_numpy(weighted.numpy() @ responses[0]) @ responses[1]

        values = summed(self.fold_sums(), folds).sum(dim=0) / self.total
        beta = torch.zeros(*self.fitted.beta.shape[:2], number, dtype=torch.float64)
        for control in range(beta.shape[1]):
            beta[:, control] = summed(self.fitted.beta[:, control], folds)
        of_rows = torch.split(fit.folds, [len(rows) for rows in self.rows])
        residuals = torch.cat([summed(*pair) for pair in zip(self.rows, of_rows, strict=True)])
        residuals -= values * fit.positions[:, None]
        for fold in range(FOLDS):
            residuals[fit.folds == fold] -= fit.controls[fit.folds == fold] @ beta[fold]
        slopes = torch.einsum("f,frg->rg", fit.by_fold, beta[:, beta.shape[1] - len(fit.covariance) :]) / self.total
        return torch.cat([residuals * (n / self.total), fit.root.T @ slopes * math.sqrt(n * (n - 1))])

    def fold_sums(self) -> torch.Tensor:
        """Return (F, K): the sums of a - beta_f d over each fold's clusters; over `total` they add up to the ratios."""
        controls = self.fit.controls
        d = torch.zeros(FOLDS, controls.shape[1], dtype=torch.float64).index_add_(0, self.fit.folds, controls)
        return self.by_fold - (self.fitted.beta * d[:, :, None]).sum(dim=1)

    def shares_without(self, fold: int) -> torch.Tensor:
        """Return (K,): the ratios over all other folds, with the coefficients that are fitted on these."""
        others = self.fit.folds != fold
        a, d = self.by_fold[torch.arange(FOLDS) != fold].sum(dim=0), self.fit.controls[others].sum(dim=0)
        return (a - d @ self.fitted.beta[fold]) / self.fit.positions[others].sum()

    def plus(self, other: ColumnRatios) -> ColumnRatios:
        """Return the columns' sums with those of another one over the same clusters and parts, without controls."""
        fitted = self.fitted._replace(ratios=self.fitted.ratios + other.fitted.ratios)
        rows = tuple(one + another for one, another in zip(self.rows, other.rows, strict=True))
        return replace(self, fitted=fitted, by_fold=self.by_fold + other.by_fold, rows=rows)


@dataclass(frozen=True)
class _Sums:
    """Sums over the clusters of each fold: m, m^2, d, d m, d d^T, and by parameter a, a^2, a m, a d."""

    m: torch.Tensor  # (F,)
    mm: torch.Tensor  # (F,)
    d: torch.Tensor  # (F, C)
    dm: torch.Tensor  # (F, C)
    dd: torch.Tensor  # (F, C, C)
    a: torch.Tensor  # (F, K)
    aa: torch.Tensor  # (F, K)
    am: torch.Tensor  # (F, K)
    ad: torch.Tensor  # (F, C, K)

    @classmethod
    def of(cls, folds: torch.Tensor, m: torch.Tensor, d: torch.Tensor, moments: torch.Tensor) -> _Sums:
        def by_fold(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(FOLDS, *values.shape[1:], dtype=torch.float64).index_add_(0, folds, values)

        return cls(
            m=by_fold(m),
            mm=by_fold(m.square()),
            d=by_fold(d),
            dm=by_fold(d * m[:, None]),
            dd=by_fold(d[:, :, None] * d[:, None, :]),
            a=moments[:, 0],
            aa=moments[:, 1],
            am=moments[:, 2],
            ad=moments[:, 3:],
        )

    def square_residuals(self, beta: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
        """Return (K,): the sums over clusters of (a - beta d - R m)^2, multiplied out."""
        crossed = (beta * (self.dd @ beta)).sum(dim=1) - 2 * (beta * self.ad).sum(dim=1)
        with_m = self.am - (beta * self.dm[:, :, None]).sum(dim=1)
        by_fold = self.aa + crossed - 2 * ratios * with_m + ratios.square() * self.mm[:, None]
        return by_fold.sum(dim=0).clamp(min=0)


def _coefficients(sums: _Sums) -> torch.Tensor:
    """Return (F, C, K): for each fold, the least-squares coefficients of a - R m on d over all other folds."""

    def others(values: torch.Tensor) -> torch.Tensor:
        return values.sum(dim=0) - values

    ratios = others(sums.a) / others(sums.m)[:, None]
    products = others(sums.ad) - ratios[:, None, :] * others(sums.dm)[:, :, None]
    moments = others(sums.dd)
    scales = moments.diagonal(dim1=1, dim2=2).sqrt()
    scales = torch.where(scales > 0, 1 / scales, 0.0)  # controls of any two units count alike
    inverse: torch.Tensor = torch.linalg.pinv(
        scales[:, :, None] * moments * scales[:, None, :], rtol=_SINGULAR, hermitian=True
    )
    return scales[:, :, None] * (inverse @ (scales[:, :, None] * products))
