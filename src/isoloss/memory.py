"""The memory that tensors on the CPU come from."""

from __future__ import annotations

import os


def keep_freed() -> None:
    """Let the process keep what it frees, up to some 60 MiB, for what it needs next.

    glibc gives what is freed back to the system beyond a threshold, which the largest block freed so far (up to 32 MiB)
    raises. Without this, the activations of a middle-sized model are fetched again, page by page, in every pass.
    """
    import torch

    torch.empty(31 << 20, dtype=torch.uint8)


def physical_memory() -> float:
    """Return the bytes of memory that this machine has; infinity where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
