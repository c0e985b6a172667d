"""Norms of the weights: the plain one, and three through the Fisher matrix that rescaling the network does not change.

Shapes: B sequences of a batch, m predicted positions, V vocabulary, d the width of the model, K trainable parameter
tensors.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._batches import Batch, CheckedBatch
from isoloss.flatness._curvature import predicted_logits, prediction_variances
from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.capture import Capture, PositionSelection
from isoloss.flatness._ghost.engine import predict
from isoloss.flatness._measurement import BatchSums, Estimator, MeasureOptions, measure
from isoloss.flatness._parameters import counted_parameters
from isoloss.statistics.estimate import Estimate

_POSITIONS = 256  # whose predictions are in float64 together


def squared_parameter_norm(model: nn.Module, *, parameters: Mapping[str, nn.Parameter] | None = None) -> Estimate:
    """Return the sum of the squared parameters: exact, with an error of 0.

    It has no batches, so there is nothing that `num_sequences`, `rtol` or `seconds` could end early, nothing to report
    progress on: it reads each weight once.

    Args:
        model: Any module.
        parameters: The parameters, by name; None: all trainable ones, tied ones once.

    Raises:
        IsolossError: No parameter is trainable, or one is not finite.

    Example:
        >>> from torch import nn
        >>> from isoloss.flatness import squared_parameter_norm
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
        num_predictions=0,
        method="squared parameter norm",
        by_parameter=squares,
        by_parameter_stderr=dict.fromkeys(squares, 0.0),
        details={"num_parameters": sum(value.numel() for value in counted.values()), "error_covers": "nothing: exact"},
    )


