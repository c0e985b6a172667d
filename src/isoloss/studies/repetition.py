"""Comparison of a study with its repetition on other seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.statistics.comparison import independent_difference
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import holm, p_value
from isoloss.studies.claims import Verdict
from isoloss.studies.reading import PROVENANCE, SUMMARY
from isoloss.studies.results import OVER_SEEDS
from isoloss.studies.summary import tables_in

NUMBERS = ("value", "stderr", "samples", "unit")  # what is read of an estimate


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One number in both exports: a claim's difference, or an entry of a table.

    Attributes:
        name: Claim and case, or table, row and estimate.
        first: In the first export; None where it was not tested there.
        second: The same in the second.
        difference: The second minus the first; None where either is None.
        p_holm: Its p-value against 0 by Holm's method over all differences.
        verdicts: The verdicts of the first and the second; None for an estimate of a table.
    """

    name: tuple[str, ...]
    first: Estimate | None
    second: Estimate | None
    difference: Estimate | None = None
    p_holm: float | None = None
    verdicts: tuple[str, str] | None = None

    @property
    def agree(self) -> bool | None:
        """Whether the two verdicts are the same; None where there are none."""
        return None if self.verdicts is None else self.verdicts[0] == self.verdicts[1]

    @property
    def is_outside(self) -> bool:
        """Whether the 95 % interval of the difference excludes 0."""
        if self.difference is None:
            return False
        low, high = self.difference.ci95
        return not low <= 0 <= high

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types; degrees of freedom are null where both numbers are exact."""
        d = self.difference
        return {
            "name": list(self.name),
            "first": _bare(self.first),
            "second": _bare(self.second),
            "difference": d
            and {
                "value": d.value,
                "stderr": d.stderr,
                "unit": d.unit,
                "freedom": d.freedom if d.stderr > 0 else None,
                "ci95": list(d.ci95),
                "p": p_value(d),
                "p_holm": self.p_holm,
            },
            "verdicts": self.verdicts and list(self.verdicts),
            "agree": self.agree,
        }


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Two exports of one study, number by number.

    Attributes:
        study: The study.
        scale: Its scale.
        seed_offsets: Of the first and of the second.
        numbers: Claims in the order of their file, then the estimates of tables.
    """

    study: str
    scale: str
    seed_offsets: tuple[int, int]
    numbers: tuple[Repeated, ...]

    @property
    def conclusion(self) -> str:
        """Which verdicts do not agree, and how many 95 % intervals of differences exclude 0."""
        judged = [each for each in self.numbers if each.verdicts is not None]
        apart = [f"{', '.join(each.name)} ({' / '.join(each.verdicts or ())})" for each in judged if not each.agree]
        but = f", all but {'; '.join(apart)}" if apart else ""
        outside = [each.is_outside for each in self.numbers if each.difference is not None]
        return (
            f"{len(judged) - len(apart)} of {len(judged)} verdicts agree{but}. The 95 % interval of {sum(outside)} of "
            f"{len(outside)} differences excludes 0 (expected: 5 %)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        return {
            **{"study": self.study, "scale": self.scale, "seed_offsets": list(self.seed_offsets)},
            "numbers": [each.to_dict() for each in self.numbers],
            "conclusion": self.conclusion,
        }


