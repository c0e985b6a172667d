"""The work on a run, step by step, from wherever an earlier process left it until its directory is complete.

Everything a step depends on is a function of seed and step, so weights, the algorithm's state and the step itself are
all that a checkpoint has to hold, and a run that was killed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.languages.pcfg.inside_outside import choose_backend
from isoloss.memory import check_fits
from isoloss.models.make import make_model
from isoloss.registry import MODELS
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.seeds import derive
from isoloss.text.masking import Batch
from isoloss.training import checkpoints, loggers, metrics, objectives
from isoloss.training.algorithms.base import (
    Loss,
    StepResult,
    TaskExamples,
    TrainingAlgorithm,
    TrainingContext,
    without_dropout,
)
from isoloss.training.averaging import WeightAverage, without_average
from isoloss.training.checkpoints import TrainerState
from isoloss.training.data_parallel import SingleProcess, make_parallel
from isoloss.training.distributed import ProcessGroup
from isoloss.training.loggers import Loggers
from isoloss.training.objectives import TrainingBatch, prediction_loss, training_batch
from isoloss.training.prefetching import Batches
from isoloss.training.process import seed_dropout, signals
from isoloss.training.stages import Stages
from isoloss.training.throughput import Progress, Timing
from isoloss.training.training_set import check_training_set

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


def check_request(
    config: TrainConfig, language: Language, *, measure: Measure | None, validate: Validate | None
) -> None:
    """Refuse a config that cannot be trained, or whose measurements nobody makes; see `trainer.train`."""
    configs.check(config)
    loggers.check_installed(config.loggers)
    for stage in config.stage_configs():
        objectives.check_language(stage.objective, language)
    check_training_set(config, language)
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


def check_memory(config: TrainConfig, language: Language, device: torch.device, num_processes: int = 1) -> None:
    """Refuse a model, or batches, for which the machine has not the memory, by what they need at least."""
    architecture = MODELS.load(config.model.architecture)
    size = max(stage.batch_size for stage in config.stage_configs()) // num_processes
    in_a_pass = min(size, config.micro_batch_size or size) if device.type == "cpu" else 0
    length = language.max_length
    shape = architecture.shape(config.model)
    needed = architecture.least_memory(shape, language.model_vocab_size, length, num_tokens=in_a_pass * length)
    needed += 3 * 8 * size * length  # ids, mask and labels
    check_fits(needed, f"the model {config.model} on batches of {size:,} sentences is too large")


def check_compiled(device: torch.device, group: ProcessGroup) -> None:
    """Refuse to train with the compiled step where it cannot run."""
    if choose_backend(torch.device("cpu")) != "numba":
        raise IsolossError("compiled is on, and the compiled step needs the package numba: leave compiled out")
    if group.world_size > 1:
        raise IsolossError(f"compiled is on, which takes one process, and these are {group.world_size}")
    if device.type != "cpu":
        raise IsolossError(f"compiled is on, which takes a CPU, and the device is {device}: name the device cpu")


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
class Step:
    """A step that is to be made.

    Attributes:
        of_stage: Its number, counted from 1 in its stage.
        batch: This process's part of the batch, on the device.
        num_tokens: Of the whole batch.
        is_logged: Whether metrics.jsonl gets a line after it, and the norm of the gradient is wanted.
        dropout_seed: Seed of its dropout.
        result: What it did, once it is made.
    """

    of_stage: int
    batch: Batch
    num_tokens: int
    is_logged: bool
    dropout_seed: int
    result: StepResult | None = None


@dataclass(eq=False)
class Training:
    """One process's work on a run; the arguments are those of `isoloss.training.trainer.train`."""

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
        self.metrics_sha256 = ""
        self.step, tensors = self._weights()
        self.model.to(device)
        self.parallel = self._make_parallel()
        forward = partial(prediction_loss, causal=config.objective.kind == "causal", precision=config.precision)
        self.loss: Loss = partial(self.parallel.loss, forward)
        self.compiled = None
        if config.compiled:
            from isoloss.models.compiled_bert import CompiledLoss

            self.loss = self.compiled = CompiledLoss(self.model)
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

    def _make_parallel(self) -> SingleProcess:
        """Return how gradients come together; the model has the weights to go on from."""
        return make_parallel(self.model, self.config.parallel, self.group)

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
            compiled=self.compiled,
        )
        made = self._build(stage, context)
        if not isinstance(made, TrainingAlgorithm):
            raise IsolossError(
                f"the config of the training algorithm {stage.algorithm.kind} builds a {type(made).__name__}; it must "
                "be an isoloss.training.algorithms.base.TrainingAlgorithm"
            )
        return made

    def _build(self, stage: TrainConfig, context: TrainingContext) -> Any:
        return stage.algorithm.build(self.model, context)

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
        self.metrics_sha256 = state.metrics_sha256
        self.stages.reached = list(state.targets_reached)
        return newest, tensors

    def run_all(self) -> None:
        """Make every step that is left, and the run complete."""
        with signals() as interrupted, contextlib.closing(self.steps(interrupted)) as steps:
            for step in steps:
                seed_dropout(step.dropout_seed, self.device)
                step.result = self.algorithms[0].step(step.of_stage, step.batch, self.loss, with_norm=step.is_logged)

    def steps(self, interrupted: Callable[[], bool]) -> Generator[Step]:
        """Yield every step that is left, to be made and given its result, and make the run complete.

        Whoever does not take all of them closes the generator.
        """
        with contextlib.ExitStack() as held:
            self.group.on_main(lambda: self._open(held))
            if self.step == 0 and 0 in self.kept and not self.group.from_main(self.run.checkpoint(0).exists()):
                self._save()
            stop = False
            while not stop and not self.stages.is_last(self.step):
                stop = yield from self._steps_of_stage(interrupted)
            self.group.on_main(self._close)
            (stop,) = self.group.any(stop or interrupted())
            if stop:
                raise Interrupted(self.step)

    def _steps_of_stage(self, interrupted: Callable[[], bool]) -> Generator[Step, None, bool]:
        """Yield the steps that are left of the stage; return whether a signal ended it before."""
        index, stop = self.stages.num_ended(self.step), False
        make = partial(self._batch, self.stages.configs[index])
        with Batches(make, last=self.stages.ends[index], ahead=self.config.prefetch) as self.batches:
            while not stop and self.stages.num_ended(self.step) == index:
                step = self._next(index)
                yield step
                self._take(step, index)
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
        for step in sorted(step for step in self.kept if step < self.step):
            checkpoints.read_state(self.run.checkpoint(step))  # refuses what was damaged since it was written
        if self.step:
            self.run.note_resume(self.step, threads=torch.get_num_threads())
        self.run.log(
            "start",
            step=self.step,
            device=str(self.device),
            processes=self.group.world_size,
            parallel=self.config.parallel if self.group.world_size > 1 else None,
            threads=torch.get_num_threads(),
            attention=self.model.config._attn_implementation,
            compiled=self.config.compiled,
            precision=self.config.precision,
        )
        checkpoints.remove_except(self.run, {*self.kept, self.step})
        num_lines = metrics.num_lines(self.step, ends=self.stages.ends, log_every=self.config.log_every)
        metrics.truncate(self.run, self.step, num_lines, self.metrics_sha256)
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

    def _next(self, index: int) -> Step:
        """Return the next step, which is of the stage `index`."""
        number = self.step + 1
        inputs, num_tokens = self.batches.of(number)
        return Step(
            of_stage=number - self.stages.begin(index),
            batch={name: tensor.to(self.device) for name, tensor in inputs.items()},
            num_tokens=num_tokens,
            is_logged=number % self.config.log_every == 0 or number == self.stages.ends[index],
            dropout_seed=derive(self.config.seed, "dropout", number, *self.group.stream),
        )

    def _take(self, step: Step, index: int) -> None:
        """Count a step that was made."""
        number, result = self.step + 1, step.result
        assert result is not None
        self._update_average()
        self._check_finite({"loss": result.loss_nats, **result.details}, number)
        self.step = number
        self.loss_sum += result.loss_nats
        self.loss_count += 1
        if step.is_logged:
            self._log(index, result)
        self.timing.tick(number, result.loss_nats, step.num_tokens)

    def _update_average(self) -> None:
        self.average.update()

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
        state = partial(
            TrainerState,
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
            of_steps = state(metrics_sha256=metrics.flush(self.run))
            folder = self.run.checkpoint(self.step)
            checkpoints.save(folder, model, tensors, of_steps, tokenizer=tokenizer, average=kept_average)
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
