"""`isoloss study plan` and `isoloss study status`: the units, how far along each is, and the time that is left."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from isoloss import files
from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.studies.folder import StudyFolder
from isoloss.studies.status import Remaining, UnitStatus, remaining, statuses, with_measured_seconds

WATCH_SECONDS = 2.0  # between two tables on a terminal
LINE_SECONDS = 30.0  # between two lines elsewhere


def show(folder: StudyFolder, action: str, start: str, workers: int, *, watch: bool, as_json: bool) -> int:
    """Print each unit and its state; refuse a folder that holds something else.

    Args:
        folder: The study.
        action: `plan` or `status`.
        start: The command that runs the study.
        workers: Number of workers for the expected time.
        watch: Whether to keep refreshing until all units are done.
        as_json: Whether to print JSON.
    """
    if not folder.exists() and action == "status":
        raise IsolossError(f"{folder.path} holds no study: {start} starts one{files.nearest(folder.path)}")
    if watch:
        return _watch(folder, as_json)
    states, measured = _states(folder)
    left = remaining(states, workers)
    if as_json:
        common.emit_json(_document(folder, states, left, workers))
    elif action == "plan":
        _print_plan(folder, states, left, workers, measured)
    else:
        _print_status(folder, states)
    return 0


def _states(folder: StudyFolder) -> tuple[list[UnitStatus], int]:
    """Return how far along each unit is, with its expected seconds, and from how many units these were measured."""
    units, measured = with_measured_seconds(folder.plan(), folder.path)
    return statuses(units, folder.path), measured


def _document(folder: StudyFolder, states: Sequence[UnitStatus], left: Remaining, workers: int) -> dict[str, object]:
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
            "arguments": list(status.unit.arguments),
        }
        for status in states
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
    folder: StudyFolder, states: Sequence[UnitStatus], left: Remaining, workers: int, measured: int
) -> None:
    needs = {
        "cores": [str(status.unit.needs.all_cores) for status in states],
        "GPUs": [f"{status.unit.needs.all_gpus:g}" for status in states],
        "GiB": [f"{status.unit.needs.memory:g}" for status in states],
    }
    # most plans have units of one core, in whose every row these would be the same
    usual = {"cores": "1", "GPUs": "0", "GiB": "0"}
    shown = [(name, words) for name, words in needs.items() if set(words) - {usual[name]}]
    rows = [
        (
            status.unit.name,
            status.progress or status.state,
            ", ".join(status.unit.after),
            f"{status.unit.seconds:,.0f}",
            *(words[i] for _, words in shown),
        )
        for i, status in enumerate(states)
    ]
    columns = ("unit", "state", "after", "seconds", *(name for name, _ in shown))
    common.print_table(f"{folder.study.name} at scale {folder.scale_name}", columns, rows, left=3)
    _say_done(folder, states)
    basis = f"from the {measured} units measured here" if measured else "not measured here yet: a rough guess"
    common.say_wrapped(
        f"Expected for what is left ({basis}): {_duration(left.with_workers)} with {workers} workers, "
        f"{_duration(left.total)} on one core; the longest chain of units takes {_duration(left.longest_chain)}."
    )


def _print_status(folder: StudyFolder, states: Sequence[UnitStatus]) -> None:
    rows = [
        (
            status.unit.name,
            status.state,
            status.progress or status.last_line,
            status.host if status.state in ("running", "failed") else "",
            status.since.removesuffix("+00:00") if status.state in ("running", "failed") else "",
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
    """Show the running and failed units, refreshed until all units are done."""
    if as_json:
        raise IsolossError("--json prints one document, but --watch keeps printing: leave one of them out")
    from rich.live import Live
    from rich.table import Table

    on_terminal = sys.stdout.isatty()

    def lines(states: Sequence[UnitStatus]) -> str:
        left = remaining(states, max(1, sum(status.state == "running" for status in states)))
        return f"{_counts(states)}; about {_duration(left.with_workers)} left"

    def table(states: Sequence[UnitStatus]) -> Table:
        shown = Table("unit", "state", "progress", "host", "since (UTC)", title=lines(states))
        for status in states:
            if status.state in ("running", "failed"):
                since = status.since.removesuffix("+00:00")
                shown.add_row(status.unit.name, status.state, status.progress or status.last_line, status.host, since)
        return shown

    states, _ = _states(folder)
    if not on_terminal:
        while True:
            common.say(lines(states))
            if all(status.state == "done" for status in states):
                return 0
            time.sleep(LINE_SECONDS)
            states, _ = _states(folder)
    with Live(table(states), auto_refresh=False) as live:
        while not all(status.state == "done" for status in states):
            time.sleep(WATCH_SECONDS)
            states, _ = _states(folder)
            live.update(table(states), refresh=True)
    return 0


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
