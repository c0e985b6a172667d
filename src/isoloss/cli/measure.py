"""`isoloss measure`: measure checkpoints; what is measured already of a run is not measured again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import config as configs
from isoloss import interrupts
from isoloss.checkpoints import places
from isoloss.cli import common, options
from isoloss.cli.options import ModuleLoading
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.input_config import InputConfig, common_run_config
from isoloss.lab.evaluation.measures.base import FunctionMeasure, make_measure, measure_class
from isoloss.lab.presets import load_preset
from isoloss.registry import MEASURES
from isoloss.runs import Run, refuse_run
from isoloss.statistics.estimate import (
    Estimate,
    accuracy_bounds,
    adjustment,
    interval,
    rare,
    rarity,
    rounded,
    samples_of,
)

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext, ModelInfo
    from isoloss.lab.evaluation.evaluator import Evaluations
    from isoloss.text.inputs import Inputs

EXAMPLES = [
    ("isoloss measure CHECKPOINT --data text.txt", "loss and flatness of a checkpoint, on your text"),
    ("isoloss measure A B --data text.txt --measures trace largest-eigenvalue fisher-rao", "measures of your choice"),
    ("isoloss measure runs/first", "loss and trace of every checkpoint of a run, kept in its folder"),
    ("isoloss measure runs/first --measures loss trace probe-root --steps 1000 2000", "chosen measures and steps"),
    ("isoloss measure runs/first --measures few-shot-root-100 --num-test 10000", "probes on 100 sentences each"),
    ("isoloss measure runs/first runs/second --steps 2000", "two runs in one table"),
    ("isoloss measure runs/first --preset paper", "on as many sentences as the paper, by its estimators"),
    ("isoloss measure TRAINER-OUTPUT --data text.txt", "every checkpoint of a training, by step"),
    ("isoloss measure CHECKPOINT --data text.txt --num-sequences 100000 --rtol 0.01", "until the error is 1 %"),
    ("isoloss measure CHECKPOINT --data hf:owner/name --column body --split test", "on a column of a dataset"),
    ("isoloss measure CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss measure 'owner/name@step*' --data text.txt", "revisions of a model on the Hugging Face hub"),
    ("isoloss measure CHECKPOINT --data text.txt --control", "both traces, and both after a random rescaling"),
    ("isoloss measure ckpt.pt --module my_gpt.py:build --data tokens.bin", "your own nn.Module and its weights"),
    ("isoloss measure CHECKPOINT --language pcfg-laptop --measures loss probe-root --output out", "on a language"),
]
# what `--help` shows; `--help-all` shows the rest
COMMON = (
    "models measures preset steps data language tokenizer length num_sequences rtol control by_layer output device json"
)
_LESS = 2.0  # times as large as it could be: an error that another command is printed for
_LARGEST = 3  # parts by parameter that are printed in any case


@dataclass(frozen=True)
class Args:
    """Measure checkpoints: loss, flatness, downstream accuracy. isoloss runs are measured on their own language.

    Flatness is by default the trace of the Fisher, as in the paper: a smaller trace is flatter. It equals the trace of
    the Hessian where the model's conditionals are the true ones. The evaluations of a run are kept in its folder, and
    what is there is not measured again. isoloss compare judges which of several models is the flattest.
    """

    models: options.Positional[tuple[str, ...]]
    """Run directories, checkpoint folders (RUN/checkpoints/step-N) or, with --data or --language, any checkpoint
    folders, folders of checkpoints such as a Trainer's output, or names on the Hugging Face hub (NAME@REVISION); also
    by patterns, 'runs/*/checkpoint-*' or 'NAME@step*'. With --module: files of weights."""
    measures: tuple[str, ...] | None = None
    """Names of measures (isoloss ls measures lists them, isoloss ls measures NAME the settings of one); default:
    trace, and loss where it is defined."""
    preset: str | None = None
    """The paper's settings (paper or authors); options override them. The loss is on 1,000,000 sentences, the trace on
    10,000 with 50 sampled labels each; the probe is the paper's."""
    steps: tuple[int | Literal["last"], ...] = ()
    """Of runs: steps to measure, last for the last one; default: all that have a checkpoint."""
    data: Path | None = None
    """Measure on text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs) or token ids (.npy, or nanoGPT's
    .bin), instead of a run's own language."""
    language: str | None = None
    """Measure on a language: a preset (isoloss ls languages) or a file; of a grammar file, --length is the longest
    sentence (default: 64)."""
    output: Path | None = None
    """With --data or --language: a folder for the results, as files."""
    rtol: float | None = configs.setting(None, above=0, below=1)
    """Flatness: stop when the standard error is at most this fraction of the value. Checked after 64, 128, 256, ...
    samples: sequences or documents, groups (hessian-trace), batches (sam-sharpness) or probes. For
    largest-eigenvalue it is the search's accuracy, 1e-3 or better."""
    seconds: float | None = configs.setting(None, above=0)
    """Flatness: stop after this many seconds, but not before 64 samples (sequences, documents, groups or batches), or 2
    probes."""
    control: bool = False
    """Measure the trace, the minimal trace, and both after a random exact rescaling. The function is the same, so only
    the plain trace should change."""
    by_layer: bool = False
    """Print each layer's share."""
    by_parameter: bool = False
    """Print each parameter's share."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """With --data or --language: type of the weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """With --data or --language: attention kernel; auto: sdpa where the architecture has it, else eager."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """Print one JSON document."""
    loading: ModuleLoading = field(default_factory=ModuleLoading)


def arguments_class() -> type:
    """Return the arguments with the settings of all measures."""
    return options.with_measures(Args, MEASURES.loaded(measure_class))


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: Any = options.parse(arguments_class(), "measure", arguments, examples=EXAMPLES, common=COMMON)
    settings = ({} if args.preset is None else load_preset(args.preset).measures) | args.measure
    args = dataclasses.replace(
        args, models=tuple(places.expand_checkpoints(args.models, common.note)), measures=_measures(args, settings)
    )
    configs.check(args)
    common.use_threads(args.threads)
    from isoloss.lab.evaluation.evaluator import InterruptedEvaluation, evaluate

    inputs: Inputs | None = None
    about: dict[str, Any] = {}

    def on_inputs(models: Sequence[ModelInfo], context: MeasureContext) -> None:
        nonlocal inputs
        # all measures see the same inputs: how many and which is asked of the trace's settings, which every measure has
        trace: Any = make_measure("trace", settings)
        inputs = context.inputs(trace.num_sequences, trace.seed)
        # a loss summed over all sentences takes no inputs, and another measure may take these beside it
        numbers = {getattr(make_measure(name, settings), "loss_sentences", None) for name in args.measures or ()}
        about["inputs"] = "all sentences of the language" if numbers == {"all"} else inputs.description
        about["architectures"] = {model.name: model.architecture for model in models}
        for model in models:
            kernel = model.config._attn_implementation
            attention = f", attention {kernel}" if kernel else ""
            common.note(f"{model.name}: {model.architecture}, {model.kind}{attention}; {about['inputs']}")

    stopped: InterruptedEvaluation | None = None
    with common.Progress("measuring", None, "evaluations") as bar:

        def show(done: int, total: int, note: str) -> None:
            # how many evaluations there are is known only once all models were opened
            if bar.total is None:
                bar.begin(bar.label, total, bar.unit)
            bar(done, note)

        try:
            evaluations = evaluate(
                args.models,
                args.measures,
                data=args.data,
                **_language(args),
                inputs=InputConfig(**args.inputs),
                steps=args.steps,
                settings=settings,
                output=args.output,
                dtype=args.dtype,
                attention=args.attention,
                rtol=args.rtol,
                seconds=args.seconds,
                **vars(args.loading),
                on_inputs=on_inputs,
                progress=show,
            )
        except InterruptedEvaluation as stop:
            if not stop.complete and stop.partial is None:
                raise
            evaluations, stopped = stop.complete, stop
    if args.json:
        partial = stopped and stopped.partial and stopped.partial.to_dict()
        interrupted = {} if stopped is None else {"interrupted": {"estimate": partial, "what": stopped.name}}
        common.emit_json({**about, "evaluations": evaluations.to_dict(), **interrupted})
    else:
        _print(args, evaluations, inputs)
    if stopped is not None:
        common.note(f"interrupted while {stopped.name} was measured")
        if stopped.partial is not None and not args.json:
            common.say(f"{stopped.name} so far: {stopped.partial}")
            _print_details(args, stopped.partial, inputs)
        return interrupts.status()
    if not args.json:
        common.say_next([*_next(args, arguments, evaluations, inputs)])
    return 0


def _measures(args: Any, settings: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the measures; refuse limits for those that have none."""
    limits = [name for name in ("rtol", "seconds") if getattr(args, name) is not None]
    measures = args.measures
    if args.control:
        measures = dict.fromkeys((*(measures or ()), "trace", "minimal-trace", "rescaling-control"))
    elif measures is None and limits:
        measures = ("trace",)
    for name in measures if measures and limits else ():
        measure = make_measure(name, settings)
        if not (isinstance(measure, FunctionMeasure) and measure.is_of_flatness):
            raise IsolossError(
                f"--{limits[0]} has no effect on {name}, which is not a measure of flatness: leave it out"
            )
    return None if measures is None else tuple(measures)


