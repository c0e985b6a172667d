"""Training a run directory, complete from wherever an earlier process left it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.training.algorithms.base import TaskExamples, no_task_examples
from isoloss.training.distributed import process_group
from isoloss.training.loop import (
    Interrupted,
    Measure,
    Training,
    Validate,
    check_compiled,
    check_memory,
    check_request,
    is_complete,
)
from isoloss.training.process import process_settings
from isoloss.training.throughput import Progress

__all__ = ["Interrupted", "train"]


def train(
    run: Run,
    config: TrainConfig,
    language: Language,
    *,
    progress: Callable[[Progress], None] | None = None,
    task_examples: TaskExamples = no_task_examples,
    measure: Measure | None = None,
    validate: Validate | None = None,
) -> None:
    """Train until `run` is complete, from its newest checkpoint if it has one; `isoloss.pretrain` calls this.

    The run's files are those that `isoloss.runs` lists. On one device and with one number of threads they are, all but
    log.jsonl, the same bytes however often the process was stopped or killed. metrics.jsonl gets a line every
    `log_every` steps and at the last one: `loss_nats` is the mean since the line before, `learning_rate`, `grad_norm`
    (before clipping) and the algorithm's own numbers are of that step. Every `measure_every` steps it holds what
    `measure` returns for the model after that step, which changes nothing in training. In a run with stages, a line
    also has the `stage`, counted from 1, and the last line of a stage `stage_ended`: why it ended. Ctrl-C and SIGTERM
    end the current step, save it and raise `Interrupted`; a second one stops at once. The number of threads and the
    random state of the CPU and of the training device are left as they were.

    Where several processes call this together (`isoloss.training.distributed.process_group`), each takes its part of
    every batch, and rank 0 writes the files. The batch of a step is the same for any number of them, and so is the
    gradient, up to rounding; dropout and what is per rank are not. A run goes on with any number, bit for bit with
    that it had.

    Args:
        run: The directory; new, or of the same config.
        config: What to train.
        language: The language that `config.language` describes; if it has a `tokenizer`, checkpoints hold it too.
        progress: Called about once a second and at the end; of several processes, in rank 0.
        task_examples: The training set of a downstream task, for an algorithm that asks for one.
        measure: Called with the model in eval mode at the steps that `config.measure_every` names; of several
            processes, in rank 0.
        validate: Called with what a stage has a target for and the model in eval mode, whenever these are compared; of
            several processes, in rank 0, which decides for all.

    Raises:
        IsolossError: A config that `isoloss.config.check` refuses; a directory of another config, in use by another
            process, or with a damaged checkpoint; initial weights that do not fit; task examples, a `measure` or a
            `validate` that are asked for and missing; exact labels where the language has none; a batch that does not
            divide equally among the processes; or a loss that is not finite.
        ProcessLost: Another process has gone.
        Interrupted: A signal came, to any of the processes.
    """
    check_request(config, language, measure=measure, validate=validate)
    with process_group() as group, contextlib.ExitStack() as held:
        for stage in config.stage_configs():
            if stage.batch_size % (n := group.world_size):
                raise IsolossError(f"batch_size is {stage.batch_size}; {n} processes need a multiple of {n}")
            stage.algorithm.check_run(stage, num_processes=n)
        device = group.device(config.device)
        if config.compiled:
            check_compiled(device, group)
        if is_complete(run, config, group):
            return
        check_memory(config, language, device, group.world_size)
        group.on_main(run.check_folder)
        group.on_main(lambda: held.enter_context(files.lock(run.path)))
        group.on_main(lambda: run.create(config) if run.exists else None)
        if group.from_main(run.complete):  # by the process that held the lock before
            return
        with process_settings(config.threads, device, compiled=config.compiled):
            # without a name, so that it is deleted before the process group; see `process_group`
            Training(run, config, language, device, group, progress, task_examples, measure, validate).run_all()
