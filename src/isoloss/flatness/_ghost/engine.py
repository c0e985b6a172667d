"""Squared gradient norms of each sequence by parameter, from one backward pass to activations ("ghost norms").

For y = W x the gradient of one sequence is sum_t g_t x_t^T with g the cotangent of y, so its squared norm is
sum_{s,t} (x_s . x_t) (g_s . g_t): the inputs and the cotangents suffice (Goodfellow, 2015; Li et al., 2022). Each use
of a parameter gives such factors, and the uses' gradients add before they are squared.

Shapes: B sequences, m predicted positions, d the width of the model, V vocabulary, P parameters, K columns of these or
of their parts (`isoloss.flatness._parameters.ParameterColumns`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._batches import Batch
from isoloss.flatness._ghost import factors
from isoloss.flatness._ghost.capture import Call, Capture, Decoder, ParameterUse, PositionSelection, calls, selected_at
from isoloss.flatness._ghost.controls import NUM_INTERMEDIATES
from isoloss.flatness._parameters import ParameterBlocks, ParameterColumns
from isoloss.model_checks import (
    device_of,
    eager_with_grad,
    forward_arguments,
    gathered_parameters,
    logits_of_output,
    max_length,
    measured_parameters,
    refuse_dropout,
    refuse_random_training,
    resharded,
    text_config,
    unwrapped,
)

# the last selection that was right for a model, which is tried before all others are
LAST_SELECTION: weakref.WeakKeyDictionary[nn.Module, PositionSelection] = weakref.WeakKeyDictionary()
HIDDEN = -1  # the index of the decoder's input among the cotangents that are kept; intermediates count from 0
_PART = 1 << 18  # numbers compared at a time, so that no further buffer as large as the logits is needed
_FEWEST_CHECKED = 2  # sequences: the fewest that can be mixed up
_EVERY = 32  # sequences: of so many one is also run by itself, with all its positions
_FEWEST_POSITIONS = 3  # of which one keeps its logits while the first and the last are NaN


@dataclass(frozen=True)
class Predictions:
    """A model's predictions for a batch, with the graph of the forward pass: drop them before the next one."""

    logits: torch.Tensor  # (m, V) with their graph, in the model's dtype
    rows: torch.Tensor  # (m,) the sequence of each predicted position, ascending
    targets: torch.Tensor  # (m,) the labels there
    num_sequences: int  # B, those that predict nothing included
    # (m, d) detached, the decoder's input; None where the logits are no linear map's output
    hidden: torch.Tensor | None
    decoder: Decoder | None  # the linear map; None together with `hidden`
    capture: Capture  # what the forward pass did with the parameters
    # `hidden` with its graph as the decoder got it, (1, m, d); None where it got all positions
    hidden_states: torch.Tensor | None

    @cached_property
    def leaves(self) -> list[torch.Tensor]:
        """All leaves of the logits' graph: a backward pass to these comes through every node that has a gradient.

        Some are the model's own: a forward pass may call `requires_grad_` on what it computed.
        """
        leaves: list[torch.Tensor] = []
        known: set[Node | None] = {None}
        waiting = [self.logits.grad_fn]
        while waiting:
            if (node := waiting.pop()) in known:
                continue
            known.add(node)
            assert node is not None
            if node.name() == "torch::autograd::AccumulateGrad":
                leaves.append(node.variable)  # type: ignore[attr-defined]
            waiting.extend(below for below, _ in node.next_functions)
        return leaves


def predict(model: nn.Module, batch: Batch, capture: Capture, selection: PositionSelection) -> Predictions | None:
    """Run the model once under a capture, which knows the weight of `selection`."""
    with eager_with_grad(model) as plain:
        return _predict(plain, batch, capture, selection)


