"""The paper's tasks on languages of its shape: A, B, C of a grammar and task-K of a hidden Markov model."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pytest

from isoloss.lab.languages.config import PRESETS
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.tasks import make_task

Floats = npt.NDArray[np.float64]

GRAMMAR = PRESETS["pcfg-paper"][0].build()
MARKOV = PRESETS["hmm-paper"][0].build()
assert isinstance(GRAMMAR, PCFG)
assert isinstance(MARKOV, HMM)


def inside_of_all(language: PCFG, tokens: list[int]) -> dict[str, float]:
    """Return Pr(symbol =>* tokens) for every symbol that yields them, by CKY over the rules as they stand."""
    grammar = language.grammar
    size, length = len(grammar.symbols), len(tokens)
    rules: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    for (a, b, c), p in zip(grammar.binary.tolist(), grammar.binary_probs.tolist(), strict=True):
        rules[a].append((b, c, p))
    weights = np.zeros((size, size, size))
    for a, own in rules.items():
        for b, c, p in own:
            weights[a, b, c] = p
    chart: Floats = np.zeros((length, length + 1, size))
    for place, token in enumerate(tokens):
        for (a, c), p in zip(grammar.emission.tolist(), grammar.emission_probs.tolist(), strict=True):
            if c == token:
                chart[place, place + 1, a] += p
    for width in range(2, length + 1):
        for start in range(length - width + 1):
            pairs = sum(
                np.outer(chart[start, cut], chart[cut, start + width]) for cut in range(start + 1, start + width)
            )
            chart[start, start + width] = np.tensordot(weights, pairs, axes=2)
    found = chart[0, length]
    for (a, b), p in zip(grammar.unary.tolist(), grammar.unary_probs.tolist(), strict=True):
        assert a == 0  # only the start symbol has such rules, and it is no label
        found[a] += p * found[b]
    return {grammar.symbols[symbol]: float(p) for symbol, p in enumerate(found) if p > 0}


@pytest.mark.parametrize(
    ("name", "width", "classes", "examples"), [("A", 32, 8, 4), ("B", 16, 16, 12), ("C", 8, 24, 30)]
)
def test_the_labels_of_the_grammar_are_those_of_cky(name: str, width: int, classes: int, examples: int) -> None:
    task = make_task(GRAMMAR, name, num_train=300, num_test=examples, seed=0)
    assert task.name == f"prefix-{width}"
    assert len(task.classes) == classes  # as the preset's description says
    assert task.train_labels.bincount().max() < 200
    for tokens, label in zip(task.test.tokens.tolist(), task.test_labels.tolist(), strict=True):
        scores = inside_of_all(GRAMMAR, tokens[:width])
        assert scores.pop("S", 0.0) >= 0
        assert scores[task.classes[label]] > max(scores.values()) * (1 - 1e-10)


@pytest.mark.parametrize("k", [6, 10])
def test_the_labels_of_the_hidden_markov_model_are_sums_over_state_sequences(k: int) -> None:
    task = make_task(MARKOV, f"task-{k}", num_train=50, num_test=200, seed=0)
    assert task.name == f"state-{k}"
    for tokens, label in zip(task.test.tokens.tolist(), task.test_labels.tolist(), strict=True):
        before = MARKOV.initial * MARKOV.emission[:, tokens[0]]
        for token in tokens[1:k]:
            before = (before @ MARKOV.transition) * MARKOV.emission[:, token]
        after = np.ones(100)
        for token in tokens[: k - 1 : -1]:
            after = MARKOV.transition @ (MARKOV.emission[:, token] * after)
        scores = before * after
        assert scores[label] > scores.max() * (1 - 1e-10)
    assert len(set(task.test_labels.tolist())) > 30
