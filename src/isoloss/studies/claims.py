"""Claims, the file that states them, and a study's result for each."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from isoloss import config
from isoloss.errors import IsolossError
from isoloss.statistics.checking import positive
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import SAME_LOSS_NATS, Equivalence
from isoloss.studies.results import UNITS, Pair

ALPHA = 0.05  # the level of all tests

Direction = Literal["decrease", "increase", "no change within"]
Role = Literal["manipulation check", "positive control", "primary", "secondary"]
GATES: tuple[Role, ...] = ("manipulation check", "positive control", "primary")  # in the order in which they are tested


class Verdict(StrEnum):
    """The verdict on a claim."""

    SHOWN = "shown"
    NO_EFFECT = "no effect of interest"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested"
    NO_VERDICT = "no verdict at this scale"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence that can be measured: a `[[claims]]` table of a study's claims.toml.

    It says what is compared and measured, but not on which tasks: it is tested on all tasks of the study.

    Attributes:
        id: Short name, e.g. `flatter-with-sgd`.
        statement: What is claimed, in plain words.
        direction: Direction of the measured difference if the claim holds.
        role: What depends on it. The claims of the first three roles are gates, tested in this order: whether the
            treatment did what it should (manipulation check), whether the study finds an effect that is known to be
            there (positive control), and the question itself (primary). All others are secondary.
        case: Of a gate, the case that is tested, e.g. `prefix-4`; its other cases are secondary tests. Empty: the gate
            is shown only if all its cases are.
        paper: What a paper says about it, its figure with its setting; empty: the claim is one's own.
        margin: How far beyond 0 the difference must be, or, for no change, how far from 0 it may be; in its unit.
        compares: The study's name of the contrast: which two models are compared.
        measures: The study's name of what is measured, e.g. `kl`, or `transfer`: the probes of all tasks.
        factor: Factor of the first model's value before it is subtracted from the second's; above 0.
        no_effect_within: The smallest effect of interest, above 0, in the difference's unit: the claim is tested for
            the absence of such an effect as well. None: it is not.
        at_same_loss: How the claim is judged at the same loss: the difference as it is, once the two losses are shown
            to be the same (tested), or the difference less what the difference in loss explains, by the contrast's
            slope from other runs (adjusted).
        same_loss_nats: Equivalence margin of the loss for this claim; None: the file's. A claim with a larger smallest
            effect of interest can have a larger margin.
        not_tested: Why the study cannot test the claim; then nothing is compared.
    """

    id: str
    statement: str
    direction: Direction
    role: Role = "secondary"
    case: str = ""
    paper: str = ""
    margin: float = 0.0
    compares: str = ""
    measures: str = ""
    factor: float = 1.0
    no_effect_within: float | None = None
    at_same_loss: Literal["tested", "adjusted"] = "tested"
    same_loss_nats: float | None = None
    not_tested: str = ""


# the keys that the TOML file may have; `ClaimsFile` adds what is known of the file itself, which no file may state
@dataclass(frozen=True, kw_only=True)
class _Document:
    claims: tuple[Claim, ...]
    same_loss_nats: float = SAME_LOSS_NATS
    scales: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimsFile(_Document):
    """What a study's claims.toml states, fixed before the study is run.

    Attributes:
        name: The file's name.
        sha256: Of its parsed content, as JSON with sorted keys, so comments and layout do not count.
        claims: The claims, in order.
        same_loss_nats: Equivalence margin of the mean difference in loss between two models.
        scales: The scales at which verdicts are given; empty: all.
    """

    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, SHA-256 of its content {self.sha256}"

    @property
    def gates(self) -> tuple[Claim, ...]:
        """The claims that are tested in order before the secondary ones, in that order."""
        return tuple(claim for role in GATES for claim in self.claims if claim.role == role)

    def judged_at(self, scale: str | None) -> bool:
        """Whether verdicts are given at a scale; always if it is None."""
        return scale is None or not self.scales or scale in self.scales

    def warning(self, scale: str) -> str:
        """Return the warning for a scale without verdicts; empty for one with verdicts."""
        if self.judged_at(scale):
            return ""
        return (
            f"Scale {scale} is too small to say anything, and no verdict is given. "
            f"Verdicts are given at scale {' and '.join(self.scales)}."
        )


