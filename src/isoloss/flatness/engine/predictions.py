"""Batches, checked for a model, and forward passes that compute the logits at their predicted positions only.

Shapes: B sequences, T positions, m predicted positions in all, d the width of the model, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node

from isoloss.errors import IsolossError
from isoloss.flatness.engine.capture import Capture, Decoder, PositionSelection, selected_at
from isoloss.model_checks import (
    NOTHING_PREDICTED,
    architecture,
    device_of,
    max_length,
    plainly,
    unwrapped,
    virtual_tokens,
)
from isoloss.text.clusters import SequenceClusters
from isoloss.text.masking import IGNORED


@dataclass(frozen=True)
class Batch:
    """A checked batch on the model's device."""

    inputs: dict[str, Any]  # the model's arguments without the labels
    predicted: torch.Tensor  # (B, T) bool, the positions whose logits are scored
    targets: torch.Tensor  # (m,) the labels there, sequence by sequence

    @staticmethod
    @torch.inference_mode(False)  # whose tensors no graph may hold
    def read(batch: Mapping[str, Any], model: nn.Module, *, causal: bool) -> Batch:
        """Check a batch for a model and mark what it predicts; a causal model predicts label t + 1 at position t.

        An input with one row, such as `position_ids` (1, T), is that of every sequence.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
            raise IsolossError("there are no `labels` of shape (sequences, positions)")
        if labels.is_floating_point():
            raise IsolossError(f"the labels are {labels.dtype}; token ids are integers")
        inputs: dict[str, Any] = {}
        device = device_of(model)
        for name, value in batch.items():
            if name == "labels":
                continue
            if isinstance(value, torch.Tensor):
                expected = labels.shape if name == "input_ids" else labels.shape[:1]
                if name != "input_ids" and value.ndim > 1 and len(value) == 1:
                    value = value.expand(len(labels), *value.shape[1:])
                if value.shape[: len(expected)] != expected:
                    raise IsolossError(
                        f"labels of shape {tuple(labels.shape)} do not fit {name} of shape {tuple(value.shape)}"
                    )
                if name == "input_ids":
                    if value.is_floating_point():
                        raise IsolossError(f"the input_ids are {value.dtype}; token ids are integers")
                    value = value.to(torch.int64)  # an embedding takes no narrower ones than int32
                    _check_ids(value, model)
                value = (value.clone() if value.is_inference() else value).to(device)
            inputs[name] = value
        labels = (labels.clone() if labels.is_inference() else labels).to(device, torch.int64)
        if causal:
            labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)
        predicted = labels != IGNORED
        targets = labels[predicted]
        if len(targets) and int(targets.min()) < 0:
            raise IsolossError(
                f"a label is {int(targets.min())}; it is a token id, or {IGNORED} where nothing is predicted"
            )
        return Batch(inputs, F.pad(predicted, (virtual_tokens(model), 0)), targets)

    @property
    def predicts(self) -> bool:
        """Whether any position is predicted."""
        return len(self.targets) > 0

    def require_predictions(self) -> None:
        """Raise an IsolossError where no position is predicted."""
        if not self.predicts:
            raise IsolossError(NOTHING_PREDICTED)

    @torch.inference_mode(False)
    def rows(self, chosen: torch.Tensor) -> Batch:
        """Return some of the sequences, by their indices in the batch."""
        chosen = chosen.to(self.predicted.device)
        inputs = {
            name: value[chosen] if isinstance(value, torch.Tensor) else value for name, value in self.inputs.items()
        }
        targets = torch.full(self.predicted.shape, IGNORED, device=self.predicted.device)
        targets[self.predicted] = self.targets
        predicted = self.predicted[chosen]
        return Batch(inputs, predicted, targets[chosen][predicted])

    def without_coincidence(self) -> Batch:
        """Return the batch; where as many positions are predicted as a sequence has, without the last of them.

        What depends on the number of positions is then not the same once the predicted ones are selected.
        """
        number = len(self.targets)
        if number < 2 or number != self.predicted.shape[1]:
            return self
        predicted = self.predicted.clone()
        predicted[tuple(self.predicted.nonzero()[-1])] = False
        return Batch(self.inputs, predicted, self.targets[:-1])

    def head(self, count: int) -> Batch:
        """Return the first `count` sequences that predict something, or as many as there are."""
        return self.rows(self.predicted.any(dim=1).nonzero()[:count, 0])

    @torch.inference_mode(False)
    def every_other(self) -> Batch:
        """Return the batch with every second position predicted, whatever was: each has one before it that is not.

        They are not as many as a sequence has, so that what belongs to the positions of one cannot be taken for theirs.
        """
        predicted = torch.zeros_like(self.predicted)
        predicted[:, 1::2] = True
        if int(predicted.sum()) == predicted.shape[1]:
            predicted[-1, -1] = False
        return Batch(self.inputs, predicted, self.targets.new_zeros(int(predicted.sum())))


def _check_ids(ids: torch.Tensor, model: nn.Module) -> None:
    """Refuse ids that the model has no embedding of, where it says how many it has."""
    try:
        holder: Any = unwrapped(model)
        known = getattr(holder.get_input_embeddings(), "num_embeddings", None)
    except (AttributeError, NotImplementedError):
        return
    if known is not None and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < known):
        raise IsolossError(f"input_ids are {int(ids.min())} to {int(ids.max())}; the model knows ids 0 to {known - 1}")


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """How far a stream of batches has been read."""

    batches: int = 0  # number of batches
    sequences: int = 0  # their sequences
    positions: int = 0  # their predicted positions
    skipped: int = 0  # batches that predict nothing


@dataclass(frozen=True, kw_only=True)
class CheckedBatch:
    """A batch of a stream."""

    given: Mapping[str, Any]  # the batch as it came
    checked: Batch  # the same on the model's device, without its documents
    number: int  # the index of the batch in the stream
    first: int  # the index of its first sequence in the stream
    clusters: torch.Tensor  # (B,) the number of each sequence's cluster, see `SequenceClusters`
    after: StreamPosition  # where the stream stands behind it


def read_batches(
    batches: Iterable[Mapping[str, Any]],
    *,
    model: nn.Module,
    causal: bool,
    num_sequences: int | None = None,
    clusters: SequenceClusters,
    start: StreamPosition | None = None,
) -> Iterator[CheckedBatch]:
    """Yield the batches of a stream, checked for a model; some may predict nothing.

    Clusters do not depend on how the stream is cut into batches. They have seen all that came before `start`.
    """
    if isinstance(batches, Mapping):
        raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
    stream, position = iter(batches), start or StreamPosition()
    while (num_sequences is None or position.sequences < num_sequences) and (batch := next(stream, None)) is not None:
        number = position.batches
        if not isinstance(batch, Mapping):
            raise IsolossError(f"batch {number} is a {type(batch).__name__}, not a mapping of input_ids, labels, ...")
        if num_sequences is not None:
            rows = slice(num_sequences - position.sequences)
            batch = {
                name: value[rows] if isinstance(value, torch.Tensor) or name == "documents" else value
                for name, value in batch.items()
            }
        if clusters.by_document is not None and clusters.by_document != (batch.get("documents") is not None):
            raise IsolossError(f"batch {number}: all batches have `documents`, or none has")
        try:
            inputs = {name: value for name, value in batch.items() if name != "documents"}
            checked = Batch.read(inputs, model, causal=causal)
        except IsolossError as error:
            raise IsolossError(f"batch {number}: {error}") from error
        first, size = position.sequences, len(checked.predicted)
        position = StreamPosition(
            batches=number + 1,
            sequences=first + size,
            positions=position.positions + len(checked.targets),
            skipped=position.skipped + (not checked.predicts),
        )
        try:
            numbers = clusters.add(batch)
        except IsolossError as error:
            raise IsolossError(f"batch {number}: {error}") from error
        yield CheckedBatch(given=batch, checked=checked, number=number, first=first, clusters=numbers, after=position)


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for a batch, with the graph of the forward pass: drop it before the next one."""

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
    with plainly(model) as plain:
        return _predict(plain, batch, capture, selection)


