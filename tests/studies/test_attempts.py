"""Attempts: a run is made in folders of its own, goes on from the attempt before, and is published once."""

import os

import pytest

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies import attempts
from isoloss.studies.plan import Unit


def unit(*paths):
    return Unit(name="train", arguments=("train", *map(str, paths)), done=lambda: False, outputs=paths)


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
    assert attempts.arguments(unit(*runs), 3) == ("train", str(tmp_path / ".a.attempt-3"), str(runs[1]))


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_attempt_goes_on_from_the_one_before(tmp_path, has_ended):
    made = unit(tmp_path / "a")
    first, second = tmp_path / ".a.attempt-1", tmp_path / ".a.attempt-2"
    write(first, run_json="{}", checkpoints__model="weights")
    (first / "metrics.jsonl").write_text("1\n")
    (first / ".tmp-x").write_text("half")
    attempts.prepare(made, 2, lambda _: has_ended)
    assert first.exists() != has_ended
    kept = {name: text for name, text in everything(second).items() if not name.startswith(".")}
    assert kept == {"run.json": "{}", "checkpoints/model": "weights", "metrics.jsonl": "1\n"}
    if not has_ended:  # whoever goes on there changes nothing here
        assert not (second / ".tmp-x").exists()
        with (first / "metrics.jsonl").open("a") as file:
            file.write("2\n")
        os.replace(first / ".tmp-x", first / "checkpoints" / "model")
        assert (second / "metrics.jsonl").read_text() == "1\n"
        assert (second / "checkpoints" / "model").read_text() == "weights"


def test_a_copy_has_the_metrics_of_every_checkpoint_in_it(tmp_path, monkeypatch):
    first, second = tmp_path / ".a.attempt-1", tmp_path / ".a.attempt-2"
    write(first, run_json="{}", checkpoints__second="weights")
    (first / "metrics.jsonl").write_text("1\n")
    link = attempts._link_or_copy

    def link_and_write(source, target):  # the writer goes on while its files are copied
        link(source, target)
        (first / "metrics.jsonl").write_text("1\n2\n")

    monkeypatch.setattr(attempts, "_link_or_copy", link_and_write)
    attempts.prepare(unit(tmp_path / "a"), 2, lambda _: False)
    monkeypatch.undo()
    assert everything(second) == {"run.json": "{}", "checkpoints/second": "weights", "metrics.jsonl": "1\n2\n"}


def test_a_run_begun_by_hand_is_continued(tmp_path):
    made = unit(tmp_path / "a", tmp_path / "complete", tmp_path / "locked")
    for name in ("a", "complete", "locked"):
        write(tmp_path / name, run_json="{}")
    write(tmp_path / "complete", result_json="{}")
    with files.lock(tmp_path / "locked"):
        attempts.adopt([made])
    assert not (tmp_path / "a").exists()
    assert Run(tmp_path / "complete").exists
    assert Run(tmp_path / "locked").exists
    attempts.prepare(made, 1, lambda number: number == attempts.BY_HAND)
    assert Run(tmp_path / ".a.attempt-1").exists
    assert not (tmp_path / ".a.attempt-0").exists()


def test_the_remains_of_a_killed_command_are_no_obstacle(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").touch()
    attempts.publish(unit(tmp_path / "a"), 1)
    assert everything(tmp_path / "a") == {"result.json": "first", "run.json": "{}"}


def test_a_complete_run_is_published_once(tmp_path, monkeypatch):
    made = unit(tmp_path / "a", tmp_path / "b")
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / ".b.attempt-1", run_json="{}")
    attempts.publish(made, 1)
    assert everything(tmp_path / "a") == {"result.json": "first", "run.json": "{}"}
    assert not (tmp_path / "b").exists()  # not complete
    write(tmp_path / ".a.attempt-2", run_json="{}", result_json="second")
    # as if it had looked before the first was published, and was paused
    monkeypatch.setattr(attempts, "folder", lambda path, number: path.with_name(f".{path.name}.attempt-{number}"))
    attempts.publish(made, 2)
    assert everything(tmp_path / "a")["result.json"] == "first"


def test_an_incomplete_folder_in_the_way_is_named(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / "a", notes="mine")
    with pytest.raises(IsolossError, match=r"cannot rename .*/a: "):
        attempts.publish(unit(tmp_path / "a"), 1)
    assert everything(tmp_path / "a") == {"notes": "mine"}


def test_other_runs_are_not_looked_through(tmp_path, monkeypatch):
    write(tmp_path / ".a.attempt-1", run_json="{}")
    listed = []
    monkeypatch.setattr(attempts.os, "listdir", lambda path: listed.append(path) or [])
    attempts.prepare(unit(tmp_path / "a"), 2, lambda _: True)
    attempts.clean(unit(tmp_path / "a"), 2, lambda _: False)
    assert listed == []
    assert Run(tmp_path / ".a.attempt-2").exists


def test_old_attempts_are_deleted_where_nobody_writes(tmp_path):
    for number in (1, 2):
        write(tmp_path / f".a.attempt-{number}", run_json="{}")
    write(tmp_path / ".ab.attempt-1", run_json="{}")
    attempts.clean(unit(tmp_path / "a"), 2, lambda number: number == 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.attempt-2", ".ab.attempt-1"]
