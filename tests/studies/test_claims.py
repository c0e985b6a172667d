import hashlib
import json

import pytest

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, Claim, ClaimResult, Contrast, read_claims
from isoloss.studies.verdicts import answer_all, judge


def estimate(value, stderr):
    return Estimate(value=value, stderr=stderr, samples=10**6, unit="points", num_predictions=1000, method="difference")


CLAIM = Claim(id="flatter", statement="Flatter.", paper="19.8 to 12.6", direction="decrease")


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
    found = read_claims(file)
    assert found.claims[0] == CLAIM
    assert found.claims[1].margin == 0.01
    assert (found.gates, found.same_loss_nats, found.scales) == ((), 0.01, ())
    assert str(found) == f"claims.toml, SHA-256 of its content {found.sha256}"


def test_the_hash_is_of_what_the_file_states(tmp_path):
    file = tmp_path / "claims.toml"

    def sha256(text):
        file.write_text(text)
        return read_claims(file).sha256

    stated = [
        {"id": "flatter", "statement": "Flatter.", "paper": "19.8 to 12.6", "direction": "decrease"},
        {
            **{"id": "same", "statement": "Same.", "paper": "3.204 and 3.206"},
            **{"direction": "no change within", "margin": 0.01},
        },
    ]
    content = json.dumps({"claims": stated}, sort_keys=True)
    assert sha256(TOML) == hashlib.sha256(content.encode()).hexdigest()
    layouts = (TOML + "# a comment", TOML.replace(' = "', '="'), TOML.replace("\n\n", "\n\n\n"))
    moved = TOML.replace('statement = "Same."\n', "").replace("margin", 'statement = "Same."\nmargin')
    assert {sha256(text) for text in (*layouts, moved)} == {sha256(TOML)}
    changed = [
        ("0.01", "0.02"),
        ('"decrease"', '"increase"'),
        ("Flatter.", "Flat."),
        ("margin", "factor = 2.0\nmargin"),
    ]
    assert len({sha256(TOML), *(sha256(TOML.replace(*each)) for each in changed)}) == 5
    first, second = TOML.split("\n\n")
    assert sha256(f"{second}\n\n{first}") != sha256(TOML)  # gates are tested in the order of the file


def test_what_holds_for_all_claims_is_read(tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text('same_loss_nats = 0.02\nscales = ["laptop"]\n' + TOML)
    found = read_claims(file, scales=("laptop", "smoke"))
    assert (found.same_loss_nats, found.scales) == (0.02, ("laptop",))
    assert (found.judged_at("laptop"), found.judged_at("smoke"), found.judged_at(None)) == (True, False, True)
    assert found.warning("laptop") == ""
    assert found.warning("smoke") == (
        "Scale smoke is too small to say anything, and no verdict is given. Verdicts are given at scale laptop."
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "same"', 'id = "flatter"', "two claims with the id 'flatter'"),
        ("margin = 0.01", "margin = 0.0", "needs a margin above 0"),
        ("margin = 0.01", "margins = 0.01", "margins"),
        (
            "margin = 0.01",
            "margin = 0.01\nfactor = nan",
            "claim same: factor is nan; it must be finite and above",
        ),
        ("margin = 0.01", "margin = 0.01\nfactor = 0", r"claim same: factor is 0\.0; it must be"),
        ("no change within", "down", r"claims\[1\].direction"),
        ('statement = "Same."', "", "statement"),
        ("[[claims]]", "[[claim]]", "claim"),
        ("\n[[", 'primary = "same"\n[[', r"are now keys of the claim itself: role = \"primary\", and case"),
        ("\n[[", 'primary_case = "root"\n[[', "are now keys of the claim itself"),
        ("margin = 0.01", 'margin = 0.01\nrole = "main"', r"claims\[1\]\.role: it must be one of manipulation check, "),
        ("margin = 0.01", 'margin = 0.01\ncase = "root"', "claim same: case is 'root', but the role is secondary"),
        (
            "margin = 0.01",
            "margin = 0.01\nno_effect_within = 0.5",
            "claim same: no_effect_within is for claims of a ch",
        ),
        ('"decrease"', '"decrease"\nno_effect_within = 0', r"claim flatter: no_effect_within is 0\.0; it must be"),
        (
            '"decrease"',
            '"decrease"\nno_effect_within = 1\nmargin = 2',
            "no_effect_within is 1; it must be above the margin",
        ),
        ('"decrease"', '"decrease"\nrole = "primary"\nnot_tested = "No."', "it is a primary and cannot be not_tested"),
        ('"decrease"', '"decrease"\nat_same_loss = "yes"', r"at_same_loss: it must be one of tested, adjusted"),
        (
            '"decrease"',
            '"decrease"\nmeasures = "trace"',
            "claim flatter: a rescaling that changes no prediction changes",
        ),
        ("\n[[", "same_loss_nats = 0.0\n[[", r"same_loss_nats is 0\.0; it must be finite and above 0"),
        ("\n[[", "same_loss_nats = -1.0\n[[", r"same_loss_nats is -1\.0"),
        ("\n[[", 'scales = ["lapdog"]\n[[', "scales has 'lapdog'; the study's scales are laptop, smoke"),
    ],
)
def test_bad_claims_are_refused(tmp_path, old, new, message):
    file = tmp_path / "claims.toml"
    file.write_text(TOML.replace(old, new, 1 if old == "\n[[" else -1))
    with pytest.raises(IsolossError, match=message):
        read_claims(file, scales=("laptop", "smoke"))


def test_a_trace_has_the_minimal_trace_beside_it(tmp_path):
    file = tmp_path / "claims.toml"
    both = TOML.replace('"decrease"', '"decrease"\nmeasures = "trace"')
    file.write_text(both + 'measures = "minimal-trace"\n')
    assert [claim.measures for claim in read_claims(file).claims] == ["trace", "minimal-trace"]


def test_the_gates_are_in_their_order_whatever_the_order_in_the_file(tmp_path):
    file = tmp_path / "claims.toml"
    roles = "primary", "secondary", "positive control", "manipulation check", "primary"
    file.write_text(
        "".join(
            f'[[claims]]\nid = "{i}"\nstatement = ""\ndirection = "increase"\nrole = "{role}"\n'
            for i, role in enumerate(roles)
        )
    )
    assert [claim.id for claim in read_claims(file).gates] == ["3", "2", "0", "4"]


def test_a_claim_about_what_the_study_does_not_have_is_refused(tmp_path):
    file = tmp_path / "claims.toml"
    file.write_text(TOML)
    with pytest.raises(IsolossError, match="measures of the claim flatter is ''; the study has none"):
        answer_all(read_claims(file), {"sgd": [], "longer": []}, {})
    with pytest.raises(IsolossError, match="compares of the claim flatter is ''; the study has sgd, longer"):
        answer_all(read_claims(file), {"sgd": [], "longer": []}, {"": {}})


def test_slopes_take_clusters():
    with pytest.raises(IsolossError, match="the contrast of a and b has slopes but no clusters"):
        Contrast(names=("a", "b"), pairs=[], slopes={"trace": estimate(1.0, 0.1)})
