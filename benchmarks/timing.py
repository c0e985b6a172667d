"""Timing contenders in turns on one thread, and the table of what was found."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "isoloss"


@dataclass(frozen=True)
class Contender:
    """One implementation: `run` does its work once, for `sentences` sentences."""

    name: str
    computes: str
    sentences: int
    run: Callable[[], object]


@dataclass
class Task:
    """What is timed together: ours first, then those it is compared with, and the peers that are missing."""

    title: str
    contenders: list[Contender]
    missing: list[str] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)


def measure(task: Task, rounds: int, seconds: float) -> None:
    """Fill in the task's rates: the contenders take turns, and a turn's rate is that of its fastest call.

    Times are the process's own on its core, without those in which another process had it.
    """
    for contender in task.contenders:
        contender.run()  # compiles
    task.rates = {label(contender): [] for contender in task.contenders}
    for _ in range(rounds):
        for contender in task.contenders:
            best, begun = float("inf"), time.process_time()
            while True:
                before = time.process_time()
                contender.run()
                best = min(best, time.process_time() - before)
                if time.process_time() - begun >= seconds:
                    break
            task.rates[label(contender)].append(contender.sentences / best)


def label(contender: Contender) -> str:
    """Return what tells a contender from the others of its task."""
    return f"{contender.name}: {contender.computes}"


def summary(task: Task) -> list[dict[str, object]]:
    """Return a record for each contender: median rate, its range over the rounds, and the median ratio of ours."""
    records: list[dict[str, object]] = []
    first = task.rates[label(task.contenders[0])]
    for contender in task.contenders:
        rates = task.rates[label(contender)]
        match = next((c for c in task.contenders if c.name == OURS and c.computes == contender.computes), None)
        reference = task.rates[label(match)] if match else first
        records.append(
            {
                "task": task.title,
                "who": contender.name,
                "computes": contender.computes,
                "sentences_per_second": statistics.median(rates),
                "slowest_round": min(rates),
                "fastest_round": max(rates),
                "compared_with": match.computes if match else task.contenders[0].computes,
                "ours_over_theirs": statistics.median(a / b for a, b in zip(reference, rates, strict=True)),
            }
        )
    for peer in task.missing:
        records.append({"task": task.title, "who": peer, "computes": "not installed"})
    return records


def machine() -> str:
    """Return the machine in words, without its name."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else model
    python = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, of which one is used; {python}"


def versions(libraries: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each library, or "not installed"."""
    found = {}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def record_of(script: str, libraries: tuple[str, ...]) -> dict[str, Any]:
    """Return what a record says of the run: the command, the date, the machine and its load, and the versions."""
    return {
        # no path of this machine
        "command": " ".join(["python", f"benchmarks/{script}", *(Path(each).name for each in sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": ", ".join(f"{value:.1f}" for value in os.getloadavg()),
        "versions": versions(libraries),
    }


def heading(title: str, record: dict[str, Any]) -> list[str]:
    """Return the first lines of a page in Markdown: what was run, on what, when."""
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [
        f"# {title}",
        "",
        f"{record['date']}, `{record['command']}`. {record['machine']}.",
        f"Load at the start: {record['load']}. Versions: {found}.",
        "",
    ]


def table(record: dict[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    lines = [
        *heading("Languages: sentences per second on one thread", record),
        "Processor time of one core. Median of the rounds, and the slowest and fastest; the ratio is the median over "
        "rounds of our rate for the same quantity, or for the task's first row where we have no such row, to theirs.",
        "",
        "| task | who | computes | sentences/s | range | isoloss is faster by |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in record["results"]:
        cells = [row["task"], row["who"], row["computes"]]
        if "sentences_per_second" in row:
            cells += [
                short(row["sentences_per_second"]),
                f"{short(row['slowest_round'])}-{short(row['fastest_round'])}",
            ]
            cells.append("" if row["who"] == OURS else f"{row['ours_over_theirs']:,.3g}".replace("e+0", "e"))
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def short(rate: float) -> str:
    """Return a rate to three digits."""
    return f"{float(f'{rate:.3g}'):,.10g}"
