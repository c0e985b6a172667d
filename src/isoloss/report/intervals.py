"""A forest plot of differences: a row for each comparison, a panel for each quantity, intervals in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from isoloss.errors import IsolossError
from isoloss.report import charts, data

CLAIMED = data.COLORS[2]  # of the range that a claim states


@dataclass(frozen=True, kw_only=True)
class Interval:
    """One marker with its interval.

    Attributes:
        row: The row that it is in.
        series: Its series, shown by color: which of several markers in one row and panel. With one series, no legend.
        value: Where the marker is.
        low: The lower end of the interval.
        high: Its upper end.
        text: The tooltip.
    """

    row: str
    series: str
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True)
class IntervalPanel:
    """One quantity.

    Attributes:
        title: Its name with its unit.
        intervals: What is in it.
        reference: The value that means no difference, marked by a line.
        log: Whether its axis is logarithmic; then all ends are above 0.
        claimed: The lower and upper end of the range that a claim states, shaded; None: open at this end.
    """

    title: str
    intervals: Sequence[Interval]
    reference: float = 0.0
    log: bool = False
    claimed: tuple[float | None, float | None] | None = None


def intervals(
    panels: Sequence[IntervalPanel], rows: Sequence[str], *, note: str, size: tuple[int, int] = charts.SIZE
) -> alt.ConcatChart:
    """Return panels beside each other, with the same rows in the order given.

    Args:
        panels: The quantities.
        rows: The names of the rows, from top to bottom.
        note: What markers and lines mean, printed below the panels.
        size: The width and height of a panel in pixels.

    Raises:
        IsolossError: A panel is empty, an interval names none of the rows, or there are more series than colors.
    """
    series = list(dict.fromkeys(each.series for panel in panels for each in panel.intervals))
    if len(series) > len(data.COLORS):
        raise IsolossError(f"there are {len(series)} series and {len(data.COLORS)} colors: show fewer")
    scale = alt.Scale(domain=series, range=list(data.COLORS[: len(series)]))
    legend = alt.Undefined if len(series) > 1 else None
    color = alt.Color(field="series", type="nominal", title=None, scale=scale, legend=legend)
    drawn = [_panel(panel, rows, series, color, named=panel is panels[0]) for panel in panels]
    return charts.concat(drawn, note, size)


def _panel(
    panel: IntervalPanel, rows: Sequence[str], series: list[str], color: alt.Color, *, named: bool
) -> alt.LayerChart:
    """Return the chart of one quantity; only the first of a row of panels names the rows."""
    if not panel.intervals:
        raise IsolossError(f"the panel {panel.title!r} has no interval")
    if missing := [each.row for each in panel.intervals if each.row not in rows]:
        raise IsolossError(f"the panel {panel.title!r} has the row {missing[0]!r}, which is none of {', '.join(rows)}")
    edges = [end for end in panel.claimed or () if end is not None]
    shown = [panel.reference, *edges, *(end for each in panel.intervals for end in (each.low, each.high))]
    ends = data.ends(shown, log=panel.log)
    base = alt.Chart(alt.InlineData(values=[vars(each) for each in panel.intervals]))
    axis: dict[str, Any] = {"labelLimit": 320, "ticks": False, "domain": False, "labels": named}
    y = alt.Y(
        field="row",
        type="nominal",
        title=None,
        sort=list(rows),
        axis=alt.Axis(**axis),
        scale=alt.Scale(domain=list(rows)),
    )
    offset = alt.YOffset(field="series", type="nominal", sort=series)
    x = charts.axis(alt.X, "value", panel.title, ends, log=panel.log)
    reference = alt.Chart(alt.InlineData(values=[{"value": panel.reference}])).mark_rule(
        color=charts.INK, strokeDash=[4, 4], opacity=0.5
    )
    claimed = []
    if panel.claimed is not None:
        low, high = (end if given is None else given for end, given in zip(ends, panel.claimed, strict=True))
        area = alt.Chart(alt.InlineData(values=[{"value": low, "high": high}])).mark_rect(color=CLAIMED, opacity=0.16)
        claimed = [area.encode(x, x2="high:Q")]
    return alt.LayerChart(
        layer=[
            *claimed,
            reference.encode(x),
            base.mark_rule(strokeWidth=charts.LINE).encode(y, offset, color, x=charts.of_field(x, "low"), x2="high:Q"),
            base.mark_point(filled=True, size=charts.POINT, opacity=1).encode(
                x, y, offset, color, tooltip=[alt.Tooltip("row:N"), alt.Tooltip("series:N"), alt.Tooltip("text:N")]
            ),
        ]
    )
