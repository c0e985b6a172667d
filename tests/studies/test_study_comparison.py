"""Differences, means over seeds and what they say to a claim, on known numbers, against scipy and by brute force."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

import known_estimates as known
from isoloss.errors import IsolossError
from isoloss.studies import Experiment, Measurement, Scale
from isoloss.studies.claims import OTHER_PARAMETERS, Claim, Contrast, Verdict, same_loss
from isoloss.studies.claims import answer as answers
from isoloss.studies.results import CheckpointEstimate, change, common_measures, difference, over_seeds

FLATTER = Claim(id="flatter", statement="Flatter.", direction="decrease", of=print, measures="trace")
BETTER = Claim(id="better", statement="Better.", direction="increase", of=print, measures="transfer")
TRACE, ROOT = {"": "trace"}, {"root": "probe-root"}


def at(kl=0.04, trace=40.0, root=0.5):
    return known.checkpoint(("root",), kl, trace, (root,))


def on_their_own(pairs):
    """The same pairs, each measured on sentences of its own, so that the error is over seeds alone."""
    return [
        tuple({key: dataclasses.replace(each, inputs=f"sentences {i}") for key, each in one.items()} for one in pair)
        for i, pair in enumerate(pairs)
    ]


def answer(claim, keys, pairs, where=""):
    (found,) = answers(claim, Contrast(names=("plain", "other"), pairs=pairs, where=where), keys)
    return found


def test_a_difference_is_that_of_the_differences_of_each_sentence():
    """Against the plain formula: the mean and s / sqrt(n) of a_i - b_i, whatever the two have in common."""
    g = np.random.default_rng(0)
    shared = g.normal(size=2000)
    a, b = 3 + shared + 0.1 * g.normal(size=2000), 2.9 + shared + 0.1 * g.normal(size=2000)
    measures = []
    for values in (a, b):
        one = known.measured(values.mean(), values.std(ddof=1) / math.sqrt(2000), influence=values - values.mean())
        measures.append(one)
    moved = difference(*measures)
    assert moved.value == pytest.approx((a - b).mean())
    assert moved.stderr == pytest.approx((a - b).std(ddof=1) / math.sqrt(2000), rel=1e-5)
    unpaired = math.hypot(*(one.stderr for one in measures))
    assert moved.stderr < unpaired / 5
    halved = difference(*measures, factor=0.5)
    assert halved.value == pytest.approx((a - 0.5 * b).mean())
    assert halved.stderr == pytest.approx((a - 0.5 * b).std(ddof=1) / math.sqrt(2000), rel=1e-5)


def test_a_difference_of_traces_counts_the_samples_not_the_rows_of_the_influence():
    """As `isoloss.compare` does: behind the samples, a trace's influence has rows for its control variates."""
    g = np.random.default_rng(0)
    rows, n = g.normal(size=(2, 25)), 20
    of = [
        dataclasses.replace(known.measured(1.0, influence=row), samples=n, examples={"influence": row}) for row in rows
    ]
    found = difference(*of)
    assert found.samples == n
    assert found.stderr == pytest.approx(math.sqrt(((rows[0] - rows[1]) ** 2).sum() / (n * (n - 1))))


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says():
    g, draws, n, hits, unpaired = np.random.default_rng(1), 1000, 20, 0, 0
    for _ in range(draws):
        shared = g.exponential(size=n)
        pair = [shared + 0.3 * g.normal(size=n) for _ in "ab"]
        errors = [values.std(ddof=1) / math.sqrt(n) for values in pair]
        moved = difference(
            *(
                known.measured(values.mean(), error, influence=values - values.mean())
                for values, error in zip(pair, errors, strict=True)
            )
        )
        hits += moved.ci95[0] <= 0 <= moved.ci95[1]
        unpaired += abs(moved.value) <= 1.96 * math.hypot(*errors)
    assert abs(hits / draws - 0.95) < 4 * math.sqrt(0.95 * 0.05 / draws)
    assert unpaired / draws > 0.99  # the sum of two errors is far too wide


def test_differences_of_accuracies_are_in_points_and_paired_over_the_examples():
    later, earlier = known.accuracy(0.55), known.accuracy(0.5)
    moved = difference(later, earlier)
    assert moved.value == pytest.approx(5.0)
    assert moved.unit == "percentage points"
    # both probes agree, so that the examples alone decide: 100 s / sqrt(n) of the differences, by hand
    each = [(one.examples["predictions"][0] == one.examples["labels"]).astype(float) for one in (later, earlier)]
    assert moved.stderr == pytest.approx(100 * (each[0] - each[1]).std(ddof=1) / math.sqrt(known.EXAMPLES))
    nested = known.accuracy(0.5)
    more = nested.examples["predictions"].copy()
    more[:, :200] = nested.examples["labels"][:200]  # right wherever the other is, and on some more
    gained = (nested.examples["predictions"][0, :200] != nested.examples["labels"][:200]).mean() / 20
    better = CheckpointEstimate.of(
        known.estimate(0.5 + gained, 0.005, "accuracy"),
        **known.ON,
        examples={**nested.examples, "predictions": more},
    )
    moved = difference(better, nested)
    assert moved.value == pytest.approx(100 * gained)
    assert moved.stderr == pytest.approx(100 * math.sqrt(gained * (1 - gained) / known.EXAMPLES), rel=1e-3)
    assert (
        answer(BETTER, ROOT, [({**at(), "probe-root": nested}, {**at(), "probe-root": better})]).verdict
        is Verdict.SHOWN
    )


