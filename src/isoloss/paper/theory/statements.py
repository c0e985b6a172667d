"""A statement of the theory, the evidence of a program, and the verdict that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement, the figures that decide it, and whether they do."""

    text: str  # what is claimed, in one sentence
    evidence: str  # the figures, and the rule that they are held against
    shown: bool  # whether the figures obey the rule
    contradicted: bool = False  # whether they break it by more than their errors allow

    @property
    def verdict(self) -> str:
        """`"shown"`, `"contradicted"` or `"not shown"`."""
        return "shown" if self.shown else "contradicted" if self.contradicted else "not shown"

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as JSON types."""
        return {"statement": self.text, "evidence": self.evidence, "verdict": self.verdict}


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def counter(progress: Callable[[int], None] | None) -> Callable[..., None]:
    """Return a function to call after every step, or with a number of steps: `progress` gets how many are done."""
    done = 0

    def count(steps: int = 1) -> None:
        nonlocal done
        done += steps
        if progress is not None:
            progress(done)

    return count
