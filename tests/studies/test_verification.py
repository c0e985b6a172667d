"""Reading a real run back: everything in order, and each kind of damage found."""

import dataclasses
import re
import shutil

import pytest
import torch
from threadpoolctl import threadpool_info

from isoloss import files
from isoloss.cli.main import main
from isoloss.errors import IsolossWarning
from isoloss.lab.evaluation.evaluator import Evaluator, pending
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.training.train import train
from isoloss.paper.same_loss import STUDY
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.runs import Run
from isoloss.studies import Experiment, Measurement, Scale, Study
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import Resources
from isoloss.studies.verify import verify, verify_run

CONFIG = TrainConfig(
    language=PRESETS["pcfg-laptop"][0],
    model=ModelConfig(size="d16", dropout=0.0),
    steps=20,
    batch_size=8,
    checkpoints=(10,),
    device="cpu",
)
SETTINGS = {"loss_sentences": 32, "num_sequences": 16, "num_train": 100, "num_test": 100, "probe_epochs": 2}
MEASURES = ("loss", "trace", "probe-prefix-4")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    train(run, CONFIG, CONFIG.language.build())
    evaluator = Evaluator(run, SETTINGS)
    for step, measure in pending(run, MEASURES, [10, 20], SETTINGS):
        evaluator.evaluate(measure, step)
    return run


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original.path, tmp_path / "run")
    return Run(tmp_path / "run")


def problems(run, config=CONFIG):
    return {
        name: wrong
        for name, wrong in verify_run(run, Experiment(config=config, measurements=()), MEASURES, [10, 20], SETTINGS)
        if wrong
    }


def test_a_run_in_order(run):
    assert problems(run) == {}
    assert len(list(verify_run(run, Experiment(config=CONFIG, measurements=()), MEASURES, [10, 20], SETTINGS))) == 9


def test_a_changed_digit_is_found_also_where_somebody_makes_the_digest_fit(run):
    path = run.evaluation_path("trace", 20)
    document = files.read_sealed(path, "")
    value = document["estimates"]["trace"]["value"]
    document["estimates"]["trace"]["value"] = float(
        torch.tensor(value, dtype=torch.float64).nextafter(torch.tensor(0.0))
    )
    files.write_sealed(path, document)
    found = problems(run)
    assert list(found) == ["run: trace at step 20, measured again"]
    assert "estimates.trace.value" in found["run: trace at step 20, measured again"]


def test_other_weights_are_found(run):
    shutil.copy(run.checkpoint(20) / "model.safetensors", run.checkpoint(10) / "model.safetensors")
    assert list(problems(run)) == ["run: files", "run: weights at step 10", "run: evaluations"]


def change(path, pattern, by):
    content = path.read_text()
    changed = re.sub(pattern, by, content, count=1)
    assert changed != content
    path.write_text(changed)


DAMAGE = {
    "run.json": (r'"seed": 0', '"seed": 5'),
    "result.json": (r'"steps": 20', '"steps": 21'),
    "metrics.jsonl": (r'"loss_nats": (\d)\.', r'"loss_nats": 9.'),
    "checkpoints/step-10/trainer.json": (r'"loss_count": \d+', '"loss_count": 99'),
    "checkpoints/step-10/config.json": (r'"layer_norm_eps": \S+,', '"layer_norm_eps": 0.1,'),
    "checkpoints/step-20/config.json": (r'"num_attention_heads": \d+', '"num_attention_heads": 4'),
    "evaluations/loss@step-10.json": (r'"value": (\d)\.', r'"value": 9.'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_digit_of_any_file_is_told_in_one_sentence_that_names_it(run, name, capsys):
    change(run.path / name, *DAMAGE[name])
    (problem,) = run.damage()
    assert problem.startswith(f"{run.path / name} is damaged: ")
    assert main(["show", str(run.path)]) == 2
    assert problem in capsys.readouterr().err
    if name.startswith("evaluations"):
        with pytest.warns(IsolossWarning, match="it counts as not made"):
            assert problem in problems(run)["run: files"]
        return
    assert problem in " ".join(problems(run).values())
    assert main(["measure", str(run.path), "--measures", "loss", "--loss-sentences", "32"]) == 2
    assert problem in capsys.readouterr().err


def test_the_files_of_an_earlier_version_and_a_users_own_are_no_damage(run, capsys):
    (run.checkpoint(20) / "README.md").write_text("my best one")
    (run.path / "notes.txt").write_text("mine")
    # an earlier version had neither digests nor the hashes of what is no tensor file
    for path in (*run.path.glob("*.json"), *run.path.glob("*/*.json"), *run.path.glob("checkpoints/*/trainer.json")):
        document = files.read_sealed(path, "")
        document.pop("model_files", None)
        if path.name == "result.json":
            del document["sha256"], document["fingerprint"]
        if path.name == "trainer.json":
            del document["sha256"]["config.json"]
        files.write_json(path, document)
    assert [*run.damage(tensors=True)] == []
    assert problems(run) == {}
    assert main(["show", str(run.path)]) == 0
    capsys.readouterr()
    # its hash of metrics.jsonl is checked
    change(run.path / "metrics.jsonl", *DAMAGE["metrics.jsonl"])
    (problem,) = run.damage()
    assert problem.startswith(f"{run.path / 'metrics.jsonl'} is damaged")


def test_a_record_of_another_run_is_found(run):
    files.write_sealed(run.path / "run.json", run.record | {"fingerprint": "0" * 16})
    (problem,) = run.damage()
    assert problem == f"{run.path / 'run.json'} and {run.path / 'result.json'} are from different runs"


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ("checkpoints/step-10", {"run: checkpoints": "none at steps [10]"}),
        ("evaluations/loss@step-10.json", {"run: evaluations": "loss at step 10"}),
        ("result.json", {"run: training": "not complete"}),
        (".", {"run: run.json": "it has not been made yet"}),
    ],
)
def test_what_is_missing_is_found(run, lost, found):
    path = run.path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    wrong = problems(run)
    assert wrong.keys() == found.keys()
    assert all(text in wrong[name] for name, text in found.items())


