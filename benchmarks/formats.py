"""The grids of `isoloss.flatness.Rounding` against torchao and bitsandbytes, bit for bit, on the CPU.

It prints how many matrices agree, and the digests that `tests/flatness/test_formats.py` keeps. In an environment with
isoloss,

    pip install -r benchmarks/requirements-formats.txt
    python benchmarks/formats.py
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version

import torch
import torch.nn.functional as F

from isoloss.flatness.formats import FORMATS, Rounding

SHAPES = ((64, 128), (1, 1), (3, 5), (7, 129), (33, 257), (128, 1), (5, 4096), (11, 64))


def matrices(shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield matrices of a shape: plain and with outliers, rows of one sign and of zeros, in two types and two sizes."""
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (0.02, 30.0):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
            yield weight.to(dtype)
            weight[::2] *= weight[::2].abs() / scale
            weight[-1] = weight[-1].abs()
            weight[0] = 0
            yield weight.to(dtype)


def known() -> Iterator[torch.Tensor]:
    """Yield the two matrices whose digests the test keeps, of numbers that every machine rounds alike."""
    integers = torch.arange(33 * 257).view(33, 257) * 7919 % 10007 - 5003
    for dtype in (torch.float32, torch.bfloat16):
        yield ((integers / 5003) ** 3 / 8).to(dtype)


def by_torchao(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Round and widen a matrix by torchao's reference primitives; padded with zeros to whole groups."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    assert rounding.group_size is not None
    mapping = MappingType.ASYMMETRIC if rounding.grid == "asymmetric" else MappingType.SYMMETRIC
    padded, block = F.pad(weight, (0, -weight.shape[1] % rounding.group_size)), (1, rounding.group_size)
    ends = 0, 2**rounding.bits - 1
    scale, zero = choose_qparams_affine(padded, mapping, block, torch.int32, *ends)
    integers = quantize_affine(padded, block, scale, zero, torch.int32, *ends)
    found = dequantize_affine(integers, block, scale, zero, torch.int32, *ends, output_dtype=weight.dtype)
    return found[:, : weight.shape[1]]


def by_bitsandbytes(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Round and widen a matrix as NF4, with the scales in float32."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=rounding.group_size, quant_type="nf4", compress_statistics=False)
    return dequantize_4bit(packed, state)


def digest(weight: torch.Tensor) -> str:
    """Return the start of the SHA-256 of a matrix's values in float32, without a sign of zeros."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()[:16]


def main() -> int:
    """Compare all formats that one of the two libraries has."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes would compile its reference code, for minutes
    print(f"torchao {version('torchao')}, bitsandbytes {version('bitsandbytes')}, torch {version('torch')}")
    wrong = 0
    for name, rounding in FORMATS.items():
        if rounding.grid == "symmetric":
            continue
        theirs = by_bitsandbytes if rounding.grid == "nf4" else by_torchao
        pairs = [(rounding.round(one), theirs(one, rounding)) for shape in SHAPES for one in matrices(shape)]
        equal = [torch.equal(ours, other) and ours.dtype == other.dtype for ours, other in pairs]
        print(f"{name}: {sum(equal)} of {len(equal)} matrices are equal in every bit, by {theirs.__name__}")
        print(f"    {[digest(theirs(one, rounding)) for one in known()]}")
        wrong += len(equal) - sum(equal)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
