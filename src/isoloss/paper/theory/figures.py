"""Figures of the theory's programs: Bartlett's gap over the KL, SGD beside its flow, solutions of the brackets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from isoloss.paper.theory import bartlett
from isoloss.paper.theory.bracket_language import study
from isoloss.paper.theory.bracket_language.heads import sign_missing
from isoloss.paper.theory.sgd_flow.study import Result, Settings
from isoloss.report import figures
from isoloss.report.data import COLOURS, MARKERS

_BARS = "Bars: standard errors"
_ERRORS: dict[str, Any] = {"elinewidth": 0.8, "markersize": 4.5}


def bartlett_gap(found: bartlett.Result) -> Figure:
    """Draw the relative gap of each model against the KL, both axes logarithmic; bars are standard errors.

    The minimisers themselves, whose KL is 0, are left out. The grey line has the slope of a square root.
    """
    with figures._style():
        figure, (ax,) = figures._panels(1)
        figure.set_size_inches(4.6, 3.2)
        rows = [row for row in found.rows if row.radius > 0]
        for place, name in enumerate(dict.fromkeys(row.model for row in rows)):
            own = [row for row in rows if row.model == name]
            ax.errorbar(
                [row.kl_nats for row in own],
                [row.gap for row in own],
                yerr=[row.gap_stderr for row in own],
                fmt=MARKERS[place][1],
                color=COLOURS[place],
                label=name,
                **_ERRORS,
            )
        ends = np.array([min(row.kl_nats for row in rows), max(row.kl_nats for row in rows)])
        ax.plot(ends, rows[0].gap * np.sqrt(ends / rows[0].kl_nats), color=COLOURS[-1], label="square root of the KL")
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            _plain_powers(axis)
        ax.set_xlabel("KL from the true conditionals (nats per token)")
        ax.set_ylabel("|covariance - Hessian| / |Hessian|")
        figures._legend_above(figure, 3)
        figures._note(figure, _BARS)
    return figure


def sgd_and_flow(found: Sequence[tuple[Settings, Result]]) -> Figure:
    """Draw traces over time, a row a model: each batch size at the smallest step size, and errors at each step size.

    Lines are the flow, points are SGD with its standard errors, crosses the control without label noise.
    """
    with figures._style():
        figure, axes = figures._panels(2 * len(found))
        for (settings, result), left, right in zip(found, axes[::2], axes[1::2], strict=True):
            _traces(left, settings, result)
            _step_errors(right, settings, result)
        figures._note(figure, _BARS)
    return figure


def _traces(ax: Axes, settings: Settings, found: Result) -> None:
    smallest = settings.step_sizes[-1]
    times = np.linspace(0, settings.times[-1], 101)
    for place, size in enumerate(settings.batch_sizes):
        colour = COLOURS[place % len(COLOURS)]
        ax.plot(times, [settings.flow_trace(float(time), size) for time in times], color=colour)
        rows = [row for row in found.rows if row.batch_size == size and row.step_size == smallest]
        ax.errorbar(
            [row.time for row in rows],
            [row.trace.value for row in rows],
            yerr=[row.trace.stderr for row in rows],
            fmt="o",
            color=colour,
            label=f"B = {size}",
            **_ERRORS,
        )
    ax.plot((0.0, *settings.times), found.control, "x", color="#444444", label="no label noise")
    ax.set_title(settings.model.name)
    ax.set_xlabel("Time K = steps x eta^2")
    ax.set_ylabel(f"Trace of the Hessian (nats), eta = {smallest:g}")
    handles = [*ax.get_legend_handles_labels()[0], Line2D([], [], color="#444444", label="flow")]
    ax.legend(handles=handles, fontsize="x-small")


def _step_errors(ax: Axes, settings: Settings, found: Result) -> None:
    least = settings.batch_sizes[0]
    for place, eta in enumerate((*settings.step_sizes, 0.0)):
        rows = [row for row in (*found.rows, *found.limits) if (row.batch_size, row.step_size) == (least, eta)]
        ax.errorbar(
            [row.time for row in rows],
            [100 * row.error for row in rows],
            yerr=[100 * row.trace.stderr / row.flow_trace for row in rows],
            fmt=MARKERS[place % len(MARKERS)][1],
            color=COLOURS[place % len(COLOURS)],
            label=f"eta = {eta:g}" if eta else "eta to 0",
            **_ERRORS,
        )
    ax.axhline(0, color="#444444", linewidth=0.8)
    ax.set_title(settings.model.name)
    ax.set_xlabel("Time K = steps x eta^2")
    ax.set_ylabel(f"SGD less flow (%), B = {least}")
    ax.set_ylim(bottom=1.6 * ax.get_ylim()[0])  # room for the legend below the points
    ax.legend(loc="lower right", ncols=2, fontsize="x-small")


def bracket_solutions(found: study.Result) -> Figure:
    """Draw the descents on the trace, how often heads fail, and the random features that a loss needs.

    Bars are standard errors. In the middle the lines are the probabilities that a training set lacks a sign, the grey
    one the theorem's 2^-n, and a point is missing where no head failed; on the right the line is the predicted width at
    loss 0.
    """
    with figures._style():
        figure, (left, middle, right) = figures._panels(3)
        heads = [row for row in found.heads if row.solution == study.TWO]
        sizes = np.array([row.samples for row in heads])
        line = np.arange(sizes.min(), sizes.max() + 1)
        for place, (length, path) in enumerate(found.paths.items()):
            colour, label = COLOURS[place], f"T = {length}"
            left.plot([point.step for point in path], [point.ratio for point in path], color=colour, label=label)
            own = [row for row in heads if row.length == length]
            middle.plot(line, [sign_missing(length, n) for n in line.tolist()], color=colour)
            middle.errorbar(
                [row.samples for row in own],
                [row.failures for row in own],
                yerr=[row.failures_stderr for row in own],
                fmt="o",
                color=colour,
                label=label,
                **_ERRORS,
            )
        left.axhline(1, color="#444444", linewidth=0.8)
        middle.plot(line, 0.5**line, color=COLOURS[-1], label="2^-n")
        lengths = [row.length for row in found.widths]
        right.plot(lengths, [row.predicted for row in found.widths], color=COLOURS[-1], label="predicted")
        for place, loss in enumerate(study.LOSSES):
            right.errorbar(
                lengths,
                [row.widths[place] for row in found.widths],
                yerr=[row.widths_stderr[place] for row in found.widths],
                fmt=MARKERS[place][1],
                color=COLOURS[place],
                label=f"loss {loss:g}",
                **_ERRORS,
            )
        left.set(xlabel="Step of the descent", ylabel="Trace of the Hessian / bound")
        middle.set(xlabel="Strings in a training set, n", ylabel="Share of heads that fail", yscale="log")
        middle.set_xticks(sorted({row.samples for row in heads}))
        right.set(xlabel="Brackets in a sentence, T", ylabel="Random features", yscale="log", xticks=lengths)
        _plain_powers(middle.yaxis)
        _plain_powers(right.yaxis)
        for ax in (left, middle, right):
            ax.legend()
        figures._note(figure, f"{_BARS}; coloured lines in the middle: how probably a training set lacks a sign")
    return figure


def _plain_powers(axis: Axis) -> None:
    """Mark powers of ten on a logarithmic axis, as numbers."""
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
