"""The rules of a grammar as text, in two formats, read into `Rule`s.

NLTK's (`S -> NP VP [0.8] | 'tok' [0.2]`) and plain rule lines (`LHS RHS [RHS] weight`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from isoloss.errors import IsolossError

LARGEST_WEIGHT = 1e100  # sums of weights stay finite below it
_NLTK_TOLERANCE = 0.01  # nltk.PCFG.EPSILON: what NLTK itself refuses

SYMBOL = re.compile(r"[\w/][\w/^<>-]*")  # an NLTK nonterminal
_TOKEN = re.compile(r"\"([^\"]*)\"|'([^']*)'")
_PROBABILITY = re.compile(r"\[([^\]]*)\]")


class Rule(NamedTuple):
    """One rule before the grammar is put together, its weight not normalized."""

    line: int  # of the text; 0 for a rule that comes from no text
    lhs: str
    rhs: tuple[tuple[str, bool], ...]  # one or two (name, whether it is a token)
    weight: float


def read_rules(text: str, source: str) -> tuple[list[Rule], str]:
    """Return the rules in a text, and its start symbol (see `isoloss.languages.pcfg.grammar.parse_grammar`)."""
    lines = _rule_lines(text)
    if not lines:
        raise IsolossError(f"{source} holds no rules: it is empty, or all of it is comments")
    if any("->" in line for _, line in lines):
        rules, start = _read_nltk(lines, source)
        _check_sums(rules, source)
        return rules, start
    return _read_plain(lines, source), lines[0][1].split()[0]


def location(source: str, rule: Rule) -> str:
    """Return where a rule stands, for an error."""
    return f"{source}, line {rule.line}" if rule.line else source


def _rule_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, line) without comments and empty lines."""
    lines = ((number, line.strip()) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _weight(text: str, line: int, source: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise IsolossError(f"{source}, line {line}: the weight {text!r} is not a number") from None
    if not 0 <= weight <= LARGEST_WEIGHT:
        raise IsolossError(
            f"{source}, line {line}: the weight is {text}; it must be at least 0 and at most {LARGEST_WEIGHT:g}"
        )
    return weight


def _read_plain(lines: Sequence[tuple[int, str]], source: str) -> list[Rule]:
    fields = [(number, line.split()) for number, line in lines]
    for number, parts in fields:
        if len(parts) not in (3, 4):
            raise IsolossError(
                f"{source}, line {number}: a rule is LHS RHS [RHS] weight, 3 or 4 fields; this line has {len(parts)}"
            )
    symbols = {parts[0] for _, parts in fields}
    return [
        Rule(
            number,
            parts[0],
            tuple((name, name not in symbols) for name in parts[1:-1]),
            _weight(parts[-1], number, source),
        )
        for number, parts in fields
    ]


def _read_nltk(lines: Sequence[tuple[int, str]], source: str) -> tuple[list[Rule], str]:
    rules: list[Rule] = []
    start = ""
    begun, pending = 0, ""
    for number, line in lines:
        begun, text = (begun, pending + line) if pending else (number, line)
        pending = text[:-1].rstrip() + " " if text.endswith("\\") else ""
        if pending:
            continue
        if text.startswith("%"):
            directive = re.fullmatch(rf"%start\s+({SYMBOL.pattern})", text)
            if not directive:
                raise IsolossError(f"{source}, line {begun}: expected `%start SYMBOL`, found {text!r}")
            start = directive[1]
        else:
            rules += _read_production(text, begun, source)
    if pending:
        raise IsolossError(f"{source}, line {begun}: the line is continued by a backslash, but nothing follows")
    if not rules:
        raise IsolossError(f"{source} holds no rules: it is empty, or all of it is comments")
    return rules, start or rules[0].lhs


def _read_production(text: str, line: int, source: str) -> list[Rule]:
    """Return the alternatives of one `LHS -> ... | ...`."""
    head = re.match(rf"({SYMBOL.pattern})\s+->\s*", text)
    if not head:
        raise IsolossError(
            f"{source}, line {line}: expected `SYMBOL -> ...` with spaces around the arrow, found {text!r}"
        )
    rules = []
    position = head.end()
    while True:
        rhs: list[tuple[str, bool]] = []
        while match := (_TOKEN.match(text, position) or SYMBOL.match(text, position)):
            is_token = match.re is _TOKEN
            rhs.append((match[1] or match[2] or "" if is_token else match[0], is_token))
            position = _skip_space(text, match.end())
        probability = _PROBABILITY.match(text, position)
        if not probability:
            rest = repr(text[position:]) if text[position:] else "the end of the line"
            raise IsolossError(
                f"{source}, line {line}: expected a symbol, a quoted token or a [probability], found {rest}"
            )
        if len(rhs) not in (1, 2) or ("", True) in rhs:
            raise IsolossError(
                f"{source}, line {line}: a right side of {head[1]} has {len(rhs)} symbols and tokens; it must have one "
                "or two, none of them empty (split a longer one with symbols of your own)"
            )
        rules.append(Rule(line, head[1], tuple(rhs), _weight(probability[1].strip(), line, source)))
        position = _skip_space(text, probability.end())
        if position == len(text) or text[position] == "#":
            return rules
        if text[position] != "|":
            raise IsolossError(f"{source}, line {line}: expected `|` or the end of the line, found {text[position:]!r}")
        position = _skip_space(text, position + 1)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _check_sums(rules: Sequence[Rule], source: str) -> None:
    """Refuse NLTK probabilities that NLTK refuses: there, a sum that is not 1 is a slip, not a count."""
    for lhs in dict.fromkeys(rule.lhs for rule in rules):
        own = [rule for rule in rules if rule.lhs == lhs]
        total = math.fsum(rule.weight for rule in own)
        if abs(total - 1) >= _NLTK_TOLERANCE:
            raise IsolossError(
                f"{source}, line {own[0].line}: the probabilities of {lhs} add up to {total:.6g}; NLTK's format wants 1"
            )
