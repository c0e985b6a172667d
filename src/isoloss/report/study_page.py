"""A study's page: `isoloss.report.html` with interactive charts, and a table of every checkpoint with its config."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.report import data
from isoloss.report.charts import VERSION, Spec
from isoloss.report.data import Column
from isoloss.report.html import Card, Section, environment, page

if TYPE_CHECKING:
    import polars as pl

Cell = tuple[
    str, float | None, float | None
]  # of a table: its text, the number it is sorted by, and its standard error


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
    lede: str,
    cards: Sequence[Card],
    figures: Sequence[Figure],
    sections: Sequence[Section],
    table: pl.DataFrame,
    shown: Sequence[Column],
    command: str,
    settings: Mapping[str, str],
    configs: Mapping[str, str] | None = None,
    elsewhere: str = "export the study: its values are a table of their own",
    banner: str = "",
    note: Markup | None = None,
) -> str:
    """Return a study's page as one HTML document; the scripts that draw the charts (about 0.9 MB) are inside.

    The first figure comes first, then the sections that are not folded, the other figures, the folded sections, every
    checkpoint, and how the study was made: the `settings` by name and the `command` that makes the page again. `table`
    has every evaluated checkpoint, as `isoloss.report.data.prepare` takes it, and `shown` the measures to show;
    `configs` the resolved config of each run, as TOML; `elsewhere` says where the values are without scripts. Title,
    lede, cards, banner and note are those of `isoloss.report.html.page`.
    """
    drawn = drawings(figures)
    first = [Section(title=figures[0].title, body=drawn[0])] if figures else []
    headed = [
        Markup("<h3>{}</h3>\n").format(figure.title) + one
        for figure, one in zip(figures[1:], drawn[1:], strict=True)
    ]  # fmt: skip
    more = [Section(title="More figures", body=Markup("\n").join(headed))] if headed else []
    checkpoints = every_checkpoint(
        checkpoint_cells(table, shown),
        {name: name.capitalize() for name in data.COLUMNS} | {m.name: m.axis_title for m in shown},
        {m.name: "fraction" if m.percent else m.unit for m in shown},
        identity=("run", "step"),
        choices=("group", "size", "step"),
        fields={name: (name, 1) for name in ("run", "group", "size")},
        configs=configs,
        elsewhere=elsewhere,
    )
    return page(
        title=title,
        lede=lede,
        cards=cards,
        banner=banner,
        note=note,
        sections=[
            *first,
            *(each for each in sections if not each.folded),
            *more,
            *(each for each in sections if each.folded),
            Section(title="Every checkpoint", body=checkpoints, folded=True),
            Section(title="How this was made", body=_macros().made(command, settings), folded=True),
        ],
        end=scripts(figures, configs),
    )


def drawings(figures: Sequence[Figure]) -> list[Markup]:
    """Return the markup of figures; the page must end with their `scripts`."""
    # several charts may show the same rows: they are in the page once, and its script puts them back
    specs = [figure.chart | {"datasets": list(figure.chart["datasets"])} for figure in figures]
    return [_macros().drawing(figure, number, specs[number]) for number, figure in enumerate(figures)]


def every_checkpoint(
    cells: Sequence[Sequence[Cell]],
    headings: Mapping[str, str],
    units: Mapping[str, str],
    *,
    identity: Sequence[str],
    choices: Sequence[str],
    fields: Mapping[str, tuple[str, float]],
    elsewhere: str,
    configs: Mapping[str, str] | None = None,
) -> Markup:
    """Return the table of all checkpoints, to filter, sort and save, linked with the charts.

    Args:
        cells: A row for each checkpoint, in the order of `headings`.
        headings: The headings by key; saved files have the keys.
        units: The units of measures by key; all other columns are labels.
        identity: The keys of the labels that identify a checkpoint; if there are two, the first is that of its run.
        choices: The keys of the labels to filter by.
        fields: For each field that charts select, the key of its column and its factor in the charts.
        elsewhere: Where to find the numbers if no script runs.
        configs: The resolved config of each run, as TOML.
    """
    numbers = [key for column, key in enumerate(headings) if any(row[column][1] is not None for row in cells)]
    about = {"id": identity, "choices": choices, "fields": fields, "numbers": numbers}
    rows = _macros().body(cells, configs or {})
    made: Markup = _macros().checkpoints(rows, len(cells), headings, units, about, bool(configs), elsewhere)
    return made


def scripts(figures: Sequence[Figure], configs: Mapping[str, str] | None = None) -> Markup:
    """Return the end of a page with the `drawings` of these figures and `every_checkpoint`."""
    rows = {name: each for figure in figures for name, each in figure.chart["datasets"].items()}
    datasets = {name: _by_column(each) for name, each in rows.items()}
    made: Markup = _macros().end(json.dumps(_by_line(configs or {})), datasets, _vega())
    return made


@functools.cache
def _macros() -> Any:
    return environment().get_template("study.html.j2").module


def checkpoint_cells(table: pl.DataFrame, shown: Sequence[Column]) -> list[list[Cell]]:
    """Return the cells of the table of all evaluated checkpoints."""
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


@functools.cache
def _vega() -> Markup:
    """Vega, Vega-Lite and Vega-Embed as one script, of the versions that the charts are written for."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VERSION)
    if "</script" in script.lower() or "<!--" in script:
        raise IsolossError("this version of vl-convert cannot be put inside a page: its script holds a script tag")
    return Markup(script)  # noqa: S704 - checked just above
