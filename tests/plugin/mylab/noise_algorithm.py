"""The algorithm itself: noise that decays with the steps (Neelakantan et al. 2015)."""

from typing import Any

import torch

from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.seeds import generator


class GradientNoise(TrainingAlgorithm):
    """The gradient plus noise that is a function of the seed and the step, so that runs resume exactly."""

    def add_gradient(self, number: int, batch: Any, loss: Any) -> tuple[float, dict[str, float]]:
        loss_nats, details = super().add_gradient(number, batch, loss)
        scale = (self.config.variance / (1 + number) ** 0.55) ** 0.5
        draws = generator(self.context.seed, "gradient noise", number)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.grad.add_(noise.to(parameter.device), alpha=scale)
        return loss_nats, {**details, "noise": scale}
