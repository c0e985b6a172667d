"""The minimizers of an enumerable model's loss as a manifold, numerically: tangents, retraction, the flow along them.

Shapes: P parameters, n contexts, V token ids. Everything is summed over all contexts and ids, in float64.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline

from isoloss.errors import IsolossError
from isoloss.paper.theory.bartlett import EnumerableModel
from isoloss.paper.theory.sgd_flow.model import Array

RANK_TOLERANCE = 1e-6  # singular values below this fraction of the largest are those of the null space
RETRACTED = 1e-12  # root of the weighted square of the log-probabilities' errors on the minimizers
TOLERANCE = 1e-9  # error of one step of the flow, as a fraction of the largest parameter
LONGEST_STEP = 0.05  # of the flow: the cubics between its knots are then exact to about the same
FLAT = 1e-3  # fraction of the trace that the flow takes off in a unit of time, below which it is nearly at rest
_RETRACTIONS = 100  # steps that retraction may take


@dataclass(frozen=True)
class Minimizers:
    r"""The parameters whose predictions are the true conditionals q.

    With A the `(nV, P)` matrix of the rows `sqrt(w(x) q(y|x)) grad log f(y|x)`, the Hessian of the loss at a minimizer
    is `A^T A` (Lemma 3.2). So its trace is the sum of A's squares, its null space that of A, and a Gauss-Newton step on
    the errors r of the log-probabilities, weighted alike, is `-A^+ r`.

    Example:
        >>> from isoloss.paper.theory.bartlett import softmax_model
        >>> model = softmax_model(seed=0)
        >>> minimizers = Minimizers(model, model.log_probs(model.teacher).exp())
        >>> back = minimizers.retract(model.teacher + 0.1)
        >>> bool((model.log_probs(back) - model.log_probs(model.teacher)).abs().max() < 1e-10)
        True
        >>> len(back) - len(minimizers.normals(back))  # dimensions of the manifold
        12
    """

    model: EnumerableModel  # the model; its `teacher` plays no role
    conditionals: torch.Tensor  # (n, V) q

    def root(self, theta: torch.Tensor) -> torch.Tensor:
        """Return A, (nV, P), at (P,) parameters."""
        weights = self._root_weights
        jacobian = torch.func.jacrev(lambda point: (weights * self.model.log_probs(point)).flatten())
        rows: torch.Tensor = jacobian(theta)
        return rows

    def trace(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the trace of the Hessian at a minimizer, (), differentiable in theta."""
        return self.root(theta).square().sum()

    def normals(self, theta: torch.Tensor) -> torch.Tensor:
        """Return an orthonormal basis, (M, P), of the space that the Hessian does not send to 0."""
        _, sizes, rows = torch.linalg.svd(self.root(theta), full_matrices=False)
        normals: torch.Tensor = rows[sizes > RANK_TOLERANCE * sizes[0]]
        return normals

    def project(self, theta: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Return the part of a (P,) vector in the null space of the Hessian at a minimizer: along the manifold."""
        normals = self.normals(theta)
        return vector - normals.T @ (normals @ vector)

    def velocity(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the projected `-grad Tr`, (P,), at a minimizer."""
        gradient: torch.Tensor = torch.func.grad(self.trace)(theta)
        return -self.project(theta, gradient)

    def retract(self, theta: torch.Tensor) -> torch.Tensor:
        """Return a minimizer near (P,) parameters, by Gauss-Newton steps of length 1 at most.

        Raises:
            IsolossError: They lead to no minimizer.
        """
        weights, target = self._root_weights, self.conditionals.log()
        for _ in range(_RETRACTIONS):
            errors = (weights * (self.model.log_probs(theta) - target)).flatten()
            if errors.norm() <= RETRACTED:
                return theta
            step = torch.linalg.pinv(self.root(theta), rtol=RANK_TOLERANCE) @ errors
            theta = theta - step / max(1.0, float(step.norm()))
        raise IsolossError(
            f"{self.model.name}: Gauss-Newton steps lead to no minimizer; the error is {errors.norm():.1e}"
        )

    @property
    def _root_weights(self) -> torch.Tensor:
        return (self.model.weights[:, None] * self.conditionals).sqrt()


class Flow:
    """The projected flow `-grad Tr` along the minimizers, solved as far as it is asked for.

    Classical Runge-Kutta steps, each with a retraction, of a length at which one step and two of half the length
    agree. Between the knots the path is the cubic with the right ends and the right velocities there.
    """

    def __init__(self, minimizers: Minimizers, start: torch.Tensor) -> None:
        """Start at a (P,) minimizer, where the flow's time is 0."""
        self.minimizers = minimizers
        self.rank = len(minimizers.normals(start))
        self._step = LONGEST_STEP
        self._times: list[float] = []
        self._points: list[torch.Tensor] = []
        self._velocities: list[torch.Tensor] = []
        self._traces: list[float] = []
        self._append(0.0, start)

    def at(self, time: float) -> Array:
        """Return the (P,) parameters at a time."""
        while len(self._times) < 2 or self._times[-1] < time:
            self._advance()
        left = max(0, bisect.bisect_left(self._times, time) - 1)
        ends = slice(left, left + 2)
        points, velocities = ([x.numpy() for x in knots[ends]] for knots in (self._points, self._velocities))
        return np.asarray(CubicHermiteSpline(self._times[ends], points, velocities)(time))

    def time_of(self, trace: float) -> tuple[float, float]:
        """Return the time at which the trace is this, and how much of the trace a unit of time takes off there.

        A trace above the start's, or below what the flow can reach, is met by a straight line from the nearer end.
        """
        while len(self._times) < 2 or (self._traces[-1] > trace and self._fall(-1) > FLAT * self._traces[-1]):
            self._advance()
        if trace >= self._traces[0]:
            return (self._traces[0] - trace) / self._fall(0), self._fall(0)
        if trace <= self._traces[-1]:
            return self._times[-1] + (self._traces[-1] - trace) / self._fall(-1), self._fall(-1)
        right = bisect.bisect_left(self._traces, -trace, key=lambda value: -value)
        ends = slice(right - 1, right + 1)
        falls = [self._fall(right - 1), self._fall(right)]
        # time over minus the trace: it increases too
        curve = CubicHermiteSpline([-value for value in self._traces[ends]], self._times[ends], [1 / x for x in falls])
        time = float(curve(-trace))
        return time, float(np.interp(time, self._times[ends], falls))

    def _fall(self, knot: int) -> float:
        return float(self._velocities[knot].square().sum())

    def _append(self, time: float, point: torch.Tensor) -> None:
        rank = len(self.minimizers.normals(point))
        if rank != self.rank:
            raise IsolossError(
                f"{self.minimizers.model.name}: the Hessian's rank is {self.rank} at the start and {rank} at time "
                f"{time:g} of the flow: its minimizers are no manifold"
            )
        self._times.append(time)
        self._points.append(point)
        self._velocities.append(self.minimizers.velocity(point))
        self._traces.append(float(self.minimizers.trace(point)))

    def _advance(self) -> None:
        point, velocity = self._points[-1], self._velocities[-1]
        while True:
            step = self._step
            once = self._runge_kutta(point, velocity, step)
            middle = self._runge_kutta(point, velocity, step / 2)
            twice = self._runge_kutta(middle, self.minimizers.velocity(middle), step / 2)
            error = float((twice - once).abs().max() / 15 / point.abs().max())  # of `twice`, whose order is 4
            self._step = min(LONGEST_STEP, step * min(2.0, max(0.2, 0.9 * (TOLERANCE / max(error, 1e-30)) ** 0.2)))
            if error <= TOLERANCE:
                self._append(self._times[-1] + step, twice)
                return

    def _runge_kutta(self, point: torch.Tensor, velocity: torch.Tensor, step: float) -> torch.Tensor:
        second = self.minimizers.velocity(point + step / 2 * velocity)
        third = self.minimizers.velocity(point + step / 2 * second)
        fourth = self.minimizers.velocity(point + step * third)
        return self.minimizers.retract(point + step / 6 * (velocity + 2 * second + 2 * third + fourth))
