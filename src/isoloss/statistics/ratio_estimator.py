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

_FEWEST = 4 * FOLDS  # clusters in which a control is not 0, for a coefficient that is worth fitting
_HARMFUL = 2  # times the error without controls: more is chance, and none is used
_CLUSTERS_A_CONTROL = 16  # or more, as each coefficient that is fitted adds its own noise
_FEWEST_AUXILIARY = 2  # times the measured sequences: a mean over fewer is hardly better known
_CONTROLS = 5  # the first column of the controls in a cluster's row
_UNLIKE = 1e-9  # the chance that sequences drawn as the auxiliary sample was are as far from its mean


class Clusters:
    """Rows of numbers summed over clusters: consecutive sequences of one document, or one sequence.

    Attributes:
        open: (width,) float64, the sums of the document that goes on.
        document: Its id; None: there is none.

    Example:
        >>> clusters = Clusters(1)
        >>> clusters.add(torch.ones(3, 1), torch.tensor([7, 7, 8])), clusters.close()
        (tensor([[2.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    def __init__(self, width: int) -> None:
        self.open = torch.zeros(width, dtype=torch.float64)
        self.document: int | None = None

    def add(self, rows: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """Add rows (n, width), and return the sums over each cluster that is complete by now."""
        rows = rows.double()
        if documents is None:
            return torch.cat([self.close(), rows])
        complete = []
        for document, row in zip(documents.tolist(), rows, strict=True):
            if document != self.document:
                complete.append(self.close())
                self.document = document
            self.open += row
        return torch.cat(complete) if complete else rows[:0]

    def close(self) -> torch.Tensor:
        """Return the sums of the document that goes on, as one row or none, and end it."""
        sums = self.open[None] if self.document is not None else self.open[None][:0]
        self.open, self.document = torch.zeros_like(self.open), None
        return sums


@dataclass(frozen=True)
class ClusteredRatio:
    """A ratio, its standard error, and both for each parameter; the parameters' values add up to `value`."""

    value: float  # sum over clusters of the squared norms, less the fitted controls, over the predicted positions
    stderr: float  # its standard error over clusters
    by_parameter: torch.Tensor  # (K,) float64
    by_parameter_stderr: torch.Tensor | None  # (K,) float64; None for a sum of two
    # (N + r,) float64: what each cluster, and each of the auxiliary sample's means, adds to the error. `value`'s
    # standard error is the root of the sum of their squares over N (N - 1), and that of the difference of two values on
    # the same clusters and means is the same of the differences of their influences
    influence: torch.Tensor
    part: float  # the sum of `by_parameter` over the parameters of the part
    part_stderr: float  # its standard error
    part_influence: torch.Tensor  # (N + r,) float64, as `influence`
    by_group: torch.Tensor  # (G,) float64, the sums of `by_parameter` over the groups of parameters
    by_group_stderr: torch.Tensor | None  # (G,) float64; None for a sum of two
    clusters: int  # N
    auxiliary_controls: tuple[bool, ...]  # (r,) which of the auxiliary sample's controls were used
    # whether the clusters are too far from the auxiliary sample's means to have been drawn alike, so that none was
    auxiliary_differs: bool

    @property
    def leading(self) -> float:
        """The largest cluster's part of the squared error, from 0 to 1.

        Near 1 a single cluster decides the error, and clusters like it are too rare in these data for it to be right.
        """
        squares = self.influence.square()
        return float(squares[: self.clusters].max() / squares.sum()) if bool(squares.any()) else 0.0

    def plus(self, other: ClusteredRatio) -> ClusteredRatio:
        """Return the sum with another one over the same clusters, with the error of the sum of their influences."""
        n = self.clusters
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
    r"""A running record of squared gradient norms by cluster: consecutive sequences of one document, or one sequence.

    For a cluster b let a_b be its squared norms, m_b its predicted positions and d_b its controls: C numbers with
    expectation 0 whatever the data. For any coefficients beta that do not depend on cluster b, a_b - beta d_b has the
    expectation of a_b. The ratio is R = sum_b (a_b - beta_{f(b)} d_b) / sum_b m_b with the clusters dealt into F folds
    and beta_f the least-squares coefficients of a - R m on d over all folds but f ("cross-fitting"), so that it is
    unbiased as the plain ratio is. Its error is that of a ratio (Cochran, Sampling Techniques, section 6.3) with
    residuals a_b - beta_{f(b)} d_b - R m_b. Least squares is linear in a, so the same formula for each parameter
    tensor's part of a gives values that add up to R.

    A control that is other than 0 in fewer than 32 clusters has the coefficient 0, and of the rest, all but the first
    N / 16 have. Where the error is more than twice that without any control, as a few clusters with enormous controls
    make it, all have.

    The last r controls may be measured from means that are estimates themselves, those of an auxiliary sample
    (`isoloss.flatness.engine.auxiliary_sample.AuxiliarySample`). With n_b the sequences of cluster b, R moves by
    g = sum_b n_b beta_{f(b)} / sum_b m_b for each unit that a mean is wrong by, so that g^T C g with the covariance C
    of the means joins the squared error. These controls are left out where the auxiliary sample has fewer than twice as
    many sequences as the clusters, and where Hotelling's T^2 says that the clusters were not drawn as the auxiliary
    sample was (chance below 1e-9). Else it is all of them, the first one or none, whichever has the smallest error,
    unless a number is given.

    Args:
        num_parameters: K.
        num_controls: C - r, which may be 0.
        groups: The group of each parameter, from 0 to G - 1, or several such lists, each with groups of its own; None:
            there are no groups.
        auxiliary: How well the means of r further controls are known; None: there are none.
        part: Parameters, by their columns, whose sum is wanted with an influence of its own.
        keep_rows: Whether every cluster's squared norms are kept by column, (N, K) float64, for `columns`.

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
        keep_rows: bool = False,
    ) -> None:
        self._part = torch.tensor(part, dtype=torch.int64)
        self._auxiliary = auxiliary or AuxiliaryMeans(torch.zeros(0, 0, dtype=torch.float64), 0)
        num_controls += len(self._auxiliary.covariance)
        # fold, a, a of the part, n, m, d of closed clusters
        self._rows = [torch.zeros(0, _CONTROLS + num_controls, dtype=torch.float64)]
        self._kept = [torch.zeros(0, num_parameters, dtype=torch.float64)] if keep_rows else None  # a by parameter
        # by fold and parameter: the sums of a, a^2, a m, a d
        self._moments = torch.zeros(FOLDS, 3 + num_controls, num_parameters, dtype=torch.float64)
        self._groups = torch.tensor(groups or [], dtype=torch.int64)
        size = int(self._groups.max()) + 1 if groups else 0
        self._group_moments = torch.zeros(FOLDS, 3 + num_controls, size, dtype=torch.float64)
        self._clusters = Clusters(num_parameters + 2 + num_controls)  # a by parameter, n, m, d

    def __len__(self) -> int:
        """Return the number of clusters, the open one included."""
        return sum(len(rows) for rows in self._rows) + (self._clusters.document is not None)

    def add(
        self,
        square_norms: torch.Tensor,
        positions: torch.Tensor,
        controls: torch.Tensor,
        documents: torch.Tensor | None = None,
    ) -> None:
        """Add sequences."""
        ones = torch.ones(len(positions), 1, dtype=torch.float64)
        values = square_norms.double().cpu(), ones, positions.double()[:, None].cpu(), controls.double().cpu()
        self._record(self._clusters.add(torch.cat(values, dim=1), documents))

    def _record(self, rows: torch.Tensor) -> None:
        first, parameters = sum(len(known) for known in self._rows), self._moments.shape[2]
        folds = torch.arange(first, first + len(rows)) % FOLDS
        a, rest = rows[:, :parameters], rows[:, parameters:]
        sums = [values.sum(dim=1, keepdim=True) for values in (a, a[:, self._part])]
        self._rows.append(torch.cat([folds[:, None].double(), *sums, rest], dim=1))
        _add_moments(self._moments, folds, a, rest[:, 1:])
        if len(self._groups):
            by_group = torch.zeros(len(a), self._group_moments.shape[2], dtype=torch.float64)
            for groups in self._groups.view(-1, parameters):
                by_group.index_add_(1, groups, a)
            _add_moments(self._group_moments, folds, by_group, rest[:, 1:])
        if self._kept is not None:
            self._kept.append(a.clone())

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors, from which `from_state` goes on."""
        if self._kept is None:
            return self._sums()
        # in the same parts, which decide how sums over the columns are rounded
        sizes = torch.tensor([len(part) for part in self._kept])
        return {**self._sums(), "kept": torch.cat(self._kept), "kept_sizes": sizes}

    def _sums(self) -> dict[str, torch.Tensor]:
        """Return the state but for the rows that are kept by column."""
        self._rows = [torch.cat(self._rows)]
        document = self._clusters.document
        return {
            "rows": self._rows[0],
            "moments": self._moments,
            "groups": self._groups,
            "part": self._part,
            "group_moments": self._group_moments,
            "open": self._clusters.open,
            "document": torch.tensor([document is not None, document or 0]),
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
        number_of_sequences = int(state["auxiliary_sequences"])
        auxiliary = AuxiliaryMeans(state["auxiliary_covariance"], number_of_sequences, next(iter(numbers), None))
        num_controls = state["rows"].shape[1] - _CONTROLS - len(auxiliary.covariance)
        estimator = cls(
            state["moments"].shape[2],
            num_controls,
            state["groups"].tolist(),
            auxiliary,
            state["part"].tolist(),
            keep_rows="kept" in state,
        )
        if "kept" in state:
            estimator._kept = [part.clone() for part in torch.split(state["kept"], state["kept_sizes"].tolist())]
        estimator._rows, estimator._moments = [state["rows"]], state["moments"].clone()
        estimator._group_moments = state["group_moments"].clone()
        estimator._clusters.open = state["open"].clone()
        is_open, document = state["document"].tolist()
        estimator._clusters.document = document if is_open else None
        return estimator

    @classmethod
    def merged(cls, parts: list[ClusteredRatioEstimator]) -> ClusteredRatioEstimator:
        """Return the estimator of several processes, none of which result a cluster with another."""
        for part in parts:
            part._record(part._clusters.close())
        states = [part._sums() for part in parts]
        joined = cls.from_state(states[0])
        joined._rows = [state["rows"] for state in states]
        if parts[0]._kept is not None:
            joined._kept = [rows for part in parts for rows in part._kept or []]
        joined._moments = torch.stack([state["moments"] for state in states]).sum(dim=0)
        joined._group_moments = torch.stack([state["group_moments"] for state in states]).sum(dim=0)
        return joined

    def result(self) -> ClusteredRatio:
        """Return the ratio, its error, and its split over the parameters, the document that goes on included."""
        return self._closed()._best()[0]

    def columns(self) -> ColumnRatios:
        """Return what gives the estimate of any weighted sum of the parameters; it takes `keep_rows`."""
        closed = self._closed()
        assert closed._kept is not None, "keep_rows is not set"
        return ColumnRatios(*closed._best()[1:], by_fold=closed._moments[:, 0].clone(), rows=tuple(closed._kept))

    def _closed(self) -> ClusteredRatioEstimator:
        """Return it, or, where a document goes on, another one in which it ends."""
        if self._clusters.document is None:
            return self
        copy = ClusteredRatioEstimator.from_state(self._sums())
        copy._kept = None if self._kept is None else list(self._kept)
        return ClusteredRatioEstimator.merged([copy])

    def _best(self) -> tuple[ClusteredRatio, ControlledClusters, FittedColumns]:
        """Return the result with as many of the auxiliary sample's controls as make its error smallest."""
        rows = torch.cat(self._rows)
        predicting = int((rows[:, 4] > 0).sum())
        if len(rows) and not predicting:
            raise IsolossError(NOTHING_PREDICTED)
        if predicting < 2:
            raise IsolossError(
                f"an error bar needs at least 2 independent sequences or documents, not {predicting} (with a label)"
            )
        used, unlike = self._used(rows[:, 3], rows[:, _CONTROLS:])
        known = len(used) - len(self._auxiliary.covariance)
        available = int(used[known:].sum())
        wanted = (0, 1, available) if self._auxiliary.number is None else (self._auxiliary.number,)
        numbers = sorted({min(number, available) for number in wanted})
        order = torch.cat([torch.zeros(known, dtype=torch.int64), used[known:].cumsum(dim=0)])
        fitted = [self._fitted(rows, used & (order <= number), unlike=unlike) for number in numbers]
        best = min(fitted, key=lambda fitted: fitted[0].stderr)
        if not bool(used.any()):
            return best
        without = self._fitted(rows, torch.zeros_like(used), unlike=unlike)
        return without if _HARMFUL * without[0].stderr < best[0].stderr else best

    def _fitted(
        self, rows: torch.Tensor, used: torch.Tensor, *, unlike: bool
    ) -> tuple[ClusteredRatio, ControlledClusters, FittedColumns]:
        """Return the result of closed clusters with these controls (C,)."""
        d = rows[:, _CONTROLS:] * used
        fit = ControlledClusters(rows[:, 0].long(), rows[:, 4], d, rows[:, 3], self._auxiliary.covariance)
        fitted, groups = fit.columns(self._moments), fit.columns(self._group_moments)

        def summed(sums: torch.Tensor, columns: torch.Tensor) -> tuple[float, float, torch.Tensor]:
            """Return the ratio of the clusters' sums (N,) over columns, its error and its influence."""
            value = math.fsum(fitted.ratios[columns].tolist())
            beta, slopes = fitted.beta[:, :, columns].sum(dim=2), fitted.slopes[:, columns].sum(dim=1)
            return value, *fit.influence(sums, beta, slopes, value)

        value, stderr, influence = summed(rows[:, 1], torch.arange(len(fitted.ratios)))
        part, part_stderr, part_influence = summed(rows[:, 2], self._part)
        result = ClusteredRatio(
            value=value,
            stderr=stderr,
            by_parameter=fitted.ratios,
            by_parameter_stderr=fitted.stderr,
            influence=influence,
            part=part,
            part_stderr=part_stderr,
            part_influence=part_influence,
            by_group=groups.ratios,
            by_group_stderr=groups.stderr,
            clusters=len(rows),
            auxiliary_controls=tuple(used[len(used) - len(self._auxiliary.covariance) :].tolist()),
            auxiliary_differs=unlike,
        )
        return result, fit, fitted

    def _used(self, sequences: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return which controls (C,) may have coefficients, and whether the auxiliary sample differs."""
        known = d.shape[1] - len(self._auxiliary.covariance)
        used = (d != 0).sum(dim=0) >= _FEWEST
        used[known:] &= self._auxiliary.num_sequences >= _FEWEST_AUXILIARY * float(sequences.sum())
        used &= used.cumsum(dim=0) <= len(d) // _CLUSTERS_A_CONTROL
        chosen = used[known:]
        unlike = _chance(sequences, d[:, known:][:, chosen], self._auxiliary.covariance[chosen][:, chosen]) < _UNLIKE
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


def _add_moments(moments: torch.Tensor, folds: torch.Tensor, a: torch.Tensor, rest: torch.Tensor) -> None:
    """Add clusters' a (n, K) and m, d (n, 1 + C) to the sums of a, a^2, a m and a d by fold, in place."""
    moments[:, 0].index_add_(0, folds, a)
    moments[:, 1].index_add_(0, folds, a.square())
    for column in range(rest.shape[1]):
        moments[:, 2 + column].index_add_(0, folds, a * rest[:, column, None])
