"""A measurement that grows by batches or probes: when it stops, and how it goes on after an interruption."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.parameters import quantized_weights
from isoloss.flatness.engine.resume import ResumeFile, State
from isoloss.model_checks import device_of, unwrapped
from isoloss.statistics.estimate import Estimate

UNIT = "nats per predicted token"
FIRST_LOOK = 64  # samples, before a measurement may end early because its error is small
_MOST_PROBES = 1024  # where rtol or seconds decides


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
            raise IsolossError(f"rtol is {self.rtol}; it is a fraction of the value, between 0 and 1")
        if self.seconds is not None and not self.seconds > 0:
            raise IsolossError(f"seconds is {self.seconds}; it must be more than 0")

    def number_of_probes(self, given: int | None, default: int) -> int:
        """Return how many probes to take at most; by default more where the error or the time decides."""
        if given is None:
            return default if self.rtol is None and self.seconds is None else _MOST_PROBES
        if given < 2:
            raise IsolossError(f"num_probes is {given}; an error bar needs at least 2")
        return given


class Accumulation(abc.ABC):
    """What a measurement has summed up, item by item: batches, probes, or the steps of a method.

    Attributes:
        seconds: The time that it has taken.
        done: What `progress` is told: how many sequences, probes or steps.
        fewest: Samples before `seconds` may end it.
    """

    seconds = 0.0
    done = 0
    fewest = 2

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
                if progress is not None:
                    progress(self.done)
                if not self.has_value:
                    continue
                if stopping.rtol is not None and len(self) >= look:
                    look = _next_look(len(self))
                    value, stderr = self.error()
                    if stderr <= stopping.rtol * abs(value):
                        return "rtol"
                if stopping.seconds is not None and len(self) >= self.fewest and self.seconds >= stopping.seconds:
                    return "seconds"
                if file is not None:
                    file.write_sometimes(self.state)
        except KeyboardInterrupt as interruption:
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
        reason = self.run(range(len(self), number), stopping, file=file, progress=progress) or "num_probes"
        if file is not None:
            file.remove()
        return reason


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
