"""The state of a study as its files tell it, and how long the rest takes."""

import json
import os
import time

import pytest

from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run.attempt import Attempts
from isoloss.studies.status import UnitStatus, by_purpose, remaining, statuses


def unit(name, *after, done=False, progress="", seconds=1.0, kind="train"):
    return Unit(
        name=name, arguments=(kind,), done=lambda: done, progress=lambda _: progress, after=after, seconds=seconds
    )


def test_every_state_follows_from_the_files(tmp_path):
    attempts = Attempts(tmp_path)
    units = {
        "done before": unit("done before", done=True),
        "done": unit("done", done=True),
        "deleted": unit("deleted"),
        "running": unit("running", progress="step 3 of 9"),
        "failed": unit("failed"),
        "stopped": unit("stopped", progress="step 1 of 9"),
        "lost": unit("lost"),
        "elsewhere": unit("elsewhere"),
        "silent": unit("silent"),
        "to do": unit("to do"),
    }

    def take(name, number=1):
        return attempts.take(units[name], number)

    take("done").end("done", seconds=3)
    take("deleted").end("done", seconds=3)
    take("running").end("stopped")
    take("running", 2)
    failed = take("failed")
    failed.end("failed", reason="failed with status 1", final=True)
    failed.log.write_text("begins\n\nthe reason\n\n")
    take("stopped").end("stopped")
    os.close(take("lost").descriptor)
    for name, seconds in (("elsewhere", 10), ("silent", 100)):
        lease = take(name).lease
        lease.write_text(json.dumps({"boot": "another", "expiry": 60}))
        os.utime(lease, (time.time() - seconds, time.time() - seconds))
    found = {status.unit.name: status for status in statuses([*units.values()], tmp_path)}
    assert {name: status.state for name, status in found.items()} == {
        **{"done before": "done", "done": "done", "running": "running", "failed": "failed"},
        **{"deleted": "interrupted", "stopped": "interrupted", "lost": "interrupted", "to do": "to do"},
        **{"elsewhere": "running", "silent": "interrupted"},
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
    lease = Attempts(tmp_path).take(one, 1)
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
    assert (left.core_seconds, left.gpu_seconds, left.with_workers) == (9, 0, 4.5)
    left = remaining([status(3, Resources(cores=2, gpus=0.5)), status(5, Resources(gpus=1, processes=2))], 4)
    assert (left.core_seconds, left.gpu_seconds) == (16, 11.5)


def status(seconds, needs):
    one = Unit(name=f"{needs}", arguments=(), done=lambda: False, seconds=seconds, needs=needs)
    return UnitStatus(unit=one, state="to do")


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
