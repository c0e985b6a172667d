"""The pieces of the compiled step, `compiled_bert`: products, layer norms, attention, cross-entropy; one CPU thread.

Everything is float32. Activations have a row for each feature and a column for each token, so that all loops run along
the columns: products need no packing, and the sums of a layer norm no rearrangement. Where a library's matrix products
do not use the widest vectors of a processor, these take half their time. Full attention has the sentences on the last
axis, which fills the vector registers however short the sentences are.

Dropout keeps a value where its 16 random bits, as an int16, are at least `level`, and multiplies what it keeps by
`scale`. The lowest level, -2^15, keeps all, and then `bits` is not read. No array may overlap another: a loop over
arrays that do may run value by value and round differently.

Shapes: n sentences, T tokens, N = n T columns, column t n + i for token t of sentence i; d the width, k and m any
number of features, h heads of e = d / h, V ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Kernel = TypeVar("Kernel", bound=Callable[..., object])
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.int16]
Ints = npt.NDArray[np.int64]

F32 = np.float32
KEEP_ALL = np.int16(-(1 << 15))
# ln 2 in two parts: the first has few bits, so that its product with an exponent is exact
_LOG2_E, _LN2_HIGH, _LN2_LOW = F32(1.4426950408889634), F32(0.693359375), F32(-2.12194440e-4)
_ROOT_HALF, _NORMAL_PEAK = F32(0.7071067811865476), F32(0.3989422804014327)
_NORM_EPS = F32(1e-12)  # the layer norms' eps of `isoloss.lab.models.architectures.BERT`

# Where each parameter begins in the vector of all of them: these first, then a block's for each layer
WORDS, POSITIONS, TYPES, NORM, SHIFT, HEAD, HEAD_BIAS, HEAD_NORM, HEAD_SHIFT, OUTPUT, FIRST = range(11)
QKV, QKV_BIAS, OUT, OUT_BIAS, NORM1, SHIFT1, INNER, INNER_BIAS, OUTER, OUTER_BIAS, NORM2, SHIFT2 = range(12)
OF_BLOCK = 12


class Sizes(NamedTuple):
    """The shape of a model and of its batch."""

    layers: int
    heads: int
    width: int
    inner: int  # the feed-forward width
    ids: int  # rows of the word embedding
    padding: int  # the id whose embedding has no gradient as an input
    sentences: int
    tokens: int


_OPTIONS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True, "error_model": "numpy"}


def part(kernel: Kernel) -> Kernel:
    """Compile what only other kernels call, into each of them; what lets Python call it would take as long.

    It is not kept on the disk by itself: a kernel that finds its parts there may round otherwise than one that is
    compiled with them. Nor are sums reordered: in what order depends on the process that compiles, and large kernels
    would differ from process to process.
    """
    return numba.njit(fastmath={"contract", "nsz"}, **_OPTIONS)(kernel)  # type: ignore[no-any-return]


def sums(kernel: Kernel) -> Kernel:
    """Compile a `part` that does nothing but add up, in the order that fills the vector registers."""
    return numba.njit(fastmath={"contract", "reassoc", "nsz"}, **_OPTIONS)(kernel)  # type: ignore[no-any-return]


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(_context: Any, _bits: Any) -> Any:
    """Return the float32 whose bits are an int32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def exp(x: np.float32) -> np.float32:
    """Return e^x for x up to 88, within 2 units in the last place; e^-87 for x below -87 (Cephes' expf)."""
    # Smaller results would be denormal, hence slow. Padding's weight, e^-87, is lost in a sum with e^0. NaN passes.
    x = F32(-87.0) if x < F32(-87.0) else x
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
    # 2^n by its exponent bits
    return p * _float_of((np.int32(n) + np.int32(127)) << np.int32(23))  # type: ignore[no-any-return]


