"""The result of a comparison of models: paired differences with errors, and the chance of each to be the flattest."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isoloss.errors import IsolossError, warn
from isoloss.flatness.verdict import Verdict, unlike, verdict
from isoloss.statistics.equivalence import SAME_LOSS_NATS
from isoloss.statistics.estimate import Estimate, html_table, interval, number, rarity, samples_of
from isoloss.statistics.paired import paired_difference, paired_log_ratio, probabilities_of_smallest
from isoloss.statistics.tables import probability, text_table


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One of the models.

    Attributes:
        name: What it is called.
        trace: The trace of its Fisher; in the comparison of the minimal traces, the minimal one.
        without_embeddings: The part of it that is not the embeddings', see `isoloss.flatness._parameters`.
        loss: Its cross-entropy on the same predicted positions.
        weights: The SHA-256 of its parameters, which identifies copies.
        architecture: The SHA-256 of its layers, their shapes and its activations; empty: not known.
        probability_of_smallest: The probability that its trace is the smallest of all.
    """

    name: str
    trace: Estimate
    without_embeddings: Estimate
    loss: Estimate
    weights: str
    architecture: str = ""
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

    def turned(self, first: str) -> Pair:
        """Return the same pair with the model called `first` as its first."""
        if first == self.first:
            return self
        names = ("trace", "without_embeddings", "loss", "log_ratio")
        negative: dict[str, Any] = {}
        for name in names:
            estimate = getattr(self, name)
            influence = None if estimate.influence is None else -estimate.influence
            negative[name] = replace(estimate, value=-estimate.value, influence=influence)
        return Pair(first=self.second, second=self.first, **negative)


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """The result of `isoloss.flatness.compare`: it prints as tables with a verdict.

    Attributes:
        models: The models, in the order in which they were given.
        pairs: Each two of them, in this order.
        minimal: The same of the minimal traces, from the same passes; None where they were not measured.
        no_minimal: Why they were not, though they were asked for.
    """

    models: tuple[Measured, ...]
    pairs: tuple[Pair, ...]
    minimal: Comparison | None = None
    no_minimal: str = ""

    @property
    def ranking(self) -> tuple[str, ...]:
        """The models' names, the smallest trace first."""
        return tuple(model.name for model in sorted(self.models, key=lambda model: model.trace.value))

    @property
    def warning(self) -> str:
        """That one input makes up much of the error of a trace or of a difference of two; empty where none does."""
        estimates: dict[str, Estimate] = {}
        for measure, comparison in self.by_measure.items():
            estimates |= {f"the {measure} of {model.name}": model.trace for model in comparison.models}
            pairs = {f"{pair.first} and {pair.second}": pair.trace for pair in comparison.pairs}
            estimates |= {f"the difference in {measure} of {names}": trace for names, trace in pairs.items()}
        return rarity(estimates)

    @property
    def by_measure(self) -> dict[str, Comparison]:
        """The comparison of the traces, and that of the minimal traces, by what was measured."""
        return {"trace": self} | ({} if self.minimal is None else {"minimal trace": self.minimal})

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

    def verdict(self, *, same_loss: float = SAME_LOSS_NATS) -> Verdict:
        """Return which model is the flattest, or why that cannot be said (`isoloss.flatness.verdict`).

        Args:
            same_loss: Margin in nats per predicted token within which two losses count as the same.
        """
        return verdict(self, same_loss=same_loss)

    def __repr__(self) -> str:
        return f"Comparison({len(self.models)} models; flattest: {self.verdict().flattest or 'no verdict'})"

    def __str__(self) -> str:
        tables = [text_table(header, rows, left=left) for header, rows, left in self.tables()]
        over = f"{self.models[0].trace.unit}; ± is the standard error over {samples_of(self.models[0].trace)}"
        verdict = str(self.verdict()) if self.pairs else ""
        return "\n\n".join(filter(None, [*tables, over, self.warning, verdict]))

    def _repr_html_(self) -> str:
        """Return the tables and the verdict for a notebook."""
        tables = "".join(html_table(rows, header) for header, rows, _ in self.tables())
        return f"{tables}<p>{html.escape(str(self.verdict()))}</p>" if self.pairs else tables

    def tables(self, names: Mapping[str, str] | None = None) -> list[tuple[list[str], list[list[str]], int]]:
        """Return the table of the models and that of the differences: header, rows, and how many columns are text.

        Args:
            names: What the models are called there; None: their names.
        """
        names = names or {model.name: model.name for model in self.models}
        split = any(model.trace.details["embeddings"] for model in self.models)
        chances = [
            {model.name: probability(model.probability_of_smallest) for model in comparison.models}
            for comparison in self.by_measure.values()
        ]
        rows = []
        for name in self.ranking:
            model = self._model(name)
            row = [names[name], f"{model.trace.details['num_parameters']:,}", number(model.loss), number(model.trace)]
            row += [number(model.without_embeddings)] * split
            row += [] if self.minimal is None else [number(self.minimal._model(name).trace)]
            rows.append([*row, *(each[name] for each in chances)])
        header = ["model", "parameters", "loss", "trace", *["without embeddings"] * split]
        header += [] if self.minimal is None else ["minimal trace"]
        models = header + [f"P(smallest {measure})" for measure in self.by_measure], rows, 1
        if not self.pairs:
            return [models]
        best, *others = self.ranking
        rows = []
        for name in others:
            pair = self.pair(name, best).turned(name)
            lines = [("loss", pair.loss, None), ("trace", pair.trace, pair)]
            lines += [("without embeddings", pair.without_embeddings, None)] * split
            if self.minimal is not None:
                least = self.minimal.pair(name, best).turned(name)
                lines.append(("minimal trace", least.trace, least))
            for place, (label, difference, ratio) in enumerate(lines):
                ends = "" if ratio is None else "{:#.4g} to {:#.4g}".format(*ratio.ratio_ci95)
                of = "" if ratio is None else f"{ratio.ratio:#.4g}"
                title = f"{names[name]} minus {names[best]}" if place == 0 else ""
                rows.append([title, label, number(difference), interval(difference), of, ends])
        return [models, (["", "paired by input", "difference", "95 % interval", "ratio", "95 % interval"], rows, 2)]

    def _model(self, name: str) -> Measured:
        return next(model for model in self.models if model.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        parts = {name: [as_json_types(part) for part in getattr(self, name)] for name in ("models", "pairs")}
        minimal = None if self.minimal is None else self.minimal.to_dict()
        return {**parts, "minimal": minimal, "no_minimal": self.no_minimal}

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
            minimal=None if document["minimal"] is None else cls.from_dict(document["minimal"]),
            no_minimal=document["no_minimal"],
        )


