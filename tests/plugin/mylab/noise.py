"""A training algorithm: Gaussian noise on the gradient that shrinks as training goes on. Its config needs no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from isoloss.config import AlgorithmConfig, setting


@dataclass(frozen=True, kw_only=True)
class GradientNoiseConfig(AlgorithmConfig):
    """The gradient plus Gaussian noise of variance `variance` / (1 + step)^0.55."""

    algorithm: ClassVar[str] = "mylab.noise_algorithm:GradientNoise"
    kind: Literal["gradient-noise"] = "gradient-noise"
    variance: float = setting(0.01, above=0)
    """Variance of the noise at the start."""
