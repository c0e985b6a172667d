"""The objectives, masked and causal: the batch of a step as a pure function of seed and step, and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from isoloss.config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.errors import IsolossError
from isoloss.languages.base import Language
from isoloss.languages.masking import IGNORED, Batch, corrupt
from isoloss.languages.next_tokens import objective_batch
from isoloss.models.make import predicted_states
from isoloss.models.sizes import find_architecture
from isoloss.pretraining.cross_entropy import linear_cross_entropy
from isoloss.seeds import generator


class TrainingBatch(NamedTuple):
    """What a training step sees.

    Attributes:
        inputs: `input_ids`, `labels` and, where something is padded, `attention_mask`, each (n, T).
        num_tokens: Tokens in it, the hidden ones counted and the padding not.
    """

    inputs: Batch
    num_tokens: int


def validate(objective: ObjectiveConfig, model: ModelConfig) -> None:
    """Raise an `IsolossError` that names the first setting of `objective` out of its range or not for `model`."""
    if objective.masking not in ("one", "fraction"):
        raise IsolossError(f"the masking is {objective.masking!r}; it must be one or fraction")
    if not 0 < objective.fraction <= 1:
        raise IsolossError(f"the masked fraction is {objective.fraction}; it must be above 0 and at most 1")
    if objective.corruption not in ("mask", "bert"):
        raise IsolossError(f"the corruption is {objective.corruption!r}; it must be mask or bert")
    learns = find_architecture(model.architecture).objective
    if objective.kind != learns:
        raise IsolossError(
            f"the objective is {objective.kind!r}, and the architecture {model.architecture} learns {learns!r}: "
            "choose the other objective or another architecture (isoloss ls models)"
        )
    if objective.kind == "causal" and objective != ObjectiveConfig(kind="causal"):
        raise IsolossError("the causal objective hides no tokens: leave the settings of the masks at their defaults")


def training_batch(language: Language, config: TrainConfig, step: int, device: torch.device) -> TrainingBatch:
    """Return the batch of training step `step`: the language's sentences of that step, and what is predicted of them.

    Args:
        language: Where the sentences come from.
        config: Batch size, seed and objective.
        step: Counted from 1.
        device: Where the batch goes.
    """
    sentences = language.batch(step, config.batch_size, seed=config.seed)
    masks = generator(config.seed, "masks", step)
    batch = objective_batch(sentences, language, config.objective, generator=masks)
    batch = corrupt(batch, language, config.objective, generator=masks)
    num_tokens = int(batch["attention_mask"].sum())
    if num_tokens == batch["attention_mask"].numel():
        del batch["attention_mask"]
    return TrainingBatch({name: tensor.to(device) for name, tensor in batch.items()}, num_tokens)


def prediction_loss(model: PreTrainedModel, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return the mean cross-entropy of the predicted tokens, in nats: a scalar (the paper, section 2.1).

    Args:
        model: A model that `isoloss.models.make.make_model` makes.
        batch: As `isoloss.languages.next_tokens.objective_batch` gives it; without an `attention_mask` nothing is
            padded.
        causal: Whether the labels are next tokens.
    """
    labels = batch["labels"][:, 1:] if causal else batch["labels"]
    output = model.get_output_embeddings()
    states = predicted_states(model, batch, causal=causal)
    return linear_cross_entropy(states, output.weight, output.bias, labels[labels != IGNORED])
