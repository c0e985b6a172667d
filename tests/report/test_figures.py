import hashlib
import os
import subprocess
import sys

import matplotlib as mpl
import polars as pl
import pytest
from notes import note_of

from isoloss.errors import IsolossError
from isoloss.report import figures
from isoloss.report.data import KL, TRACE, accuracy

ROOT = accuracy("root")


def draw(name, table):
    if name == "scatter_pair":
        return figures.scatter_pair(table, ROOT)
    return getattr(figures, name)(table, (KL, TRACE, ROOT, accuracy("prefix-4")))


@pytest.mark.parametrize("name", ["scatter_pair", "curves", "sizes"])
def test_the_same_table_gives_the_same_bytes(table, tmp_path, name):
    first = figures.save(draw(name, table), tmp_path / "a" / name)
    second = figures.save(draw(name, table), tmp_path / "b" / name)
    assert [path.name for path in first] == [f"{name}.pdf", f"{name}.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    pdf = first[0].read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"CreationDate" not in pdf
    assert b"/Type3" not in pdf  # letters are fonts, not drawings
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf
    assert first[1].read_bytes().startswith(b"\x89PNG")


def test_another_process_gives_the_same_bytes(table, tmp_path):
    table.write_parquet(tmp_path / "table.parquet")
    program = (
        "import sys, polars as pl, pathlib; from isoloss.report import data, figures\n"
        "folder = pathlib.Path(sys.argv[1]); table = pl.read_parquet(folder / 'table.parquet')\n"
        "figures.save(figures.scatter_pair(table, data.accuracy('root')), folder / 'other')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Pacific/Auckland"}
    subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True, env=environment)
    figures.save(draw("scatter_pair", table), tmp_path / "here")
    for kind in ("pdf", "png"):
        here, other = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("here", "other"))
        assert hashlib.sha256(here).hexdigest() == hashlib.sha256(other).hexdigest()


def test_the_callers_settings_neither_matter_nor_change(table, tmp_path):
    figures.save(draw("curves", table), tmp_path / "plain")
    with mpl.rc_context({"lines.linewidth": 9.0, "savefig.dpi": 30}):
        before = dict(mpl.rcParams)
        figures.save(draw("curves", table), tmp_path / "fat")
        assert dict(mpl.rcParams) == before
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "fat.png").read_bytes()
    assert "matplotlib.pyplot" not in sys.modules or not mpl.pyplot.get_fignums()


def test_what_is_drawn_is_the_table(table):
    left, right = draw("scatter_pair", table).axes
    assert left.get_ylim() == right.get_ylim()
    assert right.get_xscale() == "log"
    bars = left.containers[1]  # the AdamW d64 run
    assert bars.lines[0].get_xdata().tolist() == pytest.approx([0.11, 0.0775, 0.045])
    assert bars.lines[0].get_ydata().tolist() == pytest.approx([55.0, 58.5, 62.0])
    (horizontal, vertical) = bars.lines[2]
    assert horizontal.get_segments()[0][:, 0].tolist() == pytest.approx(
        [0.11 - 1.96 * 0.0012, 0.11 + 1.96 * 0.0012], 1e-4
    )
    assert vertical.get_segments()[0][:, 1].tolist() == pytest.approx([55 - 1.96 * 0.6, 55 + 1.96 * 0.6], 1e-4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scatter_pair", "Bars: 95 % confidence intervals"),
        ("curves", "Bars and bands: 95 % confidence intervals"),
        ("sizes", "Bars: 95 % confidence intervals; lines: a group's means"),
    ],
)
def test_a_figure_says_what_its_bars_are(table, name, text):
    assert note_of(draw(name, table)) == text


def test_the_note_has_room_in_a_single_panel(table):
    assert note_of(figures.sizes(table, (KL,))).startswith("Bars: 95 %")


def test_panels_of_one_vertical_measure_share_and_name_it_once(table):
    axes = figures.scatter(table, ((KL, TRACE), (TRACE, ROOT), (KL, ROOT))).axes
    assert [ax.get_ylabel() for ax in axes] == [TRACE.axis_title, ROOT.axis_title, ""]
    assert [ax.get_yscale() for ax in axes] == ["log", "linear", "linear"]
    assert axes[1].get_ylim() == axes[2].get_ylim()
    assert axes[2].get_xlabel() == KL.axis_title


def test_names_with_dollars_are_names(table, tmp_path):
    hostile = table.with_columns(pl.lit(r"$\frac{ $<script>").alias("group"))
    figures.save(draw("sizes", hostile), tmp_path / "hostile")


def test_a_file_that_cannot_be_written_is_an_error(table, tmp_path):
    (tmp_path / "figure.pdf").mkdir()
    with pytest.raises(IsolossError, match=r"cannot write .*figure\.pdf"):
        figures.save(draw("scatter_pair", table), tmp_path / "figure")
