"""TensorBoard's files, read back by its own reader, and that nothing that happens there reaches the run."""

import json
import sys
import types

import pytest
from running import Signalling, content, small
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.training.train import Interrupted, train
from isoloss.runs import Run

MIRRORED = ("loss_nats", "learning_rate", "grad_norm")


def trained(path, language=None, **changes):
    run = Run(path)
    train(run, small(**changes), language or PairLanguage())
    return run


def test_tensorboard_has_every_step_once(tmp_path):
    """Also where a line was logged whose step is trained again."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(Interrupted):
        trained(tmp_path, Signalling({6}), tensorboard=True, log_every=2)
    run = trained(tmp_path, tensorboard=True, log_every=2)
    events = reader.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(MIRRORED)
    for tag in MIRRORED:
        found, lines = events.Scalars(tag), run.metrics()
        assert [event.step for event in found] == [line["step"] for line in lines]
        assert [event.value for event in found] == pytest.approx([line[tag] for line in lines], rel=1e-6)
    assert len(list((run.path / "tensorboard").iterdir())) == 1


class Failing:
    """A writer that fails to open, at a step, or to close, and prints."""

    def __init__(self, when):
        self.when, self.calls = when, []

    def __call__(self, folder):
        print("a banner")
        self.note("open")
        return self

    def add_scalar(self, name, value, step):
        if name == "loss_nats":
            self.note(step)

    def close(self):
        self.note("close")

    def note(self, moment):
        self.calls.append(moment)
        if moment == self.when:
            raise RuntimeError(f"no {moment}")


@pytest.fixture
def install(monkeypatch):
    """Put a writer in the place of TensorBoard's, as if its package were installed."""

    def installed(writer):
        monkeypatch.setattr("isoloss.lab.training.train.require_package", lambda name: None)
        module = types.ModuleType("torch.utils.tensorboard")
        module.SummaryWriter = writer
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        return writer

    return installed


@pytest.mark.parametrize(
    ("when", "calls"),
    [
        ("open", ["open"]),
        (8, ["open", 4, 8]),
        ("close", ["open", 4, 8, 10, "close"]),
        (None, ["open", 4, 8, 10, "close"]),
    ],
)
def test_a_failure_is_noted_and_changes_nothing(tmp_path, install, capsys, caplog, when, calls):
    writer = install(Failing(when))
    run = trained(tmp_path / "logged", tensorboard=True)
    assert content(run) == content(trained(tmp_path / "alone"))
    assert writer.calls == calls
    events = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    failed = [event["error"] for event in events if event["event"] == "tensorboard failed"]
    assert failed == [f"RuntimeError: no {when}"] * (when is not None)
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"TensorBoard failed and gets nothing from here on: no {when}"] * (when is not None)
    assert capsys.readouterr().out == ""


def test_it_is_closed_when_training_ends_by_an_error(tmp_path, install):
    writer = install(Failing(None))
    with pytest.raises(Interrupted):
        trained(tmp_path, Signalling({5}), tensorboard=True)
    assert writer.calls == ["open", 4, "close"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").mkdir()  # a folder of the name is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if "site-packages" not in place)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    with pytest.raises(
        IsolossError, match=r"this needs tensorboard, which is not installed: pip install 'isoloss\[ten"
    ):
        trained(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
