"""The study's answer in a few short paragraphs, written from its verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isoloss.statistics.estimate import Estimate, interval, number, rounded
from isoloss.studies.claims import Answer, Claim, ClaimResult
from isoloss.studies.results import UNITS
from isoloss.studies.verdicts import Verdict

# what else is compared at the same loss: each with its claims about transfer and flatness
_OTHERS = (
    ("SGD with sampled labels vs. untouched", "sgd-transfer", "sgd-flatter"),
    ("AdamW for longer vs. untouched", "longer-transfer", "longer-flatter"),
    ("Weight decay vs. untouched", "decay-transfer", "decay-flatter"),
    ("The larger of two sizes vs. the smaller", "larger-transfer", "larger-flatter"),
)
_PRIMARY = {
    Verdict.SHOWN: "Yes.",
    Verdict.NOT_SHOWN: "Not shown.",
    Verdict.CONTRADICTED: "No, it makes transfer worse.",
    Verdict.NOT_TESTED: "Not tested: the two arms are not shown to have the same loss.",
}
_RESCALED = {
    Verdict.SHOWN: "changes by less than",
    Verdict.NOT_SHOWN: "is not shown to change by less than",
    Verdict.CONTRADICTED: "changes by more than",
}


def answer(claims: Sequence[ClaimResult]) -> Sequence[str]:
    """Return what the study answers, a paragraph each, from the result of every claim of its claims.toml.

    Differences are given where they are significant, and for the primary test; the claims have the others.
    """
    by_id = {result.claim.id: result for result in claims}
    (primary,) = (one for result in claims for one in result.answers if one.is_primary)
    controls = [one.verdict for name in ("helper", "adversary") for one in by_id[f"{name}-transfer"].answers]
    return (
        "Does SGD's label noise, which should flatten the model, improve transfer at the same loss? "
        f"{_PRIMARY[primary.verdict]} {_primary_in_numbers(primary)}",
        f"SGD with sampled vs. exact labels. {_both(by_id, 'noise-transfer', 'noise-flatter')}",
        f"Can models of the same loss transfer differently? {_can_differ(controls)} Helper (positive control) vs. "
        f"AdamW for longer. {_both(by_id, 'helper-transfer', 'helper-flatter')} Adversary vs. AdamW for longer. "
        f"{_both(by_id, 'adversary-transfer', 'adversary-sharper')}",
        *(f"{what}. {_both(by_id, transfer, flatness)}" for what, transfer, flatness in _OTHERS),
        "Untouched vs. the look-up table, whose KL is 0. "
        f"Probe accuracy: {_words(by_id['lookup-transfer'], 'higher', 'lower', 'on')}.",
        "Negative control, a random rescaling that leaves every prediction unchanged: "
        f"{'; '.join(_rescaled(one, by_id['rescaling'].claim) for one in by_id['rescaling'].answers)}.",
        "±: standard errors over grammars. Significance is at 5 %; all p-values but that of the primary test, the "
        "first one, are adjusted by Holm's method.",
    )


def _can_differ(verdicts: Sequence[Verdict]) -> str:
    if {Verdict.SHOWN, Verdict.CONTRADICTED} & set(verdicts):
        return "Yes."
    return "Not shown." if Verdict.NOT_SHOWN in verdicts else "Not tested."


def _both(by_id: Mapping[str, ClaimResult], transfer: str, flatness: str) -> str:
    """Return what a comparison says of transfer and of flatness; a larger trace is sharper."""
    accuracy, trace = by_id[transfer], by_id[flatness]
    if {one.verdict for one in (*accuracy.answers, *trace.answers)} == {Verdict.NOT_TESTED}:
        return f"Not tested: the losses are not shown to be the same.{_adjusted(accuracy)}"
    return (
        f"Probe accuracy: {_words(accuracy, 'higher', 'lower', 'on')}. "
        f"Flatness: {_words(trace, 'sharper', 'flatter', 'by')}."
    )


def _words(result: ClaimResult, above: str, below: str, preposition: str) -> str:
    """Return the verdict on each case in words; neighboring cases of one verdict share the words.

    Args:
        result: A claim of a decrease or an increase.
        above: What the second model is if the difference is above 0.
        below: What it is if the difference is below 0.
        preposition: What joins these with a case.
    """
    parts = []
    for verdict, group in itertools.groupby(result.answers, key=lambda one: one.verdict):
        cases = list(group)
        names = "" if len(cases) == len(result.answers) else f" {preposition} {', '.join(map(_case, cases))}"
        if verdict is Verdict.NOT_TESTED:
            parts.append(f"not tested{names}, as the losses are not shown to be the same")
        elif verdict is Verdict.NOT_SHOWN:
            parts.append(f"no significant difference{names}{_bound(cases)}")
        else:
            word = above if (verdict is Verdict.SHOWN) == (result.claim.direction == "increase") else below
            parts.append(f"{word} {preposition} {', '.join(f'{_case(one)} ({_difference(one)})' for one in cases)}")
    return "; ".join(parts)


def _adjusted(result: ClaimResult) -> str:
    cases = [f"{_case(one)} {_signed(one.adjusted)}" for one in result.answers if one.adjusted is not None]
    return f" Probe accuracy, adjusted to the same loss: {', '.join(cases)}." if cases else ""


def _bound(cases: Sequence[Answer]) -> str:
    """Return what each of some true differences is smaller than, if that is known."""
    bounds = [(one.below, one.difference) for one in cases if one.below is not None and one.difference is not None]
    if not bounds:
        return ""
    below, difference = max(bounds, key=lambda one: one[0])
    return f" ({'each ' * (len(cases) > 1)}within ± {_rounded(below, difference)}, 95 % confidence)"


def _primary_in_numbers(one: Answer) -> str:
    assert one.difference is not None
    text = f"Probe accuracy on {one.case} differs by {_difference(one)}, 95 % interval {interval(one.difference)}"
    if one.adjusted is not None:
        text += f"; adjusted to the same loss, by {_signed(one.adjusted)}"
    if one.below is not None:
        text += f"; two one-sided tests at 5 % put the true difference within ± {_rounded(one.below, one.difference)}"
    return f"{text}."


def _rescaled(one: Answer, claim: Claim) -> str:
    assert one.difference is not None
    edge = f"{claim.margin:g} {_unit(one.difference)}"
    return f"the {_case(one)} {_RESCALED[one.verdict]} {edge} ({_difference(one)})"


def _case(one: Answer) -> str:
    return one.case.replace("minimal-trace", "minimal trace")


def _difference(one: Answer) -> str:
    assert one.difference is not None
    return _signed(one.difference)


def _signed(difference: Estimate) -> str:
    return f"{'+' if difference.value > 0 else ''}{number(difference)} {_unit(difference)}"


def _rounded(size: float, difference: Estimate) -> str:
    return f"{rounded(size, difference.stderr).split(' ±')[0]} {_unit(difference)}"


def _unit(difference: Estimate) -> str:
    return UNITS.get(difference.unit, difference.unit)
