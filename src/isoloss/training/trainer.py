"""The training loop: it makes a run directory complete, from wherever an earlier process left it.

Everything a step depends on is a function of seed and step, so weights, the algorithm's state and the step itself are
all that a checkpoint has to hold, and a run that was killed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.models.fused_blocks import computed_by
from isoloss.models.make import make_model
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.seeds import derive
from isoloss.training import checkpoints, loggers, objectives
from isoloss.training.algorithms.base import (
    StepResult,
    TaskExamples,
    TrainingAlgorithm,
    TrainingContext,
    no_task_examples,
    without_dropout,
)
from isoloss.training.averaging import WeightAverage, without_average
from isoloss.training.checkpoints import TrainerState
from isoloss.training.data_parallel import make_parallel
from isoloss.training.distributed import ProcessGroup, process_group
from isoloss.training.loggers import Loggers
from isoloss.training.objectives import TrainingBatch, prediction_loss, training_batch
from isoloss.training.prefetching import Batches
from isoloss.training.process import process_settings, signals
from isoloss.training.throughput import Progress, Timing

Measure = Callable[[Any], Mapping[str, float]]  # of a model in eval mode, by name


class Interrupted(IsolossError):  # noqa: N818  (nothing went wrong)
    """Training stopped on a signal with everything saved; training the same run again goes on from there.

    Attributes:
        step: Steps made.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}, which is saved; run it again to go on from there")
        self.step = step


def train(
    run: Run,
    config: TrainConfig,
    language: Language,
    *,
    progress: Callable[[Progress], None] | None = None,
    task_examples: TaskExamples = no_task_examples,
    measure: Measure | None = None,
) -> None:
    """Train until `run` is complete, from its newest checkpoint if it has one; `isoloss.pretrain` calls this.

    The run's files are those that `isoloss.runs` lists. On one device and with one number of threads they are, all but
    log.jsonl, the same bytes however often the process was stopped or killed. metrics.jsonl gets a line every
    `log_every` steps and at the last one: `loss_nats` is the mean since the line before, `learning_rate`, `grad_norm`
    (before clipping) and the algorithm's own numbers are of that step. Every `measure_every` steps it holds what
    `measure` returns for the model after that step, which changes nothing in training. Ctrl-C and SIGTERM end the
    current step, save it and raise `Interrupted`; a second one stops at once. The number of threads and the random
    state of the CPU and of the training device are left as they were.

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

    Raises:
        IsolossError: A config that `isoloss.config.check` refuses; a directory of another config, in use by another
            process, or with a damaged checkpoint; initial weights that do not fit; task examples or a `measure` that
            are asked for and missing; exact labels where the language has none; a batch that does not divide equally
            among the processes; or a loss that is not finite.
        ProcessLost: Another process has gone.
        Interrupted: A signal came, to any of the processes.
    """
    configs.check(config)
    loggers.check_installed(config.loggers)
    objectives.check_language(config.objective, language)
    if config.measure_every and measure is None:
        raise IsolossError(
            f"measure_every is {config.measure_every}, and there is no measure: isoloss.pretrain makes one, "
            "isoloss.training.trainer.train takes it as an argument"
        )
    with process_group() as group, contextlib.ExitStack() as held:
        if config.batch_size % group.world_size:
            raise IsolossError(
                f"batch_size is {config.batch_size}; {group.world_size} processes need a multiple of {group.world_size}"
            )
        config.algorithm.check_run(config, num_processes=group.world_size)
        device = group.device(config.device)
        if is_complete(run, config, group):
            return
        group.on_main(run.check_folder)
        group.on_main(lambda: held.enter_context(files.lock(run.path)))
        group.on_main(lambda: run.create(config) if run.exists else None)
        if group.from_main(run.complete):  # by the process that held the lock before
            return
        with process_settings(config.threads, device):
            # without a name, so that it is deleted before the process group; see `process_group`
            _Training(run, config, language, device, group, progress, task_examples, measure).run_all()


def is_complete(run: Run, config: TrainConfig, group: ProcessGroup) -> bool:
    """Return whether `run` is complete, the same for all processes of `group`, which call this together.

    Raises:
        IsolossError: It is the complete run of another config.
    """
    if not group.from_main(run.complete):
        return False
    group.on_main(lambda: run.create(config))
    return True


