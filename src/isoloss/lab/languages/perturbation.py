"""Languages near another one, for transfer out of distribution: some of its probabilities drawn anew."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from isoloss import seeds
from isoloss.errors import IsolossError

Floats = npt.NDArray[np.float64]


class Perturbation:
    """The draws of `Language.perturbed`, whose arguments it takes."""

    def __init__(self, fraction: float, seed: int) -> None:
        if not 0 < fraction <= 1:
            raise IsolossError(f"the fraction is {fraction}; it must be above 0 and at most 1")
        self._fraction = fraction
        self._rng = np.random.default_rng(seeds.derive(seed, "redraw"))

    def choose(self, has_choice: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the ids of the symbols or states, of those where `has_choice` is true, that are drawn anew."""
        candidates = np.flatnonzero(has_choice)
        if not len(candidates):
            raise IsolossError("no symbol or state of this language has a choice, so there is nothing to draw anew")
        return np.sort(self._rng.permutation(candidates)[: math.ceil(self._fraction * len(candidates))])

    def draw(self, probs: Floats) -> Floats:
        """Return other probabilities of the same sum, from the flat Dirichlet distribution; one alone stays."""
        if len(probs) < 2:
            return probs
        drawn: Floats = probs.sum() * self._rng.dirichlet(np.ones(len(probs)))
        return drawn
