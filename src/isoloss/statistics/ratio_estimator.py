"""What a trace is computed from: sums over independent clusters, with control variates whose mean is known.

Shapes: n sequences of a batch, K parameter tensors or parts of them, C control variates, r of them with means from an
auxiliary sample, F folds, N clusters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isoloss.errors import IsolossError
from isoloss.model_checks import NOTHING_PREDICTED
from isoloss.statistics.column_ratios import FOLDS, ColumnRatios, ControlledClusters, FittedColumns
from isoloss.statistics.ratio import effective_samples

_FEWEST = 4 * FOLDS  # sequences in which a control is not 0, for a coefficient that is worth fitting
_HARMFUL = 2  # times the error without controls: more is chance, and none is used
_SEQUENCES_A_CONTROL = 14  # or more outside of each fold, as each coefficient that is fitted adds its own noise
_CLUSTERS_A_CONTROL = 16  # or more, of an auxiliary sample's, which say how clusters differ
_FEWEST_AUXILIARY = 2  # times the measured sequences: a mean over fewer is hardly better known
_UNLIKE = 1e-9  # the chance that sequences drawn as the auxiliary sample was are as far from its mean


@dataclass(frozen=True)
class ClusteredRatio:
    """A ratio, its standard error, and both for each parameter; the parameters' values add up to `value`."""

    value: float  # sum over clusters of the squared norms, less the fitted controls, over the predicted positions
    stderr: float  # its standard error over clusters
    by_parameter: torch.Tensor  # (K,) float64
    by_parameter_stderr: torch.Tensor | None  # (K,) float64; None for a sum of two
    # (n + r,) float64: what each of n samples, and each of the auxiliary sample's means, adds to the error. `value`'s
    # standard error is the root of the sum of their squares over n (n - 1), or that over clusters where it is larger;
    # that of the difference of two values on the same samples and means is the same of the differences
    influence: torch.Tensor
    effective_samples: float  # as of an `Estimate`
    part: float  # the sum of `by_parameter` over the parameters of the part
    part_stderr: float  # its standard error
    part_influence: torch.Tensor  # (n + r,) float64, as `influence`
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
        n = self.samples
        influence, part = self.influence + other.influence, self.part_influence + other.part_influence
        return dataclasses.replace(
            self,
            value=self.value + other.value,
            stderr=math.sqrt(float(influence.square().sum()) / (n * (n - 1))),
            by_parameter=self.by_parameter + other.by_parameter,
            by_parameter_stderr=None,
            by_group=self.by_group + other.by_group,
            by_group_stderr=None,
            influence=influence,
            part=self.part + other.part,
            part_stderr=math.sqrt(float(part.square().sum()) / (n * (n - 1))),
            part_influence=part,
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

    The error is the jackknife's (`isoloss.statistics.ratio.ratio`): with residuals r_b = a_b - beta_{f(b)} d_b - R m_b
    and M = sum_b m_b, R changes by r_b / (M - m_b) without cluster b, and the squared error is (N - 1) / N times the
    sum of these squares. Clusters of one size have that of a ratio by the delta method.

    A control that is other than 0 in fewer than 32 sequences has the coefficient 0, and of the rest, all but the first
    n / 14 have, with n the sequences outside of the largest fold: N / 16 where each sequence is a cluster. Where the
    error is more than twice that without any control, as a few clusters with enormous controls make it, all have.

    The last r controls may be measured from means that are estimates themselves, those of an auxiliary sample
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
        >>> estimator = ClusteredRatioEstimator(num_parameters=2, num_controls=0)
        >>> norms = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
        >>> estimator.add(norms, torch.tensor([1, 1, 1]), torch.zeros(3, 0))
        >>> result = estimator.result()
        >>> result.value, result.by_parameter.tolist(), round(result.stderr, 4)
        (2.0, [1.6666666666666667, 0.3333333333333333], 0.5774)
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

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors, from which `from_state` goes on."""
        self._rows, self._clusters = [torch.cat(self._rows)], [torch.cat(self._clusters)]
        return {
            "rows": self._rows[0],
            "clusters": self._clusters[0],
            "groups": self._groups,
            "part": self._part,
            "num_parameters": torch.tensor(self._num_parameters),
            "auxiliary_covariance": self._auxiliary.covariance,
            "auxiliary_sequences": torch.tensor(self._auxiliary.num_sequences),
            "auxiliary_number": torch.tensor(
                [] if self._auxiliary.number is None else [self._auxiliary.number], dtype=torch.int64
            ),
        }

    @classmethod
    def from_state(cls, state: dict[str, torch.Tensor]) -> ClusteredRatioEstimator:
        """Return the estimator that `state` describes."""
        numbers: list[int] = state["auxiliary_number"].tolist()
        auxiliary = AuxiliaryMeans(
            state["auxiliary_covariance"], int(state["auxiliary_sequences"]), next(iter(numbers), None)
        )
        num_parameters = int(state["num_parameters"])
        num_controls = state["rows"].shape[1] - num_parameters - 1 - len(auxiliary.covariance)
        estimator = cls(num_parameters, num_controls, state["groups"].tolist(), auxiliary, state["part"].tolist())
        estimator._rows, estimator._clusters = [state["rows"]], [state["clusters"]]
        return estimator

    @classmethod
    def merged(cls, parts: list[ClusteredRatioEstimator]) -> ClusteredRatioEstimator:
        """Return the estimator of several processes, none of which shares a cluster with another."""
        joined = cls.from_state(parts[0].state())
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
        """Return what gives the estimate of any weighted sum of the parameters."""
        _, fit, fitted = self._best(blocks)
        return ColumnRatios(fit, fitted, fit.summed(torch.cat(self._rows)[:, : self._num_parameters]))

    def _best(self, blocks: torch.Tensor | None) -> tuple[ClusteredRatio, ControlledClusters, FittedColumns]:
        """Return the result with as many of the auxiliary sample's controls as make its error smallest."""
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
        used, unlike = self._used(ControlledClusters(clusters, m, d, self._auxiliary.covariance))
        known = len(used) - len(self._auxiliary.covariance)
        available = int(used[known:].sum())
        wanted = (0, 1, available) if self._auxiliary.number is None else (self._auxiliary.number,)
        numbers = sorted({min(number, available) for number in wanted})
        order = torch.cat([torch.zeros(known, dtype=torch.int64), used[known:].cumsum(dim=0)])

        def fitted(used: torch.Tensor) -> tuple[ClusteredRatio, ControlledClusters, FittedColumns]:
            fit = ControlledClusters(clusters, m, d * used, self._auxiliary.covariance, blocks)
            return self._fitted(a, fit, used, unlike=unlike)

        best = min((fitted(used & (order <= number)) for number in numbers), key=lambda fitted: fitted[0].stderr)
        if not bool(used.any()):
            return best
        without = fitted(torch.zeros_like(used))
        return without if _HARMFUL * without[0].stderr < best[0].stderr else best

    def _fitted(
        self, a: torch.Tensor, fit: ControlledClusters, used: torch.Tensor, *, unlike: bool
    ) -> tuple[ClusteredRatio, ControlledClusters, FittedColumns]:
        """Return the result of sequences' squared norms a (n, K) with these controls (C,)."""
        fitted = fit.columns(a)
        by_group = a.new_zeros(len(a), int(self._groups.max()) + 1 if len(self._groups) else 0)
        for groups in self._groups.view(-1, a.shape[1]):
            by_group.index_add_(1, groups, a)
        of_groups, sums = fit.columns(by_group), fit.summed(a)

        def summed(columns: torch.Tensor) -> tuple[float, float, torch.Tensor]:
            """Return the ratio of the clusters' sums over columns, its error and its influence."""
            value = math.fsum(fitted.ratios[columns].tolist())
            beta, slopes = fitted.beta[:, :, columns].sum(dim=2), fitted.slopes[:, columns].sum(dim=1)
            return value, *fit.influence(sums[:, columns].sum(dim=1), beta, slopes, value)

        value, stderr, influence = summed(torch.arange(len(fitted.ratios)))
        part, part_stderr, part_influence = summed(self._part)
        result = ClusteredRatio(
            value=value,
            stderr=stderr,
            by_parameter=fitted.ratios,
            by_parameter_stderr=fitted.stderr,
            influence=influence,
            effective_samples=effective_samples(fit.sizes),
            part=part,
            part_stderr=part_stderr,
            part_influence=part_influence,
            by_group=of_groups.ratios,
            by_group_stderr=of_groups.stderr,
            samples=fit.samples,
            auxiliary_controls=tuple(used[len(used) - len(self._auxiliary.covariance) :].tolist()),
            auxiliary_differs=unlike,
        )
        return result, fit, fitted

    def _used(self, fit: ControlledClusters) -> tuple[torch.Tensor, bool]:
        """Return which controls (C,) may have coefficients, and whether the auxiliary sample differs."""
        d, n = fit.controls_by_sequence, len(fit.clusters)
        known = d.shape[1] - len(self._auxiliary.covariance)
        used = (d != 0).sum(dim=0) >= _FEWEST
        used[known:] &= self._auxiliary.num_sequences >= _FEWEST_AUXILIARY * n
        most = torch.full((len(used),), fit.number // _CLUSTERS_A_CONTROL)
        most[:known] = (n - int(fit.by_fold.max())) // _SEQUENCES_A_CONTROL  # n / 16 where each is a cluster
        used &= used.cumsum(dim=0) <= most
        chosen = used[known:]
        features, covariance = fit.controls[:, known:][:, chosen], self._auxiliary.covariance[chosen][:, chosen]
        unlike = _chance(fit.clusters.bincount().double(), features, covariance) < _UNLIKE
        used[known:] &= not unlike
        return used, unlike


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
    covariance = residuals.T @ residuals * (n / (n - 1) / total**2) + of_auxiliary
    square = float(mean @ torch.linalg.solve(covariance, mean))
    half = torch.tensor([directions / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
