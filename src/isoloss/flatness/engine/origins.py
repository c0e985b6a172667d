"""Which sequence each row of an activation belongs to once a model has gathered rows, as one of experts does.

An activation's values are followed from where rows are gathered: each new value belongs to whom a value belongs that it
is computed from. No model mixes sequences, so any such value will do, and the cotangent is of the same sequence.

What moves values is done to their owners too; of the other functions, torch itself says which work value by value. What
follows from an unknown function is lost, and a use of it is checked on every batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from isoloss.flatness.engine.layouts import Layout, without_trailing

_GATHERS = {"getitem", "index_select", "repeat", "repeat_interleave"}
MOVES = _GATHERS | {"chunk", "split", "unbind", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
MOVES |= {"transpose", "permute", "t", "T", "mT", "expand", "narrow", "select", "contiguous", "clone"}
_IN_PLACE = {"rsub", "rdiv", "where", "to", "type", "type_as", "float", "double", "half", "bfloat16", "softmax"}
_IN_PLACE |= {"log_softmax", "layer_norm", "rms_norm", "dropout"}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "grouped_mm"}
_REDUCTIONS = {"sum", "mean"}
# what is written to stays what it was
_WRITES = {"index_add", "scatter", "scatter_add", "index_copy", "index_put", "setitem", "copy", "masked_scatter"}


class Origins:
    """The owners of the values of activations that come from gathered rows, as `Layout.owners` has them."""

    def __init__(self) -> None:
        self._owners: Any = WeakTensorKeyDictionary()  # tensors of an activation's shape, mostly expanded; None: lost

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._owners

    def get(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the owners of an activation's values; None: it is not followed, or lost."""
        owners: torch.Tensor | None = self._owners.get(value)
        return owners

    def start_again(self, rows: torch.Tensor) -> None:
        """Lose all values, as the layout is another from here on, but for these, which are those that it is of."""
        for value in list(self._owners):
            self._owners[value] = None
        self._owners.pop(rows, None)

    def follow(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
        layout: Layout,
    ) -> None:
        """Note whom the output's values belong to, where an argument's are followed or it gathers rows."""
        name = name_of(function).strip("_")
        # only an activation has a gradient; a table's rows are no sequences' even where there are as many
        moves = name in _GATHERS and bool(args) and (name != "getitem" or _has_index(args[1]))
        gathers = moves and args[0].requires_grad
        if not gathers and not self._owners:
            return
        followed = [value for value in tensors_in((args, kwargs)) if value in self._owners]
        if not followed and not gathers:
            return
        if name in _WRITES:
            return
        source = followed[0] if followed else args[0]
        owners = self._owners[source] if followed else layout.owners(source)
        outputs = list(tensors_in(output))
        if not followed and owners is None and all(layout.owners(value) is None for value in outputs):
            return
        found: list[torch.Tensor | None] = [None] * len(outputs)
        others = [value for value in tensors_in((args, kwargs)) if value.requires_grad and value is not source]
        all_owners = [self._of(value, layout) for value in others]
        if name == "cat" and args and owners is not None:
            parts = [self._of(part, layout) for part in args[0]]
            if len(known := [part for part in parts if part is not None]) == len(parts):
                found = [torch.cat(known, *args[1:], **kwargs)]
        elif owners is not None and not any(value in self._owners and self._owners[value] is None for value in others):
            with contextlib.suppress(RuntimeError, IndexError, TypeError):  # what does not fit is lost
                found = _moved(name, function, args, kwargs, source, owners, outputs)
                if not _agree(name, args, others, all_owners, found):
                    found = [None] * len(outputs)
        for value, of_value in zip(outputs, found, strict=True):
            if not value.is_floating_point():
                continue
            usual = layout.owners(value)
            if of_value is None or usual is None or not _equal(of_value, usual):
                self._owners[value] = of_value
            elif value in self._owners:
                del self._owners[value]

    def _of(self, value: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        return self.get(value) if value in self._owners else layout.owners(value)


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


def _has_index(index: Any) -> bool:
    """Whether an index of `x[index]` has a tensor in it, which may put rows in another order."""
    return any(part.ndim > 0 for part in tensors_in(index)) or (
        isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(part, list) for part in index))
    )


def _moved(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    source: torch.Tensor,
    owners: torch.Tensor,
    outputs: list[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the owners of the outputs' values by those of the source's; None: not known."""
    first = args[0] if args else None
    if name in MOVES and first is source:
        moved = _gathered(owners, args[1]) if name == "getitem" else function(owners, *args[1:], **kwargs)
        return list(tensors_in(moved))
    if is_by_value(name):
        return [owners.expand(value.shape) for value in outputs]
    if name in _PRODUCTS:
        row = owners[..., :1] if first is source else owners[..., :1, :]
        return [row.expand(value.shape) for value in outputs]
    if name in _REDUCTIONS and first is source:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(dim, int):
            narrow = owners.narrow(dim, 0, 1)
            return [narrow if narrow.shape == value.shape else narrow.squeeze(dim) for value in outputs]
    return [None] * len(outputs)


def _agree(
    name: str,
    args: tuple[Any, ...],
    others: list[torch.Tensor],
    all_owners: list[torch.Tensor | None],
    found: list[torch.Tensor | None],
) -> bool:
    """Whether the other activations that a function takes belong to whom its result does, as far as it is known."""
    for value, owners in zip(others, all_owners, strict=True):
        if owners is None or found[0] is None:
            continue
        if name in _PRODUCTS:
            owners = owners[..., :1] if args and value is args[0] else owners[..., :1, :]
        if not _equal(owners.expand(found[0].shape), found[0]):
            return False
    return True


def _gathered(owners: torch.Tensor, index: Any) -> torch.Tensor:
    """Return owners[index], without a copy of what is the same along the axes behind a single index of rows."""
    if not isinstance(index, torch.Tensor):
        return owners[index]
    axes = index.ndim if index.dtype == torch.bool else 1
    rest = owners.shape[axes:]
    if any(owners.stride()[axes:]):
        return owners[index]
    rows = without_trailing(owners, len(rest))[index]
    return rows.reshape(*rows.shape, *[1] * len(rest)).expand(*rows.shape, *rest)


def is_by_value(name: str) -> bool:
    """Whether the function of this name gives values that stand where those stand that they are computed from."""
    return name in _IN_PLACE or is_pointwise(name)


def is_pointwise(name: str) -> bool:
    """Whether the function of this name works value by value, and broadcasts."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two indices are the same, of which axes that neither varies along are looked at once."""
    if first.shape != second.shape:
        return False
    shared = [one == two == 0 for one, two in zip(first.stride(), second.stride(), strict=True)]
    place = tuple(slice(0, 1) if same else slice(None) for same in shared)
    return torch.equal(first[place], second[place])
