"""Evaluating checkpoints: registered measures, on the runs of isoloss and on anyone's models.

The evaluations of a run are files in its folder, a pure function of checkpoint and settings; what is there already is
not measured again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from isoloss import config as configs
from isoloss import files, machine
from isoloss.checkpoints import places
from isoloss.errors import IsolossError, warn
from isoloss.lab.evaluation.external import ExternalRun
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import MeasureResult, make_measure, settings_of
from isoloss.registry import MEASURES
from isoloss.run_config import ObjectiveConfig
from isoloss.runs import Evaluation, Run, checkpoint_of, refuse_study, refuse_twice
from isoloss.statistics.estimate import Estimate, accuracy_bounds, html_table, rounded, samples_of
from isoloss.statistics.tables import Tabular, text_table
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import Checkpoints, MeasureContext, ModelInfo

DEFAULT = ("loss", "trace")
HEADER = ("measure", "estimate", "value ± standard error", "averaged over", "error over")

Progress = Callable[[int, int, str], None]  # evaluations done, all of them, and the one in work
Settings = Mapping[str, Any]
Step = int | Literal["last"]


class InterruptedEvaluation(KeyboardInterrupt):
    """Ctrl-C while checkpoints are measured on data or on a language.

    Attributes:
        complete: The evaluations that were done.
        name: The measure and the model in work.
        partial: The estimate so far; None where there was no error yet.
    """

    def __init__(self, complete: Evaluations, name: str, partial: Estimate | None) -> None:
        super().__init__(f"interrupted while {name} was measured")
        self.complete, self.name, self.partial = complete, name, partial


def evaluate(
    models: str | Path | Sequence[str | Path],
    measures: str | Sequence[str] | None = None,
    *,
    data: str | Path | None = None,
    language: Any = None,
    objective: ObjectiveConfig | None = None,
    inputs: InputConfig | None = None,
    steps: Step | Sequence[Step] = (),
    settings: Settings | None = None,
    output: str | Path | None = None,
    device: str = "auto",
    dtype: str = "float32",
    attention: str = "auto",
    module: str | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    trust_remote_code: bool = False,
    ignore_unexpected_weights: bool = False,
    on_inputs: Callable[[Sequence[ModelInfo], MeasureContext], None] | None = None,
    progress: Progress | None = None,
) -> Evaluations:
    """Measure checkpoints of runs on their own language, or any checkpoints on text or on a language.

    Args:
        models: Run folders, checkpoint folders, or names on the Hugging Face hub (`NAME@REVISION`).
        measures: Names of `isoloss.registry.MEASURES`, e.g. `loss`, `probe-root`, or one of them; None: `loss` and
            `trace`, or those of the two that apply.
        data: Text (.txt, .jsonl, a folder or a dataset hf:NAME), or token ids (.npy). With it or a `language` no run's
            files are written.
        language: A language's name or path (see `isoloss.lab.languages.resolve`), or its config.
        objective: What is predicted of the sentences of `language`; None: one masked token, or next tokens, as the
            model is.
        inputs: How `data` is read; `length` also for a language's path, as for `isoloss.lab.languages.resolve`.
        steps: Of runs, the step or steps to measure, `"last"` for the last one; none: all that have a checkpoint.
        settings: How much is measured and how, by the names of the measures' fields, e.g. `{"loss_sentences": 1000}`.
        output: For `data` or a `language`: a folder for the files that a run has in its `evaluations`.
        device: auto, cpu, cuda, cuda:1, mps.
        dtype: For `data` or a `language`: the type of the weights.
        attention: For `data` or a `language`: the kernel, as for `isoloss.load_model`.
        module: For files of weights: `FILE.py:NAME`, as for `isoloss.load_model`.
        rtol: For measures of flatness, on `data` or a `language`: stop when the standard error is at most this fraction
            of the value.
        seconds: For the same: stop after this time.
        trust_remote_code: Whether code that comes with a checkpoint may run.
        ignore_unexpected_weights: Whether to leave out weights that a checkpoint has and the model of its config.json
            does not, as for `isoloss.load_model`.
        on_inputs: For `data` or a `language`: called once with the models and with the context of their measurement.
        progress: Called with how many evaluations are done and to be done, and with the one in work.

    Returns:
        The evaluations, those of one model by step; `print` shows a table.

    Raises:
        IsolossError: An unknown measure, setting, run or checkpoint, or a measure that does not apply.
        InterruptedEvaluation: Ctrl-C; it carries the evaluations that are complete. Those of runs are in files.

    Example:
        >>> from isoloss import evaluate
        >>> import tempfile
        >>> from isoloss.lab.models.make import make_model
        >>> from isoloss.lab.languages.config import BracketsConfig
        >>> from isoloss.run_config import ModelConfig
        >>> config = BracketsConfig(length=4)
        >>> few = {"num_sequences": 32}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     make_model(ModelConfig(size="d16"), config.build(), seed=0).save_pretrained(folder)
        ...     found = evaluate(folder, ["squared-norm", "trace"], language=config, settings=few)
        >>> [(evaluation.measure, evaluation.estimates[evaluation.measure].value > 0) for evaluation in found]
        [('squared-norm', True), ('trace', True)]
    """
    names = [str(models)] if isinstance(models, str | Path) else [str(name) for name in models]
    measures = [measures] if isinstance(measures, str) else measures
    steps = [steps] if isinstance(steps, int | str) else steps
    inputs = inputs or InputConfig()
    if not names:
        raise IsolossError("no model is named: give a run, a checkpoint folder or a name on the Hugging Face hub")
    if measures is not None and not measures:
        raise IsolossError(f"no measure is named; the measures are {', '.join(MEASURES)}")
    for name in measures or DEFAULT:
        # a mistake in a name or a setting is refused before anything is loaded
        make_measure(name, settings)
    machine.check_device(device)
    if data is None and language is None:
        if output is not None:
            raise IsolossError("the evaluations of a run are kept in its folder: output is for data or a language")
        if objective is not None or dtype != "float32":
            unused = "objective" if objective is not None else f"dtype {dtype}"
            raise IsolossError(
                f"{unused} is for data or a language: a run is measured on its own language, as it was trained, and in "
                "float32"
            )
        inputs.check_run(names[0], "batch_size")
        for name in names:
            if not Path(name).is_dir():
                places.check_checkpoint(name)
        parts = [(name, *_checkpoints_of(Path(name), steps)) for name in names]
        return _evaluate_runs(parts, measures, settings, device, progress)
    if steps:
        raise IsolossError("steps are those of a run that is measured on its own language: name checkpoints instead")
    if data is not None and language is not None:
        raise IsolossError("data and a language are given: a model is measured on one of the two")
    inputs.check()
    refuse_twice(names)
    for name in names:
        places.check_reachable(name, module)
    if data is not None:
        hub_datasets.check_data(data)
    else:
        from isoloss.lab.languages.config import resolve

        if not isinstance(language, configs.LanguageConfig):
            language = resolve(str(language), length=inputs.length)
            inputs = dataclasses.replace(inputs, length=None)
    folders = None if output is None else _folders(Path(output), names)
    import torch

    from isoloss.lab.evaluation import context as contexts

    checkpoints = contexts.Checkpoints(
        {name: name for name in names},
        device=device,
        dtype=getattr(torch, dtype),
        attention=attention,
        module=module,
        trust_remote_code=trust_remote_code,
        ignore_unexpected_weights=ignore_unexpected_weights,
        words=() if data is not None or language.is_finite else language.build().vocabulary,
    )
    infos = checkpoints.infos
    # a measurement that may stop early takes its inputs in random order, or it would be of the start of the data
    shuffled = rtol is not None or seconds is not None
    if data is not None:
        context = contexts.data_context(Path(data), infos, inputs, shuffled=shuffled)
    else:
        objective = objective or inputs.objective(infos[0].name, is_causal=infos[0].outline.causal, default="one")
        context = contexts.language_context(language, objective, infos, inputs, shuffled=shuffled)
    context.rtol, context.seconds = rtol, seconds
    chosen = _applying(measures, settings, context, ", ".join(names))
    # before the measures that come first are computed
    for name in (name for name in chosen if hasattr(make_measure(name, settings), "rescaling_granularity")):
        if reason := next((info.no_rescalings for info in infos if info.no_rescalings), None):
            raise IsolossError(f"{name} cannot be measured: {reason}")
    if on_inputs is not None:
        on_inputs(infos, context)
    return _evaluate_models(names, checkpoints, chosen, settings, context, folders, progress)


def _folders(output: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each checkpoint's files; two names may become one, without their special characters."""
    folders: dict[Path, str] = {}
    for name in names:
        folder = output / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model")
        if folder in folders:
            raise IsolossError(
                f"{folders[folder]} and {name} would both be kept in {folder}: measure them one after another, with an "
                "output for each"
            )
        folders[folder] = name
    return {name: folder for folder, name in folders.items()}


