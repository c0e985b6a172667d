"""Sentences, and the ids that masking, packing and predicting must know of a language.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class Sentences(NamedTuple):
    """A batch of sentences, padded on the right.

    Attributes:
        tokens: (n, T) int64, token ids; positions at and beyond a sentence's length hold the language's `pad_id`.
        lengths: (n,) int64, in tokens.
        latent: What produced the sentences, in the language's own form, or None where it was not asked for.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    latent: Any = None

    def present(self) -> torch.Tensor:
        """Return (n, T) bool: true where there is a token, false where there is padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


class Start(NamedTuple):
    """What the first token of a sentence is predicted from."""

    id: int
    end_id: int | None  # the id that ends a sentence, where the language has one
    is_in_sentences: bool  # whether the language's sentences begin with the id themselves


class SpecialTokens(Protocol):
    """What masking must know of a language; see `isoloss.lab.languages.base.Language`."""

    mask_id: int
    special_token_ids: tuple[int, ...]


class TokenIds(SpecialTokens, Protocol):
    """All ids of a language, as a model knows them."""

    vocab_size: int
    model_vocab_size: int
    pad_id: int

    @property
    def start(self) -> Start: ...  # noqa: D102
