"""Claims of a paper, what a study says to each, and the rule that decides."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from isoloss import config
from isoloss.errors import IsolossError
from isoloss.report.data import column_of
from isoloss.statistics.estimate import Estimate
from isoloss.studies.comparison import Pair, change, difference, mean

Direction = Literal["decrease", "increase", "no change within"]

SAME_LOSS_NATS = 0.01  # two models whose loss differs by less, with 95 % confidence, count as of the same loss

RULE = (
    "A claim is shown when the 95 % confidence interval of the measured difference (two standard errors on either "
    "side, over three seeds 4.3) lies wholly on the claimed side of the margin; a claim of no change, when it lies "
    "wholly within the margin around zero. It is contradicted when the interval lies wholly outside that. Otherwise it "
    "is not shown: the interval is too wide to say. A claim is not tested if this scale lacks its setting, or if it "
    "needs two models of the same loss and theirs are not shown to be the same. A claim is tested on every task of "
    "the study, or with both traces, and each answer is judged by itself: on average, one in twenty such intervals "
    "misses the true difference."
)


class Verdict(StrEnum):
    """How a claim fared."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested at this scale"


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
    not_tested: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a study says to a claim in one case, and the verdict."""

    case: str  # which of several, e.g. the task; empty where there is one
    numbers: Mapping[str, Estimate]  # the estimates behind the verdict by name, in the order shown
    verdict: Verdict  # how the claim fared
    explanation: str  # one or two sentences: what was compared, or why nothing was
    difference: Estimate | None = None  # what the verdict rests on; None where nothing was tested

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """Name and text of each number, with ± one standard error."""
        return tuple((name, str(estimate)) for name, estimate in self.numbers.items()) or (("", "–"),)


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim, and what a study says to it in each case."""

    claim: Claim  # the claim
    answers: tuple[Answer, ...]  # one for each case, at least one

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


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two models that claims compare.

    Attributes:
        names: What the first and the second are called.
        pairs: One pair of checkpoints, or a pair for each seed.
        where: A sentence on which checkpoints these are, for the explanation.
        case: Which of several contrasts of the same kind.
        at_same_loss: Whether a claim about anything but the loss needs the two to have the same.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    where: str = ""
    case: str = ""
    at_same_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class _ClaimsFile:
    claims: tuple[Claim, ...]


def read_claims(path: Path) -> tuple[Claim, ...]:
    """Return the claims of a TOML file: a `[[claims]]` table each, with the fields of `Claim`.

    Raises:
        IsolossError: The file cannot be read, a key is unknown, missing or of the wrong type, a margin does
            not fit, or two claims share an id.
    """
    claims = config.read_toml(_ClaimsFile, path).claims
    for claim in claims:
        _check_margin(claim.direction, claim.margin)
    ids = [claim.id for claim in claims]
    for name in ids:
        if ids.count(name) > 1:
            raise IsolossError(f"{path} has two claims with the id {name!r}")
    return claims


# --- the rule --------------------------------------------------------------------------------------------------------


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
        IsolossError: A margin that does not fit the direction.

    Example:
        >>> gain = Estimate(value=0.024, stderr=0.008, samples=5, unit="accuracy", num_predictions=1000, method="probe")
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


def _check_margin(direction: str, margin: float) -> None:
    if not 0 <= margin < float("inf"):
        raise IsolossError(f"a claim's margin is a finite number of at least 0, not {margin}")
    if direction == "no change within" and margin == 0:
        raise IsolossError(
            "a claim of no change needs a margin above 0: no measurement shows that two numbers are equal"
        )


def loss_key(pairs: Sequence[Pair]) -> str:
    """Return which estimate is the loss: the KL to the truth, or, where that is not known, the loss itself."""
    return "kl" if "kl" in pairs[0][0] else "loss"


def same_loss(pairs: Sequence[Pair]) -> bool:
    """Whether the two models of every pair have the same loss: it differs by less than 0.01 nats, at 95 %."""
    key = loss_key(pairs)
    changes = [difference(second[key], first[key]) for first, second in pairs]
    return all(judge(each, "no change within", SAME_LOSS_NATS) is Verdict.SHOWN for each in changes)


# --- answers ---------------------------------------------------------------------------------------------------------


