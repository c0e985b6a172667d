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
from isoloss.studies import load_study
from isoloss.studies.claims import Claim, planned_tests
from isoloss.studies.export import export
from isoloss.studies.folder import StudyFolder
from isoloss.studies.reading import read_study

RESULTS = Path(__file__).parents[2] / "results"


def script():
    spec = importlib.util.spec_from_file_location("verdicts_from_the_table", RESULTS / "verdicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NO_CHANGE = {"direction": "no change within", "margin": 4.0}
BOTH = {"a": "kl", "b": "loss"}
ASKED = {
    "no gates": [
        {"measures": "kl", "direction": "decrease", "no_effect_within": 2.0},
        {"measures": "flatness", "direction": "decrease"},
        {"measures": "loss", "direction": "no change within", "margin": 1.0},
    ],
    "all tested": [
        {"measures": "kl", "role": "manipulation check", **NO_CHANGE},
        {"measures": BOTH, "role": "positive control", **NO_CHANGE},
        {"measures": "kl", "direction": "increase", "role": "primary", "no_effect_within": 3.0},
        {"measures": "flatness", "direction": "decrease"},
        {"measures": "flatness", "direction": "increase", "margin": 0.1},
        {"measures": "loss", "direction": "increase", "no_effect_within": 50.0, "margin": 0.1},
    ],
    "an open primary claim": [
        {"measures": "flatness", "direction": "decrease", "role": "primary"},
        {"measures": "kl", "direction": "increase"},
    ],
    "a failed control": [
        {"measures": "flatness", "direction": "increase", "margin": 60.0, "role": "positive control"},
        {"measures": "kl", "direction": "increase"},
        {"measures": "flatness", "direction": "increase"},
    ],
}


@pytest.mark.parametrize("name", ASKED)
def test_every_verdict_and_p_value_follows_from_the_table(tmp_path, finished, capsys, name):
    study = load_study(studies_in_process.write(tmp_path))
    of = study.claims[0].of
    claims = [Claim(id=f"c{i}", statement="", of=of, **one) for i, one in enumerate(ASKED[name])]
    study = dataclasses.replace(study, claims=claims)
    folder = StudyFolder(study, finished, "tiny")
    export(folder, tmp_path / "kept", formats=("csv",))
    judged = script()
    assert judged.main([str(tmp_path / "kept")]) == 0
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
    assert judged.main([str(tmp_path / "kept")]) == 1
    assert "verdict is as wished in the export" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["same-loss-27-grammars", "same-loss-27-grammars-repeated"])
def test_the_kept_results_are_judged_anew_as_their_table_says(capsys, kept):
    assert script().main([str(RESULTS / kept), "--family", "50"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {kept} |")]
    table = (RESULTS / "verdicts.md").read_text().splitlines()
    assert rows == [line for line in table if line.startswith(f"| {kept} |")]
    # the number of tests that the study plans, which these exports do not have
    made = load_study("same-loss")
    assert planned_tests(made.claims, made.scale("laptop")) == 50


KEPT = files.read_json(RESULTS / "claims.json")


FIRST_DESIGNS = ("dose-response", "optimizers")  # the kept draws are of these studies' first designs


@pytest.mark.parametrize("study", [study for study in KEPT if study not in FIRST_DESIGNS])
def test_the_claims_by_which_kept_results_are_judged_are_still_those_of_the_study(study):
    made, kept = load_study(study), KEPT[study]
    assert (made.loss_margin, list(made.verdicts_at)) == (kept.get("same_loss_nats", 0.01), kept["scales"])
    names = {"same_loss_nats": "loss_margin", "at_same_loss": "loss_rule"}
    defaults = {each.name: each.default for each in dataclasses.fields(Claim)}
    for claim, old in zip(made.claims, kept["claims"], strict=True):
        changed = {key: value for key, value in claim.document().items() if value != defaults[key]}
        assert changed == {names.get(k, k): v for k, v in old.items() if k not in ("compares", "measures")}


SUMMARIES = [path for path in sorted(RESULTS.glob("*/summary.json")) if "secondary_tests" in path.read_text()]


@pytest.mark.parametrize("kept", [path.parent.name for path in SUMMARIES])
def test_the_verdicts_of_kept_results_follow_from_their_table(kept, capsys):
    summary = files.read_json(RESULTS / kept / "summary.json")
    assert script().main([str(RESULTS / kept)]) == 0
    if kept.removesuffix("-repeated") in FIRST_DESIGNS:
        return
    made = load_study(summary["study"])
    scale = made.scale(summary["scale"], seed_offset=summary["seed_offset"])
    # the kept evening of `paper` has one task of text less, a case of two claims
    fewer = 2 if kept == "paper-evening" else 0
    family = summary.get("family") or summary["claims_file"]
    assert planned_tests(made.claims, scale) - fewer == family["secondary_tests"]


def test_the_script_imports_nothing_of_ours():
    tree = ast.parse((RESULTS / "verdicts.py").read_text())
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"scipy"}
