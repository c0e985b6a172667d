"""How the gradient of a batch is put together from the processes' parts of it: a single process, DDP, FSDP2.

Each process takes the gradient of its own sentences, and torch averages the gradients over the processes. So each
process multiplies its mean loss by (its predicted tokens) / (all predicted tokens) and by the number of processes: the
average is then the gradient of the mean over all predicted tokens, whichever process has which.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isoloss.lab.training.distributed import ProcessGroup, full_tensor

# buffers are constants, sent to nobody at each step; torch 2.13 has a new name for that
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}

Function = Callable[..., torch.Tensor]  # of a model and anything else


class SingleProcess:
    """One process: a gradient is what backward gives; `DDP` and `FSDP` are variations, for the processes of `group`."""

    def __init__(self, model: nn.Module, group: ProcessGroup | None = None) -> None:
        self._model = model
        self.group = group or ProcessGroup()

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return `function(model, *arguments)`, whose backward pass ends with the gradients of all processes."""
        return function(self._model, *arguments)

    def auxiliary(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return `function(model, *arguments)`, whose backward pass comes before that of a `loss`.

        The processes' gradients are averaged by the latter.
        """
        return function(self._model, *arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of losses that are computed while this is open to their process, where that is possible."""
        return contextlib.nullcontext()

    def full_model(self) -> Any:
        """Return the model with full parameters in rank 0, and None elsewhere; all processes call this."""
        return self._model if self.group.is_main else None


class DDP(SingleProcess):
    """Distributed data parallel: every process has the same whole model, and backward averages the gradients."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        super().__init__(model, group)
        self._ddp = DistributedDataParallel(_Applied(model), **_BUFFERS)

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return a loss whose backward pass averages all gradients so far; see `SingleProcess.loss`."""
        value: torch.Tensor = self._ddp(function, *arguments)
        return value

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients to this process; see `SingleProcess.no_sync`."""
        return self._ddp.no_sync()


class FSDP(SingleProcess):
    """FSDP2: every process has a shard of each parameter, its gradient and the optimizer's state.

    Gradients are averaged at every backward pass: keeping them to their process would take full ones in each.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        super().__init__(model, group)
        # what is saved and measured: made before the parameters are cut, and on the CPU, so that the device holds no
        # second model
        self._full = copy.deepcopy(model).cpu() if group.is_main else None
        mesh = init_device_mesh(next(model.parameters()).device.type, (group.world_size,))
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._root = _Applied(model)
        # blocks first: a call takes all parameters below it that no earlier one has, and the root what is left
        for module in [*(block for blocks in lists for block in blocks), self._root]:
            module.register_forward_hook(_own_memory)
            sharded = fully_shard(module, mesh=mesh)
            # gloo's own average is a sum in torch 2.8
            if mesh.device_type == "cpu":
                sharded.set_force_sum_reduction_for_comms(True)

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return a loss whose backward pass ends with the average in shards; see `SingleProcess.loss`."""
        value: torch.Tensor = self._root(function, *arguments)
        return value

    auxiliary = loss  # only the hooks around the root's forward pass put parameters together

    def full_model(self) -> Any:
        """Return a copy of the model on the CPU in rank 0; see `SingleProcess.full_model`."""
        targets = {} if self._full is None else dict(self._full.cpu().named_parameters())
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                # called in every process, as each sends its shard
                value = full_tensor(parameter)
                if name in targets:
                    targets[name].copy_(value)
        return self._full


class _Applied(nn.Module):
    """A model whose forward pass is any function of it: what DDP and FSDP put their hooks around."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Function, *arguments: Any) -> torch.Tensor:
        return function(self.model, *arguments)


def _own_memory(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Return a module's output, copied if it is a view, which FSDP2 cannot hook its backward pass onto."""
    return output.clone() if isinstance(output, torch.Tensor) and output._base is not None else output


def make_parallel(model: nn.Module, parallel: Literal["ddp", "fsdp"], group: ProcessGroup) -> SingleProcess:
    """Return how the processes of `group` train `model`, which is on its device."""
    if group.world_size == 1:
        return SingleProcess(model, group)
    return DDP(model, group) if parallel == "ddp" else FSDP(model, group)
