"""Inside and outside scores on the CPU: kernels compiled once for all grammars and lengths, 128 sentences at a time.

A plan is handed over as integer arrays. A chart is (rows, 128): a row is one symbol of one span, and every inner loop
runs over sentences, whose numbers no other sentence touches: results depend on neither chunks nor threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss.lab.jit import jit
from isoloss.lab.languages._pcfg.charts import FoldedRules, Key, Plan, Planner

# Sentences of a chart. With 32, loops take 2 to 3 times as long a sentence, most of it before they begin (checks that
# arrays do not overlap); with many more, charts leave the second-level cache.
LANES = 128
_FEWEST_LANES = 8  # the widest vector of a processor in float64
_CHART_BYTES = 1 << 28  # of a long sentence's chart, which then has fewer lanes

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class _FlatPlan:
    """A plan as arrays; rows of a chart are numbered by item, start and symbol, in this order."""

    rows: int
    items: dict[Key, int]  # the first row of each item
    root: int | None  # the row of the start symbol over the whole length; None: the plan has none
    roots: list[int]  # the rows of the start symbol over the first tokens, of every length that is a root
    leaves: Integers  # (F, 4): first row, position, first column of the emissions, number of symbols
    parts: Integers  # (Q, 5): first row of the parent, first and last pair, first and last split; by ascending width
    starts: Integers  # (Q,) of the parents
    widths: Integers  # (Q,) of the parents
    splits: Integers  # (N, 2): first row of the left and of the right child

    def lanes(self, sentences: int) -> int:
        """Return how many sentences a chart has room for: fewer where they are few or a chart is large."""
        room = _CHART_BYTES // (8 * max(1, self.rows))
        return max(_FEWEST_LANES, min(LANES, 1 << (sentences - 1).bit_length(), 1 << room.bit_length()))

    @functools.cached_property
    def is_left(self) -> npt.NDArray[np.bool_]:
        """(Q,) whether the parent is a left child or below one: only their inside scores say something of prefixes."""
        found = np.zeros(self.rows, dtype=bool)
        found[self.splits[:, 0]] = True
        for parent, _, _, first, last in self.parts[::-1]:
            if found[parent]:
                found[self.splits[first:last]] = True
        return found[self.parts[:, 0]]


@dataclass(frozen=True)
class _Tables:
    """A grammar's numbers in one dtype."""

    emission: Floats  # (tokens, columns), scaled; symbols that emit, in the order of their groups
    total: Floats  # (columns,) row sums of the unscaled emissions
    weights: Floats  # (rules,)


