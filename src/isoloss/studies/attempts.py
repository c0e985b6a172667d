"""Attempts at a unit: each makes its run directories in folders of its own, and only complete ones get the final names.

Attempt N at the run `runs/NAME` is made beside it, in `runs/.NAME.attempt-N`, so that relative paths to other runs
still hold. It starts from the files of the previous attempt. If that attempt or its process is known to have ended, its
folder is renamed; otherwise the folder is copied, so that a process that still writes there can do no harm. A finished
attempt is published by a rename that fails if the run is already there. So two processes that hold a unit's lease one
after the other never write into the same folder, even if the first was paused and resumes later.
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
BY_HAND = 0  # number of an attempt that was made before there were leases
_TRIES = 5  # at copying files that their writer may delete meanwhile
APPENDED = (".jsonl",)  # files that grow; all others are replaced, never changed


def folder(path: Path, number: int) -> Path:
    """Return the folder in which an attempt at a run is made; that of the run itself if it is complete.

    Example:
        >>> folder(Path("runs/base"), 2)
        PosixPath('runs/.base.attempt-2')
    """
    return path if Run(path).complete else unfinished(path, number)


def unfinished(path: Path, number: int) -> Path:
    """Return the folder of an attempt at a run, whether or not the run is complete by now."""
    return path.with_name(f".{path.name}.attempt-{number}")


def arguments(unit: Unit, number: int) -> tuple[str, ...]:
    """Return the arguments of a unit's command, with each run that it makes replaced by the attempt's folder for it."""
    folders = {str(path): str(folder(path, number)) for path in unit.outputs}
    return tuple(folders.get(word, word) for word in unit.arguments)


def adopt(units: Sequence[Unit]) -> None:
    """Make unfinished runs that were started by hand, or by an earlier version, attempts of number `BY_HAND`.

    Call it only while holding the study's lock. A run that is being trained now stays where it is.
    """
    for unit in units:
        for path in unit.outputs:
            run = Run(path)
            if run.exists and not run.complete and not _attempts(path):
                with contextlib.suppress(IsolossError), files.lock(path):
                    path.rename(folder(path, BY_HAND))


def prepare(unit: Unit, number: int, has_ended: Callable[[int], bool]) -> None:
    """Fill the folders of an attempt with the files of the previous one.

    Args:
        unit: The unit.
        number: The number of the attempt, whose lease this process holds.
        has_ended: Whether the attempt with a given number no longer writes into its folders.

    Raises:
        IsolossError: The files cannot be read or written.
    """
    for path in unit.outputs:
        own = folder(path, number)
        if own == path:
            continue
        earlier = _before(path, number)
        if own.exists():  # from this same attempt
            continue
        if earlier:
            last = max(earlier)
            if has_ended(last) and _is_free(earlier[last]):
                with _naming(own):
                    earlier[last].rename(own)
            else:
                _copy(earlier[last], own)
            for n, where in earlier.items():
                if n != last and has_ended(n):
                    shutil.rmtree(where, ignore_errors=True)


def publish(unit: Unit, number: int) -> None:
    """Give the complete runs of an attempt their final names; runs that other processes have published are kept.

    Raises:
        IsolossError: A folder cannot be renamed.
    """
    for path in unit.outputs:
        own = folder(path, number)
        if own == path or not Run(own).complete:
            continue
        with _naming(path):
            try:
                own.rename(path)  # fails if a folder of that name holds files
            except OSError:
                if Run(path).complete:
                    continue
                if Run(path).exists:
                    raise
                (path / ".lock").unlink(missing_ok=True)  # all that is left of a command that was killed as it started
                path.rmdir()
                own.rename(path)


def clean(unit: Unit, number: int, has_ended: Callable[[int], bool]) -> None:
    """Delete the folders that remain of a unit's attempts up to this one, unless something may still write there."""
    for path in unit.outputs:
        for n, where in _before(path, number + 1).items():
            if has_ended(n):
                shutil.rmtree(where, ignore_errors=True)


def _before(path: Path, number: int) -> dict[int, Path]:
    """Return the folders of the attempts at a run before this one, by number."""
    # looked up by name: listing the parent folder would take longer the more runs there are
    folders = {n: path.with_name(f".{path.name}.attempt-{n}") for n in range(number)}
    return {n: where for n, where in folders.items() if where.exists()}


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
    """Whether no process on this machine has locked a run, such as a command whose executor has just been killed."""
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
                    ignore=shutil.ignore_patterns(f"{files.TEMPORARY}*", ".lock", *(f"*{end}" for end in APPENDED)),
                    copy_function=_link_or_copy,
                )
                for end in APPENDED:  # last: a checkpoint needs the metrics of all steps before it
                    for growing in source.glob(f"*{end}"):
                        shutil.copy2(growing, folder)
            return
        except (OSError, shutil.Error) as error:
            if last_try:
                raise IsolossError(f"cannot copy {source} to {target}: {error}") from error


def _link_or_copy(source: str, target: str) -> None:
    """Link a file that is only ever replaced; copy it if it cannot be linked."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the folder in the error if a rename fails."""
    try:
        yield
    except OSError as error:
        raise IsolossError(f"cannot rename {path}: {error.strerror or error}") from error