@dataclass(eq=False)
class _Training:
    """One process's work on a run."""

    run: Run
    config: TrainConfig
    language: Language
    device: torch.device
    group: ProcessGroup
    progress: Callable[[Progress], None] | None
    task_examples: TaskExamples
    measure: Measure | None

    def __post_init__(self) -> None:
        config, language, device, group = self.config, self.language, self.device, self.group
        self.loggers: Loggers | None = None
        self.kept = {*config.checkpoints, config.steps}
        self.model: Any = make_model(config.model, language, seed=config.seed)
        self.loss_sum, self.loss_count = 0.0, 0
        self.initial_sha256: str | None = None
        self.step, tensors = self._weights()
        self.model.to(device)
        self.parallel = make_parallel(self.model, config.parallel, group)
        causal = config.objective.kind == "causal"
        forward = partial(prediction_loss, causal=causal, precision=config.precision)
        self.loss = partial(self.parallel.loss, forward)
        context = TrainingContext(
            optimizer=config.optimizer,
            total_steps=config.steps,
            micro_batch_size=config.micro_batch_size,
            causal=causal,
            seed=config.seed,
            language=language,
            parallel=self.parallel,
            task_examples=self.task_examples,
        )
        self.algorithm: TrainingAlgorithm = config.algorithm.build(self.model, context)
        if not isinstance(self.algorithm, TrainingAlgorithm):
            raise IsolossError(
                f"the config of the training algorithm {config.algorithm.kind} builds a "
                f"{type(self.algorithm).__name__}; it must be an isoloss.training.algorithms.base.TrainingAlgorithm"
            )
        if own := without_average(tensors):
            self.algorithm.load_state(own)
        self.average = WeightAverage(self.model, config.ema)
        if tensors:
            self.average.load_state(tensors)
        self.timing = Timing(self.step, config.steps, self.progress if group.is_main else None)
        self.batches = Batches(self._batch, last=config.steps, ahead=config.prefetch)

    def _batch(self, step: int) -> TrainingBatch:
        """Return this process's part of the batch of `step`, on the CPU."""
        return training_batch(self.language, self.config, step, torch.device("cpu"), self.group.rows())

    def _weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Give the model the weights to go on from; return the step they are of and the algorithm's tensors."""
        newest = self.group.from_main(max(self.run.steps(), default=-1))
        if newest < 0:
            if self.config.init_from is not None:
                self.initial_sha256 = checkpoints.load_weights(self.run.path / self.config.init_from, self.model)
            return 0, {}
        folder = self.run.checkpoint(newest)
        state, tensors = checkpoints.load(folder, self.model, config=self.config)
        if state.step != newest:
            raise IsolossError(f"{folder} holds step {state.step}: give the folder its own name back")
        self.loss_sum, self.loss_count = state.loss_sum_nats, state.loss_count
        self.initial_sha256 = state.initial_sha256
        return newest, tensors

    def run_all(self) -> None:
        """Make every step that is left, and the run complete."""
        with contextlib.ExitStack() as held:
            self.group.on_main(lambda: self._open(held))
            self._run_all()

    def _run_all(self) -> None:
        if self.step == 0 and 0 in self.kept and not self.group.from_main(self.run.checkpoint(0).exists()):
            self._save()
        stop = False
        with signals() as interrupted, self.batches:
            while self.step < self.config.steps and not stop:
                self._one_step()
                is_due = self.group.is_main and self.timing.save_is_due(self.config.save_every_seconds)
                stop, is_due = self.group.any(interrupted(), is_due)
                if stop or is_due or self.step in self.kept:
                    self._save()
            self.group.on_main(self._close)
            (stop,) = self.group.any(stop or interrupted())
            if stop:
                raise Interrupted(self.step)

    def _open(self, held: contextlib.ExitStack) -> None:
        """Bring the directory to where training goes on from."""
        self.run.create(self.config)  # after initial weights that do not fit were refused: a mistake makes no run
        files.remove_unfinished(self.run.path)
        missing = [step for step in self.kept if step < self.step and not self.run.checkpoint(step).is_dir()]
        if missing:
            raise IsolossError(
                f"{self.run.path} lacks the checkpoint of step {min(missing)}: "
                "delete the later ones too, and training makes them again"
            )
        self.run.log(
            "start",
            step=self.step,
            device=str(self.device),
            processes=self.group.world_size,
            parallel=self.config.parallel if self.group.world_size > 1 else None,
            threads=torch.get_num_threads(),
            attention=self.model.config._attn_implementation,
            blocks=computed_by(self.model, self.config.precision),
            precision=self.config.precision,
        )
        checkpoints.remove_except(self.run, {*self.kept, self.step})
        num_lines = _num_lines(self.step, steps=self.config.steps, log_every=self.config.log_every)
        _truncate(self.run, self.step, num_lines)
        if self.config.loggers:
            self.loggers = Loggers(self.config.loggers, self.run)
            held.callback(self.loggers.close)  # they write what they have, however training ended

    def _close(self) -> None:
        """Write the result if all steps are made, and the throughput."""
        if self.step == self.config.steps:
            self._finish()
        self.timing.report(last=True)
        self.run.log(
            "interrupted" if self.step < self.config.steps else "complete",
            step=self.step,
            seconds=self.timing.seconds(),
            tokens_per_second=self.timing.tokens_per_second(),
        )

    def _one_step(self) -> None:
        number = self.step + 1
        inputs, num_tokens = self.batches.of(number)
        batch = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        is_logged = number % self.config.log_every == 0 or number == self.config.steps
        torch.manual_seed(derive(self.config.seed, "dropout", number, *self.group.stream))
        result = self.algorithm.step(number, batch, self.loss, with_norm=is_logged)
        self.average.update()
        self._check_finite({"loss": result.loss_nats, **result.details}, number)
        self.step = number
        self.loss_sum += result.loss_nats
        self.loss_count += 1
        if is_logged:
            self._log(result)
        self.timing.tick(number, result.loss_nats, num_tokens)

    def _check_finite(self, values: Mapping[str, float], number: int) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                newest = max(self.run.steps(), default=None)
                kept = "no checkpoint was saved" if newest is None else f"the checkpoint of step {newest} is kept"
                raise IsolossError(
                    f"the {name} at step {number} is {value}: lower the learning rate or lengthen the warm-up ({kept})"
                )

    def _measured(self) -> Mapping[str, float]:
        """Return what `measure` says of the model, if this is one of its steps."""
        every = self.config.measure_every
        if self.measure is None or not every or self.step % every:
            return {}
        model = self.parallel.full_model()
        if model is None:
            return {}
        model.to(self.device)
        self.batches.wait()
        with without_dropout(model):  # each step seeds its own random state, so none has to be kept
            return self.measure(model)

    def _log(self, result: StepResult) -> None:
        line = {
            "step": self.step,
            "loss_nats": self.loss_sum / self.loss_count,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            **result.details,
            **self._measured(),
        }
        self.loss_sum, self.loss_count = 0.0, 0
        self.group.on_main(lambda: self._append(line))

    def _append(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl and to the loggers."""
        files.append_json(self.run.path / "metrics.jsonl", line)
        if self.loggers is not None:
            self.loggers.log(line)

    def _algorithm_state(self) -> dict[str, torch.Tensor]:
        """Return the algorithm's state, which a file of tensors must be able to hold."""
        state, kind = self.algorithm.state(), self.config.algorithm.kind
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise IsolossError(
                    f"the state of the training algorithm {kind} has a {type(value).__name__} under {name!r}; it must "
                    "have tensors by name"
                )
        return state

    def _save(self) -> None:
        """Save this step, and drop the checkpoints that were only there to go on from."""
        state = TrainerState(
            step=self.step,
            config=configs.identity(self.config),
            loss_sum_nats=self.loss_sum,
            loss_count=self.loss_count,
            initial_sha256=self.initial_sha256,
        )
        model, average = self.parallel.full_model(), self.average.state()
        tensors = {**self._algorithm_state(), **average}
        kept_average = average if self.step in self.kept else None
        tokenizer = getattr(self.language, "tokenizer", None)

        def write() -> None:
            _flush(self.run)
            folder = self.run.checkpoint(self.step)
            checkpoints.save(folder, model, tensors, state, tokenizer=tokenizer, average=kept_average)
            checkpoints.remove_except(self.run, {*self.kept, self.step})

        self.group.on_main(write)
        self.timing.saved()

    def _finish(self) -> None:
        files.write_json(
            self.run.path / "result.json",
            {
                "steps": self.config.steps,
                "loss_nats": self.run.metrics()[-1]["loss_nats"],
                "num_parameters": self.model.num_parameters(),
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "initial_sha256": self.initial_sha256,
                "checkpoints": {
                    str(step): checkpoints.weights_sha256(self.run.checkpoint(step)) for step in sorted(self.kept)
                },
            },
        )


# --- metrics.jsonl: lines that a checkpoint never outlives, and that a resumed run has once


def _flush(run: Run) -> None:
    """Bring metrics.jsonl to the disk: a checkpoint must not outlive the lines before it."""
    path = run.path / "metrics.jsonl"
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _num_lines(step: int, *, steps: int, log_every: int) -> int:
    """Return how many lines metrics.jsonl has when `step` of `steps` steps are made."""
    last = step == steps and step % log_every != 0
    return step // log_every + last


def _truncate(run: Run, step: int, count: int) -> None:
    """Keep the `count` lines up to `step`; a killed process may have left more, and half a line after them.

    Raises:
        IsolossError: They are not there, or not of these steps.
    """
    path = run.path / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text.splitlines(keepends=True)[:count]
    try:
        complete = len(lines) == count and all(json.loads(line)["step"] <= step for line in lines)
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise IsolossError(
            f"{path} is damaged: its first {count} lines are not those of the {step} steps that were made; "
            "delete the run to start it again"
        )
    if len(text) > len("".join(lines)):
        files.write_text(path, "".join(lines))
