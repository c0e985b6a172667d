"""Leases: one process alone gets an attempt, and a lost one is noticed by its silence or by its process being gone."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from isoloss import files
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.studies.run.lease import Last, Leases

TAKE = """
import pathlib, sys
from isoloss.studies.run.lease import Leases
Leases(pathlib.Path(sys.argv[1])).take("a", 1)
"""
TAKER = """
import sys, time
from pathlib import Path
from isoloss.studies.run.lease import Leases
leases, start = Leases(Path(sys.argv[1])), float(sys.argv[2])
time.sleep(max(0.0, start - time.time()))
print(sum(leases.take(f"unit-{i}", 1) is not None for i in range(200)))
"""


def test_of_many_processes_one_gets_each_lease(tmp_path):
    words = [sys.executable, "-c", TAKER, str(tmp_path), str(time.time() + 3)]
    takers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    counts = [int(taker.communicate(timeout=60)[0]) for taker in takers]
    assert sum(counts) == 200
    assert sum(count > 0 for count in counts) > 1  # or they did not compete
    assert Leases(tmp_path).attempts() == {f"unit-{i}": Last(1) for i in range(200)}


def test_the_last_attempt_and_its_end_count(tmp_path):
    leases = Leases(tmp_path / "leases")
    assert leases.attempts() == {}
    for number, end in ((1, "failed"), (2, "stopped"), (10, "done")):
        lease = leases.take("a", number)
        assert leases.attempts() == {"a": Last(number)}
        lease.end(end, seconds=number)
        assert leases.attempts() == {"a": Last(number, end)}
        assert leases.end_record("a", number, end) == {"seconds": number}
    (tmp_path / "leases" / "notes.txt").write_text("not a lease")
    assert leases.attempts() == {"a": Last(10, "done")}
    assert leases.take("a", 10) is None


def test_silence_longer_than_the_expiry_loses_a_lease(tmp_path):
    leases = Leases(tmp_path, expiry=30)
    lease = leases.take("a", 1)
    lease.path.write_text("{}")  # as another machine's, whose processes cannot be looked up
    assert not leases.is_lost("a", 1)
    long_ago = time.time() - 31
    os.utime(lease.path, (long_ago, long_ago))
    assert leases.is_lost("a", 1)
    # the expiry of its owner counts if it is longer, as its heart beats more slowly
    lease.path.write_text('{"expiry": 60}')
    os.utime(lease.path, (long_ago, long_ago))
    assert not leases.is_lost("a", 1)
    lease.path.write_text("{}")
    os.utime(lease.path, (long_ago, long_ago))
    assert leases.is_lost("a", 1)
    lease.renew()
    assert not leases.is_lost("a", 1)


@pytest.mark.parametrize("kind", ["json", "done"])
def test_a_time_in_the_future_is_told_and_counts_from_when_it_was_seen(tmp_path, monkeypatch, kind):
    now = [1000.0]
    monkeypatch.setattr("isoloss.studies.run.lease.time.monotonic", lambda: now[0])
    leases = Leases(tmp_path, expiry=30)
    lease = leases.take("a", 1)
    lease.path.write_text("{}")  # as another machine's
    path = lease.path.with_suffix(f".{kind}")
    path.touch()

    def is_old():
        return leases.is_lost("a", 1) if kind == "json" else leases.seconds_since("a", 1, "done") > 30

    def date(ahead):
        os.utime(path, (time.time() + ahead, time.time() + ahead))

    date(3600)
    with pytest.warns(IsolossWarning, match=rf"a\.1\.{kind} is dated 3,600 s in the future"):
        assert not is_old()
    now[0] += 29
    assert not is_old()  # and it is told once
    date(3610)  # its owner lives
    assert not is_old()
    now[0] += 31
    assert is_old()


def test_a_process_of_this_machine_that_is_gone_loses_its_lease_at_once(tmp_path):
    leases = Leases(tmp_path, expiry=1000)
    subprocess.run([sys.executable, "-c", TAKE, str(tmp_path)], check=True)
    assert leases.owner("a", 1)["pid"] != os.getpid()
    assert leases.is_lost("a", 1)
    lease = leases.take("b", 1)
    assert not leases.is_lost("b", 1)
    os.close(lease.descriptor)  # as when its process ends
    assert leases.is_lost("b", 1)
    # since the machine was started again, or on another one, the heartbeat alone counts
    (tmp_path / "b.1.json").write_text(json.dumps({**leases.owner("b", 1), "boot": "another"}))
    assert not leases.is_lost("b", 1)


def test_a_lost_lease_has_no_end(tmp_path):
    leases = Leases(tmp_path)
    first = leases.take("a", 1)
    assert first.is_held()
    leases.take("a", 2)
    assert not first.is_held()
    first.end("done")
    assert leases.attempts() == {"a": Last(2)}
    assert not (tmp_path / "a.1.done").exists()


def test_a_process_without_its_lease_writes_nothing(tmp_path, monkeypatch):
    leases = Leases(tmp_path / "leases")
    lease = leases.take("a", 1)
    monkeypatch.setenv(files.LEASE, str(lease.path))
    files.write_text(tmp_path / "kept", "first")
    files.append_json(tmp_path / "lines", 1)
    leases.take("a", 2)
    with pytest.raises(
        IsolossError, match=r"another process has taken over this work, .*a\.2\.json: nothing is written"
    ):
        files.write_text(tmp_path / "kept", "second")
    with pytest.raises(IsolossError, match="another process"):
        files.append_json(tmp_path / "lines", 2)
    with pytest.raises(IsolossError, match="another process"), files.new_directory(tmp_path / "folder") as folder:
        (folder / "file").write_text("late")
    assert (tmp_path / "kept").read_text() == "first"
    assert (tmp_path / "lines").read_text() == "1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "leases", "lines"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "leases").write_text("a file")
    with pytest.raises(IsolossError, match=r"cannot write .*leases/a\.1\.json"):
        Leases(tmp_path / "leases").take("a", 1)
    for expiry in (0, float("inf")):
        with pytest.raises(
            IsolossError, match=f"the expiry of leases is {expiry} seconds; it must be above 0 and finite"
        ):
            Leases(tmp_path, expiry=expiry)


def test_threads_compete_too(tmp_path):
    leases, taken = Leases(tmp_path), []
    threads = [threading.Thread(target=lambda: taken.append(leases.take("a", 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease is not None for lease in taken) == 1