def plain_logits(model: nn.Module, batch: Batch, *, graph: bool = False) -> torch.Tensor:
    """Return the predicted logits (m, V) of a model that is run as it is, with their graph or without."""
    logits, places = all_logits(model, batch, graph=graph).flatten(0, 1), batch.predicted.flatten().nonzero()[:, 0]
    # a view of consecutive positions, which may be all of a long sequence
    is_run = len(places) > 0 and int(places[-1] - places[0]) == len(places) - 1
    return logits[int(places[0]) : int(places[-1]) + 1] if is_run else logits[places]


def all_logits(model: nn.Module, batch: Batch, *, graph: bool = False) -> torch.Tensor:
    """Return the logits (b, T, V) of a model that is run as it is, with their graph or without."""
    with eager_with_grad(model) as plain, torch.set_grad_enabled(graph):
        logits: torch.Tensor = logits_of_output(plain(**forward_arguments(plain, batch.inputs)))
        return logits


def _predict(model: nn.Module, batch: Batch, capture: Capture, selection: PositionSelection) -> Predictions | None:
    arguments = forward_arguments(model, batch.inputs)
    try:
        with capture, selected_at(model, selection.call, capture):
            logits = logits_of_output(model(**arguments))
    # torch's own message does not say what to do about it
    except NotImplementedError as error:
        if "FlexAttention" in str(error):
            raise IsolossError(
                f"flex_attention has no gradient on the device {batch.predicted.device.type}: call "
                'model.set_attn_implementation("sdpa") before measuring'
            ) from error
        raise
    except (IndexError, RuntimeError) as error:
        # an early selection may fail for want of the other positions, and is then given up
        longest = None if selection.is_early else max_length(model)
        if longest is not None and batch.predicted.shape[1] > longest:
            raise IsolossError(
                f"sequences have {batch.predicted.shape[1]} positions; the model takes at most {longest}"
            ) from error
        raise
    # data decided a branch in which the place of selection is not called, or not with all positions
    if selection.is_early and not capture.has_selected:
        return None
    shape = (1, len(batch.targets)) if capture.has_selected else tuple(batch.predicted.shape)
    _check_logits(model, logits, shape, batch)
    assert logits is not None
    # logits that all sequences share have met no activation, and no cotangent comes to their parameters by rules
    capture.mark_batch_independent(logits)
    last_linear = capture.decoder(logits)
    if capture.has_selected:
        # a view where there can be one: the backward pass of an index fills a buffer of the logits' shape
        selected = logits.view(logits.shape[1:]) if logits.is_contiguous() else logits[0]
    else:
        selected = logits[batch.predicted]
    rows = batch.predicted.nonzero()[:, 0]
    if capture.unknown is None:
        _check_finite(selected, rows)
        _check_no_probabilities(selected[:2].detach())
    states = hidden = decoder = None
    if last_linear is not None:
        states, decoder = last_linear
        hidden = states.reshape(-1, states.shape[-1]) if capture.has_selected else states[batch.predicted]
    return Predictions(
        logits=selected,
        rows=rows,
        targets=batch.targets,
        num_sequences=len(batch.predicted),
        hidden=None if hidden is None else hidden.detach(),
        decoder=decoder,
        capture=capture,
        hidden_states=states if capture.has_selected else None,
    )


def _check_logits(model: nn.Module, logits: Any, shape: tuple[int, ...], batch: Batch) -> None:
    name = type(model).__name__
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise IsolossError(
            f"{name} gives no logits of shape (sequences, positions, vocabulary): is it a language model?"
        )
    vocabulary = getattr(text_config(model), "vocab_size", logits.shape[-1])
    if logits.shape[-1] != vocabulary:
        raise IsolossError(
            f"{name} gives {logits.shape[-1]} logits a position for a vocabulary of {vocabulary}: has it an LM head?"
        )
    if batch.predicts and int(batch.targets.max()) >= vocabulary:
        raise IsolossError(f"a label is {int(batch.targets.max())}; the model predicts ids 0 to {vocabulary - 1}")
    if tuple(logits.shape[:2]) != shape:
        raise IsolossError(f"labels of shape {tuple(batch.predicted.shape)} do not fit logits of {tuple(logits.shape)}")


