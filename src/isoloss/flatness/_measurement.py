"""A ratio of sums over independent clusters, measured over a stream of batches; most measures of flatness are one.

Shapes: B sequences of a batch, K columns (parameter tensors, parts of them, or one), C control variates, N clusters.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch, StreamPosition, read_batches
from isoloss.flatness._ghost.auxiliary import AuxiliarySample
from isoloss.flatness._parameters import (
    ParameterBlocks,
    ParameterColumns,
    check_reached,
    counted_parameters,
    embeddings,
    quantized_weights,
    requiring_gradients,
)
from isoloss.machine import disable_malloc_trim
from isoloss.model_checks import (
    architecture,
    device_of,
    eager_with_grad,
    is_causal,
    refuse_dropout,
    resharded,
    unwrapped,
)
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import AuxiliaryMeans, ClusteredRatio, ClusteredRatioEstimator, ColumnRatios
from isoloss.text.clusters import Blocks, SequenceClusters, equal_blocks

UNIT = "nats per predicted token"
FIRST_CHECK = 64  # samples, before a measurement may end early because its error is small
_MOST_PROBES = 1024  # where rtol or seconds decides

# what it changes lasts as long as the process: activations then stay in memory from one batch to the next
disable_malloc_trim()


class InterruptedEstimate(KeyboardInterrupt):
    """Ctrl-C during a measurement that already has an error bar.

    Attributes:
        partial: The estimate from what was measured so far.
    """

    def __init__(self, partial: Estimate) -> None:
        super().__init__(f"interrupted at {partial}")
        self.partial = partial


class MeasureOptions(TypedDict, total=False):
    """The arguments that all measures of flatness have in common; one that is left out is None.

    Samples are clusters of sequences, batches (`sam_sharpness`, and `hessian_trace` by the published code), or random
    probes that each see all inputs (`noise_sharpness`, `spectral_density`).

    Attributes:
        num_sequences: Stop after as many; None: at the end of the batches.
        rtol: Stop as soon as the standard error is at most this fraction of the value. Checked after 64, 128, 256, ...
            samples only, so that a lucky moment does not end it. More probes do not make the inputs' part of an error
            smaller.
        seconds: Stop at the first batch or probe that ends later than this after the start, once there are 64 clusters
            or batches, or 2 probes. The details' `ended` says what ended it.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters to measure, by name; None: all trainable ones, tied ones once.
        progress: Called after each batch with the number of sequences done, or after each probe with the number of
            probes.
    """

    num_sequences: int | None
    rtol: float | None
    seconds: float | None
    causal: bool | None
    parameters: Mapping[str, nn.Parameter] | None
    progress: Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True)
class StopCriteria:
    """When to stop before the batches end (see `MeasureOptions`); None: never."""

    num_sequences: int | None = None
    rtol: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.num_sequences is not None and self.num_sequences < 2:
            raise IsolossError(f"num_sequences is {self.num_sequences}; an error bar needs at least 2")
        if self.rtol is not None and not 0 < self.rtol < 1:
            raise IsolossError(f"rtol is {self.rtol}; it is a fraction of the value, between 0 and 1")
        if self.seconds is not None and not self.seconds > 0:
            raise IsolossError(f"seconds is {self.seconds}; it must be more than 0")

    @classmethod
    def of(cls, options: MeasureOptions) -> Self:
        """Return the limits among a call's options; refuse a call with others."""
        if unknown := sorted(options.keys() - MeasureOptions.__annotations__):
            names = ", ".join(MeasureOptions.__annotations__)
            raise TypeError(f"unexpected argument {unknown[0]!r}; the options are {names}")
        return cls(num_sequences=options.get("num_sequences"), rtol=options.get("rtol"), seconds=options.get("seconds"))

    def number_of_probes(self, given: int | None, default: int) -> int:
        """Return how many probes to take at most; by default more where the error or the time decides."""
        if given is None:
            return default if self.rtol is None and self.seconds is None else _MOST_PROBES
        if given < 2:
            raise IsolossError(f"num_probes is {given}; an error bar needs at least 2")
        return given


