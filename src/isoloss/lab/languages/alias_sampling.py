"""Drawing from many discrete distributions: alias tables, and random numbers that are a function of their coordinates.

Every number is keyed by (seed, sentence, position in the sentence), so what is drawn depends on neither threads nor
chunks nor batch size. The loops are compiled by numba, which loads with this module. Languages on a GPU draw here too,
so that their sentences are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from isoloss.errors import naming_extras
from isoloss.lab.jit import jit
from isoloss.lab.languages.batches import run_in_threads
from isoloss.text.masking import Sentences

with naming_extras():
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int32]
Long = npt.NDArray[np.int64]

_CHUNK = 1 << 14  # sentences that a thread draws at a time
_CELLS = 1 << 22  # numbers of a chunk's sentences, at most

# the constants of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_ZERO, _SHIFT, _SPLIT_SHIFT = np.uint64(0), np.uint64(11), np.uint64(12)
_UNIT = 2.0**-53


class AliasTables(NamedTuple):
    """Discrete distributions, each drawn from in constant time (Walker 1977, Vose 1991); one row is one distribution.

    A cell of row r, of those from offsets[r] to offsets[r + 1] - 1, is drawn uniformly; it gives `kept` with
    probability `threshold`, else `alias`. Only outcomes of positive probability have cells.
    """

    offsets: Long  # (rows + 1,)
    threshold: Float  # (cells,)
    kept: Int  # (cells,)
    alias: Int  # (cells,)


class Rewrites(NamedTuple):
    """A grammar as the sampler takes it: what each symbol is rewritten to, freely or to a given number of tokens.

    A row of `tables` is a symbol and a width, symbol * columns + width, and its outcomes are rules: pairs first, chains
    of one symbol next, emissions last. Free symbols have one column, and the width 0. With more columns, `width` is
    the number of tokens that the symbol must yield; a rule A -> B C of it is split into u and width - u tokens with
    probability proportional to inside[B, u] inside[C, width - u]; and a last row draws the width of symbol 0.
    """

    tables: AliasTables  # the distribution of each row over rules
    left: Int  # (rules,) the first symbol, or the token
    right: Int  # (pairs,) the second symbol
    kinds: Long  # (2,) the index of the first rule that is no pair, and of the first that is an emission
    inside: Float  # (symbols, columns) Pr(symbol yields that many tokens)
    scale: Float  # (pairs, columns) 2^52 / sum over u of inside[B, u] inside[C, width - u]


def alias_tables(rows: Float) -> AliasTables:
    """Return the alias tables of (rows, outcomes) probabilities."""
    of_row, outcome = np.nonzero(rows)
    return sparse_tables(of_row, outcome, rows[of_row, outcome], rows=len(rows))


def sparse_tables(row: Long, outcome: Long, weight: Float, *, rows: int) -> AliasTables:
    """Return the alias tables of `rows` rows, given as cells: (cells,) row, outcome and positive weight, in any order.

    Rows need not add up to 1, and may be empty: those cannot be drawn from.
    """
    # Stable, because the order of a row's cells decides which outcome a random number gives: it is part of what a seed
    # stands for.
    order = np.argsort(row, kind="stable")
    row, kept, weight = row[order], outcome[order].astype(np.int32), weight[order]
    widths = np.bincount(row, minlength=rows)
    # Scaled to a mean of 1 in each row: `_pair` fills cells below 1 from those above it.
    threshold = weight / np.bincount(row, weights=weight, minlength=rows)[row] * widths[row]
    partner = np.zeros(len(kept), np.int64)
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    _pair(offsets, threshold, partner)
    return AliasTables(offsets, threshold, kept, kept[partner])


def draw_chains(
    initial: AliasTables, transition: AliasTables, emission: AliasTables, *, numbers: Long, length: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, length) int64 tokens and states of hidden Markov chains; those of number i depend on (seed, i).

    The rows of `transition` and `emission` are states; `initial` has one row; the numbers are (n,).
    """
    n = len(numbers)
    tokens, states = np.empty((n, length), np.int64), np.empty((n, length), np.int64)

    def fill(first: int) -> None:
        rows = slice(first, first + _CHUNK)
        _chains(np.uint64(seed), numbers[rows], initial, transition, emission, tokens[rows], states[rows])

    _each(fill, range(0, n, _CHUNK))
    return torch.from_numpy(tokens), torch.from_numpy(states)


