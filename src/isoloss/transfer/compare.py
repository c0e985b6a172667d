"""Two models on the same test examples: the difference of their accuracies, its error, and whether it is chance.

Shape letters: S seeds, n examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.results import TransferResult

_LEAST_BOOTSTRAP = 100


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """The exact test of whether two classifiers err equally often (McNemar, 1947).

    Attributes:
        only_first: Examples that the first classifies correctly and the second does not.
        only_second: The reverse.
        p_value: Two-sided probability, if both err equally often, of a split of these examples at least as uneven.
    """

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True, kw_only=True)
class TransferComparison:
    """How the accuracies of two models differ, the first's minus the second's.

    Attributes:
        difference: The mean over the seeds, with its error over seeds and examples (`paired_difference`).
        bootstrap95: The 95 % percentile interval over resamples of the examples and of the seeds.
        mcnemar: The test of the two votes: of each model, the class that most of its seeds give.
        resamples: Of the bootstrap.
    """

    difference: Estimate
    bootstrap95: tuple[float, float]
    mcnemar: McNemar
    resamples: int


def compare(
    first: TransferResult, second: TransferResult, *, resamples: int = 10_000, seed: int = 0
) -> TransferComparison:
    """Compare two results on the same examples, the second's accuracy taken from the first's.

    Args:
        first: E.g. of `linear_probe`.
        second: For the same test examples in the same order, and with as many seeds.
        resamples: Of the bootstrap, at least 100.
        seed: Decides them.

    Raises:
        IsolossError: The labels, classes or numbers of seeds differ, or there are too few resamples.

    Example:
        >>> from isoloss.transfer.results import score
        >>> labels = torch.tensor([0, 1] * 20)
        >>> good, bad = labels.clone(), labels.clone()
        >>> good[:4], bad[2:16] = 1 - good[:4], 1 - bad[2:16]
        >>> results = [score(guess[None], labels, ("no", "yes"), method="a guess") for guess in (good, bad)]
        >>> found = compare(*results)
        >>> print(found.difference, found.mcnemar.only_first, found.mcnemar.only_second)
        0.250 ± 0.086 difference in accuracy 12 2
        >>> round(found.mcnemar.p_value, 4)
        0.0129
    """
    if first.classes != second.classes or not torch.equal(first.labels, second.labels):
        raise IsolossError("two results are compared on the same test examples, and these have other labels or classes")
    votes = [result.predictions.mode(dim=0).values == result.labels for result in (first, second)]
    return TransferComparison(
        difference=paired_difference(first.correct, second.correct),
        bootstrap95=bootstrap95(first.correct, second.correct, resamples=resamples, seed=seed),
        mcnemar=mcnemar(*votes),
        resamples=resamples,
    )


def paired_difference(correct_a: torch.Tensor, correct_b: torch.Tensor) -> Estimate:
    """Return the accuracy of a minus that of b, from the same test examples.

    Models that fail on the same examples are compared more sharply this way than by two separate accuracies. With
    `d_si = a_si - b_si` over S seeds and n examples, seeds and examples are two crossed random effects, and the
    variance of the mean of `d` is estimated without bias by `(M_examples + M_seeds - M_rest) / (S n)`, the mean squares
    of the two-way analysis of variance. Where a large rest makes that smaller than one of the two effects alone says,
    the larger of `M_examples / (S n)` and `M_seeds / (S n)` is taken. With one seed it is that of the examples.

    The interval is Student's t with the degrees of freedom f that Satterthwaite (1946) gives such a sum of mean
    squares, `V^2 / f = sum_i M_i^2 / f_i`, and `samples` is f + 1: n where the draw of the examples decides, and down
    to S where that of the seeds does.

    Args:
        correct_a: (S, n) bool, `TransferResult.correct` of the first model, at least 2 examples.
        correct_b: The same of the second model, for the same test examples in the same order.

    Raises:
        IsolossError: The shapes differ, or there are fewer than 2 examples.

    Example:
        >>> a = torch.tensor([[True, True, True, False], [True, True, False, True]])
        >>> b = torch.tensor([[True, False, False, False], [True, True, False, False]])
        >>> print(paired_difference(a, b))
        0.38 ± 0.12 difference in accuracy
    """
    _check(correct_a, correct_b)
    num_seeds, num_examples = correct_a.shape
    difference = correct_a.double() - correct_b.to(correct_a.device).double()
    mean = difference.mean()
    by_example, by_seed = difference.mean(dim=0), difference.mean(dim=1)
    of_examples = num_seeds * float(by_example.var()), num_examples - 1  # mean squares and their degrees of freedom
    parts = [of_examples]
    if num_seeds > 1:
        rest = difference - by_example - by_seed[:, None] + mean
        freedom = (num_seeds - 1) * (num_examples - 1)
        of_seeds = num_examples * float(by_seed.var()), num_seeds - 1
        of_rest = -float(rest.square().sum()) / freedom, freedom
        parts = max([of_examples, of_seeds, of_rest], [of_examples], [of_seeds], key=_total)
    square, squares = _total(parts), sum(part**2 / freedom for part, freedom in parts)
    return Estimate(
        value=float(mean),
        stderr=math.sqrt(square / (num_seeds * num_examples)),
        samples=1 + max(1, round(square**2 / squares)) if squares > 0 else num_examples,
        unit="difference in accuracy",
        num_inputs=num_examples,
        method="paired difference of accuracies",
        details={"seeds": num_seeds, "differences": by_seed.tolist()},
    )


def _total(parts: list[tuple[float, int]]) -> float:
    return math.fsum(part for part, _ in parts)


def mcnemar(correct_a: torch.Tensor, correct_b: torch.Tensor) -> McNemar:
    """Return McNemar's test of two classifiers, from which of the same n examples each gets right.

    Given that the two disagree on m examples, the number that only the first gets right is binomial (m, 1/2) if both
    err equally often. The probability is exact, not that of the chi-squared approximation.

    Args:
        correct_a: (n,) bool.
        correct_b: (n,) bool.

    Raises:
        IsolossError: The shapes differ.

    Example:
        >>> mcnemar(torch.tensor([True] * 6), torch.tensor([False] * 5 + [True]))
        McNemar(only_first=5, only_second=0, p_value=0.0625)
    """
    if correct_a.shape != correct_b.shape or correct_a.ndim != 1:
        raise IsolossError(
            f"McNemar's test needs two (examples,) arrays of one shape, not {tuple(correct_a.shape)} and "
            f"{tuple(correct_b.shape)}"
        )
    only_a, only_b = int((correct_a & ~correct_b).sum()), int((correct_b & ~correct_a).sum())
    m = only_a + only_b
    ways = below = 1  # whole numbers, however large
    for k in range(min(only_a, only_b)):
        ways = ways * (m - k) // (k + 1)
        below += ways
    return McNemar(only_first=only_a, only_second=only_b, p_value=min(1.0, 2 * below / 2**m))


def bootstrap95(
    correct_a: torch.Tensor, correct_b: torch.Tensor, *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the difference in accuracy, over resamples of examples and of seeds.

    Both models are given the same resampled examples and seeds. Examples with the same differences at all seeds are
    alike, so that a resample of the examples is one draw from a multinomial distribution over these patterns. Where
    the seeds of a model disagree much, the interval is too wide, as their noise is in both draws: trust the error of
    `paired_difference` there. With few seeds their own part of the variance is too small by (S - 1) / S.

    Args:
        correct_a: (S, n) bool, as for `paired_difference`.
        correct_b: (S, n) bool.
        resamples: At least 100.
        seed: Decides them; the stream is `"bootstrap"`.

    Raises:
        IsolossError: As for `paired_difference`, or there are too few resamples.
    """
    _check(correct_a, correct_b)
    if resamples < _LEAST_BOOTSTRAP:
        raise IsolossError(f"the bootstrap has {resamples} resamples; it needs at least {_LEAST_BOOTSTRAP}")
    rng = np.random.default_rng(seeds.derive(seed, "bootstrap"))
    difference = correct_a.cpu().numpy().astype(np.int64) - correct_b.cpu().numpy().astype(np.int64)
    num_seeds, num_examples = difference.shape
    patterns, counts = np.unique(difference, axis=1, return_counts=True)
    drawn = rng.multinomial(num_examples, counts / num_examples, size=resamples)
    by_seed = drawn @ patterns.T / num_examples
    chosen = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples)
    low, high = np.quantile((by_seed * chosen).sum(axis=1) / num_seeds, [0.025, 0.975])
    return float(low), float(high)


def _check(correct_a: torch.Tensor, correct_b: torch.Tensor) -> None:
    if correct_a.shape != correct_b.shape or correct_a.ndim != 2:
        raise IsolossError(
            f"a paired comparison needs two (seeds, examples) arrays of one shape, not {tuple(correct_a.shape)} and "
            f"{tuple(correct_b.shape)}"
        )
    num_seeds, num_examples = correct_a.shape
    if num_seeds < 1 or num_examples < 2:
        raise IsolossError(
            f"a paired comparison needs at least 1 seed and 2 examples, not {num_seeds} and {num_examples}"
        )
