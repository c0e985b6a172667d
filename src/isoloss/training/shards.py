"""Tensors sharded over processes, as FSDP2 leaves parameters: a process's shard, the full tensor, norms over all.

A plain tensor is its own only shard, and nothing here changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sharded over processes."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor put together from its shards, on the CPU; all processes call this, in the same order."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all processes have, sharded as `like` of the same shape is."""
    if not isinstance(like, DTensor):
        return tensor
    own = tensor.to(like.device)
    return distribute_tensor(own, like.device_mesh, like.placements, src_data_rank=None)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm over all elements of all tensors, those of the other processes' shards too: a scalar.

    Example:
        >>> float(total_norm([torch.tensor([3.0]), torch.tensor([0.0, 4.0])]))
        5.0
    """
    norm = torch.nn.utils.get_total_norm([local_shard(tensor) for tensor in tensors])
    if not any(map(is_sharded, tensors)):
        return norm
    square = norm.square()
    distributed.all_reduce(square)
    return square.sqrt()
