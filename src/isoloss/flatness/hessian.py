"""Trace of the loss's true Hessian at given labels, the Fisher's part and the rest told apart.

Shapes: B sequences of a batch, K trainable parameter tensors, n clusters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine import control_variates
from isoloss.flatness.engine.batches import Reading, read_batches
from isoloss.flatness.engine.curvature_products import (
    MeanLoss,
    hessian_vector_product,
    predicted_logits,
    second_derivatives,
)
from isoloss.flatness.engine.parameters import counted_parameters, refuse_unreached, requiring_gradients
from isoloss.flatness.engine.run import UNIT, described
from isoloss.flatness.fisher import Integrated
from isoloss.model_checks import device_of, is_causal, plainly, refuse_dropout
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio_estimator import Tally

_METHODS = ("residual", "authors")


def hessian_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: Literal["residual", "authors"] = "residual",
    num_probes: int = 1,
    seed: int = 0,
    group_size: int = 8,
    num_sequences: int | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Estimate the trace of the Hessian of the mean loss per predicted token, at the given labels.

    At a position with logits f, prediction p and label y, the trace is that of the Fisher matrix plus the residual
    term `sum_c (p - y)_c Tr(H f_c)`. The second has mean zero over labels drawn from p, so the two traces agree
    where the predictions are the true conditionals; elsewhere, and on few inputs, it may be of any size and sign. It
    depends on each label, so it is far noisier than the Fisher's trace: `details` has both parts with their errors.

    `method="residual"` takes the Fisher's part as `fisher_trace` does, and for the rest z^T H z with random signs z
    and H the Hessian of `<p - y, f>` with p held fixed, summed over a group of sequences; each group has its own z.
    Groups are the clusters that the error rests on, so it covers inputs, labels and probes. Smaller groups have less
    of the probes' noise and cost more.

    `method="authors"` is what the paper's published code does, which is not its appendix B.1: Gaussian z, z^T H z of
    the whole Hessian of a batch's mean loss, a batch a probe, the mean over batches. Like that code it leaves out
    poolers and `cls.predictions.bias`. The error is that of a mean over batches.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; the labels' values count.
        method: See above.
        num_probes: Random vectors a position and a group; the authors' method takes one a batch.
        seed: Decides them.
        group_size: Sequences that share z; where batches have `documents`, the sequences of a document do.
        num_sequences: Stop after as many; None: at the end of the batches.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters to sum over, by name; None: all trainable ones, tied ones once.
        progress: Called with the number of sequences done after each batch.

    Returns:
        The estimate, `by_parameter` adding up to `value`; with `method="residual"`, `details` has `fisher`,
        `fisher_stderr`, `residual` and `residual_stderr`.

    Raises:
        IsolossError: As for `fisher_trace`, or a part of the model has no second derivative.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> trace = hessian_trace(model, [{"input_ids": input_ids, "labels": labels}])
        >>> trace.samples, abs(trace.details["fisher"] + trace.details["residual"] - trace.value) < 1e-9
        (8, True)
    """
    if method not in _METHODS:
        raise IsolossError(f"method is {method!r}; it is one of {', '.join(_METHODS)}")
    if num_probes < 1 or (method == "authors" and num_probes != 1):
        raise IsolossError(f"num_probes is {num_probes}; it must be at least 1, and 1 with method='authors'")
    if group_size < 1:
        raise IsolossError(f"group_size is {group_size}; it must be at least 1")
    refuse_dropout(model)
    counted = counted_parameters(model, parameters)
    causal = is_causal(model) if causal is None else causal
    readings = read_batches(
        batches,
        model=model,
        causal=causal,
        num_sequences=num_sequences,
        cluster_size=group_size if method == "residual" else 1,
    )
    readings = _reporting(readings, progress)
    if method == "authors":
        return _authors(model, readings, seed=seed, causal=causal, parameters=counted)
    return _with_residual(model, readings, num_probes=num_probes, seed=seed, causal=causal, parameters=counted)


def _reporting(readings: Iterator[Reading], progress: Callable[[int], None] | None) -> Iterator[Reading]:
    for reading in readings:
        yield reading
        if progress is not None:
            progress(reading.first + len(reading.clusters))


# --- the Fisher's part and the residual ------------------------------------------------------------------------------


