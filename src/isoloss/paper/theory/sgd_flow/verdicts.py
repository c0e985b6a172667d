"""The statements of Theorem 3.3, and the rows of the table of SGD against the flow that decide them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isoloss.paper.theory.statements import Statement
from isoloss.statistics.estimate import Estimate, rounded

ERRORS = 3.0  # standard errors that a statistical figure may be off
PRECISION = 0.1  # standard error of a coefficient, as a fraction of it, above which nothing can be concluded
CONTROL_ALLOWED = 1e-3  # change of the control's trace, as a fraction of what label noise takes off it


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
    allowed: float,
    start: float,
) -> list[Statement]:
    """Return the statements with their verdicts.

    The rows come for each batch size, each step size from large to small, and each time; `limits` are the same at step
    size 0, `control` the traces over time without label noise. `allowed` is the relative error of the mean trace at the
    smallest step size, `start` the trace at the start.
    """
    single = [row for row in rows if row.batch_size == rows[0].batch_size]
    by_step = [list(some) for _, some in itertools.groupby(single, key=lambda row: row.step_size)]
    at_zero = [row for row in limits if row.batch_size == rows[0].batch_size]
    last = {row.batch_size: row.coefficient for row in limits}  # the last time's, which come after the others
    statements = [
        _trace(by_step[-1], coefficient, allowed),
        _limit(by_step, at_zero),
        _coefficient(last, coefficient),
        _batch_sizes(last, coefficient),
        _parameters(by_step, at_zero),
        _control(control, start - by_step[-1][-1].trace.value),
    ]
    return [dataclasses.replace(statement, text=f"{name}: {statement.text}") for statement in statements]


def _trace(final: Sequence[Row], coefficient: float, allowed: float) -> Statement:
    agrees = [
        abs(row.trace.value - row.flow_trace) <= max(allowed * row.flow_trace, ERRORS * row.trace.stderr)
        for row in final
    ]
    return Statement(
        text=f"SGD's mean trace after K / eta^2 steps is near that of the flow -({coefficient:g} / B) grad Tr at time "
        "K.",
        evidence=f"at eta = {final[0].step_size:g} and B = {final[0].batch_size} it is off by {_errors(final)}; "
        f"{100 * allowed:g} % or {ERRORS:g} standard errors allowed",
        shown=all(agrees),
    )


def _limit(by_step: Sequence[Sequence[Row]], at_zero: Sequence[Row]) -> Statement:
    errors = [math.sqrt(math.fsum(row.error**2 for row in some) / len(some)) for some in by_step]
    agrees = [abs(row.trace.value - row.flow_trace) <= ERRORS * row.trace.stderr for row in at_zero]
    etas = [some[0].step_size for some in by_step]
    return Statement(
        text="the error of SGD's mean trace is one of the step size: it goes to 0 with it.",
        evidence=f"root mean square over K: {_over_steps([f'{100 * error:.2f} %' for error in errors], etas)}; "
        f"extrapolated to eta = 0: {_errors(at_zero)}; it must fall faster than the root of the step size, and be "
        f"within {ERRORS:g} standard errors of 0 there",
        shown=_falls(errors, etas) and all(agrees),
    )


def _coefficient(coefficients: dict[int, Estimate], wanted: float) -> Statement:
    least = next(iter(coefficients))
    return Statement(
        text=f"the coefficient of the flow that SGD follows is -{wanted:g} / B.",
        evidence=f"B = {least}: {_minus(coefficients[least])} times 1 / B, extrapolated to eta = 0; {ERRORS:g} "
        f"standard errors allowed, the error at most {100 * PRECISION:g} %",
        shown=_is_near(coefficients[least], wanted),
    )


def _batch_sizes(coefficients: dict[int, Estimate], wanted: float) -> Statement:
    return Statement(
        text="with B examples per step the flow is B times slower.",
        evidence="coefficient times B: "
        + ", ".join(f"{_minus(value)} (B = {size})" for size, value in coefficients.items())
        + f"; {ERRORS:g} standard errors from {-wanted:g} allowed for each of at least 2, each error at most "
        f"{100 * PRECISION:g} %",
        shown=len(coefficients) > 1 and all(_is_near(value, wanted) for value in coefficients.values()),
    )


def _parameters(by_step: Sequence[Sequence[Row]], at_zero: Sequence[Row]) -> Statement:
    last = [some[-1] for some in by_step]
    values, etas = [row.distance.value for row in last], [row.step_size for row in last]
    shown = [rounded(row.distance.value, row.distance.stderr) for row in last]
    limit = at_zero[-1].distance
    return Statement(
        text="not only the trace: SGD's parameters themselves become those of the flow.",
        evidence=f"mean squared distance over the squared distance of the flow from the start, at K = "
        f"{last[-1].time:g}: {_over_steps(shown, etas)}; extrapolated to eta = 0: "
        f"{rounded(limit.value, limit.stderr)}; it must fall faster than the "
        f"root of the step size, and be within {ERRORS:g} standard errors of 0 there",
        shown=_falls(values, etas) and abs(limit.value) <= ERRORS * limit.stderr,
    )


def _control(control: Sequence[float], fall: float) -> Statement:
    drift = max(abs(trace - control[0]) for trace in control) / abs(fall)
    return Statement(
        text="without label noise, with the exact conditionals as targets, nothing drifts along the minimizers.",
        evidence=f"from off the minimizers it is back on them at a trace of {control[0]:.6g}, which then changes by "
        f"{drift:.1e} of the {fall:.3g} that sampled answers take off in as long; {CONTROL_ALLOWED:.0e} allowed",
        shown=fall > 0 and drift <= CONTROL_ALLOWED,
    )


def _falls(errors: Sequence[float], etas: Sequence[float]) -> bool:
    """Return whether each error is less than the one before by more than the root of the step sizes."""
    pairs = itertools.pairwise(zip(errors, etas, strict=True))
    return all(error < before * math.sqrt(eta / larger) for (before, larger), (error, eta) in pairs)


def _is_near(estimate: Estimate, wanted: float) -> bool:
    return abs(estimate.value - wanted) <= ERRORS * estimate.stderr and estimate.stderr <= PRECISION * wanted


def _minus(estimate: Estimate) -> str:
    return rounded(-estimate.value, estimate.stderr)


def _errors(rows: Iterable[Row]) -> str:
    return ", ".join(f"{row.error_percent} at K = {row.time:g}" for row in rows)


def _over_steps(figures: Iterable[str], etas: Sequence[float]) -> str:
    return ", ".join(f"{figure} at eta = {eta:g}" for figure, eta in zip(figures, etas, strict=True))
