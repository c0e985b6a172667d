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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from isoloss.flatness._ghost.factors import SelectedRows
from isoloss.flatness._ghost.rules import (
    Contribution,
    Layout,
    Rule,
    RuleContext,
    TrackedParameter,
    name_of,
    rule_of,
    tensors_in,
    without_trailing,
)

_RESHAPES = (torch.Tensor.view, torch.Tensor.reshape)


@dataclass(frozen=True)
class Decoder:
    """The last linear map of a model: logits = hidden @ weight.T + bias."""

    weight: torch.Tensor  # (V, d)
    bias: torch.Tensor | None  # (V,) or None


@dataclass(frozen=True)
class ParameterUse:
    """An output of a function that took parameters, by where the backward pass comes through it."""

    edge: GradientEdge  # which cotangent of which node of the graph the output's is
    shape: torch.Size  # the output's shape; the cotangent has as many elements in the same order
    contributions: dict[str, Contribution]  # how the cotangent gives each parameter's factor of the gradient
    selected: bool  # whether the output has the predicted positions alone
    work: int  # multiplications of matrices that gave the output
    # (n,) which selected row or, before rows are selected, which sequence each of its rows belongs to; None: its shape
    # says so
    sequence_ids: torch.Tensor | None
    is_doubtful: bool  # whether the shape may be wrong


@dataclass(frozen=True)
class _Linear:
    """A call of `torch.nn.functional.linear`."""

    version: int  # of its output
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    before: int  # uses that were noted before it


