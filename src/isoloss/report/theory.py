"""Figures of the theory's programs: the gap of Bartlett's identity over the KL, and SGD beside its flow."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from isoloss.report import figures
from isoloss.report.data import COLOURS, MARKERS
from isoloss.theory import bartlett, sgd_flow

_ERRORS: dict[str, Any] = {"elinewidth": 0.8, "markersize": 4.5}


def bartlett_gap(found: bartlett.Result) -> Figure:
    """Draw the relative gap of each model against the KL, both axes logarithmic; bars are standard errors.

    The minimisers themselves, whose KL is 0, are left out. The grey line has the slope of a square root.
    """
    with figures._style():
        figure, (ax,) = figures._panels(1)
        figure.set_size_inches(4.6, 3.4)
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
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("KL from the true conditionals (nats per token)")
        ax.set_ylabel("|covariance - Hessian| / |Hessian|")
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def sgd_and_flow(settings: sgd_flow.Settings, found: sgd_flow.Result) -> Figure:
    """Draw traces over time, for each batch size at the smallest step size (left) and each step size (right).

    Lines are the flow, points are SGD with its standard errors, crosses the control without label noise.
    """
    smallest, least = settings.step_sizes[-1], settings.batch_sizes[0]
    by_batch = {
        f"B = {size}": [row for row in found.rows if row.batch_size == size and row.step_size == smallest]
        for size in settings.batch_sizes
    }
    by_step = {
        f"eta = {eta:g}": [row for row in found.rows if row.batch_size == least and row.step_size == eta]
        for eta in settings.step_sizes
    }
    with figures._style():
        figure, (left, right) = figures._panels(2)
        times = np.linspace(0, settings.times[-1], 101)
        for place, (label, rows) in enumerate(by_batch.items()):
            colour = COLOURS[place % len(COLOURS)]
            traces = [
                settings.problem.flow_trace(time, batch_size=rows[0].batch_size, coefficient=settings.coefficient)
                for time in times
            ]
            left.plot(times, traces, color=colour)
            _points(left, rows, colour, "o", label)
        left.plot(settings.times, found.control, "x", color="#444444", label="no label noise")
        for place, (label, rows) in enumerate(by_step.items()):
            _errors(right, rows, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)][1], label)
        right.axhline(0, color="#444444", linewidth=0.8)
        left.set_xlabel("Time K = steps x eta^2")
        right.set_xlabel("Time K = steps x eta^2")
        left.set_ylabel(f"Trace of the Hessian, eta = {smallest:g}")
        right.set_ylabel(f"SGD less flow (%), B = {least}")
        left.legend(handles=[*left.get_legend_handles_labels()[0], Line2D([], [], color="#444444", label="flow")])
        right.legend()
    return figure


def _points(ax: Axes, rows: list[sgd_flow.Row], colour: str, marker: str, label: str) -> None:
    values = [row.trace.value for row in rows]
    errors = [row.trace.stderr for row in rows]
    ax.errorbar([row.time for row in rows], values, yerr=errors, fmt=marker, color=colour, label=label, **_ERRORS)


def _errors(ax: Axes, rows: list[sgd_flow.Row], colour: str, marker: str, label: str) -> None:
    values = [100 * row.error for row in rows]
    errors = [100 * row.trace.stderr / row.flow_trace for row in rows]
    ax.errorbar([row.time for row in rows], values, yerr=errors, fmt=marker, color=colour, label=label, **_ERRORS)
