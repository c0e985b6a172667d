"""The language of one hidden bracket: its lists, its masks, and what is no sentence; the contract has its numbers."""

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.exact import all_sentences, masked_sentences
from isoloss.lab.languages.hidden_bracket import HiddenBracket
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, objective_batch


@pytest.mark.parametrize(("length", "number"), [(4, 96), (8, 2240)])
def test_all_sentences_are_listed_in_order_and_contexts_are_equally_likely(length, number):
    language = HiddenBracket(length, flip=0.2)
    tokens = all_sentences(language)[0].tokens.tolist()
    assert len(tokens) == number
    assert tokens == sorted(tokens)
    masked, positions, weights = masked_sentences(language)
    assert set(positions.tolist()) == {length}
    assert weights.tolist() == pytest.approx([2 / number] * (number // 2))
    contexts = language.contexts()
    assert {*map(tuple, masked.tokens[:, :-1].tolist())} == {*map(tuple, contexts[:, :-1].tolist())}
    assert set(contexts[:, -1].tolist()) == {language.mask_id}


def test_the_answer_alone_is_masked():
    language = HiddenBracket(4, flip=0.2)
    sentences = language.sample(200, generator=generator(0, "sentences"))
    batch = objective_batch(sentences, language, ObjectiveConfig(), generator=generator(0, "masks"))
    assert (batch["labels"][:, :-1] == IGNORED).all()
    assert torch.equal(batch["labels"][:, -1], sentences.tokens[:, -1])
    assert language.describe().endswith("told wrongly with probability 0.2; sentences of 5 tokens")


def test_strings_are_those_without_a_blank():
    language = HiddenBracket(2)
    assert language.strings().tokens.tolist() == [[2, 2, 7], [2, 3, 7], [3, 2, 7], [3, 3, 7]]
    assert language.signs().tolist() == [[1, 1], [1, -1], [-1, 1], [-1, -1]]


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
    at_answer = {"positions": torch.tensor([4, 4])}
    for refuse, options in (
        (language.log_prob, {}),
        (language.log_conditionals, {}),
        (language.log_conditionals, at_answer),  # which the answer's own conditional does not read
        (language.conditional_entropy, at_answer),
        (language.log_next, {}),
    ):
        with pytest.raises(IsolossError, match=message):
            refuse(rows, lengths, **options)
    if 6 not in tokens:
        assert language.is_possible(rows, lengths).tolist() == [True, False]
    with pytest.raises(IsolossError, match="sentence 0 has length 4; every sentence here has 5 tokens"):
        language.log_prob(rows[:1], torch.tensor([4]))
