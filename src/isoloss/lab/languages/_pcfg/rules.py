r"""The rules of a grammar as text, in the forms that people write them in, read into `Rule`s.

A file has arrows (`S -> NP VP [0.8] | 'tok' [0.2]`), in one line at least, or none (`S NP VP 0.8`, `0.8 S NP VP`).
A line with an arrow (`->`, `-->` or `→`) is

    line        = [weight] NAME arrow alternative {"|" alternative} ["#" comment]
    alternative = {NAME | 'token' | "token"} [weight]
    weight      = "[0.5]" | "(0.5)" | "0.5" | "# 0.5"

where each alternative has one weight, or the line has one in front. A name is what stands between two spaces, so that
`S|<VP-.>`, `PRP$`, `''` and `,` are names; the spaces around arrows, quoted tokens and weights may be missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from isoloss.errors import IsolossError

NAMED = 5  # symbols or tokens that a message lists by name
LARGEST_WEIGHT = 1e100  # sums of weights stay finite below it
_NLTK_TOLERANCE = 0.01  # nltk.PCFG.EPSILON: what NLTK itself refuses

NLTK_SYMBOL = re.compile(r"[\w/][\w/^<>-]*")  # a nonterminal that NLTK reads
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_BRACKETED = rf"[\[(]\s*{_NUMBER}\s*[\])]"
ARROW = re.compile(r"--?>|→")
_FRONT = rf"(?:(?P<front>{_BRACKETED}|{_NUMBER}(?=\s))\s*)?"
# A name may contain an arrow (NLTK makes `X|<-RRB->`), so an arrow between spaces counts before one without.
_SPACED = re.compile(rf"{_FRONT}(?P<lhs>\S+)\s+(?P<arrow>{ARROW.pattern})(?!\S)\s*(?P<rest>.*)")
_TIGHT = re.compile(rf"{_FRONT}(?P<lhs>\S+?)\s*(?P<arrow>{ARROW.pattern})\s*(?P<rest>.*)")
# a token in quotes inside a name: `Det'dog'`, but neither the primes of N' nor the quotes of NLTK's `S|<''-VP>`
_INNER = r"(?<!')'(?!')[^'\s]+'(?!')|(?<!\")\"(?!\")[^\"\s]+\"(?!\")"
_LEXEME = re.compile(
    rf"\s*(?:(?P<bracketed>{_BRACKETED})|(?P<token>\"[^\"]+\"|'[^']+')|(?P<bar>\|)"
    rf"|(?P<number>{_NUMBER})(?=[\s|]|$)|(?P<name>\S(?:(?!{_BRACKETED}|{_INNER})\S)*))"
)
_HASH_WEIGHT = re.compile(rf"#\s*(?P<number>{_NUMBER})\s*(?=[|#]|$)")
_PRINTED = re.compile(r"Grammar with [\d,]+ productions? \(start state = (.+)\)")  # how NLTK prints a grammar
_WAYS = "write it as [0.5], after #, or as the last word, or in front of the rule"


class Rule(NamedTuple):
    """One rule before the grammar is put together, its weight not normalized."""

    line: int  # of the text; 0 for a rule that comes from no text
    lhs: str
    rhs: tuple[tuple[str, bool], ...]  # (name, whether it is a token)
    weight: float


class RuleText(NamedTuple):
    """What a text holds: at most two names on each right side."""

    rules: list[Rule]
    start: str
    notes: list[str]  # how the text was read, where that is not one of the two forms that isoloss writes


class _Alternative(NamedTuple):
    """A right side as it is written, its weight not taken off."""

    line: int
    lhs: str
    front: str | None  # the weight in front of the line
    parts: list[tuple[str, str]]  # (kind of lexeme, text)


def read_rules(text: str, source: str) -> RuleText:
    """Return the rules in a text, and its start symbol (see `isoloss.lab.languages._pcfg.grammar.parse_grammar`)."""
    lines, start = _header(_rule_lines(text, source), source)
    if not lines:
        raise IsolossError(f"{source} holds no rules: it is empty, or all of it is comments")
    notes: list[str] = []
    with_arrow = any(_SPACED.match(line) or _TIGHT.match(line) for _, line in lines)
    rules = (_read_arrows if with_arrow else _read_plain)(lines, source, notes)
    return RuleText(_split_long(rules, notes), start or rules[0].lhs, notes)


def location(source: str, rule: Rule | _Alternative) -> str:
    """Return where a rule stands, for an error."""
    return f"{source}, line {rule.line}" if rule.line else source


def numbers_only(names: Sequence[str]) -> bool:
    """Return whether all names are numbers, so that one cannot tell at which end of a plain rule line the weight is."""
    return all(re.fullmatch(_NUMBER, name) for name in names)


def is_plain_name(name: str) -> bool:
    """Return whether a symbol can stand as it is in a rule with an arrow."""
    match = _LEXEME.fullmatch(name)
    return bool(match and match.lastgroup in ("name", "number") and (name == "#" or not name.startswith("#")))


def _rule_lines(text: str, source: str) -> list[tuple[int, str]]:
    """Return (number, line) without comments and empty lines; a line that begins with | goes on with the rule above."""
    lines: list[tuple[int, str]] = []
    continued = False
    # Not splitlines(), which also splits at characters that tokens may hold, such as U+2028; and Windows puts a byte
    # order mark in front.
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = raw.strip()
        # A treebank has a tag #, whose rules are no comments.
        if not line or (line.startswith("#") and not re.match(rf"#\s+{ARROW.pattern}.*[\d\])]$", line)):
            continue
        if lines and (continued or line.startswith("|")):
            lines[-1] = lines[-1][0], f"{lines[-1][1]} {line}"
        else:
            lines.append((number, line))
        if continued := line.endswith("\\"):
            lines[-1] = lines[-1][0], lines[-1][1][:-1].rstrip()
    if continued:
        raise IsolossError(f"{source}, line {lines[-1][0]}: the line is continued by a backslash, but nothing follows")
    return lines


def _header(lines: list[tuple[int, str]], source: str) -> tuple[list[tuple[int, str]], str]:
    """Return the lines that are rules, and the start symbol that another line names, or ""."""
    start, rules = "", []
    for index, (number, line) in enumerate(lines):
        if line.startswith("%") and not _SPACED.match(line):
            directive = re.fullmatch(r"%\s*start\s+(\S+)", line)
            if not directive:
                raise IsolossError(f"{source}, line {number}: expected `%start SYMBOL`, found {line!r}")
            start = directive[1]
        elif index == 0 and (printed := _PRINTED.fullmatch(line)):
            start = printed[1]
        elif index == 0 and len(lines) > 1 and line.split() == [line] and not ARROW.search(line):
            start = line
        else:
            rules.append((number, line))
    return rules, start


def _read_arrows(lines: Sequence[tuple[int, str]], source: str, notes: list[str]) -> list[Rule]:
    matches = []
    for number, line in lines:
        match = _SPACED.match(line) or _TIGHT.match(line)
        if not match:
            raise IsolossError(
                f"{source}, line {number}: expected `SYMBOL -> ...`, found {line!r} (other rules have an arrow)"
            )
        matches.append((number, match))
    # All left sides before any right side: only then is it known which unquoted names are tokens.
    symbols = {match["lhs"] for _, match in matches}
    alternatives = [
        _Alternative(number, match["lhs"], match["front"], parts)
        for number, match in matches
        for parts in _alternatives(match["rest"], symbols, f"{source}, line {number}")
    ]
    per_line: dict[int, int] = {}
    for one in alternatives:
        per_line[one.line] = per_line.get(one.line, 0) + 1
    in_quotes = any(kind == "token" for one in alternatives for kind, _ in one.parts)
    rules, kinds = [], dict[str, None]()
    sums_to_one = dict[str, bool]()
    for one in alternatives:
        if one.front and per_line[one.line] > 1:
            raise IsolossError(
                f"{location(source, one)}: the weight {one.front} stands in front of {per_line[one.line]} right sides; "
                "write one rule a line, or each right side's weight in brackets after it"
            )
        weight, names, kind = _weigh(one, source)
        rhs = tuple(_named(text, kind, symbols, in_quotes=in_quotes) for kind, text in names)
        if not rhs or ("", True) in rhs:
            raise IsolossError(
                f"{location(source, one)}: a right side of {one.lhs} {'has an empty token' if rhs else 'is empty'}; "
                "it must hold symbols or tokens"
            )
        kinds[kind] = None
        sums_to_one[one.lhs] = sums_to_one.get(one.lhs, True) and kind == "in brackets"
        rules.append(Rule(one.line, one.lhs, rhs, weight))
    if not in_quotes:
        tokens = dict.fromkeys(name for rule in rules for name, is_token in rule.rhs if is_token)
        notes.append(f"nothing stands in quotes, so that names without a rule are tokens: {first_of(list(tokens))}")
    if list(kinds) != ["in brackets"]:
        notes.append(f"weights stand {' or '.join(kinds)}")
    _check_sums(rules, sums_to_one, source, notes)
    return rules


def _alternatives(text: str, symbols: set[str], where: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the lexemes of each right side in what follows an arrow."""
    parts: list[tuple[str, str]] = []
    position = 0
    while match := _LEXEME.match(text, position):
        kind, lexeme = match.lastgroup or "", match[0].strip()
        position = match.end()
        if kind == "bar":
            yield parts
            parts = []
        elif lexeme.startswith("#") and kind == "name" and lexeme not in symbols:
            # A comment, or the weight. Behind a weight in brackets, `# 0.5` is a comment, too.
            weight = _HASH_WEIGHT.match(text, match.start("name"))
            if not weight or (parts and parts[-1][0] == "bracketed"):
                break
            if len(parts) > 1 and parts[-1][0] == "number":
                raise IsolossError(
                    f"{where}: two numbers could be the weight, {parts[-1][1]} and the one after #; write the weight "
                    "in brackets, or the token in quotes"
                )
            parts.append(("after #", weight["number"]))
            position = weight.end()
        else:
            parts.append((kind, lexeme))
    yield parts


