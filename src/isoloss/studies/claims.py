"""Claims, the rule by which measured differences show or contradict them, and the order in which they are tested."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import CodeType
from typing import Any, Literal, get_args

from isoloss.errors import IsolossError, did_you_mean
from isoloss.statistics import significance
from isoloss.statistics.checking import positive
from isoloss.statistics.estimate import Estimate, interval
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.statistics.significance import LOSS_MARGIN, Equivalence, equivalence, holm, largest_size, mcnemar
from isoloss.studies.plan import AnyScale, call_study_hook
from isoloss.studies.results import SHARED, UNITS, Checkpoint, Pair, Results, change, common_measures, loss_key, mean

ALPHA = 0.05  # the level of all tests
OTHER_PARAMETERS = (
    "the models have different parameters, and a trace is a sum over them: measure the trace in one size, such as "
    "minimal-trace-in-d64"
)
CONTROL_SHOWN = "positive control shown"

Direction = Literal["decrease", "increase", "no change within"]
Role = Literal["manipulation check", "positive control", "primary", "secondary"]
LossRule = Literal["tested", "adjusted"]
GATES: tuple[Role, ...] = ("manipulation check", "positive control", "primary")  # in the order in which they are tested


class Verdict(StrEnum):
    """The verdict on a claim."""

    SHOWN = "shown"
    NO_EFFECT = "no effect of interest"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested"
    NO_VERDICT = "no verdict at this scale"


DECIDED = frozenset({Verdict.SHOWN, Verdict.CONTRADICTED, Verdict.NO_EFFECT})

# the page prints this: it has to say what `judge`, `in_sequence` and `answer` do
RULE = (
    "A claim is shown if p < 0.05 and the measured difference is on the claimed side of the margin, and contradicted "
    "if p < 0.05 and it is on the other side. For a claim of no change, the claimed side is inside the margin around "
    "0. p is two-sided, by Student's t, for the null hypothesis that the true difference is at the edge of the margin. "
    "For a claim about a slope, read slope in place of difference.",
    "A claim with a smallest effect of interest is also tested for the absence of such an effect: no effect of that "
    "size or more is shown if two one-sided t tests have p < 0.05. A claim is “not shown” if none of these is: "
    "neither it nor its opposite is significant.",
    "A positive control is an effect that is known to be there. If the study has none, or does not show it, a claim "
    "may be “not shown” because the study could not find any effect.",
    "Manipulation checks, then positive controls, then primary claims are tested first, each by its own p, or by the "
    "largest p of its cases where the claim names no case. A check or control that is not shown ends the sequence, and "
    "so does a primary claim that is “not shown” or “not tested”: what comes later is not tested.",
    "p of all other, secondary tests is adjusted by Holm's method for the number of tests that the study planned, "
    "whatever was measured.",
    "If one of the claims that are tested first is also tested for the absence of an effect, its p and all later p are "
    "doubled, because both of its answers can let the sequence go on. So the chance of any wrong verdict in the whole "
    "study is at most 5 %, not counting errors of the tests of equal loss.",
    "A claim about two models with the same loss is tested only if two one-sided tests at 5 % show that the mean "
    "difference in loss is within its margin: its 90 % interval is inside the margin. Or, where the claim says so, it "
    "is judged by the difference at the same loss: the difference minus the part that the difference in loss explains, "
    "by a slope from other runs.",
    "“Found with 80 % power” is the smallest true difference that four in five such studies would find. “Smaller than” "
    "is an upper bound, with 95 % confidence, on the size of the true difference where no difference is shown.",
)


# --- what a study claims ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two models that claims compare.

    Attributes:
        names: What the first and the second are called.
        pairs: One pair of checkpoints, or several.
        where: A sentence that says which checkpoints these are, for the explanation.
        case: Distinguishes the contrasts of one claim, e.g. `d16 to d32`.
        needs_same_loss: Whether claims about anything but the loss need the two to have the same loss.
        needs_same_parameters: Whether claims about a trace need the two to have as many parameters: it is a sum over
            them, and says little of models of two sizes.
        clusters: The independent unit of each pair, such as its grammar: errors are over these. Empty: over pairs, of
            which those that share a seed and language, directly or through other pairs, count as one; or over the
            examples of a single pair.
        clusters_are: What the clusters are, in the plural.
        slopes: Slope on the loss of each estimate, by key, from other runs, in the difference's unit per nat. With it
            the difference at the same loss is given as well. Needs clusters.
        not_tested: Why claims about it cannot be tested, where there are too few pairs; the pairs are then not used.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    where: str = ""
    case: str = ""
    needs_same_loss: bool = True
    needs_same_parameters: bool = True
    clusters: Sequence[str] = ()
    clusters_are: str = "clusters"
    slopes: Mapping[str, Estimate] = field(default_factory=dict)
    not_tested: str = ""

    def __post_init__(self) -> None:
        if self.slopes and not self.clusters:
            raise IsolossError(
                f"the contrast of {self.names[0]} and {self.names[1]} has slopes but no clusters: give the cluster of "
                "each pair"
            )

    def change(self, key: str, factor: float = 1.0) -> Estimate:
        """Return second - factor * first of the estimate `key`, with its error."""
        return change(self.pairs, key, factor=factor, clusters=self.clusters)

    def means(self, key: str) -> dict[str, Estimate]:
        """Return the mean of the estimate `key` over the first models, and over the second, by name."""
        return {
            name: mean([pair[i][key] for pair in self.pairs], clusters=self.clusters)
            for i, name in enumerate(self.names)
        }

    def described(self, key: str, measured: Estimate) -> str:
        """Return what was compared, and what the error is over."""
        first, second = self.names
        return f"{second} vs. {first}, {_paired_over(measured, self, key)}."

    def named(self, factor: float) -> str:
        """Return what the difference is called."""
        return "difference" if factor == 1 else f"{self.names[1]} minus {factor:g} times {self.names[0]}"


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Groups of models in which an outcome may change with a measure: a claim about a trend is about the slope.

    A group is, for example, all doses of a treatment that continue from one base. Within it, the outcome is regressed
    on the binary logarithm of the measure, so the slope is the change with each halving, or doubling, of the measure.
    `isoloss.statistics.clusters.slope_within` averages the groups' slopes. Unless `needs_same_loss` is False, claims
    about a trend are judged at the same loss, by `loss_rule="adjusted"`.

    Attributes:
        names: What the first and the last model of each group are called.
        along: The key of the measure, above 0, e.g. `minimal-trace`.
        per: Whether the slope is per halving or per doubling of it.
        groups: The checkpoints of each group, at least two.
        clusters: The independent unit of each group, such as its grammar or its seed: errors are over these.
        given: Keys of measures, above 0, whose logarithms are held constant.
        where, case, needs_same_loss, clusters_are, slopes, not_tested: As for `Contrast`.

    Example:
        >>> from isoloss.studies import Trend
        >>> from isoloss.studies.results import CheckpointEstimate
        >>> def checkpoint(trace, accuracy):
        ...     exact = {"stderr": 0, "samples": 0, "num_predictions": 9, "method": "", "inputs": "", "settings": {}}
        ...     known = {"trace": (trace, "nats"), "probe": (accuracy, "accuracy")}
        ...     return {k: CheckpointEstimate(value=v, unit=u, examples={}, **exact) for k, (v, u) in known.items()}
        >>> doses = [[checkpoint(4, 0.5), checkpoint(2, 0.51)], [checkpoint(8, 0.6), checkpoint(2, 0.66)]]
        >>> names = "sharp", "flat"
        >>> print(Trend(names=names, along="trace", per="halving", groups=doses, clusters=("a", "b")).change("probe"))
        2.0 ± 1.0 points per halving
    """

    names: tuple[str, str]
    along: str
    per: Literal["halving", "doubling"]
    groups: Sequence[Sequence[Checkpoint]]
    clusters: Sequence[str]
    given: Sequence[str] = ()
    where: str = ""
    case: str = ""
    needs_same_loss: bool = True
    clusters_are: str = "clusters"
    slopes: Mapping[str, Estimate] = field(default_factory=dict)
    not_tested: str = ""

    def __post_init__(self) -> None:
        sizes = {len(group) for group in self.groups}
        if len(self.groups) != len(self.clusters) or min(sizes, default=2) < 2:
            raise IsolossError(
                f"a trend has {len(self.groups)} groups of {', '.join(map(str, sorted(sizes))) or 'no'} models and "
                f"{len(self.clusters)} clusters: give each group at least 2 models and one cluster"
            )

    @property
    def pairs(self) -> list[Pair]:
        """Each checkpoint with the next one of its group."""
        return [pair for group in self.groups for pair in itertools.pairwise(group)]

    def change(self, key: str, factor: float = 1.0) -> Estimate:
        """Return the slope of the estimate `key`, with its error; a factor has no meaning here."""
        from isoloss.statistics.clusters import slope_within

        if factor != 1:
            raise IsolossError(f"the claim's factor is {factor:g}, but a slope has no first model to multiply")
        points = [checkpoint for group in self.groups for checkpoint in group]
        place = [i for i, group in enumerate(self.groups) for _ in group]
        outcomes, sign = [point[key] for point in points], -1 if self.per == "halving" else 1
        scale, unit = (100, "points") if outcomes[0].unit == "accuracy" else (1, outcomes[0].unit)
        return slope_within(
            [scale * one.value for one in outcomes],
            [sign * _log2(point, self.along) for point in points],
            [self.clusters[i] for i in place],
            within=place,
            given=[[_log2(point, other) for point in points] for other in self.given],
            unit=f"{UNITS.get(unit, unit)} per {self.per}",
        )

    def means(self, key: str) -> dict[str, Estimate]:
        """Return the mean of the estimate `key` over the first models, and over the last, by name."""
        ends = zip(self.names, (0, -1), strict=True)
        return {name: mean([group[i][key] for group in self.groups], clusters=self.clusters) for name, i in ends}

    def described(self, key: str, measured: Estimate) -> str:
        """Return what the slope is along, and what the error is over."""
        given = "".join(f", given the {name.replace('-', ' ')}" for name in self.given)
        return (
            f"Slope of {key} with each {self.per} of the {self.along.replace('-', ' ')}{given}, fitted within "
            f"{len(self.groups)} groups of {len(self.groups[0])} models; 95 % interval over {measured.samples} "
            f"{self.clusters_are} (t with {measured.samples - 1} degrees of freedom)."
        )

    def named(self, factor: float) -> str:
        """Return what the slope is called."""
        del factor
        return f"per {self.per} of the {self.along.replace('-', ' ')}"


