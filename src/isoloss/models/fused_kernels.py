"""Loops of a transformer's block between its matrix products, compiled for one thread of the CPU.

Everything is float32. Dropout keeps a value where its 16 random bits, as an int16, are at least `level`, and multiplies
what it keeps by `scale`. The lowest level, -2^15, keeps all, and then `bits` is not read. No array may overlap another:
see `compiled`.

Shapes: N rows, m any width, d the model's width, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Kernel = TypeVar("Kernel", bound=Callable[..., object])
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.int16]
Tokens = npt.NDArray[np.int64]

F32 = np.float32
KEEP_ALL = np.int16(-(1 << 15))
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
_LOG2_E, _LN2_HIGH, _LN2_LOW = F32(1.4426950408889634), F32(0.693359375), F32(-2.12194440e-4)
_ROOT_HALF, _ROOT_2PI = F32(0.7071067811865476), F32(0.3989422804014327)


def compiled(kernel: Kernel) -> Kernel:
    """Return a kernel that is compiled when first called, or read from the disk where an earlier process left it.

    Sums over a row may be taken in another order, so that they fill the vector registers. The order is fixed when the
    kernel is compiled, as long as no arrays overlap; if some do, a loop may run value by value and round differently.
    NaN and infinity stay what they are.
    """
    try:
        return numba.njit(cache=True, **_OPTIONS)(kernel)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder can be written
        return sums(kernel)


def part(kernel: Kernel) -> Kernel:
    """Return what only other kernels call, compiled into each of them.

    It is not kept on the disk by itself: a kernel that finds its parts there may round otherwise than one that is
    compiled with them. Nor are sums reordered: in what order depends on the process that compiles, and large kernels
    would differ from process to process.
    """
    return numba.njit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})(kernel)  # type: ignore[no-any-return]


def sums(kernel: Kernel) -> Kernel:
    """Return a `part` that does nothing but add up, in the order that fills the vector registers."""
    return numba.njit(**_OPTIONS)(kernel)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(_context: Any, _bits: Any) -> Any:
    """Return the float32 whose bits are an int32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def exp(x: np.float32) -> np.float32:
    """Return e^x for x up to 88, within 2 units in the last place; e^-87 for x below -87 (Cephes' expf)."""
    x = F32(-87.0) if x < F32(-87.0) else x  # NaN stays
    n = np.floor(x * _LOG2_E + F32(0.5))
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = F32(1.9875691500e-4)
    p = p * r + F32(1.3981999507e-3)
    p = p * r + F32(8.3334519073e-3)
    p = p * r + F32(4.1665795894e-2)
    p = p * r + F32(1.6666665459e-1)
    p = p * r + F32(5.0000001201e-1)
    p = p * r * r + r + F32(1.0)
    return p * _float_of((np.int32(n) + np.int32(127)) << np.int32(23))  # type: ignore[no-any-return]


@compiled
def gelu(x: Floats, bias: Floats, y: Floats) -> None:
    """Set y (N, m) to the GELU of x + bias, and x to its derivative there.

    The normal distribution function is Abramowitz and Stegun's 7.1.26, within 1e-7, as in torch's own kernel.
    """
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = x[i, j] + bias[j]
            a = abs(v) * _ROOT_HALF
            t = F32(1) / (F32(1) + F32(0.3275911) * a)
            e = exp(-a * a)
            p = F32(1.061405429)
            p = p * t + F32(-1.453152027)
            p = p * t + F32(1.421413741)
            p = p * t + F32(-0.284496736)
            p = p * t + F32(0.254829592)
            tail = F32(0.5) * p * t * e
            below = F32(1) - tail if v >= F32(0) else tail
            y[i, j] = v * below
            x[i, j] = below + v * _ROOT_2PI * e


@compiled
def add_norm(
    x: Floats,
    bias: Floats,
    residual: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    weight: Floats,
    shift: Floats,
    eps: np.float32,
    inverse: Floats,
    y: Floats,
) -> None:
    """Set y (N, d) to the layer norm of residual + dropout(x + bias), with `weight` and `shift`.

    What the backward pass needs is left in x, the normalized rows, and in `inverse` (N,), by which they were scaled.
    """
    width = x.shape[1]
    one = F32(1) / F32(width)
    for i in range(x.shape[0]):
        total = F32(0)
        for j in range(width):
            v = x[i, j] + bias[j]
            if level != KEEP_ALL:
                v = v * scale if bits[i, j] >= level else F32(0)
            v += residual[i, j]
            x[i, j] = v
            total += v
        mean = total * one
        total = F32(0)
        for j in range(width):
            v = x[i, j] - mean
            total += v * v
        r = F32(1) / np.sqrt(total * one + eps)
        inverse[i] = r
        for j in range(width):
            v = (x[i, j] - mean) * r
            x[i, j] = v
            y[i, j] = v * weight[j] + shift[j]


