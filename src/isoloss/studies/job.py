"""A job: an attempt at a unit, with its command, whose lease a process holds; and the options of executors."""

from __future__ import annotations

import contextlib
import os
import socket
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
        storage: Path or URL, as fsspec takes it, through which files are exchanged with the nodes of a cluster; empty:
            all nodes share the study's folder.

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
    storage: str = ""

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
        """The whole command, for a unit that runs on one node or in a Slurm job."""
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


def command(arguments: Sequence[str], needs: Resources, *, node: int = 0, meeting_point: str = "") -> list[str]:
    """Return the command that runs `isoloss` with these arguments, under torchrun if it has several processes.

    Args:
        arguments: Arguments of the `isoloss` command.
        needs: What the command needs.
        node: With several nodes: the number of the one that runs this command.
        meeting_point: HOST:PORT at which the other nodes reach node 0. Empty: this machine is node 0, and `srun` starts
            the command on all nodes of its Slurm job.
    """
    if needs.processes == 1:
        return [sys.executable, "-m", "isoloss", *arguments]
    prefix, nodes = tuple[str, ...](), str(needs.nodes)
    if needs.nodes == 1:
        group: tuple[str, ...] = ("--standalone",)
    elif meeting_point:
        host, _, port = meeting_point.rpartition(":")
        group = ("--nnodes", nodes, "--node-rank", str(node), "--master-addr", host, "--master-port", port)
    else:
        prefix = ("srun", "--overlap", "--kill-on-bad-exit", "--nodes", nodes, "--ntasks", nodes)
        group = ("--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", free_port(socket.gethostname()))
    group = ("--nproc-per-node", str(needs.on_each_node.processes), *group)
    return [*prefix, sys.executable, "-m", "torch.distributed.run", *group, "-m", "isoloss", *arguments]


def free_port(host: str) -> str:
    """Return HOST:PORT of an unused port of this machine, whose name or address for others is `host`."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"


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
