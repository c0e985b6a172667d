"""Learning and forgetting: how a short fine-tuning on a new text changes the loss on the new text and on the old one.

The example measures the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from isoloss.errors import IsolossError, warn
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import UNIT
from isoloss.flatness.sharpness import refuse_half_precision, weights_restored
from isoloss.statistics.comparison import independent_difference, times
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate

LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
_MORE_RATES = 2  # between those given, near the common gain


def forgetting_frontier(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    new: Iterable[Mapping[str, Any]],
    *,
    gain: float = 0.1,
    learning_rates: Sequence[float] = LEARNING_RATES,
    num_steps: int = 32,
    optimizer: Literal["adamw", "sgd"] = "adamw",
    causal: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Fine-tune on a new text at several learning rates; measure the gain on it and the forgetting on the old text.

    Training takes the first half of the new batches in order, one batch per step, and starts over after the last. The
    gain is the fall of the loss per predicted token on the rest of the new text; the forgetting is the rise of the loss
    on the old text. Every learning rate starts at the given weights and sees the same batches in the same order. The
    rate is constant, and there is no weight decay. Over the rates, gain and forgetting trace a frontier: a model that
    learns more for the same forgetting has a lower one (Biderman et al. 2024, "LoRA learns less and forgets less",
    arXiv:2405.09673, figure 4).

    To compare models, `frontier` is the forgetting at one gain, the same for all. It lies between the smallest rate
    that reaches the gain and the next smaller one (or no training). Two more rates close in on the gain, and the
    frontier is interpolated linearly between the nearest two. With f the forgetting and b the gain at the interpolated
    point, and s the slope of the line, the error is the error of f - s b over documents of both texts, each paired
    before and after, given the half that is trained on. It includes the interpolation error: the last change in
    closing in.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are trained, and set back bit for bit.
        batches: As for `fisher_trace`, the old text; the labels' values count. All are kept in memory.
        new: At least 2 batches of the new text. Documents that begin in the first half, and the first one that begins
            after it, do not count for the gain, so the gain is measured only on text that was not trained on.
        gain: The gain at which `frontier` is given, in nats per predicted token.
        learning_rates: In ascending order. A rate at which the training diverges is left out, with those above it.
        num_steps: Steps of training.
        optimizer: torch's AdamW (betas 0.9 and 0.999) or SGD, without weight decay.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        progress: Called with the number of trainings done.

    Returns:
        `frontier` and, for each rate such as 0.0001, `gain-0.0001` and `forgetting-0.0001`, in nats per predicted
        token. If no rate reaches the gain, there is a warning and no `frontier`.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, fewer than 2 documents of a text are left
            to measure on, the smallest rate diverges, or the weights are in half precision.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import forgetting_frontier
        >>> model, batches = tiny_bert()
        >>> found = forgetting_frontier(model, batches[:2], batches[2:], gain=0.01, learning_rates=(1e-3, 1e-2))
        >>> [*found]
        ['frontier', 'gain-0.001', 'forgetting-0.001', 'gain-0.01', 'forgetting-0.01']
    """
    rates = [*learning_rates]
    if not rates or rates != sorted(rates) or not 0 < rates[0] <= rates[-1] < float("inf"):
        raise IsolossError(f"learning_rates is {tuple(rates)}; name rates above 0, in ascending order")
    if not 0 < gain < float("inf"):
        raise IsolossError(f"gain is {gain}; it must be more than 0 and finite")
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    if optimizer not in _OPTIMIZERS:
        raise IsolossError(f"optimizer is {optimizer!r}; it is one of {', '.join(_OPTIMIZERS)}")
    old = MeanLoss(model, batches, causal=causal)
    refuse_half_precision(old)
    training = _Training(old, MeanLoss(model, new, causal=old.causal), num_steps, optimizer)
    points = [training.start]
    for rate in rates:
        if (point := training.at(rate)) is None:
            if len(points) == 1:
                raise IsolossError(f"fine-tuning diverges at the smallest learning rate, {rate:g}: choose smaller ones")
            warn(f"fine-tuning diverges at the learning rate {rate:g}: it is left out, with those above it")
            break
        points.append(point)
        if progress is not None:
            progress(len(points) - 1)
    found = {}
    for point in points[1:]:
        found[f"gain-{point.rate:g}"], found[f"forgetting-{point.rate:g}"] = training.estimates(point)
    gains = [training.estimates(point)[0].value for point in points[1:]]
    if (reached := next((number for number, value in enumerate(gains) if value >= gain), None)) is None:
        warn(
            f"no learning rate reaches a gain of {gain:g} nats: the largest gain is {max(gains):.3g} nats, at the "
            f"learning rate {rates[gains.index(max(gains))]:g}; choose a smaller gain, more steps or other rates"
        )
        return found
    return {"frontier": training.closing_in(points[reached], points[reached + 1], gain), **found}


class _Point(NamedTuple):
    """The effect of a learning rate, summed over the predicted positions of each cluster."""

    rate: float
    learned: torch.Tensor  # (M,) float64, by how much the loss on the new text fell
    forgotten: torch.Tensor  # (N,) float64, by how much the loss on the old text rose


