"""The paper's one-layer attention model of the bracket language (section 5), which predicts g* by squared loss.

Shapes: n sentences of T brackets, 2 T the width of an encoding (`isoloss.languages.brackets.Brackets.encode`), m
neurons, k the width of queries and keys.
"""

from __future__ import annotations

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError


class BracketAttention(nn.Module):
    """f(x) = 1/m u^T relu(V h), h = sum_j a_j x_j, a = softmax(<Q x_1, K x_1>, ..., <Q x_1, K x_T>).

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
        >>> from isoloss.languages.brackets import Brackets
        >>> model, hidden = BracketAttention(length=4, width=6, seed=0), torch.tensor([[False, True, False, False]])
        >>> x = Brackets(4).encode(torch.tensor([[0, 0, 1, 1]]), hidden, summed=False)
        >>> model(x.float()).shape
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
        attended = (self.attention(x)[:, None] @ x)[:, 0]
        return (attended @ self.value.T).relu() @ self.output / len(self.output)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, T): a, what the first token attends to, of encoded sentences (n, T, 2 T)."""
        scores = (x @ self.key.T) @ (x[:, 0] @ self.query.T)[:, :, None]
        return scores[:, :, 0].softmax(dim=-1)

    @torch.no_grad()
    def use_two_neurons(self) -> None:
        """Take the paper's transferable solution: even attention, V_1 = c [1; 0], V_2 = -c [1; 0], f = g* everywhere.

        Any c > 0 gives this function with u_1 = -m T / c and u_2 = m T / c: the attention averages the encodings where
        the paper's neurons read their sum. The flattest of them has `c = sqrt(m) T^(3/4)`, where the trace of the
        Hessian is `4 / (m sqrt(T))`. All other weights are 0.

        Raises:
            IsolossError: There are fewer than two neurons.
        """
        m, length = len(self.output), self.value.shape[1] // 2
        if m < 2:
            raise IsolossError(f"the solution needs two neurons and the model has {m}")
        for parameter in self.parameters():
            parameter.zero_()
        scale = m**0.5 * length**0.75
        self.value[0, :length], self.value[1, :length] = scale, -scale
        self.output[0], self.output[1] = -m * length / scale, m * length / scale
