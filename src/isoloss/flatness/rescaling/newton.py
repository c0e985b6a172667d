"""Where a sum of exponentials of linear functions is smallest, under linear equalities and bounds: Newton's method.

Shapes: k terms, R unknowns, m equalities. The sum is that of exp(logs + a z), with logs (k,) and a (k, R).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse
import scipy.sparse.linalg
import scipy.special

from isoloss.errors import IsolossError

Bounds = tuple[np.ndarray, np.ndarray]  # the smallest and the largest value of each unknown, each (R,)
Solver = Callable[[np.ndarray], np.ndarray]

_RIDGE = 1e-13  # of the curvature along an unknown; directions that change no term have no other
_SMALL = 100_000  # entries of a and of the curvature, up to which dense matrices are faster
_DENSE = 0.05  # of the entries of a large curvature: where more are not zero, a dense solver is faster
_SPAN = 1e-8  # of the largest curvature: smaller ones are scaled like it, or their unknowns would be all of a row
_STEPS = 1000  # of which a few dozen are needed, and two more for each bound that is met
_CLOSE = 0.1  # a step that changes the logarithm of no term by more needs no search along it
_FURTHEST = 50.0  # the most by which one step may change the logarithm of a term
_SETTLED = 1e-9  # a step that changes the logarithm of no term by more is the last
_ROUNDING = 1e-14  # of the sum; smaller gains that no longer fall are those of rounding
_INWARD = 1e-11  # of the sum: a slope at a bound by which an unknown leaves it
_OFF = 1e-9  # by how much an equality may fail


def minimum(
    logs: np.ndarray,
    a: scipy.sparse.csr_array,
    start: np.ndarray,
    rows: scipy.sparse.csr_array,
    targets: np.ndarray,
    bounds: Bounds | None = None,
) -> np.ndarray:
    """Return the z (R,) with rows z = targets that minimizes the sum of exp(logs + a z); there must be one.

    Of several, it is that of least norm, unless the bounds exclude that.

    Raises:
        IsolossError: If no z is within the bounds.
    """
    lower, upper = bounds or (np.full(len(start), -np.inf), np.full(len(start), np.inf))
    if max(a.shape) * a.shape[1] <= _SMALL:
        a, rows = a.toarray(), rows.toarray()
    z = _feasible(start, rows, targets, lower, upper)
    if not len(logs) or not len(z):
        return _least_norm(z, a, rows, targets, lower, upper)
    held, last = np.zeros(len(z), dtype=bool), np.inf  # on a bound, for as long as the sum does not fall inward
    for _ in range(_STEPS):
        terms = scipy.special.softmax(logs + a @ z)
        gradient, step = a.T @ terms, np.zeros(len(z))
        of_free, rows_of_free = (a[:, ~held], rows[:, ~held]) if held.any() else (a, rows)
        step[~held], multipliers = solve(of_free, terms, rows_of_free, -gradient[~held], np.zeros(len(targets)))
        if np.abs(rows @ step).max(initial=0) > _OFF * np.abs(step).max():  # many orders of magnitude between the terms
            step[~held] = _onto(step[~held], rows_of_free, np.zeros(len(targets)))
        changes, gain = a @ step, -float(gradient @ step)
        most = float(np.abs(changes).max())
        settled = most <= _SETTLED or last / 4 <= gain <= _ROUNDING
        blocking, longest = _first_bound(z, step, lower, upper)
        length = min(1.0, longest) if most <= _CLOSE or settled else _length(terms, changes, longest)
        z, last = z + length * step, gain
        if length == longest:
            z[blocking] = (lower if step[blocking] < 0 else upper)[blocking]
            held[blocking], last = True, np.inf
        elif settled:
            slopes = (gradient + rows.T @ multipliers) * np.where(z == lower, 1, -1) * held
            if slopes.min() >= -_INWARD:
                return _least_norm(z, a, rows, targets, lower, upper)
            held[np.argmin(slopes)], last = False, np.inf
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
    scale = 1 / np.sqrt(np.where(diagonal > 0, np.maximum(diagonal, _SPAN * largest), largest))
    norms = np.sqrt((rows**2) @ scale**2)
    norms = np.where(norms > 0, norms, 1)
    root, rows = _scaled(np.sqrt(weights), a, scale), _scaled(1 / norms, rows, scale)
    curvature, right = root.T @ root, np.concatenate([(scale * force.T).T, (off.T / norms).T])
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
    order = np.argsort(np.diff(matrix.indptr), kind="stable")
    back = np.argsort(order)
    factors = scipy.sparse.linalg.splu(
        matrix[order][:, order], permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )

    def solution(right: np.ndarray) -> np.ndarray:
        unordered: np.ndarray = factors.solve(right[order])[back]
        return unordered

    return solution


def _length(terms: np.ndarray, changes: np.ndarray, longest: float) -> float:
    """Return the s up to `longest` where sum(terms exp(s changes)) is smallest, to 1 %."""

    def slope(length: float) -> float:
        return float((terms * changes) @ np.exp(length * changes))

    high = min(longest, _FURTHEST / float(np.abs(changes).max()))
    if slope(0) >= 0 or slope(high) <= 0:
        return high if slope(high) <= 0 else min(1.0, high)
    return float(scipy.optimize.brentq(slope, 0, high, rtol=0.01))


def _first_bound(z: np.ndarray, step: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[int, float]:
    """Return the unknown that meets a bound first along a step, and after how much of the step."""
    room = np.where(step < 0, lower - z, upper - z)
    lengths = np.divide(room, step, out=np.full(len(z), np.inf), where=step != 0)
    first = int(np.argmin(lengths))
    return first, max(float(lengths[first]), 0.0)


def _onto(z: np.ndarray, rows: scipy.sparse.csr_array | np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the nearest vector that satisfies the equalities."""
    if not len(targets):
        return z
    one = np.eye(len(z)) if isinstance(rows, np.ndarray) else scipy.sparse.eye_array(len(z), format="csr")
    step, _ = solve(one, np.ones(len(z)), rows, np.zeros(len(z)), targets - rows @ z)
    return np.asarray(z + step)


