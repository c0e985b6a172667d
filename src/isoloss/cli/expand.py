"""`isoloss expand`: a transformer as a larger one with the same function, and its flatness there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import files, machine
from isoloss.checkpoints import places
from isoloss.cli import common, options
from isoloss.cli.options import Loading
from isoloss.config import check, setting
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.measures.base import SequenceMeasure
from isoloss.lab.models.architectures import reshaped, shape
from isoloss.runs import Run, checkpoint_of
from isoloss.statistics.estimate import rounded
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.checkpoints.loading import LoadedModel
    from isoloss.paper.theory.expansion import Result
    from isoloss.text.inputs import Inputs

EXAMPLES = [
    (
        "isoloss expand runs/first --into d128 --output first-d128",
        "the last checkpoint of a run, as a model of width 128",
    ),
    (
        "isoloss expand runs/first --into d128 --embedding-scale balanced",
        "another way; without --output nothing is written",
    ),
    ("isoloss expand runs/heads --into d128 --heads 8", "a size with heads as narrow as those of a d64 with 4 heads"),
    ("isoloss expand CHECKPOINT --into d1536 --data text.txt", "any BERT, RoBERTa or OPT, measured on your text"),
]
# what `--help` shows; `--help-all` shows the rest
COMMON = "model into layers heads embedding_scale data tokenizer length num_sequences seed device output json"
RECORD = "expansion.json"  # the report, beside the weights


@dataclass(frozen=True)
class Args:
    """Expand a transformer to a larger one with the same function: width by copies, depth by layers that do nothing.

    Reports how far logits and hidden states differ, and the Fisher's trace before and after, by parameter.
    """

    model: options.Positional[str]
    """A run (its last checkpoint), a checkpoint folder, or a name on the Hugging Face hub."""
    into: str
    """Size of the large model, e.g. d384 (isoloss ls sizes)."""
    layers: int | None = None
    """Layers of the large model; default: those of the size."""
    width: int | None = None
    """Width of its hidden states; default: that of the size."""
    heads: int | None = None
    """Its attention heads, each as wide as the small model's (or a multiple, if that has one head); default: the
    size's."""
    ffn: int | None = None
    """Width inside its feed-forward blocks; default: 4 times the width."""
    output: Path | None = None
    """Folder to write the large model to, which must be new or empty."""
    embedding_scale: Literal["exact", "balanced", "paper"] = "exact"
    """What the embeddings are divided by, for r copies: 1, exact at every eps of the layer norms; sqrt(r), which keeps
    their part of the trace; r, as the paper prints it."""
    data: Path | None = None
    """Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs), or token ids (.npy); default, for runs: the
    run's language."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt; default: the checkpoint's own."""
    length: int | None = None
    """Tokens in a sequence, for text and flat arrays; default: 128, or what the model takes at most."""
    mask_id: int | None = None
    """For masked models and token ids: the mask's id; default: the tokenizer's."""
    num_sequences: int = setting(SequenceMeasure.num_sequences, minimum=2, note="an error bar needs two")
    """Sequences to measure on, at most; with --data, one token of each is masked for a masked model."""
    seed: int = 0
    """Decides inputs, masks and probes."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights, also of those that are written."""
    json: bool = False
    """Print one JSON document."""
    loading: Loading = field(default_factory=Loading)


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "expand", arguments, examples=EXAMPLES, common=COMMON)
    check(args)
    into = reshaped(shape(args.into), layers=args.layers, width=args.width, heads=args.heads, ffn=args.ffn)
    if args.output is not None:
        files.check_new(args.output)
    run = Run(Path(args.model))
    name = str(run.checkpoint(run.last_step())) if run.exists else args.model
    places.check_reachable(name)
    machine.check_device(args.loading.device)
    if args.data is not None:
        hub_datasets.check_data(args.data)
    common.use_threads(args.threads)
    import torch

    from isoloss.checkpoints.loading import load_model
    from isoloss.lab.models.expansion import check_fits, expand, shape_of
    from isoloss.paper.theory.expansion import judge_expansion

    loaded = load_model(name, dtype=getattr(torch, args.dtype), **vars(args.loading))
    check_fits(shape_of(loaded.model), into)
    inputs = _inputs(args, name, loaded)
    expanded = expand(loaded.model, into, embedding_scale=args.embedding_scale)
    # both models take the same batches, so the larger one decides how large they may be
    inputs = inputs.cut(inputs.fitting_batch_size(expanded.model.config))
    common.note(f"{name}: {loaded.architecture}, {loaded.kind}; {inputs.description}")
    with common.Progress("expand", 3 * inputs.num_sequences, "sequences") as progress:
        result = judge_expansion(
            loaded.model,
            expanded,
            inputs.batches,
            causal=loaded.kind == "causal",
            seed=args.seed,
            progress=progress,
        )
    document = {
        "model": name,
        "into": _name_of(args),
        "shape": dataclasses.asdict(into),
        "embedding_scale": args.embedding_scale,
        "dtype": args.dtype,
        "data": inputs.description,
        "differences": dataclasses.asdict(result.differences),
        # without times, the record is a function of model and settings
        "before": {**result.before.to_dict(), "seconds": None},
        "after": {**result.after.to_dict(), "seconds": None},
        "change": result.change.to_dict(),
        "parameters": [dataclasses.asdict(part) for part in result.contributions],
        "statements": [statement.to_dict() for statement in result.statements],
    }
    if args.output is not None:
        _write(args.output, expanded.model, name, document)
    if args.json:
        common.emit_json(document)
    else:
        _print(args, result)
    return 0


