"""How far along a study is, from its files alone: what is done, running or failed, and what the rest will take."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isoloss.studies.plan import Unit
from isoloss.studies.run.attempt import Attempts, last_lines
from isoloss.studies.run.attempt import folder as folder_of

OTHERS = "no figure"  # what units are for that no figure shows, in a study with figures
_AMOUNTS = ("memory", "gpu_memory", "disk")  # in bytes, of what a unit needs

State = Literal["done", "running", "failed", "interrupted", "to do"]


@dataclass(frozen=True, kw_only=True)
class UnitStatus:
    """How far along a unit is, and what it needs: measured, or estimated from units like it; None: not known."""

    unit: Unit  # if it is done, its seconds are those that it took, else those expected of it
    state: State  # `interrupted`: it was started, and no process works on it now
    progress: str = ""  # of a unit that was started and is not done, e.g. `step 100 of 300`
    host: str = ""  # the machine on which it runs or last ran
    since: str = ""  # when its last attempt began, in ISO 8601, UTC; empty: never
    attempts: int = 0  # how many times it was started
    is_given_up: bool = False  # whether it failed and is not retried
    last_line: str = ""  # of its log, if it failed
    memory: int | None = None  # bytes of all its processes at the peak
    gpu_memory: int | None = None
    disk: int | None = None  # bytes of its result
    is_measured: bool = False  # whether it is done and was measured itself


def statuses(units: Sequence[Unit], folder: Path) -> list[UnitStatus]:
    """Return how far along each unit of a plan is, and what it needs.

    A unit whose lease says that it is done counts as done if the files of its result exist. Their contents are not
    read, as that would take minutes for thousands of runs. `isoloss study run`, which redoes a unit whose result does
    not match the plan, and `isoloss study verify` do read them.

    What a unit that is not done needs is estimated from the measured units of the same subcommand and group, or else
    from all of the same subcommand. Its seconds are the expected ones, times the ratio of the time that the measured
    units took to the time expected for them. Its memory is their maximum, and its disk space their mean;
    without such units, all are what the plan expects.
    """
    attempts = Attempts(folder)
    records = {unit.name: attempts.records(unit) for unit in units}
    measured = {name: used for name, leases in records.items() if (used := _used(leases))}
    alike: dict[tuple[str, ...], list[tuple[Unit, Mapping[str, Any]]]] = {}
    for unit in units:
        if unit.name in measured:
            for key in _keys(unit):
                alike.setdefault(key, []).append((unit, measured[unit.name]))
    summaries: dict[tuple[str, ...], dict[str, float]] = {key: _summary(records) for key, records in alike.items()}
    result = []
    for unit in units:
        common = next((summaries[key] for key in _keys(unit) if key in summaries), {})
        record = measured.get(unit.name, {})
        guessed = {} if unit.expected is None else vars(unit.expected)
        needs = {kind: record.get(kind, common.get(kind, guessed.get(kind))) for kind in _AMOUNTS}
        amounts: dict[str, Any] = {kind: None if needed is None else round(needed) for kind, needed in needs.items()}
        seconds = record.get("seconds", unit.seconds * common.get("factor", 1.0))
        state = _status(unit, records[unit.name], attempts)
        timed = dataclasses.replace(unit, seconds=seconds)
        result.append(dataclasses.replace(state, unit=timed, is_measured=unit.name in measured, **amounts))
    return result


def _status(unit: Unit, leases: Sequence[Mapping[str, Any]], attempts: Attempts) -> UnitStatus:
    number, lease = len(leases), leases[-1] if leases else {}
    is_done = unit.has_files if lease.get("end") == "done" and unit.has_files else unit.done
    if is_done():
        return UnitStatus(unit=unit, state="done", attempts=number)
    progress = unit.progress(functools.partial(_latest, number=number))
    if number == 0:
        return UnitStatus(unit=unit, state="interrupted" if progress else "to do", progress=progress)
    state: State = "interrupted"
    if lease.get("end") == "failed":
        state = "failed"
    elif attempts.seems_alive(unit, number, lease):
        state = "running"
    log = attempts.folder / unit.file_name / f"{number}.log"
    return UnitStatus(
        unit=unit,
        state=state,
        progress=progress,
        host=str(lease.get("host", "")),
        since=str(lease.get("began", "")),
        attempts=number,
        is_given_up=state == "failed" and bool(lease.get("final")),
        last_line=last_lines(log) if state == "failed" else "",
    )


def _latest(path: Path, number: int) -> Path:
    """Return where a run is being made: looked up by name, as listing the folder once per run would take long."""
    folder = folder_of(path, number)
    return folder if folder.exists() else path


def _keys(unit: Unit) -> tuple[tuple[str, ...], ...]:
    """Return the keys that this unit shares with units like it, the most specific first."""
    subcommand = unit.arguments[0] if unit.arguments else ""
    return (subcommand, unit.group), (subcommand,)


def _used(leases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what the attempts at a unit used, if it is done; empty: not known."""
    # each attempt goes on from the one before; the time of one that was lost is unknown, and so is the sum then
    if not leases or leases[-1].get("end") != "done" or not all("seconds" in each for each in leases):
        return {}
    return {**leases[-1], "seconds": sum(each["seconds"] for each in leases)}


