"""Probabilistic context-free grammars as data: rules and probabilities, checked, and written as text."""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isoloss.errors import IsolossError, warn
from isoloss.lab.languages.pcfg.rules import (
    ARROW,
    NLTK_SYMBOL,
    Rule,
    first_of,
    is_plain_name,
    location,
    numbers_only,
    read_rules,
)

Format = Literal["rules", "nltk"]

_SUM_TOLERANCE = 1e-12  # probabilities that add up to 1 within this are kept to the last digit: text round-trips


@dataclass(frozen=True, eq=False, kw_only=True)
class Grammar:
    """A valid grammar: every symbol derives a sentence and is reachable, no symbol derives itself alone.

    Attributes:
        symbols: Names by id, in the order of their first rule; the start symbol is the first.
        vocabulary: Token strings by id, in natural order (`w2` before `w10`).
        binary: (R, 3) ids A, B, C of the rules A -> B C, in ascending order.
        binary_probs: (R,) their probabilities.
        unary: (U, 2) ids A, B of the rules A -> B.
        unary_probs: (U,) their probabilities.
        emission: (E, 2) symbol id A, token id c of the rules A -> c.
        emission_probs: (E,) their probabilities. All probabilities of one symbol add up to 1 and none is 0.
    """

    symbols: tuple[str, ...]
    vocabulary: tuple[str, ...]
    binary: npt.NDArray[np.int64]
    binary_probs: npt.NDArray[np.float64]
    unary: npt.NDArray[np.int64]
    unary_probs: npt.NDArray[np.float64]
    emission: npt.NDArray[np.int64]
    emission_probs: npt.NDArray[np.float64]

    def to_text(self, format: Format = "rules") -> str:  # noqa: A002
        """Return the rules as text, one per line; `parse_grammar` reads the same grammar back, to the last digit.

        Args:
            format: `rules` (`LHS RHS [RHS] weight`) or `nltk` (`LHS -> RHS RHS [probability]`). NLTK allows fewer
                characters in a symbol's name: there, each other one is written as `_` (`L0.1` becomes `L0_1`).

        Raises:
            IsolossError: The format is unknown, or a name cannot be written in it.
        """
        if format not in ("rules", "nltk"):
            raise IsolossError(f"a grammar's format is rules or nltk, not {format!r}")
        obstacle = self.rules_obstacle() if format == "rules" else None
        if obstacle:
            raise IsolossError(f"{obstacle}; write format nltk instead")
        return self._text(_nltk_names(self.symbols)) if format == "nltk" else self._text(None)

    def config_text(self) -> str:
        """Return the rules as a config keeps them, with their own names in whatever form can hold these."""
        if not self.rules_obstacle():
            return self._text(None)
        return self._text(self.symbols if all(map(is_plain_name, self.symbols)) else _nltk_names(self.symbols))

    def _text(self, names: Sequence[str] | None) -> str:
        """Return the rules with arrows, the symbols called `names`, or as plain rule lines."""
        symbols = names or self.symbols
        quote: Callable[[str], str] = _quoted if names else str
        rules = [(a, f"{symbols[b]} {symbols[c]}") for a, b, c in self.binary]
        rules += [(a, symbols[b]) for a, b in self.unary]
        rules += [(a, quote(self.vocabulary[token])) for a, token in self.emission]
        blocks: list[list[str]] = [[] for _ in symbols]
        probs = np.concatenate([self.binary_probs, self.unary_probs, self.emission_probs])
        for (lhs, rhs), p in zip(rules, probs, strict=True):
            if names:
                blocks[lhs].append(f"{symbols[lhs]} -> {rhs} [{np.format_float_positional(p, trim='0')}]")
            else:
                blocks[lhs].append(f"{symbols[lhs]} {rhs} {float(p)!r}")
        return "".join(f"{line}\n" for block in blocks for line in block)

    def rules_obstacle(self) -> str | None:
        """Return why plain rule lines cannot hold this grammar, or None where they can."""
        for name in (*self.symbols, *self.vocabulary):
            if name.split() != [name] or "->" in name:
                return f"the name {name!r} has a space or an arrow, which a plain rule line cannot hold"
        for name in self.symbols:
            if name.startswith("#"):
                return f"the symbol {name!r} would start a comment in a plain rule line"
            if name.startswith("%") or ARROW.search(f"{name} "):
                return f"the symbol {name!r} could be taken for an arrow or a directive in a plain rule line"
        if numbers_only(self.symbols):
            return "all symbols are numbers, so that plain rule lines would begin and end with one"
        both = sorted(set(self.symbols) & set(self.vocabulary))
        return f"{both[0]!r} is a symbol and a token, which plain rule lines cannot tell apart" if both else None