@part
def vector(size: int) -> Floats:
    """Return an uninitialized vector that begins on a cache line: elsewhere products take twice as long."""
    buffer = np.empty(size + 16, np.float32)
    skipped = (-(buffer.ctypes.data // 4)) % 16
    return buffer[skipped : skipped + size]


@part
def empty(rows: int, columns: int) -> Floats:
    """Return an uninitialized (rows, columns) that begins on a cache line."""
    return vector(rows * columns).reshape(rows, columns)


@part
def zeros(rows: int, columns: int) -> Floats:
    """Return (rows, columns) of zeros that begin on a cache line."""
    values = vector(rows * columns)
    values[:] = 0
    return values.reshape(rows, columns)


@part
def transpose(x: Floats, y: Floats) -> None:
    """Set y (k, N) to the transpose of x (N, k)."""
    for j in range(y.shape[0]):
        for i in range(y.shape[1]):
            y[j, i] = x[i, j]


@part
def transposed(w: Floats) -> Floats:
    """Return the transpose of w (m, k), with columns of zeros up to a multiple of 4: `product` has one layout."""
    copy = zeros(w.shape[1], -(-w.shape[0] // 4) * 4)
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            copy[j, i] = w[i, j]
    return copy


@part
def product(w: Floats, x: Floats, y: Floats) -> None:
    """Set y (m, N) to the product of w (m, k) and x (k, N); k is a multiple of 4."""
    rows, inner = w.shape[0] // 4, w.shape[1] // 4
    for i in range(rows):
        a, b, c, d = y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]
        w0, w1, w2, w3 = w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]
        a[:] = 0
        b[:] = 0
        c[:] = 0
        d[:] = 0
        for j in range(inner):
            p, q, r, s = x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]
            a0, a1, a2, a3 = w0[4 * j], w0[4 * j + 1], w0[4 * j + 2], w0[4 * j + 3]
            b0, b1, b2, b3 = w1[4 * j], w1[4 * j + 1], w1[4 * j + 2], w1[4 * j + 3]
            c0, c1, c2, c3 = w2[4 * j], w2[4 * j + 1], w2[4 * j + 2], w2[4 * j + 3]
            d0, d1, d2, d3 = w3[4 * j], w3[4 * j + 1], w3[4 * j + 2], w3[4 * j + 3]
            for n in range(len(a)):
                e, f, g, h = p[n], q[n], r[n], s[n]
                a[n] += a0 * e + a1 * f + a2 * g + a3 * h
                b[n] += b0 * e + b1 * f + b2 * g + b3 * h
                c[n] += c0 * e + c1 * f + c2 * g + c3 * h
                d[n] += d0 * e + d1 * f + d2 * g + d3 * h
    # There may be any number of ids; all other heights are multiples of 4.
    for i in range(4 * rows, w.shape[0]):
        a = y[i]
        a[:] = 0
        for j in range(inner):
            p, q, r, s = x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]
            a0, a1, a2, a3 = w[i, 4 * j], w[i, 4 * j + 1], w[i, 4 * j + 2], w[i, 4 * j + 3]
            for n in range(len(a)):
                a[n] += a0 * p[n] + a1 * q[n] + a2 * r[n] + a3 * s[n]


@sums
def outer_product(y: Floats, x: Floats, w: Floats) -> None:
    """Set w (m, k) to the product of y (m, N) and the transpose of x (k, N); k is a multiple of 4."""
    # The 16 sums stay in registers along the whole row, and 16 products share 8 numbers that are read.
    zero, rows = F32(0), y.shape[0] // 4
    for j in range(x.shape[0] // 4):
        p, q, r, s = x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]
        for i in range(rows):
            a, b, c, d = y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
            for n in range(len(p)):
                e, f, g, h = p[n], q[n], r[n], s[n]
                t, u, v, z = a[n], b[n], c[n], d[n]
                a0 += t * e
                a1 += t * f
                a2 += t * g
                a3 += t * h
                b0 += u * e
                b1 += u * f
                b2 += u * g
                b3 += u * h
                c0 += v * e
                c1 += v * f
                c2 += v * g
                c3 += v * h
                d0 += z * e
                d1 += z * f
                d2 += z * g
                d3 += z * h
            w[4 * i, 4 * j], w[4 * i, 4 * j + 1], w[4 * i, 4 * j + 2], w[4 * i, 4 * j + 3] = a0, a1, a2, a3
            w[4 * i + 1, 4 * j], w[4 * i + 1, 4 * j + 1] = b0, b1
            w[4 * i + 1, 4 * j + 2], w[4 * i + 1, 4 * j + 3] = b2, b3
            w[4 * i + 2, 4 * j], w[4 * i + 2, 4 * j + 1] = c0, c1
            w[4 * i + 2, 4 * j + 2], w[4 * i + 2, 4 * j + 3] = c2, c3
            w[4 * i + 3, 4 * j], w[4 * i + 3, 4 * j + 1] = d0, d1
            w[4 * i + 3, 4 * j + 2], w[4 * i + 3, 4 * j + 3] = d2, d3
        for i in range(4 * rows, y.shape[0]):
            a = y[i]
            a0, a1, a2, a3 = zero, zero, zero, zero
            for n in range(len(p)):
                a0 += a[n] * p[n]
                a1 += a[n] * q[n]
                a2 += a[n] * r[n]
                a3 += a[n] * s[n]
            w[i, 4 * j], w[i, 4 * j + 1], w[i, 4 * j + 2], w[i, 4 * j + 3] = a0, a1, a2, a3


