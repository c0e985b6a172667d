"""Hiding tokens: from sentences to the mapping that a masked language model takes and is scored on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoloss.config import ObjectiveConfig
from isoloss.errors import IsolossError
from isoloss.languages.base import Language, Sentences

IGNORED = -100  # the label of a position that is not predicted, as everywhere in transformers

Batch = dict[str, torch.Tensor]  # input_ids, attention_mask, labels (n, T), as transformers' collators give


class SpecialIds(NamedTuple):
    """What `mask` must know of a language, where there is a tokenizer but no language.

    Attributes:
        mask_id: The id that hides a token.
        special_ids: Ids that are never hidden nor predicted.
    """

    mask_id: int
    special_ids: tuple[int, ...] = ()


def mask(
    sentences: Sentences, language: Language | SpecialIds, objective: ObjectiveConfig, *, generator: torch.Generator
) -> Batch:
    """Hide tokens of each sentence and return them as labels.

    With `masking="one"`, one position of each sentence is drawn uniformly (the paper, section 2.1). With
    `masking="fraction"`, each position is drawn with probability `fraction`, and a sentence in which none was gets one
    drawn uniformly, so that every sentence predicts something. A drawn token is always replaced by the mask.

    Args:
        sentences: n sentences padded to T tokens.
        language: Whose mask and special tokens are used.
        objective: How positions are drawn.
        generator: CPU generator of the draws.

    Returns:
        `input_ids`, `attention_mask` (1 at tokens) and `labels` (-100 where nothing is predicted), each (n, T) int64.

    Raises:
        IsolossError: A sentence has no token that could be hidden, or the fraction is not in (0, 1].
    """
    if not 0 < objective.fraction <= 1:
        raise IsolossError(f"the masked fraction is {objective.fraction}; it must be above 0 and at most 1")
    tokens = sentences.tokens
    present = sentences.present()
    candidates = present.clone()
    for special in language.special_ids:
        candidates &= tokens != special
    if not bool(candidates.any(dim=1).all()):
        raise IsolossError("a sentence has no token that could be masked: it is empty or all special tokens")
    # the smallest of the candidates' uniform draws marks one position, uniformly
    draws = torch.rand(tokens.shape, generator=generator, dtype=torch.float64).to(tokens.device)
    draws = draws.masked_fill(~candidates, 2.0)
    chosen = torch.zeros_like(candidates).scatter_(1, draws.argmin(dim=1, keepdim=True), True)
    if objective.masking == "fraction":
        chosen |= draws < objective.fraction
    return {
        "input_ids": tokens.masked_fill(chosen, language.mask_id),
        "attention_mask": present.long(),
        "labels": tokens.masked_fill(~chosen, IGNORED),
    }
