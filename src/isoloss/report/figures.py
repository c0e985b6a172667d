"""The charts of a page as matplotlib figures for a paper: vector PDF and PNG, the same bytes every time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from isoloss import files
from isoloss.report import data
from isoloss.report.data import KL, TRACE, Measure, Style

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "text.parse_math": False,  # a $ in a name is a $
    "pdf.fonttype": 42,  # letters stay letters: searchable, and accepted by publishers
    "figure.dpi": 100,
    "savefig.dpi": 200,
}
_PANEL = (3.1, 2.6)  # inches
_FOOT = 0.35  # inches, of the note


def scatter_pair(
    table: pl.DataFrame,
    accuracy: Measure,
    *,
    loss: Measure = KL,
    trace: Measure = TRACE,
    style: Style | None = None,
) -> Figure:
    """Pre-training loss against accuracy (left) and trace against accuracy (right); see `charts.scatter_pair`."""
    return scatter(table, ((loss, accuracy), (trace, accuracy)), style=style)


def scatter(table: pl.DataFrame, axes: Sequence[tuple[Measure, Measure]], *, style: Style | None = None) -> Figure:
    """Two measures of every checkpoint against each other, a panel for each pair; see `charts.scatter`."""
    frame = data.prepare(table, tuple(dict.fromkeys(measure for pair in axes for measure in pair)))
    style = style or Style.of(table)
    with _style():
        figure, panels = _panels(len(axes))
        for i, (ax, (across, up)) in enumerate(zip(panels, axes, strict=True)):
            rows, own = data.panel(frame, across, up)
            _, ends = data.panel(frame, up)
            for (_, group, size), run in _by_run(rows):
                colour, marker = _look(style, group, size)
                ax.plot(run[across.field], run[up.field], color=colour, alpha=0.35, linewidth=0.8)
                ax.errorbar(
                    run[across.field],
                    run[up.field],
                    xerr=_errors(run, across),
                    yerr=_errors(run, up),
                    fmt=marker,
                    color=colour,
                    elinewidth=0.8,
                )
            _x_axis(ax, across, own[across])
            _y_axis(ax, up, ends[up], titled=data.titled(axes, i))
        _legend(figure, style)
        _note(figure, "Bars: 95 % confidence intervals")
    return figure


def curves(table: pl.DataFrame, shown: Sequence[Measure], *, style: Style | None = None) -> Figure:
    """Each measure over the steps of pre-training, with bands of 95 % confidence; see `charts.curves`."""
    frame = data.prepare(table, shown)
    style = style or Style.of(table)
    with _style():
        figure, axes = _panels(len(shown))
        for ax, measure in zip(axes, shown, strict=True):
            rows, ends = data.panel(frame, measure)
            for (_, group, size), run in _by_run(rows):
                colour, marker = _look(style, group, size)
                low, high = run[f"{measure.field}_low"], run[f"{measure.field}_high"]
                ax.fill_between(run["step"], low, high, color=colour, alpha=0.18, linewidth=0)
                ax.errorbar(
                    run["step"],
                    run[measure.field],
                    yerr=_errors(run, measure),
                    fmt=marker,
                    color=colour,
                    elinewidth=0.6,
                )
                ax.plot(run["step"], run[measure.field], color=colour)
            ax.set_xlim(*data.step_limits(frame))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
            ax.locator_params(axis="x", nbins=5)
            ax.set_xlabel("Step")
            _y_axis(ax, measure, ends[measure])
        _legend(figure, style)
        _note(figure, "Bars and bands: 95 % confidence intervals")
    return figure


def sizes(table: pl.DataFrame, shown: Sequence[Measure], *, style: Style | None = None) -> Figure:
    """Each measure against the number of parameters; see `charts.sizes`."""
    frame = data.prepare(table, shown)
    style = style or Style.of(table)
    with _style():
        figure, axes = _panels(len(shown))
        for ax, measure in zip(axes, shown, strict=True):
            rows, ends = data.panel(frame, measure)
            for (group,), means in data.size_means(rows, measure).group_by("group", maintain_order=True):
                colour = style.colours[group] if style.colour == "group" else data.COLOURS[-1]
                ax.plot(means["parameters"], means[measure.field], color=colour, alpha=0.6, linewidth=1)
            for (_, group, size), run in _by_run(rows):
                colour, marker = _look(style, group, size)
                errors = _errors(run, measure)
                ax.errorbar(
                    run["parameters"], run[measure.field], yerr=errors, fmt=marker, color=colour, elinewidth=0.8
                )
            _log_axis(ax, "x", data.parameter_limits(frame), _thousands)
            ax.set_xlabel("Parameters")
            _y_axis(ax, measure, ends[measure])
        _legend(figure, style)
        _note(figure, "Bars: 95 % confidence intervals; lines: a group's means")
    return figure


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write a figure as `<path>.pdf` and `<path>.png`, each whole or not at all.

    Args:
        figure: The figure.
        path: Folder and name, without an ending.

    Returns:
        The two files: PDF, PNG.

    Raises:
        IsolossError: The folder cannot be written.
    """
    # no clock and no version in the files: the same figure gives the same bytes
    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "png": {"Software": None},
    }
    written = []
    with _style():
        for kind, entries in metadata.items():
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=entries)
            file = path.with_name(f"{path.name}.{kind}")
            files.write_bytes(file, buffer.getvalue())
            written.append(file)
    return written[0], written[1]


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Matplotlib's defaults with our settings on top, whatever the caller has set, and the caller's back at the end."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = data.columns(count)
    rows = -(-count // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows + _FOOT))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", wspace=0.05, hspace=0.06)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, axes


def _by_run(rows: pl.DataFrame) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    return iter(rows.group_by("run", "group", "size", maintain_order=True))


def _look(style: Style, group: str, size: str) -> tuple[str, str]:
    values = {"group": group, "size": size}
    return style.colours[values[style.colour]], style.markers[values[style.marker]][1]


def _errors(run: pl.DataFrame, measure: Measure) -> list[list[float]]:
    value = run[measure.field]
    return [(value - run[f"{measure.field}_low"]).to_list(), (run[f"{measure.field}_high"] - value).to_list()]


def _x_axis(ax: Axes, measure: Measure, ends: tuple[float, float]) -> None:
    ax.set_xlabel(measure.axis_title)
    ax.set_xlim(*ends)
    if measure.log:
        _log_axis(ax, "x", ends, _plain)
    else:
        ax.locator_params(axis="x", nbins=6)


def _y_axis(ax: Axes, measure: Measure, ends: tuple[float, float], *, titled: bool = True) -> None:
    ax.set_ylabel(measure.axis_title if titled else "")
    ax.set_ylim(*ends)
    if measure.log:
        _log_axis(ax, "y", ends, _plain)


def _log_axis(ax: Axes, which: str, ends: Sequence[float], label: Any) -> None:
    ax.set(**{f"{which}scale": "log"})
    ax.set(**{f"{which}lim": tuple(ends)})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(data.log_ticks(ends)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(label))


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _thousands(value: float, _: int) -> str:
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:g}{letter}"
    return f"{value:g}"


def _legend(figure: Figure, style: Style) -> None:
    entries = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in style.colours.items()]
    if len(style.markers) > 1:
        for name, (_, marker) in style.markers.items():
            entries.append(Line2D([], [], color="#444444", marker=marker, linestyle="none", label=name))
    _legend_above(figure, data.columns(len(entries), 6), handles=entries)


def _legend_above(figure: Figure, most: int, **entries: Any) -> None:
    """Put the legend above the panels, in as many columns, at most `most`, as have room; the figure grows by it."""
    for columns in range(most, 0, -1):
        legend = figure.legend(loc="outside upper left", ncols=columns, frameon=False, **entries)
        place = legend.get_window_extent()
        if columns == 1 or place.width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + place.height / figure.dpi)


def _note(figure: Figure, text: str) -> None:
    """Say below the panels what their bars, bands and lines are."""
    figure.supxlabel(text, x=0.99, ha="right", fontsize=7, color="#555555")
