"""How far the loss rises around the weights: in the worst direction (SAM), and on average under noise.

Shapes: n clusters of sequences, R pairs of noise, P parameters counted one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine.batches import Reading, read_batches
from isoloss.flatness.engine.curvature_products import MeanLoss, predicted_logits
from isoloss.flatness.engine.parameters import counted_parameters
from isoloss.flatness.engine.run import UNIT, described
from isoloss.model_checks import NOTHING_PREDICTED, device_of, is_causal, refuse_dropout
from isoloss.statistics.estimate import Estimate


def sam_sharpness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    rho: float = 0.05,
    num_steps: int = 1,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Estimate:
    """Measure how far a batch's mean loss L rises within a ball of radius rho around the weights w.

    With one step it is `L(w + rho g / |g|) - L(w)` for the gradient g at w, to first order the maximum over the ball
    (Foret et al. 2021, equation 2). Further steps have length rho / 2 along the gradient where they start, and go back
    to the ball where they leave it; the greatest loss that was met counts, a lower bound of the maximum.

    The value depends on the size of the batches, as each batch is given its own worst direction (m-sharpness): compare
    models at the same size. It is the mean over batches, and the error covers them.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`, at least 2; the labels' values count.
        rho: Radius, in the Euclidean norm over all parameters.
        num_steps: Steps of ascent.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters that move, by name; None: all trainable ones, tied ones once.

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
    refuse_dropout(model)
    counted = counted_parameters(model, parameters)
    causal = is_causal(model) if causal is None else causal
    begun, rises, sizes, positions, skipped = time.perf_counter(), [], [], 0, 0
    for reading in read_batches(batches, model=model, causal=causal):
        if not reading.checked.predicts:
            skipped += 1
            continue
        loss = MeanLoss(model, [reading.given], causal=causal, parameters=counted)
        rises.append(_rise(loss, rho, num_steps))
        sizes.append(loss.num_sequences)
        positions += loss.num_positions
    if len(rises) < 2:
        raise IsolossError(f"an error bar needs at least 2 batches, not {len(rises)}")
    values = torch.tensor(rises, dtype=torch.float64)
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std()) / math.sqrt(len(values)),
        samples=len(values),
        unit=UNIT,
        num_inputs=positions,
        method=f"sam sharpness, {num_steps} ascent step{'s' * (num_steps > 1)}",
        seconds=time.perf_counter() - begun,
        details={
            **described(model, list(counted.values()), causal=causal),
            "rho": rho,
            "sequences": sum(sizes),
            "skipped_batches": skipped,
            "sequences_per_batch": [min(sizes), max(sizes)],
            "error_covers": "batches",
        },
    )


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
    num_probes: int = 16,
    seed: int = 0,
    num_sequences: int | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
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
        num_probes: R, pairs of noise, at least 2.
        seed: Decides the noise.
        num_sequences: Stop after as many; None: at the end of the batches.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters that move, by name; None: all trainable ones, tied ones once.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, or a logit is not finite.

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
    if num_probes < 2:
        raise IsolossError(f"num_probes is {num_probes}; an error bar needs at least 2")
    refuse_dropout(model)
    counted = counted_parameters(model, parameters)
    causal = is_causal(model) if causal is None else causal
    begun = time.perf_counter()
    readings = list(read_batches(batches, model=model, causal=causal, num_sequences=num_sequences))
    if not readings or int(readings[-1].clusters[-1]) < 1:
        raise IsolossError("an error bar needs at least 2 independent sequences or documents")
    skipped = sum(not reading.checked.predicts for reading in readings)
    if skipped == len(readings):
        raise IsolossError(NOTHING_PREDICTED)
    before = _losses(model, readings)
    rises = []
    with weights_restored(counted) as originals:
        for probe in range(num_probes):
            noise = _noise(counted, originals, relative_std, seed, probe)
            both = []
            for sign in (1, -1):
                _move(counted, originals, [sign * part for part in noise])
                both.append(_losses(model, readings))
            rises.append((both[0] + both[1]) / 2 - before)
    positions = torch.zeros(len(before), dtype=torch.float64)
    for reading in readings:
        positions.index_add_(0, reading.clusters, reading.checked.predicted.sum(dim=1).cpu().double())
    value, stderr = crossed_ratio(torch.stack(rises, dim=1), positions)
    return Estimate(
        value=value,
        stderr=stderr,
        samples=min(num_probes, len(before)),
        unit=UNIT,
        num_inputs=int(positions.sum()),
        num_probes=num_probes,
        method="expected rise under relative gaussian noise, antithetic pairs",
        seconds=time.perf_counter() - begun,
        details={
            **described(model, list(counted.values()), causal=causal),
            "relative_std": relative_std,
            "sequences": sum(len(reading.clusters) for reading in readings),
            "skipped_batches": skipped,
            "seed": seed,
            "error_covers": "inputs, labels and probes",
        },
    )


def crossed_ratio(values: torch.Tensor, sizes: torch.Tensor) -> tuple[float, float]:
    """Return sum_ij values_ij / (R sum_i sizes_i) for (n, R) values, and its error over rows and columns as samples.

    The residuals r_ij = values_ij - ratio * sizes_i are taken as a row's effect plus a column's plus noise (Searle,
    Casella and McCulloch, Variance Components, section 4.3), with the variance of their mean
    s_rows / n + s_columns / R + s_noise / (n R).
    """
    n, columns = values.shape
    ratio = float(values.sum()) / (columns * float(sizes.sum()))
    residuals = values - ratio * sizes[:, None]
    by_row, by_column = residuals.mean(dim=1), residuals.mean(dim=0)
    neither = residuals - by_row[:, None] - by_column + residuals.mean()
    of_noise = float(neither.square().sum()) / ((n - 1) * (columns - 1)) / (n * columns)
    of_rows, of_columns = float(by_row.var()) / n, float(by_column.var()) / columns
    variance = max(of_rows + of_columns - of_noise, of_noise)  # s_rows and s_columns are at least 0
    return ratio, math.sqrt(variance) * n / float(sizes.sum())


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
    """Set the parameters to the originals plus the offsets.

    Raises:
        IsolossError: Rounding takes more than a tenth of the offsets away.
    """
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


def _losses(model: nn.Module, readings: list[Reading]) -> torch.Tensor:
    """Return (n,) float64: the losses summed over the predicted positions of each cluster."""
    sums = torch.zeros(int(readings[-1].clusters[-1]) + 1, dtype=torch.float64)
    for reading in readings:
        batch = reading.checked
        if not batch.predicts:
            continue
        with torch.no_grad():
            logits = predicted_logits(model, batch)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = F.cross_entropy(wide, batch.targets, reduction="none").double().cpu()
        sums.index_add_(0, reading.clusters[batch.predicted.nonzero()[:, 0].cpu()], losses)
    return sums


def _check_size(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise IsolossError(f"{name} is {value}; it must be more than 0 and finite")
