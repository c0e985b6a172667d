"""Differences between estimates on the same samples: what they have in common cancels.

Shapes: n samples, and behind them what else the estimates have in common (see `Estimate.influence`); L estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

_DRAWS = 200_000  # for the probability of being the smallest, which is then within 0.003
_TIE = 1e-9  # of a value: differences below it are rounding
_ROUNDING = 1e-9  # of a squared error


def paired_difference(first: Estimate, second: Estimate, *, unit: str | None = None) -> Estimate:
    """Return the first value minus the second, with the error of the differences within each sample.

    With psi_i and psi'_i the influences of sample i, the squared error is the sum of (psi_i - psi'_i)^2 over n (n - 1),
    plus what the influences leave unexplained of either squared error. The interval is Student's t with the
    `freedom` of the first estimate, which is that of the second. The difference of two exact values is exact.

    Args:
        first: An estimate with an influence, or an exact one.
        second: Another one on the same samples, in the same order.
        unit: Of the difference; None: of the first.

    Raises:
        IsolossError: An estimate has no influence, or they are not of the same samples.

    Example:
        >>> from isoloss.statistics.ratio import ratio_estimate
        >>> a, b = (ratio_estimate(x, unit="nats", method="loss") for x in ([1.5, 2.5, 4.0], [1.0, 2.0, 3.0]))
        >>> print(paired_difference(a, b))
        0.67 ± 0.17 nats
    """
    value = first.value - second.value
    if first.is_exact and second.is_exact:
        return Estimate(
            value=value,
            stderr=0.0,
            samples=0,
            unit=unit or first.unit,
            num_predictions=first.num_predictions,
            method="difference of two exact values",
        )
    one, two = _influences([first, second])
    return _paired(value, one - two, (1.0, 1.0), first, second, unit or first.unit)


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


def probability_above_zero(difference: Estimate) -> float:
    """Return the probability that the true value is above 0; 1/2 for an exact 0.

    By Student's t with the difference's `freedom`, as the interval: it is 0.975 where that ends at 0.

    Example:
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

    That of the smallest of L numbers with a joint Student's t distribution of their `freedom`, with the estimates as
    means and the influences' covariance: in closed form for two, from 200,000 draws for more.
    """
    if len(estimates) == 1:
        return [1.0]
    if len(estimates) == 2:
        first = probability_above_zero(paired_difference(estimates[1], estimates[0]))
        return [first, 1 - first]
    n, freedom = estimates[0].samples, estimates[0].freedom
    influences = torch.stack(_influences(estimates))
    root = torch.linalg.qr(influences.T / math.sqrt(n * (n - 1)), mode="r").R  # R^T R is the covariance
    generator = seeds.generator(0, "flattest")
    normals = torch.randn(_DRAWS, len(root), generator=generator, dtype=torch.float64)
    chi_squared = 2 * torch._standard_gamma(torch.full((_DRAWS, 1), freedom / 2, dtype=torch.float64), generator)
    drawn = torch.tensor([estimate.value for estimate in estimates], dtype=torch.float64)
    drawn = drawn + normals @ root * (freedom / chi_squared).sqrt()
    least = drawn.min(dim=1, keepdim=True).values
    smallest = (drawn <= least + _TIE * least.abs()).double()  # equal ones count in parts
    chances: list[float] = (smallest / smallest.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
    return chances


def _influences(estimates: Sequence[Estimate]) -> list[torch.Tensor]:
    """Return the influences (n,) of estimates on the same samples."""
    influences = []
    for estimate in estimates:
        if estimate.influence is None:
            raise IsolossError(f"{estimate.method}: the influence of each sample is not known, so it cannot be paired")
        influences.append(torch.from_numpy(estimate.influence))
    sizes = {(estimate.samples, len(influence)) for estimate, influence in zip(estimates, influences, strict=True)}
    if len(sizes) > 1:
        numbers = " and ".join(str(estimate.samples) for estimate in estimates)
        raise IsolossError(f"a paired difference needs the same samples on both sides, not {numbers}")
    return influences


def _paired(
    value: float,
    influence: torch.Tensor,
    scales: tuple[float, float],
    first: Estimate,
    second: Estimate,
    unit: str,
) -> Estimate:
    n = first.samples
    rest = sum((scale**2) * _unexplained(each) for scale, each in zip(scales, (first, second), strict=True))
    return Estimate(
        value=value,
        stderr=math.sqrt(float(influence.square().sum()) / (n * (n - 1)) + rest),
        samples=n,
        unit=unit,
        num_predictions=first.num_predictions,
        num_probes=first.num_probes,
        method="paired difference",
        effective_samples=first.effective_samples,
        influence=influence.numpy(),
    )


def _unexplained(estimate: Estimate) -> float:
    """Return what of the squared error is not in the influence, such as the residual of an eigenvalue."""
    assert estimate.influence is not None
    n, square = estimate.samples, estimate.stderr**2
    rest = square - float(torch.from_numpy(estimate.influence).square().sum()) / (n * (n - 1))
    return rest if rest > _ROUNDING * square else 0.0
