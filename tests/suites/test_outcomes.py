"""Outcomes that were measured elsewhere, beside the files that they are in."""

import json
import shutil
from pathlib import Path

import pytest

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.suites.config import Member
from isoloss.suites.outcomes import read_outcomes

DATA = Path(__file__).parent / "data" / "lm_eval"
MEMBERS = [Member(f"runs/seed{seed}@step{step}", {"seed": seed, "step": step}) for seed in (0, 1) for step in (10, 20)]


def written(tmp_path, text, name="results.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def numbers(outcomes):
    return {(each.checkpoint, each.name): each.estimate.value for each in outcomes}


def test_a_table_by_checkpoint(tmp_path):
    """Also with an error, missing cells, and columns that are no outcomes."""
    text = "checkpoint,seed,chess,chess_stderr,qa,note,qa_stderr\nruns/seed0@step10,0,1480,25,NaN,fine,\n"
    found = read_outcomes([written(tmp_path, text + "runs/seed1@step20,1,1520,,0.5,,\n")], MEMBERS)
    assert numbers(found) == {
        ("runs/seed0@step10", "chess"): 1480,
        ("runs/seed1@step20", "chess"): 1520,
        ("runs/seed1@step20", "qa"): 0.5,
    }
    chess, other, qa = (each.estimate for each in found)
    assert chess.stderr == 25
    assert chess.ci95[0] == pytest.approx(1480 - 1.96 * 25, abs=0.01)
    for estimate in (other, qa):  # without an error, and not exact
        assert (estimate.stderr, estimate.samples, estimate.is_exact) == (0, 1, False)


def test_the_index_that_pandas_writes_is_no_outcome(tmp_path):
    found = read_outcomes([written(tmp_path, ",checkpoint,qa\n0,runs/seed0@step10,0.5\n")], MEMBERS)
    assert numbers(found) == {("runs/seed0@step10", "qa"): 0.5}


def test_a_table_by_labels(tmp_path):
    text = "step\tqa\tseed\n10\t0.25\t0\n20\t0.5\t1.0\n30\t1\t1\n"
    with pytest.warns(IsolossWarning, match=r"match no checkpoint of the suite: 1 \(first: line 4, seed 1, step 30\)"):
        found = read_outcomes([written(tmp_path, text, "results.tsv")], MEMBERS)
    assert numbers(found) == {("runs/seed0@step10", "qa"): 0.25, ("runs/seed1@step20", "qa"): 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,qa\na,1\n", r"has no column checkpoint and no column of a label \(seed, step\); it has model, qa"),
        ("seed,step,note\n0,10,good\n", "has no numeric column besides seed, step; it has seed, step, note"),
        ("seed,step,qa\n0,10,0.5\n0,20,half\n", "line 3: the column qa should hold numbers, but has 'half'"),
        ("seed,qa\n0,0.5\n", "line 2: seed 0 is runs/seed0@step10 or runs/seed0@step20; add a label column"),
        (
            "seed,step,qa\n0,10,0.5\n0,10,0.6\n",
            r"lines 2 and 3 are both for runs/seed0@step10 \(by seed, step\): leave out one",
        ),
        ("seed,step,qa\n0,10,inf\n", "qa of .*results.csv, line 2: the estimate is not finite"),
        ("seed,step,qa,qa_stderr\n0,10,1,-1\n", "qa of .*results.csv, line 2: stderr is -1.0; it must be at least 0"),
        ("seed,step,qa,qa\n0,10,1,2\n", "has two columns 'qa': leave out one of them"),
        ("seed,step,qa, qa\n0,10,1,2\n", "has two columns 'qa': leave out one of them"),
        ('seed,step,qa,go\n0,10,"0,5",1\n', "line 2: the column qa should hold numbers, but has '0,5'"),
        ("seed,step,qa,go\n0,10,61%,1\n", "line 2: the column qa should hold numbers, but has '61%'"),
        ("seed,step,qa\n0,10,1,2\n", "is not a readable .csv file"),
        ("", "is not a readable .csv file"),
    ],
)
def test_tables_that_are_refused(tmp_path, text, message):
    with pytest.raises(IsolossError, match=message):
        read_outcomes([written(tmp_path, text)], MEMBERS)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(IsolossError, match=r"^cannot read \S*none.csv: there is no such file$"):
        read_outcomes([tmp_path / "none.csv"], MEMBERS)


def test_results_of_lm_eval_by_name_path_and_revision(tmp_path):
    members = [Member("models/early", {}), Member(str(tmp_path / "models/late"), {})]
    found = read_outcomes([DATA / "models__*" / "*.json*"], members)
    assert {(each.checkpoint, each.name) for each in found} >= {
        ("models/early", "topics_choice.acc"),
        (str(tmp_path / "models/late"), "topics_rolling.bits_per_byte"),
    }
    with pytest.warns(
        IsolossWarning, match="left out: the results of models/late, which is not a checkpoint of the suite"
    ):
        assert {each.checkpoint for each in read_outcomes([DATA], members[:1])} == {"models/early"}
    document = {
        "results": {"quiz": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "config": {"model_args": {"pretrained": "runs/seed1", "revision": "step20"}},
        "model_name": "runs/seed1",
    }
    file = written(tmp_path, json.dumps(document), "results_2026-01-01T12-00-00.0.json")
    assert numbers(read_outcomes([file], MEMBERS)) == {("runs/seed1@step20", "quiz.acc"): 0.5}


def test_samples_alone_have_the_name_of_their_folder(tmp_path):
    folder = tmp_path / "runs__seed0"
    shutil.copytree(DATA / "models__late", folder, ignore=shutil.ignore_patterns("results_*"))
    of_seed = [Member("runs/seed0@step10", {})]
    assert {each.checkpoint for each in read_outcomes([folder], of_seed)} == {"runs/seed0@step10"}
    which = "runs__seed0, which may belong to runs/seed0@step10 or runs/seed0@step20: put results_DATE.json"
    with pytest.warns(IsolossWarning, match=which):
        assert not read_outcomes([folder], MEMBERS)