def test_another_config_is_found(run):
    assert problems(run, dataclasses.replace(CONFIG, seed=1))["run: config"] == "seed is 0 here and 1 there"


def test_other_examples_are_found(run):
    path = run.evaluation_path("probe-prefix-4", 10).with_suffix(".safetensors")
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))  # one label
    assert "probe-prefix-4 at step 10" in problems(run)["run: evaluations"]
    # also where somebody makes the checksum fit
    last = run.evaluation_path("probe-prefix-4", 20)
    path.write_bytes(kept)
    examples = last.with_suffix(".safetensors")
    examples.write_bytes(examples.read_bytes()[:-1] + bytes([examples.read_bytes()[-1] ^ 1]))
    files.write_sealed(last, {**files.read_sealed(last, ""), "examples": files.sha256(examples)})
    assert list(problems(run)) == ["run: probe-prefix-4 at step 20, measured again"]


def test_a_study_says_the_same_of_a_run_once(tmp_path):
    folder = StudyFolder(STUDY, tmp_path, "smoke")
    folder.prepare()
    checks = list(verify(folder))  # one run has two measurements
    names = list(folder.scale.experiments)
    assert sorted(check for check, _ in checks) == sorted(f"{name}: run.json" for name in names)
    assert {problem for _, problem in checks} == {"it has not been made yet"}  # whatever stands beside it
    assert len(folder.plan()) > 2 * len(names)


def test_a_study_is_verified_with_the_threads_and_on_the_device_that_it_was_measured_with(tmp_path, monkeypatch):
    needs = Resources(cores=2), Resources(gpus=0.5)
    parts = tuple(Measurement(measures=("loss",), needs=each) for each in needs)
    experiments = {"run": Experiment(config=CONFIG, measurements=parts)}
    study = Study(name="devices", scales={"one": Scale(description="none", experiments=experiments)})
    folder = StudyFolder(study, tmp_path)
    folder.prepare()
    used = []

    def recorded(*arguments):
        used.append((torch.get_num_threads(), {one["num_threads"] for one in threadpool_info()}, arguments[-1]))
        return ()

    monkeypatch.setattr("isoloss.studies.verify.verify_run", recorded)
    before = torch.get_num_threads()
    assert list(verify(folder)) == []
    assert torch.get_num_threads() == before
    assert used == [(2, {2}, "cpu"), (1, {1}, "cuda")]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"measure": "loss"}', "[" * 100_000])
def test_an_evaluation_that_cannot_be_read_is_told_and_measured_again(run, damage):
    path = run.evaluation_path("loss", 10)
    kept = path.read_bytes()
    path.write_text(damage)
    with pytest.warns(IsolossWarning, match=r"loss@step-10\.json is .*; it counts as not made"):
        assert "loss at step 10" in problems(run)["run: evaluations"]
    with pytest.warns(IsolossWarning, match=r"it counts as not made"):
        assert pending(run, ["loss"], [10], SETTINGS) == [(10, "loss")]
    Evaluator(run, SETTINGS).evaluate("loss", 10)
    assert path.read_bytes() == kept


@pytest.mark.parametrize("damage", ["{", "[]", '{"steps": 20}'])
def test_a_file_that_cannot_be_read_is_one_problem_and_not_the_end(run, damage):
    (run.path / "result.json").write_text(damage)
    assert list(problems(run)) == ["run: files"]
