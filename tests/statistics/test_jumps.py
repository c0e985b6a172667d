"""Jumps of a course, told from its trend, its spikes and its errors."""

import itertools

import pytest

from isoloss.statistics.jumps import find_jumps


def found(values, half=1e-3):
    moves = [after - before for before, after in itertools.pairwise(values)]
    return find_jumps([(move - half, move + half) for move in moves], [1] * len(moves))


@pytest.mark.parametrize(
    "course",
    [
        [3 * 0.5**i for i in range(9)],
        [10 * 2**i for i in range(9)],
        [2 + 5 / (1 + i) for i in range(9)],
        [float(i) for i in range(9)],
        [1 / (1 + 2.718 ** (4 - i)) for i in range(9)],
        [9.0, 3.0, 2.9, 2.8, 2.7, 2.6],  # training begins with a fall
        [1085.0, 1807.0, 2481.0],
        [1.0, 1.1, 1.2, 9.0],
    ],
)
def test_a_trend_has_no_jump(course):
    assert not found(course)


def test_jumps_and_spikes_are_found_up_and_down_and_at_the_end():
    line = [3 - 0.1 * i for i in range(9)]
    for size in (-1, 1):
        assert found(line[:4] + [each + size for each in line[4:]]) == [3]
        assert found([*line[:8], line[8] + size]) == [7]
    assert found([*line[:4], line[4] + 2, *line[5:]]) == [3, 4]
    # what the errors may hide is none
    assert not found(line[:4] + [each - 1 for each in line[4:]], half=0.1)
