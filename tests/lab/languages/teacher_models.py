"""Tiny causal models with strong random weights, and the joint probability of a teacher's sentences by enumeration."""

import itertools

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from isoloss.checkpoints.loading import quiet

VOCAB = 9
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 12}


class Centered(GPT2LMHeadModel):
    """A model whose logits depend on the whole output layer, which therefore cannot be cut."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * out.logits.std(dim=-1, keepdim=True)
        return out


def build(name, seed=0, scale=0.6):
    """A model of one of several kinds, in float64, every weight drawn by the seed."""
    gpt2 = {"vocab_size": VOCAB, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 12} | SPECIAL
    llama = {"vocab_size": VOCAB, "intermediate_size": 16, "num_key_value_heads": 1} | WIDTHS | SPECIAL
    opt = {"vocab_size": VOCAB, "ffn_dim": 16, "word_embed_proj_dim": 6} | WIDTHS | SPECIAL
    with torch.random.fork_rng(devices=[]), quiet():
        model = {
            "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2)),
            "opt": lambda: OPTForCausalLM(OPTConfig(**opt)),
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**llama)),
            "windowed": lambda: MistralForCausalLM(MistralConfig(sliding_window=2, **llama)),
            "centered": lambda: Centered(GPT2Config(**gpt2)),
        }[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.double().eval()


@torch.no_grad()
def next_logs(model, sequences, ids, start_id=0):
    """(n, T, K): log Pr(x_t = c | x_<t) of (n, T) tokens, by one pass of the whole model over each."""
    ids = torch.tensor(ids)
    inputs = torch.cat([torch.full((len(sequences), 1), start_id), ids[sequences]], dim=1)
    return model(input_ids=inputs, use_cache=False).logits[:, :-1, ids].log_softmax(dim=-1)


def enumerated(model, ids, length, start_id=0):
    """All (K^T, T) sentences, and (K, ..., K): the log-probability of each."""
    sequences = torch.tensor(list(itertools.product(range(len(ids)), repeat=length)))
    logs = next_logs(model, sequences, ids, start_id)
    return sequences, logs.gather(2, sequences[..., None])[..., 0].sum(dim=1).view([len(ids)] * length)
