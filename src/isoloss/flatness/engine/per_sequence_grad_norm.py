"""Squared gradient norms of each sequence by parameter, from one backward pass to activations ("ghost norms").

For y = W x the gradient of one sequence is sum_t g_t x_t^T with g the cotangent of y, so its squared norm is
sum_{s,t} (x_s . x_t) (g_s . g_t): the inputs and the cotangents suffice (Goodfellow, 2015; Li et al., 2022). Each use
of a parameter gives such factors, and the uses' gradients add before they are squared.

Shapes: B sequences, m predicted positions, d the width of the model, V vocabulary, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from isoloss.flatness.engine.backward import intermediates_of
from isoloss.flatness.engine.checks import FEWEST_CHECKED, CheckedPasses, used_in
from isoloss.flatness.engine.position_search import mostly_agree
from isoloss.flatness.engine.predictions import Batch, Predictions, plain_logits


@dataclass(frozen=True)
class SquaredNorms:
    """What one backward pass gave."""

    by_parameter: torch.Tensor  # (B, P) float64 on the CPU: squared gradient norms of each sequence
    # (m, d) the cotangent times the decoder's weight; None where there is no decoder
    hidden_cotangent: torch.Tensor | None
    intermediate_cotangents: list[torch.Tensor]  # (m, d) of each intermediate activation (`intermediates_of`)


class Predictor(CheckedPasses):
    """Predictions of a language model and the squared gradient norms of each sequence.

    For a cotangent u (m, V) and each sequence b, it is the squared norm of the gradient of
    sum_{r in b} <u_r, logits_r>, parameter by parameter, tied ones once. No gradient of a parameter is formed: each
    torch function that takes parameters has a rule (see `isoloss.flatness.engine.vjp_rules`). A parameter with a use
    that no rule knows takes a slow path, one backward pass a sequence. The first sequences are checked against plain
    automatic differentiation of all positions, and a parameter that disagrees takes the slow path too; so do parameters
    that a later batch reaches first.

    It is a context manager: inside, `requires_grad` is off except on slow parameters; on exit the model is as result.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.tensor([[3, -100, -100, -100]] * 2)}
        >>> with Predictor(model, causal=False) as predictor:
        ...     predictions = predictor.forward(batch)
        ...     norms = predictor.squared_norms(predictions, torch.ones(2, 8))
        >>> norms.by_parameter.shape == (2, len(predictor.names)), predictor.slow_parameters
        (True, ())
        >>> str(predictor.selection)
        'before bert.encoder.layer.0.attention.output.dense'
    """

    def __init__(self, model: nn.Module, *, causal: bool, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__(model, causal=causal, parameters=parameters)
        self._flags: list[tuple[nn.Parameter, bool]] = []

    def __enter__(self) -> Self:
        self._flags = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        self._switch_on(())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self._flags = []

    def forward(self, batch: Batch | Mapping[str, Any]) -> Predictions:
        """Return the predictions for a batch: `labels` (B, T), -100 where nothing is predicted, and the model's inputs."""
        read = batch if isinstance(batch, Batch) else Batch.read(batch, self._model, causal=self._causal)
        read.require_predictions()
        if not self._calibrated:
            self._calibrate(read.head(FEWEST_CHECKED))
            self._calibrated = True
        predictions = self._run(read)
        several = predictions.num_sequences > 1
        new = {name for name in used_in(predictions.capture) if (name, several) not in self._checked}
        if new:
            chosen = self._leading(predictions, new)
            del predictions  # its graph
            self._check(read.rows(chosen))
            self._checked |= {(name, several) for name in new}
            predictions = self._run(read)
        if not self._is_like_alone(read, predictions):
            logits = predictions.logits.detach()
            del predictions
            if not mostly_agree(logits, plain_logits(self._model, read)):
                self._give_up_selection()
            predictions = self._run(read)
        if misplaced := self._misplaced(predictions) - self._slow:
            del predictions
            self._slow |= misplaced
            self._switch_on(self._slow)
            predictions = self._run(read)
        return predictions

    def squared_norms(
        self, predictions: Predictions, cotangent: torch.Tensor, *, separate: bool = False, keep: bool = True
    ) -> SquaredNorms:
        """Return the squared norms for a cotangent (m, V) on the logits.

        Norms that are NaN or infinite are returned as they are.
        """
        cotangent = cotangent.to(predictions.logits)
        intermediates = intermediates_of(predictions)
        keep = keep or bool(self._slow)
        result = self._collect(predictions, cotangent, intermediates, separate=separate, keep=keep)
        norms = result.norms.cpu()
        self._fill_slow(norms, predictions, cotangent)
        hidden = result.hidden
        if predictions.decoder is not None and hidden is None:
            hidden = cotangent @ predictions.decoder.weight.to(cotangent)
        return SquaredNorms(norms, hidden, [result.intermediates[index] for index in sorted(result.intermediates)])
