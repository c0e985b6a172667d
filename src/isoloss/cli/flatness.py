"""`isoloss flatness`: the flatness of Hugging Face masked or causal language models, with its error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import config as configs
from isoloss import files, interrupts
from isoloss.cli import common, estimates
from isoloss.cli.options import measure_configs, select, with_options
from isoloss.errors import IsolossError
from isoloss.evaluation.config import ReadingConfig
from isoloss.evaluation.measures.flatness import FlatnessMeasure
from isoloss.runs import Run

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext, ModelInfo
    from isoloss.evaluation.flatness import FlatnessResults
    from isoloss.loading import Loaded

EXAMPLES = [
    ("isoloss flatness CHECKPOINT --data text.txt", "a checkpoint with its tokenizer, on your text"),
    ("isoloss flatness CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss flatness A B C --data text.txt", "which of several is the flattest, on the same inputs"),
    ("isoloss flatness A B --data text.txt --figure ab.svg", "with a figure: trace against loss"),
    ("isoloss flatness A B --data text.txt --measures trace largest-eigenvalue fisher-rao", "other measures too"),
    ("isoloss flatness runs/first/checkpoints/step-1000", "a checkpoint of a run, on the run's own language"),
    ("isoloss flatness CHECKPOINT --data text.txt --num-inputs 100000 --rtol 0.01", "until the error is 1 %"),
]


@dataclass(frozen=True)
class Args:
    """Flatness of the loss per predicted token, by default the trace of the Fisher: the paper's. Smaller is flatter.

    That trace equals the trace of the Hessian where the model's conditionals are the true ones. Several models are
    measured one after another on the same inputs with the same Rademacher signs, and compared. Compare models of one
    architecture, at about the same loss.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """One or more checkpoint folders or names on the Hugging Face hub (NAME@REVISION)."""
    measures: tuple[str, ...] = ("trace",)
    """Measures of flatness (isoloss ls measures)."""
    data: Path | None = None
    """Text (.txt, .jsonl or a folder), or token ids (.npy); for a checkpoint of a run: default, the run's language."""
    num_inputs: int = 512
    """Sequences to measure on, at most; the tokens of all others in --data make the error smaller."""
    rtol: float | None = None
    """Stop when the standard error is at most this fraction of the value; checked after 64, 128, 256, ... sequences or
    documents. The first of several models decides."""
    seconds: float | None = None
    """Stop after this time, if 64 sequences or documents are done. The first of several models decides."""
    resume: Path | None = None
    """For one measure of one model: a file to resume from, written every half minute and removed at the end."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    by_layer: bool = False
    """Print the part of each layer."""
    by_parameter: bool = False
    """Print the part of each parameter."""
    figure: Path | None = None
    """For the traces of several models: draw trace against loss to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    own = [config for config in measure_configs() if issubclass(config, FlatnessMeasure)]
    cls = with_options(Args, exclude=("trace_sentences",), reading=[ReadingConfig], settings=own)
    args: Any = common.parse(cls, "flatness", arguments, examples=EXAMPLES)
    settings = {**vars(args.settings), "trace_sentences": args.num_inputs}
    _check(args)
    common.use_threads(args.threads)
    from isoloss.evaluation.context import ModelInfo
    from isoloss.evaluation.flatness import flatness_measure, measure_flatness
    from isoloss.flatness.engine.run import Stopping

    Stopping(rtol=args.rtol, seconds=args.seconds)  # refuses a value out of range before a model is loaded
    for name in args.measures:
        flatness_measure(name, settings)
    models = [ModelInfo.of(_load(args, name)) for name in args.models]
    context = _context(args, models)
    inputs = context.inputs(args.num_inputs, args.settings.seed)
    for model in models:
        common.note(f"{model.name}: {model.architecture}, {model.kind}; {inputs.description}")
    with common.Progress("loading", None) as bar:
        current = ("", "")

        def show(measure: str, model: str, done: int) -> None:
            nonlocal current
            if current != (measure, model):
                current = measure, model
                bar.begin(measure, *flatness_measure(measure, settings).amount(inputs.num_sequences))
            bar(done, model)

        results = measure_flatness(
            {name: partial(_model, args, name) for name in args.models},
            args.measures,
            context,
            settings=settings,
            progress=show,
        )
    if args.figure is not None and "trace" in results.comparisons:
        from isoloss.report.flatness import trace_against_loss

        traces: Any = results.comparisons["trace"]
        short = estimates.short_names([model.name for model in traces.models])
        common.save_figure(args.figure, trace_against_loss(traces, short))
    if args.json:
        document = results.to_dict()
        architectures = {model.name: {"architecture": model.architecture} for model in models}
        document["models"] = [{**model, **architectures[model["model"]]} for model in document["models"]]
        common.emit_json({"data": inputs.description, "measures": list(args.measures), **document})
    else:
        _print(args, results)
    return 0 if results.interrupted is None else interrupts.status()


