"""Rescaled parameters, what they are rescaled from, and the check that a model's logits stay as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._rescaling.symmetries import Granularity, Rescalings, rescalings_of
from isoloss.model_checks import (
    device_of,
    eager_with_grad,
    forward_arguments,
    logits_of_output,
    refuse_dropout,
    text_config,
    unwrapped,
)

_LARGEST_FACTOR = 10.0  # of a check, which has no eps
_CONTROL_FACTORS = 2.0, 3.0  # of a control; each or its inverse, so that nothing stays nearly as it was
_NO_INPUTS = ("labels", "documents")
_UNUSED = -30.0  # a log-probability
_KERNELS_OF_ANY_TYPE = (None, "eager", "sdpa")


@torch.no_grad()
def rescaled(model: nn.Module, rescalings: Rescalings, z: ArrayLike) -> dict[str, torch.Tensor]:
    """Return a model's parameters after a rescaling; the model stays as it is.

    Args:
        model: The model, or one of the same parameters, whatever it is wrapped in.
        rescalings: The rescalings of such a model, R generators.
        z: (R,) log-factor of each generator.

    Returns:
        The new value of each parameter of `rescalings`, tied ones once, by its name in the model inside of wrappers.

    Raises:
        IsolossError: z has another shape or is not finite, or the model lacks one of the parameters.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import rescaled, rescalings_of
        >>> model, _ = tiny_bert()
        >>> found = rescalings_of(model)
        >>> new = rescaled(model, found, np.full(len(found.names), np.log(2)))
        >>> old = model.bert.embeddings.word_embeddings.weight
        >>> bool(torch.allclose(new["bert.embeddings.word_embeddings.weight"], 2 * old))
        True
    """
    return rescaled_values(model, dict(unwrapped(model).named_parameters()), rescalings, z)


def rescaled_values(
    model: nn.Module, values: Mapping[str, torch.Tensor], rescalings: Rescalings, z: ArrayLike
) -> dict[str, torch.Tensor]:
    """Return given values of the model's parameters after a rescaling; otherwise like `rescaled`."""
    z = np.asarray(z, dtype=np.float64)
    if z.shape != (len(rescalings.names),) or not np.isfinite(z).all():
        raise IsolossError(f"z has the shape {z.shape}; it has {len(rescalings.names)} finite log-factors")
    factors, new = np.exp(rescalings.actions @ z), {}
    for name, offset, rows, parts in _parts(model, rescalings):
        value = values[name]
        # rounded once, at the end: a factor in bfloat16 would be off by up to 0.4 %
        wide = torch.promote_types(value.dtype, torch.float32)
        factor = torch.from_numpy(factors[rows][parts]).to(value.device, wide)
        new[name] = ((value.to(wide) + offset) * factor - offset).to(value.dtype)
    return new


