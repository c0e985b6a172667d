"""`isoloss flatness`: the flatness of Hugging Face masked or causal language models, with its error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import config as configs
from isoloss import early_checks, files, interrupts
from isoloss.cli import common, flatness_output, options
from isoloss.errors import IsolossError
from isoloss.evaluation.input_config import InputConfig, common_run_config
from isoloss.evaluation.measures.flatness import FlatnessMeasure, flatness_measure
from isoloss.registry import MEASURES
from isoloss.runs import refuse_run, refuse_twice
from isoloss.statistics.checking import positive
from isoloss.statistics.equivalence import SAME_LOSS_NATS
from isoloss.statistics.tables import short_names
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext, ModelInfo
    from isoloss.evaluation.flatness import FlatnessResults
    from isoloss.loading import LoadedModel
    from isoloss.text.inputs import Inputs

EXAMPLES = [
    ("isoloss flatness CHECKPOINT --data text.txt", "a checkpoint with its tokenizer, on your text"),
    ("isoloss flatness CHECKPOINT --data hf:owner/name --column body --split test", "on a column of a dataset"),
    ("isoloss flatness CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss flatness A B C --data text.txt", "which of several is the flattest, by trace and minimal trace"),
    ("isoloss flatness A B --data text.txt --figure ab.svg", "with a figure: trace against loss"),
    ("isoloss flatness A B --data text.txt --measures trace largest-eigenvalue fisher-rao", "other measures too"),
    ("isoloss flatness A B --data text.txt --control", "and both traces after a random rescaling"),
    ("isoloss flatness runs/first/checkpoints/step-1000", "a checkpoint of a run, on the run's own language"),
    ("isoloss flatness CHECKPOINT --data text.txt --num-sequences 100000 --rtol 0.01", "until the error is 1 %"),
]


@dataclass(frozen=True)
class Args:
    """Measure how flat the loss is: by default the trace of the Fisher, as in the paper. A smaller trace is flatter.

    That trace equals the trace of the Hessian where the model's conditionals are the true ones. Several models are
    measured one after another on the same inputs with the same Rademacher signs, and compared. One is called the
    flattest if its trace and its minimal trace, which no rescaling of whole weight tensors changes, are the smallest,
    and the models have one architecture and the same loss.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """One or more checkpoint folders or names on the Hugging Face hub (NAME@REVISION)."""
    measures: tuple[str, ...] = ()
    """Measures of flatness (isoloss ls measures); default: trace, and of several models minimal-trace too, where their
    rescalings are known."""
    data: Path | None = None
    """Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs), or token ids (.npy); default, for a run's
    checkpoint: the run's language."""
    rtol: float | None = configs.setting(None, above=0, below=1)
    """Stop when the standard error is at most this fraction of the value; checked after 64, 128, 256, ... of what the
    error is over: sequences or documents, groups (hessian-trace), batches (sam-sharpness) or probes. For
    largest-eigenvalue it is the search's accuracy, 1e-3 or better. The first of several models decides."""
    seconds: float | None = configs.setting(None, above=0)
    """Stop after this time, if 64 of what the error is over are done, or 2 probes. The first of several models decides;
    for largest-eigenvalue, each has this time."""
    resume: Path | None = None
    """For one measure of one model: a file to resume from, written every half minute and on Ctrl-C, and removed at the
    end."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel; auto: sdpa where the architecture has it, else eager."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    ignore_unexpected_weights: bool = False
    """Leave out weights that the checkpoint has and the model of its config.json does not, such as biases."""
    control: bool = False
    """Also measure the minimal trace, and both traces after a random exact rescaling. The function is the same, so only
    the plain trace should change."""
    by_layer: bool = False
    """Print the part of each layer."""
    by_parameter: bool = False
    """Print the part of each parameter."""
    same_loss_nats: float = SAME_LOSS_NATS
    """For the verdict on several models: how far their losses may be apart to count as the same, in nats per predicted
    token."""
    figure: Path | None = None
    """For the traces of several models: draw trace against loss to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    known = {name: measure for name, measure in MEASURES.loaded().items() if issubclass(measure, FlatnessMeasure)}
    cls = options.with_measures(Args, known)
    args: Any = options.parse(cls, "flatness", arguments, examples=EXAMPLES)
    trace: Any = flatness_measure("trace", args.measure)  # whose settings for the inputs are those of all
    where_known = not (args.measures or args.control)
    if where_known:
        several = len(args.models) > 1 and trace.trace_method == "ghost"
        args = dataclasses.replace(args, measures=("trace", *["minimal-trace"] * several))
    if args.control:
        added = [name for name in ("trace", "minimal-trace", "rescaling-control") if name not in args.measures]
        args = dataclasses.replace(args, measures=(*args.measures, *added))
    _check(args)
    common.use_threads(args.threads)
    from isoloss.evaluation.context import ModelInfo
    from isoloss.evaluation.flatness import measure_flatness
    from isoloss.flatness.verdict import verdict

    models = [ModelInfo.of(_load(args, name)) for name in args.models]
    context = _context(args, models)
    inputs = context.inputs(trace.num_sequences, trace.seed)
    for model in models:
        kernel = model.config._attn_implementation
        common.note(f"{model.name}: {model.architecture}, {model.kind}, attention {kernel}; {inputs.description}")
    with common.Progress("loading", None) as bar:
        current = ("", "")

        def show(measure: str, model: str, done: int) -> None:
            nonlocal current
            if current != (measure, model):
                current = measure, model
                bar.begin(measure, *flatness_measure(measure, args.measure).amount(inputs.num_sequences, context))
            bar(done, model)

        try:
            results = measure_flatness(
                {name: partial(_model, args, name) for name in args.models},
                args.measures,
                context,
                settings=args.measure,
                where_known=where_known,
                progress=show,
            )
        except KeyboardInterrupt:
            _say_how_to_go_on(args, arguments)
            raise
    if results.compared is not None:
        names = short_names(list(results.compared.models))
        helps = flatness_output.what_helps(args, inputs, next(iter(results.compared.of("trace").values())))
        judged = verdict(results.compared, same_loss=args.same_loss_nats, names=names, more=helps)
        if args.figure is not None:
            from isoloss.report.flatness import trace_against_loss

            common.save_figure(args.figure, trace_against_loss(results.compared, names))
    if args.json:
        document = results.to_dict()
        architectures = {model.name: {"architecture": model.architecture} for model in models}
        document["models"] = [{**model, **architectures[model["model"]]} for model in document["models"]]
        if results.compared is not None:
            document["verdict"] = dataclasses.asdict(judged)
        common.emit_json({"data": inputs.description, "measures": list(args.measures), **document})
    else:
        _print(args, results, inputs, is_random=_is_shuffled(args) or not _is_text(args, context))
        if results.compared is not None and len(results.compared.models) > 1:
            common.say("")
            common.say_wrapped(str(judged))
    if results.interrupted is not None:
        _say_how_to_go_on(args, arguments)
    return 0 if results.interrupted is None else interrupts.status()