def _feasible(
    start: np.ndarray,
    rows: scipy.sparse.csr_array | np.ndarray,
    targets: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> np.ndarray:
    """Return a z that satisfies the equalities and the bounds, the nearest to `start` if the bounds allow that."""
    z = _onto(start, rows, targets)
    if ((lower <= z) & (z <= upper)).all():
        return z
    z = np.clip(z, lower, upper)
    off = targets - rows @ z
    if np.abs(off).max(initial=0) > _OFF or (lower > upper).any():
        room = np.concatenate([upper - z, z - lower])  # for what is added to z and what is taken from it
        both = scipy.sparse.hstack([scipy.sparse.csr_array(rows), scipy.sparse.csr_array(-rows)])
        limits = np.stack([np.zeros(len(room)), room], axis=1)
        found = scipy.optimize.linprog(np.ones(len(room)), A_eq=both, b_eq=off, bounds=limits)
        if found.status != 0:
            raise IsolossError("no rescaling within the bounds satisfies the equalities and the gauges")
        z = z + found.x[: len(z)] - found.x[len(z) :]
    return np.asarray(z)


def _least_norm(
    z: np.ndarray,
    a: scipy.sparse.csr_array | np.ndarray,
    rows: scipy.sparse.csr_array | np.ndarray,
    targets: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> np.ndarray:
    """Return the vector of least norm with the same a z, or z where that is outside of the bounds."""
    if not len(z):
        return z
    values = np.concatenate([a @ z, targets])
    if isinstance(a, np.ndarray):
        found = np.linalg.lstsq(np.concatenate([a, rows]), values)[0]
    else:
        both = scipy.sparse.vstack([a, rows])
        found = scipy.sparse.linalg.lsmr(both, values, atol=1e-15, btol=1e-15, conlim=0, maxiter=4 * len(z) + 100)[0]
    found = _onto(found, rows, targets)
    return found if ((lower <= found) & (found <= upper)).all() else z
