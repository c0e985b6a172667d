"""Commands that start at once: each is forked from a process that has already imported everything.

This is the fork server of `multiprocessing`, which imports `isoloss.studies.run.preloaded` before it forks the first
command. When the process that starts commands ends, however it ends, so do they: their standard input is a pipe whose
other end it holds, and an `isoloss` command with `ISOLOSS_EXIT_WITH_STDIN` ends when that closes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources
from isoloss.studies.run.attempt import command

_STARTS = 3
_SERVER_KILLED = 255  # the exit status that multiprocessing gives a process whose fork server was killed
_CONTEXT = multiprocessing.get_context("forkserver")


def can_fork(arguments: Sequence[str], needs: Resources) -> bool:
    """Whether a command goes on in the forked process instead of starting Python again.

    It trains or measures, and uses no GPUs and one thread, as GPUs and threads must not have been used before a fork.
    Outside Linux, libraries that torch links to do not survive a fork.
    """
    one_thread = needs.cores == needs.processes == 1 and not needs.gpus
    return sys.platform == "linux" and one_thread and bool(arguments) and arguments[0] in ("train", "measure", "suite")


def preload(arguments: Sequence[str], needs: Resources) -> None:
    """If this command is to go on in the forked process, let the server import what it needs when it is started."""
    if can_fork(arguments, needs):
        _CONTEXT.set_forkserver_preload(["isoloss.studies.run.preloaded"])


def start(arguments: Sequence[str], needs: Resources, log: Path, environment: Mapping[str, str]) -> ForkServerProcess:
    """Start an `isoloss` command, with its output in `log` and further variables in its environment."""
    # the fork server keeps the environment that it was started with, so all variables are sent along
    variables = {**os.environ, **environment, "ISOLOSS_EXIT_WITH_STDIN": "1"}
    words = [] if can_fork(arguments, needs) else command(arguments, needs)
    main = sys.modules["__main__"]
    # multiprocessing would import the caller's main script in the new process
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        for _ in range(_STARTS):
            process = _CONTEXT.Process(target=_become, args=(list(arguments), words, str(log), variables))
            # the server was killed just now: the next start starts a new one
            with contextlib.suppress(EOFError, ConnectionError):
                process.start()
                return process
            time.sleep(1)  # a process that was killed takes a moment to end, and until then it is taken for the server
    finally:
        sys.modules["__main__"] = main
    raise IsolossError(
        f"the fork server, the process that starts units, was killed {_STARTS} times in a row: is memory short?"
    )


def is_lost(process: ForkServerProcess) -> bool:
    """Whether a command outlived its fork server, so that its exit status would be lost.

    The command is then killed; the unit can be started again from its files.
    """
    if process.exitcode != _SERVER_KILLED or process.pid is None:
        return False
    try:
        # the server waits for the commands that end while it lives: this one has not
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _become(arguments: list[str], words: list[str], log: str, environment: dict[str, str]) -> None:
    """Become the command: `words` if there are any, else `isoloss` with these arguments, in this process."""
    # in a session of its own: Ctrl-C in the terminal reaches only the executor, which passes it on once
    os.setsid()
    executor = multiprocessing.parent_process()
    assert executor is not None
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    # standard input is the pipe of `multiprocessing` whose other end the executor holds: it closes when that ends
    for target, source in ((0, executor.sentinel), (1, file), (2, file)):
        os.dup2(source, target)
    if words:
        os.execve(words[0], words, environment)  # noqa: S606
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["isoloss", *arguments]
    runpy.run_module("isoloss", run_name="__main__", alter_sys=True)
