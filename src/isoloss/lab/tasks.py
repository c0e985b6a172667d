"""Downstream tasks of a language: classify a sentence by what produced it, a symbol of a grammar or a hidden state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.base import UNDEFINED, Labeling, Language, Sentences
from isoloss.lab.languages.config import LATENT
from isoloss.lab.languages.exact import all_sentences, why_not_enumerable
from isoloss.registry import TASKS
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import with_start
from isoloss.transfer.results import majority_rate
from isoloss.transfer.tasks import TaskData, overlap
from isoloss.transfer.text_sources import TextTask

_LEAST_FRACTION = 1e-3  # a task whose labels fewer of the sentences bear is refused,
_LEAST_DRAWS = 10_000  # once so many have been drawn
_BATCH = 4096  # sentences drawn at once, or whose posteriors are computed together


def make_task(
    language: Language | str,
    name: str,
    *,
    num_train: int = 4096,
    num_test: int = 4096,
    seed: int = 0,
) -> TaskData:
    """Return the downstream task `name` of a language, on fresh sentences (paper, section 2.2 and appendix A.1).

    Of a grammar, `root`: the symbol that the start symbol is rewritten to,
    `argmax_A Pr(A covers the whole sentence | sentence)` over the symbols A of its unary rules. `level-D`, where every
    symbol has the same number of binary rules above it: the first symbol with D of them,
    `argmax_A Pr(A covers x_1 .. x_w for some w | sentence)`. `prefix-L`: the most likely symbol over the first L tokens
    by inside scores, `argmax_A Pr(A =>* x_1 .. x_L)`, over all symbols that yield L tokens (the paper's tasks A, B and
    C, which are names of `prefix-32`, `prefix-16` and `prefix-8`); a start symbol that is only ever rewritten to a
    single symbol stands for no choice and is left out. All labels are functions of the sentence, so an accuracy of 1 is
    possible, and equal scores go to the first symbol.

    Of a hidden Markov model, `state-K`: the most likely k-th hidden state given the whole sentence,
    `argmax_z Pr(z_k = z | x_1 .. x_T)`, k from 1 (the paper's task-6 and task-10); not the k-th state of the most
    likely sequence. Every sentence has this label.

    Of the paper's bracket language, `mismatch`: the number of `>` minus that of `<` in strings of independent, uniform
    brackets (section 5). They need not be sentences, and no accuracy but 1 is the best.

    With `-latent` behind the name (but `mismatch`), the label is not the most likely symbol or state but the one that
    did produce the sentence: of `prefix-L` that of the tree's node over exactly the first L tokens. It is no function
    of the sentence, and even a classifier that knows the language errs: its accuracy is `bayes`. The paper's text has
    the first definition for grammars, as a formula; of hidden Markov models it says "the 6-th and 10-th hidden
    variables", which may be either.

    A sentence for which the task has no label (shorter than L, no symbol yields its first L tokens or, with `-latent`,
    no node covers them; for `root`, the start symbol splits at once) is drawn again: the sentences follow the
    language's distribution given that there is one.

    Args:
        language: A language that has the task (`language.tasks()`), or what `isoloss.load_language` makes one of, e.g.
            `pcfg-laptop`.
        name: `root`, `level-D`, `prefix-L`, `state-K` or `mismatch`, the first four also with `-latent`; `A`, `B`, `C`
            and `task-K` are other names. What the language does not know is a task of `isoloss.registry.TASKS`.
        num_train: Training sentences.
        num_test: Test sentences, from a stream of their own.
        seed: The seed of the sentences; the streams are `("task", name, "train")` and `("task", name, "test")`, with
            the name that has no `-latent`.

    Raises:
        IsolossError: No such task; fewer than two classes can be a label; hardly any sentence has a label; a number of
            sentences is below 1.

    Example:
        >>> from isoloss import make_task
        >>> from isoloss.lab.languages.config import PCFGConfig
        >>> language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=9).build()
        >>> task = make_task(language, "prefix-2", num_train=100, num_test=50, seed=0)
        >>> task.classes, tuple(task.train.tokens.shape), task.train_labels[:5].tolist()
        (('L1.0', 'L1.1', 'L1.2'), (100, 4), [1, 0, 0, 0, 1])
        >>> print(make_task(language, "prefix-2-latent", num_train=100, num_test=50, seed=0).bayes)
        80.908 % (exact)
    """
    for split, number in (("train", num_train), ("test", num_test)):
        if number < 1:
            raise IsolossError(f"num_{split} is {number}; a task needs at least 1 {split} sentence")
    if isinstance(language, str):
        language = languages.load_language(language)
    asked = labeling(language, name)
    # by the name that stands behind an alias such as A, so that both draw the same sentences
    name, classes = asked.name or name, asked.classes
    if len(classes) < 2:
        which = f"only {classes[0]}" if classes else "no symbol"
        raise IsolossError(f"task {name}: {which} can be the label, and a task needs two classes; choose another task")
    # the two definitions of a label are compared on the same sentences
    stream = name.removesuffix(LATENT)
    (train, train_labels), (test, test_labels) = (
        _draw(language, name, asked, number, seeds.generator(seed, "task", stream, split))
        for split, number in (("train", num_train), ("test", num_test))
    )
    return TaskData(
        name=name,
        train=train,
        train_labels=train_labels,
        test=test,
        test_labels=test_labels,
        classes=classes,
        majority_rate=majority_rate(test_labels),
        overlap=overlap(train.tokens, test.tokens),
        bayes=bayes_accuracy(language, asked, test),
        vocabulary=language.vocabulary,
    )


def labeling(language: Language, name: str) -> Labeling:
    """Return the labeling of the task `name`, which is one of the language's own, or else of `TASKS`.

    Raises:
        IsolossError: Neither has such a task.
    """
    try:
        return language.labeling(name)
    except IsolossError as error:
        try:
            pattern, parts = TASKS.match(name)
        except IsolossError:
            others = [other for other, task in TASKS.loaded().items() if not isinstance(task, TextTask)]
            more = f"; any language has {', '.join(others)}" if others else ""
            raise IsolossError(f"{error}{more}") from None
    task = TASKS.load(pattern)
    if isinstance(task, TextTask):
        raise IsolossError(f"{name} is a task of text: its examples are read with make_text_task")
    asked: Labeling = task(language, **{part.lower(): value for part, value in parts.items()})
    return asked


def read_from_start(task: TaskData, language: Language) -> TaskData:
    """Return the task as a causal model of `language` reads it: with the start before each sentence."""
    train, test = (with_start(sentences, language) for sentences in (task.train, task.test))
    return dataclasses.replace(task, train=train, test=test, texts=tuple(task.inputs()))


def _draw(
    language: Language, name: str, labeling: Labeling, n: int, generator: torch.Generator
) -> tuple[Sentences, torch.Tensor]:
    """Return the stream's first `n` sentences with a label, padded to the longest of the language, and their labels."""
    tokens, lengths, labels = [], [], []
    drawn = num_labeled = 0
    while num_labeled < n:
        if drawn >= _LEAST_DRAWS and num_labeled < drawn * _LEAST_FRACTION:
            raise IsolossError(
                f"task {name}: {num_labeled} of {drawn} sentences have a label; choose another task or language"
            )
        # always as many, so that the stream's sentences do not depend on n
        if labeling.draw is not None:
            sentences = labeling.draw(_BATCH, generator)
        else:
            sentences = language.sample(_BATCH, generator=generator, latent=labeling.needs_latent)
        batch_labels = labeling.label(sentences)
        has_label = batch_labels != UNDEFINED
        # features of all tokens side by side are as wide as sentences: both splits have one width
        missing = language.max_length - sentences.tokens.shape[1]
        padded = torch.nn.functional.pad(sentences.tokens, (0, missing), value=language.pad_id)
        tokens.append(padded[has_label])
        lengths.append(sentences.lengths[has_label])
        labels.append(batch_labels[has_label])
        drawn, num_labeled = drawn + _BATCH, num_labeled + int(has_label.sum())
    return Sentences(torch.cat(tokens)[:n], torch.cat(lengths)[:n]), torch.cat(labels)[:n]


