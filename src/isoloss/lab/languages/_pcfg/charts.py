"""What a parse of each length can hold: a grammar with its unary rules folded in, and plans of its charts.

Symbols that yield the same lengths form a group, so that the levels of a layered grammar are recovered; a plan lists
the (group, start, width) items that a parse of one length can hold, and how each is computed from narrower ones.
"""

from __future__ import annotations

import graphlib
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.grammar import Grammar

_SMALL = 1024  # symbols
_LARGEST_TABLE = 1 << 27  # numbers: 1 GiB in float64
Key = tuple[int, int]  # (group, width) of a chart item, whose starts are an arithmetic progression


class Split(NamedTuple):
    """One way to cut a width in two, for all starts at once."""

    parents: slice
    left: Key
    lefts: slice
    right: Key
    rights: slice


@dataclass(frozen=True)
class Block:
    """The rules from one group to a pair of groups."""

    parent: int
    left: int
    right: int
    b: npt.NDArray[np.int64]  # (K,) index in the left group
    c: npt.NDArray[np.int64]  # (K,) index in the right group
    shape: tuple[int, int] | None  # (left size, right size) where all pairs are held, so that products broadcast
    weights: npt.NDArray[np.float64]  # (G, K)


@dataclass(frozen=True)
class Step:
    """The computation of one chart item from narrower ones."""

    key: Key
    starts: int
    parts: tuple[tuple[int, tuple[Split, ...]], ...]  # (index of the block, its splits)


@dataclass(frozen=True)
class Plan:
    """The chart of one sentence length: its items, and the steps that fill it."""

    length: int
    every_root: bool  # whether all symbols, or only the start symbol, are computed over the whole length
    prefixes: bool  # whether the start symbol is computed over the first tokens of every length, too
    starts: dict[Key, range]
    steps: tuple[Step, ...]  # by ascending width
    numbers: int  # floats of working memory per sentence


