"""Loggers, which get the lines of metrics.jsonl too: TensorBoard, trackio, Weights & Biases.

The file is the truth. A logger starts again from its lines whenever a process begins to train, so that it has no step
twice, and nothing that happens in a logger stops a run or changes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from isoloss import config as configs
from isoloss.runs import Run

PROJECT = "isoloss"

_logger = logging.getLogger(__name__)


class Logger(NamedTuple):
    """Where the numbers of a run go: `log` takes a step and its numbers, `close` writes everything that is left."""

    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


def run_label(run: Run) -> str:
    """Return what a run is called among all runs: its name and a hash of its path."""
    return f"{run.name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


def _tensorboard(run: Run) -> Logger:
    """Event files in the folder `tensorboard` of the run, one scalar a number."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard"
    # the lines of earlier processes come again, from metrics.jsonl
    shutil.rmtree(folder, ignore_errors=True)
    writer: Any = SummaryWriter(str(folder))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Logger(log, writer.close)


def _trackio(run: Run) -> Logger:
    """A run of trackio's project `isoloss`, in trackio's own folder (TRACKIO_DIR)."""
    import trackio

    name = run_label(run)
    with contextlib.suppress(ValueError):  # the project is new
        for earlier in trackio.Api().runs(PROJECT):
            if earlier.name == name:
                earlier.delete()
    opened: Any = trackio.init(project=PROJECT, name=name, config=configs.to_dict(run.config), embed=False)
    # the module's own finish, or it prints once more when the process ends
    return Logger(lambda step, values: opened.log(dict(values), step=step), trackio.finish)


def _wandb(run: Run) -> Logger:
    """A run of the W&B project `isoloss`; offline, in the folder `wandb` of the run, where there is no API key."""
    import wandb

    shutil.rmtree(run.path / "wandb", ignore_errors=True)
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    opened: Any = wandb.init(
        project=PROJECT,
        id=run_label(run),
        name=run.name,
        dir=str(run.path),
        config=configs.to_dict(run.config),
        resume=None if mode == "offline" else "allow",
        mode=mode,
        settings=wandb.Settings(silent=True, console="off"),
    )
    return Logger(lambda step, values: opened.log(dict(values), step=step), opened.finish)


LOGGERS: dict[str, Callable[[Run], Logger]] = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}


class Loggers:
    """The loggers of a run, each started with the lines that metrics.jsonl has.

    An exception in one of them is noted in log.jsonl and by a warning of Python's logger `isoloss`, and the logger gets
    nothing from then on; training the run again starts it afresh. What a logger prints is discarded.
    """

    def __init__(self, names: Sequence[str], run: Run) -> None:
        self._run, self._open = run, dict[str, Logger]()
        lines = run.metrics()
        for name in names:
            with self._protected(name):
                self._open[name] = LOGGERS[name](run)
                for line in lines:
                    self._open[name].log(*_numbers(line))

    def log(self, line: Mapping[str, Any]) -> None:
        """Log one line."""
        # over a copy, as a logger that fails is taken out of the dictionary
        for name, logger in list(self._open.items()):
            with self._protected(name):
                logger.log(*_numbers(line))

    def close(self) -> None:
        """Let every logger write everything that is left."""
        for name, logger in list(self._open.items()):
            with self._protected(name):
                logger.close()
        self._open.clear()

    @contextlib.contextmanager
    def _protected(self, name: str) -> Iterator[None]:
        """Keep the run safe from what happens inside."""
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        except Exception as error:  # but not Ctrl-C, which is for training
            self._open.pop(name, None)
            self._run.log("logger failed", logger=name, error=f"{type(error).__name__}: {error}")
            _logger.warning("the logger %s failed and is left out from here on: %s", name, error)


def _numbers(line: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the step of a line of metrics.jsonl, and the numbers in it."""
    values = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    return int(line["step"]), values
