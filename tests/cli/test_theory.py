"""`isoloss theory` as a user meets it: tables, one JSON document, a figure, and what it refuses."""

import json

import pytest

from isoloss.cli import theory

BARTLETT = ["bartlett", "--length", "2", "--directions", "2"]
FLOW = [
    "sgd-flow",
    "--trajectories",
    "64",
    "--step-sizes",
    "0.2",
    "0.1",
    "--times",
    "0.5",
    "1",
    "--batch-sizes",
    "1",
    "2",
]


def call(capsys, *words, status=0):
    capsys.readouterr()
    assert theory.main(list(words)) == status
    return capsys.readouterr().out


def test_help_names_the_statements(capsys):
    text = call(capsys, "--help")
    assert all(name in text for name in theory.STATEMENTS)
    assert text == call(capsys)


def test_bartlett_prints_a_table_and_verdicts(capsys, tmp_path):
    text = call(capsys, *BARTLETT, "--figure", str(tmp_path / "gap.svg"))
    assert "BERT, brackets of length 2" in text
    assert text.count("\nshown: ") == 4
    assert (tmp_path / "gap.svg").is_file()


def test_bartlett_as_json(capsys):
    document = json.loads(call(capsys, *BARTLETT, "--json"))
    assert document["settings"]["length"] == 2
    assert [statement["verdict"] for statement in document["statements"]] == ["shown"] * 4
    assert document["rows"][0]["gap"] < 1e-10


def test_sgd_flow_prints_a_table_and_verdicts(capsys, tmp_path):
    text = call(capsys, *FLOW, "--figure", str(tmp_path / "flow.pdf"))
    assert "nats per example" in text
    assert text.count("shown: ") == 5
    assert (tmp_path / "flow.pdf").is_file()


def test_sgd_flow_as_json_refutes_a_wrong_coefficient(capsys):
    document = json.loads(call(capsys, *FLOW, "--coefficient", "0.5", "--json"))
    assert document["settings"]["coefficient"] == 0.5
    assert document["statements"][2]["verdict"] == "not shown"
    assert set(document["coefficients"]) == {"1", "2"}
    assert len(document["rows"]) == 8
    assert len(document["control"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "there is no statement 'nonsense'; the statements are bartlett, sgd-flow"),
        (["bartlett", "--figure", "a.gif"], "--figure is a.gif; its name must end in"),
        (["sgd-flow", "--figure", "a.gif"], "--figure is a.gif; its name must end in"),
        (["bartlett", "--length", "5"], "length is 5"),
        (["bartlett", "--directions", "-1"], "directions is -1"),
        (["sgd-flow", "--trajectories", "1"], "trajectories is 1"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(theory.IsolossError, match=message):
        theory.main(words)
