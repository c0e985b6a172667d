"""Norms of the weights: the plain one, and two through the Fisher matrix that rescaling the network does not change.

Shapes: B sequences of a batch, m predicted positions, V vocabulary, K trainable parameter tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine import control_variates
from isoloss.flatness.engine.batches import read_batches
from isoloss.flatness.engine.curvature_products import derivative_along, predicted_logits, second_derivatives
from isoloss.flatness.engine.parameters import counted_parameters, requiring_gradients
from isoloss.flatness.engine.predictions import Batch
from isoloss.flatness.engine.run import UNIT, Measurement, Norms, Stopping, described
from isoloss.model_checks import is_causal, plainly, refuse_dropout
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio_estimator import Tally


def squared_parameter_norm(model: nn.Module, *, parameters: Mapping[str, nn.Parameter] | None = None) -> Estimate:
    """Return the sum of the squared parameters: exact, with an error of 0.

    Args:
        model: Any module.
        parameters: The parameters, by name; None: all trainable ones, tied ones once.

    Raises:
        IsolossError: No parameter is trainable, or one is not finite.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = nn.init.constant_(layer.weight, 3.0), nn.init.constant_(layer.bias, 1.0)
        >>> squared_parameter_norm(layer).value
        19.0
    """
    counted = counted_parameters(model, parameters)
    squares = {name: float(value.detach().double().square().sum()) for name, value in counted.items()}
    return Estimate(
        value=sum(squares.values()),
        stderr=0.0,
        samples=1,
        unit="squared weights",
        num_inputs=0,
        method="squared parameter norm",
        by_parameter=squares,
        by_parameter_stderr=dict.fromkeys(squares, 0.0),
        details={"num_parameters": sum(value.numel() for value in counted.values()), "error_covers": "nothing: exact"},
    )


def fisher_rao_norm(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_sequences: int | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Estimate:
    """Estimate the squared Fisher-Rao norm theta^T F theta (Liang et al. 2019, definition 2).

    At a predicted position, theta^T J^T (diag p - p p^T) J theta is the variance under the prediction p of the
    derivative of the logits along theta: exact for each input, with no label and no random draw. The error covers
    the inputs. It does not depend on how the same function is parametrised, where that is by rescaling: where
    theta_1 * c and theta_2 / c give the same function, so do the directional derivatives.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; the labels' values are not used.
        num_sequences: Stop after as many; None: at the end of the batches.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters theta, by name; None: all trainable ones, tied ones once.

    Raises:
        IsolossError: As for `fisher_trace`, or a part of the model has no second derivative.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (16, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
        >>> norm = fisher_rao_norm(model, [{"input_ids": input_ids, "labels": labels}])
        >>> norm.value > 0, norm.num_probes
        (True, 0)
    """
    refuse_dropout(model)
    counted = counted_parameters(model, parameters)
    causal = is_causal(model) if causal is None else causal
    begun, tally, sequences, positions, skipped = time.perf_counter(), Tally(1, 0), 0, 0, 0
    for reading in read_batches(batches, model=model, causal=causal, num_sequences=num_sequences):
        batch = reading.checked
        variances = _variances(model, batch, counted)
        if not bool(variances.isfinite().all()):
            raise IsolossError("a derivative of the logits is not finite; use a wider dtype")
        sums = torch.zeros(len(batch.predicted), dtype=torch.float64)
        sums.index_add_(0, batch.predicted.nonzero()[:, 0].cpu(), variances)
        tally.add(sums[:, None], batch.predicted.sum(dim=1).cpu(), torch.zeros(len(sums), 0), reading.clusters)
        sequences, positions = sequences + len(sums), positions + len(variances)
        skipped += not batch.predicts
    shares = tally.shares()
    return Estimate(
        value=shares.value,
        stderr=shares.stderr,
        samples=len(tally),
        unit=UNIT,
        num_inputs=positions,
        method="squared fisher-rao norm",
        seconds=time.perf_counter() - begun,
        details={
            **described(model, list(counted.values()), causal=causal),
            "sequences": sequences,
            "skipped_batches": skipped,
            "error_covers": "inputs",
        },
    )


def _variances(model: nn.Module, batch: Batch, counted: dict[str, nn.Parameter]) -> torch.Tensor:
    """Return (m,) float64: the variances under the predictions of the logits' derivative along the parameters."""
    if not batch.predicts:
        return torch.zeros(0, dtype=torch.float64)
    leaves = list(counted.values())
    with second_derivatives(), plainly(model), requiring_gradients(counted):
        logits = predicted_logits(model, batch)
        moved = derivative_along(logits, leaves, [leaf.detach() for leaf in leaves]).double()
    p = logits.detach().double().softmax(dim=-1)
    centred = moved - (p * moved).sum(dim=-1, keepdim=True)
    return (p * centred.square()).sum(dim=-1).cpu()


def weighted_fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_probes: int = 1,
    seed: int = 0,
    num_sequences: int | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    resume: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Estimate sum_i theta_i^2 F_ii: the Fisher's trace, each parameter counted by its square.

    Rescaling a unit's inputs by c and its outputs by 1 / c, which leaves the function as it is and changes the plain
    trace (Dinh et al. 2017), leaves this sum as it is: theta_i times the derivative by theta_i does not change. With
    relative noise of variance s^2 on each weight, s^2 / 2 times this sum is the expected rise of the loss to leading
    order, at saturation.

    Labels are integrated out as in `fisher_trace`: with the cotangent u = S v on a sequence's logits, g = J^T u, the
    value is the mean of sum_i theta_i^2 g_i^2. Each sequence takes a forward and a backward pass of its own, one
    backward pass a probe.

    Arguments, result and errors are those of `fisher_trace`. The error covers inputs and probes.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (16, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
        >>> trace = weighted_fisher_trace(model, [{"input_ids": input_ids, "labels": labels}])
        >>> trace.value > 0, trace.samples
        (True, 16)
    """
    stopping = Stopping(num_sequences=num_sequences, rtol=rtol, seconds=seconds)
    source = _Weighted(model, num_probes=num_probes, seed=seed, causal=causal, parameters=parameters)
    return Measurement(model, source).run(batches, stopping, resume=resume, progress=progress)


class _Weighted:
    """Squared gradients times squared parameters, a sequence at a time."""

    method = "fisher weighted by squared parameters, labels integrated out"
    num_controls = 0

    def __init__(
        self,
        model: nn.Module,
        *,
        num_probes: int,
        seed: int,
        causal: bool | None,
        parameters: Mapping[str, nn.Parameter] | None,
    ) -> None:
        refuse_dropout(model)
        if num_probes < 1:
            raise IsolossError(f"num_probes is {num_probes}; it must be at least 1")
        self.num_probes, self.seed = num_probes, seed
        self.causal = is_causal(model) if causal is None else causal
        self.settled: dict[str, int] = {}
        self._model = model
        self.parameters = counted_parameters(model, parameters)
        self._reached: set[str] = set()
        self._requiring = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._requiring.enter_context(requiring_gradients(self.parameters))
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the model as found."""
        self._requiring.close()

    def measure(self, batch: Batch, first: int) -> Norms:
        """Measure a batch, a sequence at a time; the mean over probes."""
        positions = batch.predicted.sum(dim=1).cpu()
        values = torch.zeros(len(positions), len(self.parameters), dtype=torch.float64)
        for row in positions.nonzero()[:, 0].tolist():
            values[row] = self._sequence(batch.rows(torch.tensor([row])), positions[row : row + 1], first + row)
        return Norms(values, positions, torch.zeros(len(values), 0))

    def details(self) -> dict[str, Any]:
        """Return what the error is over, and which parameters had no gradient."""
        return {
            "error_covers": "inputs and probes",
            "parameters_without_gradient": [name for name in self.parameters if name not in self._reached],
        }

    def _sequence(self, batch: Batch, count: torch.Tensor, place: int) -> torch.Tensor:
        """Return (K,): the mean over probes for one sequence."""
        leaves = list(self.parameters.values())
        total = torch.zeros(len(leaves), dtype=torch.float64)
        logits = predicted_logits(self._model, batch)
        for probe in range(self.num_probes):
            cotangent = control_variates.root_probabilities(logits)
            control_variates.integrated_(cotangent, count, range(place, place + 1), seed=self.seed, probe=probe)
            gradients = torch.autograd.grad(
                logits, leaves, cotangent.to(logits.dtype), retain_graph=True, allow_unused=True
            )
            for column, (name, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
                if gradient is not None:
                    self._reached.add(name)
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    total[column] += float((leaves[column].detach() * dense).double().square().sum()) / self.num_probes
        return total
