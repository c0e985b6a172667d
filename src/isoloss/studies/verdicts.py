"""The results of claims: the rule by which a difference shows or contradicts a claim, and all tests of a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from isoloss.errors import IsolossError
from isoloss.statistics import significance
from isoloss.statistics.estimate import Estimate, interval
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.statistics.significance import SAME_LOSS_NATS, Equivalence, equivalence, holm, largest_size
from isoloss.studies.claims import (
    ALPHA,
    Answer,
    Claim,
    ClaimResult,
    ClaimsFile,
    Contrast,
    Direction,
    Role,
    Verdict,
    check_margin,
)
from isoloss.studies.results import Pair, change, loss_key, mean

DECIDED = frozenset({Verdict.SHOWN, Verdict.CONTRADICTED, Verdict.NO_EFFECT})

# the page prints this: it has to say what `judge`, `in_sequence` and `answer` do
RULE = (
    "A claim is shown if p < 0.05 and the measured difference is on the claimed side of the margin, and contradicted "
    "if p < 0.05 and it is on the other side. For a claim of no change, the claimed side is inside the margin around "
    "0. p is two-sided, by Student's t, for the null hypothesis that the true difference is at the edge of the margin.",
    "A claim with a smallest effect of interest is also tested for the absence of such an effect: no effect of that "
    "size or more is shown if two one-sided t tests have p < 0.05. A claim is “not shown” if none of these is: "
    "neither it nor its opposite is significant.",
    "Manipulation checks, then positive controls, then primary claims are tested first, each by its own p, or by the "
    "largest p of its cases where the file names no case. A check or control that is not shown ends the sequence, and "
    "so does a primary claim that is “not shown”: what comes later is not tested.",
    "p of all other, secondary tests is adjusted by Holm's method for the number of tests that the study planned, "
    "whatever was measured.",
    "If one of the claims that are tested first is also tested for the absence of an effect, its p and all later p are "
    "doubled, because both of its answers can let the sequence go on. So the chance of any wrong verdict in the whole "
    "file is at most 5 %.",
    "A claim about two models of the same loss is tested only if two one-sided tests at 5 % show that the mean "
    "difference in loss is within its margin. Or, where the file says so, it is judged by the difference at the same "
    "loss: the difference minus the part that the difference in loss explains, by a slope from other runs.",
    "“Found with 80 % power” is the smallest true difference that four in five such studies would find. “Smaller than” "
    "is an upper bound, with 95 % confidence, on the size of the true difference where no difference is shown.",
)


def judge(
    difference: Estimate, direction: Direction, margin: float = 0.0, *, p_adjusted: float | None = None
) -> Verdict:
    """Return whether a measured difference shows or contradicts a claim, at 5 %.

    By its own p-value (`p_value`), this is the rule of the 95 % confidence interval [a, b]. Shown: b < -margin for a
    decrease, a > margin for an increase, -margin <= a and b <= margin for no change within the margin. Contradicted:
    a > -margin for a decrease, b < margin for an increase, a > margin or b < -margin for no change. Otherwise not
    shown.

    Args:
        difference: After minus before, or treated minus control, with its own standard error.
        direction: The claimed direction.
        margin: At least 0, and above 0 for `no change within`; in the difference's unit.
        p_adjusted: The p-value, adjusted for the number of tests; None: its own.

    Raises:
        IsolossError: A margin that does not fit the direction.

    Example:
        >>> gain = Estimate(value=0.024, stderr=0.008, samples=5, unit="accuracy", num_predictions=1000, method="probe")
        >>> judge(gain, "increase").value, judge(gain, "increase", margin=0.02).value, judge(gain, "decrease").value
        ('shown', 'not shown', 'contradicted')
        >>> judge(gain, "increase", p_adjusted=0.12).value
        'not shown'
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
    being outside, the test on the side where the difference is. Arguments and errors are as for `judge`.

    Example:
        >>> gain = Estimate(value=3.0, stderr=1.0, samples=9, unit="points", num_predictions=9, method="probe")
        >>> [round(p_value(gain, "increase", margin), 3) for margin in (0.0, 1.0, 3.0, 5.0)]
        [0.017, 0.081, 1.0, 0.081]
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