def _check_finite(logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Refuse NaN and infinite logits; by sums, which need no copy of the logits.

    Some models mark what they never predict by the smallest number that there is, and the sum of two is infinite.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    finite = logits.detach().sum(dim=1, dtype=wide).isfinite()
    if not bool(finite.all()):
        finite[~finite] = logits.detach()[~finite].isfinite().all(dim=1)
    if not bool(finite.all()):
        raise IsolossError(f"the model's logits are NaN or infinite (sequence {int(rows[~finite][0])} of the batch)")


def _check_no_probabilities(logits: torch.Tensor) -> None:
    """Refuse what a softmax was already taken of: all positive and with the sum 1, which no logits are by chance."""
    sums = logits.sum(dim=1, dtype=torch.float32)
    if len(logits) > 0 and bool((logits >= 0).all()) and bool(((sums - 1).abs() < 0.01).all()):
        raise IsolossError(
            "the model gives probabilities, which sum to 1 at each position: a forward pass returns logits, from "
            "before the softmax (or logarithms of probabilities)"
        )


@dataclass(frozen=True)
class SquaredNorms:
    """The results of one backward pass."""

    by_column: torch.Tensor  # (B, K) float64 on the CPU: squared gradient norms of each sequence, by column
    # (m, d) the cotangent times the decoder's weight; None where there is no decoder
    hidden_cotangent: torch.Tensor | None
    intermediate_cotangents: list[torch.Tensor]  # (m, d) of each intermediate activation (`intermediates_of`)


@dataclass(frozen=True)
class _PlainPass:
    """The results of a forward pass in which nothing is selected, by which selections are judged."""

    logits: torch.Tensor  # (m, V) detached
    without_rule: set[str]
    decoder_weight: torch.Tensor | None


class GhostNorms:
    """Predictions of a language model and the squared gradient norms of each sequence.

    For a cotangent u (m, V) and each sequence b, the squared norm is of the gradient of
    sum_{r in b} <u_r, logits_r>, parameter by parameter, tied ones once. No gradient of a parameter is formed: each
    torch function that takes parameters has a rule (see `isoloss.flatness._ghost.rules`). A parameter with a use
    that no rule knows takes a slow path, one backward pass per sequence. The first sequences are checked against plain
    automatic differentiation of all positions, and a parameter that disagrees takes the slow path too. Parameters that
    a later batch is the first to reach are checked then.

    A parameter that `parameter_blocks` has parts of has a norm for each of them.

    It is a context manager: inside, `requires_grad` is off except on slow parameters; on exit the flags are as before.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        causal: bool,
        parameters: Mapping[str, nn.Parameter] | None = None,
        parameter_blocks: Mapping[str, ParameterBlocks] | None = None,
    ) -> None:
        refuse_dropout(model)
        # of a model that is sharded, forward passes have whole parameters, and these are in the graph
        self._gathered = gathered_parameters(model)
        measured = measured_parameters(model) if parameters is None else dict(parameters)
        self._shards = {id(whole): shard for shard, whole in self._gathered.items()}
        self.parameters = {name: self._gathered.get(value, value) for name, value in measured.items()}
        self.names = list(self.parameters)  # P
        self.columns = ParameterColumns(self.parameters, parameter_blocks)
        self.selection = PositionSelection()  # what comes later sees the predicted positions alone
        self._model, self._causal = model, causal
        self._slow: set[str] = set()  # by automatic differentiation, as a use of them has no rule
        self._reached: set[str] = set()
        self.tail_fraction = 1.0  # the selected part of a forward pass's multiplications, as the first sequences showed
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._checked: set[tuple[str, bool]] = set()  # names, and whether several sequences were told apart
        self._calibrated = False
        self._time_first = False  # whether activations of the model have the sequences on their second axis
        self._draws = False  # whether a forward pass draws random numbers
        # a selection that is right for two sequences may be wrong for a batch where data decide a branch
        self._since_check, self._skipped_checks = _EVERY, False  # the first batch is checked
        self._thinning = 1.0  # predicted positions of the first sequences for each that they are checked by

    def __enter__(self) -> Self:
        parameters = [*self._model.parameters(), *self._gathered.values()]
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters]
        # no gradient of a parameter can be formed then: the graph ends in the outputs of their uses, its leaves
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
        """The parameters that take one backward pass per sequence."""
        return tuple(name for name in self.names if name in self._slow)

    @property
    def unreached(self) -> tuple[str, ...]:
        """The parameters that no predicted logit depended on so far."""
        return tuple(name for name in self.names if name not in self._reached)

    def forward(self, batch: Batch | Mapping[str, Any]) -> Predictions:
        """Return the predictions for a batch: `labels` (B, T), -100 where nothing is predicted, and the inputs."""
        read = batch if isinstance(batch, Batch) else Batch.read(batch, self._model, causal=self._causal)
        read.require_predictions()
        if not self._calibrated:
            first = read.head(_FEWEST_CHECKED)
            # a single sequence is taken twice, so that no axis of length 1 is taken for the sequences
            two = first.rows(torch.arange(_FEWEST_CHECKED) % len(first.predicted))
            self.selection = self._earliest(two.every_other())
            self._check(first)
            self._calibrated = True
        predictions = self._run(read)
        several = predictions.num_sequences > 1
        # an expert, or an adapter of a language, may be reached by a later batch for the first time
        new = {name for name in _used_in(predictions.capture) if (name, several) not in self._checked}
        if new:
            chosen = self._leading(predictions, new)
            del predictions  # its graph
            self._check(read.rows(chosen))
            self._checked |= {(name, several) for name in new}
            predictions = self._run(read)
        # positions may meet behind the selection on this batch alone
        if not self._matches_solo_run(read, predictions):
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
        # the slow path goes through the same graph afterwards
        keep = keep or bool(self._slow)
        result = self._collect(predictions, cotangent, intermediates, separate=separate, keep=keep)
        norms = result.norms.cpu()
        self._fill_slow(norms, predictions, cotangent)
        hidden = result.kept.pop(HIDDEN, None)
        if predictions.decoder is not None and hidden is None:
            # a decoder that got all positions has a cotangent for all of them, most of which are zero
            hidden = cotangent @ predictions.decoder.weight.to(cotangent)
        return SquaredNorms(norms, hidden, [result.kept[index] for index in sorted(result.kept)])

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
            # the graph of this pass does not lead to them: it is made again with their `requires_grad` on
            self._slow |= unknown
            self._switch_on(self._slow)
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
            watched, batch.predicted, select_before=selection.weight, unknown=unknown, shards=self._shards
        )
        try:
            return predict(self._model, batch, capture, selection)
        except Exception:
            # a sharded model would go on with this pass; only the outermost group forgets it, and none in older torch
            with contextlib.suppress(RuntimeError, AttributeError):
                for group in resharded(self._model):
                    group.reset_iter_state()
            raise

    def _switch_on(self, names: Iterable[str]) -> None:
        for parameter, _ in self._flags:
            parameter.requires_grad_(False)
        for name in names:
            whole = self.parameters[name]
            # the shard's flag too, which the whole parameter gets whenever it is put together
            for parameter in (whole, self._shards.get(id(whole), whole)):
                parameter.requires_grad_()

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
        """Return the norms (B, K) of a backward pass by the rules, 0 for slow parameters, and the kept cotangents."""
        capture, states = predictions.capture, predictions.hidden_states
        collector = Collector(capture, self.columns, predictions.num_sequences, cotangent.device, separate=separate)
        # a prehook sees the cotangent of the use's output when the backward pass comes to its node
        hooks = [use.edge.node.register_prehook(collector.receiver(use)) for use in capture.uses]
        if not keep:
            capture.uses.clear()  # each hook alone holds its activations then, and lets go of them once it has run
        watched = dict(enumerate(intermediates))
        if states is not None and states.requires_grad:  # only the decoder leads from them to the logits
            watched[HIDDEN] = get_gradient_edge(states)
        for index, edge in watched.items():
            hooks.append(edge.node.register_prehook(partial(collector.keep, index, edge.output_nr)))
        try:
            # to the leaves, not the parameters: the hooks have what is wanted, and no parameter's gradient is formed
            torch.autograd.grad(predictions.logits, predictions.leaves, cotangent, retain_graph=keep, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        collector.finish()
        self._reached |= collector.reached
        return collector

    def _fill_slow(self, norms: torch.Tensor, predictions: Predictions, cotangent: torch.Tensor) -> None:
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
        wanted = {name: self.parameters[name] for name in names}
        norms = torch.zeros(len(sequences), len(self.columns), dtype=torch.float64)

        def take(index: int, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:  # behind a layer that passes none
                return None
            self._reached.add(name)
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            norms[index, self.columns.of[name]] = self.columns.squares(name, dense)
            # zeros without memory, so that one parameter's gradient at a time is in it
            return gradient if gradient.is_sparse else gradient.new_zeros(()).expand(gradient.shape)

        for index, sequence in enumerate(sequences):
            chosen = (predictions.rows == sequence).nonzero()[:, 0]
            if not len(chosen):
                continue
            # rows ascend by sequence, so that a slice will do, which copies no logits
            part = slice(int(chosen[0]), int(chosen[-1]) + 1)
            # where the caller has switched gradients off, the slice would have no graph
            with eager_with_grad(self._model):
                logits = predictions.logits[part]
            hooks = [
                value.register_hook(partial(take, index, name))  # type: ignore[no-untyped-call]
                for name, value in wanted.items()
            ]
            try:
                torch.autograd.grad(
                    logits, list(wanted.values()), cotangent[part], retain_graph=True, allow_unused=True
                )
            finally:
                for hook in hooks:
                    hook.remove()
        return norms

    # --- the earliest point where the predicted positions can be selected ---

    def _earliest(self, batch: Batch) -> PositionSelection:
        """Return the earliest selection that leaves the logits as they are and behind which no positions mix."""
        # a position between the first and the last is needed
        if len(batch.targets) < _FEWEST_POSITIONS:
            return PositionSelection()
        try:
            with self._same_draws(), calls(unwrapped(self._model), batch.predicted.shape) as made:
                plain = self._plain_pass(batch)
        except IsolossError:  # of positions that need not be finite
            return PositionSelection()
        # a model is often measured again, in training for one; the last place is checked and the search left out
        last = LAST_SELECTION.get(self._model)
        candidates = (
            [last] if last is not None and self._is_exact(plain, batch, last) else self._search(plain, batch, made)
        )
        while candidates and not self._separates(plain, batch, candidates[-1]):
            candidates.pop()
        LAST_SELECTION[self._model] = candidates[-1] if candidates else PositionSelection()
        return LAST_SELECTION[self._model]

    def _plain_pass(self, batch: Batch) -> _PlainPass:
        """Return what a pass without a selection gives, and nothing that keeps its graph."""
        plain = self._attempt(batch, PositionSelection())
        assert plain is not None
        weight = None if plain.decoder is None else plain.capture.last_weight
        return _PlainPass(plain.logits.detach(), plain.capture.without_rule, weight)

    def _search(self, plain: _PlainPass, batch: Batch, made: list[Call]) -> list[PositionSelection]:
        """Return the selections, the latest first, that give what a plain pass did, for as long as they do."""
        candidates: list[PositionSelection] = []
        if plain.decoder_weight is not None:
            decoder = PositionSelection(weight=plain.decoder_weight)
            candidates += [decoder] if self._is_exact(plain, batch, decoder) else []
        # from the end: as soon as a place is wrong, so are all before it
        for call in reversed(made):
            if not self._is_exact(plain, batch, earlier := PositionSelection(call=call)):
                break
            candidates.append(earlier)
        return candidates

    def _is_exact(self, plain: _PlainPass, batch: Batch, selection: PositionSelection) -> bool:
        """Whether selection there gives the logits and the rules of a plain pass, and mixes no positions' gradients."""
        try:
            with self._same_draws():
                early = self._attempt(batch, selection)
            if early is None or early.capture.without_rule - plain.without_rule:
                return False
            # the same logits, and no position's gradient reaches another position
            return agree(early.logits, plain.logits) and _separates_positions(early)
        except Exception:  # what needs all positions may fail in any way
            return False

    def _separates(self, plain: _PlainPass, batch: Batch, selection: PositionSelection) -> bool:
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

    # --- checks against plain passes, on the first batches and on later ones ---

    def _check(self, batch: Batch) -> None:
        """Compare with plain automatic differentiation, in which nothing is selected and no parameter is watched.

        Parameters whose norms by rule differ go to the slow path. Positions are no longer selected early if that is
        what makes a difference.
        """
        whole, batch = batch.without_coincidence(), batch.thinned().without_coincidence()
        self._thinning = len(whole.targets) / len(batch.targets)
        with self._same_draws():
            logits, cotangent, exact = self._autograd_reference(batch)
        agrees, far = self._compare(batch, logits, cotangent, exact)
        if self.selection.is_early and (far or not agrees):
            early, self.selection = self.selection, PositionSelection()
            _, without = self._compare(batch, logits, cotangent, exact)
            # a rule is wrong whatever is selected, and the slow path takes its parameter
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

    def _matches_solo_run(self, batch: Batch, predictions: Predictions) -> bool:
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
        return agree(predictions.logits.detach()[-len(alone) :], alone)  # a view, as rows ascend

    def _give_up_selection(self) -> None:
        if self._skipped_checks:
            raise IsolossError(
                f"selecting predicted positions ({self.selection}) changes the logits of this batch, and earlier "
                f"batches were too small to check: use batches of at least {_EVERY} sequences, or method='paper'"
            )
        self.selection = PositionSelection()
        LAST_SELECTION[self._model] = self.selection

    def _misplaced(self, predictions: Predictions) -> set[str]:
        """Return the parameters with a use whose rows belong to other sequences than its shape suggests.

        As many rows as sequences may have been chosen by a mask, others may have been put in another order, and where
        there are as many positions as sequences a shape does not say which axis is which. If the logits' cotangent is
        multiplied by another number in each sequence, so are the cotangents of that sequence's rows, and of no others.
        """
        number = predictions.num_sequences

        def is_square(use: ParameterUse) -> bool:  # the sequences may be on either of two axes
            return self._time_first and not use.selected and use.shape[:2] == (number, number)

        doubtful = [use for use in predictions.capture.uses if use.is_doubtful or is_square(use)]
        if not doubtful or number == 1:
            return set()
        logits, edges = predictions.logits, [use.edge for use in doubtful]
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        factors_of = 1 + torch.arange(number, device=logits.device) / number
        # signs as well: rows that are exchanged differ by more than rounding in half precision
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

    def _autograd_reference(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        by_column = self._collect(predictions, cotangent).norms.cpu()
        self._fill_slow(by_column, predictions, cotangent)
        norms = self.columns.by_parameter(by_column)
        self._time_first |= any(
            use.shape[0] != len(norms) == use.shape[1]
            for use in capture.uses
            if not use.selected and len(use.shape) > 2
        )
        # what further probes of the tail alone cost, in parts of a whole pass
        tail = self._thinning * sum(use.work for use in capture.uses if use.selected)
        self.tail_fraction = tail / max(1, tail + sum(use.work for use in capture.uses if not use.selected))
        precision = torch.finfo(logits.dtype).eps
        total = exact.sum(dim=1, keepdim=True)
        # relative to each norm, but for what is as small as the rounding of the largest norms
        near = (norms - exact).abs() <= max(1e-3, 8 * precision) * exact + (30 * precision) ** 2 * total
        self._checked |= {(name, predictions.num_sequences > 1) for name in _used_in(capture)}
        is_near = near.all(dim=0).tolist()
        return agrees, {name for name, near_enough in zip(self.names, is_near, strict=True) if not near_enough}

    def _leading(self, predictions: Predictions, names: Iterable[str]) -> torch.Tensor:
        """Return the predicting sequences, ascending, in which the named parameters have the largest gradients."""
        logits = predictions.logits
        cotangent = torch.randn(logits.shape, generator=seeds.generator(0, "check of the rules")).to(logits)
        norms = self.columns.by_parameter(self._collect(predictions, cotangent, keep=False).norms.cpu())
        sizes = norms[:, [self.names.index(name) for name in names]].sum(dim=1)
        predicts = torch.bincount(predictions.rows, minlength=len(sizes)).cpu() > 0
        return sizes.where(predicts, -1.0).topk(min(_FEWEST_CHECKED, len(sizes))).indices.sort().values


def _separates_positions(predictions: Predictions) -> bool:
    """Whether the last position's logits depend on no selected output at another position."""
    uses = [use for use in predictions.capture.uses if use.selected]
    logits = predictions.logits
    if not uses or not logits.requires_grad:
        return True
    cotangent = torch.zeros_like(logits)
    # the last position alone: what it moves at any other one shows that positions meet
    cotangent[-1] = torch.randn(logits.shape[1:], generator=seeds.generator(0, "check of the rules")).to(logits)
    cotangents = torch.autograd.grad(logits, [use.edge for use in uses], cotangent, allow_unused=True)
    last = len(logits) - 1
    for use, values in zip(uses, cotangents, strict=True):
        if values is not None:
            sequence_ids = (
                torch.arange(last + 1, device=values.device) if use.sequence_ids is None else use.sequence_ids
            )
            if bool(values.reshape(len(sequence_ids), -1)[sequence_ids != last].any()):
                return False
    return True


@torch.no_grad()
def agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    if first.shape != second.shape:
        return False
    # a thousand roundings of the largest number; in bfloat16 these would be eight times that number, hence the limit
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
    """Return the first outputs of operations with parameters after positions were selected, at most 3.

    They are (m, n) with n the width of the model, which most such outputs have. The cotangent of each at a
    position depends on the logits' cotangent at this position alone.
    """
    m, capture = len(predictions.rows), predictions.capture
    uses = [use for use in capture.before_last_linear if use.selected and use.shape[:-1].numel() == m]
    widths = Counter(use.shape[-1] for use in uses)
    # outputs of another width, heads' for example, would have other scales, and a control must be worth one coefficient
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


class Collector:
    """Collects the factors of a backward pass; a parameter's norm is taken as soon as all its uses are there."""

    def __init__(
        self, capture: Capture, columns: ParameterColumns, num_sequences: int, device: torch.device, *, separate: bool
    ) -> None:
        self._separate = separate
        self.norms = torch.zeros(num_sequences, len(columns), dtype=torch.float64, device=device)
        self.kept: dict[int, torch.Tensor] = {}  # cotangents (m, d)
        self.reached: set[str] = set()
        self._columns = columns
        self._missing = Counter(name for use in capture.uses for name in use.contributions)
        self._waiting: dict[str, list[factors.Factor]] = {}

    def receiver(self, use: ParameterUse) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Return a hook that takes the cotangent of a use, once, and then lets go of the activations."""
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
                parts, len(self.norms), separate=self._separate, blocks=self._columns.parameter_blocks.get(name)
            )
            self.norms[:, self._columns.of[name]] = norms.view(len(norms), -1)


def _used_in(capture: Capture) -> set[str]:
    return {name for use in capture.uses for name in use.contributions}
