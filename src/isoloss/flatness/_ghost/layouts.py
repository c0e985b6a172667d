"""How the tokens lie in an activation, and what the rule of a torch function says and may ask.

Shapes: B sequences, T tokens in each, m selected rows, n rows of an activation whose rows were gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from isoloss.flatness._ghost.factors import Factor, SelectedRows


@dataclass(frozen=True)
class TrackedParameter:
    """A tensor that is a parameter, or one cast, transposed or shifted by a constant, or slices of one."""

    name: str  # the parameter's name
    transposed: bool = False  # whether the tensor's last two axes are those of the parameter in the other order
    # the slice of the parameter's first axis that it is, or (n,) those that it is made of; None: it is all of it
    slot: int | torch.Tensor | None = None
    viewed: bool = False  # whether it is a vector in another shape


@dataclass(frozen=True)
class Layout:
    """Which token of which sequence stands where in an activation."""

    num_sequences: int  # B
    length: int  # T
    selected: SelectedRows | None = None  # once the predicted positions are selected, the sequences of the rows

    def tokens(self, values: torch.Tensor, trailing: int) -> torch.Tensor | None:
        """Return the values as (B, S, ...), or (m, ...) once selected, keeping `trailing` dimensions; None: no fit."""
        lead, rest = tuple(values.shape[: values.ndim - trailing]), values.shape[values.ndim - trailing :]
        if self.selected is not None:
            m = len(self.selected.rows)
            return values.reshape(m, *rest) if lead in ((1, m), (m,)) else None
        if lead and lead[0] == self.num_sequences:
            return values.reshape(self.num_sequences, math.prod(lead[1:]), *rest)
        if lead == (self.num_sequences * self.length,):
            return values.reshape(self.num_sequences, self.length, *rest)
        if lead[1:2] == (self.num_sequences,):  # time first
            return values.transpose(0, 1).reshape(self.num_sequences, -1, *rest)
        return None

    def sequence_ids(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return an index in the shape of the values, expanded: the selected row that each belongs to or, before rows
        are selected, the sequence. None: the shape does not say.
        """
        shape, number = tuple(values.shape), self.num_sequences
        if self.selected is not None:
            number = len(self.selected.rows)
            axis = 0 if shape[:1] == (number,) else 1 if shape[:2] == (1, number) else None
        else:
            axis = 0 if shape[:1] in ((number,), (number * self.length,)) else 1 if shape[1:2] == (number,) else None
        if axis is None:
            return None
        index = torch.arange(shape[axis], device=values.device) // (shape[axis] // number)
        return index.view(-1, *[1] * (values.ndim - axis - 1)).expand(shape)

    def sequences(self, sequence_ids: torch.Tensor) -> torch.Tensor:
        """Return the sequence of each id."""
        return sequence_ids if self.selected is None else self.selected.rows[sequence_ids]

    def gathered(self, sequence_ids: torch.Tensor) -> Gathered:
        """Return how the tokens lie in an activation whose rows have these ids (n,), one for each."""
        sequences = self.sequences(sequence_ids)
        order = sequences.argsort(stable=True)
        once = self.selected is not None and self.selected.apart and int(torch.bincount(sequence_ids).max()) < 2
        places = SelectedRows.sorted(sequences[order], self.num_sequences, apart=once)
        return Gathered(self.num_sequences, self.length, places, order=order)


@dataclass(frozen=True)
class Gathered(Layout):
    """The layout of an activation whose rows were gathered; its tokens are in the order of their sequences."""

    order: torch.Tensor = field(kw_only=True)  # (n,) the row of each token

    def tokens(self, values: torch.Tensor, trailing: int) -> torch.Tensor | None:
        """Return the values as (n, ...), keeping `trailing` dimensions."""
        return values.reshape(len(self.order), *values.shape[values.ndim - trailing :])[self.order]


def without_trailing(values: torch.Tensor, number: int) -> torch.Tensor:
    """Return the values at index 0 of the last axes, as many as this number."""
    for _ in range(number):
        values = values[..., 0]
    return values


Contribution = Callable[[torch.Tensor], Factor]


@dataclass(frozen=True)
class Result:
    """What a function returned, and how the cotangent of that gives each parameter's factor of the gradient."""

    output: Any  # the function's result
    # by parameter; empty where `alias` says that the result is the parameter again
    contributions: dict[str, Contribution]
    alias: TrackedParameter | None = None  # the parameter that the result stands for


class RuleContext(Protocol):
    """What a rule may ask: which tensors are parameters, how the tokens lie, and to apply a function with its rule."""

    layout: Layout  # how the tokens lie at this point

    def tracked(self, value: Any) -> TrackedParameter | None:
        """Return the parameter that a tensor is, if it is one that is measured."""
        ...

    def sequence_ids(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return whose an activation's values are, in its shape, as `Layout.sequence_ids`; None: not known."""
        ...

    def layout_of(self, value: torch.Tensor, shape: torch.Size, trailing: int) -> Layout:
        """Return how the tokens lie in what has this shape and as many trailing dimensions, by a value in it."""
        ...

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a function and note the use of the parameters among its arguments."""
        ...


Rule = Callable[..., Result | None]  # None: the call is not one that the rule knows


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a torch function, of what gives a property that of the property."""
    name: str = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
