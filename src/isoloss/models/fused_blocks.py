"""BERT's embedding and blocks as transformers has them, with the pieces of `isoloss.models.fused` where training can.

A module keeps its parameters and their names; another class only gives it another forward pass, in training mode and
where the pieces are usable. In all other cases it is transformers' own, which has derivatives of any order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertSelfAttention, BertSelfOutput
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import RobertaPreLayerNormSelfAttention

from isoloss.models import fused


class _Embeddings(BertEmbeddings):  # type: ignore[misc]
    """Tokens at their places, all of the first type, their layer norm and dropout."""

    def forward(self, input_ids: Any = None, *others: Any, past_key_values_length: int = 0, **more: Any) -> Any:
        """Return the states (n, T, d) that the first block reads."""
        weight = self.LayerNorm.weight
        is_plain = past_key_values_length == 0 and all(value is None for value in (*others, *more.values()))
        if input_ids is None or not (self.training and is_plain and fused.is_usable(weight)):
            return super().forward(input_ids, *others, past_key_values_length=past_key_values_length, **more)
        places = self.position_embeddings.weight[: input_ids.shape[1]] + self.token_type_embeddings.weight[0]
        return fused.embed(input_ids, self.word_embeddings, places, self.LayerNorm, dropout=self.dropout.p)


class _Attention:
    """Self-attention by one product for queries, keys and values, with the eager kernel only."""

    def forward(self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **others: Any) -> Any:
        """Return the mixed values (n, T, d), and None in the place of the weights, which are not kept."""
        is_plain = others.get("past_key_values") is None and self.config._attn_implementation == "eager"
        if not (self.training and is_plain and fused.is_usable(hidden_states)):
            return super().forward(hidden_states, attention_mask, **others)  # type: ignore[misc]
        projections = (self.query, self.key, self.value)
        settings = {"num_heads": self.num_attention_heads, "dropout": self.dropout.p}
        return fused.attention(hidden_states, attention_mask, projections, **settings), None


class _PostNormAttention(_Attention, BertSelfAttention):  # type: ignore[misc]
    pass


class _PreNormAttention(_Attention, RobertaPreLayerNormSelfAttention):  # type: ignore[misc]
    pass


class _AttentionOutput(BertSelfOutput):  # type: ignore[misc]
    """The attention's output projection, its dropout, the residual and the layer norm."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> Any:
        """Return the block's state after its attention, of the shape of `input_tensor`."""
        if not (self.training and fused.is_usable(hidden_states)):
            return super().forward(hidden_states, input_tensor)
        x, residual = hidden_states.flatten(0, -2), input_tensor.flatten(0, -2)
        y = fused.linear_add_norm(x, self.dense, residual, self.LayerNorm, dropout=self.dropout.p)
        return y.view_as(input_tensor)


class _Layer(BertLayer):  # type: ignore[misc]
    """A block whose feed-forward half is one piece."""

    def feed_forward_chunk(self, attention_output: torch.Tensor) -> Any:
        """Return the block's output, of the shape of `attention_output`."""
        if not (self.training and fused.is_usable(attention_output)):
            return super().feed_forward_chunk(attention_output)
        inner, outer = self.intermediate.dense, self.output
        x = attention_output.flatten(0, -2)
        y = fused.feed_forward_add_norm(x, inner, outer.dense, outer.LayerNorm, dropout=outer.dropout.p)
        return y.view_as(attention_output)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    BertEmbeddings: _Embeddings,
    BertLayer: _Layer,
    BertSelfAttention: _PostNormAttention,
    BertSelfOutput: _AttentionOutput,
    RobertaPreLayerNormSelfAttention: _PreNormAttention,
}


def with_fused_blocks(model: nn.Module) -> None:
    """Give the blocks of `model` another forward pass where there is one: BERT's, with GELU, and pre-norm attention."""
    for module in model.modules():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]


def computed_by(model: nn.Module, precision: str) -> str:
    """Return what computes the blocks of `model` if it is trained here, with these threads: `fused` or `torch`."""
    has_fused = any(type(module) in _CLASSES.values() for module in model.modules())
    return "fused" if has_fused and precision == "float32" and fused.is_usable(next(model.parameters())) else "torch"
