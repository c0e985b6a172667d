"""Sentences, and what is predicted of them, masked tokens or every next one: what a model takes and is scored on.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from isoloss.errors import IsolossError
from isoloss.run_config import ObjectiveConfig

IGNORED = -100  # the label of a position that is not predicted, as everywhere in transformers

Batch = dict[str, torch.Tensor]  # input_ids, attention_mask, labels (n, T), as transformers' collators give


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


@dataclass
class SpecialIds:
    """`SpecialTokens` where there is a tokenizer but no language."""

    mask_id: int
    special_token_ids: tuple[int, ...] = ()


def mask(
    sentences: Sentences, language: SpecialTokens, objective: ObjectiveConfig, *, generator: torch.Generator
) -> Batch:
    """Mask tokens of each sentence and return them as labels.

    With `masking="one"`, one position of each sentence is drawn uniformly (the paper, section 2.1). With
    `masking="fraction"`, each position is drawn with probability `fraction`, and a sentence in which none was gets one
    drawn uniformly, so that every sentence predicts something. A drawn token is always replaced by the mask, whatever
    `corruption` says: that is for training alone (see `corrupt`), and every evaluation is on plain masks.

    Returns:
        `input_ids`, `attention_mask` (1 at tokens) and `labels` (-100 where nothing is predicted), each (n, T) int64.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.run_config import ObjectiveConfig
        >>> from isoloss.text.masking import SpecialIds, mask
        >>> sentences = Sentences(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
        >>> generator = torch.Generator().manual_seed(0)
        >>> batch = mask(sentences, SpecialIds(mask_id=9), ObjectiveConfig(), generator=generator)
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 9]], [[-100, -100, 7]])
    """
    draws = torch.rand(sentences.tokens.shape, generator=generator, dtype=torch.float64)
    return mask_by(sentences, language, objective, draws)


def mask_by(sentences: Sentences, language: SpecialTokens, objective: ObjectiveConfig, draws: torch.Tensor) -> Batch:
    """Return what `mask` returns, by (n, T) float64 uniform draws from [0, 1).

    A token is masked where its draw is below the fraction, and where it is the smallest of its sentence's.
    """
    if not 0 < objective.fraction <= 1:
        raise IsolossError(f"the masked fraction is {objective.fraction}; it must be above 0 and at most 1")
    candidates = maskable(sentences, language)
    # draws are made on the CPU, so that the masks do not depend on the device
    # the smallest of the candidates' uniform draws marks one position, uniformly; 2 is above each draw and fraction
    draws = draws.to(candidates.device).masked_fill(~candidates, 2.0)
    chosen = torch.zeros_like(candidates).scatter_(1, draws.argmin(dim=1, keepdim=True), True)
    if objective.masking == "fraction":
        chosen |= draws < objective.fraction
    return mask_at(sentences, chosen, language)


def maskable(sentences: Sentences, language: SpecialTokens) -> torch.Tensor:
    """Return (n, T) bool: the tokens that could be masked, all but special ones; a sentence must have one."""
    candidates = sentences.present()
    for special in language.special_token_ids:
        candidates &= sentences.tokens != special
    if not bool(candidates.any(dim=1).all()):
        raise IsolossError("a sentence has no token that could be masked: it is empty or all special tokens")
    return candidates


def mask_at(sentences: Sentences, chosen: torch.Tensor, language: SpecialTokens) -> Batch:
    """Return what `mask` returns, with the (n, T) `chosen` tokens masked."""
    return {
        "input_ids": sentences.tokens.masked_fill(chosen, language.mask_id),
        "attention_mask": sentences.present().long(),
        "labels": sentences.tokens.masked_fill(~chosen, IGNORED),
    }


def corrupt(batch: Batch, language: TokenIds, objective: ObjectiveConfig, *, generator: torch.Generator) -> Batch:
    """Return a masked batch as training sees it: with `corruption="bert"`, not all of the masked tokens as masks.

    As in BERT (Devlin et al. 2019, appendix A.1), each predicted position independently shows the mask with
    probability 0.8, a token drawn uniformly from all that are not special with 0.1, and the true token with 0.1. With
    `corruption="mask"` the batch is returned as it is. The labels are the same in all cases.

    A model trained so still learns the conditionals given the visible tokens where it sees a mask; what it says where
    it sees a token depends on how likely that one is to be true, which is why the loss is measured on masks alone.
    """
    if objective.corruption == "mask":
        return batch
    shape = batch["labels"].shape
    draws = torch.rand(shape, generator=generator, dtype=torch.float64)
    ordinary = _ordinary(language)
    return _corrupted(batch, objective, draws, ordinary[torch.randint(len(ordinary), shape, generator=generator)])


def corrupt_by(
    batch: Batch, language: TokenIds, objective: ObjectiveConfig, draws: torch.Tensor, others: torch.Tensor
) -> Batch:
    """Return what `corrupt` returns, by (n, T) float64 uniform draws from [0, 1): what is shown, which other token."""
    ordinary = _ordinary(language)
    return _corrupted(batch, objective, draws, ordinary[(others * len(ordinary)).long()])


def _ordinary(language: TokenIds) -> torch.Tensor:
    """Return the ids of a language's tokens that are not special."""
    is_ordinary = torch.ones(language.model_vocab_size, dtype=torch.bool)
    is_ordinary[[*language.special_token_ids, language.mask_id, language.pad_id]] = False
    return is_ordinary[: language.vocab_size].nonzero()[:, 0]


