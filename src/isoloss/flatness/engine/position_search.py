"""The search for the earliest point of a model where the predicted positions can be selected.

Shapes: m predicted positions, V vocabulary.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine.passes import Passes
from isoloss.flatness.engine.position_selection import Call, PositionSelection, calls
from isoloss.flatness.engine.predictions import Batch, Predictions
from isoloss.model_checks import unwrapped

# the last selection that was right for a model, which is tried before all others are
LAST_SELECTION: weakref.WeakKeyDictionary[nn.Module, PositionSelection] = weakref.WeakKeyDictionary()
_FEWEST_POSITIONS = 3  # of which one keeps its logits while the first and the last are NaN


class PositionSearch(Passes):
    """Passes that know where to select positions."""

    def _earliest(self, batch: Batch) -> PositionSelection:
        """Return the earliest selection that leaves the logits as they are and behind which no positions mix."""
        if len(batch.targets) < _FEWEST_POSITIONS:
            return PositionSelection()
        try:
            with self._same_draws(), calls(unwrapped(self._model), batch.predicted.shape) as made:
                plain = self._attempt(batch, PositionSelection())
        except IsolossError:  # of positions that need not be finite
            return PositionSelection()
        assert plain is not None
        last = LAST_SELECTION.get(self._model)
        candidates = (
            [last] if last is not None and self._gives(plain, batch, last) else self._search(plain, batch, made)
        )
        while candidates and not self._separates(plain, batch, candidates[-1]):
            candidates.pop()
        LAST_SELECTION[self._model] = candidates[-1] if candidates else PositionSelection()
        return LAST_SELECTION[self._model]

    def _search(self, plain: Predictions, batch: Batch, made: list[Call]) -> list[PositionSelection]:
        """Return the selections, the latest first, that give what a plain pass did, for as long as they do."""
        candidates: list[PositionSelection] = []
        if plain.decoder is not None:
            decoder = PositionSelection(weight=plain.capture.last_weight)
            candidates += [decoder] if self._gives(plain, batch, decoder) else []
        for call in reversed(made):
            if not self._gives(plain, batch, earlier := PositionSelection(call=call)):
                break
            candidates.append(earlier)
        return candidates

    def _gives(self, plain: Predictions, batch: Batch, selection: PositionSelection) -> bool:
        """Whether selection there gives the logits and the rules of a plain pass, and mixes no positions' gradients."""
        try:
            with self._same_draws():
                early = self._attempt(batch, selection)
            if early is None or early.capture.without_rule - plain.capture.without_rule:
                return False
            return agree(early.logits, plain.logits) and _separates_positions(early)
        except Exception:  # what needs all positions may fail in any way
            return False

    def _separates(self, plain: Predictions, batch: Batch, selection: PositionSelection) -> bool:
        """Whether positions keep their logits where the first and the last one are NaN from there on.

        NaN times zero is NaN: neither a weight that is zero nor a unit that is off hides that positions meet.
        """
        unknown = torch.zeros(len(batch.targets), dtype=torch.bool, device=batch.targets.device)
        unknown[[0, -1]] = True
        try:
            with self._same_draws():
                partly = self._attempt(batch, selection, unknown=unknown)
        except Exception:  # NaN may be refused
            return False
        return partly is not None and agree(partly.logits[~unknown], plain.logits[~unknown])


def _separates_positions(predictions: Predictions) -> bool:
    """Whether the last position's logits depend on no selected output at another position."""
    uses = [use for use in predictions.capture.uses if use.selected]
    logits = predictions.logits
    if not uses or not logits.requires_grad:
        return True
    cotangent = torch.zeros_like(logits)
    cotangent[-1] = torch.randn(logits.shape[1:], generator=seeds.generator(0, "check of the rules")).to(logits)
    edges = [GradientEdge(use.node, use.number) for use in uses]
    cotangents = torch.autograd.grad(logits, edges, cotangent, allow_unused=True)
    rows = [values.reshape(len(logits), -1) for values in cotangents if values is not None]
    return not any(bool(values[:-1].any()) for values in rows)


def agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if first.shape != second.shape:
        return False
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    return bool((first - second).abs().max() <= tolerance * second.abs().max())


def mostly_agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether rows (m, V) are the same; in half precision, where rounding may choose another expert, most of them."""
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    off = (first - second).abs().amax(dim=1) > tolerance * second.abs().max()
    allowed = 0.1 if first.dtype in (torch.float16, torch.bfloat16) else 0.0
    return bool(off.double().mean() <= allowed)
