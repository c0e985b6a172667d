"""An attempt at a unit: a command that makes run directories in folders of its own, which a rename publishes.

Attempt N at the run `runs/NAME` is made beside it, in `runs/.NAME.attempt-N`, so that relative paths to other runs
still hold. It goes on from what the previous attempt left, whose folder it renames. A process that still works on the
previous attempt, because it was paused, then finds neither the folder nor its lease, and can do no harm.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.run import usage
from isoloss.studies.run.lease import Lease


@dataclass(frozen=True, eq=False)
class Attempt:
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
        """The arguments of the `isoloss` command, with the attempt's folder in place of each run that it makes."""
        folders = {str(path): str(folder(path, self.lease.number)) for path in self.unit.outputs}
        return tuple(folders.get(word, word) for word in self.unit.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the command needs."""
        return {
            # read when libraries are imported, before `--threads` is
            "OMP_NUM_THREADS": str(self.unit.needs.cores),
            files.LEASE: str(self.lease.path.absolute()),
            usage.USAGE: str(self.usage.absolute()),
        }

    @property
    def usage(self) -> Path:
        """The file in which its command reports the memory and disk space that it used."""
        return self.log.with_suffix(".usage")

    @property
    def seconds(self) -> float:
        """Seconds since its lease was taken."""
        return time.monotonic() - self.start

    def call(self) -> int:
        """Run the command on this machine, with its output in the log, and return its exit status."""
        with self.log.open("wb") as file:
            environment = {**os.environ, **self.environment}
            words = command(self.arguments, self.unit.needs)
            return subprocess.call(words, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def prepare(self) -> None:
        """Move what the last attempt left of each run to this attempt's folder.

        Raises:
            IsolossError: A folder cannot be renamed, or a file cannot be written.
        """
        for path in self.unit.outputs:
            if Run(path).complete:
                continue
            # looked up by name: listing the parent folder would take longer the more runs there are
            earlier = [attempt_folder(path, n) for n in range(self.lease.number - 1, 0, -1)]
            begun = next((each for each in earlier if Run(each).exists), None)
            if begun is None and Run(path).exists:
                # begun by hand; the lock, which `isoloss train` holds too, tells whether it is still being trained
                with contextlib.suppress(IsolossError), files.lock(path):
                    begun = path
            if begun is None:
                continue
            attempt = attempt_folder(path, self.lease.number)
            # a rename and no copy: whoever was paused while writing there then finds no folder to write to
            with _naming(attempt):
                begun.rename(attempt)
            # whoever was paused may have these files open: what it adds when it resumes goes to the old ones
            (attempt / ".lock").unlink(missing_ok=True)
            for growing in attempt.glob("*.jsonl"):
                files.write_bytes(growing, growing.read_bytes())

    def publish(self) -> None:
        """Give the complete runs their final names; runs that other processes have published are kept.

        Raises:
            IsolossError: A folder cannot be renamed.
        """
        for path in self.unit.outputs:
            attempt = attempt_folder(path, self.lease.number)
            # an attempt that took over may have published first: its bytes are the same, so nothing is replaced
            if Run(path).complete or not Run(attempt).complete:
                continue
            if not Run(path).exists:
                # all that is left of a command by hand that was killed as it started, and enough to make the rename
                # fail
                (path / ".lock").unlink(missing_ok=True)
            with _naming(path):
                try:
                    # fails if a folder of that name holds files, so a run that another process has published is never
                    # replaced
                    attempt.rename(path)
                except OSError:
                    if not Run(path).complete:
                        raise

    def clean(self) -> None:
        """Delete the folders that remain of the attempts up to this one."""
        for path in self.unit.outputs:
            for number in range(1, self.lease.number + 1):
                shutil.rmtree(attempt_folder(path, number), ignore_errors=True)


def attempt_folder(path: Path, number: int) -> Path:
    """Return the folder in which an attempt at a run is made.

    Example:
        >>> attempt_folder(Path("runs/base"), 2)
        PosixPath('runs/.base.attempt-2')
    """
    return path.with_name(f".{path.name}.attempt-{number}")


def folder(path: Path, number: int) -> Path:
    """Return where a run is: in the folder of an attempt until it is complete."""
    return path if Run(path).complete else attempt_folder(path, number)


def command(arguments: Sequence[str], needs: Resources) -> list[str]:
    """Return the command that runs `isoloss` with these arguments, under torchrun if it has several processes.

    Example:
        >>> command(("train", "runs/base"), Resources())[1:]
        ['-m', 'isoloss', 'train', 'runs/base']
        >>> " ".join(command(("train", "runs/base"), Resources(processes=2))[1:])
        '-m torch.distributed.run --standalone --nproc-per-node 2 -m isoloss train runs/base'
    """
    if needs.processes == 1:
        return [sys.executable, "-m", "isoloss", *arguments]
    # with --standalone each unit gets a free port of its own, as several such units may run on one machine
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


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the folder in the error if a rename fails."""
    try:
        yield
    except OSError as error:
        raise IsolossError(f"cannot rename {path}: {error.strerror or error}") from error
