"""Every input of the bracket language's two tasks, with its answer: nothing is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from isoloss.errors import IsolossError
from isoloss.languages.brackets import OPEN, Brackets

LENGTHS = (4, 6, 8, 10)  # brackets in a sentence: 48 to 5,040 inputs


@dataclass(frozen=True)
class Inputs:
    """All inputs of a task, equally likely.

    Attributes:
        z: (n, 2 T) float64: the sum of the encodings of an input's tokens. Token j is at coordinate j, or at j + T
            where it is hidden, so that nothing is lost in the sum.
        y: (n,) float64: the answers g*, the number of `>` less that of `<`.
    """

    z: torch.Tensor
    y: torch.Tensor

    @property
    def length(self) -> int:
        """T."""
        return self.z.shape[1] // 2


def pretraining_inputs(length: int) -> Inputs:
    """Return every sentence with each of its brackets hidden in turn, under both signs that may hide it.

    Raises:
        IsolossError: The length is none of 4, 6, 8 and 10.

    Example:
        >>> len(pretraining_inputs(6).y), num_inputs(6)
        (240, 240)
    """
    _check(length)
    language = Brackets(length)
    strings = torch.cartesian_prod(*[torch.arange(2)] * length)
    sentences = strings[language.mismatch(strings) == 0]
    tokens = sentences.repeat_interleave(length, dim=0)
    hidden = torch.eye(length, dtype=torch.bool).repeat(len(sentences), 1)
    z = language.encode(tokens, hidden, generator=torch.Generator())
    y = torch.where(tokens[hidden] == OPEN, 1.0, -1.0).double()
    signs = torch.ones(2 * length, dtype=torch.float64)
    signs[length:] = -1  # the other sign that may hide a token
    return Inputs(torch.cat([z, z * signs]), torch.cat([y, y]))


def downstream_inputs(length: int) -> Inputs:
    """Return all 2^T strings of brackets, none hidden.

    Raises:
        IsolossError: The length is none of 4, 6, 8 and 10.
    """
    _check(length)
    language = Brackets(length)
    strings = torch.cartesian_prod(*[torch.arange(2)] * length)
    return Inputs(language.encode(strings), language.mismatch(strings).double())


def num_inputs(length: int) -> int:
    """Return the number of inputs of the pre-training task: 2 T C(T, T/2)."""
    return 2 * length * math.comb(length, length // 2)


def _check(length: int) -> None:
    if length not in LENGTHS:
        raise IsolossError(f"the length is {length}; it must be {', '.join(map(str, LENGTHS))}, to visit every input")
