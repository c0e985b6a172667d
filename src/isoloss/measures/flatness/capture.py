"""Watching one forward pass: every torch function that takes a parameter, by its rule, or as one that has none.

Shapes: B sequences, T tokens in each, m predicted positions, d the width of the model, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from isoloss.measures.flatness.factors import Places
from isoloss.measures.flatness.rules import Contribution, Handle, Layout, Rule, rule_of


@dataclass(frozen=True)
class Decoder:
    """The last linear map of a model: logits = hidden @ weight.T + bias.

    Attributes:
        weight: (V, d).
        bias: (V,) or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Use:
    """An output of a function that took parameters, by where the backward pass comes through it.

    Attributes:
        node: The node of the graph that receives the output's cotangent.
        number: Which of the node's cotangents it is.
        shape: The output's shape; the cotangent has as many elements in the same order.
        contributions: How the cotangent gives each parameter's factor of the gradient.
    """

    node: Node
    number: int
    shape: torch.Size
    contributions: dict[str, Contribution]


@dataclass(frozen=True)
class _Linear:
    """A call of `torch.nn.functional.linear`."""

    output: torch.Tensor
    version: int
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class Capture(TorchFunctionMode):
    """Notes the uses of parameters while it is entered, and gathers the predicted positions where it is told to.

    What needs a gradient but no parameter above it gives one becomes a root of the graph.

    Args:
        parameters: The parameters to watch, by name.
        predicted: (B, T) the positions that are predicted.
        gather_before: Gather them before the linear map with this weight.

    Attributes:
        layout: How the tokens lie in activations at this point.
        uses: What was noted, in order.
        roots: Tensors without history that the cotangents reach last.
        without_rule: Names of parameters with a use that no rule knows.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        predicted: torch.Tensor,
        *,
        gather_before: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.layout = Layout(*predicted.shape)
        self.uses: list[Use] = []
        self.roots: list[torch.Tensor] = []
        self.without_rule: set[str] = set()
        self._handles = {id(parameter): Handle(name) for name, parameter in parameters.items()}
        self._aliases: list[torch.Tensor] = []  # kept, so that no other tensor gets the id of one
        self._predicted = predicted
        self._gather_before = gather_before
        self._last_linear: _Linear | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return self._watched(func, args, kwargs or {})

    def _linear(
        self,
        input: torch.Tensor,  # noqa: A002
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight is self._gather_before and input.shape[:2] == self._predicted.shape:
            input = self.gather(input)  # noqa: A001
        output: torch.Tensor = self._watched(F.linear, (input, weight, bias), {})
        self._last_linear = _Linear(output, output._version, input, weight, bias)
        return output

    def handle(self, value: Any) -> Handle | None:
        """Return the parameter that a tensor is, if it is one that is measured."""
        return self._handles.get(id(value)) if isinstance(value, torch.Tensor) else None

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Apply a function and note the use of the parameters among its arguments."""
        return self._watched(function, args, {})

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return (1, m, ...) of values (B, T, ...): the predicted positions, as one sequence from here on."""
        self.layout = Layout(self.layout.num_sequences, self.layout.length, Places.of(self._predicted))
        return values[self._predicted][None]

    @property
    def gathered(self) -> bool:
        """Whether the predicted positions have been gathered."""
        return self.layout.places is not None

    def decoder(self, logits: torch.Tensor) -> tuple[torch.Tensor, Decoder] | None:
        """Return the hidden states and the linear map that gave the logits; None: they are no linear map's output."""
        last = self._last_linear
        if last is None or last.weight.ndim != 2 or last.output.shape != logits.shape:
            return None
        if last.output.data_ptr() != logits.data_ptr() or logits._version != last.version:
            return None
        return last.hidden, Decoder(last.weight.detach(), None if last.bias is None else last.bias.detach())

    @property
    def last_weight(self) -> torch.Tensor | None:
        """The weight of the last linear map."""
        return None if self._last_linear is None else self._last_linear.weight

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        touched = {handle.name for value in _tensors((args, kwargs)) if (handle := self.handle(value)) is not None}
        if not touched:
            return func(*args, **kwargs)
        rule = rule_of(func)
        if rule is not None and torch.is_grad_enabled():
            result = rule(self, *args, **kwargs) if _fits(rule, self, args, kwargs) else None
            if result is not None:
                if result.alias is not None:
                    self._add_alias(result.output, result.alias)
                return self._noted(result.output, result.contributions) if result.contributions else result.output
        output = func(*args, **kwargs)
        if any(value.is_floating_point() and self.handle(value) is None for value in _tensors(output)):
            self.without_rule |= touched
        return output

    def _add_alias(self, value: torch.Tensor, handle: Handle) -> None:
        if id(value) not in self._handles:
            self._handles[id(value)] = handle
            self._aliases.append(value)

    def _noted(self, output: torch.Tensor, contributions: dict[str, Contribution]) -> torch.Tensor:
        if not output.requires_grad:
            root = output.requires_grad_()
            self.roots.append(root)
            output = root.clone()  # a node of its own, and the model may overwrite it
        base = output._base
        # a view that the model overwrites leaves the graph, what it is a view of stays in it
        whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
        edge = get_gradient_edge(base if base is not None and whole else output)
        self.uses.append(Use(edge.node, edge.output_nr, output.shape, contributions))
        return output


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


def _fits(rule: Rule, uses: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the rule has these arguments."""
    try:
        inspect.signature(rule).bind(uses, *args, **kwargs)
    except TypeError:
        return False
    return True
