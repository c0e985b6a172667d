"""The plan of a study: commands on directories, and which each has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Protocol

from isoloss.errors import IsolossError


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One command on a directory, which may be killed at any moment and run again.

    Attributes:
        name: What it is called, unique in a plan.
        arguments: Of the `isoloss` command.
        done: Whether its result is there; reads files only.
        progress: Progress of a started unit that is not done, e.g. `step 100 of 300`; empty: not started.
        after: Names of the units whose results it needs.
        cost: Expected duration, in any one unit of time for the whole plan; decides the order within a block.
        block: Number of its block; units of lower blocks start first.
    """

    name: str
    arguments: tuple[str, ...]
    done: Callable[[], bool]
    progress: Callable[[], str] = lambda: ""
    after: tuple[str, ...] = ()
    cost: float = 1.0
    block: int = 0


class Executor(Protocol):
    """Carries out a plan; registered in `isoloss.registry.EXECUTORS`. All state is in the files of the units."""

    def __call__(
        self,
        units: Sequence[Unit],
        *,
        workers: int,
        logs: Path,
        say: Callable[[str], None],
        on_done: Callable[[Unit], None],
    ) -> int:
        """Carry out the units that are not done, each after those it waits for.

        Args:
            units: The plan, in the order in which to start its units; each comes after those it waits for. Whenever a
                worker is free, start the first unit that need not wait.
            workers: How many units run at a time.
            logs: Folder for the units' output.
            say: Called with one line when a unit starts or ends, and on progress.
            on_done: Called in this process after each unit that was run and is done. It may take seconds, to write the
                interim page; other units keep running.

        Returns:
            How many units were run.

        Raises:
            IsolossError: A unit failed.
            KeyboardInterrupt: Passed on after the units have saved.
        """


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Return a plan in the order in which to start its units: block by block, and in each the longest chain first.

    Raises:
        IsolossError: As for `check`.

    Example:
        >>> known = {"arguments": (), "done": lambda: False}
        >>> plan = [Unit(name="b", block=1, cost=9, **known), Unit(name="short", **known),
        ...         Unit(name="long", cost=2, **known)]
        >>> [unit.name for unit in in_order(plan)]
        ['long', 'short', 'b']
    """
    check(units)
    rank = urgency(units)
    return sorted(units, key=lambda unit: (unit.block, -rank[unit.name]))


def check(units: Sequence[Unit]) -> None:
    """Refuse a plan with a repeated name, an unknown predecessor, one of a later block, or a cycle."""
    names = [unit.name for unit in units]
    blocks = {unit.name: unit.block for unit in units}
    for name in names:
        if names.count(name) > 1:
            raise IsolossError(f"two units of the plan are called {name!r}")
    for unit in units:
        for name in unit.after:
            if name not in blocks:
                raise IsolossError(f"unit {unit.name!r} waits for {name!r}, which is not in the plan")
            if blocks[name] > unit.block:
                raise IsolossError(
                    f"unit {unit.name!r} of block {unit.block} waits for {name!r} of block {blocks[name]}: a block "
                    "must be complete without the later ones"
                )
    try:
        TopologicalSorter({unit.name: unit.after for unit in units}).prepare()
    except CycleError as error:
        raise IsolossError(f"the units {', '.join(sorted(set(error.args[1])))} wait for each other") from error


def urgency(units: Sequence[Unit]) -> dict[str, float]:
    """Return for each unit the cost of the longest chain that starts with it: the longest is started first."""
    result: dict[str, float] = {}

    def chain(unit: Unit) -> float:
        if unit.name not in result:
            followers = [u for u in units if unit.name in u.after]
            result[unit.name] = unit.cost + max((chain(u) for u in followers), default=0.0)
        return result[unit.name]

    for unit in units:
        chain(unit)
    return result
