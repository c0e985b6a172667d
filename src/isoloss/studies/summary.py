"""The summary of a study: tables of estimates and the result of each claim, as JSON types and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate, interval, number, rounded
from isoloss.studies.claims import Answer, ClaimResult
from isoloss.studies.results import ESTIMATE, RESCALED, UNITS, Results

if TYPE_CHECKING:
    from isoloss.report.html import Card

VERDICT = "verdict"  # the column of the verdicts; this and the one before it, the case, are text


@dataclass(frozen=True)
class SummaryTable:
    """Rows of estimates."""

    name: str  # its key in JSON, a plural word
    title: str  # what is printed above it
    labels: tuple[str, ...]  # headings of the columns that name a row, e.g. run and step
    rows: Sequence[tuple[tuple[str | int, ...], Mapping[str, Estimate]]]
    caption: str = ""  # on the page

    def __post_init__(self) -> None:
        # `isoloss.read_study` returns a row for each estimate, with columns of these names
        if taken := next((label for label in self.labels if label in ESTIMATE), None):
            raise IsolossError(
                f"a label of the table {self.name} is {taken!r}, as a column of its estimates is: choose another name"
            )

    @property
    def left(self) -> int:
        """How many of the first columns are text, not numbers."""
        return sum(isinstance(label, str) for label in self.rows[0][0])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows as text; accuracies are in percent."""
        columns = [*self.labels, *(_column(key, estimate.unit) for key, estimate in self.rows[0][1].items())]
        return columns, [
            [*(f"{x:,}" if isinstance(x, int) else x for x in labels), *map(number, some.values())]
            for labels, some in self.rows
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON types."""
        return [
            {**dict(zip(self.labels, labels, strict=True)), "estimates": {key: bare(e) for key, e in some.items()}}
            for labels, some in self.rows
        ]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the verdicts of a study share."""

    claims_sha256: str  # hash of what the claims state
    loss_margin: float  # equivalence margin of the loss, unless a claim sets another, in nats
    secondary_tests: int  # how many the study has, made or not


@dataclass(frozen=True, kw_only=True)
class MissedTargets:
    """The runs whose training ended above its target loss."""

    line: str  # how many, and how many of each arm
    runs: Mapping[str, Sequence[str]]  # by run: a sentence for each stage that missed its target
    next_step: str  # how to train for longer; empty at a scale without verdicts


def of_the_highest(fractions: Sequence[float]) -> str:
    """Return at which learning rates runs ended, given as fractions of the highest, in words."""
    ends = dict.fromkeys(f"{100 * each:.0f}" for each in (min(fractions), max(fractions)))
    return f"at {' to '.join(ends)} % of the highest rate"


@dataclass(frozen=True)
class Summary:
    """Summary of a study's results."""

    tables: Sequence[SummaryTable]  # tables of estimates
    claims: Sequence[ClaimResult]  # the result of each claim
    family: Family | None = None  # what the verdicts share; None: there are no claims
    warning: str = ""  # that no verdict is given at this scale, or that models are identical
    answer: Sequence[Card] = ()  # the study's answer
    missed: MissedTargets | None = None  # None: all runs reached their targets

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        return {
            **{table.name: table.to_dict() for table in self.tables},
            "claims": [
                {
                    "claim": result.claim.id,
                    **{name: value for name, value in result.claim.document().items() if name != "id"},
                    "verdict": result.verdict,
                    "answers": [_answer_to_dict(result, answer) for answer in result.answers],
                }
                for result in self.claims
            ],
            "family": self.family and dataclasses.asdict(self.family),
            "warning": self.warning,
            "missed_targets": self.missed and dataclasses.asdict(self.missed),
            "answer": [dataclasses.asdict(card) for card in self.answer],
        }


def tables_in(summary: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table in what `Summary.to_dict` returned, by the table's name."""
    return {key: rows for key, rows in summary.items() if isinstance(rows, list) and key not in ("claims", "answer")}


def _answer_to_dict(result: ClaimResult, answer: Answer) -> dict[str, Any]:
    gate = answer.same_loss
    return {
        "case": answer.case,
        "verdict": answer.verdict.value,
        "role": answer.role,
        "words": result.words(answer),
        "difference": answer.difference and bare(answer.difference),
        "interval95": answer.interval95,
        "p_value": answer.p_value,
        "p_no_effect": answer.p_no_effect,
        "p_adjusted": answer.p_adjusted,
        "p_no_effect_adjusted": answer.p_no_effect_adjusted,
        "tests": answer.tests,
        "withheld": answer.withheld,
        "detectable": answer.detectable,
        "below": answer.below,
        "adjusted": answer.adjusted and bare(answer.adjusted),
        "same_loss": gate
        and {
            "difference": bare(gate.difference),
            "margin": gate.margin,
            "p_value": gate.p_value,
            "interval90": gate.interval,
            "smallest_margin": gate.smallest_margin,
            "shown": gate.shown,
        },
        "numbers": {name: str(estimate) for name, estimate in answer.numbers.items()},
        "explanation": answer.explanation,
    }


def checkpoint_tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the table of every checkpoint, the default of a study without tables of its own."""
    rows = [(label, {key: each[key] for key in results.keys}) for label, each in results.checkpoints.items()]
    return (SummaryTable("checkpoints", "value ± standard error", ("run", "step"), rows),)


def control_tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the table of the checkpoints that were also measured after a random rescaling; empty if none was."""
    rows: list[tuple[tuple[str | int, ...], Mapping[str, Estimate]]] = []
    for label, each in results.checkpoints.items():
        if all(key in each and rescaled in each for key, rescaled in RESCALED.items()):
            shown = [name for pair in RESCALED.items() for name in pair]
            rows.append((label, {key: each[key] for key in shown}))
    if not rows:
        return ()
    factors = {
        key: [estimates[rescaled].value / estimates[key].value for _, estimates in rows]
        for key, rescaled in RESCALED.items()
    }
    plain, off = factors["trace"], max(abs(factor - 1) for factor in factors["minimal-trace"])
    caption = (
        "In each of these models, some weights are multiplied and others divided by random factors between 2 and 3, "
        f"which leaves every prediction unchanged. The trace is multiplied by {min(plain):.3g} to {max(plain):.3g}; "
        f"the minimal trace changes by at most {off:.0e} of its value."
    )
    return (SummaryTable("controls", "the same models, rescaled at random", ("run", "step"), rows, caption),)


def bare(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types, without its parts by parameter and layer."""
    parts = ("by_parameter", "by_parameter_stderr", "by_layer", "by_layer_stderr")
    return {**estimate.to_dict(), **dict.fromkeys(parts)}


def _column(key: str, unit: str) -> str:
    short = UNITS.get(unit, unit)
    return f"{'KL' if key == 'kl' else key} ({short})" if short else key


# --- claims as text


def claim_table(result: ClaimResult) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, one row per case; empty columns are left out.

    A unit stands in the heading of a column if all its numbers share it, otherwise after each number. The interval and
    the columns after it are in the unit of the difference.
    """
    headings = _headings(result)
    rows = [_cells(result, answer) for answer in result.answers]
    shown = [i for i in range(len(headings)) if any(row[i][0] for row in rows)]
    units = {i: {row[i][1] for row in rows if row[i][0]} for i in shown}
    columns = [_with(headings[i], *units[i]) if len(units[i]) == 1 else headings[i] for i in shown]
    texts = [[row[i][0] if len(units[i]) == 1 else f"{row[i][0]} {row[i][1]}".rstrip() for i in shown] for row in rows]
    return columns, texts


def all_claims_table(results: Sequence[ClaimResult]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, one row for each claim and case; the interval is in the unit of the difference."""
    columns = ["claim", "case", VERDICT, "unit", "role", "difference", "95 % interval", "p", "adjusted p"]
    rows = []
    for result in results:
        for answer in result.answers:
            case, verdict, _, _, (difference, unit), interval95, p, adjusted = _cells(result, answer)[:8]
            about = [case[0], verdict[0], unit, answer.role, difference, interval95[0], p[0], adjusted[0]]
            rows.append([result.claim.id, *about])
    return columns, rows


def _headings(result: ClaimResult) -> list[str]:
    """Return the columns; the two models have their own names where these are the same throughout."""
    names = {tuple(answer.numbers)[:2] for answer in result.answers if answer.numbers}
    first, second = names.pop() if len(names) == 1 else ("first", "second")
    factor = result.claim.factor
    difference = "difference" if factor == 1 else f"{second} minus {factor:g} times {first}"
    if any(map(_is_slope, result.answers)):
        difference = "slope"  # it is not the second number minus the first
    about = ("95 % interval", "p", "adjusted p", "adjusted p of no effect", "found with 80 % power", "smaller than")
    return ["case", VERDICT, first, second, difference, *about, "at the same loss"]


def _is_slope(answer: Answer) -> bool:
    return answer.difference is not None and answer.difference.unit.endswith((" per halving", " per doubling"))


def _cells(result: ClaimResult, answer: Answer) -> list[tuple[str, str]]:
    """Return the text and the unit of each cell."""
    difference = answer.difference
    about: list[str] = [""] * 7
    if difference is not None:
        about = [
            "" if difference.stderr == 0 else interval(difference),
            _p_text(answer.p_value),
            _p_text(answer.p_adjusted),
            _p_text(answer.p_no_effect_adjusted),
            # an effect that could be found has no error of its own: two digits will do
            "" if answer.detectable is None else _size(answer.detectable, answer.detectable),
            "" if answer.below is None else _size(answer.below, difference.stderr),
            "" if answer.adjusted is None else number(answer.adjusted),
        ]
    numbers = [(number(each), UNITS.get(each.unit, each.unit)) for each in answer.numbers.values()]
    if _is_slope(answer):
        # a slope is over all models of a group: its first and its last would look like what is compared
        numbers[:2] = [("", "")] * 2
    return [
        *((text, "") for text in (answer.case, result.words(answer))),
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
