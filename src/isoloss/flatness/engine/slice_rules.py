"""Rules of parameters with slices, as those of experts, and of parameters in other shapes.

A slice of a parameter of three axes is a matrix, one of a parameter of two axes a vector. What a model takes slices by,
a number or an index, is noted (`Handle.slot`), and the rule is that of the function that gets the slices.

Shapes: n rows of an activation, E slices, (a, b) a slice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from isoloss.flatness.engine.factors import Dense, Factor, Outer, Sliced, lookups
from isoloss.flatness.engine.layouts import Contribution, Handle, Result, Rule, Uses

# --- products with slices --------------------------------------------------------------------------------------------


def product_use(
    uses: Uses, x: torch.Tensor, weight: torch.Tensor, handle: Handle, *, by_rows: bool
) -> Contribution | None:
    """Return the rule of y = x W^T (`by_rows`) or y = x W, with one slice for all rows or for each matrix x one."""
    owners = uses.origins(x)
    return None if owners is None else _product_use(uses, x, owners, weight, handle, by_rows=by_rows)


def _product_use(
    uses: Uses, x: torch.Tensor, owners: torch.Tensor, weight: torch.Tensor, handle: Handle, *, by_rows: bool
) -> Contribution | None:
    if isinstance(handle.slot, int):
        slots = torch.full(x.shape[:-1], handle.slot, device=x.device)
    elif weight.ndim == x.ndim == 3 and len(weight) == len(x):
        slots = torch.arange(len(weight), device=x.device) if handle.slot is None else handle.slot
        slots = slots[:, None].expand(x.shape[:-1])
    else:
        return None
    return _sliced(uses, x, owners, slots, output_first=by_rows != handle.transposed)


def _sliced(
    uses: Uses, x: torch.Tensor, owners: torch.Tensor, slots: torch.Tensor, *, output_first: bool
) -> Contribution:
    inputs, selected = x.detach().flatten(0, -2), uses.layout.selected
    of_rows, slots = owners[..., 0].reshape(-1), slots.reshape(-1)

    def contribution(cotangent: torch.Tensor) -> Factor:
        outputs = cotangent.flatten(0, -2)
        left, right = (outputs, inputs) if output_first else (inputs, outputs)
        return Sliced(left, right, slots, of_rows, selected)

    return contribution


def _bmm(uses: Uses, input: Any, mat2: Any) -> Result | None:  # noqa: A002
    weight, x = (input, mat2) if uses.handle(input) is not None else (mat2, input)
    handle = uses.handle(weight)
    if (
        handle is None
        or handle.viewed
        or uses.handle(x) is not None
        or weight.ndim != 3
        or isinstance(handle.slot, int)
    ):
        return None
    owners = uses.origins(x)
    if owners is None:
        return None
    if weight is mat2:
        use = _product_use(uses, x, owners, weight, handle, by_rows=False)
        return None if use is None else Result(torch.bmm(input, mat2), {handle.name: use})
    rows = _product_use(uses, x.mT, owners.mT, weight, handle, by_rows=True)  # W x = (x^T W^T)^T
    if rows is None:
        return None

    def contribution(cotangent: torch.Tensor) -> Factor:
        return rows(cotangent.mT)

    return Result(torch.bmm(input, mat2), {handle.name: contribution})


def _grouped_mm(
    uses: Uses, mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Result | None:
    """Note consecutive rows that each take a slice, the rows of slice e up to offs[e]."""
    handle = uses.handle(mat_b)
    if handle is None or handle.viewed or handle.slot is not None or uses.handle(mat_a) is not None:
        return None
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None or int(offs[-1]) != len(mat_a):
        return None
    owners = uses.origins(mat_a)
    if owners is None:
        return None
    slots = torch.searchsorted(offs, torch.arange(len(mat_a), device=offs.device, dtype=offs.dtype), right=True)
    use = _sliced(uses, mat_a, owners, slots, output_first=handle.transposed)
    return Result(F.grouped_mm(mat_a, mat_b, offs=offs, out_dtype=out_dtype), {handle.name: use})


# --- what is added or multiplied element by element ------------------------------------------------------------------


def elementwise_use(
    uses: Uses, output: torch.Tensor, values: torch.Tensor, parameter: torch.Tensor, handle: Handle, scale: Any
) -> Contribution | None:
    """Return the rule of y = f + row, or, with a `scale`, of y = f + scale * row: one row for all, or one for each."""
    slot, width = handle.slot, parameter.shape[-1:]
    assert slot is not None
    if parameter.ndim != (1 if isinstance(slot, int) else 2) or output.shape[-1:] != width:
        return None
    owners = uses.origins(values)
    if owners is None or (parameter.ndim == 2 and output.shape != parameter.shape):
        return None
    of_rows = uses.layout.sequences(owners.expand(output.shape)[..., 0].reshape(-1))
    slots = slot if isinstance(slot, torch.Tensor) else torch.full_like(of_rows, slot)
    number = uses.layout.num_sequences

    def contribution(cotangent: torch.Tensor) -> Factor:
        products = cotangent if scale is None else cotangent * scale()
        return lookups(products.reshape(-1, *width), slots, of_rows, number)

    return contribution


def _expand(uses: Uses, input: Any, *sizes: Any) -> Result | None:  # noqa: A002
    """Note a parameter that every sequence is given."""
    handle, layout, shape = uses.handle(input), uses.layout, tuple(input.shape)
    output, number = input.expand(*sizes), layout.num_sequences
    if handle is None or handle.transposed or isinstance(handle.slot, int) or layout.selected is not None:
        return None
    is_whole = output.shape == (number, *shape)
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
        return Dense(torch.stack([part.sum_to_size(shape).flatten() for part in cotangent[:, None]]))

    return Result(output, {handle.name: contribution})


# --- the same parameter in another guise ------------------------------------------------------------------------------


def _item(uses: Uses, input: Any, index: Any) -> Result | None:  # noqa: A002
    """Note slices along the first axis, or a vector in another shape."""
    handle = uses.handle(input)
    if handle is None:
        return None
    is_number = isinstance(index, int) and not isinstance(index, bool)
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


def _rows(handle: Handle, values: torch.Tensor, index: Any) -> Result | None:
    """Return some consecutive rows of a matrix."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    is_slice = isinstance(first, slice) and all(part in (slice(None), ...) for part in rest)
    if not is_slice or values.ndim != 2 or handle != Handle(handle.name):
        return None
    slots = torch.arange(len(values), device=values.device)[first]
    return Result(values[index], {}, alias=replace(handle, slot=slots))


