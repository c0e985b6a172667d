"""What every architecture's construction shares: a check of the padding, and initial weights that follow the seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isoloss.errors import IsolossError
from isoloss.seeds import derive


def check_padding(pad_id: int, vocab_size: int) -> None:
    """Refuse a padding id outside the vocabulary.

    Raises:
        IsolossError: It is not from 0 to `vocab_size` - 1.
    """
    if not 0 <= pad_id < vocab_size:
        raise IsolossError(f"the padding's id is {pad_id}; it must be one of the model's ids, 0 to {vocab_size - 1}")


@contextlib.contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Let torch draw on the CPU from the seed's stream `"weights"`, and leave the caller's random state alone."""
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
        torch.default_generator.manual_seed(derive(seed, "weights"))
        yield
