"""How far the loss rises around the weights: in the worst direction (SAM), and on average under noise.

Shapes: n clusters of sequences, R pairs of noise, P parameters counted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine.batches import CheckedBatch, read_batches
from isoloss.flatness.engine.curvature_products import MeanLoss, predicted_logits
from isoloss.flatness.engine.measurement import Measurement, Source, Terms
from isoloss.flatness.engine.parameters import counted_parameters
from isoloss.flatness.engine.run import UNIT, Probes, Stopping, model_details, resume_file
from isoloss.model_checks import NOTHING_PREDICTED, device_of, is_causal, refuse_dropout
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import crossed_ratio

_PROBES = 16


def sam_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    rho: float = 0.05,
    num_steps: int = 1,
    num_sequences: int | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    resume: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Measure how far a batch's mean loss L rises within a ball of radius rho around the weights w.

    With one step it is `L(w + rho g / |g|) - L(w)` for the gradient g at w, to first order the maximum over the ball
    (Foret et al. 2021, equation 2). Further steps have length rho / 2 along the gradient where they start, and go back
    to the ball where they leave it; the greatest loss that was met counts, a lower bound of the maximum.

    The value depends on the size of the batches, as each batch is given its own worst direction (m-sharpness): compare
    models at the same size. It is the mean over batches. The rise is no linear function of a batch's sequences, so the
    samples are the batches: the error is s / sqrt(n) for n of them, which are taken as independent, and the influence
    is that of each batch.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`, at least 2; the labels' values count.
        rho: Radius, in the Euclidean norm over all parameters.
        num_steps: Steps of ascent.
        num_sequences: As for `fisher_trace`, and so are `rtol`, `seconds`, `causal`, `resume` and `progress`, with
            batches in the place of clusters.
        rtol: See there.
        seconds: See there.
        causal: See there.
        parameters: The parameters that move, by name; None: all trainable ones, tied ones once.
        resume: See there.
        progress: See there.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, the gradient is zero, or a loss or
            gradient is not finite.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (32, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
        >>> batches = [{"input_ids": part, "labels": labels} for part in input_ids.split(16)]
        >>> sam_sharpness(model, batches).value > 0
        True
    """
    _check_size("rho", rho)
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    stopping = Stopping(num_sequences=num_sequences, rtol=rtol, seconds=seconds)
    source = _Sam(model, rho, num_steps, causal=causal, parameters=parameters)
    return Measurement(source).measure(batches, stopping, resume=resume, progress=progress)


