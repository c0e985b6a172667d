"""The training loop: it makes a run directory complete, from wherever an earlier process left it.

Everything a step depends on is a function of seed and step, so weights, the algorithm's state and the step itself are
all that a checkpoint has to hold, and a run that was killed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
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
from isoloss.training import checkpoints, loggers, metrics, objectives
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
from isoloss.training.process import process_settings, seed_dropout, signals
from isoloss.training.stages import Stages
from isoloss.training.throughput import Progress, Timing

Measure = Callable[[Any], Mapping[str, float]]  # of a model in eval mode, by name
Validate = Callable[[str, Any], Mapping[str, float]]  # of "kl" or "loss" and a model: `validation_<that>_nats`, ...


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
    configs.check(config)
    loggers.check_installed(config.loggers)
    stages = config.stage_configs()
    for stage in stages:
        objectives.check_language(stage.objective, language)
    if validate is None and any(stage.target for stage in config.stages):
        raise IsolossError(
            "a stage has a target, and nothing measures how far it is: isoloss.pretrain does, "
            "isoloss.training.trainer.train takes validate as an argument"
        )
    if config.measure_every and measure is None:
        raise IsolossError(
            f"measure_every is {config.measure_every}, and there is no measure: isoloss.pretrain makes one, "
            "isoloss.training.trainer.train takes it as an argument"
        )
    with process_group() as group, contextlib.ExitStack() as held:
        for stage in stages:
            if stage.batch_size % (n := group.world_size):
                raise IsolossError(f"batch_size is {stage.batch_size}; {n} processes need a multiple of {n}")
            stage.algorithm.check_run(stage, num_processes=n)
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
            _Training(run, config, language, device, group, progress, task_examples, measure, validate).run_all()


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
    validate: Validate | None

    def __post_init__(self) -> None:
        config, language, device, group = self.config, self.language, self.device, self.group
        self.loggers: Loggers | None = None
        self.stages = Stages(config)
        self.model: Any = make_model(config.model, language, seed=config.seed)
        self.loss_sum, self.loss_count = 0.0, 0
        self.initial_sha256: str | None = None
        self.step, tensors = self._weights()
        self.model.to(device)
        self.parallel = make_parallel(self.model, config.parallel, group)
        forward = partial(prediction_loss, causal=config.objective.kind == "causal", precision=config.precision)
        self.loss = partial(self.parallel.loss, forward)
        # those of the stages to come too, so that what one of them refuses is told at once
        left = range(min(self.stages.num_ended(self.step), len(self.stages.configs) - 1), len(self.stages.configs))
        self.algorithms = deque(self._algorithm(index) for index in left)
        if own := without_average(tensors):
            self.algorithms[0].load_state(own)
        self.average = WeightAverage(self.model, config.ema)
        if tensors:
            self.average.load_state(tensors)
        self.timing = Timing(self.step, config.steps, self.progress if group.is_main else None)
        self.batches: Batches[TrainingBatch]  # of the stage that is being trained

    def _algorithm(self, index: int) -> TrainingAlgorithm:
        """Return the algorithm of a stage, before its first step."""
        stage = self.stages.configs[index]
        context = TrainingContext(
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch_size=stage.micro_batch_size,
            causal=stage.objective.kind == "causal",
            seed=derive(stage.seed, "stage", index) if index else stage.seed,  # it counts its steps from 1
            language=self.language,
            parallel=self.parallel,
            task_examples=self.task_examples,
        )
        made = stage.algorithm.build(self.model, context)
        if not isinstance(made, TrainingAlgorithm):
            raise IsolossError(
                f"the config of the training algorithm {stage.algorithm.kind} builds a {type(made).__name__}; it must "
                "be an isoloss.training.algorithms.base.TrainingAlgorithm"
            )
        return made

    def _batch(self, stage: TrainConfig, step: int) -> TrainingBatch:
        """Return this process's part of the batch of `step`, on the CPU."""
        return training_batch(self.language, stage, step, torch.device("cpu"), self.group.rows())

    @property
    def kept(self) -> set[int]:
        """The steps whose checkpoint is kept; of those to come, as if no further target were reached."""
        return {*self.config.checkpoints, *self.stages.ends}

    def _weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Give the model the weights to go on from; return the step they are of and the algorithm's tensors."""
        newest = self.group.from_main(max(self.run.steps(), default=-1))
        if newest < 0:
            if self.config.init_from is not None:
                source = self.run.path / self.config.init_from
                source = Run(source).last_checkpoint() if Run(source).exists else source
                self.initial_sha256 = checkpoints.load_weights(source, self.model)
            return 0, {}
        folder = self.run.checkpoint(newest)
        state, tensors = checkpoints.load(folder, self.model, config=self.config)
        if state.step != newest:
            raise IsolossError(f"{folder} holds step {state.step}: give the folder its own name back")
        self.loss_sum, self.loss_count = state.loss_sum_nats, state.loss_count
        self.initial_sha256 = state.initial_sha256
        self.stages.reached = list(state.targets_reached)
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
        with signals() as interrupted:
            while not stop and not self.stages.is_last(self.step):
                stop = self._run_stage(interrupted)
            self.group.on_main(self._close)
            (stop,) = self.group.any(stop or interrupted())
            if stop:
                raise Interrupted(self.step)

    def _run_stage(self, interrupted: Callable[[], bool]) -> bool:
        """Make the steps that are left of the stage; return whether a signal ended it before."""
        index, stop = self.stages.num_ended(self.step), False
        make = partial(self._batch, self.stages.configs[index])
        with Batches(make, last=self.stages.ends[index], ahead=self.config.prefetch) as self.batches:
            while not stop and self.stages.num_ended(self.step) == index:
                self._one_step(index)
                if self.stages.num_ended(self.step) > index and len(self.algorithms) > 1:
                    self.algorithms.popleft()  # its optimizer's state is neither saved nor needed again
                is_due = self.group.is_main and self.timing.save_is_due(self.config.save_every_seconds)
                stop, is_due = self.group.any(interrupted(), is_due)
                if stop or is_due or self.step in self.kept:
                    self._save()
        return stop

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
        num_lines = metrics.num_lines(self.step, ends=self.stages.ends, log_every=self.config.log_every)
        metrics.truncate(self.run, self.step, num_lines)
        if self.config.loggers:
            self.loggers = Loggers(self.config.loggers, self.run)
            held.callback(self.loggers.close)  # they write what they have, however training ended

    def _close(self) -> None:
        """Write the result if all steps are made, and the throughput."""
        is_complete = self.stages.is_last(self.step)
        if is_complete:
            self._finish()
        self.timing.report(last=True)
        self.run.log(
            "complete" if is_complete else "interrupted",
            step=self.step,
            seconds=self.timing.seconds(),
            tokens_per_second=self.timing.tokens_per_second(),
        )

    def _one_step(self, index: int) -> None:
        """Make the next step, which is of the stage `index`."""
        number = self.step + 1
        inputs, num_tokens = self.batches.of(number)
        batch = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        is_logged = number % self.config.log_every == 0 or number == self.stages.ends[index]
        seed_dropout(derive(self.config.seed, "dropout", number, *self.group.stream), self.device)
        of_stage = number - self.stages.begin(index)
        result = self.algorithms[0].step(of_stage, batch, self.loss, with_norm=is_logged)
        self.average.update()
        self._check_finite({"loss": result.loss_nats, **result.details}, number)
        self.step = number
        self.loss_sum += result.loss_nats
        self.loss_count += 1
        if is_logged:
            self._log(index, result)
        self.timing.tick(number, result.loss_nats, num_tokens)

    def _check_finite(self, values: Mapping[str, float], number: int) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                newest = max(self.run.steps(), default=None)
                kept = "no checkpoint was saved" if newest is None else f"the checkpoint of step {newest} is kept"
                raise IsolossError(
                    f"the {name} at step {number} is {value}: lower the learning rate or lengthen the warm-up ({kept})"
                )

    def _measured(self, measure: Measure) -> Mapping[str, float]:
        """Return what `measure` says of the model in rank 0, and nothing elsewhere."""
        model = self.parallel.full_model()
        if model is None:
            return {}
        model.to(self.device)
        self.batches.wait()
        with without_dropout(model):  # each step seeds its own random state, so none has to be kept
            return measure(model)

    def _validated(self, index: int) -> Mapping[str, float]:
        """Compare the model with the target of its stage, if this is one of the steps for that; return what was found.

        If it reaches the target, the stage ends.
        """
        target = self.stages.target(index, self.step)
        if target is None or self.validate is None:
            return {}
        what, nats = target
        values = self._measured(partial(self.validate, what))
        (is_reached,) = self.group.any(self.group.is_main and values[f"validation_{what}_nats"] <= nats)
        if is_reached:
            self.stages.reached.append(self.step)
        return values

    def _log(self, index: int, result: StepResult) -> None:
        every = self.config.measure_every
        line: dict[str, Any] = {
            "step": self.step,
            "loss_nats": self.loss_sum / self.loss_count,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            **result.details,
            **(self._measured(self.measure) if self.measure and every and self.step % every == 0 else {}),
        }
        if self.config.stages:
            line |= {"stage": index + 1, **self._validated(index)}
            if ended := self.stages.ended(index, self.step):
                line["stage_ended"] = ended
        self.loss_sum, self.loss_count = 0.0, 0
        self.group.on_main(lambda: self._append(line))

    def _append(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl and to the loggers."""
        files.append_json(self.run.path / "metrics.jsonl", line)
        if self.loggers is not None:
            self.loggers.log(line)
        if "stage_ended" in line:
            self.run.log("stage ended", stage=line["stage"], step=line["step"], why=line["stage_ended"])

    def _algorithm_state(self) -> dict[str, torch.Tensor]:
        """Return the algorithm's state, which a file of tensors must be able to hold."""
        state = self.algorithms[0].state()
        kind = self.stages.configs[-len(self.algorithms)].algorithm.kind
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
            targets_reached=self.stages.reached,
        )
        model, average = self.parallel.full_model(), self.average.state()
        tensors = {**self._algorithm_state(), **average}
        kept_average = average if self.step in self.kept else None
        tokenizer = getattr(self.language, "tokenizer", None)

        def write() -> None:
            metrics.flush(self.run)
            folder = self.run.checkpoint(self.step)
            checkpoints.save(folder, model, tensors, state, tokenizer=tokenizer, average=kept_average)
            checkpoints.remove_except(self.run, {*self.kept, self.step})

        self.group.on_main(write)
        self.timing.saved()

    def _finish(self) -> None:
        files.write_json(
            self.run.path / "result.json",
            {
                "steps": self.step,
                "loss_nats": self.run.metrics()[-1]["loss_nats"],
                "num_parameters": self.model.num_parameters(),
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "initial_sha256": self.initial_sha256,
                "checkpoints": {
                    str(step): checkpoints.weights_sha256(self.run.checkpoint(step))
                    for step in sorted(self.kept)
                    if step <= self.step
                },
                **({"stages": self.run.stages()} if self.config.stages else {}),
            },
        )
