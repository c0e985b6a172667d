"""A finite training set: permutations without a table, the same examples however they are cut, and fixed masks."""

import os
import signal
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from running import content, small
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.loss import exact_targets
from isoloss.lab.languages.config import BracketsConfig, CorpusConfig, HMMConfig, PCFGConfig
from isoloss.lab.training import training_set
from isoloss.lab.training.objectives import training_batch
from isoloss.lab.training.permutation import shuffled
from isoloss.lab.training.train import Interrupted, train
from isoloss.lab.training.training_set import check_training_set, examples
from isoloss.run_config import ModelConfig, ObjectiveConfig, StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.seeds import derive
from isoloss.text.masking import IGNORED

CPU = torch.device("cpu")
GRAMMAR = PCFGConfig(stop_probability=0.2)
LANGUAGES = {"pcfg": GRAMMAR, "hmm": HMMConfig(states=8, length=5, vocab_size=32), "brackets": BracketsConfig(length=8)}
FRACTION = ObjectiveConfig(masking="fraction", fraction=0.3)


def rows(batches):
    """Each sentence of batches without its padding: what is seen and what is predicted."""
    found = []
    for batch, _ in batches:
        present = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
        for inputs, labels, here in zip(batch["input_ids"], batch["labels"], present, strict=True):
            found.append((tuple(inputs[here].tolist()), tuple(labels[here].tolist())))
    return found


def drawn(language, config, steps, **options):
    return rows(training_batch(language, config, step, CPU, **options) for step in steps)


def sentences(examples):
    """The tokens behind rows."""
    return [tuple(x if y == IGNORED else y for x, y in zip(*row, strict=True)) for row in examples]


# --- the order


@pytest.mark.parametrize("size", [1, 2, 5, 63, 64, 65, 1000])
def test_every_epoch_is_a_permutation_of_its_own(size):
    row = shuffled(np.arange(20 * size), size, seed=3)
    epochs = row.reshape(20, size)
    assert (np.sort(epochs) == np.arange(size)).all()
    if size > 5:
        assert len({epoch.tobytes() for epoch in epochs}) == 20
        assert not np.array_equal(row, shuffled(np.arange(20 * size), size, seed=4))
    some = np.random.default_rng(0).permutation(20 * size)[:50]
    assert np.array_equal(shuffled(some, size, seed=3), row[some])