def parse_grammar(text: str, *, source: str = "<text>") -> Grammar:
    r"""Return the grammar that `text` holds, in any of the forms that people write grammars in.

    - **With arrows**, as NLTK: `S -> NP VP [0.8] | 'tok' [0.2]`. The arrow may also be `→`, `=>`, `::=`, `:=`, `:`, `=`
      or `|||`. A right side's weight is in brackets behind it, after # or :, its last word, or in front of the line
      (`[0.8] S -> NP VP`). What stands in quotes is a token; if nothing does, a name without a rule of its own is one.
      Weights in brackets are probabilities, which add up to 1 within 0.01.
    - **Plain rule lines**: `LHS RHS ... weight` or `weight LHS RHS ...`. A name that never stands on a left side is a
      token.

    The start symbol is the first left side, or what `%start X`, a first line `X` or NLTK's printed heading says. What
    follows # is a comment, a backslash continues a line, the weights of a repeated rule add up, a symbol's weights are
    normalized, and rules of weight 0 are left out. Rules between two symbols (`A -> B`) are allowed. A right side of
    more than two names is split in two, with symbols named as NLTK names them (`A|<C-D>`); no probability changes.
    A token beside another name (`A -> 'a' B`) gets a symbol of its own, named after it (`T/a`), that emits only it.

    An `IsolossWarning` says how a text was read that is in neither of the two forms that `Grammar.to_text` writes.
    A symbol that cannot be reached from the start symbol has no part in any sentence. It is left out with its rules,
    and so is a token that no other symbol emits; one `IsolossWarning` names them. Nothing is asked of their rules but
    that they can be read: they may name a symbol that has no rule, or never end.

    Raises:
        IsolossError: A line cannot be read or has two meanings, or the rules make no valid grammar: a symbol that can
            be reached has no rule, or derives no sentence, or itself alone. The message names the line.

    Example:
        >>> grammar = parse_grammar("S A A 3\nS A 1\nA a 1\nA b 1")
        >>> grammar.symbols, grammar.vocabulary, grammar.binary_probs, grammar.unary_probs
        (('S', 'A'), ('a', 'b'), array([0.75]), array([0.25]))
    """
    rules, start, notes = read_rules(text, source)
    grammar = build_grammar(rules, start=start, source=source)
    if notes:
        warn(f"{source}: {'; '.join(notes)}")
    return grammar


