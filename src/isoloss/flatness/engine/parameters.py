"""Which weights of a model a measure is of: the parameters that count, the embeddings among them, and what it misses.

Embeddings are the parameters of `torch.nn.Embedding` modules: of tokens, positions, token types. An output head that
is tied to one of them is the same parameter, so it is among them; a head with a weight of its own is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from isoloss.errors import IsolossError, warn
from isoloss.model_checks import measured_parameters, unwrapped


def counted_parameters(
    model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Return the parameters that a measure is of, by name: the ones given, else all trainable ones; tied ones once.

    Where it is all of them and layers of the model are quantized, it warns with the number of weights that are left
    out, as quantized weights are not parameters.
    """
    if parameters is None:
        trainable = measured_parameters(model)
        if layers := _quantized(model):
            _check_gradients_pass(model, layers)
            warn(
                f"{quantized_weights(model):,} weights of {len(layers)} quantized layers of "
                f"{type(unwrapped(model)).__name__} are not parameters and are not measured"
            )
        return trainable
    if not parameters:
        raise IsolossError("parameters is empty: name at least one, or leave it out to measure all trainable ones")
    known = {id(parameter) for parameter in model.parameters()}
    if others := [name for name, value in parameters.items() if id(value) not in known]:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise IsolossError(f"parameters has {others[0]}{more}, which {type(unwrapped(model)).__name__} does not have")
    names = {id(value): name for name, value in reversed(list(parameters.items()))}  # the first of several
    return {name: value for name, value in parameters.items() if names[id(value)] == name}


def embeddings(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of those parameters that belong to an embedding."""
    modules = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    owned = {id(parameter) for module in modules for parameter in module.parameters()}
    return [name for name, value in parameters.items() if id(value) in owned]


def quantized_weights(model: nn.Module) -> int:
    """Return how many weights of linear maps and embeddings are integers or packed, and so are no parameters."""
    return sum(_size(module) for module in _quantized(model))


def refuse_unreached(model: nn.Module, names: Iterable[str], without_gradient: Iterable[str]) -> None:
    """Raise where no prediction depends on any of the parameters that are measured."""
    if set(names) <= set(without_gradient):
        quantized = quantized_weights(model)
        reason = f"; {quantized:,} weights are quantized, and only floating-point ones are measured" * bool(quantized)
        name = type(unwrapped(model)).__name__
        raise IsolossError(f"no prediction of {name} has a gradient with respect to any measured parameter{reason}")


@contextmanager
def requiring_gradients(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let the parameters require gradients for a while, frozen ones as well."""
    flags = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _quantized(model: nn.Module) -> list[nn.Module]:
    """Return the innermost modules of a linear map's or embedding's size whose weight is not in floating point."""
    packed = [module for module in model.modules() if _size(module) and _is_packed(module)]
    return [module for module in packed if not any(part in packed for part in module.modules() if part is not module)]


def _size(module: nn.Module) -> int:
    """Return the number of weights that a module's sizes speak of; 0 where it has no such sizes."""
    for names in (("in_features", "out_features"), ("num_embeddings", "embedding_dim")):
        sizes = [getattr(module, name, None) for name in names]
        if all(isinstance(size, int) for size in sizes):
            return int(sizes[0]) * int(sizes[1])  # type: ignore[arg-type]
    return 0


def _is_packed(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return not weight.is_floating_point()
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return _passes_no_gradient(module) or any(not value.is_floating_point() for value in own)


def _passes_no_gradient(module: nn.Module) -> bool:
    """Whether it is one of torch's own quantized layers, whose weight is unpacked by a call."""
    return type(module).__module__.startswith("torch.ao.nn.quantized")


def _check_gradients_pass(model: nn.Module, layers: list[nn.Module]) -> None:
    stopping = [layer for layer in layers if _passes_no_gradient(layer) and not isinstance(layer, nn.Embedding)]
    if stopping:
        raise IsolossError(
            f"{len(stopping)} quantized layers of {type(unwrapped(model)).__name__} pass no gradient "
            f"({type(stopping[0]).__module__}), so parameters before them cannot be measured: measure the model before "
            "it is quantized, or name the parameters after the last such layer in `parameters`"
        )
