"""Labels against an enumeration of all derivations in plain Python, sentence by sentence."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Labeling, Sentences
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import HMMConfig, PCFGConfig
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.lookup import lookup_probe
from isoloss.lab.tasks import make_task
from isoloss.registry import TASKS, Entry
from isoloss.transfer.tasks import TaskData

# ambiguous, of mixed lengths, with a chain of unary rules, and with prefixes that no symbol yields (any that ends in d)
RULES = """
S X 3
S Y 2
S Z 2
X X Y 2
X a 3
X b 1
Y Y Z 1
Y Z X 1
Y Z 1
Y b 2
Z X X 1
Z D X 1
Z c 3
Z a 1
D d 1
"""
LANGUAGE = PCFG.from_text(RULES, max_length=6)

Rules = dict[str, list[tuple[tuple[str, ...], float]]]


def rules(text: str = RULES) -> Rules:
    """Return each symbol's right sides and probabilities, read without isoloss."""
    lines = [line.split() for line in text.split("\n") if line]
    totals: Counter[str] = Counter()
    for line in lines:
        totals[line[0]] += float(line[-1])
    found: Rules = {}
    for line in lines:
        found.setdefault(line[0], []).append((tuple(line[1:-1]), float(line[-1]) / totals[line[0]]))
    return found


def probability(symbol: str, tokens: tuple[str, ...], table: Rules) -> float:
    """Return Pr(symbol =>* tokens), the sum over all derivations, by plain recursion."""

    @cache
    def inside(symbol: str, tokens: tuple[str, ...]) -> float:
        if symbol not in table:
            return float(tokens == (symbol,))
        total = 0.0
        for right, p in table[symbol]:
            if len(right) == 1:
                total += p * inside(right[0], tokens)
            else:
                cuts = range(1, len(tokens))
                total += p * sum(inside(right[0], tokens[:u]) * inside(right[1], tokens[u:]) for u in cuts)
        return total

    return inside(symbol, tokens)


def chain(upper: str, lower: str, table: Rules) -> float:
    """Return the probability that a chain of unary rules leads from one symbol to another."""
    if upper == lower:
        return 1.0
    return sum(p * chain(right[0], lower, table) for right, p in table.get(upper, []) if len(right) == 1)


def words(sentences: Sentences, language: PCFG) -> list[tuple[str, ...]]:
    pairs = zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)
    return [tuple(language.vocabulary[token] for token in row[:length]) for row, length in pairs]


def check_labels(task: TaskData, language: PCFG, scores_of: dict[str, object]) -> None:
    """Check every label of a task against the scores that a symbol's function gives to a sentence."""
    for sentences, labels in ((task.train, task.train_labels), (task.test, task.test_labels)):
        for sentence, label in zip(words(sentences, language), labels.tolist(), strict=True):
            scores = {name: function(sentence) for name, function in scores_of.items()}  # type: ignore[operator]
            best = max(scores.values())
            assert best > 0
            assert scores[task.classes[label]] > best * (1 - 1e-12), (sentence, scores)


def test_root_labels_are_the_most_likely_roots() -> None:
    table = rules()
    task = make_task(LANGUAGE, "root", num_train=200, num_test=100, seed=0)
    assert task.classes == ("X", "Y", "Z")
    check_labels(
        task,
        LANGUAGE,
        {name: lambda s, name=name: chain("S", name, table) * probability(name, s, table) for name in task.classes},
    )
    assert set(task.train_labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("width", "classes"), [(1, ("X", "Y", "Z", "D")), (2, ("X", "Y", "Z")), (3, ("X", "Y", "Z")), (5, ("X", "Y", "Z"))]
)
def test_prefix_labels_are_the_most_likely_symbols_over_the_first_tokens(width: int, classes: tuple[str, ...]) -> None:
    table = rules()
    task = make_task(LANGUAGE, f"prefix-{width}", num_train=200, num_test=100, seed=0)
    assert task.classes == classes
    check_labels(
        task, LANGUAGE, {name: lambda s, name=name: probability(name, s[:width], table) for name in task.classes}
    )
    assert int(task.train.lengths.min()) >= width


@pytest.mark.parametrize("stop_probability", [0.0, 0.3])
def test_labels_of_a_random_grammar(stop_probability: float) -> None:
    language = PCFGConfig(
        levels=2, symbols_per_level=3, rules_per_symbol=4, vocab_size=7, stop_probability=stop_probability, seed=2
    ).build()
    table = rules(language.to_text())
    for name in ("root", "prefix-2", "prefix-4"):
        task = make_task(language, name, num_train=60, num_test=30, seed=1)
        assert "S" not in task.classes
        if name == "root":
            scores = {
                c: lambda s, c=c: dict(table["S"]).get((c,), 0.0) * probability(c, s, table) for c in task.classes
            }
        else:
            width = int(name[-1])
            scores = {c: lambda s, c=c, width=width: probability(c, s[:width], table) for c in task.classes}
        check_labels(task, language, scores)


