"""Models of any registered architecture: a new one for a language, and what one predicts at the predicted tokens alone.

Shapes: n sentences, T tokens, k predicted positions, d the model's width.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language
from isoloss.lab.models.architectures import Architecture, at_predicted
from isoloss.lab.models.dropout import with_fast_dropout
from isoloss.model_checks import forward_arguments, logits_of_output
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig
from isoloss.text.masking import IGNORED, Batch


def make_model(config: ModelConfig, language: Language, *, seed: int) -> PreTrainedModel:
    """Return a randomly initialized model of the sentences of `language`; its weights follow from the arguments.

    It is `Architecture.build`'s, with the dropout of `isoloss.lab.models.dropout`.

    Example:
        >>> from isoloss import load_language
        >>> from isoloss.lab.models.make import make_model
        >>> from isoloss.run_config import ModelConfig
        >>> make_model(ModelConfig(size="d16"), load_language("pcfg-laptop"), seed=0).num_parameters()
        4354
    """
    architecture: Architecture = MODELS.load(config.architecture)
    model = architecture.build(config, language, seed=seed)
    with_fast_dropout(model)
    return model


def architecture_of(model: nn.Module) -> Architecture | None:
    """Return the registered architecture whose class `model` has, or None."""
    classes = {parent.__name__ for parent in type(model).__mro__}
    return next((a for a in map(MODELS.load, MODELS) if a.model_class in classes), None)


def predicted_states(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return (k, d): what the output layer turns into the logits of the predicted tokens, in the order of the labels.

    With W and b the weight and bias of `model.get_output_embeddings()`, the logits are `states @ W.T + b`. A causal
    model predicts label t + 1 at position t, any other model label t at position t. The batch has `input_ids`, `labels`
    and, where something is padded, `attention_mask`, each (n, T). The model is of a registered architecture.
    """
    architecture = architecture_of(model)
    if architecture is None:
        raise IsolossError(f"{type(model).__name__} is the class of no registered architecture: {', '.join(MODELS)}")
    return architecture.predicted_states(model, batch, batch["labels"] != IGNORED)


def predicted_logits(model: nn.Module, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return (k, V): the logits of the predicted tokens in the order of the labels, of any language model."""
    if isinstance(model, PreTrainedModel) and architecture_of(model):  # without the logits of the other positions
        some: torch.Tensor = model.get_output_embeddings()(predicted_states(model, batch))
        return some
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}
    if not isinstance(model, PreTrainedModel):
        inputs = forward_arguments(model, inputs)
    logits = logits_of_output(model(**inputs))
    return at_predicted(logits, batch["labels"] != IGNORED, causal=causal)