def _log2(checkpoint: Checkpoint, key: str) -> float:
    if not (value := checkpoint[key].value) > 0:
        raise IsolossError(f"{key} of a model in a trend is {value:g}; a slope on its logarithm needs it above 0")
    return math.log2(value)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence that can be measured, stated before the runs.

    It is tested on every contrast that `of` returns and on every measure.

    Attributes:
        id: Short name, e.g. `flatter-with-sgd`.
        statement: What is claimed, in plain words.
        direction: Direction of the measured difference, second minus first, if the claim holds.
        of: The models that are compared: a function of the study's `Results` that returns a `Contrast` or a `Trend`,
            or several with a case each. It is called once for all claims that share it.
        measures: What is measured of them: `kl`, `flatness` (both traces), `transfer` (the probes of all tasks), or one
            of the study's measures; or the keys of estimates by case; or a function of the scale that returns these.
        role: What depends on it. The claims of the first three roles are gates, tested in this order: whether the
            treatment did what it should (manipulation check), whether the study finds an effect that is known to be
            there (positive control), and the question itself (primary). All others are secondary.
        case: Of a gate, the case that is tested, e.g. `prefix-4`; its other cases are secondary tests. Empty: the gate
            is shown only if all its cases are.
        cases: The cases of the contrasts, where there are several, or a function of the scale that returns them: with
            them the number of tests is known before the runs.
        paper: What a paper says about it, its figure with its setting; empty: the claim is one's own.
        margin: How far beyond 0 the difference must be, or, for no change, how far from 0 it may be; in its unit.
        factor: Factor of the first model's value before it is subtracted from the second's; above 0.
        no_effect_within: The smallest effect of interest, above 0, in the difference's unit: the claim is tested for
            the absence of such an effect as well. None: it is not.
        loss_rule: How the claim is judged at the same loss: the difference as it is, once the two losses are shown to
            be the same (tested), or the difference less what the difference in loss explains, by the contrast's slope
            from other runs (adjusted). A trend is adjusted.
        loss_margin: Equivalence margin of the loss for this claim, in nats; None: the study's. A claim with a larger
            smallest effect of interest can have a larger margin.

    Raises:
        IsolossError: A number, role or case does not fit the claim.

    Example:
        >>> from isoloss.studies import Claim, Contrast
        >>> def noise(results):
        ...     pair = results.at("exact-labels"), results.at("sampled-labels")
        ...     return Contrast(names=("exact labels", "sampled labels"), pairs=[pair])
        >>> claim = Claim(id="flatter", statement="Label noise in SGD makes the model flatter.", role="primary",
        ...               direction="decrease", of=noise, measures="flatness", case="minimal-trace")
        >>> claim.margin
        0.0
    """

    id: str
    statement: str
    direction: Direction
    of: Callable[[Results], Contrast | Trend | Sequence[Contrast | Trend]]
    measures: str | Mapping[str, str] | Callable[[Any], Mapping[str, str]]
    role: Role = "secondary"
    case: str = ""
    cases: Sequence[str] | Callable[[Any], Sequence[str]] = ("",)
    paper: str = ""
    margin: float = 0.0
    factor: float = 1.0
    no_effect_within: float | None = None
    loss_rule: LossRule = "tested"
    loss_margin: float | None = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except IsolossError as error:
            raise IsolossError(f"claim {self.id}: {error}") from error

    def _check(self) -> None:
        for name, choices in (("direction", Direction), ("role", Role), ("loss_rule", LossRule)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise IsolossError(f"{name} is {value!r}; it must be one of {', '.join(get_args(choices))}")
        if not callable(self.of):
            raise IsolossError(f"of is a {type(self.of).__name__}; it must be a function of the study's results")
        check_margin(self.direction, self.margin)
        positive("factor", self.factor)
        if self.loss_margin is not None:
            positive("loss_margin", self.loss_margin)
        if self.case and self.role == "secondary":
            raise IsolossError(
                f"case is {self.case!r}, but the role is secondary, and a secondary claim tests every case: leave out "
                "case, or give the claim another role"
            )
        if self.no_effect_within is not None:
            positive("no_effect_within", self.no_effect_within)
            if self.direction == "no change within":
                raise IsolossError("no_effect_within is for claims of a change: margin says how small no change is")
            if self.no_effect_within <= self.margin:
                raise IsolossError(
                    f"no_effect_within is {self.no_effect_within:g}; it must be above the margin, {self.margin:g}: a "
                    "claim and the absence of an effect must exclude each other"
                )

    def keys(self, scale: AnyScale) -> Mapping[str, str]:
        """Return the keys of the estimates that are compared at a scale, by case, e.g. the task."""
        if callable(self.measures):
            keys: Mapping[str, str] = call_study_hook(f"measures of the claim {self.id}", self.measures, scale)
            return keys
        if not isinstance(self.measures, str):
            return self.measures
        if self.measures not in (known := common_measures(scale)):
            raise IsolossError(
                f"measures of the claim {self.id} is {self.measures!r}; the study has {', '.join(known)}"
                f"{did_you_mean(self.measures, known)}"
            )
        if not known[self.measures]:
            needed = "trace or minimal-trace" if self.measures == "flatness" else "probe-TASK or few-shot-TASK-NUMBER"
            raise IsolossError(
                f"measures of the claim {self.id} is {self.measures!r}, but nothing is measured that belongs to it: "
                f"add {needed} to a Measurement"
            )
        return known[self.measures]

    def contrast_cases(self, scale: AnyScale) -> Sequence[str]:
        """Return the cases of the contrasts that it plans at a scale."""
        if not callable(self.cases):
            return self.cases
        cases: Sequence[str] = call_study_hook(f"cases of the claim {self.id}", self.cases, scale)
        return cases

    def document(self) -> dict[str, Any]:
        """Return what it states as JSON types: all but its functions."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in ("of", "measures", "cases")}

    def sha256(self, scale: AnyScale) -> str:
        """Return the hash of what it states at a scale, with the source of `of` but without comments and docstrings."""
        stated = {**self.document(), "measures": {**self.keys(scale)}, "cases": [*self.contrast_cases(scale)]}
        text = f"{sorted(stated.items())}\n{source_of(self.of)}"
        return hashlib.sha256(text.encode()).hexdigest()


