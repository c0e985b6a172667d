import dataclasses
import re

import polars as pl
import pytest
from panel_rows import check

from isoloss.errors import IsolossError
from isoloss.report import charts, data
from isoloss.report.data import KL, TRACE, Style, accuracy

ROOT = accuracy("root")
PAIR = ((KL, ROOT), (TRACE, ROOT))


def draw(name, table, **settings):
    if name == "scatter":
        return charts.scatter(table, PAIR, **settings)
    return getattr(charts, name)(table, (KL, TRACE, ROOT), **settings)


def rows(spec, panel, layer=-1):
    return spec["datasets"][spec["concat"][panel]["layer"][layer]["data"]["name"]]


CHARTS = pytest.mark.parametrize("name", ["scatter", "curves", "sizes"])


@pytest.mark.parametrize("name", ["scatter", "curves", "sizes", "magnified"])
def test_charts_are_vega_lite(table, name):
    check(magnified(table) if name == "magnified" else draw(name, table))


@CHARTS
def test_every_point_names_its_run_and_its_numbers(table, name):
    spec = draw(name, table)
    for panel in range(len(spec["concat"])):
        points = spec["concat"][panel]["layer"][-1]
        assert points["mark"]["type"] == "point"
        shown = {item["field"]: item["title"] for item in points["encoding"]["tooltip"]}
        texts = ["kl_text", "trace_text", "probe_root_text", "probe_prefix_4_text"]
        assert {"run", "group", "size", "parameters", "step", *texts} == set(shown)
        assert shown["kl_text"] == "KL to the truth (nats per token)"
        drawn = rows(spec, panel)
        assert len(drawn) == table.height
        assert set(shown) <= set(drawn[0])
        assert drawn[-1]["kl_text"] == "0.0480 ± 0.0012"


@CHARTS
def test_one_selection_is_shared_by_all_panels(table, name):
    spec = draw(name, table)
    views = [panel["layer"][-1]["name"] for panel in spec["concat"]]
    assert len(set(views)) == len(views)
    *selections, marked = spec["params"]
    assert [param["name"] for param in selections] == ["hovered", "picked_run", "picked_group", "picked_size"]
    assert all(param["views"] == views for param in selections)
    assert [param.get("bind") for param in selections] == [None, None, "legend", "legend"]
    assert marked == {"name": "marked", "value": None}
    picked = [{"param": param["name"]} for param in selections]
    front = {"and": [*picked, "!marked || marked[datum.run + '@' + datum.step]"]}
    for panel in spec["concat"]:
        assert panel["layer"][-1]["encoding"]["opacity"]["condition"]["test"] == front


def test_panels_of_one_vertical_measure_share_and_name_it_once(table):
    spec = charts.scatter(table, ((KL, TRACE), (TRACE, ROOT), (KL, ROOT)))
    up = [panel["layer"][-1]["encoding"]["y"] for panel in spec["concat"]]
    assert [y["title"] for y in up] == [TRACE.axis_title, ROOT.axis_title, None]
    assert [y["scale"]["type"] for y in up] == ["log", "linear", "linear"]
    assert up[1]["scale"] == up[2]["scale"]
    across = [panel["layer"][-1]["encoding"]["x"]["title"] for panel in spec["concat"]]
    assert across == [KL.axis_title, TRACE.axis_title, KL.axis_title]


def test_scatter_has_bars_both_ways(table):
    left, right = draw("scatter", table)["concat"]
    assert right["layer"][-1]["encoding"]["x"]["scale"]["type"] == "log"
    for panel, field in ((left, "kl"), (right, "trace")):
        bars = [layer["encoding"] for layer in panel["layer"] if layer["mark"]["type"] == "rule"]
        assert [(b["y"]["field"], b["y2"]["field"]) for b in bars if "y2" in b] == [
            ("probe_root_low", "probe_root_high")
        ]
        assert [(b["x"]["field"], b["x2"]["field"]) for b in bars if "x2" in b] == [(f"{field}_low", f"{field}_high")]


def test_curves_have_a_band_a_line_and_a_logarithmic_trace(table):
    kl, trace, _ = draw("curves", table)["concat"]
    band = kl["layer"][0]
    assert band["mark"]["type"] == "area"
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("kl_low", "kl_high")
    assert band["encoding"]["detail"]["field"] == "run"
    assert kl["layer"][-1]["encoding"]["y"]["scale"]["type"] == "linear"
    assert trace["layer"][-1]["encoding"]["y"]["scale"]["type"] == "log"


def test_sizes_have_a_line_through_the_means(table):
    spec = draw("sizes", table)
    means = [row["kl"] for row in rows(spec, 0, layer=0) if row["group"] == "AdamW"]
    assert means == pytest.approx([0.1075, 0.0775])
    assert spec["concat"][0]["layer"][-1]["encoding"]["x"]["scale"]["type"] == "log"


