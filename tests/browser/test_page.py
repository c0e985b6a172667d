"""The page in a real browser: charts are drawn, respond to the pointer, and ask the network for nothing."""

import json
import re
import shutil
import subprocess

import polars as pl
import pytest

from isoloss.report import charts, html
from isoloss.report.data import KL, TRACE, accuracy

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# points at the first checkpoint, clicks it, sorts the table by step, and writes down what happened
PROBE = """
<pre id="probe">nothing</pre>
<script>
const violations = [], followed = [], root = document.documentElement;
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
HTMLAnchorElement.prototype.dispatchEvent = function () { followed.push(this.getAttribute("href")); return true; };
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
(async () => {
  while (document.querySelectorAll(".chart svg").length < 2) await pause(50);
  await pause(200);
  const chart = document.querySelector("#chart-1 svg");
  const isPoint = (path) => path.getAttribute("aria-roledescription") === "point";
  const points = () => [...chart.querySelectorAll(".mark-symbol path")].filter(isPoint);
  const opacities = () => points().map((p) => Number(p.getAttribute("opacity") ?? 1));
  const before = opacities();
  const target = points()[0], box = target.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
  for (const kind of ["pointerover", "pointermove", "mouseover", "mousemove"]) {
    target.dispatchEvent(new (kind.startsWith("p") ? PointerEvent : MouseEvent)(kind, at));
  }
  await pause(300);
  const tooltip = document.getElementById("vg-tooltip-element")?.textContent ?? "";
  const after = opacities();
  target.dispatchEvent(new MouseEvent("click", at));
  for (const kind of ["pointerout", "mouseout"]) {
    target.dispatchEvent(new (kind.startsWith("p") ? PointerEvent : MouseEvent)(kind, at));
  }
  await pause(200);
  const left = opacities();
  const entry = chart.querySelector(".role-legend-symbol path");  // AdamW
  entry.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  await pause(200);
  const picked = opacities();
  document.querySelectorAll(".sortable th button")[4].click();
  const steps = [...document.querySelectorAll(".sortable tbody tr")].map((row) => Number(row.cells[4].dataset.sort));
  const widths = [...document.querySelectorAll(".chart svg")].map((svg) => svg.getBoundingClientRect().right);
  document.getElementById("probe").textContent = JSON.stringify({ before, after, left, picked, tooltip,
    followed, steps, violations, widths, page: root.clientWidth, scroll: root.scrollWidth });
})().catch((error) => { document.getElementById("probe").textContent = error.stack; });
</script>
"""


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
            rows.append({**row, "path": f"runs/{run}/run.json", "kl": 0.14 - 0.02 * i, "kl_stderr": 0.0012})
    columns = {"trace": 50.0, "trace_stderr": 2.0, "probe-root": 0.6, "probe-root_stderr": 0.006}
    places = pl.int_range(pl.len())  # no two points in one place
    return pl.DataFrame(rows).with_columns(((places * 0.05 + 1) * value).alias(name) for name, value in columns.items())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1300, 500])
def test_the_page_works(table, tmp_path, width):
    root = accuracy("root")
    drawn = (charts.scatter(table, ((KL, root), (TRACE, root))), charts.curves(table, (KL, TRACE, root)))
    page = html.Page(
        title="A study",
        lead=(),
        findings=(),
        claims=(),
        figures=tuple(html.Figure(name="n", title="t", chart=chart, caption="c") for chart in drawn),
        checkpoints=html.checkpoint_table(table),
        command="isoloss",
        settings={},
    )
    file = tmp_path / "index.html"
    file.write_text(PROBE.join(html.render(page).rsplit("</body>", 1)))
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},2000", "--virtual-time-budget=10000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    assert probe.startswith("{"), probe
    found = json.loads(probe.replace("&amp;", "&"))
    assert found["violations"] == []
    assert len(found["before"]) == 2 * table.height
    assert set(found["before"]) == {1}
    # the run under the pointer, three of eight checkpoints, stays in front in both panels
    assert sorted(found["after"]) == [0.12] * 10 + [1] * 6
    assert set(found["left"]) == {1}
    assert sorted(found["picked"]) == [0.12] * 4 + [1] * 12  # all but the two of SGD, in both panels
    assert "adamw-d16" in found["tooltip"]
    assert "0.1400 ± 0.0012" in found["tooltip"]
    assert found["followed"] == ["runs/adamw-d16/run.json"]
    assert found["steps"] == sorted(table["step"])
    assert max(found["widths"]) <= found["page"]
    assert found["scroll"] <= found["page"]
