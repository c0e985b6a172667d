"""Squared gradients of the paper's model of brackets (section 5), in closed form.

The model is f = u^T relu(V h), h = sum_j a_j x_j, a = softmax_j <Q x_1, K x_j>, without the paper's factor 1 / m.
Shapes: n inputs of T brackets, 2 T the width of an encoding, m neurons, k the width of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

KINK = 1e-9  # cosine of a neuron and its input below which the input lies on the neuron's kink


class Weights(NamedTuple):
    """The weights of f."""

    query: torch.Tensor  # (k, 2 T) Q
    key: torch.Tensor  # (k, 2 T) K
    value: torch.Tensor  # (m, 2 T) V
    output: torch.Tensor  # (m,) u


class Squares(NamedTuple):
    """The squared gradients of f at n inputs, by rows of the weights, and what the bound on their sum is made of."""

    outputs: torch.Tensor  # (n,) f
    query: torch.Tensor  # (n, k) `|grad f|^2` by each row of Q
    key: torch.Tensor  # (n, k) of K
    value: torch.Tensor  # (n, m) of V
    output: torch.Tensor  # (n, m) by each entry of u
    terms: torch.Tensor  # (n, m) |u_i| relu(V_i h); a neuron's share of `value + output` is 2 |h| times this or more
    norms: torch.Tensor  # (n,) |h|
    on_kink: torch.Tensor  # (n,) whether V_i h = 0 for a neuron with V_i and u_i not 0: the Hessian does not exist


def attend(weights: Weights, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, T) the attention a and (n, 2 T) h, what it gives, from z (n, 2 T), the sum of the encoded tokens."""
    scores = _by_token(z * (_queries(weights, z) @ weights.key))
    attention = scores.softmax(dim=1)
    # coordinates j and j + T are of one token
    return attention, z * attention.repeat(1, 2)


def squares(weights: Weights, z: torch.Tensor, *, count_kink: bool = False) -> Squares:
    r"""Return the squared gradients of f, differentiable by the weights almost everywhere.

    With s = V h and 1[.] the indicator of an active neuron: `|grad_u_i f|^2 = relu(s_i)^2` and `|grad_V_i f|^2 = |h|^2
    u_i^2 1[s_i]`; with g the gradient by h, `c_j = a_j <x_j - h, g>` that by the score of token j and `p = sum_j c_j
    x_j`: `|grad_Q_d f|^2 = <K_d, p>^2` and `|grad_K_d f|^2 = <Q_d, x_1>^2 |p|^2`, as x_1 has length 1.
    """
    attention, h = attend(weights, z)
    norms = h.norm(dim=1)
    reads = h @ weights.value.T
    # on a kink rounding decides the sign of V_i h; so kinks are found first, and count as active by choice alone
    kinks = reads.abs() <= KINK * norms[:, None] * weights.value.norm(dim=1)
    used = (weights.value != 0).any(dim=1) & (weights.output != 0)
    active = kinks | (reads > 0) if count_kink else ~kinks & (reads > 0)
    indicator = active.to(z.dtype)
    # relu(V h), (n, m), which a descent differentiates with the indicator as a constant
    values = reads * indicator
    # g, (n, 2 T); then c, (n, T), by the Jacobian of the softmax; then p, (n, 2 T)
    by_h = (indicator * weights.output) @ weights.value
    by_score = attention * (_by_token(z * by_h) - (h * by_h).sum(dim=1, keepdim=True))
    pulled = z * by_score.repeat(1, 2)
    return Squares(
        outputs=values @ weights.output,
        query=(pulled @ weights.key.T).square(),
        key=_queries(weights, z).square() * pulled.square().sum(dim=1, keepdim=True),
        value=norms.square()[:, None] * indicator * weights.output.square(),
        output=values.square(),
        terms=values * weights.output.abs(),
        norms=norms,
        on_kink=(kinks & used).any(dim=1),
    )


def _by_token(coordinates: torch.Tensor) -> torch.Tensor:
    """Return (n, T): the sum over the two coordinates of each token, of which one is 0."""
    length = coordinates.shape[1] // 2
    return coordinates[:, :length] + coordinates[:, length:]


def _queries(weights: Weights, z: torch.Tensor) -> torch.Tensor:
    """Return (n, k): Q x_1."""
    first = [0, z.shape[1] // 2]
    return z[:, first] @ weights.query[:, first].T
