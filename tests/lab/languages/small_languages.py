"""Small languages of every kind, each with the probability of every sentence by another way: loops in plain Python."""

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import torch
from slow_grammar import SlowGrammar, random_rules
from teacher_models import build, enumerated

from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import DyckConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.hidden_bracket import HiddenBracket
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.lab.languages.teacher import Teacher

TINY = math.log(torch.finfo(torch.float64).tiny)
# arithmetic as in textbooks, in the form in which treebank grammars are published; of several lengths
ARITHMETIC = "E -> E P [0.3] | 'x' [0.5] | 'y' [0.2]\nP -> O E [1.0]\nO -> '+' [0.7] | '*' [0.3]"
# unary chains, ambiguous, of every length
CHAINS = "S -> S S [0.3] | A S [0.2] | 'a' [0.25] | 'b' [0.25]\nA -> 'a' [0.3] | 'c' [0.4] | S [0.3]"
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
KINDS_OF_TEACHER = ("gpt2", "opt", "centered", "llama", "windowed")


# --- hidden Markov models that no config draws


def sparse(seed, size=4, tokens=5, length=4):
    """An HMM with many zeros, impossible sentences and, among others, a state that cannot come first."""
    rng = np.random.default_rng(seed)

    def table(rows, columns):
        found = rng.dirichlet(np.ones(columns), size=rows) * (rng.random((rows, columns)) < 0.6)
        found[:, rng.integers(columns)] += 0.1
        return found / found.sum(axis=1, keepdims=True)

    return HMM(table(1, size)[0], table(size, size), table(size, tokens), length)


def scattered():
    """Two parts whose states and tokens are not consecutive, with a token in common and one that nothing emits."""
    transition = np.zeros((5, 5))
    transition[np.ix_([0, 2, 4], [0, 2, 4])] = [[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]
    transition[np.ix_([1, 3], [1, 3])] = [[0.5, 0.5], [0.1, 0.9]]
    emission = np.zeros((5, 6))
    emission[np.ix_([0, 2, 4], [0, 3, 5])] = [[0.2, 0.3, 0.5], [0.7, 0.3, 0.0], [0.1, 0.1, 0.8]]
    emission[np.ix_([1, 3], [1, 3])] = [[0.4, 0.6], [0.9, 0.1]]
    return HMM([0.1, 0.2, 0.3, 0.4, 0.0], transition, emission, 4)


def unreachable():
    """A part that no sentence starts in."""
    return HMM([1.0, 0.0], np.eye(2), [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], 3)


def idle():
    """One part, and a token that none of its states emits."""
    return HMM([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.0, 0.5], [0.3, 0.0, 0.7]], 4)


# --- the probability of each sentence: of all that are possible, by their tokens


def by_rules(language):
    """Of a grammar, by recursion over its rules."""
    slow = SlowGrammar(language.grammar)
    found = {x: p for x in slow.sentences(language.max_length) if (p := slow.inside(0, x)) > 0}
    total = math.fsum(found.values())
    return {x: p / total for x, p in found.items()}


def nesting_probability(words, config):
    """Pr(the brackets) without the limit on their number, by a walk with a stack; 0 where they do not nest."""
    opened, result, previous_open = [], 1.0, True
    for word in words:
        room = len(opened) < config.max_depth
        if word in list(CLOSING)[: config.kinds]:
            if not room:
                return 0.0
            if previous_open and opened:  # the group holds others
                result *= config.nest_probability
            elif not previous_open:  # a group follows another
                result *= config.continue_probability
            opened.append(word)
            result /= config.kinds
            previous_open = True
        else:
            if not opened or CLOSING[opened[-1]] != word:
                return 0.0
            if previous_open:
                result *= 1.0 if not room else 1 - config.nest_probability
            else:
                result *= 1 - config.continue_probability  # the last group of its row
            opened.pop()
            previous_open = False
    return 0.0 if opened else result * (1 - config.continue_probability)


