"""SGD against the flow: each batch size and step size, the limit of small steps, and a control without label noise."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.sgd_flow.masked_lm import MaskedLM
from isoloss.paper.theory.sgd_flow.model import Model, mean, simulate, steps_until
from isoloss.paper.theory.sgd_flow.two_parameters import TwoParameters
from isoloss.paper.theory.sgd_flow.verdicts import Row, judge
from isoloss.paper.theory.statements import Statement, counter
from isoloss.statistics.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `study` runs."""

    model: Model
    step_sizes: tuple[float, ...]  # at least 2, from large to small
    times: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)  # increasing
    batch_sizes: tuple[int, ...] = (1, 2, 4)  # increasing
    trajectories: int  # for each step size and batch size, at least 2
    coefficient: float = 0.25  # the one to check; that of the theorem, for one example a step
    allowed: float  # relative error of the mean trace at the smallest step size that is allowed
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
        with np.errstate(over="ignore"):  # infinity is too steep as well
            steepest = float(self.model.trace(self.model.minimizer[None])[0])
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
    """Return the settings for `TwoParameters`; `changes` are other fields of `Settings` than the default ones."""
    given = {"step_sizes": (0.1, 0.05, 0.025), "trajectories": 65536, "allowed": 0.01, **changes}
    return Settings(model=TwoParameters(probability, start), **given)


def masked_lm(*, seed: int = 0, **changes: Any) -> Settings:
    """Return the settings for the masked language model of 88 parameters, which `seed` decides; see `MaskedLM`."""
    given = {"step_sizes": (0.05, 0.025, 0.0125), "trajectories": 1024, "allowed": 0.05, **changes}
    return Settings(model=MaskedLM.random(seed=seed), seed=seed, **given)


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
    rule = {"coefficient": settings.coefficient, "allowed": settings.allowed, "start": settings.flow_trace(0.0, 1)}
    statements = judge(settings.model.name, rows, limits, control, **rule)
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
                coefficient=_times(reached, batch_size / elapsed),
                distance=mean(squares, "", "squared distance from the flow over the flow's from the start"),
            )
        )
    return rows


def _limit(settings: Settings, rows: Sequence[Row], time: float) -> Row:
    """Return what the rows of all step sizes say at step size 0: by the polynomial through all of them.

    The traces are extrapolated as fractions of the flow's, whose times differ where no whole number of steps fits.
    """
    flow_trace = settings.flow_trace(time, rows[0].batch_size)
    fractions = extrapolated(settings.step_sizes, [_times(row.trace, 1 / row.flow_trace) for row in rows])
    return Row(
        batch_size=rows[0].batch_size,
        step_size=0.0,
        time=time,
        trace=_times(fractions, flow_trace),
        flow_trace=flow_trace,
        coefficient=extrapolated(settings.step_sizes, [row.coefficient for row in rows]),
        distance=extrapolated(settings.step_sizes, [row.distance for row in rows]),
    )


def extrapolated(step_sizes: Sequence[float], estimates: Sequence[Estimate]) -> Estimate:
    """Return the value at step size 0 of the polynomial through estimates at some step sizes.

    Example:
        >>> at = lambda value: Estimate(value=value, stderr=0.1, samples=9, unit="", num_predictions=9, method="m")
        >>> round(extrapolated([0.2, 0.1], [at(1.4), at(1.2)]).value, 9)
        1.0
    """
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


def _times(estimate: Estimate, factor: float) -> Estimate:
    """Return an estimate times a number without unit."""
    return dataclasses.replace(estimate, value=factor * estimate.value, stderr=abs(factor) * estimate.stderr)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "none"
