"""The state of a study as its files tell it, what units need by the records of others, and how long the rest takes."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from isoloss import files
from isoloss.runs import Run
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run import local, usage
from isoloss.studies.run.attempt import Attempts
from isoloss.studies.status import UnitStatus, by_purpose, remaining, statuses
from studies_in_process import carry_out


def unit(name, *after, done=False, progress="", seconds=1.0, kind="train", group=""):
    return Unit(
        name=name,
        arguments=(kind,),
        done=lambda: done,
        progress=lambda _: progress,
        after=after,
        seconds=seconds,
        group=group,
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


def test_units_are_like_those_of_their_group_or_else_of_their_subcommand(tmp_path):
    attempts = Attempts(tmp_path)
    units = [
        unit("a", seconds=10.0, group="small"),
        unit("b", seconds=20.0, group="small"),
        unit("c", seconds=10.0, group="large"),
        unit("d", seconds=4.0, group="small"),
        unit("e", seconds=4.0, group="large"),
        unit("f", seconds=4.0, group="unlike any"),
        unit("g", seconds=4.0, kind="eval"),
    ]

    def take(name, number):
        return attempts.take(next(each for each in units if each.name == name), number)

    take("a", 1).end("stopped", seconds=2.0)
    take("a", 2).end("done", seconds=3.0, memory=100, gpu_memory=0, disk=10)
    take("b", 1).end("done", seconds=40.0, memory=300, gpu_memory=0, disk=30)
    take("c", 1)  # lost after an unknown time
    take("c", 2).end("done", seconds=100.0)
    found = {one.unit.name: one for one in statuses(units, tmp_path)}
    assert {name: one.unit.seconds for name, one in found.items()} == {
        **{"a": 5.0, "b": 40.0, "c": 15.0, "d": 6.0, "e": 6.0, "f": 6.0, "g": 4.0}
    }
    assert [name for name, one in found.items() if one.is_measured] == ["a", "b"]
    assert [(one.memory, one.disk) for one in found.values()] == [
        *((100, 10), (300, 30), (300, 20), (300, 20), (300, 20), (300, 20), (None, None))
    ]
    take("e", 1).end("done", seconds=8.0, memory=50, gpu_memory=7, disk=1)
    found = {one.unit.name: one for one in statuses(units, tmp_path)}
    assert (found["c"].unit.seconds, found["c"].memory, found["c"].gpu_memory, found["c"].disk) == (20.0, 50, 7, 1)
    assert (found["f"].unit.seconds, found["f"].memory) == (4 * 53 / 34, 300)


def test_a_plan_without_results_has_only_its_own_guess(tmp_path):
    (one,) = statuses([unit("a", seconds=3.0)], tmp_path)
    assert (one.unit.seconds, one.memory, one.gpu_memory, one.disk, one.is_measured) == (3.0, None, None, None, False)


def test_a_unit_records_its_peak_memory_and_what_it_left_on_disk(tmp_path):
    path = tmp_path / "a"
    training = Unit(
        name="train a",
        arguments=("train", str(path), "--language", "pcfg-laptop", "--size", "d16", "--steps", "3", "--threads", "1"),
        done=lambda: Run(path).complete,
        outputs=(path,),
    )
    measuring = Unit(
        name="measure a",
        arguments=("measure", str(path), "--measures", "loss", "--loss-sentences", "16", "--threads", "1"),
        done=lambda: bool(Run(path).evaluations()),
        after=("train a",),
    )
    carry_out([training], tmp_path, local.run)
    before = {file: file.stat().st_size for file in path.rglob("*") if file.is_file()}
    carry_out([training, measuring], tmp_path, local.run)
    trained, measured = statuses([training, measuring], tmp_path)
    assert trained.disk == sum(before.values())
    evaluations = [file for file in (path / "evaluations").iterdir() if file not in before]
    assert measured.disk == sum(file.stat().st_size for file in evaluations) > 0
    # both imported torch; a command of this kind stays far below what this machine has
    assert all(100 * 2**20 < one.memory < 4 * 2**30 for one in (trained, measured))
    assert not list((tmp_path / "units").glob("*/*.usage*"))


def test_the_peak_is_that_of_the_process(tmp_path):
    code = (
        "import os; from isoloss.studies.run import usage\n"
        "held = bytearray(300 * 2**20); usage.report(1 + int(os.environ['RANK']))"
    )
    environment = {"ISOLOSS_USAGE": str(tmp_path / "a.usage"), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    for rank in ("0", "1"):
        subprocess.run([sys.executable, "-c", code], env={**environment, "RANK": rank}, check=True)
    used = usage.collect(tmp_path / "a.usage", 2, [])
    own = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert 2 * 300 * 2**20 < used["memory"] <= 2 * own
    assert used["gpu_memory"] == used["disk"] == 0
    assert used["seconds"] == 2
    assert not list(tmp_path.iterdir())
    assert usage.collect(tmp_path / "a.usage", 2, []) == {}


def test_what_counts_is_what_a_process_left(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "published", {})
    monkeypatch.setenv(usage.USAGE, str(tmp_path / "usage"))
    for text in ("a longer text", "short"):  # replaced
        files.write_text(tmp_path / "a", text)
    usage.report(2.5)
    assert usage.collect(tmp_path / "usage", 1, [])["disk"] == 5
    with pytest.raises(FileNotFoundError):
        (tmp_path / "usage.0").stat()