def _language(args: Any) -> dict[str, Any]:
    """Return the language to measure on: that of the runs too, where the measurement is not one to be kept in them."""
    is_other = args.rtol or args.seconds or args.control or args.loading.module or args.attention != "auto"
    # of a run, the type of its weights is refused
    is_other = is_other or (args.dtype != "float32" and not any(Run(Path(name)).exists for name in args.models))
    if args.data is None and args.language is None and args.models and is_other:
        InputConfig(**args.inputs).check_run(args.models[0])
        for name in args.models:
            refuse_run(Path(name), "and with these options a checkpoint is measured")
        config = common_run_config(args.models)
        return {"language": config.language, "objective": config.objective}
    return {"language": args.language}


# --- tables ----------------------------------------------------------------------------------------------------------


def _print(args: Any, evaluations: Evaluations, inputs: Inputs | None) -> None:
    """Print a table or, of one model that no run keeps, each estimate with what it rests on."""
    from isoloss.statistics.tables import label

    if inputs is not None and len(args.models) == 1:
        for number, evaluation in enumerate(evaluations):
            if number:
                common.say("")
            for name, estimate in evaluation.estimates.items():
                common.say(f"{label(evaluation.measure, name, tuple(evaluation.estimates))}: {estimate}")
                _print_details(args, estimate, inputs)
    else:
        columns, rows, num_text = evaluations.table()
        common.print_table(", ".join(args.models), columns, rows, left=num_text)
        for model, evaluation in zip(evaluations.models, evaluations, strict=True):
            for name, estimate in evaluation.estimates.items():
                if (args.by_layer or args.by_parameter) and estimate.by_parameter:
                    step = "" if evaluation.step is None else f" at step {evaluation.step}"
                    title = label(evaluation.measure, name, tuple(evaluation.estimates))
                    common.say(f"\n{title} of {model}{step}: {estimate}")
                    _print_parts(args, estimate)
        _say_rarity(evaluations, inputs)
    _say_below_majority(evaluations)
    if args.control:
        common.say("")
        for model in dict.fromkeys(evaluations.models):
            measured = {
                each.measure: each.estimates
                for name, each in zip(evaluations.models, evaluations, strict=True)
                if name == model
            }
            if "rescaling-control" in measured:
                common.say_wrapped(f"control of {model}: {_control(measured)}")


