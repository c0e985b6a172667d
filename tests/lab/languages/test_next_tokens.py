"""The exact conditionals of the next token: by enumeration, by the chain rule, and where numbers get small."""

import math
from collections import defaultdict

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.inside_outside import InsideOutside
from isoloss.lab.languages.base import ExactLanguage
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import DyckConfig, HMMConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.languages.hidden_bracket import HiddenBracket
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.lab.languages.teacher import Teacher

# arithmetic as in textbooks, in the form in which treebank grammars are published; of several lengths
ARITHMETIC = "E -> E P [0.3] | 'x' [0.5] | 'y' [0.2]\nP -> O E [1.0]\nO -> '+' [0.7] | '*' [0.3]"
# unary chains, ambiguous, of every length
CHAINS = "S -> S S [0.3] | A S [0.2] | 'a' [0.25] | 'b' [0.25]\nA -> 'a' [0.3] | 'c' [0.4] | S [0.3]"
LANGUAGES = {
    "layered grammar": lambda: PCFGConfig(levels=2, symbols_per_level=4, rules_per_symbol=4, vocab_size=8).build(),
    "arithmetic": lambda: PCFG.from_text(ARITHMETIC, max_length=7),
    "chains": lambda: PCFG.from_text(CHAINS, max_length=7),
    "dyck": lambda: DyckConfig(max_length=6).build(),
    "hidden Markov model": lambda: HMMConfig(states=6, blocks=2, vocab_size=6, length=5).build(),
    "brackets": lambda: Brackets(6),
    "hidden bracket": lambda: HiddenBracket(4, flip=0.1),
    "framed": lambda: WithSpecialTokens(PCFG.from_text(CHAINS, max_length=5)),
    "framed dyck": lambda: WithSpecialTokens(DyckConfig(max_length=6).build()),
    "framed hmm": lambda: WithSpecialTokens(HMMConfig(states=4, blocks=2, vocab_size=4, length=3).build()),
    "framed brackets": lambda: WithSpecialTokens(Brackets(4)),
}


def by_enumeration(language, given_length):
    """The sentences, and the conditionals of their tokens as sums over all sentences."""
    sentences, probabilities = all_sentences(language)
    rows = [row[:length] for row, length in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)]
    sums = defaultdict(lambda: [0.0] * language.vocab_size)
    for row, probability in zip(rows, probabilities.tolist(), strict=True):
        for position, token in enumerate(row):
            sums[tuple(row[:position]), len(row) if given_length else 0][token] += probability
    return sentences, rows, sums


@pytest.mark.parametrize("given_length", [False, True])
@pytest.mark.parametrize("name", LANGUAGES)
def test_they_are_sums_over_all_sentences(name, given_length):
    language = LANGUAGES[name]()
    sentences, rows, sums = by_enumeration(language, given_length)
    found, ordinary = (
        language.log_next(sentences.tokens, sentences.lengths, given_length=given_length, without_special=without)
        for without in (False, True)
    )
    for i in range(0, len(rows), max(1, len(rows) // 200)):
        for position, token in enumerate(rows[i]):
            expected = torch.tensor(sums[tuple(rows[i][:position]), len(rows[i]) if given_length else 0]).double()
            torch.testing.assert_close(found[i, position].exp(), expected / expected.sum(), rtol=1e-6, atol=1e-10)
            if token not in language.special_token_ids:
                expected[list(language.special_token_ids)] = 0
                torch.testing.assert_close(
                    ordinary[i, position].exp(), expected / expected.sum(), rtol=1e-6, atol=1e-10
                )
        assert not found[i, len(rows[i]) :].any()


@pytest.mark.parametrize("name", [name for name in LANGUAGES if name.startswith("framed")])
def test_a_framed_sentence_has_the_product_of_its_rows_as_its_probability(name):
    """[SEP] takes what is left, so that a row is a function of the tokens before it and the rows chain."""
    language = LANGUAGES[name]()
    sentences, probabilities = all_sentences(language)
    logs = language.log_next(sentences.tokens, sentences.lengths)
    present = sentences.present()
    tokens = sentences.tokens.masked_fill(~present, 0)
    found = (logs.gather(2, tokens[..., None])[..., 0] * present).sum(dim=1).exp()
    torch.testing.assert_close(found, probabilities, rtol=1e-9, atol=1e-12)


def test_sentences_without_an_end_that_follows_are_refused():
    language = WithSpecialTokens(Brackets(4))
    tokens = torch.tensor([[2, 0, 1, 0, 1, 3], [2, 0, 0, 0, 1, 3]])
    with pytest.raises(IsolossError, match="sentence 1 has probability 0"):
        language.log_next(tokens, torch.tensor([6, 6]))
    grammar = WithSpecialTokens(PCFG.from_text("S A B 1\nA a 1\nB b 1"))
    with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
        grammar.log_next(torch.tensor([[2, 1, 3]]), torch.tensor([3]))


@pytest.mark.parametrize("text", [CHAINS, ARITHMETIC])
@pytest.mark.parametrize("length", [1, 2, 9, 25])
def test_their_sum_is_the_probability_of_the_sentence(text, length):
    language = PCFG.from_text(text, max_length=25)
    if not language.length_probs[length]:
        length += 1
    tokens, lengths, _ = language.sample(300, length=length, generator=torch.Generator().manual_seed(length))
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


@pytest.mark.parametrize("longest", [None, 12])
def test_both_engines_agree(longest):
    language = PCFG.from_text(CHAINS, max_length=12)
    tokens, _, _ = language.sample(40, length=7, generator=torch.Generator().manual_seed(0))
    numba, other = (
        InsideOutside(language._rules, torch.device("cpu"), torch.float64, backend).prefix_outside(
            tokens, longest=longest
        )
        for backend in ("numba", "torch")
    )
    torch.testing.assert_close(numba[0], other[0])
    torch.testing.assert_close(numba[1], other[1])
    assert bool(numba[1].isfinite().all())


def test_a_language_in_float32_answers_in_float32():
    language = PCFG.from_text(CHAINS, max_length=9)
    tokens, lengths, _ = language.sample(50, generator=torch.Generator().manual_seed(0))
    small = language.to(dtype=torch.float32).log_next(tokens, lengths)
    assert small.dtype == torch.float32
    torch.testing.assert_close(small.double(), language.log_next(tokens, lengths), rtol=1e-5, atol=1e-5)


def test_a_teachers_are_its_own_predictions():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=8, max_position_embeddings=8,
        word_embed_proj_dim=8, bos_token_id=1, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    language = Teacher(model, tokens=[3, 5, 6, 8], length=4)
    tokens, lengths, _ = language.sample(20, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([3, 5, 6, 8])
    inputs = torch.cat([torch.full((20, 1), 1), ids[tokens]], dim=1)
    with torch.no_grad():
        expected = model(input_ids=inputs).logits[:, :-1, ids].log_softmax(dim=-1)
    torch.testing.assert_close(language.log_next(tokens, lengths), expected, rtol=1e-5, atol=1e-5)


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
