"""Loss and gradient of BERTs that predict one token a sentence, compiled as a whole for one thread of the CPU.

A member of a stack is a model whose parameters are one vector, laid out by `isoloss.models.stacked.Layout`. The members
are computed one after the other by the same code on arrays of the same shapes, so that what one of them gets does not
depend on the others. Everything is float32, and dropout is as in `isoloss.models.fused_kernels`.

Shapes: S members, n sentences, T tokens, N = n T rows, row t n + i of token t of sentence i; d the width, m the
feed-forward width, h heads of e = d / h, V ids. Attention has the sentences on the last axis, so that its loops fill
the vector registers however short the sentences are. In the last layer all that follows the scores runs on the n
predicted positions alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isoloss.models.fused_kernels import _F, _KEEP_ALL, Bits, Floats, _compiled, _exp, add_norm, add_norm_backward, gelu

Ints = npt.NDArray[np.int64]

# Where a member's parameters begin in its vector: these, then those of a block for each layer
_WORDS, _PLACES, _TYPES, _NORM, _SHIFT, _HEAD, _HEAD_BIAS, _HEAD_NORM, _HEAD_SHIFT, _OUTPUT, _FIRST = range(11)
_QKV, _QKV_BIAS, _OUT, _OUT_BIAS, _NORM1, _SHIFT1, _INNER, _INNER_BIAS, _OUTER, _OUTER_BIAS, _NORM2, _SHIFT2 = range(12)
_OF_BLOCK = 12


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


@_compiled
def loss_and_gradient(
    parameters: Floats,
    gradients: Floats,
    members: Ints,
    at: Ints,
    sizes: Sizes,
    tokens: Ints,
    places: Ints,
    unseen: Floats,
    labels: Ints,
    targets: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    losses: Floats,
) -> None:
    """Set `losses` (S, n), in nats, and the gradients of their means, for the rows `members` (S,) of `parameters`.

    `at` says where each parameter begins in a row. The `tokens` (S, T, n) are ids, `places` (S, n) the predicted
    positions; `unseen` (S, T, n) is added to the scores of a key: 0, or very low at padding. The `targets` (S, n, C)
    are probabilities of the first C ids or, with C = 0, the `labels` (S, n) are what is predicted. The random `bits`
    (S, B) are read from the first to the last.
    """
    for s in range(members.shape[0]):
        gradients[members[s]] = 0
        _member(
            parameters[members[s]], gradients[members[s]], at, sizes, tokens[s], places[s], unseen[s], labels[s],
            targets[s], bits[s], level, scale, losses[s],
        )  # fmt: skip


@_compiled
def _matrix(vector: Floats, start: int, rows: int, columns: int) -> Floats:
    return vector[start : start + rows * columns].reshape(rows, columns)


@_compiled
def _taken(bits: Bits, start: int, rows: int, columns: int) -> Bits:
    """Return the bits of (rows, columns) values, or of none where nothing is dropped."""
    if bits.shape[0] == 0:
        return bits.reshape(0, columns)
    return bits[start : start + rows * columns].reshape(rows, columns)


@_compiled
def _member(
    theta: Floats,
    grad: Floats,
    at: Ints,
    z: Sizes,
    tokens: Ints,
    places: Ints,
    unseen: Floats,
    labels: Ints,
    targets: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    losses: Floats,
) -> None:
    n, length, d, m, layers, heads = z.sentences, z.tokens, z.width, z.inner, z.layers, z.heads
    rows = n * length
    eps = _F(1e-12)
    x = np.empty((layers + 1, rows, d), np.float32)  # the input of each block; of the last entry, n rows are used
    between = np.empty((layers, rows, d), np.float32)  # after the attention's layer norm
    u0, inverse0 = np.empty((rows, d), np.float32), np.empty(rows, np.float32)
    u1, inverse1 = np.empty((layers, rows, d), np.float32), np.empty((layers, rows), np.float32)
    u2, inverse2 = np.empty((layers, rows, d), np.float32), np.empty((layers, rows), np.float32)
    slope, hidden = np.empty((layers, rows, m), np.float32), np.empty((layers, rows, m), np.float32)
    qkv = np.empty((layers, 3 * d, rows), np.float32)
    p = np.empty((layers, heads * length, length * n), np.float32)
    w = np.empty((layers, heads * length, length * n), np.float32)
    mixed = np.empty((layers, d, rows), np.float32)
    product, residual = np.empty((rows, d), np.float32), np.empty((rows, d), np.float32)

    # --- forward
    words, position = _matrix(theta, at[_WORDS], z.ids, d), _matrix(theta, at[_PLACES], length, d)
    for t in range(length):
        for i in range(n):
            u0[t * n + i] = words[tokens[t, i]]
            residual[t * n + i] = position[t]
    kind, norm, shift = theta[at[_TYPES] :][:d], theta[at[_NORM] :][:d], theta[at[_SHIFT] :][:d]
    nothing = bits[:0].reshape(0, d)
    add_norm(u0, kind, residual, nothing, _KEEP_ALL, scale, norm, shift, eps, inverse0, x[0])
    _drop(x[0], _taken(bits, 0, rows, d), level, scale)
    drawn = rows * d
    for layer in range(layers - 1):
        a = at[_FIRST + _OF_BLOCK * layer :]
        dropped = _taken(bits, drawn, heads * length, length * n)
        _attention(theta, a, z, x[layer], unseen, qkv[layer], p[layer], w[layer], mixed[layer], dropped, level, scale)
        drawn += heads * length * rows
        np.dot(mixed[layer].T, _matrix(theta, a[_OUT], d, d).T, product)
        dropped, more = _taken(bits, drawn, rows, d), _taken(bits, drawn + rows * d, rows, d)
        drawn += 2 * rows * d
        _after_attention(
            theta, a, d, m, product, x[layer], dropped, more, level, scale, u1[layer], inverse1[layer],
            between[layer], slope[layer], hidden[layer], u2[layer], inverse2[layer], x[layer + 1],
        )  # fmt: skip
    last = layers - 1
    a = at[_FIRST + _OF_BLOCK * last :]
    selected = np.empty((n, d), np.float32)
    for i in range(n):
        selected[i] = x[last, places[i] * n + i]
    query, keyed = np.empty((n, d), np.float32), np.empty((heads, n, d), np.float32)
    seen, values = np.empty((heads, n, d), np.float32), np.empty((n, d), np.float32)
    p1, w1 = np.empty((heads * n, length), np.float32), np.empty((heads * n, length), np.float32)
    dropped = _taken(bits, drawn, heads * n, length)
    _attention_from_one(
        theta, a, z, x[last], selected, unseen, query, keyed, p1, w1, seen, values, dropped, level, scale
    )
    drawn += heads * n * length
    out = product[:n]
    np.dot(values, _matrix(theta, a[_OUT], d, d).T, out)
    dropped, more = _taken(bits, drawn, n, d), _taken(bits, drawn + n * d, n, d)
    top = x[layers, :n]
    _after_attention(
        theta, a, d, m, out, selected, dropped, more, level, scale, u1[last, :n], inverse1[last, :n],
        between[last, :n], slope[last, :n], hidden[last, :n], u2[last, :n], inverse2[last, :n], top,
    )  # fmt: skip
    head = _matrix(theta, at[_HEAD], d, d)
    head_slope, u3, inverse3 = np.empty((n, d), np.float32), np.empty((n, d), np.float32), np.empty(n, np.float32)
    features, zero = np.empty((n, d), np.float32), np.zeros((n, d), np.float32)
    np.dot(top, head.T, head_slope)
    gelu(head_slope, theta[at[_HEAD_BIAS] :][:d], u3)
    head_norm = theta[at[_HEAD_NORM] :][:d]
    add_norm(
        u3, zero[0], zero, nothing, _KEEP_ALL, scale, head_norm, theta[at[_HEAD_SHIFT] :][:d], eps, inverse3, features
    )
    logits = np.dot(features, words.T)
    _cross_entropy(logits, theta[at[_OUTPUT] :][: z.ids], labels, targets, losses)

    # --- backward
    sums = np.zeros((3, d), np.float32)
    np.dot(logits.T, features, _matrix(grad, at[_WORDS], z.ids, d))
    _add_columns(logits, grad[at[_OUTPUT] :])
    d_features = np.dot(logits, words)
    d_top, unused = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    add_norm_backward(d_features, u3, inverse3, nothing, _KEEP_ALL, scale, head_norm, d_top, unused, sums)
    grad[at[_HEAD_NORM] :][:d] = sums[1]
    grad[at[_HEAD_SHIFT] :][:d] = sums[2]
    for i in range(n):
        for j in range(d):
            d_top[i, j] *= head_slope[i, j]
    np.dot(d_top.T, top, _matrix(grad, at[_HEAD], d, d))
    _add_columns(d_top, grad[at[_HEAD_BIAS] :])
    d_out, d_product, d_residual = np.dot(d_top, head), np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    _after_attention_backward(
        theta, grad, a, d, m, d_out, dropped, more, level, scale, u1[last, :n], inverse1[last, :n],
        between[last, :n], slope[last, :n], hidden[last, :n], u2[last, :n], inverse2[last, :n], d_product, d_residual,
    )  # fmt: skip
    np.dot(d_product.T, values, _matrix(grad, a[_OUT], d, d))
    d_values = np.dot(d_product, _matrix(theta, a[_OUT], d, d))
    d_x = np.zeros((rows, d), np.float32)
    dropped = _taken(bits, drawn - heads * n * length, heads * n, length)
    _attention_from_one_backward(
        theta, grad, a, z, x[last], selected, query, keyed, p1, w1, seen, d_values, dropped, level, scale, d_x,
        d_residual,
    )  # fmt: skip
    for i in range(n):
        d_x[places[i] * n + i] += d_residual[i]
    drawn -= heads * n * length
    d_product, d_residual = np.empty((rows, d), np.float32), np.empty((rows, d), np.float32)
    d_mixed, d_qkv = np.empty((d, rows), np.float32), np.empty((3 * d, rows), np.float32)
    for layer in range(layers - 2, -1, -1):
        a = at[_FIRST + _OF_BLOCK * layer :]
        drawn -= 2 * rows * d
        dropped, more = _taken(bits, drawn, rows, d), _taken(bits, drawn + rows * d, rows, d)
        _after_attention_backward(
            theta, grad, a, d, m, d_x, dropped, more, level, scale, u1[layer], inverse1[layer],
            between[layer], slope[layer], hidden[layer], u2[layer], inverse2[layer], d_product, d_residual,
        )  # fmt: skip
        np.dot(d_product.T, mixed[layer].T, _matrix(grad, a[_OUT], d, d))
        np.dot(_matrix(theta, a[_OUT], d, d).T, d_product.T, d_mixed)
        drawn -= heads * length * rows
        dropped = _taken(bits, drawn, heads * length, length * n)
        _attention_backward(z, qkv[layer], p[layer], w[layer], d_mixed, dropped, level, scale, d_qkv)
        np.dot(d_qkv, x[layer], _matrix(grad, a[_QKV], 3 * d, d))
        for j in range(3 * d):
            grad[a[_QKV_BIAS] + j] = _sum(d_qkv[j])
        np.dot(d_qkv.T, _matrix(theta, a[_QKV], 3 * d, d), d_x)
        for i in range(rows):
            for j in range(d):
                d_x[i, j] += d_residual[i, j]
    _drop(d_x, _taken(bits, 0, rows, d), level, scale)
    sums[:] = 0
    add_norm_backward(d_x, u0, inverse0, nothing, _KEEP_ALL, scale, norm, residual, product, sums)
    grad[at[_TYPES] :][:d] = sums[0]
    grad[at[_NORM] :][:d] = sums[1]
    grad[at[_SHIFT] :][:d] = sums[2]
    d_words, d_position = _matrix(grad, at[_WORDS], z.ids, d), _matrix(grad, at[_PLACES], length, d)
    for t in range(length):
        for i in range(n):
            d_position[t] += residual[t * n + i]
            if tokens[t, i] != z.padding:
                d_words[tokens[t, i]] += residual[t * n + i]


@_compiled
def _sum(values: Floats) -> np.float32:
    total = _F(0)
    for i in range(values.shape[0]):
        total += values[i]
    return total  # type: ignore[return-value]


@_compiled
def _add_columns(values: Floats, sums: Floats) -> None:
    """Add the sum of the rows of `values` (N, k) to the first k of `sums`."""
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            sums[j] += values[i, j]


@_compiled
def _drop(x: Floats, bits: Bits, level: np.int16, scale: np.float32) -> None:
    if level != _KEEP_ALL:
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                x[i, j] = x[i, j] * scale if bits[i, j] >= level else _F(0)


@_compiled
def _cross_entropy(logits: Floats, bias: Floats, labels: Ints, targets: Floats, losses: Floats) -> None:
    """Set `losses` (n,), and the logits to the gradient of their mean; arguments as for `loss_and_gradient`."""
    n, ids = logits.shape
    for i in range(n):
        highest = _F(-np.inf)
        for j in range(ids):
            logits[i, j] += bias[j]
            highest = max(highest, logits[i, j])
        mass, along = _F(0), _F(0)
        for j in range(targets.shape[1]):
            mass += targets[i, j]
            along += targets[i, j] * (logits[i, j] - highest)
        if targets.shape[1] == 0:
            mass, along = _F(1), logits[i, labels[i]] - highest
        total = _F(0)
        for j in range(ids):
            logits[i, j] = _exp(logits[i, j] - highest)
            total += logits[i, j]
        losses[i] = np.log(total) * mass - along
        factor = mass / (total * _F(n))
        for j in range(ids):
            logits[i, j] *= factor
        for j in range(targets.shape[1]):
            logits[i, j] -= targets[i, j] / _F(n)
        if targets.shape[1] == 0:
            logits[i, labels[i]] -= _F(1) / _F(n)


@_compiled
def _attention(
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
    """Set `mixed` (d, N) to the attention of x (N, d) from every position; keep qkv (3 d, N), p and w (h T, T n)."""
    n, length, d, heads = z.sentences, z.tokens, z.width, z.heads
    e = d // heads
    factor = _F(1) / np.sqrt(_F(e))
    np.dot(_matrix(theta, a[_QKV], 3 * d, d), x.T, qkv)
    for j in range(3 * d):
        b = theta[a[_QKV_BIAS] + j]
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
                    before[head, t, u, i] = _exp(before[head, t, u, i] - highest[i])
                    total[i] += before[head, t, u, i]
            for i in range(n):
                total[i] = _F(1) / total[i]
            for c in range(e):
                for i in range(n):
                    out[head, c, t, i] = 0
            for u in range(length):
                for i in range(n):
                    before[head, t, u, i] *= total[i]
                    after[head, t, u, i] = before[head, t, u, i]
                if level != _KEEP_ALL:
                    kept = bits.reshape(heads, length, length, n)
                    for i in range(n):
                        v = after[head, t, u, i]
                        after[head, t, u, i] = v * scale if kept[head, t, u, i] >= level else _F(0)
                for c in range(e):
                    for i in range(n):
                        out[head, c, t, i] += after[head, t, u, i] * parts[2, head, c, u, i]


@_compiled
def _attention_backward(
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
    factor = _F(1) / np.sqrt(_F(e))
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
                if level != _KEEP_ALL:
                    kept = bits.reshape(heads, length, length, n)
                    for i in range(n):
                        g[u, i] = g[u, i] * scale if kept[head, t, u, i] >= level else _F(0)
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


@_compiled
def _attention_from_one(
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
    factor = _F(1) / np.sqrt(_F(e))
    weight, bias = _matrix(theta, a[_QKV], 3 * d, d), theta[a[_QKV_BIAS] :]
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
            highest = _F(-np.inf)
            for t in range(length):
                score = _F(0)
                for j in range(d):
                    score += keyed[head, i, j] * states[t, i, j]
                before[head, i, t] = score * factor + unseen[t, i]
                highest = max(highest, before[head, i, t])
            total = _F(0)
            for t in range(length):
                before[head, i, t] = _exp(before[head, i, t] - highest)
                total += before[head, i, t]
            mass = _F(0)
            for j in range(d):
                seen[head, i, j] = 0
            for t in range(length):
                before[head, i, t] /= total
                weight_of_state = before[head, i, t]
                if level != _KEEP_ALL:
                    weight_of_state = weight_of_state * scale if bits[head * n + i, t] >= level else _F(0)
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


@_compiled
def _attention_from_one_backward(
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
    factor = _F(1) / np.sqrt(_F(e))
    weight, bias = _matrix(theta, a[_QKV], 3 * d, d), theta[a[_QKV_BIAS] :]
    d_weight, d_bias = _matrix(grad, a[_QKV], 3 * d, d), grad[a[_QKV_BIAS] :]
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
            mass = _F(0)
            for t in range(length):
                mass += after[head, i, t]
            of_bias = _F(0)
            for c in range(e):
                d_bias[2 * d + head * e + c] += mass * part[i, c]
                of_bias += part[i, c] * bias[2 * d + head * e + c]
            mean = _F(0)
            for t in range(length):
                slope = of_bias
                for j in range(d):
                    slope += d_seen[i, j] * states[t, i, j]
                if level != _KEEP_ALL:
                    slope = slope * scale if bits[head * n + i, t] >= level else _F(0)
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
    _add_columns(d_query, d_bias)
    more = np.dot(d_query, weight[:d])
    for i in range(n):
        for j in range(d):
            d_selected[i, j] += more[i, j]


@_compiled
def _after_attention(
    theta: Floats,
    a: Ints,
    d: int,
    m: int,
    product: Floats,
    x: Floats,
    bits: Bits,
    more_bits: Bits,
    level: np.int16,
    scale: np.float32,
    u1: Floats,
    inverse1: Floats,
    between: Floats,
    slope: Floats,
    hidden: Floats,
    u2: Floats,
    inverse2: Floats,
    y: Floats,
) -> None:
    """Set y (R, d) to a block's output from the attention's projected one, `product` (R, d), and its input x (R, d)."""
    eps = _F(1e-12)
    u1[:] = product
    bias, norm, shift = theta[a[_OUT_BIAS] :][:d], theta[a[_NORM1] :][:d], theta[a[_SHIFT1] :][:d]
    add_norm(u1, bias, x, bits, level, scale, norm, shift, eps, inverse1, between)
    np.dot(between, _matrix(theta, a[_INNER], m, d).T, slope)
    gelu(slope, theta[a[_INNER_BIAS] :][:m], hidden)
    np.dot(hidden, _matrix(theta, a[_OUTER], d, m).T, u2)
    bias, norm, shift = theta[a[_OUTER_BIAS] :][:d], theta[a[_NORM2] :][:d], theta[a[_SHIFT2] :][:d]
    add_norm(u2, bias, between, more_bits, level, scale, norm, shift, eps, inverse2, y)


@_compiled
def _after_attention_backward(
    theta: Floats,
    grad: Floats,
    a: Ints,
    d: int,
    m: int,
    d_y: Floats,
    bits: Bits,
    more_bits: Bits,
    level: np.int16,
    scale: np.float32,
    u1: Floats,
    inverse1: Floats,
    between: Floats,
    slope: Floats,
    hidden: Floats,
    u2: Floats,
    inverse2: Floats,
    d_product: Floats,
    d_x: Floats,
) -> None:
    """Set the gradients of `product` and x of `_after_attention`, and those of its parameters."""
    rows = d_y.shape[0]
    sums = np.zeros((3, d), np.float32)
    d_outer, d_between = np.empty((rows, d), np.float32), np.empty((rows, d), np.float32)
    norm = theta[a[_NORM2] :][:d]
    add_norm_backward(d_y, u2, inverse2, more_bits, level, scale, norm, d_outer, d_between, sums)
    grad[a[_OUTER_BIAS] :][:d] = sums[0]
    grad[a[_NORM2] :][:d] = sums[1]
    grad[a[_SHIFT2] :][:d] = sums[2]
    np.dot(d_outer.T, hidden, _matrix(grad, a[_OUTER], d, m))
    d_hidden = np.dot(d_outer, _matrix(theta, a[_OUTER], d, m))
    for i in range(rows):
        for j in range(m):
            d_hidden[i, j] *= slope[i, j]
    np.dot(d_hidden.T, between, _matrix(grad, a[_INNER], m, d))
    _add_columns(d_hidden, grad[a[_INNER_BIAS] :])
    more = np.dot(d_hidden, _matrix(theta, a[_INNER], m, d))
    for i in range(rows):
        for j in range(d):
            d_between[i, j] += more[i, j]
    sums[:] = 0
    norm = theta[a[_NORM1] :][:d]
    add_norm_backward(d_between, u1, inverse1, bits, level, scale, norm, d_product, d_x, sums)
    grad[a[_OUT_BIAS] :][:d] = sums[0]
    grad[a[_NORM1] :][:d] = sums[1]
    grad[a[_SHIFT1] :][:d] = sums[2]
