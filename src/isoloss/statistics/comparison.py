"""Differences between estimates: on the same samples, where what they have in common cancels, or on independent ones.

Shapes: n samples, and behind them what else the estimates have in common (see `Estimate.influence`); L estimates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

_DRAWS = 200_000  # for the probability of being the smallest, which is then within 0.003
_PART = 10_000  # of them at a time: all would take 10 MB an estimate. A multiple of 16, by which torch draws normals
_TIE = 1e-9  # of a value: differences below it are rounding
_ROUNDING = 1e-9  # of a squared error


def paired_difference(first: Estimate, second: Estimate, *, unit: str | None = None) -> Estimate:
    """Return the first value minus the second, with the error of the differences within each sample.

    With psi_i and psi'_i the influences of sample i, the squared error is the sum of (psi_i - psi'_i)^2 over n (n - 1),
    plus what the influences leave unexplained of either squared error. The interval is Student's t with the
    `freedom` that both estimates have. The difference of two exact values is exact.

    Args:
        first: An estimate with an influence, or an exact one.
        second: Another one on the same samples, in the same order.
        unit: Of the difference; None: of the first, and `"difference in accuracy"` for two accuracies.

    Raises:
        IsolossError: An estimate has no influence, or they are not of the same samples.

    Example:
        >>> from isoloss.statistics.comparison import paired_difference
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> a, b = (ratio_estimate(x, unit="nats", method="loss") for x in ([1.5, 2.5, 4.0], [1.0, 2.0, 3.0]))
        >>> print(paired_difference(a, b))
        0.67 ± 0.17 nats
    """
    value = first.value - second.value
    unit = unit or ("difference in accuracy" if first.unit == "accuracy" else first.unit)
    if first.is_exact and second.is_exact:
        return Estimate(
            value=value,
            stderr=0.0,
            samples=0,
            unit=unit,
            num_predictions=first.num_predictions,
            method="difference of two exact values",
        )
    one, two = _influences([first, second])
    return _paired(value, one - two, (1.0, 1.0), first, second, unit)


def paired_log_ratio(first: Estimate, second: Estimate) -> Estimate:
    """Return the logarithm of the first value over the second, by the delta method on psi_i / R - psi'_i / R'.

    Arguments and errors are those of `paired_difference`.

    Raises:
        IsolossError: A value is not above 0.
    """
    for estimate in (first, second):
        if estimate.value <= 0:
            raise IsolossError(f"a value is {estimate.value:.3g}, which has no ratio to another; take more inputs")
    one, two = _influences([first, second])
    value = math.log(first.value) - math.log(second.value)
    scales = 1 / first.value, 1 / second.value
    return _paired(value, one / first.value - two / second.value, scales, first, second, "logarithm of a ratio")


def times(estimate: Estimate, factor: float) -> Estimate:
    """Return a multiple of an estimate, with its error and influence."""
    return dataclasses.replace(
        estimate,
        value=factor * estimate.value,
        stderr=abs(factor) * estimate.stderr,
        influence=None if estimate.influence is None else factor * estimate.influence,
    )


def without_sample(estimate: Estimate, sample: int) -> Estimate:
    """Return an estimate without one of its n samples, by the jackknife: the value less psi_i / (n - 1).

    For a mean, value and error are those of the other samples. For a ratio of sums, the value is; the influences, and
    with them the error, are those of samples of one size.

    Example:
        >>> from isoloss.statistics.comparison import without_sample
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> print(without_sample(ratio_estimate([1.0, 2.0, 3.0, 90.0], unit="nats", method="loss"), 3))
        2.00 ± 0.58 nats
    """
    assert estimate.influence is not None
    n, influence = estimate.samples - 1, estimate.influence
    moved = influence[sample] / n
    # what stands behind the samples keeps its part of the squared error
    behind = influence[n + 1 :] * math.sqrt((n - 1) / (n + 1))
    left = np.concatenate([np.delete(influence[: n + 1], sample) + moved, behind])
    effective = estimate.effective_samples
    return dataclasses.replace(
        estimate,
        value=estimate.value - moved,
        stderr=math.sqrt(float(np.square(left).sum()) / (n * (n - 1)) + _unexplained(estimate)),
        samples=n,
        effective_samples=None if effective is None else min(effective, n),
        influence=left,
    )


def linear_combination(terms: Sequence[tuple[float, Estimate]], *, method: str) -> Estimate:
    """Return the sum of factors times estimates on the same samples, with the error of the sum within each sample.

    The combination is of the first estimate's unit and details. An estimate whose influences are fewer has none of what
    stands behind the samples of the others.

    Raises:
        IsolossError: An estimate has no influence, or they are not of the same samples.

    Example:
        >>> from isoloss.statistics.comparison import linear_combination
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> a, b = (ratio_estimate(x, unit="nats", method="loss") for x in ([1.5, 2.5, 4.0], [1.0, 2.0, 3.0]))
        >>> print(linear_combination([(0.5, a), (0.5, b)], method="mean of two"))
        2.33 ± 0.65 nats
    """
    first, n = terms[0][1], terms[0][1].samples
    influence = np.zeros(max(0 if e.influence is None else len(e.influence) for _, e in terms))
    for factor, estimate in terms:
        if estimate.influence is None or estimate.samples != n:
            raise IsolossError(f"{estimate.method}: it is not known what each of the {n} samples adds to it")
        influence[: len(estimate.influence)] += factor * estimate.influence
    rest = sum(factor**2 * _unexplained(estimate) for factor, estimate in terms)
    return dataclasses.replace(
        first,
        value=math.fsum(factor * estimate.value for factor, estimate in terms),
        stderr=math.sqrt(float(np.square(influence).sum()) / (n * (n - 1)) + rest),
        method=method,
        influence=influence,
    )


def independent_difference(second: Estimate, first: Estimate) -> Estimate:
    """Return second - first, which have no sample in common, with the standard error sqrt(a^2 + b^2) of their errors.

    The degrees of freedom are those of Welch (1938) and Satterthwaite (1946), (a^2 + b^2)^2 / (a^4 / f_a + b^4 / f_b),
    with f the `freedom` of each. For two means of independent samples it is Welch's t test. Accuracies become
    percentage points. Where both have an influence, so has the difference, of the samples of `second` and then of
    `first`: two such differences of the same samples can be paired.

    Raises:
        IsolossError: The units differ, or an estimate with an error has fewer than 2 samples.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.comparison import independent_difference
        >>> known = {"unit": "nats", "num_predictions": 9, "method": "mean over seeds"}
        >>> a = Estimate(value=1.0, stderr=0.3, samples=3, **known)
        >>> b = Estimate(value=2.0, stderr=0.4, samples=3, **known)
        >>> d = independent_difference(b, a)
        >>> print(d, round(d.freedom, 2))
        1.00 ± 0.50 nats 3.71
    """
    if first.unit != second.unit:
        raise IsolossError(f"a difference needs two estimates of one unit, not {second.unit!r} and {first.unit!r}")
    sampled = [estimate for estimate in (first, second) if estimate.stderr > 0]
    for estimate in sampled:
        if estimate.samples < 2:
            raise IsolossError(f"an error needs at least 2 independent samples, not {estimate.samples}")
    scale, unit = (100, "percentage points") if first.unit == "accuracy" else (1, first.unit)
    total = math.fsum(estimate.stderr**2 for estimate in sampled)
    parts = sum((estimate.stderr**2 / total) ** 2 / estimate.freedom for estimate in sampled)
    influences = [
        sign * scale * one.influence
        for sign, one in ((1, second), (-1, first))
        if one.stderr > 0 and one.influence is not None
    ]
    n = sum(map(len, influences))
    # scaled so that the sum of squares over n (n - 1) is the sum of the squared errors
    whole = [math.sqrt(n * (n - 1) / (len(each) * (len(each) - 1))) * each for each in influences]
    return Estimate(
        value=scale * (second.value - first.value),
        stderr=scale * math.sqrt(total),
        samples=sum(estimate.samples for estimate in sampled),
        effective_samples=1 + 1 / parts if sampled else None,
        unit=unit,
        num_predictions=first.num_predictions + second.num_predictions,
        method="independent difference",
        influence=np.concatenate(whole) if whole and len(whole) == len(sampled) else None,
    )


def probability_above_zero(difference: Estimate) -> float:
    """Return the probability that the true value is above 0; 1/2 for an exact 0.

    By Student's t with the difference's `freedom`, as the interval: it is 0.975 where that ends at 0.

    Example:
        >>> from isoloss import Estimate
        >>> from isoloss.statistics.comparison import probability_above_zero
        >>> d = Estimate(value=2.306, stderr=1.0, samples=9, unit="nats", num_predictions=9, method="paired difference")
        >>> round(probability_above_zero(d), 3)
        0.975
    """
    from scipy.special import stdtr

    if difference.stderr == 0:
        return 0.5 + 0.5 * ((difference.value > 0) - (difference.value < 0))
    return float(stdtr(difference.freedom, difference.value / difference.stderr))


def probabilities_of_smallest(estimates: Sequence[Estimate]) -> list[float]:
    """Return for each of L estimates on the same samples the probability that its true value is the smallest.

    The true values are taken as jointly Student's t of the estimates' `freedom`, with the estimates as means and the
    influences' covariance, to which the part of a squared error that is not in its influence adds by itself: in closed
    form for two, from 200,000 draws for more.

    Example:
        >>> from isoloss.statistics.comparison import probabilities_of_smallest
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> a, b = (ratio_estimate(x, unit="nats", method="loss") for x in ([1.5, 2.5, 4.0], [1.0, 2.0, 3.0]))
        >>> [round(chance, 3) for chance in probabilities_of_smallest([a, b])]
        [0.029, 0.971]
    """
    if len(estimates) == 1:
        return [1.0]
    if len(estimates) == 2:
        first = probability_above_zero(paired_difference(estimates[1], estimates[0]))
        return [first, 1 - first]
    import torch  # for draws alone: what else compares estimates does without it

    n, freedom = estimates[0].samples, estimates[0].freedom
    influences = torch.from_numpy(np.stack(_influences(estimates)))
    rows = influences.T / math.sqrt(n * (n - 1))
    rest = torch.tensor([_unexplained(estimate) for estimate in estimates], dtype=torch.float64)
    if rest.any():
        rows = torch.cat([rows, rest.sqrt().diag()])
    # from the influences by QR: the covariance has no Cholesky factor where two models are copies
    root = torch.linalg.qr(rows, mode="r").R  # R^T R is the covariance
    generator = seeds.generator(0, "flattest")

    def normals() -> torch.Tensor:
        return torch.randn(_PART, len(root), generator=generator, dtype=torch.float64)

    begun = generator.get_state()
    for _ in range(_DRAWS // _PART):  # they come first in the stream, and are drawn again below
        normals()
    # one draw for all estimates, which share their samples: a difference of two then has the Student's t of its
    # interval. `torch.distributions.Chi2` takes no generator
    chi_squared = 2 * torch._standard_gamma(torch.full((_DRAWS, 1), freedom / 2, dtype=torch.float64), generator)
    generator.set_state(begun)
    values = torch.tensor([estimate.value for estimate in estimates], dtype=torch.float64)
    counts = torch.zeros_like(values)
    for scale in torch.split((freedom / chi_squared).sqrt(), _PART):
        drawn = values + normals() @ root * scale
        least = drawn.min(dim=1, keepdim=True).values
        smallest = (drawn <= least + _TIE * least.abs()).double()  # equal ones count in parts
        counts += (smallest / smallest.sum(dim=1, keepdim=True)).sum(dim=0)
    chances: list[float] = (counts / _DRAWS).tolist()
    return chances


def _influences(estimates: Sequence[Estimate]) -> list[NDArray[np.float64]]:
    """Return the influences (n,) of estimates on the same samples."""
    influences = []
    for estimate in estimates:
        if estimate.influence is None:
            raise IsolossError(f"{estimate.method}: the influence of each sample is not known, so it cannot be paired")
        influences.append(estimate.influence)
    sizes = {(estimate.samples, len(influence)) for estimate, influence in zip(estimates, influences, strict=True)}
    if len(sizes) > 1:
        numbers = " and ".join(str(estimate.samples) for estimate in estimates)
        raise IsolossError(f"a paired difference needs the same samples on both sides, not {numbers}")
    return influences


def _paired(
    value: float,
    influence: NDArray[np.float64],
    scales: tuple[float, float],
    first: Estimate,
    second: Estimate,
    unit: str,
) -> Estimate:
    n = first.samples
    rest = sum((scale**2) * _unexplained(each) for scale, each in zip(scales, (first, second), strict=True))
    return Estimate(
        value=value,
        stderr=math.sqrt(float(np.square(influence).sum()) / (n * (n - 1)) + rest),
        samples=n,
        unit=unit,
        num_predictions=first.num_predictions,
        num_probes=first.num_probes,
        method="paired difference",
        effective_samples=first.effective_samples,
        influence=influence,
    )


def _unexplained(estimate: Estimate) -> float:
    """Return the part of the squared error that is not in the influence, such as the residual of an eigenvalue."""
    assert estimate.influence is not None
    n, square = estimate.samples, estimate.stderr**2
    # where the error is the larger of two, over clusters and over blocks, the influence may be by the other one
    rest = square - float(np.square(estimate.influence).sum()) / (n * (n - 1))
    return rest if rest > _ROUNDING * square else 0.0
