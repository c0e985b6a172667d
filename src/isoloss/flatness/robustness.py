"""How far the loss rises when the weights are rounded to a few bits, or when noise is added to them.

A trace is the curvature of the loss at the weights. A rise is the change of the loss at a distance that matters in
practice.

Shapes: N clusters of sequences; a weight matrix is (outputs, inputs).
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import UNIT
from isoloss.flatness._parameters import counted_parameters
from isoloss.flatness.sharpness import gaussian_noise, weights_restored
from isoloss.model_checks import unwrapped
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate

Weights = Mapping[nn.Parameter, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Weights of linear layers rounded to the nearest of `2^bits - 1` values, without calibration.

    Embeddings stay as they are, and so do the output layer and layers that share a weight with an embedding: the common
    low-bit formats leave them too. The output layer is the one that `model.get_output_embeddings()` returns. A module
    without this method has its output layer rounded, unless the layer shares its weight with an embedding.

    Attributes:
        bits: Bits per weight, from 2 to 8.
        group_size: How many neighboring weights of an output share a scale; None: all weights of the output.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no weight can be rounded to."""
        if not 2 <= self.bits <= 8:
            raise IsolossError(f"bits is {self.bits}; weights are rounded to between 2 and 8 bits")
        if self.group_size is not None and self.group_size < 1:
            raise IsolossError(f"group_size is {self.group_size}; a group has at least one weight")

    def __str__(self) -> str:
        groups = "per channel" if self.group_size is None else f"per group of {self.group_size}"
        return f"weights of {self.bits} bits, {groups}"

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a matrix (outputs, inputs) rounded.

        The values of a group are `s k`: k is an integer from `-(2^(bits - 1) - 1)` to `2^(bits - 1) - 1`, and the scale
        is `s = max |w| / (2^(bits - 1) - 1)`, so that the largest weight is kept. The last group of a row may be
        smaller. Halves go to the even k.

        Example:
            >>> Rounding(bits=4).round(torch.tensor([[-7.0, 3.4, 0.2], [0.07, 0.0, 0.004]]))
            tensor([[-7.0000,  3.0000,  0.0000],
                    [ 0.0700,  0.0000,  0.0000]])
        """
        outputs, inputs = weight.shape
        size = self.group_size or inputs
        largest = 2 ** (self.bits - 1) - 1
        # in float32 at least: a scale in bfloat16 would move the values themselves
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        groups = F.pad(wide, (0, -inputs % size)).view(outputs, -1, size)
        scales = groups.abs().amax(dim=2, keepdim=True) / largest
        scales[scales == 0] = 1  # of zeros alone
        rounded: torch.Tensor = (groups / scales).round() * scales
        return rounded.view(outputs, -1)[:, :inputs].to(weight.dtype)

    def weights(self, model: nn.Module) -> Iterator[Weights]:
        """Yield the rounded weights of a model, once."""
        layers = rounded_layers(model)
        if not layers:
            raise IsolossError(
                f"{type(unwrapped(model)).__name__} has no linear layer to round besides its output layer"
            )
        rounded: dict[nn.Parameter, torch.Tensor] = {}
        for layer in layers.values():
            weight: Any = layer.weight
            is_turned = isinstance(layer, Conv1D)  # GPT-2's weights are (inputs, outputs)
            values = self.round(weight.detach().T if is_turned else weight.detach())
            rounded[weight] = values.T if is_turned else values
        yield rounded


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Gaussian noise on all weights, relative to the root mean square of each tensor, in pairs of opposite sign.

    The draws depend only on the seed and the parameter's name, so all models of one architecture get the same noise in
    proportion to their weights.

    Attributes:
        relative_std: Standard deviation of the noise, divided by the root mean square of the tensor.
        pairs: Number of draws. Each is added and subtracted, so that the gradient cancels.
        seed: Decides the draws.
    """

    relative_std: float
    pairs: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse noise without a size."""
        if not (self.relative_std > 0 and math.isfinite(self.relative_std)):
            raise IsolossError(f"relative_std is {self.relative_std}; it must be more than 0 and finite")
        if self.pairs < 1:
            raise IsolossError(f"pairs is {self.pairs}; it must be at least 1")

    def __str__(self) -> str:
        return f"noise of {self.relative_std:.0%} of each tensor's root mean square, {self.pairs} pairs of draws"

    def weights(self, model: nn.Module) -> Iterator[Weights]:
        """Yield the weights with each draw added, and with it subtracted."""
        parameters = counted_parameters(model, None)
        originals = [parameter.detach().clone() for parameter in parameters.values()]
        for pair in range(self.pairs):
            noise = gaussian_noise(parameters, originals, self.relative_std, self.seed, pair)
            for sign in (1, -1):
                moved = (original + sign * part for original, part in zip(originals, noise, strict=True))
                yield dict(zip(parameters.values(), moved, strict=True))


Change = Rounding | Noise

# what `isoloss.compare` measures of every model, by the name of the estimate
ROBUSTNESS: Mapping[str, Change] = {
    "int8_rise": Rounding(bits=8),
    "int4_rise": Rounding(bits=4, group_size=128),
    **{f"noise_{percent}%_rise": Noise(relative_std=percent / 100) for percent in (2, 5, 10)},
}


def rounded_layers(model: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """Return the linear layers that `Rounding` rounds: all but the output layer and those that share a weight."""
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
    # a module that does not name its output layer: it is a linear one with an output for each token
    sizes = {module.num_embeddings for module in plain.modules() if isinstance(module, nn.Embedding)}
    if output is None:
        kept |= {id(m.weight) for m in plain.modules() if isinstance(m, nn.Linear) and m.out_features in sizes}
    return {
        name: module
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module.weight) not in kept
    }


def loss_rises(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    changes: Mapping[str, Change] = ROBUSTNESS,
    *,
    causal: bool | None = None,
    num_sequences: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Measure how far the mean loss per predicted token rises under each of several changes of the weights.

    The loss is measured before and after on the same inputs, so the error is the error of a paired difference, which is
    small. A rise can be negative. The error covers inputs and labels, but not the draws of noise, which are the same
    for every model.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are changed, and set back bit for bit.
        batches: As for `fisher_trace`, but the values of the labels count. All batches are kept in memory.
        changes: `Rounding` and `Noise`, by the name of the estimate. Default: 8 bits per channel, 4 bits per group of
            128 weights, and noise of 2, 5 and 10 % of each tensor's root mean square.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: Stop after this many sequences; None: at the end of the batches.
        progress: Called with the number of passes over the inputs done.

    Returns:
        The rise of the loss under each change, in nats per predicted token.

    Raises:
        IsolossError: A batch does not fit, fewer than 2 inputs are independent, a loss is not finite, or weights are to
            be rounded and the model has no linear layer besides its output layer.

    Example:
        >>> rises = loss_rises(model, batches, {"int3": Rounding(bits=3), "noise": Noise(relative_std=0.1)})
        >>> [(name, rise.unit, rise.stderr > 0) for name, rise in rises.items()]
        [('int3', 'nats per predicted token', True), ('noise', 'nats per predicted token', True)]
    """
    loss = MeanLoss(model, batches, causal=causal, num_sequences=num_sequences)
    positions = loss.positions()
    if len(positions) < 2:
        raise IsolossError("an error bar needs at least 2 independent sequences or documents")
    before = loss.by_cluster()
    rises: dict[str, Estimate] = {}
    taken = 1
    for name, change in changes.items():
        sums = torch.zeros_like(before)
        number = 0
        for weights in change.weights(model):
            with weights_restored(weights):
                with torch.no_grad():
                    for parameter, value in weights.items():
                        parameter.copy_(value)
                sums += loss.by_cluster() - before
            number, taken = number + 1, taken + 1
            if progress is not None:
                progress(taken)
        if not bool(sums.isfinite().all()):
            raise IsolossError(f"the loss with {change} is not finite; use a wider dtype")
        about = {**loss.details(getattr(change, "seed", 0)), **asdict(change), "clusters": loss.clusters_name}
        rise = ratio_estimate(sums / number, positions, unit=UNIT, method=f"rise of the loss with {change}")
        rises[name] = replace(rise, details={**about, "error_covers": "inputs and labels"})
    return rises