def _weigh(one: _Alternative, source: str) -> tuple[float, list[tuple[str, str]], str]:
    """Return the weight of a right side, the lexemes without it, and in words where it stands."""
    where, parts = location(source, one), list(one.parts)
    last = parts[-1][0] if parts else ""
    text = "".join(f" {lexeme}" for _, lexeme in parts)
    if one.front:
        if last in ("bracketed", "after #", "number"):
            raise IsolossError(
                f"{where}: the rule has a weight in front, {one.front}, and a number at its end, {parts[-1][1]}; leave "
                "one out, or write it in quotes if it is a token"
            )
        number, kind = one.front.strip("[]() "), "in front"
    elif last in ("bracketed", "after #", "number"):
        number = parts.pop()[1].strip("[]() ")
        kind = {"bracketed": "in brackets", "number": "as the last word"}.get(last, last)
    else:
        raise IsolossError(f"{where}: the right side `{one.lhs} ->{text}` has no weight; {_WAYS}")
    if any(kind in ("bracketed", "after #") for kind, _ in parts):
        raise IsolossError(f"{where}: the right side `{one.lhs} ->{text}` has two weights; write | between right sides")
    return _weight(number, where), parts, kind


def _named(text: str, kind: str, symbols: set[str], *, in_quotes: bool) -> tuple[str, bool]:
    if kind == "token":
        return text[1:-1], True
    if text in ("''", '""') and text not in symbols:
        return "", True
    # One quoted token anywhere means that the file quotes its tokens: then an unquoted name without rules is a mistake,
    # and is reported as one.
    return text, not in_quotes and text not in symbols


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise IsolossError(f"{where}: the weight {text!r} is not a number") from None
    if not 0 <= weight <= LARGEST_WEIGHT:
        log = "; if these are logarithms, write their exponentials" if weight < 0 else ""
        raise IsolossError(f"{where}: the weight is {text}; it must be at least 0 and at most {LARGEST_WEIGHT:g}{log}")
    return weight


