"""Theorem 3.3 on two parameters: SGD along the minimisers of the loss against the flow that lowers the Hessian's trace.

The model is one answer of two, with logit a * b; its minimisers are the curve a * b = logit(p).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.estimate import Estimate, rounded
from isoloss.theory.statements import Statement

Array = np.ndarray[Any, np.dtype[np.float64]]

COEFFICIENT = 0.25  # of the theorem, for one example a step
UNIT = "nats per example"
ALLOWED = 0.01  # relative error of the mean trace at the smallest step size
ERRORS = 3.0  # standard errors that a statistical figure may be off
CONTROL_KICK = 0.5  # of the logit: how far from the minimisers the control starts
CONTROL_ALLOWED = 1e-6  # relative change of the control's trace once it is back on the minimisers
_BLOCK = 4096  # trajectories that move together: they stay in the cache; part of what a seed stands for


@dataclass(frozen=True)
class Problem:
    r"""The loss `-p log s(ab) - (1 - p) log(1 - s(ab))`, s the logistic function, and a start on its minimisers.

    With v = p (1 - p) the trace of the Hessian at a minimiser is `v (a^2 + b^2)`. Its gradient `2v (a, b)`, projected
    on the tangent `(a, -b) / |(a, b)|`, moves `D = a^2 - b^2` at rate `-4 c v D` under the flow with coefficient c.
    As `(a^2 + b^2)^2 = D^2 + 4 (ab)^2`, the flow is closed: `D(t) = D(0) exp(-4 c v t)` and
    `Tr(t) = v sqrt(D(t)^2 + 4 logit(p)^2)`.

    Attributes:
        probability: p, of the first answer.
        start: a at the start; b is logit(p) / a.

    Example:
        >>> problem = Problem(0.7, 2.0)
        >>> round(float(problem.flow_trace(0.0)), 4), round(float(problem.flow_trace(4.0)), 4)
        (0.8777, 0.4966)
    """

    probability: float
    start: float

    def __post_init__(self) -> None:
        if not 1e-6 <= self.probability <= 1 - 1e-6:
            raise IsolossError(f"the probability is {self.probability}; it must lie between 1e-6 and 1 - 1e-6")
        if not (math.isfinite(self.start) and self.start != 0):
            raise IsolossError(f"the start is {self.start}; it must be a number other than 0")
        square = self.start * self.start
        if abs(square - abs(self.logit)) < 1e-3 * square:
            raise IsolossError(
                f"the start {self.start} is the flattest minimiser, where the flow rests: start elsewhere than at "
                f"{math.sqrt(abs(self.logit)):.4g}"
            )

    @property
    def logit(self) -> float:
        """The logarithm of p / (1 - p): a * b at every minimiser."""
        return math.log(self.probability / (1 - self.probability))

    @property
    def variance(self) -> float:
        """The variance of one answer, v = p (1 - p)."""
        return self.probability * (1 - self.probability)

    @property
    def start_difference(self) -> float:
        """D = a^2 - b^2 at the start."""
        b = self.logit / self.start
        return self.start * self.start - b * b  # a power would raise where this is infinite

    def flow_trace(self, time: float, *, batch_size: int = 1, coefficient: float = COEFFICIENT) -> float:
        """Return the trace of the Hessian on the flow `-(coefficient / batch_size) grad Tr` at a time.

        Args:
            time: K: steps times the square of the step size.
            batch_size: B, examples a step.
            coefficient: c; the theorem's is 1/4.
        """
        rate = 4 * coefficient / batch_size * self.variance
        return float(self.retracted_trace(np.array(self.start_difference * math.exp(-rate * time))))

    def retracted_trace(self, difference: Array) -> Array:
        """Return the trace of the Hessian at the minimisers with D = `difference`.

        Gradient flow of the loss keeps D, so this is the trace where gradient flow takes a point of that D.
        """
        traces: Array = self.variance * np.hypot(difference, 2 * self.logit)
        return traces

    def trace(self, a: Array, b: Array) -> Array:
        """Return the trace of the Hessian of the loss at any point: `s(ab) (1 - s(ab)) (a^2 + b^2)`."""
        s = 1 / (1 + np.exp(-a * b))
        traces: Array = s * (1 - s) * (a * a + b * b)
        return traces


@dataclass(frozen=True, kw_only=True)
class Row:
    """SGD with one step size and batch size at one time, against the flow.

    Attributes:
        batch_size: B.
        step_size: eta.
        time: K, the number of steps times eta^2.
        trace: Mean trace of the Hessian where SGD is, over the trajectories.
        retracted_trace: The same after gradient flow back to the minimisers: without the oscillation around them.
        flow_trace: The flow's, with the coefficient that is checked.
        coefficient: -log(D(K) / D(0)) B / (4 v K), which is the coefficient of a flow that is where SGD is.
    """

    batch_size: int
    step_size: float
    time: float
    trace: Estimate
    retracted_trace: Estimate
    flow_trace: float
    coefficient: Estimate

    @property
    def error(self) -> float:
        """Mean trace of SGD less the flow's, as a share of the flow's."""
        return self.trace.value / self.flow_trace - 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `study` found.

    Attributes:
        rows: One for each batch size, step size and time.
        coefficients: By batch size: the coefficient at the last time, extrapolated to step size 0.
        control: Trace at each time where every step sees the exact conditionals, from off the minimisers.
        statements: The verdicts.
    """

    rows: tuple[Row, ...]
    coefficients: dict[int, Estimate]
    control: tuple[float, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `study` runs.

    Attributes:
        probability: Of the first answer.
        start: a at the start.
        step_sizes: At least 2, from large to small.
        times: Increasing.
        batch_sizes: Increasing.
        trajectories: For each step size and batch size, at least 2.
        coefficient: The coefficient to check.
        seed: Decides the answers that are drawn.
    """

    probability: float = 0.7
    start: float = 2.0
    step_sizes: tuple[float, ...] = (0.1, 0.05, 0.025)
    times: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    trajectories: int = 65536
    coefficient: float = COEFFICIENT
    seed: int = 0

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
        steepest = self.problem.flow_trace(0.0)
        if etas[0] * steepest >= 1:
            raise IsolossError(
                f"the step size {etas[0]:g} is too large for a Hessian of trace {steepest:.3g}: it must be below "
                f"{1 / steepest:.3g}"
            )

    @property
    def problem(self) -> Problem:
        """The loss and the start."""
        return Problem(self.probability, self.start)

    @property
    def num_steps(self) -> int:
        """Steps of blocks of trajectories that `study` takes, the control apart."""
        blocks = -(-self.trajectories // _BLOCK)
        return sum(steps_until(self.times[-1], eta) for eta in self.step_sizes) * len(self.batch_sizes) * blocks


def steps_until(time: float, step_size: float) -> int:
    """Return K / eta^2, rounded to whole steps."""
    return round(time / step_size**2)


def simulate(
    problem: Problem,
    a: Array,
    b: Array,
    *,
    step_size: float,
    times: Sequence[float],
    batch_size: int = 1,
    generator: np.random.Generator | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[Array, Array]]:
    """Return a and b of independent trajectories of SGD at each time.

    A step is `(a, b) - eta * (s(ab) - y) * (b, a)`, with y the mean of `batch_size` answers drawn with the true
    probability. The loss is the population's: every example is fresh.

    Args:
        problem: The loss.
        a: (n,) starts.
        b: (n,) starts.
        step_size: eta.
        times: K, increasing: K / eta^2 steps are taken.
        batch_size: B.
        generator: Of the answers; None: y is the true probability itself, the control without label noise.
        progress: Called with each number of further steps.
    """
    p = problem.probability
    # with u uniform, the number of first answers of B is the number of these bounds below u
    ways = [math.comb(batch_size, k) * p**k * (1 - p) ** (batch_size - k) for k in range(batch_size)]
    bounds = np.cumsum(ways)
    a, b, found, done = a.copy(), b.copy(), [], 0
    for time in times:
        until = steps_until(time, step_size)
        for _ in range(until - done):
            mean: Array | float = p
            if generator is not None:
                draws = generator.random(len(a))
                mean = sum((draws > bound for bound in bounds), np.zeros(len(a))) / batch_size
            slope = step_size * (1 / (1 + np.exp(-a * b)) - mean)
            a, b = a - slope * b, b - slope * a
        if progress is not None:
            progress(until - done)
        done = until
        found.append((a.copy(), b.copy()))
    return found


def study(settings: Settings, *, progress: Callable[[int], None] | None = None) -> Result:
    """Simulate every batch size and step size, fit the coefficient, run the control, and judge.

    Args:
        settings: What to run.
        progress: Called with the number of steps that are done, of `settings.num_steps`.
    """
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done += steps
        if progress is not None:
            progress(done)

    rows: list[Row] = []
    for batch_size in settings.batch_sizes:
        for step_size in settings.step_sizes:
            rows += _rows(settings, batch_size, step_size, count)
    coefficients = {size: _extrapolated(settings, rows, size) for size in settings.batch_sizes}
    control = _control(settings)
    statements = judge(settings, rows, coefficients, control)
    return Result(rows=tuple(rows), coefficients=coefficients, control=control, statements=tuple(statements))


def _rows(settings: Settings, batch_size: int, step_size: float, count: Callable[[int], None]) -> list[Row]:
    problem, rows = settings.problem, []
    blocks = []
    for first in range(0, settings.trajectories, _BLOCK):
        n = min(_BLOCK, settings.trajectories - first)
        seed = seeds.derive(settings.seed, "sgd-flow", batch_size, repr(step_size), first)
        blocks.append(
            simulate(
                problem,
                np.full(n, problem.start),
                np.full(n, problem.logit / problem.start),
                step_size=step_size,
                times=settings.times,
                batch_size=batch_size,
                generator=np.random.default_rng(seed),
                progress=count,
            )
        )
    for place, time in enumerate(settings.times):
        a, b = (np.concatenate([block[place][which] for block in blocks]) for which in (0, 1))
        elapsed = steps_until(time, step_size) * step_size**2
        difference = a * a - b * b
        scale = batch_size / (4 * problem.variance * elapsed)
        rows.append(
            Row(
                batch_size=batch_size,
                step_size=step_size,
                time=elapsed,
                trace=_mean(problem.trace(a, b), UNIT, "trace of the Hessian where SGD is"),
                retracted_trace=_mean(problem.retracted_trace(difference), UNIT, "after gradient flow to a minimiser"),
                flow_trace=problem.flow_trace(elapsed, batch_size=batch_size, coefficient=settings.coefficient),
                coefficient=_mean(-scale * np.log(difference / problem.start_difference), "", "-log D(K)/D(0) B/(4vK)"),
            )
        )
    return rows


def _mean(values: Array, unit: str, method: str) -> Estimate:
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std(ddof=1) / math.sqrt(len(values))),
        samples=len(values),
        unit=unit,
        num_inputs=len(values),
        method=method,
    )


def _extrapolated(settings: Settings, rows: Sequence[Row], batch_size: int) -> Estimate:
    """Return the coefficient at step size 0: the polynomial through all step sizes, at the last time."""
    etas = settings.step_sizes
    last = [row for row in rows if row.batch_size == batch_size][len(settings.times) - 1 :: len(settings.times)]
    weights = [math.prod(other / (other - eta) for other in etas if other != eta) for eta in etas]
    pairs = [(weight, row.coefficient) for weight, row in zip(weights, last, strict=True)]
    return Estimate(
        value=math.fsum(weight * found.value for weight, found in pairs),
        stderr=math.hypot(*(weight * found.stderr for weight, found in pairs)),
        samples=settings.trajectories,
        unit="",
        num_inputs=settings.trajectories,
        method="extrapolated to step size 0",
    )


def _control(settings: Settings) -> tuple[float, ...]:
    """Return the trace at each time without label noise, from a point whose logit is off by `CONTROL_KICK`."""
    problem = settings.problem
    a = np.array([problem.start])
    b = (problem.logit + CONTROL_KICK) / a
    found = simulate(problem, a, b, step_size=settings.step_sizes[-1], times=settings.times)
    return tuple(float(problem.trace(*point)[0]) for point in found)


def judge(
    settings: Settings, rows: Sequence[Row], coefficients: Mapping[int, Estimate], control: Sequence[float]
) -> list[Statement]:
    """Return the statements with their verdicts; `settings.coefficient` is the one that is checked."""
    single = [row for row in rows if row.batch_size == settings.batch_sizes[0]]
    final = single[-len(settings.times) :]
    drift = max(abs(trace / control[0] - 1) for trace in control)
    lowered = 1 - final[-1].trace.value / final[0].trace.value
    return [
        _judge_trace(settings, final),
        _judge_limit(settings, single),
        *_judge_coefficients(settings, coefficients),
        Statement(
            text="Without label noise, with the exact conditionals as targets, nothing drifts along the minimisers.",
            found=f"from K = {settings.times[0]:g} to {settings.times[-1]:g} the trace changes by {drift:.1e} of its "
            f"value ({CONTROL_ALLOWED:.0e} allowed); with sampled answers it falls by {100 * lowered:.0f} %",
            shown=drift <= CONTROL_ALLOWED,
        ),
    ]


def _judge_trace(settings: Settings, final: Sequence[Row]) -> Statement:
    agrees = [
        abs(row.trace.value - row.flow_trace) <= max(ALLOWED * row.flow_trace, ERRORS * row.trace.stderr)
        for row in final
    ]
    off = [f"{percent(row.trace, row.flow_trace)} at K = {row.time:g}" for row in final]
    return Statement(
        text=f"SGD's mean trace after K / eta^2 steps is that of the flow -({settings.coefficient:g} / B) grad Tr at "
        "time K.",
        found=f"at eta = {final[0].step_size:g} and B = {final[0].batch_size} it is off by {', '.join(off)}; "
        f"{100 * ALLOWED:g} % or {ERRORS:g} standard errors allowed",
        shown=all(agrees),
    )


def _judge_limit(settings: Settings, single: Sequence[Row]) -> Statement:
    spread = [
        math.sqrt(math.fsum(row.error**2 for row in single if row.step_size == eta) / len(settings.times))
        for eta in settings.step_sizes
    ]
    falls = itertools.pairwise(zip(spread, settings.step_sizes, strict=True))
    found = [f"{100 * error:.2f} % at eta = {eta:g}" for error, eta in zip(spread, settings.step_sizes, strict=True)]
    return Statement(
        text="The error of SGD's mean trace against the flow's goes to 0 with the step size.",
        found=f"root mean square over K: {', '.join(found)}; it must fall faster than the root of the step size",
        shown=all(error < before * math.sqrt(eta / larger) for (before, larger), (error, eta) in falls),
    )


def _judge_coefficients(settings: Settings, coefficients: Mapping[int, Estimate]) -> list[Statement]:
    wanted = settings.coefficient
    fits = {size: abs(found.value - wanted) <= ERRORS * found.stderr for size, found in coefficients.items()}
    least, *others = coefficients
    shown = {size: rounded(-found.value, found.stderr) for size, found in coefficients.items()}
    return [
        Statement(
            text=f"The coefficient of the flow that SGD follows is -{wanted:g} / B.",
            found=f"B = {least}: {shown[least]} times 1 / B, extrapolated to eta = 0; {ERRORS:g} standard errors "
            "allowed",
            shown=fits[least],
        ),
        Statement(
            text="With B examples a step the flow is B times slower.",
            found="coefficient times B: "
            + ", ".join(f"{shown[size]} (B = {size})" for size in coefficients)
            + f"; {ERRORS:g} standard errors from {-wanted:g} allowed for each",
            shown=bool(others) and all(fits.values()),
        ),
    ]


def percent(found: Estimate, reference: float) -> str:
    """Return how far an estimate is off a reference, in percent of it, with its standard error.

    Example:
        >>> percent(Estimate(value=0.99, stderr=0.002, samples=9, unit="", num_inputs=9, method="m"), 1.0)
        '-1.00 ± 0.20 %'
    """
    return f"{rounded(100 * (found.value / reference - 1), 100 * found.stderr / reference)} %"


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "none"
