"""What of a training run depends on the time: when to report, when to save, and the throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REPORT_SECONDS = 1.0  # between two calls of `progress`


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps made, those of earlier processes included.
        steps: Steps of the whole run.
        loss_nats: Mean loss of the steps since the last report.
        tokens_per_second: Over this process's steps; padding is not counted.
        seconds: Since this process began to train.
    """

    step: int
    steps: int
    loss_nats: float
    tokens_per_second: float
    seconds: float


class Timing:
    """Decides by the time when to report and when to save, and measures the throughput."""

    def __init__(self, step: int, steps: int, progress: Callable[[Progress], None] | None) -> None:
        self._step, self._steps, self._progress = step, steps, progress
        self._start = self._reported = self._saved = time.monotonic()
        self._num_tokens, self._loss_sum, self._loss_count = 0, 0.0, 0

    def tick(self, step: int, loss_nats: float, num_tokens: int) -> None:
        """Count a step, and report if it is time."""
        self._step = step
        self._num_tokens += num_tokens
        self._loss_sum += loss_nats
        self._loss_count += 1
        self.report()

    def report(self, *, last: bool = False) -> None:
        """Call `progress` if it is time, or if this is the `last` call and there are steps it does not know of."""
        now = time.monotonic()
        if self._progress is None or self._loss_count == 0 or not (last or now - self._reported >= REPORT_SECONDS):
            return
        loss_nats = self._loss_sum / self._loss_count
        self._loss_sum, self._loss_count, self._reported = 0.0, 0, now
        self._progress(Progress(self._step, self._steps, loss_nats, self.tokens_per_second(), self.seconds()))

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def tokens_per_second(self) -> float:
        """Tokens seen since the start, by its seconds."""
        return self._num_tokens / max(self.seconds(), 1e-9)

    def save_is_due(self, every_seconds: float) -> bool:
        """Whether the last save was `every_seconds` ago."""
        return time.monotonic() - self._saved >= every_seconds

    def saved(self) -> None:
        """Note that a checkpoint was written."""
        self._saved = time.monotonic()
