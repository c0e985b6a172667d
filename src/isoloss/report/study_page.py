"""A study's page: one HTML file that needs nothing beside it, with charts, claims, checkpoints and configs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.report import data, save
from isoloss.report.charts import VERSION, Spec
from isoloss.report.data import Column
from isoloss.report.html import environment

# by the values of `isoloss.studies.claims.Verdict`, which this layer may not import, the class and the sign of each:
# the sign and the words carry the verdict, not the color
_BADGES = {
    "shown": ("shown", "✓"),
    "not shown": ("not-shown", "○"),
    "contradicted": ("contradicted", "✗"),
    "not tested": ("not-tested", "–"),
    "no verdict at this scale": ("not-tested", "–"),
}

Cell = tuple[
    str, float | None, float | None
]  # of a table: its text, the number it is sorted by, and its standard error


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


def render(
    *,
    title: str,
    lead: Sequence[str],
    figures: Sequence[Figure],
    table: pl.DataFrame,
    shown: Sequence[Column],
    command: str,
    settings: Mapping[str, str],
    findings: Sequence[Finding] = (),
    claims: Sequence[Mapping[str, Any]] = (),
    rule: Sequence[str] = (),
    warning: str = "",
    answer: Sequence[str] = (),
    interim: str = "",
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    configs: Mapping[str, str] | None = None,
) -> str:
    """Return a study's page as one HTML document; the scripts that draw the charts (about 0.9 MB) are inside.

    Every text is plain text. A cell of a table is its text, the number it is sorted by (None: by the text), and that
    number's standard error.

    Args:
        title: The heading.
        lead: What this is, a paragraph each.
        figures: The charts.
        table: Every evaluated checkpoint, as `isoloss.report.data.prepare` takes it.
        shown: The measures to show of them.
        command: What makes the page again.
        settings: How it was made, by name: scale, seeds, versions, device, threads.
        findings: The key findings, the most important first.
        claims: For each claim its `result` (`isoloss.studies.claims.ClaimResult`), the `columns` and `rows` of its
            table, what was compared in `explanations`, and `figures`: small charts, each with its description.
        rule: How the verdicts on the claims are reached, a paragraph each.
        warning: Shown at the top, e.g. that no verdict is given.
        answer: What the study answers, in sentences.
        interim: How much of the study is done; empty: all.
        tables: What was compared, by heading: `caption`, `columns` and `rows` of cells.
        configs: The resolved config of each run, as TOML.

    Raises:
        IsolossError: The table of checkpoints lacks a column or holds a number that cannot be shown.
    """
    specs = [figure.chart for figure in figures]
    datasets = {name: rows for spec in specs for name, rows in spec["datasets"].items()}
    return (
        _environment()
        .get_template("study.html.j2")
        .render(
            title=title,
            lead=lead,
            figures=figures,
            command=command,
            settings=settings,
            findings=findings,
            claims=claims,
            rule=rule,
            warning=warning,
            answer=answer,
            interim=interim,
            tables=tables or {},
            checkpoints=checkpoint_cells(table, shown),
            columns=("Run", "Group", "Size", "Parameters", "Step", *(m.axis_title for m in shown)),
            keys=(*data.COLUMNS, *(m.name for m in shown)),  # of the columns, in the files that the reader saves
            units={m.name: "fraction" if m.percent else m.unit for m in shown},
            # several charts may show the same rows: they are in the page once, and its script puts them back
            specs=[spec | {"datasets": list(spec["datasets"])} for spec in specs],
            datasets={name: _by_column(rows) for name, rows in datasets.items()},
            configs=configs or {},
            config_lines=_by_line(configs or {}),
            verdicts=_counts([claim["result"] for claim in claims]),
            badges=_BADGES,
            vega=_vega(),
        )
    )


def checkpoint_cells(table: pl.DataFrame, shown: Sequence[Column]) -> list[list[Cell]]:
    """Return the cells of the table of all evaluated checkpoints.

    Raises:
        IsolossError: The table lacks a column or holds a number that cannot be shown.
    """
    # `prepare` turns accuracies into percent; tables are sorted and saved by the numbers as they are here
    raw = {(row["run"], row["step"]): row for row in table.iter_rows(named=True)}
    return [
        [
            (row["run"], None, None),
            (row["group"], None, None),
            (row["size"], row["parameters"], None),
            *((f"{row[name]:,}", row[name], None) for name in ("parameters", "step")),
            *((row[f"{m.field}_text"], numbers[m.name], numbers[m.stderr_column]) for m in shown),
        ]
        for row in data.prepare(table, shown).iter_rows(named=True)
        for numbers in (raw[row["run"], row["step"]],)
    ]


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


def _counts(results: Sequence[Any]) -> dict[str, int]:
    """Return how many cases of the claims have each verdict; a claim that was not tested counts once."""
    found: Counter[str] = Counter()
    for result in results:
        is_tested = any(answer.numbers for answer in result.answers)
        found.update([answer.verdict for answer in result.answers] if is_tested else list(result.verdicts))
    return {verdict: found[verdict] for verdict in _BADGES if found[verdict]}


def _environment() -> jinja2.Environment:
    made = environment()
    made.filters["drawn"] = lambda chart: Markup(save.inline_svg(chart))  # noqa: S704 - Vega escapes its texts
    return made


@functools.cache
def _vega() -> Markup:
    """Vega, Vega-Lite and Vega-Embed as one script, of the versions that the charts are written for."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VERSION)
    if "</script" in script.lower() or "<!--" in script:
        raise IsolossError("this version of vl-convert cannot be put inside a page: its script holds a script tag")
    return Markup(script)  # noqa: S704 - checked just above
