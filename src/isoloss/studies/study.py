"""A study as the command line sees it: what it plans, and what it says when that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isoloss import files
from isoloss.report.claims import Answer, ClaimResult, Verdict
from isoloss.statistics.estimate import Estimate, rounded
from isoloss.studies import design as designs
from isoloss.studies.design import Design
from isoloss.studies.plan import Unit

_COLUMNS = {"kl": "KL (nats/token)", "trace": "trace (nats/token)"}


class Scale(Protocol):
    """How large a study is; each study has its own kind."""

    @property
    def text(self) -> str:
        """What it is for and how long it takes."""


@dataclass(frozen=True)
class SummaryTable:
    """Rows of estimates.

    Attributes:
        name: Its key in JSON, a plural word.
        title: What is printed above it.
        labels: What names a row, e.g. run and step.
        rows: For each row its labels and its estimates, the same names in all.
        unit: Of the tasks, whose columns are not `kl` or `trace`.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    rows: Sequence[tuple[tuple[str | int, ...], Mapping[str, Estimate]]]
    unit: str = "accuracy, %"

    @property
    def left(self) -> int:
        """How many of the first columns are text, not numbers."""
        return sum(isinstance(label, str) for label in self.rows[0][0])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows as text."""
        names = list(self.rows[0][1])
        columns = [*self.labels, *(_COLUMNS.get(name, f"{name} ({self.unit})") for name in names)]
        return columns, [[*map(_label, labels), *(cell(found[name]) for name in names)] for labels, found in self.rows]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON types."""
        return [
            {**dict(zip(self.labels, labels, strict=True)), "estimates": {n: _bare(e) for n, e in found.items()}}
            for labels, found in self.rows
        ]


@dataclass(frozen=True)
class Summary:
    """What a study found.

    Attributes:
        tables: Tables of estimates.
        results: How each claim fared.
    """

    tables: tuple[SummaryTable, ...]
    results: Sequence[ClaimResult]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        claims = [
            {
                "claim": result.claim.id,
                "verdict": result.verdict,
                "answers": [
                    {
                        "case": answer.case,
                        "verdict": answer.verdict.value,
                        "difference": None if answer.difference is None else _bare(answer.difference),
                        "found": "; ".join(found(answer)),
                    }
                    for answer in result.answers
                ],
            }
            for result in self.results
        ]
        return {**{table.name: table.to_dict() for table in self.tables}, "claims": claims}


def cell(estimate: Estimate) -> str:
    """Return value ± standard error without the unit; an accuracy in percent."""
    scale = 100 if estimate.unit == "accuracy" else 1
    return rounded(scale * estimate.value, scale * estimate.stderr)


def found(answer: Answer) -> list[str]:
    """Return the numbers of an answer, one a line, or why there are none."""
    if answer.verdict is Verdict.NOT_TESTED:
        return [answer.explanation]
    return [f"{name}: {text}" if name else text for name, text in answer.lines]


def _label(label: str | int) -> str:
    return f"{label:,}" if isinstance(label, int) else label


def _bare(estimate: Estimate) -> dict[str, Any]:
    """The estimate without its shares by parameter and layer."""
    shares = ("by_parameter", "by_parameter_stderr", "by_layer", "by_layer_stderr")
    return {**estimate.to_dict(), **dict.fromkeys(shares)}


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study.

    Attributes:
        name: What the command line calls it.
        scales: Its scales by name.
        design: The design at a scale of this name.
        write_page: Writes report/index.html of the finished study in a folder at a scale.
        summarise: Says what the finished study in a folder at a scale found.
    """

    name: str
    scales: Mapping[str, Scale]
    design: Callable[[str], Design]
    write_page: Callable[[Path, str], Path]
    summarise: Callable[[Path, str], Summary]

    def check_scale(self, scale: str) -> None:
        """Refuse a scale that the study does not have, with an error that lists those it has."""
        designs.choose(self.scales, scale, study=self.name)

    def holds(self, folder: Path, scale: str) -> bool:
        """Return whether `folder` holds this study, or refuse what else it holds."""
        return designs.holds(folder, self.design(scale))

    def prepare(self, folder: Path, scale: str) -> None:
        """Write the plan's files into `folder`, or check that it was made by the same plan."""
        designs.prepare(folder, self.design(scale))

    def plan(self, folder: Path, scale: str) -> list[Unit]:
        """Return the units of work."""
        return designs.plan(folder, self.design(scale))

    def report(self, folder: Path, scale: str, *, force: bool = False) -> Path:
        """Write the report of the finished study in `folder`, unless it is there for the same results.

        Returns:
            The page.
        """
        page = folder / "report" / "index.html"
        stamp = folder / "report" / "made-from.sha256"
        made_from = designs.digest(folder, self.design(scale))
        if not force and page.is_file() and stamp.is_file() and stamp.read_text() == made_from:
            return page
        self.write_page(folder, scale)
        files.write_text(stamp, made_from)
        return page

    def verify(self, folder: Path, scale: str) -> Iterator[tuple[str, str | None]]:
        """Check every file against what it was made from."""
        return designs.verify(folder, self.design(scale))

    def summary(self, folder: Path, scale: str) -> Summary:
        """Return what the finished study in `folder` found."""
        return self.summarise(folder, scale)