def answer_all(
    file: ClaimsFile,
    contrasts: Mapping[str, Sequence[Contrast]],
    measures: Mapping[str, Mapping[str, str]],
    *,
    cases: Mapping[str, Sequence[str]] | None = None,
    scale: str | None = None,
) -> tuple[ClaimResult, ...]:
    """Return the result of every claim of a file, in its order: each tested on every contrast and every measure.

    Args:
        file: The claims.
        contrasts: The contrasts, by the name in `Claim.compares`; a claim whose name has none is not tested.
        measures: The keys of the estimates to compare, by the name in `Claim.measures` and then by case, e.g. the task
            (empty if there is only one).
        cases: The cases of contrasts that have several (`isoloss.studies.Study.contrast_cases`).
        scale: The scale of the study, at which the file may rule out verdicts; None: verdicts are given.

    Raises:
        IsolossError: A claim compares or measures something that the study does not have, has no such case, or is to be
            judged by an adjusted difference without a slope.
    """
    check_claims(file, measures, cases or {}, scale=scale)
    results = []
    for claim in file.claims:
        if claim.not_tested:
            answers = [Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=claim.not_tested)]
        else:
            _check(file, claim, "compares", contrasts)
            keys, margin = measures[claim.measures], claim.same_loss_nats or file.same_loss_nats
            # without verdicts, the differences are given as they are: such a scale need not have slopes
            asked = claim if file.judged_at(scale) else dataclasses.replace(claim, at_same_loss="tested")
            answers = [a for each in contrasts[claim.compares] for a in answer(asked, each, keys, margin=margin)]
            if not answers:
                none, why = "The study has no pair of models with this measurement.", "there are no such models"
                answers = [Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=none, withheld=why)]
        roles: list[Role] = [claim.role if claim.case in ("", each.case) else "secondary" for each in answers]
        in_roles = (dataclasses.replace(each, role=role) for each, role in zip(answers, roles, strict=True))
        results.append(ClaimResult(claim=claim, answers=tuple(in_roles)))
    if file.judged_at(scale):
        return in_sequence(file, results, planned_tests(file, measures, cases or {}, contrasts))
    return tuple(
        dataclasses.replace(result, answers=tuple(_unjudged(each) for each in result.answers)) for result in results
    )


def check_claims(
    file: ClaimsFile,
    measures: Mapping[str, Mapping[str, str]],
    cases: Mapping[str, Sequence[str]],
    *,
    scale: str | None = None,
) -> None:
    """Refuse a claim that measures something, or is a gate in a case, that the study does not have."""
    for claim in file.claims:
        if not claim.not_tested:
            _check(file, claim, "measures", measures)
            names = [_case(m, c) for c in cases.get(claim.compares, ("",)) for m in measures[claim.measures]]
            if claim.case and claim.case not in names and file.judged_at(scale):
                raise IsolossError(
                    f"{file.name}: case of the claim {claim.id} is {claim.case!r}; its cases are {', '.join(names)}"
                )


def planned_tests(
    file: ClaimsFile,
    measures: Mapping[str, Mapping[str, str]],
    cases: Mapping[str, Sequence[str]],
    contrasts: Mapping[str, Sequence[Contrast]] | None = None,
) -> int:
    """Return the number of secondary tests of a study: a claim has one for each of its cases and contrasts.

    It does not depend on what was measured. Before there are results, a contrast whose cases the study does not name
    counts once; with results, as often as the study makes it.

    Args:
        file: The claims.
        measures: As for `answer_all`.
        cases: As for `answer_all`.
        contrasts: The contrasts that were made, if there are results.
    """
    number = 0
    for claim in file.claims:
        if claim.not_tested or (claim.role != "secondary" and not claim.case):
            continue
        made = len((contrasts or {}).get(claim.compares, ()))
        # the one case of a gate that is tested as the gate is not a secondary test
        number += len(measures[claim.measures]) * max(len(cases.get(claim.compares, ("",))), made) - bool(claim.case)
    return number


def _case(case: str, contrast: str) -> str:
    """Return what the case of a measure in the case of a contrast is called."""
    return f"{case} ({contrast})" if case and contrast else case or contrast


def _check(file: ClaimsFile, claim: Claim, key: str, choices: Collection[str]) -> None:
    if (name := getattr(claim, key)) not in choices:
        has = ", ".join(choices) or "none"
        raise IsolossError(f"{file.name}: {key} of the claim {claim.id} is {name!r}; the study has {has}")


