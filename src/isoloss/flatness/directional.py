"""How sharply the loss curves along one direction of weights, such as an optimizer's update.

Shapes: P parameters counted one by one.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import scipy.optimize
import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss, inner
from isoloss.flatness._measurement import UNIT
from isoloss.flatness.sharpness import move_weights, weights_restored
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import by_leaving_out, from_influence, ratio_estimate

_FIRST = 2**-10  # of the length of all weights: the first step
_DOUBLINGS = 20
_RTOL = 1e-6  # of the step
_FAR = 1e3


def directional_sharpness(
    model: nn.Module,
    direction: Mapping[str, torch.Tensor],
    batches: Iterable[Mapping[str, Any]],
    *,
    causal: bool | None = None,
    num_sequences: int | None = None,
) -> Estimate:
    """Measure the curvature of the loss along a direction: v' F v / v' v, with F the Fisher (Gauss-Newton) matrix.

    It lies between the smallest and the largest eigenvalue of F, and its mean over random directions is the trace
    divided by the number of parameters. Pan and Li (2023, arXiv:2306.00204) compare optimizers by the sharpness along
    their updates.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        direction: The parts of v by the names of all trainable parameters. Its length does not matter.
        batches: As for `fisher_trace`; all are kept in memory.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: Stop after this many sequences; None: at the end of the batches.

    Returns:
        The curvature in nats per predicted token and squared unit of length: beyond its first-order change, the loss
        rises by d^2 / 2 times the curvature for a step of length d. The error covers the inputs.

    Raises:
        IsolossError: A part is missing, has another shape or is not finite, the direction is 0 everywhere, a batch does
            not fit, or fewer than 2 inputs are independent.

    Example:
        >>> import torch
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import directional_sharpness
        >>> model, batches = tiny_bert()
        >>> ones = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        >>> directional_sharpness(model, ones, batches).value >= 0
        True
    """
    loss = MeanLoss(model, batches, causal=causal, num_sequences=num_sequences)
    flat = _flat(loss, direction)
    length = float(flat.double().norm())
    forms, positions = loss.quadratic_forms(flat / length, hessian=False)
    estimate = ratio_estimate(forms, positions, unit=UNIT, method="curvature along a direction")
    about = {"clusters": loss.clusters_name, "error_covers": "inputs", "length": length}
    return replace(estimate, details={**loss.details(0), **about})


def _flat(loss: MeanLoss, direction: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return (P,): a direction given by parameter; refuse an invalid one."""
    if alone := {*direction} ^ {*loss.parameters}:
        raise IsolossError(
            f"the direction and the model's trainable parameters differ: only one of them has {min(alone)}"
        )
    for name, parameter in loss.parameters.items():
        if direction[name].shape != parameter.shape:
            shapes = f"{tuple(direction[name].shape)}, and the parameter {tuple(parameter.shape)}"
            raise IsolossError(f"the direction's {name} has the shape {shapes}")
    flat = torch.cat([direction[name].reshape(-1).to(parameter) for name, parameter in loss.parameters.items()])
    length = float(flat.double().norm())
    if not 0 < length < float("inf"):
        what = "is 0 everywhere" if length == 0 else "is not finite"
        raise IsolossError(f"the direction {what}, so there is no curvature along it")
    return flat


def critical_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    direction: Mapping[str, torch.Tensor] | None = None,
    causal: bool | None = None,
) -> Estimate:
    """Measure 2 / s for the smallest step s along an update at which the mean loss is back at its initial value.

    With L the mean loss per predicted token, w the weights and v the update, s is the smallest s > 0 at which `L(w + s
    v) = L(w)`, the learning rate above which the update makes the loss worse (Kalra et al. 2026, arXiv:2601.16979,
    "critical sharpness"). It takes first derivatives only. For a quadratic loss with the gradient g and v = -g, the
    critical sharpness is the curvature along the gradient, g' H g / g' g, which is at most the largest eigenvalue.

    The step is doubled until the loss is above its initial value; then Brent's method finds the root of the slope of
    the chord, (L(w + s v) - L(w)) / s, which is linear in s where the loss is quadratic.

    The error is over clusters of the inputs, to first order (the root is an implicit function of the clusters' losses).
    Along the gradient it covers the error of the gradient, too. The gradient of few inputs is noisy, and the loss is
    sharper along it than along the gradient of many: compare models on the same inputs.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`, but the labels' values count. All batches are kept in memory.
        direction: The parts of v by the names of all trainable parameters; its length counts. None: the negative
            gradient of L.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.

    Returns:
        The critical sharpness, in nats per predicted token and squared unit of length along the gradient. The details
        have the critical `step` and the number of `forward_passes`, about 12.

    Raises:
        IsolossError: The direction is invalid, as for `directional_sharpness`, or the loss does not fall along it at
            first; the loss does not rise however far the weights move; a batch does not fit, or fewer than 2 inputs are
            independent.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import critical_sharpness
        >>> model, batches = tiny_bert()
        >>> sharpness = critical_sharpness(model, batches)
        >>> sharpness.value == 2 / sharpness.details["step"]
        True
    """
    loss = MeanLoss(model, batches, causal=causal)
    positions, gradient = loss.positions(), loss.gradient()
    along = -gradient if direction is None else _flat(loss, direction).to(gradient)
    slope = inner(gradient, along)
    if not slope < 0:
        raise IsolossError("the loss does not fall along the direction, so no step brings it back to its initial value")
    before, every = loss.by_cluster(), torch.ones(loss.num_sequences, dtype=torch.bool)
    rises: dict[float, torch.Tensor] = {}
    with weights_restored(loss.parameters.values()) as originals:

        def chord(step: float) -> float:
            if step == 0:
                return slope
            move_weights(loss.parameters, originals, loss.split(step * along))
            rises[step] = loss.by_cluster(every) - before
            mean = float(rises[step].sum()) / loss.num_positions
            return mean / step if math.isfinite(mean) else -_FAR * slope  # far beyond the root

        size = math.sqrt(sum(float(original.double().square().sum()) for original in originals))
        low, high = 0.0, _FIRST * size / math.sqrt(inner(along, along))
        limit = high * 2**_DOUBLINGS
        while chord(high) < 0:
            low, high = high, 2 * high
            if high > limit:
                raise IsolossError("the loss does not rise along the direction, however far the weights move")
        step = float(scipy.optimize.brentq(chord, low, high, rtol=_RTOL))
        chord(step)
        at_step = loss.gradient()
    # at the step the mean rise is 0; a change of the rise moves the step by the change over the slope there
    residuals = rises[step]
    if direction is None:  # which changes with each cluster as well
        moved = torch.tensor([inner(at_step, each) for each in loss.gradients_by_cluster()], dtype=torch.float64)
        residuals = residuals - step * (moved - positions * inner(at_step, gradient))
    influence = by_leaving_out(residuals * (2 / (step**2 * inner(at_step, along))), positions)
    method = f"critical sharpness along {'the gradient' if direction is None else 'a direction'}"
    estimate = from_influence(2 / step, influence, positions, unit=UNIT, method=method)
    about = {"clusters": loss.clusters_name, "error_covers": "inputs and labels"}
    found = {"step": step, "forward_passes": 1 + len(rises)}
    return replace(estimate, details={**loss.details(0), **about, **found})
