"""A model: DistilBERT in the sizes of isoloss's transformers."""

from typing import Any

from isoloss.lab.models.architectures import Transformer


class DistilBERT(Transformer):
    """DistilBERT: BERT without token types, and with a projection before the tied decoder."""

    model_class = "DistilBertForMaskedLM"

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return (V + T + 2) d of the embeddings and their layer norm, and d^2 + d + 2 d + V of the head."""
        return (vocab_size + max_length + 2) * d + d * d + d + 2 * d + vocab_size

    def settings(self, shape: Any, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        """Return what `DistilBertConfig` takes besides the vocabulary and the padding."""
        return {
            "max_position_embeddings": max_length,
            "dim": shape.d_model,
            "n_layers": shape.num_layers,
            "n_heads": shape.num_heads,
            "hidden_dim": shape.intermediate,
            "dropout": dropout,
            "attention_dropout": dropout,
        }


DISTILBERT = DistilBERT()
