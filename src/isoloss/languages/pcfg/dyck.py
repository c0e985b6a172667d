"""Dyck-k with a depth limit: nested brackets of k kinds, as a grammar."""

from __future__ import annotations

import math

import numpy as np

from isoloss import seeds
from isoloss.config import check
from isoloss.languages.config import DyckConfig
from isoloss.languages.entropies import derivation_sums, entropy_terms
from isoloss.languages.pcfg.grammar import Grammar, build_grammar
from isoloss.languages.pcfg.language import PCFG
from isoloss.languages.pcfg.rules import Rule

_PAIRS = ("()", "[]", "{}", "<>")  # the first kinds of bracket; further ones are numbered


class Dyck(PCFG):
    """The language of `dyck_grammar`: a `PCFG` whose entropies have a closed form."""

    @classmethod
    def from_config(cls, config: DyckConfig) -> Dyck:
        """Return the language that `config` describes."""
        return cls(dyck_grammar(config), max_length=config.max_length, config=config)

    def closed_form_entropies(self) -> tuple[float, float]:
        """Return H(sentence | length) and the entropy of one masked bracket.

        A sentence has one derivation, so that its entropy is that of its derivation. A masked bracket has the entropy
        of the tokens that it may be written as, whose mean over the kinds is exact: all kinds are equally likely.
        """
        p, s = derivation_sums(self.grammar, self.max_length)
        possible = p > 0
        weights = p[possible] / p.sum()
        given_length = math.fsum(weights * (s[possible] / p[possible] + np.log(p[possible])))
        # the symbols that emit tokens are those of the brackets: one to open and one to close each kind
        brackets = len(np.unique(self.grammar.emission[:, 0]))
        return given_length, math.fsum(entropy_terms(self.grammar.emission_probs)) / brackets


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

    Args:
        config: The numbers. Its `max_length` cuts the language and leaves the rules as they are.

    Raises:
        IsolossError: A number allows no such language.

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
    rng = np.random.default_rng(seeds.derive(config.seed, "dyck"))
    for kind in kinds:
        pair = _PAIRS[kind] if kind < len(_PAIRS) else (f"({kind}", f"){kind}")
        for symbol, bracket in zip((f"O{kind}", f"C{kind}"), pair, strict=True):
            if config.tokens_per_bracket == 1:
                add(symbol, bracket, weight=1.0, token=True)
                continue
            for index, weight in enumerate(rng.dirichlet(np.ones(config.tokens_per_bracket))):
                add(symbol, f"{bracket}.{index}", weight=float(weight), token=True)
    return build_grammar(rules, start=f"D{config.max_depth}", source="Dyck grammar")
