"""The loggers, read back by their own readers, and that nothing in them reaches the run."""

import json
import struct
import sys

import pytest
from running import Signalling, content, small
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.training import loggers
from isoloss.lab.training.train import Interrupted, train
from isoloss.runs import Run

MIRRORED = ("loss_nats", "learning_rate", "grad_norm")


def trained(path, language=None, **changes):
    run = Run(path)
    train(run, small(**changes), language or PairLanguage())
    return run


def interrupted_and_resumed(path, name):
    """Interrupt a run at its 6th step, log a line that is trained again, and complete it."""
    with pytest.raises(Interrupted):
        trained(path, Signalling({6}), loggers=(name,), log_every=2)
    return trained(path, loggers=(name,), log_every=2)


def expected(run):
    return {tag: [(line["step"], line[tag]) for line in run.metrics()] for tag in MIRRORED}


def check(found, run):
    """Fail unless each number is there once a step, to float32."""
    for tag, points in expected(run).items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points], rel=1e-6)


# --- each logger


def test_tensorboard_has_every_step_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = interrupted_and_resumed(tmp_path / "run", "tensorboard")
    events = reader.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(MIRRORED)
    check({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in MIRRORED}, run)
    assert len(list((run.path / "tensorboard").iterdir())) == 1


def test_trackio_has_every_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported, which is only here
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = interrupted_and_resumed(tmp_path / "run", "trackio")
    (record,) = [r for r in SQLiteStorage.get_run_records("isoloss") if r["name"] == loggers.run_label(run)]
    logs = SQLiteStorage.get_logs("isoloss", record["name"], run_id=record["id"])
    check({tag: [(entry["step"], entry[tag]) for entry in logs] for tag in MIRRORED}, run)


def test_wandb_offline_has_every_step_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = interrupted_and_resumed(tmp_path / "run", "wandb")
    wandb.teardown()  # what W&B does when a process ends: its service writes what it holds
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    rows = [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in wandb_rows(file)]
    check({tag: [(row["_step"], row[tag]) for row in rows] for tag in MIRRORED}, run)


def wandb_rows(file):
    """Yield the items of the history records of a .wandb file: LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its end
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                yield record.history.item


# --- whatever happens, the run is the same


class Failing:
    """Fails to open, at a step, or to close, and prints."""

    def __init__(self, when):
        self.when, self.calls = when, 0

    def __call__(self, run):
        print("a banner")
        self.fail("open")
        return self

    def log(self, step, values):
        self.fail(step)

    def close(self):
        self.fail("close")

    def fail(self, moment):
        self.calls += 1
        if moment == self.when:
            raise RuntimeError(f"no {moment}")


@pytest.fixture
def install(monkeypatch):
    """Put a logger in the place of TensorBoard's, as if its package were installed."""

    def installed(logger):
        monkeypatch.setattr("isoloss.lab.training.train.require_package", lambda name: None)
        monkeypatch.setitem(loggers.LOGGERS, "tensorboard", logger)
        return logger

    return installed


@pytest.mark.parametrize(("when", "calls"), [("open", 1), (8, 3), ("close", 5), ("never", 5)])
def test_a_logger_that_fails_is_noted_and_changes_nothing(tmp_path, install, capsys, caplog, when, calls):
    logger = install(Failing(when))
    run = trained(tmp_path / "logged", loggers=("tensorboard",))
    assert content(run) == content(trained(tmp_path / "alone"))
    assert logger.calls == calls  # opened, 3 lines and closed, unless it failed before
    events = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["event"] == "logger failed"]
    if when == "never":
        assert not failed
        assert not caplog.records
    else:
        assert failed == [{"event": "logger failed", "logger": "tensorboard", "error": f"RuntimeError: no {when}"}]
        assert [r.getMessage() for r in caplog.records] == [
            f"the logger tensorboard failed and is left out from here on: no {when}"
        ]
    assert capsys.readouterr().out == ""


def test_a_logger_is_closed_when_training_ends_by_an_error(tmp_path, install):
    logger = install(Failing("never"))
    with pytest.raises(Interrupted):
        trained(tmp_path / "run", Signalling({5}), loggers=("tensorboard",))
    assert logger.calls == 3  # opened, one line, closed


def test_only_numbers_are_logged():
    line = {"step": 3, "loss_nats": 1.5, "grad_norm": None, "name": "x", "count": 2}
    assert loggers._numbers(line) == (3, {"loss_nats": 1.5, "count": 2})


# --- what is refused


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("mlflow",), "loggers is 'mlflow'; it must be one of tensorboard, trackio, wandb"),
        (("tensorboard", "tensorboard"), "loggers is tensorboard, tensorboard; name each once"),
    ],
)
def test_bad_names_are_refused(tmp_path, names, message):
    with pytest.raises(IsolossError, match=message):
        trained(tmp_path / "run", loggers=names)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # a folder of the name, which W&B makes, is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if "site-packages" not in place)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(IsolossError, match=r"this needs wandb, which is not installed: pip install 'isoloss\[wandb\]'"):
        trained(tmp_path / "run", loggers=("wandb",))
    assert not (tmp_path / "run").exists()
