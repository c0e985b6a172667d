"""Charts as files for a paper: PNG, SVG and PDF by vl-convert, CSV of what they show; the same bytes every time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.charts import VERSION, Spec

PANEL = (172, 138)  # width and height of a panel in points, without axes
AXES = 56  # points that the axis of a panel takes
PIXELS_PER_INCH = 200  # of PNG files
_INK, _AXIS = "#222222", "#888888"
_THIN = 0.6  # of the page's strokes
_LETTER = 4.7  # points of a letter of a legend, on average
_SYMBOL = 26  # points that an entry of a legend takes beside its letters


def save(chart: Spec, file: Path) -> None:
    """Write a chart of `isoloss.report` to a `.png`, `.svg` or `.pdf` file, whole or not at all, or its data to `.csv`.

    It is drawn at the size of a paper: letters of 8 points, up to three panels of 2.4 by 1.9 inches in a row, a legend
    above and a note below them that says what bars and lines are. The data are the points, with the ends of their bars
    and the titles and units of their axes.
    """
    import vl_convert

    given: dict[str, Any] = {"vl_spec": printed(chart), "vl_version": VERSION}
    match file.suffix.lower():
        case ".png":
            written = vl_convert.vegalite_to_png(**given, ppi=PIXELS_PER_INCH)
        case ".svg":
            written = vl_convert.vegalite_to_svg(**given).encode()
        case ".pdf":
            # entries of dictionaries come in another order every time: sorted, the bytes are the same
            entries = rb"(?:\n +/\w+ \d+ 0 R)+"
            pdf: bytes = vl_convert.vegalite_to_pdf(**given)
            written = re.sub(entries, lambda match: b"\n".join(sorted(match[0].split(b"\n"))), pdf)
        case ".csv":
            frames, titles = [], _titles(chart)
            for panel in chart["concat"]:
                # the points are the last layer of a panel; panels without one of their measures have fewer
                last = panel["layer"][-1]
                rows = chart["datasets"][last["data"]["name"]]
                if not titles:
                    # columns mean something else in each panel
                    axes = (last["encoding"].get(axis, {}).get("title") for axis in ("y", "x"))
                    name = ": ".join(filter(None, (panel.get("title"), " against ".join(filter(None, axes)))))
                    rows = [{"panel": name, **row} for row in rows]
                frames.append(pl.DataFrame(rows, infer_schema_length=None))
            table = pl.concat(frames, how="diagonal_relaxed").unique(maintain_order=True)
            written = table.rename(titles, strict=False).write_csv().encode()
        case _:
            raise IsolossError(f"the figure is {file}; its name must end in .png, .svg or .pdf, or its data's in .csv")
    files.write_bytes(file, written)


def _titles(chart: Spec) -> dict[str, str]:
    """Return the titles of measures with their units by column, as a difference has the column of what it is of."""
    shown = [each for panel in chart["concat"] for each in panel["layer"][-1]["encoding"].get("tooltip", ())]
    titles = {each["field"].removesuffix("_text"): each["title"] for each in shown if each["field"].endswith("_text")}
    ends = {"": "", "_low": ", low", "_high": ", high", "_text": ", text"}
    return {field + end: title + more for field, title in titles.items() for end, more in ends.items()}


def printed(spec: Spec) -> Spec:
    """Return the Vega-Lite specification of a chart in the size, the letters and the ink of a paper."""
    has_own_legends = "resolve" in spec  # each panel has a legend, or all share one
    columns = data.columns(len(spec["concat"]), together=spec["usermeta"]["together"])
    entries = _legend_entries(spec)
    longest = max((len(line) for entry in entries for line in entry.splitlines()), default=1)
    room = (1 if has_own_legends else columns) * (PANEL[0] + AXES)
    # Vega wraps a legend by a number of columns alone, never by width: the number follows from the longest name
    legend_columns = max(1, min(6, int(room / (longest * _LETTER + _SYMBOL))))
    # one family in one weight, which vl-convert brings along: the same bytes on every machine
    letters = {"labelFont": "Liberation Sans", "titleFont": "Liberation Sans", "titleFontWeight": "normal"}
    ink = {"labelColor": _INK, "titleColor": _INK}
    config = {
        **spec["config"],
        "font": "Liberation Sans",
        "axis": {
            **{**spec["config"]["axis"], **letters, **ink},
            **{"domainColor": _AXIS, "tickColor": _AXIS, "gridColor": "#E0E0E0"},
            **{"domainOpacity": 1, "tickOpacity": 1, "gridOpacity": 1},
            **{"labelFontSize": 8, "titleFontSize": 9, "titlePadding": 5, "gridWidth": 0.5, "tickSize": 4},
        },
        "legend": {
            **{**spec["config"]["legend"], **letters, **ink},
            **{"labelFontSize": 8, "titleFontSize": 8, "symbolSize": 30, "padding": 0, "labelLimit": 0},
            **{"columns": legend_columns, "titleOrient": "left", "symbolBaseStrokeColor": _INK},
            "symbolBaseFillColor": "white" if has_own_legends else _INK,
            **{"rowPadding": 2, "columnPadding": 8, "offset": 8},
            "layout": {"top": {"anchor": "start", "direction": "vertical", "margin": 4}},
        },
        "title": {"font": "Liberation Sans", "fontSize": 9, "fontWeight": "normal", "color": _INK},
    }
    panels = [{**_thinned(panel), "width": PANEL[0], "height": PANEL[1]} for panel in spec["concat"]]
    note = {"text": spec["usermeta"]["note"], "orient": "bottom", "anchor": "end", "fontSize": 7, "color": "#555555"}
    return {
        **{**spec, "concat": panels, "columns": columns, "spacing": 14, "background": "white"},
        **{"config": config, "title": note, "padding": 4},
    }


def _thinned(panel: Spec) -> Spec:
    """Return a panel with markers and strokes for a paper."""
    # the size of a marker is an area
    factors = {"size": _THIN**2, "strokeWidth": _THIN}
    layers = [
        {**layer, "mark": {key: value * factors.get(key, 1) for key, value in layer["mark"].items()}}
        for layer in panel["layer"]
    ]
    return {**panel, "layer": layers}


def _legend_entries(spec: Any) -> list[str]:
    """Return the entries of the color legend with the most letters that a specification has."""
    if isinstance(spec, dict):
        own = spec["color"]["scale"]["domain"] if "scale" in spec.get("color", ()) else []
        lists = [own, *map(_legend_entries, spec.values())]
    elif isinstance(spec, list):
        lists = list(map(_legend_entries, spec))
    else:
        return []
    return max(lists, key=lambda entries: max(map(len, entries), default=0), default=[])
