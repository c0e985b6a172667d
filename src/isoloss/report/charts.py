"""Charts of evaluated checkpoints, as Vega-Lite specifications: panels beside each other with shared legends.

A specification is a dictionary. Altair's classes, which write the same, copy a whole chart at each step: that took four
fifths of the time of a page.

Pointing at a checkpoint shows its numbers and brings its run forward in every panel; a click on it or on a legend entry
keeps it in front (shift-click adds, double-click clears). The page sets the parameter `marked` to the checkpoints that
are chosen in its table. `isoloss.report.save` writes the same chart for a paper.

Each function takes the evaluated checkpoints, as `isoloss.report.data.prepare` describes them, and refuses what cannot
be drawn; colors and markers are chosen for this table unless a style gives them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.data import Column, Style

Spec = dict[str, Any]  # a Vega-Lite specification, or a part of one
VERSION = "6.4"  # of Vega-Lite, as vl-convert names it

INTERVALS = ": 95 % confidence intervals"
BARS = f"Bars{INTERVALS}"
SIZE = (320, 280)  # width and height of a panel in pixels; the page sets the width
POINT, LINE, RULE = 70, 2, 1.2  # pixels of a marker's area and of strokes; they are no config, which legends would take
MANY = 500  # checkpoints, from which markers are smaller
DASHES = ((8, 3), (2, 2), (8, 3, 2, 3), (1, 0))  # strokes and gaps of baselines, in pixels

_DIMMED = 0.12
_OF_POINTS = ("hovered", "picked_run")  # selections that are made at points, not in legends
INK = "currentColor"  # the page's ink, on light and on dark paper


def scatter(table: pl.DataFrame, axes: Sequence[tuple[Column, Column]], *, style: Style | None = None) -> Spec:
    """Two measures of every checkpoint against each other, a panel for each pair of (horizontal, vertical).

    Bars are 95 % confidence intervals; a faint line joins a run's checkpoints in the order of steps. Panels of one
    vertical measure share its axis. Only a panel whose left neighbor has another one names it. A dashed line marks the
    vertical measure's value of reference.
    """
    drawing = _Drawing(table, tuple(dict.fromkeys(column for pair in axes for column in pair)), style)
    panels, neighbor = [], None
    for across, up in axes:
        rows, ends = data.panel(drawing.frame, across, up)
        # the vertical axis holds all checkpoints that have `up`, so panels that share it have the same ends
        _, shared = data.panel(drawing.frame, up)
        x, y = _measured(across, ends[across]), _measured(up, shared[up], titled=up != neighbor)
        panels.append({"layer": [*_dashed("y", y, up.reference), *drawing.against(rows, (x, across), (y, up))]})
        neighbor = up
    words = " and ".join(f"{up.title} against {across.title}" for across, up in axes)
    return _side_by_side(panels, drawing.pick, words, note=BARS)


def magnified(
    table: pl.DataFrame,
    loss: Column,
    others: Sequence[Column],
    ups: Sequence[Column],
    *,
    band: tuple[float, float],
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    style: Style | None = None,
) -> Spec:
    """Measures of all checkpoints against their loss, and, magnified, of the checkpoints with about the same loss.

    For each vertical measure (`ups`) a panel of all checkpoints, with a rectangle around those whose loss is in the
    `band`, in the table's unit; then, of these alone, a panel of the measure against the loss and one against each of
    `others`. Panels of one vertical measure stand in full rows. Bars and lines are as in `scatter`, cut off at the
    edges of the rectangle. `baselines` are horizontal lines among all checkpoints: for each vertical measure, by
    name, the values by their names in the legend.
    """
    drawing = _Drawing(table, tuple(dict.fromkeys((loss, *others, *ups))), style)
    baselines = baselines or {}
    names = list(dict.fromkeys(name for each in baselines.values() for name in each))
    if len(names) > len(DASHES):
        raise IsolossError(f"there are {len(names)} baselines and {len(DASHES)} patterns of a line: show fewer")
    inside = drawing.frame.filter(pl.col(loss.field).is_between(*band))
    if not inside.height:
        raise IsolossError(f"no checkpoint has a {loss.name} between {band[0]:g} and {band[1]:g}")
    panels = []
    for up in ups:
        lines: list[dict[str, Any]] = [
            {"name": name, "y": value * (100 if up.percent else 1)}
            for name, value in baselines.get(up.name, {}).items()
        ]
        rows, ends = data.panel(drawing.frame, loss, up)
        _, near_ends = data.panel(inside, loss, up)
        inside_axis = [*ends[up], *(line["y"] for line in lines)]
        full = data.ends(inside_axis, log=up.log, percent=up.percent) if lines else ends[up]
        # a band may begin at 0, which no logarithmic axis has, or end beyond the axis
        left, right = max(band[0], ends[loss][0]), min(band[1], ends[loss][1])
        x, y = _measured(loss, ends[loss]), _measured(up, full)
        corners = {"x": left, "x2": right, "y": near_ends[up][0], "y2": near_ends[up][1]}
        everything = [
            layer(
                [corners],
                {"type": "rect", "color": INK, "fillOpacity": 0.08, "stroke": INK, "strokeWidth": RULE},
                x={**x, "field": "x"},
                x2={"field": "x2"},
                y={**y, "field": "y"},
                y2={"field": "y2"},
            ),
            *drawing.against(rows, (x, loss), (y, up)),
        ]
        if lines:
            # below the points, which stay the last layer: selections are made there
            everything.insert(-1, _baselines(lines, names, {**y, "field": "y"}))
        panels.append({"layer": everything, "title": "All models"})
        y = _measured(up, near_ends[up])
        for across in (loss, *others):
            rows, inner_ends = data.panel(inside, across, up)
            x = _measured(across, (left, right) if across == loss else inner_ends[across])
            layers = drawing.against(rows, (x, across), (y, up), clip=True)
            panels.append({"layer": layers, "title": "Models in the rectangle"})
    words = f"{', '.join(up.title for up in ups)} against {', '.join(across.title for across in (loss, *others))}"
    return _side_by_side(panels, drawing.pick, words, note=BARS, together=2 + len(others))


def _baselines(lines: Sequence[Mapping[str, Any]], names: list[str], y: Spec) -> Spec:
    """Return horizontal lines with a legend of their patterns."""
    scale = {"domain": names, "range": [list(dash) for dash in DASHES[: len(names)]]}
    # 22 pixels long, which show the whole pattern
    legend = {"symbolSize": 484}
    return layer(
        lines,
        {"type": "rule", "color": INK, "strokeWidth": RULE},
        y=y,
        strokeDash=nominal("name", title="Baseline", scale=scale, legend=legend),
        tooltip=[
            nominal("name", title="Baseline"),
            {"field": "y", "type": "quantitative", "title": str(y["title"]), "format": ".2f"},
        ],
    )


def curves(
    table: pl.DataFrame, shown: Sequence[Column], *, saturated: float | None = None, style: Style | None = None
) -> Spec:
    """Each measure over the steps of pre-training, a line per run, with bands of 95 % confidence.

    A dashed vertical line marks the step at which the loss is `saturated`.
    """
    drawing = _Drawing(table, shown, style)
    last = max(1, *drawing.frame.get_column("step").to_list())
    x = axis("step", "Step", [0.0, last * (1 + data.PADDING / 2)], format=",d")
    panels = []
    for column in shown:
        frame, ends = data.panel(drawing.frame, column)
        rows = frame.to_dicts()
        y = _measured(column, ends[column])
        interval = {"y": {**y, "field": f"{column.field}_low"}, "y2": {"field": f"{column.field}_high"}}
        common = {"x": x, "detail": nominal("run"), "color": drawing.color}
        opacity = drawing.pick.opacity
        panels.append(
            {
                "layer": [
                    *_dashed("x", x, saturated),
                    *_dashed("y", y, column.reference),
                    layer(rows, {"type": "area"}, **common, **interval, opacity=opacity(0.2, whole_run=True)),
                    # a rule too: the band of a single checkpoint has no width
                    layer(rows, {"type": "rule", "strokeWidth": RULE}, **common, **interval, opacity=opacity()),
                    layer(rows, {"type": "line", "strokeWidth": LINE}, **common, y=y, opacity=opacity(whole_run=True)),
                    drawing.points(rows, **common, y=y),
                ]
            }
        )
    words = f"{', '.join(m.title for m in shown)} over the steps of pre-training"
    return _side_by_side(panels, drawing.pick, words, note=f"Bars and bands{INTERVALS}{_marked(saturated)}")


def sizes(
    table: pl.DataFrame, shown: Sequence[Column], *, saturated: float | None = None, style: Style | None = None
) -> Spec:
    """Each measure against the number of parameters, with 95 % error bars and a line through each group's means.

    A dashed vertical line marks the number of parameters from which the loss is `saturated`.
    """
    drawing = _Drawing(table, shown, style)
    counts = drawing.frame.get_column("parameters").to_list()
    x = axis("parameters", "Parameters", [min(counts) / 1.3, max(counts) * 1.3], log=True, format="~s")
    panels = []
    for column in shown:
        frame, ends = data.panel(drawing.frame, column)
        rows = frame.to_dicts()
        y = _measured(column, ends[column])
        bars = {"y": {**y, "field": f"{column.field}_low"}, "y2": {"field": f"{column.field}_high"}}
        line = {"type": "line", "strokeWidth": 1.5, "opacity": 0.6}
        panels.append(
            {
                "layer": [
                    *_dashed("x", x, saturated),
                    layer(
                        data.size_means(frame, column).to_dicts(),
                        line,
                        x=x,
                        y=y,
                        detail=nominal("group"),
                        color=drawing.color,
                    ),
                    layer(
                        rows,
                        {"type": "rule", "strokeWidth": RULE},
                        x=x,
                        **bars,
                        color=drawing.color,
                        opacity=drawing.pick.opacity(),
                    ),
                    drawing.points(rows, x=x, y=y),
                ]
            }
        )
    words = f"{', '.join(m.title for m in shown)} against the number of parameters"
    return _side_by_side(panels, drawing.pick, words, note=f"{BARS}; lines: means of a group{_marked(saturated)}")


def _dashed(name: str, axis: Spec, at: float | None) -> list[Spec]:
    """Return a dashed line across the panel at a place of its x or y axis, if there is one."""
    mark = {"type": "rule", "color": INK, "strokeWidth": RULE, "strokeDash": [4, 4]}
    return [] if at is None else [layer([{axis["field"]: at}], mark, **{name: axis})]


def _marked(at: float | None) -> str:
    return "" if at is None else "; dashed: from here on, the loss is saturated"


class _Drawing:
    """What the panels of a chart share: the prepared table, what is in front, and how checkpoints look."""

    def __init__(self, table: pl.DataFrame, shown: Sequence[Column], style: Style | None) -> None:
        style = style or Style.of(table)
        names = {column.name for column in shown}
        # the tooltip of a point has all measures of its checkpoint, also those that no panel shows
        everything = (*dict.fromkeys(shown), *(each for each in data.measures(table) if each.name not in names))
        self.frame = data.prepare(table, everything)
        self.pick = _Pick(style)
        self._point = POINT if self.frame.height <= MANY else POINT / 3
        self.color = _legend("group", style.colors)
        self._shape = _legend("size", style.markers) if len(style.markers) > 1 else None
        self._tooltip = [
            *(nominal(name, title=name.capitalize()) for name in ("run", "group", "size")),
            *(
                {"field": name, "type": "quantitative", "title": name.capitalize(), "format": ",d"}
                for name in ("parameters", "step")
            ),
            *(nominal(f"{m.field}_text", title=m.axis_title) for m in everything),
        ]

    def against(
        self,
        frame: pl.DataFrame,
        horizontal: tuple[Spec, Column],
        vertical: tuple[Spec, Column],
        *,
        clip: bool = False,
    ) -> list[Spec]:
        """Return lines, bars and points of two measures against each other; with `clip`, bars end at the axes' ends."""
        (x, across), (y, up) = horizontal, vertical
        rows = frame.to_dicts()
        bars = {"type": "rule", "strokeWidth": RULE, "clip": clip}
        shown = {"color": self.color, "opacity": self.pick.opacity()}
        return [
            layer(
                rows,
                {"type": "line", "strokeWidth": 1, "clip": clip},
                x=x,
                y=y,
                color=self.color,
                opacity=self.pick.opacity(0.35, whole_run=True),
                detail=nominal("run"),
                order={"field": "step", "type": "quantitative"},
            ),
            layer(rows, bars, x=x, y={**y, "field": f"{up.field}_low"}, y2={"field": f"{up.field}_high"}, **shown),
            layer(
                rows, bars, y=y, x={**x, "field": f"{across.field}_low"}, x2={"field": f"{across.field}_high"}, **shown
            ),
            self.points(rows, x=x, y=y),
        ]

    def points(self, rows: Sequence[Mapping[str, Any]], **channels: Any) -> Spec:
        """Return a marker for each checkpoint."""
        shape = {} if self._shape is None else {"shape": self._shape}
        return layer(
            rows,
            {"type": "point", "filled": True, "size": self._point, "cursor": "pointer"},
            **{"color": self.color, "opacity": self.pick.opacity(), "tooltip": self._tooltip, **shape, **channels},
        )


