"""Attempts at units: who works on a unit, where its command works, and what it used; on any number of machines.

A unit has a folder in `units` of the study's folder. Attempt N belongs to the process that manages to create `N.json`
there, which is opened for exclusive creation and stays locked while that process lives; its modification time is the
heartbeat. When the attempt ends, the file says how. An attempt that has not ended is lost when its owner, on this
machine, no longer locks the file, or when the file rests for longer than the expiry, by the clock of whoever looks.
Attempts are numbered: of two processes that find one lost, the slower could otherwise remove the lease that the faster
has just taken.

Attempt N at the run `runs/NAME` is made beside it, in `runs/.NAME.attempt-N`, so that relative paths to other runs
still hold. It goes on from what the attempt before left, whose folder it renames, and a rename publishes it. So a
process that was paused and has lost its attempt finds neither folder nor lease, and can do no harm.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run import usage

EXPIRY_SECONDS = 60.0  # without a heartbeat, after which an attempt is lost


@dataclass(frozen=True, eq=False)
class Attempt:
    """An attempt at a unit that this process makes."""

    unit: Unit
    number: int  # from 1
    lease: Path  # the file that says who makes it
    owner: Mapping[str, Any]  # what the lease says
    descriptor: int  # of the open lease, which is locked until it is closed or this process ends
    start: float = field(default_factory=time.monotonic)  # when it was taken

    @property
    def log(self) -> Path:
        """The file for the output of its command."""
        return self.lease.with_suffix(".log")

    @property
    def usage(self) -> Path:
        """The file in which its command reports the memory and disk space that it used."""
        return self.lease.with_suffix(".usage")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of the `isoloss` command, with the attempt's folder in place of each run that it makes."""
        folders = {str(path): str(folder(path, self.number)) for path in self.unit.outputs}
        return tuple(folders.get(word, word) for word in self.unit.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the command needs; libraries read the first before `--threads` is read."""
        return {"OMP_NUM_THREADS": str(self.unit.needs.cores), usage.USAGE: str(self.usage.absolute())}

    @property
    def seconds(self) -> float:
        """Seconds since it was taken."""
        return time.monotonic() - self.start

    def call(self) -> int:
        """Run the command on this machine, with its output in the log, and return its exit status."""
        with self.log.open("wb") as file:
            environment = {**os.environ, **self.environment}
            words = command(self.arguments, self.unit.needs)
            return subprocess.call(words, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def is_held(self) -> bool:
        """Whether no later attempt has been taken."""
        try:
            return not self.lease.with_name(f"{self.number + 1}.json").exists()
        except OSError:  # the file system does not respond; nothing is published on the strength of this answer
            return True

    def renew(self) -> None:
        """Renew the heartbeat."""
        # the file system may not respond now; the next heartbeat may succeed
        with contextlib.suppress(OSError):
            os.utime(self.lease)

    def end(self, how: str, **details: Any) -> None:
        """Record how it ended, unless another process has taken a later one."""
        if self.is_held():
            files.write_json(self.lease, {**self.owner, "end": how, **details})
        os.close(self.descriptor)

    def prepare(self) -> None:
        """Move what the last attempt left of each run to this attempt's folder."""
        for path in self.unit.outputs:
            if Run(path).complete:
                continue
            earlier = [attempt_folder(path, n) for n in range(self.number - 1, 0, -1)]
            begun = next((each for each in earlier if Run(each).exists), None)
            if begun is None and Run(path).exists:
                # begun by hand; the lock, which `isoloss train` holds too, tells whether it is still being trained
                with contextlib.suppress(IsolossError), files.lock(path):
                    begun = path
            if begun is None:
                continue
            own = attempt_folder(path, self.number)
            # a rename and no copy: whoever was paused while writing there then finds no folder to write to
            with _naming(own):
                begun.rename(own)
            # whoever was paused may have these files open: what it adds when it resumes goes to the old ones
            (own / ".lock").unlink(missing_ok=True)
            for growing in own.glob("*.jsonl"):
                files.write_bytes(growing, growing.read_bytes())

    def publish(self) -> None:
        """Give the complete runs their final names; runs that other processes have published are kept."""
        for path in self.unit.outputs:
            own = attempt_folder(path, self.number)
            # an attempt that took over may have published first: its bytes are the same, so nothing is replaced
            if Run(path).complete or not Run(own).complete:
                continue
            if not Run(path).exists:
                # all that is left of a command by hand that was killed as it started, enough to make the rename fail
                (path / ".lock").unlink(missing_ok=True)
            with _naming(path):
                try:
                    # fails where a folder of that name holds files, so that no published run is ever replaced
                    own.rename(path)
                except OSError:
                    if not Run(path).complete:
                        raise

    def clean(self) -> None:
        """Delete the folders that remain of the attempts up to this one."""
        for path in self.unit.outputs:
            for number in range(1, self.number + 1):
                shutil.rmtree(attempt_folder(path, number), ignore_errors=True)


class Attempts:
    """The attempts at the units of a study; one is lost after `expiry` seconds without a heartbeat."""

    def __init__(self, folder: Path, expiry: float = EXPIRY_SECONDS) -> None:
        if not 0 < expiry < float("inf"):
            raise IsolossError(f"the expiry is {expiry} seconds; it must be above 0 and finite")
        self.folder, self.expiry = folder / "units", expiry
        self._rests: dict[Path, tuple[int, float]] = {}  # modification times of leases, and when they were first seen

    def last(self, unit: Unit) -> tuple[int, dict[str, Any]]:
        """Return the number of the last attempt at a unit, 0 if there is none, and what its lease says."""
        of_unit = self.folder / unit.file_name
        try:
            names = os.listdir(of_unit)
        except FileNotFoundError:
            return 0, {}
        number = max((int(name.removesuffix(".json")) for name in names if name.endswith(".json")), default=0)
        try:
            return number, dict(json.loads((of_unit / f"{number}.json").read_text())) if number else {}
        except (OSError, ValueError):  # its owner writes it now
            return number, {}

    def records(self, unit: Unit) -> list[dict[str, Any]]:
        """Return what the leases of all attempts at a unit say, from the first."""
        of_unit = self.folder / unit.file_name
        return [files.read_json(of_unit / f"{n}.json") for n in range(1, self.last(unit)[0] + 1)]

    def is_free(self, unit: Unit, number: int, lease: Mapping[str, Any]) -> bool:
        """Whether a unit that is not done may be attempted again, given its last attempt."""
        path = self.folder / unit.file_name / f"{number}.json"
        is_here = lease.get("boot") == boot()
        if number == 0 or lease.get("end") in ("failed", "stopped") or (is_here and "end" in lease):
            return True
        if is_here:
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
        # its heart should beat; or it has ended on another machine, and a network file system shows its result late
        with contextlib.suppress(OSError):
            stamp = path.stat().st_mtime_ns
            seen, since = self._rests.setdefault(path, (stamp, time.monotonic()))
            if seen == stamp:
                # the heart of an owner with a longer expiry beats more slowly
                return bool(time.monotonic() - since > max(self.expiry, lease.get("expiry", 0.0)))
            self._rests[path] = stamp, time.monotonic()
        return False

    def seems_alive(self, unit: Unit, number: int, lease: Mapping[str, Any]) -> bool:
        """Whether a process seems to work on an attempt, at a single look; of another machine, by this one's clock."""
        if "end" in lease or (lease.get("boot") == boot() and self.is_free(unit, number, lease)):
            return False
        with contextlib.suppress(OSError):
            beat = (self.folder / unit.file_name / f"{number}.json").stat().st_mtime
            return lease.get("boot") == boot() or time.time() - beat < lease.get("expiry", self.expiry)
        return False

    def take(self, unit: Unit, number: int) -> Attempt | None:
        """Take an attempt; None: another process has taken it."""
        path = self.folder / unit.file_name / f"{number}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # of all processes that try, on any machine, exactly one creates the file. Children do not inherit it
            # (PEP 446), so the lock does not live on in a command that outlives this process
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            # flock, not lockf: a process loses a POSIX lock as soon as it closes any other handle of the file
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            owner = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "boot": boot(),
                "began": began,
                "expiry": self.expiry,
            }
            # into the file itself: written beside it and renamed, it would be another file, which nobody has locked
            os.write(descriptor, json.dumps(owner).encode())
            attempt = Attempt(unit, number, path, owner, descriptor)
            attempt.log.touch()
        except FileExistsError:
            return None
        except OSError as error:
            raise IsolossError(f"cannot write {path}: {error.strerror or error}") from error
        return attempt


