"""A training algorithm: Gaussian noise on the gradient, the less the later (Neelakantan et al. 2015)."""

from dataclasses import dataclass
from typing import Any, Literal

from isoloss.config import AlgorithmConfig, setting


@dataclass(frozen=True, kw_only=True)
class GradientNoiseConfig(AlgorithmConfig):
    """The gradient plus Gaussian noise of variance `variance` / (1 + step)^0.55."""

    kind: Literal["gradient-noise"] = "gradient-noise"
    variance: float = setting(0.01, above=0)
    """Variance of the noise at the start."""

    def build(self, model: Any, context: Any) -> Any:
        """Return the algorithm."""
        import torch

        from isoloss.seeds import generator
        from isoloss.training.algorithms.base import TrainingAlgorithm

        class GradientNoise(TrainingAlgorithm):
            def add_gradient(self, number: int, batch: Any, loss: Any) -> Any:
                loss_nats, details = super().add_gradient(number, batch, loss)
                scale = (variance / (1 + number) ** 0.55) ** 0.5
                draws = generator(
                    context.seed, "gradient noise", number
                )  # a function of seed and step: resumes exactly
                for parameter in self.model.parameters():
                    noise = torch.randn(parameter.shape, generator=draws)
                    parameter.grad.add_(noise.to(parameter.device), alpha=scale)
                return loss_nats, {**details, "noise": scale}

        variance = self.variance
        return GradientNoise(model, context)
