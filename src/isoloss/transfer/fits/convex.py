"""Multinomial logistic regression to a proven optimum: many splits and strengths in one pass over the features.

Shape letters: n examples, D features, C classes, F splits, R strengths, P = F R problems, B rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isoloss.errors import IsolossError
from isoloss.transfer.fits.blocks import FeatureBlocks, Features, Spectrum, second_moments
from isoloss.transfer.fits.lbfgs import Evaluation, Problem
from isoloss.transfer.results import absent_classes, check_classes
from isoloss.transfer.stored_features import rows_at_once

_CERTIFICATE_PASSES = 2
# what part of the tolerance the steps of each round aim at: exact intercepts then move the gradient by the weights, by
# much where classes lie in clusters far apart
_ROUNDS = ((torch.float32, 0.5), *((torch.float64, 0.5 / 10**i) for i in range(10)))


@dataclass(frozen=True, kw_only=True)
class ConvexFit:
    """The minima of F x R logistic regressions on the same features, in float64."""

    weights: torch.Tensor  # (F, R, D, C)
    intercepts: torch.Tensor  # (F, R, C), each with a sum of 0 over the classes
    objectives: torch.Tensor  # (F, R), the objective reached, nats per example
    gaps: torch.Tensor  # (F, R), an upper bound on how far the objective is above its minimum, nats per example
    gradient_norms: torch.Tensor  # (F, R), Euclidean norm of the gradient by the weights; by the intercepts it is 0
    passes: int  # readings of the features

    def predict(self, features: Features) -> torch.Tensor:
        """Return (F, R, n) int64: the most probable class of each example; features is (n, D)."""
        splits, strengths, width, num_classes = self.weights.shape
        if features.ndim != 2 or features.shape[1] != width:
            raise IsolossError(f"the probe was fitted on {width} features, not on features of {tuple(features.shape)}")
        stacked = self.weights.permute(2, 0, 1, 3).reshape(width, -1)
        predictions = []
        for first in range(0, len(features), size := rows_at_once(width)):
            logits = torch.as_tensor(features[first : first + size]).to(stacked) @ stacked + self.intercepts.flatten()
            predictions.append(logits.view(-1, splits, strengths, num_classes).argmax(dim=3))
        return torch.cat(predictions).permute(1, 2, 0).contiguous()


def fit(
    features: Features,
    labels: torch.Tensor,
    *,
    classes: int,
    regularization: Sequence[float],
    splits: Sequence[torch.Tensor] | None = None,
    tolerance: float = 1e-6,
    max_passes: int = 10_000,
    block_rows: int | None = None,
    device: torch.device | str | None = None,
) -> ConvexFit:
    """Fit multinomial logistic regressions with an L2 penalty on the weights, one for each split and strength.

    For the m rows of a split and a strength `l`, the objective is::

        F(W, b) = 1/m sum_i -log softmax(x_i W + b)[y_i] + l/2 |W|^2,

    with the intercepts b free. It is scikit-learn's for `LogisticRegression(C=1 / (l * m))` divided by `C * m`, so the
    minimum is the same.

    All problems are minimized side by side, so that a step reads the features once. The method is L-BFGS whose initial
    inverse Hessian is that of `K x A + l`, K the second moments of the features and A the mean of
    `diag(p) - p p^T` over the rows, as in K-FAC (Martens and Grosse, 2015); above 2048 features K is known by a
    randomized Nystrom approximation of rank 512 and its trace. Steps are computed in float32. Then the intercepts are
    minimized exactly and the gradient `g` by the weights is computed, in float64. The minimum over b is a function of W
    that is strongly convex with constant l, so `|g|^2 / (2 l)` bounds what is left to gain. Where float32 does not
    reach the tolerance, steps in float64 follow, to a smaller one where need be.

    Args:
        features: (n, D) floats: a tensor, of which one float32 copy is made; or `StoredFeatures` or an array, which
            may be memory-mapped: these are read in blocks of rows.
        labels: (n,) int64 labels in 0..classes - 1.
        classes: Number of classes, C; each occurs in every split.
        regularization: R strengths l, above 0.
        splits: F subsets of the rows, each (n,) bool or int64 row numbers; None: one, of all rows.
        tolerance: Bound on the gap relative to the objective at which a problem is done.
        max_passes: Readings of the features before giving up.
        block_rows: Rows that are taken at once; None: 2048, or fewer of wide features, 16 million numbers.
        device: Where to compute; None: where the features are.

    Returns:
        Weights, intercepts and the bounds. Memory beside the features: 20 D C numbers a problem for the steps, and
        n C float64 a problem for the certificate.

    Raises:
        IsolossError: Shapes do not fit; a feature is not finite; a label is out of range; a split is empty, has row
            numbers out of range, or lacks a class; a setting is out of range; or the tolerance is not reached.

    Example:
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> result = fit(x, torch.tensor([0, 0, 1, 1]), classes=2, regularization=[0.1, 1.0])
        >>> result.predict(x)[0].tolist()
        [[0, 0, 1, 1], [0, 0, 1, 1]]
        >>> bool((result.gaps <= 1e-6 * result.objectives).all())
        True
    """
    _check_settings(regularization, tolerance, max_passes, 1 if block_rows is None else block_rows)
    members = _members(features, labels, classes, splits)
    block_rows = block_rows or rows_at_once(features.shape[1])
    where = torch.device(device) if device else features.device if isinstance(features, torch.Tensor) else "cpu"
    rows = FeatureBlocks(features, labels, members, block_rows=block_rows, device=torch.device(where))
    spectrum = second_moments(rows)
    priors = [labels[mask].bincount(minlength=classes).double() / int(mask.sum()) for mask in members.T]
    problems = [
        Problem(split, float(strength), prior.to(rows.device), rows.width)
        for split, prior in enumerate(priors)
        for strength in regularization
    ]
    unsolved = problems
    for dtype, part in _ROUNDS:
        _descend(rows, unsolved, spectrum, dtype, part * tolerance, max_passes)
        _certify(rows, unsolved)
        unsolved = [p for p in unsolved if not p.gap <= tolerance * p.objective]
        if not unsolved:
            break
    if unsolved:
        worst = max(unsolved, key=lambda p: p.gap / p.objective)
        raise IsolossError(
            f"after {rows.passes} passes the objective {worst.objective:.6g} of strength {worst.strength:g} is known "
            f"to {worst.gap / worst.objective:.1e} of itself only, not to {tolerance:g}: allow more passes, a larger "
            "tolerance or a larger strength"
        )
    return _result(rows, problems, (members.shape[1], len(regularization)))


def _descend(
    rows: FeatureBlocks,
    problems: list[Problem],
    spectrum: Spectrum,
    dtype: torch.dtype,
    tolerance: float,
    max_passes: int,
) -> None:
    """Take steps in `dtype` until every problem is within the tolerance, or `dtype` allows no progress."""
    spectrum = spectrum.to(dtype)
    for problem in problems:
        problem.start(dtype)
    active_problems = problems
    while active_problems and rows.passes < max_passes - _CERTIFICATE_PASSES:
        evaluations = evaluate(rows, active_problems, dtype)
        for problem, evaluation in zip(active_problems, evaluations, strict=True):
            problem.advance(evaluation, spectrum)
        active_problems = [p for p in active_problems if not p.stuck and p.bound() > tolerance * p.value]


def evaluate(rows: FeatureBlocks, problems: list[Problem], dtype: torch.dtype) -> list[Evaluation]:
    """Return objective, gradient (D + 1, C) and mean of `p p^T` (C, C) of each problem at its trial point.

    The intercepts are the last row of the parameters, and belong to the centered features.
    """
    num, classes = len(problems), problems[0].trial.shape[1]
    splits = torch.tensor([p.split for p in problems], device=rows.device)
    # a row for each problem and class: products of long rows are the faster ones
    weight = torch.stack([p.trial.T for p in problems]).to(dtype)  # (P, C, D + 1)
    coefficients, bias = weight[:, :, :-1].contiguous(), weight[:, :, -1:]
    at_zero = not bool(coefficients.any())  # the first time
    losses = torch.zeros(num, dtype=torch.float64, device=rows.device)
    gradient = torch.zeros_like(weight)
    outer = torch.zeros(num, classes, classes, dtype=dtype, device=rows.device)
    for x, y, inside in rows.blocks(dtype):
        used = inside.any(dim=0)[splits]
        if not bool(used.any()):
            continue
        active = slice(None) if bool(used.all()) else used.nonzero()[:, 0]
        logits = weight.new_zeros(len(bias[active]), classes, len(x))
        if not at_zero:
            torch.mm(coefficients[active].flatten(0, 1), x.T, out=logits.view(-1, len(x)))
        log_probs = logits.add_(bias[active]).log_softmax(dim=1)
        used_rows = inside[:, splits[active]].T[:, None].to(dtype)  # (P, 1, B)
        picked = y.expand(len(log_probs), 1, -1)
        losses[active] -= (log_probs.gather(1, picked) * used_rows).double().sum(dim=(1, 2))
        residual = log_probs.exp_().mul_(used_rows)
        outer[active] += residual @ residual.transpose(1, 2)
        residual.scatter_add_(1, picked, -used_rows)
        gradient[active, :, :-1] += torch.mm(residual.flatten(0, 1), x).view(-1, classes, rows.width)
        gradient[active, :, -1] += residual.sum(dim=2)
    return [
        Evaluation.of(problem, float(losses[i]), gradient[i].T.contiguous(), outer[i], rows.sizes[problem.split])
        for i, problem in enumerate(problems)
    ]


def _certify(rows: FeatureBlocks, problems: list[Problem]) -> None:
    """Set each problem's objective, gradient norm and gap in float64, with intercepts that are exactly optimal."""
    count, classes = len(rows.labels), problems[0].theta.shape[1]
    weight = torch.stack([p.theta[:-1] for p in problems], dim=1).double()  # (D, P, C)
    splits = torch.tensor([p.split for p in problems], device=rows.device)
    logits = torch.zeros(count, len(problems), classes, dtype=torch.float64, device=rows.device)
    first = 0
    for x, _, inside in rows.blocks(torch.float64):
        used = inside.any(dim=0)[splits]
        logits[first : first + len(x), used] = torch.tensordot(x, weight[:, used], dims=1)
        first += len(x)
    for i, problem in enumerate(problems):
        inside = rows.members[:, problem.split]
        bias, loss = _intercepts(logits[inside, i], rows.labels[inside], problem.theta[-1].double())
        problem.theta = torch.cat([problem.theta[:-1].double(), bias[None]])
        problem.objective = loss + 0.5 * problem.strength * float(problem.theta[:-1].square().sum())
        residual = (logits[:, i] + bias).softmax(dim=1)
        residual[torch.arange(count, device=rows.device), rows.labels] -= 1
        logits[:, i] = residual * inside[:, None] / rows.sizes[problem.split]
    gradient = torch.zeros_like(weight)
    first = 0
    for x, _, inside in rows.blocks(torch.float64):
        used = inside.any(dim=0)[splits]
        gradient[:, used] += torch.tensordot(x.T, logits[first : first + len(x), used], dims=1)
        first += len(x)
    for i, problem in enumerate(problems):
        whole = gradient[:, i] + problem.strength * problem.theta[:-1]
        balanced = float(logits[:, i].sum(dim=0).abs().max()) < 1e-10
        problem.gradient_norm = float(whole.norm())
        problem.gap = problem.gradient_norm**2 / (2 * problem.strength) if balanced else math.inf


