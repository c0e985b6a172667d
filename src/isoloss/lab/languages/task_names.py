"""The names of downstream tasks: those of the paper, and numbers in names."""

from __future__ import annotations

import re

from isoloss.lab.languages.config import LATENT

_ALIASES = {"A": "prefix-32", "B": "prefix-16", "C": "prefix-8"}  # the paper's names of tasks, appendix A.1
_NUMBERED = re.compile(r"([a-z]+)-(0|[1-9]\d*)")


def canonical(name: str) -> str:
    """Return the one name of a task that has several.

    Example:
        >>> canonical("B"), canonical("C-latent"), canonical("task-6"), canonical("root")
        ('prefix-16', 'prefix-8-latent', 'state-6', 'root')
    """
    base = name.removesuffix(LATENT)
    suffix = name[len(base) :]
    base = _ALIASES.get(base, base)
    return ("state-" + base.removeprefix("task-") if base.startswith("task-") else base) + suffix


def task_number(name: str, kind: str, low: int, high: int) -> int | None:
    """Return the number in e.g. `state-6`, or None where the name is of another kind or the number out of range.

    Example:
        >>> task_number("state-6", "state", 1, 8), task_number("state-9", "state", 1, 8)
        (6, None)
    """
    match = _NUMBERED.fullmatch(name)
    return int(match[2]) if match and match[1] == kind and low <= int(match[2]) <= high else None
