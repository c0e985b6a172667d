"""How the gradient of a batch comes together from the processes' shares of it: alone, DDP, FSDP2.

Each process takes the gradient of its own sentences. Torch averages what the processes have, so each one's loss is
first multiplied by their number: with the weight (its predicted tokens) / (those of all), the average is the gradient
of the mean over all predicted tokens, whatever falls to whom.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isoloss.errors import IsolossError
from isoloss.run_config import TrainConfig
from isoloss.training.algorithms.config import FisherPenaltyConfig, SAMConfig
from isoloss.training.distributed import Processes
from isoloss.training.shards import whole

# buffers are constants, sent to nobody at each step; torch 2.13 has a new name for that
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}

Function = Callable[..., torch.Tensor]  # of a model and anything else


def validate(config: TrainConfig) -> None:
    """Raise an `IsolossError` if `config.parallel` is unknown or cannot train this model by this rule."""
    if config.parallel not in ("ddp", "fsdp"):
        raise IsolossError(f"parallel is {config.parallel!r}; it must be ddp or fsdp")
    if config.parallel == "ddp":
        return
    if config.model.architecture == "lstm":
        raise IsolossError("parallel is 'fsdp', and torch's LSTM kernels need whole weights: use ddp")
    if isinstance(config.rule, FisherPenaltyConfig):
        raise IsolossError(
            "parallel is 'fsdp', and the fisher-penalty rule takes second derivatives, which sharded parameters do not "
            "have: use ddp"
        )
    if isinstance(config.rule, SAMConfig) and config.rule.ascent == "per-rank":
        raise IsolossError(
            "parallel is 'fsdp', and the sam rule's ascent is 'per-rank', which takes all weights on each process: use "
            "ddp, or the ascent reduced"
        )


def check_number(config: TrainConfig, processes: Processes) -> None:
    """Raise an `IsolossError` if a batch cannot be shared equally among the processes."""
    number, rule = processes.world_size, config.rule
    is_halved = isinstance(rule, SAMConfig) and rule.batch == "halves"
    unit = 2 * number if is_halved else number
    if number > 1 and config.batch_size % unit:
        which = f"the sam rule's halves on {number} processes" if is_halved else f"{number} processes"
        raise IsolossError(f"batch_size is {config.batch_size}; {which} need a multiple of {unit}")
    if isinstance(rule, FisherPenaltyConfig) and rule.sentences < number:
        raise IsolossError(
            f"the fisher-penalty rule's sentences are {rule.sentences}; {number} processes need at least one each"
        )


class Alone:
    """One process: a gradient is what backward gives; what the others are variations of.

    Args:
        model: The model that is trained.
        processes: Who takes part.

    Attributes:
        processes: As given.
    """

    def __init__(self, model: nn.Module, processes: Processes | None = None) -> None:
        self._model = model
        self.processes = processes or Processes()

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return `function(model, *arguments)`, whose backward pass ends with the gradients of all processes."""
        return function(self._model, *arguments)

    def aside(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return `function(model, *arguments)`, whose backward pass adds to the gradients before that of a `loss`.

        Only with the latter do the processes' gradients come together.
        """
        return function(self._model, *arguments)

    def apart(self) -> AbstractContextManager[None]:
        """Keep each process's gradients of losses that are taken while this is open to itself, where that can be."""
        return contextlib.nullcontext()

    def gathered(self) -> Any:
        """Return the model with whole parameters in rank 0, and None elsewhere; all processes call this."""
        return self._model if self.processes.is_main else None


class Replicated(Alone):
    """Distributed data parallel: every process has the whole model, and backward averages the gradients.

    Args:
        model: As for `Alone`, on its device, the same in each process.
        processes: As for `Alone`.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        super().__init__(model, processes)
        self._ddp = DistributedDataParallel(_Applied(model), **_BUFFERS)

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return a loss whose backward pass averages all gradients so far; see `Alone.loss`."""
        value: torch.Tensor = self._ddp(function, *arguments)
        return value

    def apart(self) -> AbstractContextManager[None]:
        """Keep gradients to this process; see `Alone.apart`."""
        return self._ddp.no_sync()


class Sharded(Alone):
    """FSDP2: every process has a piece of each parameter, its gradient and the optimizer's state; layers are gathered.

    Gradients come together at every backward pass: keeping them apart would take whole ones in each process.

    Args:
        model: As for `Replicated`; its parameters become pieces.
        processes: As for `Alone`.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        super().__init__(model, processes)
        # what is saved and measured: on the CPU, so that the device holds no second model
        self._whole = copy.deepcopy(model).cpu() if processes.is_main else None
        mesh = init_device_mesh(next(model.parameters()).device.type, (processes.world_size,))
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._root = _Applied(model)
        for module in [*(block for blocks in lists for block in blocks), self._root]:
            module.register_forward_hook(_own_memory)
            sharded = fully_shard(module, mesh=mesh)
            if mesh.device_type == "cpu":  # gloo's own average is a sum in torch 2.8
                sharded.set_force_sum_reduction_for_comms(True)

    def loss(self, function: Function, *arguments: Any) -> torch.Tensor:
        """Return a loss whose backward pass ends with the average in pieces; see `Alone.loss`."""
        value: torch.Tensor = self._root(function, *arguments)
        return value

    aside = loss

    def gathered(self) -> Any:
        """Return a copy of the model on the CPU in rank 0; see `Alone.gathered`."""
        targets = {} if self._whole is None else dict(self._whole.cpu().named_parameters())
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                value = whole(parameter)
                if name in targets:
                    targets[name].copy_(value)
        return self._whole


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


def make(model: nn.Module, config: TrainConfig, processes: Processes) -> Alone:
    """Return how the processes' gradients of `model`, on its device, come together under `config`."""
    if processes.world_size == 1:
        return Alone(model, processes)
    return Replicated(model, processes) if config.parallel == "ddp" else Sharded(model, processes)
