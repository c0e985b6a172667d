"""Predicting every next token: from sentences to the mapping that a causal language model takes and is scored on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoloss.languages.api import Language, Sentences
from isoloss.run_config import ObjectiveConfig
from isoloss.text.corpus import Corpus, brackets
from isoloss.text.masking import IGNORED, Batch, mask


class Start(NamedTuple):
    """What the first token of a sentence is predicted from.

    Attributes:
        id: The id that every sentence starts from.
        end_id: The id that ends a sentence, or None where the language has none.
        is_in_sentences: Whether the language's sentences begin with the id themselves.
    """

    id: int
    end_id: int | None
    is_in_sentences: bool


def start_of(language: Language) -> Start:
    """Return what the sentences of a language start from when they are read left to right.

    The packed sequences of a corpus begin with the tokenizer's [CLS] and end with its [SEP], where it has both. All
    other sentences get a start put before them: the tokenizer's bos where there is one, otherwise the id of the mask,
    which a causal model has no other use for, so that masked and causal models of a language know the same ids.

    Example:
        >>> from isoloss import languages
        >>> from isoloss.config import BracketsConfig
        >>> start_of(languages.make(BracketsConfig(length=4)))
        Start(id=3, end_id=None, is_in_sentences=False)
    """
    if isinstance(language, Corpus):
        around = brackets(language.tokenizer)
        if around["first"] is not None:
            return Start(around["first"], around["last"], is_in_sentences=True)
        if language.tokenizer.bos_token_id is not None:
            return Start(int(language.tokenizer.bos_token_id), None, is_in_sentences=False)
    return Start(language.mask_id, None, is_in_sentences=False)


def with_start(sentences: Sentences, language: Language) -> Sentences:
    """Return the sentences with the start before each, one token longer, unless the language begins them with it."""
    start = start_of(language)
    if start.is_in_sentences:
        return sentences
    firsts = sentences.tokens.new_full((len(sentences.tokens), 1), start.id)
    return Sentences(torch.cat([firsts, sentences.tokens], dim=1), sentences.lengths + 1)


def predict_next(sentences: Sentences, language: Language) -> Batch:
    """Return the batch in which every token is predicted from those before it.

    The labels are unshifted, as transformers expects: a causal model predicts label t + 1 at position t. The start and
    the language's other special ids are never predicted, nor is the padding.

    Args:
        sentences: n sentences padded to T tokens.
        language: Whose start and special tokens are used.

    Returns:
        `input_ids`, `attention_mask` (1 at tokens) and `labels` (-100 where nothing is predicted), each int64, of T
        columns or, where a start is put before the sentences, T + 1.
    """
    whole = with_start(sentences, language)
    present = whole.present()
    predicted = present.clone()
    predicted[:, 0] = False
    for special in language.special_ids:
        predicted &= whole.tokens != special
    return {
        "input_ids": whole.tokens,
        "attention_mask": present.long(),
        "labels": whole.tokens.masked_fill(~predicted, IGNORED),
    }


def objective_batch(
    sentences: Sentences, language: Language, objective: ObjectiveConfig, *, generator: torch.Generator
) -> Batch:
    """Return what a model sees of the sentences and is to predict under `objective`.

    Args:
        sentences: n sentences.
        language: Where they come from.
        objective: As for `predict_next` or `isoloss.text.masking.mask`.
        generator: CPU generator of the masks; the causal objective draws nothing.

    Raises:
        IsolossError: As for `isoloss.text.masking.mask`.
    """
    if objective.kind == "causal":
        return predict_next(sentences, language)
    return mask(sentences, language, objective, generator=generator)
