"""The tasks of a grammar: which symbol covers the sentence, or its first tokens.

Shapes: n sentences, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.api import UNDEFINED, Labeling, Sentences
from isoloss.lab.languages.config import LATENT
from isoloss.lab.languages.pcfg.chart_plan import FoldedRules
from isoloss.lab.languages.pcfg.grammar import Grammar
from isoloss.lab.languages.task_names import canonical, task_number

if TYPE_CHECKING:
    from isoloss.lab.languages.pcfg.language import PCFG


@dataclass(frozen=True)
class _Node:
    """The node of a parse that a task asks for: it begins at the first token, and at most one in a tree fits."""

    candidates: list[int]  # ids of the symbols that it can have
    widths: tuple[int, ...]  # how many tokens it can cover; none: all of the sentence


def grammar_labeling(language: PCFG, asked: str) -> Labeling:
    """Return what the task `asked` asks of a grammar's sentences (see `isoloss.lab.transfer.tasks.make_task`).

    Scores are in float64 whatever the language computes in, so that the labels are the same.
    """
    name = canonical(asked)
    base, latent = name.removesuffix(LATENT), name.endswith(LATENT)
    node = _node(language, asked, base)
    names = tuple(language.symbols[symbol] for symbol in node.candidates)
    is_prefix = base.startswith("prefix-")
    if latent or base.startswith("level-"):
        _check_exclusive(language.grammar, node.candidates, asked)
    if not latent and is_prefix:
        return Labeling(name=name, classes=names, label=_by_inside(language, node.candidates, node.widths[0]))
    exact = language.to(dtype=torch.float64)

    def scores(sentences: Sentences) -> torch.Tensor:
        return _posterior(exact, node, sentences)

    def likely(sentences: Sentences) -> torch.Tensor:
        values = scores(sentences)
        return values.argmax(dim=1).masked_fill(values.amax(dim=1) == 0, UNDEFINED)

    index = torch.full((len(language.symbols) + 1,), UNDEFINED)  # the last is for padding, -1
    index[node.candidates] = torch.arange(len(node.candidates))

    def drawn(sentences: Sentences) -> torch.Tensor:
        start, stop, symbol = sentences.latent.unbind(dim=2)
        widths = torch.tensor(node.widths, device=stop.device)
        fits = torch.isin(stop, widths) if node.widths else stop == sentences.lengths[:, None]
        labels = index.to(symbol.device)[symbol].masked_fill((start != 0) | ~fits, UNDEFINED)
        return labels.amax(dim=1)

    if latent:
        return Labeling(name=name, classes=names, label=drawn, scores=scores, needs_latent=True)
    return Labeling(name=name, classes=names, label=likely)


def _node(language: PCFG, name: str, base: str) -> _Node:
    grammar = language.grammar
    start = grammar.symbols.index(language.start_symbol)
    if base == "root":
        return _Node(grammar.unary[grammar.unary[:, 0] == start, 1].tolist(), ())
    # a start symbol that is only ever rewritten to a single symbol stands for no choice
    passes_on = not (grammar.binary[:, 0] == start).any() and not (grammar.emission[:, 0] == start).any()
    feasible = FoldedRules(grammar, language.max_length).feasible
    width = task_number(base, "prefix", 1, language.max_length)
    if width is not None:
        yields = feasible[:, width].nonzero()[0].tolist()
        return _Node([symbol for symbol in yields if symbol != start or not passes_on], (width,))
    levels = _levels(grammar) if base.startswith("level-") else []
    level = task_number(base, "level", 0, max(levels, default=0))
    if level is None:
        called = f"{name!r}" if name == base else f"{name!r} ({base})"
        raise IsolossError(
            f"no task {called}: choose root or prefix-L with L from 1 to {language.max_length}, or level-D"
            + (f" with D from 0 to {max(levels)}" if levels else "")
            + ", each also with -latent"
        )
    candidates = [symbol for symbol, own in enumerate(levels) if own == level and (symbol != start or not passes_on)]
    return _Node(candidates, tuple(np.flatnonzero(feasible[candidates].any(axis=0)).tolist()))


def _levels(grammar: Grammar) -> list[int]:
    """Return the number of binary rules above each symbol, which must be the same wherever it occurs."""
    levels = [-1] * len(grammar.symbols)
    levels[0], frontier = 0, [0]
    children: list[list[tuple[int, int]]] = [[] for _ in grammar.symbols]
    for a, b, c in grammar.binary.tolist():
        children[a] += [(b, 1), (c, 1)]
    for a, b in grammar.unary.tolist():
        children[a].append((b, 0))
    while frontier:
        symbol = frontier.pop()
        for child, step in children[symbol]:
            level = levels[symbol] + step
            if levels[child] == -1:
                levels[child] = level
                frontier.append(child)
            elif levels[child] != level:
                raise IsolossError(
                    f"the symbols of this grammar do not lie on levels: {grammar.symbols[child]} occurs on "
                    f"{levels[child]} and {level}; choose root or prefix-L"
                )
    return levels


def _check_exclusive(grammar: Grammar, candidates: list[int], name: str) -> None:
    """Refuse symbols of which a chain of unary rules can put two on the same tokens."""
    for upper, lower in FoldedRules(grammar, 1).chains.tolist():
        if upper != lower and {upper, lower} <= set(candidates):
            both = " and ".join(grammar.symbols[symbol] for symbol in (upper, lower))
            raise IsolossError(f"task {name}: {both} can cover the same tokens, so the label would not be one symbol")


def _by_inside(language: PCFG, candidates: list[int], width: int) -> Callable[[Sentences], torch.Tensor]:
    """Return the function from sentences to the symbol of the highest inside score over the first `width` tokens."""
    exact = language.to(dtype=torch.float64)

    def prefix(sentences: Sentences) -> torch.Tensor:
        labels = torch.full_like(sentences.lengths, UNDEFINED)
        long_enough = sentences.lengths >= width
        tokens = sentences.tokens[long_enough]
        scores = exact.inside(tokens, sentences.lengths[long_enough], stop=width)
        # symbols that cannot yield the tokens share one value, of at most the log of the smallest normal number
        best = scores.amax(dim=1)
        none = (best <= math.log(torch.finfo(torch.float64).tiny)) & (best == scores.amin(dim=1))
        labels[long_enough] = scores[:, candidates].argmax(dim=1).masked_fill(none, UNDEFINED)
        return labels

    return prefix


def _posterior(language: PCFG, node: _Node, sentences: Sentences) -> torch.Tensor:
    """Return (n, C): the probability that the node is there and has each symbol, given the sentence."""
    tokens, lengths, _ = sentences
    if not node.widths:
        return language.span_posterior(tokens, lengths)[:, node.candidates]
    out = torch.zeros(len(tokens), len(node.candidates), dtype=torch.float64, device=language.device)
    for width in node.widths:
        rows = torch.nonzero(lengths >= width).flatten()
        if len(rows):
            out[rows] += language.span_posterior(tokens[rows], lengths[rows], stop=width)[:, node.candidates]
    return out
