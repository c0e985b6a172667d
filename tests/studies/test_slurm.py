"""The Slurm executor by submitit's local executor: workers share the folder, one is killed and one times out."""

import os
import signal
import subprocess

import pytest
from longer_study import ENVIRONMENT, command, contents, ends, num_training, wait_for

from isoloss.errors import IsolossError
from isoloss.studies.plan import Unit
from isoloss.studies.run import slurm
from isoloss.studies.run.loop import Loop, Options

pytest.importorskip("submitit")


def processes(*words):
    """The numbers of the processes whose command line has all these words, below this one."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    below = {os.getpid()}
    for pid, parent, _ in sorted(rows, key=lambda row: int(row[0])):
        if int(parent) in below:
            below.add(int(pid))
    return [int(pid) for pid, _, text in rows if int(pid) in below and all(word in text for word in words)]


def parent(pid):
    """The number of a process's parent."""
    return int(subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout)


@pytest.mark.cluster
def test_workers_one_killed_and_one_timed_out_give_the_same_bytes(carried_out, tmp_path):
    file, expected = carried_out
    out = tmp_path / "out"
    options = ("--executor", "slurm", "--submit", "cluster=local", "--workers", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    driver = subprocess.Popen(command(file, out, *options), env=ENVIRONMENT, **pipes)
    # found before they train, so that nothing slow comes between seeing both train and the signals
    worker, _ = wait_for(lambda: len(found := processes("study work")) == 2 and found)
    (other,) = set(processes("submitit.core._submit")) - {parent(worker)}
    wait_for(lambda: num_training(out) == 2)
    os.kill(worker, signal.SIGKILL)
    os.kill(other, signal.SIGUSR2)  # as Slurm does before the time limit
    said = driver.communicate(timeout=1200)[0]
    assert driver.returncode == 0, said
    assert any("Requeued job" in path.read_text() for path in (out / "slurm").glob("*_log.*"))
    assert contents(out) == contents(expected)
    found = ends(out)
    assert found.pop("stopped", 0) == 1
    assert found == ends(expected)
    assert (out / "report" / "index.html").is_file()


def test_workers_that_do_nothing_are_an_error(tmp_path):
    unit = Unit(name="a", arguments=("ls",), done=lambda: False)
    options = Options(
        workers=1, worker_arguments=("study", "work", "no-such-study"), submit_parameters={"cluster": "local"}
    )
    with pytest.raises(
        IsolossError, match=r"(?s)no unit was done; the end of what one printed:.*no study 'no-such-study'"
    ):
        slurm.run(Loop([unit], tmp_path, options), options)


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        ({"cluster": "pbs"}, "cluster is 'pbs'; it must be one of slurm, local, debug"),
        ({"cluster": "slurm"}, "this machine has no sbatch"),
        ({"cluster": "local", "no_such": 1}, "--submit: .*no_such"),
    ],
)
def test_wrong_parameters(tmp_path, monkeypatch, submit, message):
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no sbatch
    unit = Unit(name="a", arguments=("ls",), done=lambda: False)
    options = Options(submit_parameters=submit)
    with pytest.raises(IsolossError, match=message):
        slurm.run(Loop([unit], tmp_path, options), options)
