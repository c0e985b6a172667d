"""The paper's estimator of the Fisher's trace, as appendix B.1 states it: a slow reference implementation.

Shapes: n sequences of a batch, T positions, V vocabulary, K trainable parameter tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from isoloss import seeds
from isoloss.flatness.engine.curvature_products import predicted_logits
from isoloss.flatness.engine.predictions import Batch
from isoloss.model_checks import plainly


def sampled_label_norms(
    model: nn.Module,
    batch: Batch,
    parameters: Mapping[str, nn.Parameter],
    *,
    first: int,
    num_labels: int,
    seed: int,
) -> tuple[torch.Tensor, set[str]]:
    """Return the squared norms of grad log f(x)_y, averaged over sampled labels y and summed over positions x.

    Each sequence has a forward pass of its own, and each label of each predicted position a backward pass.
    """
    norms = torch.zeros(len(batch.predicted), len(parameters), dtype=torch.float64)
    reached: set[str] = set()
    for row, predicted in enumerate(batch.predicted):
        if not bool(predicted.any()):
            continue
        generator = seeds.generator(seed, "labels", first + row)
        with plainly(model):
            logits = predicted_logits(model, batch.rows(torch.tensor([row])))
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
            for position in log_p:
                p = position.detach().cpu().double().exp()
                for label in torch.multinomial(p, num_labels, replacement=True, generator=generator).tolist():
                    gradients = torch.autograd.grad(
                        position[label], list(parameters.values()), retain_graph=True, allow_unused=True
                    )
                    for column, (name, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                        if gradient is not None:
                            reached.add(name)
                            norms[row, column] += _square_norm(gradient) / num_labels
    return norms, reached


def _square_norm(gradient: torch.Tensor) -> float:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return float(dense.to(torch.promote_types(dense.dtype, torch.float32)).square().sum())