def _legend(field: str, values: Mapping[str, str]) -> Spec:
    """Return a channel of colors or shapes: which of them stands for which value of a column."""
    scale = {"domain": list(values), "range": list(values.values())}
    return nominal(field, title=field.capitalize(), scale=scale)


class _Pick:
    """What is in front, while the rest is dimmed.

    In front are the run under the pointer, the runs and legend entries that were clicked, and the checkpoints that the
    page has marked: `marked` is null or has a key `RUN@STEP` for each of them, and `RUN@` for their runs.
    """

    def __init__(self, style: Style) -> None:
        legends = ["group", "size"] if len(style.markers) > 1 else ["group"]
        point = {"type": "point", "fields": ["run"]}
        self._selections: dict[str, Spec] = {
            "hovered": {**point, "on": "pointerover", "clear": "pointerout"},
            "picked_run": {**point, "on": "click", "clear": "dblclick"},
            **{f"picked_{field}": {"type": "point", "fields": [field]} for field in legends},
        }

    def opacity(self, opacity: float = 1.0, *, whole_run: bool = False) -> Spec:
        """The opacity of a mark of a checkpoint, or of one of a whole run: `opacity` while it is in front."""
        key = "datum.run + '@'" if whole_run else "datum.run + '@' + datum.step"
        # an empty selection counts as all of its values, so nothing is dimmed before anything is chosen
        front = {"and": [*({"param": name} for name in self._selections), f"!marked || marked[{key}]"]}
        return {"value": _DIMMED * opacity, "condition": {"test": front, "value": opacity}}

    def params(self, views: list[str]) -> list[Spec]:
        """The selections, made in the views of these names and shared by all panels, and `marked`."""
        selections = [
            {"name": name, "select": select, "views": views, **({} if name in _OF_POINTS else {"bind": "legend"})}
            for name, select in self._selections.items()
        ]
        return [*selections, {"name": "marked", "value": None}]


