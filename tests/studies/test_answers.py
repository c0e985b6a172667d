"""What a study says to a file of claims: corrected p-values, the gate, power, and what is given beside the verdict."""

import dataclasses
import json
import math

import numpy as np
import pytest
from known_claims import answers, claim, contrast, results_of
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.report.html import Card, interval_rows
from isoloss.statistics.clusters import adjusted_to_loss, cluster_mean
from isoloss.statistics.estimate import Estimate, number
from isoloss.statistics.power import paired_power
from isoloss.statistics.significance import holm
from isoloss.studies.answer import card_of, claim_lines, claim_rows, format_difference
from isoloss.studies.claims import Answer, ClaimResult, Verdict, p_value
from isoloss.studies.summary import Family, Summary, claim_table, explanations

SCALE = "where only the trace is shown, the scale of the weights may decide it"
GRAMMARS = [f"g{i // 2}" for i in range(12)]
NOISE = np.random.default_rng(0).normal(size=(4, 12))
# clear, fair, none at all, clear the other way
MOVES = NOISE * 0.3 + np.array([[1.0], [0.35], [0.0], [-1.0]])
FOUR = [claim(i) for i in range(4)]
PRIMARY_FIRST = [FOUR[0], claim(1, role="primary"), *FOUR[2:]]


def by_hand(moves):
    """The t test over the means of the grammars."""
    return stats.ttest_1samp(moves.reshape(6, 2).mean(axis=1), 0)


def test_all_tests_but_the_primary_are_adjusted_for_their_number():
    found = answers(PRIMARY_FIRST, contrast(MOVES, clusters=GRAMMARS))
    p = [by_hand(own).pvalue for own in MOVES]
    assert [each.p_value for each in found] == pytest.approx(p)
    others = holm({str(i): p[i] for i in (0, 2, 3)})
    assert [each.p_adjusted for each in found] == pytest.approx([p[1] if i == 1 else others[str(i)] for i in range(4)])
    assert [each.role for each in found] == ["secondary", "primary", "secondary", "secondary"]
    assert 0.05 / 3 < p[1] < 0.05  # shown by itself only
    assert [each.verdict.value for each in found] == ["shown", "shown", "not shown", "contradicted"]
    without = answers(FOUR, contrast(MOVES, clusters=GRAMMARS))
    assert [each.p_adjusted for each in without] == pytest.approx(list(holm(dict(enumerate(p))).values()))
    assert [each.verdict.value for each in without] == ["shown", "not shown", "not shown", "contradicted"]
    assert {each.role for each in without} == {"secondary"}


def test_the_interval_is_over_the_clusters():
    (found,) = answers([claim(0)], contrast(MOVES[:1], clusters=GRAMMARS))
    assert found.interval95 == pytest.approx(tuple(by_hand(MOVES[0]).confidence_interval(0.95)))
    assert found.explanation == (
        "after vs. before, 12 pairs by seed, 95 % interval over 6 clusters (t with 5 degrees of freedom)."
    )
    assert found.numbers["after"].value == pytest.approx(MOVES[0].mean())
    other = contrast(MOVES[:1], clusters=GRAMMARS, clusters_are="corpora")
    assert "over 6 corpora" in answers([claim(0)], other)[0].explanation


def test_power_is_that_of_the_test_that_is_made():
    found = answers(PRIMARY_FIRST, contrast(MOVES, clusters=GRAMMARS))
    for each, alpha in zip(found, (0.05 / 3, 0.05, 0.05 / 3, 0.05 / 3), strict=True):
        sd = each.difference.stderr * math.sqrt(6)
        assert paired_power(each.detectable, sd, 6, alpha=alpha) == pytest.approx(0.8)
    difference = found[2].difference
    t95 = stats.t.ppf(0.95, 5)
    assert found[2].below == pytest.approx(abs(difference.value) + t95 * difference.stderr)
    assert [each.below for each in found if each.verdict is not Verdict.NOT_SHOWN] == [None] * 3
    # beyond a margin, a difference is found that goes beyond it by as much
    plain, beyond = (
        answers([claim(0, margin=margin)], contrast(MOVES[:1], clusters=GRAMMARS))[0] for margin in (0.0, 0.2)
    )
    assert beyond.detectable == pytest.approx(plain.detectable + 0.2)


def test_what_is_exact_has_no_power():
    (found,) = answers([claim(0)], contrast([[1.0, 1.0, 1.0]]))
    assert (found.verdict, found.p_value, found.detectable, found.below) == (Verdict.SHOWN, 0.0, None, None)


