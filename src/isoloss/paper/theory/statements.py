"""A statement of the theory, the evidence of a program, and the verdict that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement, the figures that decide it, and whether they do.

    Attributes:
        text: What is claimed, in one sentence.
        evidence: The figures, and the rule that they are held against.
        shown: Whether the figures obey the rule.

    Example:
        >>> Statement(text="one is less than two", evidence="1 < 2", shown=1 < 2).verdict
        'shown'
    """

    text: str
    evidence: str
    shown: bool

    @property
    def verdict(self) -> str:
        """`"shown"` or `"not shown"`."""
        return "shown" if self.shown else "not shown"

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON types."""
        return {"statement": self.text, "evidence": self.evidence, "verdict": self.verdict}
