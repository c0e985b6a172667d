"""The local executor: runs a plan with a few worker processes on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies.executors import warm
from isoloss.studies.executors.warm import WarmCommand, WarmProcess
from isoloss.studies.plan import Unit, check

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 30.0
GRACE_SECONDS = 60.0  # for workers to save after an interrupt


@dataclass
class _Worker:
    unit: Unit
    process: subprocess.Popen[bytes] | WarmCommand
    log: Path
    start: float


def run(
    units: Sequence[Unit],
    *,
    workers: int,
    logs: Path,
    say: Callable[[str], None],
    on_done: Callable[[Unit], None] = lambda _: None,
) -> int:
    """Run the units of the plan that are not done yet, and return how many were run.

    Each unit is a process of its own with one thread; on Linux it is forked from a process that has already imported
    everything (`isoloss.studies.executors.warm`). If this process ends, however it ends, so do they, and the commands
    resume from their files. After a unit fails, no other starts; the running ones are finished first.

    Args:
        units: The plan; the first unit that can start does.
        workers: Number of processes at a time.
        logs: Folder for the units' output.
        say: Called with one line when a unit starts or ends, and on progress.
        on_done: Called after each unit that was run; the workers keep running, on the next units.

    Raises:
        IsolossError: A unit failed; the message has the last lines of its log.
        KeyboardInterrupt: Passed on after the workers have saved.
    """
    if workers < 1:
        raise IsolossError(f"{workers} workers cannot carry out a plan; give at least 1")
    check(units)
    done = {unit.name for unit in units if unit.done()}
    todo = [unit for unit in units if unit.name not in done]
    count, total = len(todo), len(units)
    running: list[_Worker] = []
    ended: list[Unit] = []  # `on_done` has not been called for these
    failed: _Worker | None = None
    heartbeat = time.monotonic()
    parent = WarmProcess() if count and warm.IS_AVAILABLE else None
    if count:
        say(f"{count} of {total} units to do, {workers} at a time; their output is in {logs}")
    try:
        while todo or running or ended:
            ready = [unit for unit in todo if done.issuperset(unit.after)] if failed is None else []
            for unit in ready[: workers - len(running)]:
                todo.remove(unit)
                running.append(_start(unit, logs, parent))
                say(f"{unit.name}: started")
            while ended:  # only now, when the workers are busy again
                on_done(ended.pop(0))
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                _close(worker)
                if worker.process.returncode == 0 and worker.unit.done():
                    done.add(worker.unit.name)
                    ended.append(worker.unit)
                    seconds = time.monotonic() - worker.start
                    say(f"{worker.unit.name}: done in {seconds:.0f} s ({len(done)} of {total} units)")
                else:
                    failed = worker
            if time.monotonic() - heartbeat > HEARTBEAT_SECONDS:
                heartbeat = time.monotonic()
                for worker in running:
                    seconds = time.monotonic() - worker.start
                    say(f"  {_last_line(worker.log) or f'{worker.unit.name}: running for {seconds:.0f} s'}")
    except BaseException:
        _stop(running)
        raise
    finally:
        if parent is not None:
            parent.close()
    if failed is not None:
        raise IsolossError(_failure(failed))
    return count


def _start(unit: Unit, logs: Path, parent: WarmProcess | None) -> _Worker:
    log = logs / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', unit.name)}.log"
    files.write_bytes(log, b"")  # now, as it is read from here on
    if parent is not None:
        return _Worker(unit, parent.start(unit.arguments, log), log, time.monotonic())
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "isoloss", *unit.arguments],
            stdin=subprocess.PIPE,  # never written to: its end tells the worker that the executor is gone
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **warm.ENVIRONMENT},
            start_new_session=True,  # Ctrl-C reaches the executor alone, which passes it on
        )
    return _Worker(unit, process, log, time.monotonic())


def _stop(running: list[_Worker]) -> None:
    """Ask the workers to save and end, and wait for them; kill those that do not."""
    for worker in running:
        worker.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for worker in running:
            worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for worker in running:
            worker.process.kill()
    for worker in running:
        _close(worker)


def _close(worker: _Worker) -> None:
    if isinstance(worker.process, subprocess.Popen):
        assert worker.process.stdin is not None
        worker.process.stdin.close()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _failure(worker: _Worker) -> str:
    tail = "\n".join(worker.log.read_text(errors="replace").splitlines()[-15:])
    status = worker.process.returncode
    reason = "ended without its result" if status == 0 else f"failed with status {status}"
    return f"{worker.unit.name} {reason}; the end of {worker.log}:\n{tail}"
