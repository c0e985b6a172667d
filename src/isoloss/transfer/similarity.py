"""How alike the features of two models are (linear CKA), and how many dimensions those of one have.

From a sample, all are computed from Gram matrices: the inner products of the features of n sentences. Over all
sentences of a language they are computed from covariances, and are exact. Shape letters: n sentences, D features.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]

_FEWEST = 5  # sentences: the estimators take 4, and the jackknife leaves out one
_COLUMNS = 8192  # of the features that are in float64 at a time
_NEGLIGIBLE = 1e-13  # of the largest eigenvalue: a smaller one is the rounding of the features and of their products


def gram_matrix(features: torch.Tensor) -> Array:
    """Return the inner products (n, n) of the rows of features (n, D), centered at their mean, in float64.

    Example:
        >>> import torch
        >>> from isoloss.transfer import gram_matrix
        >>> gram_matrix(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]])).tolist()
        [[2.0, 0.0, -2.0], [0.0, 2.0, -2.0], [-2.0, -2.0, 4.0]]
    """
    gram = np.zeros((len(features), len(features)))
    for first in range(0, features.shape[1], _COLUMNS):
        # a float64 copy of all would be twice the size; centering and the sum below go column by column
        block = features[:, first : first + _COLUMNS].cpu().double().numpy()
        block = block - block.mean(axis=0)
        gram += block @ block.T
    return gram


def upper_triangle(gram: Array) -> NDArray[np.float32]:
    """Return the upper triangle of a Gram matrix (n, n), row by row: n (n + 1) / 2 numbers in float32."""
    return gram[np.triu_indices(len(gram))].astype(np.float32)


def from_upper_triangle(triangle: NDArray[Any]) -> Array:
    """Return the Gram matrix (n, n) that `upper_triangle` was given."""
    n = (int(np.sqrt(8 * len(triangle) + 1)) - 1) // 2
    gram = np.zeros((n, n))
    gram[np.triu_indices(n)] = triangle
    return gram + np.triu(gram, 1).T


def linear_cka(first: ArrayLike, second: ArrayLike) -> Estimate:
    r"""Return the linear CKA of two models' features of the same sentences (Kornblith et al. 2019).

    With X and Y the features of a sentence in the two models, it is

        norm(Cov(X, Y))^2 / (norm(Cov(X, X)) norm(Cov(Y, Y)))

    in Frobenius norms: 1 where one is a rotation of the other times a number, 0 where they are uncorrelated. The square
    of each norm is HSIC with linear kernels, and is estimated without bias (Song et al. 2012; in CKA: Nguyen et al.
    2021). For unrelated features of more dimensions than sentences, the plain estimator is far above 0; this one is
    about 0, and may be slightly negative.

    Args:
        first: (n, n) inner products of the features of n sentences in one model, centered or not: adding a vector to
            all features changes nothing.
        second: The same of the other model, for the same sentences in the same order.

    Returns:
        The CKA, with the standard error over the draw of the sentences by the jackknife, in O(n^2).

    Raises:
        IsolossError: The two are not square and symmetric matrices of one size and of finite numbers; there are fewer
            than 5 sentences; or too few, or too similar ones, to show how a model's features vary.

    Example:
        >>> import torch
        >>> from isoloss.transfer import gram_matrix, linear_cka
        >>> x = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
        >>> y = x + 0.5 * torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
        >>> print(linear_cka(gram_matrix(x), gram_matrix(y)))
        0.7991 ± 0.0099 CKA
    """
    a, b = _gram("first", first), _gram("second", second)
    if len(a) != len(b):
        raise IsolossError(f"the first Gram matrix is of {len(a)} sentences and the second of {len(b)}: not the same")
    return _jackknifed(_hsic(a, b) / np.sqrt(_spread(a) * _spread(b)), unit="CKA", method="linear CKA, unbiased HSIC")


def effective_dimension(gram: ArrayLike) -> Estimate:
    r"""Return the participation ratio of features with covariance S, a number of dimensions: tr(S)^2 / tr(S^2).

    With eigenvalues v of S this is `(sum v)^2 / sum v^2`: d for d equal eigenvalues, 1 for a single one. Both parts are
    estimated without bias, by averages over four different sentences (U-statistics). The ratio of the same traces of
    the Gram matrix, which has at most n - 1 nonzero eigenvalues, is too small for n sentences unless n is far above
    the participation ratio.

    Args:
        gram: (n, n) inner products of the features of n sentences, centered or not.

    Returns:
        The participation ratio, with the standard error over the draw of the sentences by the jackknife.

    Raises:
        IsolossError: As for `linear_cka`.

    Example:
        >>> import torch
        >>> from isoloss.transfer import effective_dimension, gram_matrix
        >>> x = torch.randn(100, 50, generator=torch.Generator().manual_seed(0))
        >>> print(effective_dimension(gram_matrix(x)))
        50.4 ± 1.4 dimensions
        >>> x = torch.linalg.svdvals(x - x.mean(0)) ** 2
        >>> print(f"{float(x.sum() ** 2 / x.square().sum()):.1f}, the ratio of the Gram matrix's own traces")
        33.1, the ratio of the Gram matrix's own traces
    """
    centered = _gram("the", gram)
    return _jackknifed(
        _squared_trace(centered) / _spread(centered), unit="dimensions", method="participation ratio of the covariance"
    )


def effective_rank(gram: ArrayLike) -> Estimate:
    r"""Return the effective rank of features: RankMe (Garrido et al. 2023), here of centered features.

    With the singular values s_i of the centered features and p_i = s_i / sum_j s_j it is the exponential of an entropy,
    `exp(-sum_i p_i log p_i)`: d for d equal singular values, 1 for a single one. Directions of little variance count
    for more than in `effective_dimension`. It is at most n - 1 and too small for n sentences unless n is far above D,
    so compare it between models on the same sentences.

    Args:
        gram: (n, n) inner products of the features of n sentences, centered or not, in float64: rounding to float32
            would add directions.

    Returns:
        The effective rank, with the standard error over the draw of the sentences by the influence of each: with the
        eigenvectors v_i of the centered Gram matrix, `-(n / 2) R sum_i p_i (log p_i + log R) v_ki^2` for sentence k and
        rank R.

    Raises:
        IsolossError: As for `linear_cka`.

    Example:
        >>> import torch
        >>> from isoloss.transfer import effective_rank, gram_matrix
        >>> x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
        >>> print(effective_rank(gram_matrix(x)))
        19.9471 ± 0.0073 dimensions
    """
    centered = _gram("the", gram)
    values, vectors = np.linalg.eigh(centered)
    _spread(centered)  # refuses features that do not vary
    kept = values > _NEGLIGIBLE * values[-1]
    p, rank = _shares(values[kept])
    n = len(centered)
    influence = -0.5 * n * rank * (np.square(vectors[:, kept]) @ (p * np.log(p * rank)))
    return Estimate(
        value=rank,
        stderr=float(np.sqrt(np.square(influence).sum() / (n * (n - 1)))),
        samples=n,
        unit="dimensions",
        num_predictions=0,
        method="RankMe of centered features, influence",
        details={"clusters": "sentences"},
        influence=influence,
    )


def state_ranks(states: torch.Tensor, clusters: torch.Tensor) -> dict[str, Estimate]:
    r"""Return the effective rank and the participation ratio of many token states (m, d), with errors over clusters.

    Both are of the covariance of all states, so m should be far above d; see `effective_rank` and
    `effective_dimension`. A change of the covariance by a cluster moves eigenvalue l_k by its mean of (v_k'x)^2 - l_k,
    for the eigenvector v_k and centered states x; the error is the jackknife's, to first order. Of few clusters, both
    are a little too small: by up to an error for 40 documents of 16 tokens and d = 16, and by less the more there are.

    Args:
        states: (m, d), in any floating-point type.
        clusters: (m,) int64, the cluster of each state, such as its document, from 0.

    Raises:
        IsolossError: The states are all the same, or of a single cluster.

    Example:
        >>> import torch
        >>> from isoloss.transfer.similarity import state_ranks
        >>> x = torch.randn(8000, 20, generator=torch.Generator().manual_seed(0))
        >>> {name: str(each) for name, each in state_ranks(x, torch.arange(8000) // 40).items()}
        {'effective-rank': '19.99368 ± 0.00090 dimensions', 'participation-ratio': '19.9491 ± 0.0073 dimensions'}
    """
    import torch

    from isoloss.statistics.ratio import by_leaving_out, from_influence

    number = int(clusters.max()) + 1
    if number < 2:
        raise IsolossError("an error bar needs at least 2 independent sequences or documents")
    mean, blocks = states.mean(dim=0, dtype=torch.float64), torch.split(states, _COLUMNS)
    covariance = sum(((x := block - mean).T @ x for block in blocks), torch.zeros(())) / len(states)
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > _NEGLIGIBLE * values[-1]
    if not bool(kept.any()):
        raise IsolossError("the states of all tokens are the same, so they have no dimensions")
    values, vectors = values[kept], vectors[:, kept]
    p, rank = _shares(values.numpy())
    total, square = values.sum(), values.square().sum()
    ratio = float(total**2 / square)
    # the derivatives of both by each eigenvalue; each times its eigenvalue, they add up to 0
    of_rank = -rank / 2 * torch.from_numpy(p * np.log(p * rank)) / values
    of_ratio = 2 * ratio * (1 / total - values / square)
    slopes = torch.stack([of_rank, of_ratio], dim=1)
    moved = torch.cat([((block - mean) @ vectors).square() @ slopes for block in blocks])
    sums = moved.new_zeros(number, 2).index_add_(0, clusters, moved)
    sizes = clusters.bincount(minlength=number).double()
    psi = by_leaving_out(sums, sizes)
    return {
        name: from_influence(value, psi[:, k], sizes, unit="dimensions", method=f"{method} of centered token states")
        for k, (name, value, method) in enumerate(
            (("effective-rank", rank, "RankMe"), ("participation-ratio", ratio, "participation ratio"))
        )
    }


def matrix_rank(matrix: torch.Tensor) -> Estimate:
    """Return the effective rank of a matrix of weights (n, m): exact, with an error of 0 (Roy and Vetterli, 2007).

    Example:
        >>> import torch
        >>> from isoloss.transfer.similarity import matrix_rank
        >>> round(matrix_rank(torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0]))).value, 6)
        3.0
    """
    import torch

    squares = np.square(torch.linalg.svdvals(matrix.detach().double().cpu()).numpy())
    _, rank = _shares(squares[squares > _NEGLIGIBLE * squares[0]])
    about: dict[str, Any] = {"unit": "dimensions", "num_predictions": 0, "method": "exponential of an entropy"}
    return Estimate(value=rank, stderr=0.0, samples=0, **about)


def exact_features(features: torch.Tensor, probabilities: torch.Tensor, truth: torch.Tensor) -> dict[str, Estimate]:
    """Return what `effective_dimension`, `effective_rank` and `linear_cka` estimate, over all sentences of a language.

    The features are (n, D), the true ones (n, E), and the probabilities of the n sentences sum to 1.

    Example:
        >>> import torch
        >>> from isoloss.transfer.similarity import exact_features
        >>> corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> exact = exact_features(corners, torch.full((4,), 0.25), corners[:, :1])
        >>> {name: round(each.value, 4) for name, each in exact.items()}
        {'effective-dimension': 2.0, 'effective-rank': 2.0, 'cka-truth': 0.7071}
    """
    w = probabilities.cpu().double().numpy()
    raw = [each.cpu().double().numpy() for each in (features, truth)]
    if not all(np.ptp(each, axis=0).any() for each in raw):
        raise IsolossError("features are the same for all sentences, so they have no dimensions")
    x, y = (each - w @ each for each in raw)
    own, other, cross = (a.T @ (w[:, None] * b) for a, b in ((x, x), (y, y), (x, y)))
    squares = np.square(own).sum(), np.square(other).sum()
    values = np.linalg.eigvalsh(own)
    _, rank = _shares(values[values > _NEGLIGIBLE * values[-1]])
    found = {
        "effective-dimension": (np.trace(own) ** 2 / squares[0], "dimensions", "participation ratio of the covariance"),
        "effective-rank": (rank, "dimensions", "RankMe of centered features"),
        "cka-truth": (np.square(cross).sum() / math.sqrt(squares[0] * squares[1]), "CKA", "linear CKA"),
    }
    exact: dict[str, Any] = {"stderr": 0.0, "samples": 0, "num_predictions": 0}
    return {
        name: Estimate(value=float(value), unit=unit, method=f"{method}; exact over all sentences", **exact)
        for name, (value, unit, method) in found.items()
    }


def _shares(eigenvalues: Array) -> tuple[Array, float]:
    """Return the share of each singular value in their sum, and the effective rank, from squared ones above 0."""
    singular = np.sqrt(eigenvalues)
    p = singular / singular.sum()
    return p, float(np.exp(-(p * np.log(p)).sum()))


def _gram(name: str, gram: ArrayLike) -> Array:
    """Return a Gram matrix of centered features in float64; refuse anything that is not a Gram matrix."""
    what = f"{name} Gram matrix" if name == "the" else f"the {name} Gram matrix"
    matrix: Array = np.asarray(gram, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise IsolossError(f"{what} has the shape {matrix.shape}; it must be square")
    if len(matrix) < _FEWEST:
        raise IsolossError(f"{what} is of {len(matrix)} sentences; it takes at least {_FEWEST}")
    if not np.isfinite(matrix).all():
        raise IsolossError(f"{what} has a number that is not finite")
    if np.abs(matrix - matrix.T).max() > 1e-5 * np.abs(matrix).max():
        raise IsolossError(f"{what} is not symmetric")
    means = matrix.mean(axis=0)
    # the estimates do not depend on the center, and less has to cancel in them
    centered: Array = matrix - means - means[:, None] + means.mean()
    return centered


class _Sums(NamedTuple):
    """Sums of two matrices A and B with zero diagonals: (1 + n,), first of all n sentences, then of all but each."""

    products: Array  # of A_ij B_ij
    of_sums: Array  # of a_i b_i, with the row sums a and b
    first: Array  # of A_ij
    second: Array  # of B_ij
    n: Array  # sentences


def _sums(first: Array, second: Array) -> _Sums:
    """Return the sums of two symmetric matrices, whose diagonals do not count."""
    a_matrix, b_matrix = (matrix - np.diag(matrix.diagonal()) for matrix in (first, second))
    a, b = a_matrix.sum(axis=1), b_matrix.sum(axis=1)
    products = (a_matrix * b_matrix).sum(axis=1)

    def less(total: Any, parts: Array) -> Array:
        return np.append(total, total - parts)

    # Without sentence k its row and its column go, twice the same sum, and every row sum a_i loses A_ik:
    # sum_(i != k) (a_i - A_ik) (b_i - B_ik) = a.b - a_k b_k - (A b)_k - (B a)_k + sum_i A_ik B_ik
    return _Sums(
        products=less(products.sum(), 2 * products),
        of_sums=less(a @ b, a * b + a_matrix @ b + b_matrix @ a - products),
        first=less(a.sum(), 2 * a),
        second=less(b.sum(), 2 * b),
        n=less(float(len(a)), np.ones(len(a))),
    )


def _hsic(first: Array, second: Array) -> Array:
    """Return (1 + n,): the unbiased HSIC of all sentences, then of all but each (Song et al. 2012)."""
    # (tr(A B) + 1'A1 1'B1 / ((n - 1) (n - 2)) - 2 1'AB1 / (n - 2)) / (n (n - 3)), as the diagonals are 0
    products, of_sums, a, b, n = _sums(first, second)
    return (products + a * b / ((n - 1) * (n - 2)) - 2 * of_sums / (n - 2)) / (n * (n - 3))


def _spread(gram: Array) -> Array:
    """Return (1 + n,) estimates of tr(S^2), the HSIC of features with themselves, all above 0."""
    spread = _hsic(gram, gram)
    if not (spread > 0).all():
        raise IsolossError(
            f"the features of {len(gram)} sentences are too few or too similar to show how they vary: take more "
            "sentences"
        )
    return spread


def _squared_trace(gram: Array) -> Array:
    """Return (1 + n,) unbiased estimates of tr(S)^2, of all sentences, then of all but each.

    Half the squared distance of two sentences has the mean tr(S). The estimate is the mean of the product of two such
    over all four different sentences i, j, k, l: of all pairs of distances, less those with one or two in common.
    """
    diagonal = gram.diagonal()
    distances = (diagonal + diagonal[:, None]) / 2 - gram
    # inclusion and exclusion: two ordered pairs share one sentence in four ways, each of_sums, and both in two
    squares, of_sums, total, _, n = _sums(distances, distances)
    return (total**2 - 4 * of_sums + 2 * squares) / (n * (n - 1) * (n - 2) * (n - 3))


def _jackknifed(values: Array, *, unit: str, method: str) -> Estimate:
    """Return the first value, with the error that the others, which leave out one sentence each, show."""
    without_one = values[1:]
    n = len(without_one)
    influence = (n - 1) * (without_one.mean() - without_one)
    return Estimate(
        value=float(values[0]),
        stderr=float(np.sqrt(np.square(influence).sum() / (n * (n - 1)))),
        samples=n,
        unit=unit,
        num_predictions=0,
        method=f"{method}, jackknife",
        details={"clusters": "sentences"},
        influence=influence,
    )
