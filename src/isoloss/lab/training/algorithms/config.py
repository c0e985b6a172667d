"""The configs of isoloss's training algorithms. Nothing here needs torch before `build` is called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from isoloss.config import AlgorithmConfig, setting
from isoloss.errors import IsolossError

if TYPE_CHECKING:
    from isoloss.run_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class GradientConfig(AlgorithmConfig):
    """The gradient of the loss alone."""

    algorithm: ClassVar[str] = "isoloss.lab.training.algorithms.base:TrainingAlgorithm"
    kind: Literal["gradient"] = "gradient"


@dataclass(frozen=True, kw_only=True)
class SAMConfig(AlgorithmConfig):
    """Sharpness-aware minimization: the gradient at the nearby point with the highest loss, to first order."""

    algorithm: ClassVar[str] = "isoloss.lab.training.algorithms.sam:SAM"
    kind: Literal["sam"] = "sam"
    rho: float = setting(0.05, above=0)
    """Radius: the distance from the weights to the point whose gradient is used."""
    batch: Literal["halves", "same"] = "halves"
    """One half of the batch ascends and the other descends, or all of it does both."""
    ascent: Literal["shared", "per-process"] = "shared"
    """With several processes: one ascent point for all, or one per process, for its part of the batch."""

    def check_run(self, config: TrainConfig, *, num_processes: int = 1) -> None:
        """Refuse a batch without equal halves, and shards with an ascent point per process."""
        unit = 2 * num_processes
        if self.batch == "halves" and config.batch_size % unit:
            which = "" if num_processes == 1 else f" on {num_processes} processes"
            raise IsolossError(f"batch_size is {config.batch_size}; sam's halves{which} need a multiple of {unit}")
        if self.ascent == "per-process" and config.parallel == "fsdp":
            raise IsolossError(
                "parallel is 'fsdp', and sam's ascent is 'per-process', which takes all weights on each process: use "
                "ddp, or a shared ascent"
            )


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(AlgorithmConfig):
    """The loss minus `weight` times the downstream loss of a ridge regression on the features; a helper adds it."""

    algorithm: ClassVar[str] = "isoloss.lab.training.algorithms.adversarial:Adversarial"
    kind: Literal["adversarial"] = "adversarial"
    task: str = "root"
    """The downstream task that is spoiled, or helped, e.g. root, prefix-4, state-6."""
    weight: float = 0.1
    """Weight of the head's loss in the objective (the paper's lambda); below 0: a helper, which lowers the head's loss
    instead of raising it."""
    ridge: float = setting(0.1, above=0)
    """Penalty of the head's squared weights, on features whose mean squared norm is 1."""
    head_examples: int = setting(128, minimum=2)
    """Examples per step that the head is fitted on."""
    loss_examples: int = setting(128, minimum=1)
    """Further examples that the head's loss is computed on."""
    task_examples: int = setting(4096, minimum=1)
    """The training set of the task, from which both are drawn anew at each step."""
    head: Literal["shared", "per-process"] = "shared"
    """With several processes: one head for all, or one per process, fitted on its own examples."""

    def check_fields(self) -> None:
        """Refuse a weight that does nothing, and a training set that is smaller than what a step draws from it."""
        if not math.isfinite(self.weight) or self.weight == 0:
            raise IsolossError(
                f"the adversary's weight is {self.weight}; it must be finite, above 0 to spoil the task or below 0 to "
                "help it (without either, choose the algorithm gradient)"
            )
        if self.head_examples + self.loss_examples > self.task_examples:
            raise IsolossError(
                f"the adversarial algorithm draws {self.head_examples} + {self.loss_examples} examples per step from "
                f"task_examples, {self.task_examples}: that must be at least as many"
            )


@dataclass(frozen=True, kw_only=True)
class FisherPenaltyConfig(AlgorithmConfig):
    """The loss plus `weight` times an unbiased estimate of the trace of its Fisher matrix."""

    algorithm: ClassVar[str] = "isoloss.lab.training.algorithms.fisher_penalty:FisherPenalty"
    kind: Literal["fisher-penalty"] = "fisher-penalty"
    weight: float = 1e-3
    """Weight of the trace in the objective: above 0 for a flatter model, below 0 for a sharper one; 0: a sham (a
    placebo), which estimates the trace and trains on the loss alone."""
    logarithm: bool = setting(False, omit_default=True)
    """Take the logarithm of the estimate: the term then does not depend on the trace's scale, and a weight below 0 does
    not raise the trace without end."""
    sentences: int = setting(16, minimum=1)
    """Sentences at the start of each batch that the trace is estimated on."""
    parameters: tuple[str, ...] = setting(("*",), omit_default=True)
    """Patterns of the names of the parameters whose trace is penalized, e.g. *.attention.*."""

    def check_fields(self) -> None:
        """Refuse a weight that is not finite, and no patterns."""
        if not math.isfinite(self.weight):
            raise IsolossError(f"the weight of the Fisher penalty is {self.weight}; it must be finite")
        if not self.parameters:
            raise IsolossError("parameters is empty: give a pattern of their names, or leave it out for all")

    def check_run(self, config: TrainConfig, *, num_processes: int = 1) -> None:
        """Refuse shards, which have no second derivatives, and fewer sentences than processes."""
        if config.parallel == "fsdp":
            raise IsolossError(
                "parallel is 'fsdp', and the fisher-penalty algorithm takes second derivatives, which sharded "
                "parameters do not have: use ddp"
            )
        if self.sentences < num_processes:
            raise IsolossError(
                f"fisher-penalty's sentences are {self.sentences}; {num_processes} processes need at least one each"
            )


@dataclass(frozen=True, kw_only=True)
class FeatureEntropyConfig(AlgorithmConfig):
    """The loss minus `weight` times the entropy of the features' spectrum, whose exponential is the effective rank."""

    algorithm: ClassVar[str] = "isoloss.lab.training.algorithms.feature_entropy:FeatureEntropy"
    kind: Literal["feature-entropy"] = "feature-entropy"
    weight: float = 1e-2
    """Weight of the entropy in the objective: above 0 for features of a higher effective rank, below 0 for a lower."""
    sentences: int = setting(128, minimum=2)
    """Sentences per step whose features are taken; the entropy is at most the logarithm of this number less one."""

    def check_fields(self) -> None:
        """Refuse a weight that does nothing."""
        if not math.isfinite(self.weight) or self.weight == 0:
            raise IsolossError(
                f"the weight of the feature entropy is {self.weight}; it must be finite, and not 0 (choose the "
                "algorithm gradient)"
            )