def build_grammar(rules: Iterable[Rule], *, start: str, source: str) -> Grammar:
    """Return the grammar of `rules`; arguments, warnings and errors as for `parse_grammar`."""
    merged: dict[tuple[str, tuple[tuple[str, bool], ...]], tuple[int, float]] = {}
    for rule in rules:
        line, weight = merged.get((rule.lhs, rule.rhs), (rule.line, 0.0))
        merged[rule.lhs, rule.rhs] = line, weight + rule.weight
    by_symbol: dict[str, list[Rule]] = {start: []}
    for (lhs, rhs), (line, weight) in merged.items():
        by_symbol.setdefault(lhs, []).append(Rule(line, lhs, rhs, weight))
    if not by_symbol[start]:
        raise IsolossError(f"{source}: the start symbol {start} has no rule")
    reached = _reachable(by_symbol, start)
    left_out = _left_out(by_symbol, reached, start) if len(reached) < len(by_symbol) else None
    by_symbol = {lhs: _normalized(own, source) for lhs, own in by_symbol.items() if lhs in reached}
    _add_preterminals(by_symbol)
    everything = [rule for own in by_symbol.values() for rule in own]
    for rule in everything:
        for name, is_token in rule.rhs:
            if not is_token and name not in by_symbol:
                raise IsolossError(
                    f"{location(source, rule)}: the symbol {name} has no rule (a token stands in quotes)"
                )
    _check_cycles(everything, source)
    _check_productive(by_symbol, start, source)
    if left_out is not None:
        warn(f"{source}: left out {left_out}")
    return _assemble(everything, tuple(by_symbol))


def _reachable(by_symbol: dict[str, list[Rule]], start: str) -> set[str]:
    """Return the symbols that a sentence may be derived through: those that rules above weight 0 lead to."""
    reached, frontier = {start}, [start]
    while frontier:
        for rule in by_symbol[frontier.pop()]:
            for name, is_token in rule.rhs if rule.weight > 0 else ():
                if not is_token and name not in reached and name in by_symbol:
                    reached.add(name)
                    frontier.append(name)
    return reached


def _left_out(by_symbol: dict[str, list[Rule]], reached: set[str], start: str) -> str:
    """Return how many symbols are not reached, how many tokens go with them, and what the first ones are called."""
    kept = vocabulary_of(rule for lhs in reached for rule in by_symbol[lhs])
    others = {lhs: own for lhs, own in by_symbol.items() if lhs not in reached}
    symbols = [f"{lhs} (line {own[0].line})" if own[0].line else lhs for lhs, own in others.items()]
    tokens = [token for token in vocabulary_of(rule for own in others.values() for rule in own) if token not in kept]
    told = f"{_count(symbols, 'symbol')} that cannot be reached from {start}: {first_of(symbols)}"
    return f"{told}; and {_count(tokens, 'token')} that nothing else emits: {first_of(tokens)}" if tokens else told


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def _normalized(own: Sequence[Rule], source: str) -> list[Rule]:
    """Return one symbol's rules with probabilities for weights, without those of probability 0."""
    total = math.fsum(rule.weight for rule in own)
    if total == 0:
        raise IsolossError(f"{location(source, own[0])}: all weights of the symbol {own[0].lhs} are 0")
    if abs(total - 1) > _SUM_TOLERANCE:
        own = [rule._replace(weight=rule.weight / total) for rule in own]
    return [rule._replace(weight=min(rule.weight, 1.0)) for rule in own if rule.weight > 0]


def _add_preterminals(by_symbol: dict[str, list[Rule]]) -> None:
    """Give each token that stands in a pair a symbol that emits only it, and put the symbol in its place."""
    names: dict[str, str] = {}
    for lhs, own in list(by_symbol.items()):
        for index, rule in enumerate(own):
            if len(rule.rhs) == 1:
                continue
            for token, is_token in rule.rhs:
                if is_token and token not in names:
                    name = _nltk_name(f"T/{token}")
                    while name in by_symbol:
                        name += "_"
                    names[token] = name
                    by_symbol[name] = [Rule(rule.line, name, ((token, True),), 1.0)]
            by_symbol[lhs][index] = rule._replace(
                rhs=tuple((names[name], False) if is_token else (name, False) for name, is_token in rule.rhs)
            )


