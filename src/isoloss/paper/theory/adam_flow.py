r"""Adam in the place of SGD in Theorem 3.3: does its drift keep the trace term?

Adam divides each gradient by the root of its mean square. At a minimizer that mean is the Hessian's diagonal over B
(Lemma 3.2), so in the coordinates `theta / D^(1/2)`, `D = diag(H)^(-1/2)`, Adam is SGD. There the trace of the Hessian
is `R = Tr(D H) = sum_i sqrt(H_ii)`, whose gradient at constant D is twice that of R, and the projection along the
minimizers is `M = D^(1/2) P D^(1/2)`. So Adam follows `-(1/2) M grad R`, whatever B is. This is as the step size goes
to 0, with mean squares over more steps than the parameters take back to the minimizers, and fewer than the drift takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoloss.paper.theory.sgd_flow import Array, Drift, LogProbsModel, MaskedLM, Minimizers, Settings, TwoParameters

MOMENTUM = 0.9  # beta_1
EPSILON = 1e-8  # where a gradient is always 0
ON_ROOTS = Drift("Adam", "sum of the roots of the Hessian's diagonal", "M grad R", "", "as fast", 0.0, 0.5)
ON_TRACE = Drift("Adam", "trace", "M grad Tr", " / sqrt(B)", "sqrt(B) times slower", 0.5, 0.5)


class AdamMinimizers(Minimizers):
    """The minimizers in Adam's coordinates."""

    def _roots(self, theta: torch.Tensor) -> torch.Tensor:
        return (self.root(theta).square().sum(dim=0) + EPSILON**2).sqrt()

    def scale(self, theta: torch.Tensor) -> torch.Tensor:
        """Return D^(1/2) for B = 1, (P,)."""
        return self._roots(theta).rsqrt()

    def trace(self, theta: torch.Tensor) -> torch.Tensor:
        """Return R, (), the trace of the Hessian in these coordinates."""
        return self._roots(theta).sum()


class _OnTrace(AdamMinimizers):
    trace = Minimizers.trace


class Adam(LogProbsModel):
    """A model on which Adam steps; its mean squares begin with what they are on average at the start."""

    def __init__(self, model: LogProbsModel, *, on_trace: bool = False) -> None:
        """Take the model, and whether the flow to check is that of the trace itself, in Adam's coordinates."""
        of_model = model.minimizers
        self.minimizers = (_OnTrace if on_trace else AdamMinimizers)(of_model.model, of_model.conditionals)
        self.drift = ON_TRACE if on_trace else ON_ROOTS
        self.name, self.minimizer, self.block = f"{model.name}, {self.drift.gradient}", model.minimizer, model.block
        self._model = model
        self._moments: tuple[Array, ...] = ()

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Take a step of Adam, in place, with `1 - beta_2 = eta^(3/2)`."""
        if not self._moments:
            squares = self.minimizers.root(torch.tensor(self.minimizer)).square().sum(dim=0).numpy() / batch_size
            self._moments = np.zeros_like(theta), np.tile(squares, (len(theta), 1))
        stepped, (means, squares) = theta.copy(), self._moments
        # the gradient is what a step of SGD of size 1 takes off
        self._model.move(stepped, 1.0, batch_size=batch_size, generator=generator, exact=exact)
        gradient = theta - stepped
        means += (1 - MOMENTUM) * (gradient - means)
        squares += step_size**1.5 * (gradient**2 - squares)
        theta -= step_size * means / (np.sqrt(squares) + EPSILON)


def settings(*, seed: int = 0, **changes: Any) -> list[Settings]:
    """Return what to run for two parameters and for the masked language model: the derived flow, then the other."""
    of_two = {"step_sizes": (0.03, 0.01, 0.003), "times": (0.5, 1.0), "trajectories": 1024}
    of_masked = {"step_sizes": (0.01, 0.005, 0.0025), "times": (0.05, 0.1), "trajectories": 256}
    models: list[tuple[LogProbsModel, dict[str, Any]]] = [
        (TwoParameters(0.7, 2.0), of_two),
        (MaskedLM(seed=seed), of_masked),
    ]
    return [
        Settings(model=Adam(model, on_trace=on_trace), coefficient=coefficient, seed=seed, **{**fields, **changes})
        for model, fields in models
        for on_trace, coefficient in ((False, 0.5), (True, 0.25))
    ]
