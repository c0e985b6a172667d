"""The forward-backward recursions of a hidden Markov model, for many sentences at once.

Shapes: n sentences, T positions, S states, V tokens. A position whose token is unknown, or which lies behind the end of
the sentence, has the id V: it is summed over, which leaves the other positions' distribution as it is.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.csgraph import connected_components

from isoloss.lab.languages import batches
from isoloss.lab.languages.batches import Backend, choose_backend

if TYPE_CHECKING:
    from isoloss.lab.languages._hmm.kernels import Kernels

Float = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Index = slice | torch.Tensor

_LOGS = 1 << 20  # numbers in memory for one product of logs


class ForwardBackward:
    """The recursions of one model, or of some of its states that no transition may leave.

    A number below the smallest normal one, `tiny`, is lost, and a state that is lost may become the likely one again.
    A row's predictions and messages, (T, S) each, are trusted entry by entry where its least numbers prove either that

    - nothing was lost: every entry above 0 is so large that its next product with an emission factor and a transition
      is at least `tiny`, or that
    - what was lost does not matter: no transition is 0, and all entries are so far above `tiny` that whatever comes
      from a lost state is a negligible part of each of them, then and ever after.

    Other rows are computed in float64, and those of float64 in logs.

    Attributes:
        states: The model's states, a slice where they are consecutive.
        tokens: The tokens that these emit, likewise.
        emission: (states, tokens), their part of the table.
        backend: What computes: "numba" or "torch"; by default what `choose_backend` says.
    """

    def __init__(
        self,
        initial: Float,
        transition: Float,
        emission: Float,
        states: Numbers,
        device: torch.device,
        dtype: torch.dtype,
        backend: Backend | None = None,
    ) -> None:
        # Of all states, all tokens, those too that none emits: results need no room of their own then.
        tokens = np.flatnonzero((emission[states] > 0).any(axis=0) | (len(states) == len(emission)))
        self._model = initial, transition, emission, states
        self.device, self.dtype = device, dtype
        self.backend: Backend = backend or choose_backend(device)
        self.states, self.tokens, self._tokens = _index(states, device), _index(tokens, device), tokens
        start, step, part = initial[states], transition[np.ix_(states, states)], emission[np.ix_(states, tokens)]
        # Each column is divided by its largest entry, so that rare tokens do not underflow. An unknown token has the
        # factor 1 in every state; a foreign one, which none of these states emits, has 0.
        peak = part.max(axis=0)
        peak[peak == 0] = 1
        unknown, foreign = len(tokens), len(tokens) + 1
        rows = np.concatenate([(part / peak).T, np.ones((1, len(states))), np.zeros((1, len(states)))])
        local = np.full(emission.shape[1] + 1, foreign)
        local[tokens], local[-1] = np.arange(len(tokens)), unknown
        self._local = torch.as_tensor(local, device=device)
        log_peak = np.log(np.concatenate([peak, [1.0, 1.0]]))
        *tables, self._log_peak = (
            torch.as_tensor(table).to(device, dtype) for table in (start, step, rows, part, log_peak)
        )
        self.emission = tables[-1]
        numbers = torch.finfo(dtype)
        # Far enough for what is lost at each of 1024 positions, from each of many states, to be below the rounding.
        self._reliable = numbers.tiny / numbers.eps**2
        first, factor, further = (float(table[table > 0].min(initial=1)) for table in (start, rows, step))
        lossless = numbers.tiny / factor / further
        self._lossless = lossless if first >= lossless else math.inf
        # An entry is a mean of transitions: no less than the least of them. Where that is large, no entry is looked at.
        floor = float(tables[1].min())
        self._mixes = floor >= len(states) * numbers.tiny
        known = floor if floor >= self._reliable**0.5 else None
        self._torch = Recursions(*tables, known=known)
        self._engine: Recursions | Kernels = self._torch
        if self.backend == "numba":
            from isoloss.lab.languages._hmm.kernels import Kernels

            self._engine = Kernels(*tables, known=known)

    @functools.cached_property
    def _wide(self) -> ForwardBackward | LogRecursions:
        # On the CPU whatever the device: some have no float64, and few rows come here.
        if self.dtype == torch.float64:
            return LogRecursions(*self._model, self._tokens)
        return ForwardBackward(*self._model, torch.device("cpu"), torch.float64)

    def log_prob(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log-probability of the known tokens in nats, by the forward recursion; -inf for none."""
        local = self._local[ids]
        scales, least = self._engine.scales(local)
        result = scales.log().sum(dim=1) + self._log_peak[local].sum(dim=1)
        if (low := self._unreliable(least)) is not None:
            result[low] = self._wide.log_prob(ids[low].cpu()).to(result)
        # No -0.0.
        return result + 0.0

    def states_given(self, ids: torch.Tensor, out: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Write (n, T, S), each position's states given all other tokens, or with `own` given all of them, to `out`.

        Returns:
            (n,) bool, whether the sentence has a probability above 0: else its rows of `out` have no meaning.
        """
        least = self._engine.states(self._local[ids], out, own=own)
        possible = least[0] > 0
        if (low := self._unreliable(least)) is not None:
            states, possible[low] = self._again(ids[low], own=own)
            out[low] = states.to(out)
        return possible

    def conditionals(self, ids: torch.Tensor, out: torch.Tensor, *, log: bool) -> torch.Tensor:
        """Write (n, T, tokens), Pr(token | all other tokens) or its log, to `out`; return (n,) as `states_given`."""
        least = self._engine.conditionals(self._local[ids], out, log=log)
        possible = least[0] > 0
        if (low := self._unreliable(least)) is not None:
            # Of these rows the emissions are taken in float64 too: their product may be below float32 once more.
            states, possible[low] = self._again(ids[low], own=False)
            probs = (states @ self._wide.emission).to(out)
            out[low] = batches.clamped_log_(probs) if log else probs
        return possible

    def log_next(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write (n, T, tokens), log Pr(token | the tokens before it), to `out`; return (n,) as `states_given`.

        In torch on a CPU too: the products are large, and nothing comes back from behind.
        """
        local = self._local[ids]
        least = self._torch.log_next(local, out)
        possible = least[0] > 0
        if (low := self._unreliable(least)) is not None:
            again = torch.empty_like(out[low], device="cpu", dtype=torch.float64)
            possible[low] = self._wide.log_next(ids[low].cpu(), again).to(self.device)
            out[low] = again.to(out).clamp_(min=math.log(torch.finfo(out.dtype).tiny))
        return possible

    def _again(self, ids: torch.Tensor, *, own: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of `states_given`, computed in float64."""
        states = torch.empty(*ids.shape, len(self.emission), dtype=torch.float64)
        possible = self._wide.states_given(ids.cpu(), states, own=own)
        return states, possible.to(self.device)

    def _unreliable(self, least: torch.Tensor) -> torch.Tensor | None:
        """Return which rows (n,) must be computed again, or None, by (2, n) least numbers: see `Recursions`."""
        normalizer, entry = least
        trusted = entry >= self._lossless
        if self._mixes:
            trusted |= entry * normalizer >= self._reliable
        low = ~trusted | (normalizer < self._reliable)
        return low if bool(low.any()) else None


class Recursions:
    """The recursions of one model in torch, on any device; `kernels.Kernels` computes the same.

    `scaled` is (ids, S), the emission factors of each id that may come; `transition` is (S, S), `emission` (S, V).

    All return (2, n) least numbers, which tell whether a row is to be trusted: the least of its normalizers, and of the
    entries above 0 of its predictions and messages, without the first ones; `known` is a number that none of these is
    below, or None.
    """

    def __init__(
        self,
        initial: torch.Tensor,
        transition: torch.Tensor,
        scaled: torch.Tensor,
        emission: torch.Tensor,
        *,
        known: float | None,
    ) -> None:
        self._initial, self._transition, self._scaled, self._emission = initial, transition, scaled, emission
        self._back, self._known = transition.T.contiguous(), known

    def scales(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T), the factor of each id given those before it, and the least numbers."""
        scales, least = self._scaled.new_empty(ids.shape[1], len(ids)), self._new_least(len(ids))
        filtered = self._initial.expand(len(ids), -1)
        for t in range(ids.shape[1]):
            if t:
                filtered = filtered @ self._transition
                self._note(filtered, least)
            filtered = filtered * self._scaled[ids[:, t]]
            scales[t] = _normalize(filtered)
        least[0] = scales.amin(dim=0)
        return scales.T, least

    def states(self, ids: torch.Tensor, out: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Write (n, T, S), the states given all other ids, or with `own` all; return the least numbers."""
        length = ids.shape[1]
        scales, least = self._scaled.new_empty(3 * length - 1, len(ids)), self._new_least(len(ids))
        # The prediction from the ids before, times the message from those behind. Dividing the posterior given all ids
        # by the own id's factor instead would be 0 / 0 in states that cannot emit it.
        emitted = self._emitted(ids)
        states = self._forward(emitted, scales, least, own=own)
        message = torch.ones_like(states[0])
        for t in range(length - 1, -1, -1):
            scales[length + t] = _normalize(states[t].mul_(message))
            if t:
                message = message * emitted[t]
                # Only the direction of a message counts. Its size is kept to find rows in which float32 has lost it.
                scales[2 * length + t - 1] = _normalize(message)
                message = message @ self._back
                self._note(message, least)
        out.copy_(states.transpose(0, 1))
        least[0] = scales.amin(dim=0)
        return least

    def log_next(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write (n, T, V), the log-probabilities of each token given the ids before it; return the least numbers."""
        scales, least = self._scaled.new_empty(ids.shape[1], len(ids)), self._new_least(len(ids))
        states = self._forward(self._emitted(ids), scales, least, own=False)
        batches.clamped_log_(torch.matmul(states.transpose(0, 1).contiguous(), self._emission, out=out))
        least[0] = scales.amin(dim=0)
        return least

    def _emitted(self, ids: torch.Tensor) -> list[torch.Tensor]:
        # a third of the time of an index
        return [self._scaled.index_select(0, column) for column in ids.T.contiguous()]

    def _forward(
        self, emitted: list[torch.Tensor], scales: torch.Tensor, least: torch.Tensor, *, own: bool
    ) -> torch.Tensor:
        """Return (T, n, S), the states given the ids before, or with `own` the own one too, and set the normalizers."""
        # Time first: each step reads and writes one block of memory.
        states = emitted[0].new_empty(len(emitted), *emitted[0].shape)
        states[0] = self._initial
        for t, factors in enumerate(emitted):
            filtered = states[t].mul_(factors) if own else states[t] * factors
            scales[t] = _normalize(filtered)
            if t + 1 < len(emitted):
                torch.mm(filtered, self._transition, out=states[t + 1])
                self._note(states[t + 1], least)
        return states

    def _new_least(self, rows: int) -> torch.Tensor:
        return self._initial.new_full((2, rows), 1.0 if self._known is None else self._known)

    def _note(self, entries: torch.Tensor, least: torch.Tensor) -> None:
        """Take the entries (n, S) of a prediction or a message into the least ones."""
        if self._known is None:
            torch.minimum(least[1], entries.masked_fill(entries == 0, 1).amin(dim=1), out=least[1])

    def conditionals(self, ids: torch.Tensor, out: torch.Tensor, *, log: bool) -> torch.Tensor:
        """Write (n, T, V), the probabilities of each token given all other ids, or their logs; return as `states`."""
        states = out.new_empty(*ids.shape, len(self._initial))
        least = self.states(ids, states, own=False)
        torch.matmul(states, self._emission, out=out)
        if log:
            batches.clamped_log_(out)
        return least


class LogRecursions:
    """The recursions of one model in logs of float64, where nothing is lost: for the few rows that need them."""

    def __init__(self, initial: Float, transition: Float, emission: Float, states: Numbers, tokens: Numbers) -> None:
        part = torch.from_numpy(emission[states])
        self.emission = part[:, tokens]
        self._initial = torch.from_numpy(initial[states]).log()
        self._transition = torch.from_numpy(transition[np.ix_(states, states)]).log()
        # an unknown token has the factor 1 in every state
        self._factors = torch.cat([part.T.log(), part.new_zeros(1, len(states))])

    def log_prob(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log-probability of the known tokens in nats; -inf for none."""
        return self._filtered(self._predictions(ids), ids)[:, -1].logsumexp(dim=1)

    def states_given(self, ids: torch.Tensor, out: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Write and return as `ForwardBackward.states_given`."""
        logs = self._predictions(ids)
        possible = self._filtered(logs, ids)[:, -1].isfinite().any(dim=1)
        if own:
            logs = self._filtered(logs, ids)
        message = torch.zeros_like(logs[:, 0])
        for t in range(ids.shape[1] - 1, -1, -1):
            logs[:, t] += message
            message = _log_product(message + self._factors[ids[:, t]], self._transition.T)
        out.copy_(logs.softmax(dim=2))
        return possible

    def log_next(self, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write and return as `ForwardBackward.log_next`."""
        logs = self._predictions(ids)
        batches.clamped_log_(torch.matmul(logs.softmax(dim=2), self.emission, out=out))
        return self._filtered(logs, ids)[:, -1].isfinite().any(dim=1)

    def _predictions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (n, T, S), the log-probability of each state and the ids before it."""
        logs = self._initial.repeat(*ids.shape, 1)
        for t in range(1, ids.shape[1]):
            logs[:, t] = _log_product(logs[:, t - 1] + self._factors[ids[:, t - 1]], self._transition)
        return logs

    def _filtered(self, predictions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return predictions + self._factors[ids]


def _log_product(logs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the logs of `logs.exp() @ table.exp()`, some rows at a time, for their memory."""
    parts = torch.split(logs, max(1, _LOGS // table.numel()))
    return torch.cat([(part[:, :, None] + table).logsumexp(dim=1) for part in parts])


def _normalize(rows: torch.Tensor) -> torch.Tensor:
    """Divide rows by their sums, in place, and return these; where they are 0, so is the row."""
    sums = rows.sum(dim=1)
    rows /= sums.clamp(min=torch.finfo(rows.dtype).tiny)[:, None]
    return sums


class Components:
    """A model, and the parts that its transitions never connect, each a smaller model of its own.

    A block-diagonal model has many. Nearly every sentence is possible in one component alone, whatever its token at any
    one position, and all that is asked about it is then known from that component.
    """

    def __init__(
        self, initial: Float, transition: Float, emission: Float, device: torch.device, dtype: torch.dtype
    ) -> None:
        every = np.arange(len(initial))
        # Undirected: a part is closed in both directions of time.
        labels = connected_components(transition > 0, directed=False)[1]
        parts = [(labels == label).nonzero()[0] for label in np.unique(labels)]
        # No sentence starts in the others, and none gets there.
        parts = [part for part in parts if initial[part].any()]
        if len(parts) == 1 and len(parts[0]) == len(every):
            parts = []
        self.whole = ForwardBackward(initial, transition, emission, every, device, dtype)
        self.parts = [ForwardBackward(initial, transition, emission, part, device, dtype) for part in parts]
        # misses[c, k]: whether part k cannot emit token c; the last row is for unknown tokens, which all can.
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
        # A row that several parts could have written is a mixture of theirs; one that no part can is impossible. Both
        # are the whole model's to find out.
        chosen = torch.where(candidate.sum(dim=1) == 1, candidate.int().argmax(dim=1), len(self.parts))
        pairs = [((chosen == index).nonzero()[:, 0], model) for index, model in enumerate([*self.parts, self.whole])]
        return [(rows, model) for rows, model in pairs if len(rows)]


def _index(numbers: Numbers, device: torch.device) -> Index:
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return torch.as_tensor(numbers, device=device)
