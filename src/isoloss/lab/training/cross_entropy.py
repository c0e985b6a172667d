"""Cross-entropy of a linear output layer, chunk by chunk: the logits of a large vocabulary never exist all at once.

Shapes: k predicted tokens, d the width, V token ids.
"""

from __future__ import annotations

from typing import Any

import torch

from isoloss.errors import IsolossError

# Logits held at a time. In float32 they take 16 MiB, below the 32 MiB from which glibc gives every buffer back to the
# system when it is freed: fetching it again, page by page, at every step takes longer than filling it.
_CHUNK = 1 << 22


def linear_cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the mean of `-log softmax(states @ weight.T + bias)[label]` over the rows, in nats: a scalar.

    Labels can be probabilities q instead: then it is the mean of `-sum_c q_c log softmax(...)_c`.

    Value and gradient agree with `torch.nn.functional.cross_entropy` on the logits. The gradient is computed with the
    value, so that no logits are kept: with p the softmax of a row and e the unit vector of its label, the gradient by
    the row's logits is (p - e) / k, or (sum(q) p - q) / k.

    The states are (k, d), at least one row, and the weight (V, d). Labels are (k,) int64, ids from 0 to V - 1; or (k,
    C) probabilities of the ids 0 to C - 1, C at most V.

    Raises:
        IsolossError: A gradient that can itself be differentiated is asked for.

    Example:
        >>> import torch
        >>> from isoloss.lab.training.cross_entropy import linear_cross_entropy
        >>> round(float(linear_cross_entropy(torch.zeros(3, 2), torch.ones(5, 2), None, torch.tensor([0, 1, 4]))), 4)
        1.6094
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(states, weight, bias, labels)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        k, num_ids, is_ids = len(states), len(weight), labels.ndim == 1
        size = max(1, min(k, _CHUNK // num_ids))
        # one buffer for all chunks, in which the logits of each become their gradient
        buffer = states.new_empty(size, num_ids)
        losses = states.new_empty(k)
        d_states, d_weight = torch.empty_like(states), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, k, size):
            rows = slice(start, min(start + size, k))
            logits = torch.mm(states[rows], weight.T, out=buffer[: rows.stop - start])
            if bias is not None:
                logits += bias
            # then exp cannot overflow; neither loss nor gradient changes
            logits -= logits.amax(dim=1, keepdim=True)
            losses[rows] = _ids(logits, labels[rows, None]) if is_ids else _mixed(logits, labels[rows])
            logits /= k
            torch.mm(logits, weight, out=d_states[rows])
            d_weight.addmm_(logits.T, states[rows])
            if d_bias is not None:
                d_bias += logits.sum(dim=0)
        ctx.save_for_backward(d_states, d_weight, d_bias)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # with create_graph, which would take the saved gradients for constants
        if torch.is_grad_enabled():
            raise IsolossError("the loss of training has no second derivative: take that of the model's logits")
        d_states, d_weight, d_bias = ctx.saved_tensors
        return d_loss * d_states, d_loss * d_weight, None if d_bias is None else d_loss * d_bias, None


def _ids(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the losses (r,) of labels (r, 1), and put their gradients in the place of the logits (r, V)."""
    # before the logits are overwritten
    at_label = logits.gather(1, label)
    total = logits.exp_().sum(dim=1, keepdim=True)
    logits.div_(total).scatter_add_(1, label, torch.full_like(at_label, -1))
    return (total.log() - at_label)[:, 0]


def _mixed(logits: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the losses (r,) of probabilities (r, C), and put their gradients in the place of the logits (r, V)."""
    mass = q.sum(dim=1, keepdim=True)
    at_labels = (q * logits[:, : q.shape[1]]).sum(dim=1)
    total = logits.exp_().sum(dim=1, keepdim=True)
    # sum(q) p, as probabilities in float32 need not add up to exactly 1
    logits.div_(total / mass)
    logits[:, : q.shape[1]] -= q
    return (total.log() * mass)[:, 0] - at_labels
