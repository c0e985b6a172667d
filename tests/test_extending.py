"""Components of a package outside of isoloss: named by entry points, used through the command line."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forking import Commands
from isoloss import registry
from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.registry import MEASURES

PLUGIN = Path(__file__).parent / "plugin"
DOCS = Path(__file__).parents[1] / "docs"
PAGE, OPTIMIZER_PAGE = ((DOCS / name).read_text() for name in ("extending.md", "own-optimizer.md"))
COMMANDS = [shlex.split(line) for line in re.findall(r"^isoloss .*$", PAGE, flags=re.MULTILINE)]
ADDED = {
    "languages": "dice",
    "models": "distilbert",
    "measures": "top1",
    "tasks": "parity-TOKEN",
    "algorithms": "gradient-noise",
    "optimizers": "polar",
    "executors": "sequential",
    "studies": "noise",
    "rescalings": "distilbert",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which every command of the page was run, in order."""
    return tmp_path_factory.mktemp("extending")


@pytest.fixture(scope="module")
def isoloss(folder):
    """The command `isoloss` where the package is installed."""
    with pytest.MonkeyPatch.context() as patch:
        for path in (_smallest(folder), PLUGIN):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        with Commands(folder / "bin") as commands:

            def run(*words, folder=folder):
                return subprocess.run([commands.folder / "isoloss", *words], cwd=folder, capture_output=True, text=True)

            for command in COMMANDS:
                done = run(*command[1:])
                assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
            yield run


