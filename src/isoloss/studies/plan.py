"""What an engine carries out: commands on directories, with what each has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isoloss.errors import IsolossError


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One command on a directory, which may be killed at any moment and run again.

    Attributes:
        name: What it is called, unique in a plan.
        arguments: Of the `isoloss` command.
        done: Whether its result is there; reads files only.
        after: Names of the units whose results it needs.
        cost: Expected duration, in any one unit of time for the whole plan; decides the order.
    """

    name: str
    arguments: tuple[str, ...]
    done: Callable[[], bool]
    after: tuple[str, ...] = ()
    cost: float = 1.0


def check(units: Sequence[Unit]) -> None:
    """Refuse a plan with a repeated name, an unknown predecessor or a circle."""
    names = [unit.name for unit in units]
    for name in names:
        if names.count(name) > 1:
            raise IsolossError(f"two units of the plan are called {name!r}")
    for unit in units:
        for name in unit.after:
            if name not in names:
                raise IsolossError(f"unit {unit.name!r} waits for {name!r}, which is not in the plan")
    placed: set[str] = set()
    while len(placed) < len(units):
        free = [u.name for u in units if u.name not in placed and placed.issuperset(u.after)]
        if not free:
            circle = ", ".join(sorted(set(names) - placed))
            raise IsolossError(f"the units {circle} wait for each other")
        placed.update(free)


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
