"""What a language is: where sentences come from and, where it is known, the exact probability of every token."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class Language(Protocol):
    """A source of sentences.

    Attributes:
        vocab_size: Number of token ids that a sentence can hold: 0 to vocab_size - 1.
        max_length: The longest sentence, in tokens.
        vocabulary: The token strings, by id.
        pad_id: The id that fills the space after a sentence.
        mask_id: The id that hides a token from a masked language model.
        special_ids: Ids inside a sentence that are never hidden nor predicted, e.g. [CLS] and [SEP].
        model_vocab_size: Number of ids that a model of the language must know, the special ones included.
    """

    vocab_size: int
    max_length: int
    vocabulary: tuple[str, ...]
    pad_id: int
    mask_id: int
    special_ids: tuple[int, ...]
    model_vocab_size: int

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences."""
        ...

    def batch(self, step: int, n: int, *, seed: int) -> Sentences:
        """Return the `n` sentences of training step `step`: a pure function of the arguments."""
        ...


@runtime_checkable
class ExactLanguage(Language, Protocol):
    """A language whose probabilities are known. Everything is in nats, and given the sentence's length.

    What the methods share:

    - `tokens` (n, T) ids and `lengths` (n,): a padded batch; what stands behind a sentence's end is not looked at.
    - `mask` (n, T) bool, true where the token is unknown, whatever id stands there; None: nowhere. A probability is
      then a sum over all tokens at the unknown positions, and a conditional is given the visible tokens alone.
    - `positions` (n,) or (n, k) integers, positions of each sentence: only these are answered, in this order, and the
      axis of T positions becomes that of `positions`; None: all T.
    - A bad argument raises `IsolossError` that names the row: a shape or dtype, a visible token or a length out of
      range, a position beyond its sentence, a sentence of probability 0, or a mask where the language has no exact
      answer under one.
    """

    def log_prob(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log-probability of each sentence."""
        ...

    def log_conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T, vocab_size): log Pr(x_t = c | all other visible tokens, the length).

        An impossible token has the log of the dtype's smallest normal number, so that nothing is -inf and p log p is 0;
        padded positions hold 0 throughout, which is no distribution: mask them by the lengths.
        """
        ...

    def conditional_entropy(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T): the entropy of each conditional of `log_conditionals`; 0 at padded positions.

        The conditionals of all sentences are never held at once.
        """
        ...
