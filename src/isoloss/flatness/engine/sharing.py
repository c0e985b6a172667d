"""Tensors that all sequences share: what a model computes from parameters alone, such as normalized positions.

The model may map, normalize and reshape such a tensor before its sequences use it. Where it meets them, it is
computed again with a leading axis of sequences, so that each use of a parameter on the way has a rule, and a cotangent
for each sequence.

Shapes tell where they meet. A parameter for which shapes would not tell with a different number of sequences has no
rule from the first batch on. So if an axis of a later batch happens to be as long as its number of sequences, it is not
mistaken for the axis of sequences.

Shapes: B sequences.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from isoloss.flatness.engine.layouts import Uses
from isoloss.flatness.engine.origins import MOVES, is_by_value, is_pointwise, name_of, tensors_in

_BY_ROW = {"linear", "layer_norm", "rms_norm"}


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor that all sequences share."""

    names: frozenset[str]  # the parameters behind it
    make: Callable[[], torch.Tensor]

    @cached_property
    def each(self) -> torch.Tensor:
        """(B, ...): the tensor, computed for each sequence."""
        return self.make()

    def beside(self, ndim: int) -> torch.Tensor:
        """Return `each`, reshaped to broadcast with an activation (B, ...) of `ndim` axes."""
        number, *shape = self.each.shape
        shape = [1] * (ndim - 1 - len(shape)) + shape[max(0, len(shape) - ndim + 1) :]
        return self.each.reshape(number, *shape)


