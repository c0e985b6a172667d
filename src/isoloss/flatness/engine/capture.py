"""Watching one forward pass: the torch functions that take a parameter, and where predicted positions are selected.

Shapes: B sequences, T tokens in each, m predicted positions, d the width of the model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from isoloss.flatness.engine.factors import SelectedRows
from isoloss.flatness.engine.layouts import Contribution, Handle, Layout, Rule, without_trailing
from isoloss.flatness.engine.origins import Origins, tensors_in
from isoloss.flatness.engine.sharing import Sharing
from isoloss.flatness.engine.vjp_rules import rule_of

_RESHAPES = (torch.Tensor.view, torch.Tensor.reshape)


@dataclass(frozen=True)
class Decoder:
    """The last linear map of a model: logits = hidden @ weight.T + bias."""

    weight: torch.Tensor  # (V, d)
    bias: torch.Tensor | None  # (V,) or None


@dataclass(frozen=True)
class Use:
    """An output of a function that took parameters, by where the backward pass comes through it."""

    edge: GradientEdge  # which cotangent of which node of the graph the output's is
    shape: torch.Size  # the output's shape; the cotangent has as many elements in the same order
    contributions: dict[str, Contribution]  # how the cotangent gives each parameter's factor of the gradient
    selected: bool  # whether the output has the predicted positions alone
    work: int  # multiplications of matrices that gave the output
    # (n,) which selected row or, before rows are selected, which sequence each of its rows belongs to; None: its shape
    # says so
    owners: torch.Tensor | None
    is_doubtful: bool  # whether the shape may be wrong


@dataclass(frozen=True)
class _Linear:
    """A call of `torch.nn.functional.linear`."""

    version: int  # of its output
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    before: int  # uses that were noted before it


class Capture(TorchFunctionMode):
    """Notes the uses of parameters while it is entered, and selects the predicted positions where it is told to.

    The output of a parameter's use becomes a leaf of the graph where nothing above it needs a gradient. Once positions
    are selected, so is what meets them in a call: the residual stream that they are added to, or a scale for each
    position. A call that gives them the shape of all positions gives them their own.

    Args:
        parameters: The parameters to watch, by name.
        predicted: (B, T) the positions that are predicted.
        select_before: Select them before the linear map with this weight.
        unknown: (m,) which of the selected positions are NaN from there on; None: none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        predicted: torch.Tensor,
        *,
        select_before: torch.Tensor | None = None,
        unknown: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layout = Layout(*predicted.shape)
        self.uses: list[Use] = []
        self.without_rule: set[str] = set()
        self._handles = {id(parameter): Handle(name) for name, parameter in parameters.items()}
        self._matrices = {name: value.numel() for name, value in parameters.items() if value.ndim == 2}
        self._origins, self._sharing = Origins(), Sharing(self)
        self._aliases: list[torch.Tensor] = []  # kept, so that no other tensor gets the id of one
        self.predicted, self.unknown = predicted, unknown
        self._select_before = select_before
        self._last_linear: _Linear | None = None
        self._last_output: torch.Tensor | None = None
        self._source: Callable[[], torch.Tensor | None] = lambda: None  # what was selected, while it lives

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.has_selected:
            args, kwargs = self._together(func, args, kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return self._watched(func, args, kwargs)

    def _linear(
        self,
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight is self._select_before and input.shape[:2] == self.predicted.shape:
            input = self.select(input)  # noqa: A001
        before = len(self.uses)
        output: torch.Tensor = self._watched(F.linear, (input, weight, bias), {})
        self._last_linear, self._last_output = _Linear(output._version, input, weight, bias, before), output
        return output

    def handle(self, value: Any) -> Handle | None:
        """Return the parameter that a tensor is, if it is one that is measured."""
        return self._handles.get(id(value)) if isinstance(value, torch.Tensor) else None

    def origins(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the owners of an activation's values, in its shape, as `Layout.owners`; None: they are not known."""
        return self._origins.get(value) if value in self._origins else self.layout.owners(value)

    def layout_of(self, value: torch.Tensor, shape: torch.Size, trailing: int) -> Layout:
        """Return how the tokens lie in what has this shape and as many trailing dimensions, by a value in it."""
        owners = self._origins.get(value)
        if owners is None:
            return self.layout
        return self.layout.gathered(without_trailing(owners.expand(shape), trailing).reshape(-1))

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Apply a function and note the use of the parameters among its arguments."""
        return self._watched(function, args, kwargs)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return (1, m, ...) of values (B, T, ...): the predicted positions, as one sequence from here on."""
        rows = self._rows(values)
        self._source = weakref.ref(values)
        self._origins.start_again(rows)
        self.layout = Layout(self.layout.num_sequences, self.layout.length, SelectedRows.of(self.predicted))
        return rows

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        rows = values[self.predicted][None]
        if self.unknown is None or not rows.is_floating_point():
            return rows
        return rows.masked_fill(self.unknown.view(1, -1, *[1] * (rows.ndim - 2)), math.nan)

    def _together(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, those with all positions selected where others are, or a shape of all positions."""
        rows, everywhere = self.layout.selected, self.predicted.shape
        assert rows is not None
        here = (1, len(rows.rows))
        # a constant of this shape is no activation, and needs no gradient
        is_here = any(value.requires_grad and value.shape[:2] == here for value in tensors_in((args, kwargs)))
        at_selected = functools.partial(self._at_selected, is_here=is_here)
        if is_here and func in _RESHAPES:
            shape = tuple(args[1]) if isinstance(args[1], (tuple, list)) else args[1:]
            if len(shape) > 2 and all(new in (-1, old) for new, old in zip(shape, everywhere, strict=False)):
                return (args[0], here + shape[2:]), kwargs
        return tuple(at_selected(value) for value in args), {name: at_selected(value) for name, value in kwargs.items()}

    def _at_selected(self, value: Any, *, is_here: bool) -> Any:
        """Return an argument with the tensors that have all positions selected, where others of the call are."""
        if isinstance(value, torch.Tensor):
            is_met = is_here and value.ndim > 2 and value.shape[:2] == self.predicted.shape
            return self._rows(value) if is_met or value is self._source() else value
        if isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
            return type(value)(self._at_selected(part, is_here=is_here) for part in value)
        return value

    def lose_shared(self, logits: torch.Tensor) -> None:
        """Note that parameters have no rule behind logits that all sequences seem to share: they met none."""
        self.without_rule |= self._sharing.names([logits])

    @property
    def has_selected(self) -> bool:
        """Whether the predicted positions have been selected."""
        return self.layout.selected is not None

    def decoder(self, logits: torch.Tensor) -> tuple[torch.Tensor, Decoder] | None:
        """Return the hidden states and the linear map that gave the logits; None: they are no linear map's output.

        The output of the last linear map is let go of: it may be the logits of all positions.
        """
        last, output = self._last_linear, self._last_output
        self._last_output = None
        if last is None or output is None or last.weight.ndim != 2 or output.shape != logits.shape:
            return None
        if output.data_ptr() != logits.data_ptr() or logits._version != last.version:
            return None
        return last.hidden, Decoder(last.weight.detach(), None if last.bias is None else last.bias.detach())

    @property
    def before_last_linear(self) -> list[Use]:
        """The uses that were noted before the last linear map."""
        return [] if self._last_linear is None else self.uses[: self._last_linear.before]

    @property
    def last_weight(self) -> torch.Tensor | None:
        """The weight of the last linear map."""
        return None if self._last_linear is None else self._last_linear.weight

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched = {handle.name for value in tensors_in((args, kwargs)) if (handle := self.handle(value)) is not None}
        shared = self._sharing.names(tensors_in((args, kwargs)))
        touched |= shared
        rule = rule_of(func) if touched and not shared and torch.is_grad_enabled() else None
        result = rule(self, *args, **kwargs) if rule is not None and _fits(rule, self, args, kwargs) else None
        if result is None and touched and torch.is_grad_enabled():
            followed = self._sharing.follow(func, args, kwargs)
            if followed is not None:
                return followed
        if result is None:
            output = func(*args, **kwargs)
        else:
            output = result.output
            if result.alias is not None:
                self._add_alias(output, result.alias)
            if result.contributions and not output.requires_grad:
                output = output.requires_grad_().clone()  # a node of its own, and the model may overwrite it
        self._origins.follow(func, args, kwargs, output, self.layout)
        if result is not None and not result.contributions:
            return output
        if result is not None and not (self.has_selected and self._is_lost(output)):
            by_row = 0 if func is F.embedding else sum(self._matrices.get(name, 0) for name in result.contributions)
            self._note(output, result.contributions, by_row)
        elif any(value.is_floating_point() and self.handle(value) is None for value in tensors_in(output)):
            self.without_rule |= touched
        return output

    def _is_lost(self, value: torch.Tensor) -> bool:
        return value in self._origins and self._origins.get(value) is None

    def _add_alias(self, value: torch.Tensor, handle: Handle) -> None:
        if id(value) not in self._handles:
            self._handles[id(value)] = handle
            self._aliases.append(value)

    def _note(self, output: torch.Tensor, contributions: dict[str, Contribution], by_row: int) -> None:
        base = output._base
        # a view that the model overwrites leaves the graph, what it is a view of stays in it
        whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
        edge = get_gradient_edge(base if base is not None and whole else output)
        owners = self._origins.get(output)
        # as many rows as sequences: a mask may have chosen them
        is_coincidence = output.ndim == 2 and len(output) == self.layout.num_sequences and not self.has_selected
        use = Use(
            edge=GradientEdge(edge.node, edge.output_nr),
            shape=output.shape,
            contributions=contributions,
            selected=self.has_selected,
            work=by_row * math.prod(output.shape[:-1]),
            owners=None if owners is None else owners[..., 0].reshape(-1),
            is_doubtful=owners is None and (is_coincidence or self._is_lost(output)),
        )
        self.uses.append(use)


def _fits(rule: Rule, uses: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the rule has these arguments."""
    try:
        _signature(rule).bind(uses, *args, **kwargs)
    except TypeError:
        return False
    return True


@functools.cache
def _signature(rule: Rule) -> inspect.Signature:
    return inspect.signature(rule)


# --- where positions are selected ------------------------------------------------------------------------------------


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
                hooks.callback(module.register_forward_pre_hook(functools.partial(note, name)).remove)
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