def draw_derivations(
    rewrites: Rewrites, *, numbers: Long, seed: int, root: int, longest: int, most_nodes: int, pad: int, trees: bool
) -> Sentences:
    """Return the derivations of (n,) numbers; that of number i depends on (seed, i).

    Each starts from the row `root`, has at most `longest` tokens and `most_nodes` nodes, and is padded with `pad`. With
    `trees` the latent is the nodes, (n, M, 3): start, stop and symbol in preorder, padded with -1.
    """
    n = len(numbers)
    chunk = max(1, min(_CHUNK, _CELLS // (3 * most_nodes if trees else longest)))
    starts = range(0, n, chunk)
    # How long a sentence is shows only when it is drawn. So chunks are drawn without gaps, and are spread into padded
    # rows when the longest sentence of all chunks is known.
    lengths, sizes = np.zeros(n, np.int64), np.zeros(n if trees else 0, np.int64)
    tokens: list[Int] = [np.empty((0, 1), np.int32)] * len(starts)
    nodes = list(tokens)

    def fill(first: int) -> None:
        rows = slice(first, first + chunk)
        count = len(lengths[rows])
        words = np.empty((count * longest, 1), np.int32)
        spans = np.empty((count * most_nodes if trees else 0, 3), np.int32)
        _derive(np.uint64(seed), numbers[rows], rewrites, root, longest, words, lengths[rows], spans, sizes[rows])
        # Copies, which let go of the memory for sentences of the greatest length.
        tokens[first // chunk] = words[: lengths[rows].sum()].copy()
        nodes[first // chunk] = spans[: sizes[rows].sum()].copy()

    _each(fill, starts)

    def padded(parts: list[Int], sizes: Long, width: int, padding: int) -> torch.Tensor:
        out = np.empty((n, sizes.max(initial=0), width), np.int64)

        def spread(first: int) -> None:
            rows = slice(first, first + chunk)
            _spread(parts[first // chunk], sizes[rows], padding, out[rows])

        _each(spread, starts)
        return torch.from_numpy(out)

    latent = padded(nodes, sizes, 3, -1) if trees else None
    return Sentences(padded(tokens, lengths, 1, pad)[:, :, 0], torch.from_numpy(lengths), latent)


def uniforms(seed: int, numbers: Long, width: int) -> torch.Tensor:
    """Return (n, width) float64 in [0, 1): a function of the seed, the row's number and the column alone.

    Args:
        seed: The key, from 0 to 2^64 - 1.
        numbers: (n,) a number for each row.
        width: Columns; those of a smaller width are the first of a larger one's.

    Example:
        >>> import numpy as np
        >>> from isoloss.lab.languages.alias_sampling import uniforms
        >>> rows = uniforms(7, np.array([3, 0]), 5)
        >>> rows[0].equal(uniforms(7, np.array([3]), 9)[0, :5])
        True
    """
    out = np.empty((len(numbers), width))
    _uniforms(np.uint64(seed), numbers, out)
    return torch.from_numpy(out)


def _each(fill: Callable[[int], None], starts: range) -> None:
    run_in_threads(fill, ((first,) for first in starts), torch.device("cpu"))


# --- compiled --------------------------------------------------------------------------------------------------------
# all of it in one file: numba's cache on disk sees a change in the file of the function that is called, and no other


@intrinsic  # type: ignore[untyped-decorator]
def _high(context: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of a product of two uint64: numba has no integer of 128 bits, LLVM has."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@jit(inline="always")
def philox(seed: np.uint64, sentence: np.uint64, block: np.uint64) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four uint64: Philox4x64-10 with the key (seed, 0) at the counter (block, sentence, 0, 0)."""
    a, b, c, d = block, sentence, _ZERO, _ZERO
    k0, k1 = seed, _ZERO
    for _ in range(_ROUNDS):
        a, b, c, d = _high(_M1, c) ^ b ^ k0, _M1 * c, _high(_M0, a) ^ d ^ k1, _M0 * a
        k0, k1 = k0 + _W0, k1 + _W1
    return a, b, c, d


@jit(inline="always")
def draw(bits: np.uint64, tables: AliasTables, row: int | np.int32) -> np.int32:
    """Return an outcome of one row of alias tables: 53 of the bits choose the cell and, within it, the outcome."""
    begin = tables.offsets[row]
    width = tables.offsets[row + 1] - begin
    position = (bits >> _SHIFT) * _UNIT * width
    cell = int(position)
    # `position` is below `width` before rounding, but may be rounded up to it.
    if cell == width:
        cell -= 1
    keep = position - cell < tables.threshold[begin + cell]
    outcome: np.int32 = tables.kept[begin + cell] if keep else tables.alias[begin + cell]
    return outcome


@jit(nogil=True)
def _uniforms(seed: np.uint64, numbers: Long, out: Float) -> None:
    words = np.empty(4, np.uint64)
    for row in range(len(numbers)):
        for column in range(out.shape[1]):
            if column & 3 == 0:
                words[0], words[1], words[2], words[3] = philox(seed, np.uint64(numbers[row]), np.uint64(column >> 2))
            out[row, column] = (words[column & 3] >> _SHIFT) * _UNIT


@jit(nogil=True)
def _pair(offsets: Long, threshold: Float, partner: Long) -> None:
    """Turn each row of cell contents, of mean 1, into thresholds and partners, in place (Vose's algorithm)."""
    widest = 0
    for row in range(len(offsets) - 1):
        widest = max(widest, offsets[row + 1] - offsets[row])
    small, large = np.empty(widest, np.int64), np.empty(widest, np.int64)
    for row in range(len(offsets) - 1):
        few = many = 0
        for cell in range(offsets[row], offsets[row + 1]):
            partner[cell] = cell
            if threshold[cell] < 1:
                small[few] = cell
                few += 1
            else:
                large[many] = cell
                many += 1
        # The open cells keep a mean of 1, so that both lists end together, but for rounding.
        while few and many:
            few -= 1
            lower, upper = small[few], large[many - 1]
            partner[lower] = upper
            threshold[upper] -= 1 - threshold[lower]
            if threshold[upper] < 1:
                many -= 1
                small[few] = upper
                few += 1
        # what is left is full, up to rounding
        for index in range(few):
            threshold[small[index]] = 1.0
        for index in range(many):
            threshold[large[index]] = 1.0


@jit(nogil=True)
def _chains(
    seed: np.uint64,
    numbers: Long,
    initial: AliasTables,
    transition: AliasTables,
    emission: AliasTables,
    tokens: Long,
    states: Long,
) -> None:
    """Fill rows of tokens and states; a block of four random numbers serves two positions."""
    n, length = tokens.shape
    for row in range(n):
        sentence = np.uint64(numbers[row])
        state = np.int32(0)
        for block in range((length + 1) // 2):
            a, b, c, d = philox(seed, sentence, np.uint64(block))
            t = 2 * block
            # Of the four words, a and b serve the even position, c and d the odd one: the tokens of a shorter length
            # are the first of a longer one's.
            state = draw(a, initial, 0) if t == 0 else draw(a, transition, state)
            states[row, t] = state
            tokens[row, t] = draw(b, emission, state)
            if t + 1 < length:
                state = draw(c, transition, state)
                states[row, t + 1] = state
                tokens[row, t + 1] = draw(d, emission, state)


@jit(inline="always")
def _split(bits: np.uint64, left: Float, right: Float, width: int, scale: float) -> int:
    """Return u with probability left[u] right[width - u] scale / 2^52, to 2^-52.

    The sum runs over integers, so that its order does not matter to the last digit.
    """
    target, total, chosen = np.int64(bits >> _SPLIT_SHIFT), np.int64(0), 0
    for u in range(1, width):
        # `scale` makes the sum over all u at most 2^52, up to rounding: no overflow, and each part is an exact integer.
        part = np.int64(left[u] * right[width - u] * scale)
        if part > 0:
            total += part
            # The parts are rounded down and may add up to less than `target`. The last possible split stands then; a
            # split of probability 0 is never taken.
            chosen = u
            if total > target:
                break
    return chosen


@jit(nogil=True)
def _derive(
    seed: np.uint64,
    sentences: Long,
    rewrites: Rewrites,
    root: int,
    longest: int,
    tokens: Int,
    lengths: Long,
    nodes: Int,
    sizes: Long,
) -> None:
    """Fill tokens, lengths, nodes and their numbers, sentence after sentence without gaps.

    The open symbols of a derivation are a stack. Each takes the next random number, or the next two where widths are
    given: one for the rule, one for the split.
    """
    columns = rewrites.inside.shape[1]
    numbers = 1 if columns == 1 else 2
    # Every open symbol yields at least one token, so that at most `longest` symbols wait, and one is being rewritten.
    symbols, widths = np.empty(longest + 1, np.int64), np.empty(longest + 1, np.int64)
    words = np.empty(4, np.uint64)
    token = node = 0
    for row in range(len(lengths)):
        start, first_node, used, height = token, node, 0, 1
        symbols[0], widths[0] = root // columns, root % columns
        while height:
            if used & 3 == 0:
                words[0], words[1], words[2], words[3] = philox(seed, np.uint64(sentences[row]), np.uint64(used >> 2))
            height -= 1
            symbol, width = symbols[height], widths[height]
            rule = draw(words[used & 3], rewrites.tables, symbol * columns + width)
            # Symbols have the rows 0 to S - 1 of `inside`; the row after them is no symbol: it draws the width of
            # symbol 0.
            if symbol == len(rewrites.inside):
                symbols[0], widths[0] = 0, rule
                height = 1
            else:
                if len(nodes):
                    # Where the node stops is not known yet: `_close` finds it from the number of symbols that wait
                    # behind it.
                    nodes[node, 0], nodes[node, 1], nodes[node, 2] = token - start, height, symbol
                    node += 1
                left = rewrites.left[rule]
                if rule >= rewrites.kinds[1]:
                    tokens[token, 0] = left
                    token += 1
                else:
                    if rule < rewrites.kinds[0]:
                        right, u = rewrites.right[rule], 0
                        if columns > 1:
                            scale = rewrites.scale[rule, width]
                            u = _split(words[used + 1 & 3], rewrites.inside[left], rewrites.inside[right], width, scale)
                        # The right child first: the stack gives back the left one first, so that tokens come in their
                        # order.
                        symbols[height], widths[height] = right, width - u
                        width = u
                        height += 1
                    symbols[height], widths[height] = left, width
                    height += 1
            # With widths every node takes two numbers, split or not: a pair never straddles a block of four words.
            used += numbers
        lengths[row] = token - start
        if len(nodes):
            sizes[row] = node - first_node
            _close(nodes[first_node:node], token - start, widths)


@jit(nogil=True)
def _close(nodes: Int, length: int, starts: Long) -> None:
    """Replace each node's number of waiting symbols by its stop: where the first of these begins."""
    for index in range(len(nodes) - 1, -1, -1):
        waiting = nodes[index, 1]
        # From the last node to the first, `starts[k]` is the start of the nearest later node behind which k symbols
        # wait. A node with k symbols behind it stops where the top one of these, behind which k - 1 wait, begins.
        starts[waiting] = nodes[index, 0]
        nodes[index, 1] = starts[waiting - 1] if waiting else length


@jit(nogil=True)
def _spread(flat: Int, sizes: Long, padding: int, out: Long) -> None:
    """Fill (n, widest, d) from the rows of all sentences one after another."""
    begin = 0
    for row in range(len(sizes)):
        for index in range(out.shape[1]):
            for part in range(out.shape[2]):
                out[row, index, part] = flat[begin + index, part] if index < sizes[row] else padding
        begin += sizes[row]
