"""metrics.jsonl: lines that a checkpoint never outlives, and that a resumed run has once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run


def flush(run: Run) -> str:
    """Bring metrics.jsonl to the disk, as a checkpoint must not outlive the lines before it; return its SHA-256."""
    path = run.path / "metrics.jsonl"
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return files.sha256(path)


def num_lines(step: int, *, ends: Collection[int], log_every: int) -> int:
    """Return how many lines metrics.jsonl has after `step` steps, if these are the last steps of the stages."""
    return step // log_every + sum(end <= step and end % log_every != 0 for end in ends)


def truncate(run: Run, step: int, count: int, sha256: str) -> None:
    """Keep the `count` lines up to `step`; a killed process may have left more, and half a line after them.

    Args:
        run: The run.
        step: How many steps were made.
        count: How many lines these steps have.
        sha256: Of these lines, as the checkpoint has it; empty: the checkpoint does not say.

    Raises:
        IsolossError: The lines are not there, not of these steps, or changed.
    """
    path = run.path / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines(keepends=True)[:count]
    try:
        complete = len(lines) == count and all(json.loads(line)["step"] <= step for line in lines)
    except (ValueError, KeyError, TypeError):
        complete = False
    kept = b"".join(lines)
    if not complete or (sha256 and hashlib.sha256(kept).hexdigest() != sha256):
        raise IsolossError(
            f"{path} is damaged: its first {count} lines are not those of the {step} steps that were made; "
            "restore the file, or delete the run to start it again"
        )
    if len(content) > len(kept):
        files.write_bytes(path, kept)
