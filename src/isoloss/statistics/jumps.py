"""Jumps in a series of measurements, beside its trend."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

JUMP = 5.0  # a jump moves this many times as far as its neighbors
_FEWEST = 4  # moves, below which a jump cannot be told from a trend


def find_jumps(moves: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the jumps among moves from one step to the next.

    A jump moves more than `JUMP` times as far as the median of the four moves beside it, two before and two after, by
    the nearer end of its 95 % interval and the farther ends of theirs. The first move is never a jump, as training
    begins with a fall, and fewer than four moves have none.

    Args:
        moves: The 95 % interval of each move.

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
