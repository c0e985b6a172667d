"""Forward passes of a language model under a capture, where they may select positions, and squared norms by them.

Shapes: B sequences, m predicted positions, V vocabulary, P parameters, K columns of these or of their parts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine import factors
from isoloss.flatness.engine.capture import Call, Capture, PositionSelection, Use, calls
from isoloss.flatness.engine.control_variates import NUM_INTERMEDIATES
from isoloss.flatness.engine.predictions import Batch, Predictions, predict
from isoloss.flatness.engine.splits import Columns, Split
from isoloss.model_checks import device_of, measured_parameters, plainly, refuse_dropout, unwrapped

# the last selection that was right for a model, which is tried before all others are
LAST_SELECTION: weakref.WeakKeyDictionary[nn.Module, PositionSelection] = weakref.WeakKeyDictionary()
HIDDEN = -1  # the index of the decoder's input among the cotangents that are kept; intermediates count from 0
_PART = 1 << 18  # numbers compared at a time, so that no further buffer of the logits' shape is
_FEWEST_POSITIONS = 3  # of which one keeps its logits while the first and the last are NaN


class Passes:
    """Forward and backward passes of one model, with what is known of its parameters by now."""

    def __init__(
        self,
        model: nn.Module,
        *,
        causal: bool,
        parameters: Mapping[str, nn.Parameter] | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        refuse_dropout(model)
        self.parameters = measured_parameters(model) if parameters is None else dict(parameters)
        self.names = list(self.parameters)  # P
        self.columns = Columns(self.parameters, splits)
        self.selection = PositionSelection()  # what comes later sees the predicted positions alone
        self._model, self._causal = model, causal
        self._slow: set[str] = set()  # by automatic differentiation, as a use of them has no rule
        self._reached: set[str] = set()

    @property
    def slow_parameters(self) -> tuple[str, ...]:
        """The parameters that take one backward pass per sequence."""
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
        capture = Capture(watched, batch.predicted, select_before=selection.weight, unknown=unknown)
        return predict(self._model, batch, capture, selection)

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
        intermediates: Sequence[GradientEdge] = (),
        *,
        separate: bool = False,
        keep: bool = True,
    ) -> Collector:
        """Return what a backward pass by the rules gives: norms (B, K), zero for slow parameters, and cotangents."""
        result = collect(predictions, self.columns, cotangent, intermediates, separate=separate, keep=keep)
        self._reached |= result.reached
        return result

    def _all_norms(self, predictions: Predictions, cotangent: torch.Tensor) -> torch.Tensor:
        """Return (B, K) norms, those of slow parameters by automatic differentiation."""
        norms = self._collect(predictions, cotangent).norms.cpu()
        self._fill_slow(norms, predictions, cotangent)
        return norms

    def _fill_slow(self, norms: torch.Tensor, predictions: Predictions, cotangent: torch.Tensor) -> None:
        """Write the norms (B, K) of slow parameters."""
        if not self._slow:
            return
        sequences = sorted(set(predictions.rows.tolist()))
        exact = self._exact_norms(predictions, cotangent, self.slow_parameters, sequences)
        for name in self.slow_parameters:
            norms[sequences, self.columns.of[name]] = exact[:, self.columns.of[name]]

    def _exact_norms(
        self, predictions: Predictions, cotangent: torch.Tensor, names: Iterable[str], sequences: Sequence[int]
    ) -> torch.Tensor:
        """Return (len(sequences), K) norms, by one backward pass to the named parameters a sequence."""
        wanted = [self.parameters[name] for name in names]
        norms = torch.zeros(len(sequences), len(self.columns), dtype=torch.float64)
        for index, sequence in enumerate(sequences):
            chosen = (predictions.rows == sequence).nonzero()[:, 0]
            if not len(chosen):
                continue
            part = slice(int(chosen[0]), int(chosen[-1]) + 1)
            with plainly(self._model):
                logits = predictions.logits[part]
            gradients = torch.autograd.grad(logits, wanted, cotangent[part], retain_graph=True, allow_unused=True)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    self._reached.add(name)
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    norms[index, self.columns.of[name]] = self.columns.squares(name, dense)
        return norms

    # --- the earliest point where the predicted positions can be selected ---

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
        return partly is not None and agree(partly.logits[1:-1], plain.logits[1:-1])


def _separates_positions(predictions: Predictions) -> bool:
    """Whether the last position's logits depend on no selected output at another position."""
    uses = [use for use in predictions.capture.uses if use.selected]
    logits = predictions.logits
    if not uses or not logits.requires_grad:
        return True
    cotangent = torch.zeros_like(logits)
    cotangent[-1] = torch.randn(logits.shape[1:], generator=seeds.generator(0, "check of the rules")).to(logits)
    cotangents = torch.autograd.grad(logits, [use.edge for use in uses], cotangent, allow_unused=True)
    last = len(logits) - 1
    for use, values in zip(uses, cotangents, strict=True):
        if values is not None:
            owners = torch.arange(last + 1, device=values.device) if use.owners is None else use.owners
            if bool(values.reshape(len(owners), -1)[owners != last].any()):
                return False
    return True


