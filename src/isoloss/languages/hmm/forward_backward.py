"""The forward-backward recursions of a hidden Markov model, for many sentences at once.

Shapes: n sentences, T positions, S states, V tokens. A position whose token is unknown, or which lies behind the end of
the sentence, has the id V: it is summed over, which leaves the other positions' distribution as it is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.csgraph import connected_components

Float = npt.NDArray[np.float64]
Index = slice | torch.Tensor

_RELIABLE = 1e-25  # a smaller normalizer in float32 may rest on denormal numbers: its row is computed in float64


class LeaveOneOut(NamedTuple):
    """What one forward and one backward pass give; the states are of no meaning where a row is impossible."""

    states: torch.Tensor  # (T, n, S) Pr(state at t | all other tokens)
    possible: torch.Tensor  # (n,) bool, whether the sentence has a probability above 0


class ForwardBackward:
    """The recursions of one model, or of some of its states that no transition may leave.

    Attributes:
        states: The kept states, a slice where they are consecutive.
        tokens: The tokens that these emit, likewise.
        emission: (states, tokens), the kept part.
    """

    def __init__(
        self,
        initial: Float,
        transition: Float,
        emission: Float,
        states: npt.NDArray[np.int64],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model = initial, transition, emission, states
        self.device, self.dtype = device, dtype
        tokens = np.flatnonzero((emission[states] > 0).any(axis=0))
        self.states, self.tokens = _index(states, device), _index(tokens, device)
        kept = emission[np.ix_(states, tokens)]
        peak = kept.max(axis=0)  # each column is divided by its largest entry, so that rare tokens do not underflow
        unknown, foreign = len(tokens), len(tokens) + 1
        rows = np.concatenate([(kept / peak).T, np.ones((1, len(states))), np.zeros((1, len(states)))])
        local = np.full(emission.shape[1] + 1, foreign)
        local[tokens], local[-1] = np.arange(len(tokens)), unknown
        self._local = torch.as_tensor(local, device=device)
        self._scaled, self._log_peak, self.emission, self._initial, self._transition = (
            torch.as_tensor(table).to(device, dtype)
            for table in (
                rows,
                np.log(np.concatenate([peak, [1.0, 1.0]])),
                kept,
                initial[states],
                transition[np.ix_(states, states)],
            )
        )
        self._back = self._transition.T.contiguous()

    @functools.cached_property
    def _wide(self) -> ForwardBackward:
        return ForwardBackward(*self._model, torch.device("cpu"), torch.float64)

    def log_prob(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log-probability of the known tokens in nats, by the forward recursion; -inf for none."""
        local = self._local[ids]
        scales = torch.empty(ids.shape[1], len(ids), dtype=self.dtype, device=self.device)
        filtered = self._initial.expand(len(ids), -1)
        for t in range(ids.shape[1]):
            filtered = (filtered @ self._transition if t else filtered) * self._scaled[local[:, t]]
            scales[t] = filtered.sum(dim=1)
            filtered /= scales[t].clamp(min=torch.finfo(self.dtype).tiny)[:, None]
        result = scales.log().sum(dim=0) + self._log_peak[local].sum(dim=1)
        if self.dtype != torch.float64 and bool((low := scales.amin(dim=0) < _RELIABLE).any()):
            result[low] = self._wide.log_prob(ids[low].cpu()).to(result)
        return result + 0.0  # no -0.0

    def leave_one_out(self, ids: torch.Tensor) -> LeaveOneOut:
        """Return each position's state distribution given all other tokens: predicted state times backward message."""
        n, length = ids.shape
        local, tiny = self._local[ids], torch.finfo(self.dtype).tiny
        states = torch.empty(length, n, len(self._initial), dtype=self.dtype, device=self.device)
        scales = torch.empty(2 * length, n, dtype=self.dtype, device=self.device)
        states[0] = self._initial
        emitted = [self._scaled[local[:, t]] for t in range(length)]
        for t in range(length):
            filtered = states[t] * emitted[t]
            scales[t] = filtered.sum(dim=1)
            if t + 1 < length:
                filtered /= scales[t].clamp(min=tiny)[:, None]
                torch.mm(filtered, self._transition, out=states[t + 1])
        backward = torch.ones_like(states[0])
        for t in range(length - 1, -1, -1):
            states[t] *= backward
            scales[length + t] = states[t].sum(dim=1)
            if t:
                backward = (backward * emitted[t]) @ self._back
                backward /= backward.amax(dim=1, keepdim=True).clamp_(min=tiny)
        states /= scales[length:].clamp(min=tiny)[:, :, None]
        least = scales.amin(dim=0)
        possible = least > 0
        if self.dtype != torch.float64 and bool((low := least < _RELIABLE).any()):
            again = self._wide.leave_one_out(ids[low].cpu())
            states[:, low], possible[low] = again.states.to(states), again.possible.to(self.device)
        return LeaveOneOut(states, possible)

    def posterior(self, ids: torch.Tensor) -> LeaveOneOut:
        """Return each position's state distribution given all tokens, its own included; as `leave_one_out`."""
        states, possible = self.leave_one_out(ids)
        states *= self._scaled[self._local[ids].T]
        scales = states.sum(dim=2)
        states /= scales.clamp(min=torch.finfo(self.dtype).tiny)[:, :, None]
        if self.dtype != torch.float64 and bool((low := scales.amin(dim=0) < _RELIABLE).any()):
            again = self._wide.posterior(ids[low].cpu())
            states[:, low], possible[low] = again.states.to(states), again.possible.to(self.device)
        return LeaveOneOut(states, possible)


class Components:
    """A model, and the parts that its transitions never connect, each a smaller model of its own.

    A block-diagonal model has many. Nearly every sentence is possible in one component alone, whatever its token at any
    one position, and all that is asked about it is then known from that component.
    """

    def __init__(
        self, initial: Float, transition: Float, emission: Float, device: torch.device, dtype: torch.dtype
    ) -> None:
        every = np.arange(len(initial))
        labels = connected_components(transition > 0, directed=False)[1]
        parts = [(labels == label).nonzero()[0] for label in np.unique(labels)]
        parts = [part for part in parts if initial[part].any()]
        if len(parts) == 1 and len(parts[0]) == len(every):
            parts = []
        self.whole = ForwardBackward(initial, transition, emission, every, device, dtype)
        self.parts = [ForwardBackward(initial, transition, emission, part, device, dtype) for part in parts]
        misses = np.ones((emission.shape[1] + 1, len(parts)), dtype=np.float32)
        for index, part in enumerate(parts):
            misses[:-1, index] = ~emission[part].any(axis=0)
            misses[-1, index] = 0
        self._misses = torch.as_tensor(misses, device=device)

    def assign(self, ids: torch.Tensor, *, spare: int) -> list[tuple[torch.Tensor | None, ForwardBackward]]:
        """Return rows (None: all) and the model that decides them; each row is in one of the pairs.

        `spare` of a sentence's tokens may be others: 1 where each position's token is asked for.
        """
        if not self.parts:
            return [(None, self.whole)]
        candidate = self._misses[ids].sum(dim=1) <= spare
        chosen = torch.where(candidate.sum(dim=1) == 1, candidate.int().argmax(dim=1), len(self.parts))
        pairs = [((chosen == index).nonzero()[:, 0], model) for index, model in enumerate([*self.parts, self.whole])]
        return [(rows, model) for rows, model in pairs if len(rows)]


def _index(numbers: npt.NDArray[np.int64], device: torch.device) -> Index:
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.as_tensor(numbers, device=device)
