"""`isoloss.pretrain`: a run with all that its config asks for, also from the layers above training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language
from isoloss.lab.training.algorithms.base import Examples
from isoloss.lab.training.distributed import process_group
from isoloss.lab.training.process import process_settings
from isoloss.lab.training.train import Progress, Training, is_complete, train
from isoloss.machine import resolve_device
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.seeds import derive

if TYPE_CHECKING:
    from isoloss.lab.evaluation.loss import ExactTargets
    from isoloss.statistics.estimate import Estimate

_SEED = 0  # of what is measured on during training: the same for all runs
_VALIDATION_SEED = derive(_SEED, "validation")  # of what decides where a stage ends, which no evaluation is made on


def pretrain(
    run: str | PathLike[str] | Run,
    config: TrainConfig,
    *,
    language: Language | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Pre-train a model into a run directory, from its newest checkpoint if it has one, and return the run.

    This is `isoloss.lab.training.train.train` with what the config needs besides: an algorithm that asks for the
    training set of a downstream task gets it from `isoloss.lab.tasks.make_task` and the run's seed, and where
    `measure_every` is set, metrics.jsonl gets the measurements of `Monitor`. A stage's target is compared with what
    `Validation` measures.

    Args:
        run: The directory; new, or of the same config.
        config: What to train.
        language: The language that `config.language` describes, if you have it already; None: it is made.
        progress: Called about once a second and at the end; of several processes, in rank 0.

    Raises:
        IsolossError: As for `train`; the language has no such task, or nothing of it can be measured; or a stage has a
            target_kl, and the language no exact conditionals.
        Interrupted: As for `train`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss import pretrain
        >>> from isoloss.lab.languages.config import LAPTOP_PCFG
        >>> from isoloss.run_config import ModelConfig, TrainConfig
        >>> config = TrainConfig(language=LAPTOP_PCFG, model=ModelConfig(size="d16"), steps=2, batch_size=4,
        ...                      log_every=1, measure_every=2, measure_sentences=64, device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = pretrain(Path(folder) / "run", config)
        ...     list(run.metrics()[1])[4:]
        ['kl_nats', 'kl_stderr', 'trace', 'trace_stderr']
    """
    configs.check(config)
    run = run if isinstance(run, Run) else Run(Path(run))
    with process_group() as group:
        if is_complete(run, config, group):
            return run
        known = config.language.within(run.path).build() if language is None else language

        examples = functools.partial(_task_examples, known, config.seed)
        measure, validate = _measurements(known, config, is_main=group.is_main)
        train(run, config, known, progress=progress, task_examples=examples, measure=measure, validate=validate)
    return run


def next_update(run: Run, language: Language) -> dict[str, torch.Tensor]:
    """Return the change that one more optimizer step would make to the trained weights, by parameter; writes nothing.

    With `lawa` and `schedule-free` these are the weights being trained, not the average that is saved. The step uses
    the next batch and the saved state of the optimizer, as if the last stage went on; a decay that is over keeps its
    last rate. The run has at least one step, and the language is that of its config.
    """
    examples = functools.partial(_task_examples, language, run.config.seed)
    device = resolve_device(run.config.device)
    with process_group() as group, process_settings(run.config.threads, device, compiled=run.config.compiled):
        return Training(run, run.config, language, device, group, None, examples, None, None).next_update()


def _task_examples(language: Language, seed: int, name: str, n: int) -> Examples:
    from isoloss.lab.tasks import labeling, make_task

    if labeling(language, name).draw is not None:
        raise IsolossError(f"the sentences of task {name!r} are not the language's, so it cannot be spoiled")
    # of the test sentences, which a task must have, none is used
    task = make_task(language, name, num_train=n, num_test=1, seed=seed)
    return Examples(task.train, task.train_labels, len(task.classes))


def _measurements(
    language: Language, config: TrainConfig, *, is_main: bool = True
) -> tuple[Callable[[Any], Mapping[str, float]] | None, Validation | None]:
    """Return what measures in training and what decides where a stage ends; rank 0 alone measures."""
    # `train` asks for a measure in every process and calls it in rank 0: elsewhere any function will do
    measure = Monitor(language, config) if config.measure_every and is_main else dict
    return measure, Validation(language, config) if any(stage.target for stage in config.stages) else None


