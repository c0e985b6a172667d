"""Attention of a stack's members, forward and backward, and what the compiled code shares: shapes and places.

Everything is float32 and compiled for one thread. Attention has the sentences on the last axis, so that its loops fill
the vector registers however short the sentences are; where one position a sentence is asked for, no key and no value is
computed. Shapes are as in `isoloss.models.stacked_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isoloss.models.fused_kernels import F32, KEEP_ALL, Bits, Floats, exp, part, sums
from isoloss.models.stacked_columns import product

Ints = npt.NDArray[np.int64]

# Where a member's parameters begin in its vector: these, then those of a block for each layer
WORDS, PLACES, TYPES, NORM, SHIFT, HEAD, HEAD_BIAS, HEAD_NORM, HEAD_SHIFT, OUTPUT, FIRST = range(11)
QKV, QKV_BIAS, OUT, OUT_BIAS, NORM1, SHIFT1, INNER, INNER_BIAS, OUTER, OUTER_BIAS, NORM2, SHIFT2 = range(12)
OF_BLOCK = 12


class Sizes(NamedTuple):
    """The shape of a member and of its batch; `num_drawn` is how many values its dropout decides on."""

    layers: int
    heads: int
    width: int
    inner: int  # the feed-forward width
    ids: int  # rows of the word embedding
    padding: int  # the id whose embedding has no gradient as an input
    sentences: int
    tokens: int


def num_drawn(sizes: Sizes) -> int:
    """Return how many values dropout decides on in a step of one member."""
    n, tokens, width, heads = sizes.sentences, sizes.tokens, sizes.width, sizes.heads
    rows = n * tokens
    full = heads * tokens * rows + 2 * rows * width
    return rows * width + (sizes.layers - 1) * full + heads * rows + 2 * n * width


@part
def matrix(vector: Floats, start: int, rows: int, columns: int) -> Floats:
    """Return the matrix that begins at `start`, which shares memory with the vector."""
    return vector[start : start + rows * columns].reshape(rows, columns)


@part
def add_columns(values: Floats, sums: Floats) -> None:
    """Add the sum of the rows of `values` (N, k) to the first k of `sums`."""
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            sums[j] += values[i, j]


@part
def attention(
    theta: Floats,
    a: Ints,
    z: Sizes,
    x: Floats,
    unseen: Floats,
    qkv: Floats,
    p: Floats,
    w: Floats,
    mixed: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
) -> None:
    """Set `mixed` (d, N) to the attention of x (d, N) from every position; keep qkv (3 d, N), p and w (h T, T n)."""
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = F32(1) / np.sqrt(F32(e))
    product(matrix(theta, a[QKV], 3 * d, d), x, qkv)
    for j in range(3 * d):
        b = theta[a[QKV_BIAS] + j]
        for i in range(n * length):
            qkv[j, i] += b
    parts, out = qkv.reshape(3, heads, e, length, n), mixed.reshape(heads, e, length, n)
    before, after = p.reshape(heads, length, length, n), w.reshape(heads, length, length, n)
    highest, total = np.empty(n, np.float32), np.empty(n, np.float32)
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
                    before[head, t, u, i] = before[head, t, u, i] * factor + unseen[u, i]
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
    g, mean = np.empty((length, n), np.float32), np.empty(n, np.float32)
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
def from_one(
    theta: Floats,
    a: Ints,
    z: Sizes,
    x: Floats,
    selected: Floats,
    unseen: Floats,
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
    np.dot(selected, weight[:d].T, query)
    for i in range(n):
        for j in range(d):
            query[i, j] += bias[j]
    states, before, after = x.reshape(length, n, d), p.reshape(heads, n, length), w.reshape(heads, n, length)
    part, own = np.empty((n, e), np.float32), np.empty((n, e), np.float32)
    for head in range(heads):
        part[:] = query[:, head * e : (head + 1) * e]
        np.dot(part, weight[d + head * e : d + (head + 1) * e], keyed[head])
        for i in range(n):
            highest = F32(-np.inf)
            for t in range(length):
                score = _dot(keyed[head], states[t], i)
                before[head, i, t] = score * factor + unseen[t, i]
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
                own[i, c] = mass * bias[2 * d + head * e + c]
        mixed = np.dot(seen[head], weight[2 * d + head * e : 2 * d + (head + 1) * e].T)
        for i in range(n):
            for c in range(e):
                values[i, head * e + c] = mixed[i, c] + own[i, c]


@part
def from_one_backward(
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
    d_query, d_keyed = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    part, slopes = np.empty((n, e), np.float32), np.empty(length, np.float32)
    for head in range(heads):
        values = slice(2 * d + head * e, 2 * d + (head + 1) * e)
        keys = slice(d + head * e, d + (head + 1) * e)
        part[:] = d_values[:, head * e : (head + 1) * e]
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
                    d_states[t, i, j] += weight_of_state * d_seen[i, j] + slope * keyed[head, i, j]
        part[:] = query[:, head * e : (head + 1) * e]
        np.dot(part.T, d_keyed, d_weight[keys])
        d_query[:, head * e : (head + 1) * e] = np.dot(d_keyed, weight[keys].T)
    np.dot(d_query.T, selected, d_weight[:d])
    add_columns(d_query, d_bias)
    more = np.dot(d_query, weight[:d])
    for i in range(n):
        for j in range(d):
            d_selected[i, j] += more[i, j]
