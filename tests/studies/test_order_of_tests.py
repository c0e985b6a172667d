"""The order in which a study's claims are tested: gates one after the other, then the secondary tests."""

import dataclasses

import numpy as np
import pytest
from known_claims import claim, contrast, in_order, results_of
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import LAPTOP_PCFG
from isoloss.run_config import TrainConfig
from isoloss.studies.answer import claim_cards
from isoloss.studies.claims import ClaimResult, Verdict, planned_tests
from isoloss.studies.plan import Experiment, Measurement, Scale

CHECK, CONTROL = claim(0, "decrease", role="manipulation check"), claim(1, role="positive control")
PRIMARY, OTHERS = claim(2, role="primary"), (claim(3), claim(4))
ALL = CHECK, CONTROL, PRIMARY, *OTHERS


def p_of(t, samples=30):
    return 2 * stats.t.sf(abs(t), samples - 1)


def verdicts(effects, *claims, **more):
    return [each.verdict.value for each in in_order(claims or ALL, effects, **more)]


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ((-9, 9, 9, 9, 0.1), ["shown", "shown", "shown", "shown", "not shown"]),
        ((-9, 9, -9, -9, 9), ["shown", "shown", "contradicted", "contradicted", "shown"]),
        ((-9, 9, 1, 9, 9), ["shown", "shown", "not shown", "not tested", "not tested"]),
        ((-9, 1, 9, 9, 9), ["shown", "not shown", "not tested", "not tested", "not tested"]),
        ((-9, -9, 9, 9, 9), ["shown", "contradicted", "not tested", "not tested", "not tested"]),
        ((-1, 9, 9, 9, 9), ["not shown", "not tested", "not tested", "not tested", "not tested"]),
        ((9, 9, 9, 9, 9), ["contradicted", "not tested", "not tested", "not tested", "not tested"]),
    ],
)
def test_a_gate_that_is_not_passed_ends_the_sequence(effects, expected):
    assert verdicts(effects) == expected
    # whatever the order in the file
    assert verdicts(effects[::-1], *ALL[::-1]) == expected[::-1]


def test_what_a_gate_keeps_from_being_tested_says_so_and_has_its_numbers():
    check, control, *later = in_order(ALL, (-9, 1.5, 9, 9, 9))
    assert check.positive_control == control.positive_control == ""
    for each in later:
        assert each.withheld == "the positive control is not shown"
        assert each.explanation.startswith(
            "A null result would say little, as the positive control is not shown (c1: difference 1.5 ± 1.0 "
            "points, 95 % interval -0.5 to 3.5)."
        )
        assert (each.p_value, each.p_adjusted, each.tests, each.detectable) == (None,) * 4
        assert each.difference.value == 9
    failed = in_order(ALL, (-1, 9, 9, 9, 9))
    assert {each.withheld for each in failed[1:]} == {"the manipulation check is not shown"}
    assert failed[0].positive_control == "positive control not tested"
    is_open = in_order(ALL, (-9, 9, 1, 9, 9))
    assert is_open[2].positive_control == "positive control shown"
    assert {each.withheld for each in is_open[3:]} == {"the primary claim is undecided"}
    assert in_order(OTHERS, (0, 9))[0].positive_control == ""  # where none is planned, nothing is said of it


@pytest.mark.parametrize(("effects", "labels"), [((1, -1, 9), "201"), ((1, -9, 9), "210"), ((9, -9, 9), "210")])
def test_the_card_of_the_check_that_failed_comes_after_the_primary_claims(effects, labels):
    # here the control stands before the check, and the primary claim last
    claims = [dataclasses.replace(each, statement=each.id[1:]) for each in (CONTROL, CHECK, PRIMARY)]
    pairs = zip(claims, in_order(claims, effects), strict=True)
    cards = claim_cards([ClaimResult(claim=claim, answers=(answer,)) for claim, answer in pairs])
    assert "".join(card.label for card in cards) == labels


def test_gates_are_judged_by_their_own_p_and_the_others_by_holms_method_for_all_that_were_planned():
    found = in_order(ALL, (-2.2, 2.3, 2.4, 3.0, 2.5), tests=7)
    p = [p_of(t) for t in (2.2, 2.3, 2.4)]
    assert [each.p_adjusted for each in found[:3]] == pytest.approx(p)
    assert [each.p_adjusted for each in found[3:]] == pytest.approx([7 * p_of(3.0), 6 * p_of(2.5)])
    assert [each.tests for each in found] == [1, 1, 1, 7, 7]


def test_both_tests_of_a_claim_with_a_smallest_effect_of_interest():
    one = claim(0, no_effect_within=5.0)
    for value, verdict, words in (
        (0.3, "no effect of interest", "no effect of 5 points or more: shown"),
        (2.5, "shown", "shown, and smaller than 5 points"),
        (-2.5, "contradicted", "contradicted, and smaller than 5 points"),
        (4.5, "shown", "shown"),
        (1.0, "not shown", "not shown"),
    ):
        spread = 2.5 if verdict == "not shown" else 1.0
        (found,) = in_order([one], (value,), stderr=spread)
        p_absent = stats.t.sf((5 - abs(value)) / spread, 29)
        assert found.p_no_effect == found.p_no_effect_adjusted == pytest.approx(p_absent)
        assert found.verdict.value == verdict
        (result,) = results_of([one], known(value, spread))
        assert result.words(result.answer()).replace("nats/token", "points") == words
    single = claim(0, no_effect_within=1.0)
    (found,) = in_order([single], (0.1,), stderr=0.1)
    assert ClaimResult(claim=single, answers=(found,)).words(found) == "no effect of 1 point or more: shown"