def answer(
    claim: Claim,
    contrast: Contrast,
    keys: Mapping[str, str],
    *,
    margin: float = SAME_LOSS_NATS,
) -> list[Answer]:
    """Return the answers to a claim for one contrast, from second - factor * first of each estimate.

    Each is judged at 5 % without adjustment. A claim that is not about the loss needs two models of the same loss, or
    a slope on the loss, unless the contrast says otherwise. What was not measured of both models has no answer.

    Args:
        claim: The claim.
        contrast: The two models.
        keys: The key of the estimate to compare, by case.
        margin: Equivalence margin of the mean difference in loss, in nats.

    Raises:
        IsolossError: An adjusted difference is to be judged, and the contrast has no slope for it.

    Example:
        >>> from isoloss.studies.results import Measured
        >>> def checkpoint(trace):
        ...     exact = {"stderr": 0, "samples": 0, "unit": "nats", "num_predictions": 9, "method": "trace"}
        ...     return {"trace": Measured(value=trace, **exact, inputs="", settings={}, examples={})}
        >>> pairs = [(checkpoint(before), checkpoint(after)) for before, after in ((90, 40), (80, 41), (86, 43))]
        >>> noise = Contrast(names=("AdamW", "SGD"), pairs=pairs, clusters=("a", "b", "c"), at_same_loss=False)
        >>> flatter = Claim(id="flatter", statement="", direction="decrease")
        >>> [(each.verdict.value, str(each.difference)) for each in answer(flatter, noise, {"": "trace"})]
        [('shown', '-44.0 ± 3.2 nats')]
    """
    if contrast.not_tested:
        case, why = contrast.case, contrast.not_tested
        return [Answer(case=case, contrast=case, numbers={}, verdict=Verdict.NOT_TESTED, explanation=why)]
    gate = None
    # a claim about the loss itself cannot require that the losses are the same
    is_needed = contrast.at_same_loss and claim.at_same_loss == "tested"
    if is_needed and loss_key(contrast.pairs) not in keys.values():
        gate = same_loss(contrast.pairs, clusters=contrast.clusters, margin=margin)
    measured = {case: key for case, key in keys.items() if all(key in one for pair in contrast.pairs for one in pair)}
    return [_answer(claim, contrast, key, case, gate) for case, key in measured.items()]


def same_loss(pairs: Sequence[Pair], *, clusters: Sequence[str] = (), margin: float = SAME_LOSS_NATS) -> Equivalence:
    """Test whether the mean difference in loss over the pairs is within a margin of 0: two one-sided tests at 5 %.

    Args:
        pairs: The pairs of checkpoints.
        clusters: The cluster of each pair, as for `isoloss.studies.results.change`.
        margin: In nats, above 0.
    """
    return equivalence(change(pairs, loss_key(pairs), clusters=clusters), margin, alpha=ALPHA)


def _answer(claim: Claim, contrast: Contrast, key: str, case: str, gate: Equivalence | None) -> Answer:
    (first, second), pairs, factor = contrast.names, contrast.pairs, claim.factor
    measured = change(pairs, key, factor=factor, clusters=contrast.clusters)
    explanation = f"{second} vs. {first}, {_paired_over(measured, contrast, key)}."
    if gate is not None and not gate.shown:
        loss = "KL" if loss_key(pairs) == "kl" else "loss"
        explanation = (
            f"The two models are not shown to have the same loss: the {loss} of {second} minus that of {first} is "
            f"{gate.difference}, {gate}. {explanation}"
        )
    adjusted = _at_same_loss(contrast, key, measured)
    name = "difference" if factor == 1 else f"{second} minus {factor:g} times {first}"
    judged = measured
    if claim.at_same_loss == "adjusted":
        if adjusted is None:
            raise IsolossError(
                f"at_same_loss of the claim {claim.id} is 'adjusted', but the contrast of {first} and {second} has no "
                f"slope of {key} on the loss: give it in Contrast.slopes, or set at_same_loss to 'tested'"
            )
        judged, name = adjusted, f"{name} at the same loss"
        explanation = f"{explanation} The difference without the adjustment to the same loss is {measured}."
    # first, second, difference: the columns of `summary.claim_table` rely on this order
    numbers = {
        name: mean([pair[i][key] for pair in pairs], clusters=contrast.clusters)
        for i, name in enumerate(contrast.names)
    }
    numbers[name] = judged
    measured_answer = Answer(
        case=_case(case, contrast.case),
        contrast=contrast.case,
        numbers=numbers,
        verdict=Verdict.NOT_TESTED,
        explanation=f"{explanation} {contrast.where}".rstrip(),
        difference=judged,
        same_loss=gate,
        adjusted=adjusted,
    )
    if gate is not None and not gate.shown:
        return measured_answer
    # the difference is exactly 0 ± 0: a test would show "no change" of a model compared with itself
    if all(one[key].weights == two[key].weights != "" for one, two in pairs):
        return dataclasses.replace(measured_answer, withheld="the weights are identical")
    p, within = p_value(judged, claim.direction, claim.margin), claim.no_effect_within
    p_no_effect = None if within is None else equivalence(judged, within, alpha=ALPHA).p_value
    return _judged(claim, dataclasses.replace(measured_answer, p_value=p, p_no_effect=p_no_effect))


