"""The step rule that a config asks for."""

from __future__ import annotations

import math

from transformers import PreTrainedModel

from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.run_config import TrainConfig
from isoloss.training import optimizers
from isoloss.training.algorithms.adversarial import AdversarialStep, Examples
from isoloss.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, GradientConfig, SAMConfig
from isoloss.training.algorithms.fisher_penalty import FisherPenaltyStep
from isoloss.training.algorithms.sam import SAMStep
from isoloss.training.data_parallel import Alone
from isoloss.training.steps import GradientStep, StepRule


def validate(config: TrainConfig) -> None:
    """Raise an `IsolossError` that names the first setting of the optimizer or the rule out of its range."""
    optimizers.validate(config.optimizer, total=config.steps)
    rule = config.rule
    positive, count = "above 0 and finite", "at least 1"
    in_range: dict[str, tuple[bool, str]] = {}
    if isinstance(rule, SAMConfig):
        in_range["rho"] = (0 < rule.rho < math.inf, positive)
        in_range["batch"] = (rule.batch in ("halves", "same"), "halves or same")
        in_range["ascent"] = (rule.ascent in ("reduced", "per-rank"), "reduced or per-rank")
    elif isinstance(rule, AdversarialConfig):
        for name in ("weight", "ridge"):
            in_range[name] = (0 < getattr(rule, name) < math.inf, positive)
        in_range["head_examples"] = (rule.head_examples >= 2, "at least 2")
        for name in ("loss_examples", "task_examples"):
            in_range[name] = (getattr(rule, name) >= 1, count)
        in_range["ascent"] = (rule.ascent in ("reduced", "per-rank"), "reduced or per-rank")
    elif isinstance(rule, FisherPenaltyConfig):
        in_range["coefficient"] = (0 < rule.coefficient < math.inf, positive)
        in_range["sentences"] = (rule.sentences >= 1, count)
    for name, (holds, condition) in in_range.items():
        if not holds:
            raise IsolossError(f"the {rule.kind} rule's {name} is {getattr(rule, name)!r}; it must be {condition}")
    if isinstance(rule, SAMConfig) and rule.batch == "halves" and config.batch_size % 2:
        raise IsolossError(f"batch_size is {config.batch_size}; the sam rule's halves need an even number")
    if isinstance(rule, AdversarialConfig) and rule.head_examples + rule.loss_examples > rule.task_examples:
        raise IsolossError(
            f"the adversarial rule draws {rule.head_examples} + {rule.loss_examples} examples a step from "
            f"task_examples, {rule.task_examples}: that must be at least as many"
        )


def make_rule(
    model: PreTrainedModel,
    config: TrainConfig,
    language: Language,
    *,
    examples: Examples | None = None,
    parallel: Alone | None = None,
) -> StepRule:
    """Return the step rule of `config` for `model`, where it is to be trained.

    Args:
        model: What the rule updates.
        config: Its `rule`, `optimizer`, `steps`, `seed` and `micro_batch` are used.
        language: Whose sentences the model learns.
        examples: The training set of the task that the adversarial rule spoils; other rules need none.
        parallel: How the gradients of several processes come together; None: there is one process.

    Raises:
        IsolossError: A setting out of its range, or an adversarial rule without examples.
    """
    validate(config)
    rule, optimizer, causal = config.rule, config.optimizer, config.objective.kind == "causal"
    total, micro_batch = config.steps, config.micro_batch
    match rule:
        case GradientConfig():
            return GradientStep(model, optimizer, total=total, micro_batch=micro_batch, parallel=parallel)
        case SAMConfig():
            return SAMStep(model, optimizer, rule, total=total, micro_batch=micro_batch, parallel=parallel)
        case AdversarialConfig():
            if examples is None:
                raise IsolossError(
                    f"the adversarial rule needs the examples of the task {rule.task}: "
                    "isoloss.evaluation.pretraining.pretrain draws them, isoloss.training.train takes them as an "
                    "argument"
                )
            return AdversarialStep(
                model,
                optimizer,
                rule,
                examples=examples,
                language=language,
                causal=causal,
                seed=config.seed,
                total=total,
                micro_batch=micro_batch,
                parallel=parallel,
            )
        case FisherPenaltyConfig():
            return FisherPenaltyStep(
                model,
                optimizer,
                rule,
                causal=causal,
                seed=config.seed,
                total=total,
                micro_batch=micro_batch,
                parallel=parallel,
            )
    raise IsolossError(f"{rule!r} is not a training algorithm")
