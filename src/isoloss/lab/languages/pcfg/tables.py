"""A grammar as tables in a file, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoloss.errors import IsolossError
from isoloss.lab.languages.api import Stored
from isoloss.lab.languages.pcfg.grammar import Grammar, build_grammar, vocabulary_of
from isoloss.lab.languages.pcfg.rules import Rule

_RULES = {"binary": 3, "unary": 2, "emission": 2}  # tensors of rules and the ids in a row
_NAMES = [name for rules in _RULES for name in (rules, f"{rules}_probs")]
_TOLERANCE = 1e-6  # of a sum of probabilities, as for the rows of a hidden Markov model


def grammar_tables(grammar: Grammar, max_length: int) -> Stored:
    """Return what a file keeps of a grammar's language (see `isoloss.lab.languages.save`)."""
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
    rules.sort(key=lambda entry: entry[0])  # symbols are numbered by their first rule
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
    for called, table, dtype, shape in (
        (f"{name}_probs", probs, "float64", (size,)),
        (name, ids, "int64", (size, width)),
    ):
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