def test_what_was_measured_on_other_sentences_is_not_paired():
    a, b = known.measured(1.0), known.measured(2.0)
    elsewhere = CheckpointEstimate.of(b, inputs="other sentences", settings=known.SETTINGS, examples=b.examples)
    without = CheckpointEstimate.of(b, **known.ON, examples={})
    for other in (elsewhere, without, known.accuracy(0.5)):
        with pytest.raises(IsolossError, match="not made on the same examples"):
            difference(other, a)
    with pytest.raises(IsolossError, match=r"not with a factor of 0\.5"):
        difference(known.accuracy(0.5), known.accuracy(0.6), factor=0.5)


def test_a_mean_over_seeds_is_that_of_a_paired_t_test():
    before, after = [40.0, 43.5, 38.0], [36.0, 41.0, 33.0]
    pairs = on_their_own([(at(trace=a), at(trace=b)) for a, b in zip(before, after, strict=True)])
    moved = change(pairs, "trace")
    theirs = stats.ttest_rel(after, before)
    assert moved.value / moved.stderr == pytest.approx(theirs.statistic, rel=1e-9)
    interval = theirs.confidence_interval(0.95)
    assert moved.ci95 == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert moved.samples == 3


def right_on(correct):
    """The accuracy of one probe that is right on these examples."""
    examples = {"predictions": (~correct)[None].astype(np.uint8), "labels": np.zeros(len(correct), np.uint8)}
    return dataclasses.replace(known.accuracy(0.5), value=correct.mean(), examples=examples)


@pytest.mark.parametrize("kind", ["trace", "accuracy"])
def test_examples_that_all_seeds_share_are_in_the_error(kind):
    """Drawn 400 times: an effect of each seed, and one of each example, which is the same at all seeds."""
    g, n, covered, alone = np.random.default_rng(0), 64, [], []
    for _ in range(400):
        before, after, pairs = *g.normal(size=(2, n)), []
        for _ in range(6):
            if kind == "trace":
                influences = before, after + 0.1 * g.normal() + 0.5 * g.normal(size=n)
                two = [known.measured(each.mean(), influence=each - each.mean()) for each in influences]
            else:
                two = [right_on(each + 0.5 * g.normal(size=n) > 0) for each in (before, after)]
            pairs.append(tuple({kind: each} for each in two))
        found = change(pairs, kind)
        for which, (low, high) in (
            (covered, found.ci95),
            (alone, over_seeds([difference(second[kind], first[kind]) for first, second in pairs]).ci95),
        ):
            which.append(low <= 0 <= high)
    assert np.mean(alone) < 0.8
    assert np.mean(covered) == pytest.approx(0.95, abs=0.035)
    said = Contrast(names=("plain", "other"), pairs=pairs).described(kind, found)
    assert f"over 6 seeds (t with {found.freedom:.3g} degrees of freedom), and over the examples, which all" in said


def test_accuracies_keep_their_unit_in_a_mean():
    shares = over_seeds([at(root=share)["probe-root"] for share in (0.5, 0.52, 0.54)])
    assert str(shares) == "52.0 ± 1.2 %"


def test_one_run_shows_no_spread():
    with pytest.raises(IsolossError, match="at least two runs"):
        over_seeds([known.estimate(1.0)])


@pytest.mark.parametrize(
    ("moves", "same"),
    [
        ((0.0, 0.0, 0.0), True),
        ((0.009, 0.009, 0.009), True),  # no pair of exactly the same loss, and a mean that surely is within
        ((0.003, -0.003, 0.003), True),
        # two degrees of freedom: 2.9 standard errors on either side of the mean
        ((0.008, -0.008, 0.008), False),
        ((0.0, 0.0, 0.012), False),
        ((0.02, 0.02, 0.02), False),
    ],
)
def test_the_mean_difference_of_the_loss_is_shown_to_be_within_the_margin(moves, same):
    found = same_loss(on_their_own([(at(), at(kl=0.04 + move)) for move in moves]))
    assert found.shown is same
    if len(set(moves)) > 1:
        sides = {"greater": -0.01, "less": 0.01}
        theirs = [stats.ttest_1samp(moves, edge, alternative=side).pvalue for side, edge in sides.items()]
        assert found.p_value == pytest.approx(max(theirs), rel=1e-6)


def test_traces_of_models_of_two_sizes_are_not_tested():
    def of_size(number, trace):
        found = at(trace=trace)
        return {**found, "trace": dataclasses.replace(found["trace"], details={"num_parameters": number})}

    pairs = on_their_own([(of_size(10, 40.0), of_size(20, 30.0 - seed)) for seed in range(3)])
    found = answer(FLATTER, TRACE, pairs)
    assert (found.verdict, found.withheld) == (Verdict.NOT_TESTED, OTHER_PARAMETERS)
    (asked,) = answers(FLATTER, Contrast(names=("small", "large"), pairs=pairs, needs_same_parameters=False), TRACE)
    assert asked.verdict is Verdict.SHOWN


