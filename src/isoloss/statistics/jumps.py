"""Jumps in a course of measurements, told from its trend."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

JUMP = 5.0  # times as far as the moves beside it moves a jump
_FEWEST = 4  # moves, among which a jump can be told from a trend


def find_jumps(moves: Sequence[tuple[float, float]]) -> list[int]:
    """Return which moves of a course, each from one step to the next, are jumps.

    A jump is more than `JUMP` times as far as the median of up to four moves beside it, two before and two after, by
    the nearer end of its 95 % interval and the farther ends of theirs. The first move is none, as training begins with
    a fall. In fewer than four moves there are none: a jump cannot be told from a trend there.

    Args:
        moves: The 95 % interval of each.

    Example:
        >>> from isoloss.statistics.jumps import find_jumps
        >>> losses = [9.0, 5.0, 4.0, 3.5, 4.9, 4.8, 4.75, 4.72]
        >>> find_jumps([(after - before - 0.01, after - before + 0.01) for before, after in zip(losses, losses[1:])])
        []
        >>> losses = [5.0, 4.9, 4.82, 4.75, 3.5, 3.45, 3.42]
        >>> find_jumps([(after - before - 0.01, after - before + 0.01) for before, after in zip(losses, losses[1:])])
        [3]
    """
    if len(moves) < _FEWEST:
        return []
    nearest = [max(0.0, low, -high) for low, high in moves]
    farthest = [max(-low, high) for low, high in moves]
    return [
        i
        for i in range(1, len(moves))
        if nearest[i] > JUMP * statistics.median(farthest[max(0, i - 2) : i] + farthest[i + 1 : i + 3])
    ]
