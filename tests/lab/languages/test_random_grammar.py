"""Random levelled grammars: their shape, that everything in them is used, and that they are the same everywhere."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.grammar import random_grammar
from isoloss.lab.languages.config import PCFGConfig


@given(
    levels=st.integers(1, 4),
    size=st.integers(1, 5),
    share=st.floats(0, 1),
    vocab_size=st.integers(1, 40),
    stop=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 99),
)
def test_shape(levels, size, share, vocab_size, stop, seed):
    rules = 1 + int(share * (size**2 - 1))
    config = PCFGConfig(
        levels=levels,
        symbols_per_level=size,
        rules_per_symbol=rules,
        vocab_size=vocab_size,
        stop_probability=stop,
        seed=seed,
    )
    grammar = random_grammar(config)
    assert grammar.symbols == ("S", *(f"L{level}.{i}" for level in range(levels + 1) for i in range(size)))
    assert grammar.vocabulary == tuple(f"w{i}" for i in range(vocab_size))
    level = np.concatenate([[-1], np.repeat(np.arange(levels + 1), size)])
    assert (np.diff(level[grammar.binary], axis=1) == [1, 0]).all()
    assert sorted(grammar.unary.tolist()) == [[0, 1 + i] for i in range(size)]
    binary = np.bincount(grammar.binary[:, 0], minlength=len(level))
    assert (binary[(level >= 0) & (level < levels)] == rules).all()
    emitted = np.bincount(grammar.emission[:, 0], minlength=len(level))
    assert (emitted[level == levels] == min(vocab_size, max(rules, -(-2 * vocab_size // size)))).all()
    assert (emitted[(level >= 0) & (level < levels)] == (min(rules, vocab_size) if stop else 0)).all()
    stops = np.bincount(grammar.emission[:, 0], weights=grammar.emission_probs, minlength=len(level))
    assert np.allclose(stops[(level >= 0) & (level < levels)], stop, atol=1e-12)
    # every symbol below the root level is some symbol's child, and every token is emitted at the lowest level
    assert set(grammar.binary[:, 1:].ravel().tolist()) == set(np.flatnonzero(level >= 1).tolist())
    lowest = grammar.emission[level[grammar.emission[:, 0]] == levels]
    assert set(lowest[:, 1].tolist()) == set(range(vocab_size))


def test_a_level_that_is_redrawn_has_other_rules_and_all_others_the_same():
    config = PCFGConfig(levels=3, symbols_per_level=3, rules_per_symbol=4, vocab_size=9, stop_probability=0.1, seed=5)
    kept = dict(_rules(random_grammar(config)))
    for level in range(4):
        redrawn = dict(_rules(random_grammar(dataclasses.replace(config, redrawn_level=level))))
        of_level = {rule for rule in kept.keys() | redrawn.keys() if rule.startswith(f"L{level}.")}
        assert {rule: p for rule, p in kept.items() if rule not in of_level} == {
            rule: p for rule, p in redrawn.items() if rule not in of_level
        }
        assert not any(kept.get(rule) == redrawn.get(rule) for rule in of_level)
    with pytest.raises(IsolossError, match="redrawn_level is 4; the lowest level is 3"):
        dataclasses.replace(config, redrawn_level=4).build()


def _rules(grammar):
    """Return each rule as text with its probability."""
    for table, names, probabilities in (
        (grammar.unary, (grammar.symbols,), grammar.unary_probs),
        (grammar.binary, (grammar.symbols, grammar.symbols), grammar.binary_probs),
        (grammar.emission, (grammar.vocabulary,), grammar.emission_probs),
    ):
        for row, probability in zip(table.tolist(), probabilities.tolist(), strict=True):
            right = [name[i] for name, i in zip(names, row[1:], strict=True)]
            yield " ".join([grammar.symbols[row[0]], "->", *right]), probability


def test_draws_are_pinned():
    # recorded digits: a change of numpy's or our draws would silently make every experiment another one
    grammar = random_grammar(PCFGConfig(levels=1, symbols_per_level=2, rules_per_symbol=2, vocab_size=3))
    assert grammar.binary.tolist() == [[1, 3, 3], [1, 4, 4], [2, 4, 3], [2, 4, 4]]
    assert np.allclose(
        grammar.binary_probs,
        [0.07907595393158053, 0.9209240460684195, 0.5933013796794974, 0.4066986203205025],
        rtol=1e-12,
    )


def test_frequencies_follow_zipfs_law():
    settings = {"levels": 3, "symbols_per_level": 12, "vocab_size": 300, "rules_per_symbol": 20, "seed": 1}
    plain, steep = (PCFGConfig(**settings, zipf=zipf) for zipf in (0.0, 1.0))
    # the same rules, whose emissions are multiplied and normalized
    flat, grammar = random_grammar(plain), random_grammar(steep)
    assert np.array_equal(flat.emission, grammar.emission)
    assert np.array_equal(flat.binary_probs, grammar.binary_probs)
    weighted = flat.emission_probs / (1 + flat.emission[:, 1])
    totals = np.bincount(flat.emission[:, 0], weights=weighted)[flat.emission[:, 0]]
    assert np.allclose(grammar.emission_probs, weighted / totals, rtol=1e-12)

    tokens = steep.build().sample(20_000, generator=torch.Generator().manual_seed(0)).tokens
    counts = torch.bincount(tokens.flatten(), minlength=300).double()
    ranks = torch.arange(1, 301).double()
    slope = np.polyfit(ranks.log(), (counts + 1).log(), 1)[0]
    assert -1.3 < slope < -0.7
    tokens = plain.build().sample(20_000, generator=torch.Generator().manual_seed(0)).tokens
    counts = torch.bincount(tokens.flatten(), minlength=300).double()
    assert abs(np.polyfit(ranks.log(), counts.log(), 1)[0]) < 0.2
