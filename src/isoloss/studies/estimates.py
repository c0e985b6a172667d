"""The time, memory and disk space that the units of a plan will need, estimated from the units that are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.studies.plan import Unit
from isoloss.studies.run.lease import Last, Leases


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a unit needs: measured if it is done, else estimated.

    Attributes:
        unit: The unit, with its expected seconds corrected.
        memory: Peak memory of all its processes, in bytes; None: no unit like it was measured.
        gpu_memory: The same for the memory of its GPUs.
        disk: Size of its result in bytes; None: no unit like it was measured.
        is_measured: Whether the unit is done and was measured itself.
    """

    unit: Unit
    memory: int | None = None
    gpu_memory: int | None = None
    disk: int | None = None
    is_measured: bool = False


def estimates(units: Sequence[Unit], folder: Path) -> list[Estimate]:
    """Return what each unit of a plan needs.

    A unit that is not done is estimated from the measured units of the same subcommand and group, or else from those of
    the same subcommand. Its seconds are those expected beforehand, times the ratio of the time that the measured units
    took to the time expected for them. Its memory is their maximum, and its disk space their mean; without such units,
    all are what the plan expects.

    Args:
        units: The plan.
        folder: The study's folder.
    """
    measured = _records(units, Leases(folder / "leases"))
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
        needs = {
            kind: record.get(kind, common.get(kind, guessed.get(kind))) for kind in ("memory", "gpu_memory", "disk")
        }
        result.append(
            Estimate(
                unit=dataclasses.replace(unit, seconds=record.get("seconds", unit.seconds * common.get("factor", 1.0))),
                is_measured=unit.name in measured,
                **{kind: None if amount is None else round(amount) for kind, amount in needs.items()},
            )
        )
    return result


def _keys(unit: Unit) -> tuple[tuple[str, ...], ...]:
    """Return the keys that this unit shares with units like it, the most specific first."""
    subcommand = unit.arguments[0] if unit.arguments else ""
    return (subcommand, unit.group), (subcommand,)


def _records(units: Iterable[Unit], leases: Leases) -> dict[str, Mapping[str, Any]]:
    """Return what was recorded about the units that are done, by name."""
    last = leases.attempts()
    records: dict[str, Mapping[str, Any]] = {}
    for unit in units:
        attempt = last.get(unit.file_name, Last())
        if attempt.end != "done":
            continue
        # each attempt goes on from the one before; the time of one that was lost is unknown, and so is the sum then
        parts = [leases.end_record(unit.file_name, number, "stopped") for number in range(1, attempt.number)]
        parts.append(leases.end_record(unit.file_name, attempt.number, "done"))
        if all("seconds" in part for part in parts):
            records[unit.name] = {**parts[-1], "seconds": sum(part["seconds"] for part in parts)}
    return records


def _summary(records: Sequence[tuple[Unit, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the ratio of measured to expected seconds, the largest memory and the mean disk space of some units."""
    expected = sum(unit.seconds for unit, _ in records)
    summary = {"factor": sum(record["seconds"] for _, record in records) / expected if expected else 1.0}
    for kind in ("memory", "gpu_memory"):
        if amounts := [record[kind] for _, record in records if kind in record]:
            summary[kind] = max(amounts)
    if amounts := [record["disk"] for _, record in records if "disk" in record]:
        summary["disk"] = sum(amounts) / len(amounts)
    return summary