@sums
def add_rows(x: Floats, totals: Floats) -> None:
    """Set the first k of `totals` to the sums over the columns of x (k, N)."""
    for j in range(x.shape[0]):
        total = F32(0)
        for n in range(x.shape[1]):
            total += x[j, n]
        totals[j] = total


@part
def gelu(x: Floats, bias: Floats, y: Floats) -> None:
    """Set y (m, N) to the GELU of x + bias, and x to its derivative there.

    The normal distribution function is Abramowitz and Stegun's 7.1.26, within 1e-7, as in torch's own kernel.
    """
    for j in range(x.shape[0]):
        b = bias[j]
        for n in range(x.shape[1]):
            v = x[j, n] + b
            a = abs(v) * _ROOT_HALF
            t = F32(1) / (F32(1) + F32(0.3275911) * a)
            # e^(-v^2 / 2) serves the tail of the distribution and its density, for the derivative Phi(v) + v phi(v).
            e = exp(-a * a)
            p = F32(1.061405429)
            p = p * t + F32(-1.453152027)
            p = p * t + F32(1.421413741)
            p = p * t + F32(-0.284496736)
            p = p * t + F32(0.254829592)
            tail = F32(0.5) * p * t * e
            below = F32(1) - tail if v >= F32(0) else tail
            y[j, n] = v * below
            x[j, n] = below + v * _NORMAL_PEAK * e


@part
def add_norm(
    x: Floats,
    bias: Floats,
    residual: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    weight: Floats,
    shift: Floats,
    inverse: Floats,
    y: Floats,
) -> None:
    """Set y (d, N) to the layer norm over the features of residual + dropout(x + bias), with `weight` and `shift`.

    What the backward pass needs is left in x, the normalized columns, and in `inverse` (N,), by which they were scaled.
    """
    width, columns = x.shape
    one, mean = F32(1) / F32(width), zeros(1, columns)[0]
    for j in range(width):
        b = bias[j]
        for n in range(columns):
            v = x[j, n] + b
            if level != KEEP_ALL:
                v = v * scale if bits[j, n] >= level else F32(0)
            v += residual[j, n]
            x[j, n] = v
            mean[n] += v
    for n in range(columns):
        mean[n] *= one
        inverse[n] = 0
    for j in range(width):
        for n in range(columns):
            # In a second pass: the mean of the squares less the square of the mean would cancel.
            v = x[j, n] - mean[n]
            inverse[n] += v * v
    for n in range(columns):
        inverse[n] = F32(1) / np.sqrt(inverse[n] * one + _NORM_EPS)
    for j in range(width):
        f, g = weight[j], shift[j]
        for n in range(columns):
            v = (x[j, n] - mean[n]) * inverse[n]
            x[j, n] = v
            y[j, n] = v * f + g


