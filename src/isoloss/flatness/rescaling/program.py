"""The minimal trace from the shares of its parts: a convex program in log-factors, and gauges where it has no minimum.

Shapes: K parts of a trace, R generators of rescalings, m equalities, G gauges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.sparse
import scipy.special

from isoloss.errors import IsolossError
from isoloss.flatness.rescaling import newton

_NEGLIGIBLE = 1e-24  # of the sum of the shares: attention has parts of 1e-12 in a model that has just been made
_STILL = 1e-6  # of a step of the linear program: what its tolerance may leave of one that is zero


@dataclass(frozen=True)
class Minimum:
    """Where a trace is smallest over rescalings, under gauges if it has no smallest value.

    Example:
        >>> found = minimize([9, 4], [[1], [-1]], log_rms=[0, 0], sizes=[1, 1], writers=[[0]])
        >>> round(found.value, 9), found.weights.round(9).tolist(), found.gauged
        (12.0, [0.666666667, 1.5], ())
    """

    value: float  # the smallest trace, under the gauges
    # the greatest lower bound of the trace without gauges, which is `value` where there are none; None: not looked for
    infimum: float | None
    z: np.ndarray  # (R,) the log-factors; of several with this value, those of least norm
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
    bounds: newton.Bounds | None = None,
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
        bounds: The smallest and the largest value of each generator, each (R,), infinite where there is none. They
            bound the change of the model as it is, so that the result depends on how it was rescaled before.
        like: A minimum of the same program for other shares, whose gauges are kept, so that both are about one
            quantity. No infimum is looked for then.

    Raises:
        IsolossError: If a share is not finite, if no z is within the bounds, or if all parts that a gauge could be
            about are zero.
    """
    start = None if like is None else like.start
    program = _Program.of(shares, exponents, log_rms, sizes, writers, equalities, bounds, start)
    none = scipy.sparse.csr_array((0, len(program.shares)))
    gauged, gauges = ([], none) if like is None else (list(like.gauged), like.gauges)
    if like is not None and np.array_equal(program.active, like.weights > 0):  # which is all that decides it
        vanishing, left = like.vanishing, np.zeros_like(like.vanishing)
    else:
        vanishing, direction = program.recession(none)
        left, direction = program.recession(gauges) if gauged else (vanishing, direction)
    while left.any():
        generator, parts = program.gauge(left, direction, gauged)
        mean = np.where(parts, program.sizes, 0) / program.sizes[parts].sum()
        gauged.append(generator)
        gauges = scipy.sparse.vstack([gauges, scipy.sparse.csr_array(mean[None])], format="csr")
        left, direction = program.recession(gauges)
    z, value = program.smallest(program.active, gauges, program.start if like is None else like.z)
    infimum = None if like is not None else value
    if like is None and gauged:
        infimum = program.smallest(program.active & ~vanishing, none, z)[1]
    weights = np.where(program.active, np.exp(-2 * (program.exponents @ z)), 0.0)
    return Minimum(value, infimum, z, tuple(gauged), gauges, vanishing, weights, program.start)


def responses(
    minimum: Minimum,
    exponents: scipy.sparse.csr_array,
    terms: scipy.sparse.csr_array,
    bounds: newton.Bounds | None = None,
) -> np.ndarray:
    r"""Return (R, G) how sums of a minimum's terms over groups of parts follow the shares by way of the log-factors.

    With $T_g = \sum_{p \in g} t_p w_p$ and the weights $w_p = \exp(-2 (E z)_p)$ at the minimum's z, which moves with
    the shares, $\partial T_g / \partial t_p = w_p (1_{p \in g} + 2 (E \lambda_g)_p)$ by the implicit function theorem;
    $\lambda_g$ is what is returned. It is 0 for the sum over all parts, which is stationary in z.

    Args:
        minimum: Where the trace is smallest, without equalities.
        exponents: (K, R) E.
        terms: (K, G) $t_p w_p$ where part p is in group g.
        bounds: Those of the minimum; a generator that is on one stays there.
    """
    held = np.zeros(len(minimum.z), dtype=bool)
    if bounds is not None:
        held = (minimum.z <= bounds[0]) | (minimum.z >= bounds[1])
    fixed = scipy.sparse.eye_array(len(held), format="csr")[held]
    rows = scipy.sparse.vstack([minimum.gauges @ exponents, fixed], format="csr")
    a = -2.0 * exponents
    force, off = (a.T @ terms).toarray(), np.zeros((rows.shape[0], terms.shape[1]))
    return newton.solve(a, np.asarray(terms.sum(axis=1)), rows, force, off)[0]


@dataclass(frozen=True)
class _Program:
    """What `minimize` is given, and its steps."""

    shares: np.ndarray  # (K,)
    exponents: scipy.sparse.csr_array  # (K, R)
    log_rms: np.ndarray  # (K,) 0 where a part is all zero
    sizes: np.ndarray  # (K,)
    writers: scipy.sparse.csr_array  # (R, K) 1 where a part is of a generator's writers
    rows: scipy.sparse.csr_array  # (m, R)
    bounds: newton.Bounds | None
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
        bounds: newton.Bounds | None,
        start: np.ndarray | None,
    ) -> _Program:
        t, e = np.asarray(shares, dtype=float), scipy.sparse.csr_array(exponents, dtype=float)
        if not np.isfinite(t).all():
            raise IsolossError(f"part {int(np.argmin(np.isfinite(t)))} has a share of the trace that is not finite")
        n, written = np.asarray(sizes, dtype=float), np.isfinite(log_rms)
        logs = np.where(written, log_rms, 0)
        ends = np.cumsum([0, *map(len, writers)])
        members = np.concatenate([np.asarray(group, dtype=int) for group in (*writers, [])])
        of_writers = scipy.sparse.csr_array((np.ones(len(members)), members, ends), shape=e.shape[::-1])
        given = np.zeros((0, e.shape[1])) if equalities is None else equalities
        rows = scipy.sparse.csr_array(given if scipy.sparse.issparse(given) else np.atleast_2d(given), dtype=float)
        if start is None:
            start, _ = newton.solve(e[written], n[written], rows, -(e.T @ (n * logs)), np.zeros(rows.shape[0]))
        levels = np.log(t, out=np.full(len(t), -np.inf), where=t > 0) - 2 * (e @ start)
        active = levels > scipy.special.logsumexp(levels) + math.log(_NEGLIGIBLE)
        return cls(t, e, logs, n, of_writers, rows, bounds, written, active, start)

    def recession(self, gauges: scipy.sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
        """Return which shares can vanish while none grows (K,), and a direction in which they all do (R,).

        Maximizes sum(delta) with delta <= (E z)_p and 0 <= delta <= 1 over active parts; each delta is 0 or 1 then.
        """
        parts, generators = int(self.active.sum()), self.exponents.shape[1]
        limits = np.tile([-np.inf, np.inf], (generators + parts, 1))
        limits[generators:] = 0, 1
        if self.bounds is not None:  # nothing recedes toward a bound
            limits[:generators][np.isfinite(np.stack(self.bounds, axis=1))] = 0
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
        z = newton.minimum(logs, a, start, rows, targets, self.bounds)
        return z, math.exp(scipy.special.logsumexp(logs + a @ z)) if len(logs) else 0.0
