"""The language of one hidden bracket: every number against a list of its sentences that is made by counting."""

import itertools
import math

import pytest
import torch

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.config import HiddenBracketConfig
from isoloss.lab.languages.exact import all_sentences, entropy, masked_sentences, why_not_enumerable
from isoloss.lab.languages.hidden_bracket import HiddenBracket
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, objective_batch

FLIP = 0.2


def by_counting(length, flip=FLIP):
    """The probability of each sentence: of each string, place and sign, and of the answer."""
    found = {}
    strings = [s for s in itertools.product((2, 3), repeat=length) if s.count(2) == s.count(3)]
    for string, place, sign, wrong in itertools.product(strings, range(length), (4, 5), (False, True)):
        answer = (string[place] - 2) ^ wrong
        sentence = (*string[:place], sign, *string[place + 1 :], answer)
        share = 1 / (len(strings) * length * 2)
        found[sentence] = found.get(sentence, 0) + share * (flip if wrong else 1 - flip)
    return found


def lengths_of(tokens):
    return torch.full((len(tokens),), tokens.shape[1])


@pytest.mark.parametrize("length", [2, 4])
def test_probabilities_and_conditionals_are_those_of_counting(length):
    language, truth = HiddenBracket(length, flip=FLIP), by_counting(length)
    tokens, weights = torch.tensor(list(truth)), torch.tensor(list(truth.values()), dtype=torch.float64)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(length)) < 0.4
    joint, conditionals = torch.zeros(len(tokens)).double(), torch.zeros(*tokens.shape, 6).double()
    for i, (row, hidden) in enumerate(zip(tokens, mask, strict=True)):
        agrees = (tokens == row) | hidden
        joint[i] = weights[agrees.all(dim=1)].sum()
        for t in range(length + 1):
            others = agrees.clone()
            others[:, t] = True
            conditionals[i, t].index_add_(0, tokens[:, t], weights * others.all(dim=1))
    conditionals /= conditionals.sum(dim=2, keepdim=True)
    lengths = lengths_of(tokens)
    torch.testing.assert_close(language.log_prob(tokens, lengths).exp(), weights)
    torch.testing.assert_close(language.log_prob(tokens, lengths, mask=mask).exp(), joint)
    found = language.log_conditionals(tokens, lengths, mask=mask)
    torch.testing.assert_close(found.exp(), conditionals, rtol=1e-12, atol=1e-200)
    entropies = -torch.special.xlogy(conditionals, conditionals).sum(dim=2)
    torch.testing.assert_close(language.conditional_entropy(tokens, lengths, mask=mask), entropies)
    last = torch.full_like(lengths, length)
    assert torch.equal(language.log_conditionals(tokens, lengths, mask=mask, positions=last), found[:, -1])
    wide = torch.nn.functional.pad(tokens, (0, 2), value=language.pad_id)
    assert torch.equal(
        language.log_conditionals(wide, lengths)[:, : length + 1], language.log_conditionals(tokens, lengths)
    )
    assert not language.log_conditionals(wide, lengths)[:, length + 1 :].any()


