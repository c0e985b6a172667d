"""The memory that tensors on the CPU come from."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

from isoloss.errors import IsolossError


def keep_freed() -> None:
    """Let the process keep what it frees, up to some 60 MiB, for what it needs next.

    glibc gives what is freed back to the system beyond a threshold, which the largest block freed so far (up to 32 MiB)
    raises. Without this, the activations of a middle-sized model are fetched again, page by page, in every pass.
    """
    import torch

    # freed at once: freeing a block raises glibc's mmap threshold to the size of the block, and the trim threshold to
    # twice that. From 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX) on, it no longer does
    torch.empty(31 << 20, dtype=torch.uint8)


def give_back_freed() -> None:
    """Give what the process has kept of freed memory back to the system, with glibc: much, after a large model."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def check_fits(needed: float, what: str) -> None:
    """Refuse what needs more memory than this machine has.

    Args:
        needed: How many bytes it needs at least.
        what: What needs them and what to lower, in words.
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