class StopRule:
    """Says when a measurement is to stop, and how long it has taken.

    Args:
        stopping: The limits.
        seconds: The time that it has taken before.
        fewest: Samples before `stopping.seconds` may end it.
    """

    def __init__(self, stopping: StopCriteria, *, seconds: float = 0.0, fewest: int = 2) -> None:
        self.seconds, self._stopping, self._fewest = seconds, stopping, fewest
        self._begun, self._next_check = time.perf_counter() - seconds, FIRST_CHECK

    def limit_reached(
        self, samples: Sized, estimate: Callable[[], Estimate | ClusteredRatio] | None = None
    ) -> str | None:
        """Return which limit ends the measurement after these samples, `rtol` or `seconds`; None: it goes on.

        `estimate` returns the estimate so far, for `rtol`; None: only `seconds` counts.
        """
        self.seconds = time.perf_counter() - self._begun
        rtol, seconds = self._stopping.rtol, self._stopping.seconds
        if rtol is not None and estimate is not None and len(samples) >= self._next_check:
            found = estimate()
            if found.stderr <= rtol * abs(found.value):
                return "rtol"
            # checked at doubling numbers: a look after every batch would end it at a moment where the error is small by
            # chance
            while self._next_check <= len(samples):
                self._next_check *= 2
        return "seconds" if seconds is not None and len(samples) >= self._fewest and self.seconds >= seconds else None