def compare(first: Path, second: Path) -> Repetition:
    """Compare two exports of one study and scale that differ in their seeds.

    It compares the difference behind the verdict of each claim and case, and each table entry that both have in a row
    of the same labels and whose error is over seeds or clusters. A claim that was tested in neither is left out.

    Raises:
        IsolossError: A folder is no export, or the two are of different studies, scales or claims, or of the same
            seeds.
    """
    ours, theirs = (_provenance(path) for path in (first, second))
    for key, what in (("study", "studies"), ("scale", "scales")):
        if ours.get(key) != theirs.get(key):
            raise IsolossError(
                f"{first} and {second} are results of different {what}: {ours[key]} and {theirs[key]}, which cannot be "
                "compared"
            )
    if ours.get("claims_sha256") != theirs.get("claims_sha256"):
        raise IsolossError(f"{first} and {second} are results of different claims, which cannot be compared")
    if ours["seed_offset"] == theirs["seed_offset"]:
        raise IsolossError(
            f"{first} and {second} both have the seed offset {ours['seed_offset']}: a repetition needs a different one"
        )
    # two exports with a common run are not independent, as the error of the difference assumes
    if shared := ours["runs"].items() & theirs["runs"].items():
        name = min(shared)[0]
        raise IsolossError(f"{first} and {second} have the same run {name}: a repetition needs runs of its own")
    a, b = (files.read_json(path / SUMMARY) for path in (first, second))
    numbers = [*_claims(a, b), *_cells(a, b)]
    different = [
        None if each.first is None or each.second is None else independent_difference(each.second, each.first)
        for each in numbers
    ]
    by_place = {str(i): p_value(d) for i, d in enumerate(different) if d is not None}
    adjusted = holm(by_place) if by_place else {}
    return Repetition(
        study=ours["study"],
        scale=ours["scale"],
        seed_offsets=(ours["seed_offset"], theirs["seed_offset"]),
        numbers=tuple(
            dataclasses.replace(each, difference=d, p_holm=adjusted.get(str(i)))
            for i, (each, d) in enumerate(zip(numbers, different, strict=True))
        ),
    )


def _provenance(path: Path) -> dict[str, Any]:
    files.require_folder(path)
    if not (path / PROVENANCE).is_file():
        raise IsolossError(f"{path} is no export of a study: it has no {PROVENANCE}")
    document: dict[str, Any] = files.read_json(path / PROVENANCE)
    return document


def _claims(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Repeated]:
    """Yield the answers to each claim, of the cases that were tested in the first or in the second."""
    others = {claim["claim"]: claim for claim in second["claims"]}
    for ours in first["claims"]:
        # it is there, as both are of the same claims
        theirs = others[ours["claim"]]
        a, b = ({answer["case"]: answer for answer in claim["answers"]} for claim in (ours, theirs))
        for case in dict.fromkeys([*a, *b]):
            # where the two models were not of the same loss, one answer stands for all cases
            answers = a.get(case, {}), b.get(case, {})
            estimates = [_estimate(answer.get("difference")) for answer in answers]
            if estimates != [None, None]:
                verdict, other = (answer.get("verdict", Verdict.NOT_TESTED.value) for answer in answers)
                name = (ours["claim"], case) if case else (ours["claim"],)
                yield Repeated(name=name, first=estimates[0], second=estimates[1], verdicts=(verdict, other))


def _cells(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Repeated]:
    """Yield the estimates that the tables of both have."""
    a, b = _table_cells(first), _table_cells(second)
    for name in a:
        if name in b:
            yield Repeated(name=name, first=a[name], second=b[name])


def _table_cells(summary: dict[str, Any]) -> dict[tuple[str, ...], Estimate]:
    """Return the estimates of a summary's tables whose error is over seeds or clusters, by table, labels and name."""
    cells = {}
    for table, rows in tables_in(summary).items():
        for row in rows:
            labels = (str(label) for name, label in row.items() if name != "estimates")
            where = (table, *labels)
            for key, document in row["estimates"].items():
                # an error over examples leaves out the seeds, in which a repetition differs: its interval would miss
                # far too often
                if document["method"] == OVER_SEEDS or "labels" in document["details"]:
                    cells[*where, key] = Estimate.from_dict(document)
    return cells


def _estimate(document: Mapping[str, Any] | None) -> Estimate | None:
    """Return the difference that a claim's answer rests on."""
    if document is None:
        return None
    return Estimate(**{key: document[key] for key in NUMBERS}, num_predictions=0, method="claim")


def _bare(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else {key: getattr(estimate, key) for key in NUMBERS}
