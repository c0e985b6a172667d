"""Entropies against enumeration of all sentences, and of all derivations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from slow_grammar import SlowGrammar, random_rules

from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages._pcfg.grammar import parse_grammar
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import DyckConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG, derivation_sums

AMBIGUOUS = "S S S 0.3\nS A A 0.3\nS a 0.2\nS b 0.2\nA a 0.8\nA A B 0.2\nB b 0.9\nB c 0.1"


def enumerated(possible, probability):
    """H(x), H(length), and the mean entropy of a hidden token, by substitution, of a language of few sentences."""
    probs = {sentence: p for sentence in possible if (p := probability(sentence)) > 0}
    assert math.isclose(math.fsum(probs.values()), 1, rel_tol=1e-9)
    tokens = sorted({token for sentence in probs for token in sentence})
    by_length, masked = {}, 0.0
    for sentence, p in probs.items():
        by_length[len(sentence)] = by_length.get(len(sentence), 0) + p
        for position in range(len(sentence)):
            others = [probs.get((*sentence[:position], c, *sentence[position + 1 :]), 0) for c in tokens]
            masked += p / len(sentence) * sum(-q / sum(others) * math.log(q / sum(others)) for q in others if q)
    sentence = -math.fsum(p * math.log(p) for p in probs.values())
    return sentence, -math.fsum(p * math.log(p) for p in by_length.values()), masked


def enumerated_grammar(language):
    slow = SlowGrammar(language.grammar)
    possible = list(slow.sentences(language.max_length))
    total = math.fsum(slow.inside(0, sentence) for sentence in possible)
    return enumerated(possible, lambda sentence: slow.inside(0, sentence) / total)


def nested(kinds, depth, length):
    """All rows of nested brackets of at most `length` tokens and `depth` levels, as tuples of (kind, opens)."""
    rows = {()}
    while True:
        groups = {((k, True), *row, (k, False)) for row in rows for k in range(kinds) if deep(row) < depth}
        more = rows | {g + row for g in groups for row in rows if len(g) + len(row) <= length}
        if more == rows:
            return rows - {()}
        rows = more


def deep(row):
    level = itertools.accumulate(1 if opens else -1 for _, opens in row)
    return max(level, default=0)


@pytest.mark.parametrize("options", [{"kinds": 1, "tokens_per_bracket": 2}, {"kinds": 2, "tokens_per_bracket": 1}])
def test_dyck_against_all_sentences(options):
    config = DyckConfig(max_depth=2, max_length=6, continue_probability=0.3, nest_probability=0.6, seed=1, **options)
    language = config.build()
    spelled = {"()[]"[i]: (i // 2, i % 2 == 0) for i in range(4)}
    written = {bracket: [] for bracket in spelled.values()}
    for token, name in enumerate(language.vocabulary):
        written[spelled[name[0]]].append(token)
    possible = [
        tokens for row in nested(config.kinds, 2, 6) for tokens in itertools.product(*(written[b] for b in row))
    ]
    probs = {x: float(language.log_prob(torch.tensor([x]), torch.tensor([len(x)])).exp()) for x in possible}
    sentence, length, masked = enumerated(possible, probs.get)
    found = languages.entropy(language)
    assert found.sentence.value == pytest.approx(sentence, rel=1e-12)
    assert found.length.value == pytest.approx(length, rel=1e-12)
    assert found.given_length.value == pytest.approx(sentence - length, rel=1e-12)
    assert found.masked_token.value == pytest.approx(masked, rel=1e-12, abs=1e-15)
    assert (masked > 0.1) == (config.tokens_per_bracket > 1)
    assert {estimate.method for estimate in (found.sentence, found.given_length, found.masked_token)} == {"exact"}
    assert found.sentence.stderr == found.masked_token.stderr == 0


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


@pytest.mark.parametrize("length", [2, 8])
def test_brackets_against_all_sentences(length):
    possible = list(itertools.product((0, 1), repeat=length))
    ways = sum(sum(x) == length // 2 for x in possible)
    sentence, of_length, masked = enumerated(possible, lambda x: (sum(x) == length // 2) / ways)
    found = languages.entropy(Brackets(length))
    assert found.sentence.value == pytest.approx(sentence, rel=1e-12)
    assert (of_length, masked) == (pytest.approx(0, abs=1e-13), 0)
    assert (found.length.value, found.masked_token.value) == (0, 0)
    assert math.copysign(1, found.length.value) == 1
    assert found.sentence.samples == 0


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


def test_an_ambiguous_grammar_against_all_sentences():
    """Its derivations have more entropy than its sentences, and are not what is given."""
    language = PCFG.from_text(AMBIGUOUS, max_length=6)
    sentence, length, masked = enumerated_grammar(language)
    found = languages.entropy(language, num_sentences=20_000)
    assert found.length.value == pytest.approx(length, rel=1e-12)
    assert (found.length.stderr, found.length.method) == (0, "exact")
    for estimate, truth in (
        (found.sentence, sentence),
        (found.given_length, sentence - length),
        (found.masked_token, masked),
    ):
        assert 0 < estimate.stderr < 0.02 * truth
        assert abs(estimate.value - truth) < 4 * estimate.stderr
        assert estimate.samples == estimate.num_predictions == 20_000
        assert "Monte Carlo" in estimate.method
    assert found.sentence.value == found.length.value + found.given_length.value
    assert found.sentence.stderr == found.given_length.stderr
    p, s = derivation_sums(language.grammar, 6)
    of_derivations = s.sum() / p.sum() + math.log(p.sum())
    assert of_derivations > found.sentence.value + 10 * found.sentence.stderr


def test_a_hidden_markov_model_against_all_sentences():
    language = HMMConfig(states=3, blocks=1, vocab_size=3, length=4, seed=1).build()
    possible = list(itertools.product(range(3), repeat=4))
    probs = language.log_prob(torch.tensor(possible), torch.full((81,), 4)).exp().tolist()
    sentence, length, masked = enumerated(possible, dict(zip(possible, probs, strict=True)).get)
    found = languages.entropy(language, num_sentences=10_000)
    assert found.length.value == 0
    assert length == pytest.approx(0, abs=1e-12)
    for estimate, truth in ((found.sentence, sentence), (found.masked_token, masked)):
        assert 0 < estimate.stderr < 0.01 * truth
        assert abs(estimate.value - truth) < 4 * estimate.stderr


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


def test_as_json():
    document = languages.entropy(Brackets(4)).to_dict()
    assert set(document) == {"sentence", "length", "given_length", "masked_token"}
    assert document["sentence"]["unit"] == "nats per sentence"
    assert document["masked_token"]["unit"] == "nats per masked token"


def test_what_cannot_be_estimated():
    with pytest.raises(IsolossError, match="num_sentences is 1; an estimate with an error needs at least 2"):
        languages.entropy(Brackets(4), num_sentences=1)
