"""A grammar's probabilities the slow obvious way: recursion over its rules in plain Python, trees one by one."""

import itertools
import math
import random
from functools import lru_cache

import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.grammar import parse_grammar


class SlowGrammar:
    """Works on the rules as they stand, unary ones included, and shares no code with the package but the parsing."""

    def __init__(self, grammar):
        self.size, self.vocab_size = len(grammar.symbols), len(grammar.vocabulary)
        self.rules = [[] for _ in range(self.size)]  # (probability, children), a token c being -1 - c
        for ids, probs in (
            (grammar.binary.tolist(), grammar.binary_probs),
            (grammar.unary.tolist(), grammar.unary_probs),
            ([(a, -1 - c) for a, c in grammar.emission.tolist()], grammar.emission_probs),
        ):
            for (a, *children), p in zip(ids, probs.tolist(), strict=True):
                self.rules[a].append((p, tuple(children)))
        self._inside = lru_cache(maxsize=None)(self._inside)

    def inside(self, symbol, sentence):
        """Pr(symbol =>* sentence)."""
        return self._inside(symbol, tuple(sentence))

    def _inside(self, symbol, sentence):
        if symbol < 0:
            return float(sentence == (-1 - symbol,))
        total = 0.0
        for p, children in self.rules[symbol]:
            if len(children) == 1:
                total += p * self._inside(children[0], sentence)
            else:
                for cut in range(1, len(sentence)):
                    left = self._inside(children[0], sentence[:cut])
                    if left:
                        total += p * left * self._inside(children[1], sentence[cut:])
        return total

    def conditional(self, sentence, position):
        """The distribution of one token given the others: the probability of each substitution, normalized."""
        joint = [self.inside(0, (*sentence[:position], c, *sentence[position + 1 :])) for c in range(self.vocab_size)]
        return [p / sum(joint) for p in joint]

    def trees(self, symbol, sentence, start=0):
        """Yield (probability, nodes (start, stop, symbol) in preorder) of every parse."""
        for p, children in self.rules[symbol]:
            node = (start, start + len(sentence), symbol)
            if len(children) == 2:
                for cut in range(1, len(sentence)):
                    if not self.inside(children[0], sentence[:cut]) * self.inside(children[1], sentence[cut:]):
                        continue
                    for q, left in self.trees(children[0], sentence[:cut], start):
                        for r, right in self.trees(children[1], sentence[cut:], start + cut):
                            yield p * q * r, (node, *left, *right)
            elif children[0] >= 0:
                for q, below in self.trees(children[0], sentence, start):
                    yield p * q, (node, *below)
            elif tuple(sentence) == (-1 - children[0],):
                yield p, (node,)

    def log_z(self, weights, spans):
        """log of the sum over all parses of the product of their rules, the weights of their tokens and their nodes.

        By CKY in log space, for automatic differentiation.

        Args:
            weights: (T, V) the log of each token's weight at each position, -inf where it is not there.
            spans: (T, T + 1, symbols) the log of the weight of a node over start to stop - 1.
        """
        chart = {}
        order = sorted(range(self.size), key=self._height)
        for width in range(1, len(weights) + 1):
            for start in range(len(weights) - width + 1):
                stop = start + width
                for symbol in order:
                    terms = []
                    for p, children in self.rules[symbol]:
                        if len(children) == 2:
                            for cut in range(start + 1, stop):
                                pair = (start, cut, children[0]), (cut, stop, children[1])
                                if all(part in chart for part in pair):
                                    terms.append(math.log(p) + chart[pair[0]] + chart[pair[1]])
                        elif children[0] >= 0:
                            if (start, stop, children[0]) in chart:
                                terms.append(math.log(p) + chart[start, stop, children[0]])
                        elif width == 1 and weights[start, -1 - children[0]] > -math.inf:
                            terms.append(math.log(p) + weights[start, -1 - children[0]])
                    if terms:
                        chart[start, stop, symbol] = torch.stack(terms).logsumexp(0) + spans[start, stop, symbol]
        return chart[0, len(weights), 0]

    def _height(self, symbol):
        """The longest chain of unary rules below a symbol."""
        below = [children[0] for _, children in self.rules[symbol] if len(children) == 1 and children[0] >= 0]
        return 1 + max(map(self._height, below)) if below else 0

    def sentences(self, max_length):
        """All token strings, possible or not."""
        for length in range(1, max_length + 1):
            yield from itertools.product(range(self.vocab_size), repeat=length)


def random_rules(seed, *, symbols=4, tokens=3, recursive=True):
    """Rule lines of a small random grammar with unary rules; every symbol emits and is reached by the one before it."""
    rng = random.Random(seed)
    names = ["S", *(f"N{i}" for i in range(1, symbols))]
    lines = []
    for i, name in enumerate(names):
        below = names[i + 1 :]
        choices = names if recursive else below
        if below:
            lines.append(f"{name} {below[0]} {rng.choice(choices)} {rng.uniform(0.1, 1):.3f}")
        for _ in range(rng.randint(0, 3)):
            if choices:
                lines.append(f"{name} {rng.choice(choices)} {rng.choice(choices)} {rng.uniform(0.05, 0.7):.3f}")
            if below and rng.random() < 0.6:
                lines.append(f"{name} {rng.choice(below)} {rng.uniform(0.1, 1):.3f}")
        emitted = rng.sample(range(tokens), rng.randint(1, tokens))
        lines += [f"{name} t{token} {rng.uniform(0.1, 2):.3f}" for token in emitted]
    return "\n".join(lines)


def error_of(text, **options):
    """The message of the error that reading `text` raises, or None."""
    try:
        parse_grammar(text, **options)
    except IsolossError as error:
        return str(error)
    return None
