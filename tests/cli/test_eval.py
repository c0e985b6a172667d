"""`isoloss eval` of one checkpoint: a run's own, and its averaged weights, which are kept apart."""

import hashlib
import shutil
from pathlib import Path

import pytest
from speaking import as_json, refusal

from isoloss import files
from isoloss.cli.main import main
from isoloss.lab.evaluation.evaluator import Evaluator
from isoloss.runs import Run, checkpoint_of
from isoloss.statistics.estimate import rounded

SETTINGS = ("--loss-sentences", "64", "--num-sequences", "32", "--num-train", "64", "--num-test", "64")
MEASURES = ("--measures", "loss", "trace", "probe-root", *SETTINGS, "--probe-seeds", "2", "--probe-epochs", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "averaged"
    words = ["train", str(path), "--language", "pcfg-laptop", "--size", "d16", "--steps", "30", "--checkpoints", "10"]
    assert main([*words, "--batch-size", "8", "--ema", "0.9", "--threads", "1"]) == 0
    return path


@pytest.fixture
def run(trained, tmp_path):
    """A run of its own for each test, without evaluations."""
    return Path(shutil.copytree(trained, tmp_path / "averaged"))


def estimates(document):
    return {(e["measure"], e["step"]): e["estimates"] for e in document["evaluations"]}


def kept(run, *parts):
    return sorted(path.name for path in run.joinpath("evaluations", *parts).glob("*.json"))


def test_a_checkpoint_is_the_run_at_its_step(capsys, run):
    checkpoint = run / "checkpoints" / "step-10"
    alone = as_json(capsys, "eval", checkpoint, *MEASURES)
    assert {e["model"] for e in alone["evaluations"]} == {str(checkpoint)}
    assert kept(run) == ["loss@step-10.json", "probe-root@step-10.json", "trace@step-10.json"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}
    of_run = as_json(capsys, "eval", run, "--steps", "10", *MEASURES)
    assert of_run["evaluations"] == [{**e, "model": str(run)} for e in alone["evaluations"]]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.json")} == before


@pytest.mark.parametrize("first", ["run", "average"])
def test_averaged_weights_are_measured_as_weights_of_their_own(capsys, run, tmp_path, first):
    average = run / "checkpoints" / "step-30" / "ema"
    order = {"run": run, "average": average} if first == "run" else {"average": average, "run": run}
    found = {name: estimates(as_json(capsys, "eval", path, *MEASURES)) for name, path in order.items()}
    assert set(found["average"]) == {("loss", 30), ("trace", 30), ("probe-root", 30)}
    assert kept(run, "ema") == ["loss@step-30.json", "probe-root@step-30.json", "trace@step-30.json"]
    assert len(kept(run)) == 6
    # the truth: a run whose last weights are that average
    other = Path(shutil.copytree(run, tmp_path / "other"))
    shutil.rmtree(other / "evaluations")
    weights, record = (other / "checkpoints" / "step-30" / name for name in ("model.safetensors", "trainer.json"))
    shutil.copy(average / "model.safetensors", weights)
    document = files.read_sealed(record, "")
    document["sha256"]["model.safetensors"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    files.write_sealed(record, document)
    result = Run(other).result()
    result["sha256"]["checkpoints/step-30/trainer.json"] = files.sha256(record)
    files.write_sealed(other / "result.json", result)
    assert estimates(as_json(capsys, "eval", other, "--steps", "30", *MEASURES)) == found["average"]
    assert found["average"]["loss", 30]["kl"]["value"] != found["run"]["loss", 30]["kl"]["value"]
    # and neither is measured again
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}
    assert [estimates(as_json(capsys, "eval", path, *MEASURES)) for path in (run, average)] == [
        found["run"],
        found["average"],
    ]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.json")} == before


def test_show_keeps_them_apart(capsys, run):
    for path in (run, run / "checkpoints" / "step-10" / "ema"):
        assert main(["eval", str(path), "--measures", "trace", *SETTINGS]) == 0
    shown = as_json(capsys, "show", run)
    assert [e["step"] for e in shown["evaluations"]] == [10, 30]
    assert [e["step"] for e in shown["evaluations_of_averages"]] == [10]
    assert shown["evaluations_of_averages"][0]["weights"] != shown["evaluations"][0]["weights"]
    assert main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    of_run, of_average = text.split("\nevaluations\n")[1].split("\nevaluations of the averaged weights\n")
    assert [line.split()[0] for line in of_run.splitlines()[1:] if line] == ["10", "30"]
    assert [line.split()[0] for line in of_average.splitlines()[1:] if line] == ["10"]


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


def test_the_table_names_what_was_measured(capsys, run):
    average = run / "checkpoints" / "step-30" / "ema"
    capsys.readouterr()
    assert main(["eval", str(average), "--measures", "trace", *SETTINGS]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(average)


def test_a_run_knows_its_averages(run):
    assert checkpoint_of(run / "checkpoints" / "step-10") == (Run(run), 10)
    found = checkpoint_of(run / "checkpoints" / "step-10" / "ema")
    assert found == (Run(run).averaged, 10)
    assert found[0].steps() == [10, 30]
    shutil.rmtree(run / "checkpoints" / "step-10" / "ema")
    assert found[0].steps() == [30]
    assert Run(run).steps() == [10, 30]
    assert checkpoint_of(run / "checkpoints" / "step-10" / "ema") is None
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-20", run / "ema", run / "evaluations" / "ema"):
        assert checkpoint_of(path) is None


def test_what_is_no_checkpoint_of_a_run_is_refused(capsys, run, tmp_path):
    for path in (run / "checkpoints" / "step-20", run / "checkpoints" / "step-20" / "ema"):
        assert f"there is no checkpoint {path}: it is not a folder" in refusal(capsys, "eval", path, alone=True)
    for path in (tmp_path, run / "checkpoints"):
        message = refusal(capsys, "eval", path, alone=True)
        assert f"{path} is neither a run directory (it has no run.json) nor a checkpoint in one" in message
    checkpoint = run / "checkpoints" / "step-10"
    message = refusal(capsys, "eval", checkpoint, "--steps", "10", alone=True)
    assert message.endswith(f"{checkpoint} is one checkpoint: leave out steps, or name the run, {run}")
    assert kept(run) == []


def test_the_log_says_which_checkpoint(run):
    evaluator = Evaluator(Run(run).averaged, {"num_sequences": 16})
    evaluator.evaluate("trace", 10)
    assert '"checkpoint": "checkpoints/step-10/ema"' in (run / "log.jsonl").read_text().splitlines()[-1]
