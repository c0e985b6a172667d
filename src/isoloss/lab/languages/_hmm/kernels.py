"""The recursions of a hidden Markov model on the CPU: kernels compiled once for all models, many sentences at a time.

A chart is (states, lanes): every inner loop runs over sentences, whose numbers no other sentence touches, in an order
that is the same for all of them: results depend on neither chunks nor threads. Rows of charts, and rows and columns of
tables, are filled up with zeros to a multiple of four, for products of blocks of four by four.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss.lab.jit import jit
from isoloss.lab.languages.batches import clamped_log_

LANE_BYTES = 1024  # of a chart's row: long enough for vector loops, short enough for a second-level cache
_BLOCK = 4  # rows of a table, and columns, that are multiplied by together
_VECTOR = 16  # lanes that are moved together

_memory = threading.local()

Integers = npt.NDArray[np.uint32]
Floats = npt.NDArray[Any]


class Kernels:
    """The compiled recursions of one model; arguments and methods are those of `forward_backward.Recursions`."""

    def __init__(
        self,
        initial: torch.Tensor,
        transition: torch.Tensor,
        scaled: torch.Tensor,
        emission: torch.Tensor,
        *,
        known: float | None,
    ) -> None:
        # A chart has states as rows: a step back is transition @ chart, a step ahead transition.T @ chart.
        self._factors, self._back = _padded(scaled.T), _blocks(transition)
        self._ahead = _padded(initial[:, None]), _blocks(transition.T), self._factors
        self._emission = _blocks(emission.T)
        self._empty, self._known = initial.new_empty, known

    def scales(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T), the factor of each id given those before it, and the least numbers."""
        out, least = self._empty(ids.shape), self._empty(2, len(ids))
        for rows, lanes in self._tiles(ids):
            charts, scales, entries = self._charts(3, lanes), self._empty(lanes.shape), self._entries(lanes)
            forward(lanes, *self._ahead, charts[:1], charts[1:2], charts[2:], scales.numpy(), entries)
            out[rows] = scales[:, : len(out[rows])].T
            self._set_least(least[:, rows], scales, entries)
        return out, least

    def states(self, ids: torch.Tensor, out: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Write (n, T, S), the states given all other ids, or with `own` all; return the least numbers."""
        # Without rows of emissions there is no product, and the states themselves are handed out.
        return self._smooth(ids, self._emission[:0], out.numpy(), own=own, log=False)

    def conditionals(self, ids: torch.Tensor, out: torch.Tensor, *, log: bool) -> torch.Tensor:
        """Write (n, T, V), the probabilities of each token given all other ids, or their logs; return as `states`."""
        return self._smooth(ids, self._emission, out.numpy(), own=False, log=log)

    def _smooth(self, ids: torch.Tensor, emission: Floats, out: Floats, *, own: bool, log: bool) -> torch.Tensor:
        least, length = self._empty(2, len(ids)), ids.shape[1]
        for rows, lanes in self._tiles(ids):
            # Charts: T of states, T of emission factors, which both directions use, one for states that are not asked
            # for, three for `backward`. Normalizers: T forwards, and backwards T of states and T - 1 of messages.
            charts, scales = self._charts(2 * length + 4, lanes), self._empty(3 * length - 1, lanes.shape[1])
            states, emitted, one, work = charts[:length], charts[length:-4], charts[-4:-3], charts[-3:]
            entries = self._entries(lanes)
            # The states given all ids go on from the filtered ones, those given all others from the predicted ones.
            forward(lanes, *self._ahead, *((one, states) if own else (states, one)), emitted, scales.numpy(), entries)
            behind = scales[length:].numpy()
            product = self._empty(_BLOCK * len(emission), lanes.shape[1])
            for t in range(length - 1, -1, -1):
                backward(t, self._back, emission, states, emitted, work, product.numpy(), behind, entries)
                # Here, while the product is in the cache.
                if log:
                    clamped_log_(product)
                hand_out(product.numpy() if len(emission) else work[0], t, out[rows])
            self._set_least(least[:, rows], scales, entries)
        return least

    def _entries(self, lanes: Integers) -> Floats:
        """Return where the least entries are found, (lanes,); or (0,), where they are known."""
        return np.ones(lanes.shape[1] if self._known is None else 0, self._emission.dtype)

    def _set_least(self, out: torch.Tensor, scales: torch.Tensor, entries: Floats) -> None:
        # of whole vectors, the first rows
        rows = out.shape[1]
        out[0] = scales[:, :rows].amin(dim=0)
        out[1] = torch.from_numpy(entries[:rows]) if self._known is None else self._known

    def _charts(self, count: int, lanes: Integers) -> Floats:
        """Return memory of this thread, good until the next call, as fresh memory costs a tenth of the time.

        It begins where a vector may, as torch's does: elsewhere products take twice as long.
        """
        shape = count, len(self._factors), lanes.shape[1]
        size = math.prod(shape) * self._emission.itemsize
        buffer: torch.Tensor | None = getattr(_memory, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = _memory.buffer = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].numpy().view(self._emission.dtype).reshape(shape)

    def _tiles(self, ids: torch.Tensor) -> Iterator[tuple[slice, Integers]]:
        """Yield rows and their (T, lanes) ids, of whole vectors: the last sentence may be there more than once."""
        size = LANE_BYTES // self._emission.itemsize
        # Unsigned: numba would test every signed index for being negative.
        columns = ids.numpy().T.astype(np.uint32)
        for first in range(0, len(ids), size):
            part = columns[:, first : first + size]
            last = part[:, -1:].repeat(-part.shape[1] % _VECTOR, axis=1)
            yield slice(first, first + size), np.concatenate([part, last], axis=1)


def _padded(table: torch.Tensor) -> Floats:
    """Return a table with zeros behind its rows and columns."""
    rows, columns = (-(-size // _BLOCK) * _BLOCK for size in table.shape)
    out = table.new_zeros(rows, columns)
    out[: table.shape[0], : table.shape[1]] = table
    return out.numpy()


def _blocks(table: torch.Tensor) -> Floats:
    """Return (rows / 4, columns / 4, 16): blocks of four rows and columns, for `multiply`."""
    whole = _padded(table)
    rows, columns = (size // _BLOCK for size in whole.shape)
    split = whole.reshape(rows, _BLOCK, columns, _BLOCK).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(split).reshape(rows, columns, _BLOCK**2)


# --- compiled --------------------------------------------------------------------------------------------------------


# Products may be fused with the sums that take them, which rounds once instead of twice; nothing is reordered.
_compiled = jit(nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def multiply(table: Floats, chart: Floats, out: Floats) -> None:
    """Write the product of a table in blocks and a chart: 16 products for the four rows of sums read and written."""
    for i in range(len(table)):
        a, b, c, d = out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]
        a[:] = 0
        b[:] = 0
        c[:] = 0
        d[:] = 0
        for k in range(table.shape[1]):
            t, u, v, w = chart[4 * k], chart[4 * k + 1], chart[4 * k + 2], chart[4 * k + 3]
            f = table[i, k]
            for lane in range(len(a)):
                p, q, r, s = t[lane], u[lane], v[lane], w[lane]
                a[lane] += f[0] * p + f[1] * q + f[2] * r + f[3] * s
                b[lane] += f[4] * p + f[5] * q + f[6] * r + f[7] * s
                c[lane] += f[8] * p + f[9] * q + f[10] * r + f[11] * s
                d[lane] += f[12] * p + f[13] * q + f[14] * r + f[15] * s


@_compiled
def look_up(factors: Floats, ids: Integers, out: Floats) -> None:
    """Write the emission factors of the ids."""
    for state in range(len(factors)):
        row, factor = out[state], factors[state]
        for lane in range(len(ids)):
            row[lane] = factor[ids[lane]]


@_compiled
def weigh(left: Floats, right: Floats, out: Floats, total: Floats) -> None:
    """Write the product of two other charts, normalized, and its sums over the states before that."""
    total[:] = 0
    for state in range(len(out)):
        row, factor, product = left[state], right[state], out[state]
        for lane in range(len(row)):
            value = row[lane] * factor[lane]
            product[lane] = value
            total[lane] += value
    inverse = np.empty_like(total)
    for lane in range(len(total)):
        # Where the total is 0, so is the row, and it stays: 0 / 0 would be NaN, and slow.
        inverse[lane] = 1 / max(total[lane], np.finfo(total.dtype).tiny)
    for state in range(len(out)):
        product = out[state]
        for lane in range(len(product)):
            product[lane] *= inverse[lane]


@_compiled
def note(chart: Floats, least: Floats) -> None:
    """Take the entries of a chart that are above 0 into the least ones of their lanes."""
    one = chart.dtype.type(1)  # a plain 1 would make wider numbers
    for state in range(0, len(chart), _BLOCK):
        a, b, c, d = chart[state], chart[state + 1], chart[state + 2], chart[state + 3]
        for lane in range(len(least)):
            # Written so, it becomes vector instructions, which `min` does not.
            p = a[lane] if a[lane] > 0 else one
            q = b[lane] if b[lane] > 0 else one
            r = c[lane] if c[lane] > 0 else one
            s = d[lane] if d[lane] > 0 else one
            p = p if p < q else q
            r = r if r < s else s
            p = p if p < r else r
            least[lane] = p if p < least[lane] else least[lane]


@_compiled
def forward(
    ids: Integers,
    initial: Floats,
    step: Floats,
    factors: Floats,
    predicted: Floats,
    filtered: Floats,
    emitted: Floats,
    scales: Floats,
    entries: Floats,
) -> None:
    """Write the states given the ids before, and given the own id too, and the factors of the ids.

    Each of the three has charts for all positions, or for one, in which the last position is left. The least entries of
    predictions are found where there is room for them.
    """
    for state in range(len(initial)):
        predicted[0, state] = initial[state, 0]
    for t in range(len(ids)):
        chart, factor = filtered[t % len(filtered)], emitted[t % len(emitted)]
        look_up(factors, ids[t], factor)
        weigh(predicted[t % len(predicted)], factor, chart, scales[t])
        if t + 1 < len(ids):
            ahead = predicted[(t + 1) % len(predicted)]
            multiply(step, chart, ahead)
            note(ahead, entries)


@_compiled
def backward(
    t: int,
    back: Floats,
    emission: Floats,
    states: Floats,
    emitted: Floats,
    work: Floats,
    product: Floats,
    scales: Floats,
    entries: Floats,
) -> None:
    """Write a position's states given the ids before, times the probability of those behind, and what they emit.

    The positions are taken from the last to the first. `work` is the result, a message from behind and a chart.
    """
    smoothed, message, chart = work[0], work[1], work[2]
    if t == len(states) - 1:
        message[:] = 1
    weigh(states[t], message, smoothed, scales[2 * t])
    multiply(emission, smoothed, product)
    if t:
        weigh(message, emitted[t], chart, scales[2 * t - 1])
        multiply(back, chart, message)
        note(message, entries)


@_compiled
def hand_out(chart: Floats, t: int, out: Floats) -> None:
    """Write a chart (rows, lanes) as out[:, t] of (n, T, rows): whole vectors are read, lines of `out` stay at hand."""
    whole = len(out) // 16 * 16
    for first in range(0, whole, 16):
        for row in range(out.shape[2]):
            # With a number that the compiler knows: half the time of a loop to a variable.
            for lane in range(16):
                out[first + lane, t, row] = chart[row, first + lane]
    for lane in range(whole, len(out)):
        for row in range(out.shape[2]):
            out[lane, t, row] = chart[row, lane]
