"""The page in a real browser, alone in a folder: charts, table, configs and saved files, without any request."""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import polars as pl
import pytest

from isoloss.report import charts, data, study_page
from isoloss.report.data import KL, TRACE, accuracy
from isoloss.suites.page import suite_page
from synthetic_suite import answers, suite

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

# points at the first checkpoint, clicks it, picks, filters, sorts, ticks and saves, and writes down what happened
PROBE = Path(__file__).with_name("probe.html").read_text()
# clicks a checkpoint, draws over an area and filters, and counts what is in front in the first two charts
LINKED = Path(__file__).with_name("linked.html").read_text()


@pytest.fixture
def table():
    """Three runs; the first has three checkpoints, of KL 0.14 down."""
    rows = []
    for run, group, size, count in (
        ("adamw-d16", "AdamW", "d16", 3),
        ("adamw-d64", "AdamW", "d64", 3),
        ("sgd", "SGD", "d64", 2),
    ):
        for i in range(count):
            row = {"run": run, "group": group, "size": size, "parameters": 1000 * int(size[1:]), "step": 500 * (i + 1)}
            rows.append({**row, "kl": 0.14 - 0.02 * i, "kl_stderr": 0.0012})
    columns = {"trace": 50.0, "trace_stderr": 2.0, "probe-root": 0.6, "probe-root_stderr": 0.006}
    places = pl.int_range(pl.len())  # no two points in one place
    return pl.DataFrame(rows).with_columns(((places * 0.05 + 1) * value).alias(name) for name, value in columns.items())


def keys_of(table):
    return [f"{run}@{step}" for run, step in table.select("run", "step").iter_rows()]


def read(text, estimate):
    return [row for row in csv.DictReader(io.StringIO(text)) if row["estimate"] == estimate]


def page_of(table):
    """The page of a study with two figures."""
    root = accuracy("root")
    drawn = (charts.scatter(table, ((KL, root), (TRACE, root))), charts.curves(table, (KL, TRACE, root)))
    return study_page.render(
        title="A study",
        lede="",
        cards=(),
        sections=(),
        figures=tuple(
            study_page.Figure(name=f"a-{i}", title="t", chart=chart, caption="c")
            for i, chart in enumerate(drawn, start=1)
        ),
        table=table,
        shown=data.measures(table),
        command="isoloss",
        settings={},
        configs={run: f"steps = 1500\n\n[model]\nname = '{run}'\n" for run in table["run"].unique()},
    )