def _check(args: Any) -> None:
    """Refuse what needs no model to be seen as wrong."""
    if not args.models:
        raise IsolossError("no checkpoint is named: give a folder, or a name on the Hugging Face hub")
    if args.num_inputs < 2:
        raise IsolossError(f"--num-inputs is {args.num_inputs}; an error bar needs at least 2")
    for name in args.models:
        if (run := Run(Path(name))).exists:
            steps = run.steps()
            raise IsolossError(
                f"{name} is a run, and flatness is a checkpoint's: "
                + (f"name {run.checkpoint(steps[-1])}" if steps else "it has none yet")
            )
    common.check_distinct(args.models)
    if args.figure is not None and (len(args.models) == 1 or "trace" not in args.measures):
        raise IsolossError("--figure shows the traces of several models beside each other: name more, or leave it out")
    common.check_figure(args.figure)
    if args.resume is not None:
        files.check_writable(args.resume.parent)


def _load(args: Any, name: str) -> Loaded:
    import torch

    from isoloss.loading import load_model

    return load_model(
        name,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        attention=args.attention,
        trust_remote_code=args.trust_remote_code,
    )


def _model(args: Any, name: str) -> Any:
    return _load(args, name).model


def _context(args: Any, models: list[ModelInfo]) -> MeasureContext:
    from isoloss.evaluation import context as contexts

    reading = select(args.reading, ReadingConfig)
    configs.check(reading)
    shuffled = args.rtol is not None or args.seconds is not None  # it may stop before the end of the inputs
    if args.data is not None:
        context = contexts.data_context(args.data, models, reading, shuffled=shuffled)
    else:
        config = contexts.common_run_config(args.models)
        context = contexts.language_context(config.language, config.objective, models, reading, shuffled=shuffled)
    context.rtol, context.seconds, context.resume = args.rtol, args.seconds, args.resume
    return context


def _print(args: Any, results: FlatnessResults) -> None:
    from isoloss.flatness.differences import Comparison

    if results.interrupted is not None:
        measure, model, partial_estimate = results.interrupted
        so_far = ""
        if partial_estimate is not None:
            so_far = f"; the estimate from the first {partial_estimate.details['sequences']:,} sequences:"
        common.note(f"interrupted while {measure} of {model} was measured{so_far}")
        if partial_estimate is not None:
            common.say(f"{measure} of {model} so far: {partial_estimate}")
            if len(args.models) == 1:
                estimates.print_details(args, partial_estimate)
    for number, measure in enumerate(args.measures):
        if number:
            common.say("")
        compared = results.comparisons.get(measure)
        if isinstance(compared, Comparison):
            estimates.print_tables(compared)
        elif compared is not None:
            common.say(str(compared))
        for model, by_measure in results.estimates.items():
            for name, estimate in by_measure.get(measure, {}).items():
                if len(args.models) == 1:
                    common.say(f"{name}: {estimate}")
                    estimates.print_details(args, estimate)
                elif (args.by_layer or args.by_parameter) and estimate.by_parameter:
                    common.say(f"\n{name} of {model}: {estimate}")
                    estimates.print_parts(args, estimate)
