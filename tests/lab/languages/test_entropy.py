"""Entropies: sums over derivations, large languages, and errors; of small ones the contract sums over all sentences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from slow_grammar import SlowGrammar, random_rules

from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages._pcfg.grammar import parse_grammar
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import DyckConfig, PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG, derivation_sums

AMBIGUOUS = "S S S 0.3\nS A A 0.3\nS a 0.2\nS b 0.2\nA a 0.8\nA A B 0.2\nB b 0.9\nB c 0.1"


def test_dyck_of_several_kinds_and_tokens_against_its_own_sentences():
    """The kinds' tokens have different entropies, and a hidden bracket has their mean."""
    language = DyckConfig(kinds=3, tokens_per_bracket=4, max_length=12, seed=2).build()
    found = languages.entropy(language)
    tokens, lengths, _ = language.sample(20_000, generator=torch.Generator().manual_seed(0))
    surprise = -language.log_prob(tokens, lengths)
    entropies = language.conditional_entropy(tokens, lengths).sum(1) / lengths
    for values, exact in ((surprise, found.sentence), (entropies, found.masked_token)):
        stderr = float(values.std()) / 20_000**0.5
        assert 0 < stderr < 0.02 * exact.value
        assert abs(float(values.mean()) - exact.value) < 4 * stderr


def derivations(slow, symbol, length):
    """Yield the probability of every derivation of that many tokens."""
    for p, children in slow.rules[symbol]:
        if len(children) == 2:
            for cut in range(1, length):
                for q in derivations(slow, children[0], cut):
                    yield from (p * q * r for r in derivations(slow, children[1], length - cut))
        elif children[0] >= 0:
            yield from (p * q for q in derivations(slow, children[0], length))
        elif length == 1:
            yield p


@pytest.mark.parametrize("seed", range(1, 4))
def test_derivation_sums_against_all_derivations(seed):
    grammar = parse_grammar(random_rules(seed, tokens=2))
    p, s = derivation_sums(grammar, 4)
    slow = SlowGrammar(grammar)
    assert p[0] == s[0] == 0
    for length in range(1, 5):
        probs = list(derivations(slow, 0, length))
        assert p[length] == pytest.approx(math.fsum(probs), rel=1e-12)
        assert s[length] == pytest.approx(-math.fsum(q * math.log(q) for q in probs), rel=1e-12)
    assert len(grammar.unary) > 0


def test_the_standard_error_is_the_spread_over_seeds():
    language = PCFG.from_text(AMBIGUOUS, max_length=6)
    found = [languages.entropy(language, num_sentences=100, seed=seed) for seed in range(100)]
    for name in ("sentence", "masked_token"):
        values = np.array([getattr(each, name).value for each in found])
        stderr = np.mean([getattr(each, name).stderr for each in found])
        assert stderr == pytest.approx(values.std(ddof=1), rel=4 / math.sqrt(2 * 99))


def test_a_seed_decides_the_estimate_and_nothing_else_does():
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=6, stop_probability=0.3).build()
    found = languages.entropy(language, num_sentences=50, seed=1)
    assert languages.entropy(language.to(dtype=torch.float32), num_sentences=50, seed=1) == found
    assert languages.entropy(language, num_sentences=50, seed=2) != found
    # more sentences than are drawn together
    many = languages.entropy(language, num_sentences=5000, seed=1).sentence
    assert many.samples == 5000
    assert many.stderr < found.sentence.stderr / 5


def test_a_spread_of_rounding_is_none():
    """Every sentence has the same probability, up to the last digits."""
    language = HMM([0.3, 0.7], [[0.1, 0.9], [0.6, 0.4]], np.full((2, 7), 1 / 7), 5)
    found = languages.entropy(language, num_sentences=100)
    assert found.sentence.value == pytest.approx(5 * math.log(7), rel=1e-12)
    assert found.sentence.stderr == found.masked_token.stderr == 0


@pytest.mark.parametrize("stop", [0.05, 0.2, 0.3, 0.45])
def test_no_entropy_is_below_zero(stop):
    """Each length has one sentence, so that its log-probability given the length is 0 or rounding."""
    found = languages.entropy(PCFG.from_text(f"S A A {stop}\nS S A {1 - stop}\nA a 1"), num_sentences=50)
    for estimate in (found.given_length, found.masked_token):
        assert 0 <= estimate.value < 1e-14


def test_what_cannot_be_estimated():
    with pytest.raises(IsolossError, match="num_sentences is 1; an estimate with an error needs at least 2"):
        languages.entropy(Brackets(4), num_sentences=1)
