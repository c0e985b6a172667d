"""What a synthetic task asks: the classes, a sentence's label, and how likely each class is given the sentence.

Shape letters: n sentences, C classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from isoloss.errors import IsolossError
from isoloss.languages.api import Sentences
from isoloss.languages.brackets import Brackets
from isoloss.languages.hmm.language import HMM
from isoloss.languages.pcfg.chart_plan import FoldedRules
from isoloss.languages.pcfg.grammar import Grammar
from isoloss.languages.pcfg.language import PCFG
from isoloss.text.corpus import Corpus
from isoloss.transfer.task_names import LATENT, canonical

Labelled = PCFG | HMM | Brackets

UNDEFINED = -1  # the label of a sentence that the task does not cover
_TEXT = "text; for a task of text give isoloss transfer --task sst2 --data FOLDER, or a name of yours and --data FILE"
_NUMBERED = re.compile(r"(level|prefix|state|task)-(0|[1-9]\d*)")


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """A task's classes and labels.

    Attributes:
        classes: What a label can stand for.
        label: Sentences to (n,) int64 indices into `classes`, `UNDEFINED` where a sentence has no label.
        scores: Sentences to (n, C) numbers proportional to the probability of each class given the sentence, their sum
            that of the sentence having a label; None where the label is a function of the sentence.
        needs_latent: Whether `label` reads what produced the sentences.
    """

    classes: tuple[str, ...]
    label: Callable[[Sentences], torch.Tensor]
    scores: Callable[[Sentences], torch.Tensor] | None = None
    needs_latent: bool = False


def labelling(language: Labelled, name: str) -> Labelling:
    """Return what the task `name` asks of the sentences of `language`; see `isoloss.transfer.tasks.make_task`.

    Scores are in float64 whatever the language computes in, so that the labels are the same.

    Raises:
        IsolossError: The language has no such task.
    """
    base = canonical(name).removesuffix(LATENT)
    latent = name.endswith(LATENT)
    if isinstance(language, HMM):
        return _of_state(language, name, base, latent=latent)
    if isinstance(language, Brackets):
        return _of_brackets(language, name)
    if not isinstance(language, PCFG):
        raise IsolossError(
            f"task {name!r} is about what produced a sentence: it takes a grammar, a hidden Markov model or brackets, "
            f"not {_TEXT if isinstance(language, Corpus) else repr(language)}"
        )
    return _of_grammar(language, name, base, latent=latent)


def _numbered(base: str, kind: str, low: int, high: int) -> int | None:
    """Return the number in e.g. `state-6`, or None where the name is of another kind or the number out of range."""
    match = _NUMBERED.fullmatch(base)
    return int(match[2]) if match and match[1] == kind and low <= int(match[2]) <= high else None


# --- hidden Markov models and brackets -------------------------------------------------------------------------------


def _of_state(language: HMM, name: str, base: str, *, latent: bool) -> Labelling:
    k = _numbered(base, "state", 1, language.max_length)
    if k is None:
        last = language.max_length
        raise IsolossError(f"no task {name!r}: choose state-k with k from 1 to {last}, or state-k-latent")
    exact = language.to(dtype=torch.float64)

    def scores(sentences: Sentences) -> torch.Tensor:
        return exact.posterior(sentences.tokens, sentences.lengths)[:, k - 1]

    def likely(sentences: Sentences) -> torch.Tensor:
        return scores(sentences).argmax(dim=1).masked_fill(sentences.lengths < k, UNDEFINED)

    def drawn(sentences: Sentences) -> torch.Tensor:
        states: torch.Tensor = sentences.latent[:, k - 1]
        return states.masked_fill(sentences.lengths < k, UNDEFINED)

    if latent:
        return Labelling(classes=language.states, label=drawn, scores=scores, needs_latent=True)
    return Labelling(classes=language.states, label=likely)


def _of_brackets(language: Brackets, name: str) -> Labelling:
    if name != "mismatch":
        raise IsolossError(f"no task {name!r}: choose mismatch, the one task of brackets")
    length = language.length

    def label(sentences: Sentences) -> torch.Tensor:
        return (language.mismatch(sentences.tokens) + length) // 2

    return Labelling(classes=tuple(str(count) for count in range(-length, length + 1, 2)), label=label)


# --- grammars --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """The node of a parse that a task asks for: it begins at the first token, and at most one in a tree fits.

    Attributes:
        candidates: Ids of the symbols that it can have.
        widths: How many tokens it can cover; none: all of the sentence.
    """

    candidates: list[int]
    widths: tuple[int, ...]


def _of_grammar(language: PCFG, name: str, base: str, *, latent: bool) -> Labelling:
    node = _node(language, name, base)
    names = tuple(language.symbols[symbol] for symbol in node.candidates)
    is_prefix = base.startswith("prefix-")
    if latent or base.startswith("level-"):
        _check_exclusive(language.grammar, node.candidates, name)
    if not latent and is_prefix:
        return Labelling(classes=names, label=_by_inside(language, node.candidates, node.widths[0]))
    exact = language.to(dtype=torch.float64)

    def scores(sentences: Sentences) -> torch.Tensor:
        return _posterior(exact, node, sentences)

    def likely(sentences: Sentences) -> torch.Tensor:
        found = scores(sentences)
        return found.argmax(dim=1).masked_fill(found.amax(dim=1) == 0, UNDEFINED)

    index = torch.full((len(language.symbols) + 1,), UNDEFINED)  # the last is for padding, -1
    index[node.candidates] = torch.arange(len(node.candidates))

    def drawn(sentences: Sentences) -> torch.Tensor:
        start, stop, symbol = sentences.latent.unbind(dim=2)
        widths = torch.tensor(node.widths, device=stop.device)
        fits = torch.isin(stop, widths) if node.widths else stop == sentences.lengths[:, None]
        place = index.to(symbol.device)[symbol].masked_fill((start != 0) | ~fits, UNDEFINED)
        return place.amax(dim=1)

    if latent:
        return Labelling(classes=names, label=drawn, scores=scores, needs_latent=True)
    return Labelling(classes=names, label=likely)


def _node(language: PCFG, name: str, base: str) -> _Node:
    grammar = language.grammar
    start = grammar.symbols.index(language.start)
    if base == "root":
        return _Node(grammar.unary[grammar.unary[:, 0] == start, 1].tolist(), ())
    # a start symbol that is only ever rewritten to a single symbol stands for no choice
    passes_on = not (grammar.binary[:, 0] == start).any() and not (grammar.emission[:, 0] == start).any()
    feasible = FoldedRules(grammar, language.max_length).feasible
    width = _numbered(base, "prefix", 1, language.max_length)
    if width is not None:
        yields = feasible[:, width].nonzero()[0].tolist()
        return _Node([symbol for symbol in yields if symbol != start or not passes_on], (width,))
    levels = _levels(grammar) if base.startswith("level-") else []
    level = _numbered(base, "level", 0, max(levels, default=0))
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
    closure = FoldedRules(grammar, 1).closure[candidates][:, candidates]
    for upper, lower in np.argwhere(closure).tolist():
        if upper != lower:
            both = " and ".join(grammar.symbols[candidates[index]] for index in (upper, lower))
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
