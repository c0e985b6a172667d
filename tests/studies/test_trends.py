"""Claims about slopes: the number by regression, at one loss by the study's own slope, and how often they are wrong."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import statsmodels.api as sm
from known_claims import claim, measured

from isoloss.errors import IsolossError
from isoloss.statistics.clusters import cluster_mean, slope_within
from isoloss.studies.claims import Trend, Verdict, at_same_loss, judge_claims
from isoloss.studies.results import CheckpointEstimate
from known_estimates import ON, estimate

GRAMMARS, SEEDS, DOSES = 8, 2, 7
CLUSTERS = [f"g{g}" for g in range(GRAMMARS) for _ in range(SEEDS)]


def accuracy(value):
    one = estimate(float(value), 0.0, unit="accuracy")
    return CheckpointEstimate.of(one, **ON, examples={})


def trend(rng, slope, *, per_nat=0.0, of_rank=0.0, **more):
    """Groups of doses whose accuracy rises by `slope` points with each halving of the trace."""
    groups = []
    for own in np.repeat(slope + 0.3 * rng.standard_normal(GRAMMARS), SEEDS):
        halvings = np.linspace(-1, 1, DOSES) + 0.1 * rng.standard_normal(DOSES)
        rank = 0.5 * halvings + 0.3 * rng.standard_normal(DOSES)
        kl = 1e-4 + 1e-5 * halvings + 1e-6 * rng.standard_normal(DOSES)
        points = 60 + own * halvings + of_rank * rank + per_nat * kl + 0.4 * rng.standard_normal(DOSES)
        groups.append(
            [
                {"trace": measured(8 * 2.0**-h), "rank": measured(2.0**r), "kl": measured(k), "m0": accuracy(p / 100)}
                for h, r, k, p in zip(halvings, rank, kl, points, strict=True)
            ]
        )
    known = {"names": ("sharp", "flat"), "along": "trace", "per": "halving", "needs_same_loss": False}
    return Trend(groups=groups, clusters=CLUSTERS, **known | more)


def by_regression(one, given=()):
    """The slope of each grammar, by statsmodels."""
    slopes = []
    for group in one.groups:
        columns = [[-math.log2(each[one.along].value) for each in group]]
        columns += [[math.log2(each[name].value) for each in group] for name in given]
        outcomes = [100 * each["m0"].value for each in group]
        slopes.append(sm.OLS(outcomes, sm.add_constant(np.array(columns).T)).fit().params[1])
    return cluster_mean(slopes, CLUSTERS, unit="points per halving")


def judged(asked, one, **more):
    return judge_claims([asked], SimpleNamespace(scale=None, replicates={}), **more)[0]


def about(one, **more):
    return claim(0, of=lambda _: one, **more)


@pytest.mark.parametrize("given", [(), ("rank",)])
def test_the_slope_is_that_of_each_groups_regression(given):
    one = trend(np.random.default_rng(0), 1.0, of_rank=2.0, given=given)
    answer = judged(about(one), one).answer()
    expected = by_regression(one, given)
    assert (answer.difference.value, answer.difference.stderr) == pytest.approx(
        (expected.value, expected.stderr), rel=1e-9
    )
    assert answer.difference.unit == "points per halving"
    assert list(answer.numbers) == ["sharp", "flat", "per halving of the trace"]
    words = ", given the rank" if given else ""
    assert f"each halving of the trace{words}, fitted within 16 groups of 7 models" in answer.explanation
    assert "over 8 clusters (t with 7 degrees of freedom)" in answer.explanation
    doubling = Trend(**{**vars(one), "per": "doubling"})
    assert doubling.change("m0").value == pytest.approx(-expected.value, rel=1e-9)


def test_at_one_loss_it_is_less_what_the_loss_explains_with_the_error_of_that():
    rng = np.random.default_rng(1)
    raw = trend(rng, 1.0, per_nat=-40_000.0)
    first = [(group[0], group[-1]) for group in raw.groups]
    points = [checkpoint for pair in first for checkpoint in pair]
    places = [place for place in range(len(first)) for _ in range(2)]
    own = slope_within(
        [100 * each["m0"].value for each in points],
        [each["kl"].value for each in points],
        [CLUSTERS[place] for place in places],
        within=places,
        unit="points per nat",
    )
    one = Trend(**{**vars(raw), "slopes": {"m0": own}, "needs_same_loss": True})
    asked = about(one, loss_rule="adjusted")
    answer = judged(asked, one).answer()
    # by hand: the influence of each grammar on D - b L
    d, loss = raw.change("m0"), raw.change("kl")
    influence = d.influence - own.value * loss.influence - loss.value * own.influence
    assert answer.difference == at_same_loss(one, "m0")
    assert answer.difference.value == pytest.approx(d.value - own.value * loss.value, rel=1e-9)
    assert answer.difference.stderr == pytest.approx(
        math.sqrt(np.square(influence).sum() / (GRAMMARS * (GRAMMARS - 1))), rel=1e-9
    )
    with pytest.raises(IsolossError, match="c0 is about a trend, for which equal losses are not tested"):
        judged(about(one), one)
    # at a scale without verdicts it is given as it is
    assert judged(about(one), one, has_verdicts=False).answer().difference == d


def test_a_slope_has_no_factor_and_equal_traces_have_none():
    one = trend(np.random.default_rng(2), 1.0)
    with pytest.raises(IsolossError, match="but a slope has no first model to multiply"):
        judged(about(one, factor=0.5), one)
    flat = Trend(**{**vars(one), "groups": [[group[0], group[0]] for group in one.groups]})
    with pytest.raises(IsolossError, match="constant in the cluster 'g0'"):
        judged(about(flat), flat)


def test_groups_that_have_no_slope_are_refused():
    one = trend(np.random.default_rng(6), 1.0)
    with pytest.raises(IsolossError, match="16 groups of 7 models and 15 clusters: give each group at least 2 models"):
        Trend(**{**vars(one), "clusters": one.clusters[1:]})
    with pytest.raises(IsolossError, match="16 groups of 1 models and 16 clusters"):
        Trend(**{**vars(one), "groups": [group[:1] for group in one.groups]})
    broken = [[{**each, "trace": measured(0.0)} for each in group] for group in one.groups]
    with pytest.raises(IsolossError, match="trace of a model in a trend is 0; a slope on its logarithm needs it above"):
        Trend(**{**vars(one), "groups": broken}).change("m0")


@pytest.mark.parametrize(("slope", "wrong"), [(0.0, "shown contradicted"), (0.3, "no effect of interest")])
def test_verdicts_on_slopes_are_wrong_as_rarely_as_they_say(slope, wrong):
    """At no slope, and at one as large as the smallest of interest."""
    rng, number, counts = np.random.default_rng(3), 250, 0
    asked = {"role": "primary", "no_effect_within": 0.3}
    for _ in range(number):
        one = trend(rng, slope)
        counts += judged(about(one, **asked), one).answer().verdict.value in (wrong, *wrong.split())
    assert counts / number < 0.05 + 3 * math.sqrt(0.05 * 0.95 / number)


def test_a_slope_that_is_there_is_shown():
    one = trend(np.random.default_rng(4), 1.0)
    result = judged(about(one, role="primary", no_effect_within=0.3), one)
    assert result.answer().verdict is Verdict.SHOWN
    assert result.words(result.answer()) == "shown"
    absent = trend(np.random.default_rng(5), 0.0)
    groups = [[{**each, "m0": accuracy(0.6 + 1e-5 * i)} for i, each in enumerate(group)] for group in absent.groups]
    none = Trend(**{**vars(absent), "groups": groups})
    result = judged(about(none, direction="decrease", no_effect_within=0.3), none)
    assert result.words(result.answer()) == "contradicted, and smaller than 0.3 points per halving"
    assert len(none.pairs) == len(list(itertools.chain(*none.groups))) - len(none.groups)
