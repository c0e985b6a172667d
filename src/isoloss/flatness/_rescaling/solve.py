"""The minimal trace from the shares of its parts: a convex program in log-factors, and gauges where it has no minimum.

Shapes: K parts of a trace, R generators of rescalings, m equalities, G gauges.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse
import scipy.sparse.linalg
import scipy.special

from isoloss.errors import IsolossError

Solver = Callable[[np.ndarray], np.ndarray]

_RIDGE = 1e-13  # of the curvature along an unknown; directions that change no term have no other
_SMALL = 100_000  # entries of a and of the curvature, up to which dense matrices are faster
_DENSE = 0.05  # of the entries of a large curvature: where more are not zero, a dense solver is faster
_SPAN = 1e-8  # of the largest curvature: smaller ones are scaled like it, or their unknowns would be all of a row
_STEPS = 1000  # a few dozen are usually enough
_CLOSE = 0.1  # a step that changes the logarithm of no term by more needs no search along it
_FURTHEST = 50.0  # the most by which one step may change the logarithm of a term
_SETTLED = 1e-9  # a step that changes the logarithm of no term by more is the last
_ROUNDING = 1e-14  # of the sum; smaller gains that no longer fall are those of rounding
_OFF = 1e-9  # by how much an equality may fail
_LARGEST = 300.0  # log-factor: the square of its exponential is still a number


def minimum(
    logs: np.ndarray,
    a: scipy.sparse.csr_array,
    start: np.ndarray,
    rows: scipy.sparse.csr_array,
    targets: np.ndarray,
) -> np.ndarray:
    """Return the z (R,) with rows z = targets that minimizes the sum of exp(logs + a z); there must be one.

    If there are several, it is the one with the smallest norm.
    """
    # products of small sparse matrices take longer than dense ones
    if max(a.shape) * a.shape[1] <= _SMALL:
        a, rows = a.toarray(), rows.toarray()
    z = _onto(start, rows, targets)
    if not len(logs) or not len(z):
        return _least_norm(z, a, rows, targets)
    last = np.inf
    for _ in range(_STEPS):
        # each term over their sum: the step is the same as without, and nothing overflows
        terms = scipy.special.softmax(logs + a @ z)
        gradient = a.T @ terms
        step, _ = solve(a, terms, rows, -gradient, np.zeros(len(targets)))
        # the ridge and rounding leave a little of the equalities, which the next steps would add up
        if np.abs(rows @ step).max(initial=0) > _OFF * np.abs(step).max():  # many orders of magnitude between the terms
            step = _onto(step, rows, np.zeros(len(targets)))
        changes, gain = a @ step, -float(gradient @ step)
        most = float(np.abs(changes).max())
        # Newton's gains fall quadratically; one that no longer falls is rounding
        settled = most <= _SETTLED or last / 4 <= gain <= _ROUNDING
        z, last = z + (1.0 if most <= _CLOSE or settled else _step_length(terms, changes)) * step, gain
        if settled:
            return _least_norm(z, a, rows, targets)
    raise IsolossError(f"minimizing the trace over rescalings did not converge in {_STEPS} Newton steps")


def solve(
    a: scipy.sparse.csr_array | np.ndarray,
    weights: np.ndarray,
    rows: scipy.sparse.csr_array | np.ndarray,
    force: np.ndarray,
    off: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the d (R,) with rows d = off that minimizes sum(weights (a d)^2) / 2 - force d, and the multipliers (m,).

    With force (R, n) and off (m, n) these are n problems, and so are the results. Unknowns and rows are scaled to a
    curvature and a norm of 1, so that the smallest weights count like the largest.
    """
    diagonal = (a**2).T @ weights
    largest = diagonal.max(initial=0) or 1.0
    # without it the ridge would hold unknowns that only tiny terms depend on
    scale = 1 / np.sqrt(np.where(diagonal > 0, np.maximum(diagonal, _SPAN * largest), largest))
    norms = np.sqrt((rows**2) @ scale**2)
    norms = np.where(norms > 0, norms, 1)
    root, rows = _scaled(np.sqrt(weights), a, scale), _scaled(1 / norms, rows, scale)
    curvature, right = root.T @ root, np.concatenate([(scale * force.T).T, (off.T / norms).T])
    # of opposite signs: the matrix stays quasi-definite, and an LU without pivoting exists
    ridge = _RIDGE * np.repeat([1, -1], [len(scale), len(norms)])
    if isinstance(curvature, np.ndarray):
        matrix = np.block([[curvature, rows.T], [rows, np.zeros((len(norms), len(norms)))]])
        solver = _dense_solver(matrix + np.diag(ridge))
    else:
        matrix = scipy.sparse.block_array([[curvature, rows.T], [rows, None]], format="csr")
        ridged = matrix + scipy.sparse.diags_array(ridge)
        dense = curvature.nnz > _DENSE * len(scale) ** 2
        solver = _dense_solver(ridged.toarray()) if dense else _sparse_solver(ridged.tocsc())
    solution = solver(right)
    solution += solver(right - matrix @ solution)  # what the ridge has kept from the equalities
    return (scale * solution[: len(scale)].T).T, (solution[len(scale) :].T / norms).T


