"""Accuracies with their errors, the confusion matrix and the scores by class, recounted in plain Python."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.results import TransferResult, below_majority, score, write_predictions

CLASSES = ("x", "y", "z")
LABELS = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1])
PREDICTIONS = torch.tensor([[0, 1, 1, 1, 2, 0, 0, 1], [0, 0, 1, 0, 2, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1]])
BAYES = Estimate(value=0.9, stderr=0.01, samples=8, unit="accuracy", num_predictions=8, method="by hand")


def result(**changes: object) -> TransferResult:
    return score(PREDICTIONS, LABELS, CLASSES, **{"method": "by hand", **changes})  # type: ignore[arg-type]


def test_an_accuracy_below_the_majority_class_says_so():
    labels = torch.tensor([0] * 60 + [1] * 40)
    wrong = torch.tensor([0] * 10 + [1] * 90)  # 50 right, 60 by the majority; the difference is -1, 0 or 1
    details = score(wrong[None], labels, ("a", "b"), method="x", settings={"train_accuracy": 0.4}).accuracy.details
    differences = torch.tensor([0.0] * 10 + [-1.0] * 50 + [1.0] * 40)
    assert details["above_majority"] == pytest.approx(-0.1)
    assert details["above_majority_stderr"] == pytest.approx(float(differences.std()) / 10)
    assert "no better than always giving the most common label" in below_majority(details)
    far = score(1 - labels[None], labels, ("a", "b"), method="x", settings={"train_accuracy": 0.4})
    assert "below the majority class by 60" in str(far)
    assert (
        "40.0 % of its training examples, so it could not tell them apart by these features, or was not fitted"
        in str(far)
    )
    heart = score(1 - labels[None], labels, ("a", "b"), method="x", settings={"train_accuracy": 1.0})
    assert "learned these by heart" in str(heart)
    assert below_majority(score(labels[None], labels, ("a", "b"), method="x").accuracy.details) is None


def test_the_accuracy_and_its_errors() -> None:
    accuracy = result(settings={"num_train": 5}, bayes=BAYES, seconds=2.0).accuracy
    shares = [sum(p == y for p, y in zip(row, LABELS.tolist(), strict=True)) / 8 for row in PREDICTIONS.tolist()]
    mean = sum(shares) / 3
    assert accuracy.value == pytest.approx(mean)
    assert accuracy.details["accuracies"] == pytest.approx(shares)
    assert accuracy.details["seed_std"] == pytest.approx(statistics.stdev(shares))
    assert accuracy.details["binomial_stderr"] == pytest.approx(math.sqrt(mean * (1 - mean) / 8))
    assert accuracy.stderr == pytest.approx(math.sqrt(mean * (1 - mean) / 8 + statistics.variance(shares) / 3))
    expected = {"majority_rate": 5 / 8, "bayes_accuracy": 0.9, "bayes_stderr": 0.01, "num_train": 5, "num_test": 8}
    assert expected.items() <= accuracy.details.items()
    assert accuracy.seconds == 2.0
    assert "bayes_accuracy" not in result().accuracy.details


def test_one_seed_says_nothing_about_the_seeds() -> None:
    accuracy = score(PREDICTIONS[:1], LABELS, CLASSES, method="m").accuracy
    assert accuracy.details["seed_std"] is None
    assert accuracy.stderr == accuracy.details["binomial_stderr"] > 0


def test_the_confusion_matrix_counts_means_over_the_seeds() -> None:
    counts = Counter((y, p) for row in PREDICTIONS.tolist() for y, p in zip(LABELS.tolist(), row, strict=True))
    assert result().confusion.tolist() == [[counts[y, p] / 3 for p in range(3)] for y in range(3)]
    assert float(result().confusion.sum()) == pytest.approx(8)
    assert int(result().correct.sum()) == sum(counts[y, y] for y in range(3))


def test_scores_by_class() -> None:
    confusion = result().confusion
    for index, scores in enumerate(result().by_class()):
        hits, called, examples = (float(confusion[index, index]), float(confusion[:, index].sum()), scores.examples)
        assert scores.name == CLASSES[index]
        assert examples == LABELS.tolist().count(index)
        for found, top, bottom in (
            (scores.precision, hits, called),
            (scores.recall, hits, examples),
            (scores.f1, 2 * hits, examples + called),
        ):
            if bottom == 0:
                assert found is None
            else:
                assert found is not None
                assert found.value == pytest.approx(top / bottom)
    z = result().by_class()[2]
    assert (z.examples, z.recall) == (0, None)
    assert z.precision is not None
    assert z.precision.value == 0


def test_the_errors_of_the_scores_are_their_spread_over_fresh_examples() -> None:
    g = torch.Generator().manual_seed(0)
    found: dict[str, list[tuple[float, float]]] = {"precision": [], "recall": [], "f1": []}
    for _ in range(400):
        labels = (torch.rand(300, generator=g) < 0.3).long()
        hard = torch.rand(300, generator=g) < 0.4  # examples that both seeds guess
        wrong = torch.rand(2, 300, generator=g) < torch.where(hard, 0.5, 0.05)
        scores = score(torch.where(wrong, 1 - labels, labels), labels, "ab", method="m").by_class()[1]
        for name, values in found.items():
            own = getattr(scores, name)
            values.append((own.value, own.stderr))
    for values in found.values():
        spread = statistics.stdev(value for value, _ in values)
        mean_error = statistics.mean(error for _, error in values)
        # a standard deviation of 400 values is known to 1 / sqrt(800) of itself
        assert mean_error == pytest.approx(spread, rel=4 / math.sqrt(800))


def test_a_result_survives_json() -> None:
    first = result(bayes=BAYES, details={"losses_nats": [[1.5, 0.5]]})
    second = TransferResult.from_dict(json.loads(json.dumps(first.to_dict(), allow_nan=False)))
    assert second.to_dict() == first.to_dict()
    assert second.bayes == BAYES
    assert torch.equal(second.predictions, PREDICTIONS)
    assert second.predictions.dtype == torch.int64
    with pytest.raises(IsolossError, match="not a result of a transfer"):
        TransferResult.from_dict({"accuracy": {}})


def test_predictions_are_a_table_of_the_examples(tmp_path: Path) -> None:
    inputs = [(f"first {i}", 'with "quotes"\nand é') for i in range(8)]
    write_predictions(tmp_path / "new" / "p.jsonl", result(), inputs)
    table = pl.read_ndjson(tmp_path / "new" / "p.jsonl")
    assert table.columns == ["example", "text", "pair", "label", "predicted"]
    assert table["text"].to_list() == [first for first, _ in inputs]
    assert table["pair"].to_list() == [second for _, second in inputs]
    assert table["label"].to_list() == [CLASSES[y] for y in LABELS.tolist()]
    assert table["predicted"].to_list() == [[CLASSES[p] for p in column] for column in PREDICTIONS.T.tolist()]


@pytest.mark.parametrize(
    ("predictions", "labels", "message"),
    [
        (PREDICTIONS[0], LABELS, r"not \(8,\) and \(8,\)"),
        (PREDICTIONS, LABELS[:7], r"not \(3, 8\) and \(7,\)"),
        (PREDICTIONS[:0], LABELS, r"not \(0, 8\)"),
        (PREDICTIONS[:, :0], LABELS[:0], r"not \(3, 0\)"),
        (PREDICTIONS + 1, LABELS, "the predictions go from 1 to 3; with 3 classes they are 0 to 2"),
        (PREDICTIONS, LABELS - 1, "the labels go from -1 to 0"),
    ],
)
def test_what_cannot_be_scored_is_named(predictions: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(IsolossError, match=message):
        score(predictions, labels, CLASSES, method="m")


def test_results_print_as_a_line_or_a_table() -> None:
    g = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(40, (600,), generator=g), torch.randint(40, (3, 600), generator=g)
    result = score(guesses, labels, [f"<{name}>" for name in range(40)], method="a guess")
    assert "tensor" not in repr(result)
    assert len(repr(result)) < 120
    lines = str(result).splitlines()
    assert lines[0].startswith("a guess: accuracy ")
    assert lines[1].startswith("below the majority class by ")
    assert lines[2].split() == ["class", "examples", "precision", "recall", "F1"]
    assert (len(lines), lines[-1]) == (16, "and 28 rarer classes")
    assert "&lt;8&gt;" in result._repr_html_()
