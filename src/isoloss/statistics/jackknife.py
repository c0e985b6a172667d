"""The error of a statistic by leaving out one cluster at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from isoloss.statistics.estimate import Estimate


def jackknife(
    value: float, without: ArrayLike, clusters: Sequence[Any], *, unit: str, num_observations: int
) -> Estimate:
    """Return a statistic of all observations with its error by the jackknife over G clusters.

    With t_g the statistic t without cluster g, the squared error is (G - 1) / G sum_g (t_g - t)^2, for Student's t with
    G - 1 degrees of freedom (the cluster jackknife; MacKinnon, Nielsen and Webb, 2023).

    Args:
        value: t.
        without: (G,) t_g.
        clusters: (G,) the clusters' names.
        unit: Of the statistic.
        num_observations: In all clusters.

    Returns:
        An estimate with `influence` by cluster, (G - 1) (t - t_g), so that two statistics of the same clusters have a
        paired difference, and the clusters' names as `details["labels"]`.

    Example:
        >>> mean = jackknife(2.0, [2.5, 2.0, 1.5], ["a", "b", "c"], unit="points", num_observations=3)  # of 1, 2 and 3
        >>> print(mean)
        2.00 ± 0.58 points
    """
    off = value - np.asarray(without, dtype=np.float64)
    number = len(clusters)
    return Estimate(
        value=value,
        stderr=math.sqrt((number - 1) / number * float(np.square(off).sum())),
        samples=number,
        unit=unit,
        num_predictions=num_observations,
        method="jackknife over clusters",
        details={"clusters": "clusters", "labels": list(clusters)},
        influence=(number - 1) * off,
    )
