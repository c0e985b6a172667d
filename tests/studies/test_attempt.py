"""Attempts: a run is made in folders of its own, goes on from the attempt before, and is published once."""

from pathlib import Path

import pytest

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Unit
from isoloss.studies.run.attempt import Attempt
from isoloss.studies.run.lease import Lease


def attempt(number, *paths):
    """An attempt at making runs; its lease is not needed."""
    arguments = ("train", *map(str, paths))
    unit = Unit(name="train", arguments=arguments, done=lambda: False, outputs=paths)
    return Attempt(unit, Lease(Path("train.json"), number, -1), Path("log"))


def write(folder, **contents):
    for name, text in contents.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def everything(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_command_works_in_the_folders_of_the_attempt(tmp_path):
    runs = tmp_path / "a", tmp_path / "b"
    write(runs[1], run_json="{}", result_json="{}")  # complete
    assert attempt(3, *runs).arguments == ("train", str(tmp_path / ".a.attempt-3"), str(runs[1]))


def test_an_attempt_goes_on_from_the_last_one(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="first")
    last, own = tmp_path / ".a.attempt-2", tmp_path / ".a.attempt-4"
    write(last, run_json="{}", checkpoints__model="weights")
    (last / "metrics.jsonl").write_text("1\n")
    attempt(4, tmp_path / "a").prepare()
    assert not last.exists()
    assert everything(own) == {"run.json": "{}", "checkpoints/model": "weights", "metrics.jsonl": "1\n"}


def test_a_process_that_was_paused_changes_nothing_in_the_next_attempt(tmp_path):
    run = tmp_path / ".a.attempt-1"
    write(run, run_json="{}", checkpoints__model="weights")
    (run / "metrics.jsonl").write_text("1\n")
    with (run / "metrics.jsonl").open("a") as metrics, files.lock(run):  # paused with these open
        attempt(2, tmp_path / "a").prepare()
        metrics.write("2\n")
        metrics.flush()
        with pytest.raises(IsolossError, match="cannot write"):
            files.append_json(run / "metrics.jsonl", 3)
        with files.lock(tmp_path / ".a.attempt-2"):  # the next command need not wait for it
            pass
    kept = {name: text for name, text in everything(tmp_path / ".a.attempt-2").items() if name != ".lock"}
    assert kept == {"run.json": "{}", "checkpoints/model": "weights", "metrics.jsonl": "1\n"}


def test_a_run_begun_by_hand_is_continued(tmp_path):
    runs = [tmp_path / name for name in ("a", "complete", "locked")]
    for run in runs:
        write(run, run_json="{}")
    write(tmp_path / "complete", result_json="{}")
    with files.lock(tmp_path / "locked"):  # it is being trained now
        attempt(1, *runs).prepare()
    assert not (tmp_path / "a").exists()
    assert Run(tmp_path / ".a.attempt-1").exists
    assert Run(tmp_path / "complete").exists
    assert Run(tmp_path / "locked").exists


def test_the_remains_of_a_killed_command_are_no_obstacle(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").touch()
    attempt(1, tmp_path / "a").publish()
    assert everything(tmp_path / "a") == {"result.json": "first", "run.json": "{}"}


def test_a_complete_run_is_published_once(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / ".b.attempt-1", run_json="{}")
    attempt(1, tmp_path / "a", tmp_path / "b").publish()
    assert everything(tmp_path / "a") == {"result.json": "first", "run.json": "{}"}
    assert not (tmp_path / "b").exists()  # not complete
    write(tmp_path / ".a.attempt-2", run_json="{}", result_json="second")
    attempt(2, tmp_path / "a").publish()
    assert everything(tmp_path / "a")["result.json"] == "first"
    with pytest.raises(OSError, match="not empty"):  # even if it had looked before the first was published
        (tmp_path / ".a.attempt-2").rename(tmp_path / "a")


def test_an_incomplete_folder_in_the_way_is_named(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / "a", notes="mine")
    with pytest.raises(IsolossError, match=r"cannot rename .*/a: "):
        attempt(1, tmp_path / "a").publish()
    assert everything(tmp_path / "a") == {"notes": "mine"}


def test_old_attempts_are_deleted(tmp_path):
    for number in (1, 2):
        write(tmp_path / f".a.attempt-{number}", run_json="{}")
    write(tmp_path / ".ab.attempt-1", run_json="{}")
    attempt(2, tmp_path / "a").clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ab.attempt-1"]