def _evaluate_models(
    names: Sequence[str],
    checkpoints: Checkpoints,
    measures: Sequence[str],
    settings: Settings | None,
    context: MeasureContext,
    folders: Mapping[str, Path] | None,
    progress: Progress | None,
) -> Evaluations:
    """Return the evaluations of checkpoints, each of which is loaded once, and write them into `folders`."""
    from isoloss.flatness import InterruptedEstimate

    done: list[tuple[str, Evaluation]] = []
    for name in names:
        model = checkpoints.model(name)
        weights = files.tensors_sha256(sorted(model.state_dict().items()))
        for measure in measures:
            work = f"{measure} of {name}"
            if progress is not None:
                so_far = functools.partial(progress, len(done), len(names) * len(measures))
                so_far(work)
                counted = make_measure(measure, settings).counted
                context.progress = lambda number, so_far=so_far, work=work, counted=counted: so_far(
                    f"{work}, {number:,} {counted}"
                )
            try:
                evaluation, examples = measured(measure, settings, model, context, step=None, weights=weights)
            except KeyboardInterrupt as stop:
                partial = stop.partial if isinstance(stop, InterruptedEstimate) else None
                raise InterruptedEvaluation(Evaluations.of(done), work, partial) from stop
            done.append((name, evaluation))
            if folders is not None:
                path = folders[name] / f"{measure}.json"
                files.write_bytes(path.with_suffix(".safetensors"), examples)
                files.write_sealed(path, {"model": name, **evaluation.to_dict()})
    return Evaluations.of(done)


