"""Trace of the loss's true Hessian at given labels: the Fisher's part and the residual.

Shapes: B sequences of a batch, K trainable parameter tensors, n clusters.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch
from isoloss.flatness._curvature import MeanLoss, hessian_vector_product, predicted_logits, second_derivatives
from isoloss.flatness._ghost import controls
from isoloss.flatness._measurement import BatchSums, Estimator, MeasureOptions, measure
from isoloss.flatness._parameters import requiring_gradients
from isoloss.flatness.fisher import ExactLabels
from isoloss.model_checks import device_of, eager_with_grad
from isoloss.statistics.estimate import Estimate


def hessian_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: Literal["residual", "published-code"] = "residual",
    num_probes: int = 1,
    seed: int = 0,
    group_size: int = 8,
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the trace of the Hessian of the mean loss per predicted token, at the given labels.

    At a position with logits f, prediction p and label y, the trace is the trace of the Fisher matrix plus the residual
    term `sum_c (p - y)_c Tr(H f_c)`. The second has mean zero over labels drawn from p, so the two traces agree where
    the predictions are the true conditionals; elsewhere, and on few inputs, it may be of any size and sign. It depends
    on each label, so it is far noisier than the Fisher's trace: `details` has both parts with their errors.

    `method="residual"` takes the Fisher's part as `fisher_trace` does, and for the rest z^T H z with a Rademacher probe
    z (independent random signs; Hutchinson 1989) and H the Hessian of `<p - y, f>` with p held fixed, summed over a
    group of sequences; each group has its own z. Groups are the clusters that the error rests on, so it covers inputs,
    labels and probes. Smaller groups have less of the probes' noise and cost more.

    `method="published-code"` is the estimator of the paper's published code, not of its appendix B.1: Gaussian z,
    z^T H z of the whole Hessian of a batch's mean loss, one probe per batch, the mean over batches. Like that code it
    leaves out poolers and the decoder's bias. Its error is over batches.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; the labels' values count.
        method: See above.
        num_probes: Random vectors per position and group; the published code takes one per batch.
        seed: Decides them.
        group_size: Sequences that share z; where batches have `documents`, the sequences of a document do.
        options: See `MeasureOptions`; a cluster is a group, or a batch for the published code: `rtol` and `seconds` end
            it after 64 of these at the earliest.

    Returns:
        The estimate, `by_parameter` adding up to `value`; with `method="residual"`, `details` has `fisher`,
        `fisher_stderr`, `residual` and `residual_stderr`.

    Raises:
        IsolossError: As for `fisher_trace`, or a part of the model has no second derivative.
        InterruptedEstimate: As for `fisher_trace`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import hessian_trace
        >>> model, batches = tiny_bert()
        >>> trace = hessian_trace(model, batches)
        >>> trace.samples, abs(trace.details["fisher"] + trace.details["residual"] - trace.value) < 1e-9
        (8, True)
    """
    if method not in _METHODS:
        raise IsolossError(f"method is {method!r}; it is one of {', '.join(_METHODS)}")
    if num_probes < 1 or (method == "published-code" and num_probes != 1):
        raise IsolossError(f"num_probes is {num_probes}; it must be at least 1, and 1 with method='published-code'")
    if group_size < 1:
        raise IsolossError(f"group_size is {group_size}; it must be at least 1")
    size = group_size if method == "residual" else 1
    return measure(_METHODS[method], model, batches, options, num_probes=num_probes, seed=seed, cluster_size=size)


class _WithResidual(ExactLabels):
    """The Fisher's part, and z^T H z of the residual for each group of sequences."""

    method = "Hessian, Fisher and residual"
    takes_shards = False
    parts = ("fisher", "residual")

    def measure(self, batch: CheckedBatch) -> BatchSums:
        terms = super().measure(batch)
        # no parameter requires a gradient while per-sequence norms are taken
        with requiring_gradients(self.parameters):
            return terms._replace(residual=self._residual(batch))

    def details(self) -> dict[str, Any]:
        return {**super().details(), "error_covers": "inputs, labels and probes"}

    def _residual(self, batch: CheckedBatch) -> torch.Tensor:
        """Return (B, K) float64: z^T H z of each group by parameter, in the row of the group's first sequence."""
        leaves = list(self.parameters.values())
        values = torch.zeros(len(batch.clusters), len(self.columns), dtype=torch.float64)
        for group in sorted(set(batch.clusters.tolist())):
            members = (batch.clusters == group).nonzero()[:, 0]
            part = batch.checked.rows(members)
            if not part.predicts:
                continue
            with second_derivatives(), eager_with_grad(self.model):
                logits = predicted_logits(self.model, part)
                # p - y without its graph: differentiated too, it would add the Fisher's part, which is measured with
                # far less noise
                error = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
                error[torch.arange(len(error), device=error.device), part.targets] -= 1
                gradients = torch.autograd.grad((error * logits).sum(), leaves, create_graph=True, allow_unused=True)
                for probe in self.probes():
                    # by the number of the group, which may lie in two batches: with the same z their forms add up to
                    # the one of the group
                    names = (self.seed, "residual", group, probe)
                    z = [
                        controls.rademacher(leaf.shape, leaf.device, *names, number).to(leaf.dtype)
                        for number, leaf in enumerate(leaves)
                    ]
                    products = hessian_vector_product(gradients, leaves, z)
                    along = [
                        self.columns.sums(name, v.double() * h.double()).cpu()
                        for name, v, h in zip(self.parameters, z, products, strict=True)
                    ]
                    # in any row of the group: rows are summed by cluster, and the group is one
                    values[members[0]] += torch.cat(along) / self.num_probes
        return values


class _PublishedCode(Estimator):
    """The estimator of the paper's published code: one probe per batch."""

    method = "Hessian, the published code"
    by_batch = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        every = self.parameters
        self.parameters = {
            n: p for n, p in every.items() if "pooler" not in n and n not in ("cls.predictions.bias", "lm_head.bias")
        }
        self._left_out = [name for name in every if name not in self.parameters]

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch that predicts something: one row."""
        loss = MeanLoss(self.model, [batch], causal=self.causal, parameters=self.parameters)
        generator = seeds.generator(self.seed, "authors", batch.number)
        z = torch.randn(loss.num_parameters, generator=generator, dtype=loss.dtype).to(device_of(self.model))
        along = z.double() * loss.hessian_product(z).double()
        parts = torch.split(along, [parameter.numel() for parameter in self.parameters.values()])
        values = torch.cat([self.columns.sums(*part) for part in zip(self.parameters, parts, strict=True)]).cpu()
        # the mean over batches whatever their size, as the published code takes it
        return BatchSums(values[None], torch.ones(1), torch.zeros(1, 0))

    def details(self) -> dict[str, Any]:
        return {
            "parameters_without_gradient": [],
            "parameters_left_out": self._left_out,
            "error_covers": "batches, labels and probes",
        }


_METHODS: dict[str, type[_WithResidual | _PublishedCode]] = {
    "residual": _WithResidual,
    "published-code": _PublishedCode,
}
