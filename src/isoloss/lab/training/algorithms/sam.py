"""Sharpness-aware minimization (Foret et al. 2021), with the paper's halves of a batch (appendix A.5)."""

from __future__ import annotations

import torch

from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.base import Loss, TrainingAlgorithm, num_sentences, split
from isoloss.lab.training.algorithms.config import SAMConfig
from isoloss.lab.training.distributed import local_shard
from isoloss.text.masking import Batch

_TINY = 1e-12  # keeps a gradient of 0 from being divided by its norm


class SAM(TrainingAlgorithm):
    """The gradient at theta + rho g / ||g||, with g the gradient at theta, given to the optimizer at theta.

    With `batch="halves"`, g comes from the first half of the batch and the update's gradient from the second; with
    `"same"`, both are of the whole batch, at twice the work. The norm is over all parameters together. The
    parameters are put back to the bits they had before the update.

    On several processes, g is the gradient of all their sentences (`ascent="shared"`), or each process has a g and a
    point of its own, from its part of the sentences, and the gradients at these points are averaged (`"per-process"`:
    the m-sharpness of Foret et al. 2021, section 4.1).

    The loss of a step is at theta: of the half, or of all, that g is of. `loss_at_ascent_nats` is the other one.
    Where there is dropout, the two passes draw it independently.

    With `micro_batch_size`, halves are cut into parts too; of a process's part of the batch, too, the first half is of
    the batch's first half.
    """

    config: SAMConfig

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient at the ascent point; see `TrainingAlgorithm.add_gradient`."""
        del number
        first, second = batch, batch
        if self.config.batch == "halves":
            n = num_sentences(batch)
            if n % 2:
                raise IsolossError(f"the batch has {n} sentences; SAM's halves need an even number")
            first, second = split(batch, [n // 2, n // 2])
        # without sync the gradient has another length in each process, and the norm takes that out again
        loss_nats = self.add_loss_gradient(first, loss, sync=self.config.ascent == "shared")
        parameters = [p for p in self.optimizer.parameters if p.grad is not None]
        with torch.no_grad():
            # a copy: to add a step and subtract it again would leave other bits
            before = [local_shard(p).clone() for p in parameters]
            scale = self.config.rho / (self.optimizer.grad_norm() + _TINY)
            for p in parameters:
                assert p.grad is not None
                local_shard(p).add_(scale * local_shard(p.grad))
        self.optimizer.zero_grad()
        ascent_nats = self.add_loss_gradient(second, loss)
        with torch.no_grad():
            for p, values in zip(parameters, before, strict=True):
                local_shard(p).copy_(values)
        return loss_nats, {"loss_at_ascent_nats": ascent_nats}
