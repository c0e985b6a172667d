"""Leases: which process works on which unit of a plan, so that no two do the same one, on any number of machines.

For each attempt N at a unit, the study's folder `leases` has a file `UNIT.N.json` that says who holds the lease: host,
process, and when the attempt began. The file is created exclusively, so only one process gets the lease, and it stays
locked while that process lives. Its modification time is the last heartbeat. When the attempt ends, its owner writes a
second file, `UNIT.N.done`, `.failed` or `.stopped`, that says how.

The attempt with the highest N counts. A lease that has not ended is lost when its heartbeat is older than the expiry,
or when its owner ran on this machine and no longer locks it; any process may then take attempt N + 1. So nothing is
ever deleted or overwritten, and a process that was paused finds a later attempt when it resumes.

Ages are differences between two modification times on the same file system, so the machines' clocks need not agree. A
heartbeat in the future, as after a clock was set back, gives a warning, and its age counts from when it was first seen.
The file system need only support exclusive creation, as NFS does (version 3 and later).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
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
from isoloss.errors import IsolossError, warn

EXPIRY_SECONDS = 60.0  # after the last heartbeat; longer than network file systems cache attributes
HEARTBEATS = 6  # in the time of one expiry
_SKEW = 5.0  # seconds in the future that a file may be dated, as some file systems round

End = Literal["done", "failed", "stopped"]
_ENDS = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Last:
    """The last attempt at a unit, read from the names of the lease files.

    Attributes:
        number: Its number, from 1; 0 if there is none.
        end: How it ended; None if it has not.
    """

    number: int = 0
    end: End | None = None


@dataclass(frozen=True, eq=False)
class Lease:
    """An attempt that this process makes.

    Attributes:
        path: The lease file.
        number: The number of the attempt.
        descriptor: Of the open lease file, which is locked until it is closed or this process ends.
    """

    path: Path
    number: int
    descriptor: int

    def is_held(self) -> bool:
        """Whether no later attempt has been taken."""
        try:
            return not files.successor(self.path).exists()
        # the file system does not respond; nothing is published on the strength of this answer
        except OSError:
            return True

    def renew(self) -> None:
        """Renew the heartbeat."""
        # the file system may not respond now; the next heartbeat may succeed
        with contextlib.suppress(OSError):
            # without a time of ours: over NFS, the file server then stamps the heartbeat with its own clock
            os.utime(self.path)

    def end(self, how: End, **details: Any) -> None:
        """Record how the attempt ended, unless another process has taken a later one."""
        # a later attempt may have ended otherwise, and its record is the one that counts
        if self.is_held():
            files.write_json(self.path.with_suffix(f".{how}"), details)
        # only now: while the lock is held, nobody takes the attempt for a lost one
        os.close(self.descriptor)


class Leases:
    """The leases of a study.

    Args:
        folder: Their folder, which need not exist.
        expiry: Seconds after its last heartbeat at which a lease is lost.

    Raises:
        IsolossError: The expiry is not positive and finite.

    Example:
        >>> import tempfile
        >>> leases = Leases(Path(tempfile.mkdtemp()))
        >>> lease = leases.take("train-base", 1)
        >>> leases.take("train-base", 1) is None  # only one gets it
        True
        >>> lease.end("stopped")
        >>> leases.attempts()
        {'train-base': Last(number=1, end='stopped')}
    """

    def __init__(self, folder: Path, expiry: float = EXPIRY_SECONDS) -> None:
        if not 0 < expiry < math.inf:
            raise IsolossError(f"the expiry of leases is {expiry} seconds; it must be above 0 and finite")
        self.folder, self.expiry = folder, expiry
        self._future: dict[str, tuple[float, float]] = {}  # modification times in the future, and when first seen

    def attempts(self) -> dict[str, Last]:
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
                # the end of an attempt outranks its beginning: "" sorts before any name of an end
                key = (int(number), "" if kind == "json" else kind)
                found[unit] = max(found.get(unit, key), key)
        return {unit: Last(number, end or None) for unit, (number, end) in found.items()}  # type: ignore[arg-type]

    def take(self, unit: str, number: int) -> Lease | None:
        """Take an attempt at a unit and return its lease; None: another process has it.

        Args:
            unit: The unit's name as it is used in file names.
            number: The number of the attempt, one more than the last one's.

        Raises:
            IsolossError: The file cannot be written.
        """
        path = self.folder / f"{unit}.{number}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                # of all processes that try, on any machine, exactly one creates the file. Children do not inherit it
                # (PEP 446), so the lock does not live on in a command that outlives this process
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return None
            boot = _boot()
            try:
                # flock, not lockf: a process loses a POSIX lock as soon as it closes any other handle of the file
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # a file system without locks: only the heartbeat says whether this process lives
                boot = ""
            # the lock comes first: whoever reads the boot id may rely on it
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "boot": boot, "expiry": self.expiry}
            owner["began"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            # into the file itself: written beside it and renamed, it would be another file, which nobody has locked
            os.write(descriptor, json.dumps(owner).encode())
        except OSError as error:
            raise IsolossError(f"cannot write {path}: {error.strerror or error}") from error
        return Lease(path, number, descriptor)

    def is_lost(self, unit: str, number: int) -> bool:
        """Whether an attempt that has not ended is lost: its owner is gone, or its heartbeat is too old."""
        owner = self.owner(unit, number)
        try:
            # on network file systems, opening a file refreshes its cached attributes
            with (self.folder / f"{unit}.{number}.json").open() as file:
                if owner.get("boot") and owner["boot"] == _boot():
                    # a shared lock: two processes that look at once must not take each other for the owner
                    with contextlib.suppress(OSError):  # of a lock that its owner holds
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        return True
                heartbeat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:  # a network file system does not show the file yet
            return False
        # the owner's own expiry sets how often it renews the heartbeat, and may be longer
        expiry = max(self.expiry, float(owner.get("expiry", 0.0)))
        return self._age(f"{unit}.{number}.json", heartbeat) > expiry

    def seconds_since(self, unit: str, number: int, how: End) -> float:
        """Return how long ago it was recorded that an attempt ended in this way."""
        name = f"{unit}.{number}.{how}"
        return self._age(name, (self.folder / name).stat().st_mtime)

    def _age(self, name: str, modified: float) -> float:
        """Return the seconds since a file was modified; of a time in the future, since this process first saw it."""
        age = self._time() - modified
        if age >= -_SKEW:
            return age
        if name not in self._future:
            warn(
                f"{self.folder / name} is dated {-age:,.0f} s in the future: unless that changes, its age counts from "
                f"now, {datetime.datetime.now():%H:%M:%S}"
            )
        # a new heartbeat has another time
        if self._future.get(name, (None,))[0] != modified:
            self._future[name] = modified, time.monotonic()
        return time.monotonic() - self._future[name][1]

    def owner(self, unit: str, number: int) -> Mapping[str, Any]:
        """Return what an attempt's lease says about its owner; empty if unreadable, as while it is being written."""
        return _read(self.folder / f"{unit}.{number}.json")

    def end_record(self, unit: str, number: int, how: End) -> Mapping[str, Any]:
        """Return what was recorded when an attempt ended in this way; empty if it cannot be read."""
        return _read(self.folder / f"{unit}.{number}.{how}")

    def _time(self) -> float:
        """Return the time by the clock that sets the modification times of files in this folder."""
        # this machine's clock may differ from the file server's, which stamps the heartbeats of all machines
        clock = self.folder / f".clock-{socket.gethostname()}-{os.getpid()}"
        try:
            clock.touch()
            return clock.stat().st_mtime
        except OSError:  # this user may not write here
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                clock.unlink()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _boot() -> str:
    """Return an id of this machine since it was started, within which locks can be relied on; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return ""