def by_nesting(language):
    """Of nested brackets: the walk's, times the shares of the tokens that a bracket is written as."""
    grammar, config = language.grammar, language.config
    shares = dict(zip(grammar.emission[:, 1].tolist(), grammar.emission_probs.tolist(), strict=True))
    for bracket in {name[0] for name in language.vocabulary}:
        own = [shares[token] for token, name in enumerate(language.vocabulary) if name[0] == bracket]
        assert math.isclose(sum(own), 1, rel_tol=1e-12)
    found = {}
    for length in range(2, config.max_length + 1, 2):
        for x in itertools.product(range(language.vocab_size), repeat=length):
            if p := nesting_probability([language.vocabulary[token][0] for token in x], config):
                found[x] = p * math.prod(shares[token] for token in x)
    total = math.fsum(found.values())
    return {x: p / total for x, p in found.items()}


def joint(language, length):
    """Pr(states, tokens) of a hidden Markov model, axes z_1..z_T x_1..x_T: a product for each sequence of states."""
    size, vocab = language.emission.shape
    out = np.zeros([size] * length + [vocab] * length)
    for states in itertools.product(range(size), repeat=length):
        p = language.initial[states[0]]
        for a, b in itertools.pairwise(states):
            p *= language.transition[a, b]
        tokens = np.array(p)
        for state in states:
            tokens = np.multiply.outer(tokens, language.emission[state])
        out[states] = tokens
    return out


def by_states(language):
    """Of a hidden Markov model, given the length, of every length."""
    found = {}
    for length in range(1, language.max_length + 1):
        p = joint(language, length).sum(axis=tuple(range(length)))
        found |= {tuple(x): float(p[tuple(x)]) for x in np.argwhere(p > 0).tolist()}
    return found


def by_counting(language):
    """Of as many of one bracket as of the other: all alike."""
    half = language.max_length // 2
    return {x: 1 / math.comb(2 * half, half) for x in itertools.product((0, 1), repeat=2 * half) if sum(x) == half}


def by_hiding(language):
    """Of one hidden bracket: of each string, place and sign, and of the answer."""
    length, flip = language.config.length, language.config.flip
    found = Counter()
    strings = [s for s in itertools.product((2, 3), repeat=length) if s.count(2) == s.count(3)]
    for string, place, sign, wrong in itertools.product(strings, range(length), (4, 5), (False, True)):
        sentence = (*string[:place], sign, *string[place + 1 :], (string[place] - 2) ^ wrong)
        found[sentence] += (flip if wrong else 1 - flip) / (len(strings) * length * 2)
    return {x: p for x, p in found.items() if p}


def by_model(language):
    """Of a teacher, given the length, of every length: one pass of the whole model over each sentence."""
    logs = enumerated(language.model_of_the_test, language.tokens, language.max_length)[1]
    found = {}
    for length in range(language.max_length, 0, -1):
        strings = itertools.product(range(language.vocab_size), repeat=length)
        found |= {x: float(logs[x].exp()) for x in strings}
        logs = logs.logsumexp(dim=-1)
    return found


def framed(inner):
    """The truth of a language between [CLS] and [SEP], of the inner one's."""

    def truth(language):
        own = inner(language.inner)
        lengths = language.inner.length_probs
        return {(language.cls_id, *x, language.sep_id): p for x, p in own.items() if lengths[len(x)] > 0}

    return truth


def taught(kind):
    model = build(kind)
    language = Teacher(model, (5, 2, 8), 4)
    language.model_of_the_test = model
    return language