def plain_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits (m, V) of a model that is run as it is, without gradients."""
    with plainly(model) as plain, torch.no_grad():
        logits: torch.Tensor = plain(**_arguments(plain, batch)).logits
        return logits[batch.predicted]


def _arguments(model: nn.Module, batch: Batch) -> dict[str, Any]:
    inputs = dict(batch.inputs)
    if "use_cache" not in inputs and "use_cache" in inspect.signature(architecture(model).forward).parameters:
        inputs["use_cache"] = False  # a cache copies keys and values
    return inputs


def _predict(model: nn.Module, batch: Batch, capture: Capture, selection: PositionSelection) -> Predictions | None:
    inputs = _arguments(model, batch)
    try:
        with capture, selected_at(model, selection.call, capture):
            output = model(**inputs)
    except NotImplementedError as error:
        if "FlexAttention" in str(error):
            raise IsolossError(
                f"flex_attention has no gradient on the device {batch.predicted.device.type}: call "
                'model.set_attn_implementation("sdpa") before measuring'
            ) from error
        raise
    except (IndexError, RuntimeError) as error:
        longest = None if selection.is_early else max_length(model)  # where early, all positions may be needed
        if longest is not None and batch.predicted.shape[1] > longest:
            raise IsolossError(
                f"sequences have {batch.predicted.shape[1]} positions; the model takes at most {longest}"
            ) from error
        raise
    logits = getattr(output, "logits", None)
    if selection.is_early and not capture.has_selected:
        return None
    shape = (1, len(batch.targets)) if capture.has_selected else tuple(batch.predicted.shape)
    _check_logits(model, logits, shape, batch)
    assert logits is not None
    capture.lose_shared(logits)
    last_linear = capture.decoder(logits)
    if capture.has_selected:
        selected = logits.view(logits.shape[1:]) if logits.is_contiguous() else logits[0]
    else:
        selected = logits[batch.predicted]
    rows = batch.predicted.nonzero()[:, 0]
    if capture.unknown is None:
        _check_finite(selected, rows)
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
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", logits.shape[-1])
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