@torch.no_grad()
def block_sizes(model: nn.Module, rescalings: Rescalings) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how many entries each part has, and the logarithm of their root mean square, gains without their offset.

    Both are (K + L,), as the rows of `rescalings.actions`; where all entries are 0 the logarithm is minus infinity.
    """
    sizes = np.zeros(rescalings.actions.shape[0])
    squares = np.zeros_like(sizes)
    values = dict(unwrapped(model).named_parameters())
    for name, offset, rows, parts in _parts(model, rescalings):
        entries = np.square((values[name].cpu().double() + offset).numpy())
        where = np.broadcast_to(parts, entries.shape).ravel()
        sizes[rows] = np.bincount(where, minlength=rows.stop - rows.start)
        squares[rows] = np.bincount(where, weights=entries.ravel(), minlength=rows.stop - rows.start)
    with np.errstate(divide="ignore"):
        return sizes, np.log(squares / sizes) / 2


@torch.no_grad()
def check_rescaling(
    model: nn.Module, rescalings: Rescalings, batch: Mapping[str, Any], z: ArrayLike | None = None, *, seed: int = 0
) -> float:
    """Return the largest change that a rescaling makes to a log-probability of a token, in nats.

    Tokens less likely than e^-30 do not count: models may give those that are not used a logit of -1e9. The model runs
    in float64, also where its own code asks for float32, and the eps of its norms is taken to 0: what is left is
    rounding, some 1e-13. On a device without float64 all is float32, and the change some 1e-5. Where no
    log-probability is a number, it is NaN. Attention is by sdpa or, whatever other kernel the model has, eager.

    Args:
        model: The model, in evaluation mode; it is left as found.
        rescalings: Its rescalings, R generators.
        batch: Its inputs; `labels` and `documents` among them are not used.
        z: (R,) log-factors; None: factors between 0.1 and 10 at random, uniform in their logarithm.
        seed: Decides these.

    Raises:
        IsolossError: Dropout is on, or z has another shape.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import check_rescaling, rescalings_of
        >>> model, batches = tiny_bert()
        >>> check_rescaling(model, rescalings_of(model, granularity="channel"), batches[0]) < 1e-12
        True
    """
    refuse_dropout(model)
    if z is None:
        z = np.log(_LARGEST_FACTOR) * _random(rescalings, seed)
    inputs = model_inputs(model, batch)
    # in float64 and without eps a rescaling that is exact changes nothing but rounding, so that a wrong rule is seen at
    # once
    with without_rounding(model) as (network, values), torch.no_grad():
        before = logits_of(network, values, inputs).log_softmax(dim=-1)
        changed = rescaled_values(network, values, rescalings, z)
        after = logits_of(network, {**values, **changed}, inputs).log_softmax(dim=-1)
    changes = (after - before)[torch.maximum(before, after) > _UNUSED]
    return float(changes.abs().max()) if len(changes) else math.nan


@torch.no_grad()
def rescaled_at_random(model: nn.Module, *, granularity: Granularity = "tensor", seed: int = 0) -> nn.Module:
    """Return a copy of a model that computes the same, up to rounding and the eps of norms, with other parameters.

    Each generator's factor, or one over it, is between 2 and 3. A measure that changes under it is not a property of
    the function; one that does not change may still depend on the parametrization in other ways.

    Raises:
        IsolossError: As for `rescalings_of`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import fisher_trace, rescaled_at_random
        >>> model, batches = tiny_bert()
        >>> other = rescaled_at_random(model, seed=1)
        >>> values = [fisher_trace(m, batches, rescaling=r).value for r in (None, "minimal") for m in (model, other)]
        >>> abs(values[1] / values[0] - 1) > 0.1, abs(values[3] / values[2] - 1) < 1e-3
        (True, True)
    """
    rescalings = rescalings_of(model, granularity=granularity)
    draws, (least, most) = _random(rescalings, seed), np.log(_CONTROL_FACTORS)
    new = rescaled(model, rescalings, np.sign(draws) * least + draws * (most - least))
    other = copy.deepcopy(unwrapped(model))
    for name, parameter in other.named_parameters():
        if name in new:
            parameter.copy_(new[name])
    return other


def _random(rescalings: Rescalings, seed: int) -> NDArray[np.float64]:
    """Return (R,) draws, uniform between -1 and 1."""
    draws = torch.rand(len(rescalings.names), generator=seeds.generator(seed, "rescaling"), dtype=torch.float64)
    uniform: NDArray[np.float64] = 2 * draws.numpy() - 1
    return uniform


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Yield the model inside of wrappers and its values in float64, for `logits_of` while this is open.

    Norms then have no eps: the smallest number stands in for it, as a state of zeros must stay one. On a device without
    float64 the type is float32.
    """
    dtype = torch.float32 if device_of(model).type == "mps" else torch.float64
    with widened(model, dtype) as (network, values):
        eps = [
            (vars(module), key, value)
            for module in network.modules()
            for key, value in vars(module).items()
            if "eps" in key and isinstance(value, float)
        ]
        try:
            for attributes, key, _ in eps:
                # not 0: a state of zeros would become NaN
                attributes[key] = torch.finfo(dtype).tiny
            with _ReplaceFloat32(dtype):
                yield network, values
        finally:
            for attributes, key, value in eps:
                attributes[key] = value


@contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Yield the model inside of wrappers and its values in a type, for `logits_of` while this is open.

    Attention kernels that do not take every type, such as FlashAttention, are replaced by the eager one.
    """
    with eager_with_grad(model) as network:
        # by identity: modules share configs, and each must be set back to the kernel that it had
        configs = {id(config): config for module in network.modules() if (config := getattr(module, "config", None))}
        kernels = [(config, getattr(config, "_attn_implementation", None)) for config in configs.values()]
        replaced = [(config, kernel) for config, kernel in kernels if kernel not in _KERNELS_OF_ANY_TYPE]
        # the forward pass of a module of one's own may insist on the type of its buffers
        buffers = () if text_config(network) is None else network.named_buffers()
        tensors = (*network.named_parameters(), *buffers)
        values = {name: value.detach().to(dtype) for name, value in tensors if value.is_floating_point()}
        try:
            for config, _ in replaced:
                config._attn_implementation = "eager"
            yield network, values
        finally:
            for config, kernel in replaced:
                config._attn_implementation = kernel


def logits_of(network: nn.Module, values: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a model's logits with other values of its parameters and buffers, by name; it is left as found.

    `torch.func.functional_call` leaves them in a module that has several places in the model.
    """
    tensors = (*network.named_parameters(), *network.named_buffers())
    new = {id(tensor): values[name] for name, tensor in tensors if name in values}
    replaced = [
        (held, key, tensor)
        for module in network.modules()
        for held in (vars(module)["_parameters"], vars(module)["_buffers"])
        for key, tensor in held.items()
        if id(tensor) in new
    ]
    try:
        for held, key, tensor in replaced:
            held[key] = new[id(tensor)]
        logits: torch.Tensor = logits_of_output(network(**inputs))
        return logits
    finally:
        for held, key, tensor in replaced:
            held[key] = tensor


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments for a batch, on its device and without a cache, as in a measurement."""
    inputs = {
        name: value.to(device_of(model)) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name not in _NO_INPUTS
    }
    return forward_arguments(model, inputs)


class _ReplaceFloat32(TorchFunctionMode):
    """While this is open, what asks for float32 gets another type: some norms and softmaxes do, whatever the model."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swapped = {key: self._instead(value) for key, value in (kwargs or {}).items()}
        # `x.float()` names no type that could be replaced among its arguments
        if func is torch.Tensor.float:
            return args[0].to(self._dtype, **swapped)
        return func(*map(self._instead, args), **swapped)

    def _instead(self, value: Any) -> Any:
        return self._dtype if value is torch.float32 else value


def _parts(model: nn.Module, rescalings: Rescalings) -> Iterator[tuple[str, float, slice, NDArray[np.int64]]]:
    """Yield each parameter: its name, its offset, the rows of its parts, and the part of each entry among them."""
    network = unwrapped(model)
    names = {id(value): name for name, value in network.named_parameters()}
    values = {name.replace("_orig_mod.", ""): value for name, value in network.named_parameters(remove_duplicate=False)}
    first = 0
    for key in rescalings.parameters:
        if key not in values:
            raise IsolossError(f"{type(network).__name__} has no parameter {key}, which is to be rescaled")
        value, split = values[key], rescalings.parameter_blocks.get(key)
        parts, number = np.zeros((1,) * value.ndim, dtype=np.int64), 1
        if split is not None:
            table = split.rows[:, None] * split.num_columns + split.columns
            parts, number = (table if value.ndim > 1 else table[:, 0]).numpy(), split.num_blocks
        yield names[id(value)], rescalings.offsets.get(key, 0.0), slice(first, first + number), parts
        first += number
