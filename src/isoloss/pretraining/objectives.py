"""The masked-language-model objective: the batch of a step as a pure function of seed and step, and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import BertForMaskedLM

from isoloss.config import TrainConfig
from isoloss.languages.base import Language
from isoloss.languages.masking import IGNORED, Batch, mask
from isoloss.models.bert import masked_logits
from isoloss.seeds import generator


class TrainingBatch(NamedTuple):
    """What a training step sees.

    Attributes:
        inputs: `input_ids`, `labels` and, where something is padded, `attention_mask`, each (n, T).
        num_tokens: Tokens in it, the hidden ones counted and the padding not.
    """

    inputs: Batch
    num_tokens: int


def training_batch(language: Language, config: TrainConfig, step: int, device: torch.device) -> TrainingBatch:
    """Return the batch of training step `step`: the language's sentences of that step, with tokens hidden.

    Args:
        language: Where the sentences come from.
        config: Batch size, seed and objective.
        step: Counted from 1.
        device: Where the batch goes.
    """
    sentences = language.batch(step, config.batch_size, seed=config.seed)
    batch = mask(sentences, language, config.objective, generator=generator(config.seed, "masks", step))
    num_tokens = int(batch["attention_mask"].sum())
    if num_tokens == batch["attention_mask"].numel():
        del batch["attention_mask"]
    return TrainingBatch({name: tensor.to(device) for name, tensor in batch.items()}, num_tokens)


def masked_loss(model: BertForMaskedLM, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy at the predicted positions, in nats: a scalar (the paper, section 2.1).

    Args:
        model: A masked language model.
        batch: As `isoloss.languages.masking.mask` gives it; without an `attention_mask` nothing is padded.
    """
    labels = batch["labels"]
    positions = labels != IGNORED
    logits = masked_logits(model, batch["input_ids"], batch.get("attention_mask"), positions)
    return cross_entropy(logits, labels[positions])
