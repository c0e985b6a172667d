"""How far the loss rises around the weights: in the worst direction (SAM, ASAM), and on average under noise.

Shapes: n clusters of sequences, R pairs of noise, P parameters counted one by one.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._measurement import (
    UNIT,
    BatchSums,
    Estimator,
    MeasureOptions,
    StopCriteria,
    StopRule,
    interruptible,
    measure,
)
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import crossed_ratio

_PROBES = 16


def sam_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    rho: float = 0.05,
    num_steps: int = 1,
    adaptive: bool = False,
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Measure how far a batch's mean loss L rises within a ball of radius rho around the weights w.

    With one step it is `L(w + rho g / |g|) - L(w)` for the gradient g at w, to first order the maximum over the ball
    (Foret et al. 2021, equation 2). Further steps have length rho / 2 along the gradient where they start, and go back
    to the ball where they leave it; the greatest loss that was met counts, a lower bound of the maximum.

    With `adaptive`, each weight's move is measured in units of the weight: with `T = diag(|w|)` the ball is
    `|T^-1 e| <= rho`, and one step gives `L(w + rho T^2 g / |T g|) - L(w)` (Kwon et al. 2021, "ASAM"). Multiplying some
    weights and dividing others, where that leaves the function as it is, then leaves the value as it is. A weight of 0
    does not move. ASAM's code adds 0.01 to the sizes of weights and leaves biases in their own unit; neither is done
    here, as neither is invariant.

    The value depends on the size of the batches, as each batch is given its own worst direction (m-sharpness): compare
    models at the same size. It is the mean over batches. The rise is no linear function of a batch's sequences, so the
    samples are the batches: the error is s / sqrt(n) for n of them, which are taken as independent, and each batch has
    an influence.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`, at least 2; the labels' values count.
        rho: Radius, in the Euclidean norm over all parameters. With `adaptive` it is a number without unit, in ASAM's
            code 0.5.
        num_steps: Steps of ascent.
        adaptive: See above.
        options: See `MeasureOptions`; `parameters` are those that move. A sample is a batch: `rtol` and `seconds` end
            it after 64 of these at the earliest.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, the gradient is zero, or a loss or
            gradient is not finite.
        InterruptedEstimate: Ctrl-C after at least two batches; it carries the estimate so far.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import sam_sharpness
        >>> model, batches = tiny_bert()
        >>> sam_sharpness(model, batches).value > 0
        True
    """
    _check_size("rho", rho)
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    return measure(_Sam, model, batches, options, rho=rho, num_steps=num_steps, adaptive=adaptive)


class _Sam(Estimator):
    """The rise of each batch's loss."""

    by_parameter = False
    by_batch = True

    def __init__(self, model: nn.Module, rho: float, num_steps: int, adaptive: bool, **options: Any) -> None:
        super().__init__(model, **options)
        kind = "adaptive sharpness" if adaptive else "SAM sharpness"
        self.method = f"{kind}, {num_steps} ascent step{'s' * (num_steps > 1)}"
        self._rho, self._num_steps, self._adaptive = rho, num_steps, adaptive

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch that predicts something: one row."""
        loss = MeanLoss(self.model, [batch], causal=self.causal, parameters=self.parameters)
        for name, choose in (("smallest batch", min), ("largest batch", max)):
            self.choices[name] = choose(self.choices.get(name, loss.num_sequences), loss.num_sequences)
        rise = _rise(loss, self._rho, self._num_steps, adaptive=self._adaptive)
        return BatchSums(torch.tensor([[rise]], dtype=torch.float64), torch.ones(1), torch.zeros(1, 0))

    def details(self) -> dict[str, Any]:
        return {
            "rho": self._rho,
            "sequences_per_batch": [self.choices["smallest batch"], self.choices["largest batch"]],
            "error_covers": "batches",
        }


def _rise(loss: MeanLoss, rho: float, num_steps: int, *, adaptive: bool) -> float:
    before, losses = loss.value(), []
    with weights_restored(loss.parameters.values()) as originals:
        offset = torch.zeros(loss.num_parameters, dtype=loss.dtype, device=device_of(loss.model))
        units = torch.ones_like(offset)
        if adaptive:
            units = torch.cat([original.abs().reshape(-1).to(loss.dtype) for original in originals])
        for step in range(num_steps):
            # for an offset o in units of the weights, which move by T o: its gradient is T g, and its ball |o| <= rho
            gradient = units * loss.gradient()
            norm = float(gradient.norm())
            if norm == 0:
                raise IsolossError("the gradient of a batch's loss is zero: it has no direction of ascent")
            offset += gradient * ((rho if step == 0 else rho / 2) / norm)
            offset *= min(1.0, rho / float(offset.norm()))
            move_weights(loss.parameters, originals, loss.split(units * offset))
            losses.append(loss.value())
    return max(losses) - before


def noise_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    relative_std: float = 0.01,
    num_probes: int | None = None,
    seed: int = 0,
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the expected rise of the mean loss per predicted token when Gaussian noise is added to the weights.

    Each parameter tensor gets independent noise of standard deviation `relative_std` times the tensor's root mean
    square; a tensor of zeros gets none. Noise comes in pairs: `(L(w + e) + L(w - e)) / 2 - L(w)`, so that the gradient
    cancels; to leading order it is half the noise's variances times the Hessian's diagonal. It is the sharpness in
    expectation of PAC-Bayes bounds (Neyshabur et al. 2017, "Exploring generalization in deep learning").

    All pairs see the same data. The error covers both, as crossed random effects: with a_ij the rise of cluster i under
    pair j, the squared errors of the means over pairs and of the means over clusters are added, less the squared error
    of the rest, which both of them count.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`; all are kept; the labels' values count.
        relative_std: The noise's size, relative to the weights'.
        num_probes: R, pairs of noise, at least 2. None: 16; or at most 1024 with `rtol` or `seconds`.
        seed: Decides the noise.
        options: See `MeasureOptions`, a pair being a probe; `parameters` are those that move. `rtol` is of the whole
            error, and pairs make only their own part of it smaller: where the inputs alone have a larger error,
            `num_probes` end it.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, or a logit is not finite.
        InterruptedEstimate: Ctrl-C after at least two pairs; it carries the estimate so far.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import noise_sharpness
        >>> model, batches = tiny_bert()
        >>> rise = noise_sharpness(model, batches, num_probes=4)
        >>> rise.num_probes, rise.stderr > 0
        (4, True)
        >>> rise = noise_sharpness(model, batches, rtol=0.5)  # looked at after 64 pairs, 128, ...
        >>> rise.num_probes, rise.details["ended"], rise.stderr <= 0.5 * rise.value
        (64, 'rtol', True)
    """
    _check_size("relative_std", relative_std)
    stopping = StopCriteria.of(options)
    most = stopping.number_of_probes(num_probes, _PROBES)
    loss = MeanLoss.of(model, batches, options)
    positions = loss.positions()
    details = {"relative_std": relative_std, "error_covers": "inputs, labels and probes", **loss.details(seed)}

    watch, rises, ended = StopRule(stopping), list[torch.Tensor](), None

    def estimate(ended: str) -> Estimate:
        # all pairs see the same inputs, so rises are not independent: pairs and clusters are two crossed samples
        value, stderr, influence = crossed_ratio(torch.stack(rises, dim=1), positions)
        return Estimate(
            value=value,
            stderr=stderr,
            samples=min(len(rises), len(positions)),
            unit=UNIT,
            num_predictions=loss.num_positions,
            num_probes=len(rises),
            method="expected rise under relative Gaussian noise, antithetic pairs",
            seconds=watch.seconds,
            details={**details, "ended": ended},
            influence=influence.numpy(),
        )

    before = loss.by_cluster()
    with weights_restored(loss.parameters.values()) as originals, interruptible(rises, estimate):
        for probe in range(most):
            noise = gaussian_noise(loss.parameters, originals, relative_std, seed, probe)
            both = []
            for sign in (1, -1):
                move_weights(loss.parameters, originals, [sign * part for part in noise])
                both.append(loss.by_cluster())
            rises.append((both[0] + both[1]) / 2 - before)
            ended = watch.limit_reached(rises, lambda: estimate(""))
            if (progress := options.get("progress")) is not None:
                progress(len(rises))
            if ended is not None:
                break
    return estimate(ended or "num_probes")