@compiled
def add_norm_backward(
    d_y: Floats,
    normalized: Floats,
    inverse: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    weight: Floats,
    d_x: Floats,
    d_residual: Floats,
    sums: Floats,
) -> None:
    """Set the gradients of `add_norm`: d_x, d_residual (N, d), and, added to `sums` (3, d), bias, weight and shift."""
    width = d_y.shape[1]
    one = F32(1) / F32(width)
    for i in range(d_y.shape[0]):
        plain, along = F32(0), F32(0)
        for j in range(width):
            v = d_y[i, j] * weight[j]
            plain += v
            along += v * normalized[i, j]
        plain *= one
        along *= one
        r = inverse[i]
        for j in range(width):
            g, u = d_y[i, j], normalized[i, j]
            v = r * (g * weight[j] - plain - u * along)
            d_residual[i, j] = v
            if level != KEEP_ALL:
                v = v * scale if bits[i, j] >= level else F32(0)
            d_x[i, j] = v
            sums[0, j] += v
            sums[1, j] += g * u
            sums[2, j] += g


@compiled
def softmax(
    scores: Floats, factor: np.float32, bits: Bits, level: np.int16, scale: np.float32, weights: Floats
) -> None:
    """Set scores (N, T) to the softmax p of factor * scores, row by row, and `weights` to dropout(p)."""
    for i in range(scores.shape[0]):
        highest = F32(-np.inf)
        for j in range(scores.shape[1]):
            highest = max(highest, scores[i, j])
        total = F32(0)
        for j in range(scores.shape[1]):
            e = exp((scores[i, j] - highest) * factor)
            scores[i, j] = e
            total += e
        inverse = F32(1) / total
        for j in range(scores.shape[1]):
            v = scores[i, j] * inverse
            scores[i, j] = v
            if level != KEEP_ALL:
                v = v * scale if bits[i, j] >= level else F32(0)
            weights[i, j] = v


@compiled
def softmax_backward(
    d_weights: Floats, p: Floats, factor: np.float32, bits: Bits, level: np.int16, scale: np.float32
) -> None:
    """Set d_weights (N, T), the gradient of the weights that `softmax` made, to that of its scores."""
    for i in range(p.shape[0]):
        mean = F32(0)
        for j in range(p.shape[1]):
            v = d_weights[i, j]
            if level != KEEP_ALL:
                v = v * scale if bits[i, j] >= level else F32(0)
            d_weights[i, j] = v
            mean += v * p[i, j]
        for j in range(p.shape[1]):
            d_weights[i, j] = p[i, j] * (d_weights[i, j] - mean) * factor


@compiled
def gelu_backward(d: Floats, slope: Floats, sums: Floats) -> None:
    """Multiply d (N, m) by the derivative of `gelu`, and add its rows to `sums` (m,), the gradient of the bias."""
    for i in range(d.shape[0]):
        for j in range(d.shape[1]):
            v = d[i, j] * slope[i, j]
            d[i, j] = v
            sums[j] += v


@compiled
def embed_norm(
    x: Floats,
    places: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    weight: Floats,
    shift: Floats,
    eps: np.float32,
    inverse: Floats,
    y: Floats,
) -> None:
    """Set y (N, d) to the dropout of the layer norm of x plus a row of `places` (T, d): row i is at place i modulo T.

    What the backward pass needs is left in x and in `inverse`, as by `add_norm`.
    """
    width = x.shape[1]
    one = F32(1) / F32(width)
    for i in range(x.shape[0]):
        t = i % places.shape[0]
        total = F32(0)
        for j in range(width):
            v = x[i, j] + places[t, j]
            x[i, j] = v
            total += v
        mean = total * one
        total = F32(0)
        for j in range(width):
            v = x[i, j] - mean
            total += v * v
        r = F32(1) / np.sqrt(total * one + eps)
        inverse[i] = r
        for j in range(width):
            v = (x[i, j] - mean) * r
            x[i, j] = v
            v = v * weight[j] + shift[j]
            if level != KEEP_ALL:
                v = v * scale if bits[i, j] >= level else F32(0)
            y[i, j] = v


