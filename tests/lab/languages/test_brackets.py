"""Bracket languages: the paper's downstream task and encoding, long sentences, presets; the contract has the rest."""

import math
from collections import Counter

import pytest
import torch
from small_languages import p_value

from isoloss.errors import IsolossError
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import DyckConfig
from isoloss.seeds import generator


@pytest.mark.parametrize("length", [64, 4096])
def test_log_prob_of_long_sentences(length):
    language = Brackets(length)
    tokens, lengths, _ = language.sample(3, generator=generator(0, "test"))
    half = length // 2
    # Stirling's series: C(2m, m) = 4^m / sqrt(pi m) (1 - 1/(8m) + 1/(128 m^2) + 5/(1024 m^3) + O(m^-4))
    series = 1 - 1 / (8 * half) + 1 / (128 * half**2) + 5 / (1024 * half**3)
    expected = 0.5 * math.log(math.pi * half) - length * math.log(2) - math.log(series)
    assert language.log_prob(tokens, lengths).tolist() == pytest.approx([expected] * 3, rel=1e-9)


def test_downstream_is_independent_tokens_and_their_mismatch():
    n, length = 64_000, 6
    tokens, g_star = Brackets(length).downstream(n, generator=generator(0, "test"))
    assert g_star.tolist() == [row.count(1) - row.count(0) for row in tokens.tolist()]
    assert set(g_star.tolist()) == {-6, -4, -2, 0, 2, 4, 6}  # every even value, not only -1 and 1
    counts = Counter(map(tuple, tokens.tolist()))
    assert len(counts) == 2**length
    assert p_value(list(counts.values()), [n / 2**length] * 2**length) > 1e-3


def slow_encoding(sentence, hidden, signs):
    """One signed basis vector for each position, by the paper's words."""
    length = len(sentence)
    vectors = []
    for t, token in enumerate(sentence):
        vector = [0.0] * (2 * length)
        if hidden[t]:
            vector[t + length] = float(signs[t])
        else:
            vector[t] = 1.0 if token == 0 else -1.0
        vectors.append(vector)
    return vectors


def test_encoding_is_the_papers():
    language = Brackets(6)
    tokens, _ = language.downstream(500, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.3
    given = tokens.masked_fill(mask, language.mask_id)
    single = language.encode(given, mask, generator=generator(1, "test"), summed=False)
    z = language.encode(given, mask, generator=generator(1, "test"))
    assert (single.shape, z.shape, z.dtype) == ((500, 6, 12), (500, 12), torch.float64)
    signs = z[:, 6:].long()
    assert torch.equal(signs != 0, mask)
    expected = [slow_encoding(*row) for row in zip(tokens.tolist(), mask.tolist(), signs.tolist(), strict=True)]
    assert single.tolist() == expected
    assert torch.equal(single.sum(dim=1), z)
    assert torch.equal(language.mismatch(given, mask), -z[:, :6].sum(dim=1).long())
    drawn = signs[mask]
    assert abs(drawn.double().mean()) < 4 / len(drawn) ** 0.5  # as many + as -
    assert torch.equal(language.encode(tokens)[:, :6], (1 - 2 * tokens).double())
    assert (language.encode(tokens)[:, 6:] == 0).all()


def test_the_mismatch_of_the_others_tells_the_hidden_token():
    language = Brackets(8)
    tokens, _, _ = language.sample(200, generator=generator(0, "test"))
    assert (language.mismatch(tokens) == 0).all()
    mask = torch.arange(8) == torch.randint(8, (200, 1), generator=generator(0, "mask"))
    assert torch.equal(language.mismatch(tokens, mask), torch.where(tokens[mask] == 0, 1, -1))


def test_more_kinds_than_characters():
    language = DyckConfig(kinds=6, max_depth=1, max_length=2).build()
    assert set(language.vocabulary) == {*"()[]{}<>", "(4", ")4", "(5", ")5"}
    assert language.config.build().vocabulary == language.vocabulary


def test_draws_and_encodings_that_are_wrong():
    language = Brackets(4)
    with pytest.raises(IsolossError, match="cannot draw -1 sentences"):
        language.downstream(-1)
    with pytest.raises(IsolossError, match=r"tokens must be \(n, 4\), not \(1, 2\)"):
        language.encode(torch.tensor([[0, 1]]))
    with pytest.raises(IsolossError, match="holds the token id 3"):
        language.encode(torch.tensor([[0, 1, 3, 0]]))
    with pytest.raises(IsolossError, match=r"the mask must be \(1, 4\) bool"):
        language.mismatch(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[True]]))
    with pytest.raises(IsolossError, match="length is 7; it must be even"):
        Brackets(7)
    with pytest.raises(IsolossError, match="sentence 0 has length 3; every sentence here has 4 brackets"):
        language.log_prob(torch.tensor([[0, 1, 0, 1]]), torch.tensor([3]))
    with pytest.raises(
        IsolossError, match="sentence 0 has probability 0: it has 3 '<', and a sentence of 4 brackets has 2"
    ):
        language.log_prob(torch.tensor([[0, 1, 0, 0]]), torch.tensor([4]))


@pytest.mark.gpu
def test_the_encoding_on_cuda():
    tokens = Brackets(8).sample(200, generator=generator(0, "test")).tokens
    expected, found = (
        version.encode(tokens, generator=generator(0, "signs")) for version in (Brackets(8), Brackets(8).to("cuda"))
    )
    assert torch.equal(found.cpu(), expected)
