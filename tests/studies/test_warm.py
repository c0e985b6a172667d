"""Commands that are forked from a process with the imports behind it do what those started afresh do."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from isoloss.errors import IsolossError
from isoloss.studies.executors import warm
from isoloss.studies.plan import Resources

pytestmark = pytest.mark.skipif(not warm.IS_AVAILABLE, reason="forks on Linux alone")

TRAINING = ("--language", "pcfg-laptop", "--size", "d16", "--batch-size", "8", "--steps", "6", "--device", "cpu")
MEASURES = ("--measures", "loss", "trace", "probe-root", "--loss-sentences", "64", "--num-sequences", "16")
FEW = ("--num-train", "64", "--num-test", "64", "--probe-epochs", "2", "--threads", "1")


@pytest.fixture
def parent():
    process = warm.WarmProcess()
    yield process
    process.close()


def commands(folder):
    return ("train", str(folder), *TRAINING, "--threads", "1"), ("eval", str(folder), *MEASURES, *FEW)


def contents(folder):
    """SHA-256 of every file by its path, but for those that say when things happened."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("log.jsonl", ".lock")
    }


def test_results_are_those_of_a_fresh_process_bit_for_bit(tmp_path, parent):
    for name in ("first", "second"):  # the second fork is of a process that has forked before
        for command in commands(tmp_path / name):
            forked = parent.start(command, tmp_path / "log")
            forked.wait(120)
            assert forked.returncode == 0, (tmp_path / "log").read_text()
    for command in commands(tmp_path / "fresh"):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "isoloss", *command], check=True, env=environment, capture_output=True)
    assert len(contents(tmp_path / "fresh")) > 8
    assert contents(tmp_path / "first") == contents(tmp_path / "second") == contents(tmp_path / "fresh")


def test_only_what_trains_or_measures_on_one_thread_waits_for_the_imports():
    one = Resources()
    assert warm.can_fork(("train", "a"), one)
    assert warm.can_fork(["eval", "a"], one)
    assert not warm.can_fork(("--version",), one)
    assert not warm.can_fork((), one)
    assert not any(warm.can_fork(("train", "a"), needs) for needs in (Resources(cores=2), Resources(gpus=0.5)))


def test_what_a_command_says_and_its_status_are_kept(tmp_path, parent):
    version = parent.start(["--version"], tmp_path / "version.log")
    wrong = parent.start(["sample", "no-such-language"], tmp_path / "wrong.log")
    version.wait(60)
    wrong.wait(60)
    assert (version.returncode, wrong.returncode) == (0, 2)
    assert parent.status(version.pid) is None  # what has its number later has not ended
    assert (tmp_path / "version.log").read_text().startswith("isoloss ")
    assert "no language 'no-such-language'" in (tmp_path / "wrong.log").read_text()


def test_a_command_that_is_killed_says_so(tmp_path, parent):
    command = parent.start(("train", str(tmp_path / "run"), *TRAINING[:-4], "--steps", "1000000"), tmp_path / "log")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert command.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(0.1)
    command.kill()
    command.wait(30)
    assert command.returncode == -signal.SIGKILL


def test_commands_end_with_what_started_them(tmp_path):
    process = warm.WarmProcess()
    command = process.start(("train", str(tmp_path / "run"), *TRAINING[:-4], "--steps", "1000000"), tmp_path / "log")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert command.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    process.close()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{command.pid}/exe"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_end_of_the_process_that_is_forked_is_an_error(tmp_path):
    process = warm.WarmProcess()
    process._process.kill()
    process._process.wait()
    with pytest.raises(IsolossError, match="has ended: run the study again"):
        process.start(["--version"], tmp_path / "log")
    process.close()