@compiled
def embed_norm_backward(
    d_y: Floats,
    normalized: Floats,
    inverse: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    weight: Floats,
    tokens: Tokens,
    padding: int,
    d_words: Floats,
    d_places: Floats,
    sums: Floats,
) -> None:
    """Add the gradients of `embed_norm` to those of the words (V, d), of the places and, in `sums` (2, d), of the norm.

    The rows of x are the words of the tokens (N,); that of `padding` has no gradient.
    """
    width = d_y.shape[1]
    one = F32(1) / F32(width)
    dropped = np.empty(width, np.float32)
    for i in range(d_y.shape[0]):
        t, token = i % d_places.shape[0], tokens[i]
        plain, along = F32(0), F32(0)
        for j in range(width):
            g, u = d_y[i, j], normalized[i, j]
            if level != KEEP_ALL:
                g = g * scale if bits[i, j] >= level else F32(0)
            dropped[j] = g
            sums[0, j] += g * u
            sums[1, j] += g
            v = g * weight[j]
            plain += v
            along += v * u
        plain *= one
        along *= one
        r = inverse[i]
        for j in range(width):
            v = r * (dropped[j] * weight[j] - plain - normalized[i, j] * along)
            dropped[j] = v
            d_places[t, j] += v
        if token != padding:
            for j in range(width):
                d_words[token, j] += dropped[j]


@compiled
def attend_from_one(
    query: Floats, x: Floats, mask: Floats, factor: np.float32, kept: Floats, p: Floats, mass: Floats, mixed: Floats
) -> None:
    """Set `mixed` (n, h, d) to the mixture of the states x (n, T, d) that each query (n, h, d) attends to.

    With p (n, h, T) the softmax of factor * query . x plus the mask (n, T), which may have no rows, the weights of the
    mixture are p * kept, and `mass` (n, h) is their sum.
    """
    n, heads, width = query.shape
    for i in range(n):
        for h in range(heads):
            highest = F32(-np.inf)
            for t in range(x.shape[1]):
                v = F32(0)
                for j in range(width):
                    v += query[i, h, j] * x[i, t, j]
                v *= factor
                if mask.shape[0]:
                    v += mask[i, t]
                p[i, h, t] = v
                highest = max(highest, v)
            total = F32(0)
            for t in range(x.shape[1]):
                v = exp(p[i, h, t] - highest)
                p[i, h, t] = v
                total += v
            inverse = F32(1) / total
            total = F32(0)
            for j in range(width):
                mixed[i, h, j] = F32(0)
            for t in range(x.shape[1]):
                v = p[i, h, t] * inverse
                p[i, h, t] = v
                v *= kept[i, h, t]
                total += v
                for j in range(width):
                    mixed[i, h, j] += v * x[i, t, j]
            mass[i, h] = total


@compiled
def attend_from_one_backward(
    d_mixed: Floats,
    d_mass: Floats,
    query: Floats,
    x: Floats,
    factor: np.float32,
    kept: Floats,
    p: Floats,
    d_query: Floats,
    d_x: Floats,
) -> None:
    """Set the gradients of `attend_from_one`: d_query (n, h, d) and d_x (n, T, d)."""
    n, heads, width = query.shape
    d_scores = np.empty(x.shape[1], np.float32)
    for i in range(n):
        for h in range(heads):
            mean = F32(0)
            for t in range(x.shape[1]):
                v = d_mass[i, h]
                for j in range(width):
                    v += d_mixed[i, h, j] * x[i, t, j]
                v *= kept[i, h, t]
                d_scores[t] = v
                mean += v * p[i, h, t]
            for j in range(width):
                d_query[i, h, j] = F32(0)
            for t in range(x.shape[1]):
                v = p[i, h, t] * (d_scores[t] - mean) * factor
                w = p[i, h, t] * kept[i, h, t]
                for j in range(width):
                    d_query[i, h, j] += v * x[i, t, j]
                    g = v * query[i, h, j] + w * d_mixed[i, h, j]
                    d_x[i, t, j] = g if h == 0 else d_x[i, t, j] + g


@compiled
def cross_entropy(
    logits: Floats, bias: Floats, labels: Tokens, scale: np.float32, losses: Floats, sums: Floats
) -> None:
    """Set `losses` (N,) to the cross-entropies of logits + bias (N, V) at the labels (N,).

    The logits become `scale` times their gradient, whose rows are added to `sums` (V,).
    """
    width = logits.shape[1]
    for i in range(logits.shape[0]):
        if not 0 <= labels[i] < width:
            raise IndexError("a label is not an id of the output layer")
        highest = F32(-np.inf)
        for j in range(width):
            v = logits[i, j] + bias[j]
            logits[i, j] = v
            highest = max(highest, v)
        at_label = logits[i, labels[i]] - highest
        total = F32(0)
        for j in range(width):
            v = exp(logits[i, j] - highest)
            logits[i, j] = v
            total += v
        losses[i] = np.log(total) - at_label
        factor = scale / total
        for j in range(width):
            logits[i, j] *= factor
        logits[i, labels[i]] -= scale
        for j in range(width):
            sums[j] += logits[i, j]