def bayes_accuracy(language: Language, labeling: Labeling, sentences: Sentences) -> Estimate:
    r"""Return `E_x max_y Pr(y | x)`, over the sentences that have a label.

    Where the label is a function of the sentence that is 1. Where it is what produced the sentence it is a sum over all
    strings of tokens if there are at most 65,536 (its standard error is then 0), and else a mean over the given
    sentences. With s_y(x) the probability that a sentence x has a label and that it is y, both are

        sum_x Pr(x) max_y s_y(x) / sum_x Pr(x) sum_y s_y(x).

    The sentences are drawn given that they have a label.
    """
    if labeling.scores is None:
        return _exact("exact: the label is a function of the sentence")
    if why_not_enumerable(language) is None:
        strings, probabilities = all_sentences(language)
        scores = labeling.scores(strings).cpu()
        best, total = probabilities @ scores.amax(dim=1), probabilities @ scores.sum(dim=1)
        return _exact("exact: a sum over all strings", float(best / total))
    best_scores = []
    for first in range(0, len(sentences.tokens), _BATCH):
        tokens, lengths = (part[first : first + _BATCH] for part in sentences[:2])
        scores = labeling.scores(Sentences(tokens, lengths)).cpu()
        best_scores.append(scores.amax(dim=1) / scores.sum(dim=1))
    values = torch.cat(best_scores)
    # of one value the deviation is not known; numbers from 0 to 1 cannot deviate more
    deviation = float(values.std()) if len(values) > 1 else 0.5
    return Estimate(
        value=float(values.mean()),
        stderr=deviation / math.sqrt(len(values)),
        samples=len(values),
        unit="accuracy",
        num_predictions=len(values),
        method="Monte Carlo: mean over the test sentences",
    )


