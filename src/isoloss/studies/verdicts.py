"""The results of claims: the rule by which a difference shows or contradicts a claim, and all tests of a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from isoloss.errors import IsolossError
from isoloss.statistics import significance
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.statistics.significance import SAME_LOSS_NATS, Equivalence, equivalence, holm, largest_size
from isoloss.studies.claims import Answer, Claim, ClaimResult, ClaimsFile, Contrast, Direction, Verdict, check_margin
from isoloss.studies.results import Pair, change, loss_key, mean

ALPHA = 0.05  # the level of all tests

# the page prints this: it has to say what `judge`, `_corrected` and `answer` do
RULE = (
    "A claim is shown if p < 0.05 and the measured difference is on the claimed side of the margin, and contradicted "
    "if p < 0.05 and it is on the other side. Otherwise it is not shown: the measurement is too imprecise to tell. For "
    "a claim of no change, the claimed side is inside the margin around 0. p is two-sided, by Student's t, for the "
    "null hypothesis that the true difference is at the edge of the margin. It is below 0.05 exactly when the 95 % "
    "interval lies on one side of that edge.",
    "Multiple testing: the primary test, which the claims file names in advance, is judged by its own p. All other p "
    "of the file are adjusted by Holm's method, so the chance of any wrong verdict among these tests is at most 5 %.",
    "A claim about two models of the same loss is tested only if two one-sided tests at 5 % show that the mean "
    "difference in loss is within its margin. Otherwise it is not tested, and the numbers are given without a verdict.",
    "“Found with 80 % power” is the smallest true difference that four in five such studies would find. “Smaller than” "
    "is an upper bound, with 95 % confidence, on the size of the true difference where nothing is shown. “At the same "
    "loss” is the difference minus the part that the difference in loss explains, by a slope from other runs; no "
    "verdict uses it.",
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
    scale: str | None = None,
) -> tuple[ClaimResult, ...]:
    """Return the result of every claim of a file, in its order: each tested on every contrast and every measure.

    Args:
        file: The claims.
        contrasts: The contrasts, by the name in `Claim.compares`; a claim whose name has none is not tested.
        measures: The keys of the estimates to compare, by the name in `Claim.measures` and then by case, e.g. the task
            (empty if there is only one).
        scale: The scale of the study, at which the file may rule out verdicts; None: verdicts are given.

    Raises:
        IsolossError: A claim compares or measures something that the study does not have, or the primary claim has no
            such case.
    """
    check_measures(file, measures)
    results = []
    for claim in file.claims:
        if claim.not_tested:
            answers = [Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=claim.not_tested)]
        else:
            _check(file, claim, "compares", contrasts)
            keys, margin = measures[claim.measures], claim.same_loss_nats or file.same_loss_nats
            answers = [a for each in contrasts[claim.compares] for a in answer(claim, each, keys, margin=margin)]
            if not answers:
                none = "The study has no pair of models with this measurement."
                answers = [Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation=none)]
        results.append(ClaimResult(claim=claim, answers=tuple(answers)))
    if file.judged_at(scale):
        return _corrected(results, _primary(file, results))
    return tuple(_replaced(result, [_unjudged(each) for each in result.answers]) for result in results)


def check_measures(file: ClaimsFile, measures: Collection[str]) -> None:
    """Refuse a claim that measures something that the study does not have."""
    for claim in file.claims:
        if not claim.not_tested:
            _check(file, claim, "measures", measures)


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

    Each is judged at 5 % without adjustment. A claim that is not about the loss needs two models of the same loss,
    unless the contrast says otherwise. What was not measured of both models has no answer.

    Args:
        claim: The claim.
        contrast: The two models.
        keys: The key of the estimate to compare, by case.
        margin: Equivalence margin of the mean difference in loss, in nats.

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
    if contrast.at_same_loss and loss_key(contrast.pairs) not in keys.values():
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
    # first, second, difference: the columns of `summary.claim_table` rely on this order
    numbers = {
        name: mean([pair[i][key] for pair in pairs], clusters=contrast.clusters)
        for i, name in enumerate(contrast.names)
    }
    numbers["difference" if factor == 1 else f"{second} minus {factor:g} times {first}"] = measured
    measured_answer = Answer(
        case=f"{case} ({contrast.case})" if case and contrast.case else case or contrast.case,
        contrast=contrast.case,
        numbers=numbers,
        verdict=Verdict.NOT_TESTED,
        explanation=f"{explanation} {contrast.where}".rstrip(),
        difference=measured,
        same_loss=gate,
        adjusted=_at_same_loss(contrast, key, measured),
    )
    if gate is not None and not gate.shown:
        return measured_answer
    # the difference is exactly 0 ± 0: a test would show "no change" of a model compared with itself
    if all(one[key].weights == two[key].weights != "" for one, two in pairs):
        return dataclasses.replace(measured_answer, explanation=f"Their weights are identical. {explanation}")
    p = p_value(measured, claim.direction, claim.margin)
    return _judged(claim, dataclasses.replace(measured_answer, p_value=p), tests=1)


def _judged(claim: Claim, tested: Answer, *, tests: int, p_adjusted: float | None = None) -> Answer:
    """Return a tested answer with its verdict and its power as one of this many tests."""
    difference = tested.difference
    assert difference is not None
    verdict = judge(difference, claim.direction, claim.margin, p_adjusted=p_adjusted)
    detectable = below = None
    if difference.stderr > 0:
        samples, sd = difference.samples, difference.stderr * math.sqrt(difference.samples)
        # at Holm's strictest level: which of his levels a test gets depends on the other p-values
        detectable = claim.margin + minimal_detectable_effect(sd, samples, alpha=ALPHA / tests)
        below = largest_size(difference, alpha=ALPHA) if verdict is Verdict.NOT_SHOWN else None
    return dataclasses.replace(tested, verdict=verdict, p_adjusted=p_adjusted, detectable=detectable, below=below)


def _unjudged(each: Answer) -> Answer:
    """Return an answer at a scale without verdicts: the numbers and no test."""
    verdict = Verdict.NOT_TESTED if each.difference is None else Verdict.NO_VERDICT
    return dataclasses.replace(each, verdict=verdict, p_value=None, detectable=None, below=None)


def _corrected(results: Sequence[ClaimResult], primary: Answer | None) -> tuple[ClaimResult, ...]:
    """Return the results with verdicts by Holm-adjusted p-values, except for the primary one."""
    # the tests of equal loss are not among them: they give no verdict, and can only withhold one
    others = {
        str((i, j)): each.p_value
        for i, result in enumerate(results)
        for j, each in enumerate(result.answers)
        if each.p_value is not None and each is not primary
    }
    adjusted = holm(others) if others else {}

    def corrected(claim: Claim, each: Answer, name: str) -> Answer:
        if each is primary:
            return dataclasses.replace(each, is_primary=True)
        if name not in adjusted:
            return each
        return _judged(claim, each, tests=len(adjusted), p_adjusted=adjusted[name])

    return tuple(
        _replaced(result, [corrected(result.claim, each, str((i, j))) for j, each in enumerate(result.answers)])
        for i, result in enumerate(results)
    )


def _replaced(result: ClaimResult, answers: Sequence[Answer]) -> ClaimResult:
    return dataclasses.replace(result, answers=tuple(answers))


def _primary(file: ClaimsFile, results: Sequence[ClaimResult]) -> Answer | None:
    """Return the answer that the file names as its primary test; None where there was nothing to test."""
    for result in results:
        if result.claim.id == file.primary and any(each.numbers for each in result.answers):
            try:
                return result.answer(file.primary_case)
            except IsolossError as error:
                raise IsolossError(f"{file.name}: primary_case: {error}") from error
    return None


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
    from isoloss.lab.transfer.compare import mcnemar

    probes, examples = first.examples["predictions"].shape
    test = mcnemar(second.votes, first.votes)
    return (
        f"paired over {examples:,} test sentences and {probes} probes; McNemar's test on the probes' plurality "
        f"votes: {test.only_first} sentences gained, {test.only_second} lost, p = {test.p_value:.2g}"
    )
