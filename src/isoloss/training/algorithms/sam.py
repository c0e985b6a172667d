"""Sharpness-aware minimisation (Foret et al. 2021), with the paper's halves of a batch (appendix A.5)."""

from __future__ import annotations

import torch

from isoloss.errors import IsolossError
from isoloss.run_config import OptimizerConfig
from isoloss.text.masking import Batch
from isoloss.training.algorithms.config import SAMConfig
from isoloss.training.data_parallel import Alone
from isoloss.training.shards import piece
from isoloss.training.steps import GradientStep, Loss, num_sentences, split

_TINY = 1e-12  # keeps a gradient of 0 from being divided by its norm


class SAMStep(GradientStep):
    """The gradient at theta + rho g / ||g||, with g the gradient at theta, given to the optimizer at theta.

    With `batch="halves"`, g is that of the first half of the batch and the update's gradient that of the second; with
    `"same"`, both are of the whole batch, at twice the work. The norm is over all parameters together. The
    parameters are put back to the bits they had before the update.

    On several processes, g is that of all of them (`ascent="reduced"`), or each has its own g and point, found on its
    share of the sentences (`"per-rank"`: the m-sharpness of Foret et al. 2021, section 4.1), whose gradients are
    averaged.

    The loss of a step is at theta: of the half, or of all, that g is of. `loss_at_ascent_nats` is the other one.
    Where there is dropout, the two passes draw it independently.

    Args:
        model: As for `GradientStep`.
        config: As for `GradientStep`.
        sam: The radius, and which sentences serve for what.
        total: As for `GradientStep`.
        micro_batch: As for `GradientStep`; halves are cut into parts too.
        parallel: As for `GradientStep`. Of a share, too, the first half is of the batch's first half.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimizerConfig,
        sam: SAMConfig,
        *,
        total: int,
        micro_batch: int = 0,
        parallel: Alone | None = None,
    ) -> None:
        super().__init__(model, config, total=total, micro_batch=micro_batch, parallel=parallel)
        self._sam = sam

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient at the ascent point; see `GradientStep.add_gradient`."""
        del number
        first, second = batch, batch
        if self._sam.batch == "halves":
            n = num_sentences(batch)
            if n % 2:
                raise IsolossError(f"the batch has {n} sentences; SAM's halves need an even number")
            first, second = split(batch, [n // 2, n // 2])
        loss_nats = self.add_loss_gradient(first, loss, apart=self._sam.ascent == "per-rank")
        moved = [p for p in self.optimizer.parameters if p.grad is not None]
        with torch.no_grad():
            before = [piece(p).clone() for p in moved]
            scale = self._sam.rho / (self.optimizer.grad_norm() + _TINY)
            for p in moved:
                assert p.grad is not None
                piece(p).add_(scale * piece(p.grad))
        self.optimizer.zero_grad()
        ascent_nats = self.add_loss_gradient(second, loss)
        with torch.no_grad():
            for p, own in zip(moved, before, strict=True):
                piece(p).copy_(own)
        return loss_nats, {"loss_at_ascent_nats": ascent_nats}