def _read_plain(lines: Sequence[tuple[int, str]], source: str, notes: list[str]) -> list[Rule]:
    """Return the rules of lines `LHS RHS ... weight`, or `weight LHS RHS ...` if more begin than end with a number."""
    fields = [(number, line.split()) for number, line in lines]
    first = sum(numbers_only(parts[:1]) for _, parts in fields)
    last = sum(numbers_only(_without_comment(parts)[-1:]) for _, parts in fields)
    if first == last == len(lines):
        raise IsolossError(
            f"{source}, line {lines[0][0]}: the rules begin and end with a number, and either could be the weight; "
            "write them with an arrow, `LHS -> RHS [weight]`"
        )
    in_front = first > last
    form = "weight LHS RHS ..." if in_front else "LHS RHS ... weight"
    rows: list[tuple[int, float, list[str]]] = []
    for number, parts in fields:
        words = parts[: _comment(parts)] if in_front else _without_comment(parts)
        if len(words) < 3:
            raise IsolossError(
                f"{source}, line {number}: a rule is {form}, 3 or more fields; this line has {len(words)}"
            )
        where = f"{source}, line {number}"
        weight = _weight(words[0] if in_front else words[-1], where)
        rows.append((number, weight, words[1:] if in_front else words[:-1]))
    if in_front:
        notes.append(f"a line is {form}, and names without a rule of their own are tokens")
    symbols = {names[0] for _, _, names in rows}
    return [
        Rule(number, names[0], tuple((name, name not in symbols) for name in names[1:]), weight)
        for number, weight, names in rows
    ]


