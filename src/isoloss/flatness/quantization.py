"""How far the loss rises when weights are rounded to a few bits: a step of known size, unlike one of a trace's.

Shapes: N clusters of sequences; a weight matrix is (outputs, inputs).
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch
from isoloss.flatness._curvature import losses
from isoloss.flatness._measurement import BatchSums, Estimator, Options, measure, takes_options
from isoloss.model_checks import unwrapped
from isoloss.statistics.estimate import Estimate


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
    rounded: torch.Tensor = (groups / scales).round() * scales
    return rounded.view(outputs, -1)[:, :inputs].to(weight.dtype)


def rounded_layers(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
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


@takes_options
def quantization_rise(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    bits: int = 8,
    group_size: int | None = None,
    **options: Unpack[Options],
) -> Estimate:
    """Measure how far the mean loss per predicted token rises when the weights of linear layers have a few bits.

    Weights are rounded to the nearest value (`rounded_weight`), without calibration, and computed with in the dtype of
    the model: this is the error of the weights alone. The rise is paired by input, so that its error is small; it can
    be below 0. With fewer bits it measures flatness along one direction, at a distance that practice asks for.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are exchanged, and put back as they were.
        batches: As for `fisher_trace`; the labels' values count.
        bits: Of a weight, from 2 to 8.
        group_size: Weights that share a scale, along the inputs of an output; None: all of them.
        options: As follows; `parameters` are those that are rounded, as far as they are weights of linear layers.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, a logit is not finite, or the model has no
            linear layer besides its output layer.
        InterruptedEstimate: Ctrl-C; it carries the estimate so far.

    Example:
        >>> rise = quantization_rise(model, batches, bits=3)
        >>> rise.unit, rise.details["rounded_fraction"] > 0.1
        ('nats per predicted token', True)
    """
    return measure(_Rounded, model, batches, options, bits=bits, group_size=group_size)


class _Rounded(Estimator):
    """The rise of each sequence's loss."""

    by_parameter = False

    def __init__(self, model: nn.Module, bits: int, group_size: int | None, **options: Any) -> None:
        super().__init__(model, **options)
        groups = "per channel" if group_size is None else f"per group of {group_size}"
        self.method = f"rise under weights of {bits} bits, {groups}"
        self._settings = {"bits": bits, "group_size": group_size}
        chosen = {id(parameter) for parameter in self.parameters.values()}
        # by identity: layers may share a weight
        layers = {id(layer.weight): layer for layer in rounded_layers(model).values() if id(layer.weight) in chosen}
        if not layers:
            raise IsolossError(
                f"{type(unwrapped(model)).__name__} has no linear layer to round besides its output layer"
            )
        self._weights: list[nn.Parameter] = []
        self._others: list[torch.Tensor] = []  # in the places of the weights while `_exchange` has been called once
        for layer in layers.values():
            assert isinstance(layer.weight, nn.Parameter)
            weight = layer.weight.detach()
            turned = weight.T if isinstance(layer, Conv1D) else weight  # GPT-2's are (inputs, outputs)
            rounded = rounded_weight(turned, bits=bits, group_size=group_size)
            self._weights.append(layer.weight)
            self._others.append(rounded.T.contiguous() if turned is not weight else rounded)

    def _exchange(self) -> None:
        for place, weight in enumerate(self._weights):
            weight.data, self._others[place] = self._others[place], weight.data

    @torch.no_grad()
    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch: a row for each sequence."""
        checked = batch.checked
        positions = checked.predicted.sum(dim=1).double().cpu()
        rise = torch.zeros(len(positions), dtype=torch.float64)
        if checked.predicts:
            before = losses(self.model, checked)
            self._exchange()
            try:
                change = losses(self.model, checked).double() - before.double()
            finally:
                self._exchange()
            rise.index_add_(0, checked.predicted.nonzero()[:, 0].cpu(), change.cpu())
        return BatchSums(rise[:, None], positions, torch.zeros(len(positions), 0))

    def identity(self) -> dict[str, Any]:
        return self._settings

    def details(self) -> dict[str, Any]:
        number = sum(parameter.numel() for parameter in self.parameters.values())
        rounded = sum(weight.numel() for weight in self._weights)
        return {**self._settings, "rounded_fraction": rounded / number, "error_covers": "inputs and labels"}
