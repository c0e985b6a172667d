"""Probabilistic context-free grammars as data: rules and probabilities, checked, and written as text."""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isoloss.config import check
from isoloss.errors import IsolossError, warn
from isoloss.lab.languages._pcfg.rules import (
    ARROW,
    NLTK_SYMBOL,
    Rule,
    first_of,
    is_plain_name,
    location,
    numbers_only,
    read_rules,
)
from isoloss.lab.languages.base import Stored
from isoloss.lab.languages.config import DyckConfig, PCFGConfig
from isoloss.seeds import derive

Format = Literal["rules", "nltk"]

_SUM_TOLERANCE = 1e-12  # probabilities that add up to 1 within this keep their last digit: text round-trips


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

        The format is `rules` (`LHS RHS [RHS] weight`) or `nltk` (`LHS -> RHS RHS [probability]`). NLTK allows fewer
        characters in a symbol's name: there, each other one is written as `_` (`L0.1` becomes `L0_1`).
        """
        if format not in ("rules", "nltk"):
            raise IsolossError(f"a grammar's format is rules or nltk, not {format!r}")
        if format == "nltk":
            return self._text(_nltk_names(self.symbols))
        if obstacle := self.rules_obstacle():
            raise IsolossError(f"{obstacle}; write format nltk instead")
        return self._text(None)

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
        probs = np.concatenate([self.binary_probs, self.unary_probs, self.emission_probs])
        # stable: of each symbol, pairs come first and tokens last
        by_symbol = sorted(zip(rules, probs, strict=True), key=lambda rule: rule[0][0])
        if names:
            # NLTK reads no exponents; both forms have all digits.
            digits = ((a, rhs, np.format_float_positional(p, trim="0")) for (a, rhs), p in by_symbol)
            return "".join(f"{symbols[a]} -> {rhs} [{p}]\n" for a, rhs, p in digits)
        return "".join(f"{symbols[a]} {rhs} {float(p)!r}\n" for (a, rhs), p in by_symbol)

    def rules_obstacle(self) -> str | None:
        """Return why plain rule lines cannot hold this grammar, or None where they can."""
        for name in (*self.symbols, *self.vocabulary):
            if name.split() != [name] or ARROW.search(name):
                return f"the name {name!r} has a space or an arrow, which a plain rule line cannot hold"
        for name in self.symbols:
            if name.startswith("#"):
                return f"the symbol {name!r} would start a comment in a plain rule line"
            if name.startswith("%"):
                return f"the symbol {name!r} could be taken for a directive in a plain rule line"
        if numbers_only(self.symbols):
            return "all symbols are numbers, so that plain rule lines would begin and end with one"
        both = sorted(set(self.symbols) & set(self.vocabulary))
        return f"{both[0]!r} is a symbol and a token, which plain rule lines cannot tell apart" if both else None


def parse_grammar(text: str, *, source: str = "<text>") -> Grammar:
    r"""Return the grammar that `text` holds, in one of the forms that public grammars have.

    - **With arrows** (`->`, `-->` or `→`), as NLTK: `S -> NP VP [0.8] | 'tok' [0.2]`. A right side's weight is in
      brackets behind it, after #, its last word, or in front of the line (`[0.8] S -> NP VP`). What stands in quotes
      is a token; if nothing does, a name without a rule of its own is one. Weights in brackets are probabilities,
      which add up to 1 within 0.01.
    - **Plain rule lines**: `LHS RHS ... weight` or `weight LHS RHS ...`. A name that never stands on a left side is a
      token.

    The start symbol is the first left side, unless `%start X`, a first line `X` or NLTK's printed heading names one.
    Text after # is a comment, a backslash continues a line, the weights of a repeated rule add up, each symbol's
    weights are normalized, and rules of weight 0 are left out. Rules between two symbols (`A -> B`) are allowed. A
    right side of more than two names is split in two, with symbols named as NLTK names them (`A|<C-D>`); no probability
    changes. A token beside another name (`A -> 'a' B`) gets a symbol of its own, named after it (`T/a`), that emits
    only it.

    An `IsolossWarning` says how a text was read that is in neither of the two forms that `Grammar.to_text` writes.
    A symbol that cannot be reached from the start symbol has no part in any sentence. It is left out with its rules,
    and so is a token that no other symbol emits; one `IsolossWarning` names them. Nothing is asked of their rules but
    that they can be read: they may name a symbol that has no rule, or never end.

    Raises:
        IsolossError: A line cannot be read or has two meanings, or the rules make no valid grammar: a symbol that can
            be reached has no rule, or derives no sentence, or itself alone. The message names the line.

    Example:
        >>> from isoloss.lab.languages._pcfg.grammar import parse_grammar
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
    # The start symbol first, as it must get the id 0.
    by_symbol: dict[str, list[Rule]] = {start: []}
    for (lhs, rhs), (line, weight) in merged.items():
        by_symbol.setdefault(lhs, []).append(Rule(line, lhs, rhs, weight))
    if not by_symbol[start]:
        raise IsolossError(f"{source}: the start symbol {start} has no rule")
    reached = _reachable(by_symbol, start)
    left_out = _left_out(by_symbol, reached, start) if len(reached) < len(by_symbol) else None
    # Before the rules are checked: a symbol that cannot be reached may have rules that never end.
    by_symbol = {lhs: _normalized(of_lhs, source) for lhs, of_lhs in by_symbol.items() if lhs in reached}
    _add_preterminals(by_symbol)
    everything = [rule for of_lhs in by_symbol.values() for rule in of_lhs]
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
    """Return how many symbols are not reached, how many tokens go with them, and the names of the first ones."""
    vocabulary = vocabulary_of(rule for lhs in reached for rule in by_symbol[lhs])
    others = {lhs: rules for lhs, rules in by_symbol.items() if lhs not in reached}
    symbols = [f"{lhs} (line {rules[0].line})" if rules[0].line else lhs for lhs, rules in others.items()]
    emitted = vocabulary_of(rule for rules in others.values() for rule in rules)
    tokens = [token for token in emitted if token not in vocabulary]
    told = f"{_count(symbols, 'symbol')} that cannot be reached from {start}: {first_of(symbols)}"
    return f"{told}; and {_count(tokens, 'token')} that nothing else emits: {first_of(tokens)}" if tokens else told


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def _normalized(rules: Sequence[Rule], source: str) -> list[Rule]:
    """Return one symbol's rules with probabilities for weights, without those of probability 0."""
    total = math.fsum(rule.weight for rule in rules)
    if total == 0:
        raise IsolossError(f"{location(source, rules[0])}: all weights of the symbol {rules[0].lhs} are 0")
    if abs(total - 1) > _SUM_TOLERANCE:
        rules = [rule._replace(weight=rule.weight / total) for rule in rules]
    # A weight of 1 + 1e-13 within the tolerance would be a probability above 1.
    return [rule._replace(weight=min(rule.weight, 1.0)) for rule in rules if rule.weight > 0]


