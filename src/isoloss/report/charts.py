"""Charts of evaluated checkpoints, as Altair (Vega-Lite) specifications: panels beside each other with shared legends.

Pointing at a checkpoint shows its numbers and brings its run forward in every panel; a click on it or on a legend entry
keeps it in front (shift-click adds, double-click clears). The page sets the parameter `marked` to the checkpoints that
are chosen in its table. `isoloss.report.save` writes the same chart for a paper.

Each function takes the evaluated checkpoints, as `isoloss.report.data.prepare` describes them, and refuses what cannot
be drawn; colors and markers are those of this table unless a style gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.data import Column, Style

INTERVALS = ": 95 % confidence intervals"
BARS = f"Bars{INTERVALS}"
SIZE = (320, 280)  # width and height of a panel in pixels; the page sets the width
POINT, LINE, RULE = 70, 2, 1.2  # pixels of a marker's area and of strokes; they are no config, which legends would take
MANY = 500  # checkpoints, from which markers are smaller
DASHES = ((8, 3), (2, 2), (8, 3, 2, 3), (1, 0))  # strokes and gaps of baselines, in pixels

_DIMMED = 0.12
_OF_POINTS = ("hovered", "picked_run")  # selections that are made at points, not in legends
INK = "currentColor"  # the page's ink, on light and on dark paper


def scatter(
    table: pl.DataFrame, axes: Sequence[tuple[Column, Column]], *, style: Style | None = None
) -> alt.ConcatChart:
    """Two measures of every checkpoint against each other, a panel for each pair of (horizontal, vertical).

    Bars are 95 % confidence intervals; a faint line joins a run's checkpoints in the order of steps. Panels of one
    vertical measure share its axis. Only a panel whose left neighbor has another one names it.
    """
    drawing = _Drawing(table, tuple(dict.fromkeys(column for pair in axes for column in pair)), style)
    panels, left = [], None
    for across, up in axes:
        rows, own = data.panel(drawing.frame, across, up)
        _, ends = data.panel(drawing.frame, up)
        x, y = _measured(alt.X, across, own[across]), _measured(alt.Y, up, ends[up], titled=up != left)
        panels.append(_layered(*drawing.against(rows, (x, across), (y, up))))
        left = up
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
) -> alt.ConcatChart:
    """Measures of all checkpoints against their loss, and of those of about one loss once more, magnified.

    For each vertical measure a panel of all checkpoints, with a rectangle around those in the band; then, of these
    alone, a panel of the measure against the loss and one against each other measure. Panels of one vertical measure
    stand in full rows. Bars and lines are those of `scatter`, cut off at the edges of the rectangle.

    Args:
        table: The checkpoints.
        loss: The measure that defines the band.
        others: Further horizontal measures.
        ups: The vertical measures.
        band: The lowest and the highest loss in the band, in the table's unit.
        baselines: Horizontal lines among all checkpoints: by the name of a vertical measure, each with its value in
            the table's unit, by what the legend calls it.
        style: Colors and markers.

    Raises:
        IsolossError: No checkpoint is in the band, or more baselines than patterns of a line can tell apart.
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
        full = data.ends([*ends[up], *(line["y"] for line in lines)], log=up.log) if lines else ends[up]
        left, right = max(band[0], ends[loss][0]), min(band[1], ends[loss][1])  # a band may reach 0 or beyond the axis
        x, y = _measured(alt.X, loss, ends[loss]), _measured(alt.Y, up, full)
        corners = {"x": left, "x2": right, "y": near_ends[up][0], "y2": near_ends[up][1]}
        rectangle = alt.Chart(alt.InlineData(values=[corners])).mark_rect(
            color=INK, fillOpacity=0.08, stroke=INK, strokeWidth=RULE
        )
        everything = [
            rectangle.encode(x=of_field(x, "x"), x2="x2", y=of_field(y, "y"), y2="y2"),
            *drawing.against(rows, (x, loss), (y, up)),
        ]
        if lines:
            everything.insert(-1, _baselines(lines, names, of_field(y, "y")))
        panels.append(_layered(*everything).properties(title="All models"))
        y = _measured(alt.Y, up, near_ends[up])
        for across in (loss, *others):
            rows, own = data.panel(inside, across, up)
            x = _measured(alt.X, across, (left, right) if across == loss else own[across])
            panel = _layered(*drawing.against(rows, (x, across), (y, up), clip=True))
            panels.append(panel.properties(title="Models in the rectangle"))
    words = f"{', '.join(up.title for up in ups)} against {', '.join(across.title for across in (loss, *others))}"
    return _side_by_side(panels, drawing.pick, words, note=BARS, together=2 + len(others))


