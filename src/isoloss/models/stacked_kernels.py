"""Loss and gradient of BERTs that predict one token a sentence, compiled as a whole for one thread of the CPU.

A member of a stack is a model whose parameters are one vector, laid out by `isoloss.models.stacked.Layout`. The members
are computed one after the other by the same code on arrays of the same shapes, so that what one of them gets does not
depend on the others. Everything is float32, and dropout is as in `isoloss.models.fused_kernels`.

Shapes: S members, n sentences, T tokens, N = n T rows, row t n + i of token t of sentence i; d the width, m the
feed-forward width, h heads of e = d / h, V ids. In the last layer all that follows the scores runs on the n predicted
positions alone.
"""

from __future__ import annotations

import numpy as np

from isoloss.models.fused_kernels import F32, KEEP_ALL, Bits, Floats, add_norm, add_norm_backward, compiled, exp, gelu
from isoloss.models.stacked_attention import (
    FIRST,
    HEAD,
    HEAD_BIAS,
    HEAD_NORM,
    HEAD_SHIFT,
    INNER,
    INNER_BIAS,
    NORM,
    NORM1,
    NORM2,
    OF_BLOCK,
    OUT,
    OUT_BIAS,
    OUTER,
    OUTER_BIAS,
    OUTPUT,
    PLACES,
    QKV,
    QKV_BIAS,
    SHIFT,
    SHIFT1,
    SHIFT2,
    TYPES,
    WORDS,
    Ints,
    Sizes,
    add_columns,
    attention,
    attention_backward,
    from_one,
    from_one_backward,
    matrix,
)


@compiled
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


@compiled
def _taken(bits: Bits, start: int, rows: int, columns: int) -> Bits:
    """Return the bits of (rows, columns) values, or of none where nothing is dropped."""
    if bits.shape[0] == 0:
        return bits.reshape(0, columns)
    return bits[start : start + rows * columns].reshape(rows, columns)


