"""How far along a study is, from its files alone: what is done, running or failed, and how long the rest will take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isoloss.studies import attempts
from isoloss.studies.job import last_line
from isoloss.studies.leases import Attempt, Leases
from isoloss.studies.plan import Unit, in_order, makespan, urgency

State = Literal["done", "running", "failed", "begun", "to do"]


@dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """How far along a unit is.

    Attributes:
        unit: The unit.
        state: `begun`: it was started, and nobody works on it now.
        progress: Progress of a unit that is running or begun, e.g. `step 100 of 300`.
        host: The machine on which it runs or ran last.
        since: When its last attempt began, in ISO 8601, UTC; empty: never.
        attempts: How many times it was started.
        last_line: The last line of its log, if it failed.
    """

    unit: Unit
    state: State
    progress: str = ""
    host: str = ""
    since: str = ""
    attempts: int = 0
    last_line: str = ""


def statuses(units: Sequence[Unit], folder: Path) -> list[UnitStatus]:
    """Return how far along each unit of a plan is.

    Args:
        units: The plan.
        folder: The study's folder.
    """
    leases = Leases(folder / "leases")
    last = leases.attempts()
    return [_status(unit, last.get(unit.file_name, Attempt()), leases, folder / "logs") for unit in units]


def _status(unit: Unit, attempt: Attempt, leases: Leases, logs: Path) -> UnitStatus:
    number, name = attempt.number, unit.file_name
    if unit.done():
        return UnitStatus(unit=unit, state="done", attempts=number)
    progress = unit.progress(functools.partial(_latest, number=number))
    if number == 0:
        return UnitStatus(unit=unit, state="begun" if progress else "to do", progress=progress)
    owner = leases.owner(name, number)
    state: State = "begun"
    if attempt.end == "failed":
        state = "failed"
    elif attempt.end is None and not leases.is_lost(name, number):
        state = "running"
    return UnitStatus(
        unit=unit,
        state=state,
        progress=progress,
        host=str(owner.get("host", "")),
        since=str(owner.get("began", "")),
        attempts=number,
        last_line=last_line(logs / f"{name}.{number}.log") if state == "failed" else "",
    )


def _latest(path: Path, number: int) -> Path:
    """Return where a run is being made: looked up by name, as listing the folder for each of many runs takes long."""
    folder = attempts.folder(path, number)
    return folder if folder.exists() else path


def with_measured_seconds(units: Sequence[Unit], folder: Path) -> tuple[list[Unit], int]:
    """Return a plan whose expected seconds are corrected by how long units of the same subcommand took.

    The correction factor of a subcommand is the time that its finished units took, divided by that expected for them.

    Args:
        units: The plan.
        folder: The study's folder.

    Returns:
        The plan, and the number of units whose time was measured.
    """
    leases = Leases(folder / "leases")
    last = leases.attempts()
    took: dict[str, float] = {}
    expected: dict[str, float] = {}
    count = 0
    for unit in units:
        attempt = last.get(unit.file_name, Attempt())
        if attempt.end == "done":
            end = leases.ended(unit.file_name, attempt.number, "done")
            if attempt.number == 1 and "seconds" in end:  # with several attempts, the last one's time is not the whole
                kind = unit.arguments[0] if unit.arguments else ""
                took[kind] = took.get(kind, 0.0) + end["seconds"]
                expected[kind] = expected.get(kind, 0.0) + unit.seconds
                count += 1
    factors = {kind: took[kind] / expected[kind] for kind in took if expected[kind]}
    kinds = [unit.arguments[0] if unit.arguments else "" for unit in units]
    return [
        dataclasses.replace(unit, seconds=unit.seconds * factors.get(kind, 1.0))
        for unit, kind in zip(units, kinds, strict=True)
    ], count


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """How long the units that are not done will take, in seconds.

    Attributes:
        total: On one core, one after the other.
        longest_chain: For the longest chain of dependent units: no number of workers can be faster.
        with_workers: With the given number of workers.
    """

    total: float
    longest_chain: float
    with_workers: float


def remaining(states: Sequence[UnitStatus], workers: int) -> Remaining:
    """Return how long what is left of a plan will take; a unit that has begun counts in full.

    Args:
        states: The plan, with expected seconds.
        workers: How many units run at a time.
    """
    left = {status.unit.name for status in states if status.state != "done"}
    units = [
        dataclasses.replace(status.unit, after=tuple(name for name in status.unit.after if name in left))
        for status in states
        if status.unit.name in left
    ]
    return Remaining(
        total=sum(unit.seconds for unit in units),
        longest_chain=max(urgency(units).values(), default=0.0),
        with_workers=makespan(in_order(units), workers),
    )