@contextmanager
def weights_restored(parameters: Iterable[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Yield copies of the parameters, and put these back at the end, whatever happened."""
    moved = list(parameters)
    originals = [parameter.detach().clone() for parameter in moved]
    try:
        yield originals
    finally:
        with torch.no_grad():
            for parameter, original in zip(moved, originals, strict=True):
                parameter.copy_(original)


def refuse_half_precision(loss: MeanLoss) -> None:
    """Raise where many small steps of the weights would be lost in their rounding."""
    for name, parameter in loss.parameters.items():
        if parameter.dtype.itemsize < torch.float32.itemsize:
            raise IsolossError(f"{name} is {parameter.dtype}, in which small steps are lost: load the model in float32")


def move_weights(
    parameters: Mapping[str, nn.Parameter], originals: list[torch.Tensor], offsets: list[torch.Tensor]
) -> None:
    """Set the parameters to the originals plus offsets; refuse a move that rounding loses."""
    wanted = lost = 0.0
    with torch.no_grad():
        for parameter, original, offset in zip(parameters.values(), originals, offsets, strict=True):
            # from the original each time: the rounding of earlier moves would add up
            parameter.copy_(original + offset)
            wanted += float(offset.double().square().sum())
            lost += float((parameter.double() - original.double() - offset.double()).square().sum())
    # in bfloat16 a step of a thousandth of a weight rounds to none
    if lost > 0.01 * wanted:
        raise IsolossError(
            f"a move of the weights by {math.sqrt(wanted):.3g} is lost in the rounding of {originals[0].dtype}: "
            "load the model in a wider dtype"
        )


def gaussian_noise(
    parameters: Mapping[str, nn.Parameter],
    originals: list[torch.Tensor],
    relative_std: float,
    seed: int,
    probe: int,
    *,
    on_device: bool = False,
) -> list[torch.Tensor]:
    """Return noise for each parameter, whose standard deviation is `relative_std` times its root mean square.

    It is drawn by the parameter's name, so the order of parameters does not change it, and on the CPU, so the device
    does not. `on_device` draws where the parameters are, which is far faster on a GPU.
    """

    def drawn(name: str, original: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(original.dtype, torch.float32)
        device = original.device if on_device else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(seeds.derive(seed, "noise", probe, name))
        noise = torch.randn(original.shape, generator=generator, device=device, dtype=wide)
        rms = original.to(wide).square().mean().sqrt()
        return noise.to(original.device).mul_(relative_std * rms).to(original.dtype)

    # torch draws one tensor in one thread
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(drawn, parameters, originals))


def _check_size(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise IsolossError(f"{name} is {value}; it must be more than 0 and finite")
