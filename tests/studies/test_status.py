"""The state of a study as its files tell it, and how long the rest takes."""

import itertools
import os
import random
import subprocess
import sys

import pytest

from isoloss import files
from isoloss.studies.plan import Resources, Unit, in_order, makespan, upward_rank
from isoloss.studies.run.lease import Leases
from isoloss.studies.status import UnitStatus, by_purpose, remaining, statuses

TAKE = """
import pathlib, sys
from isoloss.studies.run.lease import Leases
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
        **{"deleted": "interrupted", "stopped": "interrupted", "lost": "interrupted", "to do": "to do"},
    }
    running = found["running"]
    assert (running.progress, running.attempts, running.host) == ("step 3 of 9", 2, os.uname().nodename)
    assert running.since.endswith("+00:00")
    assert found["failed"].last_line == "the reason"
    assert found["stopped"].progress == "step 1 of 9"


@pytest.mark.parametrize("has_files", [True, False])
def test_where_a_lease_says_done_the_files_need_only_exist(tmp_path, has_files):
    def done():
        asked.append("done")
        return False

    asked = []
    one = Unit(name="a", arguments=("train",), done=done, has_files=lambda: has_files)
    lease = Leases(tmp_path / "leases").take("a", 1)
    assert [status.state for status in statuses([one], tmp_path)] == ["running"]
    assert asked == ["done"]
    lease.end("done", seconds=3)
    assert [status.state for status in statuses([one], tmp_path)] == ["done" if has_files else "interrupted"]
    assert asked == ["done"]


def test_what_remains_counts_units_that_are_not_done(tmp_path):
    units = [
        unit("a", done=True, seconds=50),
        unit("b", "a", seconds=3),
        unit("c", "b", seconds=2),
        unit("d", seconds=4),
    ]
    left = remaining(statuses(units, tmp_path), 2)
    assert (left.core_seconds, left.gpu_seconds, left.longest_chain, left.with_workers) == (9, 0, 5, 5)
    left = remaining([status(3, Resources(cores=2, gpus=0.5)), status(5, Resources(gpus=1, processes=2))], 4)
    assert (left.core_seconds, left.gpu_seconds) == (16, 11.5)


def status(seconds, needs):
    one = Unit(name=f"{needs}", arguments=(), done=lambda: False, seconds=seconds, needs=needs)
    return UnitStatus(unit=one, state="to do")


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
    assert makespan(plan, 20) == max(upward_rank(units).values())
    assert all(one <= other for one, other in itertools.pairwise(sorted([makespan(plan, 20), makespan(plan, 1)])))


def test_a_figure_needs_what_its_units_wait_for():
    def status(name, *after, shown_in=(), state="to do"):
        one = Unit(name=name, arguments=("train",), done=lambda: False, after=after, group=name, shown_in=shown_in)
        return UnitStatus(unit=one, state=state)

    base, done = status("base"), status("done", state="done")
    shown = [
        status("a", "base", "done", shown_in=("figure 10", "figure 2a")),
        status("b", "a", shown_in=("figure 2a",)),
    ]
    found = by_purpose([base, done, *shown])
    names = {purpose: {each.unit.name for each in needed} for purpose, needed in found.items()}
    assert names == {"figure 2a": {"base", "a", "b"}, "figure 10": {"base", "a"}, "no figure": {"base"}}
    assert list(names) == ["figure 2a", "figure 10", "no figure"]
    assert list(by_purpose([base, done])) == ["base"]
