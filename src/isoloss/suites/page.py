"""The page of a suite: the answers, charts with linked selection, and all numbers.

All charts share one list of rows. A selection in one chart highlights the same checkpoints in the others and in the
table.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from markupsafe import Markup

from isoloss import config as configs
from isoloss.registry import MEASURES
from isoloss.report import charts, data
from isoloss.report.charts import Spec, layer, nominal
from isoloss.report.html import Card, Section, page
from isoloss.report.html import table as html_table
from isoloss.report.study_page import Cell, Figure, drawings, every_checkpoint, scripts
from isoloss.statistics.association import Association, strongest_first
from isoloss.statistics.correlation import Correlation
from isoloss.statistics.estimate import Z95, rounded
from isoloss.statistics.estimate import number as in_words
from isoloss.statistics.jumps import JUMP, find_jumps
from isoloss.statistics.tables import probability, short_names
from isoloss.studies.page import without_folders
from isoloss.suites.table import SuiteTable, column_name

_CARDS, _PAIRS = 5, 3  # the number of cards, and of pairs in the first figure
_LOSSES = ["#4A5FD9", "#B455A0", "#E0782F"]  # from the lowest loss to the highest, on white and on dark paper
_PARTS = {
    "spearman": "rank correlation",
    "within_band": "within a band of losses",
    "over_levels": "over levels",
    "kendall": "granulated Kendall",
}
_UP, _DOWN = "0 114 178", "213 94 0"  # colors of positive and negative correlations
_LETTERS = 40  # in a line of an axis title
_JUMPING = ("loss", "trace", "minimal-trace")
_FEW = 100  # checkpoints, above which markers are smaller
_DIMMED = 0.12
_PICKS: dict[str, Spec] = {
    "hovered": {"type": "point", "fields": ["checkpoint"], "on": "pointerover", "clear": "pointerout"},
    "picked_checkpoint": {"type": "point", "fields": ["checkpoint"], "on": "click", "clear": "dblclick"},
    "picked_area": {"type": "interval", "clear": "dblclick"},
}
_PICKING = (
    "Drag over an area or click a point to highlight the same checkpoints in every figure; double-click clears. "
    "The filters of the table 'Every checkpoint' do the same."
)
_READING = (
    "r at the same loss is the partial correlation given the loss: the correlation between the residuals of the "
    "measure and the outcome after a linear fit on the loss. Where both bend along the loss in the same way, r is "
    "large although neither says more than the loss. Its interval does not guard against that; p does, if all "
    "trainings bend alike, and so does r within a band of losses.\n"
    "The interval contains the true r for about 95 of 100 suites like this one. Checkpoints of one cluster are not "
    "independent: the width of the interval depends on the number of clusters.\n"
    "p is the probability of a correlation at least this strong if there were none. It comes from permutations of "
    "whole clusters, with Holm's correction for all pairs. A pair is shown if p is below 0.05 and the intervals over "
    "clusters and over levels, if there are any, exclude 0.\n"
    "The smallest r that the suite could show is the true correlation that it would show with a probability of 80 %. A "
    "pair that is not shown may still have a correlation of up to about that size. None means that the suite has too "
    "few clusters for so many pairs: add clusters or, with at least 4, drop pairs.\n"
    "A jump is a step from one checkpoint of a training run to the next at which the loss or the logarithm of a trace "
    f"moves more than {JUMP:g} times as far as the median of the neighboring steps, two before and two after, as "
    "judged by the 95 % intervals. The first step is never a jump, and a run needs at least five checkpoints."
)


def suite_page(table: SuiteTable, associations: Sequence[Association], *, command: str = "") -> str:
    """Return the page of a suite as one HTML document that loads nothing.

    Args:
        table: The numbers of the suite.
        associations: Its answers, in the order of the matrix; empty if there are no outcomes.
        command: The command line that makes the page, which is shown at its end.
    """
    suite, answers = _Suite(table), strongest_first(associations)
    figures = list(suite.figures(answers))
    parts = [
        Section(title=figure.title, body=body, folded=number > 1)
        for number, (figure, body) in enumerate(zip(figures, drawings(figures), strict=True))
    ]
    outcomes = list(dict.fromkeys(each.outcome for each in associations))
    asked = " and ".join(outcomes) if 0 < len(outcomes) < 3 else "what"
    measured = [f"{name}: {MEASURES.summary(MEASURES.match(name)[0])}" for name in table.config.measured]
    lede = f"{len(suite.rows)} checkpoints"
    if answers:
        lede += (
            f" in {len({*table.clusters()})} clusters, one for each {answers[0].over[0]}. A measure predicts an "
            "outcome if the two correlate among checkpoints with the same loss: r is their correlation "
            "with the loss held fixed, from -1 to 1. Shown means significant after correction for the number of pairs."
        )
    sections = [
        # the card says why no pair has a number
        Section(title="Measures by outcomes", body=_matrix(associations) if any(e.pearson for e in answers) else ""),
        *(each for each in parts if not each.folded),
        Section(title="Copies and jumps", body="\n".join([*suite.copies(), *suite.jumps()])),
        Section(title="Empty cells", body="\n".join(table.problems())),
        *(each for each in parts if each.folded),
        Section(title="Every test", body=_tests(answers) if answers else "", folded=True),
        Section(title="Every checkpoint", body=suite.checkpoints(), folded=True),
        Section(title="How to read this", body="\n".join([_READING, *measured]), folded=True),
        Section(title="How it was measured", body=_made(table, command), folded=True),
    ]
    return page(
        title=f"At the same loss, what predicts {asked}?",
        lede=lede,
        cards=_cards(answers),
        sections=[each for each in sections if each.body],
        end=scripts(figures),
    )


def _cards(answers: Sequence[Association]) -> list[Card]:
    """Return a card for each of the strongest answers that are shown, and one for all others."""
    cards = [
        Card(
            label=each.outcome,
            value=f"{each.measure} predicts it, r = {_with_interval(each.pearson)}",
            detail=each.sentence(),
            tone="good",
        )
        for each in [each for each in answers if each.shown][:_CARDS]
    ]
    if rest := [each for each in answers if not each.shown]:
        label, detail = "Not shown", f"The strongest of them: {rest[0]}" if len(rest) > 1 else str(rest[0])
        pairs = f"{len(rest)} of {len(answers)} pairs of measure and outcome"
        value = f"No correlation shown in {pairs}"
        if rest[0].pearson is None:
            label, detail = "Not known", "; ".join(dict.fromkeys(each.problem for each in rest))
            value = f"No correlation known in {pairs}"
        cards.append(Card(label=label, value=value, detail=detail, tone="unclear"))
    return cards


def _with_interval(found: Correlation | None) -> str:
    if found is None:
        return "–"
    value, low, high = found.texts
    return f"{value} ({low} to {high})"


def _matrix(associations: Sequence[Association]) -> Markup:
    """Return the table of measures by outcomes: r at the same loss, colored; a cell without r says why."""
    rows: dict[str, dict[str, Markup]] = {}
    for each in associations:
        rows.setdefault(each.measure, {})[each.outcome] = _cell(each)
    outcomes = list(dict.fromkeys(each.outcome for each in associations))
    caption = (
        "r at the same loss with its 95 % interval. Blue: both rise together; orange: one falls as the other rises; "
        "darker colors: stronger correlations. ✓: shown."
    )
    cells = [[measure, *(of_it.get(outcome, "") for outcome in outcomes)] for measure, of_it in rows.items()]
    return html_table(("measure", *outcomes), cells, left=len(outcomes) + 1, caption=caption)


def _cell(found: Association) -> Markup:
    if found.pearson is None:
        return Markup('<small style="display: block; max-width: 16em">{}</small>').format(found.problem)
    color = f"rgb({_UP if found.pearson.value > 0 else _DOWN} / {45 * abs(found.pearson.value):.0f}%)"
    return Markup(
        '<span style="display: block; padding: 0 0.4em; white-space: nowrap; background: {}">{}{}</span>'
    ).format(color, "✓ " if found.shown else "", _with_interval(found.pearson))


def _tests(answers: Sequence[Association]) -> Markup:
    """Return the table of all results for each pair."""
    header = (
        *("measure", "outcome", "r at the same loss"),
        *(*_PARTS.values(), "permutation p", "p after Holm", "smallest r it could show", "checkpoints", "clusters"),
        "remarks",
    )
    rows = []
    for each in answers:
        logs = [f"log {name}" if name in each.logarithms else name for name in (each.measure, each.outcome)]
        found = map(_with_interval, (each.pearson, each.spearman, each.within_band, each.over_levels))
        kendall = "–" if each.kendall is None else in_words(each.kendall.coefficient)
        ps = ["–" if math.isnan(p) else probability(p) for p in (each.p_permutation, each.p_adjusted)]
        smallest = f"{each.detectable:.2f}" if each.detectable < 1 else "none" if each.detectable == 1 else "–"
        counts = (f"{each.observations:,}", f"{each.clusters:,}")
        missing = (f"{_PARTS[name]}: {problem}" for name, problem in each.missing.items())
        remarks = "; ".join(filter(None, (each.problem, each.band, *missing)))
        rows.append([*logs, *found, kendall, *ps, smallest, *counts, remarks])
    return html_table(header, rows, left=2)


def _made(table: SuiteTable, command: str) -> Markup:
    # the page may be read on another machine; what follows a brace or an asterisk of a pattern is no folder of this one
    document = configs.to_dict(table.config)
    patterns = [re.sub(r"^/[^{*]*/(?=[^/]*[{*])", "", pattern) for pattern in document["checkpoints"]]
    texts = [command, configs.to_toml(without_folders(document | {"checkpoints": patterns}))]
    return Markup("\n").join(Markup("<pre><code>{}</code></pre>").format(text) for text in texts if text)


@dataclass(frozen=True)
class _Column:
    """A measure, or the position in a training run, and how it is drawn."""

    name: str  # in the table
    unit: str
    field: str  # in the charts' rows, where `.` and `[` would mean something to Vega
    ends: tuple[float, float]  # of its axis
    log: bool = False
    scale: int = 1  # the factor of its values: 100 for percent

    @property
    def title(self) -> str:
        """The name with the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def axis(self) -> Spec:
        """The channel of an axis."""
        return {**charts.axis(self.field, None, self.ends, log=self.log), "title": textwrap.wrap(self.title, _LETTERS)}