def _intercepts(logits: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the intercepts (C,) that minimize the mean loss of logits (m, C) plus them, and that loss: Newton."""
    counts = labels.bincount(minlength=len(bias)).double()
    frequencies = counts / len(labels)

    def loss_at(candidate: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits + candidate, labels))

    loss = loss_at(bias)
    for _ in range(50):
        probs = (logits + bias).softmax(dim=1)
        gradient = probs.mean(dim=0) - frequencies
        if float(gradient.abs().max()) < 1e-14:
            break
        hessian = torch.diag(probs.mean(dim=0)) - probs.T @ probs / len(labels) + 1 / len(bias)  # its null space is 1
        step = torch.linalg.solve(hessian, gradient)
        size = 1.0
        # differences below the rounding of the loss say nothing: there Newton's full step is right
        while loss_at(bias - size * step) > loss + 1e-14 and size > 1e-6:
            size /= 2
        bias = bias - size * step
        loss = loss_at(bias)
    return bias - bias.mean(), loss


def _result(rows: FeatureBlocks, problems: list[Problem], shape: tuple[int, int]) -> ConvexFit:
    weights = torch.stack([p.theta[:-1] for p in problems])
    intercepts = torch.stack([p.theta[-1] for p in problems]) - rows.center @ weights
    intercepts -= intercepts.mean(dim=-1, keepdim=True)

    def numbers(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(shape)

    return ConvexFit(
        weights=weights.view(*shape, *weights.shape[1:]),
        intercepts=intercepts.view(*shape, -1),
        objectives=numbers([p.objective for p in problems]),
        gaps=numbers([p.gap for p in problems]),
        gradient_norms=numbers([p.gradient_norm for p in problems]),
        passes=rows.passes,
    )


def _check_settings(regularization: Sequence[float], tolerance: float, max_passes: int, block_rows: int) -> None:
    if not regularization:
        raise IsolossError("regularization is empty; a convex probe needs at least one strength")
    for value in regularization:
        if not 0 < value < math.inf:
            raise IsolossError(f"regularization has {value}; strengths must be above 0, where the minimum is unique")
    if not 0 < tolerance < math.inf:
        raise IsolossError(f"tolerance is {tolerance}; it must be above 0")
    for name, count, least in (("max_passes", max_passes, 4), ("block_rows", block_rows, 1)):
        if count < least:
            raise IsolossError(f"{name} is {count}; it must be at least {least}")


def _members(
    features: Features, labels: torch.Tensor, classes: int, splits: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """Return (n, F) bool: which rows each split has."""
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
    if splits is not None and len(splits) == 0:
        raise IsolossError("splits is empty; a convex probe needs at least one, or None for all rows")
    labels = labels.cpu()
    subsets = [torch.ones(len(labels), dtype=torch.bool)] if splits is None else list(splits)
    return torch.stack([_mask(index, rows, labels, classes) for index, rows in enumerate(subsets)], dim=1)


def _mask(index: int, rows: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the rows of a split as (n,) bool."""
    rows, count = rows.cpu(), len(labels)
    if rows.dtype == torch.bool and rows.shape == labels.shape:
        mask = rows
    elif rows.dtype == torch.int64 and rows.ndim == 1:
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count and int(rows.bincount().max()) == 1):
            raise IsolossError(f"split {index} needs different row numbers from 0 to {count - 1}")
        mask = torch.zeros(count, dtype=torch.bool)
        mask[rows] = True
    else:
        raise IsolossError(
            f"split {index} is {rows.dtype} of shape {tuple(rows.shape)}: give ({count},) bool, or int64 row numbers"
        )
    if not bool(mask.any()):
        raise IsolossError(f"split {index} is empty: a convex probe needs examples of every class")
    if missing := absent_classes(labels[mask], classes).tolist():
        raise IsolossError(
            f"split {index} has no example of {'class' if len(missing) == 1 else 'classes'} "
            f"{', '.join(map(str, missing))} among its {int(mask.sum())}: without one the intercept has no minimum"
        )
    return mask
