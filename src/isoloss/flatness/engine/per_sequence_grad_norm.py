"""Squared gradient norms of each sequence by parameter, from one backward pass to activations ("ghost norms").

For y = W x the gradient of one sequence is sum_t g_t x_t^T with g the cotangent of y, so its squared norm is
sum_{s,t} (x_s . x_t) (g_s . g_t): the inputs and the cotangents suffice (Goodfellow, 2015; Li et al., 2022). Each use
of a parameter gives such factors, and the uses' gradients add before they are squared.

Shapes: B sequences, m predicted positions, d the width of the model, V vocabulary, P parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine import factors
from isoloss.flatness.engine.capture import Capture, Use
from isoloss.flatness.engine.control_variates import NUM_INTERMEDIATES
from isoloss.flatness.engine.position_selection import Call, PositionSelection, calls
from isoloss.flatness.engine.predictions import Batch, Predictions, plain_logits, predict
from isoloss.model_checks import (
    device_of,
    measured_parameters,
    plainly,
    refuse_dropout,
    refuse_random_training,
    unwrapped,
)

# the last place that was right for a model, which is tried before all are
_LAST_SELECTION: weakref.WeakKeyDictionary[nn.Module, PositionSelection] = weakref.WeakKeyDictionary()
_CHECKED = 2  # sequences: the fewest that can be mixed up
_FEWEST_POSITIONS = 3  # of which one keeps its logits while the first and the last are NaN
_EVERY = 32  # sequences: of so many one is also run by itself, with all its positions


@dataclass(frozen=True)
class SquaredNorms:
    """What one backward pass gave.

    Attributes:
        by_parameter: (B, P) float64 on the CPU: squared gradient norms of each sequence.
        hidden_cotangent: (m, d) the cotangent times the decoder's weight; None where there is no decoder.
        intermediate_cotangents: (m, d) of each of the intermediates (`Predictor.intermediates`).
    """

    by_parameter: torch.Tensor
    hidden_cotangent: torch.Tensor | None
    intermediate_cotangents: list[torch.Tensor]


@dataclass(frozen=True)
class IntermediateActivation:
    """An output (m, d) behind the place where positions were selected, by where the backward pass comes through it."""

    node: Node
    number: int


class Predictor:
    """Predictions of a language model and the squared gradient norms of each sequence.

    For a cotangent u (m, V) and each sequence b, it is the squared norm of the gradient of
    sum_{r in b} <u_r, logits_r>, parameter by parameter, tied ones once. No gradient of a parameter is formed: each
    torch function that takes parameters has a rule (see `isoloss.flatness.engine.vjp_rules`). A parameter with a use
    that no rule knows takes a slow path, one backward pass a sequence. The first sequences are checked against plain
    automatic differentiation of all positions, and a parameter that disagrees takes the slow path too; so do parameters
    that a later batch reaches first.

    It is a context manager: inside, `requires_grad` is off except on slow parameters; on exit the model is as found.

    Args:
        model: A language model, a module whose output has `logits` (B, T, V).
        causal: Whether position t predicts label t + 1.
        parameters: What to measure by name; None: all trainable parameters as `named_parameters` names them.

    Attributes:
        parameters: The P parameters by name.
        names: Their names.
        selection: Where the predicted positions are picked from all: what comes later sees only these.
        tail_fraction: The selected part of the multiplications of a forward pass, as the first sequences showed.

    Raises:
        IsolossError: Dropout is on, or there is no parameter to measure.

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
        refuse_dropout(model)
        self.parameters = measured_parameters(model) if parameters is None else dict(parameters)
        self.names = list(self.parameters)
        self.selection = PositionSelection()
        self.tail_fraction = 1.0
        self._model, self._causal = model, causal
        self._slow: set[str] = set()
        self._reached: set[str] = set()
        self._checked: set[tuple[str, bool]] = set()  # names, and whether several sequences were told apart
        self._calibrated = False
        self._expands = True  # lookups for all sequences together
        self._draws = False  # whether a forward pass draws random numbers
        self._since_check, self._skipped_checks = _EVERY, False  # the first batch is checked
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

    @property
    def slow_parameters(self) -> tuple[str, ...]:
        """The parameters that take one backward pass a sequence."""
        return tuple(name for name in self.names if name in self._slow)

    @property
    def unreached(self) -> tuple[str, ...]:
        """The parameters that no predicted logit depended on so far."""
        return tuple(name for name in self.names if name not in self._reached)

    def forward(self, batch: Batch | Mapping[str, Any]) -> Predictions:
        """Return the predictions for a batch: `labels` (B, T), -100 where nothing is predicted, and the model's inputs.

        Raises:
            IsolossError: The batch or what the model gives for it does not fit, or predicts nothing, or is not finite;
                or no parameter reaches the logits; or positions cannot be selected in this batch as in the first one.
        """
        read = batch if isinstance(batch, Batch) else Batch.read(batch, self._model, causal=self._causal)
        read.require_predictions()
        if not self._calibrated:
            self._calibrate(read.head(_CHECKED))
            self._calibrated = True
        predictions = self._run(read)
        several = predictions.num_sequences > 1
        new = {name for name in _used(predictions.capture) if (name, several) not in self._checked}
        if new:
            chosen = self._leading(predictions, new)
            del predictions  # its graph
            self._check(read.rows(chosen))
            self._checked |= {(name, several) for name in new}
            predictions = self._run(read)
        if not self._is_like_alone(read, predictions):
            logits = predictions.logits.detach()
            del predictions
            if not _mostly_agree(logits, plain_logits(self._model, read)):
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

        Args:
            predictions: What `forward` returned.
            cotangent: (m, V).
            separate: Where the head's parameters have a gradient for each predicted position, square these one by one
                (`isoloss.flatness.engine.factors.squared_norms`): the same on average for cotangents that are
                independent with mean 0, with less noise.
            keep: Whether it may be called again on the same predictions. If not, activations are freed on the way.
        """
        cotangent = cotangent.to(predictions.logits)
        intermediates = self.intermediates(predictions)
        keep = keep or bool(self._slow)
        norms, found = self._ruled_norms(predictions, cotangent, intermediates, separate=separate, keep=keep)
        self._fill_slow(norms, predictions, cotangent)
        hidden = found.hidden
        if predictions.decoder is not None and hidden is None:
            hidden = cotangent @ predictions.decoder.weight.to(cotangent)
        return SquaredNorms(norms, hidden, [found.intermediates[place] for place in sorted(found.intermediates)])

    @staticmethod
    def intermediates(predictions: Predictions) -> list[IntermediateActivation]:
        """Return the first outputs with parameters behind the place where positions were selected, at most 3.

        They are (m, n) with n the width that most such outputs have, that of the model. The cotangent of each at a
        position depends on the logits' cotangent at this position alone.
        """
        m, capture = len(predictions.rows), predictions.capture
        uses = [use for use in capture.before_last_linear if use.selected and use.shape[:-1].numel() == m]
        widths = Counter(use.shape[-1] for use in uses)
        widest = [use for use in uses if widths[use.shape[-1]] == max(widths.values())]
        return [IntermediateActivation(use.node, use.number) for use in widest[:NUM_INTERMEDIATES]]

    @staticmethod
    def tail_cotangents(
        predictions: Predictions, intermediate: IntermediateActivation, cotangent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cotangents (m, d) of the decoder's input and of a intermediate, by a backward pass of the tail
        alone.

        Args:
            predictions: What `forward` returned, with intermediates.
            intermediate: One of them.
            cotangent: (m, V) on the logits.
        """
        assert predictions.hidden_states is not None
        ends = [get_gradient_edge(predictions.hidden_states), GradientEdge(intermediate.node, intermediate.number)]
        found = torch.autograd.grad(predictions.logits, ends, cotangent.to(predictions.logits), retain_graph=True)
        hidden, outer = (values.reshape(len(predictions.rows), -1) for values in found)
        return hidden, outer

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

    def _calibrate(self, batch: Batch) -> None:
        """Find the earliest place to select the positions, and check it and the rules."""
        two = batch.rows(torch.arange(_CHECKED) % len(batch.predicted))
        self.selection = self._earliest(two.every_other())
        self._check(batch)

    # --- where to select ---

    def _earliest(self, batch: Batch) -> PositionSelection:
        """Return the earliest place to select that leaves the logits as they are and behind which no positions mix."""
        if len(batch.targets) < _FEWEST_POSITIONS:
            return PositionSelection()
        try:
            with self._same_draws(), calls(unwrapped(self._model), batch.predicted.shape) as made:
                plain = self._attempt(batch, PositionSelection())
        except IsolossError:  # of positions that need not be finite
            return PositionSelection()
        assert plain is not None
        last = _LAST_SELECTION.get(self._model)
        places = [last] if last is not None and self._gives(plain, batch, last) else self._search(plain, batch, made)
        while places and not self._separates(plain, batch, places[-1]):
            places.pop()
        _LAST_SELECTION[self._model] = places[-1] if places else PositionSelection()
        return _LAST_SELECTION[self._model]

    def _search(self, plain: Predictions, batch: Batch, made: list[Call]) -> list[PositionSelection]:
        """Return the places, the latest first, that give what a plain pass did, for as long as they do."""
        places: list[PositionSelection] = []
        if plain.decoder is not None:
            decoder = PositionSelection(weight=plain.capture.last_weight)
            places += [decoder] if self._gives(plain, batch, decoder) else []
        for call in reversed(made):
            if not self._gives(plain, batch, earlier := PositionSelection(call=call)):
                break
            places.append(earlier)
        return places

    def _gives(self, plain: Predictions, batch: Batch, selection: PositionSelection) -> bool:
        """Whether selection there gives the logits and the rules of a plain pass, and mixes no positions' gradients."""
        try:
            with self._same_draws():
                early = self._attempt(batch, selection)
            if early is None or early.capture.without_rule - plain.capture.without_rule:
                return False
            return _agree(early.logits, plain.logits) and _keeps_positions_apart(early)
        except Exception:  # what needs all positions may fail in any way
            return False

    def _separates(self, plain: Predictions, batch: Batch, selection: PositionSelection) -> bool:
        """Whether positions keep their logits where the first and the last one are NaN from the place on.

        NaN times zero is NaN: neither a weight that is zero nor a unit that is off hides that positions meet.
        """
        unknown = torch.zeros(len(batch.targets), dtype=torch.bool, device=batch.targets.device)
        unknown[[0, -1]] = True
        try:
            with self._same_draws():
                partly = self._attempt(batch, selection, unknown=unknown)
        except Exception:  # NaN may be refused
            return False
        return partly is not None and _agree(partly.logits[~unknown], plain.logits[~unknown])

    # --- checks ---

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
                    f"selection positions {early} changes the gradients of this batch, but not those of the first one: "
                    "put a batch like this first, or use method='paper'"
                )
            else:
                _LAST_SELECTION[self._model] = self.selection
            far = without
        self._slow |= far
        self._switch_on(self._slow)

    def _is_like_alone(self, batch: Batch, predictions: Predictions) -> bool:
        """Whether the last sequence has the logits that it has by itself with all its positions.

        On a later batch, positions or sequences may meet behind the place where they are selected: a branch that the
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
        return _agree(predictions.logits.detach()[predictions.rows == last], alone)

    def _give_up_selection(self) -> None:
        """Measure ungathered from here on.

        Raises:
            IsolossError: Batches before this one may be wrong.
        """
        if self._skipped_checks:
            raise IsolossError(
                f"selection positions {self.selection} changes the logits of this batch, and earlier ones were too "
                f"small to be checked: use batches of at least {_EVERY} sequences, or method='paper'"
            )
        self.selection = PositionSelection()
        _LAST_SELECTION[self._model] = self.selection

    def _misplaced(self, predictions: Predictions) -> set[str]:
        """Return the parameters with a use whose rows are not one for each sequence, although there are as many.

        Such rows may have been chosen by a mask. If the logits' cotangent is multiplied by another number in each
        sequence, so are the cotangents of that sequence's rows, and of no others.
        """
        number = predictions.num_sequences
        doubtful = [use for use in predictions.capture.uses if len(use.shape) == 2 and use.shape[0] == number]
        doubtful = [use for use in doubtful if not use.selected] if number > 1 else []
        if not doubtful:
            return set()
        logits, edges = predictions.logits, [GradientEdge(use.node, use.number) for use in doubtful]
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        factors_of = 1 + torch.arange(number, device=logits.device) / number
        factors_of[1::2] *= -1
        scaled = cotangent * factors_of[predictions.rows, None].to(logits)
        plain, other = (
            torch.autograd.grad(logits, edges, values, retain_graph=True, allow_unused=True)
            for values in (cotangent, scaled)
        )
        found = set()
        for use, one, two in zip(doubtful, plain, other, strict=True):
            if one is not None and two is not None:
                expected = one.reshape(number, -1) * factors_of[:, None].to(one)
                if not _agree(two.reshape(number, -1), expected):
                    found |= set(use.contributions)
        return found

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
        agrees = _agree(predictions.logits, logits)
        found = self._all_norms(predictions, cotangent)
        works = [(use.work, use.work * use.selected) for use in capture.uses]
        self.tail_fraction = sum(tail for _, tail in works) / max(1, sum(work for work, _ in works))
        precision = torch.finfo(logits.dtype).eps
        total = exact.sum(dim=1, keepdim=True)
        near = (found - exact).abs() <= max(1e-3, 8 * precision) * exact + (30 * precision) ** 2 * total
        self._checked |= {(name, predictions.num_sequences > 1) for name in _used(capture)}
        is_near = near.all(dim=0).tolist()
        return agrees, {name for name, near_enough in zip(self.names, is_near, strict=True) if not near_enough}

    def _leading(self, predictions: Predictions, names: Iterable[str]) -> torch.Tensor:
        """Return the sequences, ascending, for which parameters have the largest gradients of those that predict."""
        logits = predictions.logits
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        norms, _ = self._ruled_norms(predictions, cotangent, keep=False)
        sizes = norms[:, [self.names.index(name) for name in names]].sum(dim=1)
        predicts = torch.bincount(predictions.rows, minlength=len(sizes)).cpu() > 0
        return sizes.where(predicts, -1.0).topk(min(_CHECKED, len(sizes))).indices.sort().values

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

    def _ruled_norms(
        self,
        predictions: Predictions,
        cotangent: torch.Tensor,
        intermediates: Sequence[IntermediateActivation] = (),
        *,
        separate: bool = False,
        keep: bool = True,
    ) -> tuple[torch.Tensor, _Found]:
        """Return (B, P) norms by the rules, zero for slow parameters, and what else the backward pass gave."""
        capture, states = predictions.capture, predictions.hidden_states
        found = _Found(capture, self.names, predictions.num_sequences, cotangent.device, separate=separate)
        hooks = [use.node.register_prehook(found.receiver(use)) for use in capture.uses]
        hooks += [
            intermediate.node.register_prehook(partial(found.receive_intermediate, place, intermediate.number))
            for place, intermediate in enumerate(intermediates)
        ]
        if not keep:
            capture.uses.clear()
        if states is not None and states.requires_grad:  # only the decoder leads from them to the logits
            edge = get_gradient_edge(states)
            hooks.append(edge.node.register_prehook(partial(found.receive_hidden, edge.output_nr)))
        try:
            torch.autograd.grad(predictions.logits, predictions.leaves, cotangent, retain_graph=keep, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        found.finish()
        self._reached |= found.reached
        return found.norms.cpu(), found

    def _all_norms(self, predictions: Predictions, cotangent: torch.Tensor) -> torch.Tensor:
        """Return (B, P) norms, those of slow parameters by automatic differentiation."""
        norms, _ = self._ruled_norms(predictions, cotangent)
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
        for place, sequence in enumerate(sequences):
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
                    norms[place, column] = dense.double().square().sum()
        return norms


class _Found:
    """Collects the factors of a backward pass; a parameter's norm is taken as soon as all its uses are there."""

    def __init__(
        self, capture: Capture, names: list[str], num_sequences: int, device: torch.device, *, separate: bool
    ) -> None:
        self._separate = separate
        self.norms = torch.zeros(num_sequences, len(names), dtype=torch.float64, device=device)
        self.hidden: torch.Tensor | None = None
        self.intermediates: dict[int, torch.Tensor] = {}
        self.reached: set[str] = set()
        self._columns = {name: column for column, name in enumerate(names)}
        self._missing = Counter(name for use in capture.uses for name in use.contributions)
        self._waiting: dict[str, list[factors.Factor]] = {}

    def receiver(self, use: Use) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Return what takes the cotangent of a use, once; after that it no longer holds the activations."""
        waiting = [use]

        @torch.no_grad()
        def receive(cotangents: tuple[torch.Tensor | None, ...]) -> None:
            taken = waiting.pop()
            cotangent = cotangents[taken.number]
            for name, contribution in taken.contributions.items():
                self._missing[name] -= 1
                if cotangent is not None:
                    self._waiting.setdefault(name, []).append(contribution(cotangent.reshape(taken.shape)))
                if self._missing[name] == 0:
                    self._take(name)

        return receive

    def receive_hidden(self, number: int, cotangents: tuple[torch.Tensor | None, ...]) -> None:
        """Take the cotangent of the decoder's input."""
        cotangent = cotangents[number]
        if cotangent is not None:
            self.hidden = cotangent.reshape(-1, cotangent.shape[-1])

    def receive_intermediate(self, place: int, number: int, cotangents: tuple[torch.Tensor | None, ...]) -> None:
        """Take the cotangent of a intermediate."""
        cotangent = cotangents[number]
        if cotangent is not None:
            self.intermediates[place] = cotangent.reshape(-1, cotangent.shape[-1])

    @torch.no_grad()
    def finish(self) -> None:
        """Take the norms of parameters with uses that the logits do not depend on."""
        for name in list(self._waiting):
            self._take(name)

    def _take(self, name: str) -> None:
        parts = self._waiting.pop(name, None)
        if parts:
            self.reached.add(name)
            self.norms[:, self._columns[name]] = factors.squared_norms(parts, len(self.norms), separate=self._separate)


