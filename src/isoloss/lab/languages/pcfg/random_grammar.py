"""Grammars made from configs: random layered ones, nested brackets, and those with other probabilities."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from isoloss.config import check
from isoloss.lab.languages.config import DyckConfig, PCFGConfig
from isoloss.lab.languages.pcfg.grammar import Grammar, build_grammar
from isoloss.lab.languages.pcfg.rules import Rule
from isoloss.lab.languages.perturbation import Perturbation
from isoloss.seeds import derive

_PAIRS = ("()", "[]", "{}", "<>")  # the first kinds of bracket; further ones are numbered


def random_grammar(config: PCFGConfig) -> Grammar:
    """Return the grammar that `config` describes (see `PCFGConfig`)."""
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


def perturbed_grammar(grammar: Grammar, perturbation: Perturbation) -> Grammar:
    """Return a grammar of the same rules, of which some symbols have other probabilities (see `PCFG.perturbed`)."""
    owners = {kind: getattr(grammar, kind)[:, 0] for kind in ("binary", "unary", "emission")}
    counts = [np.bincount(owner, minlength=len(grammar.symbols)) for owner in owners.values()]
    chosen = perturbation.choose(np.any([count > 1 for count in counts], axis=0))
    drawn = {}
    for kind, owner in owners.items():
        probs = getattr(grammar, f"{kind}_probs").copy()
        for symbol in chosen:
            own = owner == symbol
            probs[own] = perturbation.draw(probs[own])
        probs.flags.writeable = False
        drawn[f"{kind}_probs"] = probs
    return dataclasses.replace(grammar, **drawn)


def dyck_grammar(config: DyckConfig) -> Grammar:
    r"""Return Dyck-k with a depth limit as a grammar: groups of nested brackets of k kinds, at most `max_depth` deep.

    With D symbols for a row of groups and B symbols for one group, each with the depth that they may still reach::

        D_d -> B_d          1 - continue_probability       B_d -> O_i C_i    (1 - nest_probability) / k
        D_d -> B_d D_d      continue_probability           B_d -> O_i R_d,i  nest_probability / k
                                                           R_d,i -> D_(d-1) C_i

    A group of depth 1 is always `O_i C_i`, so that the limit holds exactly and the rules need no empty string: the
    language has none. Each sentence has one derivation. Where one bracket is masked, the others imply it (its kind is
    that of its partner, and which of the two it is follows from the number of each), so with `tokens_per_bracket` 1
    every full conditional has entropy 0. With more, O_i and C_i each emit one of so many tokens of their own, by
    probabilities from the flat Dirichlet distribution, and the full conditional of a bracket is that distribution.

    Example:
        >>> import torch
        >>> language = DyckConfig(kinds=1, max_depth=2, max_length=4).build()
        >>> language.vocabulary
        ('(', ')')
        >>> language.log_prob(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), torch.tensor([4, 4])).exp()
        tensor([0.2857, 0.1429], dtype=torch.float64)
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