class _Training:
    """Fine-tunes from the same weights on the same batches of the new text at any learning rate."""

    def __init__(self, old: MeanLoss, new: MeanLoss, num_steps: int, optimizer: str) -> None:
        self._old, self._new, self._num_steps, self._optimizer = old, new, num_steps, optimizer
        half = len(new.batches) // 2
        self._batches = [batch.checked for batch in new.batches[:half] if batch.checked.predicts]
        first = sum(len(batch.clusters) for batch in new.batches[:half])
        # packed sequences may run into the next document
        self._held_out = ~torch.isin(new.clusters, new.clusters[: first + 1])
        kept = torch.unique(new.clusters[self._held_out])
        if not self._batches or len(kept) < 2:
            raise IsolossError(
                f"the new text has {new.num_sequences} sequences of {int(new.clusters.max()) + 1} {new.clusters_name} "
                f"in {len(new.batches)} batches; it needs 2 batches, and 2 documents that are not trained on"
            )
        self._kept = kept
        self._old_positions, self._new_positions = old.positions(), new.positions()[kept]
        self._before = new.by_cluster()[kept], old.by_cluster()
        self.start = _Point(0.0, *(torch.zeros_like(each) for each in self._before))

    def at(self, rate: float) -> _Point | None:
        """Return the point of a learning rate; None where the training diverges."""
        parameters = [*self._old.parameters.values()]
        gradients = [parameter.grad for parameter in parameters]
        optimizer = _OPTIMIZERS[self._optimizer](parameters, lr=rate)
        with weights_restored(parameters):
            try:
                with self._old.training() as of_batch:
                    for step in range(self._num_steps):
                        batch = self._batches[step % len(self._batches)]
                        for parameter, gradient in zip(parameters, of_batch(batch)[1], strict=True):
                            parameter.grad = gradient
                        optimizer.step()
            finally:
                for parameter, former in zip(parameters, gradients, strict=True):
                    parameter.grad = former
            new = self._new.by_cluster(self._held_out)[self._kept]
            # all of them: a model that diverged has no finite logits, which `by_cluster` refuses elsewhere
            old = self._old.by_cluster(torch.ones_like(self._old.clusters, dtype=torch.bool))
        point = _Point(rate, self._before[0] - new, old - self._before[1])
        return point if all(bool(part.isfinite().all()) for part in point[1:]) else None

    def estimates(self, point: _Point) -> tuple[Estimate, Estimate]:
        """Return gain and forgetting at a point."""
        how = f"{self._num_steps} steps of {self._optimizer} at the learning rate {point.rate:g}"
        about = {"learning_rate": point.rate, "error_covers": "inputs and labels"}
        gain = ratio_estimate(point.learned, self._new_positions, unit=UNIT, method=f"gain after {how}")
        forgetting = ratio_estimate(point.forgotten, self._old_positions, unit=UNIT, method=f"forgetting after {how}")
        return (
            replace(gain, details={**self._new.details(0), "clusters": self._new.clusters_name, **about}),
            replace(forgetting, details={**self._old.details(0), "clusters": self._old.clusters_name, **about}),
        )

    def closing_in(self, low: _Point, high: _Point, gain: float) -> Estimate:
        """Return the forgetting at a gain between those of two points, closing in on it by more rates."""
        found, between = self._interpolated(low, high, gain)
        error = 0.0
        for _ in range(_MORE_RATES):
            if (point := self.at(between.rate)) is None:
                break
            low, high = (low, point) if self.estimates(point)[0].value >= gain else (point, high)
            before, (found, between) = found, self._interpolated(low, high, gain)
            error = abs(found.value - before.value)
        more = {"gain": gain, "learning_rate": between.rate, "interpolation_error": error}
        return replace(found, stderr=math.hypot(found.stderr, error), details={**found.details, **more})

    def _interpolated(self, low: _Point, high: _Point, gain: float) -> tuple[Estimate, _Point]:
        """Return the forgetting at a gain on the line between two points, and that point of the line."""
        gains, forgettings = zip(*(self.estimates(point) for point in (low, high)), strict=True)
        run = gains[1].value - gains[0].value
        fraction = (gain - gains[0].value) / run
        # rates are factors apart, but for no training at all
        rate = low.rate * (high.rate / low.rate) ** fraction if low.rate else high.rate * fraction
        point = _Point(rate, *(torch.lerp(start, end, fraction) for start, end in zip(low[1:], high[1:], strict=True)))
        learned, forgotten = self.estimates(point)
        slope = (forgettings[1].value - forgettings[0].value) / run
        # the gain of the point is the one that was asked for, but for its error
        found = independent_difference(forgotten, times(replace(learned, value=0.0), slope))
        method = f"forgetting at a gain of {gain:g}, {self._num_steps} steps of {self._optimizer}"
        return replace(found, method=method, details=forgotten.details), point


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.0),
    "sgd": torch.optim.SGD,
}