def slow_permutation(number, size, seed, epoch):
    """Eight rounds on two halves of as many bits, until the result is small enough; whole numbers of any length."""

    def mixed(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    base = next(2**b for b in range(3, 32) if 4**b >= size)
    while True:
        upper, lower = divmod(number, base)
        for index in range(8):
            key = mixed(epoch ^ derive(seed, "round", index))
            upper, lower = lower, upper ^ mixed(lower ^ key) % base
        number = base * upper + lower
        if number < size:
            return number


@pytest.mark.parametrize("size", [1, 64, 65, 999, 20_000_000])
def test_permutations_are_feistel_networks_with_cycle_walking(size):
    positions = np.random.default_rng(size).integers(0, 50 * size, 40)
    wanted = [slow_permutation(int(position) % size, size, 7, int(position) // size) for position in positions]
    assert shuffled(positions, size, seed=7).tolist() == wanted


def test_permutations_are_uniform():
    """Of 5 numbers: how often each follows each and stands at each place, by a chi-square statistic."""
    epochs = shuffled(np.arange(5 * 24_000), 5, seed=1).reshape(-1, 5)
    orders = Counter(map(bytes, epochs.astype(np.uint8)))
    assert len(orders) == 120
    statistic = sum((count - 200) ** 2 / 200 for count in orders.values())
    assert 119 - 4 * (2 * 119) ** 0.5 < statistic < 119 + 4 * (2 * 119) ** 0.5


def test_a_large_epoch_is_mixed():
    """Neighbors in a hundred million are no neighbors in the order, and the halves of an epoch are alike."""
    size = 100_000_000
    found = shuffled(np.arange(200_000), size, seed=0)
    assert len(np.unique(found)) == 200_000
    assert abs(found.mean() / size - 0.5) < 4 * (1 / 12 / 200_000) ** 0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / 200_000**0.5


# --- the sentences


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_epoch_has_each_sentence_once_in_a_new_order(name):
    language = LANGUAGES[name].build()
    config = TrainConfig(language=LANGUAGES[name], num_sentences=60, batch_size=20, seed=5)
    generator = torch.Generator().manual_seed(derive(5, "training set"))
    if name == "brackets":
        tokens, lengths, _ = language.sample(60, generator=generator)
    else:
        tokens, lengths, _ = language.sentences_at(torch.arange(60), seed=derive(5, "training set"))
    wanted = Counter(tuple(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True))
    epochs = [sentences(drawn(language, config, range(first, first + 3))) for first in (1, 4, 7)]
    assert all(Counter(epoch) == wanted for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = TrainConfig(language=LANGUAGES[name], num_sentences=60, batch_size=20, seed=6)
    assert Counter(sentences(drawn(language, other, range(1, 4)))) != wanted


@pytest.mark.parametrize("name", ["pcfg", "hmm"])
def test_numbered_sentences_are_those_of_a_sample(name):
    language = LANGUAGES[name].build()
    seed = language._seed(50, torch.Generator().manual_seed(2))
    whole = language.sample(50, generator=torch.Generator().manual_seed(2))
    numbers = torch.tensor([31, 7, 49, 7])
    tokens, lengths, latent = language.sentences_at(numbers, seed=seed)
    assert latent is None
    assert torch.equal(lengths, whole.lengths[numbers])
    assert torch.equal(tokens, whole.tokens[numbers, : int(lengths.max())])
    with pytest.raises(IsolossError, match="draws its sentences one after the other"):
        BracketsConfig().build().sentences_at(numbers, seed=seed)


@pytest.mark.parametrize("masked_copies", [0, 3])
@pytest.mark.parametrize("name", LANGUAGES)
def test_nothing_depends_on_where_batches_end(name, masked_copies):
    language = LANGUAGES[name].build()
    settings = {"language": LANGUAGES[name], "num_sentences": 50, "masked_copies": masked_copies, "objective": FRACTION}
    small = drawn(language, TrainConfig(**settings, batch_size=12), range(1, 51))
    large = drawn(language, TrainConfig(**settings, batch_size=60), range(1, 11))
    assert sentences(small) == sentences(large)
    assert (small == large) == (masked_copies > 0)  # a new mask is drawn by step
    config = TrainConfig(**settings, batch_size=12)
    parts = [drawn(language, config, [4], rows=part) for part in (slice(0, 5), slice(5, 12))]
    assert parts[0] + parts[1] == drawn(language, config, [4])


def test_twenty_million_sentences_take_no_memory():
    language = PCFGConfig(levels=5, symbols_per_level=8, rules_per_symbol=14, vocab_size=200).build()
    config = TrainConfig(language=PCFGConfig(), num_sentences=20_000_000, masked_copies=5, batch_size=256)
    drawn(language, config, [1])
    tracemalloc.start()
    try:
        drawn(language, config, [400_000])
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_evaluations_draw_other_sentences():
    config = PCFGConfig(seed=4)
    language = config.build()
    seen = sentences(drawn(language, TrainConfig(language=config, num_sentences=2000, batch_size=2000), [1]))
    measured = exact_targets(language, num_sentences=2000, objective=ObjectiveConfig(), seed=0).batch
    tokens = torch.where(measured["labels"] == IGNORED, measured["input_ids"], measured["labels"])
    shared = len(set(seen) & set(map(tuple, tokens.tolist())))
    independent = len(set(seen) & set(map(tuple, language.sample(2000).tokens.tolist())))
    assert shared <= independent + 5


# --- fixed masks


@pytest.mark.parametrize("corruption", ["mask", "bert"])
@pytest.mark.parametrize("name", LANGUAGES)
def test_each_sentence_has_so_many_fixed_masks(name, corruption):
    language = LANGUAGES[name].build()
    objective = ObjectiveConfig(masking="fraction", fraction=0.3, corruption=corruption)
    config = TrainConfig(
        language=LANGUAGES[name], num_sentences=40, masked_copies=5, objective=objective, batch_size=40, seed=1
    )
    epochs = [drawn(language, config, range(first, first + 5)) for first in (1, 6)]
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    once = Counter(
        sentences(drawn(language, TrainConfig(language=GRAMMAR, num_sentences=40, batch_size=40, seed=1), [1]))
    )
    assert Counter(sentences(epochs[0])) == Counter({sentence: 5 * count for sentence, count in once.items()})
    assert len(set(epochs[0])) > 1.5 * len(once)  # the masks of a sentence differ
    if corruption == "bert":
        shown = [x for row in epochs[0] for x, y in zip(*row, strict=True) if y != IGNORED]
        assert 0.7 < sum(x == language.mask_id for x in shown) / len(shown) < 0.9


def test_fixed_masks_are_drawn_with_the_given_probability():
    config = HMMConfig(states=8, length=16, vocab_size=32)
    settings = TrainConfig(language=config, num_sentences=2000, masked_copies=2, objective=FRACTION, batch_size=4000)
    (labels,) = [training_batch(config.build(), settings, 1, CPU).inputs["labels"]]
    masked = (labels != IGNORED).double()
    expected = 0.3 + 0.7**16 / 16  # of a sentence without any, one is masked
    assert (masked.mean(dim=0) - expected).abs().max() < 4 * (0.3 * 0.7 / 4000) ** 0.5
    one = TrainConfig(language=config, num_sentences=2000, masked_copies=2, batch_size=4000)
    labels = training_batch(config.build(), one, 1, CPU).inputs["labels"]
    assert ((labels != IGNORED).sum(dim=1) == 1).all()
    counts = (labels != IGNORED).sum(dim=0).double()
    assert ((counts - 250) ** 2 / 250).sum() < 15 + 4 * 30**0.5


def test_exact_labels_of_fixed_masks_are_the_conditionals_given_what_is_visible():
    language = GRAMMAR.build()
    objective = ObjectiveConfig(masking="fraction", fraction=0.5, labels="exact")
    config = TrainConfig(language=GRAMMAR, num_sentences=30, masked_copies=2, objective=objective, batch_size=60)
    batch, _ = training_batch(language, config, 1, CPU)
    hidden = batch["labels"] != IGNORED
    tokens = torch.where(hidden, batch["labels"], batch["input_ids"])
    lengths = batch["attention_mask"].sum(dim=1)
    wanted = language.log_conditionals(tokens, lengths, mask=hidden)[hidden].exp()
    assert torch.equal(batch["targets"], wanted)


# --- runs


class Numbered(PairLanguage):
    """Pairs that have numbers, and a signal to this process when some batch is drawn."""

    has_numbered_sentences = True

    def __init__(self, signal_at=0):
        super().__init__(is_ragged=True)
        self.calls, self.signal_at = 0, signal_at

    def sentences_at(self, numbers, *, seed):
        self.calls += 1
        if self.calls == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        tokens, lengths, _ = self.sample(64, generator=torch.Generator().manual_seed(seed))
        return type(self.sample(1))(tokens[numbers], lengths[numbers])


@pytest.mark.parametrize("settings", [{}, {"masked_copies": 2, "objective": FRACTION}, {"stages": True}])
def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path, settings):
    if "stages" in settings:
        settings = {"stages": (StageConfig(steps=6), StageConfig(steps=4))}
    settings = {"num_sentences": 20, "model": ModelConfig(size="d16", dropout=0.0), **settings}
    config = small(**settings)
    train(whole := Run(tmp_path / "whole"), config, Numbered())
    with pytest.raises(Interrupted):
        train(part := Run(tmp_path / "part"), config, Numbered(signal_at=5))
    assert part.steps()[-1] < 10
    train(part, config, Numbered())
    assert content(part) == content(whole)
    parts = small(micro_batch_size=3, **settings)
    train(again := Run(tmp_path / "again"), parts, Numbered())
    losses = [[line["loss_nats"] for line in run.metrics()] for run in (whole, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_sentences_without_numbers_are_held_and_the_same_in_every_process(tmp_path, monkeypatch):
    config = small(num_sentences=20)
    train(first := Run(tmp_path / "first"), config, PairLanguage())
    train(second := Run(tmp_path / "second"), config, PairLanguage())
    assert content(first) == content(second)
    language, drawn = PairLanguage(), []
    sample = language.sample
    monkeypatch.setattr(language, "sample", lambda n, **options: drawn.append(n) or sample(n, **options))
    examples(language, config, 1), examples(language, config, 9)
    assert drawn == [20]


def test_fields_at_their_defaults_leave_fingerprints_as_they_were():
    config = TrainConfig(language=PCFGConfig())
    assert not {"num_sentences", "masked_copies"} & set(configs.identity(config))
    changed = TrainConfig(language=PCFGConfig(), num_sentences=5)
    assert configs.fingerprint(changed) != configs.fingerprint(config)


def test_languages_without_the_training_set():
    language = PairLanguage()
    language.num_training = 12
    corpus = CorpusConfig(paths=("text",), tokenizer="tokenizer")
    check_training_set(small(language=corpus, masked_copies=2), language)
    with pytest.raises(IsolossError, match="num_sentences is 13, and there are 12 sequences to train on"):
        check_training_set(small(language=corpus, num_sentences=13), language)
    with pytest.raises(IsolossError, match="masked_copies is 2, and PairLanguage draws new sentences"):
        check_training_set(small(language=corpus, masked_copies=2), PairLanguage())


def test_the_training_set_of_a_text_is_spread_evenly_over_it():
    corpus = CorpusConfig(paths=("python:docs",), tokenizer="wordpiece:300", length=64)
    language = corpus.build()
    config = TrainConfig(language=corpus, model=ModelConfig(size="d16"), num_sentences=10, batch_size=10)
    every = [tuple(row) for row in language.sentences_at(torch.arange(language.num_training), seed=0).tokens.tolist()]
    found = [tuple(row) for row in training_set.sentences(language, config, 10).tokens.tolist()]
    expected = [every[number * language.num_training // 10] for number in range(10)]
    assert sorted(found) == sorted(expected)
    assert found != expected  # an epoch has an order of its own