@torch.inference_mode(False)
def _with_residual(
    model: nn.Module,
    readings: Iterator[Reading],
    *,
    num_probes: int,
    seed: int,
    causal: bool,
    parameters: dict[str, nn.Parameter],
) -> Estimate:
    begun, sequences, positions, skipped = time.perf_counter(), 0, 0, 0
    fisher, rest = Tally(len(parameters), Integrated.num_controls), Tally(len(parameters), 0)
    source = Integrated(model, num_probes=num_probes, seed=seed, causal=causal, parameters=parameters)
    with source:
        for reading in readings:
            with plainly(model):
                norms = source.measure(reading.checked, reading.first)
            with requiring_gradients(parameters):
                residual = _residual(model, reading, parameters, num_probes=num_probes, seed=seed)
            for tally, values, controls in (
                (fisher, norms.square_norms, norms.controls),
                (rest, residual, torch.zeros(len(residual), 0)),
            ):
                if not bool(values.isfinite().all()):
                    raise IsolossError("a derivative of the loss is not finite; use a wider dtype")
                tally.add(values, norms.positions, controls, reading.clusters)
            sequences, positions = sequences + len(norms.positions), positions + int(norms.positions.sum())
            skipped += not reading.checked.predicts
    parts = fisher.shares(), rest.shares()
    refuse_unreached(model, parameters, source.details()["parameters_without_gradient"])
    influence = parts[0].influence + parts[1].influence
    n = len(influence)
    shares = parts[0].by_parameter + parts[1].by_parameter
    return Estimate(
        value=parts[0].value + parts[1].value,
        stderr=math.sqrt(float(influence.square().sum()) / (n * (n - 1))),
        samples=n,
        unit=UNIT,
        num_inputs=positions,
        num_probes=num_probes,
        method="hessian, fisher and residual",
        seconds=time.perf_counter() - begun,
        by_parameter=dict(zip(parameters, shares.tolist(), strict=True)),
        details={
            **described(model, list(parameters.values()), causal=causal),
            "sequences": sequences,
            "skipped_batches": skipped,
            "seed": seed,
            "fisher": parts[0].value,
            "fisher_stderr": parts[0].stderr,
            "residual": parts[1].value,
            "residual_stderr": parts[1].stderr,
            "error_covers": "inputs, labels and probes",
            **source.details(),
        },
    )


def _residual(
    model: nn.Module,
    reading: Reading,
    parameters: dict[str, nn.Parameter],
    *,
    num_probes: int,
    seed: int,
) -> torch.Tensor:
    """Return (B, K) float64: z^T H z of each group by parameter, in the row of the group's first sequence."""
    leaves = list(parameters.values())
    values = torch.zeros(len(reading.clusters), len(leaves), dtype=torch.float64)
    for group in sorted(set(reading.clusters.tolist())):
        members = (reading.clusters == group).nonzero()[:, 0]
        batch = reading.checked.rows(members)
        if not batch.predicts:
            continue
        with second_derivatives(), plainly(model):
            logits = predicted_logits(model, batch)
            error = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
            error[torch.arange(len(error), device=error.device), batch.targets] -= 1
            gradients = torch.autograd.grad((error * logits).sum(), leaves, create_graph=True, allow_unused=True)
            for probe in range(num_probes):
                z = [
                    control_variates.random_signs(leaf.shape, leaf.device, seed, "residual", group, probe, number).to(
                        leaf.dtype
                    )
                    for number, leaf in enumerate(leaves)
                ]
                products = hessian_vector_product(gradients, leaves, z)
                along = [float((v.double() * h.double()).sum()) for v, h in zip(z, products, strict=True)]
                values[members[0]] += torch.tensor(along, dtype=torch.float64) / num_probes
    return values


# --- the authors' code -----------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def _authors(
    model: nn.Module,
    readings: Iterator[Reading],
    *,
    seed: int,
    causal: bool,
    parameters: dict[str, nn.Parameter],
) -> Estimate:
    begun, rows, sequences, positions, skipped = time.perf_counter(), [], 0, 0, 0
    kept = {name: p for name, p in parameters.items() if "pooler" not in name and name != "cls.predictions.bias"}
    for number, reading in enumerate(readings):
        if not reading.checked.predicts:
            sequences, skipped = sequences + len(reading.clusters), skipped + 1
            continue
        loss = MeanLoss(model, [reading.given], causal=causal, parameters=kept)
        z = torch.randn(loss.num_parameters, generator=seeds.generator(seed, "authors", number), dtype=loss.dtype)
        z = z.to(device_of(model))
        along = z.double() * loss.hessian_product(z).double()
        parts = torch.split(along, [parameter.numel() for parameter in kept.values()])
        rows.append(torch.stack([part.sum() for part in parts]).cpu())
        sequences, positions = sequences + loss.num_sequences, positions + loss.num_positions
    tally = Tally(len(kept), 0)
    if rows:  # the mean over batches whatever their size, as the authors take it
        tally.add(torch.stack(rows), torch.ones(len(rows)), torch.zeros(len(rows), 0))
    if len(tally) < 2:
        raise IsolossError(f"the authors' estimator takes a batch a probe, at least 2 batches, not {len(rows)}")
    shares = tally.shares()
    return Estimate(
        value=shares.value,
        stderr=shares.stderr,
        samples=len(rows),
        unit=UNIT,
        num_inputs=positions,
        num_probes=1,
        method="hessian, the authors' code",
        seconds=time.perf_counter() - begun,
        by_parameter=dict(zip(kept, shares.by_parameter.tolist(), strict=True)),
        by_parameter_stderr=dict(zip(kept, shares.by_parameter_stderr.tolist(), strict=True)),
        details={
            **described(model, list(kept.values()), causal=causal),
            "sequences": sequences,
            "skipped_batches": skipped,
            "seed": seed,
            "parameters_left_out": [name for name in parameters if name not in kept],
            "error_covers": "batches, labels and probes",
        },
    )
