"""Small BERT, GPT-2 and Llama models, batches for them, and the trace by enumeration."""

import torch
from dense_curvature import Windows  # noqa: F401
from plain_gradients import packed
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from isoloss.flatness._ghost import controls


def bert(
    vocab=3,
    *,
    seed=3,
    tied=True,
    attention="eager",
    dropout=0.0,
    size=8,
    layers=2,
    spread=0.2,
    dtype=torch.float64,
    cls=BertForMaskedLM,
):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * size,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=spread,
        tie_word_embeddings=tied,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return cls(config).to(dtype).eval()


def gpt2(vocab=3, *, spread=0.2):
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=8,
        initializer_range=spread,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double().eval()


def llama(vocab=3):
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    # transformers' own RMSNorm computes in float32 whatever the model's dtype, too coarse for a check in float64
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                setattr(parent, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double().eval()


MODELS = {
    "bert": (bert, False),
    "gpt2": (gpt2, True),
    "llama": (llama, True),
}


def rows(n, length, vocab, seed=0, predicted=((1,),)):
    """A batch of n rows; row i predicts the positions predicted[i % len(predicted)]."""
    tokens = torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(tokens, -100)
    for i in range(n):
        for position in predicted[i % len(predicted)]:
            labels[i, position] = tokens[i, position]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def exact(model, batch, *, causal):
    """sum_y p_y ||grad log p_y||^2 by plain gradients of all labels, for each predicted position; and by parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    values, split = [], torch.zeros(len(parameters), dtype=torch.float64)
    for i in range(len(batch["labels"])):
        inputs = {name: value[i : i + 1] for name, value in batch.items() if name != "labels"}
        for t in (batch["labels"][i] != -100).nonzero()[:, 0].tolist():
            log_p = model(**inputs).logits[0, t - causal].log_softmax(-1)
            every = torch.eye(len(log_p), dtype=log_p.dtype)
            gradients = torch.autograd.grad(log_p, parameters, every, is_grads_batched=True, allow_unused=True)
            norms = [
                p.new_zeros(len(log_p)) if g is None else g.square().flatten(1).sum(dim=1)
                for p, g in zip(parameters, gradients, strict=True)
            ]
            norms = torch.stack(norms).double() @ log_p.detach().exp().double()
            split += norms
            values.append(float(norms.sum()))
    return values, split / len(values)


def patch_probes(monkeypatch, chosen):
    """Let each sequence have the signs of `chosen(sequence)`, as many as it needs."""

    def signs(streams, device, seed, *, copies=1):
        return packed([chosen(sequence)[:count] for count, (_, sequence, *_) in streams], copies)

    monkeypatch.setattr(controls, "packed_probes", signs)


def cut(batch, sizes):
    parts = zip(*(torch.as_tensor(value).split(sizes) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]
