"""One rule for each torch function that takes parameters: how their gradients follow from the cotangent of its output.

A rule is called with a context, which knows the parameters and how the tokens lie in an activation.

Shapes: B sequences, T tokens in each, m selected rows, n rows of an activation whose rows were gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._ghost.factors import Dense, Factor, Outer, SelectedRows, Sliced, lookups

# --- how the tokens lie in an activation, and what a rule says and may ask --------------------------------------------


@dataclass(frozen=True)
class TrackedParameter:
    """A tensor that is a parameter, or one cast, transposed or shifted by a constant, or slices of one."""

    name: str  # the parameter's name
    transposed: bool = False  # whether the last two axes are in the other order than in the parameter
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
            # XLNet and some others put time before the batch
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
        # a router may give a position to two experts, whose cotangents then come from one position and are not
        # independent
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
    """A function's output, and how the cotangent of it gives each parameter's factor of the gradient."""

    output: Any  # the function's result
    # by parameter; empty where `alias` says that the result is the parameter again
    contributions: dict[str, Contribution]
    alias: TrackedParameter | None = None  # the parameter that the result stands for


class RuleContext(Protocol):
    """The context of a rule: which tensors are parameters, how the tokens lie, and other functions with their rules."""

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
    """Return the name of a torch function; of the getter of a property, the property's name."""
    name: str = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


