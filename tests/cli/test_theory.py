"""`isoloss theory` as a user meets it: tables, one JSON document, a figure, and what it refuses."""

import json
import math

import pytest

from isoloss.cli import theory
from isoloss.cli.main import main

BARTLETT = ["bartlett", "--length", "2", "--directions", "2"]
FLOW = ["sgd-flow", "--trajectories", "64", "--step-sizes", "0.2", "0.1"]
FLOW += ["--times", "0.5", "1", "--batch-sizes", "1", "2"]
BRACKETS = ["brackets", "--lengths", "4", "--steps", "400", "--trials", "50", "--samples", "2", "4", "--draws", "2"]


def call(capsys, *words, status=0):
    capsys.readouterr()
    assert theory.main(list(words)) == status
    return capsys.readouterr().out


def test_help_names_the_statements(capsys):
    assert main(["theory", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("bartlett", "sgd-flow", "brackets"))
    assert main(["theory"]) == 0
    assert text == capsys.readouterr().out
    assert main(["theory", "nonsense"]) == 2
    assert "the subcommands are bartlett, sgd-flow, brackets" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "name"), theory.NUMBERS.items())
def test_a_statement_has_its_number_in_the_paper(capsys, number, name):
    shown = []
    for word in (number, name):
        assert main(["theory", word, "--help"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


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
    text = call(capsys, *FLOW, "--model", "two-parameters", "--figure", str(tmp_path / "flow.pdf"))
    lines = text.splitlines()
    start = 0.7 * 0.3 * (2.0**2 + (math.log(0.7 / 0.3) / 2.0) ** 2)  # v (a^2 + b^2)
    assert lines[0] == f"Theorem 3.3, two parameters: at K = 1, from a trace of {start:.5g} nats per example"
    assert text.count("shown: two parameters: ") == 5
    rows = [line.split() for line in lines[2 : lines.index("")]]  # of the last time, for each batch and step size
    assert [row[:2] for row in rows[:2]] == [["1", "0.2"], ["1", "0.1"]]
    assert len(rows) == 2 * 3
    found = json.loads(call(capsys, *FLOW, "--model", "two-parameters", "--json"))
    assert [row[2] for row in rows if row[1] == "0.1"] == [
        f"{row['flow_trace']:.5f}" for row in found["rows"] if row["step_size"] == 0.1 and row["time"] > 0.9
    ]
    assert (tmp_path / "flow.pdf").is_file()


def test_sgd_flow_of_both_models(capsys):
    words = ["--step-sizes", "0.1", "0.05", "--trajectories", "16", "--times", "0.5", "--batch-sizes", "1"]
    text = call(capsys, "sgd-flow", *words)
    assert "Theorem 3.3, two parameters: at K = 0.5, " in text
    assert "Theorem 3.3, masked LM, 88 parameters: at K = 0.5, " in text
    assert text.count("shown: two parameters: ") == text.count("shown: masked LM, 88 parameters: ") == 5
    document = json.loads(call(capsys, "sgd-flow", *words, "--model", "masked-lm", "--json"))
    assert {row["model"] for row in document["rows"] + document["limits"]} == {"masked LM, 88 parameters"}
    assert [row["step_size"] for row in document["rows"] + document["limits"]] == [0.1, 0.05, 0]
    assert len(document["statements"]) == 5


def test_sgd_flow_as_json_refutes_a_wrong_coefficient(capsys):
    document = json.loads(call(capsys, *FLOW, "--model", "two-parameters", "--coefficient", "0.5", "--json"))
    assert document["settings"]["coefficient"] == 0.5
    assert document["statements"][2]["verdict"] == "not shown"
    assert [row["batch_size"] for row in document["limits"]] == [1, 1, 2, 2]
    assert len(document["rows"]) == 8
    assert len(document["control"]["two parameters"]) == 3


def test_brackets_prints_tables_and_verdicts(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call(capsys, *BRACKETS, "--figure", str(tmp_path / "brackets.svg"))
    assert "four on kinks       4" in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\nshown: ") + text.count("\nnot shown: ") == 16
    assert "not shown: Theorem 5.1 as printed" in text
    assert (tmp_path / "brackets.svg").is_file()


def test_brackets_as_json(capsys):
    document = json.loads(call(capsys, *BRACKETS, "--json"))
    assert document["settings"]["lengths"] == [4]
    assert document["solutions"][0]["flatness"]["trace"] == pytest.approx(1)
    assert document["widths"][0]["predicted"] == 32
    assert {row["samples"] for row in document["heads"]} == {2, 4}
    assert len(document["statements"]) == 16
    assert document["paths"]["4"][0]["step"] == 0