def _used(capture: Capture) -> set[str]:
    return {name for use in capture.uses for name in use.contributions}


def _keeps_positions_apart(predictions: Predictions) -> bool:
    """Whether the last position's logits depend on no selected output at another position."""
    uses = [use for use in predictions.capture.uses if use.selected]
    logits = predictions.logits
    if not uses or not logits.requires_grad:
        return True
    cotangent = torch.zeros_like(logits)
    cotangent[-1] = torch.randn(logits.shape[1:], generator=seeds.generator(0, "check of the rules")).to(logits)
    edges = [GradientEdge(use.node, use.number) for use in uses]
    found = torch.autograd.grad(logits, edges, cotangent, allow_unused=True)
    rows = [values.reshape(len(logits), -1) for values in found if values is not None]
    return not any(bool(values[:-1].any()) for values in rows)


def _agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if first.shape != second.shape:
        return False
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    return bool((first - second).abs().max() <= tolerance * second.abs().max())


def _mostly_agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether rows (m, V) are the same; in half precision, where rounding may choose another expert, most of them."""
    tolerance = min(1e3 * torch.finfo(first.dtype).eps, 0.05)
    off = (first - second).abs().amax(dim=1) > tolerance * second.abs().max()
    allowed = 0.1 if first.dtype in (torch.float16, torch.bfloat16) else 0.0
    return bool(off.double().mean() <= allowed)
