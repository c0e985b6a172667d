"""Random layered grammars: symbols of one level split into pairs of the next, symbols of the lowest emit tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from isoloss.config import check
from isoloss.languages.config import PCFGConfig
from isoloss.languages.pcfg.grammar import Grammar, build_grammar
from isoloss.languages.pcfg.rules import Rule
from isoloss.languages.redrawing import Redrawing
from isoloss.seeds import derive


def random_grammar(config: PCFGConfig) -> Grammar:
    """Return the grammar that `config` describes (see `PCFGConfig`).

    Raises:
        IsolossError: A number in `config` allows no such grammar.
    """
    check(config)
    rng = np.random.default_rng(derive(config.seed, "pcfg"))
    size, vocab_size = config.symbols_per_level, config.vocab_size
    names = [[f"L{level}.{index}" for index in range(size)] for level in range(config.levels + 1)]
    tokens = [f"w{index}" for index in range(vocab_size)]
    rules: list[Rule] = []

    def add(lhs: str, rhs: list[tuple[tuple[str, bool], ...]], total: float) -> None:
        probabilities = total * rng.dirichlet(np.ones(len(rhs)))
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


def redrawn_grammar(grammar: Grammar, redrawing: Redrawing) -> Grammar:
    """Return a grammar of the same rules, of which some symbols have other probabilities (see `PCFG.redrawn`)."""
    owners = {kind: getattr(grammar, kind)[:, 0] for kind in ("binary", "unary", "emission")}
    counts = [np.bincount(owner, minlength=len(grammar.symbols)) for owner in owners.values()]
    chosen = redrawing.choose(np.any([count > 1 for count in counts], axis=0))
    drawn = {}
    for kind, owner in owners.items():
        probs = getattr(grammar, f"{kind}_probs").copy()
        for symbol in chosen:
            own = owner == symbol
            probs[own] = redrawing.draw(probs[own])
        probs.flags.writeable = False
        drawn[f"{kind}_probs"] = probs
    return dataclasses.replace(grammar, **drawn)