def _unsqueeze(uses: Uses, input: Any, dim: int) -> Result | None:  # noqa: A002
    handle = uses.handle(input)
    if handle is None:
        return None
    if isinstance(handle.slot, torch.Tensor) and input.ndim == 2 and dim == 0:
        return Result(input.unsqueeze(0), {}, alias=handle)
    return _same_numbers(handle, input, input.unsqueeze(dim))


def _same_numbers(handle: Handle, values: torch.Tensor, viewed: torch.Tensor) -> Result | None:
    """Return a view of a vector that has all its numbers in their order."""
    is_vector = handle.viewed or sum(size > 1 for size in values.shape) < 2
    if not is_vector or handle.transposed or handle.slot is not None:
        return None
    if viewed.numel() != values.numel() or not viewed.is_contiguous() or viewed.data_ptr() != values.data_ptr():
        return None
    return Result(viewed, {}, alias=replace(handle, viewed=True))


def _view(name: str) -> Rule:
    def rule(uses: Uses, input: Any, *args: Any, **kwargs: Any) -> Result | None:  # noqa: A002
        handle = uses.handle(input)
        if handle is None:
            return None
        return _same_numbers(handle, input, getattr(input, name)(*args, **kwargs))

    return rule


# --- einsum ----------------------------------------------------------------------------------------------------------


def _einsum(uses: Uses, equation: Any, *operands: Any) -> Result | None:
    """Note y = sum over common axes of x and W, where each other axis is one of y.

    As a product of matrices: W has rows of the axes that it shares with x, and columns of those that it gives to y.
    """
    if not isinstance(equation, str) or "." in equation or "->" not in equation or len(operands) != 2:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    first = uses.handle(operands[0]) is not None
    pairs = list(zip(names, operands, strict=True))
    (of_weight, weight), (of_x, x) = pairs if first else pairs[::-1]
    handle = uses.handle(weight)
    if handle is None or handle != Handle(handle.name) or uses.handle(x) is not None:
        return None
    shared = [axis for axis in of_weight if axis in of_x]
    given = [axis for axis in of_weight if axis not in of_x]
    kept = [axis for axis in output if axis in of_x and axis not in of_weight]
    if (
        sorted(output) != sorted([*kept, *given])
        or len(of_x) != len(kept) + len(shared)
        or not kept
        or any(len(set(n)) < len(n) for n in (*names, output))
    ):
        return None
    rows = x.detach().permute([of_x.index(axis) for axis in (*kept, *shared)]).flatten(len(kept))
    layout = uses.layout_of(x, x.shape, len(shared)) if of_x == "".join((*kept, *shared)) else uses.layout
    tokens = layout.tokens(rows, 1)
    if tokens is None:
        return None
    order = [output.index(axis) for axis in (*kept, *given)]

    def contribution(cotangent: torch.Tensor) -> Factor:
        outputs = layout.tokens(cotangent.permute(order).flatten(len(kept)), 1)
        assert outputs is not None
        return Outer(tokens, outputs, layout.selected)

    return Result(torch.einsum(equation, *operands), {handle.name: contribution})


_VIEWS = ("view", "reshape", "permute", "squeeze", "flatten")
RULES: dict[str, Rule] = {
    **{name: _view(name) for name in _VIEWS},
    "__getitem__": _item,
    "unsqueeze": _unsqueeze,
    "bmm": _bmm,
    "_grouped_mm": _grouped_mm,
    "einsum": _einsum,
    "expand": _expand,
}
