"""All sentences of small languages, whole and with one masked token, against loops over all strings in plain Python."""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from slow_grammar import SlowGrammar

from isoloss.errors import IsolossError
from isoloss.lab.languages import load_language
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import GrammarConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences, masked_sentences, why_not_enumerable
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG

PARSED = PCFGConfig(levels=2, symbols_per_level=2, rules_per_symbol=3, vocab_size=3, stop_probability=0.3).build()
MARKOV = HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5).build()


class TwoLengths(HMM):
    """Sentences of 1 or 3 tokens, whose log-probability is given the length."""

    @property
    def length_probs(self):
        return torch.tensor([0, 0.3, 0, 0.7], dtype=torch.float64)


LANGUAGES = {
    "grammar": PARSED,
    "hmm": MARKOV,
    "brackets": Brackets(6),
    "two lengths": TwoLengths.from_config(MARKOV.config),
}


def path_sum(language, string):
    """Pr(string) of a hidden Markov model: the sum over all sequences of states."""
    initial, transition, emission = (t.tolist() for t in (language.initial, language.transition, language.emission))
    total = 0.0
    for states in itertools.product(range(len(initial)), repeat=len(string)):
        p = initial[states[0]] * math.prod(emission[z][x] for z, x in zip(states, string, strict=True))
        total += p * math.prod(transition[a][b] for a, b in itertools.pairwise(states))
    return total


def slow_sentences(language):
    """{sentence: probability}, of those with one above 0."""
    if isinstance(language, PCFG):
        slow = SlowGrammar(language.grammar)
        found = {x: slow.inside(0, x) for x in slow.sentences(language.max_length)}
        total = math.fsum(found.values())
        found = {x: p / total for x, p in found.items()}
    elif isinstance(language, Brackets):
        found = {x: float(sum(x) == 3) / math.comb(6, 3) for x in itertools.product((0, 1), repeat=6)}
    else:
        lengths = {1: 0.3, 3: 0.7} if isinstance(language, TwoLengths) else {3: 1.0}
        strings = [x for n in lengths for x in itertools.product(range(language.vocab_size), repeat=n)]
        found = {x: lengths[len(x)] * path_sum(language, x) for x in strings}
    return {x: p for x, p in found.items() if p > 0}


def rows_of(sentences):
    return [tuple(x[:n]) for x, n in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("name", LANGUAGES)
def test_all_sentences_and_their_probabilities(name):
    language = LANGUAGES[name]
    slow = slow_sentences(language)
    sentences, probabilities = all_sentences(language)
    assert math.fsum(slow.values()) == pytest.approx(1, rel=1e-12)
    found = dict(zip(rows_of(sentences), probabilities.tolist(), strict=True))
    assert len(found) == len(sentences.tokens)
    assert found == pytest.approx(slow, rel=1e-10)
    assert probabilities.dtype == torch.float64
    assert float(probabilities.sum()) == pytest.approx(1, rel=1e-12)
    assert bool((sentences.tokens[~sentences.present()] == language.pad_id).all())


@pytest.mark.parametrize("name", LANGUAGES)
def test_all_sentences_with_one_masked_token(name):
    language = LANGUAGES[name]
    slow, weights = slow_sentences(language), defaultdict(float)
    for x, p in slow.items():
        for t in range(len(x)):
            weights[x[:t], t, x[t + 1 :]] += p / len(x)
    sentences, positions, probabilities = masked_sentences(language)
    found = {}
    for x, t, p in zip(rows_of(sentences), positions.tolist(), probabilities.tolist(), strict=True):
        assert x in slow
        found[x[:t], t, x[t + 1 :]] = p
    assert len(found) == len(sentences.tokens)
    assert found == pytest.approx(dict(weights), rel=1e-10)
    assert float(probabilities.sum()) == pytest.approx(1, rel=1e-12)


def test_special_tokens_are_never_masked():
    language = GrammarConfig(rules="S C A 1\nC begin 1\nA a 0.25\nA R R 0.75\nR a 0.5\nR b 0.5").build()
    language.special_token_ids = (language.vocabulary.index("begin"),)
    sentences, positions, probabilities = masked_sentences(language)
    found = defaultdict(dict)
    for x, t, p in zip(rows_of(sentences), positions.tolist(), probabilities.tolist(), strict=True):
        found[len(x)][t, *(language.vocabulary[c] for i, c in enumerate(x) if i != t)] = p
    # of begin a, only a; of begin R R, either of the two behind
    assert found == {
        2: {(1, "begin"): pytest.approx(0.25)},
        3: {(t, "begin", other): pytest.approx(0.1875) for t in (1, 2) for other in "ab"},
    }


def test_several_batches_are_the_sentences_of_one(monkeypatch):
    whole = all_sentences(PARSED)
    monkeypatch.setattr("isoloss.lab.languages.exact._BATCH", 7)
    parts = all_sentences(PARSED)
    assert torch.equal(parts[0].tokens, whole[0].tokens)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=0)


class Plain(Language):
    vocab_size = max_length = 2
    vocabulary, pad_id, mask_id, model_vocab_size = ("a", "b"), 2, 3, 4

    def sample(self, n, *, generator=None, latent=False):
        return Sentences(torch.zeros(n, 2, dtype=torch.int64), torch.full((n,), 2))


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        (Plain(), "Plain has no exact probabilities to sum over"),
        (Brackets(18), "Brackets has 262,144 strings of tokens, more than the 65,536 that can be enumerated"),
        (load_language("pcfg-laptop"), r"PCFG has about 10\^12 strings of tokens, more than the"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(language, sentence):
    for enumerate_all in (all_sentences, masked_sentences):
        with pytest.raises(IsolossError, match=sentence):
            enumerate_all(language)
    assert why_not_enumerable(Brackets(16)) is None
