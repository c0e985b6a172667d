"""Checkpoints of Academic Budget BERT (Izsak et al. 2021), the code that the paper trains with.

A model is a BERT or, pre-layer-norm, a RoBERTa-PreLayerNorm, with other names and no bias of the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM

from isoloss.errors import IsolossError

_FIELDS = {  # of config.json: the values that can be read
    "encoder_ln_mode": ("post-ln", "pre-ln"),
    "layer_norm_type": ("apex", "pytorch"),
    "useLN": (True,),
    "sparse_mask_prediction": (True,),
    "hidden_act": ("gelu",),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TOKENS, _POSITIONS = (f"bert.embeddings.{which}_embeddings.weight" for which in ("word", "position"))
_BIAS, _DECODER = "cls.predictions.bias", "cls.predictions.decoder."
_DENSE, _FIRST, _SECOND = r"\.dense_act\.(dense\.)?", r"\.PreAttentionLayerNorm\.", r"\.PostAttentionLayerNorm\."
_POST = {_DENSE: ".dense.", _FIRST: ".attention.output.LayerNorm.", _SECOND: ".output.LayerNorm."}
_PRE = {
    **{_DENSE: ".dense.", _FIRST: ".attention.LayerNorm.", _SECOND: ".intermediate.LayerNorm."},
    **{r"\.encoder\.FinalLayerNorm\.": ".LayerNorm.", r"^bert\.": "roberta_prelayernorm."},
    **{r"^cls\.predictions\.(transform\.)?": "lm_head.", r"^lm_head\.LayerNorm\.": "lm_head.layer_norm."},
}


def make_model(
    name: str, document: Mapping[str, Any], state: Mapping[str, Any], first: Sequence[int], **kind: Any
) -> Any:
    """Return the model of a config.json and of weights by name, with the type and attention kernel of `kind`.

    The ids in `first`, the padding's and the mask's last, become 0, 1, ...; all others come after them.
    """
    for field, choices in _FIELDS.items():
        if (value := document.get(field, choices[0])) not in choices:
            readable = " or ".join(map(str, choices))
            raise IsolossError(f"{name} has {field} {value!r} in its config.json; only {readable} can be read")
    if missing := [field for field in _SIZES if field not in document]:
        raise IsolossError(f"{name} lacks {', '.join(missing)} in its config.json")
    if first and max(first) >= document["vocab_size"]:
        raise IsolossError(f"{name} has more words in its vocab.txt than the vocab_size of its config.json")
    is_post = document["encoder_ln_mode"] == "post-ln"
    shape = {**document, "layer_norm_eps": 1e-12, "architectures": None, "bos_token_id": None, "eos_token_id": None}
    shape.pop("model_type", None)
    shape["pad_token_id"] = len(first) - 2 if first else document.get("pad_token_id") or 0
    config: Any = (BertConfig if is_post else RobertaPreLayerNormConfig).from_dict(shape)
    # masked tokens are predicted without the first two; post-layer-norm blocks do not use the third
    unused = r"\.pooler\.|^cls\.seq_relationship\." + r"|\.FinalLayerNorm\." * is_post
    weights = {key: value for key, value in state.items() if not re.search(unused, key)}
    if integers := [key for key, value in weights.items() if not value.is_floating_point()]:
        raise IsolossError(f"{name} holds {integers[0]} in {weights[integers[0]].dtype}, not in floating-point numbers")
    # the decoder's are those of the embedding, and some files hold them once
    tied = [weights[key] for key in (_TOKENS, f"{_DECODER}weight") if key in weights]
    if not all(torch.equal(tied[0], each) for each in tied):
        raise IsolossError(f"{name} holds {_TOKENS} and another {_DECODER}weight, but its model has one for both")
    weights |= dict.fromkeys((_TOKENS, f"{_DECODER}weight"), tied[0]) if tied else {}
    # it is stored, but never added to the logits of masked tokens
    weights |= {key: torch.zeros(config.vocab_size) for key in (_BIAS, f"{_DECODER}bias")}
    if first:
        order = [*first, *sorted(set(range(config.vocab_size)) - {*first})]
        weights |= {key: weights[key][order] for key in (_TOKENS, f"{_DECODER}weight")}
    if not is_post:
        # transformers' positions count from the padding's id plus one
        config.max_position_embeddings += (start := config.pad_token_id + 1)
        weights[_POSITIONS] = nn.functional.pad(weights[_POSITIONS], (0, 0, start, 0))
    for pattern, replacement in (_POST if is_post else _PRE).items():
        weights = {re.sub(pattern, replacement, key): value for key, value in weights.items()}
    model = (BertForMaskedLM if is_post else RobertaPreLayerNormForMaskedLM)._from_config(config, **kind)
    model.load_state_dict(weights)
    # not a parameter of the function, so no measure counts it
    model.get_output_embeddings().bias.requires_grad_(False)
    return model
