"""Solutions of the pre-training task: two neurons, four on their kinks, random features (Theorem G.6), and descent.

The descent lowers the trace by the gradient among the solutions, over all of Q, K, V and u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.bracket_language.attention import BracketAttention, Inputs, num_inputs
from isoloss.paper.theory.bracket_language.trace import bound, squares

RATE = 0.05  # of Adam; it falls to 0 over the second half of the steps
WEIGHTS = (10.0, 1e5)  # of the loss beside trace / bound, at the first and the last step
KEPT = 60  # points of the path that are kept


def with_even_attention(value: torch.Tensor, output: torch.Tensor) -> BracketAttention:
    """Return the model with (m, 2 T) V, (m,) u and Q = K = 0, in float64."""
    width, dimensions = value.shape
    model = BracketAttention(length=dimensions // 2, width=width, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.value.copy_(value)
        model.output.copy_(output)
    return model


def two_neurons(length: int, width: int) -> BracketAttention:
    """Return the paper's transferable solution (1): even attention, V_1 = c [1; 0], V_2 = -c [1; 0], f = g* everywhere.

    Any c > 0 gives this function with u_1 = -m T / c and u_2 = m T / c: the attention averages the encodings where the
    paper's neurons read their sum. This is the flattest: it has `c = sqrt(m) T^(3/4)`, where the trace of the Hessian
    is `4 / (m sqrt(T))`. All other weights are 0.
    """
    if width < 2:
        raise IsolossError(f"the solution needs two neurons and the model has {width}")
    value, output = torch.zeros(width, 2 * length).double(), torch.zeros(width).double()
    scale = width**0.5 * length**0.75
    value[0, :length], value[1, :length] = scale, -scale
    output[0], output[1] = -width * length / scale, width * length / scale
    return with_even_attention(value, output)


def on_the_kink(length: int) -> BracketAttention:
    r"""Return a solution of four neurons that obeys conditions (3) to (5) and reads more than the answer.

    Let w = [1; 0], so that the answer is -<w, z>, and let v = e_1 + e_{T+1} read the first token: <v, z> is 1 or -1
    on every input, hidden or not. The neurons are c/2 (w + v) and c/2 (w - v), and their negatives. Of the first two,
    one is c and the other 0 wherever <w, z> = 1; so every input lies on a neuron's kink, where relu has no
    derivative. With `>` in the conditions, as the paper writes them, such a neuron does not count; with `>=`, as in
    its inequality (7), it does, and the trace is above the bound.
    """
    w, v = torch.zeros(2, 2 * length, dtype=torch.float64)
    w[:length] = 1
    v[0] = v[length] = 1
    width = 4
    scale = math.sqrt(width) * length**0.75
    value = scale / 2 * torch.stack([w + v, w - v, -w - v, v - w])
    output = width * length / scale * torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    return with_even_attention(value, output)


def full_width(length: int) -> int:
    """Return how many random features fit every input exactly: T C(T, T/2) + 2 T.

    Features of z and -z have a sum that is even, `|<V, z>|`, one for each pair of inputs, and a difference that is
    linear in z, with 2 T dimensions. The answer is linear, so the sums must cancel at each of the pairs.

    Example:
        >>> full_width(6), full_width(8), full_width(10)
        (132, 576, 2540)
    """
    return num_inputs(length) // 2 + 2 * length


def random_features(inputs: Inputs, width: int, *, seed: int) -> BracketAttention:
    """Return the paper's solution (2): V_i normal with covariance T I, u of least norm among those of least loss."""
    least = full_width(inputs.length)
    if width < least:
        raise IsolossError(f"the width is {width}; random features fit every input of {inputs.length} from {least} on")
    value = _values(inputs.length, width, seed)
    rows, targets = _equations(inputs, value)
    output = torch.linalg.lstsq(rows, targets[:, None], driver="gels").solution[:, 0]
    return with_even_attention(value, output)


@torch.no_grad()
def balanced(model: BracketAttention, inputs: Inputs) -> BracketAttention:
    """Return the same function with the least trace that scaling can give: V_i times s_i, u_i over s_i.

    The model must have Q = K = 0, so that `|h|` is the same for every input.
    """
    h = inputs.z / inputs.length
    values, active = torch.zeros(2, len(model.output), dtype=torch.float64)
    for block in torch.split(h, 512):
        reads = block @ model.value.T
        values += reads.relu().square().sum(dim=0)
        active += (reads > 0).sum(dim=0) / inputs.length
    wanted = (model.output.square() * active / values).pow(0.25)
    scale = torch.where((values > 0) & (model.output != 0), wanted, 1.0)  # an idle neuron stays as it is
    return with_even_attention(model.value * scale[:, None], model.output / scale)