def test_colors_follow_the_style_even_if_the_table_is_cut(table):
    spec = draw("curves", table.filter(pl.col("group") != "AdamW"), style=Style.of(table))
    scale = spec["concat"][0]["layer"][-1]["encoding"]["color"]["scale"]
    assert scale == {"domain": ["AdamW", "SGD continuation"], "range": list(data.COLORS[:2])}


def test_one_size_needs_no_second_legend(table):
    spec = draw("curves", table.filter(pl.col("size") == "d64"))
    assert [param["name"] for param in spec["params"]] == ["hovered", "picked_run", "picked_group", "marked"]
    assert "shape" not in spec["concat"][0]["layer"][-1]["encoding"]


@CHARTS
def test_one_checkpoint_is_enough(table, name):
    assert len(rows(draw(name, table[:1]), 0)) == 1


@CHARTS
def test_a_bad_table_is_refused(table, name):
    with pytest.raises(IsolossError, match="no column kl_stderr"):
        draw(name, table.drop("kl_stderr"))


BAND = (0.042, 0.06)  # of the KL: both checkpoints of SGD but none of d16, and the last of d64
LOG_KL = dataclasses.replace(KL, log=True)


def magnified(table, **settings):
    baselines = {"probe-root": {"Look-up table": 0.4, "One-hot tokens": 0.3}}
    settings = {"band": BAND, "baselines": baselines, **settings}
    return charts.magnified(table, LOG_KL, [TRACE], [ROOT, accuracy("prefix-4")], **settings)


def marks(panel, kind):
    return [layer for layer in panel["layer"] if layer["mark"]["type"] == kind]


def test_magnified_panels_show_the_checkpoints_in_the_band_alone(table):
    spec = magnified(table)
    assert len(spec["concat"]) == 6  # two measures: all, then the band against the KL and against the trace
    assert [len(rows(spec, panel)) for panel in range(3)] == [table.height, 3, 3]
    in_band = table.filter(pl.col("kl").is_between(*BAND))
    for panel in (1, 2):
        found = {(row["run"], row["step"]) for row in rows(spec, panel)}
        assert found == set(in_band.select("run", "step").iter_rows())
    titles = [panel["layer"][-1]["encoding"]["x"]["title"] for panel in spec["concat"][:3]]
    assert titles == [KL.axis_title, KL.axis_title, TRACE.axis_title]


def test_the_rectangle_is_what_the_panel_beside_it_shows(table):
    everything, near, *_ = magnified(table)["concat"]
    (rectangle,) = marks(everything, "rect")
    (corners,) = magnified(table)["datasets"][rectangle["data"]["name"]]
    axes = near["layer"][-1]["encoding"]
    assert axes["x"]["scale"]["domain"] == [corners["x"], corners["x2"]] == list(BAND)
    assert axes["y"]["scale"]["domain"] == [corners["y"], corners["y2"]]
    assert not marks(near, "rect")
    # bars of checkpoints in the band may end outside; their points do not
    assert [layer["mark"].get("clip") for layer in near["layer"]] == [True, True, True, None]


def test_a_band_ends_at_the_axis_where_it_reaches_beyond(table):
    everything, near, *_ = magnified(table, band=(-1.0, 1.0))["concat"]
    domains = [panel["layer"][-1]["encoding"]["x"]["scale"]["domain"] for panel in (everything, near)]
    assert domains[0] == domains[1]
    assert 0 < domains[0][0] < table.get_column("kl").min()


def test_baselines_are_lines_among_all_checkpoints(table):
    spec = magnified(table)
    everything, near, _, other, *_ = spec["concat"]
    (lines,) = (layer for layer in marks(everything, "rule") if "strokeDash" in layer["encoding"])
    drawn = spec["datasets"][lines["data"]["name"]]
    assert drawn == [{"name": "Look-up table", "y": 40.0}, {"name": "One-hot tokens", "y": 30.0}]
    low, high = lines["encoding"]["y"]["scale"]["domain"]
    assert low < 30
    assert high > 64.4
    patterns = lines["encoding"]["strokeDash"]["scale"]["range"]
    assert len({tuple(pattern) for pattern in patterns}) == 2
    for panel in (near, other):  # not in the band, and not of a measure without baselines
        assert not [layer for layer in marks(panel, "rule") if "strokeDash" in layer["encoding"]]


def test_what_cannot_be_magnified_is_refused(table):
    with pytest.raises(IsolossError, match=re.escape("no checkpoint has a kl between 1 and 2")):
        magnified(table, band=(1.0, 2.0))
    many = {"probe-root": {f"baseline {i}": 0.1 for i in range(5)}}
    with pytest.raises(IsolossError, match="there are 5 baselines and 4 patterns of a line"):
        magnified(table, baselines=many)
