"""The objectives, masked and causal: the batch of a step as a pure function of seed and step, and its loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.models.make import predicted_states
from isoloss.lab.training import training_set
from isoloss.lab.training.cross_entropy import linear_cross_entropy
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED, Batch, corrupt, objective_batch


class TrainingBatch(NamedTuple):
    """What a training step sees.

    The inputs are `input_ids`, `labels` and, where something is padded, `attention_mask`, each (n, T); with exact
    labels, `targets` (k, V): a row of probabilities for each of the k predicted tokens, sentence by sentence.
    """

    inputs: Batch
    num_tokens: int  # the masked ones counted and the padding not


def check_language(objective: ObjectiveConfig, language: Language) -> None:
    """Raise an `IsolossError` if `objective` asks for exact labels and `language` has none."""
    if objective.labels == "exact" and not language.is_exact:
        raise IsolossError(f"{type(language).__name__} has no exact conditionals: train on sampled labels")


def exact_targets(
    language: Language, sentences: Sentences, labels: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Return (k, V) float64: the true conditionals of the predicted tokens, sentence by sentence.

    They are given all visible tokens or, if `causal`, those before. The labels (n, T) are -100 where nothing is
    predicted.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.lab.training.objectives import IGNORED, exact_targets
        >>> sentences = Sentences(torch.tensor([[0, 1]]), torch.tensor([2]))
        >>> exact_targets(Brackets(2), sentences, torch.tensor([[IGNORED, 1]])).round().tolist()
        [[0.0, 1.0]]
    """
    masked = labels != IGNORED
    tokens, lengths, _ = sentences
    if causal:
        # the labels of a start before the sentences are no tokens of theirs
        return language.log_next(tokens, lengths, without_special=True)[masked[:, -tokens.shape[1] :]].double().exp()
    # one masked token of a sentence is hidden by being the one asked for; the others would be computed for nothing
    if bool((masked.sum(dim=1) == 1).all()):
        positions = masked.int().argmax(dim=1, keepdim=True)
        return language.log_conditionals(tokens, lengths, positions=positions)[:, 0].double().exp()
    return language.log_conditionals(tokens, lengths, mask=masked)[masked].double().exp()


def training_batch(
    language: Language, config: TrainConfig, step: int, device: torch.device, rows: slice = slice(None)
) -> TrainingBatch:
    """Return the batch of training step `step`, from 1: the language's sentences, and what is predicted of them.

    Of its sentences, `rows` are wanted; `num_tokens` counts all.
    """
    if training_set.is_finite(config):
        drawn = training_set.examples(language, config, step)
        sentences = drawn.sentences
    else:
        sentences = language.batch(step, config.batch_size, seed=config.seed)
    if config.masked_copies:
        batch = training_set.masked_copy(drawn, language, config)
    else:
        masks = generator(config.seed, "masks", step)
        batch = objective_batch(sentences, language, config.objective, generator=masks)
        batch = corrupt(batch, language, config.objective, generator=masks)
    num_tokens = int(batch["attention_mask"].sum())
    if num_tokens == batch["attention_mask"].numel():
        # attention then adds no mask to its scores
        del batch["attention_mask"]
    # only now: the draws are of the whole batch, so that the processes' parts are those of one process
    batch = {name: tensor[rows] for name, tensor in batch.items()}
    if config.objective.labels == "exact":
        wanted = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        causal = config.objective.kind == "causal"
        batch["targets"] = exact_targets(language, wanted, batch["labels"], causal=causal)
    return TrainingBatch({name: tensor.to(device) for name, tensor in batch.items()}, num_tokens)


def prediction_loss(model: PreTrainedModel, batch: Batch, *, causal: bool, precision: str = "float32") -> torch.Tensor:
    """Return the mean cross-entropy of the predicted tokens, in nats: a scalar (the paper, section 2.1).

    With `targets`, the mean cross-entropy to these probabilities, which is the expected loss of tokens drawn from them.
    The batch is as `training_batch` gives it. `bfloat16` runs the model under torch's autocast to bfloat16; the output
    layer and the softmax over the vocabulary, and in both cases the weights and their gradients, are of the weights'
    own dtype.
    """
    # nothing predicts a first token
    labels = batch["labels"][:, 1:] if causal else batch["labels"]
    output = model.get_output_embeddings()
    with torch.autocast(labels.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        states = predicted_states(model, batch).to(output.weight.dtype)
    targets = batch["targets"].to(states.dtype) if "targets" in batch else labels[labels != IGNORED]
    return linear_cross_entropy(states, output.weight, output.bias, targets)
