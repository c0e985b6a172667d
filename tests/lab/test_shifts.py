"""Tasks out of distribution: other lengths, and a language with the same rules and other probabilities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import HMMConfig, PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.tasks import make_task

GRAMMAR = PCFGConfig(
    levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=6, stop_probability=0.3, seed=1
).build()
MARKOV = HMMConfig(states=6, blocks=2, vocab_size=8, length=5, seed=5).build()
RULES = ("binary", "unary", "emission")


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_a_redrawn_grammar_has_the_rules_and_other_probabilities_of_some_symbols(fraction: float) -> None:
    other = GRAMMAR.perturbed(fraction=fraction, seed=0)
    before, after = GRAMMAR.grammar, other.grammar
    assert (after.symbols, after.vocabulary, other.max_length) == (
        before.symbols,
        before.vocabulary,
        GRAMMAR.max_length,
    )
    changed = set()
    for kind in RULES:
        ids = getattr(before, kind)
        assert np.array_equal(ids, getattr(after, kind))
        old, new = getattr(before, f"{kind}_probs"), getattr(after, f"{kind}_probs")
        assert (new > 0).all()
        changed |= set(ids[old != new, 0].tolist())
        # each kind of rule of a symbol keeps its probability, so that symbols stop as often as before
        totals = [np.bincount(ids[:, 0], weights=probs, minlength=len(before.symbols)) for probs in (old, new)]
        assert np.allclose(*totals, rtol=1e-12)
    assert len(changed) == math.ceil(fraction * 10)  # S and nine others have a choice
    assert torch.allclose(other.length_probs, GRAMMAR.length_probs)
    assert np.array_equal(GRAMMAR.perturbed(fraction=fraction, seed=0).grammar.binary_probs, after.binary_probs)
    assert not np.array_equal(GRAMMAR.perturbed(fraction=1.0, seed=1).grammar.binary_probs, after.binary_probs)


def test_a_redrawn_hidden_markov_model_has_the_same_possibilities() -> None:
    other = MARKOV.perturbed(fraction=0.5, seed=0)
    changed = set()
    for name in ("transition", "emission"):
        old, new = getattr(MARKOV, name), getattr(other, name)
        assert np.array_equal(old > 0, new > 0)
        assert np.allclose(new.sum(axis=1), 1)
        changed |= set(np.flatnonzero((~np.isclose(old, new)).any(axis=1)).tolist())
    assert len(changed) == 3
    assert np.array_equal(other.initial, MARKOV.initial)
    assert (other.states, other.vocabulary, other.max_length) == (MARKOV.states, MARKOV.vocabulary, 5)


def test_redrawn_probabilities_are_flat_dirichlet() -> None:
    language = PCFG.from_text("S A A 1\nA a 0.98\nA b 0.01\nA c 0.01")
    drawn = np.array([language.perturbed(fraction=1.0, seed=seed).grammar.emission_probs for seed in range(400)])
    # a coordinate of the flat distribution over three has mean 1/3 and variance 1/18
    assert np.allclose(drawn.mean(axis=0), 1 / 3, atol=4 * math.sqrt(1 / 18 / 400))
    assert np.allclose(drawn.var(axis=0), 1 / 18, rtol=0.3)


def test_the_test_sentences_and_labels_are_those_of_the_test_language() -> None:
    other = GRAMMAR.perturbed(fraction=1.0, seed=3)
    task = make_task(GRAMMAR, "root", num_train=200, num_test=100, seed=0, test_language=other)
    plain, moved = (make_task(language, "root", num_train=200, num_test=100, seed=0) for language in (GRAMMAR, other))
    assert torch.equal(task.train.tokens, plain.train.tokens)
    assert torch.equal(task.train_labels, plain.train_labels)
    assert torch.equal(task.test.tokens, moved.test.tokens)
    assert torch.equal(task.test_labels, moved.test_labels)
    assert not torch.equal(task.test.tokens, plain.test.tokens)
    latent = make_task(GRAMMAR, "root-latent", num_train=200, num_test=100, seed=0, test_language=other)
    assert latent.bayes == make_task(other, "root-latent", num_train=200, num_test=100, seed=0).bayes


def test_sentences_of_other_lengths_are_left_out() -> None:
    task = make_task(GRAMMAR, "root", num_train=3000, num_test=500, seed=0, train_lengths=(1, 2), test_lengths=(3, 4))
    assert set(task.train.lengths.tolist()) == {1, 2}
    assert set(task.test.lengths.tolist()) == {3, 4}
    assert task.train.tokens.shape[1] == task.test.tokens.shape[1] == 4
    assert task.overlap == 0
    # the others keep their proportions
    probs = GRAMMAR.length_probs[1:3]
    share = float(probs[0] / probs.sum())
    ones = int((task.train.lengths == 1).sum())
    assert abs(ones - 3000 * share) < 4 * math.sqrt(3000 * share * (1 - share))


def test_sentences_of_a_hidden_markov_model_are_cut() -> None:
    task = make_task(MARKOV, "state-2", num_train=2000, num_test=50, seed=0, train_lengths=(1, 3))
    lengths = task.train.lengths
    assert set(lengths.tolist()) == {2, 3}  # one token has no second state
    twos = int((lengths == 2).sum())
    assert abs(twos - 1000) < 4 * math.sqrt(500)
    assert bool((task.train.tokens[~task.train.present()] == MARKOV.pad_id).all())
    # the label is given what is left of the sentence
    initial, transition, emission = (t.tolist() for t in (MARKOV.initial, MARKOV.transition, MARKOV.emission))
    rows = zip(task.train.tokens.tolist(), lengths.tolist(), task.train_labels.tolist(), strict=True)
    for tokens, length, label in itertools.islice(rows, 100):
        scores = [0.0] * 6
        for states in itertools.product(range(6), repeat=length):
            p = initial[states[0]] * math.prod(emission[z][x] for z, x in zip(states, tokens, strict=False))
            scores[states[1]] += p * math.prod(transition[a][b] for a, b in itertools.pairwise(states))
        assert scores[label] > max(scores) * (1 - 1e-12)


def test_the_bayes_accuracy_is_that_of_the_test_sentences() -> None:
    short = make_task(GRAMMAR, "root-latent", num_train=100, num_test=3000, seed=0, test_lengths=(1, 1))
    plain = make_task(GRAMMAR, "root-latent", num_train=100, num_test=3000, seed=0)
    assert short.bayes is not None
    assert plain.bayes is not None
    assert short.bayes.method == "Monte Carlo: mean over the test sentences"
    scores: dict[int, list[float]] = {}
    grammar = GRAMMAR.grammar
    for (_, root), p in zip(grammar.unary.tolist(), grammar.unary_probs.tolist(), strict=True):
        for (symbol, token), q in zip(grammar.emission.tolist(), grammar.emission_probs.tolist(), strict=True):
            if symbol == root:
                scores.setdefault(token, []).append(p * q)
    exact = sum(map(max, scores.values())) / sum(map(sum, scores.values()))
    assert abs(short.bayes.value - exact) < 4 * short.bayes.stderr
    assert plain.bayes.stderr == 0


@pytest.mark.parametrize(
    ("language", "options", "message"),
    [
        (GRAMMAR, {"test_lengths": (3, 2)}, "the lengths are 3 to 2; they must be from 1 to 4 tokens"),
        (GRAMMAR, {"train_lengths": (0, 2)}, "the lengths are 0 to 2"),
        (GRAMMAR, {"train_lengths": (1, 5)}, "the lengths are 1 to 5"),
        (MARKOV, {"test_lengths": (1, 1)}, "0 of 12288 sentences have a label and 1 to 1 tokens"),
        (GRAMMAR, {"test_language": PCFG.from_text("S A 1\nS B 1\nA a 1\nB b 1")}, "the tokens and the symbols"),
    ],
)
def test_shifts_that_cannot_be_are_named(language: PCFG | HMM, options: dict[str, object], message: str) -> None:
    name = "root" if language is GRAMMAR else "state-2"
    with pytest.raises(IsolossError, match=message):
        make_task(language, name, num_train=9, num_test=9, seed=0, **options)  # type: ignore[arg-type]


def test_lengths_that_no_sentence_has_are_named() -> None:
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=6).build()
    with pytest.raises(IsolossError, match="0 of 12288 sentences have a label and 2 to 3 tokens"):
        make_task(language, "root", num_train=9, num_test=9, seed=0, test_lengths=(2, 3))
    with pytest.raises(IsolossError, match="has no sentences of other lengths"):
        make_task(Brackets(4), "mismatch", num_train=9, num_test=9, seed=0, test_lengths=(2, 3))


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, math.nan])
def test_fractions_out_of_range_are_named(fraction: float) -> None:
    with pytest.raises(IsolossError, match="the fraction is"):
        MARKOV.perturbed(fraction=fraction, seed=0)


def test_a_language_without_a_choice_is_named() -> None:
    with pytest.raises(IsolossError, match=r"Brackets\(4, .*\) is neither"):
        Brackets(4).perturbed(fraction=1.0, seed=0)
    with pytest.raises(IsolossError, match="nothing to draw anew"):
        PCFG.from_text("S A A 1\nA a 1").perturbed(fraction=1.0, seed=0)
