"""Results of the pilot: the slopes of transfer on the loss, by size.

The pilot has its own grammars and runs. Its results are in pilot.toml, and claims.toml rests on them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from isoloss import config
from isoloss.statistics.estimate import Estimate

PATH = Path(__file__).with_name("pilot.toml")
UNIT = "percentage points per nat"


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The slope of one accuracy on the KL, within grammars, for models of one size.

    Attributes:
        size: Size of the models.
        measure: The measure of the accuracy.
        value: In percentage points per nat.
        stderr: Standard error over grammars.
        grammars: Number of grammars.
    """

    size: str
    measure: str
    value: float
    stderr: float
    grammars: int


@dataclass(frozen=True, kw_only=True)
class _Pilot:
    slopes: tuple[Slope, ...]


@functools.cache
def read() -> tuple[Slope, ...]:
    """Return the slopes that the pilot found."""
    return config.read_toml(_Pilot, PATH).slopes


def slopes(*sizes: str) -> dict[str, Estimate]:
    """Return the slope of each accuracy on the KL, by its measure: the mean of those of the sizes.

    Its error includes half the range of the sizes' slopes: which of them holds between two sizes is not known.
    """
    by_measure: dict[str, list[Slope]] = {}
    for slope in read():
        if slope.size in sizes:
            by_measure.setdefault(slope.measure, []).append(slope)
    return {measure: _mean(some) for measure, some in by_measure.items() if len(some) == len(sizes)}


def _mean(some: list[Slope]) -> Estimate:
    grammars, values = min(slope.grammars for slope in some), [slope.value for slope in some]
    return Estimate(
        value=sum(values) / len(some),
        stderr=math.hypot(math.hypot(*(slope.stderr for slope in some)) / len(some), (max(values) - min(values)) / 2),
        samples=grammars,
        unit=UNIT,
        num_predictions=grammars,
        method="slope on the KL in the pilot",
    )
