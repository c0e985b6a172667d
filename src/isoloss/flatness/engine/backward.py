"""One backward pass to activations: it collects the factors of every parameter's gradient.

Shapes: B sequences, m predicted positions, d the width of the model, P parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isoloss.flatness.engine import factors
from isoloss.flatness.engine.capture import Capture, Use
from isoloss.flatness.engine.control_variates import NUM_INTERMEDIATES
from isoloss.flatness.engine.predictions import Predictions

HIDDEN = -1  # the index of the decoder's input among the cotangents that are kept; intermediates count from 0


def intermediates_of(predictions: Predictions) -> list[GradientEdge]:
    """Return the first outputs with parameters behind where positions were selected, at most 3.

    They are (m, n) with n the width that most such outputs have, that of the model. The cotangent of each at a
    position depends on the logits' cotangent at this position alone.
    """
    m, capture = len(predictions.rows), predictions.capture
    uses = [use for use in capture.before_last_linear if use.selected and use.shape[:-1].numel() == m]
    widths = Counter(use.shape[-1] for use in uses)
    widest = [use for use in uses if widths[use.shape[-1]] == max(widths.values())]
    return [use.edge for use in widest[:NUM_INTERMEDIATES]]


def tail_cotangents(
    predictions: Predictions, intermediate: GradientEdge, cotangent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cotangents (m, d) of the decoder's input and of an intermediate, by a backward pass of the tail
    alone.
    """
    assert predictions.hidden_states is not None
    ends = [get_gradient_edge(predictions.hidden_states), intermediate]
    cotangents = torch.autograd.grad(predictions.logits, ends, cotangent.to(predictions.logits), retain_graph=True)
    hidden, outer = (values.reshape(len(predictions.rows), -1) for values in cotangents)
    return hidden, outer


def collect(
    predictions: Predictions,
    names: list[str],
    cotangent: torch.Tensor,
    intermediates: Sequence[GradientEdge] = (),
    *,
    separate: bool = False,
    keep: bool = True,
) -> Collector:
    """Return the squared norms by the rules, zero for the parameters without one, and what else the pass gave."""
    capture, states = predictions.capture, predictions.hidden_states
    collector = Collector(capture, names, predictions.num_sequences, cotangent.device, separate=separate)
    hooks = [use.edge.node.register_prehook(collector.receiver(use)) for use in capture.uses]
    if not keep:
        capture.uses.clear()
    kept = dict(enumerate(intermediates))
    if states is not None and states.requires_grad:  # only the decoder leads from them to the logits
        kept[HIDDEN] = get_gradient_edge(states)
    for index, edge in kept.items():
        hooks.append(edge.node.register_prehook(partial(collector.keep, index, edge.output_nr)))
    try:
        torch.autograd.grad(predictions.logits, predictions.leaves, cotangent, retain_graph=keep, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    collector.finish()
    return collector


class Collector:
    """Collects the factors of a backward pass; a parameter's norm is taken as soon as all its uses are there."""

    def __init__(
        self, capture: Capture, names: list[str], num_sequences: int, device: torch.device, *, separate: bool
    ) -> None:
        self._separate = separate
        self.norms = torch.zeros(num_sequences, len(names), dtype=torch.float64, device=device)
        self.kept: dict[int, torch.Tensor] = {}  # cotangents (m, d)
        self.reached: set[str] = set()
        self._columns = {name: column for column, name in enumerate(names)}
        self._missing = Counter(name for use in capture.uses for name in use.contributions)
        self._waiting: dict[str, list[factors.Factor]] = {}

    def receiver(self, use: Use) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Return what takes the cotangent of a use, once; after that it no longer holds the activations."""
        waiting = [use]

        @torch.no_grad()
        def receive(cotangents: tuple[torch.Tensor | None, ...]) -> None:
            taken = waiting.pop()
            cotangent = cotangents[taken.edge.output_nr]
            for name, contribution in taken.contributions.items():
                self._missing[name] -= 1
                if cotangent is not None:
                    self._waiting.setdefault(name, []).append(contribution(cotangent.reshape(taken.shape)))
                if self._missing[name] == 0:
                    self._take(name)

        return receive

    def keep(self, index: int, number: int, cotangents: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the cotangent of the decoder's input, or of an intermediate."""
        cotangent = cotangents[number]
        if cotangent is not None:
            self.kept[index] = cotangent.reshape(-1, cotangent.shape[-1])

    @torch.no_grad()
    def finish(self) -> None:
        """Take the norms of parameters with uses that the logits do not depend on."""
        for name in list(self._waiting):
            self._take(name)

    def _take(self, name: str) -> None:
        parts = self._waiting.pop(name, None)
        if parts:
            self.reached.add(name)
            self.norms[:, self._columns[name]] = factors.squared_norms(parts, len(self.norms), separate=self._separate)
