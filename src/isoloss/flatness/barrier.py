"""How high the loss rises on the straight line between two models: whether they lie in one basin.

The example measures the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import UNIT
from isoloss.flatness.sharpness import weights_restored
from isoloss.same_function import check_one_function, function_of_model
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate

FRACTIONS = tuple(tenth / 10 for tenth in range(1, 10))


def interpolation_barrier(
    model: nn.Module,
    other: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    fractions: Sequence[float] = FRACTIONS,
    causal: bool | None = None,
    num_sequences: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Measure how far the loss between two models with the same architecture rises above the line between their losses.

    With L(a) the mean loss per predicted token at the weights (1 - a) theta_0 + a theta_1, the barrier is the largest
    L(a) - (1 - a) L(0) - a L(1) over the fractions a (Frankle et al. 2020, arXiv:1912.05671). All losses are of the
    same inputs, so the error is that of a paired difference. The largest of several values is a little too high on
    average, by about its error where they are close.

    Args:
        model: As for `fisher_trace`, with any attention: theta_0. Its weights are changed, and restored bit for bit.
        other: A model that computes the same function of its weights: theta_1. Configs must agree, except for fields
            on training and generation; in your own module, each part must agree in class and settings.
        batches: As for `fisher_trace`, but the labels' values matter. All batches are kept in memory.
        fractions: Between 0 and 1. Default: 0.1, 0.2, ..., 0.9.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: Stop after this many sequences; None: at the end of the batches.
        progress: Called with the number of passes over the inputs done, of `len(fractions)` + 2.

    Returns:
        The barrier in nats per predicted token. Its details have the `fraction` where it is, and value and standard
        error at each fraction, `heights`.

    Raises:
        IsolossError: The models differ in more than weights, such as their activations or the buffers of batch
            normalization; a fraction is not between 0
            and 1, a batch does not fit, fewer than 2 inputs are independent, or a loss is not finite.

    Example:
        >>> import copy
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import interpolation_barrier
        >>> model, batches = tiny_bert()
        >>> barrier = interpolation_barrier(model, copy.deepcopy(model), batches)
        >>> barrier.value, barrier.unit
        (0.0, 'nats per predicted token')
    """
    if not fractions or not all(0 < fraction < 1 for fraction in fractions):
        raise IsolossError(
            f"fractions is {tuple(fractions)}; each must be between 0 and 1, and there must be at least one"
        )
    start, end = dict(model.named_parameters()), dict(other.named_parameters())
    if alone := start.keys() ^ end.keys():
        raise IsolossError(f"the models do not have the same architecture: only one of them has {min(alone)}")
    for name, parameter in start.items():
        if parameter.shape != end[name].shape:
            shapes = f"{tuple(parameter.shape)} and {tuple(end[name].shape)}"
            raise IsolossError(f"the models differ in size: {name} has the shapes {shapes}")
    check_one_function("the model", function_of_model(model), "the other", function_of_model(other))
    buffers = dict(other.named_buffers())
    for name, buffer in model.named_buffers():
        end_buffer = buffers.get(name)
        # in the coarser of two dtypes
        if (
            end_buffer is not None
            and buffer.is_floating_point()
            and not torch.equal(buffer, end_buffer.to(buffer))
            and not torch.equal(buffer.to(end_buffer), end_buffer)
        ):
            raise IsolossError(
                f"the buffer {name} differs between the models, and only weights are moved from one to the other"
            )
    loss = MeanLoss(model, batches, causal=causal, num_sequences=num_sequences)
    positions = loss.positions()
    before = loss.by_cluster()
    rises: dict[float, torch.Tensor] = {}
    with weights_restored(start.values()) as originals, torch.no_grad():
        for number, fraction in enumerate((*fractions, 1.0), 2):
            for (name, parameter), original in zip(start.items(), originals, strict=True):
                parameter.copy_(torch.lerp(original.double(), end[name].to(original.device).double(), fraction))
            rises[fraction] = loss.by_cluster() - before
            if progress is not None:
                progress(number)
    heights = {
        fraction: ratio_estimate(
            rises[fraction] - fraction * rises[1.0], positions, unit=UNIT, method="barrier on the line between models"
        )
        for fraction in fractions
    }
    if not all(bool(rise.isfinite().all()) for rise in rises.values()):
        raise IsolossError("a loss between the models is not finite; use a wider dtype")
    fraction, highest = max(heights.items(), key=lambda item: item[1].value)
    found = {str(at): [height.value, height.stderr] for at, height in heights.items()}
    about = {**loss.details(0), "clusters": loss.clusters_name, "error_covers": "inputs and labels"}
    return replace(highest, details={**about, "fraction": fraction, "heights": found})