def _summary(records: Sequence[tuple[Unit, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the ratio of measured to expected seconds, the largest memory and the mean disk space of some units."""
    # a ratio of sums: in a mean of ratios, a unit of a second would count as much as one of an hour
    expected = sum(unit.seconds for unit, _ in records)
    summary = {"factor": sum(record["seconds"] for _, record in records) / expected if expected else 1.0}
    for kind in ("memory", "gpu_memory"):
        if amounts := [record[kind] for _, record in records if kind in record]:
            # memory must do for the largest unit; disk space adds up, so below it is the mean that counts
            summary[kind] = max(amounts)
    if amounts := [record["disk"] for _, record in records if "disk" in record]:
        summary["disk"] = sum(amounts) / len(amounts)
    return summary


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """How long the units that are not done will take, in seconds."""

    core_seconds: float  # seconds times cores, summed over all units: what the rest costs
    gpu_seconds: float
    with_workers: float  # with the given number of cores, if none idles


def remaining(states: Sequence[UnitStatus], workers: int) -> Remaining:
    """Return how long the rest of a plan will take; a unit that has been started counts in full."""
    units = [status.unit for status in states if status.state != "done"]
    core_seconds = sum(unit.seconds * unit.needs.all_cores for unit in units)
    return Remaining(
        core_seconds=core_seconds,
        gpu_seconds=sum(unit.seconds * unit.needs.all_gpus for unit in units),
        with_workers=max([core_seconds / workers, *(unit.seconds for unit in units)]),
    )


def by_purpose(states: Sequence[UnitStatus]) -> dict[str, list[UnitStatus]]:
    """Return the units that are left, by the figure or table that shows them; without figures, by their group.

    Each list has all units that its units wait for, so that a unit can be in several.
    """
    left = {status.unit.name: status for status in states if status.state != "done"}
    has_figures = any(status.unit.shown_in for status in states)
    needed: dict[str, dict[str, UnitStatus]] = {}
    for status in left.values():
        unit = status.unit
        for purpose in unit.shown_in or (OTHERS if has_figures else unit.group,):
            found, waiting = needed.setdefault(purpose, {}), [unit.name]
            while waiting:
                name = waiting.pop()
                if name in left and name not in found:
                    found[name] = left[name]
                    waiting += left[name].unit.after

    def in_order(purpose: str) -> tuple[object, ...]:
        return purpose == OTHERS, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", purpose)]

    names = sorted(needed, key=in_order) if has_figures else needed
    return {name: list(needed[name].values()) for name in names}
