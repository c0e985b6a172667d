"""Claims of a paper, the file that states them, and what a study says to each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isoloss import config, files
from isoloss.errors import IsolossError
from isoloss.statistics.checking import positive
from isoloss.statistics.equivalence import Equivalence
from isoloss.statistics.estimate import Estimate
from isoloss.studies.comparison import Pair
from isoloss.studies.verdicts import Direction, Verdict, check_margin

SAME_LOSS_NATS = 0.01  # how much the losses of two models may differ that count as of the same loss


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper that can be measured: a `[[claims]]` table of a study's claims.toml.

    It says what is compared and what is measured, not on which tasks: these are all that the study has.

    Attributes:
        id: Short name, e.g. `flatter-with-sgd`.
        statement: What is claimed, in plain words.
        paper: The paper's own figure with its setting.
        direction: Which way the measured difference goes if the claim holds.
        margin: How far beyond zero the difference must go, or how far from zero it may be; in the difference's unit.
        compares: Which two models are compared, as the study calls the contrast.
        measures: What is measured of them, as the study calls it, e.g. `kl`, or `transfer`: the probes of all tasks.
        factor: What the first of the two is multiplied by before it is subtracted from the second.
        same_loss_nats: The margin within which the loss counts as the same for this claim; None: the file's. A claim
            whose smallest effect of interest is larger allows for a larger difference.
        not_tested: Why the study cannot test it; then nothing is compared.
    """

    id: str
    statement: str
    paper: str
    direction: Direction
    margin: float = 0.0
    compares: str = ""
    measures: str = ""
    factor: float = 1.0
    same_loss_nats: float | None = None
    not_tested: str = ""


@dataclass(frozen=True, kw_only=True)
class _Document:
    claims: tuple[Claim, ...]
    primary: str = ""
    primary_case: str = ""
    same_loss_nats: float = SAME_LOSS_NATS
    scales: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimsFile(_Document):
    """What a study's claims.toml states, fixed before the study is run.

    Attributes:
        name: The file's name.
        sha256: Of its bytes.
        claims: The claims, in order.
        primary: The id of the claim that is tested at 5 % by itself; empty: none is.
        primary_case: The case of it that is; empty where it has one.
        same_loss_nats: The margin within which the mean difference of two models' loss counts as none.
        scales: The scales of the study at which verdicts are given; empty: all.
    """

    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}, SHA-256 {self.sha256}"

    def judged_at(self, scale: str | None) -> bool:
        """Whether verdicts are given at a scale; None is one that needs no leave."""
        return scale is None or not self.scales or scale in self.scales

    def warning(self, scale: str) -> str:
        """Return what to say of a scale at which no verdict is given; empty where verdicts are."""
        if self.judged_at(scale):
            return ""
        return (
            f"Scale {scale}: every part runs, no verdict is given, and no number means anything. "
            f"Verdicts are given at scale {' and '.join(self.scales)}."
        )