class _Sam(Source):
    """The rise of each batch's loss."""

    by_parameter = False
    by_batch = True

    def __init__(self, model: nn.Module, rho: float, num_steps: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.method = f"sam sharpness, {num_steps} ascent step{'s' * (num_steps > 1)}"
        self._rho, self._num_steps = rho, num_steps

    def measure(self, batch: CheckedBatch) -> Terms:
        """Measure a batch: one row, none where it predicts nothing."""
        if not batch.checked.predicts:
            return Terms(torch.zeros(0, 1), torch.zeros(0), torch.zeros(0, 0))
        loss = MeanLoss(self.model, [batch], causal=self.causal, parameters=self.parameters)
        for name, choose in (("smallest batch", min), ("largest batch", max)):
            self.choices[name] = choose(self.choices.get(name, loss.num_sequences), loss.num_sequences)
        rise = _rise(loss, self._rho, self._num_steps)
        return Terms(torch.tensor([[rise]], dtype=torch.float64), torch.ones(1), torch.zeros(1, 0))

    def identity(self) -> dict[str, Any]:
        """Return what the rise depends on."""
        return {"rho": self._rho}

    def details(self) -> dict[str, Any]:
        """Return the radius, how large the batches were, and what the error is over."""
        return {
            "rho": self._rho,
            "sequences_per_batch": [self.choices["smallest batch"], self.choices["largest batch"]],
            "error_covers": "batches",
        }


def _rise(loss: MeanLoss, rho: float, num_steps: int) -> float:
    """Return the greatest rise of the loss that the steps meet in the ball."""
    before, losses = loss.value(), []
    with weights_restored(loss.parameters) as originals:
        offset = torch.zeros(loss.num_parameters, dtype=loss.dtype, device=device_of(loss.model))
        for step in range(num_steps):
            gradient = loss.gradient()
            norm = float(gradient.norm())
            if norm == 0:
                raise IsolossError("the gradient of a batch's loss is zero: it has no direction of ascent")
            offset += gradient * ((rho if step == 0 else rho / 2) / norm)
            offset *= min(1.0, rho / float(offset.norm()))
            _move(loss.parameters, originals, loss.split(offset))
            losses.append(loss.value())
    return max(losses) - before


def noise_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    relative_std: float = 0.01,
    num_probes: int | None = None,
    seed: int = 0,
    num_sequences: int | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    resume: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Estimate the expected rise of the mean loss per predicted token when Gaussian noise is added to the weights.

    Each parameter tensor gets independent noise of standard deviation `relative_std` times the tensor's root mean
    square; a tensor of zeros gets none. Noise comes in pairs: `(L(w + e) + L(w - e)) / 2 - L(w)`, so that the gradient
    cancels; to leading order it is half the noise's variances times the Hessian's diagonal.

    All pairs see the same data. The error covers both, as crossed random effects: with a_ij the rise of cluster i under
    pair j, it is the squared error of the means over pairs, plus that of the means over clusters, less that of what
    neither explains, which both count.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`; all are kept; the labels' values count.
        relative_std: The noise's size, relative to the weights'.
        num_probes: R, pairs of noise, at least 2. None: 16; or at most 1024 with `rtol` or `seconds`.
        seed: Decides the noise.
        num_sequences: Take only as many sequences; None: all.
        rtol: Stop as soon as the standard error is at most this fraction of the value. Looked at after 64, 128, ...
            pairs. More pairs do not make the inputs' part of the error smaller.
        seconds: Stop at the first pair that ends later than this after the start, once there are 2.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters that move, by name; None: all trainable ones, tied ones once.
        resume: A file to go on from, and to write what the pairs gave to every half minute. It is removed at the end.
        progress: Called with the number of pairs done after each.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, or a logit is not finite.
        InterruptedEstimate: Ctrl-C after at least two pairs; it carries the estimate so far.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (32, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(32, 4)
        >>> rise = noise_sharpness(model, [{"input_ids": input_ids, "labels": labels}], num_probes=4)
        >>> rise.num_probes, rise.stderr > 0
        (4, True)
    """
    _check_size("relative_std", relative_std)
    stopping = Stopping(num_sequences=num_sequences, rtol=rtol, seconds=seconds)
    most = stopping.number_of_probes(num_probes, _PROBES)
    refuse_dropout(model)
    counted = counted_parameters(model, parameters)
    causal = is_causal(model) if causal is None else causal
    given = list(read_batches(batches, model=model, causal=causal, num_sequences=num_sequences))
    if not given or given[-1].after.clusters < 2:
        raise IsolossError("an error bar needs at least 2 independent sequences or documents")
    stream = given[-1].after
    if not stream.positions:
        raise IsolossError(NOTHING_PREDICTED)
    positions = torch.zeros(stream.clusters, dtype=torch.float64)
    for batch in given:
        positions.index_add_(0, batch.clusters, batch.checked.predicted.sum(dim=1).cpu().double())
    details = {
        **model_details(model, list(counted.values()), causal=causal),
        "relative_std": relative_std,
        "sequences": stream.sequences,
        "skipped_batches": stream.skipped,
        "seed": seed,
        "error_covers": "inputs, labels and probes",
    }

    def estimate(rises: torch.Tensor, ended: str = "interrupted") -> Estimate:
        value, stderr, influence = crossed_ratio(rises.T.contiguous(), positions)
        return Estimate(
            value=value,
            stderr=stderr,
            samples=min(rises.shape),
            unit=UNIT,
            num_inputs=stream.positions,
            num_probes=len(rises),
            method="expected rise under relative gaussian noise, antithetic pairs",
            seconds=probes.seconds,
            details={**details, "ended": ended},
            influence=influence.numpy(),
        )

    before = _losses(model, given)
    with weights_restored(counted) as originals:

        def rise(probe: int) -> torch.Tensor:
            noise = _noise(counted, originals, relative_std, seed, probe)
            both = []
            for sign in (1, -1):
                _move(counted, originals, [sign * part for part in noise])
                both.append(_losses(model, given))
            return (both[0] + both[1]) / 2 - before

        probes = Probes(rise, estimate)
        identity = {"measure": "noise sharpness", "relative std": relative_std, "seed": seed, "causal": causal}
        file = resume_file(resume, model, counted, identity, [batch.given for batch in given])
        ended = probes.take(most, stopping, file=file, progress=progress)
    return estimate(probes.values, ended)


@contextmanager
def weights_restored(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Yield copies of the parameters, and put these back at the end, whatever happened."""
    originals = [parameter.detach().clone() for parameter in parameters.values()]
    try:
        yield originals
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters.values(), originals, strict=True):
                parameter.copy_(original)


def _move(parameters: Mapping[str, nn.Parameter], originals: list[torch.Tensor], offsets: list[torch.Tensor]) -> None:
    """Set the parameters to the originals plus the offsets."""
    wanted = lost = 0.0
    with torch.no_grad():
        for parameter, original, offset in zip(parameters.values(), originals, offsets, strict=True):
            parameter.copy_(original + offset)
            wanted += float(offset.double().square().sum())
            lost += float((parameter.double() - original.double() - offset.double()).square().sum())
    if lost > 0.01 * wanted:
        raise IsolossError(
            f"a move of the weights by {math.sqrt(wanted):.3g} is lost in the rounding of {originals[0].dtype}: "
            "load the model in a wider dtype"
        )


def _noise(
    parameters: Mapping[str, nn.Parameter], originals: list[torch.Tensor], relative_std: float, seed: int, probe: int
) -> list[torch.Tensor]:
    noise = []
    for name, original in zip(parameters, originals, strict=True):
        wide = torch.promote_types(original.dtype, torch.float32)
        drawn = torch.randn(original.shape, generator=seeds.generator(seed, "noise", probe, name), dtype=wide)
        rms = original.to(wide).square().mean().sqrt()
        noise.append((drawn.to(original.device) * (relative_std * rms)).to(original.dtype))
    return noise


def _losses(model: nn.Module, given: list[CheckedBatch]) -> torch.Tensor:
    """Return (n,) float64: the losses summed over the predicted positions of each cluster."""
    sums = torch.zeros(given[-1].after.clusters, dtype=torch.float64)
    for one in given:
        batch = one.checked
        if not batch.predicts:
            continue
        with torch.no_grad():
            logits = predicted_logits(model, batch)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(wide, batch.targets, reduction="none").double().cpu()
        sums.index_add_(0, one.clusters[batch.predicted.nonzero()[:, 0].cpu()], losses)
    return sums


def _check_size(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise IsolossError(f"{name} is {value}; it must be more than 0 and finite")
