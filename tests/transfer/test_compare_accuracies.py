"""Differences of two models on the same examples: their error, McNemar against scipy, the bootstrap against draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.statistics.significance import mcnemar
from isoloss.transfer.compare import accuracy_difference, bootstrap95, compare_accuracy
from isoloss.transfer.results import score


@pytest.mark.parametrize(
    ("num_seeds", "examples", "by_seed", "rest"),
    [(1, 1.0, 0.0, 0.3), (5, 1.0, 0.2, 0.3), (5, 0.3, 1.0, 0.3), (5, 0.0, 0.0, 1.0)],
)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    num_seeds: int, examples: float, by_seed: float, rest: float
) -> None:
    """Of models that err equally often, 95 % of the intervals hold 0: whether examples, probe seeds or both decide."""
    g, draws, hits, values, squares = seeds.generator(7, "coverage"), 500, 0, [], 0.0

    def correct() -> torch.Tensor:
        own = rest * torch.randn(num_seeds, 100, generator=g)
        return examples * torch.randn(100, generator=g) + by_seed * torch.randn(num_seeds, 1, generator=g) + own > 0

    for _ in range(draws):
        found = accuracy_difference(correct(), correct())
        hits += found.ci95[0] <= 0 <= found.ci95[1]
        values.append(found.value)
        squares += found.stderr**2 / draws
    # four standard errors of a share of 95 %, and two points for the skewness of few seeds
    error = math.sqrt(0.95 * 0.05 / draws)
    assert 0.93 - 4 * error < hits / draws
    if examples:  # noise of cells alone is in two of the mean squares: the error is the larger one's
        assert hits / draws < 0.95 + 4 * error
    assert 1 - 4 * math.sqrt(2 / draws) < squares / np.var(values, ddof=1) < 1.2 + 4 * math.sqrt(2 / draws)


def test_pairing_sees_through_shared_difficulty() -> None:
    g = seeds.generator(6, "pairs")
    easy = torch.rand(2000, generator=g) < 0.7
    b = easy.expand(3, -1).clone()
    a = b.clone()
    a[:, :40] = True  # a gets some of the hard ones as well
    gained = int((~easy[:40]).sum())
    estimate = accuracy_difference(a, b)
    assert estimate.value == pytest.approx(gained / 2000)
    d = (a[0].double() - b[0].double()).var() / 2000
    assert estimate.stderr == pytest.approx(math.sqrt(float(d)))
    unpaired = math.sqrt(2 * 0.7 * 0.3 / 2000)
    assert estimate.stderr < unpaired / 5
    # one seed has the error of the examples alone, which is the same here
    assert accuracy_difference(a[:1], b[:1]).stderr == pytest.approx(estimate.stderr)


def test_the_same_answers_differ_by_exactly_nothing() -> None:
    a = torch.tensor([[True, False, True], [False, True, True]])
    assert (accuracy_difference(a, a).value, accuracy_difference(a, a).stderr) == (0.0, 0.0)
    assert bootstrap95(a, a) == (0.0, 0.0)
    assert mcnemar(a[0].numpy(), a[0].numpy()).p_value == 1.0


@pytest.mark.parametrize(
    ("only_a", "only_b"), [(0, 0), (1, 0), (0, 7), (5, 5), (3, 12), (40, 60), (700, 800), (5200, 4800)]
)
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    a = np.array([True] * only_a + [False] * only_b + [True, False])
    b = np.array([False] * only_a + [True] * only_b + [True, False])
    found = mcnemar(a, b)
    assert (found.only_first, found.only_second) == (only_a, only_b)
    expected = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert found.p_value == pytest.approx(expected, rel=1e-8)


def test_the_bootstrap_is_that_of_drawing_the_rows_one_by_one() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(3, 200, generator=g) < 0.8, torch.rand(3, 200, generator=g) < 0.6
    low, high = bootstrap95(a, b, resamples=20_000, seed=1)
    difference = a.double() - b.double()
    rows = torch.randint(200, (4000, 200), generator=g)
    chosen = torch.randint(3, (4000, 3), generator=g)
    means = torch.stack([difference[s][:, r].mean() for s, r in zip(chosen, rows, strict=True)])
    slow_low, slow_high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # a quantile q of m draws of a normal has the error sqrt(q (1 - q) / m) / density: 2.67 deviations / sqrt(m)
    tolerance = 4 * 2.67 * float(means.std()) * math.sqrt(1 / 4000 + 1 / 20_000)
    assert abs(low - slow_low) < tolerance
    assert abs(high - slow_high) < tolerance
    assert bootstrap95(a, b, resamples=20_000, seed=1) == (low, high)


def test_with_alike_seeds_the_bootstrap_is_twice_the_error_wide() -> None:
    g = torch.Generator().manual_seed(2)
    a = (torch.rand(4000, generator=g) < 0.8).expand(5, -1)
    b = (torch.rand(4000, generator=g) < 0.7).expand(5, -1)
    low, high = bootstrap95(a, b)
    estimate = accuracy_difference(a, b)
    assert (low + high) / 2 == pytest.approx(estimate.value, abs=0.1 * estimate.stderr)
    assert (high - low) / 2 == pytest.approx(1.96 * estimate.stderr, rel=0.05)


def test_comparing_takes_the_vote_of_the_seeds() -> None:
    labels = torch.tensor([0, 1, 2, 0])
    first = score(torch.tensor([[0, 1, 2, 1], [0, 2, 2, 0], [0, 1, 0, 0]]), labels, "abc", method="m")
    second = score(torch.tensor([[0, 0, 0, 0], [1, 0, 2, 0], [1, 0, 0, 0]]), labels, "abc", method="m")
    (pair,) = compare_accuracy([first, second], resamples=100).pairs
    assert (pair.first, pair.second) == ("0", "1")
    assert (pair.mcnemar.only_first, pair.mcnemar.only_second) == (3, 0)  # votes a b c a and b a a a
    assert pair.difference.value == pytest.approx(9 / 12 - 5 / 12)
    assert pair.bootstrap95[0] <= pair.difference.value <= pair.bootstrap95[1]


def test_a_comparison_prints_as_a_small_table() -> None:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(30, (200,), generator=g)
    guesses = torch.randint(30, (3, 2, 200), generator=g)
    names = ["small", "<large>", "lookup"]
    results = {
        name: score(own, labels, list(map(str, range(30))), method="m")
        for name, own in zip(names, guesses, strict=True)
    }
    comparison = compare_accuracy(results, resamples=100)
    lines = str(comparison).splitlines()
    assert len(lines) == 11  # the majority class, a heading and three models, and as many differences
    assert [pair for pair in ("small minus <large>", "small minus lookup") if pair in str(comparison)]
    assert max(map(len, [*lines, repr(comparison)])) < 120
    assert "&lt;large&gt;" in comparison._repr_html_()


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"not \(2, 3\) and \(2, 4\)"),
        (torch.ones(3), torch.ones(3), r"two \(seeds, examples\) arrays"),
        (torch.ones(2, 1), torch.ones(2, 1), "at least 1 seed and 2 examples, not 2 and 1"),
    ],
)
def test_answers_that_cannot_be_paired_are_named(a: torch.Tensor, b: torch.Tensor, message: str) -> None:
    for function in (accuracy_difference, bootstrap95):
        with pytest.raises(IsolossError, match=message):
            function(a, b)


def test_results_of_other_examples_are_not_compared() -> None:
    first = score(torch.tensor([[0, 1]]), torch.tensor([0, 1]), "ab", method="m")
    for labels, classes in ((torch.tensor([0, 0]), "ab"), (torch.tensor([0, 1]), "ba")):
        other = score(torch.tensor([[0, 1]]), labels, classes, method="m")
        with pytest.raises(IsolossError, match="a and b cannot be compared: their test examples have other labels or"):
            compare_accuracy({"a": first, "b": other})
    with pytest.raises(IsolossError, match="99 resamples"):
        compare_accuracy([first, first], resamples=99)
    with pytest.raises(IsolossError, match="at least two results, not 1"):
        compare_accuracy([first])
    with pytest.raises(IsolossError, match="McNemar's test needs"):
        mcnemar(np.ones(2, dtype=bool), np.ones(3, dtype=bool))
