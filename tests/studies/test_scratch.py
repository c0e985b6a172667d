"""Jobs in a scratch folder: the study's folder gets what it would have without one, and a job never sees it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from longer_study import contents

import studies_in_process
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies import storage as storages
from isoloss.studies.executors import ray as executor
from isoloss.studies.executors import scratch as scratches
from isoloss.studies.executors.scratch import Driver, Scratch
from isoloss.studies.folder import StudyFolder
from isoloss.studies.job import Job, Options
from isoloss.studies.jobs import Jobs
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.spec import load_study
from isoloss.studies.storage import Storage


@pytest.fixture(autouse=True)
def node(tmp_path, monkeypatch):
    """The folder for temporary files of the machine that the jobs run on."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setattr(storages, "_RESERVING", 0.0)
    return tmp_path / "node"


@pytest.fixture
def out(tmp_path):
    """A study's folder with a finished run `a` and the configs."""
    write(
        tmp_path / "out",
        {"study.json": '{"study": "one"}', "configs/a.toml": "a", "runs/a/run.json": "{}", "runs/a/result.json": "{}"},
    )
    write(tmp_path / "out", {"runs/a/log.jsonl": "trained\n", "runs/a/checkpoints/step-1/model": "weights"})
    return tmp_path / "out"


def write(root, contents):
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)  # replaced, as isoloss does: it may be a link to an input
        (root / path).write_text(text)


def read(root):
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def plan(out):
    """A run, two measurements of it, and a run that goes on from it."""
    trained = Unit(name="train a", arguments=("ls",), done=lambda: True, outputs=(out / "runs/a",))
    known = {"arguments": ("eval", str(out / "runs/a")), "done": lambda: False, "after": ("train a",)}
    result = (out / "runs/b/result.json").is_file
    more = Unit(
        name="train b",
        arguments=("train", str(out / "runs/b"), "--config", str(out / "configs/b.toml"), "--steps", "1"),
        done=result,
        outputs=(out / "runs/b",),
        after=("train a",),
    )
    return [trained, Unit(name="loss a", **known), Unit(name="trace a", **known), more]


def driver_of(out, tmp_path, **options):
    jobs = Jobs(plan(out), out, Options(**options))
    return jobs, Driver(str(tmp_path / "storage"), jobs)


def take(jobs, name):
    """Take the job of a unit, however many could start before it."""
    jobs._ready.clear()
    jobs._make_ready(name)
    return jobs.take()


def opened(sent):
    return Scratch(sent, Storage(sent.url))


# --- real commands


@pytest.fixture
def small(tmp_path):
    """A study of two runs, with the files that it should have."""
    file = studies_in_process.write(tmp_path)
    file.write_text(file.read_text().replace("(1, 2, 3)", "(1,)"))
    expected = StudyFolder(load_study(file), tmp_path / "expected")
    made = StudyFolder(load_study(file), tmp_path / "out")
    for folder in (expected, made):
        folder.prepare()
    studies_in_process.carry_out(expected.plan(), expected.path)
    yield made, expected.path
    executor._parent().close()
    executor._parent.cache_clear()


@pytest.mark.slow
def test_commands_that_cannot_see_the_folder_give_the_same_bytes(small, tmp_path, node):
    made, expected = small
    out, hidden = made.path, tmp_path / "hidden"
    jobs = Jobs(made.plan(), out, Options(storage=str(tmp_path / "storage")))
    driver = Driver(jobs.options.storage, jobs)
    while job := jobs.take():
        sent = driver.send(job)
        arguments, environment = job.arguments, job.environment
        out.rename(hidden)
        try:
            status = executor.carry_out_in_scratch(arguments, job.unit.needs, job.log, environment, sent)
            assert not out.exists()
        finally:
            hidden.rename(out)
        driver.receive(job)
        assert status == 0, job.log.read_text()
        jobs.finish(job, status)
        assert f"{node}/" in job.log.read_text()
    assert jobs.num_done == len(jobs.units) == 4
    assert contents(out) == contents(expected)
    logs = {path.relative_to(out): path.read_text().count('"event"') for path in out.glob("runs/*/log.jsonl")}
    assert logs == {
        path.relative_to(expected): path.read_text().count('"event"') for path in expected.glob("runs/*/log.jsonl")
    }
    assert list((tmp_path / "storage").rglob("*attempt*")) == [tmp_path / "storage/attempts"]
    assert not list(out.glob(".tmp-*"))
    assert not list(node.glob("*/*/attempts/*"))


