import pytest

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, Claim, ClaimResult, Verdict, answer_all, judge, read_claims


def estimate(value, stderr):
    return Estimate(value=value, stderr=stderr, samples=10**6, unit="points", num_predictions=1000, method="difference")


# 1.96 standard errors: [value - 1.96, value + 1.96] for a standard error of 1
@pytest.mark.parametrize(
    ("value", "stderr", "direction", "margin", "shown"),
    [
        (-3.0, 1.0, "decrease", 0.0, True),
        (-1.9, 1.0, "decrease", 0.0, False),
        (3.0, 1.0, "decrease", 0.0, False),
        (-3.0, 1.0, "decrease", 1.0, True),
        (-3.0, 1.0, "decrease", 1.1, False),
        (3.0, 1.0, "increase", 0.0, True),
        (1.9, 1.0, "increase", 0.0, False),
        (-3.0, 1.0, "increase", 0.0, False),
        (3.0, 1.0, "increase", 1.0, True),
        (3.0, 1.0, "increase", 1.1, False),
        (0.0, 1.0, "no change within", 2.0, True),
        (0.0, 1.0, "no change within", 1.9, False),
        (0.5, 1.0, "no change within", 2.0, False),
        (-0.5, 1.0, "no change within", 2.0, False),
        (5.0, 0.1, "no change within", 2.0, False),
        (0.0, 0.0, "decrease", 0.0, False),
        (0.0, 0.0, "increase", 0.0, False),
        (2.0, 0.0, "no change within", 2.0, True),
    ],
)
def test_the_rule(value, stderr, direction, margin, shown):
    assert (judge(estimate(value, stderr), direction, margin) is Verdict.SHOWN) == shown


@pytest.mark.parametrize(
    ("value", "direction", "margin", "verdict"),
    [
        (3.0, "decrease", 0.0, "contradicted"),
        (-1.0, "decrease", 3.0, "contradicted"),  # it falls, but surely by less than claimed
        (-1.0, "decrease", 2.9, "not shown"),
        (-3.0, "increase", 0.0, "contradicted"),
        (1.0, "increase", 3.0, "contradicted"),
        (1.9, "decrease", 0.0, "not shown"),
        (5.0, "no change within", 3.0, "contradicted"),
        (-5.0, "no change within", 3.0, "contradicted"),
        (-4.9, "no change within", 3.0, "not shown"),
    ],
)
def test_what_contradicts_a_claim(value, direction, margin, verdict):
    assert judge(estimate(value, 1.0), direction, margin).value == verdict


@pytest.mark.parametrize("direction", ["decrease", "increase"])
def test_no_difference_at_all_shows_and_contradicts_nothing(direction):
    assert judge(estimate(0.0, 0.0), direction) is Verdict.NOT_SHOWN


def test_few_samples_make_a_wide_interval():
    three = Estimate(value=-4.0, stderr=1.0, samples=3, unit="points", num_predictions=3, method="difference")
    assert judge(three, "decrease") is Verdict.NOT_SHOWN  # Student's t with two degrees of freedom: 4.3
    assert judge(estimate(-4.0, 1.0), "decrease") is Verdict.SHOWN


@pytest.mark.parametrize(
    ("direction", "margin", "message"),
    [
        ("increase", -1.0, "at least 0, not -1"),
        ("increase", float("nan"), "at least 0, not nan"),
        ("decrease", float("inf"), "at least 0, not inf"),
        ("no change within", 0.0, "needs a margin above 0"),
    ],
)
def test_bad_margins_are_refused(direction, margin, message):
    with pytest.raises(IsolossError, match=message):
        judge(estimate(1.0, 0.1), direction, margin)


CLAIM = Claim(id="flatter", statement="Flatter.", paper="19.8 to 12.6", direction="decrease")


def answered(value, case=""):
    measured = estimate(value, 1.0)
    numbers = {"before": estimate(5.0, 0.5), "difference": measured}
    verdict = judge(measured, CLAIM.direction)
    return Answer(case=case, numbers=numbers, verdict=verdict, explanation="", difference=measured)


def test_answers_show_their_numbers():
    shown = answered(-3.0)
    assert shown.verdict is Verdict.SHOWN
    assert shown.lines == (("before", "5.00 ± 0.50 points"), ("difference", "-3.0 ± 1.0 points"))
    assert Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation="").lines == (("", "–"),)


def test_the_verdict_of_several_answers_names_those_that_differ():
    up, down, wide = answered(3.0, "a"), answered(-3.0, "b"), answered(-1.0, "c")
    assert ClaimResult(claim=CLAIM, answers=(down, down)).verdict == "shown"
    mixed = ClaimResult(claim=CLAIM, answers=(up, down, up, wide))
    assert (mixed.agree, mixed.verdict) == (False, "shown for b; not shown for c; contradicted for a, a")


TOML = """
[[claims]]
id = "flatter"
statement = "Flatter."
paper = "19.8 to 12.6"
direction = "decrease"

[[claims]]
id = "same"
statement = "Same."
paper = "3.204 and 3.206"
direction = "no change within"
margin = 0.01
"""


def test_claims_are_read(tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text(TOML)
    assert read_claims(file)[0] == CLAIM
    assert read_claims(file)[1].margin == 0.01


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "same"', 'id = "flatter"', "two claims with the id 'flatter'"),
        ("margin = 0.01", "margin = 0.0", "needs a margin above 0"),
        ("margin = 0.01", "margins = 0.01", "margins"),
        ("no change within", "down", r"claims\[1\].direction"),
        ('paper = "3.204 and 3.206"', "", "paper"),
        ("[[claims]]", "[[claim]]", "claim"),
    ],
)
def test_bad_claims_are_refused(tmp_path, old, new, message):
    file = tmp_path / "claims.toml"
    file.write_text(TOML.replace(old, new))
    with pytest.raises(IsolossError, match=message):
        read_claims(file)


def test_a_claim_about_what_the_study_does_not_have_is_refused(tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text(TOML)
    with pytest.raises(IsolossError, match="compares of the claim flatter is ''; the study has sgd, longer"):
        answer_all(file, {"sgd": [], "longer": []}, {})
