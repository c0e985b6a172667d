"""Which parameters are matrices of linear maps, and which of their axes run over the map's inputs.

Layers of torch and transformers say so by their class. Other modules are watched during a forward pass: experts whose
matrices are stacked in one parameter, `x @ W`, `einsum`, the fused projections of attention, recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.pytorch_utils import Conv1D

from isoloss.flatness._ghost.capture import is_pointwise
from isoloss.flatness._ghost.rules import name_of, tensors_in
from isoloss.flatness._parameters import quantized_weights
from isoloss.model_checks import unwrapped

_LOOKUPS = {"embedding", "embedding_bag"}
_INDEXED = {"__getitem__", "index_select"}
_NORMS = {"layer_norm", "rms_norm", "group_norm"}
_ADDED = {"addmm", "baddbmm", "addmv"}  # a product is added to the first argument
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "grouped_mm", "_grouped_mm", *_ADDED}
_PRODUCTS |= {"grouped_mm_fallback"}  # of transformers
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_FUSED = {"multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}  # all matrices are (outputs, inputs)

Axes = tuple[int | None, ...]  # the axis of the parameter along which each axis of a tensor runs


class LinearMaps(TorchFunctionMode):
    """Notes, while it is entered, which parameters of a model are multiplied with activations, and along which axes.

    Casts, scalings, transposes, slices and other views of a parameter are followed, and so are stacked matrices that
    are chosen by index. A parameter that reaches a product in another way, or goes
    to a custom kernel, is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = unwrapped(model)
        # the parameter behind a tensor, and `Axes`; weak, as casts are as large as the weights
        self._origins: Any = WeakTensorKeyDictionary()
        self._inputs: dict[nn.Parameter, tuple[int, ...]] = {}  # of the first product
        self._elementwise: set[nn.Parameter] = set()
        self._tables: set[nn.Parameter] = set()
        for parameter in self._model.parameters():
            self._origins[parameter] = parameter, tuple(range(parameter.ndim))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        values = list(tensors_in((args, kwargs)))
        if not (made_from := [value for value in values if value in self._origins]):
            return output
        name = name_of(func)
        for value, summed in _summed_axes(name, args, values):
            if value in self._origins:
                parameter, axes = self._origins[value]
                inputs = {axes[i] for i in summed} - {None}
                if inputs:
                    self._inputs.setdefault(parameter, tuple(sorted(inputs)))
        by_index = name in _INDEXED and not all(value.is_floating_point() for value in values)
        for value in made_from:
            parameter, axes = self._origins[value]
            if name in _LOOKUPS or (by_index and value.ndim == 2):
                self._tables.add(parameter)
            elif name in _NORMS or is_pointwise(name.strip("_")):
                self._elementwise.add(parameter)
            for made in tensors_in(output):
                if (
                    made not in self._origins
                    and (follows := _axes_of(value, axes, made, by_index=by_index)) is not None
                ):
                    self._origins[made] = parameter, follows
        return output

    def found(self, layers: Iterable[nn.Module]) -> tuple[dict[nn.Parameter, tuple[int, ...]], int]:
        """Return the matrices of maps, each with the axes of its inputs, and how many weights maps have in all.

        Not counted are `unrounded_weights` and parameters that only meet activations element by element: norms, biases,
        positions. All other parameters with two axes count, even where no product was seen, and so do weights that are
        quantized already.

        Args:
            layers: Those whose `weight` is (outputs, inputs), or (inputs, outputs) of a `Conv1D`, unless a product
                showed something else.
        """
        kept = unrounded_weights(self._model)
        usual: dict[Any, tuple[int, ...]] = {x.weight: (0,) if isinstance(x, Conv1D) else (1,) for x in layers}
        maps, number = dict[nn.Parameter, tuple[int, ...]](), quantized_weights(self._model)
        for parameter in self._model.parameters():
            inputs = self._inputs.get(parameter)
            if inputs is None and parameter not in self._elementwise:
                inputs = usual.get(parameter)
            is_apart = id(parameter) in kept or parameter in self._tables
            if is_apart or not is_matrix(parameter) or (inputs is None and parameter in self._elementwise):
                continue
            number += parameter.numel()
            if inputs is not None:
                maps[parameter] = inputs
        return maps, number


def unrounded_weights(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that low-bit formats leave as they are: embeddings, routers, the output layer.

    A router is recognized by its class name, such as `MixtralTopKRouter`, and the output layer if the model names it.
    """
    left = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) or "Router" in type(m).__name__)
    kept = {id(parameter) for module in left for parameter in module.parameters(recurse=False)}
    named: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return kept if named is None else kept | {id(named.weight)}


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter is in floating point and has at least two axes longer than 1."""
    return parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) > 1


def _summed_axes(
    name: str, args: tuple[Any, ...], values: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the factors of a product, each with the axes that the product sums over; nothing for other functions."""
    if name == "linear":
        yield values[1], (-1,)
    elif name in _PRODUCTS:
        left, right = values[1::-1] if name == "__rmatmul__" else values[-2:] if name in _ADDED else values[:2]
        yield left, (-1,)
        yield right, (-2 if right.ndim > 1 else -1,)
    elif name in _CONVOLUTIONS:
        yield values[1], tuple(range(1, values[1].ndim))
    elif name == "einsum" and isinstance(args[0], str) and "." not in args[0] and "->" in args[0]:
        inputs, output = args[0].replace(" ", "").split("->")
        for letters, value in zip(inputs.split(","), values, strict=True):
            yield value, tuple(i for i, letter in enumerate(letters) if letter not in output)
    elif name in _FUSED:
        yield from ((value, (-1,)) for value in values if isinstance(value, nn.Parameter) and value.ndim == 2)


def _axes_of(value: torch.Tensor, axes: Axes, made: torch.Tensor, *, by_index: bool) -> Axes | None:
    """Return the axes of a tensor that was made from one with these axes; None where they are not known."""
    if made.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        # a view: an index of the parameter's axis k moves by the stride of k, and a part of the axis by a multiple
        strides = sorted(
            (stride, axis) for stride, size, axis in zip(value.stride(), value.shape, axes, strict=True) if size > 1
        )
        within = ([axis for stride, axis in strides if 0 < stride <= step] for step in made.stride())
        return tuple(found[-1] if found and size > 1 else None for found, size in zip(within, made.shape, strict=True))
    is_chosen = by_index and made.ndim == value.ndim > 2 and made.shape[1:] == value.shape[1:]
    return axes if is_chosen or made.shape == value.shape else None