def check_margin(direction: str, margin: float) -> None:
    """Refuse a margin that is negative or not finite, or that is 0 for a claim of no change."""
    if not 0 <= margin < float("inf"):
        raise IsolossError(f"a claim's margin is a finite number of at least 0, not {margin}")
    if direction == "no change within" and margin == 0:
        raise IsolossError(
            "a claim of no change needs a margin above 0: no measurement shows that two numbers are equal"
        )


def source_of(function: Any) -> str:
    """Return the source of a function without comments, docstrings and layout, with the values that it was made with.

    A function that is not written in a file is an error.
    """
    if isinstance(function, functools.partial):
        given = [*map(_written, function.args), *(f"{name}={_written(one)}" for name, one in function.keywords.items())]
        return f"{source_of(function.func)}\n{given}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, CodeType):
        raise IsolossError(f"of a claim is of type {type(function).__name__}; it must be a function")
    try:
        tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))
    except OSError as error:
        raise IsolossError(f"the function {code.co_name} of a claim must be written in a file: {error}") from error
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    # a decorated function begins with its first decorator; of several lambdas on a line, all count
    first = [min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) for node in functions]
    found = [node for node, line in zip(functions, first, strict=True) if line == code.co_firstlineno]
    for node in (inner for one in found for inner in ast.walk(one) if isinstance(inner, ast.FunctionDef)):
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    values = {**inspect.getclosurevars(inspect.unwrap(function)).nonlocals}
    return "\n".join([*map(ast.unparse, found), *(f"{name} = {_written(each)}" for name, each in values.items())])


