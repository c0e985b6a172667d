"""Endless rows of permutations, computed at any position without a table. Loading this module loads numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isoloss import seeds
from isoloss.lab.jit import jit

_ROUNDS = 8  # of the Feistel network
_LEAST_BITS = 3  # of half a number: a network on fewer is far from all permutations

# typed: numba, like numpy, makes a float64 of an unsigned and a signed integer, and the low bits are lost
_ONE = np.uint64(1)
_STEP, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)

_Long = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def shuffled(positions: _Long, size: int, *, seed: int) -> _Long:
    """Return (n,) int64: the numbers at (n,) positions of an endless row of permutations of 0 to size - 1.

    Epoch e, the positions e size to (e + 1) size - 1, has each number once. Its permutation is a Feistel network (Luby
    and Rackoff 1988) of 8 rounds on a larger domain of 4^b numbers, keyed by the seed and e; a result of at least
    `size` is put in again until it is below (cycle walking, Black and Rogaway 2002).
    """
    # above 16 numbers the domain, 4^half, is below 4 size, so that a number takes fewer than 4 turns on average
    half = max(_LEAST_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = np.array([seeds.derive(seed, "round", index) for index in range(_ROUNDS)], np.uint64)
    out = np.empty(len(positions), np.int64)
    _fill(positions, np.int64(size), np.uint64(half), keys, out)
    return out


@jit(inline="always")
def _mixed(number: np.uint64) -> np.uint64:
    """Return 64 well-mixed bits: the finalizer of SplitMix64 (Steele et al. 2014)."""
    number = number + _STEP
    number = (number ^ (number >> _S1)) * _M1
    number = (number ^ (number >> _S2)) * _M2
    return number ^ (number >> _S3)


@jit(nogil=True)
def _fill(positions: _Long, size: np.int64, half: np.uint64, keys: _Words, out: _Long) -> None:
    low, end = (_ONE << half) - _ONE, np.uint64(size)
    for index in range(len(positions)):
        epoch, number = np.uint64(positions[index] // size), np.uint64(positions[index] % size)
        # the network is a permutation, so its cycle through a number below `size` comes back below it: this ends
        while True:
            upper, lower = number >> half, number & low
            for key in keys:
                upper, lower = lower, upper ^ (_mixed(lower ^ _mixed(epoch ^ key)) & low)
            number = (upper << half) | lower
            if number < end:
                break
        out[index] = np.int64(number)
