"""The loop over a plan: what is handed out and when, what is tried again, and that several executors share a folder."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from longer_study import TRAINING, contents, ends, engine, wait_for

from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run import loop as loop_module
from isoloss.studies.run.loop import Loop, Options


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.0)


def unit(folder, name, *after, **more):
    """A unit that is done when there is a file of its name."""
    return Unit(name=name, arguments=("ls",), done=(folder / name).exists, after=after, **more)


def finish(loop, attempt):
    (loop.folder / attempt.unit.name).touch()
    loop.finish(attempt, 0)


def test_units_wait_for_others_and_for_room(tmp_path):
    units = [unit(tmp_path, "a"), unit(tmp_path, "b", "a"), unit(tmp_path, "large", needs=Resources(cores=4))]
    said = []
    loop = Loop(units, tmp_path, Options(), say=said.append)
    a = loop.take(lambda needs: needs.cores < 4)
    assert a.unit.name == "a"
    assert loop.take(lambda needs: needs.cores < 4) is None
    large = loop.take()
    assert large.unit.name == "large"
    assert loop.take() is None
    finish(loop, a)
    b = loop.take()
    assert b.unit.name == "b"
    finish(loop, large)
    finish(loop, b)
    assert loop.finished
    assert loop.num_run_here == loop.num_done == 3
    assert said[-1] == "b: done in 0 s (3 of 3 units)"


def test_a_failure_is_tried_again_and_then_given_up(tmp_path):
    units = [unit(tmp_path, "a"), unit(tmp_path, "b", "a"), unit(tmp_path, "c", "b"), unit(tmp_path, "d")]
    loop = Loop(units, tmp_path, Options(retries=1))
    for number in (1, 2):
        attempt = loop.take()
        assert (attempt.unit.name, attempt.number) == ("a", number)
        attempt.log.write_text("first\nthe reason\n")
        loop.finish(attempt, 1)
    finish(loop, loop.take())  # others go on
    assert loop.finished
    with pytest.raises(IsolossError, match=r"a failed with status 1; .*a/2\.log:\nfirst\nthe reason\n") as caught:
        loop.raise_failures()
    assert str(caught.value).endswith("not started, as they wait for failed units: 2 units")
    # the next executor tries again
    assert Loop(units, tmp_path, Options()).take().number == 3


def test_bad_input_is_not_tried_again(tmp_path):
    loop = Loop([unit(tmp_path, "a")], tmp_path, Options(retries=5))
    loop.finish(loop.take(), 2)
    assert loop.take() is None
    assert loop.finished


def test_without_keep_going_nothing_starts_after_a_failure(tmp_path):
    loop = Loop([unit(tmp_path, "a"), unit(tmp_path, "b")], tmp_path, Options(keep_going=False))
    loop.finish(loop.take(), 2)
    assert loop.take() is None
    assert loop.finished
    with pytest.raises(IsolossError, match="a failed with status 2"):
        loop.raise_failures()


def test_a_unit_that_was_stopped_has_not_failed(tmp_path):
    loop = Loop([unit(tmp_path, "a")], tmp_path, Options(retries=0))
    for number in (1, 2, 3):
        attempt = loop.take()
        assert attempt.number == number
        loop.finish(attempt, 130, stopped=True)
    finish(loop, loop.take())
    loop.raise_failures()


def test_two_executors_share_a_folder(tmp_path):
    units = [unit(tmp_path, name) for name in "abc"]
    one, other = (Loop(units, tmp_path, Options()) for _ in range(2))
    a, b = one.take(), other.take()
    assert (a.unit.name, b.unit.name) == ("a", "b")
    c = other.take()
    assert one.take() is None
    assert not one.finished
    finish(one, a)
    finish(other, b)
    other.finish(c, 1)  # it fails once: either may try it again
    again = one.take()
    assert (again.unit.name, again.number) == ("c", 2)
    finish(one, again)
    assert other.take() is None
    assert one.finished
    assert other.finished
    assert (one.num_run_here, other.num_run_here) == (2, 1)


def test_what_another_executor_gave_up_is_given_up(tmp_path):
    units = [unit(tmp_path, "a"), unit(tmp_path, "b", "a")]
    one, other = (Loop(units, tmp_path, Options(retries=0)) for _ in range(2))
    attempt = one.take()
    assert other.take() is None
    attempt.log.write_text("the reason\n")
    one.finish(attempt, 1)
    assert other.take() is None
    assert other.finished
    with pytest.raises(IsolossError, match="a failed with status 1 in another process: the reason\n"):
        other.raise_failures()


def test_an_attempt_that_was_lost_is_taken_over_and_its_holder_told(tmp_path):
    units, said = [unit(tmp_path, "a")], []
    slow = Loop(units, tmp_path, Options(), say=said.append)
    attempt = slow.take()
    os.close(attempt.descriptor)  # as if its process had ended
    other = Loop(units, tmp_path, Options())
    taken = other.take()
    assert taken.number == 2
    finish(other, taken)
    slow.finish(replace(attempt, descriptor=os.open(tmp_path, os.O_RDONLY)), 0)  # changes nothing
    assert said[-1] == "a: another process has taken it over"
    assert slow.take() is None
    assert slow.finished
    assert (slow.num_run_here, other.num_run_here) == (0, 1)
    assert [each.get("end") for each in other.attempts.records(units[0])] == [None, "done"]


def test_a_lower_block_comes_first_and_waits_for_no_later_one(tmp_path):
    units = [unit(tmp_path, "c", block=2), unit(tmp_path, "b", "a"), unit(tmp_path, "d", block=1), unit(tmp_path, "a")]
    loop, order = Loop(units, tmp_path, Options()), []
    for attempt in loop:
        order.append(attempt.unit.name)
        finish(loop, attempt)
    assert order == ["a", "b", "d", "c"]
    # a worker without work in its block starts the next one
    for name in "abcd":
        (tmp_path / name).unlink()
    loop = Loop(units, tmp_path, Options())
    assert [loop.take().unit.name for _ in range(3)] == ["a", "d", "c"]
    with pytest.raises(IsolossError, match=r"'a' of block 0 waits for 'b' of block 1: a unit cannot wait"):
        Loop([unit(tmp_path, "a", "b"), unit(tmp_path, "b", block=1)], tmp_path, Options())


def test_a_result_that_was_deleted_is_made_again(tmp_path):
    units = [unit(tmp_path, "a")]
    loop = Loop(units, tmp_path, Options())
    finish(loop, loop.take())
    (tmp_path / "a").unlink()
    assert Loop(units, tmp_path, Options()).take().number == 2


def test_what_cannot_be_published_is_a_failure_of_its_unit(tmp_path):
    run, made = tmp_path / "runs" / "base", tmp_path / "runs" / ".base.attempt-1"
    units = [
        Unit(name="base", arguments=("train", str(run)), done=lambda: Run(run).complete, outputs=(run,)),
        unit(tmp_path, "other"),
    ]
    loop = Loop(units, tmp_path, Options())
    attempt = loop.take()
    made.mkdir(parents=True)
    for name in ("run.json", "result.json"):
        (made / name).write_text("{}")
    run.mkdir()
    (run / "notes").write_text("in the way")
    loop.finish(attempt, 0)
    finish(loop, loop.take())
    assert loop.finished
    with pytest.raises(IsolossError, match=r"base: cannot rename .*runs/base: Directory not empty"):
        loop.raise_failures()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"retries": -1}, "retries is -1; it must be at least 0"),
    ],
)
def test_wrong_options(given, message):
    with pytest.raises(IsolossError, match=message):
        Options(**given)


# --- with real commands and real processes


def commands(folder, count, steps):
    """The commands that train `count` runs in a folder, with a checkpoint every 20 steps."""
    words = (*TRAINING, "--steps", str(steps), "--checkpoints", *map(str, range(20, steps, 20)))
    return [("train", str(folder / "runs" / f"run-{i}"), *words, "--seed", str(i)) for i in range(count)]


def start(folder, count, steps):
    return engine(folder, commands(folder, count, steps))


def train_alone(folder, count, steps):
    for words in commands(folder, count, steps):
        assert main(list(words)) == 0


def has_checkpoint(folder, number=None):
    pattern = f".run-*.attempt-{number or '*'}/checkpoints/step-*"
    return any((folder / "runs").glob(pattern))


def done_by(output):
    return [line.split(":")[0] for line in output.splitlines() if ": done in" in line]


def test_two_executors_one_of_them_killed_do_every_unit_once(tmp_path):
    train_alone(tmp_path / "alone", 3, 300)
    folder = tmp_path / "both"
    killed, other = start(folder, 3, 300), start(folder, 3, 300)
    wait_for(lambda: has_checkpoint(folder))
    killed.send_signal(signal.SIGKILL)
    by_killed, by_other = (done_by(process.communicate(timeout=600)[0]) for process in (killed, other))
    assert sorted(by_killed + by_other) == [f"train {i}" for i in range(3)]
    assert by_other
    assert ends(folder) == {"done": 3}
    assert contents(folder) == contents(tmp_path / "alone")


def stopped(process, number):
    """Send a signal to an executor and all that it started."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    family = [process.pid]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    for pid in family:
        os.kill(pid, number)


@pytest.mark.slow
def test_an_executor_that_was_paused_longer_than_the_expiry_spoils_nothing(tmp_path):
    train_alone(tmp_path / "alone", 1, 600)
    folder = tmp_path / "paused"
    paused = start(folder, 1, 600)
    wait_for(lambda: has_checkpoint(folder))
    stopped(paused, signal.SIGSTOP)
    other = start(folder, 1, 600)
    wait_for(lambda: has_checkpoint(folder, 2))
    assert not (folder / "runs" / ".run-0.attempt-1").exists()  # the other goes on from it
    stopped(paused, signal.SIGCONT)  # while the other is at work
    outputs = [process.communicate(timeout=600)[0] for process in (paused, other)]
    assert [done_by(output) for output in outputs] == [[], ["train 0"]]
    assert "train 0: another process has taken it over" in outputs[0]
    assert paused.returncode == other.returncode == 0
    final = Path(folder / "runs" / "run-0")
    assert final.is_dir()
    assert not list((folder / "runs").glob(".run-0.attempt-*"))
    published = {name: digest for name, digest in contents(folder).items() if name.startswith("runs/run-0/")}
    assert published == contents(tmp_path / "alone")
