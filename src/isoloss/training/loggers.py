"""Mirrors of metrics.jsonl where others look at it: TensorBoard, trackio, Weights & Biases.

The file is the truth. A mirror is begun anew from its lines whenever a process begins to train, so that no step is in
it twice, and nothing that happens to a mirror stops a run or changes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.runs import Run

PROJECT = "isoloss"

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One mirror."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the numbers of a step."""
        ...

    def close(self) -> None:
        """Bring everything to its place."""
        ...


def label(run: Run) -> str:
    """Return what a run is called where all runs are together: its name and a hash of where it is."""
    return f"{run.name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:8]}"


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar a number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class Trackio:
    """A run of trackio's project `isoloss`, in trackio's own folder (TRACKIO_DIR)."""

    def __init__(self, run: Run) -> None:
        import trackio

        name = label(run)
        with contextlib.suppress(ValueError):  # the project is new
            for earlier in trackio.Api().runs(PROJECT):
                if earlier.name == name:
                    earlier.delete()
        self._trackio: Any = trackio
        self._run: Any = trackio.init(project=PROJECT, name=name, config=configs.to_dict(run.config), embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the numbers over."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until all are stored."""
        self._trackio.finish()  # the module's, or it prints once more when the process ends


class Wandb:
    """A run of the W&B project `isoloss`; offline, in the folder `wandb` of the run, where there is no API key."""

    def __init__(self, run: Run) -> None:
        import wandb

        shutil.rmtree(run.path / "wandb", ignore_errors=True)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        self._run: Any = wandb.init(
            project=PROJECT,
            id=label(run),
            name=run.name,
            dir=str(run.path),
            config=configs.to_dict(run.config),
            resume=None if mode == "offline" else "allow",
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the numbers over; W&B leaves out steps that it has."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until all are stored."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Run], Tracker]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}


def validate(names: Sequence[str]) -> None:
    """Raise an `IsolossError` for a name that is no tracker's or is there twice, and for a missing package."""
    for name in names:
        if name not in TRACKERS:
            raise IsolossError(f"there is no tracker {name!r}; the trackers are {', '.join(TRACKERS)}")
        if list(names).count(name) > 1:
            raise IsolossError(f"the tracker {name} is named twice")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a folder of that name, which W&B makes
            raise IsolossError(f"the tracker {name} needs the package {name}: pip install 'isoloss[{name}]'")


class Mirrors:
    """The mirrors of a run, each begun with the lines that metrics.jsonl has.

    An exception in one of them is noted in log.jsonl and by a warning of the logger `isoloss`, and the mirror is left
    alone from then on; it can be made whole by training the run again. What a tracker prints is thrown away.

    Args:
        names: Of `TRACKERS`.
        run: Whose metrics.jsonl is mirrored; run.json must be there.
    """

    def __init__(self, names: Sequence[str], run: Run) -> None:
        self._run, self._open = run, dict[str, Tracker]()
        lines = run.metrics()
        for name in names:
            with self._protected(name):
                self._open[name] = TRACKERS[name](run)
                for line in lines:
                    self._open[name].log(*_numbers(line))

    def log(self, line: Mapping[str, Any]) -> None:
        """Mirror one line."""
        for name, tracker in list(self._open.items()):
            with self._protected(name):
                tracker.log(*_numbers(line))

    def close(self) -> None:
        """Bring everything to its place."""
        for name, tracker in list(self._open.items()):
            with self._protected(name):
                tracker.close()
        self._open.clear()

    @contextlib.contextmanager
    def _protected(self, name: str) -> Iterator[None]:
        """Keep the run safe from what happens inside."""
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            self._open.pop(name, None)
            self._run.log("tracker failed", tracker=name, error=f"{type(error).__name__}: {error}")
            _logger.warning("the tracker %s failed and is left out from here on: %s", name, error)


def _numbers(line: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the step of a line of metrics.jsonl, and the numbers in it."""
    values = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    return int(line["step"]), values
