"""How often the verdicts of simulated studies are wrong, what they find, and what their intervals hold."""

import math

import numpy as np
import pytest
from known_claims import answers, claim, contrast, in_order
from scipy import stats

from isoloss.statistics.estimate import Estimate
from isoloss.statistics.power import equivalence_power, minimal_detectable_effect, paired_power
from isoloss.studies.claims import DECIDED, Verdict

CLAIMS, GRAMMARS, SEEDS = 8, 6, 2
CLUSTERS = [f"g{i}" for i in range(GRAMMARS) for _ in range(SEEDS)]
BETWEEN, WITHIN = 1.0, 0.8


def draws(number, *shape, seed, between=BETWEEN, within=WITHIN):
    """Differences (number, *shape, pairs) with mean 0, alike within a grammar."""
    g = np.random.default_rng(seed)
    of_grammar = np.repeat(g.normal(scale=between, size=(number, *shape, GRAMMARS)), SEEDS, axis=-1)
    return of_grammar + g.normal(scale=within, size=of_grammar.shape)


def within_chance(count, number, probability):
    """Whether a count is within three standard errors of what its probability says."""
    return abs(count - number * probability) < 3 * math.sqrt(number * probability * (1 - probability))


# --- the whole procedure, by estimates as Student's t has them: effects in standard errors of 30 grammars

MARGIN = 3.5
CHECK, CONTROL = claim(0, "decrease", role="manipulation check"), claim(1, role="positive control")
PRIMARY = claim(2, role="primary", no_effect_within=MARGIN)
SECONDARY = [claim(3 + i, ("increase", "decrease")[i % 2], no_effect_within=(MARGIN, None)[i // 4]) for i in range(8)]


def is_wrong(one, answer, effect):
    """Whether a verdict says what is not so."""
    toward = effect if one.direction == "increase" else -effect
    absent = answer.p_no_effect_adjusted is not None and answer.p_no_effect_adjusted < 0.05
    return (
        (answer.verdict is Verdict.SHOWN and toward <= 0)
        or (answer.verdict is Verdict.CONTRADICTED and toward >= 0)
        or (absent and abs(effect) >= one.no_effect_within)
    )


def wrong_and_decided(claims, effects, number, seed, together=0.0):
    """The share of studies with any wrong verdict, and the share whose primary claim is decided."""
    g, samples = np.random.default_rng(seed), 30
    wrong = decided = 0
    for _ in range(number):
        common = together * g.normal() + math.sqrt(1 - together**2) * g.normal(size=len(claims))
        errors = np.sqrt(g.chisquare(samples - 1, size=len(claims)) / (samples - 1))
        found = in_order(claims, np.asarray(effects) + common, stderr=errors, samples=samples)
        wrong += any(map(is_wrong, claims, found, effects))
        decided += any(each.role == "primary" and each.verdict in DECIDED for each in found)
    return wrong / number, decided / number


NONE, LARGE, EDGE = 0.0, 8.0, MARGIN
CASES = {  # the effects of check, control, primary and the secondary claims
    "no effects": (NONE, NONE, NONE, [NONE] * 8),
    "check alone": (-LARGE, NONE, NONE, [NONE] * 8),
    "check and control": (-LARGE, LARGE, NONE, [NONE] * 8),
    "primary at the margin": (-LARGE, LARGE, EDGE, [NONE] * 8),
    "all at the margin": (-LARGE, LARGE, EDGE, [EDGE] * 8),
    "primary shown": (-LARGE, LARGE, 3 * LARGE, [NONE] * 8),
    "some secondary": (-LARGE, LARGE, LARGE, [LARGE, NONE, EDGE, -EDGE, LARGE, NONE, NONE, NONE]),
    "failed control": (-LARGE, -LARGE, NONE, [NONE] * 8),
}


@pytest.mark.parametrize("case", CASES)
def test_any_wrong_verdict_in_a_file_is_as_rare_as_it_says(case):
    check, control, primary, secondary = CASES[case]
    number, claims = 700, [CHECK, CONTROL, PRIMARY, *SECONDARY]
    wrong, _ = wrong_and_decided(claims, [check, control, primary, *secondary], number, seed=len(case))
    assert wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / number)


@pytest.mark.parametrize("together", [0.0, 0.9])
def test_a_file_without_gates_is_wrong_as_rarely(together):
    number = 700
    wrong, _ = wrong_and_decided(SECONDARY, [NONE] * 8, number, seed=3, together=together)
    assert wrong < 0.05 + 3 * math.sqrt(0.05 * 0.95 / number)


@pytest.mark.parametrize(("effect", "within"), [(NONE, MARGIN), (LARGE / 2, MARGIN), (LARGE / 2, None)])
def test_the_primary_claim_is_decided_as_often_as_computed(effect, within):
    number, sd, samples = 700, math.sqrt(30), 30
    claims = [CHECK, CONTROL, claim(2, role="primary", no_effect_within=within)]
    _, decided = wrong_and_decided(claims, [-4 * LARGE, 4 * LARGE, effect], number, seed=9)
    alpha = 0.05 if within is None else 0.025
    power = paired_power(effect, sd, samples, alpha=alpha)
    if within is not None:  # where nothing is shown, the absence of an effect may be
        power += equivalence_power(within, sd, samples, effect=effect, alpha=alpha)
        power -= both_at_once(effect, within, samples, alpha)
    assert within_chance(decided * number, number, power)


def both_at_once(effect, within, samples, alpha):
    """The probability that an effect is shown and shown to be below the margin."""
    t0, t1 = stats.t.ppf(1 - alpha / 2, samples - 1), stats.t.ppf(1 - alpha, samples - 1)
    u = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, samples - 1) / (samples - 1))
    return sum(
        np.clip(
            stats.norm.cdf(within - t1 * u - sign * effect) - stats.norm.cdf(t0 * u - sign * effect), 0, None
        ).mean()
        for sign in (1, -1)
    )


# --- the tests that the procedure is made of, from pairs of checkpoints ----------------------------------------------


def test_losses_at_the_margin_are_let_through_as_rarely_as_they_say():
    number, file = 400, [claim(0)]
    losses = 0.01 + draws(number, seed=4, between=0.001, within=0.001)
    through = sum(
        answers(file, contrast([np.zeros(len(loss))], loss, clusters=CLUSTERS))[0].verdict is not Verdict.NOT_TESTED
        for loss in losses
    )
    assert within_chance(through, number, 0.05)


def test_the_stated_effect_is_found_with_the_stated_power():
    number, alphas = 500, (0.05, 0.05 / (CLAIMS - 1))
    effects = [minimal_detectable_effect(1.0, GRAMMARS, alpha=alpha) for alpha in alphas]
    files = [claim(0, role="primary")], [claim(i) for i in range(1, CLAIMS)]
    g, root = np.random.default_rng(5), math.sqrt(GRAMMARS)
    found, squares = [0, 0], [0.0, 0.0]
    for _ in range(number):
        for i, (file, effect) in enumerate(zip(files, effects, strict=True)):
            true = np.zeros(len(file))
            true[0] = effect
            errors = np.sqrt(g.chisquare(GRAMMARS - 1, size=len(true)) / (GRAMMARS - 1)) / root
            measured = true + g.normal(size=len(true)) / root
            each = in_order(file, measured, stderr=errors, samples=GRAMMARS)[0]
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
    number, degrees, slope, true, error, file = 300, 7, -20.0, 0.5, 4.0, [claim(0)]
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
