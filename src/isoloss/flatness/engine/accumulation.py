"""A measurement that grows by batches or probes: when it stops, and how it goes on after an interruption."""

from __future__ import annotations

import abc
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.flatness.engine.parameters import quantized_weights
from isoloss.model_checks import device_of, unwrapped
from isoloss.statistics.estimate import Estimate

UNIT = "nats per predicted token"
FIRST_LOOK = 64  # samples, before a measurement may end early because its error is small
_MOST_PROBES = 1024  # where rtol or seconds decides
_EVERY_SECONDS = 30.0  # a resume file is written; less often where writing it takes longer than a second

State = tuple[dict[str, Any], dict[str, torch.Tensor]]  # JSON types, and tensors


class InterruptedEstimate(KeyboardInterrupt):
    """Ctrl-C during a measurement that already has an error bar.

    Attributes:
        partial: The estimate from what was measured so far.
    """

    def __init__(self, partial: Estimate) -> None:
        super().__init__(f"interrupted at {partial}")
        self.partial = partial


F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """What the measures of flatness take besides their own arguments; what is left out is None.

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
        resume: A file to go on from, and to write what has been measured to every half minute and on Ctrl-C. It is
            removed at the end. The result is the same, bit for bit on one device with as many threads. Refused where
            weights, inputs or settings differ.
        progress: Called after each batch with the number of sequences done, or after each probe with that of probes.
    """

    num_sequences: int | None
    rtol: float | None
    seconds: float | None
    causal: bool | None
    parameters: Mapping[str, nn.Parameter] | None
    resume: Path | None
    progress: Callable[[int], None] | None


def takes_options(function: F) -> F:
    """Let the signature of a function with `**options` name them all, and its docstring describe them."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in get_type_hints(Options).items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *further])  # type: ignore[attr-defined]
    described = inspect.getdoc(Options) or ""
    before, head, after = (inspect.getdoc(function) or "").partition("\n    options: ")
    note, gap, rest = after.partition("\n\n")
    function.__doc__ = f"{before}{head}{note}\n{described.partition('Attributes:')[2].strip(chr(10))}{gap}{rest}"
    return function


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """When to stop before the batches end (see `Options`); None: never."""

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
    def of(cls, options: Options) -> Self:
        """Return the limits among a call's options; refuse a call with others."""
        if unknown := sorted(options.keys() - Options.__annotations__):
            raise TypeError(f"unexpected argument {unknown[0]!r}; the options are {', '.join(Options.__annotations__)}")
        return cls(num_sequences=options.get("num_sequences"), rtol=options.get("rtol"), seconds=options.get("seconds"))

    @staticmethod
    def check_resumed(done: int, most: int | None, name: str) -> None:
        """Refuse a resume file that holds more than is wanted."""
        if most is not None and done > most:
            raise IsolossError(f"{name} is {most}, and the resume file holds {done} already: give at least as many")

    def number_of_probes(self, given: int | None, default: int) -> int:
        """Return how many probes to take at most; by default more where the error or the time decides."""
        if given is None:
            return default if self.rtol is None and self.seconds is None else _MOST_PROBES
        if given < 2:
            raise IsolossError(f"num_probes is {given}; an error bar needs at least 2")
        return given