def _judged(
    claim: Claim,
    tested: Answer,
    *,
    p: float | None = None,
    p_no_effect: float | None = None,
    tests: int | None = None,
    factor: int = 1,
) -> Answer:
    """Return a tested answer with its verdict, by adjusted p-values or by its own, and its power as one of `tests`.

    Args:
        claim: The claim.
        tested: The answer.
        p: The adjusted p-value of the difference; None: its own.
        p_no_effect: The adjusted p-value of the absence of an effect; None: its own.
        tests: The number of tests that p-values are adjusted for; None: they are not.
        factor: What p-values are multiplied by beside that.
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


def in_sequence(file: ClaimsFile, results: Sequence[ClaimResult], tests: int) -> tuple[ClaimResult, ...]:
    """Return the results with verdicts: of each gate in its order, then of the secondary tests by Holm's method.

    The probability of any wrong verdict is at most 5 %. A gate with one null hypothesis leaves its whole 5 % to what
    follows: where that hypothesis is true, only an error lets the sequence go on, and the error counts already
    (Maurer, Hothorn and Lehmacher, 1995). With a smallest effect of interest there are two null hypotheses, no effect
    and an effect of that size. One of them can be true while the other is rightly rejected and the sequence goes on, so
    such a gate keeps half of the 5 % and leaves half.

    Args:
        file: The claims.
        results: Their results, with the p-values and roles of answers that can be tested.
        tests: How many secondary tests were planned (`planned_tests`).
    """
    answers = {result.claim.id: list(result.answers) for result in results}
    control, factor, ended = "no positive control", 1, ("", "")
    if any(claim.role == "positive control" for claim in file.claims):
        control = "positive control not tested"
    for claim in file.gates:
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
            control = f"positive control {'shown' if is_passed else 'not shown'}"
        if not is_passed and not ended[0]:
            ended = _reason(claim, [own[i] for i in gate])
    secondary = [
        (claim, i)
        for claim in file.claims
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


def _at_same_loss(contrast: Contrast, key: str, measured: Estimate) -> Estimate | None:
    if key not in contrast.slopes:
        return None
    from isoloss.statistics.clusters import at_same_loss

    loss = change(contrast.pairs, loss_key(contrast.pairs), clusters=contrast.clusters)
    return at_same_loss(measured, loss, contrast.slopes[key], same_clusters=False)


def _paired_over(measured: Estimate, contrast: Contrast, key: str) -> str:
    """Return what the error of a difference is over, with McNemar's test for a single pair of probes."""
    pairs = contrast.pairs
    if contrast.clusters:
        return (
            f"{len(pairs)} pairs by seed, 95 % interval over {measured.samples} {contrast.clusters_are} (t with "
            f"{measured.samples - 1} degrees of freedom)"
        )
    if len(pairs) > 1:
        return f"paired by seed, 95 % interval over {len(pairs)} seeds (t with {len(pairs) - 1} degrees of freedom)"
    if measured.is_exact:
        return "both exact: the verdict is on these two models, not on others that are trained alike"
    first, second = (checkpoint[key] for checkpoint in pairs[0])
    if not first.is_accuracy:
        return f"paired over {len(first.examples['influence']):,} sentences"
    from isoloss.statistics.significance import mcnemar

    probes, examples = first.examples["predictions"].shape
    test = mcnemar(second.votes.numpy(), first.votes.numpy())
    return (
        f"paired over {examples:,} test sentences and {probes} probes; McNemar's test on the probes' plurality "
        f"votes: {test.only_first} sentences gained, {test.only_second} lost, p = {test.p_value:.2g}"
    )
