"""A study's page: one HTML file that needs nothing beside it, with charts, claims, checkpoints and configs."""

from __future__ import annotations

import base64
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.report import data, save
from isoloss.report.charts import VERSION, Spec
from isoloss.report.data import Column

# the class and the sign of each verdict: the sign and the words carry it, not the color
_BADGES = {
    "shown": ("shown", "✓"),
    "not shown": ("not-shown", "○"),
    "contradicted": ("contradicted", "✗"),
    "not tested": ("not-tested", "–"),
    "no verdict at this scale": ("not-tested", "–"),
}

IMAGE_PIXELS_PER_INCH = 100  # of the images that stand in for the charts where JavaScript is off


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One key finding: a short headline, and a sentence or two with the numbers."""

    headline: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its caption."""

    name: str  # of its files: `figures/NAME.pdf` and `.png` beside the page, and those that the page saves
    title: str  # heading
    chart: Spec  # the interactive chart
    caption: str  # what is seen
    formats: tuple[str, ...] = ("pdf", "png")  # of its files

    @property
    def files(self) -> dict[str, str]:
        """The paths of its files, relative to the page, by format."""
        return {kind: f"figures/{self.name}.{kind}" for kind in self.formats}


@dataclass(frozen=True, kw_only=True)
class SmallFigure:
    """A chart without interaction, drawn into the page as it is."""

    chart: Spec  # the chart
    description: str  # the same in words, for who cannot see it


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell: its text, the number it is sorted by (None: by the text), and that number's standard error."""

    text: str
    sort: float | None = None
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader can sort by each column."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointTable(Table):
    """The table of checkpoints, which the reader can also filter, save, and see in the charts."""

    keys: tuple[str, ...]  # names of the columns in files: run, group, size, parameters, step, and the measures
    units: Mapping[str, str]  # of the measures, as they are in files