def test_a_node_without_the_storage_says_so(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    sent = driver.send(job)
    (tmp_path / "storage").rename(tmp_path / "elsewhere")
    status = executor.carry_out_in_scratch(job.arguments, job.unit.needs, job.log, job.environment, sent)
    assert status == executor.FOLDER_NOT_FOUND


# --- what goes there and back


def test_a_job_gets_what_it_reads_and_returns_what_it_makes(out, tmp_path):
    write(out, {"runs/c/run.json": "{}", "runs/.b.attempt-1/run.json": "{}", "runs/.b.attempt-1/step-1": "1"})
    write(out, {"runs/.b.attempt-1/result.json": "{}", "runs/.b.attempt-1/log.jsonl": "began\n"})
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    scratch = opened(sent := driver.send(job))
    with scratch.open():
        before = {path: text for path, text in read(scratch.folder).items() if path != ".lock"}
        run = str(scratch.folder / "runs/.b.attempt-1")
        assert tuple(map(scratch.path, job.arguments)) == (
            *("train", run, "--config", str(scratch.folder / "configs/b.toml"), "--steps", "1"),
        )
        write(scratch.folder / "runs/.b.attempt-1", {"step-2": "2", "result.json": "[]", ".tmp-x": "half"})
        (scratch.folder / "runs/.b.attempt-1/step-1").unlink()
        write(scratch.folder, {"logs/train-b.1.log": "trained"})
    assert not scratch.folder.exists()
    given = {path: text for path, text in read(out).items() if path.startswith(("configs", "runs/a", "runs/.b"))}
    given.pop("runs/a/log.jsonl")  # measurements of one run at the same time would all write it
    assert before == given
    as_before = read(out)
    driver.receive(job)
    made = {"run.json": "{}", "step-2": "2", "result.json": "[]", "log.jsonl": "began\n"}
    assert read(out / "runs/.b.attempt-1") == made
    as_before.pop("runs/.b.attempt-1/step-1")
    changes = {f"runs/.b.attempt-1/{path}": text for path, text in made.items()} | {"logs/train-b.1.log": "trained"}
    assert read(out) == as_before | changes
    assert Storage(sent.url).manifest(sent.name) is None
    jobs.finish(job, 0)
    assert read(out / "runs/b") == made
    assert jobs.num_done == 2


def test_measurements_of_one_run_at_the_same_time_are_all_kept(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    work = [take(jobs, "loss a"), take(jobs, "trace a")]
    scratch = [opened(driver.send(job)) for job in work]
    with scratch[0].open(), scratch[1].open():
        for one, name in zip(scratch, ("loss", "trace"), strict=True):
            write(one.folder, {f"runs/a/evaluations/{name}.json": name, "logs/x.log": name})
            files.append_json(one.folder / "runs/a/log.jsonl", name)
    before = read(out)
    for job in work:
        driver.receive(job)
    evaluations = {f"runs/a/evaluations/{name}.json": name for name in ("loss", "trace")}
    log = {"runs/a/log.jsonl": 'trained\n"loss"\n"trace"\n', "logs/x.log": "trace"}
    assert read(out) == before | evaluations | log


def test_what_was_sent_is_not_sent_again(out, tmp_path, monkeypatch):
    jobs, driver = driver_of(out, tmp_path)
    driver.send(take(jobs, "loss a"))
    monkeypatch.setattr(driver.storage, "_upload", None)
    driver.send(take(jobs, "trace a"))


def test_what_ends_with_an_error_is_received_too(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    scratch = opened(driver.send(job))
    with contextlib.suppress(KeyboardInterrupt), scratch.open():
        write(scratch.folder, {"runs/.b.attempt-1/step-1": "1"})
        raise KeyboardInterrupt
    driver.receive(job)
    assert read(out / "runs/.b.attempt-1") == {"step-1": "1"}


def test_a_new_checkpoint_is_pushed_at_once_and_growing_files_with_it(out, tmp_path, monkeypatch):
    monkeypatch.setattr(scratches, "LOOK_SECONDS", 0.0)
    jobs, driver = driver_of(out, tmp_path)
    scratch = opened(sent := driver.send(take(jobs, "train b")))
    run = "runs/.b.attempt-1"
    with scratch.open():
        scratch.push_if_new()
        write(scratch.folder, {f"{run}/metrics.jsonl": "1\n", "logs/b.log": "1"})
        scratch.push_if_new()
        assert driver.storage.manifest(sent.name) is None
        write(scratch.folder, {f"{run}/checkpoints/step-1/model": "1"})
        scratch.push_if_new()
        pushed = driver.storage.manifest(sent.name)
        assert set(pushed) == {f"{run}/metrics.jsonl", "logs/b.log", f"{run}/checkpoints/step-1/model"}
        write(scratch.folder, {f"{run}/metrics.jsonl": "1\n2\n"})
        scratch.push_if_new()
        assert driver.storage.manifest(sent.name) == pushed


def test_a_failed_push_is_tried_again(out, tmp_path, monkeypatch):
    monkeypatch.setattr(scratches, "LOOK_SECONDS", 0.0)
    jobs, driver = driver_of(out, tmp_path)
    scratch = opened(sent := driver.send(take(jobs, "train b")))
    with scratch.open():
        write(scratch.folder, {"runs/.b.attempt-1/step-1": "1"})
        (tmp_path / "storage/attempts").write_text("in the way")
        scratch.push_if_new()
        (tmp_path / "storage/attempts").unlink()
        scratch.push_if_new()
        assert driver.storage.manifest(sent.name)
        (tmp_path / "storage").rename(tmp_path / "elsewhere")
        (tmp_path / "storage").write_text("in the way")
        write(scratch.folder, {"runs/.b.attempt-1/step-2": "2"})
        scratch.push_if_new()
        (tmp_path / "storage").unlink()
        (tmp_path / "elsewhere").rename(tmp_path / "storage")
    assert "runs/.b.attempt-1/step-2" in driver.storage.manifest(sent.name)


# --- whose work counts


def of_a_dead_driver(out, tmp_path, number=1):
    """An attempt whose driver has died before it received anything: its job, and its scratch folder."""
    jobs, driver = driver_of(out, tmp_path)
    unit = jobs.units[-1]
    job = Job(unit, jobs.leases.take(unit.file_name, number), out / f"logs/train-b.{number}.log")
    scratch = opened(driver.send(job))
    with scratch.open():
        name = f"runs/.b.attempt-{number}"
        write(scratch.folder, {f"{name}/run.json": "{}", f"{name}/step-5": "5", f"logs/{job.log.name}": "first"})
    os.utime(job.lease.path, (0, 0))
    return job, scratch


def test_the_next_driver_goes_on_from_what_a_dead_one_did_not_receive(out, tmp_path):
    lost, zombie = of_a_dead_driver(out, tmp_path)
    assert not (out / "runs/.b.attempt-1").exists()
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    assert job.lease.number == 2
    sent = driver.send(job)
    assert read(out / "runs/.b.attempt-2") == {"run.json": "{}", "step-5": "5"}
    assert lost.log.read_text() == "first"
    assert "runs/.b.attempt-2" in sent.inputs
    assert driver.storage.manifest(zombie._job.name) is None
    # the node of the dead driver may still push: nobody takes it for later than what the second attempt has made
    write(zombie.folder, {"runs/.b.attempt-1/step-6": "6"})
    zombie._pulled = {}
    zombie.push()
    scratch = opened(sent)
    with scratch.open():
        write(scratch.folder, {"runs/.b.attempt-2/step-9": "9"})
    driver.receive(job)
    jobs.finish(job, -signal.SIGTERM, stopped=True)
    job = take(jobs, "train b")
    assert job.lease.number == 3
    driver.send(job)
    made = {path: text for path, text in read(out / "runs/.b.attempt-3").items() if path != ".lock"}
    assert made == {"run.json": "{}", "step-5": "5", "step-9": "9"}


def test_what_a_stopped_attempt_pushes_after_its_driver_gave_up_waiting_is_gone_on_from(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    scratch = opened(driver.send(job))
    with scratch.open():
        write(scratch.folder, {"runs/.b.attempt-1/step-5": "5"})
        scratch.push()
        driver.receive(job)
        jobs.finish(job, -signal.SIGTERM, stopped=True)
        write(scratch.folder, {"runs/.b.attempt-1/step-6": "6"})
    jobs, driver = driver_of(out, tmp_path)
    driver.send(take(jobs, "train b"))
    made = {path: text for path, text in read(out / "runs/.b.attempt-2").items() if path != ".lock"}
    assert made == {"step-5": "5", "step-6": "6"}
    assert not list((tmp_path / "storage/attempts").iterdir())


def test_what_a_dead_driver_did_not_receive_does_not_replace_what_got_further(out, tmp_path):
    """The second attempt was made on a machine with the study's folder, and killed."""
    jobs, driver = driver_of(out, tmp_path)
    scratch = opened(driver.send(first := take(jobs, "train b")))
    with scratch.open():
        write(scratch.folder, {"runs/.b.attempt-1/checkpoints/step-5/model": "5"})
    os.utime(first.lease.path, (0, 0))
    second = take(Jobs(plan(out), out, Options()), "train b")
    write(out / "runs/.b.attempt-2", {"checkpoints/step-3/model": "3", "checkpoints/step-9/model": "9"})
    os.utime(second.lease.path, (0, 0))
    jobs, driver = driver_of(out, tmp_path)
    driver.send(take(jobs, "train b"))
    made = {path for path in read(out / "runs/.b.attempt-3") if path != ".lock"}
    assert made == {"checkpoints/step-3/model", "checkpoints/step-9/model"}


def test_what_was_made_is_received_though_the_leases_are_gone(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    scratch = opened(driver.send(job := take(jobs, "train b")))
    with scratch.open():
        shutil.rmtree(out / "leases")
        write(scratch.folder, {"runs/.b.attempt-1/result.json": "{}"})
    driver.receive(job)
    jobs.finish(job, 0)
    assert (out / "runs/b/result.json").is_file()
    assert jobs.is_done(job.unit)


def test_an_attempt_whose_lease_was_deleted_does_not_count(out, tmp_path):
    first, _ = of_a_dead_driver(out, tmp_path)
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "train b")
    first.lease.path.unlink()
    driver.send(job)
    driver.receive(job)
    assert not (out / "runs/.b.attempt-2/step-5").exists()


def test_a_broken_snapshot_of_a_dead_driver_is_named_and_left(out, tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "_PAUSE", 0.0)
    _, zombie = of_a_dead_driver(out, tmp_path)
    for path in (tmp_path / "storage" / zombie._job.name).iterdir():
        path.write_text("broken")
    said = []
    jobs = Jobs(plan(out), out, Options(), say=said.append)
    before = read(out / "runs")
    Driver(str(tmp_path / "storage"), jobs).send(take(jobs, "train b"))
    assert "train b: the files that attempt 1 pushed are not used:" in said[-1]
    assert "is corrupt" in said[-1]
    assert read(out / "runs") == before
    assert not list(out.glob(".tmp-*"))


def test_a_study_that_is_begun_again_does_not_go_on_from_what_was_pushed_before(out, tmp_path):
    of_a_dead_driver(out, tmp_path)
    for path in (out / "leases").iterdir():
        path.unlink()
    time.sleep(1.1)  # a lease says when it began, in seconds
    jobs, driver = driver_of(out, tmp_path)
    jobs.leases.take("train-b", 1)
    os.utime(out / "leases/train-b.1.json", (0, 0))
    jobs.refresh()
    driver.send(take(jobs, "train b"))
    assert not (out / "runs/.b.attempt-2").exists()


def test_nothing_is_received_of_an_attempt_that_was_taken_over(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "loss a")
    scratch = opened(driver.send(job))
    with scratch.open():
        write(scratch.folder, {"runs/a/evaluations/loss.json": "1"})
    jobs.leases.take("loss-a", 2)
    before = read(out)
    driver.receive(job)
    assert read(out) == before


def test_what_cannot_be_received_whole_is_received_again(out, tmp_path, monkeypatch):
    jobs, driver = driver_of(out, tmp_path)
    job = take(jobs, "loss a")
    scratch = opened(driver.send(job))
    with scratch.open():
        write(scratch.folder, {"runs/a/evaluations/loss.json": "1", "runs/a/evaluations/loss.safetensors": "2"})
        write(scratch.folder, {"runs/a/log.jsonl": "measured\n"})
    put, placed = scratches._put, []

    def full(source, target):
        if placed:
            raise OSError(28, "No space left on device")
        placed.append(target.name)
        put(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(scratches, "_put", full)
        with pytest.raises(IsolossError, match=f"cannot write in {out}: No space left on device"):
            driver.receive(job)
    assert placed == ["loss.safetensors"]
    assert not list(out.glob(".tmp-*"))
    driver.receive(job)
    assert read(out / "runs/a/evaluations") == {"loss.json": "1", "loss.safetensors": "2"}
    assert (out / "runs/a/log.jsonl").read_text() == "trained\nmeasured\n"


# --- the machine of a job

HOLD = """
import sys, tempfile, time
from isoloss.studies.executors.scratch import ScratchJob, Scratch
from isoloss.studies.storage import Storage
tempfile.tempdir = sys.argv[1]
job = ScratchJob(*sys.argv[2:4], ("configs", "runs/a"), "attempts/held.1-x", ())
with Scratch(job, Storage(job.url)).open():
    print("held", flush=True)
    time.sleep(600)
"""


def test_folders_of_killed_jobs_and_unused_inputs_are_deleted_and_no_others(out, tmp_path, node, monkeypatch):
    jobs, driver = driver_of(out, tmp_path)
    scratch = opened(sent := driver.send(take(jobs, "loss a")))
    words = (sys.executable, "-c", HOLD, node, sent.url, sent.root)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        held = scratch.folder.with_name("held.1-x")
        objects = held.parent.parent / "objects"
        unused = objects / ("0" * 64)
        unused.write_text("unused")
        for _ in range(2):
            with scratch.open():
                assert held.is_dir()
                assert unused.exists()
                model = "runs/a/checkpoints/step-1/model"
                assert (scratch.folder / model).samefile(held / model)  # pulled once
        other.kill()
    monkeypatch.setattr(scratches, "KEPT_SECONDS", 0.0)
    time.sleep(0.05)
    with scratch.open():
        assert not held.exists()
        assert not unused.exists()
        assert read(scratch.folder / "runs/a") == {k: v for k, v in read(out / "runs/a").items() if k != "log.jsonl"}


def test_a_run_outside_the_study_is_refused(out, tmp_path):
    unit = Unit(name="x", arguments=(), done=lambda: False, outputs=(tmp_path / "elsewhere",))
    jobs = Jobs([unit], out, Options())
    driver = Driver(str(tmp_path / "storage"), jobs)
    with pytest.raises(IsolossError, match=f"elsewhere.attempt-1 is outside {out}"):
        driver.send(jobs.take())


@pytest.mark.parametrize("place", ["out", "out/runs", "out/../out", "link", "."])
def test_a_storage_that_overlaps_with_the_folder_is_refused_and_left_alone(out, tmp_path, place):
    (tmp_path / "link").symlink_to(out)
    before = read(out)
    with pytest.raises(IsolossError, match=r"the same or one inside the other: choose another --storage"):
        Driver(str(tmp_path / place), Jobs(plan(out), out, Options()))
    assert read(out) == before


def test_the_storage_of_another_study_is_refused_and_left_alone(out, tmp_path):
    jobs, driver = driver_of(out, tmp_path)
    driver.send(take(jobs, "loss a"))
    before = read(tmp_path / "storage")
    assert {"configs.json", "runs/a.json"} <= before.keys()
    write(tmp_path / "same plan", {"study.json": '{"study":"one"}'})
    driver_of(tmp_path / "same plan", tmp_path)
    write(tmp_path / "other", {"study.json": '{"study": "other"}'})
    with pytest.raises(IsolossError, match="storage holds the files of another study: give each study a --storage"):
        driver_of(tmp_path / "other", tmp_path)
    assert read(tmp_path / "storage") == before


def test_a_unit_of_several_nodes_is_refused(out, tmp_path):
    unit = Unit(name="large", arguments=(), done=lambda: False, needs=Resources(processes=4, nodes=2))
    with pytest.raises(IsolossError, match="unit 'large' needs 2 nodes, which must share the study's folder"):
        Driver(str(tmp_path / "storage"), Jobs([unit], out, Options()))
