"""A masked language model with more parameters than it needs, on a language small enough to enumerate.

Shapes: n trajectories, P parameters, T positions, V tokens, d hidden units; C = T V^(T-1) contexts; R = T (V+1) rows of
the embedding, one for each position and each token or the mask there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.bartlett import EnumerableModel
from isoloss.paper.theory.sgd_flow.minimizers import Flow, Minimizers
from isoloss.paper.theory.sgd_flow.model import Array, mean
from isoloss.statistics.estimate import Estimate

KICK = 0.3  # length of the random step off the minimizers from which the control starts
EMBEDDING = 0.3  # standard deviation of the embedding that is drawn, before it is brought to the minimizers
DECODER = 1.0  # the same of the decoder: far larger, so that the trace is far from its least
_CONTROLS = 8  # starts of the control


@dataclass(frozen=True, eq=False)
class MaskedLM:
    r"""A language of V^T sentences and a masked language model with one hidden layer.

    A sentence is drawn, and one of its positions, all equally likely, is masked. With x the sentence so masked, the
    model's logits for the token there are `U tanh(sum_t E[t, x_t])`: E an embedding of each token and the mask at each
    position, U a decoder. With d >= C every table of conditionals can be had, in many ways.

    Example:
        >>> model = MaskedLM.random(seed=0)
        >>> model.joint.shape, len(model.minimizer), model.conditionals.shape
        ((3, 3), 88, (6, 3))
        >>> flow = np.stack([model.flow(0.0), model.flow(1.0)])
        >>> bool(model.trace(flow)[1] < 0.6 * model.trace(flow)[0])
        True
    """

    joint: Array  # (V,) * T probabilities of the sentences, all positive
    width: int  # d
    minimizer: Array  # (P,) parameters, R d of the embedding and then V d of the decoder: where SGD and the flow start

    unit = "nats per predicted token"
    block = 1024

    @classmethod
    def random(cls, *, seed: int, vocab: int = 3, length: int = 2, width: int = 8) -> MaskedLM:
        """Return a model at a minimizer whose decoder is large: brought there from normal parameters.

        `seed` decides these and the language, whose log-probabilities are standard normal up to a constant.

        Raises:
            IsolossError: The width is too small for the conditionals of every language.
        """
        contexts = length * vocab ** (length - 1)
        if width < contexts:
            raise IsolossError(
                f"the width is {width}; to reach the truth in {contexts} contexts it must be at least {contexts}"
            )
        rng = np.random.default_rng(seeds.derive(seed, "sgd-flow", "masked-lm"))
        joint = np.exp(rng.standard_normal((vocab,) * length))
        embedding = EMBEDDING * rng.standard_normal(length * (vocab + 1) * width)
        decoder = DECODER * rng.standard_normal(vocab * width)
        model = cls(joint / joint.sum(), width, np.concatenate([embedding, decoder]))
        return dataclasses.replace(model, minimizer=model.minimizers.retract(torch.tensor(model.minimizer)).numpy())

    @property
    def name(self) -> str:
        """What it is."""
        return f"masked LM, {len(self.minimizer)} parameters"

    @functools.cached_property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(C, T): which row of the embedding each position of each context takes."""
        vocab = self.joint.shape[0]
        masked = [(*rest[:position], vocab, *rest[position:]) for position, rest in self._contexts()]
        return np.asarray(np.array(masked) + np.arange(self.joint.ndim) * (vocab + 1))

    @functools.cached_property
    def weights(self) -> Array:
        """(C,) probability of each context."""
        return np.asarray(self._joint_by_context.sum(axis=1))

    @functools.cached_property
    def conditionals(self) -> Array:
        """(C, V) the exact probability of each token in each context."""
        return np.asarray(self._joint_by_context / self.weights[:, None])

    @functools.cached_property
    def minimizers(self) -> Minimizers:
        """All minimizers of the loss."""
        rows, width, vocab = torch.tensor(self.rows), self.width, self.joint.shape[0]

        def log_probs(theta: torch.Tensor) -> torch.Tensor:
            table = theta.view(-1, width)
            hidden = torch.tanh(table[rows].sum(dim=1))
            return (hidden @ table[-vocab:].T).log_softmax(dim=-1)

        model = EnumerableModel(self.name, log_probs, torch.tensor(self.minimizer), torch.tensor(self.weights))
        return Minimizers(model, torch.tensor(self.conditionals))

    @property
    def beside(self) -> Array:
        """(n, P) the start, displaced by `KICK` in random directions."""
        rng = np.random.default_rng(seeds.derive(0, "sgd-flow", "beside"))
        draw = rng.standard_normal((_CONTROLS, len(self.minimizer)))
        return np.asarray(self.minimizer + KICK * draw / np.linalg.norm(draw, axis=1, keepdims=True))

    def move(
        self, theta: Array, step_size: float, *, batch_size: int, generator: np.random.Generator, exact: bool
    ) -> None:
        """Draw sentences and masks for every trajectory and step down the mean gradient; see `Model.move`."""
        (n, parameters), vocab = theta.shape, self.joint.shape[0]
        table = theta.reshape(-1, self.width)  # rows of all trajectories; a view
        decoder = table.reshape(n, -1, self.width)[:, -vocab:]
        outcomes = np.searchsorted(self._cumulative, generator.random((n, batch_size)), side="right")
        contexts, answers = np.divmod(outcomes, vocab)
        first = np.arange(0, n * parameters // self.width, parameters // self.width)
        rows = [first[:, None] + row[contexts] for row in self.rows.T]
        hidden = np.tanh(sum((table.take(row, axis=0) for row in rows[1:]), table.take(rows[0], axis=0)))
        errors = _softmax(hidden @ decoder.transpose(0, 2, 1))
        if exact:
            errors -= self.conditionals[contexts]
        else:
            errors.reshape(-1)[np.arange(answers.size) * vocab + answers.reshape(-1)] -= 1
        errors *= step_size / batch_size
        back = (errors @ decoder) * (1 - hidden * hidden)
        decoder -= errors.transpose(0, 2, 1) @ hidden
        for row, example in itertools.product(rows, range(batch_size)):
            table[row[:, example]] -= back[:, example]  # no row twice: each is of another trajectory

    def trace(self, theta: Array) -> Array:
        r"""Return the traces of the Hessian of the loss at (n, P) points, in closed form.

        With f the predictions in a context, S their covariance, h the hidden units and `D = 1 - h^2`, the Gauss-Newton
        part is `Tr(S) |h|^2 + T sum_i D_i^2 (U^T S U)_ii`. The rest comes from the second derivatives of the logits,
        those of tanh: `-2 T sum_i h_i D_i (U^T (f - q))_i`. It is 0 at a minimizer.
        """
        (n, _), vocab, length = theta.shape, self.joint.shape[0], self.joint.ndim
        table = theta.reshape(n, -1, self.width)
        decoder = table[:, -vocab:]
        hidden = np.tanh(sum((table[:, row] for row in self.rows.T[1:]), table[:, self.rows.T[0]]))
        probs = _softmax(hidden @ decoder.transpose(0, 2, 1))
        slopes, average = 1 - hidden**2, probs @ decoder
        variance = probs @ decoder**2 - average**2
        traces = (1 - (probs**2).sum(axis=-1)) * (hidden**2).sum(axis=-1)
        traces += length * (slopes**2 * variance).sum(axis=-1)
        traces -= 2 * length * (hidden * slopes * (average - self.conditionals @ decoder)).sum(axis=-1)
        return np.asarray(traces @ self.weights)

    def flow(self, time: float) -> Array:
        """Return the (P,) point of the projected flow `-grad Tr` at a time, numerically."""
        return self._flow.at(time)

    def reached(self, theta: Array) -> Estimate:
        """Return when the flow `-grad Tr` has the mean trace of (n, P) points."""
        trace = mean(self.trace(theta), self.unit, "")
        time, fall = self._flow.time_of(trace.value)
        return dataclasses.replace(
            trace, value=time, stderr=trace.stderr / fall, unit="", method="when the flow has the mean trace"
        )

    @functools.cached_property
    def _flow(self) -> Flow:
        return Flow(self.minimizers, torch.tensor(self.minimizer))

    @functools.cached_property
    def _joint_by_context(self) -> Array:
        """(C, V): the probability that a context is drawn and that this token is the answer."""
        axes = [np.moveaxis(self.joint, position, -1)[rest] for position, rest in self._contexts()]
        return np.array(axes) / self.joint.ndim

    @functools.cached_property
    def _cumulative(self) -> Array:
        """(C V,) the distribution function over contexts and answers."""
        cumulative = np.cumsum(self._joint_by_context)
        cumulative[-1] = 1.0  # which rounding may miss
        return cumulative

    def _contexts(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield where the mask is and the other tokens, for each context."""
        vocab, length = self.joint.shape[0], self.joint.ndim
        return itertools.product(range(length), itertools.product(range(vocab), repeat=length - 1))


def _softmax(logits: Array) -> Array:
    # over a short last axis: with that axis first, numpy reduces whole rows
    shifted = np.ascontiguousarray(np.moveaxis(logits, -1, 0))
    shifted -= shifted.max(axis=0)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=0)
    return np.ascontiguousarray(np.moveaxis(shifted, 0, -1))