def as_json_types(part: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, its estimates as dictionaries."""
    return {name: value.to_dict() if isinstance(value, Estimate) else value for name, value in vars(part).items()}


def comparison_of(
    models: Sequence[Measured], minimal: Sequence[Measured] | None = None, no_minimal: str = ""
) -> Comparison:
    """Return the comparison of models that were measured on the same inputs, their chances to be filled in.

    Args:
        models: With their traces.
        minimal: The same models with their minimal traces, if these were measured.
        no_minimal: Why they were not.
    """
    chances = probabilities_of_smallest([model.trace for model in models])
    return Comparison(
        models=tuple(
            replace(model, probability_of_smallest=chance) for model, chance in zip(models, chances, strict=True)
        ),
        pairs=tuple(_pair(a, b) for a, b in itertools.combinations(models, 2)),
        minimal=None if minimal is None else comparison_of(minimal),
        no_minimal=no_minimal,
    )


def warn_unlike(models: Mapping[str, Estimate]) -> None:
    """Warn where traces, by model, are sums over different parameters."""
    if (two := unlike(models)) is not None:
        warn(
            f"{two[0]} and {two[1]} have different parameters, and a trace is a sum over them, so the values are not "
            "comparable: expand both into one architecture first, as isoloss expand does for BERT, RoBERTa and OPT"
        )


def _pair(a: Measured, b: Measured) -> Pair:
    return Pair(
        first=a.name,
        second=b.name,
        trace=paired_difference(a.trace, b.trace),
        without_embeddings=paired_difference(a.without_embeddings, b.without_embeddings),
        loss=paired_difference(a.loss, b.loss),
        log_ratio=paired_log_ratio(a.trace, b.trace),
    )