class Sharing:
    """The tensors of a forward pass that all sequences share."""

    def __init__(self, uses: Uses) -> None:
        self._uses: Uses = weakref.proxy(uses)  # weak: it holds this object, and its activations must be freed with it
        self._shared: Any = WeakTensorKeyDictionary()

    def names(self, values: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of the parameters behind those values that are shared."""
        if not self._shared:
            return set()
        return {name for value in values if value in self._shared for name in self._shared[value].names}

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a function of parameters or shared tensors; None if the function cannot be followed."""
        name, values = name_of(function).strip("_"), list(tensors_in((args, kwargs)))
        if not args or args[0] is not values[0]:
            return None
        if name in _BY_ROW or (name == "matmul" and values[-1].ndim == 2):
            return self._mapped(function, args, kwargs)
        if name == "embedding":
            return self._looked_up(function, args, kwargs)
        if is_pointwise(name) or name == "matmul":
            return self._combined(function, args, kwargs)
        if name == "expand_as":
            return self.follow(torch.Tensor.expand, (args[0], args[1].shape), {})
        source, further = self._shared.get(args[0]), args[1:]
        if source is None or len(values) > 1 or _writes(function):
            return None
        if name in ("repeat", "expand"):
            return self._copied(function, args, source)
        if name not in MOVES and not is_by_value(name):
            return None

        def one(value: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = function(value, *further, **kwargs)
            return moved

        return self._add(function(*args, **kwargs), values, lambda: torch.vmap(one)(source.each))

    def _of(self, value: torch.Tensor) -> Shared | None:
        """Return a tensor as a shared one, which a parameter is, too; None if it is not shared."""
        found: Shared | None = self._shared.get(value)
        handle = self._uses.handle(value)
        if found is not None or handle is None or handle.transposed or isinstance(handle.slot, int):
            return found
        sizes = (self._uses.layout.num_sequences, *[-1] * value.ndim)
        return Shared(frozenset([handle.name]), partial(self._uses.apply, torch.Tensor.expand, value, *sizes))

    def _add(self, output: Any, values: Iterable[torch.Tensor], make: Callable[[], torch.Tensor]) -> Any:
        """Record and return what was computed from these values; None if it is not a tensor."""
        if not isinstance(output, torch.Tensor):
            return None
        values = list(values)
        handles = [handle for value in values if (handle := self._uses.handle(value)) is not None]
        self._shared[output] = Shared(frozenset({handle.name for handle in handles} | self.names(values)), make)
        return output

    def _mapped(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Map or normalize the rows of a shared tensor."""
        first, *others = tensors_in((args, kwargs))
        source, further = self._of(first), args[1:]
        if source is None or any(map(_is_activation, others)) or self.names(others):
            return None
        make = lambda: self._uses.apply(function, source.each, *further, **kwargs)  # noqa: E731
        return self._add(function(*args, **kwargs), [first, *others], make)

    def _looked_up(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look up the same rows of a parameter for all sequences."""
        (index, *further), layout = args, self._uses.layout
        is_packed = layout.num_sequences > 1 and index.numel() == layout.num_sequences * layout.length
        if is_packed or index.shape[:-1] not in ((), (1,)):
            return None
        every = index.expand(layout.num_sequences, *index.shape)
        make = partial(self._uses.apply, function, every, *further, **kwargs)
        return self._add(function(*args, **kwargs), tensors_in((args, kwargs)), make)

    def _combined(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Combine tensors of which some are shared: elementwise or, with three axes or more, by a matrix product."""
        name, layout, values = name_of(function), self._uses.layout, list(tensors_in((args, kwargs)))
        parts = [(self._of(arg) or arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        shapes = [arg.shape for arg, part in zip(args, parts, strict=True) if isinstance(part, Shared)]
        others = [part for part in parts if isinstance(part, torch.Tensor)]
        if not shapes or len(shapes) + len(others) < len(values):
            return None
        if any(self._uses.handle(value) is not None for value in (values if name == "matmul" else others)):
            return None
        if name == "matmul" and min(map(len, shapes)) < 3:  # a product of weights
            return None

        def combined(pure: Callable[..., Any], ndim: int) -> Any:
            beside = [part.beside(ndim) if isinstance(part, Shared) else part for part in parts]
            return self._uses.apply(pure, *beside, **kwargs)

        axes, most = max(map(len, shapes)), max((value.ndim for value in others), default=0)
        has_axis = most > 0 and all(len(shape) < most or (len(shape) == most and shape[0] == 1) for shape in shapes)
        if has_axis and any(value.ndim == most and len(value) == layout.num_sequences for value in others):
            is_known = layout.selected is None and not (_writes(function) and isinstance(parts[0], Shared))
            return combined(function, most) if is_known else None
        pure = getattr(torch, name[:-1], None) if _writes(function) else function
        if pure is None or any(map(_is_activation, others)):
            return None
        if others and (name == "matmul" or not _is_covered(others, shapes)):
            return None
        return self._add(function(*args, **kwargs), values, lambda: combined(pure, axes + 1))

    def _copied(self, function: Callable[..., Any], args: tuple[Any, ...], source: Shared) -> Any:
        """Give each sequence a copy of a shared tensor."""
        value, *sizes = args
        lead, output = (self._uses.layout.num_sequences,), function(*args)
        if name_of(function) == "repeat":
            times = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else tuple(sizes)
            is_given = times == lead + (1,) * (len(times) - 1)
        else:
            is_given = output.shape[:1] == lead and (output.ndim > value.ndim or value.shape[:1] == (1,))
        if is_given and self._uses.layout.selected is None:
            if name_of(function) == "expand":
                return source.beside(output.ndim).expand(output.shape)
            return source.each.reshape(output.shape).clone(memory_format=torch.contiguous_format)
        return self._add(output, [value], lambda: source.each) if output.shape == value.shape else None


def _is_activation(value: torch.Tensor) -> bool:
    return value.requires_grad and not isinstance(value, nn.Parameter)


def _is_covered(values: list[torch.Tensor], shapes: list[torch.Size]) -> bool:
    """Whether an elementwise result has the same shape with these values as without them."""
    spread: Callable[..., torch.Size] = torch.broadcast_shapes
    return spread(*shapes, *(value.shape for value in values)) == spread(*shapes)


def _writes(function: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = name_of(function)
    return name.endswith("_") and not name.endswith("__")
