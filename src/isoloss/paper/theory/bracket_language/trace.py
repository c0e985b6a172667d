"""Lemma G.1: the trace of the Hessian at zero loss, its lower bound, and the four steps from one to the other.

Shapes: n inputs of T brackets, m neurons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isoloss.paper.theory.bracket_language.attention import BracketAttention, Inputs

UNIT = "squared answers"  # of the loss and of its second derivatives by weights
KINK = 1e-9  # cosine of a neuron and its input below which the input lies on the neuron's kink
_BLOCK = 1 << 22  # numbers of an (inputs, neurons) table that are held together


class Squares(NamedTuple):
    """What a block of inputs adds to the trace and to the steps of the bound; all (n,)."""

    outputs: torch.Tensor  # f
    neurons: torch.Tensor  # `|grad_u f|^2 + |grad_V f|^2`
    attention: torch.Tensor  # `|grad_Q f|^2 + |grad_K f|^2`
    products: torch.Tensor  # `2 / m^2 |h| sum_i |u_i| relu(V_i h)`: the part of `neurons` that no balance removes
    norms: torch.Tensor  # `|h|`, h what the attention gives
    on_kink: torch.Tensor  # whether V_i h = 0 for a neuron with V_i and u_i not 0: the Hessian does not exist


@dataclass(frozen=True, kw_only=True)
class Flatness:
    r"""Loss, trace, and why the trace is above the bound: `trace = bound * heads * balance * cancellation * evenness`.

    Each of the four factors is at least 1 where the loss is 0. They are the inequalities (6) to (9) of the paper's
    proof of Lemma G.1, and each is 1 exactly where its condition holds.
    """

    loss: float  # mean squared error
    trace: float  # `2 E |grad f|^2` over Q, K, V and u: the trace of the Hessian of the loss, where that is 0
    bound: float  # `4 / (m sqrt(T))`
    heads: float  # what the gradients of Q and K add
    balance: float  # 1 where every active neuron has `V_i h = |u_i| |h|`: condition (3)
    cancellation: float  # 1 where no two active neurons have different signs of u: condition (4)
    evenness: float  # 1 where the attention is even: condition (5)
    kink: float  # fraction of the inputs that lie on the kink of a neuron

    @property
    def ratio(self) -> float:
        """The trace as a multiple of the bound."""
        return self.trace / self.bound


def bound(length: int, width: int) -> float:
    """Return 4 / (m sqrt(T)), the least trace at zero loss.

    The paper has sqrt(4 / T) for every m; the two agree at m = 2.

    Example:
        >>> bound(4, 2), bound(4, 8)
        (1.0, 0.25)
    """
    return 4 / (width * math.sqrt(length))


def attend(model: BracketAttention, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, T) the attention a and (n, 2 T) h, what it gives, from z: as from the tokens, but without zeros."""
    scores = _by_token(z * (_queries(model, z) @ model.key))
    weights = scores.softmax(dim=1)
    return weights, z * weights.repeat(1, 2)


def squares(model: BracketAttention, z: torch.Tensor, *, count_kink: bool = False) -> Squares:
    r"""Return the squared gradients of f, differentiable by the weights almost everywhere.

    With s = V h and 1[.] the indicator of an active neuron: `|grad_u f|^2 = |relu(s)|^2 / m^2`, `|grad_V f|^2 =
    |h|^2 sum_i u_i^2 1[s_i] / m^2`; with g the gradient by h and `c_j = a_j <x_j - h, g>` that by the score of token j,
    `|grad_Q f|^2 = |K sum_j c_j x_j|^2` and `|grad_K f|^2 = |Q x_1|^2 |sum_j c_j x_j|^2`, as x_1 has length 1.
    """
    m = len(model.output)
    weights, h = attend(model, z)
    norms = h.norm(dim=1)
    reads = h @ model.value.T
    kinks = reads.abs() <= KINK * norms[:, None] * model.value.norm(dim=1)
    used = (model.value != 0).any(dim=1) & (model.output != 0)
    active = kinks | (reads > 0) if count_kink else ~kinks & (reads > 0)
    indicator = active.to(z.dtype)
    values = reads * indicator
    by_h = (indicator * model.output) @ model.value / m
    by_score = weights * (_by_token(z * by_h) - (h * by_h).sum(dim=1, keepdim=True))
    pulled = z * by_score.repeat(1, 2)
    by_key = _queries(model, z).square().sum(dim=1) * pulled.square().sum(dim=1)
    return Squares(
        outputs=values @ model.output / m,
        neurons=(values.square().sum(dim=1) + norms.square() * (indicator @ model.output.square())) / m**2,
        attention=(pulled @ model.key.T).square().sum(dim=1) + by_key,
        products=2 / m**2 * norms * (values @ model.output.abs()),
        norms=norms,
        on_kink=(kinks & used).any(dim=1),
    )


def _by_token(coordinates: torch.Tensor) -> torch.Tensor:
    """Return (n, T): the sum over the two coordinates of each token, of which one is 0."""
    length = coordinates.shape[1] // 2
    return coordinates[:, :length] + coordinates[:, length:]


def _queries(model: BracketAttention, z: torch.Tensor) -> torch.Tensor:
    """Return (n, k): Q x_1."""
    first = [0, z.shape[1] // 2]
    return z[:, first] @ model.query[:, first].T


@torch.no_grad()
def flatness(model: BracketAttention, inputs: Inputs, *, count_kink: bool = False) -> Flatness:
    """Return the loss, the trace and its factors, exactly: averaged over every input.

    Example:
        >>> from isoloss.paper.theory.bracket_language.attention import pretraining_inputs
        >>> from isoloss.paper.theory.bracket_language.solutions import two_neurons
        >>> result = flatness(two_neurons(6, 2), pretraining_inputs(6))
        >>> result.loss < 1e-9, round(result.trace * math.sqrt(6), 9)
        (True, 2.0)
    """
    m = len(model.output)
    blocks = [squares(model, z, count_kink=count_kink) for z in torch.split(inputs.z, max(1, _BLOCK // m))]
    outputs, neurons, attention, products, norms, on_kink = map(torch.cat, zip(*blocks, strict=True))
    least = bound(inputs.length, m)
    without_cancelling = 2 / m * (norms * outputs.abs()).mean()
    return Flatness(
        loss=float((outputs - inputs.y).square().mean()),
        trace=float(2 * (neurons + attention).mean()),
        bound=least,
        heads=float((neurons + attention).mean() / neurons.mean()),
        balance=float(neurons.mean() / products.mean()),
        cancellation=float(products.mean() / without_cancelling),
        evenness=float(2 * without_cancelling / least),
        kink=float(on_kink.double().mean()),
    )


def hessian_trace(model: BracketAttention, inputs: Inputs) -> float:
    """Return the trace of the Hessian of the loss by differentiating it twice, weight by weight; for small models."""
    weights = list(model.parameters())
    loss = (squares(model, inputs.z).outputs - inputs.y).square().mean()
    flat = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights, create_graph=True)])
    identity = torch.eye(len(flat), dtype=flat.dtype)
    rows = torch.autograd.grad(flat, weights, identity, is_grads_batched=True)
    return float(torch.cat([row.flatten(start_dim=1) for row in rows], dim=1).trace())
