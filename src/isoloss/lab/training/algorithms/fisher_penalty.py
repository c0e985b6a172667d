"""Explicit flatness regularization (the paper's appendix D asks for it): the trace of the Fisher matrix as a penalty.

Shapes: m predicted tokens, V token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.lab.models.make import predicted_logits
from isoloss.lab.training.algorithms.base import (
    Loss,
    TrainingAlgorithm,
    TrainingContext,
    num_sentences,
    split,
    without_dropout,
)
from isoloss.lab.training.algorithms.config import FisherPenaltyConfig
from isoloss.lab.training.distributed import ProcessGroup
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, Batch


def trace_estimate(
    logits: torch.Tensor,
    parameters: Sequence[torch.nn.Parameter],
    probes: torch.Tensor,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Return an unbiased estimate of the trace of the Fisher matrix of the mean loss, which can be differentiated.

    With p the prediction of a row, S = diag(sqrt p) - p sqrt(p)^T and v a Rademacher probe of V signs, the cotangent
    u = S v has E[u u^T] = diag(p) - p p^T, so that E ||J^T u||^2 is the sum over labels y of p_y ||grad log p_y||^2.
    One backward pass serves all rows: as their probes are independent, cross terms are 0 on average, and the estimate
    is ||sum_rows J^T u||^2 / m. The expectation over labels is exact, not sampled, because the gradient of an average
    over sampled labels misses that the labels' probabilities depend on the parameters; u is differentiated, too.

    With several processes, which have some of the rows each, the value is the estimate of all rows together. With
    g = sum_rows J^T u over this process's rows and G its sum over the processes, that is ||G||^2 / m. Each process
    differentiates 2 G . g / m with G constant; summed over the processes, these are the gradient of ||G||^2 / m.

    The logits (m, V) are a function of the parameters with second derivatives, and the probes (m, V) are -1 and 1.
    """
    group = group or ProcessGroup()
    log_p = logits.log_softmax(dim=1)
    # not p.sqrt(): where p underflows to 0 its derivative is infinite
    p, root = log_p.exp(), (log_p / 2).exp()
    cotangent = root * probes - p * (root * probes).sum(dim=1, keepdim=True)
    # zeros for parameters that the logits do not depend on, as the sums over processes need one shape in each
    gradients = torch.autograd.grad(
        logits, parameters, grad_outputs=cotangent, create_graph=True, materialize_grads=True
    )
    (m,) = group.sum(len(logits))
    if group.world_size == 1:
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum() / m
    # these are constants, and `linear` carries the derivative
    totals = group.sum_tensors(list(gradients))
    value = torch.stack([total.square().sum() for total in totals]).sum() / m
    pairs = zip(totals, gradients, strict=True)
    linear = torch.stack([(2 * total * gradient).sum() for total, gradient in pairs]).sum() / m
    return value + linear - linear.detach()


class FisherPenalty(TrainingAlgorithm):
    """The gradient of L + weight * (estimate of the trace, or its log), given to the optimizer, by double backward.

    A weight below 0 makes the model sharper; a weight of 0 is a sham, with the gradient of L bit for bit. The trace is
    that of the parameters whose names match one of the config's patterns; its gradient is over all parameters.

    The trace is per predicted token, as `isoloss.flatness.fisher_trace` measures it: on the first sentences of
    the batch, without dropout, with Rademacher probes that are a function of seed, step and sentence. Second
    derivatives need attention's eager kernel, which the model is given if it has another. `trace_estimate` is the
    estimate. The penalty's sentences always go together whatever the `micro_batch_size`, and on several processes each
    needs full parameters, and sentences. The streams are `("penalty", step, i)` for the i-th sentence of the batch.
    """

    config: FisherPenaltyConfig

    def __init__(self, model: Any, context: TrainingContext, config: FisherPenaltyConfig) -> None:
        super().__init__(model, context, config)
        if model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matched = {pattern: [name for name in named if fnmatchcase(name, pattern)] for pattern in config.parameters}
        for pattern, names in matched.items():
            if not names:
                raise IsolossError(
                    f"no parameter of the model matches {pattern!r}, whose trace is to be penalized; some of its "
                    f"parameters are {', '.join(list(named)[:3])} and {list(named)[-1]}"
                )
        self._penalized = [p for name, p in named.items() if any(name in names for names in matched.values())]

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the objective; see `TrainingAlgorithm.add_gradient`."""
        group = self.parallel.group
        n, wanted = num_sentences(batch), group.count(self.config.sentences)
        first = split(batch, [wanted, n - wanted])[0] if wanted < n else batch
        with without_dropout(self.model):
            logits = self.parallel.auxiliary(partial(predicted_logits, causal=self.context.causal), first)
        trace = trace_estimate(logits, self._penalized, self._probes(number, first, logits), group)
        if self.config.weight:
            # The processes' gradients are averaged, and the sum is wanted. With DDP it is the loss's backward pass,
            # which must therefore come second, that averages these too.
            penalized = trace.log() if self.config.logarithm else trace
            (group.world_size * self.config.weight * penalized).backward()  # type: ignore[no-untyped-call]
        return self.add_loss_gradient(batch, loss), {"trace_estimate": trace.item()}

    def _probes(self, number: int, first: Batch, logits: torch.Tensor) -> torch.Tensor:
        """Return Rademacher probes for the logits, drawn sentence by sentence: the same whichever process has which."""
        group, counts = self.parallel.group, (first["labels"] != IGNORED).sum(dim=1).tolist()
        sentences = range(num_sentences(first) * group.world_size)[group.rows()]
        streams = [generator(self.context.seed, "penalty", number, sentence) for sentence in sentences]
        draws = [
            torch.randint(0, 2, (count, logits.shape[1]), generator=stream)
            for count, stream in zip(counts, streams, strict=True)
        ]
        return (2 * torch.cat(draws) - 1).to(logits.device, logits.dtype)