def read_claims(path: Path, *, scales: Collection[str] | None = None) -> ClaimsFile:
    """Return what a TOML file states: the keys of `ClaimsFile`, and `[[claims]]` tables with the keys of `Claim`.

    Args:
        path: The file.
        scales: The scales of the study; None: the scales that the file names are not checked.

    Raises:
        IsolossError: The file cannot be read, a key is unknown, missing or of the wrong type, a number or case does not
            fit its claim, two claims share an id, a trace is measured without the minimal trace, or a scale does not
            exist.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "claims.toml")
        >>> _ = path.write_text('''
        ... [[claims]]
        ... id = "flatter"
        ... statement = "Label noise in SGD makes the model flatter."
        ... role = "primary"
        ... direction = "decrease"
        ... compares = "noise"
        ... measures = "flatness"
        ... case = "minimal-trace"
        ... ''')
        >>> [(claim.id, claim.role, claim.direction, claim.margin) for claim in read_claims(path).claims]
        [('flatter', 'primary', 'decrease', 0.0)]
    """
    try:
        document = config.read_toml(_Document, path)
    except IsolossError as error:
        if "no setting 'primary" in str(error):  # keys of earlier files
            raise IsolossError(
                f'{path}: primary and primary_case are now keys of the claim itself: role = "primary", and case'
            ) from error
        raise
    ids = [claim.id for claim in document.claims]
    for claim in document.claims:
        if ids.count(claim.id) > 1:
            raise IsolossError(f"{path} has two claims with the id {claim.id!r}")
        try:
            _check(claim)
        except IsolossError as error:
            raise IsolossError(f"{path}: claim {claim.id}: {error}") from error
    minimal = {claim.compares for claim in document.claims if claim.measures == "minimal-trace"}
    if alone := [claim for claim in document.claims if claim.measures == "trace" and claim.compares not in minimal]:
        raise IsolossError(
            f"{path}: claim {alone[0].id}: a rescaling that changes no prediction changes the trace; measure flatness "
            "(the trace and the minimal trace), or add a claim about the minimal-trace of the same models"
        )
    positive(f"{path}: same_loss_nats", document.same_loss_nats)
    for scale in document.scales:
        if scales is not None and scale not in scales:
            raise IsolossError(f"{path}: scales has {scale!r}; the study's scales are {', '.join(scales)}")
    # the file, not the dataclasses: another version may have more fields with defaults
    content = json.dumps(tomllib.loads(path.read_text(encoding="utf-8")), sort_keys=True)
    return ClaimsFile(**vars(document), name=path.name, sha256=hashlib.sha256(content.encode()).hexdigest())


def _check(claim: Claim) -> None:
    check_margin(claim.direction, claim.margin)
    positive("factor", claim.factor)
    if claim.same_loss_nats is not None:
        positive("same_loss_nats", claim.same_loss_nats)
    if claim.case and claim.role == "secondary":
        raise IsolossError(f"case is {claim.case!r}, but the role is secondary, of which all cases are tested")
    if claim.role != "secondary" and claim.not_tested:
        raise IsolossError(f"it is a {claim.role} and cannot be not_tested: what depends on it would not be tested")
    if claim.no_effect_within is not None:
        positive("no_effect_within", claim.no_effect_within)
        if claim.direction == "no change within":
            raise IsolossError("no_effect_within is for claims of a change: margin says how small no change is")
        if claim.no_effect_within <= claim.margin:
            raise IsolossError(
                f"no_effect_within is {claim.no_effect_within:g}; it must be above the margin, {claim.margin:g}: a "
                "claim and the absence of an effect must exclude each other"
            )


