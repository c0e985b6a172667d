"""A study's page: one HTML file that needs no network, with charts, claims and every evaluated checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import jinja2
import polars as pl
from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.data import Column

# the class and the sign of each verdict: the sign and the words carry it, not the color
_BADGES = {
    "shown": ("shown", "✓"),
    "not shown": ("not-shown", "○"),
    "contradicted": ("contradicted", "✗"),
    "not tested": ("not-tested", "–"),
    "no verdict at this scale": ("not-tested", "–"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One key finding: a short headline, and a sentence or two with the numbers."""

    headline: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its caption."""

    name: str  # of its files beside the page, `figures/NAME.pdf` and `.png`; the PNG is shown where JavaScript is off
    title: str  # heading
    chart: alt.ConcatChart  # the interactive chart
    caption: str  # what is seen
    formats: tuple[str, ...] = ("pdf", "png")  # of its files

    @property
    def files(self) -> dict[str, str]:
        """The paths of its files, relative to the page, by format."""
        return {kind: f"figures/{self.name}.{kind}" for kind in self.formats}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table cell: its text, the number it is sorted by (None: by the text), and the file it links to."""

    text: str
    sort: float | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that the reader can sort by each column."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ClaimSection:
    """A claim of the paper and a study's verdict on it."""

    id: str
    statement: str
    paper: str  # the paper's own figure
    verdict: str  # of all cases
    columns: tuple[str, ...]  # of the table, one of them `verdict`; empty where nothing was compared
    rows: tuple[tuple[str, ...], ...]  # a case each
    explanations: tuple[str, ...]  # what was compared, by case, or why nothing was


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says. Every text is plain text."""

    title: str  # heading
    lead: tuple[str, ...]  # what this is, a paragraph each
    findings: tuple[Finding, ...]  # the key findings, the most important first
    claims: tuple[ClaimSection, ...]  # the paper's claims and the study's verdicts
    figures: tuple[Figure, ...]  # the charts
    checkpoints: Table  # every evaluated checkpoint
    command: str  # what makes the page again
    settings: Mapping[str, str]  # how it was made, by name: scale, seeds, versions, device, threads
    rule: tuple[str, ...] = ()  # how the verdicts on the claims are reached, a paragraph each
    warning: str = ""  # shown at the top, e.g. that no verdict is given
    answer: tuple[str, ...] = ()  # what the study answers, in sentences
    interim: str = ""  # how much of the study is done; empty: all
    tables: Mapping[str, Table] = field(default_factory=dict)  # what was compared, by heading


def checkpoint_table(table: pl.DataFrame, shown: tuple[Column, ...] | None = None) -> Table:
    """Return the table of all evaluated checkpoints, each run's name linking to its config.

    Raises:
        IsolossError: The table lacks a column or holds a number that cannot be shown.
    """
    shown = data.measures(table) if shown is None else shown
    frame = data.prepare(table, shown)
    paths = dict(zip(table.get_column("run"), table.get_column("path"), strict=True))
    rows = tuple(
        (
            Cell(text=row["run"], path=paths[row["run"]]),
            Cell(text=row["group"]),
            Cell(text=row["size"], sort=row["parameters"]),
            Cell(text=f"{row['parameters']:,}", sort=row["parameters"]),
            Cell(text=f"{row['step']:,}", sort=row["step"]),
            *(Cell(text=row[f"{m.field}_text"], sort=row[m.field]) for m in shown),
        )
        for row in frame.iter_rows(named=True)
    )
    columns = ("Run", "Group", "Size", "Parameters", "Step", *(m.axis_title for m in shown))
    return Table(caption="Values are given ± one standard error.", columns=columns, rows=rows)


def render(page: Page) -> str:
    """Return the page as one HTML document; the scripts that draw the charts (about 0.9 MB) are inside.

    Raises:
        IsolossError: A row of the table that does not have one cell a column, or a link that is not a relative path.
    """
    for table in (*page.tables.values(), page.checkpoints):
        for row in table.rows:
            if len(row) != len(table.columns):
                raise IsolossError(
                    f"a table of {len(table.columns)} columns has a row of {len(row)} cells: {row[0].text!r}"
                )
    template = _environment().get_template("page.html.j2")
    return template.render(
        page=page,
        specs=[figure.chart.to_dict(validate=False) for figure in page.figures],
        badges=_BADGES,
        vega=_vega(),
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("isoloss.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["href"] = data.href
    environment.filters["script_json"] = script_json
    return environment


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

    major, minor, _ = alt.SCHEMA_VERSION.removeprefix("v").split(".")
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", f"{major}.{minor}")
    if "</script" in script.lower() or "<!--" in script:
        raise IsolossError("this version of vl-convert cannot be put inside a page: its script holds a script tag")
    return Markup(script)  # noqa: S704 - checked just above