def _say_rarity(evaluations: Evaluations, inputs: Inputs | None) -> None:
    """Say where one input makes up much of the error of an estimate in the table."""
    from isoloss.statistics.tables import label

    found = {}
    for model, evaluation in zip(evaluations.models, evaluations, strict=True):
        step = "" if evaluation.step is None else f" at step {evaluation.step}"
        for name, estimate in evaluation.estimates.items():
            title = label(evaluation.measure, name, tuple(evaluation.estimates))
            found[f"the {title} of {model}{step}"] = estimate
    found = {name: estimate for name, estimate in found.items() if "leading_cluster" in estimate.details}
    if warning := rarity(found, _document_names(inputs, *found.values())):
        _, *others = sorted(rare(found).items(), key=lambda item: -item[1])
        also = f" So is that of {', '.join(f'{name} ({100 * part:.0f} %)' for name, part in others)}." if others else ""
        common.say("")
        common.say_wrapped(f"{warning}, and rare inputs may put the true value far above the interval.{also}")


def _document_names(inputs: Inputs | None, *estimates: Estimate) -> Sequence[str]:
    """Return where each document is and how it begins, if the samples of the estimates are documents."""
    are_documents = all(estimate.details["clusters"] == "documents" for estimate in estimates)
    return inputs.document_names if inputs is not None and are_documents else ()


def _say_below_majority(evaluations: Evaluations) -> None:
    """Say which accuracies are below the majority class's, and why; a row of the table looks like any other."""
    from isoloss.transfer.results import below_majority

    for model, evaluation in zip(evaluations.models, evaluations, strict=True):
        accuracy = evaluation.estimates.get("accuracy")
        if accuracy is not None and (problem := below_majority(accuracy.details)) is not None:
            step = "" if evaluation.step is None else f" at step {evaluation.step}"
            common.say_wrapped(f"{evaluation.measure} of {model}{step}: {problem}")


# --- what an estimate rests on ---------------------------------------------------------------------------------------