def losses_by_width(inputs: Inputs, *, seed: int) -> torch.Tensor:
    """Return (w + 1,): the least loss that u can reach over the first 0, 1, ..., w random features, w the full width.

    One orthogonal basis serves every width: feature by feature it takes away a part of the answer.
    """
    rows, targets = _equations(inputs, _values(inputs.length, full_width(inputs.length), seed))
    basis = torch.linalg.qr(rows).Q
    parts = (targets @ basis).square()
    left = parts.flip(0).cumsum(0).flip(0)
    return torch.cat([left, torch.zeros(1, dtype=left.dtype)])


def shifted_signs(k: int) -> torch.Tensor:
    """Return (2k + 1, 2k + 1): Lemma G.5's matrix, the row of k + 1 ones and k minus ones in every cyclic shift.

    Example:
        >>> shifted_signs(1).long().tolist()
        [[1, 1, -1], [-1, 1, 1], [1, -1, 1]]
    """
    row = torch.cat([torch.ones(k + 1, dtype=torch.float64), -torch.ones(k, dtype=torch.float64)])
    return torch.stack([row.roll(shift) for shift in range(2 * k + 1)])


def _values(length: int, width: int, seed: int) -> torch.Tensor:
    generator = seeds.generator(seed, "brackets", "features", length)
    return math.sqrt(length) * torch.randn(width, 2 * length, generator=generator, dtype=torch.float64)


def _equations(inputs: Inputs, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (full width, m) rows and targets such that |rows @ u - targets|^2 is the loss of u over the features.

    The loss is the sum over pairs z and -z of the squares of the even and of the odd part; the odd part, linear in z,
    is brought to 2 T rows.
    """
    length, width = inputs.length, len(value)
    pairs = inputs.z[inputs.z @ torch.arange(2 * length).double().exp2() > 0]  # z, not -z
    weight = 1 / (2 * width * length * math.sqrt(len(pairs)))
    triangle = torch.linalg.qr(pairs, mode="r").R
    answer = torch.zeros(2 * length, dtype=torch.float64)
    answer[:length] = -1
    odd = triangle @ value.T
    rows = torch.cat([(pairs @ value.T).abs(), odd]) * weight
    targets = torch.cat([torch.zeros(len(pairs), dtype=torch.float64), triangle @ answer / math.sqrt(len(pairs))])
    return rows, targets


@dataclass(frozen=True, kw_only=True)
class PathPoint:
    """Where the descent is."""

    step: int  # steps taken
    ratio: float  # trace as a multiple of the bound
    loss: float  # mean squared error


def initial(length: int, width: int, *, seed: int) -> BracketAttention:
    """Return random weights with variance 1 / (2 T) for Q, K and V and 1 for u, in float64."""
    return BracketAttention(length=length, width=width, seed=seeds.derive(seed, "brackets", "start", length)).double()


def descend(
    model: BracketAttention, inputs: Inputs, *, steps: int, progress: Callable[[], None] | None = None
) -> list[PathPoint]:
    """Minimize `trace / bound + weight * loss` in place with Adam, the weight growing with the steps; return the path.

    The trace is `2 E |grad f|^2`, differentiated once more; the relu's kinks, where it jumps, have no derivative. Each
    step sees all inputs. The model need not solve the task at the start; `progress` is called after every step.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    least, path = bound(inputs.length, len(model.output)), []
    first, last = map(math.log, WEIGHTS)
    for step in range(steps):
        fraction = step / steps
        optimizer.param_groups[0]["lr"] = RATE * min(1, 2 * (1 - fraction))
        at = squares(model, inputs.z)
        ratio = 2 * (at.neurons + at.attention).mean() / least
        loss = (at.outputs - inputs.y).square().mean()
        if step % max(1, steps // KEPT) == 0:
            path.append(PathPoint(step=step, ratio=float(ratio.detach()), loss=float(loss.detach())))
        optimizer.zero_grad()
        (ratio + math.exp(first + fraction * (last - first)) * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress()
    return path
