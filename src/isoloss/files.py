"""Writing files so that a reader, or a process killed at any moment, sees the old one or the new one, never a half."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from isoloss.errors import IsolossError, most_like

TEMPORARY = ".tmp-"  # prefix of everything unfinished; whatever carries it may be deleted once its writer is gone
published: dict[Path, int] = {}  # the size of each file that this process has written, in bytes


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the folder of `path` that becomes `path`, flushed to disk, when the block ends well.

    If `path` is a link, the file that it leads to is replaced. A device, a pipe, and the file that this process's
    output goes to are written to directly.

    Raises:
        IsolossError: It cannot be written.
    """
    try:
        with _stream(path) or _replacement(path) as file:
            yield file
    except OSError as error:  # from the disk
        raise IsolossError(f"cannot write {path}: {error.strerror or error}") from error


def _stream(path: Path) -> BinaryIO | None:
    """Open a path that must not be replaced; None for a regular file, a folder, and a path that does not exist."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return None
    for own in (sys.__stdout__, sys.__stderr__):
        # a closed one
        with contextlib.suppress(OSError, ValueError):
            if own is not None and os.path.samestat(there, os.fstat(own.fileno())):
                own.flush()
                return os.fdopen(os.dup(own.fileno()), "wb")
    return None if path.is_file() or path.is_dir() else path.open("wb")


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    target = Path(os.path.realpath(path))
    temporary = _temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            # before the rename: a power failure could otherwise leave the name with an empty file
            file.flush()
            os.fsync(file.fileno())
            # by path: a file that is written ten times takes its space once
            published[path] = file.tell()
        # neither this rename nor the folder is flushed. After a power failure the old file may be back; a resumed
        # command then does that part again
        temporary.replace(target)
    except BaseException:  # also Ctrl-C
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """Return the name under which this process makes a file or folder; on other machines the same number is another."""
    # in the folder of `path`: a rename is atomic only within one file system
    return path.with_name(f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{path.name}")


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data`, whole or not at all."""
    with new_file(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented JSON (NaN refused, keys in the order given), whole or not at all."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


_DIGEST = "digest"


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` as JSON with the SHA-256 of its content, by which `read_sealed` notices damage."""
    write_json(path, {**document, _DIGEST: _digest(document)})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return the document that `write_sealed` wrote; one without a digest, from an earlier version, is not checked.

    Raises:
        IsolossError: The file is missing, unreadable or damaged; the message about damage ends with `remedy`.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.pop(_DIGEST, None) not in (None, _digest(document)):
        raise IsolossError(f"{path} is damaged: its content is not what was written; {remedy}")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    # of the content, not of the file: indentation is no damage
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def append_json(path: Path, line: Any) -> None:
    """Add a line to a file of JSON lines."""
    try:
        # a kill may leave half a line here. `Run.metrics` and `Run.log_lines` cope with that, and resumed training cuts
        # metrics.jsonl off at its checkpoint
        with path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
    except OSError as error:
        raise IsolossError(f"cannot write {path}: {error.strerror or error}") from error


def read_json(path: Path) -> Any:
    """Return the JSON document in `path`; a missing or broken file is an `IsolossError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IsolossError(f"{path} does not exist") from error
    # json raises RecursionError where brackets are nested too deep, and no ValueError
    except (OSError, ValueError, RecursionError) as error:
        raise IsolossError(f"{path} is not a readable JSON file: {error}") from error


def require_folder(path: Path) -> None:
    """Refuse a path that is no folder; where nothing is there, name the existing path that is most like it."""
    if not path.is_dir():
        raise IsolossError(f"there is no folder {path}{nearest(path)}")


def nearest(path: str | Path) -> str:
    """Return the end of a message about a path that is not there: the existing one that is most like it, if one is.

    Each name that does not exist stands for the one beside it that is most like it, and the rest of the path is looked
    for there.
    """
    existing = Path()
    for name in Path(path).parts:
        if not (existing / name).exists():
            try:
                beside = [other.name for other in existing.iterdir() if not other.name.startswith(".")]
            except OSError:  # no folder, or one that cannot be read
                return ""
            found = _most_like_file(name, beside)
            if found is None:
                return ""
            name = found
        existing /= name
    return "" if existing == Path(path) else f"; did you mean {existing}?"


def _most_like_file(name: str, beside: list[str]) -> str | None:
    # without the suffix, which makes a.jsonl like b.jsonl; short names are like many others
    stem, suffix = os.path.splitext(name)
    stems = {os.path.splitext(other)[0]: other for other in beside if other.endswith(suffix)}
    found = most_like(stem, stems, least=0.75)
    return stems[found] if found is not None else most_like(name, set(beside) - set(stems.values()), least=0.75)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing could be written; if it does not exist, the nearest folder above it counts."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(prefix=TEMPORARY, dir=nearest):
            pass
    except OSError as error:
        raise IsolossError(f"cannot write in {folder}: {error.strerror or error}") from error


# endings that no file of a model or tokenizer has
REPORT_SUFFIXES = {".html", ".csv", ".parquet", ".png", ".svg", ".pdf"}


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[str | Path] = ()) -> None:
    """Refuse outputs that could not be written or would overwrite an input, before the work starts.

    Args:
        outputs: The file that each option names; None: not given.
        inputs: The files and folders that are read. All files in a folder count, except pages, figures and tables,
            which may be earlier results. A path that does not exist, such as a name on the hub, does not count.

    Raises:
        IsolossError: An output is a folder, is an input, is given twice, or cannot be written.
    """
    given = {option: file for option, file in outputs.items() if file is not None}
    options: dict[Any, str] = {}
    for option, file in given.items():
        if file.is_dir():
            raise IsolossError(f"{file} is a folder; name a file to write")
        if file.exists() and not file.is_file():  # a device or a pipe takes any number of outputs
            if not os.access(file, os.W_OK):
                raise IsolossError(f"cannot write {file}: {os.strerror(errno.EACCES)}")
            continue
        if (other := options.setdefault(_identity(file), option)) != option:
            raise IsolossError(f"{other} and {option} are the same file, {file}: give each its own")
        check_writable(Path(os.path.realpath(file)).parent)
    if not any(file.is_file() for file in given.values()):
        return
    for source in (Path(name).expanduser() for name in inputs):
        inside = (path for path in source.rglob("*") if path.suffix.lower() not in REPORT_SUFFIXES)
        for path in [source] if source.is_file() else inside:
            if (taken := options.get(_identity(path))) is not None:
                raise IsolossError(f"{taken} is {given[taken]}, which is read as an input: name another file")


