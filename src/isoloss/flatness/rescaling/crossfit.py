"""The minimal trace of shares that have errors: log-factors fitted where they are evaluated, and on other data.

Shapes: F folds of independent clusters, K parts of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isoloss.flatness.rescaling.program import Minimum


@dataclass(frozen=True)
class CrossFit:
    r"""A minimal trace from two estimates, one too small on average and the other too large.

    With n clusters, H the second derivative of the trace at its minimum and C the covariance of a cluster's first
    derivative there, both by the log-factors, the sum in sample is too small by $b = \operatorname{tr}(H^{-1} C) / 2n$
    on average: the fitted log-factors follow the noise. Those from the other folds miss the minimum by $b F / (F - 1)$.
    The mean of both is too large by $b / (2 (F - 1))$, with eight folds a fourteenth of b. These biases are of second
    order in the noise, as for any M-estimator; to first order the error is that of the sum at fixed weights.
    """

    minimum: Minimum  # of the shares from all folds
    fold_weights: np.ndarray  # (F, K) the weights of the shares from all folds but one
    in_sample: float  # the sum of the shares from all folds with the weights of `minimum`, too small on average
    cross_fitted: float  # the sum over the folds with `fold_weights`, too large on average

    @property
    def value(self) -> float:
        """The mean of both."""
        return (self.in_sample + self.cross_fitted) / 2

    @property
    def weights(self) -> np.ndarray:
        """(F, K) the mean of both estimates' weights, with which the sum over the folds is `value`.

        At fixed weights in sample the sum varies less from cluster to cluster than it does on other data, as the
        weights are small where the noise is large.
        """
        return np.asarray((self.minimum.weights + self.fold_weights) / 2)


def cross_fit(
    minimize: Callable[..., Minimum],
    fold_sums: np.ndarray | Sequence[Sequence[float]],
    shares_without: np.ndarray | Sequence[Sequence[float]],
    total: float,
) -> CrossFit:
    """Estimate a minimal trace from the sums of each fold.

    Gauges are those of the shares from all folds. A part without a share in the other folds takes its share from all
    folds, since there might be no minimum without it. Negative shares count as zero when the log-factors are fitted,
    and as they are in the sums, so the sums are unbiased for given log-factors.

    Args:
        minimize: `program.minimize` with all arguments but `shares` and `like`, by functools.partial.
        fold_sums: (F, K) a part's squared norms, less controls, summed over the clusters of a fold.
        shares_without: (F, K) the shares from all folds but this one.
        total: The predicted positions of all folds: a share is the sum over the folds over this.

    Raises:
        IsolossError: As `program.minimize` does.

    Example:
        >>> import functools
        >>> from isoloss.flatness.rescaling.program import minimize
        >>> program = functools.partial(minimize, exponents=[[1], [-1]], log_rms=[0, 0], sizes=[1, 1], writers=[[0]])
        >>> found = cross_fit(program, fold_sums=[[4, 1], [5, 3]], shares_without=[[5, 3], [4, 1]], total=2)
        >>> round(found.in_sample, 3), round(found.cross_fitted, 3), round(found.value, 3)
        (6.0, 6.445, 6.222)
    """
    sums, without = np.asarray(fold_sums, dtype=float), np.asarray(shares_without, dtype=float)
    shares = sums.sum(axis=0) / total
    minimum = minimize(shares)
    others = np.where(without > 0, without, shares)
    weights = np.stack([minimize(of_others, like=minimum).weights for of_others in others])
    in_sample = float(minimum.weights @ shares)
    return CrossFit(minimum, weights, in_sample, float((weights * sums).sum()) / total)
