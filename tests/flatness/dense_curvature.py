"""Language models of a few hundred parameters, and the dense Hessian and Gauss-Newton matrices of their losses."""

import types

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

VOCAB = 5


class Windows(nn.Module):
    """A masked model without attention: an embedding, a mix of what came before, a tied head."""

    def __init__(self, vocab=VOCAB, size=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.mix = nn.Linear(size, size)

    def forward(self, input_ids):
        states = torch.tanh(self.mix(self.embedding(input_ids))).cumsum(dim=1)
        return types.SimpleNamespace(logits=states @ self.embedding.weight.T)


def windows():
    torch.manual_seed(0)
    return Windows().double()


def bert(*, tied=True, attention="eager", dropout=0.0, dtype=torch.float64):
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=5,
        max_position_embeddings=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.4,
        tie_word_embeddings=tied,
        pad_token_id=None,
        attn_implementation=attention,
    )
    return BertForMaskedLM(config).to(dtype).eval()


def gpt2(*, attention="eager"):
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=4,
        n_layer=1,
        n_head=2,
        n_positions=4,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config).double().eval()


MODELS = {
    "windows": (windows, False),
    "bert": (bert, False),
    "bert, untied": (lambda: bert(tied=False), False),
    "bert, sdpa": (lambda: bert(attention="sdpa"), False),
    "gpt2": (gpt2, True),
    "gpt2, sdpa": (lambda: gpt2(attention="sdpa"), True),
}


def batch_of(sequences, *, seed=0, length=4, padded=False):
    """Sequences that predict one or two positions each, with labels of their own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (sequences, length), generator=generator)
    labels = torch.full_like(tokens, -100)
    labels[:, 1] = torch.randint(0, VOCAB, (sequences,), generator=generator)
    labels[::2, 2] = torch.randint(0, VOCAB, (len(labels[::2]),), generator=generator)
    batch = {"input_ids": tokens, "labels": labels}
    if padded:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][::3, 3] = 0
    return batch


def flat(parameters):
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters.values()])


def on_vector(model, batches, *, causal, parameters=None):
    """A function of the flat parameters: the logits at all predicted positions; and the labels there."""
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    sizes = [parameter.numel() for parameter in parameters.values()]
    masks, targets = [], []
    for batch in batches:
        labels = batch["labels"]
        if causal:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        masks.append(labels != -100)
        targets.append(labels[masks[-1]])

    def logits(vector):
        named = {
            name: part.view(parameter.shape)
            for (name, parameter), part in zip(parameters.items(), vector.split(sizes), strict=True)
        }
        rows = []
        for batch, mask in zip(batches, masks, strict=True):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            rows.append(functional_call(model, named, kwargs=inputs).logits[mask])
        return torch.cat(rows)

    return logits, torch.cat(targets)


def dense(model, batches, *, causal, parameters=None):
    """The mean loss's Hessian and Gauss-Newton matrix, (P, P) each, by one derivative a parameter."""
    options = {"causal": causal, "parameters": parameters}
    return dense_hessian(model, batches, **options), dense_gauss_newton(model, batches, **options)


def dense_hessian(model, batches, *, causal, parameters=None):
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    logits, targets = on_vector(model, batches, causal=causal, parameters=parameters)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(
            lambda vector: nn.functional.cross_entropy(logits(vector), targets), flat(parameters), vectorize=True
        )


def dense_gauss_newton(model, batches, *, causal, parameters=None):
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    logits, targets = on_vector(model, batches, causal=causal, parameters=parameters)
    theta = flat(parameters)
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(logits, theta, vectorize=True)
    p = logits(theta).detach().softmax(dim=-1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("mcp,mcd,mdq->pq", jacobian, inner, jacobian) / len(targets)
