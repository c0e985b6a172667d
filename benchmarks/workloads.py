"""Small language models and fresh sequences for them: two briefly trained on sequences with topics, one really trained.

Shapes: n sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from isoloss.seeds import derive, generator
from isoloss.text.masking import IGNORED

Batch = dict[str, torch.Tensor]
_SPECIAL = 5  # ids without a word, the mask among them
MASK = 4
_TOPICS = 20  # each is a random twentieth of the words, all equally likely in its sequences


@dataclass
class Workload:
    """A model and where its sequences come from.

    Attributes:
        name: What the tables call it.
        causal: All positions but the last predict the next token; else one masked position of each sequence does.
        vocab_size: V.
        length: T.
        model: In evaluation mode, trained by `train`.
    """

    name: str
    causal: bool
    vocab_size: int
    length: int
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.model = self._build()
        draws, words = generator(0, "topics"), self.vocab_size - _SPECIAL
        ranks = torch.stack([torch.randperm(words, generator=draws) for _ in range(_TOPICS)])
        self._topics = (ranks < words // _TOPICS).double()

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(0, "weights"))
            if self.causal:
                gpt2 = GPT2Config(
                    vocab_size=self.vocab_size,
                    n_embd=128,
                    n_layer=4,
                    n_head=2,
                    n_positions=self.length,
                    bos_token_id=None,
                    eos_token_id=None,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                    attn_implementation="eager",
                )
                return GPT2LMHeadModel(gpt2).eval()
            bert = BertConfig(
                vocab_size=self.vocab_size,
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=512,
                max_position_embeddings=self.length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                attn_implementation="eager",
            )
            return BertForMaskedLM(bert).eval()

    def batch(self, n: int, draws: torch.Generator, *, length: int | None = None) -> Batch:
        """Return n fresh sequences: `input_ids` and `labels`, (n, T)."""
        length = self.length if length is None else length
        topics = torch.randint(_TOPICS, (n,), generator=draws)
        tokens = _SPECIAL + torch.multinomial(self._topics[topics], length, replacement=True, generator=draws)
        if self.causal:
            return {"input_ids": tokens, "labels": tokens.clone()}
        labels, rows = torch.full_like(tokens, IGNORED), torch.arange(n)
        masked = torch.randint(length, (n,), generator=draws)
        labels[rows, masked] = tokens[rows, masked]
        tokens[rows, masked] = MASK
        return {"input_ids": tokens, "labels": labels}

    def batches(self, n: int, size: int, *names: str | int) -> list[Batch]:
        """Return n fresh sequences of the stream `names`, in batches of `size`."""
        draws = generator(0, *names)
        return [self.batch(min(size, n - start), draws) for start in range(0, n, size)]

    def train(self, steps: int, *, size: int = 32) -> None:
        """Take AdamW steps on `size` sequences each; a masked model learns from 15 % of the positions."""
        draws = generator(0, "training")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(steps):
            batch = self.batch(size, draws)
            if not self.causal:
                whole = batch["input_ids"].clone()
                whole[batch["labels"] != IGNORED] = batch["labels"][batch["labels"] != IGNORED]
                chosen = torch.rand(whole.shape, generator=draws) < 0.15
                batch["labels"] = torch.where(chosen, whole, IGNORED)
                batch["input_ids"] = torch.where(chosen, MASK, whole)
            optimizer.zero_grad()
            self.model(**batch).loss.backward()
            optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def describe(self) -> dict[str, float]:
        """Return the loss, and the mean entropy and largest probability of the predictions, on 512 fresh sequences."""
        batch = self.batch(512, generator(0, "describe"))
        output = self.model(**batch)
        labels = batch["labels"]
        if self.causal:
            log_p = output.logits[:, :-1].reshape(-1, self.vocab_size).log_softmax(dim=-1)
        else:
            log_p = output.logits[labels != IGNORED].log_softmax(dim=-1)
        return {
            "loss_nats": float(output.loss),
            "mean_entropy_nats": float(-(log_p.exp() * log_p).sum(dim=-1).mean()),
            "mean_largest_probability": float(log_p.exp().amax(dim=-1).mean()),
        }


_DATA = Path(os.environ.get("ISOLOSS_DATA", Path(__file__).parents[2] / "shared" / "data"))
_STORIES = _DATA / "stories260K" / "hf"


class Stories(Workload):
    """stories260K, a Llama trained for 100,000 steps; its sequences are drawn from those that it generates itself."""

    def _build(self) -> nn.Module:
        # the peers differentiate twice or forward, which only the eager kernel allows
        model: nn.Module = AutoModelForCausalLM.from_pretrained(_STORIES, attn_implementation="eager")
        return model.eval()

    @cached_property
    @torch.no_grad()
    def _generated(self) -> torch.Tensor:
        draws, cache = generator(0, "stories"), None
        tokens = torch.full((4096, 1), self.model.config.bos_token_id)
        while tokens.shape[1] < self.length:
            output = self.model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            p = output.logits[:, -1].softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=draws)], dim=1)
        return tokens

    def batch(self, n: int, draws: torch.Generator, *, length: int | None = None) -> Batch:
        """Return n of the generated sequences, or their beginnings: `input_ids` and `labels`, (n, T)."""
        chosen = torch.randint(len(self._generated), (n,), generator=draws)
        tokens = self._generated[chosen, :length]
        return {"input_ids": tokens, "labels": tokens.clone()}

    def train(self, steps: int, *, size: int = 32) -> None:
        """Leave the model as it is."""


def workloads() -> dict[str, Workload]:
    """Return the models by name: two untrained ones, and stories260K where it is."""
    found = {
        "bert": Workload("BERT, 4 layers, d 128, V 205, 32 tokens, one mask", causal=False, vocab_size=205, length=32),
        "gpt2": Workload("GPT-2, 4 layers, d 128, V 1000, 64 tokens", causal=True, vocab_size=1000, length=64),
    }
    if _STORIES.is_dir():
        name = "stories260K, a Llama trained on stories: 5 layers, d 64, V 512, 64 tokens"
        found["stories"] = Stories(name, causal=True, vocab_size=512, length=64)
    return found
