"""A model: DistilBERT in the sizes of isoloss's transformers."""

from typing import Any

from isoloss.models.architectures import Transformer


class DistilBERT(Transformer):
    """DistilBERT: BERT without token types, and with a projection before the tied decoder."""

    model_class = "DistilBertForMaskedLM"

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return (V + T + 2) d of the embeddings and their layer norm, and d^2 + d + 2 d + V of the head."""
        return (vocab_size + max_length + 2) * d + d * d + d + 2 * d + vocab_size

    def build(self, config: Any, language: Any, *, seed: int) -> Any:
        """Return a randomly initialized model."""
        import torch
        from transformers import DistilBertConfig, DistilBertForMaskedLM

        from isoloss.seeds import derive

        shape = self.shape(config)
        settings = DistilBertConfig(
            vocab_size=language.model_vocab_size,
            pad_token_id=language.pad_id,
            max_position_embeddings=language.max_length,
            dim=shape.d_model,
            n_layers=shape.num_layers,
            n_heads=shape.num_heads,
            hidden_dim=shape.intermediate,
            dropout=config.dropout,
            attention_dropout=config.dropout,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "weights"))
            return DistilBertForMaskedLM(settings).train()


DISTILBERT = DistilBERT()
