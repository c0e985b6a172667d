"""Norms of the weights: the plain one, and two through the Fisher matrix that rescaling the network does not change.

Shapes: B sequences of a batch, m predicted positions, V vocabulary, K trainable parameter tensors.
The examples measure the model and the batches of that of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from isoloss.flatness.engine import control_variates
from isoloss.flatness.engine.curvature_products import predicted_logits, prediction_variances
from isoloss.flatness.engine.measurement import Source, Terms, measure
from isoloss.flatness.engine.parameters import counted_parameters
from isoloss.flatness.engine.predictions import Batch, CheckedBatch
from isoloss.flatness.engine.run import Options, takes_options
from isoloss.statistics.estimate import Estimate


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
        samples=0,
        unit="squared weights",
        num_inputs=0,
        method="squared parameter norm",
        by_parameter=squares,
        by_parameter_stderr=dict.fromkeys(squares, 0.0),
        details={"num_parameters": sum(value.numel() for value in counted.values()), "error_covers": "nothing: exact"},
    )


@takes_options
def fisher_rao_norm(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    **options: Unpack[Options],
) -> Estimate:
    """Estimate the squared Fisher-Rao norm theta^T F theta (Liang et al. 2019, definition 2).

    At a predicted position, theta^T J^T (diag p - p p^T) J theta is the variance under the prediction p of the
    derivative of the logits along theta: exact for each input, with no label and no random draw. The error covers
    the inputs. It does not depend on how the same function is parametrised, where that is by rescaling: where
    theta_1 * c and theta_2 / c give the same function, so do the directional derivatives.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; the labels' values are not used.
        options: `isoloss.flatness.Options`; `parameters` are theta.

    Raises:
        IsolossError: As for `fisher_trace`, or a part of the model has no second derivative.

    Example (the model and batches are like those of `fisher_trace`):
        >>> norm = fisher_rao_norm(model, batches)
        >>> norm.value > 0, norm.num_probes
        (True, 0)
    """
    return measure(_FisherRao, model, batches, options)


class _FisherRao(Source):
    """The variance under the prediction of the logits' derivative along the parameters, summed over positions."""

    method = "squared fisher-rao norm"
    by_parameter = False

    def measure(self, batch: CheckedBatch) -> Terms:
        """Measure a batch."""
        checked, along = batch.checked, [value.detach() for value in self.parameters.values()]
        sums = torch.zeros(len(checked.predicted), dtype=torch.float64)
        if checked.predicts:
            variances = prediction_variances(self.model, self.parameters, along, checked)
            sums.index_add_(0, checked.predicted.nonzero()[:, 0].cpu(), variances)
        return Terms(sums[:, None], checked.predicted.sum(dim=1).cpu(), torch.zeros(len(sums), 0))

    def details(self) -> dict[str, Any]:
        """Return what the error is over."""
        return {"error_covers": "inputs"}


@takes_options
def weighted_fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_probes: int = 1,
    seed: int = 0,
    **options: Unpack[Options],
) -> Estimate:
    """Estimate sum_i theta_i^2 F_ii: the Fisher's trace, each parameter counted by its square.

    Rescaling a unit's inputs by c and its outputs by 1 / c, which leaves the function as it is and changes the plain
    trace (Dinh et al. 2017), leaves this sum as it is: theta_i times the derivative by theta_i does not change. With
    relative noise of variance s^2 on each weight, s^2 / 2 times this sum is the expected rise of the loss to leading
    order, at saturation.

    The expectation over labels is exact, as in `fisher_trace`: with the cotangent u = S v on a sequence's logits, g =
    J^T u, the value is the mean of sum_i theta_i^2 g_i^2. Each sequence takes a forward and a backward pass of its own,
    one backward pass a probe.

    Arguments, result and errors are those of `fisher_trace`. The error covers inputs and probes.

    Example:
        >>> trace = weighted_fisher_trace(model, batches)
        >>> trace.value > 0, trace.samples
        (True, 64)
    """
    return measure(_Weighted, model, batches, options, num_probes=num_probes, seed=seed)


class _Weighted(Source):
    """Squared gradients times squared parameters, a sequence at a time."""

    method = "fisher weighted by squared parameters, exact expectation over labels"

    def measure(self, batch: CheckedBatch) -> Terms:
        """Measure a batch, a sequence at a time; the mean over probes."""
        positions = batch.checked.predicted.sum(dim=1).cpu()
        values = torch.zeros(len(positions), len(self.parameters), dtype=torch.float64)
        for row in positions.nonzero()[:, 0].tolist():
            one = batch.checked.rows(torch.tensor([row]))
            values[row] = self._sequence(one, positions[row : row + 1], batch.first + row)
        return Terms(values, positions, torch.zeros(len(values), 0))

    def details(self) -> dict[str, Any]:
        """Return what the error is over, and which parameters had no gradient."""
        return {"error_covers": "inputs and probes", **super().details()}

    def _sequence(self, batch: Batch, count: torch.Tensor, index: int) -> torch.Tensor:
        """Return (K,): the mean over probes for one sequence."""
        leaves = [parameter.detach() for parameter in self.parameters.values()]
        total = torch.zeros(len(leaves), dtype=torch.float64)
        logits = predicted_logits(self.model, batch)
        for probe in range(self.num_probes):
            cotangent = control_variates.root_probabilities(logits)
            control_variates.exact_labels_(cotangent, count, range(index, index + 1), seed=self.seed, probe=probe)
            for column, gradient in self.gradients(logits, cotangent.to(logits.dtype)):
                total[column] += float((leaves[column] * gradient).double().square().sum()) / self.num_probes
        return total
