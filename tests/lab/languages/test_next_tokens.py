"""The exact conditionals of the next token: long sentences, small numbers, and languages of one's own."""

import math

import pytest
import torch
from small_languages import ARITHMETIC, CHAINS

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.inside_outside import InsideOutside
from isoloss.lab.languages.base import ExactLanguage
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.languages.special_tokens import WithSpecialTokens


def test_sentences_without_an_end_that_follows_are_refused():
    language = WithSpecialTokens(Brackets(4))
    tokens = torch.tensor([[2, 0, 1, 0, 1, 3], [2, 0, 0, 0, 1, 3]])
    with pytest.raises(IsolossError, match="sentence 1 has probability 0"):
        language.log_next(tokens, torch.tensor([6, 6]))
    grammar = WithSpecialTokens(PCFG.from_text("S A B 1\nA a 1\nB b 1"))
    with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
        grammar.log_next(torch.tensor([[2, 1, 3]]), torch.tensor([3]))


@pytest.mark.parametrize(("text", "length"), [(CHAINS, 9), (CHAINS, 25), (ARITHMETIC, 25)])
def test_their_product_is_the_probability_of_a_long_sentence(text, length):
    language = PCFG.from_text(text, max_length=25)
    tokens, lengths, _ = language.sample(100, length=length, generator=torch.Generator().manual_seed(length))
    steps = language.log_next(tokens, lengths, given_length=True).gather(2, tokens[:, :, None])[..., 0].sum(dim=1)
    expected = language.log_prob(tokens, lengths) - language.length_probs[length].log()
    torch.testing.assert_close(steps, expected, rtol=1e-10, atol=1e-10)


def test_prefixes_beyond_float64_are_scaled():
    """A rare token 399 times, each time by a rule of probability 10^-6."""
    language = PCFG.from_text(
        "S -> A S [0.5] | B S [0.000001] | 'x' [0.499999]\nA -> 'a' [1.0]\nB -> 'b' [1.0]", max_length=400
    )
    a, b, x = (language.vocabulary.index(token) for token in "abx")
    tokens = torch.full((1, 400), b)
    tokens[:, -1] = x
    found = language.log_next(tokens, torch.tensor([400]))[0].exp()
    for position in (0, 30, 60, 200, 398, 399):
        # the probability that what follows has at most as many tokens as are left
        fits = 0.499999 * (1 - 0.500001 ** (399 - position)) / (1 - 0.500001)
        expected = torch.zeros(3, dtype=torch.float64)
        expected[a], expected[b], expected[x] = 0.5 * fits, 0.000001 * fits, 0.499999
        torch.testing.assert_close(found[position], expected / expected.sum(), rtol=1e-9, atol=1e-300)


# no sentence of the last one is longer, so that the widths of what follows need not be told apart
BOUNDED = "S A B 0.5\nS B C 0.5\nA C C 0.4\nA B b 0.3\nA a 0.3\nB C c 0.5\nB b 0.5\nC a 0.9\nC a b 0.1"


@pytest.mark.parametrize("longest", [None, 12])
@pytest.mark.parametrize("text", [CHAINS, BOUNDED])
def test_both_engines_agree(text, longest):
    language = PCFG.from_text(text, max_length=12)
    longest = longest and language.max_length
    width = min(7, language.max_length)
    tokens, _, _ = language.sample(40, length=width, generator=torch.Generator().manual_seed(0))
    numba, other = (
        InsideOutside(language._rules, torch.device("cpu"), torch.float64, backend).prefix_outside(
            tokens, longest=longest
        )
        for backend in ("numba", "torch")
    )
    torch.testing.assert_close(numba[0], other[0])
    torch.testing.assert_close(numba[1], other[1])
    assert bool(numba[1].isfinite().all())


def test_float32_does_not_round_rare_tokens_of_an_hmm():
    emission = [[1.0, 1.2e-44, 0.0], [0.0, 3.7e-44, 1.0], [0.0, 1.0, 0.0]]
    language = HMM([0.5, 0.5, 0.0], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], emission, length=2)
    found = language.to(dtype=torch.float32).log_next(torch.tensor([[1, 0]]), torch.tensor([2]))[0].exp()
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.0, 0.5], [12 / 49, 0.0, 37 / 49]]))


@pytest.mark.parametrize(
    ("language", "tokens"), [(PCFG.from_text("S A B 1\nA a 1\nB b 1"), [[1, 1]]), (Brackets(4), [[0, 0, 0, 1]])]
)
def test_a_sentence_of_probability_0_is_named(language, tokens):
    with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
        language.log_next(torch.tensor(tokens), torch.tensor([len(tokens[0])]))


class Public(ExactLanguage):
    """A language of one's own, with the public methods of a grammar alone."""

    def __init__(self, inner):
        self.inner, self.max_length = inner, inner.max_length
        self.set_vocabulary(inner.vocabulary)
        self._move(inner.device, inner.dtype)

    length_probs = property(lambda self: self.inner.length_probs)

    def sample(self, n, *, generator=None, latent=False):
        return self.inner.sample(n, generator=generator)

    def log_conditionals(self, tokens, lengths, *, mask=None, positions=None):
        return self.inner.log_conditionals(tokens, lengths, mask=mask, positions=positions)


def test_a_language_of_ones_own_has_them_without_more_code():
    inner = PCFGConfig(levels=2, symbols_per_level=4, rules_per_symbol=4, vocab_size=8).build()
    tokens, lengths, _ = inner.sample(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Public(inner).log_next(tokens, lengths), inner.log_next(tokens, lengths))
    varied = PCFG.from_text(CHAINS, max_length=5)
    tokens, lengths, _ = varied.sample(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        Public(varied).log_next(tokens, lengths, given_length=True), varied.log_next(tokens, lengths, given_length=True)
    )
    with pytest.raises(IsolossError, match="Public has sentences of several lengths, and gives its next tokens with"):
        Public(varied).log_next(tokens, lengths)
    framed = WithSpecialTokens(Public(varied))
    with pytest.raises(
        IsolossError, match="Public has sentences of several lengths, and does not give the probability"
    ):
        framed.log_next(*framed.sample(2)[:2])


def test_an_impossible_last_token_is_no_error():
    """It is not among the tokens that anything is given."""
    language = PCFG.from_text("S A B 1\nA a 1\nB b 1")
    found = language.log_next(torch.tensor([[0, 0]]), torch.tensor([2]))[0].exp()
    assert found.tolist() == [[1.0, pytest.approx(0.0)], [pytest.approx(0.0), 1.0]]
    assert math.isfinite(float(found.log().sum()))