# a mode, as hooks of modules would not see a parameter in a function: a tied weight, slices of experts, code of its own
class Capture(TorchFunctionMode):
    """Notes the uses of parameters while it is entered, and selects the predicted positions where it is told to.

    The output of a parameter's use becomes a leaf of the graph where nothing above it needs a gradient. Once positions
    are selected, so is what meets them in a call: the residual stream that they are added to, or a scale for each
    position. A call that gives them the shape of all positions gives them their own.

    The way of a torch function: `__torch_function__` sees every call; `_watched` makes it, by a rule of `_ghost.rules`
    if it takes a parameter; `_note` appends a `ParameterUse` to `uses`. Where the engine says so, a call selects the
    predicted positions: activations are (B, T, ...) before it and (1, m, ...) after it, and `_together` selects the
    same positions of whatever else later calls take. `_ghost.engine` then hooks the edge of each use, so that its
    backward pass brings the cotangents there.

    Args:
        parameters: The parameters to watch, by name.
        predicted: (B, T) the positions that are predicted.
        select_before: Select them before the linear map with this weight.
        unknown: (m,) which of the selected positions are NaN from there on; None: none.
        shards: By the id of a parameter, what it is put together from for each pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        predicted: torch.Tensor,
        *,
        select_before: torch.Tensor | None = None,
        unknown: torch.Tensor | None = None,
        shards: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layout = Layout(*predicted.shape)
        self.uses: list[ParameterUse] = []
        self.without_rule: set[str] = set()
        self._handles = {id(parameter): TrackedParameter(name) for name, parameter in parameters.items()}
        self._matrices = {name: value.numel() for name, value in parameters.items() if value.ndim == 2}
        self._sequence_ids, self._independent = SequenceIds(), BatchIndependent(self)
        self._aliases: list[torch.Tensor] = []  # kept, so that no other tensor gets the id of one
        self.predicted, self.unknown, self._shards = predicted, unknown, shards or {}
        self._select_before = select_before
        self._last_linear: _Linear | None = None
        self._last_output: torch.Tensor | None = None
        # what was selected, while it lives: a strong reference would keep all positions in memory to the end
        self._source: Callable[[], torch.Tensor | None] = lambda: None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # arguments that have all positions (B, T, ...) are cut to (1, m, ...) once the predicted ones are selected
        if self.has_selected:
            args, kwargs = self._together(func, args, kwargs)
        # a linear map may be where to select, and the last one is the decoder; all else goes straight to `_watched`
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
        # the version tells later whether the model wrote to the output: a mask over logits makes them something else
        # than a linear map of the hidden states
        self._last_linear, self._last_output = _Linear(output._version, input, weight, bias, before), output
        return output

    def tracked(self, value: Any) -> TrackedParameter | None:
        return self._handles.get(id(value)) if isinstance(value, torch.Tensor) else None

    def sequence_ids(self, value: torch.Tensor) -> torch.Tensor | None:
        return self._sequence_ids.get(value) if value in self._sequence_ids else self.layout.sequence_ids(value)

    def layout_of(self, value: torch.Tensor, shape: torch.Size, trailing: int) -> Layout:
        sequence_ids = self._sequence_ids.get(value)
        if sequence_ids is None:
            return self.layout
        return self.layout.gathered(without_trailing(sequence_ids.expand(shape), trailing).reshape(-1))

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._watched(function, args, kwargs)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return (1, m, ...) of values (B, T, ...): the predicted positions, as one sequence from here on."""
        rows = self._rows(values)
        self._source = weakref.ref(values)
        self._sequence_ids.start_again(rows)
        self.layout = Layout(self.layout.num_sequences, self.layout.length, SelectedRows.of(self.predicted))
        return rows

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        rows = values[self.predicted][None]
        if self.unknown is None or not rows.is_floating_point():
            return rows
        # axes (1, m, ...), with the mask along the second
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
        # a model adds residuals, masks and scales of all positions to what has the predicted ones alone: these are
        # selected too, or the shapes would not fit
        at_selected = functools.partial(self._at_selected, is_here=is_here)
        if is_here and func in _RESHAPES:
            # views that attention makes of (B, T, heads, size) name B and T as numbers that they read from the input
            # earlier
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

    def mark_batch_independent(self, logits: torch.Tensor) -> None:
        """Note that parameters have no rule behind logits that all sequences seem to share: they met none."""
        self.without_rule |= self._independent.names([logits])

    @property
    def has_selected(self) -> bool:
        return self.layout.selected is not None

    def decoder(self, logits: torch.Tensor) -> tuple[torch.Tensor, Decoder] | None:
        """Return the hidden states and the linear map that gave the logits; None: they are no linear map's output.

        The output of the last linear map is let go of: it may be the logits of all positions.
        """
        last, output = self._last_linear, self._last_output
        self._last_output = None
        if last is None or output is None or last.weight.ndim != 2 or output.shape != logits.shape:
            return None
        # a view of the output, or the output itself, and nothing written since
        if output.data_ptr() != logits.data_ptr() or logits._version != last.version:
            return None
        return last.hidden, Decoder(self._numbers(last.weight), None if last.bias is None else self._numbers(last.bias))

    @torch.no_grad()
    def _numbers(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor for use after the forward pass, when a parameter's own numbers may have been freed."""
        shard = self._shards.get(id(value))
        return value.detach() if shard is None else shard.full_tensor().to(value.dtype)

    @property
    def before_last_linear(self) -> list[ParameterUse]:
        return [] if self._last_linear is None else self.uses[: self._last_linear.before]

    @property
    def last_weight(self) -> torch.Tensor | None:
        return None if self._last_linear is None else self._last_linear.weight

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # every torch function of a forward pass comes through here, so that what follows is kept cheap where no
        # parameter is near
        # --- 1. which measured parameters are among the arguments, or behind arguments that all sequences share
        values = list(tensors_in((args, kwargs)))
        touched = {handle.name for value in values if (handle := self._handles.get(id(value))) is not None}
        shared = self._independent.names(values)
        touched |= shared
        # --- 2. the call, by its rule or else as it is
        # a rule is about one activation for each token. What all sequences share has no sequences, and is followed
        # until it meets an activation
        rule = rule_of(func) if touched and not shared and torch.is_grad_enabled() else None
        result = rule(self, *args, **kwargs) if rule is not None and _fits(rule, self, args, kwargs) else None
        if result is None and touched and torch.is_grad_enabled():
            followed = self._independent.follow(func, args, kwargs)
            if followed is not None:
                return followed
        if result is None:
            output = func(*args, **kwargs)
        else:
            output = result.output
            # a cast to the type that it has already gives the parameter itself, which keeps its own handle
            if result.alias is not None and id(output) not in self._handles:
                self._handles[id(output)] = result.alias
                self._aliases.append(output)
            if result.contributions and not output.requires_grad:
                # below the first trainable use nothing requires a gradient, and no node would tell the cotangent
                output = output.requires_grad_().clone()  # a node of its own, and the model may overwrite it
        # --- 3. which sequence each value of the output belongs to
        self._sequence_ids.follow(func, args, kwargs, output, self.layout)
        # --- 4. the use, noted for the backward pass; the engine takes over from `self.uses`
        if result is not None and not result.contributions:
            return output
        if result is not None and not (self.has_selected and self._is_lost(output)):
            by_row = 0 if func is F.embedding else sum(self._matrices.get(name, 0) for name in result.contributions)
            self._note(output, result.contributions, by_row)
        # an index or a comparison carries no gradient; whatever else took a parameter without a rule is left to
        # automatic differentiation
        elif touched and any(value.is_floating_point() and self.tracked(value) is None for value in tensors_in(output)):
            self.without_rule |= touched
        return output

    def _is_lost(self, value: torch.Tensor) -> bool:
        return value in self._sequence_ids and self._sequence_ids.get(value) is None

    def _note(self, output: torch.Tensor, contributions: dict[str, Contribution], by_row: int) -> None:
        base = output._base
        # a view that the model overwrites leaves the graph, what it is a view of stays in it
        whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
        edge = get_gradient_edge(base if base is not None and whole else output)
        sequence_ids = self._sequence_ids.get(output)
        # as many rows as sequences: a mask may have chosen them
        is_coincidence = output.ndim == 2 and len(output) == self.layout.num_sequences and not self.has_selected
        use = ParameterUse(
            edge=GradientEdge(edge.node, edge.output_nr),
            shape=output.shape,
            contributions=contributions,
            selected=self.has_selected,
            work=by_row * math.prod(output.shape[:-1]),
            sequence_ids=None if sequence_ids is None else sequence_ids[..., 0].reshape(-1),
            is_doubtful=sequence_ids is None and (is_coincidence or self._is_lost(output)),
        )
        self.uses.append(use)


def _fits(rule: Rule, uses: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # a keyword that torch has and the rule does not know: the rule says nothing about such a call
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
        return self.call is not None or self.weight is not None

    def __str__(self) -> str:
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
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return False
    return first.ndim == 3 and first.shape[:2] == shape


_GATHERS = {"getitem", "index_select", "repeat", "repeat_interleave"}
MOVES = _GATHERS | {"chunk", "split", "unbind", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
MOVES |= {"transpose", "permute", "t", "T", "mT", "expand", "narrow", "select", "contiguous", "clone"}
_IN_PLACE = {"rsub", "rdiv", "where", "to", "type", "type_as", "float", "double", "half", "bfloat16", "softmax"}
_IN_PLACE |= {"log_softmax", "layer_norm", "rms_norm", "dropout"}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "grouped_mm"}
_REDUCTIONS = {"sum", "mean"}
# what is written to stays what it was
_WRITES = {"index_add", "scatter", "scatter_add", "index_copy", "index_put", "setitem", "copy", "masked_scatter"}


class SequenceIds:
    """The sequence_ids of the values of activations that come from gathered rows, as `Layout.sequence_ids` has them."""

    def __init__(self) -> None:
        self._ids: Any = WeakTensorKeyDictionary()  # tensors of an activation's shape, mostly expanded; None: lost

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._ids

    def get(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the sequence_ids of an activation's values; None: it is not followed, or lost."""
        sequence_ids: torch.Tensor | None = self._ids.get(value)
        return sequence_ids

    def start_again(self, rows: torch.Tensor) -> None:
        """Lose all values, as the layout is another from here on, but for these, which are those that it is of."""
        # what was computed before has all positions, and where it meets what is selected nobody can say which row is
        # whose
        for value in list(self._ids):
            self._ids[value] = None
        self._ids.pop(rows, None)

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
        # only these put rows in another order; everything else keeps the order that the shape says, and need not be
        # followed
        moves = name in _GATHERS and bool(args) and (name != "getitem" or _has_index(args[1]))
        # only an activation has a gradient; a table's rows are no sequences' even where there are as many
        gathers = moves and args[0].requires_grad
        if not gathers and not self._ids:
            return
        followed = [value for value in tensors_in((args, kwargs)) if value in self._ids]
        if not followed and not gathers:
            return
        # experts add their rows back to where they came from: what is written to has the order of its shape
        if name in _WRITES:
            return
        source = followed[0] if followed else args[0]
        sequence_ids = self._ids[source] if followed else layout.sequence_ids(source)
        outputs = list(tensors_in(output))
        if not followed and sequence_ids is None and all(layout.sequence_ids(value) is None for value in outputs):
            return
        moved: list[torch.Tensor | None] = [None] * len(outputs)
        others = [value for value in tensors_in((args, kwargs)) if value.requires_grad and value is not source]
        all_ids = [self._of(value, layout) for value in others]
        if name == "cat" and args and sequence_ids is not None:
            parts = [self._of(part, layout) for part in args[0]]
            if len(known := [part for part in parts if part is not None]) == len(parts):
                moved = [torch.cat(known, *args[1:], **kwargs)]
        elif sequence_ids is not None and not any(value in self._ids and self._ids[value] is None for value in others):
            with contextlib.suppress(RuntimeError, IndexError, TypeError):  # what does not fit is lost
                moved = _moved(name, function, args, kwargs, source, sequence_ids, outputs)
                if not _agree(name, args, others, all_ids, moved):
                    moved = [None] * len(outputs)
        for value, of_value in zip(outputs, moved, strict=True):
            if not value.is_floating_point():
                continue
            # ids are kept only where the shape would say something else, so that most activations cost nothing
            usual = layout.sequence_ids(value)
            if of_value is None or usual is None or not _equal(of_value, usual):
                self._ids[value] = of_value
            elif value in self._ids:
                del self._ids[value]

    def _of(self, value: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        return self.get(value) if value in self._ids else layout.sequence_ids(value)


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
    sequence_ids: torch.Tensor,
    outputs: list[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return the sequence_ids of the outputs' values, which follow from the source's; None: not known."""
    first = args[0] if args else None
    if name in MOVES and first is source:
        moved = _gathered(sequence_ids, args[1]) if name == "getitem" else function(sequence_ids, *args[1:], **kwargs)
        return list(tensors_in(moved))
    if is_by_value(name):
        return [sequence_ids.expand(value.shape) for value in outputs]
    if name in _PRODUCTS:
        row = sequence_ids[..., :1] if first is source else sequence_ids[..., :1, :]
        return [row.expand(value.shape) for value in outputs]
    if name in _REDUCTIONS and first is source:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(dim, int):
            narrow = sequence_ids.narrow(dim, 0, 1)
            return [narrow if narrow.shape == value.shape else narrow.squeeze(dim) for value in outputs]
    return [None] * len(outputs)


def _agree(
    name: str,
    args: tuple[Any, ...],
    others: list[torch.Tensor],
    all_ids: list[torch.Tensor | None],
    found: list[torch.Tensor | None],
) -> bool:
    """Whether the other activations that a function takes belong to whom its result does, as far as it is known."""
    for value, sequence_ids in zip(others, all_ids, strict=True):
        if sequence_ids is None or found[0] is None:
            continue
        if name in _PRODUCTS:
            sequence_ids = sequence_ids[..., :1] if args and value is args[0] else sequence_ids[..., :1, :]
        if not _equal(sequence_ids.expand(found[0].shape), found[0]):
            return False
    return True


def _gathered(sequence_ids: torch.Tensor, index: Any) -> torch.Tensor:
    """Return sequence_ids[index], without a copy of what is the same along the axes behind a single index of rows."""
    if not isinstance(index, torch.Tensor):
        return sequence_ids[index]
    axes = index.ndim if index.dtype == torch.bool else 1
    rest = sequence_ids.shape[axes:]
    if any(sequence_ids.stride()[axes:]):
        return sequence_ids[index]
    rows = without_trailing(sequence_ids, len(rest))[index]
    return rows.reshape(*rows.shape, *[1] * len(rest)).expand(*rows.shape, *rest)


def is_by_value(name: str) -> bool:
    """Whether the function of this name gives values that stand where those stand that they are computed from."""
    return name in _IN_PLACE or is_pointwise(name)


def is_pointwise(name: str) -> bool:
    """Whether the function of this name works value by value, and broadcasts."""
    # torch tags its own operators, so that no list of elementwise functions is needed here
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two indices are the same, of which axes that neither varies along are looked at once."""
    if first.shape != second.shape:
        return False
    # ids are mostly expanded along the width, and comparing every copy would take as long as the layer
    shared = [one == two == 0 for one, two in zip(first.stride(), second.stride(), strict=True)]
    place = tuple(slice(0, 1) if same else slice(None) for same in shared)
    return torch.equal(first[place], second[place])


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


class BatchIndependent:
    """The tensors of a forward pass that all sequences share."""

    def __init__(self, uses: RuleContext) -> None:
        # weak: the context holds this object, and in a cycle its activations would wait for the garbage collector
        self._context: RuleContext = weakref.proxy(uses)
        self._shared: Any = WeakTensorKeyDictionary()

    def names(self, values: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of the parameters behind those values that are shared."""
        if not self._shared:
            return set()
        return {name for value in values if value in self._shared for name in self._shared[value].names}

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a function of parameters or shared tensors; None if the function cannot be followed."""
        # DeBERTa looks up relative positions once and uses them for every sequence. The gradient of one sequence needs
        # a copy of its own: the shared tensor is computed again from the parameters that are expanded to the batch, by
        # functions that have rules
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
        handle = self._context.tracked(value)
        if found is not None or handle is None or handle.transposed or isinstance(handle.slot, int):
            return found
        sizes = (self._context.layout.num_sequences, *[-1] * value.ndim)
        return Shared(frozenset([handle.name]), partial(self._context.apply, torch.Tensor.expand, value, *sizes))

    def _add(self, output: Any, values: Iterable[torch.Tensor], make: Callable[[], torch.Tensor]) -> Any:
        """Record and return what was computed from these values; None if it is not a tensor."""
        if not isinstance(output, torch.Tensor):
            return None
        values = list(values)
        handles = [handle for value in values if (handle := self._context.tracked(value)) is not None]
        self._shared[output] = Shared(frozenset({handle.name for handle in handles} | self.names(values)), make)
        return output

    def _mapped(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first, *others = tensors_in((args, kwargs))
        source, further = self._of(first), args[1:]
        if source is None or any(map(_is_activation, others)) or self.names(others):
            return None
        make = lambda: self._context.apply(function, source.each, *further, **kwargs)  # noqa: E731
        return self._add(function(*args, **kwargs), [first, *others], make)

    def _looked_up(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look up the same rows of a parameter for all sequences."""
        (index, *further), layout = args, self._context.layout
        # as many ids as the batch has tokens, in one row: sequences that are packed end to end, each with lookups of
        # its own
        is_packed = layout.num_sequences > 1 and index.numel() == layout.num_sequences * layout.length
        if is_packed or index.shape[:-1] not in ((), (1,)):
            return None
        every = index.expand(layout.num_sequences, *index.shape)
        make = partial(self._context.apply, function, every, *further, **kwargs)
        return self._add(function(*args, **kwargs), tensors_in((args, kwargs)), make)

    def _combined(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Combine tensors of which some are shared: elementwise or, with three axes or more, by a matrix product."""
        name, layout, values = name_of(function), self._context.layout, list(tensors_in((args, kwargs)))
        parts = [(self._of(arg) or arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        shapes = [arg.shape for arg, part in zip(args, parts, strict=True) if isinstance(part, Shared)]
        others = [part for part in parts if isinstance(part, torch.Tensor)]
        if not shapes or len(shapes) + len(others) < len(values):
            return None
        if any(self._context.tracked(value) is not None for value in (values if name == "matmul" else others)):
            return None
        # it is a parameter again, of which no rule would know the product
        if name == "matmul" and min(map(len, shapes)) < 3:  # a product of weights
            return None

        def combined(pure: Callable[..., Any], ndim: int) -> Any:
            beside = [part.beside(ndim) if isinstance(part, Shared) else part for part in parts]
            return self._context.apply(pure, *beside, **kwargs)

        axes, most = max(map(len, shapes)), max((value.ndim for value in others), default=0)
        has_axis = most > 0 and all(len(shape) < most or (len(shape) == most and shape[0] == 1) for shape in shapes)
        if has_axis and any(value.ndim == most and len(value) == layout.num_sequences for value in others):
            # an activation is overwritten with what it meets; a shared tensor that is written to would have to become
            # one for each sequence
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
        lead, output = (self._context.layout.num_sequences,), function(*args)
        if name_of(function) == "repeat":
            times = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else tuple(sizes)
            is_given = times == lead + (1,) * (len(times) - 1)
        else:
            is_given = output.shape[:1] == lead and (output.ndim > value.ndim or value.shape[:1] == (1,))
        if is_given and self._context.layout.selected is None:
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
    name = name_of(function)
    return name.endswith("_") and not name.endswith("__")
