"""The answer that opens the page of a study: a template of sentences, a paragraph a line, with the claims' verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from isoloss.statistics.estimate import number
from isoloss.studies.claims import Answer, ClaimResult, Verdict
from isoloss.studies.results import UNITS

_WORDS = {
    Verdict.SHOWN: "yes",
    Verdict.CONTRADICTED: "no, the opposite is shown",
    Verdict.NOT_SHOWN: "not shown",
    Verdict.NOT_TESTED: "not tested",
}


def from_template(template: Path, claims: Sequence[ClaimResult], **more: Any) -> list[str]:
    """Return the paragraphs of a template, in which `verdicts(ID)` stands for the verdicts on a claim."""
    by_id = {result.claim.id: result.answers for result in claims}
    # strict, so that a misspelled name in a template is an error and not a gap in the answer
    paragraphs = jinja2.Template(template.read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined)
    text: str = paragraphs.render(verdicts=lambda claim: verdicts(by_id[claim]), **more)
    return text.splitlines()


def verdicts(answers: Sequence[Answer]) -> str:
    """Return the verdict on each case with its difference; cases of one verdict share the words."""
    groups: dict[Verdict, list[str]] = {}
    for one in answers:
        difference = ""
        if one.difference is not None:
            sign = "+" if one.difference.value > 0 else ""
            difference = f"{sign}{number(one.difference)} {UNITS.get(one.difference.unit, one.difference.unit)}"
        groups.setdefault(one.verdict, []).append(f"{one.case} {difference}".strip())
    return ", ".join(
        f"{_WORDS[verdict]} ({'; '.join(filter(None, cases))})" if any(cases) else _WORDS[verdict]
        for verdict, cases in groups.items()
    )
