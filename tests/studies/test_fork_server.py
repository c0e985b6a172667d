"""Commands that are forked from a process with the imports behind it do what those started afresh do."""

import importlib
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from longer_study import ENVIRONMENT, TRAINING, contents, wait_for

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources
from isoloss.studies.run import fork_server

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone"), pytest.mark.slow]

ONE = Resources()
MEASURES = ("--measures", "loss", "trace", "probe-root", "--loss-sentences", "64", "--num-sequences", "16")
FEW = ("--num-train", "64", "--num-test", "64", "--probe-epochs", "2", "--threads", "1")


def start(arguments, log, needs=ONE):
    fork_server.preload(("train",), ONE)
    return fork_server.start(arguments, needs, log, {"OMP_NUM_THREADS": "1"})


def commands(folder):
    return ("train", str(folder), *TRAINING, "--steps", "6"), ("measure", str(folder), *MEASURES, *FEW)


def test_results_are_those_of_a_fresh_process_bit_for_bit(tmp_path):
    for name in ("first", "second"):  # the second fork is of a process that has forked before
        for command in commands(tmp_path / name):
            forked = start(command, tmp_path / "log")
            forked.join(120)
            assert forked.exitcode == 0, (tmp_path / "log").read_text()
    program = "import sys; from isoloss.cli.main import main; sys.exit(any(main(words) for words in {}))"
    fresh = program.format([list(command) for command in commands(tmp_path / "fresh")])
    subprocess.run([sys.executable, "-c", fresh], check=True, env=ENVIRONMENT, capture_output=True)
    fresh = contents(tmp_path / "fresh", ".")
    assert len(fresh) > 8
    assert contents(tmp_path / "first", ".") == contents(tmp_path / "second", ".") == fresh


def test_only_what_trains_or_measures_on_one_thread_waits_for_the_imports():
    assert fork_server.can_fork(("train", "a"), ONE)
    assert fork_server.can_fork(["measure", "a"], ONE)
    assert not fork_server.can_fork(("--version",), ONE)
    assert not fork_server.can_fork((), ONE)
    assert not any(fork_server.can_fork(("train", "a"), needs) for needs in (Resources(cores=2), Resources(gpus=0.5)))


def test_what_a_command_says_and_its_status_are_kept(tmp_path):
    version = start(["--version"], tmp_path / "version.log")
    wrong = start(["sample", "no-such-language"], tmp_path / "wrong.log")
    torchrun = start(["--version"], tmp_path / "two.log", Resources(processes=2))
    for process in (version, wrong, torchrun):
        process.join(120)
    assert (version.exitcode, wrong.exitcode, torchrun.exitcode) == (0, 2, 0)
    assert (tmp_path / "version.log").read_text().startswith("isoloss ")
    assert "no language 'no-such-language'" in (tmp_path / "wrong.log").read_text()
    assert (tmp_path / "two.log").read_text().count("isoloss ") == 2


def test_a_command_that_is_killed_says_so(tmp_path):
    command = start(("train", str(tmp_path / "run"), *TRAINING, "--steps", "1000000"), tmp_path / "log")
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or command.exitcode is not None)
    assert command.exitcode is None, (tmp_path / "log").read_text()
    command.kill()
    command.join(30)
    assert command.exitcode == -signal.SIGKILL


def test_a_killed_server_is_replaced_and_what_it_left_is_ended(tmp_path):
    left = start(("train", str(tmp_path / "run"), *TRAINING, "--steps", "1000000"), tmp_path / "log")
    ended = start(["--version"], tmp_path / "version.log")
    ended.join(120)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or left.exitcode is not None)
    assert left.exitcode is None, (tmp_path / "log").read_text()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    left.join(30)
    assert not fork_server.is_lost(ended)
    assert fork_server.is_lost(left)
    again = start(["--version"], tmp_path / "version.log")
    again.join(120)
    assert again.exitcode == 0
    name = Path(f"/proc/{left.pid}/cmdline")
    wait_for(lambda: not (name.is_file() and name.read_bytes()))


def test_a_server_that_is_killed_at_every_start_is_one_error(tmp_path, monkeypatch):
    def killed(self):
        raise EOFError

    monkeypatch.setattr("multiprocessing.context.ForkServerProcess.start", killed)
    monkeypatch.setattr(fork_server.time, "sleep", lambda _: None)
    with pytest.raises(IsolossError, match=r"the fork server, .* was killed 3 times in a row"):
        start(["--version"], tmp_path / "log")


def test_everything_that_is_imported_beforehand_exists(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the module sets
    importlib.import_module("isoloss.studies.run.preloaded")  # the server would pass over an ImportError
