"""A run with all that its config asks for, also from the layers above training: a task to spoil, measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.training import Examples, Progress, train
from isoloss.training.algorithms.config import AdversarialConfig
from isoloss.training.distributed import together
from isoloss.training.trainer import validate

_SEED = 0  # of what is measured on during training: the same for all runs


def pretrain(
    run: Run, config: TrainConfig, language: Language, *, progress: Callable[[Progress], None] | None = None
) -> None:
    """Train until `run` is complete: `isoloss.training.train` with what the config needs besides the language.

    An adversarial rule gets the training set of its task (`task_examples`), as `isoloss.transfer.tasks.make_task` draws
    it from the run's seed. Where `measure_every` is set, metrics.jsonl gets the measurements of `Monitor`.

    Args:
        run: As for `train`.
        config: As for `train`.
        language: As for `train`.
        progress: As for `train`.

    Raises:
        IsolossError: As for `train`; the language has no such task, or nothing of it can be measured.
        Interrupted: As for `train`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss import languages
        >>> from isoloss.config import LAPTOP_PCFG, ModelConfig
        >>> config = TrainConfig(language=LAPTOP_PCFG, model=ModelConfig(size="d16"), steps=2, batch_size=4,
        ...                      log_every=1, measure_every=2, measure_sentences=64, device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Run(Path(folder) / "run")
        ...     pretrain(run, config, config.language.build())
        ...     list(run.metrics()[1])[4:]
        ['kl_nats', 'kl_stderr', 'trace', 'trace_stderr']
    """
    validate(config)
    if run.complete:
        train(run, config, language, measure=dict)  # only checks that the config is the same
        return
    with together() as processes:
        examples = task_examples(language, config.rule, seed=config.seed)
        # rank 0 alone measures
        measure = Monitor(language, config) if config.measure_every and processes.is_main else dict
        train(run, config, language, progress=progress, examples=examples, measure=measure)


def task_examples(language: Language, rule: Any, *, seed: int) -> Examples | None:
    """Return the training set of the task that an adversarial rule spoils, or None for another rule.

    Raises:
        IsolossError: The language has no such task.
    """
    if not isinstance(rule, AdversarialConfig):
        return None
    from isoloss.transfer.tasks import labeling, make_task

    if labeling(language, rule.task).draw is not None:
        raise IsolossError(f"the sentences of task {rule.task!r} are not the language's, so it cannot be spoiled")
    task = make_task(language, rule.task, num_train=rule.task_examples, num_test=1, seed=seed)
    return Examples(task.train, task.train_labels, len(task.classes))


class Monitor:
    """What is measured of a model in training: loss and trace, on `measure_sentences` sentences drawn once.

    `kl_nats` where the language is exact and the objective masked, `held_out_nats` of a corpus, and `trace`, each with
    its standard error `..._stderr`. The sentences are the same for all runs of a language, and not those of training.

    Args:
        language: Whose sentences the model learns.
        config: The run's.
    """

    def __init__(self, language: Language, config: TrainConfig) -> None:
        from isoloss.evaluation.inputs import language_inputs
        from isoloss.evaluation.truth import truth

        self._language, self._objective, self._n = language, config.objective, config.measure_sentences
        self._batches = language_inputs(language, config.objective, num_inputs=self._n, seed=_SEED).batches
        self._truth = None
        if language.is_exact and config.objective.kind == "masked":
            self._truth = truth(language, num_sentences=self._n, objective=config.objective, seed=_SEED)

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the values by name, of a model in eval mode."""
        from isoloss.evaluation import loss
        from isoloss.flatness import fisher_trace

        found = {}
        if self._truth is not None:
            found["kl"] = loss.pretraining_loss(model, self._truth)["kl"]
        elif self._language.num_held_out:
            found["held_out"] = loss.held_out_loss(
                model, self._language, num_sequences=self._n, objective=self._objective, seed=_SEED
            )["loss"]
        values: dict[str, float] = {}
        for name, estimate in found.items():
            values |= {f"{name}_nats": estimate.value, f"{name}_stderr": estimate.stderr}
        trace = fisher_trace(model, self._batches, seed=_SEED, causal=self._objective.kind == "causal")
        return {**values, "trace": trace.value, "trace_stderr": trace.stderr}
