"""Multinomial logistic regression with an L2 penalty, to a proven optimum: the convex linear probe.

Shape letters: n examples, D features, C classes, R strengths, K directions of the preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isoloss.errors import IsolossError
from isoloss.transfer.features import rows_at_once
from isoloss.transfer.results import absent_classes, check_classes

_EXACT_WIDTH = 1024  # features up to which the second moments are decomposed exactly
_RANK = 256  # of their approximation above that
_ENOUGH = 1e-6  # the relative gap that does where rounding allows no smaller one


@dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """The minima of R logistic regressions on the same examples, in float64."""

    weights: torch.Tensor  # (R, C, D)
    intercepts: torch.Tensor  # (R, C), each with a sum of 0 over the classes
    objectives: torch.Tensor  # (R,), the objective reached, nats per example
    gaps: torch.Tensor  # (R,), an upper bound on how far the objective is above its minimum, nats per example
    evaluations: tuple[int, ...]  # of the objective and its gradient, for each strength

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Return (R, n) int64: the most probable class of each example; features is (n, D)."""
        strengths, num_classes, width = self.weights.shape
        if features.ndim != 2 or features.shape[1] != width:
            raise IsolossError(f"the probe was fitted on {width} features, not on features of {tuple(features.shape)}")
        stacked = self.weights.flatten(0, 1)
        predictions = []
        for first in range(0, len(features), size := rows_at_once(width)):
            logits = stacked @ features[first : first + size].to(stacked).T + self.intercepts.flatten()[:, None]
            predictions.append(logits.view(strengths, num_classes, -1).argmax(dim=1))
        return torch.cat(predictions, dim=1)


def fit(
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    classes: int,
    regularization: Sequence[float],
    tolerance: float = 1e-9,
    max_evaluations: int = 10_000,
    device: torch.device | str | None = None,
) -> LogisticFit:
    r"""Fit a multinomial logistic regression with an L2 penalty on the weights for each strength.

    For n examples and a strength `l`, the objective is::

        F(W, b) = 1/n sum_i -log softmax(W x_i + b)[y_i] + l/2 |W|^2,

    with the intercepts b free. It is scikit-learn's for `LogisticRegression(C=1 / (l * n))` divided by `C * n`, so the
    minimum is the same.

    SciPy's L-BFGS-B minimizes over W, in float64; the intercepts are minimized exactly at each W. The minimum over b is
    a function of W that is strongly convex with constant l, so with `g` the gradient by W, `|g|^2 / (2 l)` bounds what
    is left to gain: `gaps`. The fit ends where this is at most `tolerance` of the objective; or, where rounding in
    float64 ends the descent before (strengths of about 1e-8), at most 1e-6 of it.

    A gap bounds the distance from the minimum too, `|W - W*|^2 <= 2 gap / l`, but loosely: at 1e-6 of the objective,
    logits were up to 0.03 away and the predictions for one example in 5,000 were still undecided. At 1e-9 no
    prediction changed any more, for 1.5 times as many evaluations.

    Args:
        features: (n, D) floats.
        labels: (n,) int64 labels in 0..classes - 1.
        classes: Number of classes, C; each occurs.
        regularization: R strengths l, above 0.
        tolerance: Bound on the gap relative to the objective at which a fit is done.
        max_evaluations: Evaluations of the objective before giving up.
        device: Where to compute; None: where the features are.

    Returns:
        Weights, intercepts and the bounds. Memory beside the features: 8 bytes for each of them (a centered copy in
        float64), and about 50 C (n + D) bytes.

    Raises:
        IsolossError: Shapes do not fit; a feature is not finite; a label is out of range; a class has no example; a
            setting is out of range; or the tolerance is not reached.

    Example:
        >>> import torch
        >>> from isoloss.transfer.logistic_regression import fit
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> result = fit(x, torch.tensor([0, 0, 1, 1]), classes=2, regularization=[0.1, 1.0])
        >>> result.predict(x).tolist()
        [[0, 0, 1, 1], [0, 0, 1, 1]]
        >>> bool((result.gaps <= 1e-9 * result.objectives).all())
        True
    """
    _check(features, labels, classes, regularization, tolerance, max_evaluations)
    where = torch.device(device) if device else features.device
    x = features.to(where, torch.float64)
    if broken := int((~x.isfinite()).any(dim=1).sum()):
        raise IsolossError(f"{broken} of {len(x)} examples have NaN or infinite features")
    # far means would cost digits, and the free intercepts make up for it
    center = x.mean(dim=0)
    x = x - center
    labels = labels.to(x.device)
    # The best weights, and the gradients on the way, are combinations of the examples. So few examples of many
    # features, such as one-hot tokens, are written in an orthonormal basis of their span.
    basis = None
    if len(x) <= _EXACT_WIDTH and len(x) < x.shape[1]:
        basis, triangular = torch.linalg.qr(x.T)
        x = triangular.T.contiguous()
    moments = _second_moments(x)
    problems = []
    for strength in regularization:
        problem = _Problem(x, labels, classes, float(strength), moments)
        problem.minimize(tolerance, max_evaluations)
        problems.append(problem)
    weights = torch.stack([problem.weight for problem in problems])
    weights = weights if basis is None else weights @ basis.T
    intercepts = torch.stack([problem.bias for problem in problems]) - weights @ center
    return LogisticFit(
        weights=weights,
        intercepts=intercepts - intercepts.mean(dim=1, keepdim=True),
        objectives=torch.tensor([problem.objective for problem in problems], dtype=torch.float64),
        gaps=torch.tensor([problem.gap for problem in problems], dtype=torch.float64),
        evaluations=tuple(problem.evaluations for problem in problems),
    )