# --- runs ------------------------------------------------------------------------------------------------------------


def pending(run: Run, measures: Sequence[str], steps: Sequence[int], settings: Settings) -> list[tuple[int, str]]:
    """Return the (step, measure) pairs that have no evaluation of these weights under these settings.

    One whose file is damaged, or whose file of examples is missing or is another one, counts as not made.
    """
    wanted = {measure: settings_of(measure, settings) for measure in measures}
    todo = []
    for step in steps:
        weights, model_files = run.weights(step), run.model_files(step)
        for measure in measures:
            try:
                done = run.evaluation(measure, step)
            except IsolossError as error:
                warn(f"{error}; it counts as not made")
                done = None
            if (
                done is None
                or (done.weights, done.settings) != (weights, wanted[measure])
                # an earlier version has not recorded them, and the checkpoint may be gone
                or (done.model_files and model_files and done.model_files != model_files)
                or not run.has_examples(done)
            ):
                todo.append((step, measure))
    return todo


class Evaluator:
    """Makes evaluations of one run; what its checkpoints share (exact targets, tasks, inputs) is made once."""

    def __init__(
        self, run: Run, settings: Settings | None = None, *, device: str = "cpu", context: MeasureContext | None = None
    ) -> None:
        from isoloss.lab.evaluation.context import run_context
        from isoloss.machine import resolve_device

        self.run, self.settings, self.device = run, settings or {}, resolve_device(device)
        if context is None:
            context = run.context(self.device) if isinstance(run, ExternalRun) else run_context(run.absolute_config)
        self.context = context
        self._go_to(max(run.steps(), default=0))
        # by step; `pending` goes step by step, so that one model is held and each is loaded once
        self._loaded: tuple[int, Any] | None = None

    def _go_to(self, step: int) -> None:
        """Tell the context, which runs on one language share, what is measured."""
        self.context.checkpoint = None if isinstance(self.run, ExternalRun) else (self.run, step)

    def evaluate(self, measure: str, step: int) -> Evaluation:
        """Measure, save the result to its file and return it."""
        start = time.perf_counter()
        evaluation, examples = self.measure(measure, step)
        self.run.save(evaluation, examples)
        folder = self.run.checkpoint(step)
        checkpoint = (folder.relative_to(self.run.path) if folder.is_relative_to(self.run.path) else folder).as_posix()
        self.run.log("evaluated", measure=measure, checkpoint=checkpoint, seconds=round(time.perf_counter() - start, 3))
        return evaluation

    def measure(self, measure: str, step: int) -> tuple[Evaluation, bytes]:
        """Return the evaluation of the checkpoint at `step`, and the file of its examples (see `Run.examples`)."""
        self._go_to(step)
        weights = self.run.weights(step)
        if reason := make_measure(measure, self.settings).why_not_applicable(self.context):
            raise IsolossError(f"{measure} of {self.run.path} cannot be measured: {reason}")
        if self._loaded is None or self._loaded[0] != step:
            from isoloss.checkpoints.loading import load_model

            self._loaded = (step, load_model(self.run.checkpoint(step), device=self.device).model)
        evaluation, examples = measured(
            measure, self.settings, self._loaded[1], self.context, step=step, weights=weights
        )
        return dataclasses.replace(evaluation, model_files=self.run.model_files(step)), examples


