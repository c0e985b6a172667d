"""The machine that computes: its devices, its threads and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from isoloss.errors import IsolossError

if TYPE_CHECKING:
    import torch

_MOST_THREADS = 1024  # on a machine with fewer cores; OpenMP ends the process where it cannot start a thread


def check_device(name: str) -> None:
    """Refuse what is not the name of a device; whether this machine has the device is not checked."""
    kind, _, index = name.partition(":")
    if name not in ("auto", "cpu", "cuda", "mps") and not (kind == "cuda" and index.isdecimal()):
        raise IsolossError(f"the device is {name!r}; it must be auto, cpu, cuda, cuda:N or mps")


def check_threads(threads: int) -> None:
    """Refuse a number of CPU threads that is negative, or more than can be started."""
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    if not 0 <= threads <= most:
        raise IsolossError(f"--threads is {threads}; it must be at least 0 (0: all cores) and at most {most}")


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`.

    Args:
        name: `auto` (the current CUDA device if there is one, otherwise the CPU), `cpu`, `cuda`, `cuda:N` or `mps`.
            Apple's `mps` is never chosen by itself, as it has no float64.

    Raises:
        IsolossError: No such name, or this machine or this torch has no such device.
    """
    import torch

    check_device(name)
    kind, _, index = name.partition(":")
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise IsolossError(f"the device is {name!r}, but torch finds no CUDA device here; use cpu or auto")
        if index and int(index) >= count:
            raise IsolossError(f"the device is {name!r}, but the CUDA devices here are cuda:0 to cuda:{count - 1}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise IsolossError("the device is 'mps', but torch finds no Apple GPU here; use cpu or auto")
    return torch.device(name)


def disable_malloc_trim() -> None:
    """Let the process keep what it frees, up to some 60 MiB, for what it needs next.

    glibc gives what is freed back to the system beyond a threshold, which the largest block freed so far (up to 32 MiB)
    raises. Without this, the activations of a middle-sized model are fetched again, page by page, in every pass.
    """
    import torch

    # freed at once: freeing a block raises glibc's mmap threshold to the size of the block, and the trim threshold to
    # twice that. From 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) on, it no longer does
    torch.empty(31 << 20, dtype=torch.uint8)


def trim_malloc() -> None:
    """Give what the process has kept of freed memory back to the system, with glibc: much, after a large model."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def check_fits(needed: float, what: str) -> None:
    """Refuse what needs more memory than this machine has.

    `needed` is in bytes; `what` says in words what needs them and what to lower.
    """
    there_is = physical_memory()
    if needed > there_is:
        raise IsolossError(
            f"{what}: it needs at least {needed / 2**30:,.0f} GiB of memory, and this machine has "
            f"{there_is / 2**30:,.0f} GiB"
        )


def physical_memory() -> float:
    """Return the bytes of memory that this machine, container or Slurm job has; infinity where nothing says so."""
    limits = [float("inf")]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    # inside a container, this is the container's own limit; without one, the file is missing or says "max"
    with contextlib.suppress(OSError, ValueError):
        limits.append(float(int(Path("/sys/fs/cgroup/memory.max").read_text())))
    if (job := os.environ.get("SLURM_MEM_PER_NODE", "")).isdecimal():
        limits.append(float(int(job) * 2**20))
    return min(limits)
