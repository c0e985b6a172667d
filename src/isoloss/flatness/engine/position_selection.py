"""Where a forward pass picks the predicted positions from all: as early as nothing behind it mixes positions.

Shapes: B sequences, T positions, m predicted positions, d a width.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from isoloss.flatness.engine.capture import Capture


@dataclass(frozen=True)
class Call:
    """A call of a submodule in a forward pass."""

    module: str  # the submodule's name
    number: int  # which of its calls, from 0 on


@dataclass(frozen=True)
class PositionSelection:
    """Where to select, at most one of both; neither: from the logits."""

    call: Call | None = None  # at the input of this call
    weight: torch.Tensor | None = None  # at the input of the linear map with this weight

    @property
    def is_early(self) -> bool:
        """Whether it is before the logits."""
        return self.call is not None or self.weight is not None

    def __str__(self) -> str:
        """Return what a result says of it."""
        if self.call is not None:
            return f"before {self.call.module}"
        return "after the head" if self.weight is None else "before the decoder"


@contextlib.contextmanager
def calls(model: nn.Module, shape: torch.Size) -> Iterator[list[Call]]:
    """Yield a list that gets the calls with inputs (B, T, d) of the submodules that have a matrix, in order."""
    made: list[Call] = []
    counts: Counter[str] = Counter()

    def note(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if _has_all(args, shape):
            made.append(Call(name, counts[name]))
        counts[name] += 1

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name and isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.ndim == 2:
                hooks.callback(module.register_forward_pre_hook(partial(note, name)).remove)
        yield made


@contextlib.contextmanager
def selected_at(model: nn.Module, call: Call | None, capture: Capture) -> Iterator[None]:
    """Let `capture` select the input of a call, if it has all positions."""
    if call is None:
        yield
        return
    before = [0]

    def select(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        before[0] += 1
        if before[0] != call.number + 1 or not _has_all(args, capture.predicted.shape):
            return None
        return (capture.select(args[0]), *args[1:])

    hook = model.get_submodule(call.module).register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _has_all(args: tuple[Any, ...], shape: torch.Size) -> bool:
    """Whether the first argument is an activation (B, T, d)."""
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return False
    return first.ndim == 3 and first.shape[:2] == shape
