"""How far the loss rises when weights are rounded to a few bits: a step of known size, unlike one of a trace's.

Shapes: N clusters of sequences; a weight matrix is (outputs, inputs).
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import UNIT
from isoloss.flatness.sharpness import weights_restored
from isoloss.model_checks import unwrapped
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate


def rounded_weight(weight: torch.Tensor, *, bits: int, group_size: int | None = None) -> torch.Tensor:
    """Return a matrix (outputs, inputs) rounded to the nearest of `2^bits - 1` values, symmetric around 0.

    The values of a group are `s k`, with whole k from `-(2^(bits - 1) - 1)` up and the scale
    `s = max |w| / (2^(bits - 1) - 1)`, so that the largest weight is kept. A group is a row, the weights of one output
    ("per channel"), or `group_size` inputs of a row; the last group of a row may be smaller. Halves go to the even k.

    Example:
        >>> rounded_weight(torch.tensor([[-7.0, 3.4, 0.2], [0.07, 0.0, 0.004]]), bits=4)
        tensor([[-7.0000,  3.0000,  0.0000],
                [ 0.0700,  0.0000,  0.0000]])
    """
    if not 2 <= bits <= 8:
        raise IsolossError(f"bits is {bits}; weights are rounded to between 2 and 8 bits")
    if group_size is not None and group_size < 1:
        raise IsolossError(f"group_size is {group_size}; a group has at least one weight")
    outputs, inputs = weight.shape
    size = group_size or inputs
    largest = 2 ** (bits - 1) - 1
    # in float32 at least: a scale in bfloat16 would move the values themselves
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    groups = F.pad(wide, (0, -inputs % size)).view(outputs, -1, size)
    scales = groups.abs().amax(dim=2, keepdim=True) / largest
    scales[scales == 0] = 1  # of zeros alone
    rounded = (groups / scales).round() * scales
    return rounded.view(outputs, -1)[:, :inputs].to(weight.dtype)


def rounded_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose weights are rounded: linear ones, but not the output layer nor what shares its weight.

    Embeddings and the output layer stay as they are, as in the common formats of weights with few bits.
    """
    plain: Any = unwrapped(model)
    kept = {
        id(parameter)
        for module in plain.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    output = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    if output is not None:
        kept.add(id(output.weight))
    return {
        name: module
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module.weight) not in kept
    }


def quantization_rise(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    bits: int = 8,
    group_size: int | None = None,
    causal: bool | None = None,
    num_sequences: int | None = None,
) -> Estimate:
    """Measure how far the mean loss per predicted token rises when the weights of linear layers have a few bits.

    Weights are rounded to the nearest value (`rounded_weight`), without calibration, and computed with in the dtype of
    the model: this is the error of the weights alone. The rise is paired by input, so that its error is small; it can
    be below 0. With fewer bits it measures flatness along one direction, at a distance that practice asks for.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are changed, and set back bit for bit.
        batches: As for `fisher_trace`; all are kept; the labels' values count.
        bits: Of a weight, from 2 to 8.
        group_size: Weights that share a scale, along the inputs of an output; None: all of them.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: At most so many are used; None: all.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, a logit is not finite, there are fewer
            than 2 clusters, or the model has no linear layer besides its output layer.

    Example:
        >>> rise = quantization_rise(model, batches, bits=3)
        >>> rise.unit, rise.details["rounded_fraction"] > 0.1
        ('nats per predicted token', True)
    """
    begun = time.perf_counter()
    layers = rounded_layers(model)
    if not layers:
        raise IsolossError(f"{type(unwrapped(model)).__name__} has no linear layer besides its output layer to round")
    loss = MeanLoss(model, batches, causal=causal, num_sequences=num_sequences)
    positions, before = loss.positions(), loss.by_cluster()
    # by identity: layers may share a weight, which is rounded once
    weights = {id(module.weight): (name, module) for name, module in layers.items()}
    with weights_restored({name: module.weight for name, module in weights.values()}), torch.no_grad():
        for _, module in weights.values():
            flip = isinstance(module, Conv1D)  # GPT-2's layers have their weights as (inputs, outputs)
            weight = module.weight.T if flip else module.weight
            rounded = rounded_weight(weight, bits=bits, group_size=group_size)
            module.weight.copy_(rounded.T if flip else rounded)
        after = loss.by_cluster()
    seen = positions > 0
    groups = "per channel" if group_size is None else f"per group of {group_size}"
    rise = ratio_estimate(
        (after - before)[seen], positions[seen], unit=UNIT, method=f"rise under weights of {bits} bits, {groups}"
    )
    rounded_fraction = sum(module.weight.numel() for _, module in weights.values()) / loss.num_parameters
    details = {**loss.details(0), "rounded_fraction": rounded_fraction, "error_covers": "inputs and labels"}
    return dataclasses.replace(
        rise, num_predictions=loss.num_positions, details=details, seconds=time.perf_counter() - begun
    )
