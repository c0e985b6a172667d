"""`isoloss theory` as a user meets it: tables, one JSON document, a figure, and what it refuses."""

import json
import math

import pytest

from isoloss.cli import theory
from isoloss.cli.main import main
from isoloss.paper.theory import sgd_flow
from isoloss.paper.theory.sgd_flow import study

BARTLETT = ["bartlett", "--length", "2", "--directions", "2"]
FLOW = ["sgd-flow", "--trajectories", "64", "--step-sizes", "0.2", "0.1"]
FLOW += ["--times", "0.5", "1", "--batch-sizes", "1", "2"]
BOTH = ["sgd-flow", "--step-sizes", "0.1", "0.05", "--trajectories", "16", "--times", "0.5", "--batch-sizes", "1"]
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


@pytest.mark.parametrize(
    ("words", "fragments", "verdicts"),
    [
        (BARTLETT, ["BERT, brackets of length 2"], 4),
        (BRACKETS, ["four on kinks       4", "contradicted: Theorem 5.1 as printed"], 17),
        (
            BOTH,
            ["Theorem 3.3, two parameters: at K = 0.5, ", "Theorem 3.3, masked LM, 88 parameters: at K = 0.5, "],
            10,
        ),
    ],
    ids=["bartlett", "brackets", "sgd-flow"],
)
def test_tables_verdicts_and_a_figure(capsys, tmp_path, monkeypatch, words, fragments, verdicts):
    monkeypatch.setenv("COLUMNS", "80")
    text = call(capsys, *words, "--figure", str(tmp_path / "figure.svg"))
    assert all(fragment in text for fragment in fragments)
    assert sum(text.count(f"\n{verdict}: ") for verdict in ("shown", "not shown", "contradicted")) == verdicts
    assert words is BOTH or max(map(len, text.splitlines())) <= 80  # a table of sgd-flow has a longer title
    assert (tmp_path / "figure.svg").is_file()


def test_bartlett_and_brackets_as_json(capsys):
    document = json.loads(call(capsys, *BARTLETT, "--json"))
    assert document["settings"]["length"] == 2
    assert [statement["verdict"] for statement in document["statements"]] == ["shown"] * 4
    assert document["rows"][0]["gap"] < 1e-10
    document = json.loads(call(capsys, *BRACKETS, "--json"))
    assert document["settings"]["lengths"] == [4]
    assert document["solutions"][0]["flatness"]["trace"] == pytest.approx(1)
    assert document["widths"][0]["predicted"] == 32
    assert {row["samples"] for row in document["heads"]} == {2, 4}
    assert len(document["statements"]) == 17
    assert document["paths"]["4"][0]["step"] == 0


def test_the_table_of_sgd_flow_is_of_the_last_time(capsys):
    text = call(capsys, *FLOW, "--model", "two-parameters")
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


def test_an_interruption_leaves_the_model_that_is_done(capsys, tmp_path, monkeypatch):
    def interrupted(settings, progress):
        if settings.model.name.startswith("masked"):
            raise KeyboardInterrupt
        return study(settings, progress=progress)

    monkeypatch.setattr(sgd_flow, "study", interrupted)
    figure = tmp_path / "flow.svg"
    assert main(["theory", *BOTH, "--figure", str(figure)]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("Theorem 3.3, two parameters: at K = 0.5, ")
    assert "Other times: --json, or --figure." in out
    assert sum(out.count(f"\n{verdict}: two parameters: ") for verdict in ("shown", "not shown", "contradicted")) == 5
    assert err.endswith(f"figure: {figure}\nisoloss theory: interrupted\n")
    assert "two parameters" in figure.read_text()


def test_sgd_flow_of_one_model(capsys):
    assert theory.main([*BOTH, "--model", "masked-lm", "--json"]) == 0
    out, err = capsys.readouterr()
    # K / eta^2 for each step size
    assert err.startswith("sgd-flow, masked LM, 88 parameters: 250 steps of SGD, then the control\n")
    document = json.loads(out)
    assert {row["model"] for row in document["rows"] + document["limits"]} == {"masked LM, 88 parameters"}
    assert [row["step_size"] for row in document["rows"] + document["limits"]] == [0.1, 0.05, 0]
    assert len(document["statements"]) == 5


def test_sgd_flow_as_json_refutes_a_wrong_coefficient(capsys):
    document = json.loads(call(capsys, *FLOW, "--model", "two-parameters", "--coefficient", "0.5", "--json"))
    assert document["settings"]["coefficient"] == 0.5
    assert document["statements"][2]["verdict"] == "contradicted"
    assert [row["batch_size"] for row in document["limits"]] == [1, 1, 2, 2]
    assert len(document["rows"]) == 8
    assert len(document["control"]["two parameters"]) == 3