def _name_of(args: Args) -> str:
    """Return the large model's size and what is set beside it."""
    changes = [f"{name} {value}" for name in ("layers", "width", "heads", "ffn") if (value := getattr(args, name))]
    return ", ".join([args.into, *changes])


def _inputs(args: Args, name: str, loaded: LoadedModel) -> Inputs:
    from isoloss.lab.evaluation.context import language_inputs
    from isoloss.model_checks import max_length
    from isoloss.text.inputs import read_inputs

    if args.data is not None:
        return read_inputs(
            args.data,
            checkpoint=name,
            tokenizer=args.tokenizer,
            config=loaded.model.config,
            kind=loaded.kind,
            max_length=max_length(loaded.model),
            length=args.length,
            num_sequences=args.num_sequences,
            mask_id=args.mask_id,
            seed=args.seed,
        )
    checkpoint = checkpoint_of(Path(name))
    if checkpoint is None:
        raise IsolossError(
            f"{name} is not a checkpoint of a run, so there is no language to measure it on: add --data with "
            "text or a .npy file of token ids"
        )
    config = checkpoint[0].absolute_config
    return language_inputs(config.language.build(), config.objective, num_sequences=args.num_sequences, seed=args.seed)


def _write(out: Path, model: Any, source: str, document: dict[str, Any]) -> None:
    """Write the model with its source's tokenizer, if that has one, and the record, whole or not at all."""
    from safetensors import SafetensorError

    from isoloss.checkpoints.loading import quiet
    from isoloss.lab.training.checkpoints import save_model
    from isoloss.text.tokenizers import load_tokenizer

    try:
        tokenizer = load_tokenizer(source)
    except IsolossError:
        tokenizer = None
    try:
        with files.new_directory(out) as folder, quiet():
            save_model(folder, model, tokenizer)
            files.write_json(folder / RECORD, document)
    except (OSError, SafetensorError) as error:
        raise IsolossError(f"cannot write {out}: {error}") from error
    common.note(f"written: {out}")


_NEGLIGIBLE = 1e-12  # of the trace: a smaller part is 0 but for rounding, such as a key's bias


def _print(args: Args, result: Result) -> None:
    cells = []
    for part in result.contributions:
        is_zero = part.before <= _NEGLIGIBLE * result.before.value
        ratio = "" if is_zero else f"{part.after / part.before:.4f}"
        factor = "" if part.factor is None else f"{part.factor:.4f}"
        before = "" if part.factor is None else f"{part.before:.4g}"
        cells.append((part.name, f"{part.parameters:,}", before, f"{part.after:.4g}", ratio, factor))
    columns = ("parameter", "size", "before", "after", "ratio", "expected")
    common.print_table("part of the trace, nats per predicted token; * is any layer", columns, cells)
    before, after = (trace.details["num_parameters"] for trace in (result.before, result.after))
    common.say(f"\ntrace of the Fisher before: {result.before}, over {before:,} parameters")
    common.say(f"trace of the Fisher in {_name_of(args)}: {result.after}, over {after:,} parameters")
    change = rounded(result.change.value, result.change.stderr)
    common.say(
        f"change: {change} nats per predicted token, on the same {result.before.num_predictions:,} predicted tokens"
    )
    common.say(f"  embedding scale {args.embedding_scale}; {result.before.details['device']}, {args.dtype}")
    common.say_statements(result.statements)
