"""The process group that trains one model: how it is joined, its collective operations, how it ends.

`torchrun` and `accelerate launch` start one process a device and put its rank into the environment. Rank 0 is the
process that writes files and prints for the user.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from isoloss.errors import IsolossError
from isoloss.machine import resolve_device

TIMEOUT = timedelta(minutes=30)  # for a process that lives and does not answer; rank 0 may be measuring or saving


class ProcessLost(IsolossError):  # noqa: N818  (it is the other one that failed)
    """Another process of the run has ended, or has not answered for `TIMEOUT`."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train a model together, as one of them sees it; by default, there is one.

    Every method but `rows`, `count`, `device` and `is_first_to_report` is called by all of them, in the same order.

    Attributes:
        rank: This process, from 0.
        world_size: How many there are.
        local_rank: This process among those of its machine, from 0.
        store: How they find each other, if this module made the group.

    Example:
        >>> from isoloss.lab.training.distributed import ProcessGroup
        >>> one = ProcessGroup()
        >>> one.sum(2.0, 3.0), one.any(True), one.rows(), one.count(7)
        ((2.0, 3.0), (True,), slice(0, None, 1), 7)
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store: Any = None

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
        """Return this process's device of the kind `name`: of CUDA devices, the one with its local rank.

        Raises:
            IsolossError: As for `isoloss.machine.resolve_device`, or there are fewer devices than processes.
        """
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
        if text := self._text_from_main("" if error is None else str(error)):
            raise error or IsolossError(text)

    def _text_from_main(self, text: str) -> str:
        if self.world_size == 1:
            return text
        texts = [text]
        with _listening():
            distributed.broadcast_object_list(texts)
        return texts[0]

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
    stays, and needs a backend for tensors of the CPU.

    Raises:
        ProcessLost: Another process has gone.
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
    # without a source each process cuts its shard out of the tensor that it has, and nothing is sent
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm over all elements of all tensors, in the shards of all processes: a scalar.

    Example:
        >>> import torch
        >>> from isoloss.lab.training.distributed import total_norm
        >>> float(total_norm([torch.tensor([3.0]), torch.tensor([0.0, 4.0])]))
        5.0
    """
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
