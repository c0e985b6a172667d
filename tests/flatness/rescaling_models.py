"""Tiny random models of the families whose rescalings are known, away from any special point, and their parts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from isoloss.lab.models.lstm import LSTMConfig, LSTMForMaskedLM

VOCABULARY, WIDTH, INNER, HEADS, SIZE, LAYERS = 11, 12, 10, 4, 4, 2
ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": SIZE, "sliding_window": 4}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)


@dataclass(frozen=True)
class Family:
    """A configuration, and what its tensors of several parts are cut into: by the end of a name, the group of rows."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, Callable[[int], torch.Tensor]] = field(default_factory=dict)
    key_bias: bool = False  # whether it has one that turns out to do nothing
    head_bias: bool = False  # whether its head has a bias beside the decoder's

    @property
    def one_layer(self) -> dict[str, int]:
        return {"n_layer" if self.name == "gpt2" else "num_hidden_layers": 1}

    def offset(self, name: str) -> float:
        """What a parameter's gain is more than it."""
        return 1.0 if "gemma" in self.name and "norm" in name else 0.0

    def groups(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of each entry of a parameter where each tensor, and each slice of a fused one, is a part."""
        cut = next((cut for end, cut in self.cut.items() if name.endswith(end)), None)
        if cut is None:
            return torch.zeros((1,) * len(shape), dtype=torch.long)
        groups = cut(shape[-1 if "c_attn" in name else 0])
        return groups if len(shape) == 1 or "c_attn" in name else groups[:, None]

    def config(self, *, tied: bool, **sizes: Any) -> transformers.PretrainedConfig:
        kind = self.name.partition(" ")[0]
        fields = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, **self.fields, **sizes}
        if kind == "isoloss-lstm":
            return LSTMConfig(**fields)
        return transformers.AutoConfig.for_model(kind, attn_implementation="eager", **fields)

    def build(self, *, tied: bool, seed: int = 0, **sizes: Any) -> nn.Module:
        """A model in float64 with gains far from 1 and biases far from 0."""
        config = self.config(tied=tied, **sizes)
        if config.model_type == "isoloss-lstm":
            model = LSTMForMaskedLM(config)
        else:
            kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
            model = kinds["bert" in config.model_type].from_config(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                is_gain = parameter.ndim == 1 and name.endswith("weight")
                parameter.copy_(parameter + 0.3 * noise if is_gain else noise * (0.5 if parameter.ndim == 2 else 0.4))
        return model.double().eval()


def thirds(number: int) -> torch.Tensor:
    return torch.arange(number) * 3 // number


def halves(number: int) -> torch.Tensor:
    return torch.arange(number) * 2 // number


def in_turn(number: int) -> torch.Tensor:
    return torch.arange(number) // (number // HEADS // 3) % 3


def grouped(number: int) -> torch.Tensor:
    return torch.tensor([0] * HEADS + [1] * 2 + [2] * 2).repeat_interleave(number // (HEADS + 4))


FAMILIES = [
    Family("bert", ENCODER, key_bias=True, head_bias=True),
    Family("bert with ReLU", {**ENCODER, "hidden_act": "relu"}, key_bias=True, head_bias=True),
    Family("roberta", ENCODER, key_bias=True, head_bias=True),
    Family("roberta-prelayernorm", ENCODER, key_bias=True, head_bias=True),
    Family(
        "modernbert",
        {**ENCODER, "hidden_size": 16, "global_attn_every_n_layers": 2, "local_attention": 4, **SPECIAL},
        {"Wqkv.weight": thirds, "Wi.weight": halves},
    ),
    Family(
        "modernbert with biases",
        {
            **ENCODER,
            "hidden_size": 16,
            **SPECIAL,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        },
        {"Wqkv.weight": thirds, "Wqkv.bias": thirds, "Wi.weight": halves, "Wi.bias": halves},
    ),
    Family(
        "gpt2",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER, "n_positions": 16},
        {"c_attn.weight": thirds, "c_attn.bias": thirds},
        key_bias=True,
    ),
    Family(
        "gpt_neox",
        {**ENCODER, "hidden_size": 16, "rotary_pct": 0.5},
        {"query_key_value.weight": in_turn, "query_key_value.bias": in_turn},
    ),
    Family(
        "gpt_neox one after the other",
        {**ENCODER, "hidden_size": 16, "rotary_pct": 0.5, "use_parallel_residual": False},
        {"query_key_value.weight": in_turn, "query_key_value.bias": in_turn},
    ),
    Family("opt", {**ENCODER, "ffn_dim": INNER, "word_embed_proj_dim": WIDTH}, key_bias=True),
    Family(
        "opt post-layer-norm with projections",
        {**ENCODER, "ffn_dim": INNER, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
        key_bias=True,
    ),
    Family("llama", DECODER),
    Family(
        "llama with biases and a gate of ReLU",
        {**DECODER, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu"},
    ),
    Family("mistral", DECODER),
    Family("phi3", DECODER, {"qkv_proj.weight": grouped, "gate_up_proj.weight": halves}),
    Family("qwen2", DECODER),
    Family("qwen3", DECODER),
    Family("gemma", DECODER),
    Family("gemma2", DECODER),
    Family("gemma3_text", DECODER),
    Family("isoloss-lstm", {"hidden_size": 6, "num_hidden_layers": LAYERS}),
    Family("isoloss-lstm one way", {"hidden_size": 6, "num_hidden_layers": LAYERS, "num_directions": 1}),
]


def tokens(sequences: int = 4, length: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed))
