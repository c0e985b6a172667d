"""Does my training algorithm find a flatter model?

An algorithm changes the gradient that the optimizer gets. This one adds Gaussian noise (Neelakantan et al. 2015).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from isoloss import ALGORITHMS, evaluate, pretrain
from isoloss.config import AlgorithmConfig, setting
from isoloss.lab.languages.config import LAPTOP_PCFG
from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.seeds import generator


class GradientNoise(TrainingAlgorithm):
    """Add noise to the gradient. The noise depends only on the seed and the step, so that runs resume exactly."""

    def add_gradient(self, number: int, batch: Any, loss: Any) -> tuple[float, dict[str, float]]:
        loss_nats, details = super().add_gradient(number, batch, loss)
        draws = generator(self.context.seed, "gradient noise", number)
        for parameter in self.model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=draws), alpha=self.config.scale)
        return loss_nats, details


@dataclass(frozen=True, kw_only=True)
class GradientNoiseConfig(AlgorithmConfig):
    """The gradient plus Gaussian noise."""

    algorithm: ClassVar[str] = f"{__name__}:GradientNoise"
    kind: Literal["gradient-noise"] = "gradient-noise"
    scale: float = setting(0.003, above=0)
    """Standard deviation of the noise."""


ALGORITHMS.register("gradient-noise", GradientNoiseConfig)

common = {"language": LAPTOP_PCFG, "model": ModelConfig(size="d16"), "steps": 200, "batch_size": 32}
for name, algorithm in {"plain": {}, "noisy": {"algorithm": GradientNoiseConfig()}}.items():
    pretrain(name, TrainConfig(**common, **algorithm, device="cpu", threads=1))
evaluations = evaluate(["plain", "noisy"], ["loss", "trace"])
for model, evaluation in zip(evaluations.models, evaluations, strict=True):
    print(f"{model}: {evaluation.measure} {evaluation.estimates[evaluation.measure]}")
