"""Jumps in a series of measurements, beside its trend."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

JUMP = 5.0  # a jump moves this many times as far as its neighbors
_FEWEST = 4  # with fewer moves, a jump cannot be told from a trend


def find_jumps(moves: Sequence[tuple[float, float]], lengths: Sequence[float]) -> list[int]:
    """Return the indices of the jumps among moves from one checkpoint to the next.

    A jump moves more than `JUMP` times as far as the median of the four moves beside it, two before and two after, by
    the nearer end of its 95 % interval and the farther ends of the others. A move over more steps than a neighbor may
    go as many times as far, so a missing checkpoint makes no jump. The first move is never a jump, because training
    begins with a fall, and fewer than four moves have none.

    Args:
        moves: The 95 % interval of each move.
        lengths: How many steps each takes.

    Example:
        >>> from isoloss.statistics.jumps import find_jumps
        >>> losses = [9.0, 5.0, 4.0, 3.5, 4.9, 4.8, 4.75, 4.72]
        >>> moves = [(after - before - 0.01, after - before + 0.01) for before, after in zip(losses, losses[1:])]
        >>> find_jumps(moves, [100] * 7)
        []
        >>> losses = [5.0, 4.9, 4.82, 4.75, 3.5, 3.45, 3.42]
        >>> moves = [(after - before - 0.01, after - before + 0.01) for before, after in zip(losses, losses[1:])]
        >>> find_jumps(moves, [100] * 6), find_jumps(moves, [100, 100, 100, 900, 100, 100])
        ([3], [])
    """
    if len(moves) < _FEWEST:
        return []
    nearest = [max(0.0, low, -high) for low, high in moves]
    farthest = [max(-low, high) for low, high in moves]
    found = []
    for i in range(1, len(moves)):
        beside = [j for j in range(max(0, i - 2), min(len(moves), i + 3)) if j != i]
        # two measurements at one step have no length
        reach = [farthest[j] * max(1.0, lengths[i] / lengths[j] if lengths[j] else 1.0) for j in beside]
        if nearest[i] > JUMP * statistics.median(reach):
            found.append(i)
    return found