def _identity(path: Path) -> Any:
    """Return a key that is the same for all names of one file."""
    try:
        found = path.stat()
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory that becomes `path` when the block ends without an error.

    An existing `path` is replaced; where it is a link, the folder that it leads to is. The files are flushed before the
    rename, so that the name never stands for less than its content.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    replaced = temporary.with_name(f"{temporary.name}-replaced")
    # a killed process that had the same number may have left them
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        # renamed, not deleted: killed while it deletes, it would leave part of the old folder under its name
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        # between the two renames, nothing has the name: an error, or Ctrl-C, there must not cost the old folder
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_new(folder: Path) -> None:
    """Refuse a folder for results that exists and is not empty, or that could not be made."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise IsolossError(f"{folder} exists and is not an empty folder: choose another name")
    check_writable(folder.parent)


@contextlib.contextmanager
def new_output(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end; `folder` must be new or empty."""
    check_new(folder)
    try:
        with new_directory(folder) as temporary:
            yield temporary
    except OSError as error:
        raise IsolossError(f"cannot write {folder}: {error.strerror or error}") from error


def remove_unfinished(folder: Path) -> None:
    """Delete what killed writers left in `folder` (call it only while holding the folder's `lock`)."""
    for leftover in folder.rglob(f"{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(folder: Path, *, name: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Hold `folder`, made where it does not exist, for this process; the system releases it however the process ends.

    Raises:
        IsolossError: Another process holds it and `wait` is false, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / name).open("w")
    except OSError as error:
        raise IsolossError(f"cannot write in {folder}: {error.strerror or error}") from error
    with handle:
        try:
            # the file stays when the lock is released: if it were deleted, one process could lock the old file while
            # another locks a new one
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise IsolossError(f"{folder} is in use by another isoloss process; wait for it or stop it") from error
        except OSError as error:
            raise IsolossError(f"{folder} cannot be locked: {error.strerror or error}") from error
        yield


def tensors_sha256(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 of torch's tensors by name, their shapes and types included, in hexadecimal."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # as bytes, since numpy has no bfloat16; flat, since torch views no tensor without axes as another type
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