@torch.no_grad()
def agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if first.shape != second.shape:
        return False
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    parts = zip(torch.split(first.reshape(-1), _PART), torch.split(second.reshape(-1), _PART), strict=True)
    far = torch.stack([torch.stack([(a - b).abs_().max(), b.abs().max()]) for a, b in parts]).amax(dim=0)
    return bool(far[0] <= tolerance * far[1])


def mostly_agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether rows (m, V) are the same; in half precision, where rounding may choose another expert, most of them."""
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    off = (first - second).abs().amax(dim=1) > tolerance * second.abs().max()
    allowed = 0.1 if first.dtype in (torch.float16, torch.bfloat16) else 0.0
    return bool(off.double().mean() <= allowed)


# --- one backward pass to activations: it collects the factors of every parameter's gradient --------------------------


def intermediates_of(predictions: Predictions) -> list[GradientEdge]:
    """Return the first outputs with parameters behind where positions were selected, at most 3.

    They are (m, n) with n the width that most such outputs have, that of the model. The cotangent of each at a
    position depends on the logits' cotangent at this position alone.
    """
    m, capture = len(predictions.rows), predictions.capture
    uses = [use for use in capture.before_last_linear if use.selected and use.shape[:-1].numel() == m]
    widths = Counter(use.shape[-1] for use in uses)
    widest = [use for use in uses if widths[use.shape[-1]] == max(widths.values())]
    return [use.edge for use in widest[:NUM_INTERMEDIATES]]


def tail_cotangents(
    predictions: Predictions, intermediate: GradientEdge, cotangent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cotangents (m, d) of the decoder's input and of an intermediate, by a backward pass of the tail
    alone.
    """
    assert predictions.hidden_states is not None
    ends = [get_gradient_edge(predictions.hidden_states), intermediate]
    cotangents = torch.autograd.grad(predictions.logits, ends, cotangent.to(predictions.logits), retain_graph=True)
    hidden, outer = (values.reshape(len(predictions.rows), -1) for values in cotangents)
    return hidden, outer


def collect(
    predictions: Predictions,
    columns: Columns,
    cotangent: torch.Tensor,
    intermediates: Sequence[GradientEdge] = (),
    *,
    separate: bool = False,
    keep: bool = True,
) -> Collector:
    """Return the squared norms by the rules, zero for the parameters without one, and what else the pass gave."""
    capture, states = predictions.capture, predictions.hidden_states
    collector = Collector(capture, columns, predictions.num_sequences, cotangent.device, separate=separate)
    hooks = [use.edge.node.register_prehook(collector.receiver(use)) for use in capture.uses]
    if not keep:
        capture.uses.clear()
    kept = dict(enumerate(intermediates))
    if states is not None and states.requires_grad:  # only the decoder leads from them to the logits
        kept[HIDDEN] = get_gradient_edge(states)
    for index, edge in kept.items():
        hooks.append(edge.node.register_prehook(partial(collector.keep, index, edge.output_nr)))
    try:
        torch.autograd.grad(predictions.logits, predictions.leaves, cotangent, retain_graph=keep, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    collector.finish()
    return collector


class Collector:
    """Collects the factors of a backward pass; a parameter's norm is taken as soon as all its uses are there."""

    def __init__(
        self, capture: Capture, columns: Columns, num_sequences: int, device: torch.device, *, separate: bool
    ) -> None:
        self._separate = separate
        self.norms = torch.zeros(num_sequences, len(columns), dtype=torch.float64, device=device)
        self.kept: dict[int, torch.Tensor] = {}  # cotangents (m, d)
        self.reached: set[str] = set()
        self._columns = columns
        self._missing = Counter(name for use in capture.uses for name in use.contributions)
        self._waiting: dict[str, list[factors.Factor]] = {}

    def receiver(self, use: Use) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Return what takes the cotangent of a use, once; after that it no longer holds the activations."""
        waiting = [use]

        @torch.no_grad()
        def receive(cotangents: tuple[torch.Tensor | None, ...]) -> None:
            taken = waiting.pop()
            cotangent = cotangents[taken.edge.output_nr]
            for name, contribution in taken.contributions.items():
                self._missing[name] -= 1
                if cotangent is not None:
                    self._waiting.setdefault(name, []).append(contribution(cotangent.reshape(taken.shape)))
                if self._missing[name] == 0:
                    self._take(name)

        return receive

    def keep(self, index: int, number: int, cotangents: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the cotangent of the decoder's input, or of an intermediate."""
        cotangent = cotangents[number]
        if cotangent is not None:
            self.kept[index] = cotangent.reshape(-1, cotangent.shape[-1])

    @torch.no_grad()
    def finish(self) -> None:
        """Take the norms of parameters with uses that the logits do not depend on."""
        for name in list(self._waiting):
            self._take(name)

    def _take(self, name: str) -> None:
        parts = self._waiting.pop(name, None)
        if parts:
            self.reached.add(name)
            norms = factors.squared_norms(
                parts, len(self.norms), separate=self._separate, split=self._columns.splits.get(name)
            )
            self.norms[:, self._columns.of[name]] = norms.view(len(norms), -1)
