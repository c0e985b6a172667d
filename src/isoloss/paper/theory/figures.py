"""Figures of the theory's programs: Bartlett's gap over the KL, SGD beside its flow, solutions of the brackets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from isoloss.paper.theory import bartlett, brackets
from isoloss.paper.theory.sgd_flow import Result, Settings
from isoloss.report.charts import Spec
from isoloss.report.data import COLORS, MARKERS
from isoloss.report.panels import INK, Axis, Panel, Series, draw

GRAY = COLORS[-1]
_BARS = "Bars: standard errors"
_TIME = Axis(title="Time K = steps × η²")


def bartlett_gap(result: bartlett.Result) -> Spec:
    """Draw the relative gap of each model against the KL, both axes logarithmic; bars are standard errors.

    The minimizers themselves, whose KL is 0, are left out. The gray line has the slope of a square root.
    """
    rows = [row for row in result.rows if row.radius > 0]
    series = [
        _points(name, index, [(row.kl_nats, row.gap, row.gap_stderr) for row in rows if row.model == name])
        for index, name in enumerate(dict.fromkeys(row.model for row in rows))
    ]
    kls = [row.kl_nats for row in rows]
    # through the first model's point at the least radius, where the square root holds best
    root = [(kl, rows[0].gap * math.sqrt(kl / rows[0].kl_nats)) for kl in (min(kls), max(kls))]
    series.append(Series(name="square root of the KL", color=GRAY, curve=root))
    panel = Panel(
        x=Axis(title="KL from the true conditionals (nats per token)", log=True),
        y=Axis(title="|covariance − Hessian| / |Hessian|", log=True),
        series=series,
    )
    return draw([panel], note=_BARS)


def sgd_and_flow(results: Sequence[tuple[Settings, Result]]) -> Spec:
    """Draw traces over time, a row per model: each batch size at the smallest step size, and errors at each step size.

    Lines are the flow, points are SGD with its standard errors, crosses the control without label noise.
    """
    panels = [draw_one(*pair) for pair in results for draw_one in (_traces, _step_errors)]
    return draw(panels, note=f"{_BARS}; lines: the flow, at every η; points: SGD")


def _points(
    name: str, index: int, points: Sequence[tuple[float, float, float]], *, marked: bool = True, **more: Any
) -> Series:
    """Return a series of x, y and the standard error of y, in the color and, if marked, the marker of its number."""
    return Series(
        name=name,
        color=COLORS[index % len(COLORS)],
        marker=MARKERS[index % len(MARKERS)] if marked else "circle",
        points=[(x, y) for x, y, _ in points],
        errors=[error for *_, error in points],
        **more,
    )


def _traces(settings: Settings, result: Result) -> Panel:
    smallest = settings.step_sizes[-1]
    times = [settings.times[-1] * i / 100 for i in range(101)]
    series = []
    for index, size in enumerate(settings.batch_sizes):
        rows = [row for row in result.rows if row.batch_size == size and row.step_size == smallest]
        points = [(row.time, row.trace.value, row.trace.stderr) for row in rows]
        curve = [(time, settings.flow_trace(time, size)) for time in times]
        series.append(_points(f"B = {size}", index, points, marked=False, curve=curve))
    control = list(zip((0.0, *settings.times), result.control, strict=True))
    series.append(Series(name="no label noise, started off the minimizers", color=INK, points=control, marker="cross"))
    return Panel(
        x=_TIME,
        y=Axis(title=f"Trace of the Hessian (nats), η = {smallest:.3g}"),
        series=series,
        title=settings.model.name,
    )


def _step_errors(settings: Settings, result: Result) -> Panel:
    least = settings.batch_sizes[0]
    series = []
    for index, eta in enumerate((*settings.step_sizes, 0.0)):
        rows = [row for row in (*result.rows, *result.limits) if (row.batch_size, row.step_size) == (least, eta)]
        points = [(row.time, 100 * row.error, 100 * row.trace.stderr / row.flow_trace) for row in rows]
        series.append(_points(f"η = {eta:.3g}" if eta else "η to 0", index, points))
    y = Axis(title=f"SGD minus flow (%), B = {least}")
    return Panel(x=_TIME, y=y, series=series, title=settings.model.name, rule=0.0)


def bracket_solutions(result: brackets.Result) -> Spec:
    """Draw the descents on the trace, how often heads fail, and the random features that a loss needs.

    Bars are standard errors. In the middle the lines are the probabilities that a training set lacks a sign, the gray
    one the theorem's 2^-n, and a point is missing where no head failed; on the right the line is the predicted width at
    loss 0.
    """
    heads = [row for row in result.heads if row.solution == brackets.TWO]
    sizes = sorted({row.samples for row in heads})
    line = range(sizes[0], sizes[-1] + 1)
    descents, failures = [], []
    for index, (length, path) in enumerate(result.paths.items()):
        name = f"T = {length}"
        descents.append(_points(name, index, [], marked=False, curve=[(point.step, point.ratio) for point in path]))
        # 0 has no place on the logarithmic axis
        failing_rows = [row for row in heads if row.length == length and row.failures > 0]
        points = [(row.samples, row.failures, row.failures_stderr) for row in failing_rows]
        curve = [(n, brackets.sign_missing(length, n)) for n in line]
        failures.append(_points(name, index, points, marked=False, curve=curve))
    failures.append(Series(name="2^-n", color=GRAY, curve=[(n, 0.5**n) for n in line]))
    predicted = [(row.length, float(row.predicted)) for row in result.widths]
    widths = [Series(name="predicted", color=GRAY, curve=predicted)]
    for index, loss in enumerate(brackets.LOSSES):
        needed = [(row.length, row.widths[index], row.widths_stderr[index]) for row in result.widths]
        widths.append(_points(f"loss {loss:g}", index, needed))
    step, ratio = Axis(title="Step of the descent"), Axis(title="Trace of the Hessian / bound")
    strings = Axis(title="Strings in a training set, n", ticks=sizes)
    failing = Axis(title="Fraction of heads that fail", log=True)
    in_sentence = Axis(title="Brackets in a sentence, T", ticks=[row.length for row in result.widths])
    panels = [
        Panel(x=step, y=ratio, series=descents, rule=1.0),
        Panel(x=strings, y=failing, series=failures),
        Panel(x=in_sentence, y=Axis(title="Random features", log=True), series=widths),
    ]
    return draw(panels, note=f"{_BARS}; colored lines in the middle: how probably a training set lacks a sign")