@part
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
    d_bias: Floats,
    d_weight: Floats,
    d_shift: Floats,
) -> None:
    """Set the gradients of `add_norm`."""
    width, columns = d_y.shape
    one = F32(1) / F32(width)
    plain, along = zeros(1, columns)[0], zeros(1, columns)[0]
    for j in range(width):
        f = weight[j]
        for n in range(columns):
            v = d_y[j, n] * f
            plain[n] += v
            along[n] += v * normalized[j, n]
    for n in range(columns):
        plain[n] *= one
        along[n] *= one
    for j in range(width):
        f = weight[j]
        for n in range(columns):
            # With g = d_y weight and x the normalized column, (g - mean g - x mean(g x)) / sigma.
            v = inverse[n] * (d_y[j, n] * f - plain[n] - normalized[j, n] * along[n])
            d_residual[j, n] = v
            if level != KEEP_ALL:
                v = v * scale if bits[j, n] >= level else F32(0)
            d_x[j, n] = v
    add_rows(d_x, d_bias)
    add_rows(d_y, d_shift)
    add_products(d_y, normalized, d_weight)


@sums
def add_products(x: Floats, y: Floats, total: Floats) -> None:
    """Set the first k of `total` to the sums over the columns of x y, both (k, N)."""
    for j in range(x.shape[0]):
        v = F32(0)
        for n in range(x.shape[1]):
            v += x[j, n] * y[j, n]
        total[j] = v


@sums
def _total(u: Floats, row: int) -> np.float32:
    total = F32(0)
    for j in range(u.shape[1]):
        total += u[row, j]
    return total


@sums
def _squares(u: Floats, row: int, mean: np.float32) -> np.float32:
    total = F32(0)
    for j in range(u.shape[1]):
        total += (u[row, j] - mean) * (u[row, j] - mean)
    return total


@sums
def _dots(g: Floats, u: Floats, row: int) -> tuple[np.float32, np.float32]:
    """Return the sums of g (d,) and of g times a row of u (N, d)."""
    plain, along = F32(0), F32(0)
    for j in range(u.shape[1]):
        plain += g[j]
        along += g[j] * u[row, j]
    return plain, along


@part
def embed(
    words: Floats,
    position: Floats,
    kind: Floats,
    norm: Floats,
    shift: Floats,
    tokens: Ints,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    u: Floats,
    inverse: Floats,
    y: Floats,
) -> None:
    """Set y (N, d) to the embedding of the tokens (T, n), with layer norm and dropout; keep u (N, d) and inverse."""
    length, n = tokens.shape
    d = words.shape[1]
    one, added = F32(1) / F32(d), vector(d)
    for t in range(length):
        for j in range(d):
            # In pre-training every token has the type 0.
            added[j] = position[t, j] + kind[j]
        for i in range(n):
            row, token = t * n + i, tokens[t, i]
            for j in range(d):
                u[row, j] = words[token, j] + added[j]
            mean = _total(u, row) * one
            r = F32(1) / np.sqrt(_squares(u, row, mean) * one + _NORM_EPS)
            inverse[row] = r
            for j in range(d):
                v = (u[row, j] - mean) * r
                u[row, j] = v
                v = v * norm[j] + shift[j]
                if level != KEEP_ALL:
                    v = v * scale if bits[row, j] >= level else F32(0)
                y[row, j] = v


@part
def embed_backward(
    d_y: Floats,
    u: Floats,
    inverse: Floats,
    norm: Floats,
    tokens: Ints,
    padding: int,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    d_words: Floats,
    d_position: Floats,
    d_norm: Floats,
) -> None:
    """Add the gradients of `embed`, but none to the padding's word; in `d_norm` (2, d), the layer norm's."""
    length, n = tokens.shape
    d = u.shape[1]
    one, g = F32(1) / F32(d), vector(d)
    for t in range(length):
        for i in range(n):
            row, token = t * n + i, tokens[t, i]
            for j in range(d):
                v = d_y[row, j]
                if level != KEEP_ALL:
                    v = v * scale if bits[row, j] >= level else F32(0)
                d_norm[0, j] += v * u[row, j]
                d_norm[1, j] += v
                g[j] = v * norm[j]
            plain, along = _dots(g, u, row)
            plain *= one
            along *= one
            r = inverse[row]
            for j in range(d):
                v = r * (g[j] - plain - u[row, j] * along)
                g[j] = v
                d_position[t, j] += v
            # torch's `padding_idx` keeps this row as it is, but for the gradient that it gets as a row of the tied
            # decoder.
            if token != padding:
                for j in range(d):
                    d_words[token, j] += g[j]