class Accumulation(abc.ABC):
    """What a measurement has summed up, item by item: batches, probes, or the steps of a method."""

    seconds = 0.0  # the time that it has taken
    done = 0  # what `progress` is told: how many sequences, probes or steps
    fewest = 2  # samples before `seconds` may end it

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of independent samples so far."""

    @abc.abstractmethod
    def add(self, item: Any) -> None:
        """Measure an item."""

    @abc.abstractmethod
    def state(self) -> State:
        """Return everything that `load_state` goes on from."""

    @abc.abstractmethod
    def load_state(self, document: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` returned."""

    @property
    def is_whole(self) -> bool:
        """Whether `state` is that after a whole item: an interruption may come while one is added to the sums."""
        return True

    @property
    def has_value(self) -> bool:
        """Whether there is anything to estimate from."""
        return True

    def error(self) -> tuple[float, float]:
        """Return the value and its standard error, for `rtol`."""
        raise NotImplementedError

    def partial(self) -> Estimate | None:
        """Return the estimate that an interruption carries; None where there is none."""
        return None

    def run(
        self,
        items: Iterable[Any],
        stopping: Stopping,
        *,
        file: ResumeFile | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> str | None:
        """Add items until they end, or `stopping` says so; return which limit it was, None where the items ended."""
        before, begun, look = self.seconds, time.perf_counter(), _next_look(len(self))
        try:
            for item in items:
                self.add(item)
                self.seconds = before + time.perf_counter() - begun
                if file is not None:
                    file.mark()
                if progress is not None:
                    progress(self.done)
                if not self.has_value:
                    continue
                if stopping.rtol is not None and len(self) >= look:
                    value, stderr = self.error()
                    if stderr <= stopping.rtol * abs(value):
                        return "rtol"
                    look = _next_look(len(self))
                if stopping.seconds is not None and len(self) >= self.fewest and self.seconds >= stopping.seconds:
                    return "seconds"
                if file is not None:
                    file.write_sometimes(self.state)
        except KeyboardInterrupt as interruption:
            # what goes on from a state takes the looks that lie ahead of it, and would miss one that is due
            is_due = stopping.rtol is not None and len(self) >= look
            if file is not None and self.is_whole and not is_due:
                file.write(self.state)
            if (partial := self.partial()) is None:
                raise
            raise InterruptedEstimate(partial) from interruption
        return None


class Probes(Accumulation):
    """A measurement by independent random probes, each of which sees all inputs."""

    def __init__(self, measure: Callable[[int], torch.Tensor], estimate: Callable[[torch.Tensor], Estimate]) -> None:
        self._measure, self._estimate = measure, estimate
        self._rows: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def values(self) -> torch.Tensor:
        """(R, ...) what the probes gave."""
        return torch.stack(self._rows)

    def add(self, item: int) -> None:
        """Take the probe of this number."""
        self._rows.append(self._measure(item))
        self.done = len(self._rows)

    def error(self) -> tuple[float, float]:
        """Return the value and its standard error."""
        estimate = self._estimate(self.values)
        return estimate.value, estimate.stderr

    def partial(self) -> Estimate | None:
        """Return the estimate so far."""
        return self._estimate(self.values) if len(self) >= 2 else None

    def state(self) -> State:
        """Return what the probes gave."""
        return {"seconds": self.seconds}, {"values": self.values}

    def load_state(self, document: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from the probes that were taken."""
        self.seconds, self._rows = document["seconds"], list(tensors["values"])

    def items(self, number: int) -> Iterable[int]:
        """Return what `add` is given until there are `number` probes."""
        return range(len(self), number)

    def take(
        self,
        number: int,
        stopping: Stopping,
        *,
        file: ResumeFile | None,
        progress: Callable[[int], None] | None,
    ) -> str:
        """Take up to `number` probes, and return what ended it."""
        if file is not None and (state := file.read()) is not None:
            self.load_state(*state)
            stopping.check_resumed(len(self), number, "num_probes")
        reason = self.run(self.items(number), stopping, file=file, progress=progress) or "num_probes"
        if file is not None:
            file.remove()
        return reason


def model_details(model: nn.Module, counted: Sequence[nn.Parameter], *, causal: bool) -> dict[str, Any]:
    """Return what the details of every measure say of the model."""
    return {
        "device": str(device_of(model)),
        "dtype": str(counted[0].dtype).removeprefix("torch."),
        "attention": getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None),
        "num_parameters": sum(parameter.numel() for parameter in counted),
        "quantized_weights": quantized_weights(model),
        "predicts": "next token" if causal else "masked tokens",
    }


def _next_look(samples: int) -> int:
    look = FIRST_LOOK
    while look <= samples:
        look *= 2
    return look


# --- the file that a measurement goes on from: what has been summed, and of what, whole or absent at any moment ------


class ResumeFile:
    """A measurement's file."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        identity: Mapping[str, Any],
        inputs: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._path = path
        self._inputs = hashlib.sha256()  # of all batches so far
        for batch in inputs:
            self._add_inputs(batch)
        self._identity = {**identity, "weights": weights_digest(model), "inputs": self._inputs.hexdigest()}
        self._expected = ""
        self._read = ""  # the digest of the inputs that are in the sums; empty: none was added here
        self._written, self._pause = time.perf_counter(), _EVERY_SECONDS

    def read(self) -> State | None:
        """Return what the file holds, or None where there is none."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as opened:
                text, recorded = (opened.metadata()[name] for name in ("measurement", "sha256"))
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            header = json.loads(text)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise IsolossError(f"{self._path} is not the resume file of a measurement: {error}") from error
        if recorded != _checksum(text, tensors):
            raise IsolossError(f"{self._path} is damaged: its content does not match its checksum; remove it")
        theirs = header["identity"]
        if other := [key for key in self._identity if self._identity[key] != theirs.get(key)]:
            what = ", ".join(other)
            raise IsolossError(
                f"{self._path} is the resume file of another measurement: it differs in {what}; remove it"
            )
        self._expected = header["read"]
        return header["state"], tensors

    def after(
        self, stream: Iterable[Mapping[str, Any]], number: int, skipped: Callable[[Mapping[str, Any]], Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the batches that follow the first `number`, and keep account of all; `skipped` is told of these."""
        for count, batch in enumerate(stream, start=1):
            self._add_inputs(batch)
            if count <= number:
                skipped(batch)
            if count == number and self._inputs.hexdigest() != self._expected:
                raise IsolossError(f"{self._path} is the resume file of a measurement on other inputs; remove it")
            if count > number:
                yield batch

    def mark(self) -> None:
        """Note that what was read up to now is in the sums."""
        self._read = self._inputs.hexdigest()

    def write_sometimes(self, state: Callable[[], State]) -> None:
        """Write the file if the last time was long ago."""
        if time.perf_counter() - self._written >= self._pause:
            self.write(state)

    def write(self, state: Callable[[], State]) -> None:
        """Write the file, in one step, if there is anything new."""
        if not self._read:
            return
        begun = time.perf_counter()
        document, tensors = state()
        header = json.dumps({"identity": self._identity, "read": self._read, "state": document})
        metadata = {"measurement": header, "sha256": _checksum(header, tensors)}
        files.write_bytes(self._path, save(tensors, metadata=metadata))
        self._written = time.perf_counter()
        self._pause = _EVERY_SECONDS * max(1.0, self._written - begun)

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        self._path.unlink(missing_ok=True)

    def _add_inputs(self, batch: Mapping[str, Any]) -> None:
        for name in sorted(batch):
            value = batch[name]
            data = value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            self._inputs.update(name.encode() + data)


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of all that decides where a measurement goes on: safetensors has none of its own."""
    return hashlib.sha256((header + files.tensors_sha256(sorted(tensors.items()))).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters, by name."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def resume_file(
    path: Path | None,
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    identity: Mapping[str, Any],
    inputs: Iterable[Mapping[str, Any]] = (),
) -> ResumeFile | None:
    """Return the file to go on from, where there is to be one."""
    if path is None:
        return None
    return ResumeFile(path, model, {**identity, "parameters": list(parameters)}, inputs)