def test_transfer_is_all_probes_of_a_models_states():
    measures = [
        "probe-root",
        "few-shot-level-1-50",
        "invariant-few-shot-level-1-50",
        "projected-level-1-64",
        "one-hot-root",
    ]
    part = Measurement(measures=("trace", *measures))
    scale = Scale(description="", experiments={"one": Experiment(config=None, measurements=(part,))})
    assert common_measures(scale)["transfer"] == {
        "root": measures[0],
        "level-1 (50 examples)": measures[1],
        "level-1 (50 examples, invariant)": measures[2],
        "level-1 (64 columns)": measures[3],
    }


def test_one_pair_has_the_same_loss_by_its_sentences():
    # the error of the difference is 0.0007: 1.64 of it, not 1.96, have to fit between the difference and 0.01
    assert same_loss([(at(), at(kl=0.0487))]).shown
    assert not same_loss([(at(), at(kl=0.0490))]).shown
    assert same_loss([(at(), at(kl=0.0490))], margin=0.02).shown


def test_over_clusters_the_mean_is_that_of_their_means():
    moves, clusters = [1.0, 3.0, 4.0, 4.0, 7.0], ["a", "a", "b", "b", "c"]
    pairs = on_their_own([(at(trace=40.0), at(trace=40.0 + move)) for move in moves])
    moved = change(pairs, "trace", clusters=clusters)
    theirs = stats.ttest_1samp([2.0, 4.0, 7.0], 0)
    assert moved.value == pytest.approx(13 / 3)
    assert moved.ci95 == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-6)
    assert change(pairs, "trace", factor=0.5, clusters=clusters).value == pytest.approx(20 + 13 / 3)
    assert change(pairs, "trace").samples == 5
    with pytest.raises(IsolossError, match="it must be 5 labels"):
        change(pairs, "trace", clusters=clusters[:4])


def test_a_claim_is_judged_by_the_spread_over_seeds():
    steady = on_their_own([(at(trace=40.0), at(trace=37.0 - seed / 10)) for seed in range(3)])
    result = answer(FLATTER, TRACE, steady, "All last.")
    assert result.verdict is Verdict.SHOWN
    assert result.explanation == (
        "other vs. plain, paired by seed, 95 % interval over 3 seeds (t with 2 degrees of freedom). All last."
    )
    assert str(result.numbers["difference"]) == "-3.100 ± 0.058 nats per predicted token"
    assert list(result.numbers) == ["plain", "other", "difference"]
    # the same mean, and 2.7 standard errors: with three seeds that is no 95 % interval
    spread = on_their_own([(at(trace=40.0), at(trace=38.9 - 2 * seed)) for seed in range(3)])
    result = answer(FLATTER, TRACE, spread)
    assert -result.difference.value / result.difference.stderr == pytest.approx(2.7, abs=0.05)
    assert result.verdict is Verdict.NOT_SHOWN
    assert answer(FLATTER, TRACE, [p[::-1] for p in steady]).verdict is Verdict.CONTRADICTED


def test_a_claim_of_one_seed_says_what_it_is_paired_over():
    pair = at(root=0.5), at(root=0.6)
    assert "other vs. plain, paired over 1,024 sentences." in answer(FLATTER, TRACE, [pair]).explanation
    found = answer(BETTER, ROOT, [pair])
    assert (found.case, found.verdict) == ("root", Verdict.SHOWN)
    each = [(one["probe-root"].examples["predictions"][0] == one["probe-root"].examples["labels"]) for one in pair]
    won, lost = int((each[1] & ~each[0]).sum()), int((each[0] & ~each[1]).sum())
    p = stats.binomtest(won, won + lost).pvalue
    assert found.explanation == (
        "other vs. plain, paired over 4,000 test sentences and 2 probes; McNemar's test on "
        f"the probes' plurality votes: {won} sentences gained, {lost} lost, p = {p:.2g}."
    )


def test_models_of_different_loss_are_not_compared():
    pairs = [(at(), at(trace=1.0)), (at(), at(kl=0.06, trace=1.0))]
    result = answer(FLATTER, TRACE, pairs, "All last.")
    assert result.verdict is Verdict.NOT_TESTED
    assert result.p_value is result.detectable is result.below is None
    assert "the KL of other minus that of plain is 0.010 ± 0.010 nats per predicted token" in result.explanation
    assert "(p = 0.5, 90 % interval -0.053 to 0.073, smallest margin 0.073)" in result.explanation
    assert result.explanation.endswith(" All last.")
    assert result.difference.value == pytest.approx(-39)  # the numbers are there all the same
    anyway = Contrast(names=("table", "model"), pairs=pairs[1:], needs_same_loss=False)
    assert answers(FLATTER, anyway, TRACE)[0].verdict is Verdict.SHOWN
