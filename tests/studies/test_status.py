"""The state of a study as its files tell it, and how long the rest takes."""

import itertools
import os
import random
import subprocess
import sys

import pytest

from isoloss import files
from isoloss.studies.leases import Leases
from isoloss.studies.plan import Unit, in_order, makespan, urgency
from isoloss.studies.status import remaining, statuses, with_measured_seconds

TAKE = """
import pathlib, sys
from isoloss.studies.leases import Leases
Leases(pathlib.Path(sys.argv[1])).take("lost", 1)
"""


def unit(name, *after, done=False, progress="", seconds=1.0, kind="train"):
    return Unit(
        name=name, arguments=(kind,), done=lambda: done, progress=lambda _: progress, after=after, seconds=seconds
    )


def test_every_state_follows_from_the_files(tmp_path):
    leases = Leases(tmp_path / "leases")
    units = [
        unit("done before", done=True),
        unit("done", done=True),
        unit("deleted"),
        unit("running", progress="step 3 of 9"),
        unit("failed"),
        unit("stopped", progress="step 1 of 9"),
        unit("lost"),
        unit("to do"),
    ]
    leases.take("done", 1).end("done", seconds=3)
    leases.take("deleted", 1).end("done", seconds=3)
    leases.take("running", 1).end("stopped")
    leases.take("running", 2)
    leases.take("failed", 1).end("failed", reason="failed with status 1")
    files.write_text(tmp_path / "logs" / "failed.1.log", "begins\n\nthe reason\n\n")
    leases.take("stopped", 1).end("stopped")
    subprocess.run([sys.executable, "-c", TAKE, str(leases.folder)], check=True)
    found = {status.unit.name: status for status in statuses(units, tmp_path)}
    assert {name: status.state for name, status in found.items()} == {
        **{"done before": "done", "done": "done", "running": "running", "failed": "failed"},
        **{"deleted": "begun", "stopped": "begun", "lost": "begun", "to do": "to do"},
    }
    running = found["running"]
    assert (running.progress, running.attempts, running.host) == ("step 3 of 9", 2, os.uname().nodename)
    assert running.since.endswith("+00:00")
    assert found["failed"].last_line == "the reason"
    assert found["stopped"].progress == "step 1 of 9"


def test_expected_seconds_are_corrected_by_what_was_measured(tmp_path):
    leases = Leases(tmp_path / "leases")
    units = [
        *(unit(name, seconds=seconds) for name, seconds in (("a", 10.0), ("b", 20.0), ("c", 5.0))),
        unit("d", seconds=7.0, kind="eval"),
    ]
    leases.take("a", 1).end("done", seconds=5.0)
    leases.take("b", 1).end("done", seconds=40.0)
    leases.take("c", 1).end("stopped")
    leases.take("c", 2).end("done", seconds=100.0)  # the time of a part of it
    corrected, measured = with_measured_seconds(units, tmp_path)
    assert measured == 2
    assert [one.seconds for one in corrected] == [15.0, 30.0, 7.5, 7.0]


def test_what_remains_counts_units_that_are_not_done(tmp_path):
    units = [
        unit("a", done=True, seconds=50),
        unit("b", "a", seconds=3),
        unit("c", "b", seconds=2),
        unit("d", seconds=4),
    ]
    left = remaining(statuses(units, tmp_path), 2)
    assert (left.total, left.longest_chain, left.with_workers) == (9, 5, 5)


def simulated(units, workers):
    """The time of a plan, second by second; all durations are whole seconds."""
    todo, running, done, now = list(units), [], set(), 0
    while todo or running:
        for one in [one for one in todo if done.issuperset(one.after)][: workers - len(running)]:
            todo.remove(one)
            running.append((one, now + one.seconds))
        now += 1
        done |= {one.name for one, end in running if end == now}
        running = [(one, end) for one, end in running if end > now]
    return now


@pytest.mark.parametrize("seed", range(20))
def test_the_makespan_is_that_of_a_simulation(seed):
    draw = random.Random(seed)
    names = [f"unit {i}" for i in range(12)]
    units = [
        unit(name, *(other for other in names[:i] if draw.random() < 0.2), seconds=draw.randint(1, 9))
        for i, name in enumerate(names)
    ]
    plan = in_order(units)
    for workers in (1, 2, 3, 20):
        assert makespan(plan, workers) == simulated(plan, workers)
    assert makespan(plan, 20) == max(urgency(units).values())
    assert all(one <= other for one, other in itertools.pairwise(sorted([makespan(plan, 20), makespan(plan, 1)])))