def _check(args: Any) -> None:
    """Refuse what needs neither a model nor torch to be seen as wrong."""
    if not args.models:
        raise IsolossError("no checkpoint is named: give a folder, or a name on the Hugging Face hub")
    positive("--same-loss-nats", args.same_loss_nats)
    for measure in args.measures:
        flatness_measure(measure, args.measure)
    inputs = InputConfig(**args.inputs)
    inputs.check()
    configs.check(args)
    for name in args.models:
        refuse_run(Path(name), "and flatness is measured of a checkpoint")
        early_checks.check_checkpoint(name)
    refuse_twice(args.models)
    if args.data is not None:
        hub_datasets.check_data(args.data)
    else:
        common_run_config(args.models)
        inputs.check_run(args.models[0])
    early_checks.check_device(args.device)
    if args.figure is not None and (len(args.models) == 1 or "trace" not in args.measures):
        raise IsolossError("--figure shows the traces of several models beside each other: name more, or leave it out")
    common.check_figure(args.figure)
    if args.resume is not None:
        files.check_writable(args.resume.parent)


def _load(args: Any, name: str) -> LoadedModel:
    import torch

    from isoloss.loading import load_model

    return load_model(
        name,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        attention=args.attention,
        trust_remote_code=args.trust_remote_code,
        ignore_unexpected_weights=args.ignore_unexpected_weights,
    )


def _model(args: Any, name: str) -> Any:
    return _load(args, name).model


def _context(args: Any, models: list[ModelInfo]) -> MeasureContext:
    from isoloss.evaluation import context as contexts

    inputs = InputConfig(**args.inputs)
    shuffled = _is_shuffled(args)
    if args.data is not None:
        context = contexts.data_context(args.data, models, inputs, shuffled=shuffled)
    else:
        config = common_run_config(args.models)
        context = contexts.language_context(config.language, config.objective, models, inputs, shuffled=shuffled)
    context.rtol, context.seconds, context.resume = args.rtol, args.seconds, args.resume
    return context


def _is_shuffled(args: Any) -> bool:
    return args.rtol is not None or args.seconds is not None  # it may stop before the end of the inputs


def _is_text(args: Any, context: MeasureContext) -> bool:
    """Whether the inputs have an order of their own: sentences that a language draws have none."""
    return args.data is not None or (context.language is not None and context.language.num_held_out > 0)


def _say_how_to_go_on(args: Any, arguments: list[str]) -> None:
    if args.resume is not None and args.resume.exists():
        common.note(f"to go on: {common.command('flatness', *arguments)}")


def _print(args: Any, results: FlatnessResults, inputs: Inputs, *, is_random: bool) -> None:
    from isoloss.statistics.comparison import label

    if results.interrupted is not None:
        measure, model, partial_estimate = results.interrupted
        so_far = ""
        if partial_estimate is not None:
            order = "" if is_random else " in the order of the data, which are not a random sample"
            part = f"the first {partial_estimate.details['sequences']:,} sequences{order}"
            if "clusters" not in partial_estimate.details:  # by probes, each of which sees all sequences
                part = f"{partial_estimate.num_probes} probes"
            so_far = f"; the estimate from {part}:"
        common.note(f"interrupted while {measure} of {model} was measured{so_far}")
        if partial_estimate is not None:
            common.say(f"{measure} of {model} so far: {partial_estimate}")
            if len(args.models) == 1:
                flatness_output.print_details(args, partial_estimate, inputs)
    if results.compared is not None:
        flatness_output.print_comparison(args, results.compared, inputs)
    for number, measure in enumerate(args.measures):
        compared = results.comparisons.get(measure)
        if number and (compared is not None or len(args.models) == 1):
            common.say("")
        if compared is not None:
            common.say(str(compared))
        for model, by_measure in results.estimates.items():
            for name, estimate in by_measure.get(measure, {}).items():
                if len(args.models) == 1:
                    common.say(f"{label(measure, name, tuple(by_measure[measure]))}: {estimate}")
                    flatness_output.print_details(args, estimate, inputs)
                elif (args.by_layer or args.by_parameter) and estimate.by_parameter:
                    common.say(f"\n{label(measure, name, tuple(by_measure[measure]))} of {model}: {estimate}")
                    flatness_output.print_parts(args, estimate)
    if args.control:
        common.say("")
        for model, by_measure in results.estimates.items():
            if "rescaling-control" in by_measure:
                common.say_wrapped(f"control of {model}: {flatness_output.control(by_measure)}")