@pytest.mark.parametrize(("length", "number"), [(4, 96), (6, 480), (8, 2240)])
def test_all_sentences_are_listed_in_order(length, number):
    language, truth = HiddenBracket(length, flip=FLIP), by_counting(length)
    assert why_not_enumerable(language) is None
    sentences, probabilities = all_sentences(language)
    assert len(truth) == number
    assert dict(zip(map(tuple, sentences.tokens.tolist()), probabilities.tolist(), strict=True)) == pytest.approx(truth)
    assert sentences.tokens.tolist() == sorted(sentences.tokens.tolist())
    # a masked sentence is a context: all are equally likely
    masked, positions, weights = masked_sentences(language)
    assert set(positions.tolist()) == {length}
    assert weights.tolist() == pytest.approx([2 / number] * (number // 2))
    contexts = language.contexts()
    assert {*map(tuple, masked.tokens[:, :-1].tolist())} == {*map(tuple, contexts[:, :-1].tolist())}
    assert set(contexts[:, -1].tolist()) == {language.mask_id}


def test_without_flips_half_of_the_sentences_are_possible():
    language, truth = HiddenBracket(4, flip=0.0), by_counting(4, flip=0.0)
    sentences, probabilities = all_sentences(language)
    possible = {sentence: share for sentence, share in truth.items() if share}
    assert dict(zip(map(tuple, sentences.tokens.tolist()), probabilities.tolist(), strict=True)) == pytest.approx(
        possible
    )
    assert language.is_possible(torch.tensor(list(truth)), torch.full((96,), 5)).tolist() == [
        s > 0 for s in truth.values()
    ]
    assert entropy(language).masked_token.value == 0


def test_entropies_are_exact():
    language, truth = HiddenBracket(6, flip=FLIP), by_counting(6)
    found = entropy(language)
    assert found.sentence.value == pytest.approx(-sum(p * math.log(p) for p in truth.values()))
    assert found.masked_token.value == pytest.approx(-FLIP * math.log(FLIP) - (1 - FLIP) * math.log(1 - FLIP))
    assert found.sentence.stderr == found.masked_token.stderr == 0


def test_sentences_are_drawn_by_their_probabilities_and_the_answer_alone_is_masked():
    language, truth = HiddenBracket(4, flip=FLIP), by_counting(4)
    sentences = language.sample(20_000, generator=generator(0, "sentences"))
    assert torch.equal(sentences.tokens, language.sample(20_000, generator=generator(0, "sentences")).tokens)
    counts = dict.fromkeys(truth, 0)
    for row in map(tuple, sentences.tokens.tolist()):
        counts[row] += 1
    statistic = sum((counts[row] - 20_000 * p) ** 2 / (20_000 * p) for row, p in truth.items())
    assert abs(statistic - 95) < 4 * (2 * 95) ** 0.5
    batch = objective_batch(sentences, language, ObjectiveConfig(), generator=generator(0, "masks"))
    assert (batch["labels"][:, :-1] == IGNORED).all()
    assert torch.equal(batch["labels"][:, -1], sentences.tokens[:, -1])


def test_it_is_what_its_config_and_its_file_say(tmp_path):
    config = HiddenBracketConfig(length=4, flip=FLIP)
    language = config.build()
    assert language.config == config
    assert configs.from_dict(LanguageConfig, configs.to_dict(config)) == config
    languages.save(language, tmp_path / "brackets.safetensors")
    assert languages.resolve(str(tmp_path / "brackets.safetensors")).build().tables().equals(language.tables())
    assert str(language) == "HiddenBracket(4, flip=0.2, torch.float64 on cpu)"
    assert language.describe() == "4 balanced brackets, one hidden, and which one it was; sentences of 5 tokens"


def test_strings_are_those_without_a_blank():
    language = HiddenBracket(2)
    assert language.strings().tokens.tolist() == [[2, 2, 7], [2, 3, 7], [3, 2, 7], [3, 3, 7]]
    assert language.signs().tolist() == [[1, 1], [1, -1], [-1, 1], [-1, -1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 5}, "length is 5; it must be even"),
        ({"length": 14}, r"length is 14; it must be at least 2 and at most 12 \(even\)"),
        ({"flip": 0.5}, r"flip is 0\.5; it must be at least 0 and below 0\.5"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(IsolossError, match=message):
        HiddenBracketConfig(**settings).build()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([2, 2, 2, 4, 0], "sentence 1 has probability 0: a context is balanced, with one bracket hidden"),
        ([2, 3, 2, 3, 0], "sentence 1 has probability 0"),  # nothing hidden
        ([2, 4, 4, 3, 0], "sentence 1 has probability 0"),
        ([2, 3, 0, 4, 0], "sentence 1 has probability 0"),  # an answer within the context
        ([2, 3, 3, 4, 2], "sentence 1 has probability 0"),
        ([2, 3, 3, 4, 6], "sentence 1 holds the token id 6"),
    ],
)
def test_what_is_no_sentence_is_refused(tokens, message):
    language, good = HiddenBracket(4), [2, 3, 3, 4, 0]
    rows, lengths = torch.tensor([good, tokens]), torch.tensor([5, 5])
    with pytest.raises(IsolossError, match=message):
        language.log_prob(rows, lengths)
    if 6 not in tokens:
        assert language.is_possible(rows, lengths).tolist() == [True, False]
    with pytest.raises(IsolossError, match="sentence 0 has length 4; every sentence here has 5 tokens"):
        language.log_prob(rows[:1], torch.tensor([4]))
