"""Downstream tasks: classify a sentence by what most likely produced it, a symbol of a grammar or a hidden state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.base import Sentences
from isoloss.languages.chart_plan import FoldedRules

if TYPE_CHECKING:
    from isoloss.languages.hmm import HMM
    from isoloss.languages.pcfg import PCFG

_PREFIX = re.compile(r"prefix-([1-9]\d*)")
_STATE = re.compile(r"state-([1-9]\d*)")
_UNDEFINED = -1  # the label of a sentence that the task does not cover
_LEAST_SHARE = 1e-3  # a task whose labels fewer of the sentences bear is refused,
_LEAST_DRAWS = 10_000  # once so many have been drawn
_BATCH = 4096  # sentences drawn at once

Labeller = Callable[[Sentences], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Labelled sentences of one downstream task.

    Attributes:
        name: The task, e.g. `root`, `prefix-4`, `state-6`.
        train: Sentences padded to the language's longest.
        train_labels: (n_train,) int64, indices into `classes`.
        test: Sentences padded to the language's longest, drawn independently of the training sentences.
        test_labels: (n_test,) int64.
        classes: The symbols or states that a label can stand for, whether or not one of these sentences bears it.
        majority_rate: Share of the commonest test label: the accuracy without looking.
        overlap: Share of the test sentences that are training sentences too; they are kept, since the test sentences
            would otherwise not follow the language's distribution.
    """

    name: str
    train: Sentences
    train_labels: torch.Tensor
    test: Sentences
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    majority_rate: float
    overlap: float


def majority_rate(labels: torch.Tensor) -> float:
    """Return the share of the commonest of the labels (n,).

    Example:
        >>> majority_rate(torch.tensor([2, 0, 2, 1]))
        0.5
    """
    return int(labels.bincount().max()) / len(labels)


def make_task(language: PCFG | HMM, name: str, *, num_train: int, num_test: int, seed: int) -> TaskData:
    """Return the downstream task `name` of a language, on fresh sentences (paper, section 2.2 and appendix A.1).

    Of a grammar, `root`: the symbol that the start symbol is rewritten to,
    `argmax_A Pr(A covers the whole sentence | sentence)` over the symbols A of its unary rules. `prefix-L`: the most
    likely symbol over the first L tokens by inside scores,
    `argmax_A Pr(A =>* x_1 .. x_L)`, over all symbols that yield L tokens; a start symbol that is only ever rewritten to
    a single symbol stands for no choice and is left out. Both labels are functions of the sentence, so an accuracy of 1
    is possible, and equal scores go to the first symbol.

    Of a hidden Markov model, `state-k`: the most likely k-th hidden state given the whole sentence,
    `argmax_z Pr(z_k = z | x_1 .. x_T)`, k from 1 (the paper's task-6 and task-10); not the k-th state of the most
    likely sequence. Every sentence has this label.

    A sentence for which the task has no label (shorter than L, or no symbol yields its first L tokens; for `root`, the
    start symbol splits at once) is drawn again: the sentences follow the language's distribution given that there is
    one.

    Args:
        language: The grammar or hidden Markov model.
        name: `root` or `prefix-L`, e.g. `prefix-4`; `state-k`, e.g. `state-6`.
        num_train: Training sentences.
        num_test: Test sentences, from a stream of their own.
        seed: The seed of the sentences; the streams are `("task", name, "train")` and `("task", name, "test")`.

    Raises:
        IsolossError: No such task; fewer than two classes can be a label, or only one occurs in training; hardly any
            sentence has a label; a number of sentences is below 1.

    Example:
        >>> from isoloss.languages.pcfg import PCFG
        >>> language = PCFG.random(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=9)
        >>> task = make_task(language, "prefix-2", num_train=100, num_test=50, seed=0)
        >>> task.classes, tuple(task.train.tokens.shape), task.train_labels[:5].tolist()
        (('L1.0', 'L1.1', 'L1.2'), (100, 4), [1, 0, 0, 0, 1])
    """
    for split, number in (("train", num_train), ("test", num_test)):
        if number < 1:
            raise IsolossError(f"num_{split} is {number}; a task needs at least 1 {split} sentence")
    from isoloss.languages.hmm import HMM

    classes, labeller = _of_hmm(language, name) if isinstance(language, HMM) else _of_grammar(language, name)
    if len(classes) < 2:
        found = f"only {classes[0]}" if classes else "no symbol"
        raise IsolossError(f"task {name}: {found} can be the label, and a task needs two classes; choose another task")
    train, train_labels = _labelled(language, name, labeller, num_train, seeds.generator(seed, "task", name, "train"))
    test, test_labels = _labelled(language, name, labeller, num_test, seeds.generator(seed, "task", name, "test"))
    if bool((train_labels == train_labels[0]).all()):
        only = classes[int(train_labels[0])]
        raise IsolossError(
            f"task {name}: all {num_train} training sentences have the label {only}; draw more sentences"
        )
    seen = {row.tobytes() for row in train.tokens.cpu().numpy()}
    repeated = sum(row.tobytes() in seen for row in test.tokens.cpu().numpy())
    return TaskData(
        name=name,
        train=train,
        train_labels=train_labels,
        test=test,
        test_labels=test_labels,
        classes=classes,
        majority_rate=majority_rate(test_labels),
        overlap=repeated / num_test,
    )


