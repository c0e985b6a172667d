"""Checkpoints of Academic Budget BERT (Izsak et al. 2021), the code that the paper trains with.

With post-layer-norm blocks such a model is a BERT, with pre-layer-norm blocks a RoBERTa-PreLayerNorm, with other names.
The eps of its layer norms is 1e-12, and its decoder has no bias, unless `sparse_mask_prediction` is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from isoloss.checkpoints.places import ACADEMIC
from isoloss.errors import IsolossError

_OWN = {  # of its config.json, and what is read of each; where it says nothing, the first
    "encoder_ln_mode": ("post-ln", "pre-ln"),
    "layer_norm_type": ("apex", "pytorch"),
    "useLN": (True,),
    "fused_linear_layer": (True, False),
    "sparse_mask_prediction": (True, False),
}
_UNUSED = r"\.pooler\.|^cls\.seq_relationship\."  # by the prediction of masked tokens
_DENSE = (r"\.dense_act\.(dense\.)?", ".dense.")
_TOKENS, _POSITIONS = (f"bert.embeddings.{which}_embeddings.weight" for which in ("word", "position"))
_BIAS, _DECODER = "cls.predictions.bias", "cls.predictions.decoder."
_NAMES = {
    "post-ln": (
        _DENSE,
        (r"\.PreAttentionLayerNorm\.", ".attention.output.LayerNorm."),
        (r"\.PostAttentionLayerNorm\.", ".output.LayerNorm."),
    ),
    "pre-ln": (
        _DENSE,
        (r"\.PreAttentionLayerNorm\.", ".attention.LayerNorm."),
        (r"\.PostAttentionLayerNorm\.", ".intermediate.LayerNorm."),
        (r"\.encoder\.FinalLayerNorm\.", ".LayerNorm."),
        (r"^bert\.", "roberta_prelayernorm."),
        (r"^cls\.predictions\.(transform\.)?", "lm_head."),
        (r"^lm_head\.LayerNorm\.", "lm_head.layer_norm."),
    ),
}


def make_model(
    name: str, document: Mapping[str, Any], state: Mapping[str, torch.Tensor], first: Sequence[int] = (), **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a config.json with its weights, and which of them are missing, unexpected or of other shape.

    Args:
        name: The checkpoint, for messages.
        document: Its config.json.
        state: Its weights by name.
        first: Ids that become 0, 1, ..., the last of them the padding's; the others come after them.
        options: Of `_from_config`: the type and the attention kernel.

    Raises:
        IsolossError: Another variant of the blocks.
    """
    for field, choices in _OWN.items():
        if (value := document.get(field, choices[0])) not in choices:
            raise IsolossError(f"{name} has {field} {value!r} in its config.json; {choices} can be read")
    mode = document[ACADEMIC]
    is_post = mode == "post-ln"
    shape = {key: value for key, value in document.items() if key not in (*_OWN, "model_type", "architectures")}
    shape |= {"layer_norm_eps": 1e-12, "architectures": None}
    if first:
        shape["pad_token_id"] = len(first) - 1
    if is_post:
        config: Any = BertConfig.from_dict(shape)
    elif shape.get("hidden_act", "gelu") != "gelu":
        raise IsolossError(f"{name} has pre-layer-norm blocks with the activation {shape['hidden_act']!r}, not 'gelu'")
    else:
        config = RobertaPreLayerNormConfig.from_dict({"bos_token_id": None, "eos_token_id": None, **shape})
        config.max_position_embeddings += config.pad_token_id + 1
    model = (BertForMaskedLM if is_post else RobertaPreLayerNormForMaskedLM)._from_config(config, **options)
    # read or not: post-layer-norm blocks have no use for the last layer norm
    unused = _UNUSED + r"|\.FinalLayerNorm\." * is_post
    weights = {key: value for key, value in state.items() if not re.search(unused, key)}
    if first and _TOKENS in weights:
        order = [*first, *sorted(set(range(len(weights[_TOKENS]))) - {*first})]
        weights |= {key: weights[key][order] for key in (_TOKENS, _BIAS, f"{_DECODER}weight") if key in weights}
    if not is_post and _POSITIONS in weights:
        # transformers' positions count from the padding's id plus one
        weights[_POSITIONS] = nn.functional.pad(weights[_POSITIONS], (0, 0, config.pad_token_id + 1, 0))
    has_bias = not document.get("sparse_mask_prediction", True)
    if _BIAS in weights and not has_bias:
        weights[_BIAS] = torch.zeros_like(weights[_BIAS])
    if _BIAS in weights:
        weights[f"{_DECODER}bias"] = weights[_BIAS]
    for pattern, replacement in _NAMES[mode]:
        weights = {re.sub(pattern, replacement, key): value for key, value in weights.items()}
    mismatched = {
        key for key, value in model.state_dict().items() if key in weights and weights[key].shape != value.shape
    }
    found = model.load_state_dict({key: weights[key] for key in weights.keys() - mismatched}, strict=False)
    if not has_bias:
        # no parameter of the checkpoint's function: measures leave it out
        model.get_output_embeddings().bias.requires_grad_(False)
    return model, {
        "mismatched_keys": [(key,) for key in mismatched],
        "missing_keys": set(found.missing_keys) - mismatched,
        "unexpected_keys": set(found.unexpected_keys),
    }
