"""Products, GELU and layer norms on activations that have a row for each feature and a column for each token.

Loops run along the columns, so that products need no packing and the sums of a layer norm no rearrangement. Where
libraries' matrix products do not use the widest vectors of a processor, these take half their time. Everything is
float32; dropout is as in `isoloss.models.fused_kernels`.

Shapes: d, k and m features, N columns.
"""

from __future__ import annotations

import numpy as np

from isoloss.models.fused_kernels import F32, KEEP_ALL, Bits, Floats, exp, part, sums

_ROOT_HALF, _ROOT_2PI = F32(0.7071067811865476), F32(0.3989422804014327)


@part
def empty(rows: int, columns: int) -> Floats:
    """Return an uninitialized (rows, columns) that begins on a cache line: elsewhere products take twice as long."""
    buffer = np.empty(rows * columns + 16, np.float32)
    skipped = (-(buffer.ctypes.data // 4)) % 16
    return buffer[skipped : skipped + rows * columns].reshape(rows, columns)


@part
def transpose(x: Floats, y: Floats) -> None:
    """Set y (k, N) to the transpose of x (N, k)."""
    for j in range(y.shape[0]):
        for i in range(y.shape[1]):
            y[j, i] = x[i, j]


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
def add_rows(x: Floats, sums: Floats) -> None:
    """Set the first k of `sums` to the sums over the columns of x (k, N)."""
    for j in range(x.shape[0]):
        total = F32(0)
        for n in range(x.shape[1]):
            total += x[j, n]
        sums[j] = total


@part
def gelu(x: Floats, bias: Floats, y: Floats) -> None:
    """Set y (m, N) to the GELU of x + bias, and x to its derivative there; see `isoloss.models.fused_kernels.gelu`."""
    for j in range(x.shape[0]):
        b = bias[j]
        for n in range(x.shape[1]):
            v = x[j, n] + b
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
            y[j, n] = v * below
            x[j, n] = below + v * _ROOT_2PI * e


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
    one, mean = F32(1) / F32(width), np.zeros(columns, np.float32)
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
            v = x[j, n] - mean[n]
            inverse[n] += v * v
    for n in range(columns):
        inverse[n] = F32(1) / np.sqrt(inverse[n] * one + F32(1e-12))
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
    plain, along = np.zeros(columns, np.float32), np.zeros(columns, np.float32)
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