def measured(
    name: str, settings: Settings | None, model: Any, context: MeasureContext, *, step: int | None, weights: str
) -> tuple[Evaluation, bytes]:
    """Return the evaluation of a model by the measure called `name`, and the file of its examples."""
    from safetensors.numpy import save

    result = MeasureResult.of(name, make_measure(name, settings).run(model, context))
    examples = save(result.arrays())
    evaluation = Evaluation(
        measure=name,
        step=step,
        weights=weights,
        settings=settings_of(name, settings),
        estimates=result.estimates,
        inputs=result.inputs,
        examples=hashlib.sha256(examples).hexdigest(),
    )
    return evaluation, examples


def _applying(
    measures: Sequence[str] | None, settings: Settings | None, context: MeasureContext, what: str
) -> list[str]:
    """Return the measures that apply; by default those of `loss` and `trace` that do, and warn about the other."""
    chosen = []
    for name in measures or DEFAULT:
        reason = make_measure(name, settings).why_not_applicable(context)
        if reason is None:
            chosen.append(name)
        elif measures is not None:
            raise IsolossError(f"{name} of {what} cannot be measured: {reason}")
        else:
            warn(f"{name} is left out: {reason}")
    return chosen


def _checkpoints_of(path: Path, steps: Sequence[Step]) -> tuple[Run, Sequence[int]]:
    """Return the run that a path names, or one of whose checkpoints it names, and the steps to measure."""
    run = Run(path)
    external = ExternalRun(path)
    if external.exists:
        return external, tuple(0 if step == "last" else step for step in steps) or (0,)
    if run.exists:
        if chosen := tuple(run.last_step() if step == "last" else step for step in steps) or tuple(run.steps()):
            return run, chosen
        raise IsolossError(f"{path} has no checkpoint yet: isoloss train {path} goes on with it")
    checkpoint = checkpoint_of(path)
    if checkpoint is None:
        refuse_study(path)
        raise IsolossError(
            f"{path} is neither a run directory (it has no run.json) nor a checkpoint in one: to measure any other "
            f"checkpoint add --data or --language (in Python, data= or language=){files.nearest(path)}"
        )
    if steps:
        raise IsolossError(f"{path} is one checkpoint: leave out steps, or name the run, {checkpoint[0].path}")
    return checkpoint[0], (checkpoint[1],)


