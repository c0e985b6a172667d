"""The granulated Kendall coefficient: whether two measures order runs alike that differ in one hyper-parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss.errors import IsolossError
from isoloss.statistics.checking import column, labels
from isoloss.statistics.estimate import Estimate, number
from isoloss.statistics.jackknife import jackknife

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

_SAME = 1e-12  # below it, differences of coefficients are rounding


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
            f"clusters): {', '.join(f'{name} {_text(each)}' for name, each in parts)}"
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
        kept = (self.first != without) & (self.second != without)
        numbers = np.bincount(self.cells[kept])
        some = numbers > 0
        sums = np.bincount(self.cells[kept], self.signs[kept])
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
    others = np.stack([np.zeros_like(groups), *(each for other, each in codes.items() if other != name)], axis=1)
    cells = np.unique(others, axis=0, return_inverse=True)[1].reshape(-1)
    own = codes[name]
    first, second = np.nonzero(np.triu((cells[:, None] == cells) & (own[:, None] != own)))
    if not len(first):
        raise IsolossError(f"no two observations differ in {name!r} alone; leave it out of the hyper-parameters")
    signs = np.sign(x[first] - x[second]) * np.sign(y[first] - y[second])
    return _Pairs(signs, cells[first], groups[first], groups[second])


def _text(part: Estimate) -> str:
    return number(part) if part.stderr > 0 else f"{part.value:.2f}"
