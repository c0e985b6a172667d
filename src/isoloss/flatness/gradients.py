"""The norm of the gradient of each sequence, and the mean squared gradient of each weight.

The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch, read_batches
from isoloss.flatness._curvature import predicted_logits
from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.engine import Predictions
from isoloss.flatness._measurement import BatchSums, Estimator, MeasureOptions, measure
from isoloss.flatness.fisher import PerSequence
from isoloss.model_checks import eager_with_grad
from isoloss.statistics.estimate import Estimate
from isoloss.text.clusters import SequenceClusters


@torch.inference_mode(False)
def per_sequence_grad_norms(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> torch.Tensor:
    """Return the norm of the gradient of each sequence's loss, with one backward pass per batch.

    The loss of a sequence is the mean cross-entropy over its predicted tokens at the given labels, as a model of
    transformers returns it for this sequence alone. No gradient is formed, as for `fisher_trace`.

    Args:
        model: As for `fisher_trace`.
        batches: As for `fisher_trace`; the labels' values count.
        causal: As in `MeasureOptions`.
        parameters: As in `MeasureOptions`.

    Returns:
        (n,) float64 on the CPU: the norms over all parameters, in nats per predicted token, in the order of the
        sequences; NaN where a sequence predicts nothing.

    Raises:
        IsolossError: As for `fisher_trace`, except that a single sequence is enough.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import per_sequence_grad_norms
        >>> model, batches = tiny_bert()
        >>> norms = per_sequence_grad_norms(model, batches)
        >>> one = {name: value[:1] for name, value in batches[0].items()}
        >>> model(**one).loss.backward()
        >>> norms.shape, bool(norms[0].isclose(sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()))
        (torch.Size([64]), True)
    """
    source = _GivenLoss(model, num_probes=1, causal=causal, parameters=parameters)
    norms = [torch.zeros(0, dtype=torch.float64)]
    with source:
        for batch in read_batches(batches, model=model, causal=source.causal, clusters=SequenceClusters()):
            with eager_with_grad(model):
                sums = source.measure(batch)
            if not bool(sums.values.isfinite().all()):
                raise IsolossError(f"batch {batch.number}: a gradient is not finite; use a wider dtype")
            norms.append(sums.values.sum(dim=1).sqrt() / sums.positions)
    if len(norms) == 1:
        raise IsolossError("there are no batches, so there is nothing to measure")
    return torch.cat(norms)


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_probes: int = 1,
    seed: int = 0,
    **options: Unpack[MeasureOptions],
) -> tuple[dict[str, torch.Tensor], Estimate]:
    """Estimate the diagonal of the Fisher matrix of the mean loss per predicted token, and its sum with an error.

    The entry of weight i is `E_x E_{y~f(x)} (d log f(x)_y / d theta_i)^2`, the mean over predicted positions x with the
    label y drawn from the model's own prediction f(x). It is the weight's importance in elastic weight consolidation
    (Kirkpatrick et al. 2017, arXiv:1612.00796, section 2.1) and in Fisher merging (Matena and Raffel 2022,
    arXiv:2111.09832, section 3). The sum is the trace of `fisher_trace`.

    As in `fisher_trace`, random signs take the expectation over labels: the squared gradient of `sum_r <u_r, logits_r>`
    over the positions r of a sequence has the sum over these positions as its mean. Each sequence takes one backward
    pass for each probe. With n sequences, the signs give an entry a relative error of about `sqrt(2 / (n num_probes))`.

    Args:
        model: As for `fisher_trace`.
        batches: As for `fisher_trace`; the labels' values do not count.
        num_probes: Random signs per position.
        seed: Decides the signs.
        options: See `MeasureOptions`.

    Returns:
        The entries by parameter name, each tensor in the shape of its parameter, in nats per predicted token and
        float32 or wider; tied parameters are there once. They and one gradient must fit in memory. And the estimate of
        their sum, with the error over clusters as for `fisher_trace`; its `by_parameter` has the sum over each tensor.

    Raises:
        IsolossError: As for `fisher_trace`.
        InterruptedEstimate: As for `fisher_trace`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import diagonal_fisher
        >>> model, batches = tiny_bert()
        >>> fisher, trace = diagonal_fisher(model, batches)
        >>> round(sum(float(entries.sum()) for entries in fisher.values()) / trace.value, 6)
        1.0
        >>> all(entries.shape == model.get_parameter(name).shape for name, entries in fisher.items())
        True
    """
    entries: dict[str, torch.Tensor] = {}
    trace = measure(_Squares, model, batches, options, num_probes=num_probes, seed=seed, entries=entries)
    return {name: total.div_(trace.num_predictions) for name, total in entries.items()}, trace


class _GivenLoss(PerSequence):
    """The gradient of each sequence's summed loss at the given labels: cotangents p - onehot(y)."""

    method = "gradients at the given labels"

    def _probe(
        self, predictions: Predictions, positions: torch.Tensor, first: int, probe: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cotangent = controls.root_probabilities(predictions.logits).square_()
        cotangent[torch.arange(len(cotangent), device=cotangent.device), predictions.targets] -= 1
        cotangent = cotangent.to(predictions.logits.dtype)
        return self._predictor.squared_norms(predictions, cotangent, keep=keep).by_column, None


class _Squares(Estimator):
    """The exact expectation over labels, a sequence at a time; adds the squares of each weight to `entries`."""

    method = "diagonal Fisher, exact expectation over labels"

    def __init__(self, model: nn.Module, *, entries: dict[str, torch.Tensor], **options: Any) -> None:
        super().__init__(model, **options)
        self._entries = entries
        for name, value in self.parameters.items():
            entries[name] = torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch, a sequence at a time."""
        predicted = batch.checked.predicted
        sums = torch.zeros(len(predicted), len(self.columns), dtype=torch.float64)
        for row in predicted.any(dim=1).nonzero()[:, 0].tolist():
            logits = predicted_logits(self.model, batch.checked.rows(torch.tensor([row])))
            positions, index = torch.tensor([len(logits)]), range(batch.first + row, batch.first + row + 1)
            for probe in self.probes():
                cotangent = controls.root_probabilities(logits)
                controls.exact_labels_(cotangent, positions, index, seed=self.seed, probe=probe)
                for name, gradient in self.gradients(logits, cotangent.to(logits.dtype)):
                    squares = gradient.to(self._entries[name].dtype).square().div_(self.num_probes)
                    self._entries[name] += squares
                    sums[row, self.columns.of[name]] += squares.sum(dtype=torch.float64).cpu()
        return BatchSums(sums, predicted.sum(dim=1).cpu(), torch.zeros(len(sums), 0))
