"""Runs trained together by one process, as rows of one stack: each has its own directory, steps, losses and end.

A run of a stack has the same bytes whatever it is stacked with, alone included: its loss and gradient are computed by
themselves (`isoloss.models.stacked_kernels`), and all else is what a run of its own does.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.languages.pcfg.inside_outside import choose_backend
from isoloss.models.make import make_model
from isoloss.models.stacked import Stack
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.training.algorithms.base import StepResult, TrainingAlgorithm, no_task_examples
from isoloss.training.data_parallel import SingleProcess
from isoloss.training.distributed import ProcessGroup, process_group
from isoloss.training.loop import (
    Interrupted,
    Measure,
    Step,
    Training,
    Validate,
    check_memory,
    check_request,
    is_complete,
)
from isoloss.training.optimizers import RowOptimizer
from isoloss.training.process import one_blas_thread, process_settings, signals
from isoloss.training.throughput import Progress


@dataclass(frozen=True, eq=False)
class Member:
    """A run of a stack; the fields are the arguments of `isoloss.training.trainer.train`."""

    run: Run
    config: TrainConfig
    language: Language
    progress: Callable[[Progress], None] | None = None
    measure: Measure | None = None
    validate: Validate | None = None


class StackError(IsolossError):
    """Some runs of a stack failed; the others went on to their end.

    Attributes:
        errors: By the run's name.
    """

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in errors.items()))
        self.errors = errors


def train_together(members: Sequence[Member]) -> None:
    """Train runs with `stacked` until all are complete, each from its newest checkpoint if it has one.

    The runs are of one model shape and may differ in everything else: seeds, languages, labels, stages, optimizers,
    batch sizes. A run that ends, at its last step or because it fails, is done with, and the others go on. Each
    is what `isoloss.training.trainer.train` makes of it alone, bit for bit.

    Raises:
        IsolossError: A run that `train` refuses, runs of different shapes, the same run twice, several processes, or no
            CPU to train on. If runs fail while they are trained, the message has all of them.
        Interrupted: A signal came; all runs are saved.
    """
    for member in members:
        check_request(member.config, member.language, measure=member.measure, validate=member.validate)
        if not member.config.stacked:
            raise IsolossError(f"the config of {member.run.path} has stacked = false: only stacked runs train together")
    with process_group() as group, contextlib.ExitStack() as held:
        if choose_backend(torch.device("cpu")) != "numba":
            raise IsolossError("a stacked run is trained by compiled loops, which need the package numba")
        if group.world_size > 1:
            raise IsolossError(f"a stacked run trains in one process, and these are {group.world_size}")
        for member in members:
            if (device := group.device(member.config.device)).type != "cpu":
                raise IsolossError(f"a stacked run trains on the CPU, and the device is {device}: name the device cpu")
            check_memory(member.config, member.language, device)
        left = [member for member in members if not is_complete(member.run, member.config, group)]
        for member in left:
            member.run.check_folder()
            held.enter_context(files.lock(member.run.path))
            if member.run.exists:
                member.run.create(member.config)
        left = [member for member in left if not member.run.complete]
        if left:
            with process_settings(1, torch.device("cpu")), one_blas_thread():
                _train(left, group)


def _train(members: Sequence[Member], group: ProcessGroup) -> None:
    """Train runs that are not complete, whose locks are held."""
    template = make_model(members[0].config.model, members[0].language, seed=members[0].config.seed)
    stack = Stack(template, len(members))
    errors: dict[str, str] = {}
    interruptions: list[Interrupted] = []
    with signals() as interrupted, contextlib.ExitStack() as held:
        rows: list[_Row] = []
        for number, member in enumerate(members):
            try:
                training = _Row.of(member, group, stack, number)
            except IsolossError as error:
                errors[member.run.name] = str(error)
                continue
            training.left = held.enter_context(contextlib.closing(training.steps(interrupted)))
            rows.append(training)
        while rows:
            ready: list[tuple[_Row, Step]] = []
            for training in rows:
                try:
                    if (step := next(training.left, None)) is not None:
                        ready.append((training, step))
                except Interrupted as stop:
                    interruptions.append(stop)
                except IsolossError as error:
                    errors[training.run.name] = str(error)
            rows = [training for training, _ in ready]
            _make(stack, ready)
    if errors:
        raise StackError(errors) if len(members) > 1 else IsolossError(*errors.values())
    if interruptions:
        raise min(interruptions, key=lambda stop: stop.step)


def _make(stack: Stack, ready: Sequence[tuple[_Row, Step]]) -> None:
    """Make one step of each run; those whose batches have one shape are computed by one call."""
    groups: dict[Any, list[tuple[_Row, Step]]] = defaultdict(list)
    for training, step in ready:
        groups[step.batch["input_ids"].shape, "targets" in step.batch].append((training, step))
    for group in groups.values():
        losses = stack.loss_and_gradient(
            [training.row for training, _ in group],
            [step.batch for _, step in group],
            [step.dropout_seed for _, step in group],
        )
        for (training, step), loss_nats in zip(group, losses, strict=True):
            update = training.algorithms[0].optimizer.update(step.of_stage, with_norm=step.is_logged)
            step.result = StepResult(loss_nats, *update, {})


@dataclass(eq=False)
class _Row(Training):
    """The work on a run whose weights are a row of a stack."""

    stack: Stack
    row: int

    left: Generator[Step] = None  # type: ignore[assignment]  # the steps, once they have begun

    @classmethod
    def of(cls, member: Member, group: ProcessGroup, stack: Stack, row: int) -> _Row:
        """Return the work on a run.

        Raises:
            IsolossError: It cannot go on, or its model is of another shape than the stack's.
        """
        m, cpu = member, torch.device("cpu")
        return cls(
            m.run, m.config, m.language, cpu, group, m.progress, no_task_examples, m.measure, m.validate, stack, row
        )

    def _make_parallel(self) -> SingleProcess:
        if not self.stack.fits(self.model):
            raise IsolossError(
                f"the model of {self.run.path} is not of the shape of the others': runs that train together have one "
                "architecture, shape, dropout and vocabulary size"
            )
        self.stack.read(self.row, self.model)
        return _OfRow(self.model, self.stack, self.row)

    def _build(self, stage: TrainConfig, context: Any) -> TrainingAlgorithm:
        made = TrainingAlgorithm(self.model, context)
        made.optimizer = RowOptimizer(self.stack, self.row, stage.optimizer, total=stage.steps)
        return made

    def _update_average(self) -> None:
        if self.config.ema:
            self.stack.write(self.row, self.model)
        super()._update_average()

    def _computed_by(self) -> str:
        return "stacked"


class _OfRow(SingleProcess):
    """A model whose weights are brought up to date when it is asked for."""

    def __init__(self, model: Any, stack: Stack, row: int) -> None:
        super().__init__(model)
        self._stack, self._row = stack, row

    def full_model(self) -> Any:
        """Return the model with the row's weights."""
        self._stack.write(self._row, self._model)
        return self._model