def browse(file, tmp_path, *options):
    """What Chromium prints when it opens a file."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=60000", *options, file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize(("num_runs", "at_most"), [(60, 5), (200, 10), (500, 3)])
def test_a_print_has_all_rows_or_none(table, tmp_path, num_runs, at_most):
    table = pl.concat([table[:1].with_columns(pl.lit(f"run-{i}").alias("run")) for i in range(num_runs)])
    file, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
    file.write_text(page_of(table))
    browse(file, tmp_path, f"--print-to-pdf={pdf}")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert 2 <= pages <= at_most
    assert (pages > 3) == (num_runs <= 200)


@pytest.mark.parametrize("width", [1300, 500])
def test_the_page_works(table, tmp_path, width):
    file = tmp_path / "elsewhere" / "moved.html"
    file.parent.mkdir()
    file.write_text(PROBE.join(page_of(table).rsplit("</body>", 1)))
    opened = browse(file, tmp_path, f"--window-size={width},2000", "--dump-dom")
    probe = re.search(r'<pre id="probe">(.*?)</pre>', opened, re.DOTALL)[1]
    assert probe.startswith("{"), probe
    found = json.loads(unescape(probe))
    assert (found["violations"], found["errors"]) == ([], [])
    assert len(found["before"]) == 2 * table.height
    assert set(found["before"]) == {1}
    # the run under the pointer, three of eight checkpoints, stays in front in both panels
    assert sorted(found["after"]) == [0.12] * 10 + [1] * 6
    assert set(found["left"]) == {1}
    assert sorted(found["picked"]) == [0.12] * 4 + [1] * 12  # all but the two of SGD, in both panels
    assert "adamw-d16" in found["tooltip"]
    assert "0.1400 ± 0.0012" in found["tooltip"]
    # picks in a chart mark rows
    keys = [f"{run}@{step}" for run, step in zip(table["run"], table["step"], strict=True)]
    assert found["pointed"] == keys[:3]
    assert found["marked"] == found["only"] == keys[:6]
    assert found["cleared"] == {"opacities": [1] * 16, "rows": keys, "marked": []}
    assert found["clicked"] == keys[:3]
    # filters and ticks bring points forward
    left = table.filter(pl.col("size") == "d64", pl.col("kl") < 0.13)
    assert found["filtered"]["rows"] == [key for key in keys if key in keys_of(left)]
    assert found["filtered"]["opacities"] == [1 if key in keys_of(left) else 0.12 for key in keys] * 2
    assert found["filtered"]["count"] == "3 of 8 rows shown"
    assert found["ticked"] == [1 if key == keys_of(left)[0] else 0.12 for key in keys] * 2
    assert found["choices"] == ["group", "size", "step"]
    assert found["chosen"] == keys[:3]
    steps = sorted(table["step"])
    assert found["sorts"] == [["ascending", steps], ["descending", steps[::-1]]]
    # the config, and saved files with all digits
    config = "steps = 1500\n\n[model]\nname = 'sgd'\n"
    assert found["config"] == ["sgd", config, ["name = 'sgd'\n"]]
    assert found["open"]
    assert found["closed"]
    saved = found["saved"]
    assert saved["sgd.toml"] == config
    assert [f"{row['run']}@{row['step']}" for row in read(saved["shown.csv"], "kl")] == keys_of(left)
    for name, given in (("kl", table["kl"]), ("probe-root", table["probe-root"])):
        for row, value, stderr in zip(
            read(saved["checkpoints.csv"], name), given, table[f"{name}_stderr"], strict=True
        ):
            assert (float(row["value"]), float(row["standard error"])) == (value, stderr)
    assert json.loads(saved["checkpoints.json"])[0] == {
        **{"run": left["run"][0], "group": "AdamW", "size": "d64", "parameters": 64_000, "step": left["step"][0]},
        **{"estimate": "kl", "value": left["kl"][0], "standard error": 0.0012, "unit": "nats per token"},
    }
    assert saved["a-1.svg"].startswith("<svg")
    assert base64.b64decode(saved["a-1.png"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert max(found["widths"]) <= found["page"]
    assert found["scroll"] <= found["page"]


def test_a_selection_in_one_chart_of_a_suite_holds_in_all_of_its_charts(tmp_path):
    table, file = suite(seeds=5, steps=6, measures=1), tmp_path / "page.html"
    file.write_text(LINKED.join(suite_page(table, answers(table)).rsplit("</body>", 1)))
    opened = browse(file, tmp_path, "--window-size=1300,2000", "--dump-dom")
    probe = re.search(r'<pre id="probe">(.*?)</pre>', opened, re.DOTALL)[1]
    assert probe.startswith("{"), probe
    found = json.loads(unescape(probe))
    assert found["errors"] == []
    assert found["scroll"] <= found["page"]
    # one of the 30 checkpoints has no minimal trace; of the five panels of each figure, three and one need it
    wide = table.wide()
    assert found["before"] == [3 * 29 + 2 * 30, 29 + 4 * 30]
    assert found["clicked"] == [5, 5]
    assert len(found["marked"]) == 1
    # the right half of the first panel, minimal trace against the outcome
    values = wide.drop_nulls("minimal-trace")["minimal-trace"]
    middle = (float(values.min()) * float(values.max())) ** 0.5
    assert 0 < len(found["rows"]) < 29
    assert abs(len(found["rows"]) - (values > middle).sum()) <= 3
    assert found["drawn"] == [5 * len(found["rows"])] * 2
    assert found["filtered"] == [5 * (values > 20).sum()] * 2
