"""The paper's one-layer attention model of the bracket language (section 5), and every input of its two tasks.

The model predicts g* by squared loss. Shapes: n sentences of T brackets, 2 T the width of an encoding
(`isoloss.languages.brackets.Brackets.encode`), m neurons, k the width of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.brackets import OPEN, Brackets
from isoloss.paper.theory.bracket_language.settings import LENGTHS


class BracketAttention(nn.Module):
    """f(x) = 1/m u^T relu(V h), h = sum_j a_j x_j, a = softmax(<Q x_1, K x_1>, ..., <Q x_1, K x_T>).

    The output is one number per sentence: the model's g*, which is 1 where the hidden bracket is `<` and -1 where it is
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


@dataclass(frozen=True)
class Inputs:
    """All inputs of a task, equally likely."""

    # (n, 2 T) float64: the sum of the encodings of an input's tokens. Token j is at coordinate j, or at j + T where it
    # is hidden, so that nothing is lost in the sum
    z: torch.Tensor
    y: torch.Tensor  # (n,) float64: the answers g*, the number of `>` minus that of `<`

    @property
    def length(self) -> int:
        """T."""
        return self.z.shape[1] // 2


def pretraining_inputs(length: int) -> Inputs:
    """Return every sentence with each of its brackets hidden in turn, under both signs that may hide it.

    Example:
        >>> len(pretraining_inputs(6).y), num_inputs(6)
        (240, 240)
    """
    language, strings = _language_and_strings(length)
    sentences = strings[language.mismatch(strings) == 0]
    tokens = sentences.repeat_interleave(length, dim=0)
    hidden = torch.eye(length, dtype=torch.bool).repeat(len(sentences), 1)
    z = language.encode(tokens, hidden, generator=torch.Generator())
    y = torch.where(tokens[hidden] == OPEN, 1.0, -1.0).double()
    signs = torch.ones(2 * length, dtype=torch.float64)
    signs[length:] = -1  # the other sign that may hide a token
    return Inputs(torch.cat([z, z * signs]), torch.cat([y, y]))


def downstream_inputs(length: int) -> Inputs:
    """Return all 2^T strings of brackets, none hidden."""
    language, strings = _language_and_strings(length)
    return Inputs(language.encode(strings), language.mismatch(strings).double())


def num_inputs(length: int) -> int:
    """Return the number of inputs of the pre-training task: 2 T C(T, T/2)."""
    return 2 * length * math.comb(length, length // 2)


def _language_and_strings(length: int) -> tuple[Brackets, torch.Tensor]:
    """Return the language and all 2^T strings, (2^T, T)."""
    if length not in LENGTHS:
        raise IsolossError(f"the length is {length}; it must be {', '.join(map(str, LENGTHS))}, to visit every input")
    return Brackets(length), torch.cartesian_prod(*[torch.arange(2)] * length)
