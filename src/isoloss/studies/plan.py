"""The plan of a study: commands on directories, what each of them waits for, and what it needs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from isoloss.errors import IsolossError

_LONGEST_NAME = 150  # bytes of a unit's name in file names: suffixes are added, and file systems allow 255


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a unit of work needs while it runs.

    Attributes:
        cores: CPU cores of each process, at least 1; the process computes with as many threads.
        gpus: GPUs of each process: a whole number, or a fraction below 1 to let several units share one. A unit with
            GPUs trains and measures on `cuda`, any other on `cpu`.
        memory: Memory in GiB; 0: unknown, so none is reserved.
        processes: Number of processes, started by torchrun.

    Raises:
        IsolossError: A number is out of range.

    Example:
        >>> from isoloss.studies import Resources
        >>> Resources(cores=2, gpus=0.25)
        Resources(cores=2, gpus=0.25, memory=0.0, processes=1)
    """

    cores: int = 1
    gpus: float = 0.0
    memory: float = 0.0
    processes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("cores", 1), ("processes", 1), ("gpus", 0), ("memory", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise IsolossError(f"{name} of a unit of work is {value}; it must be at least {least}")
            if name in ("cores", "processes") and value != int(value):
                raise IsolossError(f"{name} of a unit of work is {value}; it must be a whole number")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise IsolossError(f"gpus of a unit of work is {self.gpus}; above 1 it must be a whole number")
        if 0 < self.gpus < 1 and self.processes > 1:
            raise IsolossError(
                f"gpus of a unit of work with {self.processes} processes is {self.gpus}; each needs a whole GPU"
            )

    @property
    def all_cores(self) -> int:
        """Cores of all its processes."""
        return self.cores * self.processes

    @property
    def all_gpus(self) -> float:
        """GPUs of all its processes."""
        return self.gpus * self.processes


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a unit of work is expected to need before any like it has run.

    Attributes:
        seconds: Its duration with the resources that it needs.
        memory: Peak memory of all its processes, in bytes; None: unknown.
        gpu_memory: The same for the memory of its GPUs.
        disk: Size of its result in bytes.
    """

    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None
    disk: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One command on a directory, which may be killed at any moment and run again.

    Attributes:
        name: What it is called, unique in a plan.
        arguments: Arguments of the `isoloss` command.
        done: Whether its result is there; reads files only.
        has_files: Whether the files of its result exist, whatever they hold: enough to show its status if its lease
            says that it is done. None: `done` is called instead.
        progress: Progress of a started unit that is not done, e.g. `step 100 of 300`; empty: not started. It is called
            with a function that maps the path of each of `outputs` to the folder in which the current attempt makes it.
        outputs: Paths of the run directories that it makes, as they are written in `arguments`. An attempt makes each
            in its own folder (`isoloss.studies.run.attempt`), and only a complete one gets its final name.
        after: Names of the units whose results it needs.
        seconds: Expected duration, guessed beforehand.
        needs: What it needs while it runs.
        block: Number of its block; units of lower blocks start first.
        group: A label shared by units that need about the same time, memory and disk space.
        shown_in: The figures and tables that show what it makes.
        expected: What it is expected to need; None: unknown but for the seconds.
    """

    name: str
    arguments: tuple[str, ...]
    done: Callable[[], bool]
    has_files: Callable[[], bool] | None = None
    progress: Callable[[Callable[[Path], Path]], str] = lambda _: ""
    outputs: tuple[Path, ...] = ()
    after: tuple[str, ...] = ()
    seconds: float = 1.0
    needs: Resources = field(default_factory=Resources)
    block: int = 0
    group: str = ""
    shown_in: tuple[str, ...] = ()
    expected: Expected | None = None

    @property
    def file_name(self) -> str:
        """The form of its name that is used in file names.

        Example:
            >>> from isoloss.studies.plan import Unit
            >>> Unit(name="train base, grammars 1 to 4", arguments=(), done=lambda: False).file_name
            'train-base-grammars-1-to-4'
        """
        plain = re.sub(r"[^\w-]+", "-", self.name)
        if len(plain.encode()) <= _LONGEST_NAME:
            return plain
        # cut by bytes, of which a letter may have several
        start = plain.encode()[: _LONGEST_NAME - 9].decode(errors="ignore")
        return f"{start}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def check(units: Sequence[Unit]) -> None:
    """Refuse a plan with a repeated name, a cycle, or a unit that waits for an unknown one or one of a later block."""
    blocks: dict[str, int] = {}
    names: dict[str, str] = {}
    for unit in units:
        if unit.name in blocks:
            raise IsolossError(f"two units of the plan are called {unit.name!r}")
        blocks[unit.name] = unit.block
        # they would share their folder
        other = names.setdefault(unit.file_name, unit.name)
        if other != unit.name:
            raise IsolossError(
                f"the units {other!r} and {unit.name!r} would have the same file name, {unit.file_name}: rename one"
            )
    for unit in units:
        for name in unit.after:
            if name not in blocks:
                raise IsolossError(f"unit {unit.name!r} waits for {name!r}, which is not in the plan")
            if blocks[name] > unit.block:
                raise IsolossError(
                    f"unit {unit.name!r} of block {unit.block} waits for {name!r} of block {blocks[name]}: a unit "
                    "cannot wait for a later block"
                )
    try:
        TopologicalSorter({unit.name: unit.after for unit in units}).prepare()
    except CycleError as error:
        raise IsolossError(f"the units {', '.join(sorted(set(error.args[1])))} wait for each other") from error


def complete_blocks(units: Sequence[Unit], done: Collection[str]) -> tuple[int, ...]:
    """Return the blocks of a plan all of whose units are done, in order.

    Args:
        units: The plan.
        done: Names of the units that are done.

    Example:
        >>> from isoloss.studies.plan import Unit, complete_blocks
        >>> known = {"arguments": (), "done": lambda: False}
        >>> plan = [Unit(name="a", **known), Unit(name="b", block=1, **known), Unit(name="c", block=1, **known)]
        >>> complete_blocks(plan, {"a", "b"}), complete_blocks(plan, {"a", "b", "c"})
        ((0,), (0, 1))
    """
    return tuple(sorted({unit.block for unit in units} - {unit.block for unit in units if unit.name not in done}))
