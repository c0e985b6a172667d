"""A statement of the theory beside what a program found, and the verdict that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement, the figures that decide it, and whether they do.

    Attributes:
        text: What is claimed, in one sentence.
        found: The figures, and the rule that they are held against.
        shown: Whether the figures obey the rule.

    Example:
        >>> Statement(text="one is less than two", found="1 < 2", shown=1 < 2).verdict
        'shown'
    """

    text: str
    found: str
    shown: bool

    @property
    def verdict(self) -> str:
        """`"shown"` or `"not shown"`."""
        return "shown" if self.shown else "not shown"

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON types."""
        return {"statement": self.text, "found": self.found, "verdict": self.verdict}