def _scaled(
    left: np.ndarray, matrix: scipy.sparse.csr_array | np.ndarray, right: np.ndarray
) -> scipy.sparse.csr_array | np.ndarray:
    if isinstance(matrix, np.ndarray):
        return np.asarray(left[:, None] * matrix * right)
    return scipy.sparse.diags_array(left) @ matrix @ scipy.sparse.diags_array(right)


def _dense_solver(matrix: np.ndarray) -> Solver:
    factors = scipy.linalg.lu_factor(matrix)
    return functools.partial(scipy.linalg.lu_solve, factors)


def _sparse_solver(matrix: scipy.sparse.csc_array) -> Solver:
    """Factorize with the rows of most entries last, close to minimum degree where most generators act on few parts."""
    # a generator acts on few parts and a part knows few generators, so that a row of few entries fills in little
    order = np.argsort(np.diff(matrix.indptr), kind="stable")
    back = np.argsort(order)
    factors = scipy.sparse.linalg.splu(
        matrix[order][:, order], permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )

    def solution(right: np.ndarray) -> np.ndarray:
        unordered: np.ndarray = factors.solve(right[order])[back]
        return unordered

    return solution


def _step_length(terms: np.ndarray, changes: np.ndarray) -> float:
    """Return the s where sum(terms exp(s changes)) is smallest, to 1 %."""

    def slope(length: float) -> float:
        return float((terms * changes) @ np.exp(length * changes))

    # further out the term that grows fastest would hide all others; the next step goes on from there
    high = _FURTHEST / float(np.abs(changes).max())
    if slope(0) >= 0 or slope(high) <= 0:
        return high if slope(high) <= 0 else min(1.0, high)
    return float(scipy.optimize.brentq(slope, 0, high, rtol=0.01))


