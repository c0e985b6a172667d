"""What a paper claims, what a study found in each case that it has, and the rule that compares the two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from isoloss import config
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

Direction = Literal["decrease", "increase", "no change within"]

RULE = (
    "A claim is shown when the 95 % confidence interval of the measured difference (two standard errors on either "
    "side, over three seeds 4.3) lies wholly on the claimed side of the margin; a claim of no change, when it lies "
    "wholly within the margin around zero. It is contradicted when the interval lies wholly outside that. Otherwise it "
    "is not shown: the interval is too wide to say. A claim is not tested if this scale lacks its setting, or if it "
    "needs two models of the same loss and theirs are not shown to be the same. A claim is tested on every task of "
    "the study, and each answer is judged by itself: on average, one in twenty such intervals misses the true "
    "difference."
)


class Verdict(StrEnum):
    """How a claim fared."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested at this scale"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper that can be measured.

    It says what is compared and what is measured, not on which tasks: these are all that the study has.
    """

    id: str
    """Short name, e.g. `flatter-with-sgd`."""
    statement: str
    """What is claimed, in plain words."""
    paper: str
    """The paper's own figure with its setting."""
    direction: Direction
    """Which way the measured difference goes if the claim holds."""
    margin: float = 0.0
    """How far beyond zero the difference must go, or how far from zero it may be; in the difference's unit."""
    compares: str = ""
    """Which two models are compared, as the study calls the comparison."""
    measures: str = ""
    """What is measured of them, as the study calls it, e.g. `kl`, `trace`, or `transfer`: the probes of all tasks."""
    factor: float = 1.0
    """What the first of the two is multiplied by before it is taken from the second."""
    not_tested: str = ""
    """Why the study cannot test it; then nothing is compared."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a study found of a claim in one case, and the verdict.

    Attributes:
        case: Which of several, e.g. the task; empty where there is one.
        ours: The numbers: a text, an estimate, or estimates by name in the order shown.
        verdict: How the claim fared.
        explanation: One or two sentences: what was compared.
        difference: What the verdict rests on; None where nothing was tested.
    """

    case: str
    ours: str | Estimate | Mapping[str, Estimate]
    verdict: Verdict
    explanation: str
    difference: Estimate | None = None

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Name (may be empty) and text of each of our numbers, with ± one standard error."""
        if isinstance(self.ours, Mapping):
            return tuple((name, str(estimate)) for name, estimate in self.ours.items())
        return (("", str(self.ours)),)


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim, and what a study found of it in each case.

    Attributes:
        claim: The claim.
        answers: One for each case, at least one.
    """

    claim: Claim
    answers: tuple[Answer, ...]

    @property
    def agree(self) -> bool:
        """Whether the verdict is the same in all cases."""
        return len({answer.verdict for answer in self.answers}) == 1

    @property
    def verdict(self) -> str:
        """The verdict of all cases, or that of each where they differ.

        Example:
            >>> claim = Claim(id="longer", statement="", paper="", direction="increase")
            >>> answers = [Answer(case="root", ours="", verdict=Verdict.CONTRADICTED, explanation=""),
            ...            Answer(case="prefix-4", ours="", verdict=Verdict.SHOWN, explanation="")]
            >>> ClaimResult(claim=claim, answers=tuple(answers)).verdict
            'shown for prefix-4; contradicted for root'
        """
        if self.agree:
            return self.answers[0].verdict.value
        order = list(Verdict)
        ordered = sorted(self.answers, key=lambda answer: order.index(answer.verdict))
        groups = itertools.groupby(ordered, key=lambda answer: answer.verdict)
        return "; ".join(f"{verdict.value} for {', '.join(one.case for one in some)}" for verdict, some in groups)


@dataclass(frozen=True, kw_only=True)
class ClaimsFile:
    """The content of a study's claims.toml."""

    claims: tuple[Claim, ...]


def read_claims(path: Path) -> tuple[Claim, ...]:
    """Return the claims of a TOML file: a `[[claims]]` table each, with the fields of `Claim`.

    Raises:
        IsolossError: The file cannot be read, a key is unknown, missing or of the wrong type, a margin does
            not fit, or two claims share an id.
    """
    claims = config.read_toml(ClaimsFile, path).claims
    for claim in claims:
        _check_margin(claim.direction, claim.margin)
    ids = [claim.id for claim in claims]
    for name in ids:
        if ids.count(name) > 1:
            raise IsolossError(f"{path} has two claims with the id {name!r}")
    return claims


def judge(difference: Estimate, direction: Direction, margin: float = 0.0) -> Verdict:
    """Return whether a measured difference shows or contradicts a claim.

    Shown: with the 95 % confidence interval [a, b] of the difference, b < -margin for a decrease, a > margin for an
    increase, -margin <= a and b <= margin for no change within the margin. Contradicted: a > -margin for a decrease,
    b < margin for an increase, a > margin or b < -margin for no change. Otherwise not shown.

    Args:
        difference: After minus before, or treated minus control; its stderr is that of the difference.
        direction: The claimed direction.
        margin: At least 0, and above 0 for `no change within`; in the difference's unit.

    Raises:
        IsolossError: Another direction, or a margin that does not fit it.

    Example:
        >>> gain = Estimate(value=0.024, stderr=0.008, samples=5, unit="accuracy", num_inputs=1000, method="probe")
        >>> judge(gain, "increase").value, judge(gain, "increase", margin=0.02).value, judge(gain, "decrease").value
        ('shown', 'not shown', 'contradicted')
    """
    _check_margin(direction, margin)
    low, high = difference.ci95
    if direction == "decrease":
        shown, contradicted = high < -margin, low > -margin
    elif direction == "increase":
        shown, contradicted = low > margin, high < margin
    else:
        shown, contradicted = -margin <= low and high <= margin, low > margin or high < -margin
    if shown:
        return Verdict.SHOWN
    return Verdict.CONTRADICTED if contradicted else Verdict.NOT_SHOWN


def judged(
    claim: Claim,
    difference: Estimate,
    explanation: str,
    *,
    ours: str | Estimate | Mapping[str, Estimate] | None = None,
    case: str = "",
) -> Answer:
    """Return the answer to a claim by `judge`, showing `ours`, or the difference itself."""
    return Answer(
        case=case,
        ours=difference if ours is None else ours,
        verdict=judge(difference, claim.direction, claim.margin),
        explanation=explanation,
        difference=difference,
    )


def not_tested(why: str, *, case: str = "") -> Answer:
    """Return the answer to a claim that the study's scale cannot test."""
    return Answer(case=case, ours="–", verdict=Verdict.NOT_TESTED, explanation=why)


def _check_margin(direction: str, margin: float) -> None:
    choices = ("decrease", "increase", "no change within")
    if direction not in choices:
        raise IsolossError(f"a claim's direction is one of {', '.join(choices)}, not {direction!r}")
    if not 0 <= margin < float("inf"):
        raise IsolossError(f"a claim's margin is a finite number of at least 0, not {margin}")
    if direction == "no change within" and margin == 0:
        raise IsolossError(
            "a claim of no change needs a margin above 0: no measurement shows that two numbers are equal"
        )
