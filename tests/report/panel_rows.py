"""What a chart of `isoloss.report.panels` draws, read from its Vega-Lite specification."""

import altair
from altair.utils.schemapi import validate_jsonschema


def check(chart):
    """Compare a chart with the schema of Vega-Lite, which altair brings."""
    assert chart["$schema"] == altair.SCHEMA_URL
    validate_jsonschema(chart, altair.load_schema())


def panels(chart):
    """For each panel its encodings by layer: `points` (rows by series), `curves`, and the axes `x` and `y`."""
    spec = chart
    read = []
    for panel in spec["concat"]:
        layers = [layer for layer in panel["layer"] if "color" not in layer["mark"]]  # without the thin line
        data = [spec["datasets"][layer["data"]["name"]] for layer in layers]
        point = layers[-1]["encoding"]
        read.append(
            {
                "curves": by_series(data[0]),
                "points": by_series(data[-1]),
                "x": point["x"],
                "y": point["y"],
                "names": point["color" if "color" in point else "shape"]["scale"]["domain"],
                "markers": dict(zip(point["shape"]["scale"]["domain"], point["shape"]["scale"]["range"], strict=True)),
                "title": panel.get("title"),
            }
        )
    return read


def by_series(rows):
    """Rows by the name of their series."""
    found = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def xy(rows):
    return [[row["x"], row["y"]] for row in rows]
