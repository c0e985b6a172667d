"""Which measure predicts which outcome at the same loss: correlations given the loss, N checkpoints in G clusters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss import seeds
from isoloss.errors import IsolossError, did_you_mean
from isoloss.statistics.checking import column, labels, positive
from isoloss.statistics.correlation import Correlation, GranulatedKendall, correlation, granulated_kendall
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.statistics.significance import LOSS_MARGIN, holm
from isoloss.statistics.tables import probability

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

# words in the names of measures that are above 0 and differ between models by factors
SCALES = {"trace", "fisher", "eigenvalue", "eigenvalues", "sharpness", "flatness", "norm"}
LEAST_CLUSTERS = 3
_LEVEL = 0.05
_ALL = 7  # up to this many clusters, all permutations are taken, at most 5,040
_DRAWN = 9_999  # permutations of more clusters
_POWER = 0.85  # of a t test with the true error; with a suite's own estimate of it, 80 % of simulated suites find it
_NONE_LEFT = 1e-9  # residuals below this fraction of a variable's range are rounding
_SAME = 1e-9  # smaller differences of correlations are rounding
_RESAMPLES = 100  # the fewest that are allowed: the bootstrap's interval is not used


@dataclass(frozen=True, kw_only=True)
class Association:
    """Whether a measure predicts an outcome at the same loss.

    Attributes:
        measure: The name of the measure.
        outcome: The name of the outcome.
        given: The name of the loss.
        over: The names of the clusters and, if there are any, of the levels.
        logarithms: The names of the variables that enter as logarithms.
        pearson: The partial correlation given the loss, with its error over clusters; None if there is a `problem`.
        spearman: The same for ranks.
        kendall: The granulated Kendall coefficient of the residuals given the loss; None without hyperparameters.
        within_band: Pearson's correlation among checkpoints at the same loss, without a covariate.
        band: These checkpoints, in words.
        over_levels: `pearson` with its error over levels, such as recipes; None without levels.
        p_permutation: The p-value for no correlation given the loss, by permutations of whole clusters.
        p_adjusted: The same after Holm's correction for all pairs.
        pairs: The number of these pairs.
        detectable: The smallest true correlation that is found with 80 % power after the correction; 1 if none is.
        observations: N.
        clusters: G.
        missing: Why another field is None, by its name.
        problem: Why there is no correlation; empty if there is one.
    """

    measure: str
    outcome: str
    given: tuple[str, ...]
    over: tuple[str, ...]
    logarithms: tuple[str, ...] = ()
    pearson: Correlation | None = None
    spearman: Correlation | None = None
    kendall: GranulatedKendall | None = None
    within_band: Correlation | None = None
    band: str = ""
    over_levels: Correlation | None = None
    p_permutation: float = math.nan
    p_adjusted: float = math.nan
    pairs: int = 0
    detectable: float = math.nan
    observations: int = 0
    clusters: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def shown(self) -> bool:
        """Whether p after Holm is below 0.05 and the 95 % intervals, over clusters and over levels, exclude 0."""
        return self._shown_here and (self.over_levels is None or _without_0(self.over_levels))

    @property
    def _shown_here(self) -> bool:
        """The same without the interval over levels, so only for the levels of this suite."""
        return self.pearson is not None and _without_0(self.pearson) and self.p_adjusted < _LEVEL

    def sentence(self, *, with_advice: bool = True) -> str:
        """Return the answer in words; it says "predicts" only if it is `shown`.

        `with_advice`: also what to do where there are too few clusters to show any pair.
        """
        measure, outcome = (f"log {name}" if name in self.logarithms else name for name in (self.measure, self.outcome))
        if self.pearson is None:
            return f"Whether {measure} predicts {outcome} at the same {self.given[0]} is not known ({self.problem})."
        intervals = [
            f"({found.texts[1]} to {found.texts[2]}) over {found.clusters} {_plural(name)}"
            for name, found in zip(self.over, (self.pearson, self.over_levels), strict=False)
            if found is not None
        ]
        beyond = ""
        if self._shown_here and not self.shown and self.over_levels is not None:
            beyond = f" beyond these {self.over_levels.clusters} {_plural(self.over[1])}"
        could = f"; {self.advice}" if self.advice and with_advice else ""
        if not self.advice and not self.shown:
            could = f"; the smallest correlation that this suite could show is {self.detectable:.2f}"
        predicts = "predicts" if self.shown else "is not shown to predict"
        return (
            f"At the same {self.given[0]}, {measure} {predicts} {outcome}{beyond}: "
            f"r = {self.pearson.texts[0]} {' and '.join(intervals)}, p {probability(self.p_adjusted)} after "
            f"Holm{could}."
        )

    @property
    def advice(self) -> str:
        """What to do in a suite with too few clusters for its pairs; empty: it has enough, or r is not known."""
        if self.pearson is None or _can_show(self.pairs, self.clusters):
            return ""
        unit, one, all_of_them = _plural(self.over[0]), clusters_to_show(1), clusters_to_show(self.pairs)
        pairs, steps = f"{self.pairs:,} pairs", f"take at least {one} {unit}"
        if self.pairs == 1:
            pairs = "1 pair"
        elif not _can_show(1, self.clusters):
            steps += f", and {all_of_them} for all of these pairs" if all_of_them else ", and test fewer pairs"
        else:
            steps = "test fewer pairs" + (f", or take at least {all_of_them} {unit}" if all_of_them else "")
        return f"{self.clusters} {unit} are too few to test {pairs} of measures and outcomes: {steps}"

    def __str__(self) -> str:
        return self.sentence()


def associate(
    columns: Mapping[str, ArrayLike],
    *,
    measures: Sequence[str],
    outcomes: Sequence[str],
    loss: str,
    clusters: str,
    levels: str | None = None,
    along: str | None = None,
    hyperparameters: Sequence[str] = (),
    loss_margin: float = LOSS_MARGIN,
    seed: int = 0,
) -> tuple[Association, ...]:
    """Return the association of each measure with each outcome, given the loss.

    A variable with one of the words `trace`, `fisher`, `eigenvalue`, `sharpness`, `flatness` or `norm` in its name
    enters as a logarithm if all its values are above 0: such measures differ between models by factors. Pearson's and
    Spearman's correlations are partial correlations with the interval of `isoloss.statistics.correlation.correlation`.
    The granulated Kendall coefficient uses the residuals of least squares on the loss, because Kendall's partial tau is
    not 0 for variables that are independent given the loss. Its error does not include the error of the fit.

    `within_band` takes the checkpoints in the window of losses, `loss_margin` wide, that has the most clusters. With
    `along`, it instead takes one point of each training run at the lowest of the losses that the most clusters pass, if
    that gives more clusters: the first such point on the lines between neighboring steps. Nothing is extrapolated.

    The p-value permutes the residuals of the outcome given the loss (Freedman and Lane, 1983) by whole clusters. The
    k-th checkpoint of a cluster, along the steps, takes the place of another cluster's k-th; if there is no k-th one,
    the residual is 0. The statistic is the absolute partial correlation. A trend that all clusters share along the
    steps is in every permutation, so a correlation due to it has a large p.

    `detectable` is for a t test of artanh r at the level 0.05 divided by the number of pairs, with G - 2 degrees of
    freedom: the loss takes one. Its error is the larger of two: the root mean square of artanh r over the permutations,
    and the error of artanh r over clusters.

    Args:
        columns: N values or labels, one for each checkpoint, by name. A checkpoint with None or NaN is left out of the
            pairs that need the value.
        measures: Names of columns.
        outcomes: Names of columns.
        loss: The column of the loss.
        clusters: The column of the independent units, such as the seed; at least 3 different values.
        levels: A column across which the answers must also hold, such as the recipe.
        along: The column of the steps.
        hyperparameters: Columns, as for `isoloss.statistics.correlation.granulated_kendall`.
        loss_margin: Two losses count as the same within this margin, in nats per predicted token.
        seed: Decides the permutations; the stream is `"association"`.

    Raises:
        IsolossError: The margin is not above 0. A mistake in a column is the `problem` of its pairs.

    Example:
        >>> from isoloss.statistics.association import associate
        >>> suite = {"seed": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "loss": [3, 2, 3.1, 2, 3, 2.1, 3.2, 2, 3, 2.2]}
        >>> suite["trace"] = [90, 30, 60, 21, 77, 26, 44, 15, 80, 34]
        >>> suite["acc"] = [0.61, 0.70, 0.66, 0.73, 0.62, 0.72, 0.67, 0.77, 0.62, 0.67]
        >>> found = associate(suite, measures=["trace"], outcomes=["acc"], loss="loss", clusters="seed")
        >>> print(*found)  # doctest: +NORMALIZE_WHITESPACE
        At the same loss, log trace predicts acc: r = -0.96 (-1.00 to -0.72) over 5 seeds, p 0.008 after Holm.
    """
    positive("loss_margin", loss_margin)
    labeled = [name for name in (clusters, levels, along, *hyperparameters) if name is not None]
    over = (clusters,) if levels is None else (clusters, levels)

    def associated(measure: str, outcome: str) -> tuple[Association, float]:
        none = Association(measure=measure, outcome=outcome, given=(loss,), over=over)
        try:
            kept, logarithms = _values(columns, [measure, outcome], loss, labeled)
            x, y, at, of = kept[measure], kept[outcome], kept[loss], kept[clusters]
            names, codes = labels(of, len(x), least=LEAST_CLUSTERS)
            found = dataclasses.replace(none, logarithms=logarithms, observations=len(x), clusters=len(names))
            steps = np.zeros(len(x)) if along is None else column(along, kept[along])
            about: dict[str, Any] = {"given": {"loss": at}, "resamples": _RESAMPLES}
            pearson = correlation(x, y, of, **about)
            of_run = [labels(kept[name], len(x), 1, name)[1] for name in labeled if name != along]
        except IsolossError as error:
            return dataclasses.replace(none, problem=str(error)), math.nan
        runs = np.unique(of_run, axis=1, return_inverse=True)[1].reshape(-1) if along is not None else None
        (x_there, y_there, _), rows, band = _at_one_loss(np.stack([x, y, at]), codes, runs, steps, loss_margin)
        parts: dict[str, Callable[[], Any]] = {
            "spearman": lambda: correlation(x, y, of, kind="spearman", **about),
            "within_band": lambda: correlation(x_there, y_there, [of[i] for i in rows], resamples=_RESAMPLES),
        }
        if levels is not None:
            parts["over_levels"] = lambda: correlation(x, y, kept[levels], **about)
        if hyperparameters:
            chosen = {name: kept[name] for name in hyperparameters}
            parts["kendall"] = lambda: granulated_kendall(_residuals(x, at), _residuals(y, at), chosen, of)
        made, missing = {}, {}
        for name, make in parts.items():
            try:
                made[name] = make()
            except IsolossError as error:
                missing[name] = str(error)
        p, spread = _permuted(x, y, at, codes, steps, seed)
        together = dataclasses.replace(found, pearson=pearson, band=band, p_permutation=p, missing=missing, **made)
        return together, spread

    results = [associated(*pair) for pair in itertools.product(measures, outcomes)]
    tests = {f"{i}": each.p_permutation for i, (each, _) in enumerate(results) if each.pearson is not None}
    adjusted = holm(tests) if tests else {}
    for i, p in adjusted.items():
        each, spread = results[int(i)]
        pairs = each.clusters - 1  # of a paired t test: the loss takes a degree of freedom
        detectable = 1.0
        if _can_show(len(tests), each.clusters):
            # the interval must exclude 0, too
            error = max(spread, each.pearson.z_stderr) if each.pearson else spread
            sd, alpha = error * math.sqrt(pairs), _LEVEL / len(tests)
            detectable = math.tanh(minimal_detectable_effect(sd, pairs, power=_POWER, alpha=alpha))
        results[int(i)] = dataclasses.replace(each, p_adjusted=p, pairs=len(tests), detectable=detectable), spread
    return tuple(each for each, _ in results)


def strongest_first(associations: Iterable[Association]) -> list[Association]:
    """Return the associations that are shown, then the others, each by the size of r; those without r come last."""
    return sorted(associations, key=lambda each: (not each.shown, -abs(each.pearson.value) if each.pearson else 1))


def _plural(name: str) -> str:
    return f"{name.removesuffix('s')}s"


def clusters_to_show(pairs: int) -> int | None:
    """Return the fewest clusters with which so many pairs could be shown; None: no number is enough."""
    return next((number for number in range(LEAST_CLUSTERS, _ALL + 2) if _can_show(pairs, number)), None)


def _can_show(pairs: int, clusters: int) -> bool:
    """Whether the smallest p-value of permutations is below the level after Holm's correction."""
    permutations = math.factorial(clusters) if clusters <= _ALL else _DRAWN + 1
    return pairs / permutations < _LEVEL


