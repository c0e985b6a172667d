"""`isoloss eval` of one checkpoint of a run."""

import shutil
from pathlib import Path

import pytest
from speaking import as_json, refusal

from isoloss.cli.main import main
from isoloss.runs import Run, checkpoint_of
from isoloss.statistics.estimate import rounded

SETTINGS = ("--loss-sentences", "64", "--num-sequences", "32", "--num-train", "64", "--num-test", "64")
MEASURES = ("--measures", "loss", "trace", "probe-root", *SETTINGS, "--probe-seeds", "2", "--probe-epochs", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "run"
    words = ["train", str(path), "--language", "pcfg-laptop", "--size", "d16", "--steps", "30", "--checkpoints", "10"]
    assert main([*words, "--batch-size", "8", "--threads", "1"]) == 0
    return path


@pytest.fixture
def run(trained, tmp_path):
    """A run of its own for each test, without evaluations."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def estimates(document):
    return {(e["measure"], e["step"]): e["estimates"] for e in document["evaluations"]}


def kept(run):
    return sorted(path.name for path in run.joinpath("evaluations").glob("*.json"))


def test_a_checkpoint_is_the_run_at_its_step(capsys, run):
    checkpoint = run / "checkpoints" / "step-10"
    alone = as_json(capsys, "eval", checkpoint, *MEASURES)
    assert {e["model"] for e in alone["evaluations"]} == {str(checkpoint)}
    assert kept(run) == ["loss@step-10.json", "probe-root@step-10.json", "trace@step-10.json"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}
    of_run = as_json(capsys, "eval", run, "--steps", "10", *MEASURES)
    assert of_run["evaluations"] == [{**e, "model": str(run)} for e in alone["evaluations"]]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.json")} == before


def test_a_trace_is_printed_with_and_without_embeddings(capsys, run):
    capsys.readouterr()
    assert main(["eval", str(run), "--steps", "30", "--measures", "trace", *SETTINGS]) == 0
    printed = capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    trace = Run(run).evaluation("trace", 30).estimates["trace"]
    rest = [value for name, value in trace.by_parameter.items() if name not in trace.details["embeddings"]]
    assert 0 < len(rest) < len(trace.by_parameter)
    expected = f"{trace} ({rounded(sum(rest), trace.details['without_embeddings_stderr'])} without embeddings)"
    assert expected in printed
    assert expected in shown


def test_a_run_knows_its_checkpoints(run):
    assert checkpoint_of(run / "checkpoints" / "step-10") == (Run(run), 10)
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-20"):
        assert checkpoint_of(path) is None


def test_what_is_no_checkpoint_of_a_run_is_refused(capsys, run, tmp_path):
    path = run / "checkpoints" / "step-20"
    assert f"there is no checkpoint {path}: it is not a folder" in refusal(capsys, "eval", path, alone=True)
    for path in (tmp_path, run / "checkpoints"):
        message = refusal(capsys, "eval", path, alone=True)
        assert f"{path} is neither a run directory (it has no run.json) nor a checkpoint in one" in message
    checkpoint = run / "checkpoints" / "step-10"
    message = refusal(capsys, "eval", checkpoint, "--steps", "10", alone=True)
    assert message.endswith(f"{checkpoint} is one checkpoint: leave out steps, or name the run, {run}")
    assert kept(run) == []
