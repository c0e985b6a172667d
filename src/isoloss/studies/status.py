"""How far along a study is, from its files alone: what is done, running or failed, and how long the rest will take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isoloss.studies.plan import Unit, in_order, makespan, upward_rank
from isoloss.studies.run.attempt import folder as folder_of
from isoloss.studies.run.attempt import last_line
from isoloss.studies.run.lease import Last, Leases

State = Literal["done", "running", "failed", "interrupted", "to do"]


@dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """How far along a unit is.

    Attributes:
        unit: The unit.
        state: Its state; `interrupted`: it was started, and no process works on it now.
        progress: Progress of a unit that was started and is not done, e.g. `step 100 of 300`.
        host: The machine on which it runs or last ran.
        since: When its last attempt began, in ISO 8601, UTC; empty: never.
        attempts: How many times it was started.
        is_given_up: Whether it failed and is not retried.
        last_line: The last line of its log, if it failed.
    """

    unit: Unit
    state: State
    progress: str = ""
    host: str = ""
    since: str = ""
    attempts: int = 0
    is_given_up: bool = False
    last_line: str = ""


def statuses(units: Sequence[Unit], folder: Path) -> list[UnitStatus]:
    """Return how far along each unit of a plan is.

    A unit whose lease says that it is done counts as done if the files of its result exist. Their contents are not
    read, as that would take minutes for thousands of runs. `isoloss study run`, which redoes a unit whose result does
    not match the plan, and `isoloss study verify` do read them.

    Args:
        units: The plan.
        folder: The study's folder.
    """
    leases = Leases(folder / "leases")
    last = leases.attempts()
    return [_status(unit, last.get(unit.file_name, Last()), leases, folder / "logs") for unit in units]


def _status(unit: Unit, attempt: Last, leases: Leases, logs: Path) -> UnitStatus:
    number, name = attempt.number, unit.file_name
    is_done = unit.has_files if attempt.end == "done" and unit.has_files else unit.done
    if is_done():
        return UnitStatus(unit=unit, state="done", attempts=number)
    progress = unit.progress(functools.partial(_latest, number=number))
    if number == 0:
        return UnitStatus(unit=unit, state="interrupted" if progress else "to do", progress=progress)
    owner = leases.owner(name, number)
    state: State = "interrupted"
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
        is_given_up=state == "failed" and bool(leases.end_record(name, number, "failed").get("final")),
        last_line=last_line(logs / f"{name}.{number}.log") if state == "failed" else "",
    )


def _latest(path: Path, number: int) -> Path:
    """Return where a run is being made: looked up by name, as listing the folder once per run would take long."""
    folder = folder_of(path, number)
    return folder if folder.exists() else path


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """How long the units that are not done will take, in seconds.

    Attributes:
        core_seconds: Seconds times cores, summed over all units: what the rest costs.
        gpu_seconds: The same for GPUs.
        longest_chain: The time of the longest chain of dependent units, which no number of workers can beat.
        with_workers: The time with the given number of workers.
    """

    core_seconds: float
    gpu_seconds: float
    longest_chain: float
    with_workers: float


def remaining(states: Sequence[UnitStatus], workers: int) -> Remaining:
    """Return how long the rest of a plan will take; a unit that has been started counts in full.

    Args:
        states: The statuses of the plan's units, with expected seconds.
        workers: How many cores units may use at a time.
    """
    left = {status.unit.name for status in states if status.state != "done"}
    units = [
        dataclasses.replace(status.unit, after=tuple(name for name in status.unit.after if name in left))
        for status in states
        if status.unit.name in left
    ]
    return Remaining(
        core_seconds=sum(unit.seconds * unit.needs.all_cores for unit in units),
        gpu_seconds=sum(unit.seconds * unit.needs.all_gpus for unit in units),
        longest_chain=max(upward_rank(units).values(), default=0.0),
        with_workers=makespan(in_order(units), workers),
    )