def _print_details(args: Any, estimate: Estimate, inputs: Inputs | None) -> None:
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


def _remarks(args: Any, estimate: Estimate, inputs: Any) -> Iterator[str]:
    """What an estimate rests on, and what is to be said of its error."""
    details = estimate.details
    warning = _rarity(estimate, inputs)
    if not estimate.is_exact:
        # an error that rests on one input says nothing of how near the value is
        share = _percent(estimate.stderr / estimate.value) if estimate.value > 0 and not warning else ""
        relative = f"; the error is {share} of the value" * bool(share)
        yield f"95 % interval {interval(estimate)}{relative}, over {samples_of(estimate)}"
    if warning:
        yield (
            f"{warning}, and rare inputs may put the true value far above the interval; it takes "
            f"{_what_helps(args, inputs, estimate)}"
        )
    if "majority_rate" in details:
        yield accuracy_bounds(details)
    parameters = f"{details['num_parameters']:,} parameters" if "num_parameters" in details else ""
    if parameters and "sequences" in details:
        yield (
            f"{estimate.num_predictions:,} predicted tokens in {details['sequences']:,} sequences, {parameters}, "
            f"{details['predicts']}"
        )
    elif parameters:
        yield parameters
    if number := details.get("skipped_batches"):
        yield f"{number:,} batch{'es' if number > 1 else ''} skipped: every label is -100"
    if adjusted := adjustment(estimate):
        yield adjusted
    if "log_factors" in details:
        yield from _of_minimum(estimate)
    method = estimate.method
    if estimate.num_probes:
        drawn = "label" if "sampled labels" in method else "probe"
        each = " per token" if "clusters" in details else ""
        method += f", {estimate.num_probes} {drawn}{'s' * (estimate.num_probes > 1)}{each}"
    if {"device", "dtype"} <= details.keys():
        method += f"; {details['device']}, {details['dtype']}"
        method += f", attention {details['attention']}" if details.get("attention") else ""
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


def _rarity(estimate: Estimate, inputs: Any) -> str:
    """Return a warning where few inputs make up much of the error, else nothing."""
    if "leading_cluster" not in estimate.details:
        return ""
    return rarity({"": estimate}, _document_names(inputs, estimate))


def _missed(args: Any, estimate: Estimate) -> float:
    """Return how many times as large as asked for the error is; 0: none was asked for."""
    if args.rtol is None or not estimate.stderr:
        return 0.0
    return estimate.stderr / (args.rtol * abs(estimate.value)) if estimate.value else math.inf


def _next(args: Any, arguments: list[str], evaluations: Evaluations, inputs: Any | None) -> Iterator[str]:
    """Yield the command whose error is the one that was asked for, or half of this one, where that is to be had."""
    if inputs is None:
        return
    estimates = [estimate for evaluation in evaluations for estimate in evaluation.estimates.values()]
    for estimate in [one for one in estimates if _missed(args, one) > 1 or _rarity(one, inputs)][:1]:
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
        yield common.command_with("measure", arguments, option, more)


def _what_helps(args: Any, inputs: Any, estimate: Estimate) -> str:
    """Return what would make the error of an estimate smaller, and is to be had."""
    sequences = "more sequences, with --num-sequences"
    if args.seconds is not None and estimate.details.get("ended") == "seconds":
        sequences = "more time, with --seconds"
    elif inputs.has_most_documents or (inputs.num_held is not None and inputs.num_held <= inputs.num_sequences):
        # further sequences of the same documents would tell little that is new
        sequences = f"more {'documents' if 'documents' in inputs.batches[0] else 'sequences'} in --data"
    if "clusters" in estimate.details:
        return sequences
    covers_inputs = estimate.details.get("error_covers", "").startswith("inputs")
    return f"more probes, with --num-probes{f', and {sequences} for the part of the inputs' * covers_inputs}"


def _of_minimum(estimate: Estimate) -> Iterator[str]:
    """Yield sentences on a minimal trace beside the plain one, and on the convention where there is no minimum."""
    details = estimate.details
    plain, kept = (rounded(details[name], details[f"{name}_stderr"]) for name in ("trace", "keeping_features"))
    low, high = (rounded(details[name], estimate.stderr).split(" ±")[0] for name in ("in_sample", "cross_fitted"))
    yield f"trace at the given weights {plain}; minimum over rescalings that keep the last hidden state {kept}"
    yield (
        f"minimum over all rescalings: in sample {low} (too small on average), cross-fitted {high} (too large); the "
        "value is their mean"
    )
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
    """Return a fraction in percent with one decimal, or one significant digit where that would be 0."""
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