def _add_preterminals(by_symbol: dict[str, list[Rule]]) -> None:
    """Give each token that stands in a pair a symbol that emits only it, and put the symbol in its place."""
    names: dict[str, str] = {}
    for lhs, of_lhs in list(by_symbol.items()):
        for index, rule in enumerate(of_lhs):
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
        # graphlib lists a node's predecessor, here its right side, before it.
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
    for lhs, rules in by_symbol.items():
        for rule in rules:
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
        of_kind = [rule for rule in rules if (len(rule.rhs), rule.rhs[0][1]) == (size, is_emission)]
        rows = [(id_of[False][rule.lhs], *(id_of[is_token][name] for name, is_token in rule.rhs)) for rule in of_kind]
        # Ascending, which `FoldedRules` relies on, and the same whatever the order in the text.
        entries = sorted(zip(rows, (rule.weight for rule in of_kind), strict=True))
        fields[kind] = np.array([row for row, _ in entries], dtype=np.int64).reshape(len(entries), size + 1)
        fields[f"{kind}_probs"] = np.array([weight for _, weight in entries], dtype=np.float64)
    for array in fields.values():
        # Engines and samplers share the tables without copying them.
        array.flags.writeable = False
    return Grammar(symbols=symbols, vocabulary=vocabulary, **fields)


def _natural(name: str) -> tuple[list[str | int], str]:
    # Splitting by a group puts the digits at odd indices: numbers are only ever compared with numbers.
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


_PAIRS = ("()", "[]", "{}", "<>")  # the first kinds of bracket; further ones are numbered


def random_grammar(config: PCFGConfig) -> Grammar:
    """Return the grammar that `config` describes (see `PCFGConfig`)."""
    check(config)
    rules = _random_rules(config, derive(config.seed, "pcfg"))
    if (level := config.redrawn_level) >= 0:
        # each symbol has as many rules in all grammars of one shape
        others = _random_rules(config, derive(config.seed, "pcfg", "redrawn level", level))
        redrawn = {f"L{level}.{index}" for index in range(config.symbols_per_level)}
        rules = [other if rule.lhs in redrawn else rule for rule, other in zip(rules, others, strict=True)]
    return build_grammar(rules, start="S", source="random grammar")


