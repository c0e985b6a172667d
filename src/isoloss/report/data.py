"""The table of evaluated checkpoints that charts and pages are drawn from: its columns, checks and colors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Z95, rounded, student95

COLUMNS = ("run", "group", "size", "parameters", "step")

# Okabe and Ito's colors without black and yellow, which vanish on dark and on white paper, and gray. The others are for
# figures with many groups: hues in two lightnesses, each with a contrast of 3 or more on both kinds of paper
# fmt: off
COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C",
    "#7853E6", "#55A229", "#896C14", "#798CDE", "#167899", "#DB7171", "#D71F4D", "#29A640",
    "#12812E", "#A27EDF", "#B124E0", "#C58231", "#5F7811", "#29A281", "#3C66E3", "#CF67D9",
    "#C3461C", "#8D9726", "#127E63", "#319BC3", "#CA1D9F", "#DA6AA7", "#2E8012",
)
# fmt: on
MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

LEAST = 0.1  # of a value: how far down a logarithmic axis its interval is drawn, which may reach 0
PADDING = 0.05  # of an axis, beyond the outermost error bar


@dataclass(frozen=True)
class Column:
    """A column of the table, and how it is shown."""

    name: str  # in the table; the standard error is in `<name>_stderr`
    title: str  # what it is, e.g. `KL to the truth`
    unit: str  # E.g. `nats per token`
    log: bool = False  # whether its axis is logarithmic; its values must then be above 0
    percent: bool = False  # whether the column holds a fraction that is shown in percent
    reference: float | None = None  # of no difference, or of a baseline; marked by a line

    @property
    def stderr_column(self) -> str:
        """The column of the standard error."""
        return f"{self.name}_stderr"

    @property
    def freedom_column(self) -> str:
        """The column of the error's degrees of freedom, which a table need not have."""
        return f"{self.name}_freedom"

    @property
    def field(self) -> str:
        """The name in chart data: `.` and `[` would mean something to Vega."""
        return re.sub(r"\W", "_", self.name)

    @property
    def axis_title(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


KL = Column("kl", "KL to the truth", "nats per token")
LOSS = Column("loss", "Pre-training loss", "nats per token")
TRACE = Column("trace", "Trace of the Fisher", "nats per token", log=True)
MINIMAL_TRACE = Column("minimal-trace", "Minimal trace", "nats per token", log=True)


def accuracy(task: str) -> Column:
    """Return the column `probe-<task>`: the accuracy of the linear probe on a task."""
    return Column(f"probe-{task}", f"Probe accuracy, {task}", "%", percent=True)


def column_of(name: str, unit: str = "") -> Column:
    """Return how to show a column: as one of those above, or under its own name."""
    kind, _, task = name.partition("-")
    if kind == "probe":
        return accuracy(task)
    if kind == "finetune":
        return Column(name, f"Fine-tuned accuracy, {task}", "%", percent=True)
    if kind == "lookup":
        return Column(name, f"Accuracy of the look-up table, {task}", "%", percent=True)
    for trace in (TRACE, MINIMAL_TRACE):
        if name.startswith(f"{trace.name}-in-"):
            size, _, expansion = name.removeprefix(f"{trace.name}-in-").partition("-")
            # the whole title would not fit beside a panel
            title = f"{trace.title.removesuffix(' of the Fisher')} in {size}" + (f", {expansion}" if expansion else "")
            return Column(name, title, trace.unit, log=True)
    known = {column.name: column for column in (KL, LOSS, TRACE, MINIMAL_TRACE)}
    if unit == "accuracy":
        return Column(name, name, "%", percent=True)
    return known.get(name) or Column(name, name, unit.replace("predicted token", "token"))


def measures(table: pl.DataFrame) -> tuple[Column, ...]:
    """Return the columns that a table has of KL, loss, both traces and the probes' accuracies, in this order."""
    probes = [c for c in table.columns if c.startswith("probe-") and not c.endswith(("_stderr", "_freedom"))]
    shown = (KL, LOSS, TRACE, MINIMAL_TRACE, *map(column_of, probes))
    return tuple(c for c in shown if c.name in table.columns)


def prepare(table: pl.DataFrame, shown: Sequence[Column]) -> pl.DataFrame:
    """Check `table` and return what is drawn.

    Args:
        table: One row per checkpoint: run (name), group (label), size (label), parameters (count), step, path (of its
            run.json, relative to the page), and for each measure its value and its standard error. A measure that a
            checkpoint does not have is null in both. Optionally the degrees of freedom of the error, as of a mean over
            few seeds; without them, intervals are those of the normal distribution.
        shown: The measures.

    Returns:
        run, group, size, parameters, step, and for each measure, by its `field`: the value (in percent where it
        is), `<field>_low` and `<field>_high` (the 95 % confidence interval; of a percentage, within 0 and 100; on a
        logarithmic axis, down to a tenth of the value at most, or that of a ratio's logarithm), `<field>_text` (value ±
        one standard error).
        Rows by run and step.

    Raises:
        IsolossError: A missing column, no row, two rows of one run and step, or a number that is not finite, without
            its standard error, or not above 0 where its axis is logarithmic.
    """
    _require(table, [*COLUMNS, *(name for m in shown for name in (m.name, m.stderr_column))])
    if not table.height:
        raise IsolossError("the table of checkpoints has no row")
    for name in COLUMNS:
        if table.get_column(name).null_count():
            raise IsolossError(f"the table of checkpoints has a row without its {name}")
    seen: set[tuple[Any, Any]] = set()
    for key in zip(table.get_column("run"), table.get_column("step"), strict=True):
        if key in seen:
            raise IsolossError(f"the table of checkpoints has step {key[1]} of run {key[0]!r} twice")
        seen.add(key)
    columns: dict[str, list[Any]] = {name: table.get_column(name).to_list() for name in COLUMNS}
    for column in shown:
        if column.field in columns:
            raise IsolossError(f"two measures share the field {column.field}: rename the column {column.name}")
        columns |= _drawn(table, column)
    order = list(dict.fromkeys(columns["run"]))  # runs keep the table's order
    return (
        pl.DataFrame(columns)
        .with_columns(pl.col("run").map_elements(order.index, return_dtype=pl.Int64).alias("_order"))
        .sort("_order", "step")
        .drop("_order")
    )


def _require(table: pl.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        has = ", ".join(table.columns) or "none"
        raise IsolossError(f"the table of checkpoints has no column {', '.join(missing)}; its columns: {has}")


def _drawn(table: pl.DataFrame, column: Column) -> dict[str, list[Any]]:
    freedom = column.freedom_column if column.freedom_column in table.columns else pl.lit(None).alias("freedom")
    rows = table.select("run", "step", column.name, column.stderr_column, freedom).iter_rows()
    drawn = [_one(column, *row) for row in rows]
    names = (column.field, f"{column.field}_low", f"{column.field}_high", f"{column.field}_text")
    return {name: list(column) for name, column in zip(names, zip(*drawn, strict=True), strict=True)}


def _one(
    column: Column, run: str, step: int, value: float | None, stderr: float | None, freedom: float | None
) -> tuple[Any, Any, Any, str]:
    """The value, the ends of its interval and its text, as `prepare` returns them."""
    if value is None and stderr is None:
        return None, None, None, "–"
    where = f"{column.name} of run {run!r} at step {step}"
    if value is None or stderr is None or not (math.isfinite(value) and 0 <= stderr < math.inf):
        raise IsolossError(f"{where} is {value} with standard error {stderr}: both must be finite numbers, or null")
    if column.log and value <= 0:
        raise IsolossError(f"{where} is {value}: it cannot be drawn on a logarithmic axis")
    scale = 100 if column.percent else 1
    # an exact value has no degrees of freedom
    half = stderr * (Z95 if freedom is None else student95(freedom)) if stderr else 0.0
    low, high = scale * (value - half), scale * (value + half)
    if column.percent:
        low, high = max(low, 0.0), min(high, 100.0)
    elif column.log:
        if column.reference is None:
            low = max(low, LEAST * value)
        else:  # a ratio to a control, whose interval is that of its logarithm
            low, high = value * math.exp(-half / value), value * math.exp(half / value)
    return scale * value, low, high, rounded(scale * value, scale * stderr)


def panel(frame: pl.DataFrame, *shown: Column) -> tuple[pl.DataFrame, dict[Column, tuple[float, float]]]:
    """Return the rows of a prepared table that have all of these measures, and the ends of each measure's axis.

    The axes hold all error bars with a little room, those of percentages none beyond 0 and 100, and a measure's line of
    reference. That no row has all of them is an error.
    """
    rows = frame.filter(*(pl.col(m.field).is_not_null() for m in shown))
    if not rows.height:
        raise IsolossError(f"no checkpoint has {' and '.join(m.name for m in shown)}")
    axes = {}
    for column in shown:
        values = [*rows.get_column(f"{column.field}_low"), *rows.get_column(f"{column.field}_high")]
        marked = [] if column.reference is None else [column.reference]
        axes[column] = ends([*values, *marked], log=column.log, percent=column.percent)
    return rows, axes


def log_ticks(ends: Sequence[float]) -> list[float]:
    """Return the ticks of a logarithmic axis: powers of ten and, where these are few, their multiples.

    1, 2 and 5 times powers of ten below four decades; where fewer than three of those are on the axis, 1, 1.5, 2, 3, 5
    and 7 times, or steps of the power, of half, a fifth or a tenth of it.
    """
    low, high = (math.log10(end) for end in ends)

    def on_axis(factors: Sequence[float]) -> list[float]:
        ticks = [f * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for f in factors]
        return [tick for tick in ticks if ends[0] <= tick <= ends[1]]

    few = (1.0, 2.0, 5.0) if high - low < 4 else (1.0,)
    steps = [[1 + number / parts for number in range(9 * parts)] for parts in (1, 2, 5, 10)]
    for factors in (few, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), *steps):
        ticks = on_axis(factors)
        if len(ticks) >= 3:
            break
    return ticks


def columns(count: int, most: int = 3, together: int = 1) -> int:
    """Return how many of `count` panels stand side by side: as many as go, but in rows as equal as can be.

    Each run of `together` panels takes full rows.

    Example:
        >>> from isoloss.report.data import columns
        >>> [columns(n) for n in (1, 2, 3, 4, 5, 6)]
        [1, 2, 3, 2, 3, 3]
        >>> columns(8, together=4), columns(6, together=3)
        (2, 3)
    """
    if together > 1:
        return max(each for each in range(1, most + 1) if together % each == 0)
    rows = -(-count // most)
    return -(-count // rows)


def size_means(rows: pl.DataFrame, column: Column) -> pl.DataFrame:
    """Return the mean of a measure by group and number of parameters, in the order of a line: smallest model first."""
    means = rows.group_by("group", "parameters", maintain_order=True).agg(pl.col(column.field).mean())
    return means.sort("parameters", maintain_order=True)


def ends(values: Sequence[float], *, log: bool, percent: bool = False) -> tuple[float, float]:
    """Return the ends of an axis that holds these values with a little room: a twentieth of their range on each side.

    An axis of percentages does not go beyond 0 and 100.
    """
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** PADDING, 1.05)
        return low / room, high * room
    # equal values span nothing: they get a part of their own size, and zeros get 1
    room = (high - low) * PADDING or abs(high) * PADDING or 1.0
    return (max(low - room, 0.0), min(high + room, 100.0)) if percent else (low - room, high + room)


@dataclass(frozen=True)
class Style:
    """Which color and marker stands for what, the same in every chart and figure of a page."""

    colors: Mapping[str, str]  # hexadecimal, by group
    markers: Mapping[str, str]  # Vega's, by size

    @classmethod
    def of(cls, table: pl.DataFrame) -> Style:
        """Return the style for a table: groups in its order, sizes by number of parameters.

        If there are more groups than colors, colors repeat: a click on a mark or on the legend tells groups apart. More
        sizes than there are markers are refused.
        """
        _require(table, ("group", "size", "parameters"))
        by_size = table.sort("parameters", maintain_order=True)
        groups, sizes = (
            some.get_column(name).unique(maintain_order=True).to_list()
            for some, name in ((table, "group"), (by_size, "size"))
        )
        if len(sizes) > len(MARKERS):
            raise IsolossError(
                f"the table has {len(sizes)} values of size, but only {len(MARKERS)} markers can be told apart: show "
                "fewer"
            )
        return cls(dict(zip(groups, itertools.cycle(COLORS), strict=False)), dict(zip(sizes, MARKERS, strict=False)))