def _corrupted(batch: Batch, objective: ObjectiveConfig, draws: torch.Tensor, others: torch.Tensor) -> Batch:
    if objective.corruption != "bert":
        raise IsolossError(f"the corruption is {objective.corruption!r}; it must be mask or bert")
    inputs, labels = batch["input_ids"], batch["labels"]
    draws, others = draws.to(inputs.device), others.to(inputs.device)
    masked = labels != IGNORED
    # from 0.8 to 0.9 another token; above, where the next line comes second, the true one
    inputs = torch.where(masked & (draws >= 0.8), others, inputs)
    return {**batch, "input_ids": torch.where(masked & (draws >= 0.9), labels, inputs)}


def with_start(sentences: Sentences, language: TokenIds) -> Sentences:
    """Return the sentences with the start before each, one token longer, unless the language begins them with it."""
    start = language.start
    if start.is_in_sentences:
        return sentences
    firsts = sentences.tokens.new_full((len(sentences.tokens), 1), start.id)
    return Sentences(torch.cat([firsts, sentences.tokens], dim=1), sentences.lengths + 1)


def predict_next(sentences: Sentences, language: TokenIds) -> Batch:
    """Return the batch in which every token is predicted from those before it.

    The labels are unshifted, as transformers expects: a causal model predicts label t + 1 at position t. The start and
    the language's other special ids are never predicted, nor is the padding.

    Returns:
        `input_ids`, `attention_mask` (1 at tokens) and `labels` (-100 where nothing is predicted), each int64, of T
        columns or, where a start is put before the sentences, T + 1.
    """
    whole = with_start(sentences, language)
    present = whole.present()
    predicted = present.clone()
    # nothing comes before the first token
    predicted[:, 0] = False
    for special in language.special_token_ids:
        predicted &= whole.tokens != special
    return {
        "input_ids": whole.tokens,
        "attention_mask": present.long(),
        "labels": whole.tokens.masked_fill(~predicted, IGNORED),
    }


def objective_batch(
    sentences: Sentences, language: TokenIds, objective: ObjectiveConfig, *, generator: torch.Generator
) -> Batch:
    """Return what a model sees of the sentences and is to predict under `objective`.

    See `predict_next` and `mask`; the causal objective draws nothing from the generator.
    """
    if objective.kind == "causal":
        return predict_next(sentences, language)
    return mask(sentences, language, objective, generator=generator)
