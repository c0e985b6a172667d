"""Masking: what is hidden, how often, and never what must not be."""

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages import Sentences
from isoloss.lab.languages.config import PRESETS
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, corrupt, mask

LANGUAGE = PRESETS["pcfg-varied"][0].build()
N = 20_000


def masked(objective, sentences, seed=0):
    return mask(sentences, LANGUAGE, objective, generator=generator(seed, "masks"))


def test_one_position_uniformly():
    sentences = Sentences(torch.zeros(N, 5, dtype=torch.int64), torch.full((N,), 4))
    labels = masked(ObjectiveConfig(masking="one"), sentences)["labels"]
    counts = (labels != IGNORED).sum(0).double()
    assert counts.sum() == N
    assert counts[4] == 0
    chi_square = ((counts[:4] - N / 4) ** 2 / (N / 4)).sum()
    assert chi_square < 16.3  # the 99.9 % point with 3 degrees of freedom


def test_a_fraction_and_at_least_one():
    sentences = Sentences(torch.zeros(N, 10, dtype=torch.int64), torch.full((N,), 10))
    chosen = masked(ObjectiveConfig(masking="fraction", fraction=0.15), sentences)["labels"] != IGNORED
    assert chosen.any(1).all()
    # each position is drawn with 0.15, and the sentences without one (0.85^10) get one more
    expected = 10 * 0.15 + 0.85**10
    variance = 10 * 0.15 * 0.85  # of the plain draw, above the variance of the draw with the addition
    assert abs(chosen.sum(1).double().mean() - expected) < 4 * (variance / N) ** 0.5


def test_inputs_and_labels_are_the_sentence():
    sentences = LANGUAGE.sample(500, generator=generator(1, "s"))
    batch = masked(ObjectiveConfig(masking="fraction", fraction=0.5), sentences)
    hidden = batch["labels"] != IGNORED
    assert (batch["input_ids"][hidden] == LANGUAGE.mask_id).all()
    assert torch.where(hidden, batch["labels"], batch["input_ids"]).equal(sentences.tokens)
    assert batch["attention_mask"].bool().equal(sentences.present())
    assert not (hidden & ~sentences.present()).any()


def test_special_tokens_are_never_hidden():
    class WithSpecial:
        mask_id, special_token_ids = 9, (1,)

    sentences = Sentences(torch.tensor([[1, 2, 1]]).expand(100, 3), torch.full((100,), 3))
    batch = mask(sentences, WithSpecial(), ObjectiveConfig(), generator=generator(0, "m"))
    assert (batch["labels"] == torch.tensor([IGNORED, 2, IGNORED])).all()
    only = Sentences(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3]))
    with pytest.raises(IsolossError, match="no token that could be masked"):
        mask(only, WithSpecial(), ObjectiveConfig(), generator=generator(0, "m"))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_an_impossible_fraction_is_refused(fraction):
    sentences = LANGUAGE.sample(3, generator=generator(1, "s"))
    with pytest.raises(IsolossError, match=str(fraction)):
        masked(ObjectiveConfig(masking="fraction", fraction=fraction), sentences)


TRUE, OTHERS = 7, 90_000  # the true token everywhere, and predicted positions enough for small errors


class Ordinary:
    """Ten ids, of which 0, 3 and 9 are special, and two more of the model: 9 is the mask, 11 the padding."""

    vocab_size, model_vocab_size, special_token_ids, mask_id, pad_id = 10, 12, (0, 3), 9, 11


def corrupted(batch, corruption="bert", seed=0):
    objective = ObjectiveConfig(masking="fraction", corruption=corruption)
    return corrupt(batch, Ordinary(), objective, generator=generator(seed, "corruption"))


def many():
    sentences = Sentences(torch.full((OTHERS // 10, 20), TRUE), torch.full((OTHERS // 10,), 20))
    objective = ObjectiveConfig(masking="fraction", fraction=0.5)
    return mask(sentences, Ordinary(), objective, generator=generator(1, "m"))


def test_bert_corruption_has_its_three_shares():
    plain = many()
    batch = corrupted(plain)
    hidden = plain["labels"] != IGNORED
    shown = batch["input_ids"][hidden]
    n = len(shown)
    counts = torch.bincount(shown, minlength=10)
    share = 0.1 / 7  # of each of the seven ordinary tokens
    expected = {9: 0.8, TRUE: 0.1 + share} | dict.fromkeys((1, 2, 4, 5, 6, 8), share)
    for token, probability in expected.items():
        assert abs(counts[token] - n * probability) < 4 * (n * probability * (1 - probability)) ** 0.5
    assert counts[0] == counts[3] == 0  # never special, but for the mask
    assert batch["input_ids"][~hidden].equal(plain["input_ids"][~hidden])
    assert batch["labels"].equal(plain["labels"])
    assert batch["attention_mask"].equal(plain["attention_mask"])


def test_corruption_is_repeatable_and_leaves_its_argument_alone():
    plain = many()
    before = plain["input_ids"].clone()
    once, again, other = corrupted(plain), corrupted(plain), corrupted(plain, seed=1)
    assert once["input_ids"].equal(again["input_ids"])
    assert not once["input_ids"].equal(other["input_ids"])
    assert plain["input_ids"].equal(before)
    assert corrupted(plain, "mask")["input_ids"].equal(before)
    with pytest.raises(IsolossError, match="the corruption is 'swap'; it must be mask or bert"):
        corrupted(plain, "swap")


def test_masks_for_evaluation_do_not_depend_on_the_corruption():
    sentences = LANGUAGE.sample(50, generator=generator(1, "s"))
    batches = [masked(ObjectiveConfig(masking="fraction", corruption=name), sentences) for name in ("mask", "bert")]
    assert batches[0]["input_ids"].equal(batches[1]["input_ids"])