def _baselines(lines: Sequence[Mapping[str, Any]], names: list[str], y: alt.Y) -> alt.Chart:
    """Return horizontal lines with a legend of their patterns."""
    scale = alt.Scale(domain=names, range=[list(dash) for dash in DASHES[: len(names)]])
    legend = alt.Legend(symbolSize=484)  # 22 pixels long, which show the whole pattern
    done: alt.Chart = (
        alt.Chart(alt.InlineData(values=list(lines)))
        .mark_rule(color=INK, strokeWidth=RULE)
        .encode(
            y,
            strokeDash=alt.StrokeDash(field="name", type="nominal", title="Baseline", scale=scale, legend=legend),
            tooltip=[alt.Tooltip("name:N", title="Baseline"), alt.Tooltip("y:Q", title=str(y.title), format=".2f")],
        )
    )
    return done


def curves(table: pl.DataFrame, shown: Sequence[Column], *, style: Style | None = None) -> alt.ConcatChart:
    """Each measure over the steps of pre-training, a line per run, with bands of 95 % confidence."""
    drawing = _Drawing(table, shown, style)
    last = max(1, *drawing.frame.get_column("step").to_list())
    x = axis(alt.X, "step", "Step", [0.0, last * (1 + data.PADDING / 2)], format=",d")
    panels = []
    for column in shown:
        rows, ends = data.panel(drawing.frame, column)
        y = _measured(alt.Y, column, ends[column])
        interval = {"y": of_field(y, f"{column.field}_low"), "y2": f"{column.field}_high"}
        base = drawing.base(rows).encode(x, detail="run:N")
        panels.append(
            _layered(
                base.mark_area().encode(**interval, opacity=drawing.pick.opacity(0.2, whole_run=True)),
                base.mark_rule(strokeWidth=RULE).encode(**interval),
                base.mark_line(strokeWidth=LINE).encode(y, opacity=drawing.pick.opacity(whole_run=True)),
                drawing.points(base).encode(y),
            )
        )
    words = f"{', '.join(m.title for m in shown)} over the steps of pre-training"
    return _side_by_side(panels, drawing.pick, words, note=f"Bars and bands{INTERVALS}")


def sizes(table: pl.DataFrame, shown: Sequence[Column], *, style: Style | None = None) -> alt.ConcatChart:
    """Each measure against the number of parameters, with 95 % error bars and a line through each group's means."""
    drawing = _Drawing(table, shown, style)
    counts = drawing.frame.get_column("parameters").to_list()
    x = axis(alt.X, "parameters", "Parameters", [min(counts) / 1.3, max(counts) * 1.3], log=True, format="~s")
    panels = []
    for column in shown:
        rows, ends = data.panel(drawing.frame, column)
        y = _measured(alt.Y, column, ends[column])
        base = drawing.base(rows).encode(x)
        means = alt.Chart(_values(data.size_means(rows, column))).mark_line(strokeWidth=1.5, opacity=0.6)
        bars = base.mark_rule(strokeWidth=RULE)
        panels.append(
            _layered(
                means.encode(x, y, detail="group:N", color=drawing.color),
                bars.encode(y=of_field(y, f"{column.field}_low"), y2=f"{column.field}_high"),
                drawing.points(base).encode(y),
            )
        )
    words = f"{', '.join(m.title for m in shown)} against the number of parameters"
    return _side_by_side(panels, drawing.pick, words, note=f"{BARS}; lines: means of a group")


