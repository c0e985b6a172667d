"""A hand-written loop in plain torch: a small BERT that skips what it does not need, and nothing of isoloss in a step.

It is what a good engineer would write: one product for queries, keys and values, the last layer's queries and all that
follows them at the masked position alone, no attention mask, torch's fused AdamW, gradients set to None. One token of
each sentence is masked, and nothing is padded.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class PlainBatch(NamedTuple):
    """Sentences as a collator of one's own gives them: (n, T) tokens, and (n,) masked positions and their tokens."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


class Block(nn.Module):
    """A post-norm block: attention by hand or by torch's fused kernel."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, eps: float, *, sdpa: bool) -> None:
        super().__init__()
        self.heads, self.size, self.dropout, self.sdpa = heads, width // heads, dropout, sdpa
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.first, self.second = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return the states (n, T, d), or those at one position of each sentence, (n, 1, d)."""
        n, length, width = x.shape
        if positions is None:
            q, k, v = self.qkv(x).view(n, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        else:
            rest = F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:])
            k, v = rest.view(n, length, 2, self.heads, self.size).permute(2, 0, 3, 1, 4)
            x = x[torch.arange(n), positions].unsqueeze(1)
            q = F.linear(x, self.qkv.weight[:width], self.qkv.bias[:width]).view(n, 1, self.heads, self.size)
            q = q.transpose(1, 2)
        dropped = self.dropout if self.training else 0.0
        if self.sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        else:
            weights = (q @ k.transpose(2, 3) * self.size**-0.5).softmax(dim=-1)
            mixed = F.dropout(weights, dropped) @ v
        x = self.first(x + F.dropout(self.mixed(mixed.transpose(1, 2).reshape(x.shape)), dropped))
        return self.second(x + F.dropout(self.outer(F.gelu(self.inner(x))), dropped))


class PlainBERT(nn.Module):
    """BERT with its output layer tied to the token embedding, with a transformers model's shape and weights."""

    def __init__(self, like: Any, *, sdpa: bool) -> None:
        super().__init__()
        config = like.config
        width, eps = config.hidden_size, config.layer_norm_eps
        self.dropout = config.hidden_dropout_prob
        self.tokens = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.places = nn.Parameter(torch.empty(config.max_position_embeddings, width))
        self.types = nn.Parameter(torch.empty(config.type_vocab_size, width))
        self.norm = nn.LayerNorm(width, eps)
        shape = (width, config.num_attention_heads, config.intermediate_size, self.dropout, eps)
        self.blocks = nn.ModuleList(Block(*shape, sdpa=sdpa) for _ in range(config.num_hidden_layers))
        self.dense, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width, eps)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self._copy(like)

    @torch.no_grad()
    def _copy(self, like: Any) -> None:
        head, embeddings = like.cls.predictions, like.bert.embeddings
        self.places.copy_(embeddings.position_embeddings.weight)
        self.types.copy_(embeddings.token_type_embeddings.weight)
        self.bias.copy_(head.bias)
        pairs = [
            (self.tokens, embeddings.word_embeddings),
            (self.norm, embeddings.LayerNorm),
            (self.dense, head.transform.dense),
            (self.last_norm, head.transform.LayerNorm),
        ]
        for block, layer in zip(self.blocks, like.bert.encoder.layer, strict=True):
            own = layer.attention.self
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in (own.query, own.key, own.value)]
                getattr(block.qkv, name).copy_(torch.cat(parts))
            pairs += [
                (block.mixed, layer.attention.output.dense),
                (block.first, layer.attention.output.LayerNorm),
                (block.inner, layer.intermediate.dense),
                (block.outer, layer.output.dense),
                (block.second, layer.output.LayerNorm),
            ]
        for module, source in pairs:
            module.load_state_dict(source.state_dict())

    def forward(self, batch: PlainBatch) -> torch.Tensor:
        """Return the mean cross-entropy of the masked tokens, in nats."""
        x = self.tokens(batch.tokens) + (self.places[: batch.tokens.shape[1]] + self.types[0])
        x = F.dropout(self.norm(x), self.dropout, self.training)
        for block in self.blocks[:-1]:
            x = block(x, None)
        x = self.blocks[-1](x, batch.positions)[:, 0]
        x = self.last_norm(F.gelu(self.dense(x)))
        return F.cross_entropy(F.linear(x, self.tokens.weight, self.bias), batch.labels)


def plain_batch(inputs: dict[str, torch.Tensor]) -> PlainBatch:
    """Return a batch of ours, with one masked token in each sentence and no padding, as this loop takes it."""
    tokens, labels = inputs["input_ids"], inputs["labels"]
    masked = labels != -100
    if "attention_mask" in inputs or not bool((masked.sum(dim=1) == 1).all()):
        raise ValueError("the hand-written loop takes one masked token a sentence and no padding")
    return PlainBatch(tokens, masked.int().argmax(dim=1), labels[masked])


def plain_loop(model: Any, optimizer: torch.optim.Optimizer, batches: list[PlainBatch]) -> list[float]:
    """Make a step with each batch; return the process's time at the start of each."""
    times = []
    for batch in batches:
        times.append(time.process_time())
        loss = model(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()  # as a loop that logs it
    return times
