"""Labels of what did produce a sentence, and Bayes-optimal accuracies, against all strings and their derivations."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab import tasks
from isoloss.lab.languages.base import UNDEFINED
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import HMMConfig, PCFGConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.tasks import labeling, make_task

# symbols on levels, some of which stop early: sentences of 1 to 4 tokens
LEVELS = PCFGConfig(
    levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=4, stop_probability=0.3, seed=1
).build()
MARKOV = HMMConfig(states=4, blocks=2, vocab_size=4, length=3, seed=5).build()

String = tuple[int, ...]
Joint = dict[String, dict[str, float]]
Node = tuple[int, int, str, int]  # start, stop, symbol, binary rules above it


def derivations(
    language: PCFG, symbol: int, string: String, start: int, level: int
) -> Iterator[tuple[float, list[Node]]]:
    """Yield the probability and the nodes of every derivation of `string` from `symbol`, by plain recursion."""
    grammar = language.grammar
    node = (start, start + len(string), grammar.symbols[symbol], level)
    for (a, c), p in zip(grammar.emission.tolist(), grammar.emission_probs.tolist(), strict=True):
        if a == symbol and string == (c,):
            yield p, [node]
    for (a, b), p in zip(grammar.unary.tolist(), grammar.unary_probs.tolist(), strict=True):
        if a == symbol:
            for q, below in derivations(language, b, string, start, level):
                yield p * q, [node, *below]
    for (a, b, c), p in zip(grammar.binary.tolist(), grammar.binary_probs.tolist(), strict=True):
        if a == symbol:
            for cut in range(1, len(string)):
                for q, left in derivations(language, b, string[:cut], start, level + 1):
                    for r, right in derivations(language, c, string[cut:], start + cut, level + 1):
                        yield p * q * r, [node, *left, *right]


def asked(name: str, nodes: list[Node]) -> str | None:
    """Return the symbol that a task asks for, from the nodes of one derivation."""
    kind, _, number = name.partition("-")
    for start, stop, symbol, level in nodes:
        if symbol == "S" or start != 0:
            continue
        if kind == "root" and stop == nodes[0][1]:
            return symbol
        if kind == "level" and level == int(number):
            return symbol
        if kind == "prefix" and stop == int(number):
            return symbol
    return None


@cache
def joint_of_grammar(name: str) -> Joint:
    found: Joint = defaultdict(lambda: defaultdict(float))
    for length in range(1, 5):
        for string in itertools.product(range(4), repeat=length):
            for p, nodes in derivations(LEVELS, 0, string, 0, 0):
                if (symbol := asked(name, nodes)) is not None:
                    found[string][symbol] += p
    return found


@cache
def joint_of_states(k: int) -> Joint:
    found: Joint = defaultdict(lambda: defaultdict(float))
    initial, transition, emission = (t.tolist() for t in (MARKOV.initial, MARKOV.transition, MARKOV.emission))
    for string in itertools.product(range(4), repeat=3):
        for states in itertools.product(range(4), repeat=3):
            p = initial[states[0]] * math.prod(emission[z][x] for z, x in zip(states, string, strict=True))
            p *= math.prod(transition[a][b] for a, b in itertools.pairwise(states))
            if p > 0:
                found[string][f"s{states[k - 1]}"] += p
    return found


CASES = [
    (LEVELS, "root"),
    (LEVELS, "level-0"),
    (LEVELS, "level-1"),
    (LEVELS, "level-2"),
    (LEVELS, "prefix-1"),
    (LEVELS, "prefix-2"),
    (LEVELS, "prefix-4"),
    (MARKOV, "state-1"),
    (MARKOV, "state-3"),
]


def joint_of(language: PCFG | HMM, name: str) -> Joint:
    return joint_of_states(int(name[-1])) if isinstance(language, HMM) else joint_of_grammar(name)


@pytest.mark.parametrize(("language", "name"), CASES, ids=[name for _, name in CASES])
def test_latent_labels_and_sentences_have_their_joint_distribution(language: PCFG | HMM, name: str) -> None:
    joint = joint_of(language, name)
    total = sum(p for labels in joint.values() for p in labels.values())
    task = make_task(language, f"{name}-latent", num_train=8_000, num_test=100, seed=0)
    counts: Counter[tuple[String, str]] = Counter()
    rows = zip(task.train.tokens.tolist(), task.train.lengths.tolist(), task.train_labels.tolist(), strict=True)
    for tokens, length, label in rows:
        counts[tuple(tokens[:length]), task.classes[label]] += 1
    expected = {(string, symbol): p / total for string, labels in joint.items() for symbol, p in labels.items()}
    assert set(counts) <= set(expected)
    # cells of fewer than 5 expected examples are put together
    cells = [(counts[cell], 8_000 * p) for cell, p in expected.items() if 8_000 * p >= 5]
    cells.append((8_000 - sum(n for n, _ in cells), 8_000 - sum(e for _, e in cells)))
    chi2 = sum((n - e) ** 2 / e for n, e in cells if e > 1)
    degrees = len(cells) - 1
    assert degrees > 8
    assert abs(chi2 - degrees) < 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("language", "name"), CASES, ids=[name for _, name in CASES])
def test_bayes_accuracy_is_the_sum_over_all_strings(
    language: PCFG | HMM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = joint_of(language, name)
    best = sum(max(labels.values()) for labels in joint.values())
    total = sum(sum(labels.values()) for labels in joint.values())
    task = make_task(language, f"{name}-latent", num_train=100, num_test=4000, seed=0)
    assert task.bayes is not None
    assert task.bayes.value == pytest.approx(best / total, rel=1e-10)
    assert (task.bayes.stderr, task.bayes.method) == (0.0, "exact: a sum over all strings")
    monkeypatch.setattr(tasks, "why_not_enumerable", lambda language: "too many")
    drawn = tasks.bayes_accuracy(language, labeling(language, f"{name}-latent"), task.test)
    assert abs(drawn.value - task.bayes.value) <= 4 * drawn.stderr + 1e-12
    # a classifier that knows the posterior reaches it, within the error of 4,000 examples
    chosen = [
        max(joint[tuple(tokens[:length])].items(), key=lambda item: item[1])[0]
        for tokens, length in zip(task.test.tokens.tolist(), task.test.lengths.tolist(), strict=True)
    ]
    hits = sum(task.classes[label] == name for label, name in zip(task.test_labels.tolist(), chosen, strict=True))
    assert abs(hits / 4000 - best / total) <= 4 * math.sqrt(best / total * (1 - best / total) / 4000) + 1e-12


@pytest.mark.parametrize("level", [0, 1, 2])
def test_level_labels_are_the_most_likely_first_symbols(level: int) -> None:
    joint = joint_of_grammar(f"level-{level}")
    task = make_task(LEVELS, f"level-{level}", num_train=300, num_test=100, seed=2)
    assert task.classes == tuple(f"L{level}.{index}" for index in range(3))
    for tokens, length, label in zip(
        task.train.tokens.tolist(), task.train.lengths.tolist(), task.train_labels.tolist(), strict=True
    ):
        scores = joint[tuple(tokens[:length])]
        assert scores[task.classes[label]] > max(scores.values()) * (1 - 1e-12)
    # sentences that have no such symbol are left out, and only these
    sentences = LEVELS.sample(500, generator=torch.Generator().manual_seed(0))
    labels = labeling(LEVELS, f"level-{level}").label(sentences)
    for tokens, length, label in zip(
        sentences.tokens.tolist(), sentences.lengths.tolist(), labels.tolist(), strict=True
    ):
        assert (label != UNDEFINED) == (tuple(tokens[:length]) in joint)


def test_the_scores_add_up_to_the_probability_of_a_label() -> None:
    joint = joint_of_grammar("prefix-2")
    sentences = LEVELS.sample(200, generator=torch.Generator().manual_seed(1))
    long = sentences.lengths >= 2
    sentences = sentences._replace(tokens=sentences.tokens[long], lengths=sentences.lengths[long])
    scores = labeling(LEVELS, "prefix-2-latent").scores(sentences)
    for row, tokens, length in zip(scores.tolist(), sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True):
        string = tuple(tokens[:length])
        whole = sum(p for p, _ in derivations(LEVELS, 0, string, 0, 0))
        assert sum(row) == pytest.approx(sum(joint[string].values()) / whole, rel=1e-9)


def test_the_label_that_is_a_function_of_the_sentence_can_be_reached() -> None:
    for language, name in ((LEVELS, "root"), (LEVELS, "prefix-2"), (MARKOV, "state-2"), (Brackets(6), "mismatch")):
        bayes = make_task(language, name, num_train=100, num_test=50, seed=0).bayes
        assert bayes is not None
        assert (bayes.value, bayes.stderr) == (1.0, 0.0)


def test_both_definitions_are_of_the_same_sentences_where_every_sentence_has_both() -> None:
    likely = make_task(MARKOV, "task-2", num_train=300, num_test=100, seed=3)
    latent = make_task(MARKOV, "task-2-latent", num_train=300, num_test=100, seed=3)
    assert (likely.name, latent.name) == ("state-2", "state-2-latent")
    assert torch.equal(likely.train.tokens, latent.train.tokens)
    agree = float((likely.train_labels == latent.train_labels).double().mean())
    assert latent.bayes is not None
    assert abs(agree - latent.bayes.value) < 4 * math.sqrt(0.25 / 300)


def test_mismatch_counts_the_brackets_of_uniform_strings() -> None:
    task = make_task(Brackets(4), "mismatch", num_train=4000, num_test=50, seed=0)
    assert task.classes == ("-4", "-2", "0", "2", "4")
    for tokens, label in zip(task.train.tokens.tolist(), task.train_labels.tolist(), strict=True):
        assert int(task.classes[label]) == tokens.count(1) - tokens.count(0)
    counts = task.train_labels.bincount(minlength=5).tolist()
    expected = [4000 * math.comb(4, k) / 16 for k in range(5)]
    assert sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True)) < 4 + 4 * math.sqrt(8)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("S X 1\nS Y 1\nX Y 1\nX a 1\nY b 1", "root-latent", "X and Y can cover the same tokens"),
        ("S S S 1\nS A 2\nS B 2\nA a 1\nB b 1", "level-0", "do not lie on levels: S occurs on 0 and 1"),
        ("S A 1\nS B 1\nA a 1\nB b 1", "level-1", "level-D with D from 0 to 0"),
        ("S A 1\nS B 1\nA a 1\nB b 1", "A", r"no task 'A' \(prefix-32\)"),
        ("S A 1\nS B 1\nA a 1\nB b 1", "mismatch-latent", "no task 'mismatch-latent'"),
    ],
)
def test_tasks_that_cannot_be_are_named(text: str, name: str, message: str) -> None:
    with pytest.raises(IsolossError, match=message):
        make_task(PCFG.from_text(text, max_length=4), name, num_train=9, num_test=9, seed=0)


def test_brackets_have_one_task() -> None:
    with pytest.raises(IsolossError, match="no task 'root': choose mismatch"):
        make_task(Brackets(4), "root", num_train=9, num_test=9, seed=0)
