"""What training borrows from its process and gives back: threads, random state, signal handlers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def process_settings(threads: int, device: torch.device) -> Iterator[None]:
    """Train with `threads` threads, and leave the process's threads and random state as they were."""
    before = torch.get_num_threads()
    devices = [device.index or 0] if device.type == "cuda" else []
    if threads:
        torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C or SIGTERM came; the second one is handled as if this were not here.

    A signal that the process ignores stays ignored, and outside the main thread, where Python allows no handlers, none
    is caught.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, _frame: Any) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        restore()
