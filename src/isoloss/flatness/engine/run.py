"""A measurement over a stream of batches: when it stops, how it goes on after an interruption, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.auxiliary_sample import Pool
from isoloss.flatness.engine.parameters import embeddings, quantized_weights, refuse_unreached
from isoloss.flatness.engine.predictions import Batch
from isoloss.flatness.engine.resume import Place, Record
from isoloss.memory import keep_freed
from isoloss.model_checks import device_of, plainly, unwrapped
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio_estimator import PoolMeans, Shares, Tally

UNIT = "nats per predicted token"
_OF_A_PROCESS = 1 << 40  # sequences; a process's own have places in the stream that no other process's have
_FIRST_LOOK = 64  # clusters, before any rule may end a measurement early


class Norms(NamedTuple):
    """What a source gives for a batch of B sequences.

    Attributes:
        square_norms: (B, K) squared gradient norms by sequence and parameter, on the CPU.
        positions: (B,) predicted positions.
        controls: (B, C) control variates, each with expectation 0.
    """

    square_norms: torch.Tensor
    positions: torch.Tensor
    controls: torch.Tensor


class Source(Protocol):
    """Where squared norms come from; a context manager, inside which the model may be changed.

    Attributes:
        method: What the result calls it.
        parameters: The K parameters, by name.
        num_controls: C.
        num_probes: Random vectors or labels a position.
        seed: What they are drawn with.
        causal: Whether position t predicts label t + 1.
        settled: What it chose at the first batch; with this set before, it does not choose.
    """

    method: str
    parameters: dict[str, nn.Parameter]
    num_controls: int
    num_probes: int
    seed: int
    causal: bool
    settled: dict[str, int]

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def measure(self, batch: Batch, first: int) -> Norms:
        """Measure a batch, which may predict nothing; `first` is the place of its first sequence in the stream."""
        ...

    def details(self) -> dict[str, Any]:
        """Return what the result's details say of how it was done, `parameters_without_gradient` in any case."""
        ...


class InterruptedEstimate(KeyboardInterrupt):
    """Ctrl-C during a measurement that already has an error bar.

    Attributes:
        partial: The estimate from what was measured so far.
    """

    def __init__(self, partial: Estimate) -> None:
        super().__init__(f"interrupted at {partial}")
        self.partial = partial


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """When to stop before the batches end (see `isoloss.flatness.fisher_trace`); None: never.

    Raises:
        IsolossError: A limit is out of its range.
    """

    num_sequences: int | None = None
    rtol: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.num_sequences is not None and self.num_sequences < 2:
            raise IsolossError(f"num_sequences is {self.num_sequences}; an error bar needs at least 2")
        if self.rtol is not None and not 0 < self.rtol < 1:
            raise IsolossError(f"rtol is {self.rtol}; it is a share of the value, between 0 and 1")
        if self.seconds is not None and not self.seconds > 0:
            raise IsolossError(f"seconds is {self.seconds}; it must be more than 0")


