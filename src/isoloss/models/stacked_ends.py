"""The ends of a stack's members: the embedding with its layer norm and dropout, and the loss of the logits.

Everything is float32 and compiled for one thread. Shapes are as in `isoloss.models.stacked_kernels`.
"""

from __future__ import annotations

import numpy as np

from isoloss.models.fused_kernels import F32, KEEP_ALL, Bits, Floats, exp, part
from isoloss.models.fused_kernels import sums as adding
from isoloss.models.stacked_attention import Ints


@adding
def _total(u: Floats, row: int) -> np.float32:
    total = F32(0)
    for j in range(u.shape[1]):
        total += u[row, j]
    return total


@adding
def _squares(u: Floats, row: int, mean: np.float32) -> np.float32:
    total = F32(0)
    for j in range(u.shape[1]):
        total += (u[row, j] - mean) * (u[row, j] - mean)
    return total


@adding
def _dots(g: Floats, u: Floats, row: int) -> tuple[np.float32, np.float32]:
    """Return the sum of g (d,), and that of g times a row of u (N, d)."""
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
    one, added = F32(1) / F32(d), np.empty(d, np.float32)
    for t in range(length):
        for j in range(d):
            added[j] = position[t, j] + kind[j]
        for i in range(n):
            row, token = t * n + i, tokens[t, i]
            for j in range(d):
                u[row, j] = words[token, j] + added[j]
            mean = _total(u, row) * one
            r = F32(1) / np.sqrt(_squares(u, row, mean) * one + F32(1e-12))
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
    sums: Floats,
) -> None:
    """Add the gradients of `embed`; in `sums` (2, d), those of the layer norm. The padding's word has none."""
    length, n = tokens.shape
    d = u.shape[1]
    one, g = F32(1) / F32(d), np.empty(d, np.float32)
    for t in range(length):
        for i in range(n):
            row, token = t * n + i, tokens[t, i]
            for j in range(d):
                v = d_y[row, j]
                if level != KEEP_ALL:
                    v = v * scale if bits[row, j] >= level else F32(0)
                sums[0, j] += v * u[row, j]
                sums[1, j] += v
                g[j] = v * norm[j]
            plain, along = _dots(g, u, row)
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


@part
def cross_entropy(logits: Floats, bias: Floats, labels: Ints, targets: Floats, losses: Floats) -> None:
    """Set `losses` (n,), and the logits (V, n) to the gradient of their mean; see `isoloss.models.stacked_kernels`."""
    ids, n = logits.shape
    one = F32(1) / F32(n)
    highest, total, mass = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for j in range(ids):
        for i in range(n):
            logits[j, i] += bias[j]
            highest[i] = max(highest[i], logits[j, i])
    for i in range(n):
        if targets.shape[1] == 0:
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