def fisher_rao_norm(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the squared Fisher-Rao norm theta^T F theta (Liang et al. 2019, definition 2).

    At a predicted position, theta^T J^T (diag p - p p^T) J theta is the variance under the prediction p of the
    derivative of the logits along theta: exact for each input, with no label and no random draw. The error covers
    the inputs. It does not depend on how the same function is parametrized, where that is by rescaling: where
    theta_1 * c and theta_2 / c give the same function, so do the directional derivatives.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; the labels' values are not used.
        options: See `MeasureOptions`; `parameters` are theta.

    Raises:
        IsolossError: As for `fisher_trace`, or a part of the model has no second derivative.
        InterruptedEstimate: As for `fisher_trace`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import fisher_rao_norm
        >>> model, batches = tiny_bert()
        >>> norm = fisher_rao_norm(model, batches)
        >>> norm.value > 0, norm.num_probes
        (True, 0)
    """
    return measure(_FisherRao, model, batches, options)


def relative_flatness(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the relative flatness of the last linear map, the one that gives the logits (Petzka et al. 2021).

    For the rows w_s of a layer's weight and the blocks H_ss' of the loss's Hessian by two rows, relative flatness is
    `kappa = sum_{s,s'} <w_s, w_s'> Tr H_ss'`. The features are here the input h of the last linear map, whose logits
    are linear in its weight: the Hessian is the Gauss-Newton matrix, whatever the labels, and with the prediction p at
    a position `Tr H_ss' = (p_s [s = s'] - p_s p_s') |h|^2`. So kappa is the mean over predicted positions of
    `|h|^2 (sum_s p_s |w_s|^2 - |sum_s p_s w_s|^2)`, from one forward pass, exact for each input. The weight is taken as
    this map's alone where it is tied to the embeddings; the bias has no part in it. Multiplying h and dividing the
    weight, as a whole, does not change it, and what the layers below do to give the same h does not either. The
    smaller, the flatter. The error covers the inputs.

    Args:
        model: As for `fisher_trace`, with any attention. The logits must be the output of its last linear map.
        batches: As for `fisher_trace`; the labels' values are not used.
        options: See `MeasureOptions`; `parameters` are not taken.

    Raises:
        IsolossError: As for `fisher_trace`, `parameters` are given, or something follows the last linear map.
        InterruptedEstimate: Ctrl-C after at least two clusters; it carries the estimate so far.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import relative_flatness
        >>> model, batches = tiny_bert()
        >>> flatness = relative_flatness(model, batches)
        >>> flatness.value > 0, flatness.num_probes
        (True, 0)
    """
    if options.get("parameters") is not None:
        raise IsolossError("parameters are given, but relative flatness is of the last linear map's weight alone")
    return measure(_RelativeFlatness, model, batches, options)


class _ByPosition(Estimator):
    """A number for each predicted position, exact for its inputs, summed over positions."""

    by_parameter = False

    @abc.abstractmethod
    def values(self, batch: Batch) -> torch.Tensor:
        """Return (m,) float64 on the CPU."""

    def measure(self, batch: CheckedBatch) -> BatchSums:
        checked = batch.checked
        sums = torch.zeros(len(checked.predicted), dtype=torch.float64)
        if checked.predicts:
            sums.index_add_(0, checked.predicted.nonzero()[:, 0].cpu(), self.values(checked))
        return BatchSums(sums[:, None], checked.predicted.sum(dim=1).cpu(), torch.zeros(len(sums), 0))

    def details(self) -> dict[str, Any]:
        return {"error_covers": "inputs"}


class _FisherRao(_ByPosition):
    """The variance under the prediction of the logits' derivative along the parameters."""

    method = "squared Fisher-Rao norm"

    def values(self, batch: Batch) -> torch.Tensor:
        along = [value.detach() for value in self.parameters.values()]
        return prediction_variances(self.model, self.parameters, along, batch)


class _RelativeFlatness(_ByPosition):
    """The squared norm of the last linear map's input times the variance under the prediction of the weight's rows."""

    method = "relative flatness of the last linear map"

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        predictions = predict(self.model, batch, Capture({}, batch.predicted), PositionSelection())
        if predictions is None or predictions.hidden is None or predictions.decoder is None:
            raise IsolossError(
                f"the logits of {type(self.model).__name__} are not the output of its last linear map, whose relative "
                "flatness was asked for"
            )
        weight = predictions.decoder.weight.double()
        squares, variances = weight.square().sum(dim=1), []
        for logits in torch.split(predictions.logits, _POSITIONS):
            p = logits.double().softmax(dim=-1)
            # in float64, as the two terms nearly cancel where the model is sure
            variances.append(p @ squares - (p @ weight).square().sum(dim=1))
        return (predictions.hidden.double().square().sum(dim=1) * torch.cat(variances)).cpu()


def weighted_fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_probes: int = 1,
    seed: int = 0,
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate sum_i theta_i^2 F_ii: the Fisher's trace, each parameter counted by its square.

    Rescaling a unit's inputs by c and its outputs by 1 / c, which leaves the function as it is and changes the plain
    trace (Dinh et al. 2017), leaves this sum as it is: theta_i times the derivative by theta_i does not change. With
    relative noise of variance s^2 on each weight, s^2 / 2 times this sum is the expected rise of the loss to leading
    order, at saturation.

    The expectation over labels is exact, as in `fisher_trace`: with the cotangent u = S v on a sequence's logits, g =
    J^T u, the value is the mean of sum_i theta_i^2 g_i^2. Each sequence takes a forward and a backward pass of its own,
    one backward pass per probe.

    The error covers inputs and probes.

    Args:
        model: As for `fisher_trace`.
        batches: As for `fisher_trace`; the labels' values are not used.
        num_probes: Rademacher probes per position (default 1).
        seed: Decides the probes.
        options: See `MeasureOptions`.

    Raises:
        IsolossError: As for `fisher_trace`.
        InterruptedEstimate: As for `fisher_trace`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import weighted_fisher_trace
        >>> model, batches = tiny_bert()
        >>> trace = weighted_fisher_trace(model, batches)
        >>> trace.value > 0, trace.samples
        (True, 64)
    """
    return measure(_Weighted, model, batches, options, num_probes=num_probes, seed=seed)


class _Weighted(Estimator):
    """Squared gradients times squared parameters, a sequence at a time."""

    method = "Fisher weighted by squared parameters, exact expectation over labels"

    def measure(self, batch: CheckedBatch) -> BatchSums:
        positions = batch.checked.predicted.sum(dim=1).cpu()
        values = torch.zeros(len(positions), len(self.columns), dtype=torch.float64)
        for row in positions.nonzero()[:, 0].tolist():
            one = batch.checked.rows(torch.tensor([row]))
            values[row] = self._sequence(one, positions[row : row + 1], batch.first + row)
        return BatchSums(values, positions, torch.zeros(len(values), 0))

    def details(self) -> dict[str, Any]:
        return {"error_covers": "inputs and probes", **super().details()}

    def _sequence(self, batch: Batch, count: torch.Tensor, index: int) -> torch.Tensor:
        total = torch.zeros(len(self.columns), dtype=torch.float64)
        logits = predicted_logits(self.model, batch)
        for probe in self.probes():
            cotangent = controls.root_probabilities(logits)
            controls.exact_labels_(cotangent, count, range(index, index + 1), seed=self.seed, probe=probe)
            for name, gradient in self.gradients(logits, cotangent.to(logits.dtype)):
                squares = (self.parameters[name].detach() * gradient).double().square()
                total[self.columns.of[name]] += self.columns.sums(name, squares).cpu() / self.num_probes
        return total
