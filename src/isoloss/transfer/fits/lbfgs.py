"""One logistic regression on its way to the minimum: L-BFGS with a Kronecker-factored initial Hessian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from isoloss.transfer.fits.blocks import Spectrum

_HISTORY = 10  # pairs of steps and changes of the gradient
_DECREASE = 1e-4  # fraction of the predicted decrease that a step must reach
_LEAST_STEP = 1e-6
_PATIENCE = 30  # evaluations in float32 without a smaller gradient, after which its rounding is what is left


@dataclass(frozen=True)
class Evaluation:
    """Objective, gradient (D + 1, C) and the curvature `mean(diag(p) - p p^T)` (C, C) at a trial point."""

    value: float
    gradient: torch.Tensor
    curvature: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, loss: float, gradient: torch.Tensor, outer: torch.Tensor, size: int) -> Evaluation:
        """Return the evaluation from sums over the split's `size` rows, with the penalty added."""
        weight = problem.trial[:-1]
        whole = gradient / size
        whole[:-1] += problem.strength * weight
        penalty = 0.5 * problem.strength * float(weight.double().square().sum())
        # the rows of `outer` sum to those of the probabilities, since probabilities sum to one
        curvature = (torch.diag(outer.sum(dim=1)) - outer) / size
        return cls(loss / size + penalty, whole, curvature.double())


class Problem:
    """A split and a strength: the point reached, `theta` (D + 1, C) with the intercepts last, and the one on trial."""

    def __init__(self, split: int, strength: float, prior: torch.Tensor, width: int) -> None:
        """Start at weights 0 and the intercepts that give the class frequencies `prior` (C,)."""
        self.split, self.strength = split, strength
        intercepts = prior.log()
        self.theta = torch.cat([prior.new_zeros(width, len(prior)), (intercepts - intercepts.mean())[None]])
        self.objective = self.gap = self.gradient_norm = math.inf

    def start(self, dtype: torch.dtype) -> None:
        """Begin at `theta` in `dtype`, with no history."""
        self.theta = self.theta.to(dtype)
        self.trial, self.value, self.stuck = self.theta, math.inf, False
        self._gradient = self._direction = torch.zeros_like(self.theta)
        self._slope, self._step = 0.0, 0.0
        self._best, self._waited = math.inf, 0
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def bound(self) -> float:
        """Return the bound on the gap, were the intercepts optimal."""
        return float(self._gradient[:-1].double().square().sum()) / (2 * self.strength)

    def advance(self, evaluation: Evaluation, spectrum: Spectrum) -> None:
        """Take the trial point or shorten the step, and choose the next trial point."""
        slope = float((evaluation.gradient * self._direction).sum())
        if self.value < math.inf and not self._acceptable(evaluation, slope):
            # where the line's derivative would vanish were it linear
            fraction = self._slope / (self._slope - slope) if slope > 0 else 0.5
            self._step *= min(max(fraction, 0.1), 0.5)
            self.stuck = self._step < _LEAST_STEP
        else:
            if self.value < math.inf:
                step, change = self.trial - self.theta, evaluation.gradient - self._gradient
                product = float((step * change).sum())
                if product > 1e-10 * float(step.norm() * change.norm()):
                    self._pairs = [*self._pairs[1 - _HISTORY :], (step, change, product)]
            self.theta, self.value, self._gradient = self.trial, evaluation.value, evaluation.gradient
            self._direction = -self._inverse(evaluation, spectrum)
            self._slope, self._step = float((self._gradient * self._direction).sum()), 1.0
            self.stuck = not self._slope < 0
        self.trial = self.theta + self._step * self._direction
        self._best, self._waited = (self.bound(), 0) if self.bound() < self._best else (self._best, self._waited + 1)
        if self._waited >= _PATIENCE and self.theta.dtype == torch.float32:
            self.stuck = True

    def _acceptable(self, evaluation: Evaluation, slope: float) -> bool:
        """Return whether the objective falls enough; where it rounds, ask its derivative (Hager-Zhang)."""
        if evaluation.value <= self.value + _DECREASE * self._step * self._slope:
            return True
        rounding = 1e-6 if evaluation.gradient.dtype == torch.float32 else 1e-14
        return evaluation.value <= self.value * (1 + rounding) and slope <= (2 * _DECREASE - 1) * self._slope

    def _inverse(self, evaluation: Evaluation, spectrum: Spectrum) -> torch.Tensor:
        """Return the approximate inverse Hessian times the gradient: the two loops of L-BFGS."""
        q: torch.Tensor = self._gradient.clone()
        alphas = []
        for step, change, product in reversed(self._pairs):
            alpha = float((step * q).sum()) / product
            q -= alpha * change
            alphas.append(alpha)
        values, turn = torch.linalg.eigh(evaluation.curvature)
        values, turn = values.clamp(min=1e-6 * float(values[-1])).to(q.dtype), turn.to(q.dtype)
        last = self._pairs[-1:]
        turned = torch.cat([vector @ turn for vector in (q, *(change for _, change, _ in last))], dim=1)
        repeated = values.repeat(1 + len(last))
        solved = torch.cat([spectrum.solve(turned[:-1], repeated, self.strength), (turned[-1] / repeated)[None]])
        q, *foreseen = (part @ turn.T for part in torch.split(solved, len(values), dim=1))
        for (_, change, product), inverse in zip(last, foreseen, strict=True):
            # to the scale that the last step shows, halfway: its directions are those of large curvature
            q *= math.sqrt(product / float((change * inverse).sum()))
        for (step, change, product), alpha in zip(self._pairs, reversed(alphas), strict=True):
            q += step * (alpha - float((change * q).sum()) / product)
        return q