def _comment(parts: list[str]) -> int:
    """Return the index of the word that a comment begins at."""
    return next((index for index, word in enumerate(parts) if word.startswith("#")), len(parts))


def _without_comment(parts: list[str]) -> list[str]:
    """Return the fields of `LHS RHS ... weight` without a comment behind the weight; elsewhere, # is a name."""
    end = _comment(parts)
    return parts[:end] if end > 2 and numbers_only(parts[end - 1 : end]) else parts


def _split_long(rules: list[Rule], notes: list[str]) -> list[Rule]:
    """Return rules of at most two names on the right; of a longer side, all but the first become a symbol of their own.

    A -> B C D becomes A -> B A|<C-D> and A|<C-D> -> C D, which is certain, so that all probabilities stay.
    """
    taken = {rule.lhs for rule in rules} | {name for rule in rules for name, _ in rule.rhs}
    names: dict[tuple[tuple[str, bool], ...], str] = {}
    out: list[Rule] = []
    for rule in rules:
        lhs, rhs, weight = rule.lhs, rule.rhs, rule.weight
        while len(rhs) > 2:
            rest = rhs[1:]
            is_new = rest not in names
            if is_new:
                # As NLTK's chomsky_normal_form names them.
                name = f"{rule.lhs}|<{'-'.join(name for name, _ in rest)}>"
                while name in taken:
                    name += "_"
                taken.add(name)
                names[rest] = name
            out.append(Rule(rule.line, lhs, (rhs[0], (names[rest], False)), weight))
            # Its rules are there: a suffix that several rules share gets one symbol.
            if not is_new:
                break
            lhs, rhs, weight = names[rest], rest, 1.0
        else:
            out.append(Rule(rule.line, lhs, rhs, weight))
    long = sum(len(rule.rhs) > 2 for rule in rules)
    if long:
        what = "1 rule with a right side longer than two is" if long == 1 else f"{long:,} longer right sides are"
        notes.append(f"{what} split in two with symbols such as {next(iter(names.values()))}")
    return out


def _check_sums(rules: Sequence[Rule], sums_to_one: dict[str, bool], source: str, notes: list[str]) -> None:
    """Refuse bracketed probabilities that NLTK refuses, for a sum that is not 1 is a slip; note other weights' sums."""
    by_symbol: dict[str, list[Rule]] = {}
    for rule in rules:
        by_symbol.setdefault(rule.lhs, []).append(rule)
    others = []
    for lhs, of_symbol in by_symbol.items():
        total = math.fsum(rule.weight for rule in of_symbol)
        if abs(total - 1) < _NLTK_TOLERANCE:
            continue
        if sums_to_one[lhs]:
            raise IsolossError(
                f"{location(source, of_symbol[0])}: the probabilities of {lhs} add up to {total:.6g}; in brackets they "
                "must add up to 1"
            )
        others.append(f"{lhs} ({total:.6g})")
    if others:
        notes.append(f"weights that do not add up to 1 are divided by their sum: of {first_of(others)}")


def first_of(names: Sequence[Any]) -> str:
    """Return the first names of many, and how many more there are."""
    rest = len(names) - NAMED
    return ", ".join(map(str, names[:NAMED])) + (f" and {rest:,} more" if rest > 0 else "")
