"""The page of a comparison of models, one screen with the numbers below it."""

from __future__ import annotations

from collections.abc import Iterator

from isoloss.comparison.models import ModelComparison
from isoloss.comparison.verdict import in_digits
from isoloss.report.html import Card, IntervalRow, Section, Tone, interval_rows, page, table
from isoloss.statistics.estimate import interval, number

_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "unclear"}
_RATIOS = ("trace", "minimal-trace", "without_embeddings")  # whose differences are read as ratios

_LEDE = (
    "Flatness is the trace of the Fisher information, the curvature of the loss summed over all weights: smaller is "
    "flatter. The minimal trace is the smallest trace that rescaling the weights can reach without changing a "
    "prediction."
)
_READING = (
    "Every difference is paired: all models read the same inputs, with the same random probes and the same noise, so "
    "the error that they share cancels. Intervals have 95 % confidence.\n"
    "A model is called the flattest only if its trace and its minimal trace are both the smallest, the models have one "
    "architecture, and their losses are shown to be the same. The trace alone is not enough: rescaling the weights can "
    "change it without changing a prediction.\n"
    "A rise is how far the loss grows under a change of the weights. With 8 bits, the weights of linear layers are "
    "rounded to the nearest of 255 values per output; with 4 bits, to the nearest of 15 values per group of 128 "
    "weights; both without calibration. With noise, Gaussian noise of a few percent of each tensor's root mean square "
    "is added to all weights."
)


def comparison_page(comparison: ModelComparison, *, command: str = "", more: str = "more inputs") -> str:
    """Return the page of a comparison as one HTML document that loads nothing.

    Args:
        comparison: The comparison of two models or more. If only one was measured, because another failed, the page has
            its numbers alone.
        command: The command line that made the page, which is shown at its end.
        more: What would make the errors smaller.
    """
    names = comparison.short
    first, *others = names.values()
    title = f"Which of {len(names)} models is flatter?"
    if len(others) < 2:
        title = f"Which is flatter: {first} or {others[0]}?" if others else f"How flat is {first}?"
    cards = [
        Card(label=answer.question, value=answer.answer, detail=answer.detail, tone=_TONES[answer.holds])
        for answer in comparison.answers()
    ]
    header, rows, left = comparison.table()
    minus = f"{others[0]} minus {first}" if len(others) == 1 else f"minus {first}"
    differences = (
        interval_rows(list(_rows(comparison)), effect=f"{minus} (nats per token; traces: ratio)") if others else ""
    )
    caption, *texts = comparison.texts(more)
    verdict = texts[0] if texts else ""  # the cards have the other answers
    made = [comparison.inputs, command]
    sections = [
        Section(title="Verdict", body=verdict),
        Section(title="Differences", body=differences),
        Section(title="Numbers", body=table(header, rows, left=left, caption=caption)),
        Section(title="How to read this", body=_READING, folded=True),
        Section(title="How it was measured", body="\n".join(filter(None, made)), folded=True),
    ]
    return page(title=title, lede=_LEDE, cards=cards, sections=[each for each in sections if each.body])


def _rows(comparison: ModelComparison) -> Iterator[IntervalRow]:
    """Yield a row for each measure and each model but the first."""
    first, *others = comparison.models
    names = comparison.short
    for name, title in comparison.titles.items():
        for other in others if name in comparison.paired else ():
            label = title if len(others) == 1 else names[other]
            group = "" if len(others) == 1 else title
            if name in _RATIOS:
                ratio, (low, high) = comparison.ratio(name, other, first)
                yield IntervalRow(
                    label=label,
                    effect=f"× {in_digits(ratio)}",
                    interval=f"{in_digits(low)} to {in_digits(high)}",
                    value=ratio,
                    low=low,
                    high=high,
                    reference=1.0,
                    log=True,
                    scale="traces",
                    group=group,
                )
            else:
                difference = comparison.difference(name, other, first)
                low, high = difference.ci95
                yield IntervalRow(
                    label=label,
                    effect=number(difference),
                    interval=interval(difference),
                    value=difference.value,
                    low=low,
                    high=high,
                    scale=name,
                    claimed=(-comparison.loss_margin, comparison.loss_margin) if name == "loss" else None,
                    group=group,
                )
