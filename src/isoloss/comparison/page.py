"""The page of a comparison of models, one screen with the numbers below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from isoloss.comparison.models import TITLES, ModelComparison
from isoloss.comparison.verdict import in_digits, listed, times_in_words
from isoloss.report.html import Card, IntervalRow, Section, Tone, interval_rows, page, table
from isoloss.statistics.estimate import interval, number

_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "unclear"}
_RATIOS = ("trace", "minimal-trace", "without-embeddings")  # whose differences are read as ratios

_LEDE = (
    "Flatness is the trace of the Fisher information, the curvature of the loss summed over all weights: smaller is "
    "flatter. The minimal trace is the smallest trace that rescaling the weights can reach without changing a "
    "prediction."
)
_NEXT = "Commands to try next"
_READING = (
    "Every difference is paired: all models read the same inputs, with the same random probes and the same noise, so "
    "the error that they share cancels. Intervals have 95 % confidence. Errors are over the inputs, not over "
    "trainings: one training with each of two settings, such as two learning rates, shows how these two models differ, "
    "but says nothing about the settings. For that, train each setting with several seeds (isoloss study).\n"
    "A model is called the flattest only if its trace and its minimal trace are both the smallest, the models have the "
    "same architecture, and their losses are shown to be the same. The trace alone is not enough: rescaling the "
    "weights can change it without changing a prediction.\n"
    "A rise is how far the loss grows when the weights change. With 8 bits, the weights of linear layers are "
    "rounded to the nearest of 255 values per output; with 4 bits, to the nearest of 15 values per group of 128 "
    "weights; both without calibration. With noise, Gaussian noise of 10 % of each tensor's root mean square "
    "is added to all weights."
)


def comparison_page(
    comparison: ModelComparison, *, command: str = "", more: str = "more inputs", next_commands: Sequence[str] = ()
) -> str:
    """Return the page of a comparison as one HTML document that loads nothing.

    Args:
        comparison: The comparison of two models or more. If only one was measured because another failed, the page has
            only its numbers.
        command: The command line that made the page, which is shown at its end.
        more: What would make the errors smaller, such as more inputs.
        next_commands: Command lines that may answer what is open.
    """
    # a change over the steps of one series is neither good nor open
    tones: dict[bool | None, Tone] = _TONES | ({None: "neutral"} if len(comparison.series) == 1 else {})
    cards = [
        Card(label=answer.question, value=answer.answer, detail=answer.detail, tone=tones[answer.holds])
        for answer in comparison.answers()
    ]
    if comparison.series:
        return _series_page(comparison, cards, command, more, next_commands)
    names = comparison.short
    first, *others = names.values()
    title = f"Which of {len(names)} models is the flattest?"
    if len(others) < 2:
        title = f"Which is flatter: {first} or {others[0]}?" if others else f"How flat is {first}?"
    header, rows, left = comparison.table()
    minus = f"{others[0]} minus {first}" if len(others) == 1 else f"minus {first}"
    caption, *texts = comparison.texts(more)
    # of two models the values stand beside their difference
    values = [first, *others] if len(others) == 1 else []
    effect = f"{minus} (nats per token; traces: ratio)"
    differences = interval_rows(list(_rows(comparison)), effect=effect, values=values) if others else ""
    numbers = table(header, rows, left=left, caption=caption)
    if values:
        numbers, differences = differences + Markup('<p class="note">{}</p>').format(caption), ""
    # the cards have the other answers
    verdict = "\n".join(filter(None, [*(texts[:1] if others else ()), comparison.warning]))
    made = [comparison.inputs, command]
    sections = [
        Section(title="Verdict", body=verdict),
        Section(title="Differences", body=differences),
        Section(title="Numbers", body=numbers),
        Section(title=_NEXT, body="\n".join(next_commands)),
        Section(title="How to read this", body=_READING, folded=True),
        Section(title="How it was measured", body="\n".join(filter(None, made)), folded=True),
    ]
    return page(title=title, lede=_LEDE, cards=cards, sections=[each for each in sections if each.body])


def _series_page(
    comparison: ModelComparison, cards: list[Card], command: str, more: str, next_commands: Sequence[str]
) -> str:
    """Return the page of series: a chart for each measure over the steps, and of several series at the same loss."""
    # with polars and the scripts of charts, which the page of two does without
    import polars as pl

    from isoloss.report import data
    from isoloss.report.charts import BARS, curves, scatter
    from isoloss.report.intervals import Interval, IntervalPanel, intervals
    from isoloss.report.study_page import Figure, render

    first, *others = comparison.series
    title = f"How do the measures change over the steps of {first}?"
    if others:
        title = f"At the same loss, which is flatter: {' or '.join(comparison.series)}?"
    # the loss with rounded weights would look as the loss does
    along = [name.replace("int4-loss", "int4-rise") for name in comparison.along]
    columns = [data.column_of(name, "nats per token") for name in along]
    shown = [dataclasses.replace(c, title=TITLES.get(c.name, c.title).capitalize()) for c in columns]
    sizes = {model: trace.details["num_parameters"] for model, trace in comparison.of("trace").items()}
    has_markers = len(set(sizes.values())) <= len(data.MARKERS)
    rows = []
    for name, series in comparison.series.items():
        for step, model in series.items():
            size = f"{sizes[model]:,}" if has_markers else "various"
            row = {"run": name, "group": name, "size": size, "parameters": sizes[model], "step": step}
            for column in shown:
                estimate = comparison.models[model][column.name]
                row |= {column.name: estimate.value, column.stderr_column: estimate.stderr}
                row[column.freedom_column] = estimate.freedom
            rows.append(row)
    frame = pl.DataFrame(rows)
    about = "At each checkpoint."
    if "int4-rise" in along:
        about += (
            " Rounding is one fixed change of the weights: a rise may be below 0, and move between steps by more than "
            "its error, which is over texts."
        )
    if alone := [name for name, series in comparison.series.items() if [*series] == [0]]:
        about += f" At step 0: {listed(alone)}, without steps."
    charts = {("steps", "Over the steps", about): curves(frame, shown)}
    panels = []
    for column in (column for column in shown if column.name in comparison.traces):
        drawn = []
        for other, found in comparison.pairs_at_same_loss.items():
            for pair in found:
                ratio, (low, high) = pair.comparison.ratio(column.name, *pair.names)
                text = f"{times_in_words(ratio, (low, high))} {first}'s, at {number(pair.loss)} nats"
                both = f"{pair.first}\n{pair.second}"
                drawn.append(Interval(row=both, series=other, value=ratio, low=low, high=high, text=text))
        title_of = f"{column.title}, ratio to {first}"
        panels.append(IntervalPanel(title=title_of, intervals=drawn, reference=1.0, log=True))
    if panels[0].intervals and len(others) <= len(data.COLORS):
        at_one = (
            "A row for each pair, from the largest loss to the smallest; a series without a checkpoint at this loss is "
            "interpolated, and the intervals do not cover how its trace bends between two steps."
        )
        of_pairs = [each.row for each in panels[0].intervals]
        charts["pairs", "At the same loss", at_one] = intervals(panels, of_pairs, note=BARS)
    if others:
        axes = [(shown[0], column) for column in shown if column.name in comparison.traces]
        charts["loss", "Against the loss", "Each line joins the checkpoints of a series."] = scatter(frame, axes)
    caption, *texts = comparison.texts(more)
    return render(
        title=title,
        lede=_LEDE,
        cards=cards,
        figures=[
            Figure(name=name, title=heading, chart=chart, caption=about, formats=())
            for (name, heading, about), chart in charts.items()
        ],
        sections=[
            Section(title="Changes over the steps", body="\n".join([*texts, caption])),
            *(
                Section(title=f"{header[0]} and {header[1]} at the same loss", body=table(header, cells, left=left))
                for header, cells, left in comparison.pairs_tables()
            ),
            *([Section(title=_NEXT, body="\n".join(next_commands))] if next_commands else ()),
            Section(title="How to read this", body=_READING, folded=True),
        ],
        table=frame,
        shown=shown,
        command=command,
        settings={"inputs": comparison.inputs},
        elsewhere="add --csv FILE to the command",
    )


def _rows(comparison: ModelComparison) -> Iterator[IntervalRow]:
    """Yield a row for each measure and each model but the first; of two, with the values of both."""
    first, *others = comparison.models
    names = comparison.short
    for name, title in comparison.titles.items():
        estimates = comparison.of(name).values() if len(others) == 1 else ()
        values = tuple(number(comparison.shown(name, each)) for each in estimates)
        if name not in comparison.paired and values:
            yield IntervalRow(label=title, effect="", values=values)
        for other in others if name in comparison.paired else ():
            shown: dict[str, Any]
            if name in _RATIOS:
                value, (low, high) = comparison.ratio(name, other, first)
                shown = {"effect": f"× {in_digits(value)}", "interval": f"{in_digits(low)} to {in_digits(high)}"}
                shown |= {"reference": 1.0, "log": True, "scale": "traces"}
            else:
                difference = comparison.shown(name, comparison.difference(name, other, first))
                value, (low, high) = difference.value, difference.ci95
                shown = {"effect": number(difference), "interval": interval(difference), "scale": name}
                if name == "loss":
                    shown["claimed"] = (-comparison.loss_margin, comparison.loss_margin)
            label, group = (title, "") if len(others) == 1 else (names[other], title)
            yield IntervalRow(label=label, group=group, values=values, value=value, low=low, high=high, **shown)
