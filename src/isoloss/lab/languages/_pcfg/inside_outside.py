"""Exact inference in a grammar: inside and outside scores of batches of sentences of one length, in linear space.

Emissions are divided by a constant per token, a power of two, so that nothing is rounded. All splits of a span share
its tokens, so no step rescales. Every sum is of non-negative products, so nothing cancels. On the CPU compiled kernels
do the work (`kernels`), elsewhere torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.charts import FoldedRules, Key, Plan, Planner, intersection, part_of
from isoloss.lab.languages.batches import Backend, choose_backend

if TYPE_CHECKING:
    from isoloss.lab.languages._pcfg.kernels import Kernels

# Shapes: n sentences, T tokens, S symbols, G symbols of a group, K pairs of a block, P start positions of an item.
# The sentences are the last axis of charts: every operation runs along contiguous memory.

_BYTES = {"cpu": 1 << 23, "cuda": 1 << 30}  # working memory of one chunk of sentences: what the caches hold, on a CPU
# |log2| of a scaled sentence probability that is not recomputed. The types end at 126 and 1022: the rest is room for
# the entries of its chart.
_COMFORTABLE = {torch.float32: 80, torch.float64: 700}
_CALIBRATION = 16  # sentences of a chunk whose float64 probabilities set the scale in which float32 works

_Run = Callable[[torch.Tensor, torch.dtype, torch.Tensor], tuple[torch.Tensor, ...]]


class InsideOutside:
    """Inside and outside scores of a grammar on one device, in one dtype: the seam behind which an engine works.

    Every method takes sentences of one length, (n, T) int64 on the engine's device, best at most `chunk(T)` of them at
    once, and also returns (n,) float64: the log-probability of each sentence, -inf where it is impossible (the row's
    other results then mean nothing). A token may be `unknown`: probabilities are then sums over all tokens there. Rows
    that float32 cannot hold are recomputed in float64, with a scale of their own where that is needed.

    Attributes:
        emitting: (E,) ids of the symbols that yield single tokens.
        unknown: The id that stands for any token: the number of tokens.
        backend: What computes: "numba" or "torch"; by default what `choose_backend` says.
    """

    def __init__(self, rules: FoldedRules, device: torch.device, dtype: torch.dtype, backend: Backend | None = None):
        self._rules, self._device, self._dtype = rules, device, dtype
        self._planner = Planner(rules)
        self.unknown = rules.emission.shape[1]
        # An unknown token is one more token, emitted with the sum of the others' probabilities: an unknown position
        # costs nothing extra, and its conditional comes out beside the others'.
        total = rules.emission.sum(axis=1)
        self.emitting = np.flatnonzero(total > 0)
        emission = np.concatenate([rules.emission, total[:, None]], axis=1)
        # Unscaled, a sentence of the paper's grammar loses 5 nats a token and leaves float32 at 17 tokens. Over each
        # token's mean emission it stays near 1, but for a drift that `_calibrated` removes.
        log2_scale = np.round(np.log2(emission[self.emitting].mean(axis=0))).clip(min=-1000)
        self._log2_scale = torch.as_tensor(log2_scale, device=device)
        self._scaled = emission * np.exp2(-log2_scale)
        # A product of two numbers of a chart and a rule's weight is a normal number of float32 where both are no less
        # than this: then nothing is lost that a large factor elsewhere in the sentence would have brought back.
        single = np.finfo(np.float32)
        weight = min((float(block.weights[block.weights > 0].min()) for block in self._planner.blocks), default=1.0)
        is_held = bool((self._scaled[self._scaled > 0] >= single.tiny).all())
        self._lossless = math.sqrt(float(single.tiny) / weight) if is_held else math.inf
        # Beside numba too: only torch's charts can tell what is impossible from what underflows (`possible`).
        self._torch = TorchCharts(rules, self._planner, self._scaled, self.emitting, device, self._log2_scale)
        self.backend: Backend = backend or choose_backend(device)

    # Made when first asked: a large grammar's tables take a while, and it may be there to be drawn from only.
    @functools.cached_property
    def _engine(self) -> TorchCharts | Kernels:
        if self.backend == "torch":
            return self._torch
        from isoloss.lab.languages._pcfg.kernels import Kernels

        return Kernels(self._rules, self._planner, self._scaled, self.emitting)

    def chunk(self, length: int) -> int:
        """Return how many sentences `log_partition` and `leaf_outside` take at once with bounded working memory."""
        return self._chunk(self._planner.plan(length), length * len(self.emitting))

    def chunk_of_spans(self, length: int) -> int:
        """Return the same for `inside` and `span_posterior`, whose results hold every symbol."""
        return self._chunk(self._planner.plan(length, every_root=True), len(self._planner.group_of))

    def _chunk(self, plan: Plan, numbers: int) -> int:
        # The kernels' charts hold 128 sentences, whatever the chunk: only the results grow with it.
        if self.backend == "numba":
            return max(1, _BYTES["cpu"] // (self._dtype.itemsize * numbers * 128)) * 128
        return self._rows(plan)

    def _rows(self, plan: Plan) -> int:
        numbers = max(1, plan.numbers)
        return max(1, _BYTES.get(self._device.type, _BYTES["cpu"]) // (self._dtype.itemsize * numbers))

    def log_partition(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log-probability of each sentence."""
        plan = self._planner.plan(tokens.shape[1])

        def run(tokens: torch.Tensor, dtype: torch.dtype, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z, _, least = self._engine.run(plan, tokens, torch.exp2(shift).to(dtype), leaves=False)
            return z, torch.zeros_like(z), least

        return self._robust(plan, tokens, run)[1]

    def leaf_outside(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T, E), the probability that each `emitting` symbol yields the token, and log-probabilities.

        It is given all other tokens: `Pr(x_t = c | x_-t) = sum_A share[t, A] e[A, c] / e[A]`, with the emission
        probabilities e and their sums over tokens e[A].
        """
        plan = self._planner.plan(tokens.shape[1])

        def run(tokens: torch.Tensor, dtype: torch.dtype, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._engine.run(plan, tokens, torch.exp2(shift).to(dtype), leaves=True)

        return self._robust(plan, tokens, run)

    def prefix_outside(self, tokens: torch.Tensor, *, longest: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T, E), the probability that each `emitting` symbol yields a token given those before it.

        As `leaf_outside`, but nothing is known of the tokens that follow: a span that begins at t is completed by all
        strings, of as many tokens as are left or, with `longest`, of any number up to so many in all. So one pass
        from the roots down, in which only what stands to the left of a span has its tokens' inside scores, gives every
        next token (the prefix probabilities of Jelinek and Lafferty, 1991, position by position). The second result is
        (n, T): the log-probability of the tokens before a position and of a token there, -inf where it is 0.

        Always in float64: prefixes of one sentence differ by more than float32 holds.
        """
        plan = self._planner.plan(longest or tokens.shape[1], prefixes=longest is not None)
        shift = torch.zeros(len(tokens), dtype=torch.float64, device=self._device)
        scores, mass = self._engine.prefixes(plan, tokens, torch.exp2(shift))
        poor = (~_within(mass, torch.float64)).any(dim=1).nonzero().flatten()
        if len(poor):
            # anew, with a scale by which the last prefix that had any mass is near 1
            low = mass[poor].log2()
            reached = low.isfinite().sum(dim=1).clamp(min=1)
            shift[poor] = -torch.round(low.gather(1, reached[:, None] - 1)[:, 0].nan_to_num(0.0, 0.0, 0.0) / reached)
            scores[poor], again = self._engine.prefixes(plan, tokens[poor], torch.exp2(shift[poor]))
            # No token takes a factor of 2^-300: mass that is gone after a comfortable prefix was never there.
            before = torch.nn.functional.pad(again, (1, 0), value=1.0)[:, :-1]
            if bool(((again == 0) & (before > 0) & (before < 2.0**-700)).any() | ~again.isfinite().all()):
                raise IsolossError(_TOO_WIDE)
            mass[poor] = again
        # the tokens before a position have scaled its mass
        scale = shift[:, None] - self._log2_scale[tokens[:, :-1]]
        return scores, mass.log() - math.log(2) * torch.nn.functional.pad(scale.cumsum(dim=1), (1, 0))

    def prefix_span(self, tokens: torch.Tensor, start: int, *, longest: int) -> torch.Tensor:
        """Return (n, S) float64: Pr(a node of each symbol covers the tokens from `start` on, and all tokens), scaled.

        Nothing is known of what follows, in a sentence of at most `longest` tokens; see `prefix_outside`. All scores of
        a row have one factor.
        """
        plan, width = self._planner.plan(longest, prefixes=True), tokens.shape[1] - start
        ones = torch.ones(len(tokens), dtype=torch.float64, device=self._device)
        parts = zip(*(torch.split(each, self._rows(plan)) for each in (tokens, ones)), strict=True)
        above = torch.cat([self._torch.above_span(plan, rows, factor, start, width) for rows, factor in parts])
        # a chart holds the topmost symbol of a chain of unary rules: the closure leads to those below it
        chained = torch.as_tensor(self._rules.chained, device=self._device)
        above[:, chained] = above[:, chained] @ torch.as_tensor(self._rules.closure, device=self._device)
        most = above.amax(dim=1, keepdim=True)
        if not bool(_within(most[most > 0], torch.float64).all()):
            raise IsolossError(_TOO_WIDE)
        inside = self.inside(tokens[:, start:])[0]
        return above / most * (inside - inside.amax(dim=1, keepdim=True)).exp()

    def possible(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: whether the grammar derives each sentence, however improbable it is."""
        plan = self._planner.plan(tokens.shape[1])
        return torch.cat([self._torch.possible(plan, rows) for rows in torch.split(tokens, self._rows(plan))])

    def inside(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, S) float64: the log-probability that each symbol yields exactly these tokens.

        Always in float64, as symbols of one span may differ by more than float32 holds. An impossible symbol has a
        finite value, at most the log of float64's smallest normal number and not above the values of the possible
        symbols of its row. The second result is the log of the largest.
        """
        plan = self._planner.plan(tokens.shape[1], every_root=True)

        def run(tokens: torch.Tensor, dtype: torch.dtype, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            factor = torch.exp2(shift).to(dtype)
            _, scaled, least = self._engine.span(plan, tokens, factor, 0, plan.length, outer=False)
            log_scale = self._log_scale(tokens, shift)[:, None]
            floor = torch.finfo(torch.float64).tiny
            # No possible symbol has less than log(floor) - log_scale, and callers compare with log(floor): impossible
            # ones have the lesser of the two.
            impossible = math.log(floor) - log_scale.clamp(min=0)
            logs = torch.where(scaled > 0, scaled.clamp(min=floor).log() - log_scale, impossible)
            return scaled.amax(dim=1), logs, least

        return self._robust(plan, tokens, run, torch.float64)

    def span_posterior(self, tokens: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, S): Pr(a node of each symbol covers exactly the tokens start to stop - 1 | sentence)."""
        width = stop - start
        plan, inner = self._planner.plan(tokens.shape[1]), self._planner.plan(width, every_root=True)

        def run(tokens: torch.Tensor, dtype: torch.dtype, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            factor = torch.exp2(shift).to(dtype)
            # The outside scores are scaled by the tokens around the span, the inside scores by the tokens in it:
            # together as z is, so that the quotient has no scale.
            z, above, least = self._engine.span(plan, tokens, factor, start, width, outer=True)
            # a chart holds the topmost symbol of a chain of unary rules: the closure leads to those below it
            chained = torch.as_tensor(self._rules.chained, device=self._device)
            above[:, chained] = above[:, chained] @ torch.as_tensor(self._rules.closure, device=self._device).to(dtype)
            _, below, least_below = self._engine.span(inner, tokens[:, start:stop], factor, 0, width, outer=False)
            return z, (above * below / z[:, None]).clamp(max=1), torch.minimum(least, least_below)

        return self._robust(plan, tokens, run)

    def _robust(
        self, plan: Plan, tokens: torch.Tensor, run: _Run, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `run`'s second result and the log-probabilities, from the narrowest numbers that hold each row.

        `run(tokens, dtype, shift)` works with leaves multiplied by 2^shift, by row, and returns the scaled probability
        of each row, a result that does not depend on the scale, and the least number above 0 in the row's charts.
        """
        dtype = dtype or self._dtype
        shift = self._calibrated(plan, tokens, dtype)
        z, result, least = run(tokens, dtype, shift)
        log_z = z.double().log() - self._log_scale(tokens, shift)
        is_rich = _within(z, dtype) & _finite(result)
        if dtype == torch.float32:
            is_rich &= least >= self._lossless
        all_poor = torch.nonzero(~is_rich).flatten()
        # Split once more: torch's charts of these rows may need more memory than the kernels' did.
        for poor in torch.split(all_poor, self._rows(plan)) if len(all_poor) else ():
            rows = tokens[poor]
            shift, possible = self._fitted(plan, rows)
            z, again, _ = run(rows, torch.float64, shift)
            # z fits, but numbers of a chart may not: parts of a sentence can differ by more than 1e600.
            if not bool((_finite(again) | ~possible).all()):
                raise IsolossError(_TOO_WIDE)
            result[poor] = again.to(result.dtype)
            log_z[poor] = (z.log() - self._log_scale(rows, shift)).masked_fill(~possible, -math.inf)
        return result, log_z

    def _log_scale(self, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Return (n,): the log of the factor by which a whole sentence's probability is multiplied."""
        return (shift * tokens.shape[1] - self._log2_scale[tokens].sum(dim=1)) * math.log(2)

    def _calibrated(self, plan: Plan, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return (n,) one whole number: log2 of the factor per token that brings the probabilities near 1.

        Multiplying by a power of two rounds nothing: which sentences are together only decides which rows are too far
        from 1, and are computed in float64 instead.
        """
        # In float64 the tokens' scales suffice up to some hundred tokens; rows beyond are fitted one by one.
        shift = torch.zeros(len(tokens), dtype=torch.float64, device=self._device)
        if dtype == torch.float32 and len(tokens):
            z = self._probabilities(plan, tokens[:_CALIBRATION], shift[:_CALIBRATION])
            z = z[_within(z, torch.float64)]
            if len(z):
                shift -= torch.round(z.log2().mean() / plan.length).clamp(-100, 100)
        return shift

    def _fitted(self, plan: Plan, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n,) the shift with which float64 holds each row, and whether the row is possible at all."""
        low = torch.full((len(tokens),), -1000.0, dtype=torch.float64, device=self._device)
        high, shift = -low, torch.zeros_like(low)
        # Asked first: a row of probability 0 has no shift that fits, and bisection would blame the range.
        possible = self._torch.possible(plan, tokens)
        while True:
            z = self._probabilities(plan, tokens, shift)
            done = _within(z, torch.float64) | ~possible
            if bool(done.all()):
                return shift, possible
            if bool((~done & (high - low < 2)).any()):
                raise IsolossError(_TOO_WIDE)
            # z grows with the shift. An overflow is not small, nor is the NaN that 0 times infinity leaves.
            small = z < 1
            low, high = torch.where(small, shift, low), torch.where(small, high, shift)
            shift = torch.where(done, shift, torch.floor((low + high) / 2))

    def _probabilities(
        self, plan: Plan, tokens: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        factor = torch.exp2(shift).to(dtype)
        if plan.every_root:
            return self._engine.span(plan, tokens, factor, 0, plan.length, outer=False)[1].amax(dim=1)
        return self._engine.run(plan, tokens, factor, leaves=False)[0]


_TOO_WIDE = "the scores of a sentence span a wider range than float64 holds; leave the sentence out"


def _within(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return whether numbers are far from the underflow and overflow of `dtype`; false for NaN."""
    bound = 2.0 ** _COMFORTABLE[dtype]
    return (z > 1 / bound) & (z < bound)


def _finite(result: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(result).flatten(1).all(dim=1) if result.dim() > 1 else torch.isfinite(result)


# --- the engine in torch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chart:
    items: dict[Key, torch.Tensor]  # (G, P, n) each
    sentences: int
    dtype: torch.dtype

    def least(self) -> torch.Tensor:
        """Return (n,): the least number above 0 of each sentence, at most 1."""
        device = next(iter(self.items.values())).device if self.items else None
        least = torch.ones(self.sentences, dtype=self.dtype, device=device)
        for scores in self.items.values():
            if scores.numel():
                least = torch.minimum(least, scores.masked_fill(scores == 0, 1).flatten(0, 1).amin(dim=0))
        return least


@dataclass(frozen=True)
class _Tables:
    """A grammar's numbers in one dtype."""

    dtype: torch.dtype
    emission: list[torch.Tensor]  # by group: (G, V), scaled
    blocks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # by block: weights (G, K), b, c


class TorchCharts:
    """The engine of one grammar in torch, on any device; arguments and methods are those of `kernels.Kernels`."""

    def __init__(
        self,
        rules: FoldedRules,
        planner: Planner,
        emission: npt.NDArray[np.float64],
        emitting: npt.NDArray[np.int64],
        device: torch.device,
        log2_scale: torch.Tensor,
    ) -> None:
        self._planner, self._scaled, self._emitting, self._device = planner, emission, emitting, device
        self._log2_scale = log2_scale
        self._total = rules.emission.sum(axis=1)[emitting]
        self._cache: dict[torch.dtype, _Tables] = {}

    def run(
        self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, *, leaves: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return probabilities, with `leaves` shares, and the least numbers, as `kernels.Kernels.run`."""
        inside = self._inside(plan, tokens, factor)
        z = self._root(plan, inside)
        if not leaves:
            return z, z.new_zeros(len(z), 0, len(self._emitting)), inside.least()
        outside = self._outside(plan, inside, narrowest=1)
        scores = self._by_symbol(plan, outside, 1, range(plan.length), self._emitting)
        # The sum over tokens is the product with the emissions' row sums: dividing here takes E numbers, after the
        # product with the emissions it would take V.
        shares = scores * self._tensor(self._total, factor.dtype)
        return z, shares / shares.sum(dim=-1, keepdim=True), torch.minimum(inside.least(), outside.least())

    def prefixes(self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T, E) shares of the symbols given the tokens before each, and (n, T) the scaled mass of all."""
        outside = self._given_left(plan, tokens, factor, narrowest=1)
        scores = self._by_symbol(plan, outside, 1, range(plan.length), self._emitting)[:, : tokens.shape[1]]
        shares = scores * self._tensor(self._total, factor.dtype)
        mass = shares.sum(dim=-1)
        return shares / mass.unsqueeze(-1), mass

    def above_span(
        self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, start: int, width: int
    ) -> torch.Tensor:
        """Return (n, S) scaled outside scores of the symbols over one span, given the tokens before it."""
        outside = self._given_left(plan, tokens, factor, narrowest=width)
        return self._by_symbol(plan, outside, width, range(start, start + 1))[:, 0]

    def _given_left(self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, *, narrowest: int) -> _Chart:
        """Return the outside scores of items given the tokens before each; nothing is known of later ones."""
        n, length = tokens.shape
        unknown = torch.full((1, plan.length), len(self._log2_scale) - 1, device=self._device)
        tokens = torch.cat([tokens, unknown[:, length:].expand(n, -1)], dim=1)
        # the scale of an unknown token, undone
        undone = torch.exp2(self._log2_scale[-1:]).to(factor.dtype)
        beyond = self._inside(plan, unknown, undone)
        return self._outside(plan, self._inside(plan, tokens, factor), narrowest=narrowest, beyond=beyond)

    def span(
        self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, start: int, width: int, *, outer: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return probabilities, scores of the symbols over one span and least numbers, as `kernels.Kernels.span`."""
        inside = self._inside(plan, tokens, factor)
        chart = self._outside(plan, inside, narrowest=width) if outer else inside
        scores = self._by_symbol(plan, chart, width, range(start, start + 1))[:, 0]
        return self._root(plan, inside), scores, torch.minimum(inside.least(), chart.least())

    def possible(self, plan: Plan, tokens: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: whether a root of the plan yields each sentence, decided without underflow."""
        ones = torch.ones(len(tokens), dtype=torch.float64, device=self._device)
        chart = self._inside(plan, tokens, ones, support=True)
        if plan.every_root:
            return self._by_symbol(plan, chart, plan.length, range(1))[:, 0].amax(dim=1) > 0
        return self._root(plan, chart) > 0

    def _inside(self, plan: Plan, tokens: torch.Tensor, factor: torch.Tensor, *, support: bool = False) -> _Chart:
        """Return the inside scores; with `support`, 1 where they are positive and 0 elsewhere, free of underflow."""
        n, tables = len(tokens), self._tables(factor.dtype)
        items = {}
        for (group, width), starts in plan.starts.items():
            if width == 1:
                columns = tokens.T[starts.start : starts.stop : starts.step]
                # (G, P n) as (G, P, n)
                leaf = tables.emission[group].index_select(1, columns.reshape(-1)).view(-1, len(starts), n)
                items[group, 1] = (leaf > 0).to(tables.dtype) if support else leaf * factor
        for step in plan.steps:
            total: torch.Tensor | None = None
            for index, splits in step.parts:
                block, (weights, b, c) = self._planner.blocks[index], tables.blocks[index]
                # The sum over splits before the product with the rules' weights: one matrix product for each block, not
                # one for each split.
                pairs = torch.zeros(len(block.b), step.starts, n, dtype=tables.dtype, device=self._device)
                for split in splits:
                    left = items[split.left][:, split.lefts]
                    right = items[split.right][:, split.rights]
                    # (B, 1, P, n) times (1, C, P, n), without gathering either
                    if block.shape:
                        wide = pairs.view(*block.shape, step.starts, n)
                        wide[:, :, split.parents].addcmul_(left.unsqueeze(1), right.unsqueeze(0))
                    else:
                        pairs[:, split.parents].addcmul_(left.index_select(0, b), right.index_select(0, c))
                part = weights @ pairs.view(len(block.b), -1)
                total = part if total is None else total.add_(part)
            assert total is not None
            total = (total > 0).to(tables.dtype) if support else total
            items[step.key] = total.view(-1, step.starts, n)
        return _Chart(items, n, tables.dtype)

    def _outside(self, plan: Plan, chart: _Chart, *, narrowest: int, beyond: _Chart | None = None) -> _Chart:
        """Return the outside scores of the items at least `narrowest` wide: dZ / d inside, exactly.

        With `beyond`, of one sentence, they are given the tokens to the left alone; it has the scores of the others.
        """
        inside, n, tables = chart.items, chart.sentences, self._tables(chart.dtype)
        following = (beyond or chart).items
        outside = {key: torch.zeros_like(scores) for key, scores in inside.items()}
        for width in range(1, plan.length + 1) if plan.prefixes else (plan.length,):
            if (root := (int(self._planner.group_of[0]), width)) in outside:
                # The start symbol has the id 0, so it is the first of its group.
                outside[root][0, 0] = 1
        for step in reversed(plan.steps):
            if step.key[1] <= narrowest:
                break
            above = outside[step.key].view(-1, step.starts * n)
            for index, splits in step.parts:
                block, (weights, b, c) = self._planner.blocks[index], tables.blocks[index]
                pairs = (weights.T @ above).view(len(block.b), step.starts, n)
                for split in splits:
                    left, right = inside[split.left][:, split.lefts], following[split.right][:, split.rights]
                    # Views: what is added to them is in `outside`.
                    to_left = outside[split.left][:, split.lefts]
                    to_right = outside[split.right][:, split.rights]
                    if block.shape:
                        wide = pairs.view(*block.shape, step.starts, n)[:, :, split.parents]
                        to_left += (wide * right.unsqueeze(0)).sum(dim=1)
                        to_right += (wide * left.unsqueeze(1)).sum(dim=0)
                    else:
                        part = pairs[:, split.parents]
                        to_left.index_add_(0, b, part * right.index_select(0, c))
                        to_right.index_add_(0, c, part * left.index_select(0, b))
        return _Chart(outside, n, chart.dtype)

    def _root(self, plan: Plan, chart: _Chart) -> torch.Tensor:
        """Return (n,): the start symbol's score over the whole length, 0 where every symbol is a root."""
        root = None if plan.every_root else chart.items.get((int(self._planner.group_of[0]), plan.length))
        return torch.zeros(chart.sentences, dtype=chart.dtype, device=self._device) if root is None else root[0, 0]

    def _by_symbol(
        self,
        plan: Plan,
        chart: _Chart,
        width: int,
        positions: range,
        symbols: npt.NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return (n, positions, symbols): the items of one width, 0 where the chart has none; default all symbols."""
        symbols = np.arange(len(self._planner.group_of)) if symbols is None else symbols
        out = torch.zeros(len(symbols), len(positions), chart.sentences, dtype=chart.dtype, device=self._device)
        for key, scores in chart.items.items():
            shared = intersection(plan.starts[key], positions)
            rows = np.flatnonzero(np.isin(symbols, self._planner.members[key[0]]))
            if key[1] == width and shared and len(rows):
                local = self._tensor(np.searchsorted(self._planner.members[key[0]], symbols[rows]), torch.int64)
                scores_here = scores[:, part_of(plan.starts[key], shared)].index_select(0, local)
                out[self._tensor(rows, torch.int64), part_of(positions, shared)] = scores_here
        return out.permute(2, 1, 0)

    def _tensor(self, array: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device).to(dtype)

    def _tables(self, dtype: torch.dtype) -> _Tables:
        if dtype not in self._cache:
            scaled = self._tensor(self._scaled, torch.float64)
            self._cache[dtype] = _Tables(
                dtype,
                [scaled[self._tensor(members, torch.int64)].to(dtype) for members in self._planner.members],
                [
                    (self._tensor(x.weights, dtype), self._tensor(x.b, torch.int64), self._tensor(x.c, torch.int64))
                    for x in self._planner.blocks
                ],
            )
        return self._cache[dtype]
