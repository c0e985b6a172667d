"""A forest plot of differences: a row for each comparison, a panel for each quantity, intervals in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isoloss.errors import IsolossError
from isoloss.report import charts, data
from isoloss.report.charts import Spec, layer, nominal

_LINE = 16  # pixels of height for each line of a row's name
_LINES = "split(datum.label, '\\n')"  # else Vega draws them in one


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One marker with its interval."""

    row: str  # the row that it is in; its name may have several lines
    series: str  # shown by color: which of several markers in one row and panel. With one series, no legend
    value: float  # where the marker is
    low: float  # the ends of the interval
    high: float
    text: str  # the tooltip


@dataclass(frozen=True, kw_only=True)
class IntervalPanel:
    """One quantity."""

    title: str  # its name with its unit
    intervals: Sequence[Interval]
    reference: float = 0.0  # the value that means no difference, marked by a line
    log: bool = False  # whether its axis is logarithmic; then all ends are above 0


def intervals(panels: Sequence[IntervalPanel], rows: Sequence[str], *, note: str) -> Spec:
    """Return panels beside each other, with the same rows in the order given from top to bottom, and a note below them.

    Example:
        >>> from isoloss.report.intervals import Interval, IntervalPanel, intervals
        >>> sgd = Interval(row="SGD", series="", value=-44.0, low=-57.7, high=-30.3, text="-44.0 ± 3.2")
        >>> panel = IntervalPanel(title="difference in trace (nats)", intervals=[sgd])
        >>> chart = intervals([panel], ["SGD"], note="95 % confidence intervals")
        >>> [layer["mark"]["type"] for layer in chart["concat"][0]["layer"]]
        ['rule', 'rule', 'point']
    """
    series = list(dict.fromkeys(each.series for panel in panels for each in panel.intervals))
    if len(series) > len(data.COLORS):
        raise IsolossError(f"there are {len(series)} series and {len(data.COLORS)} colors: show fewer")
    scale = {"domain": series, "range": list(data.COLORS[: len(series)])}
    color = nominal("series", title=None, scale=scale, **({} if len(series) > 1 else {"legend": None}))
    drawn = [_panel(panel, rows, series, color, named=panel is panels[0]) for panel in panels]
    return charts.concat(drawn, note)


def _panel(panel: IntervalPanel, rows: Sequence[str], series: list[str], color: Spec, *, named: bool) -> Spec:
    """Return the chart of one quantity; only the first of a row of panels names the rows."""
    if not panel.intervals:
        raise IsolossError(f"the panel {panel.title!r} has no interval")
    if missing := [each.row for each in panel.intervals if each.row not in rows]:
        raise IsolossError(f"the panel {panel.title!r} has the row {missing[0]!r}, which is none of {', '.join(rows)}")
    shown = [panel.reference, *(end for each in panel.intervals for end in (each.low, each.high))]
    ends = data.ends(shown, log=panel.log)
    y = nominal(
        "row",
        title=None,
        sort=list(rows),
        axis={"labelLimit": 320, "ticks": False, "domain": False, "labels": named, "labelExpr": _LINES},
        scale={"domain": list(rows)},
    )
    x = charts.axis("value", panel.title, ends, log=panel.log)
    reference = {"type": "rule", "color": charts.INK, "strokeDash": [4, 4], "opacity": 0.5}
    drawn = [vars(each) for each in panel.intervals]
    placed = {"y": y, "yOffset": nominal("series", sort=series), "color": color}
    lines = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
    point = {"type": "point", "filled": True, "size": charts.POINT, "opacity": 1}
    texts = [nominal(name) for name in ("row", "series", "text")]
    return {
        "height": max(charts.SIZE[1], _LINE * sum(1 + row.count("\n") for row in rows)),
        "layer": [
            layer([{"value": panel.reference}], reference, x=x),
            layer(drawn, {"type": "rule", "strokeWidth": charts.LINE}, **placed, **lines),
            layer(drawn, point, x=x, **placed, tooltip=texts),
        ],
    }