@dataclass(frozen=True)
class _Moments:
    """Second moments of centered features, `K ~ U diag(values) U^T + rest (1 - U U^T)`."""

    vectors: torch.Tensor  # (D, K), orthonormal columns U
    values: torch.Tensor  # (K,)
    rest: float  # the mean eigenvalue of what the vectors leave out


def _second_moments(x: torch.Tensor) -> _Moments:
    n, width = x.shape
    if width <= _EXACT_WIDTH:
        values, vectors = torch.linalg.eigh(x.T @ x / n)
        # rounding makes some eigenvalues of 0 negative, and `_Problem` takes roots
        return _Moments(vectors, values.clamp(min=0), 0.0)
    rank = min(_RANK, n)
    # svd_lowrank draws from torch's global random state
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        # one seed, so that the descent and its bits are the same each time
        torch.manual_seed(0)
        _, singular, vectors = torch.svd_lowrank(x, q=rank, niter=1)
    values = singular.square() / n
    rest = max(float(x.square().sum()) / n - float(values.sum()), 0.0) / (width - rank)
    return _Moments(vectors, values, rest)


class _Problem:
    """The regression of one strength, and the point with the smallest bound on its gap so far.

    L-BFGS runs over `theta`, with `W = theta (a K + strength)^(-1/2)`: K is the second moments of the features and a
    the mean variance of a class's indicator, so that `a K + strength` is about the Hessian at W = 0. The variances of
    the features of language models differ by orders of magnitude. There plain L-BFGS needs 10 to 20 times as many
    steps, and scikit-learn's LogisticRegression, whose penalty is the same in all directions of the space that it
    searches, cannot be given other coordinates; nor does it minimize the intercepts exactly, which the bound needs.
    """

    def __init__(self, x: torch.Tensor, labels: torch.Tensor, classes: int, strength: float, moments: _Moments) -> None:
        self.x, self.labels, self.strength, self._moments = x, labels, strength, moments
        self._frequencies = labels.bincount(minlength=classes).double() / len(labels)
        curvature = float((self._frequencies * (1 - self._frequencies)).mean())
        # (a K + strength)^(-1/2) is outside (1 - U U^T) + U diag(...) U^T, for `_scaled` outside + U diag(inside) U^T
        self._outside = (moments.rest * curvature + strength) ** -0.5
        self._inside = (moments.values * curvature + strength).rsqrt() - self._outside
        # the best intercepts at W = 0, where the descent begins
        start = self._frequencies.log()
        self._last_bias = start - start.mean()
        self.objective = self.gap = math.inf
        self.evaluations = 0

    def minimize(self, tolerance: float, max_evaluations: int) -> None:
        """Minimize until the bound is at most `tolerance` of the objective."""
        import numpy as np
        from scipy import optimize

        # SciPy goes by the argument's name: with another one it would pass the point alone
        def stop_if_done(intermediate_result: optimize.OptimizeResult) -> None:
            if self.gap <= tolerance * self.objective or self.evaluations >= max_evaluations:
                raise StopIteration

        theta = np.zeros(len(self._frequencies) * self.x.shape[1])
        # SciPy's own criteria are switched off: the bound decides
        options = {"ftol": 0, "gtol": 0, "maxls": 50, "maxiter": max_evaluations, "maxfun": max_evaluations}
        optimize.minimize(self._evaluate, theta, jac=True, method="L-BFGS-B", callback=stop_if_done, options=options)
        has_stalled = self.evaluations < max_evaluations
        if not self.gap <= max(tolerance, _ENOUGH if has_stalled else 0) * self.objective:
            raise IsolossError(
                f"after {self.evaluations} evaluations the objective {self.objective:.6g} of strength "
                f"{self.strength:g} is known to {self.gap / self.objective:.1e} of itself only, not to {tolerance:g}: "
                "allow more evaluations, a larger tolerance or a larger strength"
            )

    def _evaluate(self, theta: object) -> tuple[float, object]:
        """Return the objective, with the best intercepts, and its gradient by `theta`, (C D,)."""
        weight = self._scaled(torch.as_tensor(theta, device=self.x.device).view(-1, self.x.shape[1]))
        bias, loss, residual = self._best_intercepts(weight @ self.x.T)
        self._last_bias = bias
        residual[self.labels, torch.arange(len(self.labels), device=self.x.device)] -= 1
        gradient = residual @ self.x / len(self.x) + self.strength * weight
        objective = loss + self.strength / 2 * float(weight.square().sum())
        gap = float(gradient.square().sum()) / (2 * self.strength)
        self.evaluations += 1
        # Not simply the last: the bound need not fall in every step, nor within a line search. And it is a bound only
        # at the best intercepts, which 50 steps may not reach where a line search tries weights far out.
        if gap < self.gap and float(residual.mean(dim=1).abs().max()) < 1e-10:
            self.weight, self.bias, self.objective, self.gap = weight, bias, objective, gap
        # by the chain rule, with the same matrix, which is symmetric
        return objective, self._scaled(gradient).flatten().cpu().numpy()

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (C, D) times `(a K + strength)^(-1/2)`."""
        vectors = self._moments.vectors
        scaled: torch.Tensor = self._outside * rows + (rows @ vectors * self._inside) @ vectors.T
        return scaled

    def _best_intercepts(self, logits: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
        """Return the intercepts (C,) that minimize the mean loss of logits (C, n) plus them, by Newton's method.

        Also that loss, and the probabilities (C, n).
        """
        picked = self.labels[None]

        def probabilities_at(candidate: torch.Tensor) -> tuple[torch.Tensor, float]:
            log_probs = (logits + candidate[:, None]).log_softmax(dim=0)
            return log_probs, -float(log_probs.gather(0, picked).mean())

        bias = self._last_bias
        log_probs, loss = probabilities_at(bias)
        for _ in range(50):
            probs = log_probs.exp()
            means = probs.mean(dim=1)
            gradient = means - self._frequencies
            if float(gradient.abs().max()) < 1e-14:
                break
            # one constant for all classes changes nothing, so that the Hessian is singular but for the last term
            hessian = torch.diag(means) - probs @ probs.T / len(self.labels) + 1 / len(bias)
            step = torch.linalg.solve_ex(hessian, gradient).result
            spread = step.max() - step.min()
            # The third derivative of the loss along the step is at most the spread times the second, so that the loss
            # falls at each size up to this one (Sun and Tran-Dinh, Generalized self-concordant functions, 2019).
            safe = float(spread.log1p() / spread)
            size = 1.0
            candidate, new = probabilities_at(bias - step)
            # differences below the rounding of the loss say nothing: there Newton's full step is right
            while new > loss + 1e-14 and size > safe:
                size /= 2
                candidate, new = probabilities_at(bias - size * step)
            # Where nearly all probabilities are 0 or 1, rounding leaves nothing of the Hessian, and Newton's step goes
            # astray or is not a number. Sinkhorn's step, which gives each class its frequency at fixed normalizers of
            # the examples, never raises the loss.
            if not new <= loss + 1e-14:
                step, size = log_probs.logsumexp(dim=1) - (len(self.labels) * self._frequencies).log(), 1.0
                candidate, new = probabilities_at(bias - step)
            bias, loss, log_probs = bias - size * step, new, candidate
        return bias - bias.mean(), loss, log_probs.exp()


def _check(
    features: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    regularization: Sequence[float],
    tolerance: float,
    max_evaluations: int,
) -> None:
    if features.ndim != 2 or labels.ndim != 1 or len(features) != len(labels) or features.shape[1] == 0:
        raise IsolossError(
            f"a convex probe needs features (n, D) and labels (n,), not {tuple(features.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if len(labels) == 0:
        raise IsolossError(f"there are no examples: the features are {tuple(features.shape)}")
    if labels.dtype != torch.int64:
        raise IsolossError(f"a convex probe needs int64 labels, not {labels.dtype}")
    if classes < 2:
        raise IsolossError(f"classes is {classes}; a convex probe needs at least 2")
    check_classes("label", labels, classes)
    if missing := absent_classes(labels, classes).tolist():
        raise IsolossError(
            f"there is no example of {'class' if len(missing) == 1 else 'classes'} {', '.join(map(str, missing))} "
            f"among the {len(labels)}: without one the intercept has no minimum"
        )
    if not regularization:
        raise IsolossError("regularization is empty; a convex probe needs at least one strength")
    for value in regularization:
        if not 0 < value < math.inf:
            raise IsolossError(f"regularization has {value}; strengths must be above 0, where the minimum is unique")
    if not 0 < tolerance < math.inf:
        raise IsolossError(f"tolerance is {tolerance}; it must be above 0")
    if max_evaluations < 1:
        raise IsolossError(f"max_evaluations is {max_evaluations}; it must be at least 1")