@contextlib.contextmanager
def interruptible(samples: Sized, estimate: Callable[[str], Estimate]) -> Iterator[None]:
    """Turn Ctrl-C into an `InterruptedEstimate` with the estimate so far, if there are at least two samples."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if len(samples) < 2:
            raise
        raise InterruptedEstimate(estimate("interrupted")) from interruption


def model_details(model: nn.Module, counted: Sequence[nn.Parameter], *, causal: bool) -> dict[str, Any]:
    """Return the details about the model, which every measure has."""
    return {
        "device": str(device_of(model)),
        "dtype": str(counted[0].dtype).removeprefix("torch."),
        "attention": getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None),
        "num_parameters": sum(parameter.numel() for parameter in counted),
        "quantized_weights": quantized_weights(model),
        "predicts": "next token" if causal else "masked tokens",
    }


# what makes another estimate of one, from the ratios of its columns
Finish = Callable[[Estimate, ColumnRatios], Estimate]

_OF_A_PROCESS = 1 << 40  # sequences; the indices of a process's sequences are no other process's
_OVERTIME = 10  # times its time limit, and at least a second, that a measurement waits for the probes of a batch


class BatchSums(NamedTuple):
    """The terms of a batch of B sequences; of a batch that is one sample, with one row or none."""

    values: torch.Tensor  # (B, K) what each sequence adds to the numerator, on the CPU
    positions: torch.Tensor  # (B,) what it adds to the denominator: predicted positions
    controls: torch.Tensor  # (B, C) control variates, each with expectation 0
    # (B, K) of a second sum, which has no controls and is added to the first; None: there is none
    residual: torch.Tensor | None = None


class Estimator(abc.ABC):
    """Measures a batch at a time; a context manager, inside which the model may be changed."""

    method: str  # what the result calls it
    parts: tuple[str, ...] = ()  # names of the sums, where there are two
    num_controls = 0  # C
    by_parameter = True  # whether the columns are the parameters; else there is one
    by_batch = False  # whether a batch is one sample
    takes_shards = False  # whether the model may be sharded by `fully_shard`

    def __init__(
        self,
        model: nn.Module,
        *,
        num_probes: int = 0,
        seed: int = 0,
        causal: bool | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
        cluster_size: int = 1,
        parameter_blocks: Mapping[str, ParameterBlocks] | None = None,
    ) -> None:
        refuse_dropout(model)
        self.model, self.num_probes, self.seed = model, num_probes, seed
        self.causal = is_causal(model) if causal is None else causal
        self.parameters = counted_parameters(model, parameters, shards=self.takes_shards)
        self.parameter_blocks = parameter_blocks  # not None, even where it is empty: the columns' ratios are wanted
        self.cluster_size = cluster_size  # consecutive sequences that are not independent
        self.choices: dict[str, int] = {}  # what it chose at the first batch
        self.reached: set[str] = set()  # names of the parameters that had a gradient
        self.seconds: float | None = None  # the time limit of the measurement
        self.batch_begun = 0.0  # when the batch was begun that is measured
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(requiring_gradients(self.parameters))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    @cached_property
    def columns(self) -> ParameterColumns:
        return ParameterColumns(self.parameters, self.parameter_blocks)

    @abc.abstractmethod
    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch, which may predict nothing."""

    def probes(self) -> Iterator[int]:
        """Yield the number of each probe of a batch.

        A measurement ends between batches. So that its time limit holds for any number of probes, a batch whose probes
        take far longer than all of the measurement may is an error.
        """
        for probe in range(self.num_probes):
            elapsed = time.perf_counter() - self.batch_begun
            if probe and self.seconds is not None and elapsed > max(1.0, _OVERTIME * self.seconds):
                raise IsolossError(
                    f"{probe:,} of {self.num_probes:,} probes took {elapsed:.3g} s, and the time limit of "
                    f"{self.seconds:g} s cannot end a measurement within a batch: lower num_probes, or raise seconds"
                )
            yield probe

    def gradients(
        self, output: torch.Tensor, cotangent: torch.Tensor | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradient of each parameter that the output depends on, dense, with its name; keep the graph."""
        gradients = torch.autograd.grad(
            output, list(self.parameters.values()), cotangent, retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                self.reached.add(name)
                yield name, gradient.to_dense() if gradient.is_sparse else gradient

    def details(self) -> dict[str, Any]:
        """Return the details of the result about how it was measured."""
        return {"parameters_without_gradient": [name for name in self.parameters if name not in self.reached]}


class Measurement:
    """A ratio of a model's terms over a stream of batches; it runs once.

    Args:
        source: Measures the batches. Where it has `parameter_blocks`, every cluster's terms are kept: N K numbers.
        distributed: As for `isoloss.flatness.fisher_trace`.
        auxiliary_sample: See there.
        finish: Makes the estimate that is returned, watched for `rtol`, and carried by an interruption, from that of
            the sum of all columns and from the columns. It takes a source with `parameter_blocks`.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        source: Estimator,
        *,
        distributed: bool = False,
        auxiliary_sample: AuxiliarySample | None = None,
        finish: Finish | None = None,
    ) -> None:
        if distributed and not (dist.is_available() and dist.is_initialized()):
            raise IsolossError("distributed is set, but torch.distributed has no process group: start it with torchrun")
        if distributed and resharded(source.model):
            # how many passes a batch takes depends on its data, and each pass of a sharded model is of all processes
            raise IsolossError(
                "distributed is set, and the processes of a sharded model run each pass together: leave it out, and "
                "give every process the same batches"
            )
        self._model, self._source, self._distributed = source.model, source, distributed
        self._auxiliary, self._finish = auxiliary_sample, finish
        self._first = dist.get_rank() * _OF_A_PROCESS if distributed else 0
        self._names = list(source.parameters) if source.by_parameter else ["value"]
        self._layers = list(dict.fromkeys(layer_of(name) for name in self._names))
        parameter_ids: list[int] = source.columns.parameter_ids.tolist() if source.by_parameter else [0]
        self._column_names = [self._names[owner] for owner in parameter_ids]
        # errors of layers need the sums over their columns by cluster, not the errors of the columns
        groups = [[self._layers.index(layer_of(name)) for name in self._column_names]]
        self._is_split = len(parameter_ids) > len(self._names)
        if self._is_split:  # the columns are no parameters: these are groups, before the layers
            groups = [parameter_ids, [len(self._names) + layer for layer in groups[0]]]
        self._embeddings = embeddings(self._model, source.parameters)
        others = [column for column, name in enumerate(self._column_names) if name not in self._embeddings]
        means = None
        if auxiliary_sample is not None:
            means = AuxiliaryMeans(auxiliary_sample.covariance, auxiliary_sample.num_sequences, auxiliary_sample.number)
        width = len(parameter_ids)
        self._estimators = [ClusteredRatioEstimator(width, source.num_controls, groups, means, others)]
        if source.parts:
            self._estimators.append(ClusteredRatioEstimator(width, 0, groups, part=others))
        config = getattr(architecture(self._model), "config", None)
        self.clusters = SequenceClusters(config, group_size=source.cluster_size)
        self._position = StreamPosition()
        self._gathered_blocks: Blocks | None = None  # of all processes

    def __len__(self) -> int:
        return len(self._estimators[0])

    def blocks(self) -> Blocks | None:
        """Return the blocks of clusters that depend on each other, if there are any."""
        blocks = None if self._source.by_batch else self._gathered_blocks or self.clusters.blocks()
        # a batch that was read may not have been measured, where Ctrl-C came between
        return blocks and blocks._replace(labels=blocks.labels[: len(self)])

    def result(self) -> ClusteredRatio:
        first, *rest = self._results()
        return first.plus(rest[0]) if rest else first

    def _results(self) -> list[ClusteredRatio]:
        blocks = self.blocks()
        labels = None if blocks is None else blocks.labels
        return [estimator.result(labels) for estimator in self._estimators]

    def columns(self) -> ColumnRatios:
        """Return the ratios of the columns, where there are `parameter_blocks`, and what gives ratios of their sums."""
        blocks = self.blocks()
        labels = None if blocks is None else blocks.labels
        first, *rest = (estimator.columns(labels) for estimator in self._estimators)
        return first.plus(rest[0]) if rest else first

    @torch.inference_mode(False)
    def measure(
        self,
        batches: Iterable[Mapping[str, Any]],
        stopping: StopCriteria,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Estimate:
        """Measure until the batches end or `stopping` says so; arguments, result and errors as for `fisher_trace`."""
        if isinstance(batches, Mapping):
            raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
        if self._distributed and (stopping.rtol is not None or stopping.seconds is not None):
            raise IsolossError(
                "rtol and seconds do not end all processes alike: leave them out where it is distributed"
            )
        source = self._source
        source.seconds = stopping.seconds
        before = 0.0 if self._auxiliary is None else self._auxiliary.seconds
        self._watch, reason = StopRule(stopping, seconds=before, fewest=FIRST_CHECK), None
        with source:
            items = read_batches(
                batches,
                model=self._model,
                causal=source.causal,
                num_sequences=stopping.num_sequences,
                clusters=self.clusters,
            )
            with interruptible(self, self._estimate):
                for item in items:
                    self._add(item)
                    if self._position.positions:
                        reason = self._watch.limit_reached(self, self._watched)
                    if progress is not None:
                        progress(self._position.sequences)
                    if reason is not None:
                        break
            if not self._position.batches:
                raise IsolossError("there are no batches, so there is nothing to measure")
            if reason is None:
                # the stream may have ended exactly there, and then both are true
                is_full = self._position.sequences == stopping.num_sequences
                reason = "num_sequences" if is_full else "end of the batches"
            if self._distributed:
                self._gather()
            return self._estimate(reason)

    def _add(self, item: CheckedBatch) -> None:
        auxiliary = self._auxiliary
        if auxiliary is not None and auxiliary.by_document != self.clusters.by_document:
            raise IsolossError("both the batches and the auxiliary sample have `documents`, or neither has")
        self._source.batch_begun = time.perf_counter()
        try:
            if self._source.by_batch and not item.checked.predicts:
                terms = BatchSums(torch.zeros(0, len(self._column_names)), torch.zeros(0), torch.zeros(0, 0))
            else:
                with eager_with_grad(self._model):
                    terms = self._source.measure(replace(item, first=self._first + item.first))
            controls = terms.controls
            if auxiliary is not None:
                controls = torch.cat([controls, auxiliary.features(item.given)], dim=1)
        except IsolossError as error:
            raise IsolossError(f"batch {item.number}: {error}") from error
        clusters = None if self._source.by_batch else item.clusters
        parts = [(terms.values, controls)]
        if terms.residual is not None:
            parts.append((terms.residual, controls[:, :0]))
        for values, _ in parts:
            self._check_finite(values, item)
        for estimator, (values, of_part) in zip(self._estimators, parts, strict=True):
            estimator.add(values, terms.positions, of_part, clusters)
        self._position = item.after

    def _check_finite(self, values: torch.Tensor, item: CheckedBatch) -> None:
        if not bool(values.isfinite().all()):
            row, column = (~values.isfinite()).nonzero()[0].tolist()
            what = f"the gradient of {self._column_names[column]}" if self._source.by_parameter else "a derivative"
            raise IsolossError(
                f"batch {item.number}: {what} is not finite (sequence {row} of the batch); use a wider dtype"
            )

    def _watched(self) -> Estimate | ClusteredRatio:
        return self.result() if self._finish is None else self._estimate("")

    def _gather(self) -> None:
        gathered: list[Any] = [None] * dist.get_world_size()
        # whether neighbors are alike is asked of each process's own stream
        packed = len(self.clusters), self.clusters.is_packed()
        dist.all_gather_object(gathered, (self._position, self._watch.seconds, self._estimators, packed))
        positions = [position for position, *_ in gathered]
        for number in range(len(self._estimators)):
            self._estimators[number] = ClusteredRatioEstimator.merged([parts[number] for _, _, parts, _ in gathered])
        self._watch.seconds = max(seconds for _, seconds, *_ in gathered)
        if any(is_packed for *_, (_, is_packed) in gathered):
            self._gathered_blocks = equal_blocks([number for *_, (number, _) in gathered])
        summed = ("batches", "sequences", "positions", "skipped")
        totals = {name: sum(getattr(position, name) for position in positions) for name in summed}
        self._position = replace(self._position, **totals)

    def _estimate(self, reason: str) -> Estimate:
        source, position = self._source, self._position
        if source.cluster_size > 1 and not self.clusters.by_document and len(self) == 1:
            raise IsolossError(
                "an error bar needs at least 2 groups of sequences, and these are 1 group of up to "
                f"{source.cluster_size} sequences; take more sequences or a smaller group_size"
            )
        if source.by_batch and len(self) < 2:
            raise IsolossError(f"an error bar needs at least 2 batches, not {len(self)}")
        result = self.result()
        details = source.details()
        if source.by_parameter and not bool(result.by_parameter.any()):
            check_reached(self._model, self._names, details["parameters_without_gradient"])
        blocks = self.blocks()
        clusters = self.clusters.name if blocks is None else blocks.name
        estimate = Estimate(
            value=result.value,
            stderr=result.stderr,
            samples=result.samples,
            effective_samples=result.effective_samples,
            unit=UNIT,
            num_predictions=position.positions,
            num_probes=source.num_probes,
            method=source.method,
            seconds=self._watch.seconds,
            **self._split(result),
            details={
                **model_details(self._model, list(source.parameters.values()), causal=source.causal),
                "sequences": position.sequences,
                "skipped_batches": position.skipped,
                "leading_cluster": result.leading,
                "auxiliary_sequences": 0 if self._auxiliary is None else self._auxiliary.num_sequences,
                "auxiliary_bigrams": any(result.auxiliary_controls[:1]),
                "auxiliary_directions": sum(result.auxiliary_controls[1:]),
                "auxiliary_differs": result.auxiliary_differs,
                "clusters": "batches" if source.by_batch else clusters,
                "processes": dist.get_world_size() if self._distributed else 1,
                "seed": source.seed,
                "ended": reason,
                **self._without_embeddings(result),
                **self._of_parts(),
                **details,
            },
            influence=result.influence.numpy(),
        )
        return estimate if self._finish is None else self._finish(estimate, self.columns())

    def _split(self, result: ClusteredRatio) -> dict[str, Any]:
        if not self._source.by_parameter:
            return {}
        fields = {"": (result.by_parameter, result.by_group)}
        if result.by_parameter_stderr is not None and result.by_group_stderr is not None:
            fields["_stderr"] = result.by_parameter_stderr, result.by_group_stderr
        split = {}
        for suffix, (by_column, by_group) in fields.items():
            sizes = [len(self._names), len(self._layers)]
            values = torch.split(by_group, sizes) if self._is_split else (by_column, by_group)
            for name, keys, numbers in zip(("parameter", "layer"), (self._names, self._layers), values, strict=True):
                split[f"by_{name}{suffix}"] = dict(zip(keys, numbers.tolist(), strict=True))
        return split

    def _without_embeddings(self, result: ClusteredRatio) -> dict[str, Any]:
        if not self._source.by_parameter:
            return {}
        return {
            "embeddings": self._embeddings,
            "without_embeddings": result.part.value,
            "without_embeddings_stderr": result.part.stderr,
        }

    def _of_parts(self) -> dict[str, float]:
        if not self._source.parts:
            return {}
        details: dict[str, float] = {}
        for name, result in zip(self._source.parts, self._results(), strict=True):
            details |= {name: result.value, f"{name}_stderr": result.stderr}
        return details


def measure(
    kind: Callable[..., Estimator],
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    options: MeasureOptions,
    *,
    num_probes: int | None = None,
    distributed: bool = False,
    auxiliary_sample: AuxiliarySample | None = None,
    finish: Finish | None = None,
    **arguments: Any,
) -> Estimate:
    """Return the estimate over the batches by an estimator of this kind, made with these further `arguments`.

    A `finish` (see `Measurement`) takes `parameter_blocks` among them.
    """
    stopping = StopCriteria.of(options)
    if num_probes is not None and num_probes < 1:
        raise IsolossError(f"num_probes is {num_probes}; it must be at least 1")
    chosen = {"causal": options.get("causal"), "parameters": options.get("parameters")}
    source = kind(model, num_probes=num_probes or 0, **chosen, **arguments)
    measurement = Measurement(source, distributed=distributed, auxiliary_sample=auxiliary_sample, finish=finish)
    return measurement.measure(batches, stopping, progress=options.get("progress"))


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: its name up to the first number, else up to two parts of it.

    Example:
        >>> from isoloss.flatness._measurement import layer_of
        >>> [layer_of(name) for name in ("bert.encoder.layer.3.output.dense.bias", "bert.embeddings.LayerNorm.bias")]
        ['bert.encoder.layer.3', 'bert.embeddings']
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[: min(2, max(1, len(parts) - 1))])
