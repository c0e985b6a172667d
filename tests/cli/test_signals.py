"""SIGTERM and Ctrl-C, in real processes: the exit status, no child left behind, and files that are whole."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoloss import files
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.runs import Run

TRAIN = ("train", "RUN", "--language", "pcfg-laptop", "--size", "d16", "--steps", "1000000", "--threads", "1")
TRAIN += ("--device", "cpu", "--checkpoints", "1")
SLOW = pytest.mark.slow

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def start(folder, *words):
    command = [sys.executable, "-m", "isoloss", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


def wait_for(condition, process=None):
    deadline = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def catches(process, number):
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def ended(process, number):
    """Send the signal; return the exit status and what was written."""
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


def children_of(pid):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=SLOW)])
def test_training_saves_and_goes_on(capsys, tmp_path, number, status):
    run = Run(tmp_path / "RUN")
    process = start(tmp_path, *TRAIN)
    wait_for(lambda: run.checkpoint(1).exists(), process)
    code, _, err = ended(process, number)
    assert code == status
    assert "progress is saved. To resume:\n  isoloss train RUN " in err
    step = max(run.steps())
    assert json.loads((run.checkpoint(step) / "trainer.json").read_text())["step"] == step
    assert main(["show", str(run.path)]) == 0
    assert f"{run.path}: at step {step} of " in capsys.readouterr().out
    assert not list(run.path.rglob(f"{files.TEMPORARY}*"))


def test_a_verb_that_keeps_nothing(tmp_path):
    process = start(tmp_path, "sample", "pcfg-paper", "--num-sentences", "2000000")
    wait_for(lambda: catches(process, signal.SIGTERM), process)
    code, out, err = ended(process, signal.SIGTERM)
    assert (code, out, err) == (143, "", "isoloss sample: interrupted\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=SLOW)])
def test_a_study_ends_with_its_workers(tmp_path, number, status):
    words = ("study", "run", "same-loss", "--scale", "smoke", "--folder", "study", "--workers", "1")
    process = start(tmp_path, *words)
    wait_for(lambda: any((tmp_path / "study").glob("runs/*/checkpoints/step-*")), process)
    servers = children_of(process.pid)  # the fork server and its tracker of resources
    workers = [*servers, *(pid for server in servers for pid in children_of(server))]
    assert len(workers) == 3
    code, _, err = ended(process, number)
    assert code == status
    assert "stopped; progress is saved. To resume:" in err
    wait_for(lambda: all(is_gone(pid) for pid in workers))  # the kernel takes a moment
    for path in (tmp_path / "study").rglob("*.json"):
        json.loads(path.read_text())
    for run in (tmp_path / "study" / "runs").iterdir():
        with files.lock(run):
            assert Run(run).complete or Run(run).steps()  # it has saved where it is
    assert main(["study", "status", *words[2:-3], str(tmp_path / "study")]) == 0


@SLOW
def test_the_processes_that_torchrun_started(tmp_path):
    run = Run(tmp_path / "RUN")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "isoloss", *TRAIN]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: run.checkpoint(1).exists(), process)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert len(workers) == 2
    wait_for(lambda: all(is_gone(pid) for pid in workers))  # the kernel takes a moment
    assert "progress is saved. To resume, with any number of processes:" in err
    assert max(run.steps()) > 1


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", "143"), ("SIGINT", "130")])
def test_a_signal_during_a_finalizer_is_not_lost(name, status):
    code = (
        "import signal, time\nfrom isoloss import interrupts\ninterrupts.raise_on_sigterm()\n"
        f"class Last:\n    def __del__(self):\n        signal.raise_signal(signal.{name})\n"
        "last = Last()\ntry:\n    del last\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print(interrupts.status())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{status}\n", "")


def test_the_second_sigterm_ends_at_once(tmp_path):
    code = (
        "import signal, time\nfrom isoloss import interrupts\ninterrupts.raise_on_sigterm()\n"
        "try:\n    signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt:\n"
        "    print(interrupts.status(), flush=True)\nsignal.raise_signal(signal.SIGTERM)\ntime.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "143\n")


def test_a_file_that_is_half_written_goes_with_an_interruption(tmp_path, monkeypatch):
    (tmp_path / "result").write_text("old")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "result", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("result", "old")]
    monkeypatch.undo()
    with pytest.raises(IsolossError, match="cannot write"):
        files.write_text(tmp_path / "result" / "below", "new")
