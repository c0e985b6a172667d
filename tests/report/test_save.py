"""Charts as files for a paper: the same bytes every time, and what a reader needs on them."""

import dataclasses
import os
import subprocess
import sys

import polars as pl
import pytest

from isoloss.errors import IsolossError
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, accuracy
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.panels import Axis, Panel, Series
from isoloss.report.panels import draw as draw_panels
from isoloss.report.save import AXES, PANEL, printed, save

ROOT = accuracy("root")
PAIR = ((KL, ROOT), (TRACE, ROOT))


def draw(name, table):
    if name == "scatter":
        return charts.scatter(table, PAIR)
    return getattr(charts, name)(table, (KL, TRACE, ROOT, accuracy("prefix-4")))


def test_another_process_gives_the_same_bytes(table, tmp_path):
    table.write_parquet(tmp_path / "table.parquet")
    program = (
        "import sys, polars as pl, pathlib\nfrom isoloss.report import charts, data, save\n"
        "folder = pathlib.Path(sys.argv[1]); table = pl.read_parquet(folder / 'table.parquet')\n"
        "for kind in ('pdf', 'png', 'svg'):\n"
        "    save.save(charts.sizes(table, (data.KL, data.TRACE)), folder / 'other' / f'figure.{kind}')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Pacific/Auckland"}
    subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True, env=environment)
    written = {}
    for kind, start in (("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<svg")):
        save(charts.sizes(table, (KL, TRACE)), tmp_path / "here" / f"figure.{kind}")
        written[kind] = (tmp_path / "here" / f"figure.{kind}").read_bytes()
        assert written[kind].startswith(start)
        assert (tmp_path / "other" / f"figure.{kind}").read_bytes() == written[kind]
    assert b"CreationDate" not in written["pdf"]
    assert b"/Type3" not in written["pdf"]  # letters are fonts, not drawings
    assert b"LiberationSans" in written["pdf"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scatter", "Bars: 95 % confidence intervals"),
        ("curves", "Bars and bands: 95 % confidence intervals"),
        ("sizes", "Bars: 95 % confidence intervals; lines: means of a group"),
    ],
)
def test_a_figure_says_what_its_bars_are(table, name, text, tmp_path):
    assert printed(draw(name, table))["title"]["text"] == text
    save(draw(name, table), tmp_path / "a.svg")
    assert text in (tmp_path / "a.svg").read_text()


def test_panels_have_the_size_of_a_paper_in_equal_rows(table):
    spec = printed(draw("curves", table))
    assert {(panel["width"], panel["height"]) for panel in spec["concat"]} == {PANEL}
    assert spec["columns"] == 2  # of four panels
    assert spec["background"] == "white"
    assert "currentColor" not in str(spec["config"])


def test_a_legend_of_long_names_is_not_wider_than_the_panels(table):
    groups = ["a name that is as long as some names are in practice, or longer", "another one"]
    long = table.with_columns(
        pl.when(pl.col("group") == "AdamW").then(pl.lit(groups[0])).otherwise(pl.lit(groups[1])).alias("group")
    )
    assert printed(draw("scatter", table))["config"]["legend"]["columns"] == 4
    assert printed(draw("scatter", long))["config"]["legend"]["columns"] == 1
    assert 4.7 * len(groups[0]) < 2 * (PANEL[0] + AXES)


def test_names_with_markup_are_names(table, tmp_path):
    save(draw("sizes", table.with_columns(pl.lit(r"$\frac{ $<script>").alias("group"))), tmp_path / "hostile.svg")
    assert "<script>" not in (tmp_path / "hostile.svg").read_text()


def test_what_cannot_be_written_is_an_error(table, tmp_path):
    (tmp_path / "figure.pdf").mkdir()
    with pytest.raises(IsolossError, match=r"cannot write .*figure\.pdf"):
        save(draw("scatter", table), tmp_path / "figure.pdf")
    with pytest.raises(IsolossError, match=r"must end in .png, .svg or .pdf"):
        save(draw("scatter", table), tmp_path / "figure.gif")


def test_panels_that_belong_together_take_full_rows(table):
    ups = [ROOT, accuracy("prefix-4")]
    both = table.with_columns(pl.col("^trace.*$").name.map(lambda name: f"minimal-{name}"))
    four = charts.magnified(both, KL, [TRACE, MINIMAL_TRACE], ups, band=(0.0, 1.0))
    three = charts.magnified(table, KL, [TRACE], ups, band=(0.0, 1.0))
    assert [(len(printed(chart)["concat"]), printed(chart)["columns"]) for chart in (four, three)] == [(8, 2), (6, 3)]


def test_data_beside_a_figure_have_the_units_of_its_axes(table, tmp_path):
    minus = dataclasses.replace(TRACE, unit="times the control's", reference=1.0)
    save(charts.curves(table, (KL, ROOT, minus)), tmp_path / "a.csv")
    written = pl.read_csv(tmp_path / "a.csv")
    first = table.row(0, named=True)
    row = written.filter(pl.col("run") == first["run"], pl.col("step") == first["step"]).row(0, named=True)
    assert row["Probe accuracy, root (%)"] == pytest.approx(100 * first["probe-root"])
    assert row["Probe accuracy, root (%), high"] == pytest.approx(100 * (first["probe-root"] + 1.96 * 0.006), abs=0.01)
    assert "Trace of the Fisher (times the control's)" in row
    assert "trace" not in row


def test_data_of_intervals_name_their_panel(tmp_path):
    one = Interval(row="SGD", series="", value=2.0, low=1.0, high=3.0, text="2.0 ± 0.5")
    panels = [IntervalPanel(title=title, intervals=[one]) for title in ("trace (nats)", "accuracy (points)")]
    save(intervals(panels, ["SGD"], note="95 %"), tmp_path / "a.csv")
    assert pl.read_csv(tmp_path / "a.csv")["panel"].to_list() == ["trace (nats)", "accuracy (points)"]
    points = Series(name="SGD", color="#000000", points=[(1.0, 2.0)])
    flow = Series(name="flow", color="#000000", curve=[(1.0, 2.0), (2.0, 3.0)])
    drawn = [Panel(x=Axis(title="time"), y=Axis(title="flow"), series=[flow])]  # has no points
    drawn += [Panel(x=Axis(title="time"), y=Axis(title=title), series=[points]) for title in ("trace", "distance")]
    save(draw_panels(drawn, note=""), tmp_path / "b.csv")
    assert pl.read_csv(tmp_path / "b.csv")["panel"].to_list() == ["trace against time", "distance against time"]