class Monitor:
    """What is measured of a model in training: loss and trace, on `measure_sentences` sentences drawn once.

    `kl_nats` where the language is exact, `held_out_nats` of a corpus, and `trace`, each with its standard error
    `..._stderr`. The sentences are the same for all runs of a language, and not those of training.
    """

    def __init__(self, language: Language, config: TrainConfig) -> None:
        from isoloss.lab.evaluation import loss
        from isoloss.lab.evaluation.context import language_inputs

        objective, n = config.objective, config.measure_sentences
        self._objective = objective
        self._batches = language_inputs(language, objective, num_sequences=n, seed=_SEED).batches
        self._targets, self._held_out = None, None
        if language.is_exact:
            self._targets = loss.exact_targets(language, num_sentences=n, objective=objective, seed=_SEED)
        elif language.num_held_out:
            self._held_out = loss.held_out_batch(language, num_sequences=n, objective=objective, seed=_SEED)

    def __call__(self, model: Any) -> dict[str, float]:
        """Return the values by name, of a model in eval mode."""
        from isoloss.flatness import fisher_trace
        from isoloss.lab.evaluation import loss

        estimates = {}
        if self._targets is not None:
            estimates["kl_nats"] = loss.pretraining_loss(model, self._targets)["kl"]
        elif self._held_out is not None:
            about: Any = {"objective": self._objective, "seed": _SEED, "method": "held-out text"}
            estimates["held_out_nats"] = loss.text_loss(model, [self._held_out], **about)["loss"]
        is_causal = self._objective.kind == "causal"
        estimates["trace"] = fisher_trace(model, self._batches, seed=_SEED, causal=is_causal)
        return _by_name(estimates)


class Validation:
    """What decides where a stage with a target ends: KL or loss on `measure_sentences` sentences drawn for this alone.

    `validation_kl_nats` or `validation_loss_nats`, per predicted token, with its standard error `..._stderr`. The
    sentences are the same for all runs of a language, and neither training nor an evaluation uses them: a stage ends
    where the value on them happens to be low, which biases this value, but not an evaluation's. Of a corpus, they are
    held-out sequences, which its evaluations share, with masks of their own.

    Raises:
        IsolossError: A stage has a target_kl, and the exact conditionals cannot be had.
    """

    def __init__(self, language: Language, config: TrainConfig) -> None:
        from isoloss.lab.evaluation.loss import why_no_exact_targets

        self._language, self._objective, self._n = language, config.objective, config.measure_sentences
        for stage in config.stages:
            reason = stage.target_kl and why_no_exact_targets(
                language, num_sentences=self._n, objective=self._objective, seed=_VALIDATION_SEED
            )
            if reason:
                raise IsolossError(f"target_kl is {stage.target_kl:g}, but {reason}; give target_loss in its place")

    def __call__(self, what: str, model: Any) -> dict[str, float]:
        """Return the value of `what`, kl or loss, and its error, of a model in eval mode."""
        from isoloss.lab.evaluation import loss

        if what == "kl":
            estimate = loss.pretraining_loss(model, self._targets)["kl"]
        else:
            about: Any = {"objective": self._objective, "seed": _VALIDATION_SEED, "method": "validation sentences"}
            estimate = loss.text_loss(model, self._batches, **about)["loss"]
        return _by_name({f"validation_{what}_nats": estimate})

    # made when first compared with, which only rank 0 does: the others hold neither

    @functools.cached_property
    def _targets(self) -> ExactTargets:
        from isoloss.lab.evaluation.loss import exact_targets

        return exact_targets(self._language, num_sentences=self._n, objective=self._objective, seed=_VALIDATION_SEED)

    @functools.cached_property
    def _batches(self) -> Sequence[Mapping[str, torch.Tensor]]:
        from isoloss.lab.evaluation.context import language_inputs

        return language_inputs(self._language, self._objective, num_sequences=self._n, seed=_VALIDATION_SEED).batches


def _by_name(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return values, and standard errors as `..._stderr`, without the unit in the name."""
    values: dict[str, float] = {}
    for name, estimate in estimates.items():
        values |= {name: estimate.value, f"{name.removesuffix('_nats')}_stderr": estimate.stderr}
    return values
