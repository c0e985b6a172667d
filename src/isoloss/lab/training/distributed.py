"""Several processes that train one model: their group, and how they put a gradient together (DDP, FSDP2).

`torchrun` and `accelerate launch` start one process a device and put its rank into the environment. Rank 0 is the
process that writes files and prints for the user.

Each process takes the gradient of its own sentences, and torch averages the gradients over the processes. So each
process multiplies its mean loss by (its predicted tokens) / (all predicted tokens) and by the number of processes: the
average is then the gradient of the mean over all predicted tokens, whichever process has which.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from isoloss.errors import IsolossError
from isoloss.machine import resolve_device

TIMEOUT = timedelta(minutes=30)  # for a process that lives and does not answer; rank 0 may be measuring or saving

# buffers are constants, sent to nobody at each step; torch 2.13 has a new name for that
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}

Function = Callable[..., torch.Tensor]  # of a model and anything else


class ProcessLost(IsolossError):  # noqa: N818  (it is the other one that failed)
    """Another process of the run has ended, or has not answered for `TIMEOUT`."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train a model together, as one of them sees it; by default, there is one.

    Every method but `rows`, `count`, `device` and `is_first_to_report` is called by all of them, in the same order.

    Example:
        >>> from isoloss.lab.training.distributed import ProcessGroup
        >>> one = ProcessGroup()
        >>> one.sum(2.0, 3.0), one.any(True), one.rows(), one.count(7)
        ((2.0, 3.0), (True,), slice(0, None, 1), 7)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of its machine
    store: Any = None  # how they find each other, if this module made the group

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def stream(self) -> tuple[int, ...]:
        """What to append to the name of a random stream that differs by process: nothing for a single process."""
        return () if self.world_size == 1 else (self.rank,)

    def rows(self) -> slice:
        """Return which sentences of a batch are this process's: every `world_size`-th."""
        # not a block of them: the first half of a batch, and its first sentences, are then spread over all processes
        return slice(self.rank, None, self.world_size)

    def count(self, n: int) -> int:
        """Return how many of the first `n` sentences of a batch are this process's."""
        return len(range(self.rank, n, self.world_size))

    def device(self, name: str) -> torch.device:
        """Return this process's device of the kind `name`: of CUDA devices, the one with its local rank."""
        device = resolve_device(name)
        if self.world_size == 1 or device.type == "cpu":
            return device
        if device.type != "cuda" or ":" in name:
            raise IsolossError(
                f"the device is {name!r}, and {self.world_size} processes cannot share it: use cuda, which gives each "
                "its own, or cpu"
            )
        if self.local_rank >= (count := torch.cuda.device_count()):
            raise IsolossError(
                f"process {self.local_rank + 1} of this machine has no device of its own, as torch finds {count} CUDA "
                "device(s) here: start as many processes as there are devices, or use the device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def sum(self, *values: float) -> tuple[float, ...]:
        """Return the sum over the processes of each value."""
        if self.world_size == 1:
            return values
        totals = torch.tensor(values, dtype=torch.float64)  # counts and steps stay exact
        with _listening():
            distributed.all_reduce(totals)
        return tuple(totals.tolist())

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return of each flag whether it is true in any process."""
        return tuple(total > 0 for total in self.sum(*map(float, flags)))

    def from_main(self, value: int) -> int:
        """Return the value that rank 0 has."""
        return int(self.sum(value if self.is_main else 0)[0])

    def sum_tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums over the processes of tensors that are of the same shapes in each; without gradients."""
        tensors = [tensor.detach() for tensor in tensors]
        if self.world_size == 1:
            return tensors
        # one exchange instead of one for each tensor
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _listening():
            distributed.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def on_main(self, function: Callable[[], object]) -> None:
        """Call `function` in rank 0 alone. If it raises an `IsolossError`, that is raised in every process."""
        error: IsolossError | None = None
        if self.is_main:
            try:
                function()
            except IsolossError as raised:
                error = raised
        # where nothing failed the text is empty; the others wait here until the function is done
        texts = ["" if error is None else str(error)]
        if self.world_size > 1:
            with _listening():
                distributed.broadcast_object_list(texts)
        if texts[0]:
            raise error or IsolossError(texts[0])

    def is_first_to_report(self) -> bool:
        """Whether no other process has called this: where all of them fail, one says why.

        A process calls it before it leaves, so one that fails by itself does before those that miss it.
        """
        if self.store is None:
            return True
        try:
            return bool(self.store.add("isoloss/reporting", 1) == 1)
        except RuntimeError:  # the store went with the process that had it
            return True


@contextlib.contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Yield the group of the processes that this one was started with, or of this one alone.

    It is torch's default process group. Where there is none and the environment says that there are several processes,
    the group is made, with gloo for the CPU and NCCL for CUDA devices, and destroyed at the end; one that was there
    stays, and needs a backend for tensors of the CPU. Where another process has gone, this raises `ProcessLost`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if distributed.is_initialized():
        with _listening():
            yield ProcessGroup(distributed.get_rank(), distributed.get_world_size(), local_rank)
        return
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ProcessGroup()
        return
    with _listening():
        # what init_process_group does by itself, but with the store at hand, which `is_first_to_report` needs
        store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
        has_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
    try:
        with _listening():
            yield ProcessGroup(rank, world_size, local_rank, store)
    except BaseException as error:
        _forget(error)
        raise
    finally:
        # reference cycles may still hold DDP's reducer; see `_forget`
        gc.collect()
        distributed.destroy_process_group()


def _forget(error: BaseException | None) -> None:
    """Clear the locals of the frames that an error passed through.

    DDP's reducer is among them. If it outlives the group, its own end is what stops the group's threads, and waits for
    them while they wait for Python's lock: the process would hang.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Turn what torch says of a connection that broke into a `ProcessLost`."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises a plain RuntimeError, with its name in the message
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise ProcessLost(
                "another process of this run has ended or has stopped answering; what was saved is kept, and the same "
                "command goes on from there"
            ) from error
        raise


# --- tensors sharded over processes, as FSDP2 leaves parameters; a plain tensor is its own only shard


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
    # without a source each process cuts its shard out of the tensor that it has, and nothing is sent
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm over all elements of all tensors, in the shards of all processes: a scalar."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# --- how a gradient is put together from the processes' parts of a batch


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
