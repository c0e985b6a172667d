"""Evaluations of several models: a table to print, JSON to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

from isoloss.runs import Evaluation
from isoloss.statistics.estimate import Estimate, html_table, rounded
from isoloss.statistics.tables import text_table

HEADER = ("step", "measure", "estimate", "value ± standard error", "inputs")
NUM_TEXT = 4  # columns of text, those of numbers come last


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
        entries = sorted(
            zip(self.models, self.evaluations, strict=True),
            key=lambda entry: (entry[1].measure, entry[0]) if several else (entry[1].step or 0, entry[1].measure),
        )
        rows = [
            (
                evaluation.measure,
                place,
                [
                    *([model] if several else []),
                    "" if evaluation.step is None else str(evaluation.step),
                    evaluation.measure,
                    name,
                    f"{estimate}{_more(estimate)}",
                    f"{estimate.num_inputs:,}",
                ],
            )
            for model, evaluation in entries
            for place, (name, estimate) in enumerate(evaluation.estimates.items())
        ]
        if several:
            rows.sort(key=lambda row: row[:2])
        return [*(["model"] if several else []), *HEADER], [row for *_, row in rows], NUM_TEXT + several

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
