"""What languages that are drawn from a model share: where their exact computations run, and the batch of a step."""

from __future__ import annotations

import abc
import copy
from typing import Self

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.api import Sentences


class Synthetic(abc.ABC):
    """Base of the languages whose sentences are drawn and whose probabilities are computed.

    Attributes:
        device: Where exact computations run and sentences are put.
        dtype: What exact computations run in.
    """

    device: torch.device
    dtype: torch.dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the language with its exact computations on `device` and in `dtype`; None leaves one as it is.

        Raises:
            IsolossError: `dtype` is neither float64 nor float32, or there is no such device.
        """
        dtype = dtype or self.dtype
        if dtype not in (torch.float64, torch.float32):
            raise IsolossError(f"exact computations run in torch.float64 or torch.float32, not in {dtype}")
        try:
            place = torch.device(device) if device is not None else self.device
            torch.zeros(1, dtype=dtype, device=place)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            raise IsolossError(f"cannot compute in {dtype} on device {device!r}: {error}") from error
        moved = copy.copy(self)
        moved._place(place, dtype)
        return moved

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Put what the exact computations use on `device`, in `dtype`."""
        self.device, self.dtype = device, dtype

    @abc.abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences."""

    def _seed(self, n: int, generator: torch.Generator | None) -> int:
        """Return the seed of `n` sentences, one number of the generator.

        Raises:
            IsolossError: `n` is negative, or the generator is not on the CPU.
        """
        if n < 0:
            raise IsolossError(f"cannot draw {n} sentences: it must be at least 0")
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        if generator.device.type != "cpu":
            raise IsolossError(f"a seed is drawn on the CPU, but the generator is on {generator.device}")
        return int(torch.randint(2**63 - 1, (1,), generator=generator))

    def batch(self, step: int, n: int, *, seed: int) -> Sentences:
        """Return the `n` sentences of training step `step`: a pure function of the arguments."""
        return self.sample(n, generator=seeds.generator(seed, "sentences", step))
