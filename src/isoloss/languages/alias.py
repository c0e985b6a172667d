"""Drawing from many discrete distributions: alias tables, and random numbers that are a function of their coordinates.

Every number is keyed by (seed, sentence, place in the sentence), so what is drawn depends on neither threads nor chunks
nor batch size. The loops are compiled by numba, which loads with this module.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from isoloss.errors import IsolossError

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int32]

_CHUNK = 1 << 14  # sentences that a thread draws at a time
_TOLERANCE = 1e-9  # of a row's sum

# the constants of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_ZERO, _SHIFT = np.uint64(0), np.uint64(11)
_UNIT = 2.0**-53


class AliasTables(NamedTuple):
    """Discrete distributions, each drawn from in constant time (Walker 1977, Vose 1991); one row is one distribution.

    A cell of row r is drawn uniformly; it gives `kept` with probability `threshold`, else `alias`. Only outcomes of
    positive probability have cells, so that sparse distributions have short rows.

    Attributes:
        threshold: (rows, width) float64 in [0, 1].
        kept: (rows, width) int32, an outcome.
        alias: (rows, width) int32, an outcome.
    """

    threshold: Float
    kept: Int
    alias: Int

    def probabilities(self, outcomes: int) -> Float:
        """Return (rows, outcomes): the distributions that the tables draw from, cell by cell."""
        rows, width = self.threshold.shape
        found = np.zeros((rows, outcomes))
        index = np.arange(rows)[:, None]
        np.add.at(found, (index, self.kept), self.threshold / width)
        np.add.at(found, (index, self.alias), (1 - self.threshold) / width)
        return found


def alias_tables(probabilities: npt.ArrayLike) -> AliasTables:
    """Return the alias tables of (rows, outcomes) probabilities; each row must add up to 1.

    Raises:
        IsolossError: A row has a negative or non-finite entry or another sum.

    Example:
        >>> tables = alias_tables([[0.5, 0.0, 0.5], [0.25, 0.75, 0.0]])
        >>> tables.probabilities(3).tolist()
        [[0.5, 0.0, 0.5], [0.25, 0.75, 0.0]]
    """
    rows = np.ascontiguousarray(probabilities, dtype=np.float64)
    if rows.ndim != 2 or not rows.size:
        raise IsolossError(f"probabilities must be (rows, outcomes), not of shape {rows.shape}")
    wrong = ~(np.isfinite(rows) & (rows >= 0)).all(axis=1) | ~(np.abs(rows.sum(axis=1) - 1) < _TOLERANCE)
    if wrong.any():
        row = int(wrong.argmax())
        raise IsolossError(f"row {row} of the probabilities is no distribution: its sum is {rows[row].sum()}")
    width = int((rows > 0).sum(axis=1).max())
    # outcomes of positive probability first, in order
    outcomes = np.argsort(rows <= 0, axis=1, kind="stable")[:, :width].astype(np.int32)
    threshold = np.take_along_axis(rows, outcomes, axis=1)
    threshold *= width / threshold.sum(axis=1, keepdims=True)
    partner = np.zeros_like(outcomes)
    _pair(threshold, partner)
    return AliasTables(threshold, outcomes, np.take_along_axis(outcomes, partner, axis=1))


def draw_chains(
    initial: AliasTables, transition: AliasTables, emission: AliasTables, *, n: int, length: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, length) int64 tokens and states of n hidden Markov chains; those of sentence i depend on (seed, i).

    Args:
        initial: One row: the first state.
        transition: A row a state: the next state.
        emission: A row a state: its token.
        n: Number of sentences.
        length: Their length.
        seed: From 0 to 2^64 - 1.
    """
    tokens, states = np.empty((n, length), np.int64), np.empty((n, length), np.int64)

    def fill(first: int) -> None:
        rows = slice(first, first + _CHUNK)
        _chains(np.uint64(seed), np.uint64(first), *initial, *transition, *emission, tokens[rows], states[rows])

    starts = range(0, n, _CHUNK)
    if len(starts) < 2 or torch.get_num_threads() < 2:
        for first in starts:
            fill(first)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, starts))
    return torch.from_numpy(tokens), torch.from_numpy(states)


# --- compiled --------------------------------------------------------------------------------------------------------
# all of it in one file: numba's cache on disk sees a change in the file of the function that is called, and no other


@intrinsic  # type: ignore[untyped-decorator]
def _high(context: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the product of two uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def philox(seed: np.uint64, sentence: np.uint64, block: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four uint64: Philox4x64-10 with the key (seed, 0) at the counter (block, sentence, 0, 0)."""
    a, b, c, d = block, sentence, _ZERO, _ZERO
    k0, k1 = seed, _ZERO
    for _ in range(_ROUNDS):
        a, b, c, d = _high(_M1, c) ^ b ^ k0, _M1 * c, _high(_M0, a) ^ d ^ k1, _M0 * a
        k0, k1 = k0 + _W0, k1 + _W1
    return a, b, c, d


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def draw(bits: np.uint64, threshold: Float, kept: Int, alias: Int, row: int) -> np.int32:
    """Return an outcome of one row of alias tables: 53 of the bits choose the cell and, within it, the outcome."""
    place = (bits >> _SHIFT) * _UNIT * threshold.shape[1]
    cell = int(place)
    if cell == threshold.shape[1]:  # the product may round up
        cell -= 1
    outcome: np.int32 = kept[row, cell] if place - cell < threshold[row, cell] else alias[row, cell]
    return outcome


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pair(threshold: Float, partner: Int) -> None:
    """Turn each row of cell contents, of mean 1, into thresholds and partners, in place (Vose's algorithm)."""
    rows, width = threshold.shape
    small, large = np.empty(width, np.int32), np.empty(width, np.int32)
    for row in range(rows):
        few = many = 0
        for cell in range(width):
            partner[row, cell] = cell
            if threshold[row, cell] < 1:
                small[few] = cell
                few += 1
            else:
                large[many] = cell
                many += 1
        while few and many:
            few -= 1
            lower, upper = small[few], large[many - 1]
            partner[row, lower] = upper
            threshold[row, upper] -= 1 - threshold[row, lower]
            if threshold[row, upper] < 1:
                many -= 1
                small[few] = upper
                few += 1
        # what is left is full, up to rounding
        for index in range(few):
            threshold[row, small[index]] = 1.0
        for index in range(many):
            threshold[row, large[index]] = 1.0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _chains(
    seed: np.uint64,
    first: np.uint64,
    start_threshold: Float,
    start_kept: Int,
    start_alias: Int,
    next_threshold: Float,
    next_kept: Int,
    next_alias: Int,
    token_threshold: Float,
    token_kept: Int,
    token_alias: Int,
    tokens: npt.NDArray[np.int64],
    states: npt.NDArray[np.int64],
) -> None:
    """Fill rows of tokens and states; a block of four random numbers serves two positions."""
    n, length = tokens.shape
    for row in range(n):
        sentence = first + np.uint64(row)
        state = np.int32(0)
        for block in range((length + 1) // 2):
            a, b, c, d = philox(seed, sentence, np.uint64(block))
            t = 2 * block
            if t == 0:
                state = draw(a, start_threshold, start_kept, start_alias, 0)
            else:
                state = draw(a, next_threshold, next_kept, next_alias, state)
            states[row, t] = state
            tokens[row, t] = draw(b, token_threshold, token_kept, token_alias, state)
            if t + 1 < length:
                state = draw(c, next_threshold, next_kept, next_alias, state)
                states[row, t + 1] = state
                tokens[row, t + 1] = draw(d, token_threshold, token_kept, token_alias, state)
