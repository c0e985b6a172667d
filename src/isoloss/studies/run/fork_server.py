"""Commands that start at once: each is forked from a process that has already imported everything.

`python -m isoloss.studies.executors.warm LIFELINE` reads commands from standard input and reports on standard output
when they start and end, one JSON document per line. Each command is a fork that does what `python -m isoloss` does. Its
standard input is the pipe LIFELINE, to which nobody writes: it closes when the process that holds its other end ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources

# what training and evaluation need. With one OpenMP thread, these imports start no threads; a fork of a process with
# threads could hang
PRELOADED = (
    "isoloss.cli.train",
    "isoloss.cli.eval",
    "isoloss.evaluation.evaluator",
    "isoloss.evaluation.loss",
    "isoloss.evaluation.measures.flatness",
    "isoloss.evaluation.measures.loss",
    "isoloss.evaluation.measures.transfer",
    "isoloss.evaluation.pretraining",
    "isoloss.evaluation.context",
    "isoloss.flatness._rescaling.families",
    "isoloss.flatness.minimal_trace",
    "isoloss.languages.hmm.language",
    "isoloss.languages.pcfg.language",
    "isoloss.languages.pcfg.numba_kernels",
    "isoloss.models.architectures",
    "isoloss.models.bert",
    "isoloss.models.expansion",
    "isoloss.models.compiled_bert",
    "isoloss.training.trainer",
    "isoloss.transfer.probe",
    "isoloss.transfer.tasks",
    "transformers.models.bert.modeling_bert",
)
EXIT_WITH_STDIN = {"ISOLOSS_EXIT_WITH_STDIN": "1"}  # in the environment of every command
_REAP_SECONDS = 0.05
_NOTHING: Mapping[str, str] = MappingProxyType({})

IS_AVAILABLE = sys.platform == "linux"  # elsewhere, libraries that torch links to do not survive a fork


def can_fork(arguments: Sequence[str], needs: Resources) -> bool:
    """Whether a command is to be forked: it trains or measures, and uses no GPUs and one thread.

    GPUs and threads must not have been used before a fork. Other subcommands import little, so waiting for all imports
    would make them slower.
    """
    one_thread = needs.cores == needs.processes == 1 and not needs.gpus
    return IS_AVAILABLE and one_thread and bool(arguments) and arguments[0] in ("train", "eval")


class WarmProcess:
    """The executor's side of the process from which units are forked."""

    def __init__(self) -> None:
        lifeline, self._held = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "isoloss.studies.executors.warm", str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lifeline],
            env={**os.environ, "OMP_NUM_THREADS": "1", **EXIT_WITH_STDIN},
            start_new_session=True,  # so that Ctrl-C reaches only the executor, which passes it on
        )
        os.close(lifeline)
        self._statuses: dict[int, int] = {}
        self._buffer = b""

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] = _NOTHING) -> WarmCommand:
        """Start an `isoloss` command, with its output in `log` and further variables in its environment."""
        assert self._process.stdin is not None
        try:
            command = {"arguments": list(arguments), "log": str(log), "environment": dict(environment)}
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise IsolossError(_GONE) from None
        while True:
            for document in self._read(None):
                if "started" in document:
                    return WarmCommand(self, document["started"])

    def status(self, pid: int) -> int | None:
        """Return the exit status of a command, once; None while it runs."""
        self._read(0.0)
        return self._statuses.pop(pid, None)  # a later command may get the same process id

    def close(self) -> None:
        """End the process and all its commands."""
        os.close(self._held)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended before
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self, seconds: float | None) -> list[dict[str, int]]:
        """Return what the process has reported, after waiting at most `seconds`; None: until it reports something."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        documents = []
        while select.select([file], [], [], seconds)[0]:
            if not (more := os.read(file, 1 << 16)):
                raise IsolossError(_GONE)
            *lines, self._buffer = (self._buffer + more).split(b"\n")
            for document in map(json.loads, lines):
                documents.append(document)
                if "ended" in document:
                    self._statuses[document["ended"]] = document["status"]
            seconds = 0.0
        return documents


@dataclass
class WarmCommand:
    """A started command, with the methods of `subprocess.Popen` that an executor needs."""

    parent: WarmProcess
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self.parent.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("isoloss", timeout)
            time.sleep(_REAP_SECONDS)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


_GONE = "the process from which units are forked has ended: run the study again"


def serve(lifeline: int) -> NoReturn:
    """Fork a process for every command on standard input, until standard input is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    running: set[int] = set()
    buffer = b""
    while True:
        if select.select([0], [], [], _REAP_SECONDS)[0]:
            if not (more := os.read(0, 1 << 16)):
                os._exit(0)  # at once, without the exit handlers of the imported libraries
            *lines, buffer = (buffer + more).split(b"\n")
            for document in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    os.environ.update(document["environment"])
                    _become(document["arguments"], document["log"], lifeline)
                running.add(pid)
                _say(started=pid)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _say(ended=pid, status=os.waitstatus_to_exitcode(status))


def _become(arguments: Sequence[str], log: str, lifeline: int) -> None:
    """Run `python -m isoloss` with these arguments in the forked process, then exit."""
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target, source in ((0, lifeline), (1, file), (2, file)):
            os.dup2(source, target)
        sys.argv = ["isoloss", *arguments]
        runpy.run_module("isoloss", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _say(**document: int) -> None:
    os.write(1, json.dumps(document).encode() + b"\n")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
