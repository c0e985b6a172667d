"""Batches, checked for a model, and forward passes that compute the logits at their predicted positions only.

Shapes: B sequences, T positions, m predicted positions in all, d the width of the model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from isoloss.errors import NOTHING_PREDICTED, IsolossError, warn
from isoloss.flatness._parameters import quantized_weights
from isoloss.model_checks import (
    device_of,
    eager_with_grad,
    forward_arguments,
    logits_of_output,
    position_ids,
    takes_mask,
    text_config,
    unwrapped,
    virtual_tokens,
)
from isoloss.text.clusters import SequenceClusters, document_keys
from isoloss.text.masking import IGNORED

_MOST_CHECKED = 128  # predicted positions of a sequence that checks of a model need at most; all have V logits
_IDS = ("labels", "input_ids", "position_ids", "token_type_ids")
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def as_tensors(batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield batches with lists and arrays as tensors, and ids as int64."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise IsolossError(f"batch {number} is a {type(batch).__name__}, not a mapping of input_ids, labels, ...")
        try:
            yield _with_tensors(batch)
        except IsolossError as error:
            raise IsolossError(f"batch {number}: {error}") from error


def _with_tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in batch.items() if value is not None}
    for name in {*_IDS, *_PER_TOKEN} & made.keys():
        value = made[name]
        if isinstance(value, Sequence | np.ndarray):
            try:
                value = torch.as_tensor(value)
            except (ValueError, TypeError) as error:
                raise IsolossError(f"{name} cannot become a tensor ({error}): give all sequences one length") from error
        if name in _IDS and isinstance(value, torch.Tensor):
            if value.is_floating_point():
                raise IsolossError(f"{name} are {value.dtype}; ids are integers")
            value = value.to(torch.int64)  # an embedding takes no narrower ones than int32
        made[name] = value
    labels = made.get("labels")
    if "documents" in made and isinstance(labels, torch.Tensor) and labels.ndim:
        document_keys(made["documents"], len(labels))  # or refuses
    return made


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

        An input with one row, such as `position_ids` (1, T), counts for every sequence.
        """
        given = _with_tensors(batch)
        labels = given.pop("labels", None)
        if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
            raise IsolossError("there are no `labels` of shape (sequences, positions)")
        inputs: dict[str, Any] = {}
        device = device_of(model)
        for name, value in given.items():
            if name == "attention_mask" and not takes_mask(model):
                _check_no_mask(value, model, causal=causal)
                continue
            if isinstance(value, torch.Tensor):
                if name != "input_ids" and value.ndim > 1 and len(value) == 1:
                    value = value.expand(len(labels), *value.shape[1:])
                # a mask may have further axes, for what each position sees
                is_per_token = name == "input_ids" or (name in _PER_TOKEN and value.ndim == 2)
                expected = labels.shape if is_per_token else labels.shape[:1]
                if value.shape[: len(expected)] != expected:
                    raise IsolossError(
                        f"labels of shape {tuple(labels.shape)} do not fit {name} of shape {tuple(value.shape)}"
                    )
                # a tensor made in inference mode cannot be saved for a backward pass, its copy can
                value = (value.clone() if value.is_inference() else value).to(device)
            inputs[name] = value
        if not any(isinstance(value, torch.Tensor) for name, value in inputs.items() if name != "attention_mask"):
            raise IsolossError("there are no `input_ids` of shape (sequences, positions)")
        _check_ranges(inputs, model, labels.shape[1])
        labels = (labels.clone() if labels.is_inference() else labels).to(device)
        if causal:
            labels = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)
        predicted = labels != IGNORED
        targets = labels[predicted]
        if len(targets) and int(targets.min()) < 0:
            raise IsolossError(
                f"a label is {int(targets.min())}; it is a token id, or {IGNORED} where nothing is predicted"
            )
        # the logits have positions for the tokens of PEFT's prompt, too, which stand before all others
        return Batch(inputs, F.pad(predicted, (virtual_tokens(model), 0)), targets)

    @property
    def predicts(self) -> bool:
        return len(self.targets) > 0

    def require_predictions(self) -> None:
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
    def thinned(self) -> Batch:
        """Return the batch with fewer predicted positions, of each sequence the last and others, where it has many."""
        left = self.predicted.flip(1).cumsum(dim=1).flip(1) - 1  # predicted positions behind each
        step = -(-(int(left.max()) + 1) // _MOST_CHECKED)
        if step < 2:
            return self
        kept = self.predicted & (left % step == 0)
        return Batch(self.inputs, kept, self.targets[kept[self.predicted]])

    @torch.inference_mode(False)
    def every_other(self) -> Batch:
        """Return the batch with every second position predicted, whatever was: each has one before it that is not.

        Of a long sequence they are fewer. They are not as many as a sequence has, so that what belongs to the positions
        of one cannot be taken for theirs.
        """
        predicted = torch.zeros_like(self.predicted)
        predicted[:, 1 :: max(2, predicted.shape[1] // _MOST_CHECKED)] = True
        if int(predicted.sum()) == predicted.shape[1]:
            predicted[-1, -1] = False
        return Batch(self.inputs, predicted, self.targets.new_zeros(int(predicted.sum())))


def _check_no_mask(mask: torch.Tensor, model: nn.Module, *, causal: bool) -> None:
    """Refuse padding that a model without an attention mask would take for tokens that predictions depend on."""
    present = mask != 0
    # a causal model's predictions at tokens do not depend on what comes after them
    if not bool((present[:, :-1] >= present[:, 1:] if causal else present).all()):
        where = " before tokens" if causal else ""
        raise IsolossError(f"sequences have padding{where}, and {type(model).__name__} takes no attention_mask")


def _check_ranges(inputs: Mapping[str, Any], model: nn.Module, length: int) -> None:
    """Refuse ids that the model has no embedding for: on a GPU, nothing would run after such an error."""
    text, holder = text_config(model), cast("Any", unwrapped(model))
    known: dict[str, range] = {}
    with contextlib.suppress(AttributeError, NotImplementedError):
        known["input_ids"] = range(holder.get_input_embeddings().num_embeddings)
    if number := getattr(text, "type_vocab_size", None):
        known["token_type_ids"] = range(number)
    said = getattr(text, "max_position_embeddings", None)
    # rotary positions have no table, and no end
    if "position_ids" in inputs and (table := position_ids(model, explicit=True)) is not None:
        known["position_ids"] = table
    elif isinstance(said, int) and length > said and (table := position_ids(model)) and length > table.stop:
        raise IsolossError(f"sequences have {length} positions; the model takes at most {table.stop}")
    for name, allowed in known.items():
        ids = inputs.get(name)
        if not isinstance(ids, torch.Tensor) or not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        if low not in allowed or high not in allowed:
            raise IsolossError(f"{name} are {low} to {high}; the model knows ids {allowed[0]} to {allowed[-1]}")


def _warn_of_leaks(batch: Batch, model: nn.Module) -> bool:
    """Return whether a batch has padding or packed documents; warn where predictions depend on what they should not.

    The first such sequence is also run without its padding, or its last document by itself.
    """
    mask, positions = (batch.inputs.get(name) for name in ("attention_mask", "position_ids"))
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return False
    # dynamic quantization rounds all activations of a layer by one scale, padding too
    if quantized_weights(model):
        return True
    apart, what, remedy = mask != 0, "padding", "pad on the right, or pass position_ids that count from the first token"
    if bool(apart.all()) and isinstance(positions, torch.Tensor) and positions.shape == mask.shape:
        begins = F.pad(positions[:, 1:] < positions[:, :-1], (1, 0)).cumsum(dim=1)
        apart = begins == begins[:, -1:]
        what, remedy = "documents before them", "leave out the attention_mask, with which these are not kept apart"
    chosen = (~apart).any(dim=1) & (batch.predicted[:, -mask.shape[1] :] & apart).any(dim=1)
    if not bool(chosen.any()):
        return False
    row = int(chosen.nonzero()[0, 0])
    sequence, present = batch.rows(torch.tensor([row])), apart[row]
    part = {
        name: value[:, present] if isinstance(value, torch.Tensor) and value.shape[1:2] == present.shape else value
        for name, value in sequence.inputs.items()
    }
    with eager_with_grad(model) as plain, torch.no_grad():
        try:
            alone, whole = (
                logits_of_output(plain(**forward_arguments(plain, inputs)))[0] for inputs in (part, sequence.inputs)
            )
        except Exception:  # a model may not take every length
            return True
    # the positions of a prompt's tokens stand before the mask's
    kept = F.pad(present, (len(whole) - len(present), 0), value=True)
    predicted = sequence.predicted[0][kept]
    alone, whole = alone[predicted], whole[kept][predicted]
    change = float((whole - alone).abs().max() / alone.abs().max())
    if change > torch.finfo(alone.dtype).eps ** 0.5:
        warn(
            f"{type(unwrapped(model)).__name__} predicts otherwise with {what} than without (sequence {row}: logits "
            f"change by up to {100 * change:.2g} %): {remedy}"
        )
    return True


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
) -> Iterator[CheckedBatch]:
    """Yield the batches of a stream, checked for a model; some may predict nothing.

    Clusters do not depend on how the stream is cut into batches.
    """
    if isinstance(batches, Mapping):
        raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
    position, is_checked = StreamPosition(), False
    stream = as_tensors(batches)
    # the number is checked first: no batch is taken from the stream that is not measured
    while (num_sequences is None or position.sequences < num_sequences) and (batch := next(stream, None)) is not None:
        number = position.batches
        if num_sequences is not None:
            rows = slice(num_sequences - position.sequences)
            batch = {
                # `documents` may be a list
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
        is_checked = is_checked or _warn_of_leaks(checked, model)
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
