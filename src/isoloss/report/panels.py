"""Charts of plain series: points with error bars and curves in panels, each panel with a legend of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from isoloss.report import charts, data

INK = "#444444"  # of what is no series of its own, e.g. a control


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a panel."""

    title: str  # what it shows, with its unit
    log: bool = False  # whether it is logarithmic; the values must then be above 0
    ticks: Sequence[float] = ()  # where its ticks are; empty: chosen


@dataclass(frozen=True, kw_only=True)
class Series:
    """What is drawn in one color under one name."""

    name: str  # in the legend
    color: str  # hexadecimal
    points: Sequence[tuple[float, float]] = ()  # (x, y) drawn as markers
    errors: Sequence[float] = ()  # half the length of each point's vertical bar; empty: no bars
    x_errors: Sequence[float] = ()  # half the length of each point's horizontal bar; empty: no bars
    curve: Sequence[tuple[float, float]] = ()  # (x, y) joined by a line
    marker: str = "circle"  # Vega's name of the marker


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel."""

    x: Axis  # the horizontal axis
    y: Axis  # the vertical axis
    series: Sequence[Series] = field(default_factory=tuple)  # what is drawn, in the order of the legend
    title: str = ""  # above the panel
    rule: float | None = None  # A thin horizontal line at this value


def draw(panels: Sequence[Panel], *, note: str) -> alt.ConcatChart:
    """Return panels beside each other; a series without points has a line as its legend's symbol."""
    chart = charts.concat([_panel(panel) for panel in panels], note)
    done: alt.ConcatChart = chart.resolve_scale(color="independent", shape="independent")
    return done


def _panel(panel: Panel) -> alt.LayerChart:
    points = [row for series in panel.series for row in _points(series)]
    curves = [{"name": series.name, "x": x, "y": y} for series in panel.series for x, y in series.curve]
    drawn = [*points, *curves, *([] if panel.rule is None else [{"y": panel.rule}])]
    x, x_ends = _channel(alt.X, "x", panel.x, drawn)
    y, y_ends = _channel(alt.Y, "y", panel.y, drawn)
    for row in points:  # a bar that reaches 0 on a logarithmic axis runs to the end of the axis
        for name, axis, ends in (("x", panel.x, x_ends), ("y", panel.y, y_ends)):
            if axis.log and row[f"{name}_low"] <= 0:
                row[f"{name}_low"] = ends[0]
    names = [series.name for series in panel.series]
    legend = alt.Legend(title=None, labelExpr="split(datum.label, '\\n')")
    color = alt.Color("name:N", legend=legend, scale=alt.Scale(domain=names, range=[s.color for s in panel.series]))
    markers = [series.marker if series.points else "stroke" for series in panel.series]
    shape = alt.Shape("name:N", legend=legend, scale=alt.Scale(domain=names, range=markers))
    base = alt.Chart(alt.InlineData(values=points)).encode(color=color)
    layers = [
        alt.Chart(alt.InlineData(values=curves))
        .mark_line(strokeWidth=charts.LINE)
        .encode(x, y, color=color, order="x:Q"),
        base.mark_rule(strokeWidth=charts.RULE).encode(x, y=charts.of_field(y, "y_low"), y2="y_high"),
        base.mark_rule(strokeWidth=charts.RULE).encode(y, x=charts.of_field(x, "x_low"), x2="x_high"),
        base.mark_point(filled=False, fill="white", opacity=1, size=charts.POINT, strokeWidth=1.6).encode(
            x, y, shape=shape
        ),
    ]
    if panel.rule is not None:
        line = (
            alt.Chart(alt.InlineData(values=[{"y": panel.rule}]))
            .mark_rule(color=INK, strokeWidth=charts.RULE)
            .encode(y)
        )
        layers.insert(0, line)
    done: alt.LayerChart = alt.LayerChart(layer=layers)
    return done.properties(title=panel.title) if panel.title else done


def _points(series: Series) -> list[dict[str, Any]]:
    zeros = [0.0] * len(series.points)
    bars = zip(series.points, series.errors or zeros, series.x_errors or zeros, strict=True)
    rows = []
    for (x, y), up, across in bars:
        ends = {"x_low": x - across, "x_high": x + across, "y_low": y - up, "y_high": y + up}
        rows.append({"name": series.name, "x": x, "y": y, **ends})
    return rows


def _channel(channel: Any, name: str, axis: Axis, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, tuple[float, float]]:
    """Return an encoding whose axis holds all points, bars and curves with a little room, and the ends of the axis."""
    values = [row[key] for row in rows for key in (name, f"{name}_low", f"{name}_high") if key in row]
    ends = data.ends([value for value in values if value > 0] if axis.log else values, log=axis.log)
    return charts.axis(channel, name, axis.title, ends, log=axis.log, ticks=axis.ticks), ends
