"""Which weights of a model a measure is of: the parameters that count, the embeddings among them, and what it misses.

Embeddings are the parameters of `torch.nn.Embedding` modules: of tokens, positions, token types. An output head that
is tied to one of them is the same parameter, so it is among them; a head with a weight of its own is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from isoloss.errors import IsolossError, warn
from isoloss.model_checks import measured_parameters, resharded, unwrapped


def counted_parameters(
    model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None, *, shards: bool = False
) -> dict[str, nn.Parameter]:
    """Return the parameters that a measure is of, by name: the ones given, else all trainable ones; tied ones once.

    Where it is all of them and layers of the model are quantized, it warns with the number of weights that are left
    out, as quantized weights are not parameters. A model that is sharded is refused unless the measure can take
    `shards`.
    """
    if resharded(model) and not shards:
        raise IsolossError(
            f"{type(unwrapped(model)).__name__} is sharded by fully_shard, and this measure needs whole weights: only "
            "fisher_trace (method='ghost', without a rescaling), empirical_fisher_trace and per_sequence_grad_norms "
            "measure a sharded model"
        )
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
    # a parameter that is not the model's would count as one without a gradient, and make the trace too small unseen
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


def check_reached(model: nn.Module, names: Iterable[str], without_gradient: Iterable[str]) -> None:
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
    # an adapter's layer has the sizes of the quantized one inside it: only the inner one counts
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
    # GPTQ and AWQ keep their integers in buffers of other names, torch.ao behind a method `weight`
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return _passes_no_gradient(module) or any(not value.is_floating_point() for value in tensors)


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


_PART = 1 << 18  # numbers squared at a time: in float64 a large embedding's gradient takes more than all activations


@dataclass(frozen=True, eq=False)
class ParameterBlocks:
    """How the entries of one parameter are dealt into parts.

    Entry (i, j) is in part rows[i] * num_columns + columns[j]. A vector has rows and the one column [0]. Where a tensor
    has more than two axes, those between the first and the last are not split.

    Example:
        >>> import torch
        >>> from isoloss.flatness._parameters import ParameterBlocks
        >>> split = ParameterBlocks(torch.tensor([0, 0, 1]), torch.tensor([0, 1]))
        >>> split.num_blocks, split.sums(torch.arange(6.0)[None])
        (4, tensor([[2., 4., 4., 5.]], dtype=torch.float64))
    """

    rows: torch.Tensor  # (a,) int64, the group of each index of the first axis
    columns: torch.Tensor  # (b,) int64, the group of each index of the last axis

    def __post_init__(self) -> None:
        for axis, groups in (("rows", self.rows), ("columns", self.columns)):
            if groups.ndim != 1 or groups.dtype != torch.int64 or not len(groups):
                raise IsolossError(
                    f"the {axis} of a split are {groups.dtype} of shape {tuple(groups.shape)}; they are int64, a vector"
                )
            numbers = sorted(set(groups.tolist()))
            if numbers != list(range(len(numbers))):
                raise IsolossError(
                    f"the groups of the {axis} of a split are {numbers}; they count from 0 without a gap"
                )

    @cached_property
    def num_rows(self) -> int:
        return int(self.rows.max()) + 1

    @cached_property
    def num_columns(self) -> int:
        return int(self.columns.max()) + 1

    @property
    def num_blocks(self) -> int:
        return self.num_rows * self.num_columns

    def check(self, name: str, shape: torch.Size) -> None:
        ends = (shape[0] if len(shape) else 1, shape[-1] if len(shape) > 1 else 1)
        if ends != (given := (len(self.rows), len(self.columns))):
            raise IsolossError(f"the split of {name} is of {given} rows and columns; its shape is {tuple(shape)}")

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return (n, num_blocks) float64: the sums over each block of values (n, a ... b) of the parameter."""
        axes = values.reshape(len(values), len(self.rows), -1, len(self.columns))
        entries = axes[:, :, 0] if axes.shape[2] == 1 else axes.sum(dim=2, dtype=torch.float64)
        return self.row_sums(self.column_sums(entries), 1).flatten(1)

    def row_sums(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Return float64: the sums over the groups of rows, which are the indices (a,) of a dimension."""
        return _grouped(values, self.rows, self.num_rows, dim)

    def column_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return float64: the sums over the groups of columns, which are the indices (b,) of the last dimension."""
        return _grouped(values, self.columns, self.num_columns, values.ndim - 1)


def _grouped(values: torch.Tensor, groups: torch.Tensor, number: int, dim: int) -> torch.Tensor:
    if number == 1:
        return values.sum(dim=dim, keepdim=True, dtype=torch.float64)
    shape = [*values.shape[:dim], number, *values.shape[dim + 1 :]]
    sums = torch.zeros(shape, dtype=torch.float64, device=values.device)
    return sums.index_add_(dim, groups.to(values.device), values.double())


class ParameterColumns:
    """The columns of a measurement: one for each parameter or, where it is split, for each part; parameters in order.

    Attributes:
        parameter_blocks: Those of the parameters that have several parts.
        of: The columns of each parameter.
        parameter_ids: (K,) the index of the parameter that each column belongs to.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], parameter_blocks: Mapping[str, ParameterBlocks] | None = None
    ) -> None:
        for name, split in (parameter_blocks or {}).items():
            if name not in parameters:
                raise IsolossError(f"{name} is split, but it is not one of the {len(parameters)} measured parameters")
            split.check(name, parameters[name].shape)
        # a split into one part is the whole parameter, whose norm has faster rules
        self.parameter_blocks = {
            name: split for name, split in (parameter_blocks or {}).items() if split.num_blocks > 1
        }
        numbers = [
            self.parameter_blocks[name].num_blocks if name in self.parameter_blocks else 1 for name in parameters
        ]
        ends = list(itertools.accumulate(numbers, initial=0))
        self.of = {name: slice(*span) for name, span in zip(parameters, itertools.pairwise(ends), strict=True)}
        self.parameter_ids = torch.repeat_interleave(
            torch.arange(len(numbers)), torch.tensor(numbers, dtype=torch.int64)
        )

    def __len__(self) -> int:
        return len(self.parameter_ids)

    def sums(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return (n,): the sums of a tensor of the parameter's shape over the parameter's n columns."""
        split = self.parameter_blocks.get(name)
        return values.sum()[None] if split is None else split.sums(values.reshape(1, -1))[0]

    def squares(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return (n,) float64: the same sums of the squares of a tensor."""
        if name in self.parameter_blocks:
            return self.sums(name, values.double().square())
        parts = torch.split(values.reshape(-1), _PART)
        return torch.stack([part.double().square_().sum() for part in parts]).sum()[None]

    def by_parameter(self, values: torch.Tensor) -> torch.Tensor:
        """Return (n, P): values (n, K) summed over the columns of each parameter."""
        if not self.parameter_blocks:
            return values
        return values.new_zeros(len(values), len(self.of)).index_add_(1, self.parameter_ids.to(values.device), values)
