"""What training borrows from its process and gives back: threads, random state, signal handlers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from isoloss import interrupts
from isoloss.machine import disable_malloc_trim, trim_malloc


@contextlib.contextmanager
def process_settings(threads: int, device: torch.device, *, compiled: bool = False) -> Iterator[None]:
    """Train with `threads` threads on `device`; leave the process's threads, device and random state as they were.

    The compiled step has one thread. The memory of what was freed within is given back to the system.
    """
    before = torch.get_num_threads()
    is_cuda = device.type == "cuda"
    # empty for a CPU: given None, `fork_rng` would keep the random state of every GPU that there is
    devices = [torch.cuda.current_device() if device.index is None else device.index] if is_cuda else []
    if threads or compiled:
        torch.set_num_threads(1 if compiled else threads)
    disable_malloc_trim()
    try:
        with (
            torch.cuda.device(devices[0]) if is_cuda else contextlib.nullcontext(),
            torch.random.fork_rng(devices),
            _one_blas_thread() if compiled else contextlib.nullcontext(),
        ):
            yield
    finally:
        torch.set_num_threads(before)
        trim_malloc()


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Let the matrix products of compiled loops, which are SciPy's, have one thread."""
    import scipy.linalg.cython_blas  # noqa: F401  (what is not loaded is not limited)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of `device`, which dropout draws from.

    On a CPU, `torch.manual_seed` would also keep a call with its stack trace for every kind of GPU: 0.8 ms, each step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C or SIGTERM came; the second one is handled as if this were not here.

    A signal that the process ignores stays ignored. Outside the main thread, where Python allows no handlers, no
    signal is caught.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # None stands for a handler that is not Python's: it could not be put back
    previous = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, _frame: Any) -> None:
        interrupts.note(number)
        received.append(number)
        # the second signal is not ours: it stops the process at once
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        restore()
