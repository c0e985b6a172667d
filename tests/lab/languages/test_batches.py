"""Conditionals when tokens are unknown, by enumeration of all completions, and at chosen positions only."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import SlowGrammar, random_rules
from test_pcfg import LANGUAGES, TINY, acceptance, some

from isoloss.errors import IsolossError
from isoloss.lab.languages.pcfg import PCFG
from isoloss.seeds import generator

MASKED = {name: LANGUAGES[name] for name in ("random", "stops", "recursive", "unary")}  # of few tokens: enumerable


def completions(slow, sentence, hidden):
    """Every (sentence, probability) that agrees with the visible tokens."""
    choices = [range(slow.vocab_size) if unknown else (token,) for token, unknown in zip(sentence, hidden, strict=True)]
    return [(full, slow.inside(0, full)) for full in itertools.product(*choices)]


def masked_sentences(language, n, seed=0, most=4):
    """Sentences and masks of every kind: none, some, up to `most` tokens hidden; ids under the mask are nonsense."""
    sentences = some(language, n, seed)
    draws = torch.rand(sentences.tokens.shape, generator=generator(seed, "mask"))
    mask = (draws.argsort(dim=1).argsort(dim=1) < torch.arange(n)[:, None] % (most + 1)) & sentences.present()
    return sentences.tokens.masked_fill(mask, 9999), sentences.lengths, mask


def assert_exact_under_masks(language, tokens, lengths, mask):
    slow = SlowGrammar(language.grammar)
    total = sum(acceptance(language, slow))
    log_prob = language.log_prob(tokens, lengths, mask=mask)
    log_conditionals = language.log_conditionals(tokens, lengths, mask=mask)
    entropy = language.conditional_entropy(tokens, lengths, mask=mask)
    for index, length in enumerate(lengths.tolist()):
        sentence, hidden = tokens[index, :length].tolist(), mask[index, :length].tolist()
        joint = math.fsum(p for _, p in completions(slow, sentence, hidden))
        assert math.isclose(math.exp(log_prob[index]), joint / total, rel_tol=1e-10)
        for t in range(length):
            mass = [0.0] * slow.vocab_size
            for full, p in completions(slow, sentence, [*hidden[:t], True, *hidden[t + 1 :]]):
                mass[full[t]] += p
            truth = [p / sum(mass) for p in mass]
            for c, p in enumerate(truth):
                found = log_conditionals[index, t, c]
                assert math.isclose(math.exp(found), p, rel_tol=1e-10) if p else found == TINY
            expected = -sum(p * math.log(p) for p in truth if p)
            assert math.isclose(entropy[index, t], expected, rel_tol=1e-9, abs_tol=1e-12)
        assert (log_conditionals[index, length:] == 0).all()


@pytest.mark.parametrize("name", MASKED)
def test_masked_conditionals_are_sums_over_all_completions(name):
    assert_exact_under_masks(MASKED[name], *masked_sentences(MASKED[name], 15))


@given(seed=st.integers(0, 10_000), recursive=st.booleans(), max_length=st.integers(1, 6))
@settings(max_examples=12, deadline=None)
def test_masked_conditionals_of_any_grammar(seed, recursive, max_length):
    language = PCFG.from_text(random_rules(seed, recursive=recursive), max_length=max_length)
    assert_exact_under_masks(language, *masked_sentences(language, 8, seed, most=6))


def test_nothing_visible_leaves_the_length():
    language = LANGUAGES["stops"]
    lengths = torch.nonzero(language.length_probs).flatten()
    tokens = torch.full((len(lengths), language.max_length), language.mask_id)
    found = language.log_prob(tokens, lengths, mask=torch.ones_like(tokens, dtype=torch.bool))
    assert torch.allclose(found.exp(), language.length_probs[lengths], rtol=1e-12, atol=0)


def test_an_empty_mask_changes_nothing():
    language = LANGUAGES["stops"]
    tokens, lengths, _ = some(language, 300)
    nothing = torch.zeros(tokens.shape, dtype=torch.bool)
    for method in (language.log_prob, language.log_conditionals, language.conditional_entropy):
        assert torch.equal(method(tokens, lengths, mask=nothing), method(tokens, lengths))
    beyond = ~(torch.arange(tokens.shape[1]) < lengths[:, None])  # padding has no token that could be unknown
    assert torch.equal(
        language.log_conditionals(tokens, lengths, mask=beyond), language.log_conditionals(tokens, lengths)
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("laptop", torch.float32), ("stops", torch.float64), ("nltk", torch.float64)]
)
def test_positions_are_rows_of_the_conditionals(name, dtype):
    language = LANGUAGES[name].to(dtype=dtype)
    tokens, lengths, mask = masked_sentences(language, 600)
    rows = torch.arange(600)
    for given_mask in (None, mask):
        if given_mask is None:
            tokens, lengths, _ = some(language, 600)
        everywhere = language.log_conditionals(tokens, lengths, mask=given_mask)
        entropy = language.conditional_entropy(tokens, lengths, mask=given_mask)
        several = (torch.rand(600, 3, generator=generator(1, "positions")) * lengths[:, None]).long()
        close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-13}
        for positions, index in ((several, (rows[:, None], several)), (several[:, 1], (rows, several[:, 1]))):
            found = language.log_conditionals(tokens, lengths, mask=given_mask, positions=positions)
            assert found.shape == (*positions.shape, language.vocab_size)
            torch.testing.assert_close(found, everywhere[index], **close)
            found = language.conditional_entropy(tokens, lengths, mask=given_mask, positions=positions)
            assert found.shape == positions.shape
            torch.testing.assert_close(found, entropy[index], **close)
    assert language.log_conditionals(tokens, lengths, mask=mask, positions=several[:, :0]).shape[:2] == (600, 0)


def test_wrong_masks_and_positions():
    language = PCFG.from_text("S A B 1\nS a 1\nA a 1\nB b 1\nB c 1")
    tokens, lengths = torch.tensor([[0, 1], [0, 9]]), torch.tensor([2, 1])
    for mask in (torch.zeros(2, 3).bool(), torch.zeros(2).bool(), torch.zeros(2, 2).long()):
        with pytest.raises(IsolossError, match=r"the mask must be \(2, 2\) bool like the tokens, not \(2"):
            language.log_prob(tokens, lengths, mask=mask)
    cases = [
        ([0], r"positions must be \(2,\) or \(2, k\), not \(1,\)"),
        ([0.0, 0.0], "positions must be integers, not torch.float32"),
        ([0, 1], "sentence 1 has no position 1; its positions are from 0 to 0"),
        ([[0, -1], [0, 0]], "sentence 0 has no position -1; its positions are from 0 to 1"),
    ]
    for positions, message in cases:
        for method in (language.log_conditionals, language.conditional_entropy):
            with pytest.raises(IsolossError, match=message):
                method(tokens, lengths, positions=torch.tensor(positions))
    with pytest.raises(IsolossError, match="sentence 0 holds the token id 9"):
        language.log_prob(torch.tensor([[9, 9]]), torch.tensor([2]), mask=torch.tensor([[True, False]]))
    with pytest.raises(IsolossError, match="sentence 0 has probability 0"):  # what is visible has none
        language.log_prob(torch.tensor([[9, 0]]), torch.tensor([2]), mask=torch.tensor([[True, False]]))
