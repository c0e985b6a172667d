"""`isoloss study plan` and `isoloss study status`: the units, how far along each is, and the time that is left."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence

from isoloss import files
from isoloss.cli import common
from isoloss.errors import IsolossError, printable
from isoloss.studies.estimates import Estimate, estimates
from isoloss.studies.folder import StudyFolder
from isoloss.studies.status import Remaining, UnitStatus, remaining, statuses

WATCH_SECONDS = 2.0  # between two tables on a terminal
LINE_SECONDS = 30.0  # between two lines elsewhere
MIB = 2**20
BEGUN = ("running", "failed", "interrupted")


def show(folder: StudyFolder, action: str, run_command: str, workers: int, *, watch: bool, as_json: bool) -> int:
    """Print each unit and its state; refuse a folder that holds something else.

    Args:
        folder: The study.
        action: `plan` or `status`.
        run_command: The command that runs the study.
        workers: Number of workers that the expected time assumes.
        watch: Whether to keep refreshing until all units are done.
        as_json: Whether to print JSON.
    """
    if action == "plan":
        folder.check()
    if not folder.exists() and action == "status":
        raise IsolossError(f"{folder.path} holds no study: {run_command} starts one{files.nearest(folder.path)}")
    if watch:
        return _watch(folder, as_json)
    if action == "status" and not as_json:
        _print_status(folder, statuses(folder.plan(), folder.path))
        return 0
    states, needed = _states(folder)
    left = remaining(states, workers)
    if as_json:
        common.emit_json(_document(folder, states, needed, left, workers))
    else:
        _print_plan(folder, states, needed, left, workers)
    return 0


def _states(folder: StudyFolder) -> tuple[list[UnitStatus], list[Estimate]]:
    """Return the status of each unit, with its expected seconds, and the estimates of what each needs."""
    needed = estimates(folder.plan(), folder.path)
    return statuses([estimate.unit for estimate in needed], folder.path), needed


def _document(
    folder: StudyFolder, states: Sequence[UnitStatus], needed: Sequence[Estimate], left: Remaining, workers: int
) -> dict[str, object]:
    rows = [
        {
            "unit": status.unit.name,
            "state": status.state,
            "progress": status.progress,
            "host": status.host,
            "since": status.since,
            "attempts": status.attempts,
            "last_line": status.last_line,
            "after": list(status.unit.after),
            "needs": dataclasses.asdict(status.unit.needs),
            "expected_seconds": round(status.unit.seconds, 3),
            "memory_bytes": estimate.memory,
            "gpu_memory_bytes": estimate.gpu_memory,
            "disk_bytes": estimate.disk,
            "measured": estimate.is_measured,
            "shown_in": list(status.unit.shown_in),
            "arguments": list(status.unit.arguments),
        }
        for status, estimate in zip(states, needed, strict=True)
    ]
    return {
        "study": folder.study.name,
        "scale": folder.scale_name,
        "folder": str(folder.path),
        "workers": workers,
        "remaining_seconds": {name: round(value, 1) for name, value in dataclasses.asdict(left).items()},
        "units": rows,
    }


def _print_plan(
    folder: StudyFolder, states: Sequence[UnitStatus], needed: Sequence[Estimate], left: Remaining, workers: int
) -> None:
    needs = {
        "cores": [str(status.unit.needs.all_cores) for status in states],
        "GPUs": [f"{status.unit.needs.all_gpus:g}" for status in states],
        "reserved (GiB)": [f"{status.unit.needs.memory:g}" for status in states],
        "memory (MiB)": [_mib(estimate.memory) for estimate in needed],
        "GPU memory (MiB)": [_mib(estimate.gpu_memory) for estimate in needed],
        "disk (MiB)": [_mib(estimate.disk) for estimate in needed],
    }
    # most plans have one-core units only: these columns would be the same in every row
    usual = {"cores": {"1"}, "GPUs": {"0"}, "reserved (GiB)": {"0"}}
    shown = [(name, words) for name, words in needs.items() if set(words) - usual.get(name, {"", _mib(0)})]
    rows = [
        (
            status.unit.name,
            ", ".join(filter(None, (status.state, status.progress))),
            ", ".join(status.unit.after),
            f"{status.unit.seconds:,.0f}",
            *(words[i] for _, words in shown),
        )
        for i, status in enumerate(states)
    ]
    columns: tuple[str, ...] = ("unit", "state", "after", "seconds", *(name for name, _ in shown))
    left_columns = 3
    if any(status.unit.shown_in for status in states):  # of a study that says which figures its runs are for
        columns, left_columns = ("unit", "shown in", *columns[1:]), 4
        rows = [(row[0], ", ".join(status.unit.shown_in), *row[1:]) for status, row in zip(states, rows, strict=True)]
    common.print_table(f"{folder.study.name} at scale {folder.scale_name}", columns, rows, left=left_columns)
    _say_done(folder, states)
    measured = sum(estimate.is_measured for estimate in needed)
    basis = f"from the {measured} units measured here" if measured else "a rough guess, as no unit is measured yet"
    if all(status.state == "done" for status in states):
        used = sum(status.unit.seconds * status.unit.needs.all_cores for status in states)
        size = sum(estimate.disk or 0 for estimate in needed)
        common.say_wrapped(f"All units are done: {_hours(used, 'core')} and {_mib(size)} MiB of disk space.")
        return
    common.say_wrapped(
        f"Expected time for the rest ({basis}): {_duration(left.with_workers)} with {workers} workers; the longest "
        f"chain of units takes {_duration(left.longest_chain)} with any number of workers. "
        f"Cost: {_hours(left.core_seconds, 'core')}"
        + (f" and {_hours(left.gpu_seconds, 'GPU')}." if left.gpu_seconds else ".")
    )
    if measured or all(estimate.disk is not None for estimate in needed):
        sizes = [(estimate.disk, status.state == "done") for estimate, status in zip(needed, states, strict=True)]
        to_come = sum(size for size, is_done in sizes if size and not is_done)
        unknown = sum(size is None for size, _ in sizes)
        common.say_wrapped(
            f"Disk space: {_mib(sum(size for size, _ in sizes if size))} MiB, {_mib(to_come)} MiB of it not written yet"
            + (f"; not known for {unknown} units." if unknown else ".")
        )
    else:
        common.say_wrapped("Memory and disk space are estimated once a unit of each kind is done.")


def _mib(amount: int | None) -> str:
    """Return a number of bytes in MiB; empty if unknown."""
    return "" if amount is None else f"{amount / MIB:,.0f}" if amount >= 10 * MIB else f"{amount / MIB:.2g}"


def _hours(seconds: float, resource: str) -> str:
    """Return a cost in words.

    Example:
        >>> _hours(1800, "core"), _hours(7200 * 100, "GPU")
        ('0.5 core-hours', '200 GPU-hours')
    """
    hours = seconds / 3600
    return f"{hours:,.0f} {resource}-hours" if hours >= 10 else f"{hours:.2g} {resource}-hours"


def _print_status(folder: StudyFolder, states: Sequence[UnitStatus]) -> None:
    rows = [
        (
            status.unit.name,
            status.state,
            status.progress or status.last_line,
            status.host if status.state in BEGUN else "",
            status.since.removesuffix("+00:00") if status.state in BEGUN else "",
            str(status.attempts) if status.attempts > 1 else "",
        )
        for status in states
    ]
    columns = ("unit", "state", "progress", "host", "since (UTC)", "attempts")
    common.print_table(str(folder.path), columns, rows, left=5)
    _say_done(folder, states)


def _say_done(folder: StudyFolder, states: Sequence[UnitStatus]) -> None:
    common.say_wrapped(f"{_counts(states)} in {folder.path}; --json has the command of each")


def _counts(states: Sequence[UnitStatus]) -> str:
    count = {state: sum(status.state == state for status in states) for state in ("done", "running", "failed")}
    more = "".join(f", {count[state]} {state}" for state in ("running", "failed") if count[state])
    return f"{count['done']} of {len(states)} units done{more}"


def _watch(folder: StudyFolder, as_json: bool) -> int:
    """Show the running and failed units until all units are done, or those that failed for good hold up the rest."""
    if as_json:
        raise IsolossError("--json prints one document, but --watch keeps printing: give only one of them")
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def line(states: Sequence[UnitStatus]) -> str:
        left = remaining(states, max(1, sum(status.state == "running" for status in states)))
        return f"{_counts(states)}; about {_duration(left.with_workers)} left"

    def table(states: Sequence[UnitStatus]) -> Table:
        shown = Table("unit", "state", "progress", "host", "since (UTC)", title=line(states))
        for status in states:
            if status.state in ("running", "failed"):
                since = status.since.removesuffix("+00:00")
                cells = (status.unit.name, status.state, status.progress or status.last_line, status.host, since)
                shown.add_row(*(Text(printable(cell)) for cell in cells))
        return shown

    looks = 0  # one after the other in which nothing was running
    with Live(auto_refresh=False) if sys.stdout.isatty() else contextlib.nullcontext() as live:
        while True:
            states, _ = _states(folder)
            if live is None:
                common.say(line(states))
            else:
                live.update(table(states), refresh=True)
            if all(status.state == "done" for status in states):
                return 0
            looks = 0 if any(status.state == "running" for status in states) else looks + 1
            given_up = [status.unit.name for status in states if status.is_given_up]
            if given_up and looks > 1:  # between two units nothing runs for a moment, too
                break
            time.sleep(LINE_SECONDS if live is None else WATCH_SECONDS)
    common.say_wrapped(f"Nothing is running, and what is left waits for failed units: {', '.join(given_up)}.")
    return 1


def _duration(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> _duration(42), _duration(600), _duration(9000)
        ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
