"""Explicit flatness regularisation (the paper's appendix D asks for it): the trace of the Fisher matrix as a penalty.

Shapes: m predicted tokens, V token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from isoloss.models.make import predicted_logits
from isoloss.run_config import OptimizerConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, Batch
from isoloss.training.algorithms.config import FisherPenaltyConfig
from isoloss.training.data_parallel import Alone
from isoloss.training.distributed import Processes
from isoloss.training.steps import GradientStep, Loss, num_sentences, split, without_dropout


def trace_estimate(
    logits: torch.Tensor,
    parameters: Sequence[torch.nn.Parameter],
    signs: torch.Tensor,
    processes: Processes | None = None,
) -> torch.Tensor:
    """Return an unbiased estimate of the trace of the Fisher matrix of the mean loss, which can be differentiated.

    With p the prediction of a row, S = diag(sqrt p) - p sqrt(p)^T and v of V random signs, the cotangent u = S v has
    E[u u^T] = diag(p) - p p^T, so that E ||J^T u||^2 is the sum over labels y of p_y ||grad log p_y||^2. One backward
    pass serves all rows: those of independent signs have no cross terms on average, and the estimate is
    ||sum_rows J^T u||^2 / m. Labels are integrated out, not sampled, because the gradient of an average over sampled
    labels misses that the labels' probabilities depend on the parameters; u is differentiated, too.

    Where processes have rows each, the estimate is that of all rows together, and so is the sum over the processes of
    what its gradients are: with g = sum_rows J^T u of this process and G that of all, it is ||G||^2 / m, differentiated
    as 2 G . g / m.

    Args:
        logits: (m, V), a function of the parameters with second derivatives.
        parameters: Over which the trace is.
        signs: (m, V) of -1 and 1.
        processes: Who has rows; None: this process alone.
    """
    processes = processes or Processes()
    log_p = logits.log_softmax(dim=1)
    p, root = log_p.exp(), (log_p / 2).exp()
    cotangent = root * signs - p * (root * signs).sum(dim=1, keepdim=True)
    gradients = torch.autograd.grad(
        logits, parameters, grad_outputs=cotangent, create_graph=True, materialize_grads=True
    )
    (m,) = processes.sum(len(logits))
    if processes.world_size == 1:
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum() / m
    totals = processes.sum_tensors(list(gradients))
    value = torch.stack([total.square().sum() for total in totals]).sum() / m
    moving = torch.stack([(2 * total * own).sum() for total, own in zip(totals, gradients, strict=True)]).sum() / m
    return value + moving - moving.detach()


class FisherPenaltyStep(GradientStep):
    """The gradient of L + coefficient * (estimate of the trace), given to the optimizer, by a double backward pass.

    The trace is per predicted token, as `isoloss.flatness.fisher_trace` measures it: on the first sentences of
    the batch, without dropout, with random signs that are a function of seed, step and sentence. Second derivatives
    need attention's eager kernel, which the model is given if it has another. `trace_estimate` is the estimate.

    Args:
        model: As for `GradientStep`; a language model of `isoloss.models`.
        config: As for `GradientStep`.
        penalty: The coefficient and the number of sentences.
        causal: Whether the labels are next tokens.
        seed: The run's seed; the streams are `("penalty", step, i)` for the i-th sentence of the batch.
        total: As for `GradientStep`.
        micro_batch: As for `GradientStep`; the penalty's sentences always go together.
        parallel: As for `GradientStep`; each process has parameters of its own, and sentences.
    """

    def __init__(
        self,
        model: Any,
        config: OptimizerConfig,
        penalty: FisherPenaltyConfig,
        *,
        causal: bool,
        seed: int,
        total: int,
        micro_batch: int = 0,
        parallel: Alone | None = None,
    ) -> None:
        super().__init__(model, config, total=total, micro_batch=micro_batch, parallel=parallel)
        if model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
        self._model, self._penalty, self._causal, self._seed = model, penalty, causal, seed

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the objective; see `GradientStep.add_gradient`."""
        processes = self.parallel.processes
        n, wanted = num_sentences(batch), processes.count(self._penalty.sentences)
        group = split(batch, [wanted, n - wanted])[0] if wanted < n else batch
        with without_dropout(self._model):
            logits = self.parallel.aside(partial(predicted_logits, causal=self._causal), group)
        signs = self._signs(number, group, logits)
        trace = trace_estimate(logits, self.optimizer.parameters, signs, processes)
        # the processes' gradients are averaged, and the sum is wanted
        (processes.world_size * self._penalty.coefficient * trace).backward()  # type: ignore[no-untyped-call]
        return self.add_loss_gradient(batch, loss), {"trace_estimate": trace.item()}

    def _signs(self, number: int, group: Batch, logits: torch.Tensor) -> torch.Tensor:
        """Return random signs for the logits, drawn sentence by sentence: the same whichever process has which."""
        counts = (group["labels"] != IGNORED).sum(dim=1).tolist()
        places = range(num_sentences(group) * self.parallel.processes.world_size)[self.parallel.processes.rows()]
        streams = [generator(self._seed, "penalty", number, place) for place in places]
        draws = [
            torch.randint(0, 2, (count, logits.shape[1]), generator=stream)
            for count, stream in zip(counts, streams, strict=True)
        ]
        return (2 * torch.cat(draws) - 1).to(logits.device, logits.dtype)
