"""A language of another package: what it has, isoloss uses, and what it lacks is one clear sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from isoloss.config import LanguageConfig, check, setting
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.base import UNDEFINED, ExactLanguage, Labeling, Language, Sentences, Stored
from isoloss.lab.languages.config import (
    PRESETS,
)
from isoloss.lab.tasks import make_task
from isoloss.registry import LANGUAGES, TASKS


@dataclass(frozen=True, kw_only=True)
class CoinConfig(LanguageConfig):
    """Tosses of a coin."""

    is_self_contained = True
    kind: Literal["coin"] = "coin"
    heads: float = setting(0.5, minimum=0, maximum=1)

    def build(self, progress: Any = None) -> Coin:
        check(self)
        return Coin(self)

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        return cls(heads=float(Path(spec).read_text())) if spec.endswith(".coin") else None

    @classmethod
    def from_tables(cls, stored: Stored, path: Path) -> Coin:
        return Coin(cls(heads=float(stored.tables["heads"])))


class Coin(ExactLanguage):
    """Three tosses, independent of one another."""

    def __init__(self, config: CoinConfig) -> None:
        self._config, self.max_length = config, 3
        self.set_vocabulary(("tails", "heads"))
        self.device, self.dtype = torch.device("cpu"), torch.float64

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        tokens = (torch.rand(n, 3, generator=generator) < self.config.heads).long()
        return Sentences(tokens, torch.full((n,), 3))

    @property
    def logs(self) -> torch.Tensor:
        return torch.tensor([1 - self.config.heads, self.config.heads], dtype=self.dtype).log()

    def log_prob(self, tokens, lengths, *, mask=None):
        totals = self.logs[tokens].sum(dim=1)
        if bool(totals.isinf().any()):
            raise IsolossError("a sentence is impossible")
        return totals

    def log_conditionals(self, tokens, lengths, *, mask=None, positions=None):
        shape = (tokens if positions is None else positions).shape
        return self.logs.expand(*shape, 2)

    def conditional_entropy(self, tokens, lengths, *, mask=None, positions=None):
        return -(self.logs.exp() * self.logs).sum().expand((tokens if positions is None else positions).shape)

    def tasks(self):
        return {"first": "the first toss"}

    def labeling(self, name):
        if name != "first":
            return super().labeling(name)
        return Labeling(classes=self.vocabulary, label=lambda sentences: sentences.tokens[:, 0])

    def tables(self):
        table = torch.tensor(self.config.heads, dtype=torch.float64).numpy()
        return Stored(kind="coin", max_length=3, vocabulary=self.vocabulary, tables={"heads": table})


class Plain(Language):
    """A language that has sentences and nothing else."""

    vocab_size = max_length = 2
    vocabulary, pad_id, mask_id, model_vocab_size = ("a", "b"), 2, 3, 4

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        return Sentences(torch.randint(2, (n, 2), generator=generator), torch.full((n,), 2))


@pytest.fixture
def coins(monkeypatch):
    for registry in (LANGUAGES, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    LANGUAGES.register("coin", CoinConfig)


def test_a_language_of_another_package_is_named_built_stored_and_measured(coins, tmp_path):
    (tmp_path / "fair.coin").write_text("0.5")
    (tmp_path / "bent.toml").write_text('kind = "coin"\nheads = 0.25\n')
    fair, bent = (languages.load_language(tmp_path / name) for name in ("fair.coin", "bent.toml"))
    assert (fair.config, bent.config) == (CoinConfig(), CoinConfig(heads=0.25))
    assert languages.entropy(fair, num_sentences=50).sentence.value == pytest.approx(3 * math.log(2))
    assert fair.describe() == "2 tokens; sentences of 3 tokens"
    languages.save(bent, tmp_path / "bent.safetensors")
    assert languages.load_language(tmp_path / "bent.safetensors").config == bent.config
    with pytest.raises(IsolossError, match="heads is 2; it must be at least 0 and at most 1"):
        languages.load_language(CoinConfig(heads=2))


def test_its_tasks_are_asked_of_it_and_then_of_the_registry(coins):
    coin = CoinConfig(heads=0.25).build()
    task = make_task(coin, "first", num_train=50, num_test=2000, seed=0)
    assert task.test_labels.equal(task.test.tokens[:, 0])
    assert (task.name, task.bayes.value) == ("first", 1.0)
    with pytest.raises(IsolossError, match="no task 'last': choose first"):
        make_task(coin, "last", num_train=9, num_test=9, seed=0)

    def at(language: Language, *, k: str) -> Labeling:
        return Labeling(classes=language.vocabulary, label=lambda sentences: sentences.tokens[:, int(k)])

    def guess(language: Language) -> Labeling:
        """The toss that the sentence does not tell: each of its own."""
        scores = lambda sentences: torch.tensor([[0.75, 0.25]]).double().expand(len(sentences.tokens), 2)  # noqa: E731
        label = lambda sentences: torch.full((len(sentences.tokens),), UNDEFINED + 1)  # noqa: E731
        return Labeling(classes=language.vocabulary, label=label, scores=scores)

    TASKS.register("toss-K", at)
    TASKS.register("guess", guess)
    with pytest.raises(IsolossError, match=r"no task 'last': choose first; any language has .*toss-K, guess"):
        make_task(coin, "last", num_train=9, num_test=9, seed=0)
    task = make_task(coin, "toss-2", num_train=50, num_test=200, seed=0)
    assert task.test_labels.equal(task.test.tokens[:, 2])
    guessed = make_task(coin, "guess", num_train=50, num_test=200, seed=0)
    assert (guessed.bayes.value, guessed.bayes.stderr) == (pytest.approx(0.75), 0.0)  # all strings are summed over


def test_what_is_possible_is_asked_sentence_by_sentence_where_nothing_better_is_known(coins):
    tokens = torch.tensor([[0, 0, 0], [0, 1, 0]])
    assert CoinConfig(heads=0.0).build().is_possible(tokens, torch.tensor([3, 3])).tolist() == [True, False]


def test_what_a_language_lacks_is_one_clear_sentence(tmp_path):
    plain = Plain()
    sentences = plain.sample(2)
    assert (plain.is_exact, plain.num_held_out, plain.latent_name, plain.tasks()) == (False, 0, None, {})
    assert plain.start.id == plain.mask_id
    assert torch.equal(plain.batch(3, 5, seed=1).tokens, plain.batch(3, 5, seed=1).tokens)
    for lacking, message in (
        (lambda: plain.config, "is only in memory"),
        (
            lambda: plain.log_prob(*sentences[:2]),
            r"probabilities of Plain\(2 tokens; sentences of 2 tokens\) are not",
        ),
        (lambda: plain.log_conditionals(*sentences[:2]), "are not known"),
        (lambda: plain.conditional_entropy(*sentences[:2]), "are not known"),
        (lambda: languages.entropy(plain), "are not known"),
        (lambda: plain.labeling("root"), r"no task 'root': Plain\(.*\) has no tasks of its own"),
        (lambda: plain.held_out(3), "holds no sentences out"),
        (lambda: plain.describe_latent(sentences), "nothing is known of what produced"),
        (lambda: languages.save(plain, tmp_path / "a.safetensors"), "is not stored as one file"),
    ):
        with pytest.raises(IsolossError, match=message):
            lacking()


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_and_its_language_have_the_same_tasks(name):
    language = languages.load_language(name)
    assert language.tasks() == PRESETS[name][0].task_patterns
    assert language.is_exact
    assert language.exact() is language
