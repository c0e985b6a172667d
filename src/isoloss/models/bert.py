"""BERT with a masked-language-model head, at a named size: how one is made, and its logits where they are wanted.

Shapes: n sentences, T tokens, k predicted positions, V token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from isoloss.models.architectures import BERT, TOKEN_TYPES
from isoloss.models.initial import check_padding, seeded_weights
from isoloss.run_config import ModelConfig


def build(config: ModelConfig, *, vocab_size: int, max_length: int, pad_id: int, seed: int) -> BertForMaskedLM:
    """Return a randomly initialized BERT: post-layer-norm blocks, GELU, decoder tied to the token embedding, no pooler.

    The weights are a pure function of the arguments (normal with standard deviation 0.02, biases 0, layer norms 1 and
    0), and the caller's random state is left alone. Attention is transformers' eager kernel: as fast as the fused one
    at short lengths, made of operations that repeat bit for bit, and with second derivatives.

    Args:
        config: Shape and dropout.
        vocab_size: Token ids that the model knows, the special ones included.
        max_length: Longest sentence, in tokens.
        pad_id: Id of the padding; its embedding starts at 0.
        seed: The experiment's seed; the stream is `"weights"`.

    Returns:
        The model in float32 on the CPU, in training mode.

    Raises:
        IsolossError: An unknown size, a shape that cannot be, or a `pad_id` outside the vocabulary.

    Example:
        >>> model = build(ModelConfig(size="d16"), vocab_size=34, max_length=8, pad_id=32, seed=0)
        >>> model.num_parameters()
        4354
    """
    check_padding(pad_id, vocab_size)
    sizes = BERT.shape(config)
    bert_config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.d_model,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate,
        hidden_act="gelu",
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        max_position_embeddings=max_length,
        type_vocab_size=TOKEN_TYPES,
        layer_norm_eps=1e-12,
        pad_token_id=pad_id,
        attn_implementation="eager",
    )
    with seeded_weights(seed):
        return BertForMaskedLM(bert_config).train()


def masked_logits(
    model: BertForMaskedLM, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Return the logits at the predicted positions only: `model(...).logits[positions]` at a fraction of the work.

    Args:
        model: As for `states`.
        input_ids: As for `states`.
        attention_mask: As for `states`.
        positions: (n, T) bool, true where logits are wanted.

    Returns:
        (k, V), in the order of `positions.nonzero()`.
    """
    logits: torch.Tensor = model.cls.predictions.decoder(states(model, input_ids, attention_mask, positions))
    return logits


def states(
    model: BertForMaskedLM, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Return what the decoder turns into logits, at the predicted positions only.

    What a position's logits need of the other positions ends with the mixing of values in the last layer's attention,
    so all that follows (its output projection, the last feed-forward block and the head) runs on the k predicted
    positions alone.

    Args:
        model: A BERT with a masked-language-model head.
        input_ids: (n, T) int64.
        attention_mask: (n, T), 1 at tokens and 0 at padding; None where nothing is padded, which is faster.
        positions: (n, T) bool, true where logits are wanted.

    Returns:
        (k, d), in the order of `positions.nonzero()`.
    """
    with selected(model.bert.encoder.layer[-1].attention, positions):
        hidden = model.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    transformed: torch.Tensor = model.cls.predictions.transform(hidden)
    return transformed


@contextlib.contextmanager
def selected(attention: Any, positions: torch.Tensor) -> Iterator[None]:
    """Let a block's attention give its output (n, T, d) at the positions alone, as (k, d), while this is open.

    Its output projection and what follows run on these. With one position in each sentence and the eager kernel, all
    products of the attention do, too.
    """
    rows = positions.flatten().nonzero()[:, 0]
    own, is_eager = attention.self, attention.self.config._attn_implementation == "eager"

    def select(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        for tensor in inputs:
            if tensor.ndim == 3 and tensor.shape[:2] != positions.shape:
                raise IndexError(f"positions {tuple(positions.shape)} of states {tuple(tensor.shape)}")
        return tuple(t.flatten(0, 1).index_select(0, rows) if t.ndim == 3 else t for t in inputs)

    hook = attention.output.register_forward_pre_hook(select)
    if is_eager and bool((positions.sum(dim=1) == 1).all()):
        own.forward = partial(_attend_from_one, own, positions)
    try:
        yield
    finally:
        hook.remove()
        own.__dict__.pop("forward", None)


def _attend_from_one(
    module: Any, positions: torch.Tensor, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return (n, d): what the eager kernel gives at each sentence's one position.

    No key and no value is computed: with q the query, K and V the projections, the score of a state x is (K^T q) . x
    plus the bias's, and the mixed values are V times the mixed states. That is a product of d x d numbers a sentence
    instead of one a token.
    """
    n, length, width = hidden.shape
    heads = (module.num_attention_heads, module.attention_head_size)
    query = module.query(hidden[positions]).view(n, *heads)
    at = torch.einsum("nhe,hed->nhd", query, module.key.weight.view(*heads, width))
    constant = torch.einsum("nhe,he->nh", query, module.key.bias.view(heads))
    scores = (torch.einsum("nhd,ntd->nht", at, hidden) + constant[:, :, None]) * module.scaling
    if attention_mask is not None:
        scores = scores + attention_mask.expand(n, 1, length, length)[:, 0][positions][:, None]
    weights = nn.functional.dropout(scores.softmax(dim=-1), p=module.dropout.p, training=module.training)
    mixed = torch.einsum("nht,ntd->nhd", weights, hidden)
    values = torch.einsum("nhd,hed->nhe", mixed, module.value.weight.view(*heads, width))
    return (values + weights.sum(dim=-1)[:, :, None] * module.value.bias.view(heads)).flatten(1), None
