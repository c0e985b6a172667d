"""Ridge regression on few examples, its strength chosen by leaving one out.

Shapes: n training examples of d features with t targets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# for features of mean squared norm 1; a weaker one would magnify directions in which few rows hardly differ
STRENGTHS = np.logspace(-2, 2, 17)
_AS_GOOD = 1e-9  # where a fit is exact, rounding must not decide


def leave_one_out_ridge(train_x: Floats, train_y: Floats, test_x: Floats) -> Floats:
    r"""Return (n', t): what ridge regressions with an intercept, one for each target, predict of (n', d) features.

    A regression minimizes `|y - X w - b|^2 + s |w|^2`. s is the one of `STRENGTHS`, made for features of mean squared
    norm 1, with the smallest squared error on examples that are left out one at a time; of those that are as good but
    for `_AS_GOOD` of the targets' variation, the largest. That error has a closed form: with the hat
    matrix H, example i is missed by (y - H y)_i / (1 - H_ii). There are at least two training examples.
    """
    n, (center, middle) = len(train_x), (train_x.mean(axis=0), train_y.mean(axis=0))
    x, y = train_x - center, train_y - middle
    products = x @ x.T
    values, vectors = np.linalg.eigh(products)
    # the centered features have no part along (1, ..., 1): rounding there would be divided by a small strength
    values[values < n * np.finfo(float).eps * values.max()] = 0
    strengths = STRENGTHS[::-1, None]
    shrunk = values / (values + strengths)  # (s, n)
    rotated = vectors.T @ y  # (n, t)
    hats = np.square(vectors) @ shrunk.T + 1 / n  # (n, s)
    missed = (y - np.einsum("in,sn,nt->sit", vectors, shrunk, rotated)) / (1 - hats.T)[:, :, None]
    errors = np.square(missed).sum(axis=1)  # (s, t)
    best = (errors <= errors.min(axis=0) + _AS_GOOD * np.square(y).sum(axis=0)).argmax(axis=0)  # (t,), the first
    solved: Floats = vectors @ (rotated / (values[:, None] + strengths[best].T))
    predictions: Floats = (test_x - center) @ (x.T @ solved) + middle
    return predictions


def r_squared(features: Floats, targets: Floats, chosen: NDArray[np.int64]) -> Floats:
    """Return (t,): R^2 of ridge regressions on the chosen rows (n,) at all other rows, about the mean of these.

    Features are first centered and divided by one number, so that the mean squared norm of all rows is 1: where the
    chosen rows happen to be nearly alike, what little they differ in is not magnified.

    Example:
        >>> import numpy as np
        >>> from isoloss.transfer.ridge import r_squared
        >>> x = np.arange(6.0)[:, None]
        >>> r_squared(x, 2 * x, np.array([0, 3, 5])).round(3).tolist()
        [1.0]
    """
    others = np.delete(np.arange(len(features)), chosen)
    features = features - features.mean(axis=0)
    features = features / max(np.sqrt(np.square(features).sum(axis=1).mean()), np.finfo(float).tiny)
    wanted = targets[others]
    missed = wanted - leave_one_out_ridge(features[chosen], targets[chosen], features[others])
    explained: Floats = 1 - np.square(missed).sum(axis=0) / np.square(wanted - wanted.mean(axis=0)).sum(axis=0)
    return explained
