"""Checks of the numbers that statistics are taken of, each with one sentence where they fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss.errors import IsolossError


def column(name: str, values: ArrayLike, length: int | None = None) -> NDArray[np.float64]:
    """Return values (N,) as float64.

    Raises:
        IsolossError: They are not a list of finite numbers, or not as many as `length`.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise IsolossError(f"{name} is not a list of numbers: {error}") from error
    if array.ndim != 1 or (length is not None and len(array) != length):
        wanted = "one number for each observation" if length is None else f"{length} numbers, one for each observation"
        raise IsolossError(f"{name} has the shape {array.shape}; it must be {wanted}")
    if not np.isfinite(array).all():
        first = int(np.argmin(np.isfinite(array)))
        raise IsolossError(f"{name}[{first}] is {array[first]}; all of {name} must be finite")
    return array


def labels(
    clusters: Sequence[Any], length: int, least: int = 2, what: str = "clusters"
) -> tuple[list[Any], NDArray[np.intp]]:
    """Return the clusters' names in order, and for each observation the index of its cluster (N,).

    Raises:
        IsolossError: There is not one label for each observation, one is None or NaN, some are text and others are not,
            or there are too few clusters.
    """
    array = np.asarray(clusters)
    if array.shape != (length,):
        raise IsolossError(f"{what} has the shape {array.shape}; it must be {length} labels, one for each observation")
    for number, each in enumerate(clusters):
        if each is None or each != each:  # NaN
            raise IsolossError(f"{what}[{number}] is {each}; each observation needs a label")
    # numpy would make text of the others, and 1 and "1" one label
    if len({isinstance(each, str) for each in clusters}) > 1:
        kinds = " and ".join(sorted({type(each).__name__ for each in clusters}))
        raise IsolossError(f"{what} has labels of different types ({kinds}); they must be of one type")
    try:
        names, codes = np.unique(array, return_inverse=True)
    except TypeError as error:
        kinds = " and ".join(sorted({type(each).__name__ for each in array}))
        raise IsolossError(f"{what} has labels that have no order ({kinds}); they must be of one type") from error
    if len(names) < least:
        raise IsolossError(f"the number of clusters is {len(names)}; an error over clusters needs at least {least}")
    return names.tolist(), codes


def fraction(name: str, value: float, *, below: float = 1.0) -> None:
    """Refuse a probability that does not lie strictly between 0 and `below`."""
    if not 0 < value < below:
        raise IsolossError(f"{name} is {value}; it must be above 0 and below {below:g}")


def positive(name: str, value: float) -> None:
    """Refuse a number that is not finite and above 0."""
    if not 0 < value < math.inf:
        raise IsolossError(f"{name} is {value}; it must be finite and above 0")


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a number that is not finite or too small."""
    if not least <= value < math.inf:
        raise IsolossError(f"{name} is {value}; it must be finite and at least {least:g}")


def count(name: str, value: int, least: int) -> None:
    """Refuse a number of things that is too small or not whole."""
    if not float(value).is_integer() or value < least:
        raise IsolossError(f"{name} is {value}; it must be a whole number of at least {least}")
