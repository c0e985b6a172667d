"""Attempts at a unit: each makes its run directories in folders of its own, and only complete ones get the final names.

An attempt N at the run `runs/NAME` is made in `runs/.NAME.attempt-N`, beside it, so that relative paths to other runs
still hold. It starts from the files of the previous attempt. If that attempt or its process is known to have ended, its
folder is renamed; otherwise it is copied, so that a process that still writes there can do no harm. A finished attempt
is published by a rename that fails if the run is there already. So two processes that hold a unit's lease one after the
other never write into the same folder, not even if the first was paused and resumes later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.plan import Unit

_NUMBER = re.compile(r"\.attempt-(\d+)$")
BY_HAND = 0  # number of the attempt that was made before any lease
_TRIES = 5  # at copying files that their writer may delete in the meantime
_APPENDED = (".jsonl",)  # files that grow; all others are replaced, never changed


def folder(path: Path, number: int) -> Path:
    """Return where an attempt at a run is made; the run itself if that is complete.

    Example:
        >>> folder(Path("runs/base"), 2)
        PosixPath('runs/.base.attempt-2')
    """
    return path if Run(path).complete else path.with_name(f".{path.name}.attempt-{number}")


def arguments(unit: Unit, number: int) -> tuple[str, ...]:
    """Return the arguments of a unit's command, with each run that it makes replaced by the attempt's folder for it."""
    folders = {str(path): str(folder(path, number)) for path in unit.makes}
    return tuple(folders.get(word, word) for word in unit.arguments)


def adopt(units: Sequence[Unit]) -> None:
    """Make the runs of a plan that were begun by hand, or by an earlier version, attempts of number `BY_HAND`.

    Call it only while holding the study's lock. A run that is being trained now stays where it is.
    """
    for unit in units:
        for path in unit.makes:
            run = Run(path)
            if run.exists and not run.complete and not _attempts(path):
                with contextlib.suppress(IsolossError), files.lock(path):
                    path.rename(folder(path, BY_HAND))


def prepare(unit: Unit, number: int, has_ended: Callable[[int], bool]) -> None:
    """Fill the folders of an attempt with the files of the previous one.

    Args:
        unit: The unit.
        number: The number of the attempt, whose lease this process holds.
        has_ended: Whether the attempt of that number no longer writes into its folders.

    Raises:
        IsolossError: The files cannot be read or written.
    """
    for path in unit.makes:
        own = folder(path, number)
        if own == path:
            continue
        earlier = {n: where for n, where in _attempts(path).items() if n < number}
        if own.exists():  # left by this same attempt
            continue
        if earlier:
            last = max(earlier)
            if has_ended(last) and _is_free(earlier[last]):
                with _named(own):
                    earlier[last].rename(own)
            else:
                _copy(earlier[last], own)
            for n, where in earlier.items():
                if n != last and has_ended(n):
                    shutil.rmtree(where, ignore_errors=True)


def publish(unit: Unit, number: int) -> None:
    """Give the complete runs of an attempt their final names; runs that another process has published are kept.

    Raises:
        IsolossError: A folder cannot be renamed.
    """
    for path in unit.makes:
        own = folder(path, number)
        if own == path or not Run(own).complete:
            continue
        with _named(path):
            try:
                own.rename(path)  # fails if a folder of that name holds files
            except OSError:
                if Run(path).complete:
                    continue
                if Run(path).exists:
                    raise
                (path / ".lock").unlink(missing_ok=True)  # all that a command leaves that was killed as it began
                path.rmdir()
                own.rename(path)


def clean(unit: Unit, has_ended: Callable[[int], bool]) -> None:
    """Delete the folders that attempts left at a unit that is done, unless something may still write there."""
    for path in unit.makes:
        for number, where in _attempts(path).items():
            if has_ended(number):
                shutil.rmtree(where, ignore_errors=True)


def _attempts(path: Path) -> dict[int, Path]:
    """Return the folders of the attempts at a run, by number."""
    prefix = f".{path.name}.attempt-"
    try:
        names = [name for name in os.listdir(path.parent) if name.startswith(prefix)]
    except FileNotFoundError:
        return {}
    matches = ((_NUMBER.search(name), name) for name in names)
    return {int(match[1]): path.with_name(name) for match, name in matches if match}


def _is_free(run: Path) -> bool:
    """Whether no process of this machine holds a run, such as a command whose executor has just been killed."""
    try:
        with files.lock(run):
            return True
    except IsolossError:
        return False


def _copy(source: Path, target: Path) -> None:
    """Copy a folder whose writer may still be at work; its complete checkpoints suffice."""
    for last_try in (False,) * (_TRIES - 1) + (True,):
        try:
            with files.new_directory(target) as folder:
                shutil.copytree(
                    source,
                    folder,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(f"{files.TEMPORARY}*", ".lock"),
                    copy_function=_link_or_copy,
                )
            return
        except (OSError, shutil.Error) as error:
            if last_try:
                raise IsolossError(f"cannot copy {source} to {target}: {error}") from error


def _link_or_copy(source: str, target: str) -> None:
    """Link a file that is only ever replaced; copy one that grows, or where linking fails."""
    if not source.endswith(_APPENDED):
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copy2(source, target)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the folder in the error if a rename fails."""
    try:
        yield
    except OSError as error:
        raise IsolossError(f"cannot rename {path}: {error.strerror or error}") from error
