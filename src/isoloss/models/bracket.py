"""The paper's one-layer attention model of the bracket language (section 5), which predicts g* by squared loss.

Shapes: n sentences of T brackets, d = 2 T the width of the encoding, m neurons, k the width of queries and keys.
"""

from __future__ import annotations

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.dyck import CLOSE, OPEN, Brackets


def encode(tokens: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """Return sentences of brackets, some of them hidden, as the paper encodes them: (n, T, 2 T).

    Position t (from 0) is e_t where `<` stands, -e_t where `>` stands, and e_{t + T} or -e_{t + T}, each with
    probability 1/2, where the bracket is hidden. So g* = -<1_T, [sum_t x_t]_{1:T}>, the number of `>` less that of `<`.

    Args:
        tokens: (n, T) ids of `isoloss.languages.dyck.Brackets`: 0 for `<`, 1 for `>`, 3 where it is hidden.
        generator: CPU generator of the signs of hidden brackets.

    Raises:
        IsolossError: An id that is none of these.

    Example:
        >>> encode(torch.tensor([[0, 1]]), generator=torch.Generator()).tolist()
        [[[1.0, 0.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]]]
    """
    is_hidden = tokens == Brackets.mask_id
    others = tokens[~is_hidden & (tokens != OPEN) & (tokens != CLOSE)]
    if len(others):
        raise IsolossError(f"a token is {int(others[0])}; it must be 0 (<), 1 (>) or {Brackets.mask_id} (hidden)")
    length = tokens.shape[1]
    drawn = 2.0 * torch.randint(0, 2, tokens.shape, generator=generator).to(tokens.device) - 1
    signs = torch.where(is_hidden, drawn, torch.where(tokens == OPEN, 1.0, -1.0))
    places = torch.arange(length, device=tokens.device) + length * is_hidden
    empty = torch.zeros(*tokens.shape, 2 * length, device=tokens.device)
    return empty.scatter(2, places[:, :, None], signs[:, :, None])


class BracketAttention(nn.Module):
    """f(x) = 1/m u^T relu(sum_j a_j V x_j) with a = softmax(<Q x_1, K x_1>, ..., <Q x_1, K x_T>), x_1 the first token.

    The output is one number a sentence: the model's g*, which is 1 where the hidden bracket is `<` and -1 where it is
    `>`. It is trained on that by squared loss, not on logits by cross-entropy, so it is no architecture of
    `isoloss train`. Initial weights are normal: Q, K and V with variance 1 / (2 T), u with variance 1.

    Args:
        length: T.
        width: m, the number of neurons.
        key_width: k.
        seed: The experiment's seed; the stream is `"weights"`.

    Attributes:
        query: (k, 2 T) Q.
        key: (k, 2 T) K.
        value: (m, 2 T) V.
        output: (m,) u.

    Raises:
        IsolossError: A width or the length is below 1.

    Example:
        >>> model = BracketAttention(length=4, width=6, seed=0)
        >>> x = encode(torch.tensor([[0, 3, 1, 1]]), generator=torch.Generator())
        >>> model(x).shape
        torch.Size([1])
    """

    def __init__(self, *, length: int, width: int, key_width: int = 1, seed: int) -> None:
        super().__init__()
        for name, number in (("length", length), ("width", width), ("key_width", key_width)):
            if number < 1:
                raise IsolossError(f"{name} is {number}; it must be at least 1")
        generator = seeds.generator(seed, "weights")

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        d = 2 * length
        self.query, self.key, self.value = drawn(key_width, d), drawn(key_width, d), drawn(width, d)
        self.output = nn.Parameter(torch.randn(width, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n,): f of encoded sentences (n, T, 2 T)."""
        scores = (x[:, :1] @ self.query.T) @ (x @ self.key.T).transpose(1, 2)
        attended = (scores.softmax(dim=-1) @ x)[:, 0]
        return (attended @ self.value.T).relu() @ self.output / len(self.output)

    @torch.no_grad()
    def use_two_neurons(self) -> None:
        """Take the paper's transferable solution: even attention, V_1 = [1; 0] and V_2 = -[1; 0], f = g* everywhere.

        The attention averages the encodings where the paper's neurons read their sum, so u is m T and not 1: it is
        -m T at the first neuron, m T at the second, and 0 at any other.

        Raises:
            IsolossError: There are fewer than two neurons.
        """
        m, length = len(self.output), self.value.shape[1] // 2
        if m < 2:
            raise IsolossError(f"the solution needs two neurons and the model has {m}")
        for parameter in self.parameters():
            parameter.zero_()
        self.value[0, :length], self.value[1, :length] = 1.0, -1.0
        self.output[0], self.output[1] = -m * length, m * length
