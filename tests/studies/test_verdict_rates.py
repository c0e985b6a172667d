"""How often the verdicts of simulated studies are wrong, what they find, and what their intervals hold."""

import math

import numpy as np
import pytest
from known_claims import answers, claim, claims_file, contrast

from isoloss.statistics.estimate import Estimate
from isoloss.statistics.power import minimal_detectable_effect
from isoloss.studies.claims import Verdict

CLAIMS, GRAMMARS, SEEDS = 8, 6, 2
CLUSTERS = [f"g{i}" for i in range(GRAMMARS) for _ in range(SEEDS)]
BETWEEN, WITHIN = 1.0, 0.8
SD_OF_MEANS = math.hypot(BETWEEN, WITHIN / math.sqrt(SEEDS))
VERDICTS = (Verdict.SHOWN, Verdict.CONTRADICTED)
FILE = claims_file(*(claim(i, ("increase", "decrease")[i % 2]) for i in range(CLAIMS)), primary="c0")


def draws(number, *shape, seed, between=BETWEEN, within=WITHIN):
    """Differences (number, *shape, pairs) with mean 0, alike within a grammar."""
    g = np.random.default_rng(seed)
    of_grammar = np.repeat(g.normal(scale=between, size=(number, *shape, GRAMMARS)), SEEDS, axis=-1)
    return of_grammar + g.normal(scale=within, size=of_grammar.shape)


def within_chance(count, number, probability):
    """Whether a count is within three standard errors of what its probability says."""
    return abs(count - number * probability) < 3 * math.sqrt(number * probability * (1 - probability))


def test_wrong_verdicts_are_as_rare_as_they_say():
    number = 300
    losses = draws(number, seed=1, between=0.002, within=0.002)
    of_primary = of_others = uncorrected = tested = 0
    for moves, loss in zip(draws(number, CLAIMS, seed=0), losses, strict=True):
        primary, *others = answers(FILE, contrast(moves, loss, clusters=CLUSTERS))
        tested += primary.verdict is not Verdict.NOT_TESTED
        of_primary += primary.verdict in VERDICTS
        of_others += any(each.verdict in VERDICTS for each in others)
        uncorrected += any(each.p_value is not None and each.p_value < 0.05 for each in others)
    assert tested > 0.95 * number
    assert within_chance(of_primary, tested, 0.05)
    # of seven independent tests, the smallest p is below 0.05 / 7 in 4.9 % of cases
    assert within_chance(of_others, tested, 1 - (1 - 0.05 / 7) ** 7)
    assert uncorrected > 0.2 * number


def test_tests_that_depend_on_each_other_are_not_wrong_more_often():
    number, wrong = 150, 0
    moves = draws(number, 1, seed=2) + draws(number, CLAIMS, seed=3, between=0.3, within=0.3)
    for own in moves:
        _, *others = answers(FILE, contrast(own, clusters=CLUSTERS))
        wrong += any(each.verdict in VERDICTS for each in others)
    assert wrong / number < 0.05 + 3 * math.sqrt(0.05 * 0.95 / number)


def test_losses_at_the_margin_are_let_through_as_rarely_as_they_say():
    number, file = 400, claims_file(claim(0))
    losses = 0.01 + draws(number, seed=4, between=0.001, within=0.001)
    through = sum(
        answers(file, contrast([np.zeros(len(loss))], loss, clusters=CLUSTERS))[0].verdict is not Verdict.NOT_TESTED
        for loss in losses
    )
    assert within_chance(through, number, 0.05)


def test_the_stated_effect_is_found_with_the_stated_power():
    number, alphas = 250, (0.05, 0.05 / (CLAIMS - 1))
    effects = [minimal_detectable_effect(SD_OF_MEANS, GRAMMARS, alpha=alpha) for alpha in alphas]
    moves = draws(number, CLAIMS, seed=5)
    moves[:, 0] += effects[0]  # the primary, which says that it increases
    moves[:, 2] += effects[1]  # one of seven others; the rest are null
    found, squares = [0, 0], [0.0, 0.0]
    for own in moves:
        all_found = answers(FILE, contrast(own, clusters=CLUSTERS))
        for i, each in enumerate((all_found[0], all_found[2])):
            found[i] += each.verdict is Verdict.SHOWN
            squares[i] += each.detectable**2 / number
    assert within_chance(found[0], number, 0.8)
    # Holm's finds a little more than Bonferroni's, where another one is found first
    assert found[1] / number > 0.8 - 3 * math.sqrt(0.16 / number)
    assert found[1] / number < 0.83 + 3 * math.sqrt(0.16 / number)
    # the squared error has the relative variance 2 / 5 with six grammars
    for square, effect in zip(squares, effects, strict=True):
        assert square / effect**2 == pytest.approx(1, abs=3 * math.sqrt(0.4 / number))


@pytest.mark.parametrize("of_loss", [0.004, 0.05])  # through the gate in most cases, and never
def test_the_adjusted_interval_holds_the_difference_at_the_same_loss(of_loss):
    number, degrees, slope, true, error, file = 300, 7, -20.0, 0.5, 4.0, claims_file(claim(0))
    g = np.random.default_rng(6)
    losses = of_loss + draws(number, seed=7, between=0.002, within=0.002)
    moves = true + slope * losses + draws(number, seed=8, between=0.05, within=0.05)
    held = unadjusted = 0
    for own, loss in zip(moves, losses, strict=True):
        stderr = error * math.sqrt(g.chisquare(degrees) / degrees)
        estimated = Estimate(
            value=g.normal(slope, error), stderr=stderr, samples=degrees + 1, unit="", num_predictions=1, method="slope"
        )
        one = contrast([own], loss, clusters=CLUSTERS, slopes={"m0": estimated})
        (found,) = answers(file, one)
        low, high = found.adjusted.ci95
        held += low <= true <= high
        unadjusted += found.interval95[0] <= true <= found.interval95[1]
    chance = 3 * math.sqrt(0.95 * 0.05 / number)
    assert 0.95 - chance < held / number < 0.97 + chance
    assert unadjusted < 0.8 * number