@part
def cross_entropy(logits: Floats, bias: Floats, labels: Ints, targets: Floats, losses: Floats) -> None:
    """Set `losses` (n,) in nats, and the logits (V, n), before their bias, to the gradient of the losses' mean.

    The `targets` (n, C) are probabilities of the first C ids or, with C = 0, the `labels` (n,) are the ids predicted.
    """
    ids, n = logits.shape
    one = F32(1) / F32(n)
    highest, total, mass = vector(n), zeros(1, n)[0], zeros(1, n)[0]
    highest[:] = -np.inf
    for j in range(ids):
        for i in range(n):
            logits[j, i] += bias[j]
            highest[i] = max(highest[i], logits[j, i])
    for i in range(n):
        if targets.shape[1] == 0:
            # Loss: mass (highest + log total) less the targets' logits, highest being subtracted first so that exp
            # cannot overflow. Its gradient is mass softmax - targets, over n.
            mass[i], losses[i] = F32(1), highest[i] - logits[labels[i], i]
        else:
            along = F32(0)
            for j in range(targets.shape[1]):
                mass[i] += targets[i, j]
                along += targets[i, j] * (logits[j, i] - highest[i])
            losses[i] = -along
    for j in range(ids):
        for i in range(n):
            logits[j, i] = exp(logits[j, i] - highest[i])
            total[i] += logits[j, i]
    for i in range(n):
        losses[i] += np.log(total[i]) * mass[i]
        total[i] = mass[i] * one / total[i]
    for j in range(ids):
        for i in range(n):
            logits[j, i] *= total[i]
    for i in range(n):
        if targets.shape[1] == 0:
            logits[labels[i], i] -= one
        for j in range(targets.shape[1]):
            logits[j, i] -= targets[i, j] * one


@part
def matrix(vector: Floats, start: int, rows: int, columns: int) -> Floats:
    """Return the matrix that begins at `start`, which shares memory with the vector."""
    return vector[start : start + rows * columns].reshape(rows, columns)


@part
def add_columns(values: Floats, totals: Floats) -> None:
    """Add the sum of the rows of `values` (N, k) to the first k of `totals`."""
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            totals[j] += values[i, j]


