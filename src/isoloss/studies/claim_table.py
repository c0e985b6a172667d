"""The result of a claim as a table of text and as a small figure, for the page and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isoloss.statistics.estimate import interval, number, rounded
from isoloss.studies.claims import Answer, Claim, ClaimResult
from isoloss.studies.results import UNITS

if TYPE_CHECKING:
    from isoloss.report.charts import Spec

VERDICT = "verdict"  # the column of the verdicts; this and the one before it, the case, are text
WIDTH = 300  # pixels of the figure without the names of the cases
ROW = 34  # pixels of a case


def claim_table(result: ClaimResult) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, one row per case; empty columns are left out.

    A unit stands in the heading of a column if all its numbers share it, otherwise after each number. The interval and
    the columns after it are in the unit of the difference.
    """
    headings = _headings(result)
    rows = [_cells(answer) for answer in result.answers]
    shown = [i for i in range(len(headings)) if any(row[i][0] for row in rows)]
    units = {i: {row[i][1] for row in rows if row[i][0]} for i in shown}
    columns = [_with(headings[i], *units[i]) if len(units[i]) == 1 else headings[i] for i in shown]
    texts = [[row[i][0] if len(units[i]) == 1 else f"{row[i][0]} {row[i][1]}".rstrip() for i in shown] for row in rows]
    return columns, texts


def all_claims_table(results: Sequence[ClaimResult]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, one row for each claim and case; the interval is in the unit of the difference."""
    columns = ["claim", "case", VERDICT, "unit", "difference", "95 % interval", "p", "adjusted p"]
    rows = []
    for result in results:
        for answer in result.answers:
            case, verdict, _, _, (difference, unit), interval95, p, adjusted, *_ = _cells(answer)
            rows.append([result.claim.id, case[0], verdict[0], unit, difference, interval95[0], p[0], adjusted[0]])
    return columns, rows


def _headings(result: ClaimResult) -> list[str]:
    """Return the columns; the two models have their own names where these are the same throughout."""
    names = {tuple(answer.numbers)[:2] for answer in result.answers if answer.numbers}
    first, second = names.pop() if len(names) == 1 else ("first", "second")
    factor = result.claim.factor
    difference = "difference" if factor == 1 else f"{second} minus {factor:g} times {first}"
    about = ("95 % interval", "p", "adjusted p", "found with 80 % power", "smaller than", "at the same loss")
    return ["case", VERDICT, first, second, difference, *about]


def _cells(answer: Answer) -> list[tuple[str, str]]:
    """Return the text and the unit of each cell."""
    difference = answer.difference
    about: list[str] = [""] * 6
    if difference is not None:
        about = [
            "" if difference.stderr == 0 else interval(difference),
            _p_text(answer.p_value),
            "primary" if answer.is_primary else _p_text(answer.p_adjusted),
            "" if answer.detectable is None else _size(answer.detectable, answer.detectable),
            "" if answer.below is None else _size(answer.below, difference.stderr),
            "" if answer.adjusted is None else number(answer.adjusted),
        ]
    numbers = [(number(each), UNITS.get(each.unit, each.unit)) for each in answer.numbers.values()]
    return [
        *((text, "") for text in (answer.case, answer.verdict.value)),
        *(numbers or [("", "")] * 3),
        *((text, "") for text in about),
    ]


def _with(heading: str, unit: str) -> str:
    return f"{heading} ({unit})" if unit else heading


def _p_text(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _size(size: float, error: float) -> str:
    """Return a size with as many digits as two of the error."""
    return rounded(size, error).split(" ±")[0]


def explanations(result: ClaimResult) -> list[str]:
    """Return each explanation once, preceded by its cases if there are several explanations."""
    cases: dict[str, list[str]] = {}
    for answer in result.answers:
        cases.setdefault(answer.explanation, []).append(answer.case)
    return [text if len(cases) == 1 else f"{', '.join(names)}: {text}" for text, names in cases.items()]


def claim_figures(result: ClaimResult) -> list[tuple[Spec, str]]:
    """Return a small chart for each unit that the claim's differences have, each with the same in words.

    It shows the difference in each case with its interval, against what the claim states.
    """
    by_unit: dict[str, dict[str, Answer]] = {}
    for answer in result.answers:
        if answer.difference is not None:
            by_unit.setdefault(answer.difference.unit, {})[answer.case] = answer
    return [_figure(result.claim, unit, answers) for unit, answers in by_unit.items()]


def _figure(claim: Claim, unit: str, answers: dict[str, Answer]) -> tuple[Spec, str]:
    from isoloss.report.intervals import Interval, IntervalPanel, intervals  # which the command line does without

    drawn, told = [], []
    for case, answer in answers.items():
        assert answer.difference is not None
        low, high = answer.difference.ci95
        text = f"{number(answer.difference)}, 95 % interval {interval(answer.difference)}"
        row = Interval(row=case, series="", value=answer.difference.value, low=low, high=high, text=text)
        drawn.append(row)
        told.append(f"{case}: {text}" if case else text)
    panel = IntervalPanel(title=f"difference ({UNITS.get(unit, unit)})", intervals=drawn, claimed=claimed(claim))
    chart = intervals([panel], list(answers), note="", size=(WIDTH, ROW * len(drawn)))
    return chart, f"{panel.title}. {'; '.join(told)}. The claim states {_range(claim)}."


def claimed(claim: Claim) -> tuple[float | None, float | None]:
    """Return the ends of the range of differences that a claim states; None: open.

    Example:
        >>> claimed(Claim(id="a", statement="", paper="", direction="decrease", margin=0.1))
        (None, -0.1)
    """
    return {
        "increase": (claim.margin, None),
        "decrease": (None, -claim.margin),
        "no change within": (-claim.margin, claim.margin),
    }[claim.direction]


def _range(claim: Claim) -> str:
    low, high = claimed(claim)
    if low is None:
        return f"a difference below {high:g}"
    return f"a difference above {low:g}" if high is None else f"a difference from {low:g} to {high:g}"
