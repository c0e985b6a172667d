"""The features of a model as a measure: their effective dimension, and what compares them with another model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.config import setting
from isoloss.evaluation.measures.base import MeasureResult, SeededMeasure, digest, influences

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext

NAME = "effective-dimension"


@dataclass(frozen=True, kw_only=True)
class Features(SeededMeasure):
    """Effective dimension of the last hidden states of all tokens, concatenated, as linear probes read them."""

    feature_sentences: int = setting(256, minimum=5)
    """Sentences whose features are compared; for text, held-out sequences at most."""

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `effective-dimension`, with the upper triangle of the features' Gram matrix as `gram`.

        The inputs are the sentences without a start, so that causal and masked models of a language have the same.
        """
        from isoloss.text.masking import with_start
        from isoloss.transfer.features import extract
        from isoloss.transfer.similarity import effective_dimension, from_upper_triangle, gram_matrix, upper_triangle

        sentences = context.sentences(self.feature_sentences, self.seed)
        takes_start = context.is_causal and context.language is not None
        features: Any = extract(model, with_start(sentences, context.language) if takes_start else sentences)
        gram = upper_triangle(gram_matrix(features))
        estimates = {NAME: effective_dimension(from_upper_triangle(gram))}
        return MeasureResult(
            estimates=estimates,
            arrays={**influences(estimates), f"{NAME}.gram": gram},
            inputs=digest(sentences.tokens, sentences.lengths),
        )
