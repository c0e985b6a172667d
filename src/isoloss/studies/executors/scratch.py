"""Jobs on nodes that do not share the study's folder: their files go through a storage (`isoloss.studies.storage`).

The driver, which holds the leases, pushes what a job reads, as one snapshot per run. The job's node pulls it into a
scratch folder with the layout of the study's folder, runs the command there and pushes what the command makes, as one
snapshot per attempt. When the job has ended, however it ended, the driver pulls that snapshot into the study's folder
and publishes it. So the study's folder alone decides, and what a lost node still pushes does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies import attempts
from isoloss.studies.job import Job
from isoloss.studies.jobs import Jobs
from isoloss.studies.plan import Unit
from isoloss.studies.storage import Storage, listing

LOOK_SECONDS = 1.0  # between two looks for new checkpoints and evaluations
KEPT_SECONDS = 3600.0  # for which a node keeps inputs that none of its jobs uses
CONFIGS = "configs"  # the folder of the runs' configs, and the name of its snapshot
_LOG = "log.jsonl"  # no result depends on it, and jobs that measure the same run at the same time all append to it
_GROWING = (*attempts.APPENDED, ".log")


@dataclass(frozen=True)
class ScratchJob:
    """What a node must know to carry out a job in its scratch folder.

    Attributes:
        url: The storage.
        root: The study's folder on the driver's machine.
        inputs: Names of the snapshots that the job reads.
        name: Name of the snapshot that the job makes.
        outputs: Folders of which that snapshot has all files, relative to the study's folder; of other folders it has
            only files that are new or have changed.
    """

    url: str
    root: str
    inputs: tuple[str, ...]
    name: str
    outputs: tuple[str, ...]


# --- the driver ------------------------------------------------------------------------------------------------------


class Driver:
    """The driver's side: it sends what jobs read, and receives what they have made.

    Args:
        url: The storage.
        jobs: The jobs.

    Raises:
        IsolossError: The storage cannot be used, it has another study's files, or it overlaps with the study's folder;
            or a unit needs several nodes.
    """

    def __init__(self, url: str, jobs: Jobs) -> None:
        self.storage, self._jobs, self._root = Storage(url), jobs, jobs.logs.parent
        self._by_name = {unit.name: unit for unit in jobs.units}
        self._names: dict[tuple[str, int], str] = {}  # of the snapshots of attempts, by unit and number
        if self.storage.path is not None:  # both have runs in `runs`, and what is deleted there must not be lost here
            place, root = self.storage.path.resolve(), self._root.resolve()
            if place.is_relative_to(root) or root.is_relative_to(place):
                raise IsolossError(
                    f"the storage {self.storage.url} and the study's folder {self._root} must not be the same or one "
                    "inside the other: choose another --storage"
                )
        for unit in jobs.units:
            if unit.needs.nodes > 1:
                raise IsolossError(
                    f"unit {unit.name!r} needs {unit.needs.nodes} nodes, which must share the study's folder: "
                    f"the storage {url} cannot replace it"
                )
        self.storage.check()
        self.storage.reserve(self._root / "study.json")

    def send(self, job: Job) -> ScratchJob:
        """Send what a job reads and return what its node must know. Files that have not changed are not read again.

        Raises:
            IsolossError: The storage cannot be read or written, or files cannot be read.
        """
        unit, number = job.unit, job.lease.number
        self._recover(job)
        own = [attempts.folder(path, number) for path in unit.outputs]
        before = [path for other in self._before(unit) for path in other.outputs]
        inputs = [self._push(self._root / CONFIGS), *(self._push(path) for path in (*before, *own) if path.exists())]
        outputs = tuple(self._name(attempts.unfinished(path, number)) for path in unit.outputs)
        return ScratchJob(self.storage.url, str(self._root), tuple(inputs), self._attempt(unit, number), outputs)

    def receive(self, job: Job) -> None:
        """Put what a job has made into the study's folder, unless another process has taken it over.

        Raises:
            IsolossError: The storage cannot be read, what it has is corrupt, or a file cannot be written.
        """
        if job.lease.is_held():
            self._receive(job.unit, job.lease.number, job.lease.number)
            for number in range(1, job.lease.number):  # pushed late, by nodes whose driver was killed
                with contextlib.suppress(FileNotFoundError):  # its lease was deleted
                    self.storage.delete(self._attempt(job.unit, number))
            for path in job.unit.outputs:
                self.storage.delete(self._name(attempts.unfinished(path, job.lease.number)))

    def _recover(self, job: Job) -> None:
        """Start from what an earlier attempt pushed after its driver had ended or stopped waiting for it.

        The last attempt that a driver has ended went on from those before it, so they do not count.
        """
        unit, leases = job.unit, self._jobs.leases
        for number in range(job.lease.number - 1, 0, -1):
            try:
                if self._receive(unit, number, job.lease.number):
                    return
            except FileNotFoundError:  # its lease was deleted
                return
            except IsolossError as error:
                self._jobs.say(f"{unit.name}: the files that attempt {number} pushed are not used: {error}")
            if leases.has_end(unit.file_name, number):
                return

    def _receive(self, unit: Unit, number: int, into: int) -> bool:
        """Put what an attempt has pushed into the study's folder; its unfinished runs become those of attempt `into`.

        Returns:
            Whether it had pushed anything.
        """
        name = self._attempt(unit, number)
        if self.storage.manifest(name) is None:
            return False
        incoming = self._root / f"{files.TEMPORARY}{unit.file_name}.{number}"  # replaces what a killed driver left
        shutil.rmtree(incoming, ignore_errors=True)
        try:
            self.storage.pull(name, incoming / "files", incoming / "objects")
            for path in unit.outputs:
                source = incoming / "files" / self._name(attempts.unfinished(path, number))
                # an attempt on a machine with the study's folder may have got further since
                if source.is_dir() and (number == into or _newest(source) >= _newest(attempts.unfinished(path, into))):
                    _replace(source, attempts.unfinished(path, into), incoming / "replaced" / path.name)
            rest = listing(incoming / "files", incoming / "files")
            for relative in sorted(rest, key=_sort_key):
                _put(rest[relative], self._root / relative)
        except OSError as error:
            raise IsolossError(f"cannot write in {self._root}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        self.storage.delete(name)
        return True

    def _push(self, folder: Path) -> str:
        """Send a folder and return the name of its snapshot."""
        omitted = "" if folder.name.startswith(".") else _LOG  # an unfinished run continues its own log

        def files_of_folder() -> dict[str, Path]:
            return {relative: path for relative, path in listing(folder, self._root).items() if path.name != omitted}

        name = self._name(folder)
        self.storage.push(name, files_of_folder)
        return name

    def _before(self, unit: Unit) -> list[Unit]:
        """Return the units that a unit waits for, directly or not."""
        found: dict[str, Unit] = {}
        waiting = [*unit.after]
        while waiting:
            if (name := waiting.pop()) not in found:
                found[name] = self._by_name[name]
                waiting += found[name].after
        return list(found.values())

    def _name(self, folder: Path) -> str:
        if not folder.is_relative_to(self._root):
            raise IsolossError(f"{folder} is outside {self._root}: with --storage, runs must be in the study's folder")
        return folder.relative_to(self._root).as_posix()

    def _attempt(self, unit: Unit, number: int) -> str:
        """Return the name of an attempt's snapshot, which no other study in the same storage uses."""
        key = unit.file_name, number
        if key not in self._names:  # the lease may be deleted later
            lease = self._jobs.leases.folder / f"{unit.file_name}.{number}.json"
            self._names[key] = f"attempts/{unit.file_name}.{number}-{files.sha256(lease)[:12]}"
        return self._names[key]