def _without_0(found: Correlation) -> bool:
    low, high = found.interval95
    return low > 0 or high < 0


def _values(
    columns: Mapping[str, Any], pair: Sequence[str], loss: str, labeled: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the columns of the checkpoints with all values, and the names of those that are logarithms."""
    names = list(dict.fromkeys([*pair, loss, *labeled]))
    for name in names:
        if name not in columns:
            raise IsolossError(f"there is no column {name!r}{did_you_mean(name, columns)}")
        if len(columns[name]) != len(columns[loss]):
            raise IsolossError(f"{name} has {len(columns[name])} values, but {loss} has {len(columns[loss])}")
    there = [[value is not None and value == value for value in columns[name]] for name in names]
    rows = np.flatnonzero(np.all(there, axis=0)).tolist()
    if not rows:
        empty = next((name for name, some in zip(names, there, strict=True) if not any(some)), " and ".join(names))
        raise IsolossError(f"no checkpoint has a value for {empty}")
    kept: dict[str, Any] = {name: [columns[name][i] for i in rows] for name in names}
    # refuses too few clusters, of which the checks below are a result
    labels(kept[labeled[0]], len(rows), least=LEAST_CLUSTERS)
    kept |= {name: column(name, kept[name]) for name in (*pair, loss)}
    # without the name of a text, "trace (docs)"
    scales = [name for name in pair if SCALES.intersection(re.split("[^a-z]+", name.partition(" (")[0].lower()))]
    logarithms = tuple(name for name in scales if kept[name].min() > 0)
    kept |= {name: np.log(kept[name]) for name in logarithms}
    for name in pair:
        if np.ptp(kept[name]) == 0:
            raise IsolossError(f"{name} is the same in all {len(rows)} checkpoints that have {' and '.join(pair)}")
        if np.ptp(_residuals(kept[name], kept[loss])) < _NONE_LEFT * np.ptp(kept[name]):
            raise IsolossError(f"given {loss}, nothing is left of {name}")
    return kept, logarithms


def _residuals(values: Floats, loss: Floats) -> Floats:
    """Return the residuals (N,) of values after least squares on the loss and a constant."""
    off, centered = loss - loss.mean(), values - values.mean()
    residuals: Floats = centered - off * (off @ centered) / ((off @ off) or 1.0)
    return residuals


def _at_one_loss(
    values: Floats, codes: Integers, runs: Integers | None, steps: Floats, margin: float
) -> tuple[Floats, Integers, str]:
    """Return x, y and loss (3, n) of checkpoints at the same loss, the rows with their clusters, and them in words.

    `values` are x, y and loss (3, N); `runs` (N,) is None without steps.
    """
    order = np.argsort(values[2], kind="stable")
    loss = values[2][order]
    bands = [order[i:end] for i, end in enumerate(np.searchsorted(loss, loss + margin, side="right"))]
    band = max(bands, key=lambda rows: (len({*codes[rows]}), len(rows)))  # of equal ones the lowest
    paths = []  # the rows of each run in the order of its steps
    for run in [] if runs is None else np.unique(runs):
        rows = np.flatnonzero(runs == run)
        if 1 < len(rows) == len({*steps[rows]}):
            paths.append(rows[np.argsort(steps[rows])])
    if paths:
        lows, highs = np.array([(values[2, rows].min(), values[2, rows].max()) for rows in paths]).T
        first = np.array([rows[0] for rows in paths])
        passing = [np.flatnonzero((lows <= low) & (low <= highs)) for low in np.sort(lows)]
        most = max(passing, key=lambda some: (len({*codes[first[some]]}), len(some)))
        if len({*codes[first[most]]}) > len({*codes[band]}):
            level, points, between = lows[most].max(), [], 0
            for path in (values[:, paths[i]] for i in most):
                off = path[2] - level
                i = np.flatnonzero(off[:-1] * off[1:] <= 0)[0]
                part = off[i] / ((off[i] - off[i + 1]) or 1.0)
                points.append(path[:, i] + part * (path[:, i + 1] - path[:, i]))
                between += 0 < part < 1
            about = f"{len(points)} checkpoints at a loss of {level:.4g}, {between} of them interpolated"
            return np.array(points).T, first[most], about
    low, high = values[2, band].min(), values[2, band].max()
    return values[:, band], band, f"{len(band)} checkpoints with losses from {low:.4g} to {high:.4g}"


def _permuted(x: Floats, y: Floats, loss: Floats, codes: Integers, steps: Floats, seed: int) -> tuple[float, float]:
    """Return the p-value of x and y given the loss, and the root mean square of artanh r over permutations."""
    sizes = np.bincount(codes)
    groups = np.arange(len(sizes))
    order = np.lexsort((steps, codes))
    kth = np.arange(len(x)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    wide = np.zeros((4, len(groups), sizes.max()))  # by cluster, and within it in the order of steps
    variables = _residuals(y, loss), _residuals(x, loss), loss - loss.mean(), np.ones(len(x))
    wide[:, codes[order], kth] = np.stack(variables)[:, order]
    moved, own = wide[0], wide[1:]
    # for the residuals of cluster h in the place of cluster g (4, G, G): their products with the residuals of x and
    # with the loss, their sum, and the sum of their squares
    added = np.concatenate([own @ moved.T, own[2:] @ np.square(moved).T])
    if len(groups) <= _ALL:
        orders = np.array(list(itertools.permutations(groups)))
    else:
        rng = np.random.default_rng(seeds.derive(seed, "association"))
        orders = np.vstack([groups, rng.permuted(np.tile(groups, (_DRAWN, 1)), axis=1)])
    product, on_loss, total, square = (each[groups, orders].sum(axis=1) for each in added)
    # the permuted residuals are again taken given the loss
    left = square - total**2 / len(x) - on_loss**2 / (np.square(own[1]).sum() or 1.0)
    size = np.abs(product) / np.sqrt(np.maximum(left, _NONE_LEFT * square[0]) * np.square(own[0]).sum())
    spread = np.sqrt(np.square(np.arctanh(np.minimum(size, 1 - _SAME))).mean())
    return float(np.mean(size >= size[0] - _SAME)), float(spread)
