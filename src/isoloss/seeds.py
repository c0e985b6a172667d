"""Named random streams: every draw is a pure function of a seed and of what it is for, so nothing has to be resumed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """Return the seed of the stream called `names`, e.g. `"masks", step, rank`: 63 bits of a SHA-256 over all.

    Example:
        >>> from isoloss.seeds import derive
        >>> derive(0, "masks", 7) == derive(0, "masks", 7), derive(0, "masks", 7) == derive(0, "masks", 8)
        (True, False)
    """
    # `repr` keeps 1 and "1" apart, and ("ab", "c") from ("a", "bc"). Python's own hash differs from process to process
    text = repr((int(seed), *names)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator at the start of the stream called `names` under `seed`; arguments as for `derive`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))
