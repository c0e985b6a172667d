"""The page of benchmarks/executors.py, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from timing import heading, short


def page(document: dict[str, Any]) -> str:
    """Return the page of the parts that were measured."""
    parts = {"overhead": _overhead, "status": _status}
    newest = max((document[name] for name in parts if name in document), key=lambda record: record["date"])
    lines = heading("Executors: overhead, scale and status", newest)
    for name, part in parts.items():
        if name in document:
            lines += part(document[name])
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _commands(record: dict[str, Any]) -> str:
    """Return the commands by which the rows of a part were measured, and the machine's load at their start."""
    runs = dict.fromkeys((row["run"]["command"], row["run"]["load"]) for row in record["results"])
    return "; ".join(f"`{command}` (load at the start {load})" for command, load in runs)


def _overhead(record: dict[str, Any]) -> list[str]:
    rows = sorted(record["results"], key=lambda row: (row["executor"], row["command"], row["jobs"]))
    return [
        *("## Empty jobs", ""),
        f"By {_commands(record)}.",
        "",
        f"{record['workers']} commands at a time. `--version` prints a line; `eval` is a unit's measurement of a "
        "checkpoint whose evaluation already exists. The executor's time runs from making the plan to the end of its "
        "last job and includes all processes that it starts; for each job, its lease, log and end are written and "
        "flushed. Bare: the same command by `subprocess.run`, as many at a time, with its output in a file. For ray, "
        "bare commands are Ray tasks of one core on the same cluster, and both times include connecting and "
        "disconnecting; for slurm-local, which is submitit's local executor, they are run by `subprocess.run` too. "
        "Bare commands, at most as many as their column says, are timed before and after each turn of the executor; "
        "a turn is repeated if the two times differ by more than 30 %, with at most as many repeats as turns. Times "
        "the bare command: the median over turns, and the range, of the executor's time divided by the mean of the two "
        "bare times.",
        "",
        *_table(
            (
                "executor, command",
                "jobs",
                "turns",
                "ms a job",
                "bare ms",
                "bare commands",
                "times the bare command",
                "largest change of bare",
            ),
            [
                (
                    f"{row['executor']}, `{row['command']}`",
                    f"{row['jobs']:,}",
                    ", ".join([str(row["rounds"]), *(f"{ratio:.2f} repeated" for ratio in row["ratios_repeated"])]),
                    short(1e3 * row["seconds_a_job"]),
                    short(1e3 * row["bare_seconds_a_job"]),
                    str(row["bare_jobs"]),
                    f"{row['ratio']:.2f} ({row['range'][0]:.2f}-{row['range'][1]:.2f})",
                    f"{row['largest_change_of_bare'] - 1:.0%}",
                )
                for row in rows
            ],
        ),
        "",
        "Executors fork commands that train or measure from a process that has imported everything. So `eval` takes "
        "less time than by itself once that process has loaded; these times include the loading. Other commands start "
        "as they do by themselves.",
        "",
    ]


def _status(record: dict[str, Any]) -> list[str]:
    names = {
        "plan_new_seconds": "`study plan`, nothing done",
        "prepare_seconds": "`study run`: checking and writing the runs' configs, once",
        "schedule_new_seconds": "`study run`: plan and first look, nothing done",
        "schedule_done_seconds": "`study run`: plan and first look, all done: reads and hashes every file",
        "status_seconds": "`study status`, all done",
        "plan_done_seconds": "`study plan`, all done",
        "status_without_leases_seconds": "`study status`, all done, but no leases: reads and hashes every file",
    }
    lines = [
        *("## Status of many runs", ""),
        f"By {_commands(record)}.",
        "",
        "Runs of one setting with one measurement each, so there are twice as many units as runs. One run is trained "
        "and measured; the others have copies of its files under their own names and configs, except that the weights "
        "are links to the same file. Commands are timed from starting Python to the end of the output; the table has "
        "the median and range of three.",
        "",
    ]
    for row in record["results"]:
        lines += _table(
            (f"{row['runs']:,} runs, {2 * row['runs']:,} units", "s"),
            [(text, _times(row[key])) for key, text in names.items()],
        )
        lines.append("")
    return lines


def _times(seconds: float | list[float]) -> str:
    if isinstance(seconds, float):
        return short(seconds)
    median = short(statistics.median(seconds))
    return median if len(seconds) == 1 else f"{median} ({short(min(seconds))}-{short(max(seconds))})"
