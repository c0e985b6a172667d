"""The rule by which a measured difference shows or contradicts a claim."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Literal

from isoloss.errors import IsolossError
from isoloss.statistics import significance
from isoloss.statistics.estimate import Estimate

Direction = Literal["decrease", "increase", "no change within"]

ALPHA = 0.05  # the level of all tests

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


class Verdict(StrEnum):
    """The verdict on a claim."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    NOT_TESTED = "not tested"
    NO_VERDICT = "no verdict at this scale"


def judge(
    difference: Estimate, direction: Direction, margin: float = 0.0, *, p_adjusted: float | None = None
) -> Verdict:
    """Return whether a measured difference shows or contradicts a claim, at 5 %.

    By its own p-value (`p_value`), this is the rule of the 95 % confidence interval [a, b]. Shown: b < -margin for a
    decrease, a > margin for an increase, -margin <= a and b <= margin for no change within the margin. Contradicted:
    a > -margin for a decrease, b < margin for an increase, a > margin or b < -margin for no change. Otherwise not
    shown.

    Args:
        difference: After minus before, or treated minus control; its stderr is that of the difference.
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
    the margin, it is twice the smallest of two p-values: that of being within, the larger one of two one-sided tests,
    and that of being outside on the side where the difference is. Arguments and errors are those of `judge`.

    Example:
        >>> gain = Estimate(value=3.0, stderr=1.0, samples=9, unit="points", num_predictions=9, method="probe")
        >>> [round(p_value(gain, "increase", margin), 3) for margin in (0.0, 1.0, 3.0, 5.0)]
        [0.017, 0.081, 1.0, 0.081]
    """
    check_margin(direction, margin)
    beyond = _beyond(difference.value, direction, margin)
    if difference.stderr == 0 and _at_the_edge_of_no_change(beyond, direction):
        return 0.0
    return significance.p_value(dataclasses.replace(difference, value=beyond))


def check_margin(direction: str, margin: float) -> None:
    """Refuse a margin that is negative or not finite, or that is 0 for a claim of no change."""
    if not 0 <= margin < float("inf"):
        raise IsolossError(f"a claim's margin is a finite number of at least 0, not {margin}")
    if direction == "no change within" and margin == 0:
        raise IsolossError(
            "a claim of no change needs a margin above 0: no measurement shows that two numbers are equal"
        )


def _beyond(value: float, direction: str, margin: float) -> float:
    """Return how far a difference lies on the claimed side of the edge; below 0 on the other side."""
    if direction == "no change within":
        return margin - abs(value)
    return (value if direction == "increase" else -value) - margin


def _at_the_edge_of_no_change(beyond: float, direction: str) -> bool:
    return beyond == 0 and direction == "no change within"  # the margin itself counts as within