def test_models_of_another_loss_are_not_tested_and_their_numbers_are_given():
    asked = claim(0, role="primary"), FOUR[1], claim(2, "no change within", margin=1.0)
    found = answers(asked, contrast(MOVES[:3], 0.02 + NOISE[3] / 1000, clusters=GRAMMARS))
    assert {each.verdict for each in found} == {Verdict.NOT_TESTED}
    assert all(each.p_value is each.p_adjusted is each.detectable is each.below is None for each in found)
    assert [each.difference.value for each in found] == pytest.approx(MOVES[:3].mean(axis=1))
    assert found[0].role == "primary"
    gate = found[0].same_loss
    assert not gate.shown
    assert gate.difference.value == pytest.approx(0.02 + NOISE[3].mean() / 1000)
    end = gate.difference.value + stats.t.ppf(0.95, 5) * gate.difference.stderr
    assert gate.smallest_margin == pytest.approx(end)
    for words in (f"{gate.difference}", "90 % interval", "smallest margin 0.02128", "p = 1"):
        assert words in found[0].explanation
    # a wider margin lets them through, and a claim about the loss itself is always tested
    wide = answers(FOUR[:1], contrast(MOVES[:1], 0.02, clusters=GRAMMARS), loss_margin=0.05)
    assert wide[0].verdict is Verdict.SHOWN
    losses = 0.02 + NOISE[3] / 1000
    about = claim(0), claim(1, "no change within", margin=0.01, measures={"": "kl"})
    first, second = answers(about, contrast(MOVES[:1], losses, clusters=GRAMMARS))
    assert (first.verdict, second.verdict) == (Verdict.NOT_TESTED, Verdict.CONTRADICTED)
    assert second.same_loss is None
    # the other test counts, though it could not be made
    assert second.p_adjusted == min(1.0, 2 * second.p_value)


def test_the_line_of_what_is_not_tested_says_by_how_much_the_losses_may_differ():
    moved = contrast(MOVES[:1], 0.02 + NOISE[3] / 1000, clusters=GRAMMARS)
    (result,) = results_of([claim(0)], moved)
    [(tone, _, words)] = claim_lines(result)
    loss = format_difference(result.answer().same_loss.difference)
    assert tone == "neutral"
    assert words.startswith(f"not tested: the losses may differ by {loss}, not shown to be within ± 0.01; ")
    assert card_of("Does it?", result).detail.startswith(f"by {loss}, not shown to be within ± 0.01")


def test_the_page_has_the_test_of_equal_loss_beside_the_verdict():
    losses = 0.004 + NOISE[3] / 1000
    wide, narrow = contrast(MOVES[:1], losses, clusters=GRAMMARS), contrast(MOVES[:1], 5 * losses, clusters=GRAMMARS)
    (same,), (other,) = (results_of([claim(0, statement="It does.")], one) for one in (wide, narrow))
    first, second = same.answer().same_loss, other.answer().same_loss
    assert (first.shown, second.shown) == (True, False)
    told = f"loss: +{number(first.difference)} nats/token, within ± 0.01: shown"
    assert card_of("Does it?", same).detail.endswith(f"; {told}")
    assert "within ± 0.01: shown" not in card_of("Does it?", other).detail
    after, before = (number(same.answer().numbers[name]) for name in ("after", "before"))
    assert card_of("Does it?", same).detail.split("; ")[1] == f"{after} (after) against {before} nats/token (before)"
    # two claims, with two cases of one contrast each
    cases = {"a": "m0", "b": "m1"}
    both = results_of([claim(0, measures=cases), claim(1, measures=cases)], contrast(MOVES[:2], losses))
    assert [row.label for row in claim_rows(both)] == ["loss", "a", "b"] * 2
    ends = [first.difference.value + t * first.difference.stderr for t in stats.t.ppf([0.05, 0.95], 5)]
    for result, gate, verdict in ((same, first, "within"), (other, second, "not shown to be within")):
        loss, row = claim_rows([result])
        assert (loss.group, loss.effect) == (row.group, f"+{number(gate.difference)} nats/token")
        assert loss.verdict == f"{verdict} ± 0.01" + ": shown" * gate.shown
        page = interval_rows(claim_rows([result]))
        assert loss.verdict in page
        assert loss.interval in page
    low, high = map(float, claim_rows([same])[0].interval.removeprefix("90 %: ").split(" to "))
    assert [low, high] == pytest.approx(ends, abs=first.difference.stderr / 10)
    # no test is shown where none decides
    unneeded = contrast(MOVES[:1], losses, clusters=GRAMMARS, needs_same_loss=False)
    for result in (*results_of([claim(0)], unneeded), *results_of([claim(0)], wide, has_verdicts=False)):
        assert [row.label for row in claim_rows([result])] == ["m0"]
        assert "loss" not in card_of("Does it?", result).detail


