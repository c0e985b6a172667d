"""A small task and a small model to fine-tune, for the tests and for the processes that they kill."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForMaskedLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from isoloss import seeds
from isoloss.lab.languages.base import Sentences
from isoloss.transfer.results import majority_rate
from isoloss.transfer.tasks import TaskData


def sentences(n: int, stream: str) -> Sentences:
    """Return sentences of 3 to 7 tokens from 3 to 19, after a 1 that begins each of them."""
    g = seeds.generator(0, "sentences", stream)
    lengths = torch.randint(3, 8, (n,), generator=g)
    tokens = torch.randint(3, 20, (n, 7), generator=g)
    tokens[:, 0] = 1
    return Sentences(tokens.masked_fill(torch.arange(7) >= lengths[:, None], 0), lengths)


def small_task(n_train: int = 41, n_test: int = 30) -> TaskData:
    """Return the task of naming which third of the ids the second token is in."""
    train, test = sentences(n_train, "train"), sentences(n_test, "test")
    train_labels, test_labels = ((split.tokens[:, 1] - 3) // 6 for split in (train, test))
    return TaskData(
        name="thirds",
        train=train,
        train_labels=train_labels,
        test=test,
        test_labels=test_labels,
        classes=("low", "middle", "high"),
        majority_rate=majority_rate(test_labels),
        overlap=0.0,
    )


def bert(dropout: float = 0.0) -> PreTrainedModel:
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=7,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(config).eval()


def opt() -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=20,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=7,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OPTForCausalLM(config).eval()
