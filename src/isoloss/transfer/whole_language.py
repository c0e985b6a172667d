"""A downstream task tested on all sentences of a language: accuracies are exact sums, not estimates from a sample.

Shape letters: n sentences, C classes, R classifiers (draws, projections or seeds).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.languages.api import UNDEFINED, Language, Sentences
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.tasks import TaskData, labeling, make_task


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

    def accuracies(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return (R,) float64: the probability that each of R classifiers is right, from predictions (R, n)."""
        return self.probabilities.gather(1, predictions.cpu().T).sum(dim=0)

    def estimate(
        self,
        predictions: torch.Tensor,
        *,
        method: str,
        over: str,
        given: str,
        details: Mapping[str, Any],
        seconds: float | None = None,
    ) -> Estimate:
        """Return the mean accuracy of R classifiers, with its standard error over them; a single one is exact.

        Args:
            predictions: (R, n) int64.
            method: How they were made.
            over: What the classifiers differ in, in the plural: draws, projections or seeds.
            given: What the accuracy is conditional on, e.g. the training sentences.
            details: Further details of the estimate.
            seconds: Wall-clock time.

        Returns:
            The accuracy, with `accuracies`, `majority_rate`, `bayes_accuracy` and `given` among its details. Its
            influences are the classifiers' accuracies minus their mean.
        """
        accuracies = self.accuracies(predictions)
        count, value = len(accuracies), float(accuracies.mean())
        stderr = float(accuracies.std()) / math.sqrt(count) if count > 1 else 0.0
        deviations = (accuracies - value).numpy() if count > 1 else None
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

    Args:
        language: A language that has the task.
        name: The task, as for `isoloss.make_task`.
        every: All sentences of the language and their probabilities (n,); None: too many, or not known.
        num_train: Number of training sentences, drawn as by `make_task`.
        seed: Their seed.

    Raises:
        IsolossError: As `make_task`; `every` is None; or the task has sentences of its own.

    Example:
        >>> from isoloss.languages.config import PCFGConfig
        >>> from isoloss.languages.enumeration import all_sentences
        >>> language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=2, vocab_size=5).build()
        >>> whole_task(language, "prefix-2", all_sentences(language), num_train=100, seed=0)
        WholeTask(prefix-2: 3 classes, 512 sentences)
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
        joint[labels == UNDEFINED] = 0
    joint = joint * probabilities[:, None]
    joint /= joint.sum()
    place = {tokens.tobytes(): row for row, tokens in enumerate(sentences.tokens.numpy())}
    train_rows = torch.tensor([place[tokens.tobytes()] for tokens in drawn.train.tokens.cpu().numpy()])
    task = dataclasses.replace(
        drawn,
        test=sentences,
        test_labels=joint.argmax(dim=1),
        majority_rate=float(joint.sum(dim=0).max()),
        overlap=overlap(joint, train_rows),
    )
    return WholeTask(task=task, probabilities=joint, train_rows=train_rows)


def overlap(probabilities: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the probability of the sentences `rows` (m,), each counted once, of joint `probabilities` (n, C).

    Example:
        >>> overlap(torch.tensor([[0.5, 0.0], [0.0, 0.25], [0.25, 0.0]]), torch.tensor([1, 1, 2]))
        0.5
    """
    return float(probabilities[rows.bincount(minlength=len(probabilities)) > 0].sum())
