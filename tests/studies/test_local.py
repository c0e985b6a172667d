"""The local engine, with real commands: it carries out, it reports failures, and its workers end with it."""

import functools
import re
import signal
import subprocess
from pathlib import Path

import longer_study
import pytest
from longer_study import ENVIRONMENT, TRAINING, engine, wait_for

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Unit
from isoloss.studies.run import local
from studies_in_process import carry_out


def training(path: Path, steps: int) -> Unit:
    arguments = ("train", str(path), *TRAINING, "--steps", str(steps))
    return Unit(name=f"train {path.name}", arguments=arguments, done=lambda: Run(path).complete, outputs=(path,))


def measuring(path: Path) -> Unit:
    arguments = ("measure", str(path), "--measures", "trace", "--num-sequences", "16", "--threads", "1")
    done = functools.partial(lambda run: bool(run.evaluations()), Run(path))
    return Unit(name=f"measure {path.name}", arguments=arguments, done=done, after=(f"train {path.name}",))


def test_a_plan_is_carried_out_once(tmp_path):
    units = [measuring(tmp_path / "a"), training(tmp_path / "a", 20)]
    said, done = carry_out(units, tmp_path, local.run)
    assert done == ["train a", "measure a"]
    assert [line for line in said if "started" in line] == ["train a: started", "measure a: started"]
    assert said[0] == f"2 of 2 units to do, 2 at a time; their output is in {tmp_path / 'units'}"
    assert all(unit.done() for unit in units)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert carry_out(units, tmp_path, local.run) == ([], [])
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_failure_shows_its_log_and_stops_what_waits_for_it(tmp_path):
    broken = Unit(name="broken", arguments=("sample", "no-such-language"), done=lambda: False)
    after = Unit(name="after", arguments=("ls",), done=lambda: False, after=("broken",))
    with pytest.raises(IsolossError, match=r"broken failed with status 2.*\n.*no language 'no-such-language'"):
        carry_out([broken, after], tmp_path, local.run, workers=1)
    assert not (tmp_path / "units" / "after").exists()


def test_a_unit_that_ends_without_its_result_is_a_failure(tmp_path):
    unit = Unit(name="nothing", arguments=("--version",), done=lambda: False)
    with pytest.raises(IsolossError, match="nothing ended without its result"):
        carry_out([unit], tmp_path, local.run, retries=0)


def test_a_unit_that_says_nothing_is_said_to_be_at_work(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PROGRESS_SECONDS", 0.0)
    said, _ = carry_out([training(tmp_path / "a", 5)], tmp_path, local.run)
    quiet = [line for line in said if line.startswith("  ")]
    assert quiet
    assert re.fullmatch(r"  train a: running for \d+ s", quiet[0])


def test_at_least_one_worker(tmp_path):
    with pytest.raises(IsolossError, match="workers is 0"):
        carry_out([], tmp_path, local.run, workers=0)


def is_free(folder: Path) -> bool:
    try:
        with files.lock(folder):
            return True
    except IsolossError:
        return False


# that a signal to the command saves is shown in tests/cli/test_signals.py
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_workers_end_with_the_engine(tmp_path, number):
    arguments = ("train", str(tmp_path / "run"), *TRAINING, "--steps", "1000000")
    process = engine(tmp_path, [arguments])
    run = Run(tmp_path / ".run.attempt-1")
    wait_for(lambda: (run.path / "metrics.jsonl").exists())
    assert not is_free(run.path)
    process.send_signal(number)
    process.communicate(timeout=600)
    wait_for(lambda: is_free(run.path))
    # an interrupted worker has saved where it is; a killed one had no chance to
    assert bool(run.steps()) == (number == signal.SIGINT)


@pytest.mark.slow
def test_a_unit_of_two_processes_is_stopped_and_goes_on_with_the_same_bytes(tmp_path):
    file = longer_study.write_spread(tmp_path, steps=200)
    words = longer_study.command(file, tmp_path / "stopped")
    driver = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: driver.poll() is not None or longer_study.num_training(tmp_path / "stopped"))
    driver.send_signal(signal.SIGINT)
    said = driver.communicate()[0]
    assert driver.returncode == 130, said
    assert longer_study.ends(tmp_path / "stopped") == {"stopped": 1}
    for folder in ("stopped", "whole"):
        subprocess.run(longer_study.command(file, tmp_path / folder), check=True, env=ENVIRONMENT, capture_output=True)
    assert longer_study.ends(tmp_path / "stopped") == {"done": 2, "stopped": 1}
    assert longer_study.contents(tmp_path / "stopped") == longer_study.contents(tmp_path / "whole")
