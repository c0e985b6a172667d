"""Models on the same test examples: the differences of their accuracies, their errors, and whether they are chance.

Shape letters: S seeds, n examples.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError, require
from isoloss.statistics.clusters import crossed_mean
from isoloss.statistics.estimate import Estimate, accuracy_bounds, rounded
from isoloss.statistics.significance import McNemar, mcnemar
from isoloss.statistics.tables import text_table
from isoloss.transfer.results import TransferResult

_LEAST_BOOTSTRAP = 100


@dataclass(frozen=True, kw_only=True)
class AccuracyDifference:
    """How the accuracies of two models differ, the first's minus the second's.

    Attributes:
        first: The first model.
        second: The second model.
        difference: The mean over the seeds, with its error over seeds and examples (`accuracy_difference`).
        bootstrap95: The 95 % percentile interval over resamples of the examples and of the seeds.
        mcnemar: The test on the majority votes of each model's seeds.
        resamples: Number of bootstrap resamples.
    """

    first: str
    second: str
    difference: Estimate
    bootstrap95: tuple[float, float]
    mcnemar: McNemar
    resamples: int

    def row(self, first: str | None = None, second: str | None = None) -> tuple[str, ...]:
        """Return the cells of `DIFFERENCE_COLUMNS`, in percentage points, perhaps with shorter names of the models."""
        return (
            f"{first or self.first} minus {second or self.second}",
            rounded(100 * self.difference.value, 100 * self.difference.stderr),
            "{:.2f} to {:.2f}".format(*(100 * end for end in self.bootstrap95)),
            f"{self.mcnemar.only_first} : {self.mcnemar.only_second}",
            f"{self.mcnemar.p_value:.2g}",
        )


DIFFERENCE_COLUMNS = ("", "difference", "95 % interval (bootstrap)", "only one is right", "p (McNemar)")


@dataclass(frozen=True, kw_only=True, repr=False)
class AccuracyComparison:
    """The accuracies of several models on the same test examples, and their differences.

    Attributes:
        results: By the model's name.
        pairs: Of every two models.
    """

    results: Mapping[str, TransferResult]
    pairs: tuple[AccuracyDifference, ...]

    def __repr__(self) -> str:
        accuracies = ", ".join(f"{name} {result.accuracy}" for name, result in self.results.items())
        return f"AccuracyComparison({accuracies})"

    def __str__(self) -> str:
        models = [(name, str(result.accuracy)) for name, result in self.results.items()]
        return "\n".join(
            [
                accuracy_bounds(next(iter(self.results.values())).accuracy.details),
                text_table(("model", "accuracy"), models),
                "",
                "differences in percentage points",
                text_table(DIFFERENCE_COLUMNS, [pair.row() for pair in self.pairs]),
            ]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def compare_accuracy(
    results: Mapping[str, TransferResult] | Sequence[TransferResult], *, resamples: int = 10_000, seed: int = 0
) -> AccuracyComparison:
    """Compare the accuracies of two or more models on the same test examples.

    Args:
        results: By the model's name, e.g. from `linear_probe`; or in a list, where a model's name is its index. All
            have the same test examples in the same order, and equally many seeds.
        resamples: Number of bootstrap resamples, at least 100.
        seed: Decides the resamples.

    Raises:
        IsolossError: There are fewer than two results; the labels, classes or numbers of seeds differ; or there are too
            few resamples.

    Example:
        >>> import torch
        >>> from isoloss import compare_accuracy
        >>> from isoloss.transfer.results import score
        >>> labels = torch.tensor([0, 1] * 20)
        >>> good, bad = labels.clone(), labels.clone()
        >>> good[:4], bad[2:16] = 1 - good[:4], 1 - bad[2:16]
        >>> first, second = (score(guess[None], labels, ("no", "yes"), method="a guess") for guess in (good, bad))
        >>> print(compare_accuracy({"good": first, "bad": second}))
        majority class 50.00 %
        model      accuracy
        good   90.0 ± 4.7 %
        bad    65.0 ± 7.5 %
        <BLANKLINE>
        differences in percentage points
                        difference  95 % interval (bootstrap)  only one is right  p (McNemar)
        good minus bad  25.0 ± 8.6              7.50 to 42.50             12 : 2        0.013
    """
    named = dict(results) if isinstance(results, Mapping) else {str(i): result for i, result in enumerate(results)}
    for name, result in named.items():
        require(f"result {name}", result, TransferResult, "what linear_probe or finetune returns")
    if len(named) < 2:
        raise IsolossError(f"a comparison needs at least two results, not {len(named)}")
    pairs = itertools.combinations(named.items(), 2)
    return AccuracyComparison(
        results=named, pairs=tuple(_difference(*first, *second, resamples, seed) for first, second in pairs)
    )


def _difference(
    first: str, result: TransferResult, second: str, other: TransferResult, resamples: int, seed: int
) -> AccuracyDifference:
    if result.classes != other.classes or not torch.equal(result.labels, other.labels):
        raise IsolossError(f"{first} and {second} cannot be compared: their test examples have other labels or classes")
    votes = [each.predictions.mode(dim=0).values == each.labels for each in (result, other)]
    return AccuracyDifference(
        first=first,
        second=second,
        difference=accuracy_difference(result.correct, other.correct),
        bootstrap95=bootstrap95(result.correct, other.correct, resamples=resamples, seed=seed),
        mcnemar=mcnemar(*(vote.numpy() for vote in votes)),
        resamples=resamples,
    )


def accuracy_difference(correct_a: torch.Tensor, correct_b: torch.Tensor) -> Estimate:
    """Return the accuracy of a minus that of b, from the same test examples.

    Models that fail on the same examples are compared more sharply this way than by two separate accuracies. Seeds and
    examples are two crossed random effects: `isoloss.statistics.clusters.crossed_mean` of `d_si = a_si - b_si` over S
    seeds and n examples has the formula, and the degrees of freedom for the interval. The arrays (S, n) are
    `TransferResult.correct` of two models on the same examples, at least 2.

    Example:
        >>> import torch
        >>> from isoloss.transfer.compare import accuracy_difference
        >>> a = torch.tensor([[True, True, True, False], [True, True, False, True]])
        >>> b = torch.tensor([[True, False, False, False], [True, True, False, False]])
        >>> print(accuracy_difference(a, b))
        38 ± 24 points
    """
    _check(correct_a, correct_b)
    difference = correct_a.double() - correct_b.to(correct_a.device).double()
    num_seeds, num_examples = difference.shape
    return dataclasses.replace(
        crossed_mean(difference, unit="difference in accuracy", method="paired difference of accuracies"),
        num_predictions=num_examples,
        details={"seeds": num_seeds, "differences": difference.mean(dim=1).tolist()},
    )


def bootstrap95(
    correct_a: torch.Tensor, correct_b: torch.Tensor, *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the difference in accuracy, over resamples of examples and of seeds.

    Both models are given the same resampled examples and seeds. Examples with the same differences at all seeds are
    alike, so that a resample of the examples is one draw from a multinomial distribution over these patterns. Where
    the seeds of a model disagree much, the interval is too wide, as their noise is in both draws: trust the error of
    `accuracy_difference` there. With few seeds their own part of the variance is too small by (S - 1) / S.
    """
    _check(correct_a, correct_b)
    if resamples < _LEAST_BOOTSTRAP:
        raise IsolossError(f"the bootstrap has {resamples} resamples; it needs at least {_LEAST_BOOTSTRAP}")
    rng = np.random.default_rng(seeds.derive(seed, "bootstrap"))
    difference = correct_a.cpu().numpy().astype(np.int64) - correct_b.cpu().numpy().astype(np.int64)
    num_seeds, num_examples = difference.shape
    # (S, P) patterns, of which there are at most 3^S: the memory of a resample is P numbers, not n
    patterns, counts = np.unique(difference, axis=1, return_counts=True)
    drawn = rng.multinomial(num_examples, counts / num_examples, size=resamples)
    by_seed = drawn @ patterns.T / num_examples  # (resamples, S)
    chosen = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples)
    low, high = np.quantile((by_seed * chosen).sum(axis=1) / num_seeds, [0.025, 0.975])
    return float(low), float(high)


def _check(correct_a: torch.Tensor, correct_b: torch.Tensor) -> None:
    if correct_a.shape != correct_b.shape or correct_a.ndim != 2:
        shapes = f"{tuple(correct_a.shape)} and {tuple(correct_b.shape)}"
        raise IsolossError(f"a paired comparison needs two (seeds, examples) arrays of one shape, not {shapes}")
    num_seeds, num_examples = correct_a.shape
    if num_seeds < 1 or num_examples < 2:
        raise IsolossError(
            f"a paired comparison needs at least 1 seed and 2 examples, not {num_seeds} and {num_examples}"
        )
