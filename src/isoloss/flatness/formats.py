"""Low-bit formats: the values to which they round the weights of linear maps.

Each weight is rounded to the nearest value on the grid of its group. Nothing is calibrated: a method such as GPTQ or
AWQ, which corrects the error of one weight with others or rescales channels first, does better on the same grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from isoloss.errors import IsolossError

Grid = Literal["symmetric", "asymmetric", "gptq", "nf4"]


# the float32 values of bitsandbytes
_NF4: tuple[float, ...] = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
_NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
_NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


def _symmetric(groups: torch.Tensor, bits: int) -> torch.Tensor:
    largest = 2 ** (bits - 1) - 1
    # in float32 at least: a scale in bfloat16 would move the values themselves
    wide = groups.to(torch.promote_types(groups.dtype, torch.float32))
    scales = _positive(wide.abs().amax(dim=2, keepdim=True) / largest)
    rounded: torch.Tensor = (wide / scales).round() * scales
    return rounded.to(groups.dtype)


def _gptq(groups: torch.Tensor, bits: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    scales = _positive(groups.abs().amax(dim=2, keepdim=True) / (half - 0.5))
    return (groups * (1 / scales)).round().clamp(-half, half - 1) * scales


def _asymmetric(groups: torch.Tensor, bits: int) -> torch.Tensor:
    largest = 2**bits - 1
    low, high = groups.amin(dim=2, keepdim=True).clamp(max=0), groups.amax(dim=2, keepdim=True).clamp(min=0)
    scales = _positive((high - low) / largest)
    zeros = (-(low / scales).round()).clamp(0, largest)
    return (((groups * (1 / scales)).round() + zeros).clamp(0, largest) - zeros) * scales


def _nf4(groups: torch.Tensor, bits: int) -> torch.Tensor:
    wide = groups.to(torch.promote_types(groups.dtype, torch.float32))
    values = torch.tensor(_NF4, dtype=wide.dtype, device=wide.device)
    scales = wide.abs().amax(dim=2, keepdim=True)
    nearest = torch.bucketize(wide * (1 / _positive(scales)), (values[:-1] + values[1:]) / 2, out_int32=True)
    return (values[nearest] * scales).to(groups.dtype)


def _positive(scales: torch.Tensor) -> torch.Tensor:
    return scales.clamp(min=torch.finfo(scales.dtype).tiny)  # the scale of zeros is 0


_GRIDS: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "symmetric": _symmetric,
    "asymmetric": _asymmetric,
    "gptq": _gptq,
    "nf4": _nf4,
}


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Weight matrices of linear maps, rounded to the nearest values of a grid, without calibration.

    These are the weights of linear layers and every other parameter that the forward pass multiplies with activations
    as a matrix, such as experts in one tensor of three axes, or `x @ W`. If the class of a layer does not say which
    axes are its inputs, the forward pass shows it; a matrix `weight` that the pass does not reach counts as (outputs,
    inputs).

    Embeddings, norms, biases and positions stay as they are, and so do the routers of transformers' experts, the output
    layer, and layers that share a weight with an embedding: common low-bit formats leave them, too. The output layer is
    the one that `model.get_output_embeddings()` returns. If a module lacks this method, its output layer is rounded,
    unless it shares its weight with an embedding.

    With w the weights of a group, the values of a grid are:

    - `"symmetric"`: `s k` with `s = max |w| / (2^(bits - 1) - 1)` and k the integers from `-(2^(bits - 1) - 1)` to
      `2^(bits - 1) - 1`, so the largest weight is kept. Computed in float32 or wider.
    - `"gptq"`: `s k` with `s = 2 max |w| / (2^bits - 1)` and k from `-2^(bits - 1)` to `2^(bits - 1) - 1`: one value
      more, but the largest weight moves by half a step. It is the grid of GPTQ's symmetric quantizer, and torchao's
      `MappingType.SYMMETRIC`.
    - `"asymmetric"`: `s (k - z)` with `s = (max(w, 0) - min(w, 0)) / (2^bits - 1)`, the zero point
      `z = -round(min(w, 0) / s)` and k from 0 to `2^bits - 1`, so that 0 is kept: torchao's
      `MappingType.ASYMMETRIC` and, in groups with weights of both signs, AWQ's grid.
    - `"nf4"`: `max |w| c` with c one of 16 quantiles of a Gaussian (Dettmers et al. 2023, QLoRA, arXiv:2305.14314,
      appendix E), as in bitsandbytes without double quantization of the scales. Groups are blocks of the whole matrix,
      row after row.

    The last three agree with torchao 0.18 and bitsandbytes 0.50.2 bit for bit in float32 and bfloat16
    (`benchmarks/formats.py`). As in torchao, the scales of `"gptq"` and `"asymmetric"` have the type of the weights.

    Attributes:
        bits: Bits per weight, from 2 to 8; 4 for `"nf4"`.
        group_size: How many neighboring weights of an output share a scale; None: all weights of the output.
        grid: The values of a group, as above.
    """

    bits: int
    group_size: int | None = None
    grid: Grid = "symmetric"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 2 <= self.bits <= 8:
            raise IsolossError(f"bits is {self.bits}; it must be from 2 to 8")
        if self.group_size is not None and self.group_size < 1:
            raise IsolossError(f"group_size is {self.group_size}; it must be at least 1")
        if self.grid not in _GRIDS:
            raise IsolossError(f"grid is {self.grid!r}; it is one of {', '.join(_GRIDS)}")
        if self.grid == "nf4" and self.bits != 4:
            raise IsolossError(f"bits is {self.bits}; the grid nf4 has 4 bits")

    def __str__(self) -> str:
        groups = "per channel" if self.group_size is None else f"per group of {self.group_size}"
        grid = "" if self.grid == "symmetric" else f" ({self.grid})"
        return f"weights of {self.bits} bits{grid}, {groups}"

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a matrix (outputs, inputs) rounded.

        The last group of a row may be smaller. Ties go to the even k.

        Example:
            >>> import torch
            >>> from isoloss.flatness import Rounding
            >>> Rounding(bits=4).round(torch.tensor([[-7.0, 3.4, 0.2], [0.07, 0.0, 0.004]]))
            tensor([[-7.0000,  3.0000,  0.0000],
                    [ 0.0700,  0.0000,  0.0000]])
        """
        rows = weight.reshape(1, -1) if self.grid == "nf4" else weight
        number, length = rows.shape
        size = self.group_size or length
        # zeros change neither the largest weight of a group nor a range that has 0 in it
        groups = F.pad(rows, (0, -length % size)).view(number, -1, size)
        rounded = _GRIDS[self.grid](groups, self.bits)
        return rounded.view(number, -1)[:, :length].reshape(weight.shape)

    def weights(self, maps: Mapping[nn.Parameter, tuple[int, ...]]) -> dict[nn.Parameter, torch.Tensor]:
        """Return the rounded weights of the matrices of maps, each given with the axes that are its inputs."""
        rounded = {}
        for weight, axes in maps.items():
            last = tuple(range(weight.ndim - len(axes), weight.ndim))
            inputs_last = weight.detach().movedim(axes, last)
            rows = inputs_last.flatten(last[0]).flatten(0, -2)
            rounded[weight] = self.round(rows).view(inputs_last.shape).movedim(last, axes)
        return rounded


# by the name of a measure without its -rise
FORMATS: Mapping[str, Rounding] = {
    "int8": Rounding(bits=8),
    "int4": Rounding(bits=4, group_size=128),
    "int3": Rounding(bits=3, group_size=128),
    "int2": Rounding(bits=2, group_size=128),
    "int4-asymmetric-128": Rounding(bits=4, group_size=128, grid="asymmetric"),
    "int4-asymmetric-32": Rounding(bits=4, group_size=32, grid="asymmetric"),
    "int4-gptq": Rounding(bits=4, group_size=128, grid="gptq"),
    "nf4": Rounding(bits=4, group_size=64, grid="nf4"),
}
