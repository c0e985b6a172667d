"""Forward passes of a language model under a capture, and squared gradient norms by them.

Shapes: B sequences, m predicted positions, V vocabulary, P parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.backward import Collector, IntermediateActivation, collect
from isoloss.flatness.engine.capture import Capture
from isoloss.flatness.engine.position_selection import PositionSelection
from isoloss.flatness.engine.predictions import Batch, Predictions, predict
from isoloss.model_checks import device_of, measured_parameters, plainly, refuse_dropout


class Passes:
    """Forward and backward passes of one model, with what is known of its parameters by now.

    Attributes:
        parameters: The P parameters by name.
        names: Their names.
        selection: Where the predicted positions are selected from all: what comes later sees only these.
    """

    def __init__(self, model: nn.Module, *, causal: bool, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        refuse_dropout(model)
        self.parameters = measured_parameters(model) if parameters is None else dict(parameters)
        self.names = list(self.parameters)
        self.selection = PositionSelection()
        self._model, self._causal = model, causal
        self._slow: set[str] = set()  # by automatic differentiation, as a use of them has no rule
        self._reached: set[str] = set()
        self._expands = True  # lookups for all sequences together

    @property
    def slow_parameters(self) -> tuple[str, ...]:
        """The parameters that take one backward pass a sequence."""
        return tuple(name for name in self.names if name in self._slow)

    @property
    def unreached(self) -> tuple[str, ...]:
        """The parameters that no predicted logit depended on so far."""
        return tuple(name for name in self.names if name not in self._reached)

    # --- forward ---

    def _run(self, batch: Batch) -> Predictions:
        """Run the model, again where it turns out that a parameter has no rule and must require a gradient.

        Where a batch takes another way through the model than the first ones, positions may not be selected early.
        """
        while True:
            try:
                predictions = self._attempt(batch, self.selection)
            except Exception:
                if not self.selection.is_early:
                    raise
                predictions = None
            if predictions is None:
                self.selection = PositionSelection()
                continue
            unknown = predictions.capture.without_rule - self._slow
            if not unknown:
                break
            self._slow |= unknown
            for name in unknown:
                self.parameters[name].requires_grad_()
        self._require_gradient(predictions)
        return predictions

    def _require_gradient(self, predictions: Predictions) -> None:
        if not predictions.logits.requires_grad:
            raise IsolossError(f"no trainable parameter of {type(self._model).__name__} reaches its logits")

    def _attempt(
        self, batch: Batch, selection: PositionSelection, *, unknown: torch.Tensor | None = None
    ) -> Predictions | None:
        watched = {name: value for name, value in self.parameters.items() if name not in self._slow}
        capture = Capture(
            watched, batch.predicted, select_before=selection.weight, unknown=unknown, expands=self._expands
        )
        try:
            return predict(self._model, batch, capture, selection)
        except RuntimeError:
            if selection.is_early or not capture.shared:
                raise
        self._expands = False  # the model does not take the rows of a lookup that was expanded
        return self._attempt(batch, selection, unknown=unknown)

    def _switch_on(self, names: Iterable[str]) -> None:
        """Let only these parameters require a gradient."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for name in names:
            self.parameters[name].requires_grad_()

    def _generators(self) -> list[torch.Generator]:
        device, generators = device_of(self._model), [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        return generators

    def _random_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    @contextlib.contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Let a model that draws random numbers draw the same ones each time, and leave the global generators alone."""
        states = self._random_states()
        try:
            for generator in self._generators():
                generator.manual_seed(0)
            yield
        finally:
            for generator, state in zip(self._generators(), states, strict=True):
                generator.set_state(state)

    # --- backward ---

    def _collect(
        self,
        predictions: Predictions,
        cotangent: torch.Tensor,
        intermediates: Sequence[IntermediateActivation] = (),
        *,
        separate: bool = False,
        keep: bool = True,
    ) -> Collector:
        """Return what a backward pass by the rules gives: norms (B, P), zero for slow parameters, and cotangents."""
        result = collect(predictions, self.names, cotangent, intermediates, separate=separate, keep=keep)
        self._reached |= result.reached
        return result

    def _all_norms(self, predictions: Predictions, cotangent: torch.Tensor) -> torch.Tensor:
        """Return (B, P) norms, those of slow parameters by automatic differentiation."""
        norms = self._collect(predictions, cotangent).norms.cpu()
        self._fill_slow(norms, predictions, cotangent)
        return norms

    def _fill_slow(self, norms: torch.Tensor, predictions: Predictions, cotangent: torch.Tensor) -> None:
        """Write the norms (B, P) of slow parameters."""
        if not self._slow:
            return
        sequences = sorted(set(predictions.rows.tolist()))
        columns = torch.tensor([self.names.index(name) for name in self.slow_parameters])
        exact = self._exact_norms(predictions, cotangent, self.slow_parameters, sequences)
        norms[torch.tensor(sequences)[:, None], columns] = exact

    def _exact_norms(
        self, predictions: Predictions, cotangent: torch.Tensor, names: Iterable[str], sequences: Sequence[int]
    ) -> torch.Tensor:
        """Return (len(sequences), len(names)) norms, by one backward pass to the parameters a sequence."""
        wanted = [self.parameters[name] for name in names]
        norms = torch.zeros(len(sequences), len(wanted), dtype=torch.float64)
        for index, sequence in enumerate(sequences):
            chosen = (predictions.rows == sequence).nonzero()[:, 0]
            if not len(chosen):
                continue
            part = slice(int(chosen[0]), int(chosen[-1]) + 1)
            with plainly(self._model):
                logits = predictions.logits[part]
            gradients = torch.autograd.grad(logits, wanted, cotangent[part], retain_graph=True, allow_unused=True)
            for column, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
                if gradient is not None:
                    self._reached.add(name)
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    norms[index, column] = dense.double().square().sum()
        return norms