def known(mean, stderr, measure=0, n=30, **more):
    """Thirty grammars whose differences have this mean and standard error."""
    moves = np.random.default_rng(0).normal(size=n)
    moves = mean + (moves - moves.mean()) / moves.std(ddof=1) * stderr * np.sqrt(n)
    table = np.zeros((measure + 1, n))
    table[measure] = moves
    return contrast(table, clusters=[f"g{i}" for i in range(n)], **more)


def test_a_gate_that_either_answer_passes_leaves_half_of_the_level():
    primary = claim(2, role="primary", no_effect_within=5.0)
    found = in_order([CHECK, CONTROL, primary, *OTHERS], (-2.2, 2.2, 0.3, 3.0, 0.0))
    assert [each.verdict.value for each in found] == ["shown", "shown", "no effect of interest", "shown", "not shown"]
    assert found[1].p_adjusted == pytest.approx(p_of(2.2))
    assert found[2].p_adjusted == 1.0
    assert found[2].p_no_effect_adjusted == pytest.approx(2 * found[2].p_no_effect)
    assert found[3].p_adjusted == pytest.approx(2 * 2 * p_of(3.0))
    # 0.05 < 2 p: not shown, where p alone would show it
    assert in_order([primary], (2.2,), stderr=1.0)[0].verdict is Verdict.NO_EFFECT
    assert in_order([claim(2, no_effect_within=5.0)], (2.2,))[0].verdict is Verdict.SHOWN


def test_rejecting_one_of_two_exclusive_hypotheses_does_not_relax_the_others():
    margin = [claim(i, no_effect_within=6.0) for i in range(4)]
    # three without an effect of interest; by Holm's method on the smaller p of each, the fourth would have p x 1
    found = in_order(margin, (0.0, 0.1, 0.2, 2.4))
    assert [each.verdict.value for each in found] == ["no effect of interest"] * 4
    assert found[3].p_adjusted == pytest.approx(4 * p_of(2.4))


def test_a_gate_with_several_cases_is_shown_if_all_are():
    gate = claim(0, role="manipulation check", measures={"trace": "m0", "minimal-trace": "m1"})

    def found(second):
        g = np.random.default_rng(0).normal(size=(3, 20)) * 0.1
        moves = g - g.mean(axis=1, keepdims=True) + np.array([[1.0], [second], [1.0]])
        one = contrast(moves, clusters=[f"g{i}" for i in range(20)])
        return results_of([gate, claim(2)], one)

    for second, both, later in ((1.0, "shown", "shown"), (0.01, "not shown", "not tested")):
        results = found(second)
        assert [each.verdict.value for each in results[0].answers] == [both, both]
        assert results[1].answer().verdict.value == later
        largest = max(each.p_value for each in results[0].answers)
        assert {each.p_adjusted for each in results[0].answers} == {largest}


def test_the_other_cases_of_a_gate_are_secondary():
    gate = claim(0, role="primary", case="a", measures={"a": "m0", "b": "m1"})
    one = contrast(np.random.default_rng(1).normal(size=(3, 9)) + 2, clusters=[f"g{i}" for i in range(9)])
    (a, b), (other,) = (result.answers for result in results_of([gate, claim(2)], one))
    assert [each.role for each in (a, b, other)] == ["primary", "secondary", "secondary"]
    assert [each.tests for each in (a, b, other)] == [1, 2, 2]
    other = dataclasses.replace(gate, measures={"b": "m1"})
    with pytest.raises(IsolossError, match=r"case of the claim c0 is 'a'; its cases are b"):
        results_of([other, claim(2)], one)
    results_of([other, claim(2)], one, has_verdicts=False)  # a scale without verdicts need not have it


def test_the_family_is_known_before_the_runs():
    two = {"a": "m3", "b": "m4"}
    asked = PRIMARY, claim(3, measures=two), claim(4)
    assert planned_tests(asked, None) == 3
    cased = [dataclasses.replace(each, cases=lambda scale: scale) for each in asked]
    assert planned_tests(cased, ["small", "large"]) == 6
    assert planned_tests([claim(3, role="primary", case="a", measures=two), claim(4)], None) == 2
    # two contrasts of which one cannot be tested count as two, declared or not
    pair = known(1.0, 0.1, measure=4, case="x"), known(1.0, 0.1, measure=4, case="y", not_tested="Too few.")
    found = results_of([claim(3, measures=two)], *pair)[0].answers
    assert [each.verdict.value for each in found] == ["not shown", "shown", "not tested"]
    assert [each.tests for each in found] == [4, 4, None]


def test_a_gate_names_the_cases_of_contrasts_that_it_does_not_list():
    gate = claim(0, role="primary", case="a", measures={"a": "m0", "b": "m1"})
    pair = known(1.0, 0.1, case="y"), known(1.0, 0.1, case="x")
    with pytest.raises(IsolossError, match=r"claim c0 .* in the case 'a', .* in its `cases`: list 'x', 'y' there"):
        results_of([gate], *pair)


def test_transfer_is_every_probe_and_a_claim_on_what_is_not_measured_is_refused():
    probes = Measurement(measures=("loss", "probe-root", "few-shot-prefix-4-100"))
    scale = Scale(
        description="", experiments={"a": Experiment(config=TrainConfig(language=LAPTOP_PCFG), measurements=(probes,))}
    )
    asked = {"root": "probe-root", "prefix-4 (100 examples)": "few-shot-prefix-4-100"}
    assert claim(0, measures="transfer").keys(scale) == asked
    with pytest.raises(IsolossError, match=r"claim c0 is 'flatness', .*: add trace or minimal-trace to a"):
        claim(0, measures="flatness").keys(scale)
