"""Random levelled grammars: symbols of one level split into pairs of the next, symbols of the lowest emit tokens."""

from __future__ import annotations

import math

import numpy as np

from isoloss.errors import IsolossError
from isoloss.languages.config import PCFGConfig
from isoloss.languages.pcfg.grammar import Grammar, Rule, build_grammar
from isoloss.seeds import derive

MAX_LEVELS = 10  # sentences of 1024 tokens; the exact algorithms take time cubic in the length


def random_grammar(config: PCFGConfig) -> Grammar:
    """Return the grammar that `config` describes (see `PCFG.random`).

    Raises:
        IsolossError: A number in `config` allows no such grammar.
    """
    _check(config)
    rng = np.random.default_rng(derive(config.seed, "pcfg"))
    size, vocab_size = config.symbols_per_level, config.vocab_size
    names = [[f"L{level}.{index}" for index in range(size)] for level in range(config.levels + 1)]
    tokens = [f"w{index}" for index in range(vocab_size)]
    rules: list[Rule] = []

    def add(lhs: str, rhs: list[tuple[tuple[str, bool], ...]], share: float) -> None:
        probabilities = share * rng.dirichlet(np.ones(len(rhs)))
        rules.extend(Rule(0, lhs, right, float(p)) for right, p in zip(rhs, probabilities, strict=True))

    add("S", [((name, False),) for name in names[0]], 1.0)
    for level in range(config.levels):
        below = names[level + 1]
        first_children = rng.permutation(size)  # dealt one to each symbol: every symbol below is used
        for index, lhs in enumerate(names[level]):
            first = int(first_children[index]) * size + int(rng.integers(size))
            others = [int(code) for code in rng.permutation(size * size) if code != first]
            pairs = [first, *others[: config.rules_per_symbol - 1]]
            splits = [((below[code // size], False), (below[code % size], False)) for code in pairs]
            add(lhs, list(splits), 1.0 - config.stop_probability)
            if config.stop_probability > 0:
                few = rng.permutation(vocab_size)[: config.rules_per_symbol]
                add(lhs, [((tokens[token], True),) for token in few], config.stop_probability)
    emitted = min(vocab_size, max(config.rules_per_symbol, math.ceil(2 * vocab_size / size)))
    dealt = rng.permutation(vocab_size)  # every token is emitted by the symbol that it is dealt to
    for index, lhs in enumerate(names[config.levels]):
        own = dealt[index::size]
        others_ = rng.permutation(np.setdiff1d(dealt, own))[: emitted - len(own)]
        add(lhs, [((tokens[token], True),) for token in (*own, *others_)], 1.0)
    return build_grammar(rules, start="S", source="random grammar")


def _check(config: PCFGConfig) -> None:
    if not 1 <= config.levels <= MAX_LEVELS:
        raise IsolossError(f"a random grammar has 1 to {MAX_LEVELS} levels, not {config.levels}")
    for field in ("symbols_per_level", "rules_per_symbol", "vocab_size"):
        if getattr(config, field) < 1:
            raise IsolossError(f"{field} is {getattr(config, field)}; it must be at least 1")
    pairs = config.symbols_per_level**2
    if config.rules_per_symbol > pairs:
        raise IsolossError(
            f"rules_per_symbol is {config.rules_per_symbol}, but {config.symbols_per_level} symbols a level make only "
            f"{pairs} different pairs; take fewer rules or more symbols"
        )
    if not 0 <= config.stop_probability < 1:
        raise IsolossError(f"stop_probability is {config.stop_probability}; it must be at least 0 and below 1")