def read_claims(path: Path, *, scales: Collection[str] | None = None) -> ClaimsFile:
    """Return what a TOML file states: the keys of `ClaimsFile`, and a `[[claims]]` table each with those of `Claim`.

    Args:
        path: The file.
        scales: The scales of the study; None: those that the file names are not checked.

    Raises:
        IsolossError: The file cannot be read, a key is unknown, missing or of the wrong type, a margin does
            not fit, two claims share an id, or the primary claim or a scale is none that there is.
    """
    document = config.read_toml(_Document, path)
    ids = [claim.id for claim in document.claims]
    for claim in document.claims:
        check_margin(claim.direction, claim.margin)
        if ids.count(claim.id) > 1:
            raise IsolossError(f"{path} has two claims with the id {claim.id!r}")
    for name, margin in [("", document.same_loss_nats), *((each.id, each.same_loss_nats) for each in document.claims)]:
        if margin is not None:
            positive(f"{path}: same_loss_nats{f' of the claim {name}' if name else ''}", margin)
    if document.primary and document.primary not in ids:
        raise IsolossError(f"{path}: primary is {document.primary!r}; the claims are {', '.join(ids) or 'none'}")
    if document.primary_case and not document.primary:
        raise IsolossError(f"{path}: primary_case is {document.primary_case!r}, and primary does not name its claim")
    for scale in document.scales:
        if scales is not None and scale not in scales:
            raise IsolossError(f"{path}: scales has {scale!r}; the study's scales are {', '.join(scales)}")
    return ClaimsFile(**vars(document), name=path.name, sha256=files.sha256(path))


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two models that claims compare.

    Attributes:
        names: What the first and the second are called.
        pairs: One pair of checkpoints, or several.
        where: A sentence on which checkpoints these are, for the explanation.
        case: Which of several contrasts of the same kind.
        at_same_loss: Whether a claim about anything but the loss needs the two to have the same.
        clusters: The independent unit of each pair, such as its grammar: errors are over these. Empty: over pairs, or
            over the examples of the only one.
        clusters_are: What the clusters are, in the plural.
        slopes: By the key of an estimate, its slope on the loss, in its difference's unit per nat, estimated on other
            runs: with it the difference at the same loss is given as well. It takes clusters.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    where: str = ""
    case: str = ""
    at_same_loss: bool = True
    clusters: Sequence[str] = ()
    clusters_are: str = "grammars"
    slopes: Mapping[str, Estimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slopes and not self.clusters:
            raise IsolossError(
                f"the contrast of {self.names[0]} and {self.names[1]} has slopes and no clusters: name the cluster of "
                "each pair"
            )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a study says to a claim in one case, and the verdict.

    Attributes:
        case: Which of several, e.g. the task; empty where there is one.
        numbers: The estimates behind the verdict by name, in the order shown: the first model's, the second's and
            their difference; empty where the study cannot test the claim.
        verdict: How the claim fared.
        explanation: One or two sentences: what was compared, or why nothing was.
        difference: What the verdict rests on; None where nothing was compared.
        same_loss: The test of whether the two models have the same loss; None where that does not matter.
        p_value: Of the difference (`isoloss.studies.verdicts.p_value`); None where it was not tested.
        p_adjusted: By Holm's method over all tests of the file but the primary one; None for that, or not tested.
        is_primary: Whether it is the file's primary test.
        detectable: The smallest size of a true difference that is found with 80 % power, in the difference's unit:
            beyond 0, and beyond the margin if there is one. None where it was not tested, or is exact.
        below: Where nothing is shown, what the size of the true difference is below, with 95 % confidence.
        adjusted: The difference as it would be at the same loss; None where the contrast has no slope for it.
    """

    case: str
    numbers: Mapping[str, Estimate]
    verdict: Verdict
    explanation: str
    difference: Estimate | None = None
    same_loss: Equivalence | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    is_primary: bool = False
    detectable: float | None = None
    below: float | None = None
    adjusted: Estimate | None = None

    @property
    def interval95(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the difference, in its unit."""
        return None if self.difference is None else self.difference.ci95


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim, and what a study says to it in each case."""

    claim: Claim  # the claim
    answers: tuple[Answer, ...]  # one for each case, at least one

    def answer(self, case: str = "") -> Answer:
        """Return the answer of a case.

        Raises:
            IsolossError: There is no such case, or more than one.
        """
        found = [answer for answer in self.answers if answer.case == case]
        if len(found) != 1:
            cases = ", ".join(repr(answer.case) for answer in self.answers)
            raise IsolossError(f"the claim {self.claim.id} has no one case {case!r}; its cases are {cases}")
        return found[0]

    @property
    def agree(self) -> bool:
        """Whether the verdict is the same in all cases."""
        return len({answer.verdict for answer in self.answers}) == 1

    @property
    def verdict(self) -> str:
        """The verdict of all cases, or that of each where they differ.

        Example:
            >>> claim = Claim(id="longer", statement="", paper="", direction="increase")
            >>> answers = [Answer(case="root", numbers={}, verdict=Verdict.CONTRADICTED, explanation=""),
            ...            Answer(case="prefix-4", numbers={}, verdict=Verdict.SHOWN, explanation="")]
            >>> ClaimResult(claim=claim, answers=tuple(answers)).verdict
            'shown for prefix-4; contradicted for root'
        """
        if self.agree:
            return self.answers[0].verdict.value
        order = list(Verdict)
        ordered = sorted(self.answers, key=lambda answer: order.index(answer.verdict))
        groups = itertools.groupby(ordered, key=lambda answer: answer.verdict)
        return "; ".join(f"{verdict.value} for {', '.join(one.case for one in some)}" for verdict, some in groups)
