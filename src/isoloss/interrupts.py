"""Ctrl-C and SIGTERM: a command ends in the same way on both, and its exit status says on which."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

_received: list[int] = []


def note(number: int) -> None:
    """Remember that the signal `number` came."""
    _received.append(number)


def clear() -> None:
    """Forget the signals that came."""
    _received.clear()


def status() -> int:
    """Return the exit status of a command that was interrupted, as shells report it: 128 and the signal's number."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def raise_on_sigterm() -> None:
    """Let the first SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, so that what is open is closed.

    The second one ends the process at once. Where SIGTERM is ignored or handled already, it stays so. Python only
    prints an exception raised in a finalizer, such as `__del__`: a `KeyboardInterrupt` lost in this way, on Ctrl-C
    too, is raised again.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def end(number: int, _frame: FrameType | None) -> None:
        note(number)
        # Python's handlers run only between bytecodes: the system's own also ends a process that hangs in a write
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    as_before = sys.unraisablehook

    def raise_again(lost: Any) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            as_before(lost)
            return
        number = status() - 128
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, end)
        # a moment later: raised from here, it would be lost as well
        threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, number]).start()

    signal.signal(signal.SIGTERM, end)
    sys.unraisablehook = raise_again
