"""Several tests at once: Holm's correction, and the p-value of an estimate that goes into it."""

from __future__ import annotations

from collections.abc import Mapping

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate


def p_value(difference: Estimate) -> float:
    """Return the two-sided p-value of a difference against 0: `P(|T| > |value| / stderr)`.

    T is Student's with the difference's `freedom`, as the interval: it is below 0.05 just where `ci95` is without
    0. Without an error it is 0, and 1 for a difference of 0.

    Raises:
        IsolossError: Fewer than 2 samples.

    Example:
        >>> d = Estimate(value=2.306, stderr=1.0, samples=9, unit="nats", num_predictions=9, method="paired difference")
        >>> round(p_value(d), 3)
        0.05
    """
    from scipy.special import stdtr

    if difference.stderr == 0:
        return float(difference.value == 0)
    if difference.samples < 2:
        raise IsolossError(f"a p-value needs at least 2 independent samples, not {difference.samples}")
    return 2 * float(stdtr(difference.freedom, -abs(difference.value) / difference.stderr))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values adjusted for their number by Holm's method (1979), in the order given.

    With p_(1) <= ... <= p_(m), the adjusted p_(i) is the largest of min(1, (m - j + 1) p_(j)) over j <= i. Rejecting
    where it is at most alpha, the probability of rejecting any true hypothesis is at most alpha, however the tests
    depend on each other.

    Args:
        p_values: By the test's name; all those that were made, not only those that are reported.

    Raises:
        IsolossError: There is none, or one is not between 0 and 1.

    Example:
        >>> holm({"flatter": 0.01, "transfers better": 0.04, "same loss": 0.03})
        {'flatter': 0.03, 'transfers better': 0.06, 'same loss': 0.06}
    """
    if not p_values:
        raise IsolossError("Holm's correction needs at least one p-value")
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not 0 <= p <= 1:
            raise IsolossError(f"the p-value of {name} is {p}; it must be from 0 to 1")
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