@part
def copy_columns(x: Floats, start: int, y: Floats) -> None:
    """Set y (N, k) to k columns of x, from `start` on; numba compiles loops in a tenth of the time of a slice."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = x[i, start + j]


@part
def attention(
    bias: Floats,
    z: Sizes,
    attention_bias: Floats,
    qkv: Floats,
    p: Floats,
    w: Floats,
    mixed: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
) -> None:
    """Set `mixed` (d, N) to the attention from every position, of qkv (3 d, N), to which `bias` is added here.

    For the backward pass, p and w (h T, T n) are set to the weights before and after dropout.
    """
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = F32(1) / np.sqrt(F32(e))
    for j in range(3 * d):
        b = bias[j]
        for i in range(n * length):
            qkv[j, i] += b
    parts, out = qkv.reshape(3, heads, e, length, n), mixed.reshape(heads, e, length, n)
    before, after = p.reshape(heads, length, length, n), w.reshape(heads, length, length, n)
    highest, total = vector(n), vector(n)
    for head in range(heads):
        for t in range(length):
            highest[:] = -np.inf
            for u in range(length):
                for i in range(n):
                    before[head, t, u, i] = 0
                for c in range(e):
                    for i in range(n):
                        before[head, t, u, i] += parts[0, head, c, t, i] * parts[1, head, c, u, i]
                for i in range(n):
                    before[head, t, u, i] = before[head, t, u, i] * factor + attention_bias[u, i]
                    highest[i] = max(highest[i], before[head, t, u, i])
            total[:] = 0
            for u in range(length):
                for i in range(n):
                    before[head, t, u, i] = exp(before[head, t, u, i] - highest[i])
                    total[i] += before[head, t, u, i]
            for i in range(n):
                total[i] = F32(1) / total[i]
            for c in range(e):
                for i in range(n):
                    out[head, c, t, i] = 0
            for u in range(length):
                for i in range(n):
                    before[head, t, u, i] *= total[i]
                    after[head, t, u, i] = before[head, t, u, i]
                if level != KEEP_ALL:
                    # Only here: `bits` has no rows where nothing is dropped.
                    kept = bits.reshape(heads, length, length, n)
                    for i in range(n):
                        v = after[head, t, u, i]
                        after[head, t, u, i] = v * scale if kept[head, t, u, i] >= level else F32(0)
                for c in range(e):
                    for i in range(n):
                        out[head, c, t, i] += after[head, t, u, i] * parts[2, head, c, u, i]


@part
def attention_backward(
    z: Sizes,
    qkv: Floats,
    p: Floats,
    w: Floats,
    d_mixed: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    d_qkv: Floats,
) -> None:
    """Set d_qkv (3 d, N) from d_mixed (d, N)."""
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = F32(1) / np.sqrt(F32(e))
    parts, d_out = qkv.reshape(3, heads, e, length, n), d_mixed.reshape(heads, e, length, n)
    before, after = p.reshape(heads, length, length, n), w.reshape(heads, length, length, n)
    d_qkv[:] = 0
    d_parts = d_qkv.reshape(3, heads, e, length, n)
    g, mean = empty(length, n), vector(n)
    for head in range(heads):
        for t in range(length):
            mean[:] = 0
            for u in range(length):
                for i in range(n):
                    g[u, i] = 0
                for c in range(e):
                    for i in range(n):
                        g[u, i] += d_out[head, c, t, i] * parts[2, head, c, u, i]
                    for i in range(n):
                        d_parts[2, head, c, u, i] += d_out[head, c, t, i] * after[head, t, u, i]
                if level != KEEP_ALL:
                    kept = bits.reshape(heads, length, length, n)
                    for i in range(n):
                        g[u, i] = g[u, i] * scale if kept[head, t, u, i] >= level else F32(0)
                for i in range(n):
                    mean[i] += g[u, i] * before[head, t, u, i]
            for u in range(length):
                for i in range(n):
                    # The softmax's derivative, w (g - sum w g), takes the weights before dropout; the values' above
                    # took those after it.
                    g[u, i] = before[head, t, u, i] * (g[u, i] - mean[i]) * factor
                for c in range(e):
                    for i in range(n):
                        d_parts[0, head, c, t, i] += g[u, i] * parts[1, head, c, u, i]
                    for i in range(n):
                        d_parts[1, head, c, u, i] += g[u, i] * parts[0, head, c, t, i]


@sums
def _dot(x: Floats, y: Floats, i: int) -> np.float32:
    total = F32(0)
    for j in range(x.shape[1]):
        total += x[i, j] * y[i, j]
    return total


@part
def single_query(
    theta: Floats,
    a: Ints,
    z: Sizes,
    x: Floats,
    selected: Floats,
    attention_bias: Floats,
    query: Floats,
    keyed: Floats,
    p: Floats,
    w: Floats,
    seen: Floats,
    values: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
) -> None:
    """Set `values` (n, d) to the attention from the rows `selected` (n, d) of x (N, d).

    No key and no value is computed: with q the query and K the projection of a head, a state's score is (K^T q) . x
    (a key's bias adds the same to all, and changes nothing), and the mixed values are V times the mixed states.
    """
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = F32(1) / np.sqrt(F32(e))
    weight, bias = matrix(theta, a[QKV], 3 * d, d), theta[a[QKV_BIAS] :]
    # np.dot, as tokens are rows here, and `product` takes columns.
    np.dot(selected, weight[:d].T, query)
    for i in range(n):
        for j in range(d):
            query[i, j] += bias[j]
    states, before, after = x.reshape(length, n, d), p.reshape(heads, n, length), w.reshape(heads, n, length)
    part, own = empty(n, e), empty(n, e)
    for head in range(heads):
        copy_columns(query, head * e, part)
        np.dot(part, weight[d + head * e : d + (head + 1) * e], keyed[head])
        for i in range(n):
            highest = F32(-np.inf)
            for t in range(length):
                score = _dot(keyed[head], states[t], i)
                before[head, i, t] = score * factor + attention_bias[t, i]
                highest = max(highest, before[head, i, t])
            total = F32(0)
            for t in range(length):
                before[head, i, t] = exp(before[head, i, t] - highest)
                total += before[head, i, t]
            mass = F32(0)
            for j in range(d):
                seen[head, i, j] = 0
            for t in range(length):
                before[head, i, t] /= total
                weight_of_state = before[head, i, t]
                if level != KEEP_ALL:
                    weight_of_state = weight_of_state * scale if bits[head * n + i, t] >= level else F32(0)
                after[head, i, t] = weight_of_state
                mass += weight_of_state
                for j in range(d):
                    seen[head, i, j] += weight_of_state * states[t, i, j]
            for c in range(e):
                # The weights that dropout leaves do not add up to 1, so the value's bias counts `mass` times.
                own[i, c] = mass * bias[2 * d + head * e + c]
        mixed = np.dot(seen[head], weight[2 * d + head * e : 2 * d + (head + 1) * e].T)
        for i in range(n):
            for c in range(e):
                values[i, head * e + c] = mixed[i, c] + own[i, c]


@part
def single_query_backward(
    theta: Floats,
    grad: Floats,
    a: Ints,
    z: Sizes,
    x: Floats,
    selected: Floats,
    query: Floats,
    keyed: Floats,
    p: Floats,
    w: Floats,
    seen: Floats,
    d_values: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    d_x: Floats,
    d_selected: Floats,
) -> None:
    """Add the gradients of x (N, d) and of `selected` (n, d) to `d_x` and `d_selected`."""
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = F32(1) / np.sqrt(F32(e))
    weight, bias = matrix(theta, a[QKV], 3 * d, d), theta[a[QKV_BIAS] :]
    d_weight, d_bias = matrix(grad, a[QKV], 3 * d, d), grad[a[QKV_BIAS] :]
    states, before, after = x.reshape(length, n, d), p.reshape(heads, n, length), w.reshape(heads, n, length)
    d_states = d_x.reshape(length, n, d)
    # A key's bias adds the same to all scores: its gradient is 0, and its part of `grad` is left as it is.
    d_query, d_keyed = empty(n, d), empty(n, d)
    part, slopes = empty(n, e), vector(length)
    for head in range(heads):
        values = slice(2 * d + head * e, 2 * d + (head + 1) * e)
        keys = slice(d + head * e, d + (head + 1) * e)
        copy_columns(d_values, head * e, part)
        np.dot(part.T, seen[head], d_weight[values])
        d_seen = np.dot(part, weight[values])
        for i in range(n):
            mass = F32(0)
            for t in range(length):
                mass += after[head, i, t]
            of_bias = F32(0)
            for c in range(e):
                d_bias[2 * d + head * e + c] += mass * part[i, c]
                of_bias += part[i, c] * bias[2 * d + head * e + c]
            mean = F32(0)
            for t in range(length):
                slope = of_bias + _dot(d_seen, states[t], i)
                if level != KEEP_ALL:
                    slope = slope * scale if bits[head * n + i, t] >= level else F32(0)
                slopes[t] = slope
                mean += slope * before[head, i, t]
            for j in range(d):
                d_keyed[i, j] = 0
            for t in range(length):
                slope, weight_of_state = before[head, i, t] * (slopes[t] - mean) * factor, after[head, i, t]
                for j in range(d):
                    d_keyed[i, j] += slope * states[t, i, j]
                for j in range(d):
                    # as a value and as a key
                    d_states[t, i, j] += weight_of_state * d_seen[i, j] + slope * keyed[head, i, j]
        copy_columns(query, head * e, part)
        np.dot(part.T, d_keyed, d_weight[keys])
        np.dot(d_keyed, weight[keys].T, part)
        for i in range(n):
            for c in range(e):
                d_query[i, head * e + c] = part[i, c]
    np.dot(d_query.T, selected, d_weight[:d])
    add_columns(d_query, d_bias)
    more = np.dot(d_query, weight[:d])
    for i in range(n):
        for j in range(d):
            d_selected[i, j] += more[i, j]
