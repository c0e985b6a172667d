"""The figure of a comparison: the trace of each model against its loss, with 95 % intervals."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.flatness.differences import Comparison
from isoloss.report import figures
from isoloss.report.data import COLOURS, MARKERS, TRACE
from isoloss.statistics.estimate import Estimate

_SIZE = (4.6, 3.2)  # inches, without the legend
_NAME = 50  # letters of a name on a line, such as fit the figure
_WIDE = 4.0  # ratio of the largest trace to the smallest, from which the axis is logarithmic
_METADATA: dict[str, dict[str, Any]] = {  # no clock and no version in the files
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}


def trace_against_loss(found: Comparison, names: Mapping[str, str] | None = None) -> Figure:
    """Draw each model as a point: its loss to the right, its trace upwards; bars are 95 % intervals.

    Where the traces lie far apart their axis is logarithmic.

    Args:
        found: The comparison.
        names: What to call the models; None: by their own names.
    """
    labels = {model.name: model.name for model in found.models} | dict(names or {})
    traces = [model.trace.value for model in found.models]
    with figures._style():
        figure, axes = figures._panels(1)
        figure.set_size_inches(_SIZE)
        ax = axes[0]
        for place, model in enumerate(found.models):
            ax.errorbar(
                [model.loss.value],
                [model.trace.value],
                xerr=_half(model.loss),
                yerr=_half(model.trace),
                fmt=MARKERS[place // len(COLOURS) % len(MARKERS)][1],
                color=COLOURS[place % len(COLOURS)],
                elinewidth=1.0,
                markersize=6,
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=textwrap.fill(labels[model.name], _NAME),
            )
        ax.margins(0.12)
        ax.set_xlabel("Loss (nats per token)")
        ax.set_ylabel(TRACE.axis_title)
        if max(traces) > _WIDE * min(traces):
            _logarithmic(ax)
        figures._legend_above(figure, min(len(traces), 3))
        figures._note(figure, "Bars: 95 % confidence intervals")
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a figure to a `.png`, `.svg` or `.pdf` file, whole or not at all, the same bytes every time.

    Raises:
        IsolossError: The name has another ending, or the folder cannot be written.
    """
    kind = file.suffix.lower().removeprefix(".")
    if kind not in _METADATA:
        raise IsolossError(f"the figure is {file}; its name must end in .png, .svg or .pdf")
    buffer = io.BytesIO()
    with figures._style():
        mpl.rcParams["svg.hashsalt"] = "isoloss"
        figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    files.write_bytes(file, buffer.getvalue())


def _half(estimate: Estimate) -> float:
    return estimate.ci95[1] - estimate.value


def _logarithmic(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
