"""Optimizers of other packages, of the extra `optimizers`: imported when one of them is used."""

from __future__ import annotations

import schedulefree
import torch
from pytorch_optimizer import SOAP, Lion, Shampoo

from isoloss.errors import IsolossError
from isoloss.lab.training.optimizers import Groups
from isoloss.run_config import OptimizerConfig


def soap(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return SOAP (Vyas et al. 2024): Adam in the eigenbases of Shampoo's matrices, recomputed every 10 steps.

    The first step only prepares the eigenbases: weights do not move. Biases and norms are updated by Adam.
    """
    return SOAP(groups, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps)


def shampoo(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return Shampoo (Gupta et al. 2018): G <- L^(-1/4) G R^(-1/4) of a matrix, with L and R the sums of G G' and G' G.

    The weight decay is decoupled. A step takes two singular value decompositions per matrix.
    """
    return Shampoo(groups, lr=config.learning_rate, weight_decouple=True)


def lion(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return Lion (Chen et al. 2023): theta <- (1 - eta w) theta - eta sign(b1 m + (1 - b1) g), m <- b2 m + (1 - b2) g.

    Every weight moves by the full learning rate, which should be about a tenth of AdamW's.
    """
    return Lion(groups, lr=config.learning_rate, betas=config.betas)


def schedule_free(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return schedule-free AdamW (Defazio et al. 2024): gradients at y = (1 - b1) z + b1 x, where x averages the z.

    The rate must be constant after the warm-up. x is what is saved and measured.

    Raises:
        IsolossError: A schedule that decays.
    """
    if config.schedule != "constant":
        raise IsolossError(
            f"optimizer.schedule is {config.schedule!r}, and schedule-free averages weights instead of lowering the "
            "rate: choose 'constant'"
        )
    made: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps
    )
    return made