def check_margin(direction: str, margin: float) -> None:
    """Refuse a margin that is negative or not finite, or that is 0 for a claim of no change."""
    if not 0 <= margin < float("inf"):
        raise IsolossError(f"a claim's margin is a finite number of at least 0, not {margin}")
    if direction == "no change within" and margin == 0:
        raise IsolossError(
            "a claim of no change needs a margin above 0: no measurement shows that two numbers are equal"
        )


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two models that claims compare.

    Attributes:
        names: What the first and the second are called.
        pairs: One pair of checkpoints, or several.
        where: A sentence that says which checkpoints these are, for the explanation.
        case: Distinguishes contrasts of the same kind, e.g. `d16 to d32`.
        at_same_loss: Whether claims about anything but the loss need the two to have the same loss.
        clusters: The independent unit of each pair, such as its grammar: errors are over these. Empty: over pairs, or
            over the examples of a single pair.
        clusters_are: What the clusters are, in the plural.
        slopes: Slope on the loss of each estimate, by key, from other runs, in the difference's unit per nat. With it
            the difference at the same loss is given as well. Needs clusters.
        not_tested: Why claims about it cannot be tested, where there are too few pairs; the pairs are then not used.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    where: str = ""
    case: str = ""
    at_same_loss: bool = True
    clusters: Sequence[str] = ()
    clusters_are: str = "grammars"
    slopes: Mapping[str, Estimate] = field(default_factory=dict)
    not_tested: str = ""

    def __post_init__(self) -> None:
        if self.slopes and not self.clusters:
            raise IsolossError(
                f"the contrast of {self.names[0]} and {self.names[1]} has slopes but no clusters: give the cluster of "
                "each pair"
            )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a claim in one case, with its verdict.

    Attributes:
        case: The case, e.g. the task; empty if there is only one.
        contrast: The case of the contrast alone, e.g. `d16 to d32`.
        numbers: The estimates behind the verdict by name, in the order shown: the first model's, the second's and
            their difference; empty if the study cannot test the claim.
        verdict: The verdict.
        explanation: One or two sentences: what was compared, or why nothing was.
        role: The role of this test: of the claim, or secondary for a case of a gate that is not the one tested.
        difference: The difference that is judged; None if nothing was compared.
        same_loss: The test of equivalence of the two losses; None if the claim does not need it.
        p_value: Of the difference (`isoloss.studies.verdicts.p_value`); None if it was not tested.
        p_no_effect: Of the larger of two one-sided tests: for a difference as large as the smallest effect of interest.
            None if the claim has none, or was not tested.
        p_adjusted: `p_value`, adjusted as the verdict needs (`isoloss.studies.verdicts.RULE`).
        p_no_effect_adjusted: `p_no_effect`, adjusted in the same way.
        tests: Number of tests that the adjustment is for; None if it was not tested.
        withheld: What kept it from being tested, in a few words: a gate, identical weights, or that there are no such
            models; empty: none of these.
        positive_control: Beside `not shown`: what the positive control says, in a few words; empty for other verdicts.
        detectable: The smallest true difference that is found with 80 % power, in the difference's unit; it includes
            the margin if there is one. None if it was not tested, or is exact.
        below: If nothing is shown: upper bound on the size of the true difference, with 95 % confidence.
        adjusted: The difference adjusted to the same loss; None if the contrast has no slope for it.
    """

    case: str
    numbers: Mapping[str, Estimate]
    verdict: Verdict
    explanation: str
    contrast: str = ""
    role: Role = "secondary"
    difference: Estimate | None = None
    same_loss: Equivalence | None = None
    p_value: float | None = None
    p_no_effect: float | None = None
    p_adjusted: float | None = None
    p_no_effect_adjusted: float | None = None
    tests: int | None = None
    withheld: str = ""
    positive_control: str = ""
    detectable: float | None = None
    below: float | None = None
    adjusted: Estimate | None = None

    @property
    def interval95(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the difference, in its unit."""
        return None if self.difference is None else self.difference.ci95


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim and its result in each case."""

    claim: Claim
    answers: tuple[Answer, ...]  # one for each case, at least one

    def answer(self, case: str = "") -> Answer:
        """Return the answer of a case.

        Raises:
            IsolossError: There is no such case, or more than one.
        """
        matching = [answer for answer in self.answers if answer.case == case]
        if len(matching) != 1:
            cases = ", ".join(repr(answer.case) for answer in self.answers)
            raise IsolossError(f"the claim {self.claim.id} has no one case {case!r}; its cases are {cases}")
        return matching[0]

    @property
    def verdict(self) -> str:
        """The verdict of all cases, or of each case where they differ.

        Example:
            >>> claim = Claim(id="longer", statement="", direction="increase")
            >>> answers = [Answer(case="root", numbers={}, verdict=Verdict.CONTRADICTED, explanation=""),
            ...            Answer(case="prefix-4", numbers={}, verdict=Verdict.SHOWN, explanation="")]
            >>> ClaimResult(claim=claim, answers=tuple(answers)).verdict
            'shown for prefix-4; contradicted for root'
        """
        cases: dict[Verdict, list[str]] = {}
        for answer in self.answers:
            cases.setdefault(answer.verdict, []).append(answer.case)
        if len(cases) == 1:
            return self.answers[0].verdict
        return "; ".join(f"{verdict} for {', '.join(cases[verdict])}" for verdict in Verdict if verdict in cases)

    def words(self, answer: Answer) -> str:
        """Return the verdict of one answer in words: with the smallest effect of interest where that is excluded.

        Example:
            >>> claim = Claim(id="longer", statement="", direction="increase", no_effect_within=0.5)
            >>> known = {"case": "", "numbers": {}, "explanation": "", "p_no_effect_adjusted": 0.01}
            >>> answers = [Answer(verdict=each, **known) for each in (Verdict.NO_EFFECT, Verdict.SHOWN)]
            >>> result = ClaimResult(claim=claim, answers=tuple(answers))
            >>> [result.words(answer) for answer in answers]
            ['no effect of 0.5 or more: shown', 'shown, and smaller than 0.5']
        """
        unit = "" if answer.difference is None else UNITS.get(answer.difference.unit, answer.difference.unit)
        if self.claim.no_effect_within == 1 and unit == "points":
            unit = "point"
        size = "" if self.claim.no_effect_within is None else f"{self.claim.no_effect_within:g} {unit}".rstrip()
        if answer.verdict is Verdict.NO_EFFECT:
            return f"no effect of {size} or more: shown"
        # beside an interval that excludes 0, "shown" alone would say that there is a change
        if answer.verdict is Verdict.SHOWN and self.claim.direction == "no change within":
            return f"shown: within ± {self.claim.margin:g} {unit}".rstrip()
        if answer.p_no_effect_adjusted is not None and answer.p_no_effect_adjusted < ALPHA:
            return f"{answer.verdict.value}, and smaller than {size}"
        if answer.withheld:
            return f"{answer.verdict.value}: {answer.withheld}"
        return answer.verdict.value + (f"; {answer.positive_control}" if answer.positive_control else "")
