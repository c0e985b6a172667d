"""The local engine, with real commands: it carries out, it reports failures, and its workers end with it."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.executors import local
from isoloss.studies.plan import Unit

TRAINING = ("--language", "pcfg-laptop", "--size", "d16", "--batch-size", "8", "--device", "cpu", "--threads", "1")


def training(path: Path, steps: int) -> Unit:
    arguments = ("train", str(path), *TRAINING, "--steps", str(steps))
    return Unit(name=f"train {path.name}", arguments=arguments, done=lambda: Run(path).complete)


def measuring(path: Path) -> Unit:
    arguments = ("eval", str(path), "--measures", "trace", "--flatness-sentences", "16", "--threads", "1")
    done = functools.partial(lambda run: bool(run.evaluations()), Run(path))
    return Unit(name=f"measure {path.name}", arguments=arguments, done=done, after=(f"train {path.name}",))


def test_a_plan_is_carried_out_once(tmp_path):
    units = [measuring(tmp_path / "a"), training(tmp_path / "a", 20)]
    said: list[str] = []
    assert local.run(units, workers=2, logs=tmp_path / "logs", say=said.append) == 2
    assert [line for line in said if "started" in line] == ["train a: started", "measure a: started"]
    assert said[0] == f"2 of 2 units to do, 2 at a time; their output is in {tmp_path / 'logs'}"
    assert all(unit.done() for unit in units)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert local.run(units, workers=2, logs=tmp_path / "logs", say=said.append) == 0
    assert said[-1].startswith("measure a: done in ")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_failure_shows_its_log_and_stops_what_waits_for_it(tmp_path):
    broken = Unit(name="broken", arguments=("sample", "no-such-language"), done=lambda: False)
    after = Unit(name="after", arguments=("ls",), done=lambda: False, after=("broken",))
    with pytest.raises(IsolossError, match=r"broken failed with status 2.*\n.*no language 'no-such-language'"):
        local.run([broken, after], workers=1, logs=tmp_path, say=lambda _: None)
    assert not (tmp_path / "after.log").exists()


def test_a_unit_that_ends_without_its_result_is_a_failure(tmp_path):
    unit = Unit(name="nothing", arguments=("--version",), done=lambda: False)
    with pytest.raises(IsolossError, match="nothing ended without its result"):
        local.run([unit], workers=1, logs=tmp_path, say=lambda _: None)


def test_a_unit_that_says_nothing_is_said_to_be_at_work(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "HEARTBEAT_SECONDS", 0.0)
    said: list[str] = []
    local.run([training(tmp_path / "a", 5)], workers=1, logs=tmp_path / "logs", say=said.append)
    quiet = [line for line in said if line.startswith("  ")]
    assert quiet
    assert re.fullmatch(r"  train a: running for \d+ s", quiet[0])


def test_logs_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "logs").write_text("a file")
    unit = Unit(name="a", arguments=("--version",), done=lambda: False)
    with pytest.raises(IsolossError, match=r"cannot write .*logs/a\.log"):
        local.run([unit], workers=1, logs=tmp_path / "logs", say=lambda _: None)


def test_at_least_one_worker(tmp_path):
    with pytest.raises(IsolossError, match="0 workers"):
        local.run([], workers=0, logs=tmp_path, say=lambda _: None)


ENGINE = """
import pathlib, sys
from isoloss.runs import Run
from isoloss.studies.executors import local
from isoloss.studies.plan import Unit
path = pathlib.Path(sys.argv[1])
unit = Unit(name="train", arguments=tuple(sys.argv[2:]), done=lambda: Run(path).complete)
local.run([unit], workers=1, logs=path.parent / "logs", say=lambda line: None)
"""


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_free(folder: Path) -> bool:
    try:
        with files.lock(folder):
            return True
    except IsolossError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_engine(tmp_path, number):
    run = Run(tmp_path / "run")
    arguments = ("train", str(run.path), *TRAINING, "--steps", "1000000")
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(run.path), *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    wait_for(lambda: (run.path / "metrics.jsonl").exists())
    assert not is_free(run.path)
    engine.send_signal(number)
    engine.wait(timeout=60)
    wait_for(lambda: is_free(run.path), 10)
    # an interrupted worker has saved where it is; a killed one had no chance to
    assert bool(run.steps()) == (number == signal.SIGINT)
