"""`isoloss flatness`: the flatness of Hugging Face masked or causal language models, with its error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import config as configs
from isoloss import interrupts, machine
from isoloss.checkpoints import places
from isoloss.cli import common, options
from isoloss.cli.options import ModuleLoading
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.input_config import InputConfig, common_run_config
from isoloss.lab.evaluation.measures.flatness import flatness_measure, flatness_measures
from isoloss.runs import refuse_run, refuse_twice
from isoloss.statistics.checking import positive
from isoloss.statistics.estimate import Estimate, interval, rarity, rounded, samples_of
from isoloss.statistics.significance import SAME_LOSS_NATS
from isoloss.statistics.tables import short_names
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.comparison.verdict import Reason, TraceComparison
    from isoloss.lab.evaluation.context import MeasureContext, ModelInfo
    from isoloss.lab.evaluation.flatness import FlatnessResults
    from isoloss.text.inputs import Inputs

EXAMPLES = [
    ("isoloss flatness CHECKPOINT --data text.txt", "a checkpoint with its tokenizer, on your text"),
    ("isoloss flatness A B C --data text.txt", "which of several is the flattest, by trace and minimal trace"),
    ("isoloss flatness TRAINER-OUTPUT --data text.txt", "every checkpoint of a training, by step"),
    ("isoloss flatness A B --data text.txt --measures trace largest-eigenvalue fisher-rao", "other measures too"),
    ("isoloss flatness CHECKPOINT --data text.txt --num-sequences 100000 --rtol 0.01", "until the error is 1 %"),
    ("isoloss flatness CHECKPOINT --data hf:owner/name --column body --split test", "on a column of a dataset"),
    ("isoloss flatness CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss flatness 'owner/name@step*' --data text.txt", "revisions of a model on the Hugging Face hub"),
    ("isoloss flatness A B --data text.txt --figure ab.svg", "with a figure: trace against loss"),
    ("isoloss flatness A B --data text.txt --control", "and both traces after a random rescaling"),
    ("isoloss flatness ckpt.pt --module my_gpt.py:build --data tokens.bin", "your own nn.Module and its weights"),
    ("isoloss flatness runs/first/checkpoints/step-1000", "a checkpoint of a run, on the run's own language"),
]
# what `--help` shows; `--help-all` shows the rest
COMMON = (
    "models",
    "measures",
    "data",
    "tokenizer",
    "length",
    "num_sequences",
    "rtol",
    "control",
    "by_layer",
    "figure",
    "device",
    "json",
)
_LESS = 2.0  # times as large as it could be: an error that another command is printed for
_LARGEST = 3  # parts by parameter that are printed in any case


@dataclass(frozen=True)
class Args:
    """Measure how flat the loss is: by default the trace of the Fisher, as in the paper. A smaller trace is flatter.

    That trace equals the trace of the Hessian where the model's conditionals are the true ones. Several models are
    measured one after another on the same inputs with the same Rademacher signs, and compared. One is called the
    flattest if its trace and its minimal trace, which no rescaling of whole weight tensors changes, are the smallest,
    and the models have one architecture and the same loss.
    """

    models: options.Positional[tuple[str, ...]]
    """Checkpoint folders, folders of checkpoints such as a Trainer's output, or names on the Hugging Face hub
    (NAME@REVISION); also by patterns, 'runs/*/checkpoint-*' or 'NAME@step*'. With --module: files of weights."""
    measures: tuple[str, ...] = ()
    """Measures of flatness (isoloss ls measures lists them, isoloss ls measures NAME the settings of one); default:
    trace, and of several models minimal-trace too, where their rescalings are known."""
    data: Path | None = None
    """Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs), or token ids (.npy, or nanoGPT's .bin);
    default, for a run's checkpoint: the run's language."""
    rtol: float | None = configs.setting(None, above=0, below=1)
    """Stop when the standard error is at most this fraction of the value. Checked after 64, 128, 256, ... of what the
    error is over: sequences or documents, groups (hessian-trace), batches (sam-sharpness) or probes. For
    largest-eigenvalue it is the search's accuracy, 1e-3 or better. The first of several models decides."""
    seconds: float | None = configs.setting(None, above=0)
    """Stop after this time, if 64 of what the error is over are done, or 2 probes. The first of several models decides;
    for largest-eigenvalue, each has this time."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel; auto: sdpa where the architecture has it, else eager."""
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
    loading: ModuleLoading = field(default_factory=ModuleLoading)


def arguments_class() -> type:
    """Return the arguments with the settings of all measures of flatness."""
    known = flatness_measures()
    return options.with_measures(Args, known)


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: Any = options.parse(arguments_class(), "flatness", arguments, examples=EXAMPLES, common=COMMON)
    args = dataclasses.replace(args, models=tuple(places.expand_checkpoints(args.models, common.note)))
    # all measures see the same inputs: how many and which is asked of the trace's settings, which every measure shares
    trace: Any = flatness_measure("trace", args.measure)
    where_known = not (args.measures or args.control)
    if where_known:
        # the paper's sampled labels give no comparison of models, for which the minimal trace is measured
        several = len(args.models) > 1 and trace.trace_method == "ghost"
        args = dataclasses.replace(args, measures=("trace", *["minimal-trace"] * several))
    if args.control:
        added = [name for name in ("trace", "minimal-trace", "rescaling-control") if name not in args.measures]
        args = dataclasses.replace(args, measures=(*args.measures, *added))
    _check(args)
    common.use_threads(args.threads)
    import torch

    from isoloss.comparison.verdict import verdict
    from isoloss.lab.evaluation.context import Checkpoints
    from isoloss.lab.evaluation.flatness import measure_flatness

    checkpoints = Checkpoints(
        {name: name for name in args.models},
        dtype=getattr(torch, args.dtype),
        attention=args.attention,
        **vars(args.loading),
    )
    models = checkpoints.infos
    context = _context(args, models)
    inputs = context.inputs(trace.num_sequences, trace.seed)
    for model in models:
        kernel = model.config._attn_implementation
        attention = f", attention {kernel}" if kernel else ""
        common.note(f"{model.name}: {model.architecture}, {model.kind}{attention}; {inputs.description}")
    with common.Progress("loading", None) as bar:
        current = ("", "")

        def show(measure: str, model: str, done: int) -> None:
            nonlocal current
            if current != (measure, model):
                current = measure, model
                bar.begin(measure, *flatness_measure(measure, args.measure).amount(inputs.num_sequences, context))
            bar(done, model)

        results = measure_flatness(
            {name: partial(checkpoints.model, name) for name in args.models},
            args.measures,
            context,
            settings=args.measure,
            where_known=where_known,
            progress=show,
        )
    if results.compared is not None:
        names = short_names(list(results.compared.models))
        helps = _what_helps(args, inputs, next(iter(results.compared.of("trace").values())))
        judged = verdict(results.compared, same_loss=args.same_loss_nats, names=names, more=helps)
    if args.json:
        document = results.to_dict()
        architectures = {model.name: {"architecture": model.architecture} for model in models}
        document["models"] = [{**model, **architectures[model["model"]]} for model in document["models"]]
        if results.compared is not None:
            document["verdict"] = dataclasses.asdict(judged)
        common.emit_json({"data": inputs.description, "measures": list(args.measures), **document})
    else:
        # text has an order of its own, and the sentences that a language draws have none
        is_text = args.data is not None or (context.language is not None and context.language.num_held_out > 0)
        _print(args, results, inputs, is_random=_is_shuffled(args) or not is_text)
        if results.compared is not None and len(results.compared.models) > 1:
            common.say("")
            common.say_wrapped(str(judged))
        if results.interrupted is None:
            reasons = judged.reasons if results.compared is not None else ()
            common.say_next([*_next(args, arguments, results, inputs, reasons)])
    if args.figure is not None and results.compared is not None:
        from isoloss.comparison.page import trace_against_loss

        # last, so that a full disk does not cost the table
        common.save_figure(args.figure, trace_against_loss(results.compared, names))
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
        places.check_reachable(name, args.loading.module)
    refuse_twice(args.models)
    if args.data is not None:
        hub_datasets.check_data(args.data)
    else:
        common_run_config(args.models)
        inputs.check_run(args.models[0])
    machine.check_device(args.loading.device)
    if args.figure is not None and (len(args.models) == 1 or "trace" not in args.measures):
        raise IsolossError("--figure shows the traces of several models beside each other: name more, or leave it out")
    common.check_figure(args.figure)
    common.check_outputs(args, args.models, "figure")


def _context(args: Any, models: list[ModelInfo]) -> MeasureContext:
    from isoloss.lab.evaluation import context as contexts

    inputs = InputConfig(**args.inputs)
    shuffled = _is_shuffled(args)
    if args.data is not None:
        context = contexts.data_context(args.data, models, inputs, shuffled=shuffled)
    else:
        config = common_run_config(args.models)
        context = contexts.language_context(config.language, config.objective, models, inputs, shuffled=shuffled)
    context.rtol, context.seconds = args.rtol, args.seconds
    return context


def _is_shuffled(args: Any) -> bool:
    # a measurement that may stop early needs its inputs in random order, or it would estimate the start of the data
    return args.rtol is not None or args.seconds is not None


def _print(args: Any, results: FlatnessResults, inputs: Inputs, *, is_random: bool) -> None:
    from isoloss.statistics.comparison import label

    if results.interrupted is not None:
        measure, model, partial_estimate = results.interrupted
        so_far = ""
        if partial_estimate is not None:
            order = "" if is_random else " in the order of the data, which are not a random sample"
            part = f"the first {partial_estimate.details['sequences']:,} sequences{order}"
            # without clusters the error is over probes, and each probe has seen all sequences
            if "clusters" not in partial_estimate.details:
                part = f"{partial_estimate.num_probes} probes"
            so_far = f"; the estimate from {part}:"
        common.note(f"interrupted while {measure} of {model} was measured{so_far}")
        if partial_estimate is not None:
            common.say(f"{measure} of {model} so far: {partial_estimate}")
            if len(args.models) == 1:
                _print_details(args, partial_estimate, inputs)
    if results.compared is not None:
        _print_comparison(args, results.compared, inputs)
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
                    _print_details(args, estimate, inputs)
                elif (args.by_layer or args.by_parameter) and estimate.by_parameter:
                    common.say(f"\n{label(measure, name, tuple(by_measure[measure]))} of {model}: {estimate}")
                    _print_parts(args, estimate)
    if args.control:
        common.say("")
        for model, by_measure in results.estimates.items():
            if "rescaling-control" in by_measure:
                common.say_wrapped(f"control of {model}: {_control(by_measure)}")


# --- what an estimate of one model rests on ---------------------------------------------------------------------------


def _print_details(args: Any, estimate: Estimate, inputs: Inputs) -> None:
    """Print what an estimate of one model rests on, below its value."""
    for line in _remarks(args, estimate, inputs):
        common.say_wrapped(line, indent=2)
    if not args.by_parameter:
        _print_largest(estimate)
    _print_parts(args, estimate)


def _print_parts(args: Any, estimate: Estimate) -> None:
    """Print the parts by layer and by parameter, where they are asked for and known."""
    for part, asked in (("layer", args.by_layer), ("parameter", args.by_parameter)):
        parts: Mapping[str, float] = getattr(estimate, f"by_{part}") or {}
        errors: Mapping[str, float] = getattr(estimate, f"by_{part}_stderr") or {}
        rows = [(name, parts[name], errors.get(name)) for name in sorted(parts, key=lambda name: -parts[name])]
        if asked and rows:
            _print_rows(f"\nby {part}", part, estimate, rows, digits=2)


def _remarks(args: Any, estimate: Estimate, inputs: Inputs) -> Iterator[str]:
    """What an estimate rests on, and what is to be said of its error."""
    details = estimate.details
    if not estimate.is_exact:
        relative = f"; the error is {_percent(estimate.stderr / estimate.value)} of the value" * (estimate.value > 0)
        yield f"95 % interval {interval(estimate)}{relative}, over {samples_of(estimate)}"
    if warning := _rarity(estimate):
        yield f"{warning}; it takes {_what_helps(args, inputs, estimate)}"
    parameters = f"{details['num_parameters']:,} parameters"
    if "sequences" in details:
        yield (
            f"{estimate.num_predictions:,} predicted tokens in {details['sequences']:,} sequences, {parameters}, "
            f"{details['predicts']}"
        )
    else:
        yield parameters
    yield from _skipped(estimate)
    yield from _adjustment(estimate)
    if "log_factors" in details:
        yield from _of_minimum(estimate)
    method = estimate.method
    if estimate.num_probes:
        drawn = "label" if "sampled labels" in method else "probe"
        each = " per token" if "clusters" in details else ""
        method += f", {estimate.num_probes} {drawn}{'s' * (estimate.num_probes > 1)}{each}"
    if "device" in details:
        method += f"; {details['device']}, {details['dtype']}"
        method += f", attention {details['attention']}" if details["attention"] else ""
    yield method + (f"; {estimate.seconds:.1f} s" if estimate.seconds is not None else "")
    if "error_covers" in details and not estimate.is_exact:
        yield f"the error covers {details['error_covers']}"
    if details.get("parameters_by_autograd"):
        yield f"by automatic differentiation, a sequence at a time: {', '.join(details['parameters_by_autograd'])}"
    if details.get("quantized_weights"):
        yield f"{details['quantized_weights']:,} quantized weights were not measured: they are not parameters"
    if details.get("parameters_without_gradient"):
        yield f"parameters without gradient: {', '.join(details['parameters_without_gradient'])}"
    if _missed(args, estimate) > 1:
        yield f"the error is above --rtol {args.rtol:g}: it takes {_what_helps(args, inputs, estimate)}"


def _rarity(estimate: Estimate) -> str:
    """Return a warning where few inputs make up much of the error, else nothing."""
    return rarity({"": estimate}) if "leading_cluster" in estimate.details else ""


def _missed(args: Any, estimate: Estimate) -> float:
    """Return how many times as large as asked for the error is; 0: none was asked for."""
    if args.rtol is None or not estimate.stderr:
        return 0.0
    return estimate.stderr / (args.rtol * abs(estimate.value)) if estimate.value else math.inf


def _next(
    args: Any, arguments: list[str], results: FlatnessResults, inputs: Inputs, reasons: Collection[Reason]
) -> Iterator[str]:
    """Yield the command whose error is the one that was asked for, or half of this one, where that is to be had."""
    if results.compared is not None:
        is_open = not {"open", "loss open", "rare"}.isdisjoint(reasons) or results.compared.warning
        wanting = list(results.compared.of("trace").values())[:1] if is_open else []
    else:
        estimates = (one for of in results.estimates.values() for named in of.values() for one in named.values())
        wanting = [one for one in estimates if _missed(args, one) > 1 or _rarity(one)][:1]
    for estimate in wanting:
        words, missed = _what_helps(args, inputs, estimate), _missed(args, estimate)
        now = {"--num-probes": estimate.num_probes, "--seconds": args.seconds, "--num-sequences": inputs.num_sequences}
        option = next((option for option in now if option in words), None)
        if option is None:
            continue
        # how much of an error is of the probes is not known
        is_known = option != "--num-probes" and math.isfinite(missed)
        more = math.ceil(now[option] * (max(missed, _LESS) if is_known else _LESS) ** 2)
        if option == "--num-sequences" and inputs.num_held is not None:
            more = min(more, inputs.num_held)
        yield common.command_with("flatness", arguments, option, more)


def _what_helps(args: Any, inputs: Inputs, estimate: Estimate) -> str:
    """Return what would make the error of an estimate smaller, and is to be had."""
    sequences = "more sequences, with --num-sequences"
    if args.seconds is not None and estimate.details["ended"] == "seconds":
        sequences = "more time, with --seconds"
    elif inputs.has_all_documents or (inputs.num_held is not None and inputs.num_held <= inputs.num_sequences):
        # further sequences of the same documents would tell little that is new
        sequences = f"more {'documents' if 'documents' in inputs.batches[0] else 'sequences'} in --data"
    if "clusters" in estimate.details:
        return sequences
    covers_inputs = estimate.details["error_covers"].startswith("inputs")
    return f"more probes, with --num-probes{f', and {sequences} for the part of the inputs' * covers_inputs}"


def _of_minimum(estimate: Estimate) -> Iterator[str]:
    """Yield sentences on a minimal trace beside the plain one, and on its conventions where there is no minimum."""
    details = estimate.details
    plain, kept = (rounded(details[name], details[f"{name}_stderr"]) for name in ("trace", "keeping_features"))
    low, high = (rounded(details[name], estimate.stderr).split(" ±")[0] for name in ("in_sample", "cross_fitted"))
    yield f"trace at the given weights {plain}; minimum over rescalings that keep the last hidden state {kept}"
    yield (
        f"minimum over all rescalings: in sample {low} (too small on average), cross-fitted {high} (too large); the "
        "value is their mean"
    )
    yield from _conventions(estimate)


def _conventions(estimate: Estimate) -> Iterator[str]:
    """Yield a sentence on the convention that fixes the scale where the trace has no minimum."""
    details = estimate.details
    if details["gauged"]:
        infimum = rounded(details["infimum"], estimate.stderr).split(" ±")[0]
        yield (
            f"the trace has no minimum over rescalings (infimum {infimum}: the contributions of "
            f"{len(details['vanishing'])} parameters vanish, such as {details['vanishing'][0]}), so the scale of "
            f"{' and '.join(details['gauged'])} is fixed by convention: the geometric mean of the root mean squares of "
            "what it multiplies is 1"
        )


def _control(measured: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return by how much a random rescaling changes both traces of a model, given its estimates by measure."""
    trace, minimum = (
        measured["rescaling-control"][f"{name}-rescaled-at-random"].value / measured[name][name].value
        for name in ("trace", "minimal-trace")
    )
    return (
        f"a random exact rescaling multiplies the trace by {trace:.4g}, and changes the minimal trace by "
        f"{abs(minimum - 1):.1g} of its value"
    )


def _percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal, or one significant digit where that would be 0.

    Example:
        >>> _percent(0.0371), _percent(0.00512), _percent(0.00038)
        ('3.7 %', '0.5 %', '0.04 %')
    """
    return f"{100 * fraction:{'.1f' if fraction >= 0.001 else '.1g'}} %"


def _print_largest(estimate: Estimate) -> None:
    """Print the parameters with the largest parts, and what is left without embeddings."""
    parts, errors, details = estimate.by_parameter or {}, estimate.by_parameter_stderr or {}, estimate.details
    if len(parts) < 2 or estimate.value <= 0:
        return
    largest = sorted(parts, key=lambda name: -parts[name])[:_LARGEST]
    lines = [(name, parts[name], errors.get(name)) for name in largest]
    if details.get("embeddings"):
        lines.append(("without embeddings", details["without_embeddings"], details["without_embeddings_stderr"]))
    _print_rows("\nlargest parts by parameter", "parameter", estimate, lines, digits=1)


def _print_rows(
    title: str, part: str, estimate: Estimate, rows: list[tuple[str, float, float | None]], *, digits: int
) -> None:
    cells = []
    for name, value, error in rows:
        number = f"{value:.4g}" if error is None else rounded(value, error)
        cells.append((name, number, f"{100 * value / estimate.value:.{digits}f} %"))
    common.print_table(title, (part, estimate.unit, "fraction"), cells)


# --- several models --------------------------------------------------------------------------------------------------


def _print_comparison(args: Any, comparison: TraceComparison, inputs: Inputs) -> None:
    """Print the models, their differences where there are several, and what they rest on."""
    trace = next(iter(comparison.of("trace").values()))
    names = short_names(list(comparison.models))
    title = f"Fisher, {trace.unit}; P: the probability of being the smallest"
    for header, rows, left in comparison.tables(names):
        common.print_table(title, header, rows, left=left)
        title = ""
    common.say("")
    common.say_wrapped(
        f"{trace.num_predictions:,} predicted tokens in {trace.details['sequences']:,} sequences; ± is the standard "
        f"error over {samples_of(trace)}"
    )
    if comparison.warning:
        common.say_wrapped(f"{comparison.warning}; it takes {_what_helps(args, inputs, trace)}")
    for line in (*_skipped(trace), *_adjustment(trace)):
        common.say_wrapped(line)
    for model, least in comparison.of("minimal-trace").items() if "minimal-trace" in comparison.traces else ():
        for line in _conventions(least):
            common.say_wrapped(f"{names[model]}: {line}")


def _skipped(trace: Estimate) -> Iterator[str]:
    """Say how many batches had nothing to predict; nothing where none had."""
    if number := trace.details.get("skipped_batches"):
        yield f"{number:,} batch{'es' if number > 1 else ''} skipped: every label is -100"


def _adjustment(trace: Estimate) -> Iterator[str]:
    """Say how the auxiliary sample was used, or that it differs from what was measured; nothing where there is none."""
    details = trace.details
    number = details.get("auxiliary_directions", 0)
    used = ["how probable each is after the one before"] if details.get("auxiliary_bigrams") else []
    used += [f"{number} direction{'s' if number > 1 else ''} of their mean embedding"] if number else []
    if used:
        yield f"adjusted to all {details['auxiliary_sequences']:,} sequences by their tokens: {' and '.join(used)}"
    elif details.get("auxiliary_differs"):
        yield "not adjusted to the rest of the data by its tokens: those that were measured differ from them"
