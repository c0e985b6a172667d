"""Squared gradient norms of each sequence by parameter, from one backward pass to activations ("ghost norms").

For y = W x the gradient of one sequence is sum_t g_t x_t^T with g the cotangent of y, so its squared norm is
sum_{s,t} (x_s . x_t) (g_s . g_t): the inputs and the cotangents suffice (Goodfellow, 2015; Li et al., 2022). Each use
of a parameter gives such factors, and the uses' gradients add before they are squared.

Shapes: B sequences, m predicted positions, d the width of the model, V vocabulary, P parameters, K columns of these or
of their parts (`isoloss.flatness.engine.splits.Columns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine.capture import Capture, PositionSelection, Use
from isoloss.flatness.engine.passes import HIDDEN, LAST_SELECTION, Passes, agree, intermediates_of, mostly_agree
from isoloss.flatness.engine.predictions import Batch, Predictions, plain_logits, predict
from isoloss.flatness.engine.splits import Split
from isoloss.model_checks import refuse_random_training

_FEWEST_CHECKED = 2  # sequences: the fewest that can be mixed up
_EVERY = 32  # sequences: of so many one is also run by itself, with all its positions


@dataclass(frozen=True)
class SquaredNorms:
    """What one backward pass gave."""

    by_parameter: torch.Tensor  # (B, K) float64 on the CPU: squared gradient norms of each sequence
    # (m, d) the cotangent times the decoder's weight; None where there is no decoder
    hidden_cotangent: torch.Tensor | None
    intermediate_cotangents: list[torch.Tensor]  # (m, d) of each intermediate activation (`intermediates_of`)


class Predictor(Passes):
    """Predictions of a language model and the squared gradient norms of each sequence.

    For a cotangent u (m, V) and each sequence b, it is the squared norm of the gradient of
    sum_{r in b} <u_r, logits_r>, parameter by parameter, tied ones once. No gradient of a parameter is formed: each
    torch function that takes parameters has a rule (see `isoloss.flatness.engine.vjp_rules`). A parameter with a use
    that no rule knows takes a slow path, one backward pass per sequence. The first sequences are checked against plain
    automatic differentiation of all positions, and a parameter that disagrees takes the slow path too; so do parameters
    that a later batch reaches first.

    A parameter that `splits` has parts of has a norm for each of them.

    It is a context manager: inside, `requires_grad` is off except on slow parameters; on exit the flags are as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        causal: bool,
        parameters: Mapping[str, nn.Parameter] | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        super().__init__(model, causal=causal, parameters=parameters, splits=splits)
        self.tail_fraction = 1.0  # the selected part of a forward pass's multiplications, as the first sequences showed
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._checked: set[tuple[str, bool]] = set()  # names, and whether several sequences were told apart
        self._calibrated = False
        self._time_first = False  # whether the model has activations whose second axis is that of the sequences
        self._draws = False  # whether a forward pass draws random numbers
        self._since_check, self._skipped_checks = _EVERY, False  # the first batch is checked

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
        """Return the predictions for a batch: `labels` (B, T), -100 where nothing is predicted, and the inputs."""
        read = batch if isinstance(batch, Batch) else Batch.read(batch, self._model, causal=self._causal)
        read.require_predictions()
        if not self._calibrated:
            self._calibrate(read.head(_FEWEST_CHECKED))
            self._calibrated = True
        predictions = self._run(read)
        several = predictions.num_sequences > 1
        new = {name for name in _used_in(predictions.capture) if (name, several) not in self._checked}
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
        hidden = result.kept.pop(HIDDEN, None)
        if predictions.decoder is not None and hidden is None:
            hidden = cotangent @ predictions.decoder.weight.to(cotangent)
        return SquaredNorms(norms, hidden, [result.kept[index] for index in sorted(result.kept)])

    # --- checks against plain passes, on the first batches and on later ones ---

    def _calibrate(self, batch: Batch) -> None:
        """Search for the earliest position selection, and check it and the rules."""
        two = batch.rows(torch.arange(_FEWEST_CHECKED) % len(batch.predicted))
        self.selection = self._earliest(two.every_other())
        self._check(batch)

    def _check(self, batch: Batch) -> None:
        """Compare with plain automatic differentiation, in which nothing is selected and no parameter is watched.

        Parameters whose norms by rule differ go to the slow path. Positions are no longer selected early if that is
        what makes a difference.
        """
        batch = batch.without_coincidence()
        with self._same_draws():
            logits, cotangent, exact = self._plainly(batch)
        agrees, far = self._compare(batch, logits, cotangent, exact)
        if self.selection.is_early and (far or not agrees):
            early, self.selection = self.selection, PositionSelection()
            _, without = self._compare(batch, logits, cotangent, exact)
            if agrees and without == far:  # the rules alone differ
                self.selection = early
            elif self._calibrated:
                raise IsolossError(
                    f"selecting predicted positions ({early}) changes the gradients of this batch, but not those of "
                    "the first one: put a batch like this first, or use method='paper'"
                )
            else:
                LAST_SELECTION[self._model] = self.selection
            far = without
        self._slow |= far
        self._switch_on(self._slow)

    def _is_like_alone(self, batch: Batch, predictions: Predictions) -> bool:
        """Whether the last sequence has the logits that it has by itself with all its positions.

        On a later batch, positions or sequences may meet behind the selection: a branch that the
        data decides, a cap on how many positions pass. At most one sequence in 32 is run for it, the last of a batch,
        which a cap meets first. Where it differs, the whole batch decides: sequences may meet in the model itself.
        """
        self._since_check += predictions.num_sequences
        if not self.selection.is_early or self._draws:
            return True
        if self._since_check < _EVERY:
            self._skipped_checks = True
            return True
        self._since_check = 0
        last = int(predictions.rows[-1])
        alone = plain_logits(self._model, batch.rows(torch.tensor([last])))
        return agree(predictions.logits.detach()[predictions.rows == last], alone)

    def _give_up_selection(self) -> None:
        """Stop selecting positions."""
        if self._skipped_checks:
            raise IsolossError(
                f"selecting predicted positions ({self.selection}) changes the logits of this batch, and earlier "
                f"batches were too small to check: use batches of at least {_EVERY} sequences, or method='paper'"
            )
        self.selection = PositionSelection()
        LAST_SELECTION[self._model] = self.selection

    def _misplaced(self, predictions: Predictions) -> set[str]:
        """Return the parameters with a use whose rows are not those of the sequences that its shape says.

        As many rows as sequences may have been chosen by a mask, others may have been put in another order, and where
        there are as many positions as sequences a shape does not say which axis is which. If the logits' cotangent is
        multiplied by another number in each sequence, so are the cotangents of that sequence's rows, and of no others.
        """
        number = predictions.num_sequences
        doubtful = [use for use in predictions.capture.uses if use.is_doubtful or self._is_square(use, number)]
        doubtful = doubtful if number > 1 else []
        if not doubtful:
            return set()
        logits, edges = predictions.logits, [use.edge for use in doubtful]
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        factors_of = 1 + torch.arange(number, device=logits.device) / number
        factors_of[1::2] *= -1
        scaled = cotangent * factors_of[predictions.rows, None].to(logits)
        plain, other = (
            torch.autograd.grad(logits, edges, values, retain_graph=True, allow_unused=True)
            for values in (cotangent, scaled)
        )
        misplaced = set()
        for use, one, two in zip(doubtful, plain, other, strict=True):
            if one is not None and two is not None:
                expected = one.reshape(number, -1) * factors_of[:, None].to(one)
                narrow = torch.float32 if two.dtype == torch.float64 else two.dtype  # which routers compute in
                if not agree(two.reshape(number, -1).to(narrow), expected.to(narrow)):
                    misplaced |= set(use.contributions)
        return misplaced

    def _is_square(self, use: Use, number: int) -> bool:
        """Whether either of two axes of a use may be that of the sequences."""
        return self._time_first and not use.selected and use.shape[:2] == (number, number)

    def _plainly(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits (m, V), a random cotangent (m, V) and (B, P) squared norms, with no rule and no selection."""
        self._switch_on(self.names)
        before = self._random_states()
        try:
            plain = predict(self._model, batch, Capture({}, batch.predicted), PositionSelection())
            assert plain is not None
            if any(not torch.equal(*states) for states in zip(before, self._random_states(), strict=True)):
                self._draws = True
                refuse_random_training(self._model)
            self._require_gradient(plain)
            logits = plain.logits
            cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
            exact = self._exact_norms(plain, cotangent, self.names, range(plain.num_sequences))
            exact = self.columns.by_parameter(exact)
        finally:
            self._switch_on(self._slow)
        return logits.detach(), cotangent, exact

    def _compare(
        self, batch: Batch, logits: torch.Tensor, cotangent: torch.Tensor, exact: torch.Tensor
    ) -> tuple[bool, set[str]]:
        """Return whether the logits are the plain pass's, and the parameters whose norms are not."""
        with self._same_draws():
            predictions = self._run(batch)
        capture = predictions.capture
        agrees = agree(predictions.logits, logits)
        norms = self.columns.by_parameter(self._all_norms(predictions, cotangent))
        self._time_first |= any(
            use.shape[0] != len(norms) == use.shape[1]
            for use in capture.uses
            if not use.selected and len(use.shape) > 2
        )
        works = [(use.work, use.work * use.selected) for use in capture.uses]
        self.tail_fraction = sum(tail for _, tail in works) / max(1, sum(work for work, _ in works))
        precision = torch.finfo(logits.dtype).eps
        total = exact.sum(dim=1, keepdim=True)
        near = (norms - exact).abs() <= max(1e-3, 8 * precision) * exact + (30 * precision) ** 2 * total
        self._checked |= {(name, predictions.num_sequences > 1) for name in _used_in(capture)}
        is_near = near.all(dim=0).tolist()
        return agrees, {name for name, near_enough in zip(self.names, is_near, strict=True) if not near_enough}

    def _leading(self, predictions: Predictions, names: Iterable[str]) -> torch.Tensor:
        """Return the sequences, ascending, for which parameters have the largest gradients of those that predict."""
        logits = predictions.logits
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        norms = self.columns.by_parameter(self._collect(predictions, cotangent, keep=False).norms.cpu())
        sizes = norms[:, [self.names.index(name) for name in names]].sum(dim=1)
        predicts = torch.bincount(predictions.rows, minlength=len(sizes)).cpu() > 0
        return sizes.where(predicts, -1.0).topk(min(_FEWEST_CHECKED, len(sizes))).indices.sort().values


def _used_in(capture: Capture) -> set[str]:
    """Return the names of the parameters with a use by a rule."""
    return {name for use in capture.uses for name in use.contributions}
