"""How far the loss rises when the weights are rounded to a few bits, or when noise is added to them.

A trace is the curvature of the loss at the weights. A rise is the change of the loss at a distance that matters in
practice.

Shapes: n sequences in N clusters; a weight matrix is (outputs, inputs).
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._linear_maps import LinearMaps, is_matrix, unrounded_weights
from isoloss.flatness._measurement import UNIT
from isoloss.flatness.formats import FORMATS, Rounding
from isoloss.flatness.sharpness import gaussian_noise, weights_restored
from isoloss.model_checks import unwrapped
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import estimate_in_blocks

# of the sequences. With two draws each, draws are less than half of the squared error even of the difference of two
# GPT-2s of width 32 from two initializations, and the fewer passes, the less of a small model's time is overhead
_PARTS = 20


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Gaussian noise on all weights, relative to the root mean square of each tensor, in pairs of opposite sign.

    The cost of a draw is that of the sequences that are measured with it, and a rise varies more from draw to draw than
    from sequence to sequence. So the sequences are split into about 20 parts, each with its own draws. This takes as
    many passes over the inputs as the same draws for all sequences, and has about 20 times as many draws.

    The draws depend only on the seed, the part and the parameter's name, so all models of one architecture get the same
    noise in proportion to their weights. Another device has other draws.

    Attributes:
        relative_std: Standard deviation of the noise, divided by the root mean square of the tensor.
        pairs: Number of draws for each sequence. Each is added and subtracted, so that the gradient cancels.
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
        return f"noise of {self.relative_std:.0%} of each tensor's root mean square, added and subtracted"


Change = Rounding | Noise

# what `isoloss.compare` measures of every model, by the name of the estimate
ROBUSTNESS: Mapping[str, Change] = {
    **{f"{name}-rise": FORMATS[name] for name in ("int8", "int4")},
    # a rise under less noise is smaller by the square of the ratio, to the error of either
    "noise-rise": Noise(relative_std=0.1),
}


def rounded_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose `weight` is a matrix that `Rounding` rounds if a forward pass shows nothing else.

    It is (outputs, inputs), or (inputs, outputs) of a `Conv1D`. Left out are embeddings, routers, the output
    layer that the model names, and layers that share a weight with one of these.
    """
    plain = unwrapped(model)
    kept = unrounded_weights(plain)
    weights = {name: getattr(module, "weight", None) for name, module in plain.named_modules()}
    return {
        name: plain.get_submodule(name)
        for name, weight in weights.items()
        if isinstance(weight, nn.Parameter) and is_matrix(weight) and weight.ndim == 2 and id(weight) not in kept
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
    small. A rise can be negative. The error covers inputs, labels and the draws of noise.

    Noise and inputs are both samples. Groups share neither inputs nor draws, so each group is a replication of the
    whole measurement. The error over groups covers inputs, draws and their interaction, for a rise and for the
    difference of two models alike (the random group method: Wolter 2007, Introduction to Variance Estimation, chapter
    2). With c, d and e for the variances of a rise between clusters, between draws, and of the rest, the value has the
    variance c / N + d / draws + e / (N pairs) over N clusters.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are changed, and set back bit for bit.
        batches: As for `fisher_trace`, but the values of the labels count. All batches are kept in memory.
        changes: `Rounding` and `Noise`, by the name of the estimate. Default: 8 bits per channel, 4 bits per group of
            128 weights, and noise of 10 % of each tensor's root mean square.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        num_sequences: Stop after this many sequences; None: at the end of the batches.
        progress: Called with the number of passes over the inputs done.

    Returns:
        The rise of the loss under each change, in nats per predicted token, and, for a rounding called
        `NAME` or `NAME-rise`, the loss with rounded weights, `NAME-loss`. `details` have the `rounded_weights` and
        how many `map_weights` there are besides embeddings and the output layer, or the number of `draws`.

    Raises:
        IsolossError: A batch does not fit, fewer than 2 inputs are independent, a loss is not finite, or weights are to
            be rounded and the model has no linear map besides its output layer.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import Noise, Rounding, loss_rises
        >>> model, batches = tiny_bert()
        >>> rises = loss_rises(model, batches, {"int3": Rounding(bits=3), "noise": Noise(relative_std=0.1)})
        >>> [(name, rise.stderr > 0) for name, rise in rises.items()]
        [('int3', True), ('int3-loss', True), ('noise', True)]
        >>> rises["noise"].details["draws"]
        40
    """
    loss = MeanLoss(model, batches, causal=causal, num_sequences=num_sequences)
    positions = loss.positions()
    positions_by_part = loss.positions(numbers=loss.parts)
    with LinearMaps(model) as watched:
        before_by_part = loss.by_cluster(numbers=loss.parts)
    before = before_by_part
    if loss.blocks is not None:
        before = torch.zeros_like(positions).index_add_(0, loss.blocks, before_by_part)
    rises: dict[str, Estimate] = {}
    passes = 1
    for name, change in changes.items():
        about = {**loss.details(getattr(change, "seed", 0)), **asdict(change)}
        if isinstance(change, Rounding):
            maps, number = watched.found(rounded_layers(model).values())
            if not maps:
                raise IsolossError(
                    f"{type(unwrapped(model)).__name__} has no linear layer to round besides its output layer"
                )
            about |= {"rounded_weights": sum(weight.numel() for weight in maps), "map_weights": number}
            about |= {"clusters": loss.clusters_name, "error_covers": "inputs and labels"}
            after, repeats = _rounded_losses(loss, change.weights(maps)), 1
            sums, sizes, blocks = after - before_by_part, positions_by_part, loss.blocks
        else:
            groups, parts = _groups_and_parts(loss.clusters)
            after, repeats = _noisy_losses(loss, change, parts), 2 * change.pairs
            together = "groups of " * (int(groups.max()) + 1 < len(positions))
            about |= {"draws": (int(parts.max()) + 1) * change.pairs, "clusters": together + loss.clusters_name}
            about |= {"error_covers": "inputs, labels and draws"}
            sums, sizes = (
                positions.new_zeros(int(groups.max()) + 1).index_add_(0, groups, values)
                for values in (after / repeats - before, positions)
            )
            blocks = None
        passes += repeats
        if progress is not None:
            progress(passes)
        if not bool(after.isfinite().all()):
            raise IsolossError(f"the loss with {change} is not finite; use a wider dtype")
        rise = estimate_in_blocks(sums, sizes, blocks, unit=UNIT, method=f"rise of the loss with {change}")
        rises[name] = replace(rise, details=about)
        if isinstance(change, Rounding):
            level = estimate_in_blocks(after, sizes, blocks, unit=UNIT, method=f"loss with {change}")
            rises[f"{name.removesuffix('-rise')}-loss"] = replace(level, details=about)
    return rises


@torch.no_grad()
def _rounded_losses(loss: MeanLoss, weights: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """Return (N,): the losses of each cluster, or part of a block, with other weights, which are set back."""
    with weights_restored(weights):
        for parameter, value in weights.items():
            parameter.copy_(value)
        return loss.by_cluster(torch.ones_like(loss.clusters, dtype=torch.bool), numbers=loss.parts)


@torch.no_grad()
def _noisy_losses(loss: MeanLoss, change: Noise, parts: torch.Tensor) -> torch.Tensor:
    """Return (N,): the losses of each cluster under noise, summed over the draws of its parts and both signs."""
    sums = torch.zeros_like(loss.positions())
    with weights_restored(loss.parameters.values()) as originals:
        for part, draw in itertools.product(range(int(parts.max()) + 1), range(change.pairs)):
            number = part * change.pairs + draw
            noise = gaussian_noise(loss.parameters, originals, change.relative_std, change.seed, number, on_device=True)
            for sign in (1, -1):
                for parameter, original, moved in zip(loss.parameters.values(), originals, noise, strict=True):
                    torch.add(original, moved, alpha=sign, out=parameter)  # without a copy of a large model
                sums += loss.by_cluster(parts == part)
    return sums


def _groups_and_parts(clusters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (N,) the group of each cluster, and (n,) the part of each sequence, which lies within one group.

    There are up to 20 groups of consecutive clusters. Where they are fewer, or one is large, a group may have several
    parts.
    """
    number = int(clusters.max()) + 1
    groups = torch.arange(number) * min(_PARTS, number) // number
    group = groups[clusters]
    sizes = group.bincount()
    shares = (sizes * _PARTS / len(group)).round().long().clamp(min=1).minimum(sizes)
    within = group.argsort(stable=True).argsort() - (sizes.cumsum(0) - sizes)[group]
    return groups, (shares.cumsum(0) - shares)[group] + within * shares[group] // sizes[group]
