"""Predicting next tokens: what stands before a sentence, which labels are scored, and what corpora bring themselves."""

import pytest
import torch

from isoloss.lab.languages import Sentences
from isoloss.lab.languages.base import Start
from isoloss.lab.languages.config import PRESETS, CorpusConfig
from isoloss.lab.languages.text import Corpus
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, mask, objective_batch, predict_next, with_start

LANGUAGE = PRESETS["pcfg-varied"][0].build()  # 32 tokens, so that the padding is 32 and the mask 33
SENTENCES = Sentences(torch.tensor([[5, 6, 7], [8, 32, 32]]), torch.tensor([3, 1]))


@pytest.fixture
def corpus(tmp_path, vocab, words):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(" ".join(words[(7 * i + j) % 59 + 1] if j % 5 else "zzz" for j in range(40)))
    config = CorpusConfig(paths=(str(text),), tokenizer=str(vocab), length=8, held_out=0.3)
    return Corpus.from_config(config, cache=tmp_path / "cache")


def test_a_drawn_sentence_follows_the_id_of_the_mask():
    assert LANGUAGE.start == Start(33, None, is_in_sentences=False)
    batch = predict_next(SENTENCES, LANGUAGE)
    assert batch["input_ids"].tolist() == [[33, 5, 6, 7], [33, 8, 32, 32]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 5, 6, 7], [IGNORED, 8, IGNORED, IGNORED]]
    assert with_start(SENTENCES, LANGUAGE).lengths.tolist() == [4, 2]


def test_a_packed_sequence_has_its_start_and_its_special_tokens_are_not_predicted(corpus):
    first, last = corpus.tokenizer.cls_token_id, corpus.tokenizer.sep_token_id
    assert corpus.start == Start(first, last, is_in_sentences=True)
    sentences = corpus.held_out()
    unknown = sentences.tokens == corpus.tokenizer.unk_token_id
    assert unknown.any()  # every fifth word is one that the vocabulary lacks
    batch = predict_next(sentences, corpus)
    assert torch.equal(batch["input_ids"], sentences.tokens)
    expected = sentences.tokens.clone()
    expected[:, 0] = expected[:, -1] = IGNORED
    expected[unknown] = IGNORED
    assert torch.equal(batch["labels"], expected)
    assert batch["attention_mask"].all()


def test_a_tokenizer_without_ends_lends_its_bos(corpus):
    corpus.tokenizer.cls_token = None
    assert corpus.start == Start(corpus.mask_id, None, is_in_sentences=False)
    corpus.tokenizer.bos_token = "au"
    assert corpus.start == Start(1, None, is_in_sentences=False)


def test_the_objective_decides():
    objective = ObjectiveConfig(masking="fraction", fraction=0.5)
    masked = mask(SENTENCES, LANGUAGE, objective, generator=generator(0, "x"))
    got = objective_batch(SENTENCES, LANGUAGE, objective, generator=generator(0, "x"))
    assert all(torch.equal(got[name], masked[name]) for name in masked)
    causal = objective_batch(SENTENCES, LANGUAGE, ObjectiveConfig(kind="causal"), generator=generator(0, "x"))
    assert torch.equal(causal["labels"], predict_next(SENTENCES, LANGUAGE)["labels"])