def test_sentences_without_a_label_are_left_out_and_the_rest_keep_their_distribution() -> None:
    """The sentences follow the language given that a label exists: every sentence of it, as often as it should come."""
    table = rules()
    language = PCFG.from_text(RULES, max_length=3)
    task = make_task(language, "prefix-2", num_train=20_000, num_test=1, seed=0)
    counts = Counter(words(task.train, language))
    expected = {}
    for length in (2, 3):
        for index in range(4**length):
            sentence = tuple("abcd"[index // 4**place % 4] for place in range(length))
            covered = any(probability(name, sentence[:2], table) > 0 for name in task.classes)
            if covered and (p := probability("S", sentence, table)) > 0:
                expected[sentence] = p
    left_out = PCFG.from_text(RULES, max_length=3).sample(5000, generator=torch.Generator().manual_seed(0))
    assert any(len(s) == 3 and s not in expected for s in words(left_out, language))  # the case occurs
    total = sum(expected.values())
    assert set(counts) <= set(expected)
    chi2 = sum((counts[s] - 20_000 * p / total) ** 2 / (20_000 * p / total) for s, p in expected.items())
    degrees = len(expected) - 1
    assert degrees > 20
    assert abs(chi2 - degrees) < 4 * math.sqrt(2 * degrees)


def test_a_start_symbol_that_splits_by_itself() -> None:
    language = PCFG.from_text("S A B 1\nS A 1\nS B 2\nA a 1\nA c 1\nB b 1\nB c 2")
    root = make_task(language, "root", num_train=200, num_test=100, seed=0)
    assert root.classes == ("A", "B")
    assert set(root.train.lengths.tolist()) == {1}  # a sentence of two tokens has no root but S
    for sentence, label in zip(words(root.train, language), root.train_labels.tolist(), strict=True):
        assert root.classes[label] == {"a": "A", "b": "B", "c": "B"}[sentence[0]]
    # S stands for a choice of its own here, so it can be the label of a prefix
    assert make_task(language, "prefix-1", num_train=200, num_test=100, seed=0).classes == ("S", "A", "B")


def test_labels_are_decided_in_double_precision() -> None:
    # the scores of A and B differ by 2e-9, which float32 cannot tell
    language = PCFG.from_text("S A 1\nS B 1\nA a 1\nA b 1\nB a 1.00000001\nB b 1").to(dtype=torch.float32)
    task = make_task(language, "prefix-1", num_train=100, num_test=10, seed=0)
    for sentence, label in zip(words(task.train, language), task.train_labels.tolist(), strict=True):
        assert task.classes[label] == {"a": "B", "b": "A"}[sentence[0]]


def test_sentences_are_padded_to_the_longest_and_counted() -> None:
    task = make_task(LANGUAGE, "prefix-2", num_train=300, num_test=200, seed=0)
    for sentences, labels, n in ((task.train, task.train_labels, 300), (task.test, task.test_labels, 200)):
        assert sentences.tokens.shape == (n, 6)
        assert labels.shape == (n,)
        assert bool((sentences.tokens[~sentences.present()] == LANGUAGE.pad_id).all())
        assert bool((sentences.tokens[sentences.present()] < LANGUAGE.vocab_size).all())
    train, test = words(task.train, LANGUAGE), words(task.test, LANGUAGE)
    assert task.overlap == sum(s in set(train) for s in test) / 200
    assert 0 < task.overlap < 1
    assert task.majority_rate == Counter(task.test_labels.tolist()).most_common(1)[0][1] / 200


def test_padding_reaches_the_longest_sentence_even_where_none_was_drawn() -> None:
    language = PCFG.from_text("S A 1\nS B 1\nA a 1\nB b 1\nB B B 1e-12", max_length=5)
    task = make_task(language, "root", num_train=20, num_test=10, seed=0)
    assert int(task.train.lengths.max()) == 1
    assert task.train.tokens.shape == (20, 5)
    assert bool((task.train.tokens[:, 1:] == language.pad_id).all())


def test_a_task_is_a_function_of_its_seed_and_grows_at_its_end() -> None:
    def task(seed: int, num_train: int) -> TaskData:
        return make_task(LANGUAGE, "root", num_train=num_train, num_test=50, seed=seed)

    first, longer, other = task(0, 50), task(0, 5000), task(1, 50)
    assert torch.equal(longer.train.tokens[:50], first.train.tokens)
    assert torch.equal(longer.train_labels[:50], first.train_labels)
    assert torch.equal(longer.test.tokens, first.test.tokens)
    assert not torch.equal(other.train.tokens, first.train.tokens)
    assert not torch.equal(first.test.tokens, first.train.tokens)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (RULES, "leaf", "no task 'leaf': choose root or prefix-L with L from 1 to 6"),
        (RULES, "prefix-0", "no task 'prefix-0'"),
        (RULES, "prefix-7", "no task 'prefix-7': choose root or prefix-L with L from 1 to 6"),
        ("S A A 1\nA a 1\nA b 1", "root", "task root: no symbol can be the label"),
        ("S A 1\nA a 1\nA b 1", "root", "task root: only A can be the label"),
        ("S A 1\nA a 1\nA b 1", "prefix-1", "task prefix-1: only A can be the label"),
        ("S a 1\nS A A 1e-6\nS A 1e-7\nS B 1e-7\nA a 1\nB b 1", "prefix-2", "only S can be the label"),
        ("S A 1\nA a 1e6\nA B B 1\nA C C 1\nB b 1\nC c 1\nB C C 1", "prefix-2", "of 12288 sentences have a label"),
    ],
)
def test_tasks_that_cannot_be_made_are_named(text: str, name: str, message: str) -> None:
    with pytest.raises(IsolossError, match=message):
        make_task(PCFG.from_text(text, max_length=6), name, num_train=9, num_test=9, seed=0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_state_labels_are_the_most_likely_states(k: int) -> None:
    """Against the sum over all state sequences, in plain Python, for a language that computes in float32."""
    language = HMMConfig(states=4, blocks=2, vocab_size=6, length=4, mixing_weight=0.1, seed=2).build()
    task = make_task(language.to(dtype=torch.float32), f"state-{k}", num_train=150, num_test=50, seed=0)
    assert task.classes == ("s0", "s1", "s2", "s3")
    initial, transition, emission = (
        table.tolist() for table in (language.initial, language.transition, language.emission)
    )
    for sentences, labels in ((task.train, task.train_labels), (task.test, task.test_labels)):
        for tokens, label in zip(sentences.tokens.tolist(), labels.tolist(), strict=True):
            scores = [0.0] * 4
            for states in itertools.product(range(4), repeat=4):
                p = initial[states[0]] * math.prod(emission[z][x] for z, x in zip(states, tokens, strict=True))
                scores[states[k - 1]] += p * math.prod(transition[a][b] for a, b in itertools.pairwise(states))
            assert scores[label] > max(scores) * (1 - 1e-12)
    assert len(set(task.train_labels.tolist())) == 4
    assert task.majority_rate < 0.7


@pytest.mark.parametrize("name", ["state-0", "state-5", "state-", "root", "prefix-2"])
def test_tasks_that_an_hmm_has_not(name: str) -> None:
    language = HMMConfig(states=4, blocks=2, vocab_size=6, length=4).build()
    with pytest.raises(IsolossError, match=f"no task '{name}': choose state-K with k from 1 to 4"):
        make_task(language, name, num_train=9, num_test=9, seed=0)


def test_empty_splits_are_named() -> None:
    with pytest.raises(IsolossError, match="num_train is 0"):
        make_task(LANGUAGE, "root", num_train=0, num_test=9, seed=0)
    with pytest.raises(IsolossError, match="num_test is -1"):
        make_task(LANGUAGE, "root", num_train=9, num_test=-1, seed=0)


def test_a_registered_task_is_one_of_every_language(monkeypatch):
    def first_token(language, *, token: str) -> Labeling:
        labels = lambda sentences: (sentences.tokens[:, 0] == int(token)).long()  # noqa: E731
        return Labeling(classes=("other", language.vocabulary[int(token)]), label=labels)

    monkeypatch.setitem(TASKS._entries, "begins-with-TOKEN", Entry(first_token, "whether it is the first token"))
    task = make_task("pcfg-laptop", "begins-with-3", num_train=50, num_test=40)
    assert task.classes[0] == "other"
    assert torch.equal(task.test_labels, (task.test.tokens[:, 0] == 3).long())
    with pytest.raises(IsolossError, match="no task 'begins-with': choose root or prefix-L"):
        make_task("pcfg-laptop", "begins-with")
    with pytest.raises(IsolossError, match="sst2 is a task of text: its examples are read with make_text_task"):
        make_task("pcfg-laptop", "sst2")


def test_strings_that_are_no_sentences_have_no_look_up_table():
    task = make_task(Brackets(4), "mismatch", num_train=50, num_test=20)
    with pytest.raises(IsolossError, match=r"mismatch cannot be probed without a model: sentence .* probability 0"):
        lookup_probe(Brackets(4), task, epochs=1)