def _of_hmm(language: HMM, name: str) -> tuple[tuple[str, ...], Labeller]:
    """Return the states, and the function from sentences to indices into them; scores as for a grammar."""
    match = _STATE.fullmatch(name)
    if match is None or int(match[1]) > language.max_length:
        raise IsolossError(f"no task {name!r}: choose state-k with k from 1 to {language.max_length}")
    exact, position = language.to(dtype=torch.float64), int(match[1]) - 1

    def state(sentences: Sentences) -> torch.Tensor:
        return exact.posterior(sentences.tokens, sentences.lengths)[:, position].argmax(dim=1)

    return language.states, state


def _of_grammar(language: PCFG, name: str) -> tuple[tuple[str, ...], Labeller]:
    """Return the symbols that can be a label, and the function from sentences to indices into them.

    Scores are in float64 whatever the language computes in, so that the labels are the same.
    """
    exact, grammar = language.to(dtype=torch.float64), language.grammar
    start = grammar.symbols.index(language.start)
    if name == "root":
        roots = grammar.unary[grammar.unary[:, 0] == start, 1].tolist()

        def root(sentences: Sentences) -> torch.Tensor:
            posterior = exact.span_posterior(sentences.tokens, sentences.lengths)[:, roots]
            return posterior.argmax(dim=1).masked_fill(posterior.amax(dim=1) == 0, _UNDEFINED)

        return tuple(grammar.symbols[symbol] for symbol in roots), root
    match = _PREFIX.fullmatch(name)
    if match is None or int(match[1]) > language.max_length:
        raise IsolossError(f"no task {name!r}: choose root or prefix-L with L from 1 to {language.max_length}")
    width = int(match[1])
    yields = FoldedRules(grammar, width).feasible[:, width]
    passes_on = not (grammar.binary[:, 0] == start).any() and not (grammar.emission[:, 0] == start).any()
    candidates = [symbol for symbol in yields.nonzero()[0].tolist() if symbol != start or not passes_on]

    def prefix(sentences: Sentences) -> torch.Tensor:
        labels = torch.full_like(sentences.lengths, _UNDEFINED)
        long_enough = sentences.lengths >= width
        tokens = sentences.tokens[long_enough]
        scores = exact.inside(tokens, sentences.lengths[long_enough], stop=width)
        # symbols that cannot yield the tokens share one value, of at most the log of the smallest normal number
        best = scores.amax(dim=1)
        none = (best <= math.log(torch.finfo(torch.float64).tiny)) & (best == scores.amin(dim=1))
        labels[long_enough] = scores[:, candidates].argmax(dim=1).masked_fill(none, _UNDEFINED)
        return labels

    return tuple(grammar.symbols[symbol] for symbol in candidates), prefix


def _labelled(
    language: PCFG | HMM, name: str, labeller: Labeller, n: int, generator: torch.Generator
) -> tuple[Sentences, torch.Tensor]:
    """Return the stream's first `n` sentences with a label, padded to the language's longest, and their labels."""
    tokens, lengths, labels = [], [], []
    drawn = found = 0
    while found < n:
        if drawn >= _LEAST_DRAWS and found < drawn * _LEAST_SHARE:
            raise IsolossError(
                f"task {name}: {found} of {drawn} sentences have a label; choose another task or language"
            )
        # an equal number each time: the sentences are those of the stream, whatever n is
        sentences = language.sample(_BATCH, generator=generator)
        own = labeller(sentences)
        kept = own != _UNDEFINED
        width = language.max_length - sentences.tokens.shape[1]
        tokens.append(torch.nn.functional.pad(sentences.tokens, (0, width), value=language.pad_id)[kept])
        lengths.append(sentences.lengths[kept])
        labels.append(own[kept])
        drawn, found = drawn + len(own), found + int(kept.sum())
    return Sentences(torch.cat(tokens)[:n], torch.cat(lengths)[:n]), torch.cat(labels)[:n]