def _check_cycles(rules: Sequence[Rule], source: str) -> None:
    graph: dict[str, list[str]] = {}
    for rule in rules:
        if len(rule.rhs) == 1 and not rule.rhs[0][1]:
            graph.setdefault(rule.lhs, []).append(rule.rhs[0][0])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1][::-1]
        first = next(rule for rule in rules if rule.lhs == cycle[0] and rule.rhs == ((cycle[1], False),))
        told = f"{location(source, first)}: the unary rules run in a cycle: {' -> '.join(cycle)}"
        if len(cycle) == 2:
            told += f"; if {cycle[0]} is a token, too, write rules with an arrow and the token in quotes"
        raise IsolossError(told) from None


def _check_productive(by_symbol: dict[str, list[Rule]], start: str, source: str) -> None:
    # Every rule waits for the symbols on its right; a symbol is productive when one of its rules waits no longer.
    waiting: dict[str, list[tuple[str, set[str]]]] = {}
    productive, frontier = set[str](), list[str]()
    for lhs, own in by_symbol.items():
        for rule in own:
            missing = {name for name, is_token in rule.rhs if not is_token}
            for name in missing:
                waiting.setdefault(name, []).append((lhs, missing))
            if not missing:
                frontier.append(lhs)
    while frontier:
        done = frontier.pop()
        if done not in productive:
            productive.add(done)
            for lhs, missing in waiting.get(done, ()):
                missing.discard(done)
                if not missing:
                    frontier.append(lhs)
    for lhs in (start, *by_symbol):
        if lhs not in productive:
            role = "start symbol" if lhs == start else "symbol"
            raise IsolossError(
                f"{location(source, by_symbol[lhs][0])}: the {role} {lhs} derives no sentence: its rules never end"
            )


def vocabulary_of(rules: Iterable[Rule]) -> tuple[str, ...]:
    """Return the tokens that rules emit with a weight above 0, in the natural order of a grammar's vocabulary."""
    tokens = {name for rule in rules if rule.weight > 0 for name, is_token in rule.rhs if is_token}
    return tuple(sorted(tokens, key=_natural))


def _assemble(rules: Sequence[Rule], symbols: tuple[str, ...]) -> Grammar:
    vocabulary = vocabulary_of(rules)
    id_of = {False: {name: i for i, name in enumerate(symbols)}, True: {name: i for i, name in enumerate(vocabulary)}}
    fields: dict[str, npt.NDArray[Any]] = {}
    for kind, size, is_emission in (("binary", 2, False), ("unary", 1, False), ("emission", 1, True)):
        own = [rule for rule in rules if (len(rule.rhs), rule.rhs[0][1]) == (size, is_emission)]
        rows = [(id_of[False][rule.lhs], *(id_of[is_token][name] for name, is_token in rule.rhs)) for rule in own]
        entries = sorted(zip(rows, (rule.weight for rule in own), strict=True))
        fields[kind] = np.array([row for row, _ in entries], dtype=np.int64).reshape(len(entries), size + 1)
        fields[f"{kind}_probs"] = np.array([weight for _, weight in entries], dtype=np.float64)
    for array in fields.values():
        array.flags.writeable = False
    return Grammar(symbols=symbols, vocabulary=vocabulary, **fields)


def _natural(name: str) -> tuple[list[str | int], str]:
    parts: list[str | int] = [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
    return parts, name


def _nltk_name(name: str) -> str:
    name = re.sub(r"[^\w/^<>-]", "_", name)
    return name if NLTK_SYMBOL.fullmatch(name) else f"_{name}"


def _nltk_names(symbols: Sequence[str]) -> tuple[str, ...]:
    names = tuple(map(_nltk_name, symbols))
    owner: dict[str, str] = {}
    for name, symbol in zip(names, symbols, strict=True):
        if owner.setdefault(name, symbol) != symbol:
            raise IsolossError(
                f"the symbols {owner[name]!r} and {symbol!r} are both {name!r} in NLTK's format; rename one"
            )
    return names


def _quoted(token: str) -> str:
    if "'" not in token:
        return f"'{token}'"
    if '"' in token:
        raise IsolossError(f"the token {token!r} has both kinds of quotes, which NLTK's format cannot hold")
    return f'"{token}"'