def _evaluate_runs(
    parts: Sequence[tuple[str, Run, Sequence[int]]],
    measures: Sequence[str] | None,
    settings: Settings | None,
    device: str,
    progress: Progress | None,
) -> Evaluations:
    """Return the evaluations of runs, of which those that are missing are made."""
    # evaluations that are damaged count as not made
    if damage := [
        problem for run in dict.fromkeys(run for _, run, _ in parts) for problem in run.damage(evaluations=False)
    ]:
        raise IsolossError("\n".join(damage))
    todo = [(name, run, pending(run, measures or DEFAULT, steps, settings or {})) for name, run, steps in parts]
    # runs on one language share inputs and targets, which take long to make
    contexts: dict[Any, MeasureContext] = {}
    total, done = sum(len(pairs) for *_, pairs in todo), 0
    for name, run, pairs in todo:
        if not pairs:
            continue
        # an external checkpoint reads its data with a tokenizer and to a length of its own
        shared: Any = run.path if isinstance(run, ExternalRun) else (run.absolute_config.language, run.config.objective)
        evaluator = Evaluator(run, settings, device=device, context=contexts.get(shared))
        contexts[shared] = evaluator.context
        wanted = dict.fromkeys(measure for _, measure in pairs)
        chosen = _applying(tuple(wanted) if measures else None, settings, evaluator.context, str(run.path))
        for step, measure in pairs:
            if measure in chosen:
                if progress is not None:
                    progress(done, total, f"{measure} of {name} at step {step}")
                evaluator.evaluate(measure, step)
            # `total` counts those that were left out, too
            done += 1
    # from the files, which also hold the evaluations that were made before
    return Evaluations.of(
        (name, evaluation)
        for name, run, steps in parts
        for step in steps
        for measure in measures or DEFAULT
        if (evaluation := run.evaluation(measure, step)) is not None
    )


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluations(Tabular, Sequence[Evaluation]):
    """Evaluations with the models that they are of; printing it gives a table."""

    models: tuple[str, ...]  # what the model of each evaluation is called
    evaluations: tuple[Evaluation, ...]  # the evaluations

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Evaluation]]) -> Self:
        """Return evaluations that come with the names of their models."""
        pairs = list(entries)
        return cls(tuple(model for model, _ in pairs), tuple(evaluation for _, evaluation in pairs))

    @overload
    def __getitem__(self, index: int) -> Evaluation: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Evaluation]: ...

    def __getitem__(self, index: int | slice) -> Evaluation | Sequence[Evaluation]:
        return self.evaluations[index]

    def __len__(self) -> int:
        return len(self.evaluations)

    def table(self) -> tuple[list[str], list[list[str]], int]:
        """Return the columns and rows of a table, and how many columns are text; several models stand side by side.

        Rows of one measure and estimate follow each other, so that models are easily compared.
        """
        several = len(set(self.models)) > 1
        steps = any(evaluation.step is not None for evaluation in self.evaluations)
        # measures in the order in which they were asked for
        order = {name: place for place, name in enumerate(dict.fromkeys(each.measure for each in self.evaluations))}
        rows: list[tuple[tuple[Any, ...], list[str]]] = []
        for model, evaluation in zip(self.models, self.evaluations, strict=True):
            measure, step = order[evaluation.measure], evaluation.step
            for place, (name, estimate) in enumerate(evaluation.estimates.items()):
                averaged_over = "examples" if estimate.unit == "accuracy" else "predicted tokens"
                cells = [
                    *([model] if several else []),
                    *(["" if step is None else str(step)] if steps else []),
                    evaluation.measure,
                    name,
                    f"{estimate}{_more(estimate)}",
                    f"{estimate.num_predictions:,} {averaged_over}" if estimate.num_predictions else "",
                    samples_of(estimate),
                ]
                # the checkpoints of one model are a course in time
                rows.append(((measure, place, model) if several else (step or 0, measure, place), cells))
        columns = [*(["model"] if several else []), *(["step"] if steps else []), *HEADER]
        return columns, [cells for _, cells in sorted(rows, key=lambda row: row[0])], len(columns) - 2

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each estimate, with its `model`, `step` and `measure`."""
        return [
            {"model": model, "step": each.step, "measure": each.measure, "estimate": name, **estimate.row()}
            for model, each in zip(self.models, self.evaluations, strict=True)
            for name, estimate in each.estimates.items()
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the evaluations as JSON types, each with its `model`."""
        pairs = zip(self.models, self.evaluations, strict=True)
        return [{"model": model, **evaluation.to_dict()} for model, evaluation in pairs]

    def __str__(self) -> str:
        header, rows, left = self.table()
        return text_table(header, rows, left=left)

    def __repr__(self) -> str:
        measures = ", ".join(dict.fromkeys(evaluation.measure for evaluation in self))
        return f"Evaluations({len(self)} of {', '.join(dict.fromkeys(self.models))}: {measures})"

    def _repr_html_(self) -> str:
        header, rows, _ = self.table()
        return html_table(rows, header)


def _more(estimate: Estimate) -> str:
    """Return what belongs beside an accuracy or a trace."""
    details: Mapping[str, Any] = estimate.details
    if "majority_rate" in details:
        return f" ({accuracy_bounds(details)})"
    if details.get("embeddings"):
        rest = rounded(details["without_embeddings"], details["without_embeddings_stderr"])
        return f" ({rest} without embeddings)"
    return ""
