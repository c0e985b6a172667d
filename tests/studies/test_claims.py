"""Claims: what is refused, what their hash is of, and the results of several cases."""

import functools

import pytest

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, Claim, ClaimResult, Contrast, check_claims, gates, judge, source_of


def estimate(value, stderr):
    return Estimate(value=value, stderr=stderr, samples=10**6, unit="points", num_predictions=1000, method="difference")


def claim(**more):
    about = {"id": "flatter", "statement": "Flatter.", "direction": "decrease", "of": claim, "measures": {"": "trace"}}
    return Claim(**about | more)


CLAIM = claim()


def answered(value, case=""):
    measured = estimate(value, 1.0)
    numbers = {"before": estimate(5.0, 0.5), "difference": measured}
    verdict = judge(measured, CLAIM.direction)
    return Answer(case=case, numbers=numbers, verdict=verdict, explanation="", difference=measured)


def test_the_answer_of_a_case_is_looked_up():
    up, down = answered(3.0, "a"), answered(-3.0, "b")
    assert ClaimResult(claim=CLAIM, answers=(up, down)).answer("b") is down
    assert ClaimResult(claim=CLAIM, answers=(answered(1.0),)).answer().interval95 == pytest.approx(
        (-0.96, 2.96), abs=0.01
    )
    for answers, case in (((up, down), ""), ((up, up), "a")):
        with pytest.raises(IsolossError, match=f"the claim flatter has no one case {case!r}; its cases are 'a', "):
            ClaimResult(claim=CLAIM, answers=answers).answer(case)


def test_the_verdict_of_several_answers_names_those_that_differ():
    up, down, wide = answered(3.0, "a"), answered(-3.0, "b"), answered(-1.0, "c")
    assert ClaimResult(claim=CLAIM, answers=(down, down)).verdict == "shown"
    mixed = ClaimResult(claim=CLAIM, answers=(up, down, up, wide))
    assert mixed.verdict == "shown for b; not shown for c; contradicted for a, a"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"direction": "no change within"}, "a claim of no change needs a margin above 0"),
        ({"factor": float("nan")}, "factor is nan; it must be finite and above"),
        ({"factor": 0.0}, r"factor is 0\.0; it must be"),
        ({"direction": "down"}, "direction is 'down'; it must be one of decrease, increase, no change within"),
        ({"role": "main"}, "role is 'main'; it must be one of manipulation check, "),
        ({"case": "root"}, "case is 'root', but the role is secondary"),
        (
            {"direction": "no change within", "margin": 1.0, "no_effect_within": 0.5},
            "no_effect_within is for claims of",
        ),
        ({"no_effect_within": 0.0}, r"no_effect_within is 0\.0; it must be"),
        ({"no_effect_within": 1.0, "margin": 2.0}, "no_effect_within is 1; it must be above the margin"),
        ({"loss_rule": "yes"}, "loss_rule is 'yes'; it must be one of tested, adjusted"),
        ({"loss_margin": -1.0}, r"loss_margin is -1\.0"),
        ({"of": 3}, "of is a int; it must be a function"),
    ],
)
def test_bad_claims_are_refused(stated, message):
    with pytest.raises(IsolossError, match=f"claim flatter: {message}"):
        claim(**stated)


def test_claims_that_do_not_fit_each_other_are_refused():
    with pytest.raises(IsolossError, match="two claims have the id 'flatter'"):
        check_claims([CLAIM, CLAIM], None)
    trace = claim(id="trace", measures="trace")
    with pytest.raises(IsolossError, match="claim trace: a rescaling that changes no prediction changes"):
        check_claims([trace], None)
    with pytest.raises(IsolossError, match="claim trace: a rescaling that changes no prediction changes"):
        check_claims([trace, claim(id="other", measures="minimal-trace", of=gates)], None)


def test_the_gates_are_in_their_order_whatever_the_order_in_the_study():
    roles = "primary", "secondary", "positive control", "manipulation check", "primary"
    assert [each.id for each in gates([claim(id=str(i), role=role) for i, role in enumerate(roles)])] == [*"3204"]


FUNCTIONS = '''
import functools

def made(results, name="a"):
    """Return the pair."""
    return results.at(name)  # the last

later = functools.partial(made, name="b")
short = lambda results: results.at("c")

def around(name):
    def of(results):
        return results.at(name)
    return of

first, second = around("d"), around("e")
'''


def functions(folder, text=FUNCTIONS):
    file = folder / "functions.py"
    file.write_text(text)
    names = {}
    exec(compile(text, file, "exec"), names)
    return [source_of(names[name]) for name in ("made", "later", "short", "first", "second")]


def test_the_source_of_a_claim_is_the_code_and_what_it_was_made_with(tmp_path):
    sources = functions(tmp_path)
    assert len(set(sources)) == 5
    assert sources[0] == "def made(results, name='a'):\n    return results.at(name)"
    for old, new in (
        ("# the last", "# why"),
        ("Return the pair.", "Give it."),
        ("results.at(name)  #", "(results.at(name))  #"),
    ):
        assert functions(tmp_path, FUNCTIONS.replace(old, new)) == sources
    for old, new in (("at(name)  #", "at(name, 3)  #"), ('"b"', '"B"'), ('"c"', '"C"'), ('"d"', '"D"')):
        assert functions(tmp_path, FUNCTIONS.replace(old, new)) != sources
    with pytest.raises(IsolossError, match="of a claim is of type builtin_function_or_method; it must be a function"):
        source_of(print)
    assert source_of(functools.partial(claim, id="a")) != source_of(claim)


def test_the_hash_is_of_all_that_a_claim_states():
    changes = ({"direction": "increase"}, {"margin": 0.1}, {"statement": ""}, {"cases": ("a",)}, {"measures": {}})
    stated = [CLAIM, *(claim(**each) for each in changes)]
    assert len({each.sha256(None) for each in stated}) == len(stated)


def test_slopes_take_clusters():
    with pytest.raises(IsolossError, match="the contrast of a and b has slopes but no clusters"):
        Contrast(names=("a", "b"), pairs=[], slopes={"trace": estimate(1.0, 0.1)})
