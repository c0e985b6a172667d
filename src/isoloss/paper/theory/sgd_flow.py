"""Theorem 3.3: SGD from a minimizer against the flow -(1 / (4 B)) grad Tr along the minimizers.

Shapes: n trajectories, P parameters, B examples a step. Of enumerable models: C contexts, V token ids; everything is
summed over all contexts and ids, in float64.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.bartlett import EnumerableModel, unflattened
from isoloss.paper.theory.statements import Statement, counter
from isoloss.statistics import comparison
from isoloss.statistics.estimate import Estimate, rounded

Array = np.ndarray[Any, np.dtype[np.float64]]
RANK_TOLERANCE = 1e-6  # singular values below this fraction of the largest count as 0
RETRACTED = 1e-12  # root of the weighted square of the log-probabilities' errors on the minimizers
TOLERANCE = 1e-9  # error of one step of the flow, as a fraction of the largest parameter
LONGEST_STEP = 0.05  # of the flow: the cubics between its knots are then about as exact
FLAT = 1e-3  # fraction of the trace that the flow takes off in a unit of time, below which it is nearly at rest
_RETRACTIONS = 100  # steps that retraction may take
LOGIT_KICK = 0.5  # of the logit: how far from the minimizers the control starts
SUM_TOLERANCE = 1e-4  # of the sum of a distribution that is given, perhaps in float32
LARGEST = 0.9  # step size that is chosen, however small the trace
ROUNDING = 1e-12  # of a sum in float64
GRADIENT = 1e-6  # of the loss at a minimizer, as a fraction of the root of the trace: rounding, also in float32
EMBEDDING = 0.3  # standard deviation of the embedding that is drawn, before it is brought to the minimizers
DECODER = 1.0  # the same of the decoder: far larger, so that the trace is far from its least
_CONTROLS = 8  # starts of the control
_CHUNK = 256  # Hessians that are held together
ERRORS = 3.0  # standard errors that a statistical figure may be off
PRECISION = 0.1  # standard error of a coefficient, as a fraction of it, above which nothing can be concluded
# errors must fall faster than the step size to this power. They fall as the step size, so it leaves room for sampling
# and for terms of higher order; over a fourth of the step size a constant rest fails that is a sixth of what falls
FALL = 0.75
CONTROL_ALLOWED = 1e-3  # change of the control's trace, as a fraction of what label noise takes off it


def steps_until(time: float, step_size: float) -> int:
    """Return K / eta^2, rounded to whole steps."""
    return round(time / step_size**2)


def simulate(
    model: LogProbsModel,
    theta: Array,
    *,
    step_size: float,
    times: Sequence[float],
    generator: np.random.Generator,
    batch_size: int = 1,
    exact: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Array]:
    """Return the (n, P) parameters of independent trajectories of SGD at each time, from (n, P) starts.

    The loss is the population's: every example is fresh, and with `exact` the exact conditionals replace the sampled
    answers. `times` are K, increasing: K / eta^2 steps are taken. `progress` gets a 1 after each.

    Example:
        >>> import numpy as np
        >>> from isoloss.paper.theory.sgd_flow import TwoParameters, simulate
        >>> model = TwoParameters(0.7, 2.0)
        >>> starts, generator = np.tile(model.minimizer, (1000, 1)), np.random.default_rng(0)
        >>> (points,) = simulate(model, starts, step_size=0.05, times=[1.0], generator=generator)
        >>> bool(abs(model.trace(points).mean() / model.trace(model.flow(0.25)[None])[0] - 1) < 0.05)  # at K / 4
        True
    """
    # a copy of the model, too: the state of an optimizer ends with the run
    model, theta, points, done = copy.copy(model), theta.copy(), [], 0
    for time in times:
        # counted from the start: rounding each stretch by itself would add up
        until = steps_until(time, step_size)
        for _ in range(until - done):
            model.move(theta, step_size, batch_size=batch_size, generator=generator, exact=exact)
            if progress is not None:
                progress(1)
        done = until
        points.append(theta.copy())
    return points


def mean(values: Array, unit: str, method: str) -> Estimate:
    """Return the mean of (n,) values, one for each trajectory, with its standard error."""
    # without `influence`, unlike `ratio_estimate`: the rows are printed as JSON, and it has a number per trajectory
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std(ddof=1) / math.sqrt(len(values))),
        samples=len(values),
        unit=unit,
        num_predictions=len(values),
        method=method,
    )


@dataclass(frozen=True)
class Minimizers:
    r"""The parameters whose predictions are the true conditionals q.

    With A the `(nV, P)` matrix of the rows `sqrt(w(x) q(y|x)) grad log f(y|x)`, the Hessian of the loss at a minimizer
    is `A^T A` (Lemma 3.2). So its trace is the sum of A's squares, the two have one null space, and a Gauss-Newton step
    on the errors r of the log-probabilities, weighted alike, is `-A^+ r`.
    """

    model: EnumerableModel  # the model; its `teacher` plays no role
    conditionals: torch.Tensor  # (n, V) q

    def root(self, theta: torch.Tensor) -> torch.Tensor:
        """Return A, (nV, P), at (P,) parameters."""
        weights = self._root_weights
        # by rows: the models here have fewer outputs nV than parameters P
        jacobian = torch.func.jacrev(lambda point: (weights * self.model.log_probs(point)).flatten())
        rows: torch.Tensor = jacobian(theta)
        return rows

    def trace(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the trace of the Hessian at a minimizer, (), differentiable in theta."""
        return self.root(theta).square().sum()

    def scale(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the root of the factors, (P,), by which an optimizer multiplies the gradient: 1, for SGD."""
        return torch.ones_like(theta)

    def normals(self, theta: torch.Tensor) -> torch.Tensor:
        """Return an orthonormal basis, (M, P), of the space that the Hessian, scaled, does not send to 0."""
        # sum_y f(y|x) grad log f(y|x) is 0 everywhere, so A has rank n (V - 1) off the minimizers too, and the flow may
        # project at points that are not on them. By A and not by A^T A, which would square the gap to rounding
        _, sizes, rows = torch.linalg.svd(self.root(theta) * self.scale(theta), full_matrices=False)
        normals: torch.Tensor = rows[sizes > RANK_TOLERANCE * sizes[0]]
        return normals

    def least_eigenvalue(self, theta: torch.Tensor) -> float:
        """Return the least eigenvalue above 0 of the Hessian at a minimizer."""
        sizes = torch.linalg.svdvals(self.root(theta))
        return float(sizes[sizes > RANK_TOLERANCE * sizes[0]].min().square())

    def project(self, theta: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Return the part of a (P,) vector in the null space of the Hessian at a minimizer: along the manifold."""
        normals = self.normals(theta)
        return vector - normals.T @ (normals @ vector)

    def velocity(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the projected `-grad Tr`, (P,), at a minimizer; projected in the coordinates `theta / scale`."""
        # off the minimizers |A|^2 is not the Hessian's trace, so only the part of its gradient along them counts
        gradient, scale = torch.func.grad(self.trace)(theta), self.scale(theta)
        return -scale * self.project(theta, scale * gradient)

    def retract(self, theta: torch.Tensor) -> torch.Tensor:
        """Return a minimizer near (P,) parameters, by Gauss-Newton steps of length 1 at most.

        Raises:
            IsolossError: They lead to no minimizer.
        """
        weights, target = self._root_weights, self.conditionals.log()
        for _ in range(_RETRACTIONS):
            errors = (weights * (self.model.log_probs(theta) - target)).flatten()
            if errors.norm() <= RETRACTED:
                # before any step, so that a minimizer stays the same bit for bit
                return theta
            # the step of least norm has no part in the null space of A: it moves across the manifold, not along it
            step = torch.linalg.pinv(self.root(theta), rtol=RANK_TOLERANCE) @ errors
            # from a random start the first step may be longer than 1, farther than the linear model holds
            theta = theta - step / max(1.0, float(step.norm()))
        raise IsolossError(
            f"{self.model.name}: Gauss-Newton steps lead to no minimizer; the error is {errors.norm():.1e}. Can the "
            "model predict these conditionals exactly, not only to a few digits? If so, try another start"
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
        self._falls: list[float] = []
        self._append(0.0, start)

    def at(self, time: float) -> Array:
        """Return the (P,) parameters at a time."""
        # a cubic needs two knots, also at time 0
        while len(self._times) < 2 or self._times[-1] < time:
            self._advance()
        # of two pieces that meet at a knot the earlier: it is there whenever the knot is, so that the answer does not
        # depend on how far the flow was solved before
        knot = max(0, bisect.bisect_left(self._times, time) - 1)
        ends = slice(knot, knot + 2)
        points, velocities = ([x.numpy() for x in knots[ends]] for knots in (self._points, self._velocities))
        return np.asarray(CubicHermiteSpline(self._times[ends], points, velocities)(time))

    def time_of(self, trace: float) -> tuple[float, float]:
        """Return the time at which the trace is this, and how much of the trace a unit of time takes off there.

        A trace above the start's, or below what the flow can reach, is met by a straight line from the nearer end.
        """
        # the trace approaches its least without reaching it: below that the loop would never end, so FLAT ends it
        while len(self._times) < 2 or (self._traces[-1] > trace and self._falls[-1] > FLAT * self._traces[-1]):
            self._advance()
        if trace >= self._traces[0]:
            return (self._traces[0] - trace) / self._falls[0], self._falls[0]
        if trace <= self._traces[-1]:
            return self._times[-1] + (self._traces[-1] - trace) / self._falls[-1], self._falls[-1]
        right = bisect.bisect_left(self._traces, -trace, key=lambda value: -value)
        ends = slice(right - 1, right + 1)
        falls = [self._falls[right - 1], self._falls[right]]
        # the inverse function, time over minus the trace, which increases as a spline's x must; its slope is 1 / fall
        curve = CubicHermiteSpline([-value for value in self._traces[ends]], self._times[ends], [1 / x for x in falls])
        time = float(curve(-trace))
        return time, float(np.interp(time, self._times[ends], falls))

    def _append(self, time: float, point: torch.Tensor) -> None:
        # Assumption 3.1: all minimizers have a Hessian of one rank
        rank = len(self.minimizers.normals(point))
        if rank != self.rank:
            raise IsolossError(
                f"{self.minimizers.model.name}: the Hessian's rank is {self.rank} at the start and {rank} at time "
                f"{time:g} of the flow: the minimizers are not a manifold"
            )
        self._times.append(time)
        self._points.append(point)
        self._velocities.append(self.minimizers.velocity(point))
        self._traces.append(float(self.minimizers.trace(point)))
        # dTr/dt = <grad Tr, v> = -|v|^2 where the scale is 1, as v is minus the projection of grad Tr
        self._falls.append(float((self._velocities[-1] / self.minimizers.scale(point)).square().sum()))

    def _advance(self) -> None:
        point, velocity = self._points[-1], self._velocities[-1]
        while True:
            step = self._step
            once = self._runge_kutta(point, velocity, step)
            middle = self._runge_kutta(point, velocity, step / 2)
            twice = self._runge_kutta(middle, self.minimizers.velocity(middle), step / 2)
            # of `twice`: of order 4, so that halving the step leaves 1/16 of the error, and 15/16 is the difference
            error = float((twice - once).abs().max() / 15 / point.abs().max())
            # one step's error grows as its length to the power 5; 0.9 saves rejected steps, 1e-30 a division by 0
            self._step = min(LONGEST_STEP, step * min(2.0, max(0.2, 0.9 * (TOLERANCE / max(error, 1e-30)) ** 0.2)))
            if error <= TOLERANCE:
                # not the extrapolation of both, which would leave the minimizers
                self._append(self._times[-1] + step, twice)
                return

    def _runge_kutta(self, point: torch.Tensor, velocity: torch.Tensor, step: float) -> torch.Tensor:
        second = self.minimizers.velocity(point + step / 2 * velocity)
        third = self.minimizers.velocity(point + step / 2 * second)
        fourth = self.minimizers.velocity(point + step * third)
        return self.minimizers.retract(point + step / 6 * (velocity + 2 * second + 2 * third + fourth))


class LogProbsModel:
    """A model of one's own, by its log-probabilities alone: SGD, the Hessian and the flow are made by autograd.

    The start becomes a minimizer: its own predictions are the true conditionals, or it is moved to a minimizer of the
    given ones. Shapes: C inputs, V outcomes of each, n trajectories of P parameters, those of the start in one row.

    Example:
        >>> import torch
        >>> from isoloss.paper.theory.sgd_flow import LogProbsModel
        >>> def log_probs(theta):  # the logit a b of one outcome of two
        ...     return torch.stack([theta["a"] * theta["b"], torch.zeros(1)], dim=-1).log_softmax(dim=-1)
        >>> model = LogProbsModel(log_probs, {"a": torch.tensor([2.0]), "b": torch.tensor([0.5])})
        >>> [float(each) for each in model.flow(0.1).round(4)]  # flatter
        [1.9324, 0.5175]
    """

    unit = "nats per example"  # of the loss and of the trace of its Hessian
    block = 1024  # trajectories that move together, so that they stay in the cache; part of what a seed stands for
    kick = 0.03  # length of the random steps off the minimizers from which the control starts

    def __init__(
        self,
        log_probs: Callable[[Any], torch.Tensor],
        start: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        weights: torch.Tensor | None = None,
        conditionals: torch.Tensor | None = None,
        name: str = "own model",
    ) -> None:
        """Take (C, V) log-probabilities in nats as a function of parameters like `start`, in float64.

        `weights` are the (C,) probabilities of the inputs, equal by default; `conditionals` the (C, V) true ones.

        Raises:
            IsolossError: A table has another shape, a probability of 0 or rows that do not sum to 1, the start leads to
                no minimizer, or `log_probs` is normalized at the start alone.
        """
        parts = start if isinstance(start, Mapping) else {"": start}
        shapes = {key: part.shape for key, part in parts.items()}

        def of_flat(theta: torch.Tensor) -> torch.Tensor:
            values = unflattened(theta, shapes)
            return log_probs(values if isinstance(start, Mapping) else values[""])

        flat = torch.cat([part.detach().flatten() for part in parts.values()]).double()
        if (found := of_flat(flat).dtype) is not torch.float64:
            raise IsolossError(
                f"{name}: log_probs gives {str(found).removeprefix('torch.')}; it must compute in float64, with inputs "
                "and constants of this type"
            )
        truth = of_flat(flat).detach().exp() if conditionals is None else conditionals.double()
        if weights is None:
            weights = torch.full(truth.shape[:1], 1 / len(truth), dtype=torch.float64)
        tables = {"log_probs": of_flat(flat).detach().exp(), "conditionals": truth, "weights": weights.double()}
        for table, values in tables.items():
            wanted = truth.shape[:1] if table == "weights" else truth.shape
            # an outcome that never comes has no logarithm
            is_positive = bool((values > 0).all() if values.ndim == 2 else (values >= 0).all())
            sums_to_1 = bool((values.sum(dim=-1) - 1).abs().max() < SUM_TOLERANCE)
            if truth.ndim != 2 or values.shape != wanted or not (sums_to_1 and is_positive):
                raise IsolossError(
                    f"{name}: {table} has the shape {tuple(values.shape)}, sums from {values.sum(dim=-1).min():.6g} to "
                    f"{values.sum(dim=-1).max():.6g} and a least entry of {values.min():.6g}; the probabilities of "
                    "outcomes are (inputs, outcomes) and above 0, those of inputs (inputs,), and each distribution "
                    "sums to 1"
                )
        if ((truth.sum(dim=-1) - 1).abs() > ROUNDING).any():
            # of float32, or of rounded numbers: no predictions in float64 would be these
            truth = truth / truth.sum(dim=-1, keepdim=True)
        self.name = name
        self.minimizers = Minimizers(EnumerableModel(name, of_flat, flat, tables["weights"]), truth)
        self.minimizer: Array = self.minimizers.retract(flat).numpy()  # (P,) where SGD and the flow start
        # where predictions sum to 1 nearby too, the mean gradient of the loss is 0
        root = self.minimizers.root(torch.tensor(self.minimizer))
        gradient = root.T @ (tables["weights"][:, None] * truth).sqrt().flatten()
        if gradient.norm() > GRADIENT * root.norm():
            raise IsolossError(
                f"{name}: the gradient of the loss at the start is {gradient.norm():.2g} and not 0, although the "
                "predictions are the truth: log_probs is not normalized at all parameters"
            )
        # (C V,) the distribution function over inputs and outcomes. Rounding may miss the sum of all, and a draw above
        # it would have no outcome
        self._cumulative: Array = np.cumsum((tables["weights"][:, None] * truth).numpy())
        self._cumulative[-1] = 1.0

    @property
    def least_eigenvalue(self) -> float:
        """The least eigenvalue above 0 of the Hessian at the start; along it SGD settles at about K = eta over it."""
        return self.minimizers.least_eigenvalue(torch.tensor(self.minimizer))

    def settings(self, **changes: Any) -> Settings:
        """Return `Settings` for this model; `changes` override the defaults, which follow from its trace.

        Raises:
            IsolossError: The flow rests at the start.
        """
        start = torch.tensor(self.minimizer)
        trace, fall = float(self.minimizers.trace(start)), float(self.minimizers.velocity(start).square().sum())
        if fall <= FLAT * trace:
            raise IsolossError(
                f"{self.name}: the flow rests at the start, where a unit of time takes {fall:.1e} off a trace of "
                f"{trace:.3g} {self.unit}: start at another minimizer, or take a model whose minimizers differ in "
                "their trace (those of a single linear map do not)"
            )
        # with B = 1 about a fifth of the trace is gone by the first time
        times = tuple(multiple * trace / fall for multiple in (1.0, 2.0))
        largest = min(0.2 / trace, LARGEST)
        fields = {"step_sizes": (largest, largest / 2, largest / 4), "times": times}
        return Settings(model=self, **{**fields, "batch_sizes": (1, 2), "trajectories": 512, **changes})

    @property
    def beside(self) -> Array:
        """(n, P) the start, displaced by `kick` in random directions: where the control without label noise starts."""
        rng = np.random.default_rng(seeds.derive(0, "sgd-flow", "beside"))
        draw = rng.standard_normal((_CONTROLS, len(self.minimizer)))
        return np.asarray(self.minimizer + self.kick * draw / np.linalg.norm(draw, axis=1, keepdims=True))

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Step down the mean gradient of each of the (n, P) trajectories, in place, on examples of its own."""
        truth = self.minimizers.conditionals
        outcomes = np.searchsorted(self._cumulative, generator.random((len(theta), batch_size)), side="right")
        places = outcomes + truth.numel() * np.arange(len(theta))[:, None]
        counts = np.bincount(places.ravel(), minlength=len(theta) * truth.numel()).reshape(-1, *truth.shape)
        targets = torch.tensor(counts / batch_size)
        if exact:
            # inputs are drawn where the labels are exact, too: the control is without label noise alone
            targets = targets.sum(dim=-1, keepdim=True) * truth
        points = torch.tensor(theta, requires_grad=True)
        loss = -(targets * torch.vmap(self.minimizers.model.log_probs)(points)).sum()
        theta -= step_size * torch.autograd.grad(loss, points)[0].numpy()

    def trace(self, theta: Array) -> Array:
        """Return the traces of the Hessian of the loss at (n, P) points, (n,)."""
        model = self.minimizers.model
        shares = model.weights[:, None] * self.minimizers.conditionals

        def gradient(point: torch.Tensor) -> torch.Tensor:
            of_loss: torch.Tensor = torch.func.grad(lambda at: -(shares * model.log_probs(at)).sum())(point)
            return of_loss

        def trace(point: torch.Tensor) -> torch.Tensor:
            hessian: torch.Tensor = torch.func.jacrev(gradient)(point)
            return hessian.trace()

        return np.asarray(torch.vmap(trace, chunk_size=_CHUNK)(torch.tensor(theta)).numpy())

    def flow(self, time: float) -> Array:
        """Return the (P,) point of the projected flow `-grad Tr` at a time, numerically."""
        return self._flow.at(time)

    def reached(self, theta: Array) -> Estimate:
        """Return when the flow `-grad Tr` has the mean trace of (n, P) points."""
        trace = mean(self.trace(theta), self.unit, "")
        time, fall = self._flow.time_of(trace.value)
        # the error by the delta method: dt = dTr / fall
        return dataclasses.replace(
            trace, value=time, stderr=trace.stderr / fall, unit="", method="when the flow has the mean trace"
        )

    @functools.cached_property
    def _flow(self) -> Flow:
        return Flow(self.minimizers, torch.tensor(self.minimizer))


class TwoParameters(LogProbsModel):
    r"""The loss `-p log s(ab) - (1 - p) log(1 - s(ab))`, s the logistic function, and a start on its minimizers.

    With v = p (1 - p) the trace of the Hessian at a minimizer is `v (a^2 + b^2)`. Its gradient `2v (a, b)`, projected
    on the tangent `(a, -b) / |(a, b)|`, moves `D = a^2 - b^2` at rate `-4 v D` under the flow `-grad Tr`.
    As `(a^2 + b^2)^2 = D^2 + 4 (ab)^2`, the flow is closed: `D(t) = D(0) exp(-4 v t)` and
    `Tr(t) = v sqrt(D(t)^2 + 4 logit(p)^2)`.
    """

    block = 4096

    def __init__(self, probability: float, start: float) -> None:
        """Take p, of the first answer, and a at the start; b is logit(p) / a."""
        if not 1e-6 <= probability <= 1 - 1e-6:
            raise IsolossError(f"the probability is {probability}; it must lie between 1e-6 and 1 - 1e-6")
        if not (math.isfinite(start) and start != 0):
            raise IsolossError(f"the start is {start}; it must be a number other than 0")
        self.probability = probability
        self.logit = math.log(probability / (1 - probability))  # a * b at every minimizer
        self.variance = probability * (1 - probability)  # v, of one answer
        square = start * start
        if abs(square - abs(self.logit)) < 1e-3 * square:
            raise IsolossError(
                f"the start {start} is the flattest minimizer, where the flow rests: start elsewhere than at "
                f"{math.sqrt(abs(self.logit)):.4g}"
            )
        at_start = torch.tensor([start, self.logit / start], dtype=torch.float64)
        truth = torch.tensor([[probability, 1 - probability]], dtype=torch.float64)
        super().__init__(_two_log_probs, at_start, conditionals=truth, name="two parameters")

    @property
    def beside(self) -> Array:
        """(1, 2) the start, with the logit off by `LOGIT_KICK`: where the control without label noise starts."""
        start = self.minimizer[0]
        return np.array([[start, (self.logit + LOGIT_KICK) / start]])

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Step in place to `(a, b) - eta * (s(ab) - y) * (b, a)`, y the mean of `batch_size` answers."""
        p = self.probability
        answers: Array | float = p
        if not exact:
            # one uniform u whatever B: the number of first answers of B, a binomial, is the number of bounds below u
            ways = [math.comb(batch_size, k) * p**k * (1 - p) ** (batch_size - k) for k in range(batch_size)]
            draws = generator.random(len(theta))
            answers = sum((draws > bound for bound in np.cumsum(ways)), np.zeros(len(theta))) / batch_size
        # a copy, as both updates start from the old point
        a, b = theta.T.copy()
        slope = step_size * (1 / (1 + np.exp(-a * b)) - answers)
        theta[:, 0] -= slope * b
        theta[:, 1] -= slope * a

    def trace(self, theta: Array) -> Array:
        """Return `s(ab) (1 - s(ab)) (a^2 + b^2)`, the trace, at (n, 2) points."""
        a, b = theta.T
        s = 1 / (1 + np.exp(-a * b))
        traces: Array = s * (1 - s) * (a * a + b * b)
        return traces

    def flow(self, time: float) -> Array:
        """Return a and b of the flow `-grad Tr` at a time; the theorem's flow runs 1/(4B) as fast."""
        a, b = (float(x) for x in self.minimizer)
        # a ** 2 would raise an OverflowError where a * a is infinite
        difference = (a * a - b * b) * math.exp(-4 * self.variance * time)
        # a^2 + b^2 = hypot(D, 2ab). The smaller of the two by their product: half of a^2 + b^2 - |D| would cancel
        larger = math.sqrt((math.hypot(difference, 2 * self.logit) + abs(difference)) / 2)
        smaller = abs(self.logit) / larger
        sizes = (larger, smaller) if difference > 0 else (smaller, larger)
        return np.copysign(sizes, (a, b))

    def reached(self, theta: Array) -> Estimate:
        """Return when the flow is where (n, 2) points are: the mean of `-log(D / D(0)) / (4 v)`.

        Gradient flow of the loss keeps D, so the oscillation around the minimizers does not matter.
        """
        a, b = self.minimizer
        differences = theta[:, 0] ** 2 - theta[:, 1] ** 2
        times = -np.log(differences / (a * a - b * b)) / (4 * self.variance)
        return mean(times, "", "-log(D / D(0)) / (4v)")


def _two_log_probs(theta: torch.Tensor) -> torch.Tensor:
    logit = theta[0] * theta[1]
    return torch.stack([logit, torch.zeros_like(logit)]).log_softmax(dim=0)[None]


class MaskedLM(LogProbsModel):
    r"""A language of V^T sentences, and a masked language model with one hidden layer that is at a minimizer.

    A sentence is drawn, and one of its positions, all equally likely, is masked. With x the sentence so masked, the
    model's logits for the token there are `U tanh(sum_t E[t, x_t])`: E an embedding of each token and the mask at each
    position, U a decoder. With d >= C every table of conditionals can be had, in many ways. The (P,) parameters are
    the R d of the embedding, then the V d of the decoder.
    """

    unit = "nats per predicted token"
    kick = 0.3

    def __init__(self, *, seed: int, vocab: int = 3, length: int = 2, width: int = 8) -> None:
        """Draw the language, whose log-probabilities are standard normal up to a constant, and the start.

        The start is a minimizer whose decoder is large: normal parameters, brought to the minimizers.

        Raises:
            IsolossError: The width is too small for the conditionals of every language.
        """
        number = length * vocab ** (length - 1)
        if width < number:
            raise IsolossError(
                f"the width is {width}; to reach the truth in {number} contexts it must be at least {number}"
            )
        rng = np.random.default_rng(seeds.derive(seed, "sgd-flow", "masked-lm"))
        joint = np.exp(rng.standard_normal((vocab,) * length))
        embedding = EMBEDDING * rng.standard_normal(length * (vocab + 1) * width)
        decoder = DECODER * rng.standard_normal(vocab * width)
        self.vocab, self.length, self.width = vocab, length, width
        self.joint: Array = joint / joint.sum()  # (V,) * T probabilities of the sentences
        # where the mask is and the other tokens, for each context
        contexts = list(itertools.product(range(length), itertools.product(range(vocab), repeat=length - 1)))
        masked = [(*rest[:position], vocab, *rest[position:]) for position, rest in contexts]
        # (C, T): which row of the embedding each position of each context takes
        self.rows = np.array(masked) + np.arange(length) * (vocab + 1)
        # (C, V): the probability that a context is drawn and that this token is the answer
        by_context = np.array([np.moveaxis(self.joint, position, -1)[rest] for position, rest in contexts]) / length
        self.weights: Array = by_context.sum(axis=1)  # (C,) probability of each context
        self.conditionals: Array = by_context / self.weights[:, None]  # (C, V) of each token in each context
        start = torch.tensor(np.concatenate([embedding, decoder]))
        truth = {"weights": torch.tensor(self.weights), "conditionals": torch.tensor(self.conditionals)}
        super().__init__(self._log_probs, start, **truth, name=f"masked LM, {len(start)} parameters")

    def _log_probs(self, theta: torch.Tensor) -> torch.Tensor:
        table = theta.view(-1, self.width)
        hidden = torch.tanh(table[torch.tensor(self.rows)].sum(dim=1))
        return (hidden @ table[-self.vocab :].T).log_softmax(dim=-1)

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Step down the mean gradient, in place, on sentences and masks of every trajectory; theta is contiguous."""
        n, parameters = theta.shape
        # rows of all trajectories; a view, as is the decoder (n, V, d)
        table = theta.reshape(-1, self.width)
        decoder = table.reshape(n, -1, self.width)[:, -self.vocab :]
        # contexts are drawn where the labels are exact, too: the control is without label noise alone
        outcomes = np.searchsorted(self._cumulative, generator.random((n, batch_size)), side="right")
        contexts, answers = np.divmod(outcomes, self.vocab)
        first = np.arange(0, n * parameters // self.width, parameters // self.width)
        # by position: (n, B) rows of `table`
        rows = [first[:, None] + row[contexts] for row in self.rows.T]
        hidden = np.tanh(sum((table.take(row, axis=0) for row in rows[1:]), table.take(rows[0], axis=0)))
        errors = _softmax(hidden @ decoder.transpose(0, 2, 1))
        if exact:
            errors -= self.conditionals[contexts]
        else:
            # f minus the one-hot answer; the flat view writes through, as `_softmax` gives a contiguous array
            errors.reshape(-1)[np.arange(answers.size) * self.vocab + answers.reshape(-1)] -= 1
        errors *= step_size / batch_size
        # ahead of the decoder's update, which is in place
        back = (errors @ decoder) * (1 - hidden * hidden)
        decoder -= errors.transpose(0, 2, 1) @ hidden
        # by example: indexed subtraction counts a row once that two examples share; no two trajectories share one
        for row, example in itertools.product(rows, range(batch_size)):
            table[row[:, example]] -= back[:, example]

    def trace(self, theta: Array) -> Array:
        r"""Return the traces of the Hessian of the loss at (n, P) points, in closed form.

        With f the predictions in a context, S their covariance, h the hidden units and `D = 1 - h^2`, the Gauss-Newton
        part is `Tr(S) |h|^2 + T sum_i D_i^2 (U^T S U)_ii`. The rest comes from the second derivative of tanh in the
        logits: `-2 T sum_i h_i D_i (U^T (f - q))_i`. It is 0 at a minimizer.
        """
        table = theta.reshape(len(theta), -1, self.width)
        decoder = table[:, -self.vocab :]
        hidden = np.tanh(sum((table[:, row] for row in self.rows.T[1:]), table[:, self.rows.T[0]]))
        probs = _softmax(hidden @ decoder.transpose(0, 2, 1))
        slopes, average = 1 - hidden**2, probs @ decoder
        variance = probs @ decoder**2 - average**2
        traces = (1 - (probs**2).sum(axis=-1)) * (hidden**2).sum(axis=-1)
        traces += self.length * (slopes**2 * variance).sum(axis=-1)
        traces -= 2 * self.length * (hidden * slopes * (average - self.conditionals @ decoder)).sum(axis=-1)
        return np.asarray(traces @ self.weights)


def _softmax(logits: Array) -> Array:
    # over a short last axis: with that axis first, numpy reduces whole rows
    shifted = np.ascontiguousarray(np.moveaxis(logits, -1, 0))
    shifted -= shifted.max(axis=0)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=0)
    return np.ascontiguousarray(np.moveaxis(shifted, 0, -1))


@dataclass(frozen=True, kw_only=True)
class Row:
    """SGD with one step size and batch size at one time, against the flow."""

    batch_size: int  # B
    step_size: float  # eta; 0: the limit of small steps, extrapolated
    time: float  # K, the number of steps times eta^2
    trace: Estimate  # mean trace of the Hessian where SGD is, over the trajectories
    flow_trace: float  # the flow's, with the coefficient that is checked
    coefficient: Estimate  # of the flow that is where SGD is, times B
    # mean squared distance of SGD's parameters from the flow's, as a fraction of the squared distance that the flow is
    # from the start
    distance: Estimate

    @property
    def error(self) -> float:
        """Mean trace of SGD minus the flow's, as a fraction of the flow's."""
        return self.trace.value / self.flow_trace - 1

    @property
    def error_percent(self) -> str:
        """The same in percent, with its standard error."""
        return f"{rounded(100 * self.error, 100 * self.trace.stderr / self.flow_trace)} %"


def judge(
    name: str,
    rows: Sequence[Row],
    limits: Sequence[Row],
    control: Sequence[float],
    *,
    coefficient: float,
    start: float,
    least_eigenvalue: float | None = None,
) -> list[Statement]:
    """Return the statements with their verdicts.

    The rows come for each batch size, each step size from large to small, and each time; `limits` are the same at step
    size 0, `control` the traces over time without label noise, `start` the trace at the start and
    `least_eigenvalue` that of the Hessian there, where it is known. Theorem 3.3 is about small step sizes, so verdicts
    are given at the limit; at a finite step size the error is a constant times its size.
    """
    least = rows[0].batch_size
    single = [row for row in rows if row.batch_size == least]
    by_step = [list(some) for _, some in itertools.groupby(single, key=lambda row: row.step_size)]
    etas, last = [some[0].step_size for some in by_step], [some[-1] for some in by_step]
    at_zero = [row for row in limits if row.batch_size == least]
    # later times replace earlier ones, so these are at the last time
    coefficients = {row.batch_size: row.coefficient for row in limits}

    errors = [
        (_rms([100 * row.error for row in some]), _rms([100 * row.trace.stderr / row.flow_trace for row in some]))
        for some in by_step
    ]
    distances, limit = [(row.distance.value, row.distance.stderr) for row in last], at_zero[-1].distance
    error_fall, allowed_error = _fall(errors, etas, " %")
    distance_fall, allowed_distance = _fall(distances, etas)
    limit_errors = ", ".join(f"{row.error_percent} at K = {row.time:.3g}" for row in at_zero)
    off_times = [f"{row.time:.3g}" for row in at_zero if _is_off(row.trace, row.flow_trace)]
    off_sizes = [str(size) for size, value in coefficients.items() if _is_off(value, coefficient)]
    fall = start - last[-1].trace.value
    drift = max(abs(trace - control[0]) for trace in control) / abs(fall)
    coefficients_needed = [(value.stderr, PRECISION * coefficient) for value in coefficients.values()]
    falls = errors[-1][0] < allowed_error
    does_not_fall = f"from eta = {etas[0]:.3g} to {etas[-1]:.3g} it does not fall that fast"
    off = f"off by more than {ERRORS:g} standard errors"
    too_large = "step sizes too large to extrapolate from (take smaller ones)"
    # errors beyond sampling that do not fall with the step size
    unsettled = "the error of the trace does not fall with the step size, which more trajectories do not change"
    unsettled *= not falls and bool(off_times)
    judged = functools.partial(_statement, last[0].trace.samples, unsettled=unsettled)
    statements = [
        judged(
            "as the step size goes to 0, SGD's mean trace after K / eta^2 steps becomes that of the flow "
            f"-({coefficient:g} / B) grad Tr at time K.",
            f"B = {least}, extrapolated to eta = 0: off by {limit_errors}; {ERRORS:g} standard errors "
            f"allowed. Root mean square over K, of the errors ± of their standard errors: {error_fall}",
            {
                does_not_fall: _is_above(errors[-1], allowed_error),
                f"{off} at K = {', '.join(off_times)}: another coefficient, or {too_large}": bool(off_times),
            },
            [(errors[-1][1], allowed_error / ERRORS)],
            unsettled=unsettled and f"{unsettled}. {_settling(least_eigenvalue, etas, at_zero[-1].time)}",
        ),
        judged(
            f"the coefficient of the flow that SGD follows is -{coefficient:g} / B.",
            f"B = {least}: {_minus(coefficients[least])} times 1 / B, extrapolated to eta = 0; {ERRORS:g} "
            f"standard errors allowed, the error at most {100 * PRECISION:g} %; contradicted if off by more than "
            f"{100 * ERRORS * PRECISION:g} % and {ERRORS:g} standard errors together",
            {off: _is_off(coefficients[least], coefficient)},
            coefficients_needed[:1],
            contradicted=is_far(coefficients[least], coefficient),
        ),
        judged(
            "with B examples per step the flow is B times slower.",
            "coefficient times B: "
            + ", ".join(f"{_minus(value)} (B = {size})" for size, value in coefficients.items())
            + f"; {ERRORS:g} standard errors from {-coefficient:g} allowed for each of at least 2, each error at most "
            f"{100 * PRECISION:g} %",
            {
                "one batch size alone cannot tell": len(coefficients) == 1,
                f"{off} for B = {', '.join(off_sizes)}": bool(off_sizes),
            },
            coefficients_needed,
            contradicted=len(coefficients) > 1 and any(is_far(each, coefficient) for each in coefficients.values()),
        ),
        judged(
            "not only the trace: SGD's parameters themselves become those of the flow.",
            f"mean squared distance over the squared distance of the flow from the start, at K = "
            f"{last[-1].time:.3g}: {distance_fall}; extrapolated to eta = 0: {rounded(limit.value, limit.stderr)}; "
            f"{ERRORS:g} standard errors from 0 allowed",
            {
                does_not_fall: _is_above(distances[-1], allowed_distance),
                f"{off}: another coefficient, or {too_large}": _is_off(limit, 0.0) and limit.value > 0,
                f"{off}, and no squared distance is below 0: {too_large}": _is_off(limit, 0.0) and limit.value < 0,
            },
            [(distances[-1][1], allowed_distance / ERRORS)],
        ),
        judged(
            "without label noise, with the exact conditionals as targets, nothing drifts along the minimizers.",
            f"started off the minimizers, it returns to them at a trace of {control[0]:.6g}, which then changes by "
            f"{drift:.1e} of the {fall:.3g} that sampled answers take off in that time; {CONTROL_ALLOWED:.0e} allowed",
            {"sampled answers take nothing off": fall <= 0, "it changes by more": drift > CONTROL_ALLOWED},
        ),
    ]
    return [dataclasses.replace(statement, text=f"{name}: {statement.text}") for statement in statements]


def _statement(
    trajectories: int,
    text: str,
    evidence: str,
    failures: Mapping[str, bool],
    needed: Sequence[tuple[float, float]] = (),
    *,
    unsettled: str,
    contradicted: bool = False,
) -> Statement:
    """Return a statement, shown unless one of `failures` is so or an error in `needed` is above what it may be.

    The evidence of a statement that is not shown ends with the reasons, and with how many trajectories would halve the
    errors that are allowed: at just these, what is judged may still miss its limit by chance. If SGD has not settled on
    the flow, as `unsettled` says, no number of trajectories would.
    """
    reasons = [reason for reason, failed in failures.items() if failed]
    # the square of how far each is from what is allowed: a standard error falls as the root of their number
    factor = max([(error / allowed) ** 2 for error, allowed in needed], default=0.0)
    if factor > 1:
        wanted = f": take about {float(f'{4 * trajectories * factor:.2g}'):,.0f} trajectories"
        reasons.append(f"the run is too imprecise to tell{wanted * (not unsettled)}")
    if needed and reasons and unsettled:
        reasons.append(unsettled)
    if reasons and not contradicted:
        evidence = "; ".join([evidence, *reasons])
    return Statement(text=text, evidence=evidence, shown=not reasons, contradicted=contradicted)


def _is_above(error: tuple[float, float], allowed: float) -> bool:
    """Whether an error that must be below `allowed` is not, and no sampling error of its own can be the reason."""
    value, stderr = error
    return value >= allowed and (stderr <= allowed / ERRORS or value - ERRORS * stderr >= allowed)


def _settling(least_eigenvalue: float | None, etas: Sequence[float], end: float) -> str:
    """Return when SGD settles on the flow, against the end of the run, and what to do where that is too late."""
    text = "Along an eigenvalue h of the Hessian at the start, SGD settles at about K = eta / h"
    if least_eigenvalue is not None:
        times = " and ".join(f"{eta / least_eigenvalue:.3g} for eta = {eta:.3g}" for eta in (etas[0], etas[-1]))
        text += f": along the least above 0, h = {least_eigenvalue:.2g}, at K = {times}; the run ends at K = {end:.3g}"
    return f"{text}. If that is too late, try another start or smaller step sizes"


def _fall(errors: Sequence[tuple[float, float]], etas: Sequence[float], unit: str = "") -> tuple[str, float]:
    """Return errors at each step size with the rule of their fall, and what the last must be below.

    So must 3 of its standard errors: else few trajectories would show any fall. Errors in between are not judged: one
    that changes its sign is small for a while, and then larger.
    """
    allowed = errors[0][0] * (etas[-1] / etas[0]) ** FALL
    figures = ", ".join(f"{rounded(*error)}{unit} at eta = {eta:.3g}" for error, eta in zip(errors, etas, strict=True))
    return (
        f"{figures}; the last and {ERRORS:g} times its standard error must each be below {allowed:.2g}{unit}, which is "
        f"({etas[-1]:.3g} / {etas[0]:.3g})^{FALL:g} times the first",
        allowed,
    )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value**2 for value in values) / len(values))


def _is_off(estimate: Estimate, wanted: float) -> bool:
    return abs(estimate.value - wanted) > ERRORS * estimate.stderr


def is_far(estimate: Estimate, wanted: float) -> bool:
    """Return whether a coefficient is off by more than its errors and the allowed ones.

    With few trajectories, standard errors alone are too small: a coefficient is an extrapolation of a few means.
    """
    return abs(estimate.value - wanted) > ERRORS * (estimate.stderr + PRECISION * wanted)


def _minus(estimate: Estimate) -> str:
    return rounded(-estimate.value, estimate.stderr)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `study` runs."""

    model: LogProbsModel
    step_sizes: tuple[float, ...]  # at least 2, from large to small
    times: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)  # increasing
    batch_sizes: tuple[int, ...] = (1, 2, 4)  # increasing
    trajectories: int  # for each step size and batch size, at least 2
    coefficient: float = 0.25  # to check, for one example a step; the theorem has 1/4
    seed: int = 0  # decides the examples that are drawn

    def __post_init__(self) -> None:
        etas, times, sizes = self.step_sizes, self.times, self.batch_sizes
        if len(etas) < 2 or not all(x > y for x, y in itertools.pairwise(etas)) or not 0 < etas[-1] <= etas[0] < 1:
            raise IsolossError(f"the step sizes are {_list(etas)}; give at least 2, from large to small, below 1")
        if not times or not all(x < y for x, y in itertools.pairwise((0.0, *times))) or not math.isfinite(times[-1]):
            raise IsolossError(f"the times are {_list(times)}; they must be positive and increase")
        if times[0] < etas[0] ** 2:
            raise IsolossError(f"the first time is {times[0]:g}, less than one step of size {etas[0]:g} takes")
        if not sizes or not all(x < y for x, y in itertools.pairwise((0, *sizes))):
            raise IsolossError(f"the batch sizes are {_list(sizes)}; they must be positive and increase")
        if self.trajectories < 2:
            raise IsolossError(f"trajectories is {self.trajectories}; a standard error needs at least 2")
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise IsolossError(f"the coefficient is {self.coefficient}; it must be a positive number")
        # an infinite trace is too steep as well, and needs no warning
        with np.errstate(over="ignore"):
            steepest = float(self.model.trace(self.model.minimizer[None])[0])
        # the trace bounds the largest eigenvalue, and at 2 / eta gradient descent itself diverges
        if etas[0] * steepest >= 1:
            raise IsolossError(
                f"{self.model.name}: the step size {etas[0]:g} is too large for a Hessian of trace {steepest:.3g}: it "
                f"must be below {1 / steepest:.3g}"
            )

    @property
    def num_steps(self) -> int:
        """Steps of blocks of trajectories that `study` takes, without the control."""
        blocks = -(-self.trajectories // self.model.block)
        return sum(steps_until(self.times[-1], eta) for eta in self.step_sizes) * len(self.batch_sizes) * blocks

    def flow_trace(self, time: float, batch_size: int) -> float:
        """Return the trace of the Hessian on the flow `-(coefficient / batch_size) grad Tr` at a time."""
        point = self.model.flow(self.coefficient * time / batch_size)
        return float(self.model.trace(point[None])[0])


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `study`."""

    rows: tuple[Row, ...]  # one for each batch size, step size and time
    limits: tuple[Row, ...]  # one for each batch size and time: what the rows say at step size 0
    # mean trace where every step sees the exact conditionals: once it is back on the minimizers, and at each time from
    # then on
    control: tuple[float, ...]
    statements: tuple[Statement, ...]  # the verdicts


def two_parameters(*, probability: float = 0.7, start: float = 2.0, **changes: Any) -> Settings:
    """Return the settings for `TwoParameters`; `changes` override fields of `Settings`."""
    fields = {"step_sizes": (0.1, 0.05, 0.025), "trajectories": 65536, **changes}
    return Settings(model=TwoParameters(probability, start), **fields)


def masked_lm(*, seed: int = 0, **changes: Any) -> Settings:
    """Return the settings for the masked language model of 88 parameters, which `seed` decides; see `MaskedLM`."""
    fields = {"step_sizes": (0.05, 0.025, 0.0125), "trajectories": 1024, **changes}
    return Settings(model=MaskedLM(seed=seed), seed=seed, **fields)


def study(settings: Settings, *, progress: Callable[[int], None] | None = None) -> Result:
    """Simulate every batch size and step size, go to step size 0, run the control, and judge.

    `progress` is called with the number of steps that are done, of `settings.num_steps`.
    """
    count = counter(progress)
    rows: list[Row] = []
    limits: list[Row] = []
    for batch_size in settings.batch_sizes:
        by_step = [_rows(settings, batch_size, step_size, count) for step_size in settings.step_sizes]
        rows += [row for some in by_step for row in some]
        limits += [_limit(settings, same_time, time) for *same_time, time in zip(*by_step, settings.times, strict=True)]
    control = _control(settings)
    start = settings.flow_trace(0.0, 1)
    statements = judge(
        settings.model.name,
        rows,
        limits,
        control,
        coefficient=settings.coefficient,
        start=start,
        # a class of one's own, for another loss, need not have it
        least_eigenvalue=getattr(settings.model, "least_eigenvalue", None),
    )
    return Result(rows=tuple(rows), limits=tuple(limits), control=control, statements=tuple(statements))


def _rows(settings: Settings, batch_size: int, step_size: float, count: Callable[[int], None]) -> list[Row]:
    model, rows, blocks = settings.model, [], []
    for first in range(0, settings.trajectories, model.block):
        n = min(model.block, settings.trajectories - first)
        seed = seeds.derive(settings.seed, "sgd-flow", batch_size, repr(step_size), first)
        blocks.append(
            simulate(
                model,
                np.tile(model.minimizer, (n, 1)),
                step_size=step_size,
                times=settings.times,
                batch_size=batch_size,
                generator=np.random.default_rng(seed),
                progress=count,
            )
        )
    for time, parts in zip(settings.times, zip(*blocks, strict=True), strict=True):
        theta = np.concatenate(parts)
        # not `time`: where no whole number of steps fits, the flow is compared at the time that SGD has reached
        elapsed = steps_until(time, step_size) * step_size**2
        reached = model.reached(theta)
        point = model.flow(settings.coefficient * elapsed / batch_size)
        squares = ((theta - point) ** 2).sum(axis=1) / ((point - model.minimizer) ** 2).sum()
        rows.append(
            Row(
                batch_size=batch_size,
                step_size=step_size,
                time=elapsed,
                trace=mean(model.trace(theta), model.unit, "trace of the Hessian where SGD is"),
                flow_trace=settings.flow_trace(elapsed, batch_size),
                coefficient=comparison.times(reached, batch_size / elapsed),
                distance=mean(squares, "", "squared distance from the flow over the flow's from the start"),
            )
        )
    return rows


def _limit(settings: Settings, rows: Sequence[Row], time: float) -> Row:
    """Return the rows of all step sizes extrapolated to step size 0, by the polynomial through them.

    The traces are extrapolated as fractions of the flow's, whose times differ where no whole number of steps fits.
    """
    flow_trace = settings.flow_trace(time, rows[0].batch_size)
    fractions = extrapolated(settings.step_sizes, [comparison.times(row.trace, 1 / row.flow_trace) for row in rows])
    return Row(
        batch_size=rows[0].batch_size,
        step_size=0.0,
        time=time,
        trace=comparison.times(fractions, flow_trace),
        flow_trace=flow_trace,
        coefficient=extrapolated(settings.step_sizes, [row.coefficient for row in rows]),
        distance=extrapolated(settings.step_sizes, [row.distance for row in rows]),
    )


def extrapolated(step_sizes: Sequence[float], estimates: Sequence[Estimate]) -> Estimate:
    """Return the value at step size 0 of the polynomial through estimates at some step sizes."""
    # Lagrange's basis polynomials at 0; the errors are independent, as each step size has random numbers of its own
    weights = [math.prod(other / (other - eta) for other in step_sizes if other != eta) for eta in step_sizes]
    pairs = list(zip(weights, estimates, strict=True))
    return dataclasses.replace(
        estimates[0],
        value=math.fsum(weight * estimate.value for weight, estimate in pairs),
        stderr=math.hypot(*(weight * estimate.stderr for weight, estimate in pairs)),
        method=f"{estimates[0].method}, extrapolated to step size 0",
    )


def _control(settings: Settings) -> tuple[float, ...]:
    """Return the mean trace at each time without label noise, from points off the minimizers.

    It is left for as long as the last time to come back to them, and only then does its time begin.
    """
    model, ahead = settings.model, settings.times[-1]
    points = simulate(
        model,
        model.beside,
        step_size=settings.step_sizes[-1],
        times=[ahead + time for time in (0.0, *settings.times)],
        generator=np.random.default_rng(seeds.derive(settings.seed, "sgd-flow", "control")),
        exact=True,
    )
    return tuple(float(model.trace(theta).mean()) for theta in points)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "none"
