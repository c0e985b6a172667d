"""`isoloss flatness`: the flatness of any Hugging Face masked or causal language model, with its error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from isoloss.cli import common
from isoloss.cli.transfer import checkpoint_of
from isoloss.config import ObjectiveConfig
from isoloss.errors import IsolossError
from isoloss.estimate import rounded
from isoloss.runs import Run

if TYPE_CHECKING:
    from isoloss.estimate import Estimate
    from isoloss.loading import Loaded
    from isoloss.measures.inputs import Inputs

EXAMPLES = [
    ("isoloss flatness CHECKPOINT --data text.txt", "a checkpoint with its tokenizer, on your text"),
    ("isoloss flatness CHECKPOINT --data tokens.npy", "on token ids: an array of sequences"),
    ("isoloss flatness runs/first/checkpoints/step-1000", "a checkpoint of a run, on the run's own language"),
]


@dataclass(frozen=True)
class Args:
    """Trace of the Fisher of the loss per predicted token: the paper's flatness. Smaller is flatter.

    It equals the trace of the Hessian where the model's conditionals are the true ones. Compare models of one
    architecture, on the same data, at about the same loss.
    """

    model: tyro.conf.Positional[str]
    """A checkpoint folder or a name on the Hugging Face hub."""
    data: Path | None = None
    """Text (.txt, .jsonl or a folder), or token ids (.npy); for a checkpoint of a run: default, the run's language."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt; default: the checkpoint's own."""
    num_inputs: int = 512
    """Sequences to measure on, at most."""
    length: int = 128
    """Tokens in a sequence, for text and flat arrays."""
    masking: Literal["one", "fraction"] = "fraction"
    """For masked models: hide one token of each sequence, or a fraction of all."""
    fraction: float = ObjectiveConfig.fraction
    """The fraction, where masking is fraction."""
    mask_id: int | None = None
    """For masked models and token ids: the mask's id; default: the tokenizer's."""
    method: Literal["ghost", "paper"] = "ghost"
    """One backward pass a batch with labels integrated out, or the paper's: one for each of 50 sampled labels."""
    num_probes: int | None = None
    """Random signs (default 1) or sampled labels (default 50) for each input."""
    seed: int = 0
    """Decides masks and signs."""
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
    by_parameter: bool = False
    """Print the share of each parameter."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "flatness", arguments, examples=EXAMPLES)
    if args.num_inputs < 2:
        raise IsolossError(f"--num-inputs is {args.num_inputs}; an error bar needs at least 2")
    if (run := Run(Path(args.model))).exists:
        steps = run.steps()
        raise IsolossError(
            f"{args.model} is a run, and flatness is a checkpoint's: "
            + (f"name {run.checkpoint(steps[-1])}" if steps else "it has none yet")
        )
    common.use_threads(args.threads)
    import torch

    from isoloss.loading import load
    from isoloss.measures.flatness import InterruptedEstimate, fisher_trace

    loaded = load(
        args.model,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        attention=args.attention,
        trust_remote_code=args.trust_remote_code,
    )
    inputs = _inputs(args, loaded)
    common.note(f"{args.model}: {loaded.architecture}, {loaded.kind}; {inputs.description}")
    interrupted = False
    with common.Progress("flatness", inputs.num_sequences, "sequences") as progress:
        try:
            trace = fisher_trace(
                loaded.model,
                inputs.batches,
                method=args.method,
                num_probes=args.num_probes,
                seed=args.seed,
                causal=loaded.kind == "causal",
                progress=progress,
            )
        except InterruptedEstimate as stop:
            trace, interrupted = stop.partial, True
    if interrupted:
        common.note("interrupted; the estimate so far:")
    if args.json:
        common.emit_json(
            {
                "model": args.model,
                "architecture": loaded.architecture,
                "data": inputs.description,
                "interrupted": interrupted,
                "fisher_trace": trace.to_dict(),
            }
        )
    else:
        _print(args, trace)
    return 130 if interrupted else 0


FOR_MASKED = ("masking", "fraction", "mask_id")  # options that say which tokens are hidden
FOR_DATA = ("tokenizer", "length", *FOR_MASKED)  # options that say how --data is read


def _inputs(args: Args, loaded: Loaded) -> Inputs:
    from isoloss.measures import inputs

    found = checkpoint_of(Path(args.model))
    if args.data is None:
        if found is None:
            raise IsolossError(
                f"{args.model} is not a checkpoint of a run, so there is no language to measure it on: add --data with "
                "text or a .npy file of token ids"
            )
        if unused := _given(args, FOR_DATA):
            raise IsolossError(
                f"{args.model} is measured on its run's language, masked as in its training: leave out "
                f"{', '.join(unused)}, or add --data"
            )
        return inputs.language_inputs(found[0].config, num_inputs=args.num_inputs, seed=args.seed)
    if loaded.kind == "causal" and (unused := _given(args, FOR_MASKED)):
        raise IsolossError(f"{args.model} predicts next tokens and has none hidden: leave out {', '.join(unused)}")
    return inputs.read_inputs(
        args.data,
        checkpoint=args.model,
        tokenizer=args.tokenizer,
        config=loaded.model.config,
        kind=loaded.kind,
        length=args.length,
        num_inputs=args.num_inputs,
        masking=ObjectiveConfig(masking=args.masking, fraction=args.fraction),
        mask_id=args.mask_id,
        seed=args.seed,
    )


def _given(args: Args, names: tuple[str, ...]) -> list[str]:
    """Return those of the options that have another value than their default."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != getattr(Args, name)]


def _print(args: Args, trace: Estimate) -> None:
    details = trace.details
    common.say(f"trace of the Fisher: {trace}")
    relative = f", {100 * trace.stderr / trace.value:.1f} % of the value" if trace.value > 0 else ""
    low, high = (rounded(end, trace.stderr).split(" ±")[0] for end in trace.ci95)
    common.say(
        f"  95 % interval {low} to {high}{relative} (standard error over {trace.samples:,} {details['clusters']})"
    )
    common.say(
        f"  {trace.num_inputs:,} predicted tokens in {details['sequences']:,} sequences, "
        f"{details['num_parameters']:,} parameters, {details['predicts']}"
    )
    common.say(
        f"  {trace.method}, {trace.num_probes} per token; {details['device']}, {details['dtype']}, "
        f"attention {details['attention']}; {trace.seconds:.1f} s"
    )
    if details["parameters_without_gradient"]:
        common.say(f"  parameters without gradient: {', '.join(details['parameters_without_gradient'])}")
    if args.by_parameter and trace.by_parameter:
        rows = sorted(trace.by_parameter.items(), key=lambda item: -item[1])
        cells = [(name, f"{share:.6g}", f"{100 * share / trace.value:.2f} %") for name, share in rows]
        common.print_table("\nby parameter", ("parameter", "nats per predicted token", "share"), cells)
