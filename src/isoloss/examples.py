"""A tiny model and its inputs, with which the examples of the documentation run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import BertForMaskedLM


def tiny_bert() -> tuple[BertForMaskedLM, list[dict[str, torch.Tensor]]]:
    """A BERT of one layer and width 8 with random weights, the same each time, and four batches of 16 sequences.

    A sequence has four tokens, of which the first is predicted.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> model, batches = tiny_bert()
        >>> model.num_parameters(), batches[0]["input_ids"].shape
        (856, torch.Size([16, 4]))
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes)).eval()
        input_ids = torch.randint(0, 8, (64, 4))
    labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
    return model, [{"input_ids": part, "labels": labels} for part in torch.split(input_ids, 16)]