class Kernels:
    """The compiled engine of one grammar.

    `emission` is (S, tokens) float64, scaled, with a column for every token id that may come; `emitting` are the
    ascending ids of the symbols that yield single tokens.
    """

    def __init__(self, rules: FoldedRules, planner: Planner, emission: npt.NDArray[np.float64], emitting: Integers):
        self._planner, self._scaled = planner, emission
        self._total = rules.emission.sum(axis=1)
        self._symbols = np.concatenate([*planner.members, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        self._first = np.cumsum([0, *(len(members) for members in planner.members)])
        self._score_of = np.searchsorted(emitting, self._symbols)  # used for emitting symbols only
        self._emitting = len(emitting)
        self._pair_range, self._pairs, self._targets, self._weights = _flat_blocks(planner)
        self._plans: dict[tuple[int, bool, bool], _FlatPlan | None] = {}
        self._tables: dict[np.dtype[Any], _Tables] = {}
        self._of_unknown: dict[tuple[int, bool, np.dtype[Any]], Floats] = {}

    def run(
        self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, *, leaves: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (n,) scaled probabilities, with `leaves` (n, T, E) shares of the symbols at each position, and least.

        Leaves are multiplied by `factor` (n,), in whose dtype all is computed. The third result, (n,), is the least
        number above 0 in the charts of each sentence.
        """
        n, length = tokens.shape
        z, least = torch.zeros(n, dtype=factor.dtype), torch.ones(n, dtype=factor.dtype)
        scores = torch.zeros(n, length if leaves else 0, self._emitting, dtype=factor.dtype)
        mass = np.empty(scores.shape[:2], dtype=scores.numpy().dtype)
        flat = self._flat(plan)
        if flat is not None:
            total = self._in(z.numpy().dtype).total
            for first, inside, outside in self._charts(flat, tokens, factor, narrowest=1 if leaves else None):
                least[first : first + inside.shape[1]] = _least(inside, outside)[: n - first]
                z[first : first + inside.shape[1]] = torch.from_numpy(inside[flat.root, : n - first])
                if leaves:
                    write_scores(scores.numpy(), mass, outside, first, flat.leaves, total, self._score_of)
        return z, scores, least

    def prefixes(self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T, E) shares of the symbols given the tokens before each alone, and (n, T) the mass of all.

        The plan may be of more tokens than T: nothing is known of the others. The mass is what the outside scores give
        to all tokens, scaled by the tokens before. The roots are those of the plan: a sentence ends
        after any of them. Leaves are multiplied by `factor` (n,), in whose dtype all is computed.
        """
        numbers = (np.ascontiguousarray(tokens.numpy()), factor.numpy())
        n, length = tokens.shape
        scores = np.zeros((n, length, self._emitting), dtype=numbers[1].dtype)
        mass = np.zeros((n, length), dtype=numbers[1].dtype)
        flat = self._flat(plan)
        if flat is not None:
            tables = self._in(numbers[1].dtype)
            rules = (self._pairs, self._targets, tables.weights)
            unknown = self._unknown(plan, flat, numbers[1].dtype)
            inside = np.empty((flat.rows, flat.lanes(n)), dtype=numbers[1].dtype)
            outside = np.empty_like(inside)
            leaves = flat.leaves[flat.leaves[:, 1] < length]
            # what ends before the last token is a left sibling, and what begins before the end may be above a token
            left = flat.parts[flat.is_left & (flat.starts + flat.widths < length)]
            above = flat.parts[flat.starts < length]
            for first in range(0, n, inside.shape[1]):
                fill_leaves(inside, *numbers, first, tables.emission, leaves)
                fill_inside(inside, left, flat.splits, *rules)
                outside.fill(0)
                outside[flat.roots] = 1
                fill_outside(outside, inside, unknown, above, flat.splits, *rules)
                write_scores(scores, mass, outside, first, leaves, tables.total, self._score_of)
        return torch.from_numpy(scores), torch.from_numpy(mass)

    def _unknown(self, plan: Plan, flat: _FlatPlan, dtype: np.dtype[Any]) -> Floats:
        """Return (rows, 1) inside scores of tokens that are not known, not scaled; the same for all sentences."""
        key = (plan.length, plan.prefixes, dtype)
        if key not in self._of_unknown:
            tables = self._in(dtype)
            chart = np.zeros((flat.rows, 1), dtype=dtype)
            for row, _, column, size in flat.leaves:
                chart[row : row + size, 0] = tables.total[column : column + size]
            fill_inside(chart, flat.parts, flat.splits, self._pairs, self._targets, tables.weights)
            self._of_unknown[key] = chart
        return self._of_unknown[key]

    def span(
        self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, start: int, width: int, *, outer: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (n,) scaled probabilities, (n, S) scores of the symbols over one span, and (n,) as `run` does.

        The scores are the outside ones with `outer`, else the inside ones, and 0 where a chart has none. The
        probabilities are 0 where every symbol of the plan is a root.
        """
        z, least = torch.zeros(len(tokens), dtype=factor.dtype), torch.ones(len(tokens), dtype=factor.dtype)
        scores = np.zeros((len(tokens), len(self._planner.group_of)), dtype=z.numpy().dtype)
        flat = self._flat(plan)
        if flat is not None:
            symbols, rows = self._rows(plan, flat, start, width)
            for first, inside, outside in self._charts(flat, tokens, factor, narrowest=width if outer else None):
                count = min(inside.shape[1], len(tokens) - first)
                least[first : first + count] = _least(inside, outside)[:count]
                scores[first : first + count, symbols] = (outside if outer else inside)[rows, :count].T
                if flat.root is not None:
                    z[first : first + count] = torch.from_numpy(inside[flat.root, :count])
        return z, torch.from_numpy(scores), least

    def _charts(
        self, flat: _FlatPlan, tokens: torch.Tensor, factor: torch.Tensor, *, narrowest: int | None
    ) -> Iterator[tuple[int, Floats, Floats]]:
        """Yield the first sentence of each chart, the inside scores, and the outside scores from `narrowest` on."""
        numbers = (np.ascontiguousarray(tokens.numpy()), factor.numpy())
        tables = self._in(numbers[1].dtype)
        rules = (self._pairs, self._targets, tables.weights)
        # One chart serves all: the caller has read it when it asks for the next sentences.
        inside = np.empty((flat.rows, flat.lanes(len(tokens))), dtype=tables.weights.dtype)
        outside = inside if narrowest is None else np.empty_like(inside)
        for first in range(0, len(tokens), inside.shape[1]):
            fill_leaves(inside, *numbers, first, tables.emission, flat.leaves)
            fill_inside(inside, flat.parts, flat.splits, *rules)
            if narrowest is not None:
                outside.fill(0)
                outside[flat.roots] = 1
                # Narrower items are not asked for. The widths ascend, as the plan's steps do.
                wider = flat.parts[np.searchsorted(flat.widths, narrowest, side="right") :]
                fill_outside(outside, inside, inside, wider, flat.splits, *rules)
            yield first, inside, outside

    def _rows(self, plan: Plan, flat: _FlatPlan, start: int, width: int) -> tuple[Integers, Integers]:
        """Return the symbols that a chart has over a span, and their rows."""
        symbols, rows = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for (group, wide), first in flat.items.items():
            starts, members = plan.starts[group, wide], self._planner.members[group]
            if wide == width and start in starts:
                symbols.append(members)
                rows.append(first + starts.index(start) * len(members) + np.arange(len(members)))
        return np.concatenate(symbols), np.concatenate(rows)

    def _in(self, dtype: np.dtype[Any]) -> _Tables:
        if dtype not in self._tables:
            self._tables[dtype] = _Tables(
                np.ascontiguousarray(self._scaled[self._symbols].T.astype(dtype)),
                self._total[self._symbols].astype(dtype),
                self._weights.astype(dtype),
            )
        return self._tables[dtype]

    def _flat(self, plan: Plan) -> _FlatPlan | None:
        """Return the plan as arrays, or None where no sentence has its length."""
        key = (plan.length, plan.every_root, plan.prefixes)
        if key not in self._plans:
            group = int(self._planner.group_of[0])
            widths = range(1, plan.length + 1) if plan.prefixes else (plan.length,)
            roots = [] if plan.every_root else [(group, width) for width in widths if (group, width) in plan.starts]
            self._plans[key] = self._flatten(plan, roots) if plan.every_root or roots else None
        return self._plans[key]

    def _flatten(self, plan: Plan, roots: list[Key]) -> _FlatPlan:
        size = [len(members) for members in self._planner.members]
        offset: dict[Key, int] = {}
        rows = 0
        for key, starts in sorted(plan.starts.items(), key=lambda item: item[0][1]):  # leaves first
            offset[key] = rows
            rows += len(starts) * size[key[0]]
        leaves = [
            (offset[group, width] + index * size[group], position, self._first[group], size[group])
            for (group, width), starts in plan.starts.items()
            if width == 1
            for index, position in enumerate(starts)
        ]
        parts, splits = [np.zeros((7, 0), dtype=np.int64)], [np.zeros((2, 0), dtype=np.int64)]
        total = 0
        for step in plan.steps:
            found = []  # columns: number of the part in this step, left and right child
            for nth, (_, cuts) in enumerate(step.parts):
                for cut in cuts:
                    parents = np.arange(*cut.parents.indices(step.starts))
                    # the children's starts run along with the parent's
                    left, right = (
                        offset[key] + size[key[0]] * (at.start + at.step * np.arange(len(parents)))
                        for key, at in ((cut.left, cut.lefts), (cut.right, cut.rights))
                    )
                    found.append(np.stack([parents * len(step.parts) + nth, left, right]))
            if found:
                rows_of_step = np.concatenate(found, axis=1)
                # by start and, of one start, by block; of one part, the cuts keep their order
                rows_of_step = rows_of_step[:, rows_of_step[0].argsort(kind="stable")]
                numbers, first, count = np.unique(rows_of_step[0], return_index=True, return_counts=True)
                start, of_start = np.divmod(numbers, len(step.parts))
                pairs = np.array([self._pair_range[index] for index, _ in step.parts])[of_start].T
                parent = offset[step.key] + start * size[step.key[0]]
                begins, widths = np.array(plan.starts[step.key])[start], np.full(len(start), step.key[1])
                parts.append(np.stack([parent, *pairs, total + first, total + first + count, begins, widths]))
                splits.append(rows_of_step[1:])
                total += rows_of_step.shape[1]
        *columns, begins, widths = np.concatenate(parts, axis=1)
        arrays = _table(leaves, 4), np.stack(columns, axis=1), begins, widths, np.concatenate(splits, axis=1).T.copy()
        # The start symbol has the id 0, so it is the first of its group; a root begins with the first token.
        rows_of = [offset[root] for root in roots]
        whole = next((offset[root] for root in roots if root[1] == plan.length), None)
        return _FlatPlan(rows, offset, whole, rows_of, *arrays)


def _flat_blocks(planner: Planner) -> tuple[list[tuple[int, int]], Integers, Integers, npt.NDArray[np.float64]]:
    """Return the pairs of each block as (first, last), (K, 4) left, right, first and last rule, targets and weights."""
    ranges: list[tuple[int, int]] = []
    pairs: list[tuple[int, int, int, int]] = []
    targets: list[int] = []
    weights: list[float] = []
    for block in planner.blocks:
        before = len(pairs)
        # Blocks in which torch broadcasts hold pairs that no rule has; a loop leaves them out.
        for k in np.flatnonzero(block.weights.any(axis=0)).tolist():
            parents = np.flatnonzero(block.weights[:, k])
            pairs.append((int(block.b[k]), int(block.c[k]), len(targets), len(targets) + len(parents)))
            targets += parents.tolist()
            weights += block.weights[parents, k].tolist()
        ranges.append((before, len(pairs)))
    return ranges, _table(pairs, 4), np.array(targets, dtype=np.int64), np.array(weights)


def _least(inside: Floats, outside: Floats) -> torch.Tensor:
    """Return the least number above 0 in each lane of two charts, which may be one."""
    least = np.ones(inside.shape[1], inside.dtype)
    note_least(inside, least)
    if outside is not inside:
        note_least(outside, least)
    return torch.from_numpy(least)


def _table(rows: list[Any], columns: int) -> Integers:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


# --- compiled --------------------------------------------------------------------------------------------------------


# Products may be fused with the sums that take them, which rounds once instead of twice; nothing is reordered.
# error_model: 1 / 0 is infinity, as in NumPy, and raises nothing: impossible rows go through, and are found by z.
_compiled = jit(nogil=True, error_model="numpy", fastmath={"contract"})


@_compiled
def fill_leaves(
    inside: Floats, tokens: Integers, factor: Floats, first: int, emission: Floats, leaves: Integers
) -> None:
    """Set the rows of single tokens, and all others to 0; lanes beyond the last sentence repeat it."""
    # `fill_inside` adds to a parent in several parts.
    inside[:] = 0
    for f in range(len(leaves)):
        row, position, column, size = leaves[f, 0], leaves[f, 1], leaves[f, 2], leaves[f, 3]
        for lane in range(inside.shape[1]):
            # Full lanes leave the other loops without a test of which of them count.
            sentence = min(first + lane, len(tokens) - 1)
            token = tokens[sentence, position]
            for g in range(size):
                inside[row + g, lane] = emission[token, column + g] * factor[sentence]


@_compiled
def fill_inside(
    inside: Floats, parts: Integers, splits: Integers, pairs: Integers, targets: Integers, weights: Floats
) -> None:
    """Compute all wider items: parent(a) += weight * sum over splits of left(b) right(c)."""
    pair = np.empty(inside.shape[1], inside.dtype)
    for q in range(len(parts)):
        parent, first, last = parts[q, 0], parts[q, 3], parts[q, 4]
        for k in range(parts[q, 1], parts[q, 2]):
            b, c = pairs[k, 0], pairs[k, 1]
            left, right = splits[first, 0] + b, splits[first, 1] + c
            for lane in range(inside.shape[1]):
                pair[lane] = inside[left, lane] * inside[right, lane]
            for s in range(first + 1, last):
                left, right = splits[s, 0] + b, splits[s, 1] + c
                for lane in range(inside.shape[1]):
                    pair[lane] += inside[left, lane] * inside[right, lane]
            # The sum over splits is computed once for a pair (B, C), and serves every rule A -> B C.
            for r in range(pairs[k, 2], pairs[k, 3]):
                row, weight = parent + targets[r], weights[r]
                for lane in range(inside.shape[1]):
                    inside[row, lane] += weight * pair[lane]


@_compiled
def note_least(chart: Floats, least: Floats) -> None:
    """Take the numbers of a chart that are above 0 into the least ones of their lanes."""
    for row in range(len(chart)):
        numbers = chart[row]
        for lane in range(len(least)):
            # Written so, it becomes vector instructions, which `min` does not.
            number = numbers[lane] if numbers[lane] > 0 else least[lane]
            least[lane] = number if number < least[lane] else least[lane]


@_compiled
def fill_outside(
    outside: Floats,
    inside: Floats,
    right: Floats,
    parts: Integers,
    splits: Integers,
    pairs: Integers,
    targets: Integers,
    weights: Floats,
) -> None:
    """Compute dZ / d inside from the roots down, which hold 1, all other rows 0.

    The inside scores of what follows an item are in `right`: the chart's own, or those of unknown tokens in one column.
    """
    pair = np.empty(inside.shape[1], inside.dtype)
    for q in range(len(parts) - 1, -1, -1):
        parent = parts[q, 0]
        for k in range(parts[q, 1], parts[q, 2]):
            b, c = pairs[k, 0], pairs[k, 1]
            # Backwards likewise: the sum over A of weight times outside once for a pair, then handed to all splits.
            # Every pair has a rule, so the first one starts the sum.
            row, weight = parent + targets[pairs[k, 2]], weights[pairs[k, 2]]
            for lane in range(inside.shape[1]):
                pair[lane] = weight * outside[row, lane]
            for r in range(pairs[k, 2] + 1, pairs[k, 3]):
                row, weight = parent + targets[r], weights[r]
                for lane in range(inside.shape[1]):
                    pair[lane] += weight * outside[row, lane]
            for s in range(parts[q, 3], parts[q, 4]):
                first, second = splits[s, 0] + b, splits[s, 1] + c
                if right.shape[1] == 1:
                    factor = right[second, 0]
                    for lane in range(inside.shape[1]):
                        outside[first, lane] += pair[lane] * factor
                else:
                    for lane in range(inside.shape[1]):
                        outside[first, lane] += pair[lane] * right[second, lane]
                for lane in range(inside.shape[1]):
                    outside[second, lane] += pair[lane] * inside[first, lane]


@_compiled
def write_scores(
    scores: Floats,
    masses: Floats,
    outside: Floats,
    first: int,
    leaves: Integers,
    total: Floats,
    score_of: Integers,
) -> None:
    """Write each symbol's share of the mass that the outside scores of a position give to all tokens, and the mass."""
    # Normalized here, on the symbols that emit: after the product with the emissions it would be two more passes over
    # all V tokens.
    mass = np.zeros((scores.shape[1], outside.shape[1]), outside.dtype)
    for f in range(len(leaves)):
        row, position, column = leaves[f, 0], leaves[f, 1], leaves[f, 2]
        for g in range(leaves[f, 3]):
            for lane in range(outside.shape[1]):
                mass[position, lane] += outside[row + g, lane] * total[column + g]
    count = min(outside.shape[1], len(scores) - first)
    for f in range(len(leaves)):
        row, position, column = leaves[f, 0], leaves[f, 1], leaves[f, 2]
        for lane in range(count):
            masses[first + lane, position] = mass[position, lane]
            inverse = 1 / mass[position, lane]
            for g in range(leaves[f, 3]):
                share = outside[row + g, lane] * total[column + g] * inverse
                scores[first + lane, position, score_of[column + g]] = share
