"""The numbers of metrics.jsonl in TensorBoard's files."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from isoloss.runs import Run

_logger = logging.getLogger(__name__)


class TensorBoard:
    """Event files in the folder `tensorboard` of a run, one scalar a number.

    Whenever a process begins to train, they are written anew from metrics.jsonl, so that they have no step twice.
    Nothing that happens here stops a run or changes it: an exception is noted in log.jsonl and by a warning of Python's
    logger `isoloss`, and nothing more is written until the run is trained again.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._writer: Any = None
        lines = run.metrics()
        with self._protected():
            from torch.utils.tensorboard import SummaryWriter

            folder = run.path / "tensorboard"
            shutil.rmtree(folder, ignore_errors=True)
            self._writer = SummaryWriter(str(folder))
        for line in lines:
            self.log(line)

    def log(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one line of metrics.jsonl."""
        with self._protected():
            for name, value in line.items() if self._writer is not None else ():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Write everything that is left."""
        with self._protected():
            if self._writer is not None:
                self._writer.close()

    @contextlib.contextmanager
    def _protected(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                yield
        except Exception as error:  # but not Ctrl-C, which is for training
            self._writer = None
            self._run.log("tensorboard failed", error=f"{type(error).__name__}: {error}")
            _logger.warning("TensorBoard failed and gets nothing from here on: %s", error)
