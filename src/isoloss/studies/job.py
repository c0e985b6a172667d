"""A job: an attempt at a unit, with its command, whose lease a process holds; and the options of executors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isoloss import files, usage
from isoloss.errors import IsolossError
from isoloss.studies import attempts
from isoloss.studies.leases import EXPIRY_SECONDS, Lease
from isoloss.studies.plan import Resources, Unit


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a plan is carried out.

    Attributes:
        workers: Number of cores that the units may use at a time; for the executor slurm, number of workers.
        retries: How many times a unit that fails is tried again, after 1, 2, 4, ... seconds. One whose input is
            wrong (exit status 2) is not retried.
        keep_going: Whether other units start after one has failed.
        expiry: Seconds without a heartbeat after which another process may take over a unit.
        worker_arguments: Arguments of the `isoloss` command with which a process on another machine helps with the
            same plan.
        submit_parameters: Parameters of the cluster, by name.
        address: Address of a cluster; empty: one is started on this machine.

    Raises:
        IsolossError: A number is out of range.
    """

    workers: int = 2
    retries: int = 2
    keep_going: bool = True
    expiry: float = EXPIRY_SECONDS
    worker_arguments: tuple[str, ...] = ()
    submit_parameters: Mapping[str, str | int | float] = field(default_factory=dict)
    address: str = ""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise IsolossError(f"workers is {self.workers}; it must be at least 1")
        if self.retries < 0:
            raise IsolossError(f"retries is {self.retries}; it must be at least 0")


@dataclass(frozen=True, eq=False)
class Job:
    """An attempt at a unit whose lease this process holds.

    Attributes:
        unit: The unit.
        lease: Its lease.
        log: File for the output of its command.
        start: When its lease was taken, by `time.monotonic`.
    """

    unit: Unit
    lease: Lease
    log: Path
    start: float = field(default_factory=time.monotonic)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the `isoloss` command, with the folders of this attempt."""
        return attempts.arguments(self.unit, self.lease.number)

    @property
    def command(self) -> list[str]:
        """The whole command."""
        return command(self.arguments, self.unit.needs)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the command needs."""
        return {
            "OMP_NUM_THREADS": str(self.unit.needs.cores),
            files.LEASE: str(self.lease.path.absolute()),
            usage.USAGE: str(self.usage.absolute()),
        }

    @property
    def usage(self) -> Path:
        """The file in which its command reports the memory and disk space that it used."""
        return self.log.with_suffix(".usage")

    def call(self) -> int:
        """Run the command on this machine, with its output in the log, and return its exit status."""
        with self.log.open("wb") as file:
            environment = {**os.environ, **self.environment}
            return subprocess.call(self.command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    @property
    def seconds(self) -> float:
        """Seconds since its lease was taken."""
        return time.monotonic() - self.start


def command(arguments: Sequence[str], needs: Resources) -> list[str]:
    """Return the command that runs `isoloss` with these arguments, under torchrun if it has several processes."""
    if needs.processes == 1:
        return [sys.executable, "-m", "isoloss", *arguments]
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(needs.processes))
    return [sys.executable, "-m", *torchrun, "-m", "isoloss", *arguments]


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log; empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        lines = log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def tail(log: Path) -> str:
    """Return the last lines of a log; empty if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return ""
