"""metrics.jsonl: lines that a checkpoint never outlives, and that a resumed run has once."""

from __future__ import annotations

import json
import os
from collections.abc import Collection

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run


def flush(run: Run) -> None:
    """Bring metrics.jsonl to the disk: a checkpoint must not outlive the lines before it."""
    path = run.path / "metrics.jsonl"
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def num_lines(step: int, *, ends: Collection[int], log_every: int) -> int:
    """Return how many lines metrics.jsonl has after `step` steps, if these are the last steps of the stages."""
    return step // log_every + sum(end <= step and end % log_every != 0 for end in ends)


def truncate(run: Run, step: int, count: int) -> None:
    """Keep the `count` lines up to `step`; a killed process may have left more, and half a line after them.

    Raises:
        IsolossError: They are not there, or not of these steps.
    """
    path = run.path / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text.splitlines(keepends=True)[:count]
    try:
        complete = len(lines) == count and all(json.loads(line)["step"] <= step for line in lines)
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise IsolossError(
            f"{path} is damaged: its first {count} lines are not those of the {step} steps that were made; "
            "delete the run to start it again"
        )
    if len(text) > len("".join(lines)):
        files.write_text(path, "".join(lines))
