"""What a trace is computed from: sums over independent clusters, with control variates whose mean is known.

Shapes: n sequences of a batch, K parameter tensors, C control variates, F folds, N clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isoloss.errors import IsolossError

FOLDS = 8
_FEWEST = 4 * FOLDS  # clusters in which a control is not 0, for a coefficient that is worth fitting
_CLUSTERS_A_CONTROL = 16  # or more, as each coefficient that is fitted adds its own noise
_SINGULAR = 1e-10  # of the largest eigenvalue of the controls' correlations


@dataclass(frozen=True)
class Shares:
    """A ratio, its standard error, and both for each parameter; the parameters' values add up to `value`.

    Attributes:
        value: Sum over clusters of the squared norms, less the fitted controls, over the predicted positions.
        stderr: Its standard error over clusters.
        by_parameter: (K,) float64.
        by_parameter_stderr: (K,) float64.
        by_group: (G,) float64, the sums of `by_parameter` over the groups of parameters.
        by_group_stderr: (G,) float64.
        influence: (N,) float64 with mean 0: what each cluster adds to the error; `value`'s standard error is their
            standard deviation over the root of N, and that of the difference of two values on the same clusters is
            the same of the differences of their influences.
    """

    value: float
    stderr: float
    by_parameter: torch.Tensor
    by_parameter_stderr: torch.Tensor
    influence: torch.Tensor
    by_group: torch.Tensor
    by_group_stderr: torch.Tensor

    @property
    def leading(self) -> float:
        """The largest cluster's part of the squared error, from 0 to 1.

        Near 1 a single cluster decides the error, and clusters like it are too rare in these data for it to be right.
        """
        squares = self.influence.square()
        return float(squares.max() / squares.sum()) if bool(squares.any()) else 0.0


class Tally:
    r"""A running record of squared gradient norms by cluster: consecutive sequences of one document, or one sequence.

    For a cluster b let a_b be its squared norms, m_b its predicted positions and d_b its controls: C numbers with
    expectation 0 whatever the data. For any coefficients beta that do not depend on cluster b, a_b - beta d_b has the
    expectation of a_b. The ratio is R = sum_b (a_b - beta_{f(b)} d_b) / sum_b m_b with the clusters dealt into F folds
    and beta_f the least-squares coefficients of a - R m on d over all folds but f ("cross-fitting"), so that it is
    unbiased as the plain ratio is. Its error is that of a ratio (Cochran, Sampling Techniques, section 6.3) with
    residuals a_b - beta_{f(b)} d_b - R m_b. Least squares is linear in a, so the same formula for each parameter
    tensor's part of a gives values that add up to R.

    A control that is other than 0 in fewer than 32 clusters has the coefficient 0, and of the rest, all but the first
    N / 16 have.

    Args:
        num_parameters: K.
        num_controls: C, which may be 0.
        groups: The group of each parameter, from 0 to G - 1; None: there are no groups.

    Example:
        >>> tally = Tally(num_parameters=2, num_controls=0)
        >>> tally.add(torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1, 1]), torch.zeros(3, 0))
        >>> shares = tally.shares()
        >>> shares.value, shares.by_parameter.tolist(), round(shares.stderr, 4)
        (2.0, [1.6666666666666667, 0.3333333333333333], 0.5774)
    """

    def __init__(self, num_parameters: int, num_controls: int, groups: Sequence[int] | None = None) -> None:
        self._rows = [torch.zeros(0, 3 + num_controls, dtype=torch.float64)]  # fold, a, m, d of closed clusters
        # by fold and parameter: the sums of a, a^2, a m, a d
        self._moments = torch.zeros(FOLDS, 3 + num_controls, num_parameters, dtype=torch.float64)
        self._groups = torch.tensor(groups or [], dtype=torch.int64)
        size = int(self._groups.max()) + 1 if groups else 0
        self._group_moments = torch.zeros(FOLDS, 3 + num_controls, size, dtype=torch.float64)
        self._open = torch.zeros(num_parameters + 1 + num_controls, dtype=torch.float64)  # a by parameter, m, d
        self._document: int | None = None  # of the open cluster; None: there is none

    def __len__(self) -> int:
        """Return the number of clusters, the open one included."""
        return sum(len(rows) for rows in self._rows) + (self._document is not None)

    def add(
        self,
        square_norms: torch.Tensor,
        positions: torch.Tensor,
        controls: torch.Tensor,
        documents: torch.Tensor | None = None,
    ) -> None:
        """Add sequences.

        Args:
            square_norms: (n, K) squared norms by sequence and parameter.
            positions: (n,) predicted positions.
            controls: (n, C), each with expectation 0.
            documents: (n,) ids: consecutive sequences of one id are one cluster. None: each is its own.
        """
        rows = torch.cat([square_norms.double(), positions.double()[:, None], controls.double()], dim=1).cpu()
        if documents is None:
            self._close()
            self._record(rows)
            return
        for document, row in zip(documents.tolist(), rows, strict=True):
            if document != self._document:
                self._close()
                self._document = document
            self._open += row

    def _close(self) -> None:
        if self._document is not None:
            self._record(self._open[None])
            self._open = torch.zeros_like(self._open)
            self._document = None

    def _record(self, rows: torch.Tensor) -> None:
        first, parameters = len(self), self._moments.shape[2]
        folds = torch.arange(first, first + len(rows)) % FOLDS
        a, rest = rows[:, :parameters], rows[:, parameters:]
        self._rows.append(torch.cat([folds[:, None].double(), a.sum(dim=1, keepdim=True), rest], dim=1))
        _add_moments(self._moments, folds, a, rest)
        if len(self._groups):
            by_group = torch.zeros(len(a), self._group_moments.shape[2], dtype=torch.float64)
            _add_moments(self._group_moments, folds, by_group.index_add_(1, self._groups, a), rest)

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors, from which `from_state` goes on."""
        self._rows = [torch.cat(self._rows)]
        document = torch.tensor([self._document is not None, self._document or 0])
        return {
            "rows": self._rows[0],
            "moments": self._moments,
            "groups": self._groups,
            "group_moments": self._group_moments,
            "open": self._open,
            "document": document,
        }

    @classmethod
    def from_state(cls, state: dict[str, torch.Tensor]) -> Tally:
        """Return the tally that `state` described."""
        tally = cls(state["moments"].shape[2], state["rows"].shape[1] - 3, state["groups"].tolist())
        tally._rows, tally._moments, tally._open = [state["rows"]], state["moments"].clone(), state["open"].clone()
        tally._group_moments = state["group_moments"].clone()
        is_open, document = state["document"].tolist()
        tally._document = document if is_open else None
        return tally

    @classmethod
    def merged(cls, parts: list[Tally]) -> Tally:
        """Return the tally of several processes, none of which shares a cluster with another."""
        for part in parts:
            part._close()
        states = [part.state() for part in parts]
        joined = cls.from_state(states[0])
        joined._rows = [state["rows"] for state in states]
        joined._moments = torch.stack([state["moments"] for state in states]).sum(dim=0)
        joined._group_moments = torch.stack([state["group_moments"] for state in states]).sum(dim=0)
        return joined

    def shares(self) -> Shares:
        """Return the ratio, its error, and its split over the parameters.

        Raises:
            IsolossError: There are fewer than two clusters.
        """
        self._close()
        rows = torch.cat(self._rows)
        n = len(rows)
        if n < 2:
            raise IsolossError(f"an error bar needs at least 2 independent sequences or documents, not {n}")
        folds, m, d = rows[:, 0].long(), rows[:, 2], rows[:, 3:]
        total, correction = float(m.sum()), n / (n - 1)
        used = (d != 0).sum(dim=0) >= _FEWEST
        d = d * (used & (used.cumsum(dim=0) <= n // _CLUSTERS_A_CONTROL))

        def split(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Return the coefficients (F, C, K), the ratios (K,) and their errors."""
            sums = _Sums.of(folds, m, d, moments)
            beta = _coefficients(sums)
            ratios = (sums.a - (beta * sums.d[:, :, None]).sum(dim=1)).sum(dim=0) / total
            return beta, ratios, (correction * sums.square_residuals(beta, ratios)).sqrt() / total

        beta, ratios, errors = split(self._moments)
        _, by_group, by_group_stderr = split(self._group_moments)
        value = math.fsum(ratios.tolist())
        residuals = rows[:, 1] - (beta.sum(dim=2)[folds] * d).sum(dim=1) - value * m
        return Shares(
            value=value,
            stderr=math.sqrt(correction * float(residuals.square().sum())) / total,
            by_parameter=ratios,
            by_parameter_stderr=errors,
            influence=residuals * (n / total),
            by_group=by_group,
            by_group_stderr=by_group_stderr,
        )


def _add_moments(moments: torch.Tensor, folds: torch.Tensor, a: torch.Tensor, rest: torch.Tensor) -> None:
    """Add clusters' a (n, K) and m, d (n, 1 + C) to the sums of a, a^2, a m and a d by fold, in place."""
    moments[:, 0].index_add_(0, folds, a)
    moments[:, 1].index_add_(0, folds, a.square())
    for place in range(rest.shape[1]):
        moments[:, 2 + place].index_add_(0, folds, a * rest[:, place, None])


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
