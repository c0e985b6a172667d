"""The verdicts of a study, computed again from its export by a script that uses nothing of isoloss."""

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import studies_in_process
from isoloss import files
from isoloss.studies.claims import read_claims
from isoloss.studies.export import export
from isoloss.studies.folder import StudyFolder
from isoloss.studies.reading import read_study
from isoloss.studies.spec import load_study
from isoloss.studies.verdicts import planned_tests

RESULTS = Path(__file__).parents[2] / "results"
CLAIM = '[[claims]]\nid = "{id}"\nstatement = ""\ncompares = "dropout"\nmeasures = "{measures}"\ndirection = "{way}"\n'


def script():
    spec = importlib.util.spec_from_file_location("verdicts_from_the_table", RESULTS / "verdicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def claims(*tables):
    return "".join(
        CLAIM.format(id=f"c{i}", measures=measures, way=way) + "".join(f"{line}\n" for line in more)
        for i, (measures, way, *more) in enumerate(tables)
    )


FILES = {
    "no gates": claims(
        ("kl", "decrease", "no_effect_within = 2"), ("flatness", "decrease"), ("loss", "no change within", "margin = 1")
    ),
    "all tested": claims(
        ("kl", "no change within", "margin = 4", 'role = "manipulation check"'),
        ("both", "no change within", "margin = 4", 'role = "positive control"'),
        ("kl", "increase", 'role = "primary"', "no_effect_within = 3"),
        ("flatness", "decrease"),
        ("flatness", "increase", "margin = 0.1"),
        ("loss", "increase", "no_effect_within = 50", "margin = 0.1"),
    ),
    "an open primary claim": claims(("flatness", "decrease", 'role = "primary"'), ("kl", "increase")),
    "a failed control": claims(
        ("flatness", "increase", "margin = 60", 'role = "positive control"'),
        ("kl", "increase"),
        ("flatness", "increase"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_verdict_and_p_value_follows_from_the_table(tmp_path, finished, capsys, name):
    study = load_study(studies_in_process.write(tmp_path))
    (tmp_path / "claims.toml").write_text(FILES[name])
    measures = {
        "kl": {"": "kl"},
        "loss": {"": "loss"},
        "flatness": {"trace": "trace"},
        "both": {"a": "kl", "b": "loss"},
    }
    study = dataclasses.replace(study, measures=lambda scale: measures)
    folder = StudyFolder(study, finished, "tiny")
    export(folder, tmp_path / "kept", formats=("csv",))
    judged = script()
    assert judged.main([str(tmp_path / "kept"), str(tmp_path / "claims.toml")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| kept")]
    answers = [one for each in files.read_json(tmp_path / "kept/summary.json")["claims"] for one in each["answers"]]
    assert len(rows) == len(answers)
    seen = {one["verdict"] for one in answers}
    assert seen >= {"no gates": {"no effect of interest"}, "all tested": {"shown"}}.get(name, {"not tested"})
    # the differences and their errors follow from the table of values
    last = read_study(tmp_path / "kept").values.filter(step=6)
    kl = dict(last.filter(estimate="kl").select("run", "value").iter_rows())
    moves = np.array([kl[f"dropped-{seed}"] - kl[f"plain-{seed}"] for seed in (1, 2, 3)])
    of_kl = next(one["difference"] for one in answers if one["case"] in ("", "a"))
    assert (of_kl["value"], of_kl["stderr"]) == pytest.approx((moves.mean(), moves.std(ddof=1) / np.sqrt(3)))
    # a table that says otherwise is found out
    document = files.read_json(tmp_path / "kept/summary.json")
    document["claims"][0]["answers"][0]["verdict"] = "as wished"
    files.write_json(tmp_path / "kept/summary.json", document)
    assert judged.main([str(tmp_path / "kept"), str(tmp_path / "claims.toml")]) == 1
    assert "verdict is as wished in the export" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["same-loss-27-grammars", "same-loss-27-grammars-repeated"])
def test_the_kept_results_are_judged_anew_as_their_table_says(capsys, kept):
    made, planned = load_study("same-loss"), 50
    assert script().main([str(RESULTS / kept), str(made.claims), "--family", str(planned)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {kept} |")]
    table = (RESULTS / "verdicts.md").read_text().splitlines()
    assert rows == [line for line in table if line.startswith(f"| {kept} |")]
    # the number of tests that the study plans, which these exports do not have
    scale = made.scale()
    assert planned_tests(read_claims(made.claims), made.measures(scale), made.contrast_cases(scale)) == planned


def test_the_script_imports_nothing_of_ours():
    tree = ast.parse((RESULTS / "verdicts.py").read_text())
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"scipy"}
