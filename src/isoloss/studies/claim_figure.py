"""The small figure of a claim: the difference in each case with its interval, against what the claim states."""

from __future__ import annotations

from isoloss.report.html import SmallFigure
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.statistics.estimate import interval, number
from isoloss.studies.claims import Answer, Claim, ClaimResult
from isoloss.studies.results import UNITS

WIDTH = 300  # pixels of the figure without the names of the cases
ROW = 34  # pixels of a case


def claim_figures(result: ClaimResult) -> tuple[SmallFigure, ...]:
    """Return a figure for each unit that the claim's differences have; none where nothing was compared."""
    by_unit: dict[str, dict[str, Answer]] = {}
    for answer in result.answers:
        if answer.difference is not None:
            by_unit.setdefault(answer.difference.unit, {})[answer.case] = answer
    return tuple(_figure(result.claim, unit, answers) for unit, answers in by_unit.items())


def _figure(claim: Claim, unit: str, answers: dict[str, Answer]) -> SmallFigure:
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
    return SmallFigure(chart=chart, description=f"{panel.title}. {'; '.join(told)}. The claim states {_range(claim)}.")


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
