"""Snapshots of files in a storage that several machines reach through fsspec, such as a bucket of an object store.

NAME.json       the manifest of the snapshot NAME: SHA-256 and size of each file, by path; written last, atomically
NAME/SHA256     an object: the content of the files with this SHA-256; never changed
study.json      what the study is whose files these are

A snapshot has one writer and any number of readers. A writer that is killed leaves the old snapshot as it was: objects
that no manifest names do not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies.attempts import APPENDED

_TRIES = 5  # at reading what a writer may change meanwhile
_PAUSE = 0.2  # seconds between two tries
_TRANSFERS = 8  # at a time, as a small object takes little more than a round trip
_RESERVING = 1.0  # seconds in which another study, which found the storage free too, may write
_BLOCK = 1 << 20  # bytes
_PROBE, _STUDY = "probe", "study.json"
_Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Stored:
    """A file in a snapshot.

    Attributes:
        sha256: SHA-256 of its content, in hexadecimal.
        size: Its size in bytes.
    """

    sha256: str
    size: int


class Storage:
    """A folder in a storage.

    Args:
        url: Its path as fsspec takes it: `s3://bucket/folder`, `file:///mounted/folder`, `/mounted/folder`. Credentials
            are those that the protocol's package finds on the machine.

    Attributes:
        url: Its absolute path with its protocol.
        path: The folder that it is on this machine; None: it is not one.

    Raises:
        IsolossError: The protocol is unknown, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._fs, self._root = url_to_fs(url)
        except Exception as error:  # whatever the package of a protocol raises
            raise IsolossError(f"{url} cannot be used as storage: {error}") from error
        self._root = self._root.rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.url: str = self._fs.unstrip_protocol(self._root)
        self.path = Path(self._root or "/") if self._is_local else None
        self._digests: dict[Path, tuple[_Signature, Stored]] = {}
        self._pushed: dict[str, dict[str, _Signature]] = {}  # the files of each snapshot when it was last pushed

    def check(self) -> None:
        """Write, read and delete an object.

        Raises:
            IsolossError: One of these fails, or the storage is in the memory of one process.
        """
        if "memory" in (protocol := self._fs.protocol) or protocol == "memory":
            raise IsolossError(
                f"{self.url} cannot be used as storage: it is in the memory of one process, where other machines "
                "cannot reach it"
            )
        path = f"{self._root}/{_PROBE}-{os.urandom(4).hex()}"
        try:
            self._write(path, b"isoloss")
            if self._fs.cat_file(path) != b"isoloss":
                raise IsolossError("it does not return what was written to it")
            self._fs.rm_file(path)
        except Exception as error:  # whatever the package of a protocol raises
            what = str(error) if isinstance(error, IsolossError) else f"{type(error).__name__}: {error}"
            raise IsolossError(f"{self.url} cannot be used as storage: {what}") from error

    def reserve(self, study: Path) -> None:
        """Reserve the storage for a study: snapshots of two studies would have the same names.

        Args:
            study: The study's `study.json`. Studies of the same plan have the same, and may share a storage.

        Raises:
            IsolossError: It is another study's, or cannot be read or written.
        """
        ours = files.read_json(study)
        if self._study() is None:
            with self._reaching("written"):
                self._write(f"{self._root}/{_STUDY}", json.dumps(ours).encode())
            time.sleep(_RESERVING)
        if self._study() != ours:
            raise IsolossError(f"{self.url} holds the files of another study: give each study a --storage of its own")

    def manifest(self, name: str) -> dict[str, Stored] | None:
        """Return the files of a snapshot by path; None: there is no such snapshot.

        Raises:
            IsolossError: The storage cannot be read, or the manifest is invalid.
        """
        with self._reaching("read"):
            try:
                data = self._fs.cat_file(self._manifest(name))
            except FileNotFoundError:
                return None
        try:
            found = {path: Stored(str(sha256), int(size)) for path, (sha256, size) in json.loads(data).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise IsolossError(f"{self.url}/{name}.json is not the manifest of a snapshot: {error}") from error
        for path in found:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise IsolossError(f"{self.url}/{name}.json names {path}, which is outside the snapshot's folder")
        return found

    def push(self, name: str, listing: Callable[[], Mapping[str, Path]]) -> None:
        """Make a snapshot of files that others may write at the same time.

        A file that grows is stored up to the size that it has when it is first read; all others must only ever be
        replaced. Files are read after all were listed: so if the snapshot has a file, it also has what was written to
        the other listed files before that. What the storage already has is not uploaded again, and if nothing has
        changed since the last push, the storage is not accessed.

        Args:
            name: The snapshot's name.
            listing: Lists the files by their paths in the snapshot; called again if one of them vanishes meanwhile.

        Raises:
            IsolossError: The storage cannot be read or written, or the files change faster than they can be read.
        """
        for _ in range(_TRIES):
            try:
                return self._push(name, listing())
            except _ChangedError as error:
                changed = error.args[0]
                time.sleep(_PAUSE)
        raise IsolossError(f"{changed} changes too often to be stored in {self.url}")

    def pull(self, name: str, folder: Path, objects: Path) -> dict[str, Stored]:
        """Write the files of a snapshot into a folder, and return them.

        Args:
            name: The snapshot's name.
            folder: The folder, which has none of them.
            objects: A folder of objects on the same file system, which any number of processes may share. An object
                that is there is not downloaded again. Files are links to the objects, except for those that grow.

        Raises:
            IsolossError: There is no such snapshot, the storage cannot be reached, an object is corrupt or missing, or
                a file cannot be written.
        """
        for last_try in (False,) * (_TRIES - 1) + (True,):
            found = self.manifest(name)
            if found is None:
                raise IsolossError(f"{self.url} has no snapshot {name}")
            try:
                self._all(lambda stored: self._download(name, stored, objects), set(found.values()))
                for path, stored in found.items():
                    _place(objects / stored.sha256, folder / path)
                return found
            except _ChangedError as error:  # by the snapshot's writer, or by another process in `objects`
                if last_try:
                    raise IsolossError(
                        f"{self.url}/{name} cannot be read: {error.args[0]}; delete {self.url}/{name}.json, and the "
                        "study will upload it again when it is next run"
                    ) from error
                time.sleep(_PAUSE)
        raise AssertionError("not reached")

    def delete(self, name: str) -> None:
        """Delete a snapshot, if it is there.

        Raises:
            IsolossError: The storage cannot be written.
        """
        self._pushed.pop(name, None)
        with self._reaching("written"):
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._manifest(name))
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{name}", recursive=True)

    # --- pushing

    def _push(self, name: str, paths: Mapping[str, Path]) -> None:
        signatures = {path: _signature(file) for path, file in paths.items()}
        if self._pushed.get(name) == signatures:
            return
        old = self.manifest(name)
        has = {stored.sha256 for stored in (old or {}).values()}
        new = dict(zip(paths, self._all(self._digest, paths.values()), strict=True))
        missing = {stored: paths[path] for path, stored in new.items() if stored.sha256 not in has}
        self._all(lambda item: self._upload(name, *item), missing.items())
        if new != old:
            document = {path: (stored.sha256, stored.size) for path, stored in sorted(new.items())}
            with self._reaching("written"):
                self._write(self._manifest(name), json.dumps(document).encode())
                for sha256 in has - {stored.sha256 for stored in new.values()}:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(self._object(name, sha256))
        self._pushed[name] = signatures

    def _digest(self, path: Path) -> Stored:
        """Return the SHA-256 and size of a file, which is read only if it has changed."""
        signature = _signature(path)
        known = self._digests.get(path)
        if known is None or known[0] != signature:
            with _opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                known = self._digests[path] = signature, Stored(_copy(file, None, size), size)
        return known[1]

    def _upload(self, name: str, stored: Stored, path: Path) -> None:
        place = self._object(name, stored.sha256)
        with _opened(path) as file, self._reaching("written"), self._new(place) as target:
            sha256 = _copy(file, target, stored.size)
        if sha256 != stored.sha256:  # the file was replaced, or changed other than by appending
            self._digests.pop(path, None)
            raise _ChangedError(path)

    # --- pulling

    def _download(self, name: str, stored: Stored, objects: Path) -> None:
        path, source = objects / stored.sha256, self._object(name, stored.sha256)
        if path.is_file():
            return
        with contextlib.ExitStack() as opened:
            with self._reaching("read"):
                try:
                    data = opened.enter_context(self._fs.open(source, "rb"))
                except FileNotFoundError as error:
                    raise _ChangedError(f"{stored.sha256} is missing") from error
            with files.new_file(path) as file:
                with self._reaching("read"):
                    sha256 = _copy(data, file)
                if sha256 != stored.sha256:
                    raise _ChangedError(f"{stored.sha256} is corrupt, as its SHA-256 is {sha256}")

    # --- the storage

    def _study(self) -> Any:
        """Return what the study is that has reserved the storage; None: none has."""
        with self._reaching("read"):
            try:
                return json.loads(self._fs.cat_file(f"{self._root}/{_STUDY}"))
            except FileNotFoundError:
                return None

    def _manifest(self, name: str) -> str:
        return f"{self._root}/{name}.json"

    def _object(self, name: str, sha256: str) -> str:
        return f"{self._root}/{name}/{sha256}"

    def _write(self, path: str, data: bytes) -> None:
        if self._is_local:
            files.write_bytes(Path(path), data)
        else:
            self._fs.pipe_file(path, data)

    def _new(self, path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a new object; if its writer is killed, no manifest names what there is of it."""
        target: contextlib.AbstractContextManager[IO[bytes]]
        target = files.new_file(Path(path)) if self._is_local else self._fs.open(path, "wb")
        return target

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """Turn whatever the protocol's package raises into an error that names the storage."""
        try:
            yield
        except (IsolossError, _ChangedError):
            raise
        except Exception as error:
            raise IsolossError(f"{self.url} cannot be {what}: {type(error).__name__}: {error}") from error

    @staticmethod
    def _all(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Call a function with each item, several at a time."""
        with ThreadPoolExecutor(_TRANSFERS) as pool:
            return list(pool.map(function, items))


class _ChangedError(Exception):
    """A file or an object was replaced or deleted while it was read; the argument says which."""


def listing(folder: Path, root: Path) -> dict[str, Path]:
    """Return the files in a folder by their paths relative to `root`, without locks and unfinished files."""
    found = {}
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(files.TEMPORARY))
        for name in sorted(names):
            if not name.startswith(files.TEMPORARY) and name != ".lock":
                found[(Path(where) / name).relative_to(root).as_posix()] = Path(where) / name
    return found


def _signature(path: Path) -> _Signature:
    """Return file attributes that change when a file is replaced or grows."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise _ChangedError(path) from None
    return status.st_size, status.st_mtime_ns, status.st_ino


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise _ChangedError(path) from None
    except OSError as error:
        raise IsolossError(f"cannot read {path}: {error.strerror or error}") from error
    with file:
        yield file


def _copy(source: IO[bytes], target: IO[bytes] | None, size: int | None = None) -> str:
    """Copy the first `size` bytes, by default all, and return their SHA-256; without a target, only read them."""
    digest, left = hashlib.sha256(), size
    while block := source.read(_BLOCK if left is None else min(_BLOCK, left)):
        digest.update(block)
        if target is not None:
            target.write(block)
        left = None if left is None else left - len(block)
    return digest.hexdigest()


def _place(held: Path, path: Path) -> None:
    """Make the file `path` from an object: a copy if the file grows, else a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix in APPENDED:
            files.write_bytes(path, held.read_bytes())
            return
        path.unlink(missing_ok=True)  # of an earlier try
        try:
            os.link(held, path)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copy(held, path)
    except FileNotFoundError as error:
        raise _ChangedError(f"{held} was deleted") from error
