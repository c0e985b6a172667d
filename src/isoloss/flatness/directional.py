"""How sharply the loss curves along one direction of weights, such as an optimizer's update.

The example measures the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import UNIT
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate


def directional_sharpness(
    model: nn.Module,
    direction: Mapping[str, torch.Tensor],
    batches: Iterable[Mapping[str, Any]],
    *,
    causal: bool | None = None,
    num_sequences: int | None = None,
) -> Estimate:
    """Measure the curvature of the loss along a direction: v' F v / v' v, with F the Fisher (Gauss-Newton) matrix.

    It lies between the smallest and the largest eigenvalue of F, and over random directions its mean is the trace over
    the number of parameters. Pan and Li (2023, arXiv:2306.00204) compare optimizers by it, along their updates.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        direction: The parts of v by the names of all trainable parameters. Its length does not matter.
        batches: As for `fisher_trace`; all are kept in memory.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: Stop after this many sequences; None: at the end of the batches.

    Returns:
        The curvature in nats per predicted token and squared unit of length: besides its first-order change, the loss
        rises by d^2 / 2 times it for a step of length d. The error covers the inputs.

    Raises:
        IsolossError: A part that is missing, of another shape or not finite, a direction that is 0 everywhere, a batch
            that does not fit, or fewer than 2 independent inputs.

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
        raise IsolossError(f"the direction {what}, so that there is no curvature along it")
    forms, positions = loss.quadratic_forms(flat / length, hessian=False)
    estimate = ratio_estimate(forms, positions, unit=UNIT, method="curvature along a direction")
    about = {"clusters": loss.clusters_name, "error_covers": "inputs", "length": length}
    return replace(estimate, details={**loss.details(0), **about})
