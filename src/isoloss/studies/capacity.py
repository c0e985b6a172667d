"""The cores, GPUs and memory that an executor has free, and which unit gets which GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources, Unit

_ROUNDING = 1e-9  # so that three thirds of a GPU fit into one


@dataclass
class Capacity:
    """What is free on a machine.

    Attributes:
        cores: CPU cores.
        gpus: Free fraction of each GPU, by its name in `CUDA_VISIBLE_DEVICES`.
        memory: Memory in GiB.

    Example:
        >>> capacity = Capacity(cores=4, gpus={"0": 1.0}, memory=8.0)
        >>> capacity.take(Resources(gpus=0.5)), capacity.take(Resources(gpus=0.75))
        (('0',), None)
    """

    cores: int
    gpus: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0

    @classmethod
    def of_machine(cls, cores: int) -> Capacity:
        """Return a capacity of this many cores, all GPUs and memory of this machine."""
        return cls(cores, dict.fromkeys(visible_gpus(), 1.0), _memory())

    def check(self, units: Sequence[Unit]) -> None:
        """Refuse a unit that does not fit even if nothing else runs. Call it before the first `take`.

        Raises:
            IsolossError: A unit needs more than there is; the first such unit is named.
        """
        for unit in units:
            if not self.fits(unit.needs):
                needs = unit.needs
                raise IsolossError(
                    f"{unit.name} needs {_words(needs.all_cores, needs.all_gpus, needs.memory)}; there are "
                    f"{_words(self.cores, len(self.gpus), self.memory)} (--workers is the number of cores)"
                )

    def fits(self, needs: Resources) -> bool:
        """Whether a unit with these needs could start now."""
        return needs.all_cores <= self.cores and needs.memory <= self.memory and self._choose(needs) is not None

    def take(self, needs: Resources) -> tuple[str, ...] | None:
        """Reserve what a unit needs, and return the GPUs that it gets; None: it does not fit now."""
        chosen = self._choose(needs)
        if chosen is None or not self.fits(needs):
            return None
        self._change(needs, chosen, -1)
        return chosen

    def give_back(self, needs: Resources, gpus: Sequence[str]) -> None:
        """Free what `take` reserved."""
        self._change(needs, gpus, 1)

    def _change(self, needs: Resources, gpus: Sequence[str], sign: int) -> None:
        self.cores += sign * needs.all_cores
        self.memory += sign * needs.memory
        for gpu in gpus:
            self.gpus[gpu] += sign * min(needs.gpus, 1.0)

    def _choose(self, needs: Resources) -> tuple[str, ...] | None:
        """Return GPUs with room, the fullest first so that whole ones stay free; None if there are too few."""
        if not needs.gpus:
            return ()
        each, count = min(needs.gpus, 1.0), max(1, round(needs.all_gpus))
        free = sorted((room, gpu) for gpu, room in self.gpus.items() if room >= each - _ROUNDING)
        return tuple(gpu for _, gpu in free[:count]) if len(free) >= count else None


def _memory() -> float:
    """Return how much memory in GiB this machine, container or Slurm job may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30]
    with contextlib.suppress(OSError, ValueError):  # without a limit, the file is missing or says "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30)
    if (job := os.environ.get("SLURM_MEM_PER_NODE", "")).isdecimal():
        limits.append(int(job) / 2**10)
    return min(limits)


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as named in `CUDA_VISIBLE_DEVICES`, without loading torch."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in given.split(",") if name and name != "-1")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(i) for i, line in enumerate(line for line in listed.splitlines() if line.startswith("GPU ")))


def _words(cores: int, gpus: float, memory: float) -> str:
    parts = [f"{cores} cores" if cores != 1 else "1 core", f"{gpus:g} GPUs" if gpus != 1 else "1 GPU"]
    return ", ".join([*parts, f"{memory:.3g} GiB of memory"])
