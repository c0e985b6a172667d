"""An executor: carries out a study's plan, one unit after another, in the order of the plan."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isoloss.errors import IsolossError


def run(
    units: Sequence[Any],
    *,
    workers: int,
    logs: Path,
    say: Callable[[str], None],
    on_done: Callable[[Any], None],
) -> int:
    """Run each unit that is not done as a command of its own; return how many were run."""
    count = 0
    for unit in units:  # a plan lists a unit after those that it needs
        if unit.done():
            continue
        say(f"{unit.name}: isoloss {' '.join(unit.arguments)}")
        result = subprocess.run([sys.executable, "-m", "isoloss", *unit.arguments], capture_output=True, text=True)
        if result.returncode != 0:
            raise IsolossError(f"{unit.name} failed: {result.stderr.strip()}")
        on_done(unit)  # may write the interim page
        count += 1
    return count