class _Drawing:
    """What the panels of a chart share: the prepared table, what is in front, and how checkpoints look."""

    def __init__(self, table: pl.DataFrame, shown: Sequence[Column], style: Style | None) -> None:
        style = style or Style.of(table)
        names = {column.name for column in shown}
        everything = (*dict.fromkeys(shown), *(each for each in data.measures(table) if each.name not in names))
        self.frame = data.prepare(table, everything)
        self.pick = _Pick(style)
        self._point = POINT if self.frame.height <= MANY else POINT / 3
        self.color = _legend(alt.Color, "group", style.colors)
        self._shape = _legend(alt.Shape, "size", style.markers) if len(style.markers) > 1 else None
        self._tooltip = [
            alt.Tooltip("run:N", title="Run"),
            alt.Tooltip("group:N", title="Group"),
            alt.Tooltip("size:N", title="Size"),
            alt.Tooltip("parameters:Q", title="Parameters", format=",d"),
            alt.Tooltip("step:Q", title="Step", format=",d"),
            *(alt.Tooltip(field=f"{m.field}_text", type="nominal", title=m.axis_title) for m in everything),
        ]

    def base(self, rows: pl.DataFrame) -> alt.Chart:
        """Return a chart of rows without marks."""
        base: alt.Chart = alt.Chart(_values(rows)).encode(color=self.color, opacity=self.pick.opacity())
        return base

    def against(
        self,
        rows: pl.DataFrame,
        horizontal: tuple[alt.X, Column],
        vertical: tuple[alt.Y, Column],
        *,
        clip: bool = False,
    ) -> list[alt.Chart]:
        """Return lines, bars and points of two measures against each other; with `clip`, bars end at the axes' ends."""
        (x, across), (y, up) = horizontal, vertical
        base = self.base(rows)
        line = base.mark_line(strokeWidth=1, clip=clip)
        bars = base.mark_rule(strokeWidth=RULE, clip=clip)
        return [
            line.encode(
                x, y, opacity=self.pick.opacity(0.35, whole_run=True), detail="run:N", order=alt.Order("step:Q")
            ),
            bars.encode(x, y=of_field(y, f"{up.field}_low"), y2=f"{up.field}_high"),
            bars.encode(y, x=of_field(x, f"{across.field}_low"), x2=f"{across.field}_high"),
            self.points(base).encode(x, y),
        ]

    def points(self, base: alt.Chart) -> alt.Chart:
        """Return a marker for each checkpoint."""
        points: alt.Chart = base.mark_point(filled=True, size=self._point, cursor="pointer").encode(
            tooltip=self._tooltip, **({} if self._shape is None else {"shape": self._shape})
        )
        points.name = "points"
        return points


def _legend(channel: Any, field: str, values: Mapping[str, str]) -> Any:
    """Return the channel of colors or shapes: which of them stands for which value of a column."""
    scale = alt.Scale(domain=list(values), range=list(values.values()))
    return channel(field=field, type="nominal", title=field.capitalize(), scale=scale)


class _Pick:
    """What is in front, while the rest is dimmed.

    In front are the run under the pointer, the runs and legend entries that were clicked, and the checkpoints that the
    page has marked: `marked` is null or has a key `RUN@STEP` for each of them, and `RUN@` for their runs.
    """

    def __init__(self, style: Style) -> None:
        legends = ["group", "size"] if len(style.markers) > 1 else ["group"]
        self._selections = {
            "hovered": alt.PointSelectionConfig("point", fields=["run"], on="pointerover", clear="pointerout")
        }
        self._selections["picked_run"] = alt.PointSelectionConfig("point", fields=["run"], on="click", clear="dblclick")
        self._selections |= {f"picked_{f}": alt.PointSelectionConfig("point", fields=[f]) for f in legends}

    def opacity(self, opacity: float = 1.0, *, whole_run: bool = False) -> alt.OpacityValue:
        """The opacity of a mark of a checkpoint, or of one of a whole run: `opacity` while it is in front."""
        key = "datum.run + '@'" if whole_run else "datum.run + '@' + datum.step"
        front = {"and": [*({"param": name} for name in self._selections), f"!marked || marked[{key}]"]}
        return alt.OpacityValue(_DIMMED * opacity, condition={"test": front, "value": opacity})

    def params(self, views: list[str]) -> list[alt.TopLevelSelectionParameter | alt.VariableParameter]:
        """The selections, made in the views of these names and shared by all panels, and `marked`."""
        selections = [
            alt.TopLevelSelectionParameter(
                name=name, select=select, views=views, bind=alt.Undefined if name in _OF_POINTS else "legend"
            )
            for name, select in self._selections.items()
        ]
        return [*selections, alt.VariableParameter(name="marked", value=None)]


