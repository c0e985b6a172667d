"""Evaluations of several models: a table to print, JSON to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

from isoloss.runs import Evaluation
from isoloss.statistics.estimate import Estimate, html_table, rounded, samples_of
from isoloss.statistics.tables import text_table

HEADER = ("measure", "estimate", "value ± standard error", "averaged over", "error over")


@dataclass(frozen=True)
class Evaluations(Sequence[Evaluation]):
    """Evaluations with the models that they are of; printing it gives a table."""

    models: tuple[str, ...]  # what the model of each evaluation is called
    evaluations: tuple[Evaluation, ...]  # the evaluations

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Evaluation]]) -> Self:
        """Return evaluations that come with the names of their models."""
        known = list(entries)
        return cls(tuple(model for model, _ in known), tuple(evaluation for _, evaluation in known))

    @overload
    def __getitem__(self, index: int) -> Evaluation: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Evaluation]: ...

    def __getitem__(self, index: int | slice) -> Evaluation | Sequence[Evaluation]:
        return self.evaluations[index]

    def __len__(self) -> int:
        return len(self.evaluations)

    def table(self) -> tuple[list[str], list[list[str]], int]:
        """Return the columns and rows of a table, and how many columns are text; several models stand side by side.

        Rows of one measure and estimate follow each other, so that models are easily compared.
        """
        several = len(set(self.models)) > 1
        steps = any(evaluation.step is not None for evaluation in self.evaluations)
        # measures in the order in which they were asked for
        order = {name: place for place, name in enumerate(dict.fromkeys(each.measure for each in self.evaluations))}
        entries = sorted(
            zip(self.models, self.evaluations, strict=True),
            key=lambda entry: (
                (order[entry[1].measure], entry[0]) if several else (entry[1].step or 0, order[entry[1].measure])
            ),
        )
        rows = [
            (
                order[evaluation.measure],
                place,
                [
                    *([model] if several else []),
                    *(["" if evaluation.step is None else str(evaluation.step)] if steps else []),
                    evaluation.measure,
                    name,
                    f"{estimate}{_more(estimate)}",
                    _averaged_over(estimate),
                    samples_of(estimate),
                ],
            )
            for model, evaluation in entries
            for place, (name, estimate) in enumerate(evaluation.estimates.items())
        ]
        if several:
            rows.sort(key=lambda row: row[:2])
        columns = [*(["model"] if several else []), *(["step"] if steps else []), *HEADER]
        return columns, [row for *_, row in rows], len(columns) - 2

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the evaluations as JSON types, each with its `model`."""
        return [
            {"model": model, **evaluation.to_dict()}
            for model, evaluation in zip(self.models, self.evaluations, strict=True)
        ]

    def __str__(self) -> str:
        header, rows, left = self.table()
        return text_table(header, rows, left=left)

    def __repr__(self) -> str:
        measures = ", ".join(dict.fromkeys(evaluation.measure for evaluation in self))
        return f"Evaluations({len(self)} of {', '.join(dict.fromkeys(self.models))}: {measures})"

    def _repr_html_(self) -> str:
        header, rows, _ = self.table()
        return html_table(rows, header)


def _averaged_over(estimate: Estimate) -> str:
    """Return how many predictions an estimate is a mean over; nothing for what needs no inputs."""
    kind = "examples" if estimate.unit == "accuracy" else "predicted tokens"
    return f"{estimate.num_predictions:,} {kind}" if estimate.num_predictions else ""


def _more(estimate: Estimate) -> str:
    """Return what belongs beside an accuracy or a trace."""
    details: Mapping[str, Any] = estimate.details
    if "majority_rate" in details:
        return f" ({bounds(details)})"
    if details.get("embeddings"):
        rest = rounded(details["without_embeddings"], details["without_embeddings_stderr"])
        return f" ({rest} without embeddings)"
    return ""


def bounds(details: Mapping[str, Any]) -> str:
    """Return, of the details of an accuracy, the commonest class's and the highest, in words."""
    text = f"majority class {100 * details['majority_rate']:.2f} %"
    if "bayes_accuracy" in details:
        text += f", Bayes {rounded(100 * details['bayes_accuracy'], 100 * details['bayes_stderr'])} %"
    return text