def layer(rows: Sequence[Mapping[str, Any]], mark: Spec, **channels: Any) -> Spec:
    """Return marks of rows, each with its channels; `concat` gives equal rows of several layers one name."""
    return {"data": {"values": rows}, "mark": mark, "encoding": channels}


def nominal(field: str, **more: Any) -> Spec:
    """Return a channel of names."""
    return {"field": field, "type": "nominal", **more}


def axis(
    field: str,
    title: str | None,
    ends: Sequence[float],
    *,
    log: bool = False,
    ticks: Sequence[float] = (),
    **shown: Any,
) -> Spec:
    """Return a channel of numbers."""
    ticks = list(ticks) or (data.log_ticks(ends) if log else [])
    marks: Spec = {"values": ticks} if ticks else {"tickCount": 5}
    if log:
        marks["format"] = "~e" if ends[0] < 1e-4 or ends[1] > 1e6 else "~g"
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        # the ends hold every bar already. With `nice`, Vega would move them, and a panel would no longer show just what
        # is in the rectangle of the panel beside it
        "scale": {"type": "log" if log else "linear", "domain": list(ends), "nice": False},
        "axis": {"labelOverlap": "greedy", "labelSeparation": 6, **marks, **shown},
    }


def _measured(column: Column, ends: tuple[float, float], *, titled: bool = True) -> Spec:
    return axis(column.field, column.axis_title if titled else None, ends, log=column.log)


