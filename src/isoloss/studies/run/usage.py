"""What the command of a unit used: its time, its peak memory, and the size of what it wrote.

Only the command itself can measure this on every machine and under every launcher, and without the time that it waited
for a free machine. So it writes a file when it ends, and the process that holds the unit's lease copies the numbers
into the record of the attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

from isoloss import files

USAGE = "ISOLOSS_USAGE"  # environment variable that names the file; each process appends its rank to the name
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


def report(seconds: float) -> None:
    """Write what this process has used in its `seconds`, if the environment names a file for it."""
    if not (name := os.environ.get(USAGE)):
        return
    used = {
        "seconds": round(seconds, 3),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT,
        "gpu_memory": _gpu_memory(),
        "disk": sum(files.published.values()),
    }
    with contextlib.suppress(OSError):  # the unit's result does not depend on it
        Path(f"{name}.{os.environ.get('RANK', '0')}").write_text(json.dumps(used))


def collect(name: Path, processes: int, outputs: Iterable[Path]) -> dict[str, float]:
    """Return what all processes of a command used, and delete their usage files; empty if there are none.

    These are the `seconds` of the slowest process and, in bytes, `memory` and `gpu_memory` at the peak, summed over
    processes, and `disk`: the present size of the folders that it made (`outputs`), without what was deleted meanwhile.
    """
    used: dict[str, float] = {}
    for path in (name.with_name(f"{name.name}.{rank}") for rank in range(processes)):  # beside the logs of all units
        with contextlib.suppress(OSError, ValueError):
            for kind, amount in json.loads(path.read_text()).items():
                so_far = used.get(kind, 0)
                used[kind] = max(so_far, amount) if kind == "seconds" else so_far + amount
            path.unlink()
    if folders := [folder for folder in outputs if folder.is_dir()]:
        used["disk"] = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    return used


def _gpu_memory() -> int:
    # a command that has not imported torch has used no GPU
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())