def test_a_claim_is_affirmed_by_all_its_cases_only():
    moves = MOVES[:1].repeat(2, axis=0) * np.array([[1.0], [-1.0]])
    (mixed,) = results_of([claim(0, measures={"a": "m0", "b": "m1"})], contrast(moves, 0, clusters=GRAMMARS))
    assert [each.verdict for each in mixed.answers] == [Verdict.SHOWN, Verdict.CONTRADICTED]
    card = card_of("Does it?", mixed)
    assert (card.value, card.tone) == ("1 of 2 cases shown, the opposite in 1", "unclear")
    assert card.detail.endswith(f"; b: {format_difference(mixed.answer('b').difference)}, contradicted")
    moves[0] = np.tile([1.0, -1.0], moves.shape[1])[: moves.shape[1]]
    (mixed,) = results_of([claim(0, measures={"a": "m0", "b": "m1"})], contrast(moves, 0, clusters=GRAMMARS))
    card = card_of("Does it?", mixed)
    assert (card.value, card.tone) == ("The opposite in 1 of 2 cases", "bad")
    assert card.detail.startswith("b: ")
    # of several cases, none of which is shown, no one's difference is the answer
    neither = results_of([claim(0, measures={"a": "m0", "b": "m1"})], contrast(moves[[0, 0]], 0, clusters=GRAMMARS))
    card = card_of("Does it?", neither[0])
    assert (card.value, card.tone) == ("Not shown in any of 2 cases", "unclear")
    assert card.detail.startswith("a: ")
    assert card.detail.endswith(f"; b: {format_difference(neither[0].answer('b').difference)}, not shown")
    moves[0] = -moves[1]
    # of the two traces, the one that no rescaling changes comes first, and only the other may rest on the scale
    noise = np.tile([1.0, -1.0], moves.shape[1])[: moves.shape[1]]
    for trace, minimal, first, verdict in (
        (moves[0], moves[1], "trace", "contradicted; " + SCALE),
        (moves[0], noise, "trace", "not shown; " + SCALE),
        (moves[0], moves[0], "minimal trace", "shown"),
        (noise, moves[0], "minimal trace", "not shown"),
    ):
        asked = claim(0, measures={"trace": "m0", "minimal-trace": "m1"})
        (found,) = results_of([asked], contrast(np.array([trace, minimal]), 0, clusters=GRAMMARS))
        flatness = dataclasses.replace(found, claim=dataclasses.replace(found.claim, measures="flatness"))
        detail = card_of("Is it?", flatness).detail
        assert detail.startswith(f"{first}: ")
        assert detail.endswith(f", {verdict}")
    (mixed,) = results_of([claim(0, measures={"a": "m0", "b": "m1"})], contrast(moves, 0, clusters=GRAMMARS))
    # one case decides a primary claim, and what speaks against it stands beside it
    first = claim(0, measures={"a": "m0", "b": "m1"}, role="primary", case="a")
    card = card_of("Does it?", *results_of([first], contrast(moves, 0, clusters=GRAMMARS)))
    assert card.value.startswith("Yes: +")
    assert card.detail.endswith(", contradicted")


def test_the_adjusted_difference_is_beside_the_verdict_and_does_not_make_it():
    slope = Estimate(value=-20.0, stderr=3.0, samples=8, unit="points per nat", num_predictions=8, method="slope")
    for loss in (0.002, 0.05):
        losses = loss + NOISE[3] / 1000
        slopes = {"m0": slope}
        plain, adjusted = (
            answers(FOUR[:2], contrast(MOVES[:2], losses, clusters=GRAMMARS, slopes=given)) for given in ({}, slopes)
        )
        wanted = adjusted_to_loss(
            cluster_mean(MOVES[0], GRAMMARS, unit=""),
            cluster_mean(losses, GRAMMARS, unit=""),
            slope,
            same_clusters=False,
        )
        assert adjusted[0].adjusted.value == pytest.approx(wanted.value)
        assert adjusted[0].adjusted.stderr == pytest.approx(wanted.stderr)
        assert adjusted[1].adjusted is None
        assert [each.verdict for each in plain] == [each.verdict for each in adjusted]
        assert (adjusted[0].verdict is Verdict.NOT_TESTED) == (loss == 0.05)