def _side_by_side(panels: list[Spec], pick: _Pick, description: str, *, note: str, together: int = 1) -> Spec:
    """Panels in a row; the page sets their width and, where it is narrow, puts them below each other."""
    views = [f"points_{number}" for number in range(len(panels))]
    for panel, view in zip(panels, views, strict=True):
        # the points, which every panel has as its last layer: selections are made there
        panel["layer"][-1]["name"] = view
    return {**concat(panels, note, together=together), "params": pick.params(views), "description": description}


def concat(panels: Sequence[Spec], note: str, *, together: int = 1) -> Spec:
    """Return panels in a row, in the page's colors, with a note below them in print that says what bars and lines are.

    Where panels do not fit into one row, each run of `together` panels takes full rows.
    """
    width, height = SIZE
    datasets: dict[str, Sequence[Mapping[str, Any]]] = {}
    names: dict[int, str] = {}  # by identity, so that rows that layers share are hashed once
    named = []
    for panel in panels:
        layers = []
        for one in panel["layer"]:
            rows = one["data"]["values"]
            if id(rows) not in names:
                # the lines, bars and points of a panel have the same rows: by their hash, the page holds them once
                names[id(rows)] = f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]}"
                datasets[names[id(rows)]] = rows
            layers.append({**one, "data": {"name": names[id(rows)]}})
        named.append({"height": height, **panel, "layer": layers, "width": width})
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VERSION}.1.json",
        "concat": named,
        "columns": len(panels),
        "spacing": 24,
        "datasets": datasets,
        "background": "transparent",
        "config": _CONFIG,
        "usermeta": {"note": note, "together": together},
    }


_CONFIG: Spec = {
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), INK),
        "gridOpacity": 0.1,
        "domainOpacity": 0.4,
        "tickOpacity": 0.4,
        "labelFontSize": 12,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "legend": {
        **dict.fromkeys(("labelColor", "titleColor", "symbolBaseFillColor", "symbolBaseStrokeColor"), INK),
        "orient": "top",
        "labelFontSize": 13,
        "titleFontSize": 13,
        "symbolSize": 90,
        "labelLimit": 320,
        "titleLimit": 320,
        "symbolOpacity": 1,
        "padding": 8,  # keeps the legends away from each other
    },
    "title": {"color": INK, "fontSize": 13, "fontWeight": "normal"},
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
}
