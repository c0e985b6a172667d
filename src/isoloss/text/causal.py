"""Predicting every next token: from sentences to the mapping that a causal language model takes and is scored on."""

from __future__ import annotations

import torch

from isoloss.run_config import ObjectiveConfig
from isoloss.text.masking import IGNORED, Batch, mask
from isoloss.text.sentences import Sentences, TokenIds


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

    See `predict_next` and `isoloss.text.masking.mask`; the causal objective draws nothing from the generator.
    """
    if objective.kind == "causal":
        return predict_next(sentences, language)
    return mask(sentences, language, objective, generator=generator)
