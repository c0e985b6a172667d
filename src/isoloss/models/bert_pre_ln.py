"""BERT with pre-layer-norm blocks at a named size: how one is made, and what its decoder reads where it predicts.

Shapes: n sentences, T tokens, k predicted positions, d the model's width.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from isoloss.models.architectures import PRE_LAYER_NORM_BERT, TOKEN_TYPES
from isoloss.models.bert import selected
from isoloss.models.initial import check_padding, seeded_weights
from isoloss.run_config import ModelConfig


def build(
    config: ModelConfig, *, vocab_size: int, max_length: int, pad_id: int, seed: int
) -> RobertaPreLayerNormForMaskedLM:
    """Return a randomly initialized BERT with pre-layer-norm blocks: h + Attn(LN(h)), then h + FF(LN(h)).

    A last layer norm follows the blocks; embeddings, head and tied decoder are BERT's. It is transformers'
    RoBERTa-PreLayerNorm, whose positions count from `pad_id` + 1: the rows of the position embedding before that one
    belong to no token and have no gradient. The rest is as for `isoloss.models.bert.build`.

    Args:
        config: Shape and dropout.
        vocab_size: Token ids that the model knows, the special ones included.
        max_length: Longest sentence, in tokens.
        pad_id: Id of the padding; its embedding starts at 0, and no token may have this id.
        seed: The experiment's seed; the stream is `"weights"`.

    Returns:
        The model in float32 on the CPU, in training mode.

    Raises:
        IsolossError: An unknown size, a shape that cannot be, or a `pad_id` outside the vocabulary.

    Example:
        >>> settings = ModelConfig(architecture="bert-pre-ln", size="d16")
        >>> model = build(settings, vocab_size=34, max_length=8, pad_id=32, seed=0)
        >>> model.num_parameters(), model.config.max_position_embeddings
        (4914, 41)
    """
    check_padding(pad_id, vocab_size)
    sizes = PRE_LAYER_NORM_BERT.shape(config)
    bert_config = RobertaPreLayerNormConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.d_model,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate,
        hidden_act="gelu",
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        max_position_embeddings=pad_id + 1 + max_length,
        type_vocab_size=TOKEN_TYPES,
        layer_norm_eps=1e-12,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    with seeded_weights(seed):
        return RobertaPreLayerNormForMaskedLM(bert_config).train()


def states(
    model: RobertaPreLayerNormForMaskedLM,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return (k, d): what the decoder turns into logits, at the predicted positions only.

    What follows the last mixing of values runs on these alone, as in `isoloss.models.bert.states`, whose arguments
    these are.
    """
    base, head = model.roberta_prelayernorm, model.lm_head
    with selected(base.encoder.layer[-1].attention, positions):
        hidden = base(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    transformed: torch.Tensor = head.layer_norm(nn.functional.gelu(head.dense(hidden)))
    return transformed