def _smallest(folder):
    """Write the files of the page on an optimizer, and the table of entry points that pip would make of them."""
    files = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", OPTIMIZER_PAGE, flags=re.DOTALL)
    place = folder / "signum"
    place.mkdir()
    for name, text in files:
        (folder / name).write_text(text)
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    (info := place / "signum-1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return place


def test_the_page_shows_the_package():
    shown = dict(re.findall(r"<!-- file: (mylab/\S+) -->\n```python\n(.*?)```\n", PAGE, flags=re.DOTALL))
    assert shown == {str(path.relative_to(PLUGIN)): path.read_text() for path in (PLUGIN / "mylab").glob("[!_]*.py")}
    table = (PLUGIN / "mylab-1.0.dist-info" / "entry_points.txt").read_text()
    assert set(re.findall(r"^(\S+) = (\S+)$", table, flags=re.MULTILINE)) == set(
        re.findall(r'^(\S+) = "(mylab\S+)"$', PAGE, flags=re.MULTILINE)
    )


def test_one_of_each_is_listed(isoloss):
    lists = json.loads(isoloss("ls", "all", "--json").stdout)
    for name, component in ADDED.items():
        assert component in json.dumps(lists[name]), name


def test_the_language_is_measured_against_its_truth(isoloss):
    document = json.loads(isoloss("measure", "runs/dice", "--measures", "loss", "top1", "--json").stdout)
    estimates = {name: e for each in document["evaluations"] for name, e in each["estimates"].items()}
    assert estimates["kl"]["value"] > 0
    assert estimates["entropy"]["stderr"] == 0 or estimates["entropy"]["value"] > 1
    assert 0 < estimates["top1"]["value"] < 1
    assert estimates["top1"]["stderr"] > 0


def test_the_algorithm_changed_the_training(isoloss, folder):
    lines = (folder / "runs/dice/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["noise"] == pytest.approx((0.1 / 21**0.55) ** 0.5)
    # which it may do in any way that torch allows: the compiled step would not notice
    start = json.loads((folder / "runs/dice/log.jsonl").read_text().splitlines()[0])
    assert not start["compiled"]


def test_the_optimizer_moves_matrices_and_leaves_the_rest_to_adamw(isoloss, folder):
    state = load_file(folder / "runs/distil/checkpoints/step-20/trainer.safetensors")
    by_polar = {name.partition("/")[2] for name in state if name.startswith("momentum/")}
    by_adamw = {name.partition("/")[2] for name in state if name.startswith("exp_avg/")}
    assert not by_polar & by_adamw
    assert {"distilbert.transformer.layer.0.ffn.lin1.weight", "vocab_transform.weight"} < by_polar
    assert {"distilbert.embeddings.word_embeddings.weight", "vocab_layer_norm.weight"} < by_adamw


def test_the_smallest_package_trains(isoloss, folder):
    assert "signum         Signum: the sign of the momentum\n" in isoloss("ls", "optimizers").stdout
    (commands,) = re.findall(r"```sh\n(for .*?)```", OPTIMIZER_PAGE, flags=re.DOTALL)
    # two of the page's runs, for a few steps, which do not reach the target
    words = re.search(r"isoloss (train .*?)\n  done", commands, flags=re.DOTALL)[1].replace("\\\n", "")
    for optimizer, kept in (("adamw", "exp_avg/"), ("signum", "average/")):
        few = words.replace("$optimizer", optimizer).replace("$rate", "0.003").replace("--steps 1000", "--steps 20")
        assert "target not reached" in isoloss(*few.split(), folder=folder / "signum").stdout
        state = load_file(folder / f"signum/rates/{optimizer}-0.003/checkpoints/step-20/trainer.safetensors")
        assert any(name.startswith(kept) for name in state)


def test_the_study_of_the_page_has_a_test_for_each_trace_and_each_task_at_each_rate(isoloss, folder):
    planned = isoloss("study", "plan", "study.py", folder=folder / "signum").stdout
    assert "Secondary tests: 8" in planned
    assert "64 units" in planned


@pytest.mark.slow  # minutes
def test_the_study_of_the_page_ends_as_the_page_says(isoloss, folder):
    printed = isoloss("study", "run", "study.py", folder=folder / "signum").stdout
    (shown,) = re.findall(r"```text\n(.*?)```", OPTIMIZER_PAGE, flags=re.DOTALL)
    assert shown in printed


def test_a_changed_component_does_not_go_on_with_what_another_one_made(isoloss, folder):
    """A comment is no change; of other code, a run is refused, and a measure is measured again."""
    train = shlex.split(
        "train runs/signum --language pcfg-laptop --size d16 --steps 20 --optimizer signum --learning-rate 0.001"
    )
    assert isoloss(*train).returncode == 0
    module = folder / "signum/signum.py"
    text = module.read_text()
    module.write_text(f"# a remark\n\n{text}")
    assert isoloss(*train).returncode == 0
    module.write_text(f"{text}\nOTHER = 1\n")
    refused = isoloss(*train)
    assert refused.returncode == 2
    assert (
        "the code of the optimizer signum has changed since runs/signum began: choose another folder" in refused.stderr
    )
    measured = isoloss("measure", "runs/signum", "--measures", "loss", "--num-sequences", "64")
    assert measured.returncode == 0, measured.stderr


def test_an_evaluation_has_the_code_of_its_measure():
    assert "code_sha256" not in settings_of("loss")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        registry._entry_points.cache_clear()
        assert settings_of("top1")["code_sha256"] == MEASURES.code_sha256("top1") != ""
        assert settings_of("probe-parity-x")["code_sha256"] == MEASURES.code_sha256("top1")
    registry._entry_points.cache_clear()


def test_options_of_components_are_options_of_the_commands(isoloss):
    assert "--gradient-noise-variance" in isoloss("train", "--help-all").stdout
    assert "--top1-guesses" in isoloss("measure", "--help-all").stdout
    wrong = isoloss(
        "train",
        "runs/x",
        "--language",
        "dice",
        "--algorithm",
        "gradient-noise",
        "--gradient-noise-variance",
        "0",
    )
    assert wrong.returncode == 2
    assert "variance is 0.0; it must be above 0" in wrong.stderr


def test_the_study_is_verified_and_has_a_page(isoloss, folder):
    done = isoloss("study", "verify", "noise", "--scale", "smoke")
    assert done.returncode == 0, done.stderr
    report = folder / "runs/noise-smoke/report"
    assert (report / "index.html").stat().st_size > 0
    for kind, start in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        figures = [path.read_bytes() for path in report.glob(f"figures/*.{kind}")]
        assert figures
        assert all(figure.startswith(start) for figure in figures)
