"""Training a run directory, from wherever an earlier process left it until it is complete.

Everything a step draws is a function of seed and step. So a checkpoint holds the weights, the state of the algorithm
and a few counts (`TrainerState`), but no random state; and a run that was killed ends with the
same bytes as one that was not.

In the order in which it runs: `train` refuses and locks, `Training.__post_init__` makes the model and what updates it,
`run_all` goes through the stages, `_train_stage` is the loop, and `_log`, `_save` and `_close` write the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.places import TRAINER
from isoloss.errors import IsolossError, require_package
from isoloss.lab.languages.base import Language
from isoloss.lab.models.make import make_model
from isoloss.lab.training import checkpoints, objectives
from isoloss.lab.training.algorithms.base import (
    Loss,
    StepResult,
    TaskExamples,
    TrainingAlgorithm,
    TrainingContext,
    no_task_examples,
    without_dropout,
)
from isoloss.lab.training.checkpoints import TrainerState
from isoloss.lab.training.distributed import ProcessGroup, make_parallel, process_group
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.lab.training.process import process_settings, seed_dropout, signals
from isoloss.lab.training.tensorboard import TensorBoard
from isoloss.lab.training.training_set import check_training_set
from isoloss.machine import check_fits
from isoloss.registry import MODELS, OPTIMIZERS
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.seeds import derive

Measure = Callable[[Any], Mapping[str, float]]  # of a model in eval mode, by name
Validate = Callable[[str, Any], Mapping[str, float]]  # takes "kl" or "loss" and a model: `validation_kl_nats`, ...
REPORT_SECONDS = 1.0  # between two calls of `progress`


class Interrupted(IsolossError):  # noqa: N818  (nothing went wrong)
    """Training stopped on a signal after `step` steps, all saved; training the same run again goes on from there."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}, which is saved; run it again to go on from there")
        self.step = step


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int  # steps made, those of earlier processes included
    steps: int  # of the whole run
    loss_nats: float  # mean of the steps since the last report
    tokens_per_second: float  # over this process's steps; padding is not counted
    seconds: float  # since this process began to train


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
    (before clipping) and the algorithm's own numbers are of that step. In a run with stages, a line also has the
    `stage`, counted from 1, and the last line of a stage `stage_ended`: why it ended. Ctrl-C and SIGTERM end the
    current step, save it and raise `Interrupted`; a second one stops at once. The number of threads and the random
    state of the CPU and of the training device are left as they were.

    Where several processes call this together (`isoloss.lab.training.distributed.process_group`), each takes its part
    of every batch. Rank 0 writes the files and calls `progress`, `measure` and `validate`. The batch of a step is the
    same for any number of processes, and so is the gradient, up to rounding; dropout and what is per rank are not. A
    run may go on with any number of processes, and with the same number it goes on bit for bit.

    Args:
        run: The directory; new, or of the same config.
        config: What to train.
        language: The language that `config.language` describes; if it has a `tokenizer`, checkpoints hold it too.
        progress: Called about once a second and at the end.
        task_examples: The training set of a downstream task, for an algorithm that asks for one.
        measure: Called with the model in eval mode every `config.measure_every` steps, for the line of that step; it
            changes nothing in training.
        validate: Called with the quantity of a stage's target, "kl" or "loss", and the model in eval mode, whenever the
            target is checked.

    Raises:
        IsolossError: A config, language or callable that cannot be trained with; a directory of another config, in use,
            or with a damaged checkpoint; initial weights that do not fit; too little memory; a loss that is not finite.
        ProcessLost: Another process has gone.
        Interrupted: A signal came, to any of the processes.
    """
    check_request(config, language, measure=measure, validate=validate)
    with process_group() as group, contextlib.ExitStack() as until_the_end:
        # the config was checked for one process; how many there are is known only here
        for stage in config.stage_configs():
            if stage.batch_size % (n := group.world_size):
                raise IsolossError(f"batch_size is {stage.batch_size}; {n} processes need a multiple of {n}")
            stage.algorithm.check_run(stage, num_processes=n)
        device = group.device(config.device)
        if config.compiled:
            check_compiled(device, group)
        # a run that is complete needs neither the lock nor the memory
        if is_complete(run, config, group):
            return
        check_memory(config, language, device, group.world_size)
        # before the lock, which makes the folder and a file in it
        group.on_main(run.check_folder)
        # rank 0 alone: to the others a lock that it holds is another process's
        group.on_main(lambda: until_the_end.enter_context(files.lock(run.path)))
        # a run of another config is refused here; a new one is made once its model is there, in `_open`
        group.on_main(lambda: run.create(config) if run.exists else None)
        # the process that held the lock before may have completed it
        if group.from_main(run.complete):
            return
        with process_settings(config.threads, device, compiled=config.compiled):
            # without a name, so that it is deleted before the process group; see `process_group`
            Training(run, config, language, device, group, progress, task_examples, measure, validate).run_all()


@dataclass(eq=False)
class Training:
    """One process's work on a run; the arguments are those of `train`.

    Several processes make the same calls in the same order, as whatever needs all shards or a sum waits for the others.
    So what depends on files or on time is decided in rank 0 and told to the others.
    """

    run: Run
    config: TrainConfig
    language: Language
    device: torch.device
    group: ProcessGroup
    progress: Callable[[Progress], None] | None
    task_examples: TaskExamples
    measure: Measure | None
    validate: Validate | None

    # --- the model, and what updates it

    def __post_init__(self) -> None:
        config, language, device, group = self.config, self.language, self.device, self.group
        self.tensorboard: TensorBoard | None = None
        self.stages = Stages(config)
        # drawn and loaded on the CPU, so that the initial weights are the same on every device
        self.model: Any = make_model(config.model, language, seed=config.seed)
        # of the steps since the last line of metrics.jsonl
        self.loss_sum, self.loss_count = 0.0, 0
        self.initial_sha256: str | None = None
        self.metrics_sha256 = ""
        # before FSDP cuts the parameters that weights are copied into
        self.step, saved_tensors = self._load()
        self.model.to(device)

        self.parallel = make_parallel(self.model, config.parallel, group)
        forward = partial(prediction_loss, causal=config.objective.kind == "causal", precision=config.precision)
        self.loss: Loss = partial(self.parallel.loss, forward)
        self.compiled = None
        if config.compiled:
            from isoloss.lab.models.compiled_bert import CompiledLoss  # loads numba

            self.loss = self.compiled = CompiledLoss(self.model)

        # Below, the optimizer takes the parameters as FSDP or the compiled loss has left them.
        # Stages to come have their algorithms already, so that what one of them refuses is told at once; their
        # optimizers hold no tensors before their first step. With every stage done but result.json, one is left.
        first = min(self.stages.num_ended(self.step), len(self.stages.configs) - 1)
        self.algorithms = deque(self._algorithm(index) for index in range(first, len(self.stages.configs)))
        if saved_tensors:
            self.algorithms[0].load_state(saved_tensors)
        self.timing = Timing(self.step, config.steps, self.progress if group.is_main else None)

    def _load(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Give the model the weights to go on from; return the step they are of and the trainer's tensors."""
        newest = self.group.from_main(max(self.run.steps(), default=-1))
        if newest < 0:
            if self.config.init_from is not None:
                source = self.run.path / self.config.init_from
                source = Run(source).last_checkpoint() if Run(source).exists else source
                self.initial_sha256 = checkpoints.load_weights(source, self.model)
                if self.config.init_optimizer:
                    return 0, checkpoints.load_branch(source, self.stages.configs[0])
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

    def _algorithm(self, index: int) -> TrainingAlgorithm:
        """Return the algorithm of a stage, before its first step."""
        stage = self.stages.configs[index]
        context = TrainingContext(
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch_size=stage.micro_batch_size,
            causal=stage.objective.kind == "causal",
            # an algorithm counts its steps from 1, and later stages must not repeat the first one's draws
            seed=derive(stage.seed, "stage", index) if index else stage.seed,
            language=self.language,
            parallel=self.parallel,
            task_examples=self.task_examples,
            compiled=self.compiled,
        )
        algorithm = stage.algorithm.build(self.model, context)
        if not isinstance(algorithm, TrainingAlgorithm):
            raise IsolossError(
                f"the config of the training algorithm {stage.algorithm.kind} builds a {type(algorithm).__name__}; it "
                "must be an isoloss.lab.training.algorithms.base.TrainingAlgorithm"
            )
        return algorithm

    @property
    def kept_steps(self) -> set[int]:
        """The steps whose checkpoint is kept; future steps, as if no further target were reached."""
        return {*self.config.checkpoints, *self.stages.ends}

    # --- the loop

    def run_all(self) -> None:
        """Make every step that is left, and the run complete."""
        stop = False
        with signals() as interrupted, contextlib.ExitStack() as until_the_end:
            self.group.on_main(lambda: self._open(until_the_end))
            if self.step == 0 and 0 in self.kept_steps and not self.group.from_main(self.run.checkpoint(0).exists()):
                self._save()
            while not stop and not self.stages.is_last(self.step):
                stop = self._train_stage(self.stages.num_ended(self.step), interrupted)
            self.group.on_main(self._close)
            # a signal may also have come after the last step
            (stop,) = self.group.any(stop or interrupted())
            if stop:
                raise Interrupted(self.step)

    def _train_stage(self, index: int, interrupted: Callable[[], bool]) -> bool:
        """Make the steps that are left of a stage, and return whether a signal ended it early."""
        stage, begin, end = self.stages.configs[index], self.stages.begin(index), self.stages.ends[index]
        stop = False
        rows = self.group.rows()
        while not stop and self.stages.num_ended(self.step) == index:
            number = self.step + 1
            inputs, num_tokens = training_batch(self.language, stage, number, device=torch.device("cpu"), rows=rows)
            batch = {name: tensor.to(self.device) for name, tensor in inputs.items()}

            is_logged = number % self.config.log_every == 0 or number == end
            # at every step, so that there is no random state to save
            seed_dropout(derive(self.config.seed, "dropout", number, *self.group.stream), self.device)
            # where nothing is clipped, the norm is one more pass over the gradients for metrics.jsonl alone
            result = self.algorithms[0].step(number - begin, batch, self.loss, with_norm=is_logged)

            # before the step counts: an update from such a gradient gets into no line and no checkpoint
            self._check_finite({"loss": result.loss_nats, **result.details}, number)
            self.step = number
            self.loss_sum += result.loss_nats
            self.loss_count += 1
            if is_logged:
                # this may end the stage, at its target
                self._log(index, result)
            self.timing.tick(number, result.loss_nats, num_tokens)

            if self.stages.num_ended(self.step) > index and len(self.algorithms) > 1:
                # before the checkpoint, which is then that of a stage that begins: without an optimizer's state
                self.algorithms.popleft().optimizer.to_evaluated()
            is_due = self.group.is_main and self.timing.save_is_due(self.config.save_every_seconds)
            # saving puts shards together, so that all must agree; one sum answers both questions
            stop, is_due = self.group.any(interrupted(), is_due)
            if stop or is_due or self.step in self.kept_steps:
                self._save()
        return stop

    def _check_finite(self, values: Mapping[str, float], number: int) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                newest = max(self.run.steps(), default=None)
                saved = "no checkpoint was saved" if newest is None else f"the checkpoint of step {newest} is kept"
                raise IsolossError(
                    f"the {name} at step {number} is {value}: lower the learning rate or lengthen the warm-up ({saved})"
                )

    def next_update(self) -> dict[str, torch.Tensor]:
        """Return what a further step of the last stage adds to the weights, by parameter; nothing is written.

        These are the weights that are trained, also where an average of them is saved and measured.
        """
        last, number = len(self.stages.configs) - 1, self.step + 1
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        counted, stage = number - self.stages.begin(last), self.stages.configs[last]
        inputs, _ = training_batch(self.language, stage, number, device=self.device)
        seed_dropout(derive(self.config.seed, "dropout", number, *self.group.stream), self.device)
        if stage.optimizer.schedule != "constant":
            counted = min(counted, stage.steps)  # beyond the last step of a decay the rate is 0
        self.algorithms[0].step(counted, inputs, self.loss, with_norm=False)
        return {name: after.detach() - before[name] for name, after in self.model.named_parameters()}

    # --- files: at the start, a line, a checkpoint, at the end

    def _open(self, until_the_end: contextlib.ExitStack) -> None:
        """Bring the directory to where training goes on from."""
        # only now that initial weights which do not fit were refused: a mistake makes no run
        self.run.create(self.config)
        files.remove_unfinished(self.run.path)
        # now, as result.json lists them all, and a missing one would otherwise be noticed at the very end
        made = sorted(step for step in self.kept_steps if step < self.step)
        if missing := [step for step in made if not self.run.checkpoint(step).is_dir()]:
            raise IsolossError(
                f"{self.run.path} lacks the checkpoint of step {missing[0]}: "
                "delete the later ones too, and training makes them again"
            )
        for step in made:
            # this refuses what was damaged since it was written
            checkpoints.read_state(self.run.checkpoint(step))
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
        # a process that was killed between saving one and removing the one before leaves both
        checkpoints.remove_except(self.run, {*self.kept_steps, self.step})
        # a line every `log_every` steps, and one at the end of each stage
        every, ends = self.config.log_every, self.stages.ends
        num_lines = self.step // every + sum(end <= self.step and end % every != 0 for end in ends)
        _truncate_metrics(self.run, self.step, num_lines, self.metrics_sha256)
        if self.config.tensorboard:
            # after metrics.jsonl was cut, as TensorBoard begins with its lines
            self.tensorboard = TensorBoard(self.run)
            # however training ends, it writes what it has
            until_the_end.callback(self.tensorboard.close)

    def _log(self, index: int, result: StepResult) -> None:
        """Add a line to metrics.jsonl; in a run with stages, compare with the target of the stage, and end it there."""
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

    def _measured(self, measure: Measure) -> Mapping[str, float]:
        """Return what `measure` says of the model in rank 0, and nothing elsewhere."""
        with self.algorithms[0].optimizer.evaluated():
            model = self.parallel.full_model()
            if model is None:
                return {}
            # a copy that was put together from shards is on the CPU
            model.to(self.device)
            # each step seeds its own random state, so none has to be kept
            with without_dropout(model):
                return measure(model)

    def _validated(self, index: int) -> Mapping[str, float]:
        """Compare the model with the target of its stage, if this is one of the steps for that; return the values.

        If it reaches the target, the stage ends.
        """
        target = self.stages.target(index, self.step)
        if target is None or self.validate is None:
            return {}
        what, nats = target
        # these are empty but in rank 0, which decides
        values = self._measured(partial(self.validate, what))
        (is_reached,) = self.group.any(self.group.is_main and values[f"validation_{what}_nats"] <= nats)
        if is_reached:
            self.stages.reached.append(self.step)
        return values

    def _append(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl and to TensorBoard."""
        files.append_json(self.run.path / "metrics.jsonl", line)
        if self.tensorboard is not None:
            self.tensorboard.log(line)
        if "stage_ended" in line:
            self.run.log("stage ended", stage=line["stage"], step=line["step"], why=line["stage_ended"])

    def _save(self) -> None:
        """Save this step, and drop the checkpoints that were only there to go on from."""
        # all processes put the shards together, then rank 0 writes
        # before the model has the weights that are evaluated: the state has those that are trained
        tensors = self._algorithm_state()

        def write(model: Any) -> None:
            state = TrainerState(
                step=self.step,
                config=configs.identity(self.config),
                loss_sum_nats=self.loss_sum,
                loss_count=self.loss_count,
                initial_sha256=self.initial_sha256,
                targets_reached=self.stages.reached,
                metrics_sha256=_flush_metrics(self.run),
            )
            tokenizer = getattr(self.language, "tokenizer", None)
            checkpoints.save(self.run.checkpoint(self.step), model, tensors, state, tokenizer=tokenizer)
            # only now: killed at any moment, the run has a whole checkpoint
            checkpoints.remove_except(self.run, {*self.kept_steps, self.step})

        with self.algorithms[0].optimizer.evaluated():
            model = self.parallel.full_model()
            self.group.on_main(lambda: write(model))
        self.timing.saved()

    def _algorithm_state(self) -> dict[str, torch.Tensor]:
        """Return the algorithm's state, which a file of tensors must be able to hold."""
        state = self.algorithms[0].state()
        # `algorithms` are those of the last stages
        kind = self.stages.configs[-len(self.algorithms)].algorithm.kind
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise IsolossError(
                    f"the state of the training algorithm {kind} has a {type(value).__name__} under {name!r}; it must "
                    "have tensors by name"
                )
        return state

    def _close(self) -> None:
        """Write the result if all steps are made, and the throughput."""
        if is_complete := self.stages.is_last(self.step):
            kept = [step for step in sorted(self.kept_steps) if step <= self.step]
            names = ["metrics.jsonl", *(f"checkpoints/step-{step}/{TRAINER}" for step in kept)]
            files.write_sealed(
                # written last: where it is, the run is complete
                self.run.path / "result.json",
                {
                    "fingerprint": configs.fingerprint(self.config),
                    "steps": self.step,
                    "loss_nats": self.run.metrics()[-1]["loss_nats"],
                    "num_parameters": self.model.num_parameters(),
                    "dtype": str(self.model.dtype).removeprefix("torch."),
                    "initial_sha256": self.initial_sha256,
                    # steps of `checkpoints` that an early end of a stage left out are not among them
                    "checkpoints": {str(step): checkpoints.weights_sha256(self.run.checkpoint(step)) for step in kept},
                    "sha256": {name: files.sha256(self.run.path / name) for name in names},
                    **({"stages": self.run.stages()} if self.config.stages else {}),
                },
            )
        self.timing.report(last=True)
        self.run.log(
            "complete" if is_complete else "interrupted",
            step=self.step,
            seconds=self.timing.seconds(),
            tokens_per_second=self.timing.tokens_per_second(),
        )


# --- what is refused before anything is written


def check_request(
    config: TrainConfig, language: Language, *, measure: Measure | None, validate: Validate | None
) -> None:
    """Refuse a config that cannot be trained, or that asks for measurements without a `measure` or `validate`."""
    configs.check(config)
    # numba draws sentences, orders and masks
    for package in ("numba", *["tensorboard"] * config.tensorboard):
        require_package(package)
    for stage in config.stage_configs():
        objectives.check_language(stage.objective, language)
        # its package may not be installed
        OPTIMIZERS.load(stage.optimizer.name)
    check_training_set(config, language)
    if validate is None and any(stage.target for stage in config.stages):
        raise IsolossError(
            "a stage has a target, and nothing measures how far it is: isoloss.pretrain does, "
            "isoloss.lab.training.train.train takes validate as an argument"
        )
    if config.measure_every and measure is None:
        raise IsolossError(
            f"measure_every is {config.measure_every}, and there is no measure: isoloss.pretrain makes one, "
            "isoloss.lab.training.train.train takes it as an argument"
        )


def check_memory(config: TrainConfig, language: Language, device: torch.device, num_processes: int = 1) -> None:
    """Refuse a model or batches that need more memory than the machine has, by a lower bound of the need."""
    architecture = MODELS.load(config.model.architecture)
    size = max(stage.batch_size for stage in config.stage_configs()) // num_processes
    # an accelerator has memory of its own for activations; the model and the batches are made here all the same
    in_a_pass = min(size, config.micro_batch_size or size) if device.type == "cpu" else 0
    length = language.max_length
    shape = architecture.shape(config.model)
    needed = architecture.least_memory(shape, language.model_vocab_size, length, num_tokens=in_a_pass * length)
    # ids, mask and labels, 8 bytes each
    needed += 3 * 8 * size * length
    check_fits(needed, f"the model {config.model} on batches of {size:,} sentences is too large")


def check_compiled(device: torch.device, group: ProcessGroup) -> None:
    """Refuse to train with the compiled step where it cannot run."""
    if group.world_size > 1:
        raise IsolossError(f"compiled is on, which takes one process, and these are {group.world_size}")
    if device.type != "cpu":
        raise IsolossError(f"compiled is on, which takes a CPU, and the device is {device}: name the device cpu")


def is_complete(run: Run, config: TrainConfig, group: ProcessGroup) -> bool:
    """Return whether `run` is complete, in all processes of `group` together; one of another config is refused."""
    if not group.from_main(run.complete):
        return False
    # of a run that exists, this compares the configs and writes nothing
    group.on_main(lambda: run.create(config))
    return True


# --- stages, time and metrics.jsonl


class Stages:
    """The stages of a run; a run without stages has one, itself. An index counts from 0, a step from the start."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.configs = config.stage_configs()  # each stage as the config of a run of its own
        self.reached: list[int] = []  # steps at which a stage ended at its target

    @property
    def ends(self) -> tuple[int, ...]:
        """The last step of each stage; of future stages, as if no further target were reached."""
        return self._config.stage_ends(self.reached)

    def begin(self, index: int) -> int:
        """Return the number of steps before a stage."""
        return self.ends[index - 1] if index else 0

    def num_ended(self, step: int) -> int:
        """Return how many stages have ended after `step` steps, which is the index of the next one."""
        return sum(end <= step for end in self.ends)

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this step."""
        return self.num_ended(step) == len(self.configs)

    def target(self, index: int, step: int) -> tuple[str, float] | None:
        """Return what the model is compared with after `step`, a step of this stage; None: it is not compared."""
        stage = self._config.stages[index]
        return stage.target if step % stage.validate_every == 0 or step == self.ends[index] else None

    def ended(self, index: int, step: int) -> str | None:
        """Return why a stage ended with this step; None: it did not."""
        if step != self.ends[index]:
            return None
        if self._config.stages[index].target is None:
            return "steps done"
        return "target reached" if step in self.reached else "target not reached"


class Timing:
    """Decides by the time when to report and when to save, and measures the throughput."""

    def __init__(self, step: int, steps: int, progress: Callable[[Progress], None] | None) -> None:
        self._step, self._steps, self._progress = step, steps, progress
        self._start = self._reported = self._saved = time.monotonic()
        self._num_tokens, self._loss_sum, self._loss_count = 0, 0.0, 0

    def tick(self, step: int, loss_nats: float, num_tokens: int) -> None:
        """Count a step, and report if it is time."""
        self._step = step
        self._num_tokens += num_tokens
        self._loss_sum += loss_nats
        self._loss_count += 1
        self.report()

    def report(self, *, last: bool = False) -> None:
        """Call `progress` if it is time, or if this is the `last` call and there are steps it does not know of."""
        now = time.monotonic()
        if self._progress is None or self._loss_count == 0 or not (last or now - self._reported >= REPORT_SECONDS):
            return
        loss_nats = self._loss_sum / self._loss_count
        self._loss_sum, self._loss_count, self._reported = 0.0, 0, now
        self._progress(Progress(self._step, self._steps, loss_nats, self.tokens_per_second(), self.seconds()))

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def tokens_per_second(self) -> float:
        """Tokens seen since the start, by its seconds."""
        return self._num_tokens / max(self.seconds(), 1e-9)

    def save_is_due(self, every_seconds: float) -> bool:
        """Whether the last save was `every_seconds` ago."""
        return time.monotonic() - self._saved >= every_seconds

    def saved(self) -> None:
        """Note that a checkpoint was written."""
        self._saved = time.monotonic()


def _flush_metrics(run: Run) -> str:
    """Bring metrics.jsonl to the disk, as a checkpoint must not outlive the lines before it; return its SHA-256."""
    path = run.path / "metrics.jsonl"
    # without a line yet, the hash of nothing, which `_truncate_metrics` computes too
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return files.sha256(path)


def _truncate_metrics(run: Run, step: int, count: int, sha256: str) -> None:
    """Keep the `count` lines up to `step`; a killed process may have left more, and half a line after them.

    Refuse lines that are not there, not of these steps, or of another SHA-256; empty: the checkpoint does not say.
    """
    path = run.path / "metrics.jsonl"
    content = path.read_bytes() if path.exists() else b""
    lines = content.splitlines(keepends=True)[:count]
    try:
        complete = len(lines) == count and all(json.loads(line)["step"] <= step for line in lines)
    except (ValueError, KeyError, TypeError):
        complete = False
    remaining = b"".join(lines)
    if not complete or (sha256 and hashlib.sha256(remaining).hexdigest() != sha256):
        raise IsolossError(
            f"{path} is damaged: its first {count} lines are not those of the {step} steps that were made; "
            "restore the file, or delete the run to start it again"
        )
    if len(content) > len(remaining):
        files.write_bytes(path, remaining)