def _written(value: Any) -> str:
    """Return a value as it is written: the same in every process, as an object's address would not be."""
    return source_of(value) if callable(value) else repr(value)


def claims_sha256(claims: Sequence[Claim], scale: AnyScale) -> str:
    """Return the hash of what all claims of a study state at a scale, in their order."""
    return hashlib.sha256(" ".join(claim.sha256(scale) for claim in claims).encode()).hexdigest()


def gates(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims that are tested in order before the secondary ones, in that order."""
    return [claim for role in GATES for claim in claims if claim.role == role]


def check_claims(claims: Sequence[Claim], scale: AnyScale, *, has_verdicts: bool = True) -> None:
    """Refuse claims that could not be judged, before the runs.

    Raises:
        IsolossError: Two claims share an id, one measures something or is a gate in a case that the study does not
            have, or a trace is measured without the minimal trace.
    """
    ids = [claim.id for claim in claims]
    minimal = {claim.of for claim in claims if claim.measures == "minimal-trace"}
    for claim in claims:
        if ids.count(claim.id) > 1:
            raise IsolossError(f"two claims have the id {claim.id!r}")
        if claim.measures == "trace" and claim.of not in minimal:
            raise IsolossError(
                f"claim {claim.id}: a rescaling that changes no prediction changes the trace; measure flatness (the "
                "trace and the minimal trace), or add a claim about the minimal-trace of the same models"
            )
        names = [_case(m, c) for c in claim.contrast_cases(scale) for m in claim.keys(scale)]
        if claim.case and claim.case not in names and has_verdicts:
            raise IsolossError(
                f"case of the claim {claim.id} is {claim.case!r}; its cases are {', '.join(names) or 'none'}"
            )


def planned_tests(
    claims: Sequence[Claim], scale: AnyScale, made: Mapping[str, Sequence[Contrast | Trend]] | None = None
) -> int:
    """Return the number of secondary tests of a study: a claim has one for each of its cases and contrasts.

    It does not depend on what was measured: a case that could not be compared counts. If `made`
    (by the claim's id) has more contrasts than were planned, those in `made` count.
    """
    number = 0
    for claim in claims:
        if claim.role == "secondary" or claim.case:
            contrasts = max(len(claim.contrast_cases(scale)), len((made or {}).get(claim.id, ())))
            # the one case of a gate that is tested as the gate is not a secondary test
            number += len(claim.keys(scale)) * contrasts - bool(claim.case)
    return number


def _case(case: str, contrast: str) -> str:
    """Return what the case of a measure in the case of a contrast is called."""
    return f"{case} ({contrast})" if case and contrast else case or contrast


# --- the answer to a claim -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a claim in one case, with its verdict. None: nothing was tested, or it does not apply."""

    case: str  # e.g. the task; empty if there is only one
    # by name, in the order shown: the first model's, the second's and their difference; empty if there are none
    numbers: Mapping[str, Estimate]
    verdict: Verdict
    explanation: str  # one or two sentences: what was compared, or why nothing was
    contrast: str = ""  # the case of the contrast alone, e.g. `d16 to d32`
    role: Role = "secondary"  # of this test: the claim's, or secondary for a case of a gate that is not the one tested
    difference: Estimate | None = None  # that is judged; None if nothing was compared
    same_loss: Equivalence | None = None  # the test of the two losses; None if the claim does not need it
    p_value: float | None = None  # of the difference
    p_no_effect: float | None = None  # of the absence of an effect as large as the smallest effect of interest
    p_adjusted: float | None = None  # `p_value`, adjusted as the verdict needs (`RULE`)
    p_no_effect_adjusted: float | None = None
    tests: int | None = None  # number of tests that the adjustment is for
    withheld: str = ""  # what kept it from being tested, in a few words
    positive_control: str = ""  # beside `not shown`: what the positive control says, if the study plans one
    detectable: float | None = None  # the smallest true difference found with 80 % power, with the margin; None: exact
    below: float | None = None  # if nothing is shown: 95 % upper bound on the size of the true difference
    adjusted: Estimate | None = None  # the difference adjusted to the same loss; None: no slope for it

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
        """Return the answer of a case; it is an error if there is no such case, or more than one."""
        matching = [answer for answer in self.answers if answer.case == case]
        if len(matching) != 1:
            cases = ", ".join(repr(answer.case) for answer in self.answers)
            raise IsolossError(f"the claim {self.claim.id} has no one case {case!r}; its cases are {cases}")
        return matching[0]

    @property
    def verdict(self) -> str:
        """The verdict of all cases or, where they differ, of each: `shown for prefix-4; contradicted for root`."""
        cases: dict[Verdict, list[str]] = {}
        for answer in self.answers:
            cases.setdefault(answer.verdict, []).append(answer.case)
        if len(cases) == 1:
            return self.answers[0].verdict
        return "; ".join(f"{verdict} for {', '.join(cases[verdict])}" for verdict in Verdict if verdict in cases)

    def words(self, answer: Answer) -> str:
        """Return the verdict of one answer in words: with the smallest effect of interest where that is excluded."""
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
        verdict = answer.verdict.value
        # the interval beside it is not adjusted, and may exclude 0
        if answer.p_adjusted is not None and answer.p_value is not None and answer.p_value < ALPHA <= answer.p_adjusted:
            verdict += f" (adjusted p = {answer.p_adjusted:.2g})"
        # that it is shown, the page says once
        control = "" if answer.positive_control == CONTROL_SHOWN else answer.positive_control
        return verdict + (f"; {control}" if control else "")


# --- the rule of a verdict -------------------------------------------------------------------------------------------


def judge(
    difference: Estimate, direction: Direction, margin: float = 0.0, *, p_adjusted: float | None = None
) -> Verdict:
    """Return whether a measured difference shows or contradicts a claim, at 5 %.

    By its own p-value (`p_value`), this is the rule of the 95 % confidence interval [a, b]. Shown: b < -margin for a
    decrease, a > margin for an increase, -margin <= a and b <= margin for no change within the margin. Contradicted:
    a > -margin for a decrease, b < margin for an increase, a > margin or b < -margin for no change. Otherwise not
    shown. With `p_adjusted`, an adjusted p-value decides in the place of its own.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.studies.claims import judge
        >>> gain = Estimate(value=0.024, stderr=0.008, samples=5, unit="accuracy", num_predictions=1000, method="probe")
        >>> judge(gain, "increase").value, judge(gain, "increase", margin=0.02).value, judge(gain, "decrease").value
        ('shown', 'not shown', 'contradicted')
    """
    p = p_value(difference, direction, margin) if p_adjusted is None else p_adjusted
    if p >= ALPHA:
        return Verdict.NOT_SHOWN
    beyond = _beyond(difference.value, direction, margin)
    return Verdict.SHOWN if beyond > 0 or _at_the_edge_of_no_change(beyond, direction) else Verdict.CONTRADICTED


def p_value(difference: Estimate, direction: Direction, margin: float = 0.0) -> float:
    """Return the two-sided p-value of a difference against the nearest edge of the claim's margin.

    It is below alpha exactly when the interval of level 1 - alpha shows or contradicts the claim. For no change within
    the margin, it is twice the smaller of two p-values: for being within, the larger one of two one-sided tests; for
    being outside, the test on the side where the difference is.
    """
    check_margin(direction, margin)
    beyond = _beyond(difference.value, direction, margin)
    # by the general rule p would be 1 here, but the margin itself counts as within
    if difference.stderr == 0 and _at_the_edge_of_no_change(beyond, direction):
        return 0.0
    # the distance from the edge of the margin, against 0
    return significance.p_value(dataclasses.replace(difference, value=beyond))


def _beyond(value: float, direction: str, margin: float) -> float:
    """Return how far a difference lies on the claimed side of the edge; below 0 on the other side."""
    if direction == "no change within":
        return margin - abs(value)
    return (value if direction == "increase" else -value) - margin


def _at_the_edge_of_no_change(beyond: float, direction: str) -> bool:
    return beyond == 0 and direction == "no change within"  # the margin itself counts as within


def judge_claims(
    claims: Sequence[Claim], results: Results, *, loss_margin: float = LOSS_MARGIN, has_verdicts: bool = True
) -> tuple[ClaimResult, ...]:
    """Return the result of every claim, in their order: each tested on every contrast and every measure.

    Args:
        claims: The claims.
        results: The results of the study.
        loss_margin: Equivalence margin of the mean difference in loss, of claims that set none, in nats.
        has_verdicts: False: the differences are given without tests and verdicts.

    Raises:
        IsolossError: As for `check_claims`; or a claim is to be judged by an adjusted difference without a slope.
    """
    scale = results.scale
    check_claims(claims, scale, has_verdicts=has_verdicts)
    by_function: dict[Any, Sequence[Contrast | Trend]] = {}
    for claim in claims:
        if claim.of not in by_function:
            made = call_study_hook(f"of of the claim {claim.id}", claim.of, results)
            several = [made] if isinstance(made, Contrast | Trend) else made
            by_function[claim.of] = [_over_seeds(each, results) for each in several]
    found = []
    for claim in claims:
        # without verdicts, the differences are given as they are: such a scale need not have slopes
        asked = claim if has_verdicts else dataclasses.replace(claim, loss_rule="tested")
        keys, margin = claim.keys(scale), claim.loss_margin or loss_margin
        if asked.loss_rule == "tested" and has_verdicts and any(map(_needs_adjusting, by_function[claim.of])):
            raise IsolossError(
                f"claim {claim.id} is about a trend, for which equal losses are not tested: set loss_rule to "
                "'adjusted' and give the trend slopes on the loss, or set its needs_same_loss to False"
            )
        unlisted = sorted({each.case for each in by_function[claim.of]} - {*claim.contrast_cases(scale)})
        if claim.case and unlisted and has_verdicts:
            raise IsolossError(
                f"claim {claim.id} is tested in the case {claim.case!r}, and its contrasts have cases that are not in "
                f"its `cases`: list {', '.join(map(repr, unlisted))} there"
            )
        answers = [one for each in by_function[claim.of] for one in answer(asked, each, keys, margin=margin)]
        if not answers:
            none, why = (
                "The study has no pair of models with this measurement.",
                "there are no such models at this scale",
            )
            answers = [Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=none, withheld=why)]
        roles: list[Role] = [claim.role if claim.case in ("", each.case) else "secondary" for each in answers]
        in_roles = (dataclasses.replace(each, role=role) for each, role in zip(answers, roles, strict=True))
        found.append(ClaimResult(claim=claim, answers=tuple(in_roles)))
    if has_verdicts:
        planned = planned_tests(claims, scale, {claim.id: by_function[claim.of] for claim in claims})
        return in_sequence(found, planned)
    return tuple(dataclasses.replace(each, answers=tuple(_unjudged(one) for one in each.answers)) for each in found)


def _over_seeds(contrast: Contrast | Trend, results: Results) -> Contrast | Trend:
    """Return a contrast whose pairs are in clusters where some share a replicate; any other as it is."""
    if isinstance(contrast, Trend) or contrast.clusters or contrast.not_tested:
        return contrast
    # a checkpoint that a study makes of others has their estimates
    of_estimate = results.replicates
    shared = [
        {of_estimate[id(one)] for checkpoint in pair for one in checkpoint.values() if id(one) in of_estimate}
        for pair in contrast.pairs
    ]
    clusters = list(range(len(shared)))
    for i, j in itertools.combinations(clusters, 2):
        if clusters[i] != clusters[j] and shared[i] & shared[j]:
            clusters = [clusters[i] if each == clusters[j] else each for each in clusters]
    number, (first, second) = len(set(clusters)), contrast.names
    if number == len(clusters):
        return contrast
    if number == 1:
        return dataclasses.replace(
            contrast,
            not_tested=f"{second} vs. {first}: the {len(clusters)} pairs share seeds or runs, directly or through "
            "other pairs, so they count as one, which has no error over seeds. Train with more seeds, or compare one "
            "pair, whose error is over examples.",
        )
    found = set[tuple[str, int | str]]().union(*shared)
    by_seed = len(found) == number and len({language for language, _ in found}) == 1
    return dataclasses.replace(
        contrast, clusters=[*map(str, clusters)], clusters_are="seeds" if by_seed else "independent sets of runs"
    )


def _needs_adjusting(compared: Contrast | Trend) -> bool:
    return isinstance(compared, Trend) and compared.needs_same_loss


def answer(
    claim: Claim, contrast: Contrast | Trend, keys: Mapping[str, str], *, margin: float = LOSS_MARGIN
) -> list[Answer]:
    """Return the answers to a claim for one contrast or trend, one for each case in `keys`.

    An answer is about second - factor * first of the estimate with the case's key, or about its slope along the trend.

    Each is judged at 5 % without adjustment. A claim that is not about the loss needs two models of the same loss
    within a margin in nats, or a slope on the loss, unless the contrast says otherwise. What was not measured of both
    models has no answer. It is an error if an adjusted difference is to be judged and the contrast has no slope for it.

    Example:
        >>> from isoloss.studies import Claim, Contrast
        >>> from isoloss.studies.claims import answer
        >>> from isoloss.studies.results import CheckpointEstimate
        >>> def checkpoint(trace):
        ...     exact = {"stderr": 0, "samples": 0, "unit": "nats", "num_predictions": 9, "method": "trace"}
        ...     return {"trace": CheckpointEstimate(value=trace, **exact, inputs="", settings={}, examples={})}
        >>> pairs = [(checkpoint(before), checkpoint(after)) for before, after in ((90, 40), (80, 41), (86, 43))]
        >>> noise = Contrast(names=("AdamW", "SGD"), pairs=pairs, clusters=("a", "b", "c"), needs_same_loss=False)
        >>> flatter = Claim(id="flatter", statement="", direction="decrease", of=lambda _: noise, measures="trace")
        >>> [(each.verdict.value, str(each.difference)) for each in answer(flatter, noise, {"": "trace"})]
        [('shown', '-44.0 ± 3.2 nats')]
    """
    if contrast.not_tested:
        case, why = contrast.case, contrast.not_tested
        return [Answer(case=case, contrast=case, numbers={}, verdict=Verdict.NOT_TESTED, explanation=why)]
    if not contrast.pairs:
        return []
    gate = None
    # a claim about the loss itself cannot require that the losses are the same
    is_needed = isinstance(contrast, Contrast) and contrast.needs_same_loss and claim.loss_rule == "tested"
    if is_needed and loss_key(contrast.pairs) not in keys.values():
        gate = same_loss(contrast.pairs, clusters=contrast.clusters, margin=margin)
    measured = {case: key for case, key in keys.items() if all(key in one for pair in contrast.pairs for one in pair)}
    return [_answer(claim, contrast, key, case, gate) for case, key in measured.items()]


def same_loss(pairs: Sequence[Pair], *, clusters: Sequence[str] = (), margin: float = LOSS_MARGIN) -> Equivalence:
    """Test whether the mean difference in loss over the pairs is within a margin of 0: two one-sided tests at 5 %."""
    return equivalence(change(pairs, loss_key(pairs), clusters=clusters), margin, alpha=ALPHA)


def _answer(claim: Claim, contrast: Contrast | Trend, key: str, case: str, gate: Equivalence | None) -> Answer:
    pairs, measured = contrast.pairs, contrast.change(key, claim.factor)
    explanation = contrast.described(key, measured)
    if gate is not None and not gate.shown:
        loss = "KL" if loss_key(pairs) == "kl" else "loss"
        assert isinstance(contrast, Contrast)  # a trend has no test of equal loss
        first, second = contrast.names
        explanation = (
            f"The two models are not shown to have the same loss: the {loss} of {second} minus that of {first} is "
            f"{gate.difference}, {gate}. {explanation}"
        )
    adjusted = at_same_loss(contrast, key, claim.factor)
    judged, name = measured, contrast.named(claim.factor)
    if claim.loss_rule == "adjusted":
        if adjusted is None:
            raise IsolossError(
                f"loss_rule of the claim {claim.id} is 'adjusted', but there is no slope of {key} on the loss: give it "
                f"in the slopes of its {type(contrast).__name__}, or set loss_rule to 'tested'"
                + " and needs_same_loss of the trend to False"
                * isinstance(contrast, Trend)
            )
        judged, name = adjusted, f"{name} at the same loss"
        loss = "KL" if loss_key(pairs) == "kl" else "loss"
        explanation = (
            f"{explanation} Without the adjustment to the same loss it is {measured}; that of the {loss} is "
            f"{contrast.change(loss_key(pairs))}."
        )
    found = Answer(
        case=_case(case, contrast.case),
        contrast=contrast.case,
        numbers={**contrast.means(key), name: judged},
        verdict=Verdict.NOT_TESTED,
        explanation=f"{explanation} {contrast.where}".rstrip(),
        difference=judged,
        same_loss=gate,
        adjusted=adjusted,
    )
    if gate is not None and not gate.shown:
        return found
    # the difference is exactly 0 ± 0: a test would show "no change" of a model compared with itself
    if all(one[key].weights == two[key].weights != "" for one, two in pairs):
        return dataclasses.replace(found, withheld="the weights are identical")
    if isinstance(contrast, Contrast) and contrast.needs_same_parameters and _are_unlike(pairs, key):
        return dataclasses.replace(found, withheld=OTHER_PARAMETERS)
    p, within = p_value(judged, claim.direction, claim.margin), claim.no_effect_within
    p_no_effect = None if within is None else equivalence(judged, within, alpha=ALPHA).p_value
    return _judged(claim, dataclasses.replace(found, p_value=p, p_no_effect=p_no_effect))


def _are_unlike(pairs: Sequence[Pair], key: str) -> bool:
    """Whether a key is a trace, and the two models of a pair have other parameters, over which it is a sum."""
    numbers = [[one[key].details.get("num_parameters") for one in pair] for pair in pairs]
    return "trace" in key and any(first != second for first, second in numbers)


def _judged(
    claim: Claim,
    tested: Answer,
    *,
    p: float | None = None,
    p_no_effect: float | None = None,
    tests: int | None = None,
    factor: int = 1,
) -> Answer:
    """Return a tested answer with its verdict and power.

    Without adjusted p-values (`p` of the difference, `p_no_effect`), its own decide. `tests` is the number of tests
    that they are adjusted for, and `factor` what they are multiplied by beside that.
    """
    difference = tested.difference
    assert difference is not None
    verdict = judge(difference, claim.direction, claim.margin, p_adjusted=p)
    absent = tested.p_no_effect if p_no_effect is None else p_no_effect
    if verdict is Verdict.NOT_SHOWN and absent is not None and absent < ALPHA:
        verdict = Verdict.NO_EFFECT
    detectable = below = None
    if difference.stderr > 0:
        samples, sd = difference.samples, difference.stderr * math.sqrt(difference.samples)
        # at Holm's strictest level: which of his levels a test gets depends on the other p-values
        alpha = ALPHA / factor / (tests or 1)
        detectable = claim.margin + minimal_detectable_effect(sd, samples, alpha=alpha)
        below = largest_size(difference, alpha=ALPHA) if verdict in (Verdict.NOT_SHOWN, Verdict.NO_EFFECT) else None
    return dataclasses.replace(
        tested,
        verdict=verdict,
        p_adjusted=p,
        p_no_effect_adjusted=p_no_effect,
        tests=tests,
        detectable=detectable,
        below=below,
    )


def _unjudged(each: Answer) -> Answer:
    """Return an answer without a verdict: the numbers and no test."""
    verdict = Verdict.NOT_TESTED if each.difference is None else Verdict.NO_VERDICT
    return dataclasses.replace(each, verdict=verdict, p_value=None, p_no_effect=None, detectable=None, below=None)


# --- the order of the tests ------------------------------------------------------------------------------------------


def in_sequence(results: Sequence[ClaimResult], tests: int) -> tuple[ClaimResult, ...]:
    """Return the results with verdicts: of each gate in its order, then of the secondary tests by Holm's method.

    The probability of any wrong verdict is at most 5 %. A gate with one null hypothesis leaves its whole 5 % to what
    follows: where that hypothesis is true, only an error lets the sequence go on, and the error counts already
    (Maurer, Hothorn and Lehmacher, 1995). With a smallest effect of interest there are two null hypotheses, no effect
    and an effect of that size. One of them can be true while the other is rightly rejected and the sequence goes on, so
    such a gate keeps half of the 5 % and leaves half.

    Args:
        results: The claims, with the p-values and roles of answers that can be tested.
        tests: How many secondary tests were planned (`planned_tests`).
    """
    claims = [result.claim for result in results]
    answers = {result.claim.id: list(result.answers) for result in results}
    control, factor, ended = "", 1, ("", "")
    if any(claim.role == "positive control" for claim in claims):
        control = "positive control not tested"
    for claim in gates(claims):
        own, factor = answers[claim.id], factor if claim.no_effect_within is None else 2 * factor
        gate = [i for i, each in enumerate(own) if each.role == claim.role]
        # an intersection-union test: all cases are shown if the one with the largest p is
        p = min(1.0, factor * max((_or_one(own[i].p_value) for i in gate), default=1.0))
        p_no_effect = min(1.0, factor * max((_or_one(own[i].p_no_effect) for i in gate), default=1.0))
        for i in gate:
            if ended[0]:
                own[i] = _withheld(own[i], *ended)
            elif own[i].p_value is not None:
                absent = None if claim.no_effect_within is None else p_no_effect
                own[i] = _judged(claim, own[i], p=p, p_no_effect=absent, tests=1, factor=factor)
        passing = DECIDED if claim.role == "primary" else {Verdict.SHOWN}
        is_passed = bool(gate) and all(own[i].verdict in passing for i in gate)
        if claim.role == "positive control" and not ended[0]:
            control = CONTROL_SHOWN if is_passed else "positive control not shown"
        if not is_passed and not ended[0]:
            ended = _reason(claim, [own[i] for i in gate])
    secondary = [
        (claim, i)
        for claim in claims
        for i, each in enumerate(answers[claim.id])
        if each.role == "secondary" and each.p_value is not None
    ]
    adjusted = _by_holm([answers[claim.id][i] for claim, i in secondary], tests)
    for (claim, i), (p, absent) in zip(secondary, adjusted, strict=True):
        own = answers[claim.id]
        if ended[0]:
            own[i] = _withheld(own[i], *ended)
        else:
            p, absent = min(1.0, factor * p), None if absent is None else min(1.0, factor * absent)
            own[i] = _judged(claim, own[i], p=p, p_no_effect=absent, tests=tests, factor=factor)
    for own in answers.values():
        for i, each in enumerate(own):
            if each.verdict is Verdict.NOT_SHOWN and each.role != "positive control":
                own[i] = dataclasses.replace(each, positive_control=control)
    return tuple(dataclasses.replace(result, answers=tuple(answers[result.claim.id])) for result in results)


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p


def _by_holm(tested: Sequence[Answer], tests: int) -> list[tuple[float, float | None]]:
    """Return the adjusted p-values of each answer's difference and of its absence."""
    p_values = {f"{i} difference": _or_one(one.p_value) for i, one in enumerate(tested)}
    p_values |= {f"{i} absence": one.p_no_effect for i, one in enumerate(tested) if one.p_no_effect is not None}
    adjusted = holm(p_values, tests=tests, exclusive={name: name.split()[0] for name in p_values}) if tested else {}
    return [(adjusted[f"{i} difference"], adjusted.get(f"{i} absence")) for i in range(len(tested))]


def _withheld(each: Answer, why: str, sentence: str) -> Answer:
    """Return an answer that a gate keeps from being tested, with its numbers; if it was not tested anyway, itself."""
    if each.p_value is None:
        return each
    return dataclasses.replace(
        _unjudged(each), verdict=Verdict.NOT_TESTED, withheld=why, explanation=f"{sentence} {each.explanation}"
    )


def _reason(claim: Claim, gate: Sequence[Answer]) -> tuple[str, str]:
    """Return why a gate that is not passed ends the sequence: in a few words, and as a sentence with its effects."""
    effects = [
        f"{each.case or 'difference'} {each.difference}, 95 % interval {interval(each.difference)}"
        for each in gate
        if each.difference is not None
    ]
    words = {
        "manipulation check": ("the manipulation check is not shown", "The manipulation check is not shown"),
        "positive control": (
            "the positive control is not shown",
            "A null result would say little, as the positive control is not shown",
        ),
        "primary": ("the primary claim is undecided", "The primary claim is undecided"),
    }
    short, sentence = words[claim.role]
    return short, f"{sentence} ({claim.id}: {'; '.join(effects) or 'not tested'})."


def at_same_loss(compared: Contrast | Trend, key: str, factor: float = 1.0) -> Estimate | None:
    """Return the difference, or slope, of an estimate less what the loss explains of it; None without a slope on it."""
    if key not in compared.slopes:
        return None
    from isoloss.statistics.clusters import adjusted_to_loss

    loss, slope = compared.change(loss_key(compared.pairs)), compared.slopes[key]
    # a slope that is over clusters is of this study's own, over the same ones
    is_own = "labels" in slope.details
    return adjusted_to_loss(compared.change(key, factor), loss, slope, same_clusters=is_own)


def _freedom(measured: Estimate) -> str:
    """Return the degrees of freedom, and what the examples add to the error, if these are the same for all runs."""
    shared = measured.details.get(SHARED)
    also = f", and over the examples, which all models share: ± {shared:.2g} of the error" if shared else ""
    return f"(t with {measured.freedom:.3g} degrees of freedom){also}"


def _paired_over(measured: Estimate, contrast: Contrast, key: str) -> str:
    """Return what the error of a difference is over, with McNemar's test for a single pair of probes."""
    pairs = contrast.pairs
    if contrast.clusters:
        return (
            f"{len(pairs)} pairs by seed, 95 % interval over {measured.samples} {contrast.clusters_are} "
            f"{_freedom(measured)}"
        )
    if len(pairs) > 1:
        return f"paired by seed, 95 % interval over {len(pairs)} seeds {_freedom(measured)}"
    if measured.is_exact:
        return "both exact: the verdict is on these two models, not on others that are trained alike"
    first, second = (checkpoint[key] for checkpoint in pairs[0])
    if not first.is_accuracy:
        return f"paired over {measured.samples:,} sentences"
    probes, examples = first.examples["predictions"].shape
    test = mcnemar(second.votes.numpy(), first.votes.numpy())
    return (
        f"paired over {examples:,} test sentences and {probes} probes; McNemar's test on the probes' plurality "
        f"votes: {test.only_first} sentences gained, {test.only_second} lost, p = {test.p_value:.2g}"
    )
