"""The local executor: processes on this machine, with its cores, GPUs and memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess

from isoloss.errors import IsolossError
from isoloss.machine import physical_memory
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run import fork_server
from isoloss.studies.run.attempt import Attempt, last_lines
from isoloss.studies.run.loop import Loop, Options

POLL_SECONDS = 0.1
PROGRESS_SECONDS = 30.0  # between two progress messages
GRACE_SECONDS = 60.0  # for commands to save after an interrupt
_ROUNDING = 1e-9  # so that three thirds of a GPU fit into one


def run(loop: Loop, options: Options) -> None:
    """Run each attempt in its own process, as many at a time as cores (`workers`), GPUs and memory allow.

    An attempt gets the GPUs, or the fraction of one, that it needs through `CUDA_VISIBLE_DEVICES`. If this process ends
    for any reason, so do the commands; when run again, they resume from their files. A unit that needs more than the
    machine has is refused.
    """
    capacity, todo = Capacity.of_machine(options.workers), loop.todo
    capacity.check(todo)
    if not todo:
        return
    for unit in todo:
        # before the first command: the server reads the list of imports when it starts, and never again
        fork_server.preload(unit.arguments, unit.needs)
    where = f"{options.workers} at a time" + (f" on {len(capacity.gpus)} GPUs" if capacity.gpus else "")
    loop.say(f"{len(todo)} of {len(loop.units)} units to do, {where}; their output is in {loop.attempts.folder}")
    running: dict[Attempt, tuple[ForkServerProcess, tuple[str, ...]]] = {}
    last_message, said = time.monotonic(), set[str]()
    try:
        while not loop.finished:
            while capacity.cores > 0 and (attempt := loop.take(capacity.fits)):
                gpus = capacity.reserve(attempt.unit.needs) or ()
                environment = {**attempt.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
                process = fork_server.start(attempt.arguments, attempt.unit.needs, attempt.log, environment)
                running[attempt] = process, gpus
            # with a timeout, as units of other executors may end and a failed one may be due again meanwhile
            wait([process.sentinel for process, _ in running.values()], timeout=POLL_SECONDS)
            for attempt, (process, gpus) in list(running.items()):
                if (status := process.exitcode) is not None:
                    del running[attempt]
                    capacity.release(attempt.unit.needs, gpus)
                    if lost := fork_server.is_lost(process):
                        loop.say(f"{attempt.unit.name}: the process that starts units was killed; it starts again")
                    loop.finish(attempt, status, stopped=lost)
            if time.monotonic() - last_message > PROGRESS_SECONDS:
                last_message = time.monotonic()
                for attempt in running:
                    name, seconds = attempt.unit.name, attempt.seconds
                    line = last_lines(attempt.log) or f"{name}: running for {seconds:.0f} s"
                    # several units may wait for the same, such as a step that is compiled once
                    if line not in said:
                        loop.say(f"  {line}")
                    said.add(line)
    except BaseException:
        _stop(loop, {attempt: process for attempt, (process, _) in running.items()})
        raise


def _stop(loop: Loop, running: dict[Attempt, ForkServerProcess]) -> None:
    """Interrupt the commands so that they save and end; kill those that take too long."""
    if running:
        loop.say("stopping when the running units have saved; Ctrl-C again kills them")
    for process in running.values():
        if process.exitcode is None and process.pid:
            with contextlib.suppress(ProcessLookupError):  # it ends now
                os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    # a second Ctrl-C ends the wait
    with contextlib.suppress(KeyboardInterrupt):
        for process in running.values():
            process.join(max(0.1, deadline - time.monotonic()))
    for attempt, process in running.items():
        process.kill()
        process.join(GRACE_SECONDS)
        loop.finish(attempt, -signal.SIGKILL if process.exitcode is None else process.exitcode, stopped=True)


@dataclass
class Capacity:
    """What is free on a machine."""

    cores: int
    gpus: dict[str, float] = field(default_factory=dict)  # free fraction, by name in `CUDA_VISIBLE_DEVICES`
    memory: float = 0.0  # GiB

    @classmethod
    def of_machine(cls, cores: int) -> Capacity:
        """Return a capacity of this many cores, all GPUs and memory of this machine."""
        return cls(cores, dict.fromkeys(visible_gpus(), 1.0), physical_memory() / 2**30)

    def check(self, units: Sequence[Unit]) -> None:
        """Refuse a unit that does not fit even if nothing else runs. Call it before the first `reserve`."""
        for unit in units:
            if not self.fits(unit.needs):
                needs = unit.needs
                raise IsolossError(
                    f"{unit.name} needs {_words(needs.all_cores, needs.all_gpus, needs.memory)}; there are "
                    f"{_words(self.cores, len(self.gpus), self.memory)} (--workers is the number of cores)"
                )

    def fits(self, needs: Resources) -> bool:
        """Whether a unit with these needs could start now."""
        return needs.all_cores <= self.cores and needs.memory <= self.memory and self._choose(needs) is not None

    def reserve(self, needs: Resources) -> tuple[str, ...] | None:
        """Reserve what a unit needs, and return the GPUs that it gets; None: it does not fit now."""
        chosen = self._choose(needs) if self.fits(needs) else None
        if chosen is not None:
            self._change(needs, chosen, -1)
        return chosen

    def release(self, needs: Resources, gpus: Sequence[str]) -> None:
        """Free what was reserved."""
        self._change(needs, gpus, 1)

    def _change(self, needs: Resources, gpus: Sequence[str], sign: int) -> None:
        self.cores += sign * needs.all_cores
        self.memory += sign * needs.memory
        for gpu in gpus:
            self.gpus[gpu] += sign * min(needs.gpus, 1.0)

    def _choose(self, needs: Resources) -> tuple[str, ...] | None:
        """Return GPUs with room, the fullest first so that whole ones stay free; None if there are too few."""
        if not needs.gpus:
            return ()
        # a fraction of a GPU is a share of one, though it rounds to none
        each, count = min(needs.gpus, 1.0), max(1, round(needs.all_gpus))
        free = sorted((room, gpu) for gpu, room in self.gpus.items() if room >= each - _ROUNDING)
        return tuple(gpu for _, gpu in free[:count]) if len(free) >= count else None


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as named in `CUDA_VISIBLE_DEVICES`, without loading torch."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in visible.split(",") if name and name != "-1")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(i) for i, line in enumerate(line for line in listed.splitlines() if line.startswith("GPU ")))


def _words(cores: int, gpus: float, memory: float) -> str:
    parts = [f"{cores} cores" if cores != 1 else "1 core", f"{gpus:g} GPUs" if gpus != 1 else "1 GPU"]
    return ", ".join([*parts, f"{memory:.3g} GiB of memory"])