class _Suite:
    """The rows of the charts, the figures, and the tables of checkpoints."""

    def __init__(self, table: SuiteTable) -> None:
        self.table, wide = table, table.wide()
        self.names = short_names(wide["checkpoint"].to_list())
        self.labels = {name: wide[name].to_list() for name in table.labels}
        others = [name for name in self.labels if name != table.along]
        self.group = table.config.levels or table.config.cluster or next(iter(others), "")
        # a step may be a word, such as the revision `main`
        along = wide[table.along].cast(pl.Float64, strict=False).to_list() if table.along else [None] * len(wide)
        self.rows: list[dict[str, Any]] = []
        self.cells: list[list[Cell]] = []
        for row, position in zip(wide.iter_rows(named=True), along, strict=True):
            name, labels = self.names[row["checkpoint"]], [row[each] for each in self.labels]
            line, group = ", ".join(str(row[each]) for each in others), str(row.get(self.group, ""))
            self.rows.append({"checkpoint": name, "line": line, "group": group, "along": position})
            self.cells.append(
                [(name, None, None), *((str(each), each if isinstance(each, int) else None, None) for each in labels)]
            )
        groups = list(dict.fromkeys(row["group"] for row in self.rows))
        self.groups = groups if 1 < len(groups) <= len(data.COLORS) else []
        known = [position for position in along if position is not None]
        self.along = _Column(table.along, "", "along", data.ends(known, log=False)) if len({*known}) > 1 else None
        # the labels in the charts' rows, by their fields
        named = {"checkpoint": "checkpoint", "group": self.group, "along": self.along.name if self.along else ""}
        self.named = {field: name for field, name in named.items() if name}
        self.columns = {column.name: column for column in self._measured(table.frame, wide)}
        self.loss = self.columns.get(table.roles()[0])

    def _measured(self, frame: pl.DataFrame, wide: pl.DataFrame) -> Iterator[_Column]:
        """Yield each column that has values, and write them into the rows and the cells."""
        places = {name: place for place, name in enumerate(wide["checkpoint"])}
        # an estimate without an error, such as an imported one, has no interval
        ends = (pl.coalesce(end, "value").alias(end) for end in ("low", "high"))
        filled = frame.filter(pl.col("value").is_not_null()).with_columns(pl.col("stderr").fill_null(0), *ends)
        for number, kind in enumerate(filled.partition_by("measure", "text", maintain_order=True)):
            measure, text, unit = kind.select("measure", "text", "unit").row(0)
            name, field = column_name(measure, text), f"v{number}"
            name = name if name in wide.columns else measure
            scale = 100 if unit == "accuracy" else 1
            values = kind["value"].to_list()
            log = min(values) > 0 and max(values) > 10 * min(values)
            # an interval that comes near 0 would stretch a logarithmic axis without end
            least = min(values) / 2 if log else -math.inf
            reach = [scale * max(each, least) for each in (*values, *kind["low"], *kind["high"])]
            low_end, high_end = data.ends(reach, log=log, percent=scale == 100)
            for cells in self.cells:
                cells.append(("–", None, None))
            numbers = kind.select("checkpoint", "value", "stderr", "low", "high")
            for checkpoint, value, stderr, *bar in numbers.iter_rows():
                place = places[checkpoint]
                # what goes on beyond the axis, as below 0 % or far down on a logarithmic one, is drawn to its end
                low, high = (min(max(scale * end, low_end), high_end) for end in bar)
                text = rounded(scale * value, scale * stderr)
                self.cells[place][-1] = (text, value, stderr)
                drawn = {field: scale * value, f"{field}_low": low, f"{field}_high": high, f"{field}_text": text}
                self.rows[place] |= drawn
            unit = "%" if scale == 100 else (unit or "").replace("predicted token", "token")
            yield _Column(name, unit, field, (low_end, high_end), log, scale)

    def figures(self, answers: Sequence[Association]) -> Iterator[Figure]:
        """Yield the figures, the open ones first."""
        loss, columns = self.loss, self.columns
        pairs = [
            (columns[each.measure], columns[each.outcome], f"r = {_with_interval(each.pearson)}")
            for each in answers
            if each.pearson and {each.measure, each.outcome} <= columns.keys()
        ]
        if loss and pairs:
            panels = pairs[:_PAIRS]
            panels += [(loss, x, "") for x in dict.fromkeys(x for x, _, _ in panels)]
            caption = "The strongest pairs, and their measures against the loss: compare points of the same color."
            yield self._figure("at-one-loss", "At the same loss", panels, f"{caption} {_PICKING}")
        if self.along and columns:
            color = f" in the color of its {self.group}" if self.groups else ""
            # the entropy of a language is the same everywhere
            panels = [(self.along, column, "") for column in columns.values() if column.name != "entropy"]
            caption = f"A line for each training run{color}. {_PICKING}"
            yield self._figure("along", f"Over the {self.along.name.removesuffix('s')}s", panels, caption)
        if loss and len(pairs) > _PAIRS:
            yield self._figure("every-pair", "Every measure against every outcome", pairs, "")
        if loss and len(columns) > 1:
            panels = [(loss, column, "") for column in columns.values() if column != loss]
            yield self._figure("against-the-loss", "Everything against the loss", panels, "")

    def _figure(self, name: str, title: str, panels: Sequence[tuple[_Column, _Column, str]], caption: str) -> Figure:
        """Return a figure of panels (x, y, title) with linked selection."""
        picks = _PICKS
        if panels[0][0] == self.along and self.groups:
            picks = picks | {"picked_group": {"type": "point", "fields": ["group"]}}
        drawn = [self._panel(x, y, list(picks)) | ({"title": heading} if heading else {}) for x, y, heading in panels]
        views = [f"points_{number}" for number in range(len(drawn))]
        for panel, view in zip(drawn, views, strict=True):
            panel["layer"][-1]["name"] = view  # the points, where selections are made
        params = [
            {"name": each, "select": select, "views": views, **({"bind": "legend"} if each == "picked_group" else {})}
            for each, select in picks.items()
        ]
        chart = charts.concat(drawn, charts.BARS) | {"params": [*params, {"name": "marked", "value": None}]}
        chart["description"] = "; ".join(f"{y.name} against {x.name}" for x, y, _ in panels)
        return Figure(name=name, title=title, chart=chart, caption=caption, formats=())

    def _panel(self, x: _Column, y: _Column, picks: Sequence[str]) -> Spec:
        """Return points with error bars, colored by the loss; over steps, also lines, colored by the group."""
        color: Spec = {"value": data.COLORS[0]}
        if x != self.along and self.loss:
            loss, scale = self.loss, {"range": _LOSSES}
            color = {"field": loss.field, "type": "quantitative", "title": loss.title, "scale": scale}
        elif self.groups:
            scale = {"domain": self.groups, "range": list(data.COLORS[: len(self.groups)])}
            color = nominal("group", title=self.group, scale=scale)
        front = {"and": [*({"param": name} for name in picks), "!marked || marked[datum.checkpoint]"]}
        shown = {"color": color, "opacity": {"value": _DIMMED, "condition": {"test": front, "value": 1}}}
        axes, bar = {"x": x.axis, "y": y.axis}, {"type": "rule", "strokeWidth": charts.RULE, "strokeOpacity": 0.4}
        layers = []
        if x == self.along:
            detail = {"detail": nominal("line"), "order": {"field": x.field, "type": "quantitative"}}
            line = {"type": "line", "strokeWidth": 1, "opacity": 0.4}
            layers.append(layer(self.rows, line, **axes, color=color, **detail))
        measured = {name: column for name, column in (("x", x), ("y", y)) if column != self.along}
        for name, column in measured.items():
            low = {name: {**axes[name], "field": f"{column.field}_low"}, f"{name}2": {"field": f"{column.field}_high"}}
            layers.append(layer(self.rows, bar, **axes | low, **shown))
        texts = {f"{each.field}_text": each.title for each in (self.loss, *measured.values()) if each}
        tooltip = [nominal(field, title=title) for field, title in {**self.named, **texts}.items()]
        size = charts.POINT / (1 if len(self.rows) <= _FEW else 2 if len(self.rows) <= charts.MANY else 5)
        point = {"type": "point", "filled": True, "size": size, "cursor": "pointer"}
        layers.append(layer(self.rows, point, **axes, **shown, tooltip=tooltip))
        # a checkpoint with an empty cell is not in the panel
        valid = [{"filter": {"field": column.field, "valid": True}} for column in (x, y)]
        return {"layer": [{**each, "transform": valid} for each in layers]}

    def copies(self) -> Iterator[str]:
        """Yield a sentence for each set of checkpoints with identical weights."""
        for first, others in self.table.copies().items():
            same = " and ".join(self.names[name] for name in (first, *others))
            yield f"Copies: {same} have identical weights, and count once, as {self.names[first]}."

    def jumps(self) -> Iterator[str]:
        """Yield a sentence for each jump of a loss or trace along a training run."""
        for place, column in enumerate(self.columns.values(), start=1 + len(self.labels)):
            kind = column.name.partition(" (")[0]
            lines: dict[str, list[tuple[float, float, float, str]]] = {}
            for row, cells in zip(self.rows, self.cells, strict=True):
                text, value, stderr = cells[place]
                if kind in _JUMPING and row["along"] is not None and value and value > 0 and stderr is not None:
                    # a trace moves by factors
                    point = (value, stderr) if kind == "loss" else (math.log(value), stderr / value)
                    lines.setdefault(row["line"], []).append((row["along"], *point, f"{text} in {cells[0][0]}"))
            for line in lines.values():
                steps = list(itertools.pairwise(sorted(line)))
                moves = [(b[1] - a[1], Z95 * math.hypot(a[2], b[2])) for a, b in steps]
                intervals = [(move - half, move + half) for move, half in moves]
                for i in find_jumps(intervals, [b[0] - a[0] for a, b in steps]):
                    way = "rises" if moves[i][0] > 0 else "falls"
                    yield f"Jump: {column.name} {way} from {steps[i][0][3]} to {steps[i][1][3]}."

    def checkpoints(self) -> Markup:
        """Return the table of all numbers."""
        # the table's filter takes no spaces
        keys = {column.name: column.name.replace(" ", "") for column in self.columns.values()}
        fields = {column.field: (keys[column.name], column.scale) for column in self.columns.values()}
        return every_checkpoint(
            self.cells,
            {name: name for name in ("checkpoint", *self.labels)}
            | {keys[c.name]: c.title for c in self.columns.values()},
            {keys[c.name]: "fraction" if c.scale == 100 else c.unit for c in self.columns.values()},
            identity=("checkpoint",),
            choices=list(self.labels),
            fields=fields | {field: (name, 1) for field, name in self.named.items()},
            elsewhere="read the suite's table",
        )