class FoldedRules:
    """A grammar without unary rules that gives every symbol the same yields: chains are folded into other rules.

    With U the unary probabilities, the closure (I - U)^-1 = I + U + U^2 + ... is finite, as unary rules do not run in a
    cycle. A symbol's folded rule has the probability of all chains that end in it.

    Attributes:
        chained: (U,) ids of the symbols that unary rules may have on either side, ascending.
        closure: (U, U) probability that a chain of unary rules leads from one of these to another, 1 on the diagonal.
        chains: (N, 2) ids of any two symbols of which a chain leads from the first to the second, or that are one.
        binary: (R, 3) rules A -> B C, and `binary_probs` (R,).
        emission: (S, V) probability that a symbol yields exactly the one token.
        feasible: (S, max_length + 1) whether a symbol can yield that many tokens.
        length_probs: (S, max_length + 1) the probability of it.
    """

    def __init__(self, grammar: Grammar, max_length: int):
        check_size(grammar)
        size = len(grammar.symbols)
        # A small grammar has them all, so that sums are taken in one order whatever its unary rules are.
        self.chained = np.arange(size) if size <= _SMALL else np.unique(grammar.unary)
        self.closure = np.eye(len(self.chained))
        below: dict[int, list[tuple[int, float]]] = {}
        for (a, b), prob in zip(
            np.searchsorted(self.chained, grammar.unary).tolist(), grammar.unary_probs, strict=True
        ):
            below.setdefault(a, []).append((b, prob))
        # Symbols below come first: their rows are complete when they are added to those above.
        for a in graphlib.TopologicalSorter({a: [b for b, _ in rules] for a, rules in below.items()}).static_order():
            for b, prob in below.get(a, ()):
                self.closure[a] += prob * self.closure[b]
        emission = np.zeros((size, len(grammar.vocabulary)))
        emission[tuple(grammar.emission.T)] = grammar.emission_probs
        emission[self.chained] = self.closure @ emission[self.chained]
        self.emission = emission
        upper, lower = np.nonzero(self.closure)
        alone = np.setdiff1d(np.arange(size), self.chained)
        self.chains = np.concatenate([self.chained[np.stack([upper, lower], axis=1)], np.stack([alone, alone], axis=1)])
        self._chain_probs = np.concatenate([self.closure[upper, lower], np.ones(len(alone))])
        self.binary, self.binary_probs = self._fold(grammar)
        self.feasible, self.length_probs = self._lengths(max_length)

    def _fold(self, grammar: Grammar) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        size = len(grammar.symbols)
        # A rule as one number, so that `unique` finds the same rule reached by several chains; these add up.
        codes, probs = [], []
        for (a, d), prob in zip(self.chains, self._chain_probs, strict=True):
            # `Grammar.binary` ascends, so that a symbol's rules are together.
            of_d = slice(*np.searchsorted(grammar.binary[:, 0], [d, d + 1]))
            codes.append((a * size + grammar.binary[of_d, 1]) * size + grammar.binary[of_d, 2])
            probs.append(prob * grammar.binary_probs[of_d])
        unique, index = np.unique(np.concatenate(codes), return_inverse=True)
        total = np.bincount(index, weights=np.concatenate(probs), minlength=len(unique))
        binary = np.stack([unique // size**2, unique // size % size, unique % size], axis=1).astype(np.int64)
        return binary, total.astype(np.float64)

    def _lengths(self, max_length: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        size = len(self.emission)
        # Apart from the probabilities, which may underflow to 0 where a length is possible.
        feasible = np.zeros((size, max_length + 1), dtype=bool)
        probs = np.zeros((size, max_length + 1))
        feasible[:, 1], probs[:, 1] = self.emission.any(axis=1), self.emission.sum(axis=1)
        a, b, c = self.binary.T
        for width in range(2, max_length + 1):
            both = (feasible[b, 1:width] & feasible[c, width - 1 : 0 : -1]).any(axis=1)
            feasible[a[both], width] = True
            split = np.einsum("ru,ru->r", probs[b, 1:width], probs[c, width - 1 : 0 : -1])
            probs[:, width] = np.bincount(a, weights=split * self.binary_probs, minlength=size)
        return feasible, probs


class Planner:
    """The groups and blocks of a grammar, and the plan of each sentence length, made when first asked for.

    Attributes:
        group_of: (S,) the group of each symbol.
        members: The symbols of each group, ascending.
        blocks: The rules, cut by the groups of their three symbols.
    """

    def __init__(self, rules: FoldedRules):
        patterns, group_of = np.unique(rules.feasible, axis=0, return_inverse=True)
        # NumPy 2.0.0 returns the inverse as a column where an axis is given.
        self.group_of: npt.NDArray[np.int64] = group_of.reshape(-1)
        self.members = [np.flatnonzero(self.group_of == group) for group in range(len(patterns))]
        self._feasible = [frozenset(np.flatnonzero(pattern).tolist()) for pattern in patterns]
        self.blocks = self._make_blocks(rules)
        self._plans: dict[tuple[int, bool, bool], Plan] = {}

    def plan(self, length: int, *, every_root: bool = False, prefixes: bool = False) -> Plan:
        """Return the plan of sentences of `length` tokens, with the start symbol or with every symbol as the root.

        With `prefixes`, the start symbol is a root over the first tokens of every length up to `length`.
        """
        key = (length, every_root, prefixes)
        if key not in self._plans:
            self._plans[key] = self._compile(*key)
        return self._plans[key]

    def _compile(self, length: int, every_root: bool, prefixes: bool) -> Plan:
        roots = range(len(self.members)) if every_root else [int(self.group_of[0])]
        widths = range(1, length + 1) if prefixes else (length,)
        # bit i: start at i
        reach = {(group, width): 1 for group in roots for width in widths if width in self._feasible[group]}
        splits: dict[Key, dict[int, list[int]]] = {}  # item: block: widths of the left part
        # From the root down, so that only items that a parse of this length can contain are computed: for a layered
        # grammar at its greatest length thousands of times fewer products than all spans and symbols.
        for width in range(length, 1, -1):
            for index, block in enumerate(self.blocks):
                if mask := reach.get((block.parent, width), 0):
                    right = self._feasible[block.right]
                    cuts = [u for u in self._feasible[block.left] if u < width and width - u in right]
                    if cuts:
                        splits.setdefault((block.parent, width), {})[index] = cuts
                    for u in cuts:
                        reach[block.left, u] = reach.get((block.left, u), 0) | mask
                        # The right part starts u tokens later: all starts at once, by a shift of the bits.
                        reach[block.right, width - u] = reach.get((block.right, width - u), 0) | mask << u
        starts = {key: _progression(mask) for key, mask in reach.items()}
        steps = []
        numbers = 2 * sum(len(self.members[group]) * len(positions) for (group, _), positions in starts.items())
        for key in sorted(splits, key=lambda key: key[1]):
            parts = tuple((index, self._cut(starts, key, index, cuts)) for index, cuts in splits[key].items())
            steps.append(Step(key, len(starts[key]), parts))
        # The pairs, and what is gathered to the left and to the right of them; charts count twice, inside and outside.
        pairs = [3 * len(self.blocks[index].b) * step.starts for step in steps for index, _ in step.parts]
        return Plan(length, every_root, prefixes, starts, tuple(steps), numbers + max(pairs, default=0))

    def _cut(self, starts: dict[Key, range], parent: Key, index: int, cuts: list[int]) -> tuple[Split, ...]:
        block = self.blocks[index]
        splits = []
        for u in cuts:
            left, right = (block.left, u), (block.right, parent[1] - u)
            shared = intersection(starts[parent], starts[left])
            ends = starts[right]
            shared = intersection(shared, range(ends.start - u, ends.stop - u, ends.step))
            if shared:
                shifted = range(shared.start + u, shared.stop + u, shared.step)
                lefts, rights = part_of(starts[left], shared), part_of(ends, shifted)
                splits.append(Split(part_of(starts[parent], shared), left, lefts, right, rights))
        return tuple(splits)

    def _make_blocks(self, rules: FoldedRules) -> list[Block]:
        """Cut the rules by the groups of their three symbols."""
        groups = self.group_of[rules.binary]
        local = np.zeros(len(self.group_of), dtype=np.int64)
        for members in self.members:
            local[members] = np.arange(len(members))
        blocks = []
        for g, h, k in np.unique(groups, axis=0).tolist():
            in_block = np.flatnonzero((groups == (g, h, k)).all(axis=1))
            a, b, c = local[rules.binary[in_block]].T
            size = len(self.members[h]), len(self.members[k])
            codes, column = np.unique(b * size[1] + c, return_inverse=True)
            # Where half of all pairs have rules, a product of all without gathering is cheaper than gathering those.
            broadcast = 2 * len(codes) >= size[0] * size[1]
            if broadcast:
                codes, column = np.arange(size[0] * size[1]), b * size[1] + c
            _check_table(len(self.members[g]) * len(codes), "symbols and pairs of symbols in rules A -> B C")
            weights = np.zeros((len(self.members[g]), len(codes)))
            weights[a, column] = rules.binary_probs[in_block]
            blocks.append(Block(g, h, k, codes // size[1], codes % size[1], size if broadcast else None, weights))
        return blocks


def check_size(grammar: Grammar) -> None:
    """Refuse a grammar whose tables would fill the memory, before anything that takes long."""
    _check_table(len(np.unique(grammar.unary)) ** 2, "pairs of symbols in rules A -> B")
    _check_table(len(grammar.symbols) * len(grammar.vocabulary), "symbols and tokens")


def _check_table(numbers: int, what: str) -> None:
    if numbers > _LARGEST_TABLE:
        raise IsolossError(
            f"the grammar is too large to be computed with exactly: its table of {what} would hold {numbers:,} "
            f"numbers, and at most {_LARGEST_TABLE:,} fit; leave out rare tokens and rules"
        )


def _progression(mask: int) -> range:
    """Return the narrowest arithmetic progression that holds the set bits of `mask`."""
    # Starts between the set bits may come along. Nothing reads their inside scores, and their outside scores are 0.
    bits = [i for i in range(mask.bit_length()) if mask >> i & 1]
    step = math.gcd(*(b - a for a, b in itertools.pairwise(bits))) or 1
    return range(bits[0], bits[-1] + 1, step)


def intersection(a: range, b: range) -> range:
    """Return the common elements of two arithmetic progressions, which are one themselves."""
    if a.step == b.step == 1:
        return range(max(a.start, b.start), min(a.stop, b.stop))
    common = sorted(set(a) & set(b))
    if len(common) < 2:
        return range(common[0], common[0] + 1) if common else range(0)
    return range(common[0], common[-1] + 1, common[1] - common[0])


def part_of(whole: range, part: range) -> slice:
    """Return the slice of `whole` that holds `part`."""
    first, last = whole.index(part.start), whole.index(part[-1])
    return slice(first, last + 1, max(1, part.step // whole.step))  # a part of one element has step 1
