"""Tiny random models of every architecture with a language model's head in transformers; nothing is downloaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

VOCABULARY = 13
PAD, BOS, EOS = 0, 1, 2
MOST_PARAMETERS = 300_000
ATTENTION, MLP, HEAD = "attention outputs zero", "MLP outputs zero", "head zero"
VARIANTS = ("perturbed", ATTENTION, MLP, HEAD)

# what a config's usual fields are set to, where it has them
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "embedding_rank"), 8),
    **dict.fromkeys(("num_hidden_layers", "decoder_layers", "encoder_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads", "n_head"), 2),
    **dict.fromkeys(("n_heads", "num_heads", "attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 1),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "linear_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "hidden_dim"), 24),
    **dict.fromkeys(("ffn_hidden_size", "d_inner", "dff", "dim_ff", "feed_forward_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 12),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 12),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "dense_intermediate_size"), 12),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 32),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "original_max_position_embeddings"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "n_groups"), 4),
    "qk_head_dim": 16,
    "rotary_dim": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    "sliding_window": 4,
    "time_step_rank": 4,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
# what a family's config wants beside or instead of these, by its class's name without "Config"
_FAMILIES: dict[str, dict[str, Any]] = {
    "CodeGen": {"n_head": 4},
    "DiffLlama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "Dots1": {"n_shared_experts": 1},
    "Esmc": {"num_key_value_heads": 2},
    "GotOcr2Vision": {"image_size": 64, "output_channels": 16, "mlp_dim": 24},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"]},
    "Longformer": {"attention_window": 8},
    "Luke": {"entity_vocab_size": 5, "entity_emb_size": 4},
    "Mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 2},
    "NeoMME": {"head_dim": 16},
    "Reformer": {
        "attention_head_size": 8,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [8, 8],
        "hash_seed": 1,
    },
    "RoCBert": {
        "pronunciation_embed_dim": 4,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 4,
        "shape_vocab_size": VOCABULARY,
    },
    "SqueezeBert": {"embedding_size": 16},
    "Xmod": {"default_language": "en_XX"},
    "Zamba": {"layer_types": ["hybrid", "hybrid"]},
    "Zamba2": {"layer_types": ["hybrid", "hybrid"]},
    "Zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Architecture:
    """A class with a language model's head, and the config that goes with it."""

    model: type[nn.Module]
    config: type[PretrainedConfig]
    causal: bool

    @property
    def name(self) -> str:
        """The class's name."""
        return self.model.__name__


def architectures() -> Iterator[Architecture]:
    """Yield every class that transformers lists for causal and masked language models, each once."""
    seen: set[type[nn.Module]] = set()
    for mapping, causal in ((MODEL_FOR_CAUSAL_LM_MAPPING, True), (MODEL_FOR_MASKED_LM_MAPPING, False)):
        for config, model in mapping.items():
            if model not in seen:
                seen.add(model)
                config = getattr(model, "config_class", None) or config  # of several modalities, the text's
                yield Architecture(model, config, causal and "XL" not in model.__name__[:3])


@functools.cache  # a second of imports
def known() -> dict[str, Architecture]:
    """Return these classes by name."""
    return {architecture.name: architecture for architecture in architectures()}


def tiny_config(architecture: Architecture, *, tied: bool | None = None) -> PretrainedConfig:
    """Return a config with the usual fields made small."""
    fields = _fields(architecture.config)
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    if hasattr(architecture.config(), "is_decoder"):
        fields["is_decoder"] = architecture.causal
    config = architecture.config(**fields)
    config._experts_implementation = "eager"
    return config


def _fields(kind: type[PretrainedConfig]) -> dict[str, Any]:
    family = _FAMILIES.get(kind.__name__.removesuffix("Config"), {})
    default = kind()
    known = default.to_dict()
    fields = {name: value for name, value in _FIELDS.items() if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        fields["num_key_value_heads"] = 2  # latent attention has no groups
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if len(kinds) > 1:
        fields["layer_types"] = kinds[:2]  # a layer of each kind
    for name in getattr(kind, "sub_configs", {}):
        part = type(getattr(default, name, None))  # which may be one of several
        if issubclass(part, PretrainedConfig) and part is not PretrainedConfig:
            fields[name] = _fields(part) | {"model_type": part.model_type}
    return fields | family


_LEFT_OUT = dict.fromkeys(
    ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "a sequence is as many rows of its batch as it has codebooks"
)


def build(architecture: Architecture, *, tied: bool | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a tiny model in evaluation mode, with noise on every parameter."""
    if architecture.name in _LEFT_OUT:
        raise ValueError(_LEFT_OUT[architecture.name])
    config = tiny_config(architecture, tied=tied)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in architecture.model(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are too many")
    torch.manual_seed(1)
    config = tiny_config(architecture, tied=tied)
    model = architecture.model(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


# what the parts of a layer that mix positions are called, and the last linear map of these and of the others
_MIXER = re.compile(r"\.\d+\..*(?:att|mixer|mamba|temporal|\bconv\b|lstm|ssm)|^transformer\.attentions")
_MIXER_OUTPUT = re.compile(
    r"\.(?:o_proj|out_proj|c_proj|dense|Wo|out_lin|attention_out|post_proj|o|o_b_proj|output|output_linear|linear_out"
    r"|post_attention\.conv1d)(?:\.weight)?$"
)
_MLP_OUTPUT = re.compile(
    r"\.(?:down_proj|fc2|c_proj|output\.dense|output\.conv1d|dense_4h_to_h|lin2|w2|Wo|w_out|fc_out|ffn\.2|linear_2"
    r"|layer_2|dense2|feed_forward\.value|feed_forward\.output|proj_down|output_linear|ffn_output|feed_forward\.output\.dense)(?:\.weight)?$"
)


def zero(model: nn.Module, variant: str) -> list[str]:
    """Set to zero the weights that a variant names, in place, and return their names; an empty list: there are none."""
    chosen = {"perturbed": [], ATTENTION: _outputs(model, mixers=True), MLP: _outputs(model, mixers=False)}
    names = _head(model) if variant == HEAD else chosen[variant]
    with torch.no_grad():
        for name in names:
            dict(model.named_parameters(remove_duplicate=False))[name].zero_()
    return names


def _outputs(model: nn.Module, *, mixers: bool) -> list[str]:
    pattern = _MIXER_OUTPUT if mixers else _MLP_OUTPUT
    matrices = [name for name, value in model.named_parameters() if value.ndim > 1 and re.search(r"\.\d+\.", name)]
    return [name for name in matrices if pattern.search(name) and bool(_MIXER.search(name)) is mixers]


def _head(model: nn.Module) -> list[str]:
    head: Any = model
    try:
        weight = getattr(head.get_output_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        weight = None
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, value in named if weight is not None and value is weight]