DYCK = {
    "dyck": DyckConfig(kinds=2, max_depth=2, max_length=6, continue_probability=0.3, nest_probability=0.7),
    "dyck flat": DyckConfig(kinds=2, max_depth=1, max_length=4),
    "dyck deep": DyckConfig(kinds=1, max_depth=4, max_length=8, continue_probability=0.2),
    "dyck always nested": DyckConfig(kinds=1, max_depth=2, max_length=8, nest_probability=1.0),
    "dyck of one group": DyckConfig(kinds=2, max_depth=3, max_length=6, continue_probability=0.0),
    "dyck of words": DyckConfig(kinds=1, max_depth=2, max_length=4, tokens_per_bracket=2, seed=3),
}
LAYERED = {"levels": 2, "symbols_per_level": 3, "rules_per_symbol": 3, "vocab_size": 5}
STOPS = {"levels": 2, "symbols_per_level": 2, "rules_per_symbol": 3, "vocab_size": 3, "stop_probability": 0.3}
# each: how it is made, and how its probabilities are found in another way
MAKERS = {
    "grammar": (lambda: PCFGConfig(**LAYERED).build(), by_rules),
    "grammar that stops": (lambda: PCFGConfig(**STOPS).build(), by_rules),
    "grammar that recurs": (lambda: PCFG.from_text(random_rules(7), max_length=5), by_rules),
    "grammar of unary rules": (lambda: PCFG.from_text(random_rules(21, symbols=5), max_length=5), by_rules),
    "arithmetic": (lambda: PCFG.from_text(ARITHMETIC, max_length=5), by_rules),
    "chains": (lambda: PCFG.from_text(CHAINS, max_length=6), by_rules),
    **{name: (config.build, by_nesting) for name, config in DYCK.items()},
    "hmm": (lambda: HMMConfig(states=3, blocks=1, vocab_size=4, length=4, seed=1).build(), by_states),
    "hmm of blocks": (lambda: HMMConfig(states=5, blocks=3, vocab_size=6, length=4).build(), by_states),
    "hmm that mixes": (
        lambda: HMMConfig(states=4, blocks=2, vocab_size=5, length=4, mixing_weight=0.2).build(),
        by_states,
    ),
    "hmm of few": (lambda: sparse(0), by_states),
    "hmm of fewer": (lambda: sparse(3, tokens=3), by_states),
    "hmm scattered": (scattered, by_states),
    "hmm unreachable": (unreachable, by_states),
    "hmm with an idle token": (idle, by_states),
    "brackets": (lambda: Brackets(6), by_counting),
    "hidden bracket": (lambda: HiddenBracket(4, flip=0.2), by_hiding),
    "hidden bracket, certain": (lambda: HiddenBracket(4, flip=0.0), by_hiding),
    "framed grammar": (lambda: WithSpecialTokens(PCFG.from_text(CHAINS, max_length=4)), framed(by_rules)),
    "framed dyck": (lambda: WithSpecialTokens(DYCK["dyck"].build()), framed(by_nesting)),
    "framed hmm": (
        lambda: WithSpecialTokens(HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5).build()),
        framed(by_states),
    ),
    "framed brackets": (lambda: WithSpecialTokens(Brackets(6)), framed(by_counting)),
    **{f"teacher {kind}": (lambda kind=kind: taught(kind), by_model) for kind in KINDS_OF_TEACHER},
}
NAMES = list(MAKERS)


@cache
def language_of(name):
    return MAKERS[name][0]()


@cache
def truth_of(name):
    """{sentence: the probability that `log_prob` is the logarithm of}, of those above 0."""
    return MAKERS[name][1](language_of(name))


def drawn_truth_of(name):
    """{sentence: probability} of what is drawn: sentences of a length that the language has."""
    lengths = language_of(name).length_probs
    return {x: p for x, p in truth_of(name).items() if lengths[len(x)] > 0}


def tolerance_of(name):
    """The norms of Llama and its kin run in float32."""
    return 5e-5 if name in ("teacher llama", "teacher windowed") else 1e-9


def as_batch(rows, padding=99):
    """Rows of tokens as (n, T) and lengths, padded with what is no token."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) for row in rows])


def rows_of(sentences):
    return [tuple(x[:n]) for x, n in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)]


def p_value(counts, expected):
    """Pearson's chi-square test; outcomes expected fewer than 5 times are put together."""
    counts, expected = np.array(counts, dtype=float), np.array(expected, dtype=float)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    if rare.any():
        counts, expected = (np.append(part[~rare], part[rare].sum()) for part in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1])) if len(counts) > 1 else 1.0
