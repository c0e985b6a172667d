"""Attempts: one process alone gets each, a lost one is noticed, and it is gone on with in a folder of its own."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Unit
from isoloss.studies.run.attempt import Attempts

TAKER = """
import sys, time
from pathlib import Path
from isoloss.studies.plan import Unit
from isoloss.studies.run.attempt import Attempts
attempts, start = Attempts(Path(sys.argv[1])), float(sys.argv[2])
units = [Unit(name=f"unit-{i}", arguments=(), done=lambda: False) for i in range(int(sys.argv[3]))]
time.sleep(max(0.0, start - time.time()))
print(sum(attempts.take(unit, 1) is not None for unit in units))
"""


def unit(*paths, name="a"):
    return Unit(name=name, arguments=("train", *map(str, paths)), done=lambda: False, outputs=paths)


def attempt(number, *paths):
    return Attempts(paths[0].parent / "study").take(unit(*paths), number)


def write(folder, **contents):
    for name, text in contents.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def everything(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- who makes an attempt


def test_of_many_processes_and_threads_one_gets_each_attempt(tmp_path):
    words = [sys.executable, "-c", TAKER, str(tmp_path), str(time.time() + 3), "200"]
    takers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(taker.communicate(timeout=600)[0]) for taker in takers]
    assert sum(counts) == 200
    attempts, taken = Attempts(tmp_path), []
    threads = [threading.Thread(target=lambda: taken.append(attempts.take(unit(), 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one is not None for one in taken) == 1


def test_the_last_attempt_counts_and_says_how_it_ended(tmp_path):
    attempts = Attempts(tmp_path)
    assert attempts.last(unit()) == (0, {})
    for number, end in enumerate(("failed", "stopped", "done"), 1):
        made = attempts.take(unit(), number)
        assert attempts.take(unit(), number) is None
        found, lease = attempts.last(unit())
        assert (found, lease["host"], lease.get("end")) == (number, os.uname().nodename, None)
        assert not attempts.is_free(unit(), found, lease)
        made.end(end, seconds=number)
        found, lease = attempts.last(unit())
        assert (found, lease["end"], lease["seconds"]) == (number, end, number)
        assert attempts.is_free(unit(), found, lease)
    assert [each["end"] for each in attempts.records(unit())] == ["failed", "stopped", "done"]


def test_an_attempt_of_a_process_of_this_machine_that_is_gone_is_lost_at_once(tmp_path):
    attempts, taken = Attempts(tmp_path, expiry=1000), unit(name="unit-0")
    subprocess.run([sys.executable, "-c", TAKER, str(tmp_path), "0", "1"], check=True, capture_output=True)
    assert attempts.is_free(taken, *attempts.last(taken))
    assert not attempts.seems_alive(taken, *attempts.last(taken))
    made = attempts.take(unit(), 1)
    assert not attempts.is_free(unit(), *attempts.last(unit()))
    os.close(made.descriptor)  # as when its process ends
    assert attempts.is_free(unit(), *attempts.last(unit()))


@pytest.mark.parametrize("end", [{}, {"end": "done"}])  # its result may not be visible here yet
def test_an_attempt_of_another_machine_is_lost_when_its_heart_rests_for_longer_than_the_expiry(
    tmp_path, monkeypatch, end
):
    now = [1000.0]
    monkeypatch.setattr("isoloss.studies.run.attempt.time.monotonic", lambda: now[0])
    attempts = Attempts(tmp_path, expiry=30)
    made = attempts.take(unit(), 1)

    def is_free(seconds, **more):
        made.lease.write_text(json.dumps({"boot": "another", **end, **more}))
        os.utime(made.lease, (beat, beat))
        now[0] += seconds
        return attempts.is_free(unit(), *attempts.last(unit()))

    beat = 5e9  # whatever its clock says
    assert [is_free(seconds) for seconds in (0, 29, 2)] == [False, False, True]
    # one with a longer expiry beats more slowly
    assert not is_free(0, expiry=60.0)
    beat += 1  # it lives
    assert [is_free(seconds) for seconds in (0, 29, 2)] == [False, False, True]
    made.lease.write_text("")  # it was just made
    assert not attempts.is_free(unit(), *attempts.last(unit()))


def test_an_attempt_that_was_lost_records_nothing(tmp_path):
    attempts = Attempts(tmp_path)
    first = attempts.take(unit(), 1)
    first.renew()
    assert first.is_held()
    attempts.take(unit(), 2)
    assert not first.is_held()
    first.end("done")
    assert ["end" in each for each in attempts.records(unit())] == [False, False]


def test_what_cannot_be_written_or_is_no_expiry_is_refused(tmp_path):
    (tmp_path / "units").write_text("a file")
    with pytest.raises(IsolossError, match=r"cannot write .*units/a/1\.json"):
        Attempts(tmp_path).take(unit(), 1)
    for expiry in (0, float("inf")):
        with pytest.raises(IsolossError, match=f"the expiry is {expiry} seconds; it must be above 0 and finite"):
            Attempts(tmp_path, expiry=expiry)


# --- where its command works


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
    assert all(Run(tmp_path / name).exists for name in (".a.attempt-1", "complete", "locked"))


def test_a_complete_run_is_published_once(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / ".b.attempt-1", run_json="{}")
    write(tmp_path / "a", **{".lock": ""})  # the remains of a killed command are no obstacle
    attempt(1, tmp_path / "a", tmp_path / "b").publish()
    assert everything(tmp_path / "a") == {"result.json": "first", "run.json": "{}"}
    assert not (tmp_path / "b").exists()  # not complete
    write(tmp_path / ".a.attempt-2", run_json="{}", result_json="second")
    second = attempt(2, tmp_path / "a")
    second.publish()
    assert everything(tmp_path / "a")["result.json"] == "first"
    with pytest.raises(OSError, match="not empty"):  # even if it had looked before the first was published
        (tmp_path / ".a.attempt-2").rename(tmp_path / "a")
    write(tmp_path / ".ab.attempt-1", run_json="{}")
    second.clean()
    assert sorted(path.name for path in tmp_path.glob(".a*")) == [".ab.attempt-1"]


def test_an_incomplete_folder_in_the_way_is_named(tmp_path):
    write(tmp_path / ".a.attempt-1", run_json="{}", result_json="first")
    write(tmp_path / "a", notes="mine")
    with pytest.raises(IsolossError, match=r"cannot rename .*/a: "):
        attempt(1, tmp_path / "a").publish()
    assert everything(tmp_path / "a") == {"notes": "mine"}
