"""The architectures behind one door: a model for a language, and what its output layer reads where it predicts.

Shapes: n sentences, T tokens, k predicted positions, d the model's width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertForMaskedLM, OPTForCausalLM, PreTrainedModel, RobertaPreLayerNormForMaskedLM

from isoloss.languages.api import Language
from isoloss.lstm import LSTMForMaskedLM
from isoloss.models import bert, bert_pre_ln, lstm, opt
from isoloss.models.dropout import with_fast_dropout
from isoloss.models.fused_blocks import with_fused_blocks
from isoloss.models.sizes import configured_shape
from isoloss.run_config import ModelConfig
from isoloss.text.masking import IGNORED, Batch

_KNOWN = (BertForMaskedLM, RobertaPreLayerNormForMaskedLM, LSTMForMaskedLM, OPTForCausalLM)


def make_model(config: ModelConfig, language: Language, *, seed: int) -> PreTrainedModel:
    """Return a randomly initialised model of the sentences of `language`; its weights follow from the arguments.

    Its dropout is `isoloss.models.dropout.Dropout`, and its blocks those of `isoloss.models.fused_blocks`.

    Args:
        config: Architecture, shape and dropout.
        language: For the ids that the model knows, its padding, its start and the longest sentence.
        seed: The experiment's seed; the stream is `"weights"`.

    Raises:
        IsolossError: There is no such architecture or shape, or the dropout is outside [0, 1).
    """
    model = _make(config, language, seed)
    with_fast_dropout(model)
    with_fused_blocks(model)
    return model


def _make(config: ModelConfig, language: Language, seed: int) -> PreTrainedModel:
    configured_shape(config)
    common: dict[str, Any] = {"vocab_size": language.model_vocab_size, "pad_id": language.pad_id, "seed": seed}
    if config.architecture == "bert":
        return bert.build(config, max_length=language.max_length, **common)
    if config.architecture == "bert-pre-ln":
        return bert_pre_ln.build(config, max_length=language.max_length, **common)
    if config.architecture == "lstm":
        return lstm.build(config, **common)
    start = language.start
    max_length = language.max_length + (not start.is_in_sentences)
    return opt.build(config, max_length=max_length, start_id=start.id, end_id=start.end_id, **common)


def predicted_states(model: PreTrainedModel, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return (k, d): what the output layer turns into the logits of the predicted tokens, in the order of the labels.

    With W and b the weight and bias of `model.get_output_embeddings()`, the logits are `states @ W.T + b`. A causal
    model predicts label t + 1 at position t, any other model label t at position t.

    Args:
        model: A model that `make_model` makes.
        batch: `input_ids`, `labels` and, where something is padded, `attention_mask`, each (n, T).
        causal: Whether the labels are next tokens.
    """
    input_ids, attention_mask, predicted = batch["input_ids"], batch.get("attention_mask"), batch["labels"] != IGNORED
    if isinstance(model, BertForMaskedLM):
        return bert.states(model, input_ids, attention_mask, predicted)
    if isinstance(model, RobertaPreLayerNormForMaskedLM):
        return bert_pre_ln.states(model, input_ids, attention_mask, predicted)
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return _at_predicted(hidden, predicted, causal)


def predicted_logits(model: nn.Module, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return (k, V): the logits of the predicted tokens, in the order of the labels.

    Args:
        model: A language model, a module whose output has `logits` (n, T, V).
        batch: As for `predicted_states`.
        causal: As for `predicted_states`.
    """
    if isinstance(model, _KNOWN):  # without the logits of the other positions
        some: torch.Tensor = model.get_output_embeddings()(predicted_states(model, batch, causal=causal))
        return some
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
    return _at_predicted(logits, batch["labels"] != IGNORED, causal)


def _at_predicted(values: torch.Tensor, predicted: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return (k, ...): those of the values (n, T, ...) from which the predicted tokens are predicted."""
    return values[:, :-1][predicted[:, 1:]] if causal else values[predicted]
