"""Masking: what is hidden, how often, and never what must not be."""

import pytest
import torch

from isoloss.config import PRESETS, ObjectiveConfig
from isoloss.errors import IsolossError
from isoloss.languages import Sentences, make
from isoloss.languages.masking import IGNORED, mask
from isoloss.seeds import generator

LANGUAGE = make(PRESETS["pcfg-varied"][0])
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
        mask_id, special_ids = 9, (1,)

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
