"""The configs of isoloss's training algorithms. Nothing here needs torch before `build` is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from isoloss.config import AlgorithmConfig, setting
from isoloss.errors import IsolossError

if TYPE_CHECKING:
    from isoloss.run_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class GradientConfig(AlgorithmConfig):
    """The gradient of the loss alone."""

    algorithm: ClassVar[str] = "isoloss.training.algorithms.base:TrainingAlgorithm"
    kind: Literal["gradient"] = "gradient"


@dataclass(frozen=True, kw_only=True)
class SAMConfig(AlgorithmConfig):
    """Sharpness-aware minimization: the gradient at the point that the loss rises most towards."""

    algorithm: ClassVar[str] = "isoloss.training.algorithms.sam:SAM"
    kind: Literal["sam"] = "sam"
    rho: float = setting(0.05, above=0)
    """Distance to that point."""
    batch: Literal["halves", "same"] = "halves"
    """One half of the batch ascends and the other descends, or all of it does both."""
    ascent: Literal["reduced", "per-rank"] = "reduced"
    """On several processes: one ascent point, as on one process, or one for each process's part of the batch."""

    def check_run(self, run: TrainConfig, *, num_processes: int = 1) -> None:
        """Refuse a batch without equal halves, and shards with an ascent point per process."""
        unit = 2 * num_processes
        if self.batch == "halves" and run.batch_size % unit:
            which = "" if num_processes == 1 else f" on {num_processes} processes"
            raise IsolossError(f"batch_size is {run.batch_size}; sam's halves{which} need a multiple of {unit}")
        if self.ascent == "per-rank" and run.parallel == "fsdp":
            raise IsolossError(
                "parallel is 'fsdp', and sam's ascent is 'per-rank', which takes all weights on each process: use "
                "ddp, or the ascent reduced"
            )


@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(AlgorithmConfig):
    """The loss minus a multiple of what a ridge regression on the features loses on a downstream task."""

    algorithm: ClassVar[str] = "isoloss.training.algorithms.adversarial:Adversarial"
    kind: Literal["adversarial"] = "adversarial"
    task: str = "root"
    """The downstream task that is spoiled, e.g. root, prefix-4, state-6."""
    weight: float = setting(0.1, above=0)
    """The multiple (lambda)."""
    ridge: float = setting(0.1, above=0)
    """Penalty of the head's squared weights, on features whose mean squared norm is 1."""
    head_examples: int = setting(128, minimum=2)
    """Examples a step that the head is fitted on."""
    loss_examples: int = setting(128, minimum=1)
    """Other examples, that its loss is taken on."""
    task_examples: int = setting(4096, minimum=1)
    """The training set of the task, from which both are drawn anew at each step."""
    ascent: Literal["reduced", "per-rank"] = "reduced"
    """On several processes: one head, as on one process, or one for each process, on examples of its own."""

    def check_fields(self) -> None:
        """Refuse a training set that is smaller than what a step draws from it."""
        if self.head_examples + self.loss_examples > self.task_examples:
            raise IsolossError(
                f"the adversarial algorithm draws {self.head_examples} + {self.loss_examples} examples a step from "
                f"task_examples, {self.task_examples}: that must be at least as many"
            )


@dataclass(frozen=True, kw_only=True)
class FisherPenaltyConfig(AlgorithmConfig):
    """The loss plus a multiple of an unbiased estimate of the trace of its Fisher matrix."""

    algorithm: ClassVar[str] = "isoloss.training.algorithms.fisher_penalty:FisherPenalty"
    kind: Literal["fisher-penalty"] = "fisher-penalty"
    coefficient: float = setting(1e-3, above=0)
    """The multiple."""
    sentences: int = setting(16, minimum=1)
    """The first sentences of each batch: the trace is estimated on them."""

    def check_run(self, run: TrainConfig, *, num_processes: int = 1) -> None:
        """Refuse shards, which have no second derivatives, and fewer sentences than processes."""
        if run.parallel == "fsdp":
            raise IsolossError(
                "parallel is 'fsdp', and the fisher-penalty algorithm takes second derivatives, which sharded "
                "parameters do not have: use ddp"
            )
        if self.sentences < num_processes:
            raise IsolossError(
                f"fisher-penalty's sentences are {self.sentences}; {num_processes} processes need at least one each"
            )
