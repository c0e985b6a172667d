"""The result of a comparison of models: paired differences with errors, and the chance of each to be the flattest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isoloss.errors import IsolossError, warn
from isoloss.statistics.estimate import Estimate, html_table, number, rarity
from isoloss.statistics.paired import paired_difference, paired_log_ratio, probabilities_of_smallest
from isoloss.statistics.tables import probability, text_table

_ROWS = 5  # of a table that is printed


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One of the models.

    Attributes:
        name: What it is called.
        trace: The trace of its Fisher.
        without_embeddings: The part of it that is not the embeddings', see `isoloss.flatness.engine.parameters`.
        loss: Its cross-entropy on the same predicted positions.
        probability_of_smallest: The probability that its trace is the smallest of all.
    """

    name: str
    trace: Estimate
    without_embeddings: Estimate
    loss: Estimate
    probability_of_smallest: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The difference between two models; the errors are of the differences within each cluster.

    Attributes:
        first: A model's name.
        second: The other's.
        trace: The trace of the first minus that of the second.
        without_embeddings: The same of the traces without embeddings.
        loss: The loss of the first minus that of the second.
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """The result of `isoloss.flatness.compare`: it prints as a table.

    Attributes:
        models: The models, in the order in which they were given.
        pairs: Each two of them, in this order.
    """

    models: tuple[Measured, ...]
    pairs: tuple[Pair, ...]

    @property
    def measure(self) -> str:
        """What was measured: `trace` or `minimal trace`."""
        return "minimal trace" if self.models[0].trace.method.startswith("minimal") else "trace"

    @property
    def ranking(self) -> tuple[str, ...]:
        """The models' names, the flattest first."""
        return tuple(model.name for model in sorted(self.models, key=lambda model: model.trace.value))

    @property
    def warning(self) -> str:
        """That one input makes up much of the error of a trace or of a difference of two; empty where none does."""
        traces = {f"the trace of {model.name}": model.trace for model in self.models}
        pairs = {f"the difference of {pair.first} and {pair.second}": pair.trace for pair in self.pairs}
        return rarity({**traces, **pairs})

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

    def __repr__(self) -> str:
        best = min(self.models, key=lambda model: model.trace.value)
        chance = probability(best.probability_of_smallest)
        return f"Comparison({len(self.models)} models; {best.name} is the flattest with probability {chance})"

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [*(text_table(*table) for table in self._tables()), self.warning]))

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        return "".join(html_table(rows, header) for header, rows in self._tables())

    def _tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Return header and rows of the models, flattest first, and of the pairs with the flattest."""
        ranked = sorted(self.models, key=lambda model: model.trace.value)
        unit = self.models[0].trace.unit
        header = ["model", f"{self.measure} ({unit})", f"loss ({unit})", "flattest"]
        rows = [
            [model.name, number(model.trace), number(model.loss), probability(model.probability_of_smallest)]
            for model in ranked[:_ROWS]
        ]
        more = [[f"and {len(ranked) - _ROWS} more", "", "", ""]] if len(ranked) > _ROWS else []
        tables = [(header, rows + more)]
        best, *others = ranked
        if others:
            pairs = [(other, self.pair(other.name, best.name)) for other in others[:_ROWS]]
            rows = []
            for other, pair in pairs:
                sign = 1 if pair.first == other.name else -1
                low, high = sorted(math.exp(sign * math.log(end)) for end in pair.ratio_ci95)
                differences = [number(replace(each, value=sign * each.value)) for each in (pair.trace, pair.loss)]
                rows.append([other.name, *differences, f"{low:.4g} to {high:.4g}"])
            tables.append(([f"minus {best.name}", self.measure, "loss", "ratio of traces, 95 %"], rows))
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {name: [as_json_types(part) for part in getattr(self, name)] for name in ("models", "pairs")}

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


def as_json_types(part: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, its estimates as dictionaries."""
    return {name: value.to_dict() if isinstance(value, Estimate) else value for name, value in vars(part).items()}


def comparison_of(models: Sequence[Measured]) -> Comparison:
    """Return the comparison of models that were measured on the same inputs, their chances to be filled in."""
    chances = probabilities_of_smallest([model.trace for model in models])
    return Comparison(
        models=tuple(
            replace(model, probability_of_smallest=chance) for model, chance in zip(models, chances, strict=True)
        ),
        pairs=tuple(_pair(a, b) for a, b in itertools.combinations(models, 2)),
    )


def warn_unlike(models: Mapping[str, Estimate]) -> None:
    """Warn where traces, by model, are sums over different parameters."""
    (first, one), *others = models.items()
    for name, other in others:
        if _summed(one) != _summed(other):
            warn(
                f"{first} and {name} have different parameters, and a trace is a sum over these, so the values are not "
                "comparable: expand both into one architecture first, as isoloss expand does for BERT, RoBERTa and OPT"
            )
            return


def _summed(trace: Estimate) -> tuple[list[str], int]:
    """Return what tells the parameters that a trace is a sum over from others."""
    return list(trace.by_parameter or ()), trace.details["num_parameters"]


def _pair(a: Measured, b: Measured) -> Pair:
    return Pair(
        first=a.name,
        second=b.name,
        trace=paired_difference(a.trace, b.trace),
        without_embeddings=paired_difference(a.without_embeddings, b.without_embeddings),
        loss=paired_difference(a.loss, b.loss),
        log_ratio=paired_log_ratio(a.trace, b.trace),
    )