def _sort_key(path: str) -> tuple[bool, bool]:
    """Sort evaluations after the files that they refer to, and logs last, as their lines must not be added twice."""
    return path.endswith(f"/{_LOG}"), path.endswith(".json")


def _newest(folder: Path) -> int:
    """Return the step of the last checkpoint of an unfinished run; -1 if it has none."""
    return max(Run(folder).steps(), default=-1)


def _replace(source: Path, target: Path, replaced: Path) -> None:
    """Rename a folder to `target`; a folder that was there becomes `replaced`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        replaced.parent.mkdir(exist_ok=True)
        target.rename(replaced)
    source.rename(target)


def _put(source: Path, target: Path) -> None:
    """Rename a file to `target`; but append the lines of a log to those that are there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.name != _LOG:
        source.replace(target)
        return
    with target.open("ab") as file:
        file.write(source.read_bytes())


# --- the node --------------------------------------------------------------------------------------------------------


class Scratch:
    """The scratch folder of a job.

    Args:
        job: What the driver has sent.
        storage: The storage.

    Attributes:
        folder: The scratch folder; files have the same relative paths in it as in the study's folder.
    """

    def __init__(self, job: ScratchJob, storage: Storage) -> None:
        self._job, self._storage = job, storage
        study = hashlib.sha256(f"{job.url} {job.root}".encode()).hexdigest()[:12]
        self._node = Path(tempfile.gettempdir()) / f"isoloss-{os.getuid()}" / study
        self.folder = self._node / job.name
        self._pulled: dict[str, tuple[int, int, int]] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._looked = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Pull the inputs; when the block ends, push the outputs and delete the folder, but keep inputs for other jobs.

        Raises:
            IsolossError: The storage cannot be used, or the folder cannot be written.
        """
        objects = self._node / "objects"
        with contextlib.ExitStack() as held:
            with files.lock(self._node, wait=True):
                _remove_unused(self._node, objects)
                held.enter_context(files.lock(self.folder))
            held.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name in self._job.inputs:
                self._storage.pull(name, self.folder, objects)
            (self.folder / "logs").mkdir(exist_ok=True)
            self._pulled = self._signatures()
            self._seen = self._results()
            try:
                yield
            finally:
                self.push()

    def path(self, word: str) -> str:
        """Return an argument with the path of the study's folder, if it starts with that, replaced by this folder."""
        root = self._job.root
        return f"{self.folder}{word[len(root) :]}" if word == root or word.startswith(f"{root}/") else word

    def push_if_new(self) -> None:
        """Push the outputs if there is a new checkpoint or evaluation."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        seen = self._results()
        if seen != self._seen:
            with contextlib.suppress(IsolossError):  # tried again at the next look or at the end
                self.push()
                self._seen = seen
            self._looked = time.monotonic()

    def push(self) -> None:
        """Push the outputs.

        Raises:
            IsolossError: The storage cannot be written.
        """
        self._storage.push(self._job.name, self._outputs)

    def _outputs(self) -> dict[str, Path]:
        """Return all files of this attempt's runs, and those other files that are new or have changed."""
        now, own = self._signatures(), tuple(f"{folder}/" for folder in self._job.outputs)
        changed = {path for path, signature in now.items() if self._pulled.get(path) != signature}
        return {path: self.folder / path for path in now if path in changed or path.startswith(own)}

    def _results(self) -> dict[str, tuple[int, int, int]]:
        """Return the signatures of all files but metrics and logs, which grow all the time."""
        return {path: signature for path, signature in self._signatures().items() if not path.endswith(_GROWING)}

    def _signatures(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for path, file in listing(self.folder, self.folder).items():
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                found[path] = status.st_size, status.st_mtime_ns, status.st_ino
        return found


def _remove_unused(node: Path, objects: Path) -> None:
    """Delete the folders of jobs that were killed, and inputs that no job has used for `KEPT_SECONDS`."""
    for folder in (node / "attempts").glob("*"):
        with contextlib.suppress(IsolossError), files.lock(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for path in objects.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_nlink == 1 and time.time() - status.st_ctime > KEPT_SECONDS:  # links change its ctime
                path.unlink()
