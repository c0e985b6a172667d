"""One rule for each torch function that takes parameters: how their gradients follow from the cotangent of its output.

The rules of slices of parameters are in `isoloss.flatness.engine.slice_rules`.

Shapes: B sequences, T tokens in each, m selected rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine import slice_rules
from isoloss.flatness.engine.factors import Dense, Factor, Outer
from isoloss.flatness.engine.layouts import Contribution, Handle, Result, Rule, Uses
from isoloss.flatness.engine.origins import name_of

# --- matrices --------------------------------------------------------------------------------------------------------


def _matrix_use(
    uses: Uses, x: torch.Tensor, weight: torch.Tensor, handle: Handle, *, by_rows: bool
) -> Contribution | None:
    """Return the rule of y = x W^T (`by_rows`) or y = x W."""
    if handle.viewed:
        return None
    if handle.slot is not None or weight.ndim != 2:
        return slice_rules.product_use(uses, x, weight, handle, by_rows=by_rows)
    layout = uses.layout_of(x, x.shape, 1)
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
    uses: Uses, x: Any, weight: Any, bias: Any, apply: Callable[[Any], torch.Tensor], *, by_rows: bool
) -> Result | None:
    """Return the rule of what `apply` gives for x: y = x W^T (`by_rows`) or y = x W, plus a bias if there is one."""
    matrix = uses.handle(weight)
    if not _is_plain(uses, x):
        return None
    contributions: dict[str, Contribution] = {}
    if matrix is not None:
        use = _matrix_use(uses, x, weight, matrix, by_rows=by_rows)
        if use is None:
            return None
        contributions[matrix.name] = use
    return _terms(uses, apply(x), x, (bias, None), contributions=contributions)


def _linear(uses: Uses, input: Any, weight: Any, bias: Any = None) -> Result | None:  # noqa: A002
    return _affine(uses, input, weight, bias, lambda x: F.linear(x, weight, bias), by_rows=True)


def _addmm(uses: Uses, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Result | None:  # noqa: A002
    if beta != 1 or alpha != 1 or not _is_plain(uses, mat1):
        return None
    return _affine(uses, mat1, mat2, input, lambda x: torch.addmm(input, x, mat2), by_rows=False)


def _matmul(uses: Uses, input: Any, other: Any) -> Result | None:  # noqa: A002
    if uses.handle(other) is None or input.ndim < 2:
        return None
    return _affine(uses, input, other, None, lambda x: torch.matmul(x, other), by_rows=False)


def _embedding(
    uses: Uses,
    input: Any,  # noqa: A002
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Result | None:
    handle = uses.handle(weight)
    if handle is None or handle.transposed:
        return None
    for option, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
        if value:
            raise IsolossError(
                f"the embedding {handle.name} has {option}={value}, which makes its gradient something else than a "
                f"derivative: set {option} to {None if option == 'max_norm' else False}"
            )
    layout = uses.layout
    is_shared = layout.num_sequences > 1 and input.shape[:-1] in ((), (1,))  # by all sequences
    index = None if is_shared else layout.tokens(input, 0)
    if index is None or layout.selected is not None or input.ndim < 2:
        return None
    skipped = None if padding_idx is None else padding_idx % weight.shape[0]

    def contribution(cotangent: torch.Tensor) -> Factor:
        rows = layout.tokens(cotangent, 1)
        assert rows is not None
        if skipped is not None:  # torch gives the padding row no gradient
            rows = rows.masked_fill((index == skipped)[:, :, None], 0.0)
        return Outer(index, rows)

    return Result(F.embedding(input, weight, padding_idx), {handle.name: contribution})


# --- vectors ---------------------------------------------------------------------------------------------------------


def _elementwise(
    uses: Uses, output: torch.Tensor, values: torch.Tensor, parameter: torch.Tensor, handle: Handle, scale: Any
) -> Contribution | None:
    """Return the rule of y = f + parameter, or, with a `scale`, of y = f + scale * parameter, both broadcast to y.

    `values` are those that the parameter meets. `scale` is a function without arguments, so that what it gives is held
    only while it is needed.
    """
    if handle.transposed:
        return None
    if handle.slot is not None:
        return slice_rules.elementwise_use(uses, output, values, parameter, handle, scale)
    shape = tuple(parameter.shape)
    if len(shape) == output.ndim and shape[0] == 1:
        shape = shape[1:]
    kept = output.shape[output.ndim - len(shape) :]
    layout = uses.layout_of(values, output.shape, len(shape))
    if layout.tokens(output.detach(), len(shape)) is None or len(kept) != len(shape):
        return None
    broadcast = [i - len(shape) for i, (of, to) in enumerate(zip(shape, kept, strict=True)) if of != to]

    def contribution(cotangent: torch.Tensor) -> Factor:
        products = cotangent if scale is None else cotangent * scale()
        tokens = layout.tokens(products, len(shape))
        assert tokens is not None
        if tokens.dtype in (torch.float16, torch.bfloat16):
            tokens = tokens.float()
        if layout.selected is None:
            tokens = tokens.sum(dim=1)
        if broadcast:
            tokens = tokens.sum(dim=broadcast)
        return Dense(tokens.flatten(1) if tokens.ndim > 1 else tokens[:, None], layout.selected)

    return contribution


def _terms(
    uses: Uses,
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
        handle = uses.handle(parameter)
        if handle is None:
            continue
        use = _elementwise(uses, output, values, parameter, handle, scale)
        if use is None:
            return None
        contributions[handle.name] = use
    return Result(output, contributions)


def _layer_norm(
    uses: Uses,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Result | None:
    if not _is_plain(uses, input):
        return None
    x, shape = input.detach(), tuple(normalized_shape)
    output = F.layer_norm(input, shape, weight, bias, eps)
    return _terms(uses, output, input, (weight, lambda: F.layer_norm(x, shape, None, None, eps)), (bias, None))


def _rms_norm(
    uses: Uses,
    input: Any,  # noqa: A002
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Result | None:
    if not _is_plain(uses, input):
        return None
    x, shape = input.detach(), tuple(normalized_shape)
    output = F.rms_norm(input, shape, weight, eps)
    return _terms(uses, output, input, (weight, lambda: F.rms_norm(x, shape, None, eps)))


def _product(uses: Uses, input: Any, other: Any) -> Result | None:  # noqa: A002
    parameter, values = (input, other) if uses.handle(input) is not None else (other, input)
    if uses.handle(parameter) is None or not isinstance(values, torch.Tensor) or not _is_plain(uses, values):
        return None
    output, held = torch.mul(input, other), values.detach()
    return _terms(uses, output, values, (parameter, lambda: held))


def _sum(uses: Uses, input: Any, other: Any) -> Result | None:  # noqa: A002
    parameter, values = (input, other) if uses.handle(input) is not None else (other, input)
    handle = uses.handle(parameter)
    if handle is None:
        return None
    output = torch.add(input, other)
    if not isinstance(values, torch.Tensor):
        return Result(output, {}, alias=handle)
    return _terms(uses, output, values, (parameter, None)) if _is_plain(uses, values) else None


def _sum_in_place(uses: Uses, input: Any, other: Any) -> Result | None:  # noqa: A002
    # where the result has no gradient yet, what stands for it would be no longer the tensor that is overwritten
    if uses.handle(other) is None or not _is_plain(uses, input) or not input.requires_grad:
        return None
    return _terms(uses, input.add_(other), input, (other, None))


def _is_plain(uses: Uses, value: Any) -> bool:
    return uses.handle(value) is None


# --- the same parameter in another guise ------------------------------------------------------------------------------


def _cast(name: str) -> Rule:
    def rule(uses: Uses, input: Any, *args: Any, **kwargs: Any) -> Result | None:  # noqa: A002
        # where the parameter is what another tensor is cast to, the result does not depend on it
        return Result(getattr(input, name)(*args, **kwargs), {}, alias=uses.handle(input))

    return rule


def _transpose(uses: Uses, input: Any, *dims: int) -> Result | None:  # noqa: A002
    handle = uses.handle(input)
    swapped = {dim % max(input.ndim, 1) for dim in dims}
    if handle is None or handle.viewed or input.ndim < 2 or (not dims and input.ndim > 2):
        return None
    if swapped not in (set(), {input.ndim - 2, input.ndim - 1}):
        return None
    return Result(input.mT, {}, alias=replace(handle, transposed=not handle.transposed))


def _transposed(uses: Uses, input: Any) -> Result | None:  # noqa: A002
    """Return the rule of `mT`."""
    return _transpose(uses, input, -2, -1)


# --- recurrent layers ------------------------------------------------------------------------------------------------


def _lstm(
    uses: Uses,
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
    if isinstance(hx, torch.Tensor) or uses.layout.selected is not None:
        return None
    x = input if batch_first else input.transpose(0, 1)
    if x.shape[0] != uses.layout.num_sequences:
        return None
    directions = 2 if bidirectional else 1
    per_direction = len(params) // (num_layers * directions)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = list(params[number * per_direction : (number + 1) * per_direction])
            biases = [weights.pop(2), weights.pop(2)] if has_biases else [None, None]
            start = (hx[0][number], hx[1][number])
            steps = range(x.shape[1] - 1, -1, -1) if direction else range(x.shape[1])
            output, state = _lstm_direction(uses, x, start, weights, biases, steps)
            outputs.append(output)
            states.append(state)
        x = torch.cat(outputs, dim=2)
    h, c = (torch.stack(list(parts)) for parts in zip(*states, strict=True))
    return Result((x if batch_first else x.transpose(0, 1), h, c), {})


def _lstm_direction(
    uses: Uses,
    x: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    weights: list[nn.Parameter],
    biases: list[Any],
    steps: range,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return (B, T, H) outputs and the last state of one layer in one direction."""
    h, c = state
    outputs: dict[int, torch.Tensor] = {}
    driven = uses.apply(F.linear, x, weights[0], biases[0])
    for t in steps:
        gates = driven[:, t] + uses.apply(F.linear, h, weights[1], biases[1])
        enter, forget, value, leave = gates.chunk(4, dim=1)
        c = forget.sigmoid() * c + enter.sigmoid() * value.tanh()
        h = leave.sigmoid() * c.tanh()
        if len(weights) == 3:
            h = uses.apply(F.linear, h, weights[2], None)
        outputs[t] = h
    return torch.stack([outputs[t] for t in range(x.shape[1])], dim=1), (h, c)


_CASTS = ("to", "type", "float", "double", "half", "bfloat16", "type_as", "contiguous")
_BY_NAME: dict[str, Rule] = {name: _cast(name) for name in _CASTS}
_BY_NAME |= {
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
    **slice_rules.RULES,
}


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """Return the rule of a torch function, if there is one."""
    return _BY_NAME.get(name_of(function))
