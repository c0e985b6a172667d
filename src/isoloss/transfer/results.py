"""What a probe or a fine-tuned model reached on a task: accuracy with its error, confusion matrix, scores by class.

Shape letters: S seeds, n test examples, C classes.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isoloss import files
from isoloss.errors import IsolossError, warn
from isoloss.statistics.clusters import crossed_mean
from isoloss.statistics.estimate import Estimate, accuracy_bounds, rounded
from isoloss.statistics.tables import text_table

MOST_CLASSES = 12  # in a printed table; `by_class` has all


def check_classes(what: str, values: torch.Tensor, num_classes: int) -> None:
    """Raise an `IsolossError` unless all values, of which there is one at least, are classes."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= num_classes:
        raise IsolossError(
            f"the {what}s go from {low} to {high}; with {num_classes} classes they are 0 to {num_classes - 1}"
        )


def absent_classes(train_y: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the classes that no training label (n,) has."""
    return (train_y.bincount(minlength=num_classes) == 0).nonzero()[:, 0]


def check_labels(train_y: torch.Tensor, test_y: torch.Tensor, classes: Sequence[str]) -> None:
    """Raise an `IsolossError` unless the labels (n,) are classes, and warn of classes without training examples."""
    for split, y in (("training", train_y), ("test", test_y)):
        if y.numel() == 0:
            raise IsolossError(f"the {split} split is empty")
        if y.dtype != torch.int64:
            raise IsolossError(f"the {split} split needs int64 labels, not {y.dtype}")
        check_classes(f"{split} label", y, len(classes))
    absent = absent_classes(train_y, len(classes))
    unseen = torch.isin(test_y, absent.to(test_y.device))
    if count := int(unseen.sum()):
        names = ", ".join(classes[label] for label in sorted(set(test_y[unseen].tolist())))
        warn(
            f"{count:,} of the {len(test_y):,} test examples have a label that none of the {len(train_y):,} training "
            f"examples has ({names}): they count as errors"
        )
    if len(absent) == len(classes) - 1:
        label = classes[int(train_y[0])]
        warn(f"all {len(train_y):,} training examples have the label {label}, so every prediction is that label")


def majority_rate(labels: torch.Tensor) -> float:
    """Return the fraction of the labels (n,) that are the most common one."""
    return int(labels.bincount().max()) / len(labels)


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """How well one class is told from the others; errors are over the draw of the test examples, for the given seeds.

    Attributes:
        name: The class.
        examples: Test examples of the class.
        precision: Fraction of the examples predicted to be of the class that are; None where none is predicted.
        recall: Fraction of the class's examples that are predicted; None where there is none.
        f1: Harmonic mean of the two, `2 hits / (examples + predicted)`; None where both numbers are 0.
    """

    name: str
    examples: int
    precision: Estimate | None
    recall: Estimate | None
    f1: Estimate | None

    def row(self) -> tuple[str, ...]:
        """Return the name, the number of examples and the three scores as text."""
        scores = ("" if score is None else str(score) for score in (self.precision, self.recall, self.f1))
        return self.name, f"{self.examples:,}", *scores


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TransferResult:
    """The accuracy of a probe, a fine-tuned model or the look-up table on a task, with its predictions.

    Attributes:
        accuracy: Fraction of the test examples that are classified correctly, mean over the seeds.
        predictions: (S, n) int64 on the CPU, the class that each seed's classifier gives to each test example.
        labels: (n,) int64 on the CPU, the class of each test example.
        classes: C names.
        bayes: The highest accuracy that any classifier of these sentences can have; None where the truth is unknown.
        details: What else there is to say of the classifiers, in JSON types, e.g. a curve over epochs.

    Example:
        >>> import torch
        >>> from isoloss.transfer.results import score
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> result = score(torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]]), labels, ("no", "yes"), method="a guess")
        >>> result.accuracy.value, result.confusion.tolist()
        (0.625, [[1.5, 0.5], [1.0, 1.0]])
        >>> result
        TransferResult(accuracy 62 ± 27 %, 4 test examples, 2 classes, seeds 2, a guess)
        >>> print(result)
        a guess: accuracy 62 ± 27 %; majority class 50.00 %
        class  examples  precision     recall         F1
        no            2  60 ± 30 %  75 ± 18 %  67 ± 21 %
        yes           2  67 ± 31 %  50 ± 35 %  57 ± 31 %
    """

    accuracy: Estimate
    predictions: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    bayes: Estimate | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        seeds, examples = self.predictions.shape
        return (
            f"TransferResult(accuracy {self.accuracy}, {examples:,} test examples, {len(self.classes)} classes, "
            f"seeds {seeds}, {self.accuracy.method})"
        )

    def __str__(self) -> str:
        rows = self.class_rows()
        lines = [f"{self.accuracy.method}: accuracy {self.accuracy}; {accuracy_bounds(self.accuracy.details)}"]
        lines += filter(None, [below_majority(self.accuracy.details)])
        lines.append(text_table(CLASS_COLUMNS, rows[:MOST_CLASSES]))
        if len(rows) > MOST_CLASSES:
            lines.append(f"and {len(rows) - MOST_CLASSES} rarer classes")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def class_rows(self) -> list[tuple[str, ...]]:
        """Return a row of text for each class that occurs, of `CLASS_COLUMNS`, the most common class first."""
        occurring = [scores for scores in self.by_class() if scores.examples or scores.precision is not None]
        return [scores.row() for scores in sorted(occurring, key=lambda scores: -scores.examples)]

    @property
    def correct(self) -> torch.Tensor:
        """(S, n) bool, whether a prediction is the label; `isoloss.transfer.compare` takes two models'."""
        return self.predictions == self.labels

    @property
    def confusion(self) -> torch.Tensor:
        """(C, C) float64: test examples by label (row) and prediction (column), mean over the seeds."""
        num_classes, num_seeds = len(self.classes), len(self.predictions)
        cells = (self.labels * num_classes + self.predictions).flatten().bincount(minlength=num_classes**2)
        return cells.view(num_classes, num_classes).double() / num_seeds

    def by_class(self) -> tuple[ClassScores, ...]:
        """Return the scores of each class.

        All three are ratios of sums over the examples, `sum_i a_i / sum_i b_i`; with the ratio r, the squared error is
        `sum_i (a_i - r b_i)^2 / (sum_i b_i)^2`, the binomial one where the `b_i` are 0 or 1 and the `a_i` do not depend
        on the seed.
        """
        scores = []
        for index, name in enumerate(self.classes):
            # (n,), the fraction of the seeds that predict the class
            predicted = (self.predictions == index).double().mean(dim=0)
            is_class = (self.labels == index).double()
            hits = predicted * is_class
            scores.append(
                ClassScores(
                    name=name,
                    examples=int(is_class.sum()),
                    precision=_ratio(hits, predicted, "precision"),
                    recall=_ratio(hits, is_class, "recall"),
                    f1=_ratio(2 * hits, is_class + predicted, "F1"),
                )
            )
        return tuple(scores)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types; `confusion` and `by_class` follow from the other fields."""
        return {
            "accuracy": self.accuracy.to_dict(),
            "bayes": None if self.bayes is None else self.bayes.to_dict(),
            "classes": list(self.classes),
            "confusion": self.confusion.tolist(),
            "by_class": [dataclasses.asdict(scores) for scores in self.by_class()],
            "details": dict(self.details),
            "labels": self.labels.tolist(),
            "predictions": self.predictions.tolist(),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TransferResult:
        """Return the result that `to_dict` wrote.

        Raises:
            IsolossError: A key is missing.
        """
        try:
            bayes = document["bayes"]
            return cls(
                accuracy=Estimate.from_dict(document["accuracy"]),
                predictions=torch.tensor(document["predictions"]),
                labels=torch.tensor(document["labels"]),
                classes=tuple(document["classes"]),
                bayes=None if bayes is None else Estimate.from_dict(bayes),
                details=document["details"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IsolossError(f"this is not a result of a transfer: {type(error).__name__} {error}") from error


CLASS_COLUMNS = ("class", "examples", "precision", "recall", "F1")


def below_majority(details: Mapping[str, Any]) -> str | None:
    """Return a sentence on an accuracy below the majority class's, from its `details`; None where it is not below.

    The difference is paired by example. Within two standard errors of 0 the classifier is as good as the constant
    answer; further below, it has not fitted the task, or has fitted little but its training examples.
    """
    above, stderr = details.get("above_majority"), details.get("above_majority_stderr")
    if above is None or stderr is None or above >= 0:
        return None
    text = f"below the majority class by {rounded(-100 * above, 100 * stderr)} percentage points"
    if above + 2 * stderr >= 0:
        return f"{text}: no better than always giving the most common label"
    if (train := details.get("train_accuracy")) is None or isinstance(train, list):
        return f"{text}: the classifier has not learned the task, so this says nothing about the model's features"
    reason = (
        "has learned these by heart: more of them, stronger regularization or a projection helps"
        if train > details["majority_rate"]
        else "could not tell them apart by these features, or was not fitted: with the solver adamw, more epochs or "
        "standardized features may help"
    )
    return f"{text}; the classifier is right on {100 * train:.1f} % of its training examples, so it {reason}"


def score(
    predictions: torch.Tensor,
    labels: torch.Tensor,
    classes: Sequence[str],
    *,
    method: str,
    settings: Mapping[str, Any] | None = None,
    bayes: Estimate | None = None,
    details: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> TransferResult:
    """Return the result of S classifiers on the same n test examples, with predictions (S, n) and labels (n,) in int64.

    The error of the mean accuracy `a` joins the draw of the test examples and the draw of the seeds:
    `stderr^2 = a (1 - a) / n + sd^2 / S`, with `sd` the standard deviation of the seeds' accuracies. Where the
    classifiers of all seeds give nearly the same answers, as trained ones do, that is the standard deviation over fresh
    examples and seeds; where they do not, part of their noise is in both terms and the error is too large. It leaves
    out the draw of the training examples, and at an accuracy of exactly 0 or 1 it is 0: there the accuracy is known to
    about 3 / n. With one seed `sd` is unknown: it is None, and the error is the first term's. `settings` are
    added to the accuracy's details.

    Raises:
        IsolossError: There is no example or seed, the shapes do not fit, or a label or prediction is no class.
    """
    predictions, labels = predictions.cpu(), labels.cpu()
    if predictions.ndim != 2 or labels.shape != predictions.shape[1:] or predictions.numel() == 0:
        raise IsolossError(
            f"a score needs predictions (seeds, examples) and a label of each example, not {tuple(predictions.shape)} "
            f"and {tuple(labels.shape)}"
        )
    check_classes("label", labels, len(classes))
    check_classes("prediction", predictions, len(classes))
    num_seeds, num_test = predictions.shape
    correct = (predictions == labels).double()
    above = {}
    # one example has no spread to take an error from
    if num_test > 1:
        majority = (labels == labels.bincount().argmax()).double()
        difference = crossed_mean(
            correct - majority, unit="difference in accuracy", method="accuracy minus the majority class's"
        )
        above = {"above_majority": difference.value, "above_majority_stderr": difference.stderr}
    accuracies = correct.mean(dim=1)
    value = float(accuracies.mean())
    deviation = float(accuracies.std()) if num_seeds > 1 else None
    binomial = math.sqrt(value * (1 - value) / num_test)
    accuracy = Estimate(
        value=value,
        stderr=math.hypot(binomial, (deviation or 0.0) / math.sqrt(num_seeds)),
        samples=num_test,
        unit="accuracy",
        num_predictions=num_test,
        method=method,
        seconds=seconds,
        details={
            "accuracies": accuracies.tolist(),
            "seed_std": deviation,
            "binomial_stderr": binomial,
            "majority_rate": majority_rate(labels),
            **above,
            **({} if bayes is None else {"bayes_accuracy": bayes.value, "bayes_stderr": bayes.stderr}),
            "num_test": num_test,
            "seeds": num_seeds,
            **(settings or {}),
        },
    )
    return TransferResult(
        accuracy=accuracy,
        predictions=predictions,
        labels=labels,
        classes=tuple(classes),
        bayes=bayes,
        details=details or {},
    )


def write_predictions(path: Path, result: TransferResult, inputs: Sequence[Sequence[str]]) -> None:
    """Write a table of the test examples to `path` as JSON lines, whole or not at all.

    A line has `example` (from 0), `text`, a `pair` where an example is two texts, `label`, and `predicted`, the class
    by each seed: by their names. polars reads it with `read_ndjson`. The `inputs` are those of `TaskData.inputs`.
    """
    names, predicted = result.classes, result.predictions.T.tolist()
    lines = []
    for number, (texts, label, guesses) in enumerate(zip(inputs, result.labels.tolist(), predicted, strict=True)):
        line = {
            "example": number,
            **dict(zip(("text", "pair"), texts, strict=False)),  # one text or two
            "label": names[label],
            "predicted": [names[guess] for guess in guesses],
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    files.write_text(path, "\n".join(lines) + "\n")


def _ratio(a: torch.Tensor, b: torch.Tensor, method: str) -> Estimate | None:
    """Return sum(a) / sum(b) of (n,) a and b, with its error over the draw of the examples; None where sum(b) is 0."""
    total = float(b.sum())
    if total == 0:
        return None
    value = float(a.sum()) / total
    return Estimate(
        value=value,
        stderr=float((a - value * b).square().sum().sqrt()) / total,
        samples=len(a),
        unit="accuracy",
        num_predictions=len(a),
        method=method,
    )
