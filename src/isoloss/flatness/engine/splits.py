"""Parts of parameters: groups of rows and columns of a tensor, each with a column of its own in a measurement.

Shapes: a, b the lengths of a parameter's first and last axis, P parameters, K columns.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from isoloss.errors import IsolossError

_PART = 1 << 18  # numbers squared at a time: in float64 a large embedding's gradient takes more than all activations


@dataclass(frozen=True, eq=False)
class Split:
    """How the entries of one parameter are dealt into parts.

    Entry (i, j) is in part rows[i] * num_columns + columns[j]. A vector has rows and the one column [0]. Where a tensor
    has more than two axes, those between the first and the last are not split.

    Raises:
        IsolossError: The groups of an axis are not numbered 0, 1, ... without a gap.

    Example:
        >>> split = Split(torch.tensor([0, 0, 1]), torch.tensor([0, 1]))
        >>> split.num_parts, split.sums(torch.arange(6.0)[None])
        (4, tensor([[2., 4., 4., 5.]], dtype=torch.float64))
    """

    rows: torch.Tensor  # (a,) int64, the group of each index of the first axis
    columns: torch.Tensor  # (b,) int64, that of each index of the last axis

    def __post_init__(self) -> None:
        for axis, groups in (("rows", self.rows), ("columns", self.columns)):
            if groups.ndim != 1 or groups.dtype != torch.int64 or not len(groups):
                raise IsolossError(
                    f"the {axis} of a split are {groups.dtype} of shape {tuple(groups.shape)}; they are int64, a vector"
                )
            found = sorted(set(groups.tolist()))
            if found != list(range(len(found))):
                raise IsolossError(f"the groups of the {axis} of a split are {found}; they count from 0 without a gap")

    @cached_property
    def num_rows(self) -> int:
        """Groups of the first axis."""
        return int(self.rows.max()) + 1

    @cached_property
    def num_columns(self) -> int:
        """Groups of the last axis."""
        return int(self.columns.max()) + 1

    @property
    def num_parts(self) -> int:
        """Parts of the parameter."""
        return self.num_rows * self.num_columns

    def check(self, name: str, shape: torch.Size) -> None:
        """Refuse a parameter of another shape."""
        ends = (shape[0] if len(shape) else 1, shape[-1] if len(shape) > 1 else 1)
        if ends != (given := (len(self.rows), len(self.columns))):
            raise IsolossError(f"the split of {name} is of {given} rows and columns; its shape is {tuple(shape)}")

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return (n, num_parts) float64: the sums over each part of values (n, a ... b) of the parameter's elements."""
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


class Columns:
    """The columns of a measurement: one for each parameter or, where it is split, for each part; parameters in order.

    Attributes:
        splits: Those of the parameters that have several parts.
        of: The columns of each parameter.
        owners: (K,) the index of the parameter that each column belongs to.

    Raises:
        IsolossError: A split is of a parameter that is not measured, or of another shape.

    Example:
        >>> split = Split(torch.tensor([0, 0, 1]), torch.tensor([0]))
        >>> columns = Columns({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, {"bias": split})
        >>> columns.owners.tolist(), columns.sums("bias", torch.ones(3))
        ([0, 1, 1], tensor([2., 1.], dtype=torch.float64))
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], splits: Mapping[str, Split] | None = None) -> None:
        for name, split in (splits or {}).items():
            if name not in parameters:
                raise IsolossError(f"{name} is split, but it is not one of the {len(parameters)} measured parameters")
            split.check(name, parameters[name].shape)
        self.splits = {name: split for name, split in (splits or {}).items() if split.num_parts > 1}
        numbers = [self.splits[name].num_parts if name in self.splits else 1 for name in parameters]
        ends = list(itertools.accumulate(numbers, initial=0))
        self.of = {name: slice(*span) for name, span in zip(parameters, itertools.pairwise(ends), strict=True)}
        self.owners = torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers, dtype=torch.int64))

    def __len__(self) -> int:
        """Return K."""
        return len(self.owners)

    def sums(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return (n,): the sums of a tensor of the parameter's shape over the parameter's n columns."""
        split = self.splits.get(name)
        return values.sum()[None] if split is None else split.sums(values.reshape(1, -1))[0]

    def squares(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return (n,) float64: the same sums of the squares of a tensor."""
        if name in self.splits:
            return self.sums(name, values.double().square())
        parts = torch.split(values.reshape(-1), _PART)
        return torch.stack([part.double().square_().sum() for part in parts]).sum()[None]

    def by_parameter(self, values: torch.Tensor) -> torch.Tensor:
        """Return (n, P): values (n, K) summed over the columns of each parameter."""
        if not self.splits:
            return values
        return values.new_zeros(len(values), len(self.of)).index_add_(1, self.owners.to(values.device), values)

    def digest(self) -> str:
        """Return what tells these splits from others."""
        content = hashlib.sha256()
        for name, columns in self.of.items():
            if name in self.splits:
                for groups in (self.splits[name].rows, self.splits[name].columns):
                    content.update(f"{name} {columns} {len(groups)} ".encode() + groups.cpu().numpy().tobytes())
        return content.hexdigest()