def _exact(method: str, value: float = 1.0) -> Estimate:
    return Estimate(value=value, stderr=0.0, samples=0, unit="accuracy", num_predictions=0, method=method)


# --- tested on all sentences of a language ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class WholeTask:
    """A downstream task of a language, tested on every sentence that has a label, by its probability.

    Attributes:
        task: The task with all n sentences of the language as test sentences, each with its most likely label.
            Sentences without a label are among them; the rates leave these out and weight the others by probability.
        probabilities: (n, C) float64, `Pr(sentence, label | there is a label)`: their sum is 1.
        train_rows: (num_train,) int64, which of the test sentences the training sentences are.
    """

    task: TaskData
    probabilities: torch.Tensor
    train_rows: torch.Tensor

    def __repr__(self) -> str:
        return f"WholeTask({self.task.name}: {len(self.task.classes)} classes, {self.num_test:,} sentences)"

    @property
    def num_test(self) -> int:
        """Number of sentences with a label."""
        return int((self.probabilities.sum(dim=1) > 0).sum())

    def estimate(
        self,
        predictions: torch.Tensor,
        *,
        method: str,
        over: str,
        details: Mapping[str, Any],
        seconds: float | None = None,
    ) -> Estimate:
        """Return the mean accuracy of R classifiers, with its standard error over them; a single one is exact.

        Its influences are the classifiers' accuracies minus their mean.

        Args:
            predictions: (R, n) int64.
            method: How they were made.
            over: What the classifiers differ in, as a plural noun: draws, projections or seeds.
            details: Further details of the estimate.
            seconds: Wall-clock time.
        """
        # the probability that each classifier is right
        accuracies = self.probabilities.gather(1, predictions.cpu().T).sum(dim=0)
        count, value = len(accuracies), float(accuracies.mean())
        stderr = float(accuracies.std()) / math.sqrt(count) if count > 1 else 0.0
        deviations = (accuracies - value).numpy() if count > 1 else None
        # what the accuracy is conditional on
        given = "the training sentences" if over != "draws" or count == 1 else ""
        given += f" and the {over[:-1]}" if over != "draws" and count == 1 else ""
        return Estimate(
            value=value,
            stderr=stderr,
            samples=count if count > 1 else 0,
            unit="accuracy",
            num_predictions=self.num_test,
            method=f"{method}; exact over all sentences{f', given {given}' if given else ''}",
            seconds=seconds,
            details={
                "accuracies": accuracies.tolist(),
                "clusters": over,
                over: count,
                "given": given,
                "majority_rate": self.task.majority_rate,
                "above_majority": value - self.task.majority_rate,
                "above_majority_stderr": stderr,
                "bayes_accuracy": float(self.probabilities.amax(dim=1).sum()),
                "bayes_stderr": 0.0,
                "num_test": self.num_test,
                **details,
            },
            influence=deviations,
        )


def whole_task(
    language: Language,
    name: str,
    every: tuple[Sentences, torch.Tensor] | None,
    *,
    num_train: int,
    seed: int,
) -> WholeTask:
    """Return the downstream task `name` with all sentences of the language as test sentences.

    `every` has all sentences and their probabilities (n,); None is refused: there are too many sentences, or their
    probabilities are not known. A task with sentences of its own is refused, too. The training sentences are drawn as
    by `make_task`.
    """
    drawn = make_task(language, name, num_train=num_train, num_test=1, seed=seed)
    if every is None:
        raise IsolossError(
            "num_test is all, but the language has too many sentences to enumerate, or their probabilities are not "
            "known: give num_test as a number"
        )
    asked = labeling(language, name)
    if asked.draw is not None:
        raise IsolossError(f"num_test is all, but the task {name} has sentences of its own: give num_test as a number")
    sentences, probabilities = every
    if asked.scores is not None:
        joint = asked.scores(sentences).cpu().double()
    else:
        labels = asked.label(sentences).cpu()
        joint = torch.nn.functional.one_hot(labels.clamp(min=0), len(asked.classes)).double()
        # the clamp above has made these class 0
        joint[labels == UNDEFINED] = 0
    # a row of scores adds up to the probability that its sentence has a label, so the rest is left out here
    joint = joint * probabilities[:, None]
    joint /= joint.sum()
    # both are padded to the language's longest sentence, so that equal sentences are equal bytes
    place = {tokens.tobytes(): row for row, tokens in enumerate(sentences.tokens.numpy())}
    train_rows = torch.tensor([place[tokens.tobytes()] for tokens in drawn.train.tokens.cpu().numpy()])
    task = dataclasses.replace(
        drawn,
        test=sentences,
        test_labels=joint.argmax(dim=1),
        majority_rate=float(joint.sum(dim=0).max()),
        overlap=weighted_overlap(joint, train_rows),
    )
    return WholeTask(task=task, probabilities=joint, train_rows=train_rows)


def weighted_overlap(probabilities: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the probability of the sentences `rows` (m,), each counted once, of joint `probabilities` (n, C)."""
    return float(probabilities[rows.bincount(minlength=len(probabilities)) > 0].sum())
