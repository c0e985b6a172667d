"""Sampling derivations of a grammar: sentences of any length that it allows, or of exactly one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.grammar import Grammar
from isoloss.lab.languages._pcfg.rules import first_of
from isoloss.text.masking import Sentences

if TYPE_CHECKING:
    from isoloss.lab.languages.alias_sampling import Rewrites

_SMALLEST = 1e-280  # of a rule's splits: a smaller sum, by which one cannot divide, counts as 0
_SMALLEST_ROOT = 1e-250  # of a sentence length: what counts as 0 is then far too small to matter
_SPLIT_UNIT = 2.0**52  # what the integers that choose a split add up to

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class Sampler:
    """Draws from a grammar's sentences of at most `max_length` tokens, exactly and without rejection.

    Where no derivation is longer, each symbol is rewritten by its rules' probabilities. Otherwise, and where one length
    is asked for, symbols are refined to (symbol A, width w), with the inside probability of the length alone,
    L[A, w] = Pr(A yields w tokens): a rule A -> B C has the weight p sum_u L[B, u] L[C, w - u], a rule A -> B the
    weight p L[B, w], and a rule A -> c the weight p where w is 1. All are alias tables, made when first needed; they
    hold a number for each rule and width, and serve every length. A length of probability under 1e-250 counts as none.

    Sentence i is a function of the seed and of i, on every device.
    """

    def __init__(self, grammar: Grammar, max_length: int):
        self._grammar, self._max_length = grammar, max_length
        # Cut at max_length + 1, which stands for all that is longer.
        self._bounded = bool(longest_yields(grammar, max_length + 1)[0] <= max_length)
        self._chains = _chains(grammar)

    def __call__(
        self,
        numbers: torch.Tensor,
        seed: int,
        *,
        length: int | None = None,
        trees: bool = False,
    ) -> Sentences:
        """Return the independent sentences of (n,) numbers, with their trees where `trees` is set.

        A `length` that no sentence has is an `IsolossError`.
        """
        from isoloss.lab.languages import alias_sampling

        refined = length is not None or not self._bounded
        rewrites = self._refined if refined else self._free
        if refined:
            self._check(length)
        longest = self._max_length if length is None else length
        # A binary tree over L tokens has 2 L - 1 nodes, each at the end of a chain of unary rules.
        most_nodes = (2 * longest - 1) * (len(self._chains) + 1)
        # Rows are symbol * columns + width: the start symbol with a given width, the last row, which draws the width,
        # or without widths the start symbol.
        root = length if length is not None else len(rewrites.tables.offsets) - 2 if refined else 0
        return alias_sampling.draw_derivations(
            rewrites,
            numbers=numbers.cpu().numpy(),
            seed=seed,
            root=root,
            longest=longest,
            most_nodes=most_nodes,
            pad=len(self._grammar.vocabulary),
            trees=trees,
        )

    def _check(self, length: int | None) -> None:
        """Complain of a length that no sentence has; of None, where none is probable enough to be computed with."""
        inside = self._refined.inside[0]
        possible = np.flatnonzero(inside >= _SMALLEST_ROOT).tolist()
        if not possible:
            raise IsolossError(
                f"no sentence can be drawn: those of at most {self._max_length} tokens have a probability of only "
                f"{inside.sum():.2g}; raise max_length or give shorter rules more weight"
            )
        if length is not None and length not in possible:
            raise IsolossError(
                f"no sentence of {length} tokens can be drawn; the possible lengths are {first_of(possible)}"
            )

    @functools.cached_property
    def _free(self) -> Rewrites:
        grammar = self._grammar
        lhs = np.concatenate([grammar.binary[:, 0], grammar.unary[:, 0], grammar.emission[:, 0]])
        probs = np.concatenate([grammar.binary_probs, grammar.unary_probs, grammar.emission_probs])
        size = len(grammar.symbols)
        # One column tells the sampler that there are no widths; the numbers are not read.
        no_widths = np.zeros((size, 1)), np.zeros((len(grammar.binary), 1))
        return self._rewrites(lhs, np.arange(len(lhs)), probs, size, *no_widths)

    @functools.cached_property
    def _refined(self) -> Rewrites:
        """The rules of each symbol and width, and the widths of the start symbol."""
        grammar, size, columns = self._grammar, len(self._grammar.symbols), self._max_length + 1
        inside, splits = self._inside()
        weights = np.zeros((len(grammar.binary) + len(grammar.unary), columns))
        weights[: len(grammar.binary)] = grammar.binary_probs[:, None] * splits
        weights[len(grammar.binary) :] = grammar.unary_probs[:, None] * inside[grammar.unary[:, 1]]
        rule, width = np.nonzero(weights)
        lhs = np.concatenate([grammar.binary[:, 0], grammar.unary[:, 0]])
        lengths = np.flatnonzero(inside[0] >= _SMALLEST_ROOT)
        rows = lhs[rule] * columns + width, grammar.emission[:, 0] * columns + 1, np.full(len(lengths), size * columns)
        rules = rule, len(weights) + np.arange(len(grammar.emission)), lengths
        probs = weights[rule, width], grammar.emission_probs, inside[0, lengths]
        scale = np.divide(_SPLIT_UNIT, splits, out=np.zeros_like(splits), where=splits > 0)
        row, outcome, weight = map(np.concatenate, (rows, rules, probs))
        return self._rewrites(row, outcome, weight, size * columns + 1, inside, scale)

    def _inside(self) -> tuple[_Floats, _Floats]:
        """Return (S, columns) Pr(symbol yields that many tokens), and (R, columns) the sum over splits of each pair."""
        grammar, size, columns = self._grammar, len(self._grammar.symbols), self._max_length + 1
        inside, splits = np.zeros((size, columns)), np.zeros((len(grammar.binary), columns))
        inside[:, 1] = np.bincount(grammar.emission[:, 0], weights=grammar.emission_probs, minlength=size)
        a, b, c = grammar.binary.T
        for width in range(1, columns):
            if width > 1:
                total = np.einsum("ru,ru->r", inside[b, 1:width], inside[c, width - 1 : 0 : -1])
                # `_refined` divides 2^52 by it, which must be finite.
                splits[:, width] = np.where(total < _SMALLEST, 0, total)
                inside[:, width] = np.bincount(a, weights=grammar.binary_probs * splits[:, width], minlength=size)
            # After the binary rules of this width, and lower symbols before those above them: what is added is
            # complete.
            for rules in self._chains:
                upper, lower = grammar.unary[rules].T
                probs = grammar.unary_probs[rules] * inside[lower, width]
                inside[:, width] += np.bincount(upper, weights=probs, minlength=size)
        return inside, splits

    def _rewrites(
        self, row: _Ints, rule: _Ints, weight: _Floats, rows: int, inside: _Floats, scale: _Floats
    ) -> Rewrites:
        from isoloss.lab.languages.alias_sampling import Rewrites, sparse_tables

        grammar = self._grammar
        left = np.concatenate([grammar.binary[:, 1], grammar.unary[:, 1], grammar.emission[:, 1]])
        kinds = np.cumsum([len(grammar.binary), len(grammar.unary)])
        tables = sparse_tables(row, rule, weight, rows=rows)
        right = grammar.binary[:, 2].astype(np.int32)
        return Rewrites(tables, left.astype(np.int32), right, kinds, inside, scale)


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


def _chains(grammar: Grammar) -> list[_Ints]:
    """Return the unary rules by the longest chain below them, shortest first: those of a symbol are together."""
    depth = np.zeros(len(grammar.symbols), dtype=np.int64)
    while True:
        before = depth.copy()
        np.maximum.at(depth, grammar.unary[:, 0], depth[grammar.unary[:, 1]] + 1)
        if np.array_equal(depth, before):
            return [np.flatnonzero(depth[grammar.unary[:, 0]] == level) for level in range(1, depth.max() + 1)]


def derivations(sentences: Sentences, symbols: Sequence[str], vocabulary: Sequence[str]) -> list[str]:
    """Return the derivation of each sentence, drawn with its tree: `(SYMBOL child child)` or `(SYMBOL token)`."""
    rows = zip(sentences.latent.tolist(), sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)
    return [
        bracketed([node for node in nodes if node[0] >= 0], symbols, [vocabulary[token] for token in tokens[:length]])
        for nodes, tokens, length in rows
    ]


def bracketed(nodes: Sequence[Sequence[int]], symbols: Sequence[str], words: Sequence[str]) -> str:
    """Return a tree as nested brackets; a name with a bracket, a quote or a space in it stands in quotes.

    The nodes are rows (start, stop, symbol id) in preorder, each over the words start to stop - 1.
    """
    text, open_until = "", list[int]()
    for index, (start, stop, symbol) in enumerate(nodes):
        while open_until and open_until[-1] <= start:
            text += ")"
            open_until.pop()
        text += f" ({_quoted(symbols[symbol])}"
        open_until.append(stop)
        if index + 1 == len(nodes) or nodes[index + 1][0] >= stop:
            text += f" {_quoted(words[start])}"
    return text.strip() + ")" * len(open_until)


def _quoted(name: str) -> str:
    return repr(name) if any(c in "()'\"" or c.isspace() for c in name) else name