@compiled
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
    eps = F32(1e-12)
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
    product = np.empty((rows, d), np.float32)

    # --- forward
    words, position = matrix(theta, at[WORDS], z.ids, d), matrix(theta, at[PLACES], length, d)
    kind, norm, shift = theta[at[TYPES] :][:d], theta[at[NORM] :][:d], theta[at[SHIFT] :][:d]
    nothing = bits[:0].reshape(0, d)
    dropped = _taken(bits, 0, rows, d)
    _embed(words, position, kind, norm, shift, tokens, dropped, level, scale, u0, inverse0, x[0])
    drawn = rows * d
    for layer in range(layers - 1):
        a = at[FIRST + OF_BLOCK * layer :]
        dropped = _taken(bits, drawn, heads * length, length * n)
        attention(theta, a, z, x[layer], unseen, qkv[layer], p[layer], w[layer], mixed[layer], dropped, level, scale)
        drawn += heads * length * rows
        np.dot(mixed[layer].T, matrix(theta, a[OUT], d, d).T, product)
        dropped, more = _taken(bits, drawn, rows, d), _taken(bits, drawn + rows * d, rows, d)
        drawn += 2 * rows * d
        _after_attention(
            theta, a, d, m, product, x[layer], dropped, more, level, scale, u1[layer], inverse1[layer],
            between[layer], slope[layer], hidden[layer], u2[layer], inverse2[layer], x[layer + 1],
        )  # fmt: skip
    last = layers - 1
    a = at[FIRST + OF_BLOCK * last :]
    selected = np.empty((n, d), np.float32)
    for i in range(n):
        selected[i] = x[last, places[i] * n + i]
    query, keyed = np.empty((n, d), np.float32), np.empty((heads, n, d), np.float32)
    seen, values = np.empty((heads, n, d), np.float32), np.empty((n, d), np.float32)
    p1, w1 = np.empty((heads * n, length), np.float32), np.empty((heads * n, length), np.float32)
    dropped = _taken(bits, drawn, heads * n, length)
    from_one(theta, a, z, x[last], selected, unseen, query, keyed, p1, w1, seen, values, dropped, level, scale)
    drawn += heads * n * length
    out = product[:n]
    np.dot(values, matrix(theta, a[OUT], d, d).T, out)
    dropped, more = _taken(bits, drawn, n, d), _taken(bits, drawn + n * d, n, d)
    top = x[layers, :n]
    _after_attention(
        theta, a, d, m, out, selected, dropped, more, level, scale, u1[last, :n], inverse1[last, :n],
        between[last, :n], slope[last, :n], hidden[last, :n], u2[last, :n], inverse2[last, :n], top,
    )  # fmt: skip
    head = matrix(theta, at[HEAD], d, d)
    head_slope, u3, inverse3 = np.empty((n, d), np.float32), np.empty((n, d), np.float32), np.empty(n, np.float32)
    features, zero = np.empty((n, d), np.float32), np.zeros((n, d), np.float32)
    np.dot(top, head.T, head_slope)
    gelu(head_slope, theta[at[HEAD_BIAS] :][:d], u3)
    head_norm = theta[at[HEAD_NORM] :][:d]
    add_norm(
        u3, zero[0], zero, nothing, KEEP_ALL, scale, head_norm, theta[at[HEAD_SHIFT] :][:d], eps, inverse3, features
    )
    logits = np.dot(features, words.T)
    _cross_entropy(logits, theta[at[OUTPUT] :][: z.ids], labels, targets, losses)

    # --- backward
    sums = np.zeros((3, d), np.float32)
    np.dot(logits.T, features, matrix(grad, at[WORDS], z.ids, d))
    add_columns(logits, grad[at[OUTPUT] :])
    d_features = np.dot(logits, words)
    d_top, unused = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    add_norm_backward(d_features, u3, inverse3, nothing, KEEP_ALL, scale, head_norm, d_top, unused, sums)
    grad[at[HEAD_NORM] :][:d] = sums[1]
    grad[at[HEAD_SHIFT] :][:d] = sums[2]
    for i in range(n):
        for j in range(d):
            d_top[i, j] *= head_slope[i, j]
    np.dot(d_top.T, top, matrix(grad, at[HEAD], d, d))
    add_columns(d_top, grad[at[HEAD_BIAS] :])
    d_out, d_product, d_residual = np.dot(d_top, head), np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    _after_attention_backward(
        theta, grad, a, d, m, d_out, dropped, more, level, scale, u1[last, :n], inverse1[last, :n],
        between[last, :n], slope[last, :n], hidden[last, :n], u2[last, :n], inverse2[last, :n], d_product, d_residual,
    )  # fmt: skip
    np.dot(d_product.T, values, matrix(grad, a[OUT], d, d))
    d_values = np.dot(d_product, matrix(theta, a[OUT], d, d))
    d_x = np.zeros((rows, d), np.float32)
    dropped = _taken(bits, drawn - heads * n * length, heads * n, length)
    from_one_backward(
        theta, grad, a, z, x[last], selected, query, keyed, p1, w1, seen, d_values, dropped, level, scale, d_x,
        d_residual,
    )  # fmt: skip
    for i in range(n):
        d_x[places[i] * n + i] += d_residual[i]
    drawn -= heads * n * length
    d_product, d_residual = np.empty((rows, d), np.float32), np.empty((rows, d), np.float32)
    d_mixed, d_qkv = np.empty((d, rows), np.float32), np.empty((3 * d, rows), np.float32)
    for layer in range(layers - 2, -1, -1):
        a = at[FIRST + OF_BLOCK * layer :]
        drawn -= 2 * rows * d
        dropped, more = _taken(bits, drawn, rows, d), _taken(bits, drawn + rows * d, rows, d)
        _after_attention_backward(
            theta, grad, a, d, m, d_x, dropped, more, level, scale, u1[layer], inverse1[layer],
            between[layer], slope[layer], hidden[layer], u2[layer], inverse2[layer], d_product, d_residual,
        )  # fmt: skip
        np.dot(d_product.T, mixed[layer].T, matrix(grad, a[OUT], d, d))
        np.dot(matrix(theta, a[OUT], d, d).T, d_product.T, d_mixed)
        drawn -= heads * length * rows
        dropped = _taken(bits, drawn, heads * length, length * n)
        attention_backward(z, qkv[layer], p[layer], w[layer], d_mixed, dropped, level, scale, d_qkv)
        np.dot(d_qkv, x[layer], matrix(grad, a[QKV], 3 * d, d))
        for j in range(3 * d):
            grad[a[QKV_BIAS] + j] = _sum(d_qkv[j])
        np.dot(d_qkv.T, matrix(theta, a[QKV], 3 * d, d), d_x)
        for i in range(rows):
            for j in range(d):
                d_x[i, j] += d_residual[i, j]
    sums[:] = 0
    d_words, d_position = matrix(grad, at[WORDS], z.ids, d), matrix(grad, at[PLACES], length, d)
    dropped = _taken(bits, 0, rows, d)
    _embed_backward(d_x, u0, inverse0, norm, tokens, z.padding, dropped, level, scale, d_words, d_position, sums)
    grad[at[NORM] :][:d] = sums[0]
    grad[at[SHIFT] :][:d] = sums[1]
    for t in range(length):
        for j in range(d):
            grad[at[TYPES] + j] += d_position[t, j]


