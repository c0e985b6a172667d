"""What the decoder of a BERT reads where it predicts, post- and pre-layer-norm.

Shapes: n sentences, T tokens, k predicted positions, d the model's width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import BertForMaskedLM
from transformers.masking_utils import create_bidirectional_mask


def states(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Return (k, d): what the decoder turns into logits, at the positions (n, T) only, in their order.

    What a position's logits need of the other positions ends with the mixing of values in the last layer's attention,
    so all that follows (its output projection, the last feed-forward block and the head) runs on the k predicted
    positions alone. The model is a BERT or a RoBERTa-PreLayerNorm with its head; without an attention mask, where
    nothing is padded, it is faster.
    """
    base = model.base_model
    with selected(base.encoder.layer[-1].attention, positions):
        hidden = base.embeddings(input_ids=input_ids)
        if attention_mask is not None:
            attention_mask = create_bidirectional_mask(base.config, hidden, attention_mask)
        # Calling `base` instead takes as long again as a small layer, for what lets it return all states.
        for layer in base.encoder.layer:
            hidden = layer(hidden, attention_mask)
    transformed: torch.Tensor
    if isinstance(model, BertForMaskedLM):
        transformed = model.cls.predictions.transform(hidden)
    else:
        hidden = base.LayerNorm(hidden)
        transformed = model.lm_head.layer_norm(nn.functional.gelu(model.lm_head.dense(hidden)))
    return transformed


@contextlib.contextmanager
def selected(attention: Any, positions: torch.Tensor) -> Iterator[None]:
    """Let a block's attention give its output (n, T, d) at the positions alone, as (k, d), while this is open.

    Its output projection and what follows run on these. With one position in each sentence and the eager kernel, all
    products of the attention do, too.
    """
    rows = positions.flatten().nonzero()[:, 0]
    self_attention = attention.self
    is_eager = self_attention.config._attn_implementation == "eager"

    def select(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        for tensor in inputs:
            if tensor.ndim == 3 and tensor.shape[:2] != positions.shape:
                raise IndexError(f"positions {tuple(positions.shape)} of states {tuple(tensor.shape)}")
        return tuple(t.flatten(0, 1).index_select(0, rows) if t.ndim == 3 else t for t in inputs)

    # The output block gets the mixed values and the residual, so that both are cut to the positions by one hook.
    hook = attention.output.register_forward_pre_hook(select)
    if is_eager and bool((positions.sum(dim=1) == 1).all()):
        self_attention.forward = partial(_attend_from_one, self_attention, positions)
    try:
        yield
    finally:
        hook.remove()
        # The instance's attribute hid the class's method, which is there again.
        self_attention.__dict__.pop("forward", None)


def _attend_from_one(
    module: Any, positions: torch.Tensor, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return (n, d): what the eager kernel gives at each sentence's one position.

    No key and no value is computed: with q the query, K and V the projections, the score of a state x is (K^T q) . x
    plus the bias's, and the mixed values are V times the mixed states. That is a product of d x d numbers a sentence
    instead of one a token.
    """
    n, length, width = hidden.shape
    if attention_mask is not None:
        # (n, 1, T, T) or what broadcasts to it, as (n, T): the row of the one position
        attention_mask = attention_mask.expand(n, 1, length, length)[:, 0][positions]
    heads = (module.num_attention_heads, module.attention_head_size)
    query = module.query(hidden[positions]).view(n, *heads)
    at = torch.einsum("nhe,hed->nhd", query, module.key.weight.view(*heads, width))
    constant = torch.einsum("nhe,he->nh", query, module.key.bias.view(heads))
    scores = (torch.einsum("nhd,ntd->nht", at, hidden) + constant[:, :, None]) * module.scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, None]
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=module.dropout.p, training=module.training)
    mixed = torch.einsum("nht,ntd->nhd", weights, hidden)
    values = torch.einsum("nhd,hed->nhe", mixed, module.value.weight.view(*heads, width))
    # The weights add up to 1 only without dropout: the value's bias counts as often as they do.
    return (values + weights.sum(dim=-1)[:, :, None] * module.value.bias.view(heads)).flatten(1), None