def answer_all(
    path: Path, contrasts: Mapping[str, Sequence[Contrast]], measures: Mapping[str, Mapping[str, str]]
) -> tuple[ClaimResult, ...]:
    """Return the result of every claim of a file, in its order: each tested on every contrast and every measure.

    Args:
        path: The claims.
        contrasts: The pairs of models, by what claims call them in `compares`.
        measures: The keys of the estimates to compare, by case (a task, say; empty where there is one), by what claims
            call them in `measures`.

    Raises:
        IsolossError: A claim compares or measures what the study does not have.
    """
    results = []
    for claim in read_claims(path):
        if claim.not_tested:
            answers = [_not_tested(claim.not_tested)]
        else:
            for word, choices in (("compares", contrasts), ("measures", measures)):
                if (name := getattr(claim, word)) not in choices:
                    has = ", ".join(choices) or "none"
                    raise IsolossError(f"{path}: {word} of the claim {claim.id} is {name!r}; the study has {has}")
            answers = [a for each in contrasts[claim.compares] for a in answer(claim, each, measures[claim.measures])]
        results.append(ClaimResult(claim=claim, answers=tuple(answers)))
    return tuple(results)


def answer(claim: Claim, contrast: Contrast, keys: Mapping[str, str]) -> list[Answer]:
    """Return the answers to a claim for one contrast: by second - factor * first of each estimate.

    A claim that is not about the loss needs two models of the same loss, unless the contrast says otherwise.
    """
    (first, second), pairs = contrast.names, contrast.pairs
    loss = loss_key(pairs)
    if contrast.at_same_loss and loss not in keys.values() and not same_loss(pairs):
        changes = ", ".join(str(difference(b[loss], a[loss])) for a, b in pairs)
        why = (
            f"The two models are not shown to have the same loss, to within {SAME_LOSS_NATS} nats: the "
            f"{'KL' if loss == 'kl' else 'loss'} of {second} minus that of {first} is "
            f"{changes}{' for each seed' if len(pairs) > 1 else ''}. {contrast.where}"
        )
        return [_not_tested(why.rstrip(), case=contrast.case)]
    return [_answer(claim, contrast, key, case) for case, key in keys.items()]


def _not_tested(why: str, *, case: str = "") -> Answer:
    return Answer(case=case, numbers={}, verdict=Verdict.NOT_TESTED, explanation=why)


def _answer(claim: Claim, contrast: Contrast, key: str, case: str) -> Answer:
    (first, second), pairs, factor = contrast.names, contrast.pairs, claim.factor
    measured = change(pairs, key, factor=factor)
    explanation = (
        f"{column_of(key).title}: {second} against {first}, {_paired_over(measured, pairs, key)}. {contrast.where}"
    )
    numbers = {name: mean([pair[i][key].estimate for pair in pairs]) for i, name in enumerate(contrast.names)}
    numbers["difference" if factor == 1 else f"{second} minus {factor:g} times {first}"] = measured
    return Answer(
        case=f"{case} ({contrast.case})" if case and contrast.case else case or contrast.case,
        numbers=numbers,
        verdict=judge(measured, claim.direction, claim.margin),
        explanation=explanation.rstrip(),
        difference=measured,
    )


def _paired_over(measured: Estimate, pairs: Sequence[Pair], key: str) -> str:
    """What the error of a difference is over, and how far that is from zero.

    Over seeds it says how many standard errors, as the 95 % interval of a mean over few seeds is much wider than two;
    of one pair of probes it gives McNemar's test.
    """
    if len(pairs) > 1:
        far = f", {abs(measured.value) / measured.stderr:.1f} standard errors" if measured.stderr > 0 else ""
        return f"paired over {len(pairs)} seeds{far}"
    first, second = (checkpoint[key] for checkpoint in pairs[0])
    if measured.is_exact:
        return "both exact"
    if not first.is_accuracy:
        return f"paired over {len(first.examples['influence']):,} sentences"
    from isoloss.transfer.comparing import mcnemar

    probes, examples = first.examples["predictions"].shape
    test = mcnemar(second.votes, first.votes)
    return (
        f"paired over {examples:,} test sentences and {probes} probes; McNemar's test on the probes' plurality "
        f"votes: {test.only_first} sentences gained, {test.only_second} lost, p = {test.p_value:.2g}"
    )
