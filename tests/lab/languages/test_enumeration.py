"""Listing all sentences: special tokens, lengths with probabilities, batches, and languages that are too large."""

from collections import defaultdict

import pytest
import torch
from small_languages import LAYERED, by_states, rows_of

from isoloss.errors import IsolossError
from isoloss.lab.languages import load_language
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import GrammarConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences, masked_sentences, why_not_enumerable
from isoloss.lab.languages.hmm import HMM


class TwoLengths(HMM):
    """Sentences of 1 or 3 tokens, whose log-probability is given the length."""

    @property
    def length_probs(self):
        return torch.tensor([0, 0.3, 0, 0.7], dtype=torch.float64)


def test_lengths_have_their_own_probabilities():
    language = TwoLengths.from_config(HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5))
    sentences, probabilities = all_sentences(language)
    expected = {x: {1: 0.3, 3: 0.7}[len(x)] * p for x, p in by_states(language).items() if len(x) != 2}
    assert dict(zip(rows_of(sentences), probabilities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-10)


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
    language = PCFGConfig(**LAYERED).build()
    whole = all_sentences(language)
    monkeypatch.setattr("isoloss.lab.languages.exact._BATCH", 7)
    parts = all_sentences(language)
    assert torch.equal(parts[0].tokens, whole[0].tokens)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        (Brackets(18), "Brackets has 262,144 strings of tokens, more than the 65,536 that can be enumerated"),
        (load_language("pcfg-laptop"), r"PCFG has about 10\^12 strings of tokens, more than the"),
    ],
)
def test_what_cannot_be_enumerated_is_refused(language, sentence):
    for enumerate_all in (all_sentences, masked_sentences):
        with pytest.raises(IsolossError, match=sentence):
            enumerate_all(language)
    assert why_not_enumerable(Brackets(16)) is None
