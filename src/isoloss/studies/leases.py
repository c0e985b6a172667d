"""Leases: which process works on which unit of a plan, so that no two do the same one, on any number of machines.

For each attempt N at a unit, the study's folder `leases` has a file `UNIT.N.json` that says who holds the lease: host,
process, and when the attempt began. The file is created exclusively, so only one process gets the lease. Its
modification time is the last heartbeat. When the attempt ends, its owner writes a second file, `UNIT.N.done`, `.failed`
or `.stopped`, that says how.

The attempt with the highest N counts. A lease that has not ended is lost when its heartbeat is older than the expiry,
or when its owner was a process on this machine that no longer exists; any process may then take attempt N + 1. So
nothing is ever deleted or overwritten, and a process that was paused finds a later attempt when it resumes.

Ages are differences between two modification times on the same file system, so the machines' clocks need not agree.
The file system need only support exclusive creation, as NFS does (version 3 and later).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isoloss import files
from isoloss.errors import IsolossError

EXPIRY_SECONDS = 60.0  # after the last heartbeat; longer than network file systems cache attributes
HEARTBEATS = 6  # in the time of one expiry

End = Literal["done", "failed", "stopped"]
_ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Attempt:
    """The last attempt at a unit, read from the names of the lease files.

    Attributes:
        number: Its number, from 1; 0 if there is none.
        end: How it ended; None if it has not.
    """

    number: int = 0
    end: End | None = None


@dataclass(frozen=True)
class Lease:
    """A unit that this process works on.

    Attributes:
        path: The lease file.
        unit: The unit's name as it is used in file names.
        number: The number of the attempt.
    """

    path: Path
    unit: str
    number: int

    def is_held(self) -> bool:
        """Whether no later attempt has been taken."""
        try:
            return not files.successor(self.path).exists()
        except OSError:  # the file system does not respond; nothing is published on the strength of this answer
            return True

    def renew(self) -> None:
        """Renew the heartbeat."""
        with contextlib.suppress(OSError):  # the file system may not respond now; the next heartbeat may succeed
            os.utime(self.path)

    def end(self, how: End, **details: Any) -> None:
        """Record how the attempt ended, unless another process has taken a later one."""
        if self.is_held():
            files.write_json(self.path.with_suffix(f".{how}"), details)


class Leases:
    """The leases of a study.

    Args:
        folder: Their folder, which need not exist.
        expiry: Seconds after its last heartbeat at which a lease is lost.

    Raises:
        IsolossError: The expiry is not positive and finite.
    """

    def __init__(self, folder: Path, expiry: float = EXPIRY_SECONDS) -> None:
        if not 0 < expiry < math.inf:
            raise IsolossError(f"the expiry of leases is {expiry} seconds; it must be above 0 and finite")
        self.folder, self.expiry = folder, expiry

    def attempts(self) -> dict[str, Attempt]:
        """Return the last attempt at every unit that has one, by the unit's name as it is used in file names.

        One listing of the folder; no file is read.
        """
        found: dict[str, tuple[int, str]] = {}
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return {}
        for name in names:
            unit, _, rest = name.partition(".")
            number, _, kind = rest.partition(".")
            if unit and number.isdecimal() and kind in ("json", *_ENDS):
                key = (int(number), "" if kind == "json" else kind)  # an attempt's end outranks its beginning
                found[unit] = max(found.get(unit, key), key)
        return {unit: Attempt(number, end or None) for unit, (number, end) in found.items()}  # type: ignore[arg-type]

    def take(self, unit: str, number: int) -> Lease | None:
        """Take an attempt at a unit and return its lease; None: another process has it.

        Args:
            unit: The unit's name as it is used in file names.
            number: The number of the attempt, one more than that of the last.

        Raises:
            IsolossError: The file cannot be written.
        """
        path = self.folder / f"{unit}.{number}.json"
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                file = path.open("x")
            except FileExistsError:
                return None
            with file:
                json.dump({**_this_process(), "began": _now(), "expiry": self.expiry}, file)
        except OSError as error:
            raise IsolossError(f"cannot write {path}: {error.strerror or error}") from error
        return Lease(path, unit, number)

    def is_lost(self, unit: str, number: int) -> bool:
        """Whether an attempt that has not ended is lost: its owner is gone, or its heartbeat is too old."""
        owner = self.owner(unit, number)
        if owner and _is_gone(owner):
            return True
        heartbeat = self._modified(self.folder / f"{unit}.{number}.json")
        # the owner's own expiry sets how often it renews the heartbeat, and may be longer
        return heartbeat is not None and self._time() - heartbeat > max(self.expiry, owner.get("expiry", 0.0))

    def has_ended(self, unit: str, number: int) -> bool:
        """Whether an attempt no longer writes: it was recorded as ended, or its process is known to be gone."""
        return self.has_end(unit, number) or _is_gone(self.owner(unit, number))

    def has_end(self, unit: str, number: int) -> bool:
        """Whether it was recorded how an attempt ended."""
        return any((self.folder / f"{unit}.{number}.{end}").exists() for end in _ENDS)

    def owner(self, unit: str, number: int) -> Mapping[str, Any]:
        """Return what an attempt's lease says about its owner; empty if unreadable, as while it is being written."""
        return _read(self.folder / f"{unit}.{number}.json")

    def end_record(self, unit: str, number: int, how: End) -> Mapping[str, Any]:
        """Return what was recorded when an attempt ended in this way; empty if it cannot be read."""
        return _read(self.folder / f"{unit}.{number}.{how}")

    def _time(self) -> float:
        """The time by the clock that sets the modification times of files in this folder."""
        clock = self.folder / f".clock-{socket.gethostname()}-{os.getpid()}"
        try:
            clock.touch()
        except OSError:  # this user may not write here
            return time.time()
        try:
            return clock.stat().st_mtime
        finally:
            clock.unlink(missing_ok=True)

    def _modified(self, path: Path) -> float | None:
        try:
            with path.open("rb") as file:  # on network file systems, opening a file refreshes its cached attributes
                return os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        **{"host": socket.gethostname(), "pid": pid, "user": os.getuid()},
        **{"system": _system(), "started": _started(pid)},
    }


def _is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether an owner is a process on this system that has ended."""
    if owner.get("system") != _system() or not _system():
        return False
    started = _started(owner.get("pid", 0))
    if not started and owner.get("user") != os.getuid():
        return False  # another user's process may be hidden from this one
    return started != owner.get("started")


def _system() -> str:
    """An id of this boot and process namespace, in which process ids are unique; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> str:
    """When a process started, in ticks since boot, which with its id is unique; empty if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