def _onto(z: np.ndarray, rows: scipy.sparse.csr_array | np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the nearest vector that satisfies the equalities."""
    if not len(targets):
        return z
    one = np.eye(len(z)) if isinstance(rows, np.ndarray) else scipy.sparse.eye_array(len(z), format="csr")
    step, _ = solve(one, np.ones(len(z)), rows, np.zeros(len(z)), targets - rows @ z)
    return np.asarray(z + step)


def _least_norm(
    z: np.ndarray,
    a: scipy.sparse.csr_array | np.ndarray,
    rows: scipy.sparse.csr_array | np.ndarray,
    targets: np.ndarray,
) -> np.ndarray:
    """Return the vector of least norm with the same a z."""
    if not len(z):
        return z
    values = np.concatenate([a @ z, targets])
    if isinstance(a, np.ndarray):
        found = np.linalg.lstsq(np.concatenate([a, rows]), values)[0]
    else:
        both = scipy.sparse.vstack([a, rows])
        found = scipy.sparse.linalg.lsmr(both, values, atol=1e-15, btol=1e-15, conlim=0, maxiter=4 * len(z) + 100)[0]
    return _onto(found, rows, targets)


_NEGLIGIBLE = 1e-24  # of the sum of the shares: attention has parts of 1e-12 in a model that has just been made
_STILL = 1e-6  # of a step of the linear program: what its tolerance may leave of one that is zero


@dataclass(frozen=True)
class Minimum:
    """Where a trace is smallest over rescalings, under gauges if it has no smallest value.

    Example:
        >>> from isoloss.flatness._rescaling.solve import minimize
        >>> found = minimize([9, 4], [[1], [-1]], log_rms=[0, 0], sizes=[1, 1], writers=[[0]])
        >>> round(found.value, 9), found.weights.round(9).tolist(), found.gauged
        (12.0, [0.666666667, 1.5], ())
    """

    value: float  # the smallest trace, under the gauges
    # the greatest lower bound of the trace without gauges, which is `value` where there are none; None: not looked for
    infimum: float | None
    z: np.ndarray  # (R,) the log-factors; of several with this value, the ones of least norm
    gauged: tuple[int, ...]  # (G,) the generators that are fixed by a gauge
    # (G, K), each row adding up to 1: gauges @ (log_rms + E z) == 0, the mean of log RMS over the entries of some parts
    gauges: scipy.sparse.csr_array
    vanishing: np.ndarray  # (K,) bool, the parts that vanish on the way to the infimum
    weights: np.ndarray  # (K,) exp(-2 E z), the factors of the shares; 0 where a share counts as zero
    start: np.ndarray  # (R,) the log-factors that bring the RMS of the parts as near to 1 as they can


def minimize(
    shares: np.ndarray | Sequence[float],
    exponents: scipy.sparse.csr_array | np.ndarray | Sequence[Sequence[int]],
    *,
    log_rms: np.ndarray | Sequence[float],
    sizes: np.ndarray | Sequence[int],
    writers: Sequence[np.ndarray | Sequence[int]],
    equalities: scipy.sparse.csr_array | np.ndarray | None = None,
    like: Minimum | None = None,
) -> Minimum:
    r"""Minimize a trace over rescalings: $f(z) = \sum_p t_p \exp(-2 (E z)_p)$, convex in the log-factors z.

    The value is exact up to rounding (Newton's method with line search). A share counts as zero if it is negative or at
    most $10^{-24}$ of the sum of all shares. They are compared in the model as it is when all parts' RMS are as near to
    1 as rescalings bring them, which is the same model however it was rescaled before.

    f has a minimum unless some direction z makes some shares vanish and none grow (Stiemke's lemma). A linear program
    decides this and finds all shares that can vanish. If there are any, one generator is fixed by a gauge: the mean of
    log RMS over the entries of its writers is 0, leaving out parts that are all zero or have no share. It is the
    generator whose vanishing writers have the most entries (ties: the first). This repeats until there is a minimum. If
    no generator has such writers, all parts that it acts on are used; if every part that vanishes is all zero, the
    parts without a share. Value, infimum and gauges are the same for the shares $t_p \exp(-2 (E z_0)_p)$ and the log
    RMS $+ (E z_0)_p$ of the rescaled model, for any $z_0$ that satisfies the equalities.

    Args:
        shares: (K,) t, the parts of the trace.
        exponents: (K, R) E, integers: a rescaling by z multiplies part p by $\exp((E z)_p)$.
        log_rms: (K,) logarithm of the root mean square of a part's entries; minus infinity where it is all zero.
        sizes: (K,) number of entries of each part.
        writers: For each generator, the parts that its gauge is about.
        equalities: (m, R) rows with rows @ z == 0, or a single one, (R,): the log-factors of features that are kept.
        like: A minimum of the same program for other shares, whose gauges are kept, so that both are about one
            quantity. No infimum is looked for then.

    Raises:
        IsolossError: If a share is not finite, if all parts that a gauge could be about are zero, or if the smallest
            trace needs factors beyond e^300.
    """
    start = None if like is None else like.start
    program = _ConvexProgram.of(shares, exponents, log_rms, sizes, writers, equalities, start)
    none = scipy.sparse.csr_array((0, len(program.shares)))
    gauged, gauges = ([], none) if like is None else (list(like.gauged), like.gauges)
    # which parts can vanish depends on which have a share, and on no share's size
    if like is not None and np.array_equal(program.active, like.weights > 0):  # which is all that decides it
        vanishing, receding = like.vanishing, np.zeros_like(like.vanishing)
    else:
        vanishing, direction = program.recession(none)
        receding, direction = program.recession(gauges) if gauged else (vanishing, direction)
    # each gauge takes one direction along which the trace falls forever; others may be left
    while receding.any():
        generator, parts = program.gauge(receding, direction, gauged)
        mean = np.where(parts, program.sizes, 0) / program.sizes[parts].sum()
        gauged.append(generator)
        gauges = scipy.sparse.vstack([gauges, scipy.sparse.csr_array(mean[None])], format="csr")
        receding, direction = program.recession(gauges)
    z, value = program.smallest(program.active, gauges, program.start if like is None else like.z)
    if (furthest := np.abs(z).max(initial=0)) > _LARGEST:
        raise IsolossError(
            f"the smallest trace takes factors of e^{furthest:.0f}, beyond floating-point numbers: the gradients of "
            "some parameters vanish, as in a model whose predictions hardly depend on its input. Measure the plain "
            "trace"
        )
    infimum = None if like is not None else value
    if like is None and gauged:
        infimum = program.smallest(program.active & ~vanishing, none, z)[1]
    weights = np.where(program.active, np.exp(-2 * (program.exponents @ z)), 0.0)
    return Minimum(value, infimum, z, tuple(gauged), gauges, vanishing, weights, program.start)


def responses(
    minimum: Minimum,
    exponents: scipy.sparse.csr_array,
    terms: scipy.sparse.csr_array,
) -> np.ndarray:
    r"""Return (R, G) how sums of a minimum's terms over groups of parts follow the shares by way of the log-factors.

    With $T_g = \sum_{p \in g} t_p w_p$ and the weights $w_p = \exp(-2 (E z)_p)$ at the minimum's z, which moves with
    the shares, $\partial T_g / \partial t_p = w_p (1_{p \in g} + 2 (E \lambda_g)_p)$ by the implicit function theorem;
    $\lambda_g$ is what is returned. It is 0 for the sum over all parts, which is stationary in z.

    Args:
        minimum: Where the trace is smallest, without equalities.
        exponents: (K, R) E.
        terms: (K, G) $t_p w_p$ where part p is in group g.
    """
    rows = minimum.gauges @ exponents
    a = -2.0 * exponents
    force, off = (a.T @ terms).toarray(), np.zeros((rows.shape[0], terms.shape[1]))
    return solve(a, np.asarray(terms.sum(axis=1)), rows, force, off)[0]


@dataclass(frozen=True)
class _ConvexProgram:
    """The arguments of `minimize`, and its steps."""

    shares: np.ndarray  # (K,)
    exponents: scipy.sparse.csr_array  # (K, R)
    log_rms: np.ndarray  # (K,) 0 where a part is all zero
    sizes: np.ndarray  # (K,)
    writers: scipy.sparse.csr_array  # (R, K) 1 where a part is of a generator's writers
    rows: scipy.sparse.csr_array  # (m, R)
    written: np.ndarray  # (K,) bool, the parts that are not all zero
    active: np.ndarray  # (K,) bool, the parts whose shares count
    start: np.ndarray  # (R,) the log-factors that bring the RMS of the parts as near to 1 as they can

    @classmethod
    def of(
        cls,
        shares: np.ndarray | Sequence[float],
        exponents: scipy.sparse.csr_array | np.ndarray | Sequence[Sequence[int]],
        log_rms: np.ndarray | Sequence[float],
        sizes: np.ndarray | Sequence[int],
        writers: Sequence[np.ndarray | Sequence[int]],
        equalities: scipy.sparse.csr_array | np.ndarray | None,
        start: np.ndarray | None,
    ) -> _ConvexProgram:
        t, e = np.asarray(shares, dtype=float), scipy.sparse.csr_array(exponents, dtype=float)
        if not np.isfinite(t).all():
            raise IsolossError(f"part {int(np.argmin(np.isfinite(t)))} has a share of the trace that is not finite")
        n, written = np.asarray(sizes, dtype=float), np.isfinite(log_rms)
        logs = np.where(written, log_rms, 0)
        ends = np.cumsum([0, *map(len, writers)])
        members = np.concatenate([np.asarray(group, dtype=int) for group in (*writers, [])])
        of_writers = scipy.sparse.csr_array((np.ones(len(members)), members, ends), shape=e.shape[::-1])
        equal = np.zeros((0, e.shape[1])) if equalities is None else equalities
        rows = scipy.sparse.csr_array(equal if scipy.sparse.issparse(equal) else np.atleast_2d(equal), dtype=float)
        if start is None:
            start, _ = solve(e[written], n[written], rows, -(e.T @ (n * logs)), np.zeros(rows.shape[0]))
        # shares are compared in the model that all rescaled copies have in common, or the same part would count in one
        # copy and not in another
        levels = np.log(t, out=np.full(len(t), -np.inf), where=t > 0) - 2 * (e @ start)
        active = levels > scipy.special.logsumexp(levels) + math.log(_NEGLIGIBLE)
        return cls(t, e, logs, n, of_writers, rows, written, active, start)

    def recession(self, gauges: scipy.sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
        """Return which shares can vanish while none grows (K,), and a direction in which they all do (R,).

        Maximizes sum(delta) with delta <= (E z)_p and 0 <= delta <= 1 over active parts; each delta is 0 or 1 then.
        """
        # unknowns are the direction z and delta, which says whether a part vanishes
        parts, generators = int(self.active.sum()), self.exponents.shape[1]
        limits = np.tile([-np.inf, np.inf], (generators + parts, 1))
        limits[generators:] = 0, 1
        still = [self.rows]
        for g in range(gauges.shape[0]):
            group = gauges[[g]].indices
            # active parts may only grow here, so that their mean stays only if each of them does
            still.append(self.exponents[group] if self.active[group].all() else gauges[[g]] @ self.exponents)
        fixed = scipy.sparse.vstack(still, format="csr")
        found = scipy.optimize.linprog(
            np.repeat([0, -1], [generators, parts]),
            A_ub=scipy.sparse.hstack([-self.exponents[self.active], scipy.sparse.eye_array(parts)], format="csr"),
            b_ub=np.zeros(parts),
            A_eq=scipy.sparse.hstack([fixed, scipy.sparse.csr_array((fixed.shape[0], parts))], format="csr"),
            b_eq=np.zeros(fixed.shape[0]),
            bounds=limits,
        )
        if found.status != 0:
            raise IsolossError(f"the linear program of the shares that can vanish failed: {found.message}")
        vanishing = np.zeros(len(self.shares), dtype=bool)
        vanishing[self.active] = found.x[generators:] > 0.5
        return vanishing, found.x[:generators]

    def gauge(self, vanishing: np.ndarray, direction: np.ndarray, gauged: list[int]) -> tuple[int, np.ndarray]:
        """Return the generator to fix and the parts (K,) of its gauge, which cannot all stay in the direction."""
        acts = (self.exponents != 0).T.astype(float).tocsr()
        for groups in (self.writers, acts):
            entries = groups @ (self.sizes * (vanishing & self.written))
            if entries.any():
                generator = int(np.argmax(entries))
                return generator, (groups[[generator]].toarray()[0] > 0) & self.active & self.written
        # all that vanish are zero, and say nothing about their scale; what moves with them and has no share may
        silent = self.sizes * (self.written & ~self.active)
        for groups, of in itertools.product((self.writers, acts), (acts @ vanishing > 0, 1)):
            entries = (groups @ silent) * of
            entries[np.abs(groups @ (silent * (self.exponents @ direction))) <= _STILL * entries] = 0
            entries[gauged] = 0
            if entries.any():
                generator = int(np.argmax(entries))
                return generator, (groups[[generator]].toarray()[0] > 0) & (silent > 0)
        raise IsolossError(
            "the trace has no minimum over rescalings, and no gauge can fix the scale: all weights of one are zero"
        )

    def smallest(
        self, parts: np.ndarray, gauges: scipy.sparse.csr_array, start: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Return the log-factors (R,) where the sum of the shares of some parts (K,) is smallest, and that sum."""
        a, logs = -2 * self.exponents[parts], np.log(self.shares[parts])
        rows = scipy.sparse.vstack([self.rows, gauges @ self.exponents], format="csr")
        targets = np.concatenate([np.zeros(self.rows.shape[0]), -(gauges @ self.log_rms)])
        z = minimum(logs, a, start, rows, targets)
        return z, math.exp(scipy.special.logsumexp(logs + a @ z)) if len(logs) else 0.0


@dataclass(frozen=True)
class CrossFit:
    r"""A minimal trace from two estimates, one too small on average and the other too large.

    With n clusters, H the second derivative of the trace at its minimum and C the covariance of a cluster's first
    derivative there, both by the log-factors, the sum in sample is too small by $b = \operatorname{tr}(H^{-1} C) / 2n$
    on average: the fitted log-factors follow the noise. Those from the other folds miss the minimum by $b F / (F - 1)$.
    The mean of both is too large by $b / (2 (F - 1))$, with eight folds a fourteenth of b. These biases are of second
    order in the noise, as for any M-estimator; to first order the sum has its error at fixed weights.
    """

    minimum: Minimum  # of the shares from all folds
    fold_weights: np.ndarray  # (F, K) the weights of the shares from all folds but one
    in_sample: float  # the sum of the shares from all folds with the weights of `minimum`, too small on average
    cross_fitted: float  # the sum over the folds with `fold_weights`, too large on average

    @property
    def value(self) -> float:
        return (self.in_sample + self.cross_fitted) / 2

    @property
    def weights(self) -> np.ndarray:
        """(F, K) the mean of both estimates' weights, with which the sum over the folds is `value`.

        At fixed weights in sample the sum varies less from cluster to cluster than it does on other data, as the
        weights are small where the noise is large.
        """
        return np.asarray((self.minimum.weights + self.fold_weights) / 2)


def cross_fit(
    minimize: Callable[..., Minimum],
    fold_sums: np.ndarray | Sequence[Sequence[float]],
    shares_without: np.ndarray | Sequence[Sequence[float]],
    total: float,
) -> CrossFit:
    """Estimate a minimal trace from the sums of each fold.

    Gauges are taken from the shares of all folds. A part without a share in the other folds takes its share from all
    folds, since there might be no minimum without it. Negative shares count as zero when the log-factors are fitted,
    and as they are in the sums, so the sums are unbiased for given log-factors.

    Args:
        minimize: `program.minimize` with all arguments but `shares` and `like`, by functools.partial.
        fold_sums: (F, K) a part's squared norms, less controls, summed over the clusters of a fold.
        shares_without: (F, K) the shares from all folds but this one.
        total: The predicted positions of all folds: a share is the sum over the folds over this.

    Raises:
        IsolossError: As `program.minimize` does.

    Example:
        >>> import functools
        >>> from isoloss.flatness._rescaling.solve import cross_fit, minimize
        >>> program = functools.partial(minimize, exponents=[[1], [-1]], log_rms=[0, 0], sizes=[1, 1], writers=[[0]])
        >>> found = cross_fit(program, fold_sums=[[4, 1], [5, 3]], shares_without=[[5, 3], [4, 1]], total=2)
        >>> round(found.in_sample, 3), round(found.cross_fitted, 3), round(found.value, 3)
        (6.0, 6.445, 6.222)
    """
    sums, without = np.asarray(fold_sums, dtype=float), np.asarray(shares_without, dtype=float)
    shares = sums.sum(axis=0) / total
    minimum = minimize(shares)
    # a part with a negative share in the other folds has no logarithm
    others = np.where(without > 0, without, shares)
    weights = np.stack([minimize(of_others, like=minimum).weights for of_others in others])
    in_sample = float(minimum.weights @ shares)
    return CrossFit(minimum, weights, in_sample, float((weights * sums).sum()) / total)
