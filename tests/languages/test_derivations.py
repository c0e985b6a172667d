"""Sampling: the right distribution over sentences and trees, valid trees, and the same draws for the same seed."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import SlowGrammar, random_rules

from isoloss.config import PCFGConfig
from isoloss.languages.derivations import CHUNK, Sampler, _alias, longest_yields
from isoloss.languages.grammar import parse_grammar
from isoloss.languages.random_grammar import random_grammar
from isoloss.seeds import generator


def p_value(counts, expected):
    """Pearson's chi-square test; outcomes expected fewer than 5 times are put together."""
    counts, expected = np.array(counts, dtype=float), np.array(expected, dtype=float)
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    if rare.any():
        counts, expected = (
            np.append(counts[~rare], counts[rare].sum()),
            np.append(expected[~rare], expected[rare].sum()),
        )
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1])) if len(counts) > 1 else 1.0


def sampler(grammar, max_length, acceptance=1.0):
    return Sampler(grammar, max_length, acceptance)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_sentences_follow_the_conditioned_distribution(seed):
    grammar = parse_grammar(random_rules(seed, tokens=2))
    slow, longest, n = SlowGrammar(grammar), 5, 40_000
    truth = {sentence: slow.inside(0, sentence) for sentence in slow.sentences(longest)}
    acceptance = sum(truth.values())
    drawn = sampler(grammar, longest, acceptance)(n, generator(seed, "test"))
    assert drawn.tokens.shape == (n, int(drawn.lengths.max()))
    rows = zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)
    found = Counter(tuple(row[:length]) for row, length in rows)
    assert set(found) <= set(truth)
    counts, expected = zip(*((found[key], n * p / acceptance) for key, p in truth.items()), strict=True)
    assert p_value(counts, expected) > 1e-3


def test_the_test_sees_a_wrong_distribution():
    grammar = parse_grammar("S a 0.52\nS b 0.48")
    drawn = sampler(grammar, 1)(40_000, generator(0, "test"))
    counts = torch.bincount(drawn.tokens[:, 0], minlength=2).tolist()
    assert p_value(counts, [20_000, 20_000]) < 1e-3 < p_value(counts, [20_800, 19_200])


def test_trees_follow_their_distribution():
    grammar = parse_grammar(random_rules(2, symbols=3, tokens=2))
    slow, longest, n = SlowGrammar(grammar), 3, 40_000
    truth = Counter()
    for sentence in slow.sentences(longest):
        for p, nodes in slow.trees(0, sentence):
            truth[sentence, nodes] += p
    acceptance = sum(truth.values())
    drawn = sampler(grammar, longest, acceptance)(n, generator(0, "trees"), trees=True)
    found = Counter(
        (tuple(row[:length]), tuple(tuple(node) for node in nodes if node[0] >= 0))
        for row, length, nodes in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), drawn.nodes.tolist(), strict=True)
    )
    assert set(found) <= set(truth)
    counts, expected = zip(*((found[key], n * p / acceptance) for key, p in truth.items()), strict=True)
    assert len(counts) > 50
    assert p_value(counts, expected) > 1e-3


@given(seed=st.integers(0, 1000), recursive=st.booleans())
@settings(max_examples=20, deadline=None)
def test_every_tree_is_a_parse_in_preorder(seed, recursive):
    grammar = parse_grammar(random_rules(seed, recursive=recursive))
    slow = SlowGrammar(grammar)
    drawn = sampler(grammar, 4, 0.5)(20, generator(seed, "trees"), trees=True)
    assert drawn.nodes.shape[0] == 20
    assert (drawn.nodes[:, :, 0] >= 0).sum(dim=1).max() == drawn.nodes.shape[1]
    for row, length, nodes in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), drawn.nodes.tolist(), strict=True):
        real = [tuple(node) for node in nodes if node[0] >= 0]
        assert nodes[len(real) :] == [[-1, -1, -1]] * (len(nodes) - len(real))
        assert tuple(real) in {below for _, below in slow.trees(0, tuple(row[:length]))}
        assert row[length:] == [slow.vocab_size] * (len(row) - length)


def test_same_seed_same_sentences():
    draw = sampler(random_grammar(PCFGConfig(stop_probability=0.2)), 8)
    first, again, other = (draw(500, generator(seed, "x")) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.lengths, other.lengths)
    plain, with_trees = draw(500, generator(3, "x")), draw(500, generator(3, "x"), trees=True)
    assert torch.equal(plain.tokens, with_trees.tokens)


@pytest.mark.parametrize("n", [0, 1, CHUNK, CHUNK + 1])
def test_any_number(n):
    drawn = sampler(parse_grammar("S S S 0.45\nS a 0.55"), 4, 0.7)(n, generator(0, "x"), trees=True)
    assert len(drawn.tokens) == len(drawn.lengths) == len(drawn.nodes) == n
    assert n == 0 or 1 <= drawn.lengths.min() <= drawn.lengths.max() <= 4


def test_a_grammar_whose_derivations_never_end_on_average():
    # S -> S S with 0.9: most derivations are infinite, and must be given up
    drawn = sampler(parse_grammar("S S S 0.9\nS a 0.1"), 8, 0.107)(3000, generator(0, "x"))
    weights = [0.1, 0.009, 2 * 0.9**2 * 0.1**3, 5 * 0.9**3 * 0.1**4]
    counts = torch.bincount(drawn.lengths, minlength=9)[1:5].tolist()
    total = sum(counts)
    assert p_value(counts, [total * w / sum(weights) for w in weights]) > 1e-3


def test_long_yields():
    assert longest_yields(random_grammar(PCFGConfig()), 100).tolist() == [8] * 7 + [4] * 6 + [2] * 6 + [1] * 6
    assert longest_yields(parse_grammar("S S A 1\nS a 1\nA a 1"), 10).tolist() == [10, 1]


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=40))
def test_alias_tables_hold_the_probabilities(weights):
    probs = np.array(weights) / sum(weights)
    thresholds, aliases = _alias(probs)
    mass = np.bincount(aliases, weights=1 - thresholds, minlength=len(probs)) + thresholds
    assert np.allclose(mass / len(probs), probs, rtol=0, atol=1e-14)
