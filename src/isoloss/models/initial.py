"""What every architecture's construction shares: checks of its settings, and initial weights that follow the seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isoloss.errors import IsolossError
from isoloss.models.sizes import Shape, configured_shape
from isoloss.run_config import ModelConfig
from isoloss.seeds import derive


def checked_shape(config: ModelConfig, *, vocab_size: int, pad_id: int) -> Shape:
    """Return the shape of the transformer that `config` describes.

    Raises:
        IsolossError: An unknown size or a shape that cannot be, a dropout outside [0, 1), or a `pad_id` outside the
            vocabulary.
    """
    sizes = configured_shape(config)
    if not isinstance(sizes, Shape):
        raise IsolossError(f"the architecture is {config.architecture}, which is not a transformer")
    check_settings(config, vocab_size=vocab_size, pad_id=pad_id)
    return sizes


def check_settings(config: ModelConfig, *, vocab_size: int, pad_id: int) -> None:
    """Refuse what no architecture can be built with.

    Raises:
        IsolossError: A dropout outside [0, 1), or a `pad_id` outside the vocabulary.
    """
    if not 0 <= config.dropout < 1:
        raise IsolossError(f"the dropout is {config.dropout}; it must be at least 0 and below 1")
    if not 0 <= pad_id < vocab_size:
        raise IsolossError(f"the padding's id is {pad_id}; it must be one of the model's ids, 0 to {vocab_size - 1}")


@contextlib.contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Let torch draw on the CPU from the seed's stream `"weights"`, and leave the caller's random state alone."""
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
        torch.default_generator.manual_seed(derive(seed, "weights"))
        yield
