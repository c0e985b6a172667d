"""The study's answer in a few sentences, written from its verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from isoloss.statistics.estimate import interval, rounded, signed
from isoloss.studies.claims import Answer, ClaimResult
from isoloss.studies.verdicts import Verdict


def answer(claims: Sequence[ClaimResult]) -> Sequence[str]:
    """Return what the study answers, from the result of every claim of its claims.toml."""
    by_id = {result.claim.id: result for result in claims}

    def each(claim: str, better: str, worse: str) -> str:
        return "; ".join(_told(one, better, worse) for one in by_id[claim].answers)

    (primary,) = (one for result in claims for one in result.answers if one.is_primary)
    flatter, sharper = ("flatter", "sharper"), ("sharper", "flatter")
    better, worse = ("better", "worse"), ("worse", "better")
    return (
        "Does SGD's label noise, which is to make models flatter, make them transfer better at the same loss? "
        + f"{_YES_OR_NO[primary.verdict]} {_capital(each('noise-transfer', *better))}; by "
        + f"{each('noise-flatter', *flatter)}. SGD with label noise against no SGD: {each('sgd-transfer', *better)}; by "
        + f"{each('sgd-flatter', *flatter)}.",
        "Can models of the same loss be made to transfer differently? With the helper: "
        + f"{each('helper-transfer', *better)}. "
        + f"With the adversary: {each('adversary-transfer', *worse)}. Flatness of the helper's model, by "
        + f"{each('helper-flatter', *flatter)}; of the adversary's, by {each('adversary-sharper', *sharper)}.",
        f"After AdamW for longer: {each('longer-transfer', *better)}; by {each('longer-flatter', *flatter)}.",
        f"The larger of two sizes: {each('larger-transfer', *better)}; by {each('larger-flatter', *flatter)}.",
        f"The model against the look-up table, whose loss is perfect: {each('lookup-transfer', *better)}.",
        "After a random rescaling that changes no prediction: "
        + "; ".join(f"the {one.case} {_RESCALED[one.verdict]} ({_numbers(one)})" for one in by_id["rescaling"].answers)
        + ".",
    )


_YES_OR_NO = {
    Verdict.SHOWN: "Yes.",
    Verdict.NOT_SHOWN: "That is not shown.",
    Verdict.CONTRADICTED: "No: the contrary is shown.",
    Verdict.NOT_TESTED: "It cannot be said: the models are not shown to have the same loss.",
}
_RESCALED = {
    Verdict.SHOWN: "stays where it is",
    Verdict.NOT_SHOWN: "is not shown to stay where it is",
    Verdict.CONTRADICTED: "does not stay where it is",
}


def _told(one: Answer, claimed: str, contrary: str) -> str:
    """Return what is said of one case: its verdict in words, with the difference."""
    if one.verdict is Verdict.SHOWN:
        return f"{one.case} {claimed} ({_numbers(one)})"
    if one.verdict is Verdict.CONTRADICTED:
        return f"{one.case} {contrary} ({_numbers(one)})"
    if one.verdict is Verdict.NOT_TESTED:
        at_same = f"; adjusted to the same loss {signed(one.adjusted)}" if one.adjusted is not None else ""
        return f"{one.case} not judged, as the loss is not shown to be the same ({_numbers(one)}{at_same})"
    assert one.difference is not None
    below = "" if one.below is None else f"; smaller than {rounded(one.below, one.difference.stderr).split(' ±')[0]}"
    return f"{one.case} no difference shown ({_numbers(one)}{below})"


def _numbers(one: Answer) -> str:
    assert one.difference is not None
    return f"{signed(one.difference)}, 95 % interval {interval(one.difference)}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