@dataclass(frozen=True, kw_only=True)
class ClaimSection:
    """A claim of the paper and a study's verdict on it."""

    id: str
    statement: str
    paper: str  # the paper's own figure
    verdicts: tuple[tuple[str, str], ...]  # each verdict with its cases in words; without them where all cases agree
    columns: tuple[str, ...]  # of the table, one of them `verdict`; empty where nothing was compared
    rows: tuple[tuple[str, ...], ...]  # a case each
    explanations: tuple[str, ...]  # what was compared, by case, or why nothing was
    figures: tuple[SmallFigure, ...] = ()  # the cases' differences with their intervals


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says. Every text is plain text."""

    title: str  # heading
    lead: tuple[str, ...]  # what this is, a paragraph each
    findings: tuple[Finding, ...]  # the key findings, the most important first
    claims: tuple[ClaimSection, ...]  # the paper's claims and the study's verdicts
    figures: tuple[Figure, ...]  # the charts
    checkpoints: CheckpointTable  # every evaluated checkpoint
    command: str  # what makes the page again
    settings: Mapping[str, str]  # how it was made, by name: scale, seeds, versions, device, threads
    rule: tuple[str, ...] = ()  # how the verdicts on the claims are reached, a paragraph each
    warning: str = ""  # shown at the top, e.g. that no verdict is given
    answer: tuple[str, ...] = ()  # what the study answers, in sentences
    interim: str = ""  # how much of the study is done; empty: all
    tables: Mapping[str, Table] = field(default_factory=dict)  # what was compared, by heading
    configs: Mapping[str, str] = field(default_factory=dict)  # the resolved config of each run, as TOML


def checkpoint_table(table: pl.DataFrame, shown: tuple[Column, ...] | None = None) -> CheckpointTable:
    """Return the table of all evaluated checkpoints.

    Raises:
        IsolossError: The table lacks a column or holds a number that cannot be shown.
    """
    shown = data.measures(table) if shown is None else shown
    frame = data.prepare(table, shown)
    raw = {(row["run"], row["step"]): row for row in table.iter_rows(named=True)}
    rows = tuple(
        (
            Cell(text=row["run"]),
            Cell(text=row["group"]),
            Cell(text=row["size"], sort=row["parameters"]),
            Cell(text=f"{row['parameters']:,}", sort=row["parameters"]),
            Cell(text=f"{row['step']:,}", sort=row["step"]),
            *(Cell(text=row[f"{m.field}_text"], sort=own[m.name], error=own[m.stderr_column]) for m in shown),
        )
        for row in frame.iter_rows(named=True)
        for own in (raw[row["run"], row["step"]],)
    )
    columns = ("Run", "Group", "Size", "Parameters", "Step", *(m.axis_title for m in shown))
    return CheckpointTable(
        caption="Values are given ± one standard error.",
        columns=columns,
        rows=rows,
        keys=("run", "group", "size", "parameters", "step", *(m.name for m in shown)),
        units={m.name: "fraction" if m.percent else m.unit for m in shown},
    )


def render(page: Page) -> str:
    """Return the page as one HTML document; the scripts that draw the charts (about 0.9 MB) are inside.

    Raises:
        IsolossError: A row of the table that does not have one cell a column.
    """
    for table in (*page.tables.values(), page.checkpoints):
        for row in table.rows:
            if len(row) != len(table.columns):
                raise IsolossError(
                    f"a table of {len(table.columns)} columns has a row of {len(row)} cells: {row[0].text!r}"
                )
    template = _environment().get_template("page.html.j2")
    specs = [figure.chart for figure in page.figures]
    datasets = {name: rows for spec in specs for name, rows in spec["datasets"].items()}
    return template.render(
        page=page,
        specs=[spec | {"datasets": list(spec["datasets"])} for spec in specs],
        datasets={name: _by_column(rows) for name, rows in datasets.items()},
        configs=_by_line(page.configs),
        verdicts=_counts(page.claims),
        badges=_BADGES,
        vega=_vega(),
    )


def _by_column(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows with each key once; numbers have seven digits, enough to draw them, and null is what a row lacks."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_drawn(row.get(key)) for row in rows] for key in keys}


def _drawn(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _by_line(configs: Mapping[str, str]) -> dict[str, Any]:
    """Return the configs with each line that any of them has once, and the numbers of its lines for each run."""
    numbers: dict[str, int] = {}
    runs = {
        run: [numbers.setdefault(line, len(numbers)) for line in text.splitlines()] for run, text in configs.items()
    }
    return {"lines": list(numbers), "runs": runs}


def _counts(claims: Sequence[ClaimSection]) -> dict[str, int]:
    """Return how many cases of the claims have each verdict."""
    found: Counter[str] = Counter()
    for claim in claims:
        if claim.columns:
            found.update(row[claim.columns.index("verdict")] for row in claim.rows)
        else:
            found.update(verdict for verdict, _ in claim.verdicts)
    return {verdict: found[verdict] for verdict in _BADGES if found[verdict]}


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("isoloss.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["image"] = _image
    environment.filters["drawn"] = lambda chart: Markup(save.inline_svg(chart))  # noqa: S704 - Vega escapes its texts
    return environment


def _image(chart: Spec) -> str:
    """Return a chart as the address of an image that is inside the address."""
    return "data:image/png;base64," + base64.b64encode(save.png(chart, IMAGE_PIXELS_PER_INCH)).decode()


def script_json(document: Any) -> Markup:
    r"""Return JSON that can stand in a `<script>` element: no text in it can end the element or open another.

    Example:
        >>> print(script_json({"run": "</script>"}))
        {"run":"\u003c/script\u003e"}
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 is escaped as well
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped just above


@functools.cache
def _vega() -> Markup:
    """Vega, Vega-Lite and Vega-Embed as one script, of the versions that the charts are written for."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VERSION)
    if "</script" in script.lower() or "<!--" in script:
        raise IsolossError("this version of vl-convert cannot be put inside a page: its script holds a script tag")
    return Markup(script)  # noqa: S704 - checked just above