class Measurement:
    """Squared gradient norms of a model, by sequence, over a stream of batches; it runs once.

    Args:
        model: What is measured.
        source: Where its squared norms come from.
        distributed: Whether every process of the torch.distributed group measures batches of its own, and all get the
            result of all.
        pool: Gives further controls; where it is distributed, the same one to every process.

    Raises:
        IsolossError: It is to be distributed, and torch.distributed has no process group.
    """

    @torch.inference_mode(False)
    def __init__(
        self, model: nn.Module, source: Source, *, distributed: bool = False, pool: Pool | None = None
    ) -> None:
        if distributed and not (dist.is_available() and dist.is_initialized()):
            raise IsolossError("distributed is set, but torch.distributed has no process group: start it with torchrun")
        self._model, self._source, self._distributed, self._pool = model, source, distributed, pool
        self._first = dist.get_rank() * _OF_A_PROCESS if distributed else 0
        self._names = list(source.parameters)
        self._layers = list(dict.fromkeys(layer_of(name) for name in self._names))
        groups = [self._layers.index(layer_of(name)) for name in self._names]
        self._embeddings = embeddings(model, source.parameters)
        others = [column for column, name in enumerate(self._names) if name not in self._embeddings]
        means = None if pool is None else PoolMeans(pool.covariance, pool.num_sequences, pool.number)
        self._tally = Tally(len(self._names), source.num_controls, groups, means, part=others)
        self._place = Place(seconds=0.0 if pool is None else pool.seconds)

    def shares(self) -> Shares:
        """Return what the result is made of, and the influence of each cluster, which errors of differences rest on."""
        return self._tally.shares()

    @torch.inference_mode(False)
    def run(
        self,
        batches: Iterable[Mapping[str, Any]],
        stopping: Stopping,
        *,
        resume: Path | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Estimate:
        """Measure until the batches end or `stopping` says so; arguments, result and errors as for `fisher_trace`."""
        if isinstance(batches, Mapping):
            raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
        if self._distributed and (stopping.rtol is not None or stopping.seconds is not None):
            raise IsolossError(
                "rtol and seconds do not end all processes alike: leave them out where it is distributed"
            )
        keep_freed()
        source = self._source
        identity = {"method": source.method, "probes": source.num_probes, "seed": source.seed, "causal": source.causal}
        identity |= {"controls": source.num_controls, "pool": str(self._pool or "none")}
        identity["embeddings"] = self._embeddings
        if self._distributed:
            identity["first sequence"] = self._first
        with source:
            record = None if resume is None else Record(resume, self._model, self._names, identity)
            try:
                reason = self._consume(batches, stopping, record, progress)
            except KeyboardInterrupt as interruption:
                if len(self._tally) < 2:
                    raise
                raise InterruptedEstimate(self._estimate("interrupted")) from interruption
            if not self._place.batches:
                raise IsolossError("there are no batches, so there is nothing to measure")
            if self._distributed:
                self._gather()
            result = self._estimate(reason)
            if record is not None:
                record.remove()
            return result

    def _consume(
        self,
        batches: Iterable[Mapping[str, Any]],
        stopping: Stopping,
        record: Record | None,
        progress: Callable[[int], None] | None,
    ) -> str:
        """Measure batch after batch, and return why it ended."""
        stream: Iterator[Mapping[str, Any]] = iter(batches)
        if record is not None:
            if (done := record.read()) is not None:
                self._place, self._tally, settled = done
                self._source.settled.update(settled)
            stream = record.after(stream, self._place)
        before, begun, look = self._place.seconds, time.perf_counter(), _next_look(len(self._tally))
        while self._place.sequences != stopping.num_sequences and (batch := next(stream, None)) is not None:
            if stopping.num_sequences is not None:
                batch = first_rows(batch, stopping.num_sequences - self._place.sequences)
            self._add(batch)
            self._place = replace(self._place, seconds=before + time.perf_counter() - begun)
            if progress is not None:
                progress(self._place.sequences)
            clusters = len(self._tally)
            if not self._place.positions:
                continue
            if stopping.rtol is not None and clusters >= look:
                look = _next_look(clusters)
                shares = self.shares()
                if shares.stderr <= stopping.rtol * shares.value:
                    return "rtol"
            if stopping.seconds is not None and clusters >= _FIRST_LOOK and self._place.seconds >= stopping.seconds:
                return "seconds"
            if record is not None:
                record.write_sometimes(self._place, self._tally, self._source.settled)
        return "end of the batches" if self._place.sequences != stopping.num_sequences else "num_sequences"

    def _add(self, batch: Mapping[str, Any]) -> None:
        place = self._place
        if not isinstance(batch, Mapping):
            raise IsolossError(
                f"batch {place.batches} is a {type(batch).__name__}, not a mapping of input_ids, labels, ..."
            )
        documents = batch.get("documents")
        if place.batches and place.by_document != (documents is not None):
            raise IsolossError(f"batch {place.batches}: all batches have `documents`, or none has")
        if self._pool is not None and self._pool.by_document != (documents is not None):
            raise IsolossError("both the batches and their pool have `documents`, or neither has")
        given = {name: value for name, value in batch.items() if name != "documents"}
        try:
            read = Batch.read(given, self._model, causal=self._source.causal)
            with plainly(self._model):
                norms = self._source.measure(read, self._first + place.sequences)
            controls = norms.controls
            if self._pool is not None:
                controls = torch.cat([controls, self._pool.features(batch)], dim=1)
        except IsolossError as error:
            raise IsolossError(f"batch {place.batches}: {error}") from error
        if not bool(norms.square_norms.isfinite().all()):
            row, column = (~norms.square_norms.isfinite()).nonzero()[0].tolist()
            raise IsolossError(
                f"batch {place.batches}: the gradient of {self._names[column]} is not finite "
                f"(sequence {row} of the batch); use a wider dtype"
            )
        self._tally.add(norms.square_norms, norms.positions, controls, documents)
        self._place = Place(
            batches=place.batches + 1,
            sequences=place.sequences + len(norms.positions),
            positions=place.positions + int(norms.positions.sum()),
            skipped=place.skipped + (not read.predicts),
            by_document=documents is not None,
            seconds=place.seconds,
        )

    def _gather(self) -> None:
        """Put together what the processes summed."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self._place, self._tally))
        places, tallies = [place for place, _ in found], [tally for _, tally in found]
        self._tally = Tally.merged(tallies)
        self._place = replace(
            self._place,
            batches=sum(place.batches for place in places),
            sequences=sum(place.sequences for place in places),
            positions=sum(place.positions for place in places),
            skipped=sum(place.skipped for place in places),
            seconds=max(place.seconds for place in places),
        )

    def _estimate(self, reason: str) -> Estimate:
        shares, source = self.shares(), self._source
        details = source.details()
        if not bool(shares.by_parameter.any()):  # after a resumption the source has not seen all batches
            refuse_unreached(self._model, self._names, details["parameters_without_gradient"])
        return Estimate(
            value=shares.value,
            stderr=shares.stderr,
            samples=len(self._tally),
            unit=UNIT,
            num_inputs=self._place.positions,
            num_probes=source.num_probes,
            method=source.method,
            seconds=self._place.seconds,
            by_parameter=dict(zip(self._names, shares.by_parameter.tolist(), strict=True)),
            by_parameter_stderr=dict(zip(self._names, shares.by_parameter_stderr.tolist(), strict=True)),
            by_layer=dict(zip(self._layers, shares.by_group.tolist(), strict=True)),
            by_layer_stderr=dict(zip(self._layers, shares.by_group_stderr.tolist(), strict=True)),
            details={
                **described(self._model, list(source.parameters.values()), causal=source.causal),
                "sequences": self._place.sequences,
                "skipped_batches": self._place.skipped,
                "leading_cluster": shares.leading,
                "pool_sequences": 0 if self._pool is None else self._pool.num_sequences,
                "pool_bigrams": any(shares.pool_controls[:1]),
                "pool_directions": sum(shares.pool_controls[1:]),
                "unlike_pool": shares.unlike_pool,
                "clusters": "documents" if self._place.by_document else "sequences",
                "processes": dist.get_world_size() if self._distributed else 1,
                "seed": source.seed,
                "ended": reason,
                "embeddings": self._embeddings,
                "without_embeddings": shares.part,
                "without_embeddings_stderr": shares.part_stderr,
                **details,
            },
        )


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: its name up to the first number, else up to two parts of it.

    Example:
        >>> [layer_of(name) for name in ("bert.encoder.layer.3.output.dense.bias", "bert.embeddings.LayerNorm.bias")]
        ['bert.encoder.layer.3', 'bert.embeddings']
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[: min(2, max(1, len(parts) - 1))])


def described(model: nn.Module, counted: Sequence[nn.Parameter], *, causal: bool) -> dict[str, Any]:
    """Return what the details of every measure say of the model."""
    return {
        "device": str(device_of(model)),
        "dtype": str(counted[0].dtype).removeprefix("torch."),
        "attention": getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None),
        "num_parameters": sum(parameter.numel() for parameter in counted),
        "quantized_weights": quantized_weights(model),
        "predicts": "next token" if causal else "masked tokens",
    }


def _next_look(clusters: int) -> int:
    look = _FIRST_LOOK
    while look <= clusters:
        look *= 2
    return look


def first_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return at most the first `rows` sequences of a batch."""
    return {name: value[:rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
