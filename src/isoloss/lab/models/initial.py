"""Random initial weights as a function of the seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isoloss.seeds import derive


@contextlib.contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Let torch draw on the CPU from the seed's stream `"weights"`, and leave the caller's random state alone."""
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
        torch.default_generator.manual_seed(derive(seed, "weights"))
        yield
