"""What a comparison of models found: paired differences with errors, and the chance of each to be the flattest.

Shapes: N clusters, r means of a pool, L models.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine.run import UNIT
from isoloss.statistics.estimate import Estimate

_DRAWS = 200_000  # for the probability of being the flattest, which is then within 0.003
_TIE = 1e-9  # of a trace: differences below it are rounding


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One of the models.

    Attributes:
        name: What it is called.
        trace: The trace of its Fisher.
        without_embeddings: The part of it that is not the embeddings', see `isoloss.flatness.engine.parameters`.
        loss: Its cross-entropy on the same predicted positions.
        flattest: The probability that its trace is the smallest of all.
    """

    name: str
    trace: Estimate
    without_embeddings: Estimate
    loss: Estimate
    flattest: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The difference between two models; the errors are of the differences within each cluster.

    Attributes:
        first: A model's name.
        second: The other's.
        trace: The trace of the first less that of the second.
        without_embeddings: The same of the traces without embeddings.
        loss: The loss of the first less that of the second.
        log_ratio: The logarithm of the ratio of the traces, first to second.
    """

    first: str
    second: str
    trace: Estimate
    without_embeddings: Estimate
    loss: Estimate
    log_ratio: Estimate

    @property
    def ratio(self) -> float:
        """The trace of the first over that of the second."""
        return math.exp(self.log_ratio.value)

    @property
    def ratio_ci95(self) -> tuple[float, float]:
        """Its 95 % confidence interval, that of the logarithm carried over."""
        low, high = self.log_ratio.ci95
        return math.exp(low), math.exp(high)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found.

    Attributes:
        models: The models, in the order in which they were given.
        pairs: Each two of them, in this order.
    """

    models: tuple[Measured, ...]
    pairs: tuple[Pair, ...]

    @property
    def ranking(self) -> tuple[str, ...]:
        """The models' names, the flattest first."""
        return tuple(model.name for model in sorted(self.models, key=lambda model: model.trace.value))

    def pair(self, first: str, second: str) -> Pair:
        """Return the pair of these two models, in this order or the other.

        Raises:
            IsolossError: There is none.
        """
        for pair in self.pairs:
            if {pair.first, pair.second} == {first, second}:
                return pair
        names = ", ".join(model.name for model in self.models)
        raise IsolossError(f"there is no pair of {first} and {second}; the models are {names}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        document = dataclasses.asdict(self)
        return {name: list(parts) for name, parts in document.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `to_dict` wrote."""

        def part(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: Estimate.from_dict(value) if isinstance(value, Mapping) else value
                for name, value in fields.items()
            }

        return cls(
            models=tuple(Measured(**part(fields)) for fields in document["models"]),
            pairs=tuple(Pair(**part(fields)) for fields in document["pairs"]),
        )


@dataclass(frozen=True)
class Influence:
    """A model's estimates, and what each of N clusters adds to their errors: (N,) on the loss.

    On the trace, and on that without embeddings, it is (N + r,), with each of the r means of a pool, which are the
    same for all models; `pool_controls` (r,) says which of these were used.
    """

    name: str
    trace: Estimate
    without_embeddings: Estimate
    loss: Estimate
    on_trace: torch.Tensor
    on_without_embeddings: torch.Tensor
    on_loss: torch.Tensor
    pool_controls: tuple[bool, ...]


def compared(done: list[Influence]) -> Comparison:
    """Return the comparison of models that were measured on the same inputs."""
    chances = _flattest(
        [one.trace.value for one in done], torch.stack([one.on_trace for one in done]), done[0].trace.samples
    )
    return Comparison(
        models=tuple(
            Measured(
                name=one.name,
                trace=one.trace,
                without_embeddings=one.without_embeddings,
                loss=one.loss,
                flattest=chance,
            )
            for one, chance in zip(done, chances, strict=True)
        ),
        pairs=tuple(_pair(a, b) for a, b in itertools.combinations(done, 2)),
    )


def _pair(a: Influence, b: Influence) -> Pair:
    log_ratio = math.log(a.trace.value) - math.log(b.trace.value)
    of_logs = a.on_trace / a.trace.value - b.on_trace / b.trace.value
    rest, on_rest = (
        a.without_embeddings.value - b.without_embeddings.value,
        a.on_without_embeddings - b.on_without_embeddings,
    )
    return Pair(
        first=a.name,
        second=b.name,
        without_embeddings=_paired(rest, on_rest, a.trace, UNIT),
        trace=_paired(a.trace.value - b.trace.value, a.on_trace - b.on_trace, a.trace, UNIT),
        loss=_paired(a.loss.value - b.loss.value, a.on_loss - b.on_loss, a.loss, UNIT),
        log_ratio=_paired(log_ratio, of_logs, a.trace, "logarithm of a ratio"),
    )


def _paired(value: float, influence: torch.Tensor, like: Estimate, unit: str) -> Estimate:
    n = like.samples
    return Estimate(
        value=value,
        stderr=math.sqrt(float(influence.square().sum()) / (n * (n - 1))),
        samples=n,
        unit=unit,
        num_inputs=like.num_inputs,
        num_probes=like.num_probes,
        method="paired difference",
    )


def _flattest(values: list[float], influences: torch.Tensor, n: int) -> list[float]:
    """Return for each of L models the probability that its trace is the smallest, given influences on n clusters."""
    number = len(values)
    if number == 1:
        return [1.0]
    if number == 2:
        difference = values[1] - values[0]
        deviation = math.sqrt(float((influences[0] - influences[1]).square().sum()) / (n * (n - 1)))
        if deviation == 0:
            first = 0.5 + 0.5 * ((difference > 0) - (difference < 0))
        else:
            first = 0.5 * math.erfc(-difference / deviation / math.sqrt(2))
        return [first, 1 - first]
    root = torch.linalg.qr(influences.T / math.sqrt(n * (n - 1)), mode="r").R  # R^T R is the covariance
    normals = torch.randn(_DRAWS, len(root), generator=seeds.generator(0, "flattest"), dtype=torch.float64)
    drawn = torch.tensor(values, dtype=torch.float64) + normals @ root
    least = drawn.min(dim=1, keepdim=True).values
    smallest = (drawn <= least + _TIE * least.abs()).double()  # models that are the same share the place
    chances: list[float] = (smallest / smallest.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
    return chances