def test_the_adjusted_difference_is_judged_where_the_claim_says_so():
    slope = Estimate(value=-20.0, stderr=3.0, samples=8, unit="points per nat", num_predictions=8, method="slope")
    losses = 0.05 + NOISE[3] / 1000
    one = contrast(MOVES[:1], losses, clusters=GRAMMARS, slopes={"m0": slope})
    asked = claim(0, loss_rule="adjusted", role="primary", no_effect_within=5.0)
    (found,), (plain,) = (answers([each], one) for each in (asked, claim(0, role="primary")))
    assert plain.verdict is Verdict.NOT_TESTED
    assert found.difference == found.adjusted == plain.adjusted
    assert found.same_loss is None
    assert found.p_value == p_value(plain.adjusted, "increase")
    assert found.p_adjusted == 2 * found.p_value
    assert found.verdict is Verdict.SHOWN
    assert list(found.numbers) == ["before", "after", "difference at the same loss"]
    told = f"Without the adjustment to the same loss it is {plain.difference}; that of the KL is "
    assert f"{told}{one.change('kl')}." in found.explanation
    with pytest.raises(IsolossError, match="loss_rule of the claim c0 is 'adjusted', but there is no slope of m0"):
        answers([asked], contrast(MOVES[:1], losses, clusters=GRAMMARS))
    # a scale without verdicts need not have slopes
    (smoke,) = answers([asked], contrast(MOVES[:1], losses, clusters=GRAMMARS), has_verdicts=False)
    assert smoke.difference.value == pytest.approx(MOVES[0].mean())


def test_at_another_scale_no_verdict_is_given():
    other = claim(1, role="primary", case="a case of the laptop")
    asked = FOUR[0], other, *FOUR[2:]
    for loss in (0.0, 0.02):
        found = answers(asked, contrast(MOVES, loss, clusters=GRAMMARS), has_verdicts=False)
        assert {each.verdict for each in found} == {Verdict.NO_VERDICT}
        assert all(each.p_value is each.detectable is each.below is None for each in found)
        assert [each.difference.value for each in found] == pytest.approx(MOVES.mean(axis=1))
    with pytest.raises(IsolossError, match="case of the claim c1 is 'a case of the lap"):
        answers(asked, contrast(MOVES, clusters=GRAMMARS))


def test_a_summary_is_json():
    one = contrast(MOVES, clusters=GRAMMARS)
    results = results_of(PRIMARY_FIRST, one)
    family = Family(claims_sha256="0", loss_margin=0.01, secondary_tests=3)
    summary = Summary((), results, family, "Mind.", [Card(label="Is it?", value="So.")])
    document = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert document["family"] == {"claims_sha256": "0", "loss_margin": 0.01, "secondary_tests": 3}
    assert [(one["claim"], one["direction"]) for one in document["claims"]] == [(f"c{i}", "increase") for i in range(4)]
    assert (document["warning"], document["answer"][0]["value"]) == ("Mind.", "So.")
    shown, primary, *_ = (one["answers"][0] for one in document["claims"])
    assert shown["p_adjusted"] == results[0].answer().p_adjusted
    assert shown["interval95"] == list(results[0].answer().interval95)
    assert (shown["role"], primary["role"]) == ("secondary", "primary")
    assert (shown["tests"], primary["tests"]) == (3, 1)
    assert primary["p_adjusted"] == primary["p_value"]
    assert (shown["verdict"], shown["words"], primary["p_no_effect"]) == ("shown", "shown", None)
    assert primary["same_loss"]["shown"]


def test_cases_of_other_models_or_units_say_which():
    def one(case, unit, names, explanation):
        numbers = {
            name: Estimate(value=v, stderr=0.1, samples=9, unit=unit, num_predictions=9, method="")
            for name, v in zip((*names, "difference"), (1, 3, 2), strict=True)
        }
        difference = numbers["difference"]
        return Answer(
            case=case,
            numbers=numbers,
            verdict=Verdict.SHOWN,
            explanation=explanation,
            difference=difference,
            p_value=p_value(difference, "increase"),
        )

    several = one("a", "nats", ("d16", "d32"), "Why."), one("b", "bits", ("d32", "d64"), "So.")
    columns, rows = claim_table(ClaimResult(claim=claim(0), answers=several))
    assert columns == ["case", "verdict", "first", "second", "difference", "95 % interval", "p"]
    assert [row[4] for row in rows] == ["2.00 ± 0.10 nats", "2.00 ± 0.10 bits"]
    assert explanations(ClaimResult(claim=claim(0), answers=several)) == ["a: Why.", "b: So."]
    same = one("a", "nats", ("d16", "d32"), "Why."), one("b", "nats", ("d16", "d32"), "Why.")
    columns, rows = claim_table(ClaimResult(claim=claim(0, factor=0.5), answers=same))
    assert columns[2:5] == ["d16 (nats)", "d32 (nats)", "d32 minus 0.5 times d16 (nats)"]
    assert rows[0][:5] == ["a", "shown", "1.00 ± 0.10", "3.00 ± 0.10", "2.00 ± 0.10"]
    assert explanations(ClaimResult(claim=claim(0), answers=same)) == ["Why."]