def _random_rules(config: PCFGConfig, seed: int) -> list[Rule]:
    rng = np.random.default_rng(seed)
    size, vocab_size = config.symbols_per_level, config.vocab_size
    names = [[f"L{level}.{index}" for index in range(size)] for level in range(config.levels + 1)]
    tokens = [f"w{index}" for index in range(vocab_size)]
    rules: list[Rule] = []

    def add(lhs: str, rhs: list[tuple[tuple[str, bool], ...]], total: float) -> None:
        probabilities = total * rng.dirichlet(np.ones(len(rhs)))
        rules.extend(Rule(0, lhs, right, float(p)) for right, p in zip(rhs, probabilities, strict=True))

    def emit(lhs: str, numbers: list[int], total: float) -> None:
        probabilities = rng.dirichlet(np.ones(len(numbers)))
        if config.zipf:
            probabilities *= (np.array(numbers) + 1.0) ** -config.zipf
            probabilities /= probabilities.sum()
        for number, p in zip(numbers, total * probabilities, strict=True):
            rules.append(Rule(0, lhs, ((tokens[number], True),), float(p)))

    add("S", [((name, False),) for name in names[0]], 1.0)
    for level in range(config.levels):
        below = names[level + 1]
        # Dealt one to each symbol: every symbol below is used.
        first_children = rng.permutation(size)
        for index, lhs in enumerate(names[level]):
            # a pair of symbols as one number, left * size + right
            first = int(first_children[index]) * size + int(rng.integers(size))
            others = [int(code) for code in rng.permutation(size * size) if code != first]
            pairs = [first, *others[: config.rules_per_symbol - 1]]
            splits = [((below[code // size], False), (below[code % size], False)) for code in pairs]
            add(lhs, list(splits), 1.0 - config.stop_probability)
            if config.stop_probability > 0:
                few = rng.permutation(vocab_size)[: config.rules_per_symbol]
                emit(lhs, few.tolist(), config.stop_probability)
    # So a token has two or more symbols that emit it, on average, and does not tell its symbol.
    emitted = min(vocab_size, max(config.rules_per_symbol, math.ceil(2 * vocab_size / size)))
    # Every token is emitted by the symbol that it is dealt to.
    dealt = rng.permutation(vocab_size)
    for index, lhs in enumerate(names[config.levels]):
        first_tokens = dealt[index::size]
        more = rng.permutation(np.setdiff1d(dealt, first_tokens))[: emitted - len(first_tokens)]
        emit(lhs, [*first_tokens.tolist(), *more.tolist()], 1.0)
    return rules


def dyck_grammar(config: DyckConfig) -> Grammar:
    r"""Return Dyck-k with a depth limit as a grammar: groups of nested brackets of k kinds, at most `max_depth` deep.

    With D symbols for a row of groups and B symbols for one group, each with the depth that they may still reach::

        D_d -> B_d          1 - continue_probability       B_d -> O_i C_i    (1 - nest_probability) / k
        D_d -> B_d D_d      continue_probability           B_d -> O_i R_d,i  nest_probability / k
                                                           R_d,i -> D_(d-1) C_i

    A group of depth 1 is always `O_i C_i`, so that the limit holds exactly and the rules need no empty string: the
    language has none. Each sentence has one derivation. Where one bracket is masked, the others imply it (its kind is
    its partner's, and which of the two it is follows from the number of each), so with `tokens_per_bracket` 1
    every full conditional has entropy 0. With more, O_i and C_i each emit one of so many tokens of their own, by
    probabilities from the flat Dirichlet distribution, and the full conditional of a bracket is that distribution.
    """
    check(config)
    rules: list[Rule] = []

    def add(lhs: str, *rhs: str, weight: float, token: bool = False) -> None:
        rules.append(Rule(0, lhs, tuple((name, token) for name in rhs), weight))

    kinds = range(config.kinds)
    for depth in range(config.max_depth, 0, -1):
        row, group = f"D{depth}", f"B{depth}"
        add(row, group, weight=1 - config.continue_probability)
        add(row, group, row, weight=config.continue_probability)
        # A group of the last depth cannot nest: the limit is in the rules, not in a rejection.
        nest = config.nest_probability if depth > 1 else 0.0
        for kind in kinds:
            add(group, f"O{kind}", f"C{kind}", weight=(1 - nest) / config.kinds)
            if nest > 0:
                rest = f"R{depth}_{kind}"
                add(group, f"O{kind}", rest, weight=nest / config.kinds)
                add(rest, f"D{depth - 1}", f"C{kind}", weight=1.0)
    rng = np.random.default_rng(derive(config.seed, "dyck"))
    for kind in kinds:
        pair = _PAIRS[kind] if kind < len(_PAIRS) else (f"({kind}", f"){kind}")
        for symbol, bracket in zip((f"O{kind}", f"C{kind}"), pair, strict=True):
            if config.tokens_per_bracket == 1:
                add(symbol, bracket, weight=1.0, token=True)
                continue
            for index, weight in enumerate(rng.dirichlet(np.ones(config.tokens_per_bracket))):
                add(symbol, f"{bracket}.{index}", weight=float(weight), token=True)
    return build_grammar(rules, start=f"D{config.max_depth}", source="Dyck grammar")


_RULES = {"binary": 3, "unary": 2, "emission": 2}  # tensors of rules and the ids in a row
_NAMES = [name for rules in _RULES for name in (rules, f"{rules}_probs")]
_TOLERANCE = 1e-6  # of a sum of probabilities, as for the rows of a hidden Markov model


def grammar_tables(grammar: Grammar, max_length: int) -> Stored:
    """Return the tables of a grammar's language, as a file keeps them (see `isoloss.lab.languages.save`)."""
    tables = {name: getattr(grammar, name) for name in _NAMES}
    words = {"vocabulary": grammar.vocabulary, "symbols": grammar.symbols}
    return Stored(kind="pcfg", max_length=max_length, tables=tables, **words)


def read_grammar(stored: Stored, path: Path) -> Grammar:
    """Return the grammar in a file's tables, checked as one that is read from text."""
    tables, symbols, vocabulary = stored.tables, stored.symbols, stored.vocabulary
    stored.check_names(_NAMES, path)
    if not symbols or len(set(symbols)) < len(symbols):
        raise IsolossError(f"{path}: the symbols must be different names, at least one, not {', '.join(symbols)!r}")
    rules: list[tuple[int, Rule]] = []
    for name in _RULES:
        _check_rules(name, tables, path, num_symbols=len(symbols), num_tokens=len(vocabulary))
        is_token = name == "emission"
        names = vocabulary if is_token else symbols
        for (lhs, *rhs), prob in zip(tables[name].tolist(), tables[f"{name}_probs"].tolist(), strict=True):
            rules.append((lhs, Rule(0, symbols[lhs], tuple((names[index], is_token) for index in rhs), prob)))
    # A grammar numbers its symbols by their first rule: sorted by symbol, they get the ids that they have in the file.
    rules.sort(key=lambda entry: entry[0])
    for lhs, symbol in enumerate(symbols):
        total = math.fsum(rule.weight for owner, rule in rules if owner == lhs)
        if abs(total - 1) > _TOLERANCE:
            raise IsolossError(f"{path}: the rules of {symbol} add up to {total:.9g}; they must add up to 1")
    if vocabulary_of(rule for _, rule in rules) != vocabulary:
        raise IsolossError(
            f"{path}: the tokens of the vocabulary must be those of the rules, a token w2 before a token w10"
        )
    return build_grammar((rule for _, rule in rules), start=symbols[0], source=str(path))


def _check_rules(
    name: str, tables: Mapping[str, npt.NDArray[Any]], path: Path, *, num_symbols: int, num_tokens: int
) -> None:
    """Check that the rules called `name` are rows of ids within the names and probabilities above 0."""
    ids, probs = tables[name], tables[f"{name}_probs"]
    width, size = _RULES[name], len(probs) if probs.ndim else 0
    for called, dtype, shape in ((f"{name}_probs", "float64", (size,)), (name, "int64", (size, width))):
        table = tables[called]
        if table.dtype != dtype or table.shape != shape:
            raise IsolossError(
                f"{path}: {called} must be {dtype} of shape {shape}, not {table.dtype} of shape {table.shape}"
            )
    limits = np.full(width, num_symbols)
    limits[-1] = num_tokens if name == "emission" else num_symbols
    if (wrong := ((ids < 0) | (ids >= limits)).any(axis=1)).any():
        row = int(wrong.argmax())
        raise IsolossError(f"{path}: row {row} of {name} is {ids[row].tolist()}; ids there are below {limits.tolist()}")
    if (wrong := ~(np.isfinite(probs) & (probs > 0))).any():
        row = int(wrong.argmax())
        raise IsolossError(f"{path}: row {row} of {name}_probs is {probs[row]}; a rule's probability is above 0")