@compiled
def _embed(
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
    one, added = F32(1) / F32(d), np.empty(d, np.float32)
    for t in range(length):
        for j in range(d):
            added[j] = position[t, j] + kind[j]
        for i in range(n):
            row, token, total = t * n + i, tokens[t, i], F32(0)
            for j in range(d):
                v = words[token, j] + added[j]
                u[row, j] = v
                total += v
            mean = total * one
            total = F32(0)
            for j in range(d):
                v = u[row, j] - mean
                total += v * v
            r = F32(1) / np.sqrt(total * one + F32(1e-12))
            inverse[row] = r
            for j in range(d):
                v = (u[row, j] - mean) * r
                u[row, j] = v
                v = v * norm[j] + shift[j]
                if level != KEEP_ALL:
                    v = v * scale if bits[row, j] >= level else F32(0)
                y[row, j] = v


@compiled
def _embed_backward(
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
    sums: Floats,
) -> None:
    """Add the gradients of `_embed`; in `sums` (2, d), those of the layer norm. The padding's word has none."""
    length, n = tokens.shape
    d = u.shape[1]
    one, g = F32(1) / F32(d), np.empty(d, np.float32)
    for t in range(length):
        for i in range(n):
            row, token = t * n + i, tokens[t, i]
            plain, along = F32(0), F32(0)
            for j in range(d):
                v = d_y[row, j]
                if level != KEEP_ALL:
                    v = v * scale if bits[row, j] >= level else F32(0)
                sums[0, j] += v * u[row, j]
                sums[1, j] += v
                v *= norm[j]
                g[j] = v
                plain += v
                along += v * u[row, j]
            plain *= one
            along *= one
            r = inverse[row]
            for j in range(d):
                v = r * (g[j] - plain - u[row, j] * along)
                g[j] = v
                d_position[t, j] += v
            if token != padding:
                for j in range(d):
                    d_words[token, j] += g[j]


@compiled
def _sum(values: Floats) -> np.float32:
    total = F32(0)
    for i in range(values.shape[0]):
        total += values[i]
    return total


@compiled
def _cross_entropy(logits: Floats, bias: Floats, labels: Ints, targets: Floats, losses: Floats) -> None:
    """Set `losses` (n,), and the logits to the gradient of their mean; arguments as for `loss_and_gradient`."""
    n, ids = logits.shape
    for i in range(n):
        highest = F32(-np.inf)
        for j in range(ids):
            logits[i, j] += bias[j]
            highest = max(highest, logits[i, j])
        mass, along = F32(0), F32(0)
        for j in range(targets.shape[1]):
            mass += targets[i, j]
            along += targets[i, j] * (logits[i, j] - highest)
        if targets.shape[1] == 0:
            mass, along = F32(1), logits[i, labels[i]] - highest
        total = F32(0)
        for j in range(ids):
            logits[i, j] = exp(logits[i, j] - highest)
            total += logits[i, j]
        losses[i] = np.log(total) * mass - along
        factor = mass / (total * F32(n))
        for j in range(ids):
            logits[i, j] *= factor
        for j in range(targets.shape[1]):
            logits[i, j] -= targets[i, j] / F32(n)
        if targets.shape[1] == 0:
            logits[i, labels[i]] -= F32(1) / F32(n)


@compiled
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
    eps = F32(1e-12)
    u1[:] = product
    bias, norm, shift = theta[a[OUT_BIAS] :][:d], theta[a[NORM1] :][:d], theta[a[SHIFT1] :][:d]
    add_norm(u1, bias, x, bits, level, scale, norm, shift, eps, inverse1, between)
    np.dot(between, matrix(theta, a[INNER], m, d).T, slope)
    gelu(slope, theta[a[INNER_BIAS] :][:m], hidden)
    np.dot(hidden, matrix(theta, a[OUTER], d, m).T, u2)
    bias, norm, shift = theta[a[OUTER_BIAS] :][:d], theta[a[NORM2] :][:d], theta[a[SHIFT2] :][:d]
    add_norm(u2, bias, between, more_bits, level, scale, norm, shift, eps, inverse2, y)


@compiled
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
    norm = theta[a[NORM2] :][:d]
    add_norm_backward(d_y, u2, inverse2, more_bits, level, scale, norm, d_outer, d_between, sums)
    grad[a[OUTER_BIAS] :][:d] = sums[0]
    grad[a[NORM2] :][:d] = sums[1]
    grad[a[SHIFT2] :][:d] = sums[2]
    np.dot(d_outer.T, hidden, matrix(grad, a[OUTER], d, m))
    d_hidden = np.dot(d_outer, matrix(theta, a[OUTER], d, m))
    for i in range(rows):
        for j in range(m):
            d_hidden[i, j] *= slope[i, j]
    np.dot(d_hidden.T, between, matrix(grad, a[INNER], m, d))
    add_columns(d_hidden, grad[a[INNER_BIAS] :])
    more = np.dot(d_hidden, matrix(theta, a[INNER], m, d))
    for i in range(rows):
        for j in range(d):
            d_between[i, j] += more[i, j]
    sums[:] = 0
    norm = theta[a[NORM1] :][:d]
    add_norm_backward(d_between, u1, inverse1, bits, level, scale, norm, d_product, d_x, sums)
    grad[a[OUT_BIAS] :][:d] = sums[0]
    grad[a[NORM1] :][:d] = sums[1]
    grad[a[SHIFT1] :][:d] = sums[2]
