"""Sampling derivations of a grammar, many at a time: all open symbols of all sentences are rewritten in one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from isoloss.languages.grammar import Grammar

CHUNK = 16384  # derivations rewritten together; part of what a seed stands for

_Ints = npt.NDArray[np.int64]


class Derived(NamedTuple):
    """Sentences and their trees.

    Attributes:
        tokens: (n, T) int64, padded with the vocabulary's size; T is the longest length.
        lengths: (n,) int64.
        nodes: (n, M, 3) int64, the rows (start, stop, symbol) of all tree nodes in preorder, padded with -1; or None.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    nodes: torch.Tensor | None


class _Rewritten(NamedTuple):
    """One step of a derivation, kept for the trees: (F,) each, over the open row of nodes before the step."""

    nodes: torch.Tensor
    sentences: torch.Tensor
    first: torch.Tensor  # index of the first child in the row after the step
    last: torch.Tensor
    kept: torch.Tensor | None  # indices of the row after the step that go on, where some sentences are given up


class Sampler:
    """Draws from a grammar's sentences of at most `max_length` tokens.

    A symbol's rule is drawn by an alias table (Walker 1977; Vose 1991). A derivation is given up, and another drawn, as
    soon as its shortest sentence would be too long.

    Args:
        grammar: The grammar.
        max_length: The longest sentence, in tokens.
        acceptance: Pr(length <= max_length): how many derivations to try for the sentences that are missing.
    """

    def __init__(self, grammar: Grammar, max_length: int, acceptance: float):
        self._size, self._vocab_size = len(grammar.symbols), len(grammar.vocabulary)
        self._max_length, self._acceptance = max_length, acceptance
        self._bounded = bool(longest_yields(grammar, max_length + 1)[0] <= max_length)
        shortest = np.concatenate([_shortest_yields(grammar), np.ones(self._vocab_size, dtype=np.int64)])
        self._shortest = torch.from_numpy(shortest)
        children, probs, counts = _outcomes(grammar)
        self._offsets = torch.from_numpy(np.cumsum(counts) - counts)
        self._counts = torch.from_numpy(counts)
        tables = [_alias(own) for own in np.split(probs, np.cumsum(counts)[:-1])]
        self._thresholds = torch.from_numpy(np.concatenate([threshold for threshold, _ in tables]))
        self._aliases = torch.from_numpy(np.concatenate([alias for _, alias in tables]))
        self._first, self._second = torch.from_numpy(children.T.copy())

    def __call__(self, n: int, generator: torch.Generator, *, trees: bool = False) -> Derived:
        """Return `n` independent sentences, with their trees where `trees` is set."""
        chunks: list[Derived] = []
        missing = n
        while missing > 0:
            attempts = missing if self._bounded else int(missing / self._acceptance * 1.05) + 16
            chunk = self._derive(min(attempts, CHUNK), generator, trees)
            chunks.append(Derived(*(None if part is None else part[:missing] for part in chunk)))  # type: ignore[arg-type]
            missing -= len(chunks[-1].lengths)
        return self._joined(chunks, trees)

    def _joined(self, chunks: list[Derived], trees: bool) -> Derived:
        lengths = torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk.lengths for chunk in chunks)])
        tokens = torch.full((len(lengths), int(lengths.max()) if len(lengths) else 0), self._vocab_size)
        kept = [chunk.nodes for chunk in chunks if chunk.nodes is not None]
        nodes = torch.full((len(lengths), max((part.shape[1] for part in kept), default=0), 3), -1) if trees else None
        row = 0
        for chunk in chunks:
            rows = slice(row, row + len(chunk.lengths))
            width = min(chunk.tokens.shape[1], tokens.shape[1])
            tokens[rows, :width] = chunk.tokens[:, :width]
            if nodes is not None and chunk.nodes is not None:
                nodes[rows, : chunk.nodes.shape[1]] = chunk.nodes
            row = rows.stop
        if nodes is not None and len(nodes):
            nodes = nodes[:, : int((nodes[:, :, 0] >= 0).sum(dim=1).max())]
        return Derived(tokens, lengths, nodes)

    def _derive(self, attempts: int, generator: torch.Generator, trees: bool) -> Derived:
        """Return the sentences of those of `attempts` derivations that are short enough, in order."""
        nodes = torch.zeros(attempts, dtype=torch.int64)  # ids from the number of symbols on are tokens
        sentences = torch.arange(attempts)
        history: list[_Rewritten] = []
        while len(active := torch.nonzero(nodes < self._size).flatten()):
            outcome = self._draw(nodes[active], generator)
            first, second = nodes.clone(), torch.full_like(nodes, -1)
            first[active], second[active] = self._first[outcome], self._second[outcome]
            pairs = second >= 0
            sizes = 1 + pairs.long()
            begins = sizes.cumsum(0) - sizes
            rewritten = torch.empty(int(sizes.sum()), dtype=torch.int64)
            rewritten[begins] = first
            rewritten[begins[pairs] + 1] = second[pairs]
            carried = sentences.repeat_interleave(sizes)
            kept = None if self._bounded else self._short_enough(rewritten, carried, attempts)
            if trees:
                history.append(_Rewritten(nodes, sentences, begins, begins + sizes - 1, kept))
            nodes, sentences = (rewritten, carried) if kept is None else (rewritten[kept], carried[kept])
        lengths = torch.bincount(sentences, minlength=attempts)
        positions = torch.arange(len(nodes)) - (lengths.cumsum(0) - lengths)[sentences]
        tokens = torch.full((attempts, int(lengths.max())), self._vocab_size)
        tokens[sentences, positions] = nodes - self._size
        accepted = lengths > 0
        found = self._trees(history, positions, attempts)[accepted] if trees else None
        return Derived(tokens[accepted], lengths[accepted], found)

    def _draw(self, symbols: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return an outcome of each symbol."""
        counts = self._counts[symbols]
        point = torch.rand(len(symbols), generator=generator, dtype=torch.float64) * counts
        column = torch.minimum(point.long(), counts - 1)
        slot = self._offsets[symbols] + column
        return torch.where(point - column < self._thresholds[slot], slot, self._offsets[symbols] + self._aliases[slot])

    def _short_enough(self, nodes: torch.Tensor, sentences: torch.Tensor, attempts: int) -> torch.Tensor | None:
        shortest = torch.zeros(attempts, dtype=torch.int64).index_add_(0, sentences, self._shortest[nodes])
        keep = (shortest <= self._max_length)[sentences]
        return None if bool(keep.all()) else torch.nonzero(keep).flatten()

    def _trees(self, history: list[_Rewritten], positions: torch.Tensor, attempts: int) -> torch.Tensor:
        """Return (attempts, M, 3): the rewritten nodes, whose spans are found from the last step back to the first."""
        start, stop = positions, positions + 1
        rows = []  # (sentence, start, stop, depth, symbol)
        for depth in range(len(history) - 1, -1, -1):
            step = history[depth]
            if step.kept is not None:
                size = int(step.last[-1]) + 1 if len(step.last) else 0
                start = torch.full((size,), -1).index_copy_(0, step.kept, start)
                stop = torch.full((size,), -1).index_copy_(0, step.kept, stop)
            start, stop = start[step.first], stop[step.last]
            inner = (step.nodes < self._size) & (start >= 0)
            level = torch.full((int(inner.sum()),), depth)
            rows.append(torch.stack([step.sentences[inner], start[inner], stop[inner], level, step.nodes[inner]]))
        sentence, begin, end, level, symbol = torch.cat(rows, dim=1)
        base = self._max_length + 1
        order = (((sentence * base + begin) * base + self._max_length - end) * len(history) + level).argsort()
        counts = torch.bincount(sentence, minlength=attempts)
        sentence = sentence[order]
        index = torch.arange(len(sentence)) - (counts.cumsum(0) - counts)[sentence]
        nodes = torch.full((attempts, int(counts.max()), 3), -1)
        nodes[sentence, index] = torch.stack([begin, end, symbol], dim=1)[order]
        return nodes


def longest_yields(grammar: Grammar, cap: int) -> _Ints:
    """Return (S,): the length of the longest sentence of each symbol, or `cap` where it is as long or longer."""
    longest = np.zeros(len(grammar.symbols), dtype=np.int64)
    longest[grammar.emission[:, 0]] = 1
    while True:
        before = longest.copy()
        b, c = longest[grammar.binary[:, 1]], longest[grammar.binary[:, 2]]
        np.maximum.at(longest, grammar.binary[:, 0], np.where((b > 0) & (c > 0), np.minimum(b + c, cap), 0))
        np.maximum.at(longest, grammar.unary[:, 0], longest[grammar.unary[:, 1]])
        if np.array_equal(longest, before):
            return longest


def _shortest_yields(grammar: Grammar) -> _Ints:
    unknown = 1 << 40
    shortest = np.full(len(grammar.symbols), unknown, dtype=np.int64)
    shortest[grammar.emission[:, 0]] = 1
    while True:
        before = shortest.copy()
        pairs = shortest[grammar.binary[:, 1]] + shortest[grammar.binary[:, 2]]
        np.minimum.at(shortest, grammar.binary[:, 0], pairs)
        np.minimum.at(shortest, grammar.unary[:, 0], shortest[grammar.unary[:, 1]])
        if np.array_equal(shortest, before):
            return shortest


def _outcomes(grammar: Grammar) -> tuple[_Ints, npt.NDArray[np.float64], _Ints]:
    """Return what symbols are rewritten to, symbol by symbol: (O, 2) children (-1: none), (O,) probs, (S,) counts."""
    size = len(grammar.symbols)

    def single(children: _Ints) -> _Ints:
        return np.stack([children, np.full_like(children, -1)], axis=1)

    children = np.concatenate(
        [grammar.binary[:, 1:], single(grammar.unary[:, 1]), single(size + grammar.emission[:, 1])]
    )
    owners = np.concatenate([grammar.binary[:, 0], grammar.unary[:, 0], grammar.emission[:, 0]])
    probs = np.concatenate([grammar.binary_probs, grammar.unary_probs, grammar.emission_probs])
    order = np.argsort(owners, kind="stable")
    return children[order], probs[order], np.bincount(owners, minlength=size).astype(np.int64)


def _alias(probs: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], _Ints]:
    """Return Vose's table: column i stands for outcome i below its threshold, and for its alias above it."""
    scaled = probs * len(probs) / probs.sum()
    thresholds, aliases = np.ones(len(probs)), np.arange(len(probs), dtype=np.int64)
    small = [i for i in range(len(probs)) if scaled[i] < 1]
    large = [i for i in range(len(probs)) if scaled[i] >= 1]
    while small and large:
        less, more = small.pop(), large[-1]
        thresholds[less], aliases[less] = scaled[less], more
        scaled[more] -= 1 - scaled[less]
        if scaled[more] < 1:
            small.append(large.pop())
    return thresholds, aliases
