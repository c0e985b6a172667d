"""Charts of plain series: points with error bars and curves in panels, each panel with a legend of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isoloss.report import charts, data
from isoloss.report.charts import Spec, layer, nominal

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


def draw(panels: Sequence[Panel], *, note: str) -> Spec:
    """Return panels beside each other; a series without points has a line as its legend's symbol."""
    chart = charts.concat([_panel(panel) for panel in panels], note)
    # panels may give one name two colors, so each has scales and legends of its own
    return {**chart, "resolve": {"scale": {"color": "independent", "shape": "independent"}}}


def _panel(panel: Panel) -> Spec:
    points = [row for series in panel.series for row in _points(series)]
    curves = [{"name": series.name, "x": x, "y": y} for series in panel.series for x, y in series.curve]
    drawn = [*points, *curves, *([] if panel.rule is None else [{"y": panel.rule}])]
    x, x_ends = _channel("x", panel.x, drawn)
    y, y_ends = _channel("y", panel.y, drawn)
    # as in `data.panel`, a bar that reaches 0 on a logarithmic axis runs to the end of the axis
    for row in points:
        for name, axis, ends in (("x", panel.x, x_ends), ("y", panel.y, y_ends)):
            if axis.log and row[f"{name}_low"] <= 0:
                row[f"{name}_low"] = ends[0]
    names = [series.name for series in panel.series]
    legend = {"title": None, "labelExpr": "split(datum.label, '\\n')"}
    color = nominal("name", legend=legend, scale={"domain": names, "range": [s.color for s in panel.series]})
    markers = [series.marker if series.points else "stroke" for series in panel.series]
    shape = nominal("name", legend=legend, scale={"domain": names, "range": markers})
    bar = {"type": "rule", "strokeWidth": charts.RULE}
    point = {"type": "point", "filled": False, "fill": "white", "opacity": 1, "size": charts.POINT, "strokeWidth": 1.6}
    layers = [
        layer(
            curves,
            {"type": "line", "strokeWidth": charts.LINE},
            x=x,
            y=y,
            color=color,
            order={"field": "x", "type": "quantitative"},
        ),
        layer(points, bar, x=x, y={**y, "field": "y_low"}, y2={"field": "y_high"}, color=color),
        layer(points, bar, y=y, x={**x, "field": "x_low"}, x2={"field": "x_high"}, color=color),
        layer(points, point, x=x, y=y, color=color, shape=shape),
    ]
    if panel.rule is not None:
        layers.insert(0, layer([{"y": panel.rule}], {**bar, "color": INK}, y=y))
    return {"layer": layers, **({"title": panel.title} if panel.title else {})}


def _points(series: Series) -> list[dict[str, Any]]:
    zeros = [0.0] * len(series.points)
    bars = zip(series.points, series.errors or zeros, series.x_errors or zeros, strict=True)
    rows = []
    for (x, y), up, across in bars:
        ends = {"x_low": x - across, "x_high": x + across, "y_low": y - up, "y_high": y + up}
        rows.append({"name": series.name, "x": x, "y": y, **ends})
    return rows


def _channel(name: str, axis: Axis, rows: Sequence[Mapping[str, Any]]) -> tuple[Spec, tuple[float, float]]:
    """Return an encoding whose axis holds all points, bars and curves with a little room, and the ends of the axis."""
    values = [row[key] for row in rows for key in (name, f"{name}_low", f"{name}_high") if key in row]
    ends = data.ends([value for value in values if value > 0] if axis.log else values, log=axis.log)
    return charts.axis(name, axis.title, ends, log=axis.log, ticks=axis.ticks), ends