def _values(rows: pl.DataFrame) -> alt.InlineData:
    return alt.InlineData(values=rows.to_dicts())


def axis(
    channel: Any,
    field: str,
    title: str | None,
    ends: Sequence[float],
    *,
    log: bool = False,
    ticks: Sequence[float] = (),
    **shown: Any,
) -> Any:
    """Return a channel of numbers."""
    ticks = list(ticks) or (data.log_ticks(ends) if log else [])
    marks: dict[str, Any] = {"values": ticks} if ticks else {"tickCount": 5}
    if log:
        marks["format"] = "~e" if ends[0] < 1e-4 or ends[1] > 1e6 else "~g"
    return channel(
        field=field,
        type="quantitative",
        title=title,
        scale=alt.Scale(type="log" if log else "linear", domain=list(ends), nice=False),
        axis=alt.Axis(labelOverlap="greedy", labelSeparation=6, **{**marks, **shown}),
    )


def of_field(channel: Any, field: str) -> Any:
    """Return the same axis for another field."""
    other = channel.copy()
    other.field = field
    return other


def _measured(channel: Any, column: Column, ends: tuple[float, float], *, titled: bool = True) -> Any:
    return axis(channel, column.field, column.axis_title if titled else None, ends, log=column.log)


def _layered(*layers: alt.Chart) -> alt.LayerChart:
    return alt.LayerChart(layer=list(layers))


def _side_by_side(
    panels: list[alt.LayerChart], pick: _Pick, description: str, *, note: str, together: int = 1
) -> alt.ConcatChart:
    """Panels in a row; the page sets their width and, where it is narrow, puts them below each other."""
    chart = concat(panels, note, together=together)
    # the last layer of each panel holds its points; altair may have renamed it
    chart.params = pick.params([panel.layer[-1].name for panel in chart.concat])
    return chart.properties(description=description)


def concat(
    panels: Sequence[alt.LayerChart], note: str, size: tuple[int, int] = SIZE, *, together: int = 1
) -> alt.ConcatChart:
    """Return panels in a row, in the page's colors.

    Args:
        panels: The panels.
        note: What bars and lines are, in print below the panels.
        size: The width and height of a panel in pixels.
        together: Where panels do not fit into one row, each run of this many takes full rows.
    """
    width, height = size
    chart = alt.concat(*(p.properties(width=width, height=height) for p in panels), columns=len(panels), spacing=24)
    done: alt.ConcatChart = chart.properties(
        background="transparent", config=_config(), usermeta={"note": note, "together": together}
    )
    return done


def _config() -> alt.Config:
    axes = alt.AxisConfig(
        labelColor=INK,
        titleColor=INK,
        domainColor=INK,
        tickColor=INK,
        gridColor=INK,
        gridOpacity=0.1,
        domainOpacity=0.4,
        tickOpacity=0.4,
        labelFontSize=12,
        titleFontSize=13,
        titleFontWeight="normal",
        titlePadding=8,
    )
    legend = alt.LegendConfig(
        labelColor=INK,
        titleColor=INK,
        orient="top",
        labelFontSize=13,
        titleFontSize=13,
        symbolSize=90,
        labelLimit=320,
        symbolOpacity=1,
        symbolBaseFillColor=INK,
        symbolBaseStrokeColor=INK,
        padding=8,  # keeps the legends away from each other
    )
    return alt.Config(
        axis=axes,
        legend=legend,
        title=alt.TitleConfig(color=INK, fontSize=13, fontWeight="normal"),
        view=alt.ViewConfig(stroke=None),
        font="system-ui, sans-serif",
    )