_PLAIN = (int, float, str, slice, type(None), torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif not isinstance(value, _PLAIN) and isinstance(value, Mapping):  # an abstract class, which takes long to ask
        yield from tensors_in(tuple(value.values()))


# --- products with slices --------------------------------------------------------------------------------------------


def _product_use(
    context: RuleContext,
    x: torch.Tensor,
    sequence_ids: torch.Tensor,
    weight: torch.Tensor,
    handle: TrackedParameter,
    *,
    by_rows: bool,
) -> Contribution | None:
    """Return the rule of y = x W^T (`by_rows`) or y = x W, with one slice for all rows or for each matrix x one."""
    # `weight[e]`: one expert of several, for all rows that came to it
    if isinstance(handle.slot, int):
        slots = torch.full(x.shape[:-1], handle.slot, device=x.device)
    elif weight.ndim == x.ndim == 3 and len(weight) == len(x):
        slots = torch.arange(len(weight), device=x.device) if handle.slot is None else handle.slot
        slots = slots[:, None].expand(x.shape[:-1])
    else:
        return None
    return _sliced(context, x, sequence_ids, slots, output_first=by_rows != handle.transposed)


def _sliced(
    context: RuleContext, x: torch.Tensor, sequence_ids: torch.Tensor, slots: torch.Tensor, *, output_first: bool
) -> Contribution:
    inputs, selected = x.detach().flatten(0, -2), context.layout.selected
    of_rows, slots = sequence_ids[..., 0].reshape(-1), slots.reshape(-1)

    def contribution(cotangent: torch.Tensor) -> Factor:
        outputs = cotangent.flatten(0, -2)
        left, right = (outputs, inputs) if output_first else (inputs, outputs)
        return Sliced(left, right, slots, of_rows, selected)

    return contribution


def _bmm(context: RuleContext, input: Any, mat2: Any) -> Result | None:  # noqa: A002
    weight, x = (input, mat2) if context.tracked(input) is not None else (mat2, input)
    handle = context.tracked(weight)
    if (
        handle is None
        or handle.viewed
        or context.tracked(x) is not None
        or weight.ndim != 3
        or isinstance(handle.slot, int)
    ):
        return None
    sequence_ids = context.sequence_ids(x)
    if sequence_ids is None:
        return None
    if weight is mat2:
        use = _product_use(context, x, sequence_ids, weight, handle, by_rows=False)
        return None if use is None else Result(torch.bmm(input, mat2), {handle.name: use})
    rows = _product_use(context, x.mT, sequence_ids.mT, weight, handle, by_rows=True)  # W x = (x^T W^T)^T
    if rows is None:
        return None

    def contribution(cotangent: torch.Tensor) -> Factor:
        return rows(cotangent.mT)

    return Result(torch.bmm(input, mat2), {handle.name: contribution})


def _grouped_mm(
    context: RuleContext, mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Result | None:
    """Note consecutive rows that each take a slice, the rows of slice e up to offs[e]."""
    handle = context.tracked(mat_b)
    if handle is None or handle.viewed or handle.slot is not None or context.tracked(mat_a) is not None:
        return None
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None or int(offs[-1]) != len(mat_a):
        return None
    sequence_ids = context.sequence_ids(mat_a)
    if sequence_ids is None:
        return None
    # `right=True` passes over experts that got no row, which have the offset of the expert before
    slots = torch.searchsorted(offs, torch.arange(len(mat_a), device=offs.device, dtype=offs.dtype), right=True)
    use = _sliced(context, mat_a, sequence_ids, slots, output_first=handle.transposed)
    return Result(F.grouped_mm(mat_a, mat_b, offs=offs, out_dtype=out_dtype), {handle.name: use})


# --- what is added or multiplied element by element ------------------------------------------------------------------


def _slice_use(
    context: RuleContext,
    output: torch.Tensor,
    values: torch.Tensor,
    parameter: torch.Tensor,
    handle: TrackedParameter,
    scale: Any,
) -> Contribution | None:
    """Return the rule of y = f + row, or, with a `scale`, of y = f + scale * row: one row for all, or one for each."""
    slot, width = handle.slot, parameter.shape[-1:]
    assert slot is not None
    if parameter.ndim != (1 if isinstance(slot, int) else 2) or output.shape[-1:] != width:
        return None
    sequence_ids = context.sequence_ids(values)
    if sequence_ids is None or (parameter.ndim == 2 and output.shape != parameter.shape):
        return None
    of_rows = context.layout.sequences(sequence_ids.expand(output.shape)[..., 0].reshape(-1))
    slots = slot if isinstance(slot, torch.Tensor) else torch.full_like(of_rows, slot)
    number = context.layout.num_sequences

    def contribution(cotangent: torch.Tensor) -> Factor:
        products = cotangent if scale is None else cotangent * scale()
        return lookups(products.reshape(-1, *width), slots, of_rows, number)

    return contribution


def _expand(context: RuleContext, input: Any, *sizes: Any) -> Result | None:  # noqa: A002
    """Note a parameter that every sequence is given."""
    handle, layout, shape = context.tracked(input), context.layout, tuple(input.shape)
    output, number = input.expand(*sizes), layout.num_sequences
    if handle is None or handle.transposed or isinstance(handle.slot, int) or layout.selected is not None:
        return None
    is_whole = output.shape == (number, *shape)
    # a class token, or queries that are learned: (1, ...) or (...) becomes (B, ...), one copy for each sequence
    if not is_whole and (output.shape[:1] != (number,) or len(shape) != output.ndim or shape[0] != 1):
        return None
    rows = torch.arange(len(input), device=input.device) if is_whole and input.ndim == 2 else None
    slots = handle.slot if isinstance(handle.slot, torch.Tensor) else rows
    if slots is not None and output.numel() != number * input.numel():
        return None

    def contribution(cotangent: torch.Tensor) -> Factor:
        if slots is not None:
            sequences = torch.arange(number, device=cotangent.device).repeat_interleave(len(slots))
            return lookups(cotangent.reshape(-1, shape[-1]), slots.repeat(number), sequences, number)
        # an axis that was expanded within a sequence is one number that was used several times
        return Dense(torch.stack([part.sum_to_size(shape).flatten() for part in cotangent[:, None]]))

    return Result(output, {handle.name: contribution})


# --- the same parameter in another guise ------------------------------------------------------------------------------


def _item(context: RuleContext, input: Any, index: Any) -> Result | None:  # noqa: A002
    """Note slices along the first axis, or a vector in another shape."""
    handle = context.tracked(input)
    if handle is None:
        return None
    # True is an int, and as an index it adds an axis
    is_number = isinstance(index, int) and not isinstance(index, bool)
    # a mask chooses rows by value, and the slots of these are not known before
    is_index = isinstance(index, torch.Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    if not is_number and not is_index:
        return _rows(handle, input, index) or _same_numbers(handle, input, input[index])
    if handle.slot is not None or handle.viewed or input.ndim < 2 or (handle.transposed and input.ndim == 2):
        return None
    if is_number or index.ndim == 0:
        return Result(input[index], {}, alias=replace(handle, slot=int(index) % len(input)))
    if index.ndim != 1:
        return None
    return Result(input[index], {}, alias=replace(handle, slot=index % len(input)))


def _rows(handle: TrackedParameter, values: torch.Tensor, index: Any) -> Result | None:
    first, *rest = index if isinstance(index, tuple) else (index,)
    is_slice = isinstance(first, slice) and all(part in (slice(None), ...) for part in rest)
    if not is_slice or values.ndim != 2 or handle != TrackedParameter(handle.name):
        return None
    slots = torch.arange(len(values), device=values.device)[first]
    return Result(values[index], {}, alias=replace(handle, slot=slots))


def _unsqueeze(context: RuleContext, input: Any, dim: int) -> Result | None:  # noqa: A002
    handle = context.tracked(input)
    if handle is None:
        return None
    if isinstance(handle.slot, torch.Tensor) and input.ndim == 2 and dim == 0:
        return Result(input.unsqueeze(0), {}, alias=handle)
    return _same_numbers(handle, input, input.unsqueeze(dim))


def _same_numbers(handle: TrackedParameter, values: torch.Tensor, viewed: torch.Tensor) -> Result | None:
    """Return a view of a vector that has all its numbers in their order."""
    is_vector = handle.viewed or sum(size > 1 for size in values.shape) < 2
    if not is_vector or handle.transposed or handle.slot is not None:
        return None
    if viewed.numel() != values.numel() or not viewed.is_contiguous() or viewed.data_ptr() != values.data_ptr():
        return None
    return Result(viewed, {}, alias=replace(handle, viewed=True))


def _view(name: str) -> Rule:
    def rule(context: RuleContext, input: Any, *args: Any, **kwargs: Any) -> Result | None:  # noqa: A002
        handle = context.tracked(input)
        if handle is None:
            return None
        return _same_numbers(handle, input, getattr(input, name)(*args, **kwargs))

    return rule


# --- einsum ----------------------------------------------------------------------------------------------------------


def _einsum(context: RuleContext, equation: Any, *operands: Any) -> Result | None:
    """Note y = sum over common axes of x and W, where each other axis is one of y.

    As a product of matrices: W has rows of the axes that it shares with x, and columns of the axes that only it has.
    """
    # an ellipsis or an implicit output could mean several things
    if not isinstance(equation, str) or "." in equation or "->" not in equation or len(operands) != 2:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    first = context.tracked(operands[0]) is not None
    pairs = list(zip(names, operands, strict=True))
    (of_weight, weight), (of_x, x) = pairs if first else pairs[::-1]
    handle = context.tracked(weight)
    if handle is None or handle != TrackedParameter(handle.name) or context.tracked(x) is not None:
        return None
    shared = [axis for axis in of_weight if axis in of_x]
    from_weight = [axis for axis in of_weight if axis not in of_x]
    from_x = [axis for axis in output if axis in of_x and axis not in of_weight]
    if (
        sorted(output) != sorted([*from_x, *from_weight])
        or len(of_x) != len(from_x) + len(shared)
        or not from_x
        or any(len(set(n)) < len(n) for n in (*names, output))
    ):
        return None
    rows = x.detach().permute([of_x.index(axis) for axis in (*from_x, *shared)]).flatten(len(from_x))
    # the ids of gathered rows are known in the order of x's axes, which an equation may permute
    layout = context.layout_of(x, x.shape, len(shared)) if of_x == "".join((*from_x, *shared)) else context.layout
    tokens = layout.tokens(rows, 1)
    if tokens is None:
        return None
    order = [output.index(axis) for axis in (*from_x, *from_weight)]

    def contribution(cotangent: torch.Tensor) -> Factor:
        outputs = layout.tokens(cotangent.permute(order).flatten(len(from_x)), 1)
        assert outputs is not None
        return Outer(tokens, outputs, layout.selected)

    return Result(torch.einsum(equation, *operands), {handle.name: contribution})


# --- matrices --------------------------------------------------------------------------------------------------------


def _matrix_use(
    context: RuleContext, x: torch.Tensor, weight: torch.Tensor, handle: TrackedParameter, *, by_rows: bool
) -> Contribution | None:
    """Return the rule of y = x W^T (`by_rows`) or y = x W."""
    if handle.viewed:
        return None
    if handle.slot is not None or weight.ndim != 2:
        sequence_ids = context.sequence_ids(x)
        return None if sequence_ids is None else _product_use(context, x, sequence_ids, weight, handle, by_rows=by_rows)
    layout = context.layout_of(x, x.shape, 1)
    tokens = layout.tokens(x.detach(), 1)
    if tokens is None:
        return None
    inputs, output_first = tokens, by_rows != handle.transposed

    def contribution(cotangent: torch.Tensor) -> Factor:
        outputs = layout.tokens(cotangent, 1)
        assert outputs is not None
        return Outer(outputs, inputs, layout.selected) if output_first else Outer(inputs, outputs, layout.selected)

    return contribution


def _affine(
    context: RuleContext, x: Any, weight: Any, bias: Any, apply: Callable[[Any], torch.Tensor], *, by_rows: bool
) -> Result | None:
    """Return the rule of what `apply` gives for x: y = x W^T (`by_rows`) or y = x W, plus a bias if there is one."""
    matrix = context.tracked(weight)
    if not _is_plain(context, x):
        return None
    contributions: dict[str, Contribution] = {}
    if matrix is not None:
        use = _matrix_use(context, x, weight, matrix, by_rows=by_rows)
        if use is None:
            return None
        contributions[matrix.name] = use
    return _terms(context, apply(x), x, (bias, None), contributions=contributions)


def _linear(context: RuleContext, input: Any, weight: Any, bias: Any = None) -> Result | None:  # noqa: A002
    return _affine(context, input, weight, bias, lambda x: F.linear(x, weight, bias), by_rows=True)


def _addmm(
    context: RuleContext,
    input: Any,  # noqa: A002
    mat1: Any,
    mat2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Result | None:
    # the factors would multiply the gradients, and no model in use has them
    if beta != 1 or alpha != 1 or not _is_plain(context, mat1):
        return None
    return _affine(context, mat1, mat2, input, lambda x: torch.addmm(input, x, mat2), by_rows=False)


def _matmul(context: RuleContext, input: Any, other: Any) -> Result | None:  # noqa: A002
    if context.tracked(other) is None or input.ndim < 2:
        return None
    return _affine(context, input, other, None, lambda x: torch.matmul(x, other), by_rows=False)


def _embedding(
    context: RuleContext,
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Result | None:
    handle = context.tracked(weight)
    if handle is None or handle.transposed:
        return None
    # what follows is a derivative of the output by the table, and with these torch returns another one
    for option, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
        if value:
            raise IsolossError(
                f"the embedding {handle.name} has {option}={value}, which makes its gradient something else than a "
                f"derivative: set {option} to {None if option == 'max_norm' else False}"
            )
    layout = context.layout
    is_shared = layout.num_sequences > 1 and input.shape[:-1] in ((), (1,))  # by all sequences
    index = None if is_shared else layout.tokens(input, 0)
    if index is None or layout.selected is not None or input.ndim < 2:
        return None
    # counted from the end where it is negative, as torch does
    skipped = None if padding_idx is None else padding_idx % weight.shape[0]

    def contribution(cotangent: torch.Tensor) -> Factor:
        rows = layout.tokens(cotangent, 1)
        assert rows is not None
        if skipped is not None:  # torch gives the padding row no gradient
            # the reference is what torch does, and what an optimizer sees
            rows = rows.masked_fill((index == skipped)[:, :, None], 0.0)
        return Outer(index, rows)

    return Result(F.embedding(input, weight, padding_idx), {handle.name: contribution})


# --- vectors ---------------------------------------------------------------------------------------------------------


def _elementwise(
    context: RuleContext,
    output: torch.Tensor,
    values: torch.Tensor,
    parameter: torch.Tensor,
    handle: TrackedParameter,
    scale: Any,
) -> Contribution | None:
    """Return the rule of y = f + parameter, or, with a `scale`, of y = f + scale * parameter, both broadcast to y.

    `values` are those that the parameter meets. `scale` is a function without arguments, so that what it gives is held
    only while it is needed.
    """
    if handle.transposed:
        return None
    if handle.slot is not None:
        return _slice_use(context, output, values, parameter, handle, scale)
    shape = tuple(parameter.shape)
    if len(shape) == output.ndim and shape[0] == 1:
        shape = shape[1:]
    trailing = output.shape[output.ndim - len(shape) :]
    layout = context.layout_of(values, output.shape, len(shape))
    if layout.tokens(output.detach(), len(shape)) is None or len(trailing) != len(shape):
        return None
    broadcast = [i - len(shape) for i, (of, to) in enumerate(zip(shape, trailing, strict=True)) if of != to]

    def contribution(cotangent: torch.Tensor) -> Factor:
        products = cotangent if scale is None else cotangent * scale()
        tokens = layout.tokens(products, len(shape))
        assert tokens is not None
        # a sum over a long sequence in half precision loses the small cotangents
        if tokens.dtype in (torch.float16, torch.bfloat16):
            tokens = tokens.float()
        if layout.selected is None:
            tokens = tokens.sum(dim=1)
        if broadcast:
            tokens = tokens.sum(dim=broadcast)
        return Dense(tokens.flatten(1) if tokens.ndim > 1 else tokens[:, None], layout.selected)

    return contribution


def _terms(
    context: RuleContext,
    output: torch.Tensor,
    values: torch.Tensor,
    *terms: tuple[Any, Callable[[], torch.Tensor] | None],
    contributions: dict[str, Contribution] | None = None,
) -> Result | None:
    """Return the rule of an output to which parameters are added, each times what its function gives, if it has one.

    `values` are those that the parameters meet.
    """
    contributions = contributions or {}
    for parameter, scale in terms:
        handle = context.tracked(parameter)
        if handle is None:
            continue
        use = _elementwise(context, output, values, parameter, handle, scale)
        if use is None:
            return None
        contributions[handle.name] = use
    return Result(output, contributions)


def _layer_norm(
    context: RuleContext,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result | None:
    if not _is_plain(context, input):
        return None
    # the normalized input is computed again in the backward pass instead of being held: it is as large as the
    # activation
    x, shape = input.detach(), tuple(normalized_shape)
    output = F.layer_norm(input, shape, weight, bias, eps)
    return _terms(context, output, input, (weight, lambda: F.layer_norm(x, shape, None, None, eps)), (bias, None))


def _rms_norm(
    context: RuleContext,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Result | None:
    if not _is_plain(context, input):
        return None
    x, shape = input.detach(), tuple(normalized_shape)
    output = F.rms_norm(input, shape, weight, eps)
    return _terms(context, output, input, (weight, lambda: F.rms_norm(x, shape, None, eps)))


def _product(context: RuleContext, input: Any, other: Any) -> Result | None:  # noqa: A002
    parameter, values = (input, other) if context.tracked(input) is not None else (other, input)
    if context.tracked(parameter) is None or not isinstance(values, torch.Tensor) or not _is_plain(context, values):
        return None
    output, held = torch.mul(input, other), values.detach()
    return _terms(context, output, values, (parameter, lambda: held))


def _sum(context: RuleContext, input: Any, other: Any) -> Result | None:  # noqa: A002
    parameter, values = (input, other) if context.tracked(input) is not None else (other, input)
    handle = context.tracked(parameter)
    if handle is None:
        return None
    output = torch.add(input, other)
    if not isinstance(values, torch.Tensor):
        # a constant, as the 1 that Gemma adds to its gains, changes no gradient: the sum stands for the parameter
        return Result(output, {}, alias=handle)
    return _terms(context, output, values, (parameter, None)) if _is_plain(context, values) else None


def _sum_in_place(context: RuleContext, input: Any, other: Any) -> Result | None:  # noqa: A002
    # where the result has no gradient yet, what stands for it would be no longer the tensor that is overwritten
    if context.tracked(other) is None or not _is_plain(context, input) or not input.requires_grad:
        return None
    return _terms(context, input.add_(other), input, (other, None))


def _is_plain(context: RuleContext, value: Any) -> bool:
    return context.tracked(value) is None


# --- the same parameter in another guise ------------------------------------------------------------------------------


def _cast(name: str) -> Rule:
    def rule(context: RuleContext, input: Any, *args: Any, **kwargs: Any) -> Result | None:  # noqa: A002
        # where the parameter is what another tensor is cast to, the result does not depend on it
        return Result(getattr(input, name)(*args, **kwargs), {}, alias=context.tracked(input))

    return rule


def _transpose(context: RuleContext, input: Any, *dims: int) -> Result | None:  # noqa: A002
    handle = context.tracked(input)
    swapped = {dim % max(input.ndim, 1) for dim in dims}
    if handle is None or handle.viewed or input.ndim < 2 or (not dims and input.ndim > 2):
        return None
    if swapped not in (set(), {input.ndim - 2, input.ndim - 1}):
        return None
    return Result(input.mT, {}, alias=replace(handle, transposed=not handle.transposed))


def _transposed(context: RuleContext, input: Any) -> Result | None:  # noqa: A002
    return _transpose(context, input, -2, -1)


# --- recurrent layers ------------------------------------------------------------------------------------------------


def _lstm(
    context: RuleContext,
    input: Any,  # noqa: A002
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Result | None:
    """Unroll the layer into linear maps, each of which has a rule. Packed sequences are not known."""
    # packed sequences have their batch sizes in this place. Dropout needs no rule: `refuse_dropout` has seen that it is
    # off
    if isinstance(hx, torch.Tensor) or context.layout.selected is not None:
        return None
    x = input if batch_first else input.transpose(0, 1)
    if x.shape[0] != context.layout.num_sequences:
        return None
    directions = 2 if bidirectional else 1
    per_direction = len(params) // (num_layers * directions)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = list(params[number * per_direction : (number + 1) * per_direction])
            # torch's order is input, recurrent, two biases, and a projection where there is one
            biases = [weights.pop(2), weights.pop(2)] if has_biases else [None, None]
            start = (hx[0][number], hx[1][number])
            steps = range(x.shape[1] - 1, -1, -1) if direction else range(x.shape[1])
            output, state = _lstm_direction(context, x, start, weights, biases, steps)
            outputs.append(output)
            states.append(state)
        x = torch.cat(outputs, dim=2)
    h, c = (torch.stack(list(parts)) for parts in zip(*states, strict=True))
    return Result((x if batch_first else x.transpose(0, 1), h, c), {})


def _lstm_direction(
    context: RuleContext,
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    weights: list[nn.Parameter],
    biases: list[Any],
    steps: range,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return (B, T, H) outputs and the last state of one layer in one direction."""
    h, c = state
    outputs: dict[int, torch.Tensor] = {}
    # one product for all steps: only the recurrent part waits for the step before
    driven = context.apply(F.linear, x, weights[0], biases[0])
    for t in steps:
        gates = driven[:, t] + context.apply(F.linear, h, weights[1], biases[1])
        # in torch's order: input, forget, cell and output gate
        enter, forget, value, leave = gates.chunk(4, dim=1)
        c = forget.sigmoid() * c + enter.sigmoid() * value.tanh()
        h = leave.sigmoid() * c.tanh()
        if len(weights) == 3:
            h = context.apply(F.linear, h, weights[2], None)
        outputs[t] = h
    return torch.stack([outputs[t] for t in range(x.shape[1])], dim=1), (h, c)


_CASTS = ("to", "type", "float", "double", "half", "bfloat16", "type_as", "contiguous")
_VIEWS = ("view", "reshape", "permute", "squeeze", "flatten")
RULES: dict[str, Rule] = {
    **{name: _cast(name) for name in _CASTS},
    **{name: _view(name) for name in _VIEWS},
    "__getitem__": _item,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "einsum": _einsum,
    "bmm": _bmm,
    "_grouped_mm": _grouped_mm,
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "mul": _product,
    "add": _sum,
    "add_": _sum_in_place,
    "t": _transpose,
    "transpose": _transpose,
    "T": _transpose,
    "mT": _transposed,
    "lstm": _lstm,
}


def rule_of(function: Callable[..., Any]) -> Rule | None:
    return RULES.get(name_of(function))
