"""Which tokens a teacher's language has: counted in text or in samples, never special ones, ties by id."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from teacher_models import VOCAB, build, next_logs
from transformers import BertTokenizerFast, GPT2Config, GPT2LMHeadModel

from isoloss.checkpoints.loading import quiet
from isoloss.errors import IsolossError
from isoloss.lab.languages import teacher
from isoloss.lab.languages.config import TeacherConfig


def test_ties_go_to_the_smaller_id_and_what_does_not_occur_is_left_out():
    counts = np.array([3, 7, 0, 3, 9, 3, 7])
    assert teacher.most_frequent(counts, {4, 40}, 10) == (1, 6, 0, 3, 5)
    assert teacher.most_frequent(counts, (), 2) == (4, 1)
    assert counts[4] == 9


def test_special_ids_are_those_of_the_config_and_of_the_tokenizer(vocab):
    model = build("gpt2")
    assert teacher.special_token_ids(model) == {0, 1}
    model.config.eos_token_id = [1, 6]
    assert teacher.special_token_ids(model) == {0, 1, 6}
    tokenizer = BertTokenizerFast(vocab=str(vocab))
    specials = set(tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    assert teacher.special_token_ids(model, tokenizer) == {0, 1, 6} | specials


def test_samples_are_counted_as_the_whole_model_draws_them():
    model, n, length = build("gpt2", scale=0.4), 4000, 2
    counts = teacher.count_samples(model, 0, sequences=n, length=length, seed=0)
    assert counts.sum() == n * length
    ids = list(range(VOCAB))
    first = next_logs(model, torch.zeros(1, 2, dtype=torch.int64), ids)[0, 0].exp()
    second = next_logs(model, torch.tensor([[token, 0] for token in ids]), ids)[:, 1].exp()
    mean, both = first + first @ second, first * second.diagonal()
    variance = mean + 2 * both - mean**2  # of a token's count in one sequence
    z = (torch.from_numpy(counts) - n * mean) / (n * variance).sqrt()
    assert z.abs().max() < stats.norm.isf(1e-4)
    again = teacher.count_samples(model, 0, sequences=n, length=length, seed=0)
    assert np.array_equal(again, counts)
    assert not np.array_equal(teacher.count_samples(model, 0, sequences=n, length=length, seed=1), counts)


@pytest.fixture
def folder(tmp_path, vocab):
    """A model with a tokenizer of sixty words."""
    tokenizer = BertTokenizerFast(vocab=str(vocab))
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=16, bos_token_id=3, eos_token_id=3
    )
    with torch.random.fork_rng(devices=[]), quiet():
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_tokens_of_a_corpus(folder, tmp_path, words):
    text = " ".join([words[7]] * 5 + [words[3]] * 9 + [words[20], words[11]] * 4 + ["[MASK] unknownword"] * 30)
    (tmp_path / "text.txt").write_text(text)
    config = TeacherConfig(checkpoint=str(folder), length=4, vocab_size=4, corpus=(str(tmp_path / "text.txt"),))
    teacher = config.build()
    counts = Counter(text.split())
    assert [counts[word] for word in teacher.vocabulary] == [9, 5, 4, 4]
    assert teacher.vocabulary == (words[3], words[7], words[11], words[20])  # of equals, the smaller id first
    (tmp_path / "text.txt").unlink()
    again = teacher.config.build()  # its tokens are in the config
    assert (again.tokens, again.vocabulary) == (teacher.tokens, teacher.vocabulary)
    with pytest.raises(IsolossError, match="there is no text file"):
        config.build()


def test_a_tokenizer_with_more_tokens_than_the_model(folder, tmp_path, words):
    (tmp_path / "text.txt").write_text(words[-1])
    with pytest.raises(IsolossError, match=r"the tokenizer gives the id \d+; the teacher's ids are from 0 to 8"):
        teacher.count_text([str(tmp_path / "text.txt")], BertTokenizerFast.from_pretrained(folder), VOCAB)
