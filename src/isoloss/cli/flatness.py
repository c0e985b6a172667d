"""`isoloss flatness`: the flatness of Hugging Face masked or causal language models, with its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import files, interrupts
from isoloss.cli import common, comparison
from isoloss.errors import IsolossError
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.runs import Run, checkpoint_of
from isoloss.statistics.estimate import rounded

if TYPE_CHECKING:
    from isoloss.flatness.compare import InterruptedComparison, Outline
    from isoloss.flatness.differences import Comparison
    from isoloss.loading import Kind, Loaded
    from isoloss.statistics.estimate import Estimate
    from isoloss.text.inputs import Inputs

EXAMPLES = [
    ("isoloss flatness CHECKPOINT --data text.txt", "a checkpoint with its tokenizer, on your text"),
    ("isoloss flatness CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss flatness A B C --data text.txt", "which of several is the flattest, on the same inputs"),
    ("isoloss flatness A B --data text.txt --figure ab.svg", "with a figure: trace against loss"),
    ("isoloss flatness runs/first/checkpoints/step-1000", "a checkpoint of a run, on the run's own language"),
    ("isoloss flatness CHECKPOINT --data text.txt --num-inputs 100000 --rtol 0.01", "until the error is 1 %"),
]


@dataclass(frozen=True)
class Args:
    """Trace of the Fisher of the loss per predicted token: the paper's flatness. Smaller is flatter.

    It equals the trace of the Hessian where the model's conditionals are the true ones. Several models are measured one
    after another on the same inputs with the same random signs, and compared. Compare models of one architecture, at
    about the same loss.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """One or more checkpoint folders or names on the Hugging Face hub."""
    data: Path | None = None
    """Text (.txt, .jsonl or a folder), or token ids (.npy); for a checkpoint of a run: default, the run's language."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt; default: the first checkpoint's own."""
    num_inputs: int = 512
    """Sequences to measure on, at most; the tokens of all others in --data make the error smaller."""
    rtol: float | None = None
    """Stop when the standard error is at most this share of the value; looked at after 64, 128, 256, ... sequences or
    documents. Of several models the first decides."""
    seconds: float | None = None
    """Stop after this time, if 64 sequences or documents are done. Of several models the first decides."""
    resume: Path | None = None
    """For one model: a file to go on from, written every half minute and removed at the end."""
    batch_size: int | None = None
    """Sequences in a pass; default: as many, up to 256, as keep the logits of the predicted tokens below 256 MiB and
    the layers' activations around 1 GiB. It does not change the inputs or signs, only time and memory."""
    length: int | None = None
    """Tokens in a sequence, for text and flat arrays; default: 128, or what the first model takes at most."""
    masking: Literal["one", "fraction"] = "fraction"
    """For masked models: hide one token of each sequence, or a fraction of all."""
    fraction: float = ObjectiveConfig.fraction
    """The fraction, where masking is fraction."""
    mask_id: int | None = None
    """For masked models and token ids: the mask's id; default: the tokenizer's."""
    method: Literal["ghost", "paper"] = "ghost"
    """One backward pass a batch, in expectation over all labels, or the paper's: one for each of 50 sampled."""
    num_probes: int | None = None
    """Random signs (default 1) or sampled labels (default 50) for each predicted token."""
    seed: int = 0
    """Decides inputs, masks and signs."""
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
    """Print the share of each layer."""
    by_parameter: bool = False
    """For one model: print the share of each parameter."""
    figure: Path | None = None
    """For several models: draw trace against loss to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""


FOR_MASKED = ("masking", "fraction", "mask_id")  # options that say which tokens are hidden
FOR_DATA = ("tokenizer", "length", *FOR_MASKED)  # options that say how --data is read
FOR_ONE = ("resume", "method", "by_layer", "by_parameter")  # options that have no meaning for several models


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "flatness", arguments, examples=EXAMPLES)
    _check(args)
    common.use_threads(args.threads)
    from isoloss.flatness.engine.run import Stopping

    Stopping(rtol=args.rtol, seconds=args.seconds)  # refuses a value out of range before a model is loaded
    return _one(args, args.models[0]) if len(args.models) == 1 else _several(args)


def _check(args: Args) -> None:
    """Refuse what needs no model to be seen as wrong."""
    if not args.models:
        raise IsolossError("no checkpoint is named: give a folder, or a name on the Hugging Face hub")
    if args.num_inputs < 2:
        raise IsolossError(f"--num-inputs is {args.num_inputs}; an error bar needs at least 2")
    if args.batch_size is not None and args.batch_size < 1:
        raise IsolossError(f"--batch-size is {args.batch_size}; it must be at least 1")
    for name in args.models:
        if (run := Run(Path(name))).exists:
            steps = run.steps()
            raise IsolossError(
                f"{name} is a run, and flatness is a checkpoint's: "
                + (f"name {run.checkpoint(steps[-1])}" if steps else "it has none yet")
            )
    if len(args.models) == 1:
        if args.figure is not None:
            raise IsolossError("--figure shows several models beside each other: name another one, or leave it out")
        if args.resume is not None:
            files.check_writable(args.resume.parent)
        return
    if twice := next((name for i, name in enumerate(args.models) if name in args.models[:i]), None):
        raise IsolossError(f"{twice} is named twice; a model is compared with others")
    if unused := _given(args, FOR_ONE):
        raise IsolossError(f"{', '.join(unused)}: only for one model, and {len(args.models)} are named")
    common.check_figure(args.figure)


def _load(args: Args, name: str) -> Loaded:
    import torch

    from isoloss.loading import load_model

    return load_model(
        name,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        attention=args.attention,
        trust_remote_code=args.trust_remote_code,
    )


# --- one model -------------------------------------------------------------------------------------------------------


def _one(args: Args, name: str) -> int:
    loaded = _load(args, name)
    inputs = _inputs(args, name, loaded.kind, loaded.model.config)
    from isoloss.flatness import InterruptedEstimate, fisher_trace
    from isoloss.flatness.engine.auxiliary_sample import input_embeddings

    inputs = inputs.cut(args.batch_size or inputs.fitting_batch_size(loaded.model.config))
    common.note(f"{name}: {loaded.architecture}, {loaded.kind}; {inputs.description}")
    interrupted = False
    with common.Progress("flatness", inputs.num_sequences, "sequences") as progress:
        try:
            trace = fisher_trace(
                loaded.model,
                inputs.batches,
                method=args.method,
                num_probes=args.num_probes,
                seed=args.seed,
                rtol=args.rtol,
                seconds=args.seconds,
                causal=loaded.kind == "causal",
                auxiliary_sample=None if input_embeddings(loaded.model) is None else inputs.pool,
                resume=args.resume,
                progress=progress,
            )
        except InterruptedEstimate as stop:
            trace, interrupted = stop.partial, True
    if interrupted:
        common.note(f"interrupted; the estimate from the first {trace.details['sequences']:,} sequences:")
    if args.json:
        common.emit_json(
            {
                "model": name,
                "architecture": loaded.architecture,
                "data": inputs.description,
                "interrupted": interrupted,
                "fisher_trace": trace.to_dict(),
            }
        )
    else:
        _print(args, trace)
    return interrupts.status() if interrupted else 0


_FEW = 32  # clusters, of which one may well make up much of the error
_LARGEST = 3  # shares that are printed in any case
_LEADING = 0.25  # of the squared error: more than one cluster should make up


def _print(args: Args, trace: Estimate) -> None:
    common.say(f"trace of the Fisher: {trace}")
    for line in _remarks(args, trace):
        common.say_wrapped(line, indent=2)
    if not args.by_parameter:
        _print_largest(trace)
    if args.by_layer:
        _print_shares("layer", trace, trace.by_layer or {}, trace.by_layer_stderr or {})
    if args.by_parameter:
        _print_shares("parameter", trace, trace.by_parameter or {}, trace.by_parameter_stderr or {})


def _remarks(args: Args, trace: Estimate) -> Iterator[str]:
    """What a trace rests on, and what is to be said of its error."""
    details = trace.details
    relative = f"; the error is {percent(trace.stderr / trace.value)} of the value" if trace.value > 0 else ""
    yield f"95 % interval {comparison.interval(trace)}{relative}, over {trace.samples:,} {details['clusters']}"
    if trace.samples >= _FEW and details["leading_cluster"] > _LEADING:
        part = f"{100 * details['leading_cluster']:.0f} %"
        yield (
            f"one of the {details['clusters']} makes up {part} of the squared error: "
            "its kind is too rare here for the error to be right; measure more"
        )
    yield (
        f"{trace.num_inputs:,} predicted tokens in {details['sequences']:,} sequences, "
        f"{details['num_parameters']:,} parameters, {details['predicts']}"
    )
    yield from comparison.skipped(trace)
    yield from comparison.adjustment(trace)
    drawn = "labels" if args.method == "paper" else "sign vectors"
    yield (
        f"{trace.method}, {trace.num_probes} {drawn if trace.num_probes > 1 else drawn[:-1]} per token; "
        f"{details['device']}, {details['dtype']}, attention {details['attention']}; {trace.seconds:.1f} s"
    )
    if details.get("parameters_by_autograd"):
        yield f"by automatic differentiation, a sequence at a time: {', '.join(details['parameters_by_autograd'])}"
    if details["quantized_weights"]:
        yield f"{details['quantized_weights']:,} quantized weights were not measured: they are not parameters"
    if details["parameters_without_gradient"]:
        yield f"parameters without gradient: {', '.join(details['parameters_without_gradient'])}"
    if args.rtol is not None and trace.stderr > args.rtol * trace.value:
        yield f"the error is above --rtol {args.rtol:g}: give more --num-inputs"


def percent(share: float) -> str:
    """Return a share in percent with one decimal, or one significant digit where that would be 0.

    Example:
        >>> percent(0.0371), percent(0.00512), percent(0.00038)
        ('3.7 %', '0.5 %', '0.04 %')
    """
    return f"{100 * share:{'.1f' if share >= 0.001 else '.1g'}} %"


def _print_largest(trace: Estimate) -> None:
    """Print the parameters with the largest shares, and what is left without embeddings."""
    shares, errors, details = trace.by_parameter or {}, trace.by_parameter_stderr or {}, trace.details
    if len(shares) < 2 or trace.value <= 0:
        return
    largest = sorted(shares, key=lambda name: -shares[name])[:_LARGEST]
    lines = [(name, shares[name], errors[name]) for name in largest]
    if details["embeddings"]:
        lines.append(("without embeddings", details["without_embeddings"], details["without_embeddings_stderr"]))
    cells = [(name, rounded(value, error), f"{100 * value / trace.value:.1f} %") for name, value, error in lines]
    common.print_table("\nlargest shares by parameter", ("parameter", "nats per predicted token", "share"), cells)


def _print_shares(part: str, trace: Estimate, shares: Mapping[str, float], errors: Mapping[str, float]) -> None:
    rows = sorted(shares.items(), key=lambda item: -item[1])
    cells = [(name, rounded(share, errors[name]), f"{100 * share / trace.value:.2f} %") for name, share in rows]
    common.print_table(f"\nby {part}", (part, "nats per predicted token", "share"), cells)


# --- several models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """What is known of a model before it is measured."""

    name: str
    kind: Kind
    architecture: str
    outline: Outline
    config: Any
    has_embeddings: bool


def _several(args: Args) -> int:
    from isoloss.flatness.compare import InterruptedComparison, compare

    candidates = [_candidate(args, name) for name in args.models]
    inputs = _common_inputs(args, candidates)
    for candidate in candidates:
        common.note(f"{candidate.name}: {candidate.architecture}, {candidate.kind}")
    common.note(inputs.description)
    places = {name: place for place, name in enumerate(args.models)}
    total = inputs.num_sequences * len(places)
    stop: InterruptedComparison | None = None
    found: Comparison | None = None
    with common.Progress("flatness", total, "sequences") as progress:
        try:
            found = compare(
                {name: partial(_model, args, name) for name in args.models},
                inputs.batches,
                seed=args.seed,
                num_probes=args.num_probes,
                rtol=args.rtol,
                seconds=args.seconds,
                causal=candidates[0].kind == "causal",
                auxiliary_sample=inputs.pool if candidates[0].has_embeddings else None,
                progress=lambda name, done: progress(places[name] * inputs.num_sequences + done, name),
            )
        except InterruptedComparison as interruption:
            stop, found = interruption, interruption.complete
    if args.figure is not None and found is not None:
        from isoloss.report.flatness import trace_against_loss

        short = comparison.short_names([model.name for model in found.models])
        common.save_figure(args.figure, trace_against_loss(found, short))
    if args.json:
        common.emit_json(
            {
                "data": inputs.description,
                "interrupted": stop is not None,
                **({} if found is None else {**found.to_dict(), "ranking": list(found.ranking)}),
                **({} if stop is None else {"partial": _partial(stop)}),
            }
        )
        return 0 if stop is None else interrupts.status()
    if found is not None:
        comparison.print_tables(found)
    if stop is not None:
        common.note(f"interrupted while {stop.name} was measured")
        if stop.partial is not None:
            common.say(f"trace of the Fisher of {stop.name} so far: {stop.partial}")
    return 0 if stop is None else interrupts.status()


def _candidate(args: Args, name: str) -> _Candidate:
    """Load a model to see what it is, and drop it."""
    from isoloss.flatness.compare import Outline
    from isoloss.flatness.engine.auxiliary_sample import input_embeddings

    loaded = _load(args, name)
    outline = Outline.of(name, loaded.model, loaded.kind == "causal")
    has_embeddings = input_embeddings(loaded.model) is not None
    return _Candidate(name, loaded.kind, loaded.architecture, outline, loaded.model.config, has_embeddings)


def _model(args: Args, name: str) -> Any:
    return _load(args, name).model


def _partial(stop: InterruptedComparison) -> dict[str, Any]:
    return {"model": stop.name, "fisher_trace": None if stop.partial is None else stop.partial.to_dict()}


def _common_inputs(args: Args, candidates: list[_Candidate]) -> Inputs:
    """Return inputs that all models take in the same meaning.

    Raises:
        IsolossError: There are none.
    """
    from isoloss.text.inputs import check_model

    first = candidates[0]
    for other in candidates[1:]:
        first.outline.check(other.outline)
    if args.data is None:
        _check_languages([candidate.name for candidate in candidates])
    else:
        _check_tokenizers([candidate.name for candidate in candidates])
    inputs = _inputs(args, first.name, first.kind, first.config)
    for other in candidates[1:]:
        check_model(inputs, other.config, other.name)
    fitting = min(inputs.fitting_batch_size(candidate.config) for candidate in candidates)
    return inputs.cut(args.batch_size or fitting)


def _check_languages(names: list[str]) -> None:
    """Refuse checkpoints that are not all of runs on one language with one objective."""
    known: tuple[str, TrainConfig] | None = None
    for name in names:
        config = _run_config(name)
        if known is not None and (known[1].language, known[1].objective) != (config.language, config.objective):
            raise IsolossError(
                f"{known[0]} and {name} are of runs with different languages or objectives: add --data to compare them"
            )
        known = known or (name, config)


def _check_tokenizers(names: list[str]) -> None:
    """Refuse checkpoints that bring tokenizers in which an id is not the same token."""
    from isoloss.text.tokenizers import load_tokenizer

    known: tuple[str, dict[str, int]] | None = None
    for name in names:
        try:
            vocabulary = load_tokenizer(name).get_vocab()
        except IsolossError:
            continue  # it has none of its own: token ids, or a tokenizer that is given, say what it reads
        if known is not None and known[1] != vocabulary:
            raise IsolossError(
                f"{known[0]} and {name} have different tokenizers, so their losses per token are not of the same thing"
            )
        known = known or (name, vocabulary)


# --- both ------------------------------------------------------------------------------------------------------------


def _inputs(args: Args, name: str, kind: Kind, config: Any) -> Inputs:
    """Return the inputs, in random order where the measurement may stop before their end."""
    found = _in_order(args, name, kind, config)
    return found if args.rtol is None and args.seconds is None else found.shuffled(args.seed)


def _in_order(args: Args, name: str, kind: Kind, config: Any) -> Inputs:
    from isoloss.evaluation.inputs import language_inputs
    from isoloss.text.inputs import read_inputs

    if args.data is None:
        config_of_run = _run_config(name)
        if unused := _given(args, FOR_DATA):
            raise IsolossError(
                f"{name} is measured on its run's language, masked as in its training: leave out "
                f"{', '.join(unused)}, or add --data"
            )
        return language_inputs(config_of_run, num_inputs=args.num_inputs, seed=args.seed)
    if kind == "causal" and (unused := _given(args, FOR_MASKED)):
        raise IsolossError(f"{name} predicts next tokens and has none hidden: leave out {', '.join(unused)}")
    return read_inputs(
        args.data,
        checkpoint=name,
        tokenizer=args.tokenizer,
        config=config,
        kind=kind,
        length=args.length,
        num_inputs=args.num_inputs,
        masking=ObjectiveConfig(masking=args.masking, fraction=args.fraction),
        mask_id=args.mask_id,
        seed=args.seed,
    )


def _run_config(name: str) -> TrainConfig:
    found = checkpoint_of(Path(name))
    if found is None:
        raise IsolossError(
            f"{name} is not a checkpoint of a run, so there is no language to measure it on: add --data with "
            "text or a .npy file of token ids"
        )
    return found[0].config


def _given(args: Args, names: tuple[str, ...]) -> list[str]:
    """Return those of the options that have another value than their default."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != getattr(Args, name)]
