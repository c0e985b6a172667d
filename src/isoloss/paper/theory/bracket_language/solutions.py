"""Solutions of the pre-training task: two neurons, four neurons on their kinks, and random features (Theorem G.6)."""

from __future__ import annotations

import math

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.bracket_language.attention import BracketAttention
from isoloss.paper.theory.bracket_language.inputs import Inputs, num_inputs


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
    """Return the paper's transferable solution, solution (1), at its flattest; errors as for `use_two_neurons`."""
    model = BracketAttention(length=length, width=width, seed=0).double()
    model.use_two_neurons()
    return model


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
    """Return the paper's solution (2): V_i normal with covariance T I, u of least norm among those of least loss.

    Args:
        inputs: All inputs of the pre-training task.
        width: m, from the width that fits every input.
        seed: Decides V.

    Raises:
        IsolossError: The width is below that.
    """
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

    Args:
        model: A model with Q = K = 0, so that `|h|` is the same for every input.
        inputs: All inputs of the pre-training task.
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

    Args:
        inputs: All inputs of the pre-training task.
        seed: Decides the features.
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
