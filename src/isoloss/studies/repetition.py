"""Comparison of a study with its replication on other seeds."""

from __future__ import annotations

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
Name = tuple[str, ...]  # claim and case, or table, row and estimate


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One number in both exports: a claim's difference, or an entry of a table."""

    name: Name
    first: Estimate | None  # None where it was not tested
    second: Estimate | None
    difference: Estimate | None  # the second minus the first; None where either is None
    p_holm: float | None  # of the difference against 0, by Holm's method over all differences
    verdicts: tuple[str, str] | None  # of the first and the second; None for an entry of a table

    @property
    def agree(self) -> bool | None:
        """Whether the two verdicts are the same; None where there are none."""
        return None if self.verdicts is None else self.verdicts[0] == self.verdicts[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types; degrees of freedom are null where both numbers are exact."""
        d = self.difference
        about = d and {
            **{"value": d.value, "stderr": d.stderr, "unit": d.unit, "freedom": d.freedom if d.stderr > 0 else None},
            **{"ci95": list(d.ci95), "p": p_value(d), "p_holm": self.p_holm},
        }
        first, second = (one and {key: getattr(one, key) for key in NUMBERS} for one in (self.first, self.second))
        verdicts = self.verdicts and list(self.verdicts)
        return {
            **{"name": list(self.name), "first": first, "second": second, "difference": about},
            **{"verdicts": verdicts, "agree": self.agree},
        }


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Two exports of one study, number by number."""

    study: str
    scale: str
    seed_offsets: tuple[int, int]  # of the first and of the second
    numbers: tuple[Repeated, ...]  # claims in the order of the study, then the entries of tables

    @property
    def conclusion(self) -> str:
        """Which verdicts do not agree, and how many 95 % intervals of differences exclude 0."""
        judged = [each for each in self.numbers if each.verdicts is not None]
        apart = [f"{', '.join(each.name)} ({' / '.join(each.verdicts or ())})" for each in judged if not each.agree]
        but = f", all but {'; '.join(apart)}" if apart else ""
        intervals = [each.difference.ci95 for each in self.numbers if each.difference is not None]
        outside = sum(not low <= 0 <= high for low, high in intervals)
        return (
            f"{len(judged) - len(apart)} of {len(judged)} verdicts agree{but}. The 95 % interval of {outside} of "
            f"{len(intervals)} differences excludes 0 (expected: 5 %)."
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
            f"{first} and {second} both have the seed offset {ours['seed_offset']}: a replication needs a different one"
        )
    # two exports with a common run are not independent, as the error of the difference assumes
    if shared := ours["runs"].items() & theirs["runs"].items():
        name = min(shared)[0]
        raise IsolossError(f"{first} and {second} have the same run {name}: a replication needs runs of its own")
    a, b = (files.read_json(path / SUMMARY) for path in (first, second))
    pairs = [*_claims(a, b), *_cells(a, b)]
    differences = [
        None if one is None or other is None else independent_difference(other, one) for _, (one, other, _) in pairs
    ]
    by_place = {str(i): p_value(each) for i, each in enumerate(differences) if each is not None}
    adjusted = holm(by_place) if by_place else {}
    return Repetition(
        study=ours["study"],
        scale=ours["scale"],
        seed_offsets=(ours["seed_offset"], theirs["seed_offset"]),
        numbers=tuple(
            Repeated(
                name=name,
                first=one,
                second=other,
                verdicts=verdicts,
                difference=difference,
                p_holm=adjusted.get(str(i)),
            )
            for i, ((name, (one, other, verdicts)), difference) in enumerate(zip(pairs, differences, strict=True))
        ),
    )


def _provenance(path: Path) -> dict[str, Any]:
    files.require_folder(path)
    if not (path / PROVENANCE).is_file():
        raise IsolossError(f"{path} is no export of a study: it has no {PROVENANCE}")
    document: dict[str, Any] = files.read_json(path / PROVENANCE)
    return document


_Pair = tuple[Name, tuple[Estimate | None, Estimate | None, tuple[str, str] | None]]


def _claims(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[_Pair]:
    """Yield the differences of each claim, of the cases that were tested in the first or in the second."""
    others = {claim["claim"]: claim for claim in second["claims"]}
    for ours in first["claims"]:
        # it is there, as both are of the same claims
        theirs = others[ours["claim"]]
        a, b = ({answer["case"]: answer for answer in claim["answers"]} for claim in (ours, theirs))
        for case in dict.fromkeys([*a, *b]):
            # where the two models were not of the same loss, one answer stands for all cases
            answers = a.get(case, {}), b.get(case, {})
            one, other = (_difference(answer.get("difference")) for answer in answers)
            if one is not None or other is not None:
                verdict, again = (answer.get("verdict", Verdict.NOT_TESTED.value) for answer in answers)
                yield (ours["claim"], case) if case else (ours["claim"],), (one, other, (verdict, again))


def _difference(document: Mapping[str, Any] | None) -> Estimate | None:
    if document is None:
        return None
    known = {key: document[key] for key in NUMBERS}
    # of few unequal documents, the degrees of freedom are fewer than the documents
    effective = document.get("effective_samples")
    return Estimate(**known, effective_samples=effective, num_predictions=0, method="claim")


def _cells(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[_Pair]:
    """Yield the entries that the tables of both have, with an error over seeds or clusters."""
    a, b = (
        {
            (table, *(str(label) for name, label in row.items() if name != "estimates"), key): Estimate.from_dict(entry)
            for table, rows in tables_in(summary).items()
            for row in rows
            for key, entry in row["estimates"].items()
            # an error over examples leaves out the seeds, in which a replication differs: its interval would miss far
            # too often
            if entry["method"] == OVER_SEEDS or "labels" in entry["details"]
        }
        for summary in (first, second)
    )
    for name in a:
        if name in b:
            yield name, (a[name], b[name], None)