@functools.cache
def boot() -> str:
    """Return what tells this run of this machine's system from all others, within which locks can be relied on."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else socket.gethostname()


def attempt_folder(path: Path, number: int) -> Path:
    """Return the folder in which an attempt at a run is made: `runs/.base.attempt-2` for `runs/base`."""
    return path.with_name(f".{path.name}.attempt-{number}")


def folder(path: Path, number: int) -> Path:
    """Return where a run is: in the folder of an attempt until it is complete."""
    return path if Run(path).complete else attempt_folder(path, number)


def command(arguments: Sequence[str], needs: Resources) -> list[str]:
    """Return the command that runs `isoloss` with these arguments, under torchrun if it has several processes."""
    if needs.processes == 1:
        return [sys.executable, "-m", "isoloss", *arguments]
    # with --standalone each unit gets a free port of its own, as several such units may run on one machine
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(needs.processes))
    return [sys.executable, "-m", *torchrun, "-m", "isoloss", *arguments]


def last_lines(log: Path, number: int = 1) -> str:
    """Return the last non-empty lines of a log; empty if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        lines = log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return "\n".join([line.rstrip() for line in lines if line.strip()][-number:])
    return ""


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the folder in the error if a rename fails."""
    try:
        yield
    except OSError as error:
        raise IsolossError(f"cannot rename {path}: {error.strerror or error}") from error
