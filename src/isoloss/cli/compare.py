"""`isoloss compare`: two models or more on one text, in one table with one verdict."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from isoloss import config as configs
from isoloss import files, interrupts, machine
from isoloss.checkpoints import places
from isoloss.cli import common, options
from isoloss.cli.options import ModuleLoading
from isoloss.errors import IsolossError, require_package
from isoloss.lab.evaluation.input_config import InputConfig, language_of_runs
from isoloss.lab.evaluation.measures.base import SequenceMeasure
from isoloss.lab.evaluation.measures.flatness import flatness_measure, flatness_measures
from isoloss.lab.evaluation.measures.transfer import task_probes
from isoloss.runs import last_checkpoint, refuse_twice
from isoloss.statistics.checking import at_least, positive
from isoloss.statistics.significance import LOSS_MARGIN, MIN_RATIO
from isoloss.statistics.tables import csv_table
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.comparison.models import ModelComparison
    from isoloss.comparison.verdict import Reason

EXAMPLES = [
    ("isoloss compare A B", "on a text that comes with Python"),
    ("isoloss compare A B --data text.txt --html page.html", "on your text, with a page"),
    ("isoloss compare A B --data text.txt --task sst2", "with the accuracy of a probe on a task"),
    ("isoloss compare A B --task mine=reviews.csv", "on your own task: columns text and label"),
    ("isoloss compare A B --data text.txt --measures largest-eigenvalue fisher-rao", "with other measures of flatness"),
    ("isoloss compare A B --data text.txt --figure ab.svg", "with a figure: trace against loss"),
    ("isoloss compare TRAINER-OUTPUT --data text.txt --output kept", "all checkpoints of a Trainer's output"),
    ("isoloss compare 'A/checkpoint-*' 'B/checkpoint-*'", "two runs at the same losses"),
    ("isoloss compare 'EleutherAI/pythia-14m@step*000' --data text.txt", "revisions of a model on the hub"),
]
COMMON = "models data tokenizer length num_sequences task loss_margin output html csv json device"
_MORE = 4  # times as many sequences: errors about half as large
_OPEN: frozenset[Reason] = frozenset({"open", "loss open", "rare"})  # what more inputs may answer


@dataclass(frozen=True)
class Args:
    """Compare models on the same inputs: loss, flatness, robustness to small changes of the weights, and tasks.

    The output is one table and one verdict: are the losses the same, and is one model flatter both by its trace and by
    its minimal trace, which rescaling the weights does not change? The table also says how far the loss rises with
    weights of 8 and 4 bits and under noise. All differences are paired by input, with errors over documents.
    """

    models: options.Positional[tuple[str, ...]]
    """Checkpoint folders, runs of isoloss (their last checkpoint), folders of checkpoints such as a Trainer's output,
    or names on the Hugging Face hub (NAME@REVISION); also patterns: 'runs/*/checkpoint-*', 'NAME@step*'. With
    --module: files of weights."""
    data: Path | None = None
    """Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs), or token ids (.npy); default: python:docs,
    the language reference that comes with Python."""
    measures: tuple[str, ...] = ()
    """Measures of flatness to add to the table, on the same inputs (isoloss ls measures lists them, isoloss ls measures
    NAME the settings of one): each is a row, with its paired difference where its error can be paired."""
    rtol: float | None = configs.setting(None, above=0, below=1)
    """Stop measuring the traces when the standard error of the first model's is at most this fraction of its value; the
    other models get as many sequences. Checked after 64, 128, 256, ... sequences or documents."""
    seconds: float | None = configs.setting(None, above=0)
    """Stop measuring the traces of the first model after this time; the others get as many sequences."""
    task: tuple[str, ...] = ()
    """Tasks (isoloss ls tasks), or tasks of your own as NAME=FILE: the accuracy of a linear probe on the last hidden
    states. FILE (.csv, .tsv, .jsonl, .json) has the columns text and label, and pair for a second text. NAME=PATH also
    says where the examples of a known task are: in a file, a folder or hf:NAME."""
    pooling: Literal["auto", "last", "mean", "first", "concatenate"] = "auto"
    """Which token states the probe of a task reads; auto: the last token of causal models, the mean over
    tokens of masked ones. Another pooling may rank the models differently."""
    loss_margin: float = LOSS_MARGIN
    """How far losses may be apart to count as the same, in nats per predicted token."""
    min_ratio: float = MIN_RATIO
    """The smallest ratio of two traces that counts: no model is called the flattest if another is closer than this."""
    output: Path | None = None
    """Keep the numbers of each finished model in this folder; if interrupted, the same command resumes."""
    html: Path | None = None
    """Write a self-contained page to this file."""
    csv: Path | None = None
    """Write all numbers to this file, one per row."""
    parquet: Path | None = None
    """Write the same rows to this Parquet file."""
    figure: Path | None = None
    """Draw trace against loss, a point a model, to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention kernel; auto: sdpa where the architecture has it, else eager."""
    loading: ModuleLoading = field(default_factory=ModuleLoading)


def arguments_class() -> type:
    """Return the arguments with the settings of all measures of flatness."""
    return options.with_measures(Args, flatness_measures())


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: Any = options.parse(arguments_class(), "compare", arguments, examples=EXAMPLES, common=COMMON)
    names = places.expand_checkpoints(args.models, common.note)
    models = {name: _last(name) for name in names}
    _check(args, names, [models[name] for name in names])
    common.use_threads(args.threads)
    import torch

    from isoloss.comparison.traces import ComparisonError, Incomplete
    from isoloss.lab.evaluation.compare import DATA, compare

    inputs = dict(args.inputs)
    if args.data is None:
        run = None if inputs.get("tokenizer") else language_of_runs(list(models.values()))
        data = f"{DATA}, the language reference that comes with Python" if run is None else "the language of their runs"
        common.note(f"no --data: models are compared on {data}")
    failed: Incomplete | None = None
    settings = dict(args.measure)
    num_sequences, seed = (
        settings.pop("num_sequences", SequenceMeasure.num_sequences),
        settings.pop("seed", SequenceMeasure.seed),
    )
    places_of = {name: place for place, name in enumerate(models)}

    def progress(model: str, done: int) -> None:
        # how many sequences there are is known at the end alone: the text may have fewer
        bar(places_of[model] + min(1.0, done / num_sequences), f"{model}, {done:,} sequences")

    with common.Progress("measuring", len(models), "models") as bar:
        try:
            compared = compare(
                models,
                data=args.data,
                tokenizer=inputs.pop("tokenizer", None),
                tasks=args.task,
                measures=args.measures,
                settings=settings,
                pooling=args.pooling,
                num_sequences=num_sequences,
                seed=seed,
                rtol=args.rtol,
                seconds=args.seconds,
                loss_margin=args.loss_margin,
                min_ratio=args.min_ratio,
                inputs=InputConfig(**inputs),
                dtype=getattr(torch, args.dtype),
                attention=args.attention,
                output=args.output,
                progress=progress,
                **vars(args.loading),
            )
        except Incomplete as stop:
            if stop.complete is None:
                raise
            compared, failed = cast("ModelComparison", stop.complete), stop
    about = next(iter(compared.of("trace").values())).details
    # of one or two models, or of the pairs of each two series
    of_pairs = (pair.comparison.verdict() for found in compared.pairs_at_same_loss.values() for pair in found)
    verdicts = of_pairs if compared.series else [compared.verdict()] * (len(compared.models) > 1)
    reasons = [each.reasons for each in verdicts]
    # further sequences of the same documents are no further samples of what is rare
    needs_documents = compared.has_most_documents and any("rare" in each for each in reasons)
    has_more = about["sequences"] == num_sequences != compared.num_held and not needs_documents
    more = "more sequences (--num-sequences)" if has_more else "more text in --data"
    if about["sequences"] == compared.num_held:
        more += f" (all {compared.num_held:,} sequences of it are used)"
    elif needs_documents:
        more = "more documents in --data (nearly all of its documents are used)"
    elif about["ended"] in ("rtol", "seconds"):
        more = {"rtol": "a smaller --rtol", "seconds": "more time (--seconds)"}[about["ended"]]
    commands = []
    if len(compared.models) > 1 and failed is None:
        # at other losses, more sequences give no verdict either
        is_open = any("loss" not in each and not _OPEN.isdisjoint(each) for each in reasons)
        # more than there are would be all
        most = min(_MORE * num_sequences, compared.num_held or _MORE * num_sequences)
        taken = most if has_more and is_open else None
        of_all = () if compared.series else reasons[0]
        commands = _next(args, arguments, list(models.values()), of_all, taken, compared.nearest)
    if args.json:
        common.emit_json(compared.to_dict())
    else:
        header, rows, left = compared.table(brief=True)
        common.print_table(compared.inputs, header, rows, left=left)
        if len(rows[0]) < len(compared.table()[0]):
            # the page of series has charts of the measures whose changes the text gives
            places_of_all = "--csv and --json" if compared.series else "--html, --csv and --json"
            common.note(f"the other measures are in {places_of_all}")
        for text in compared.texts(more):
            common.say("")
            common.say_wrapped(text)
        for header, rows, left in compared.pairs_tables():
            common.say("")
            common.print_table("At the same loss", header, rows, left=left)
        common.say_next(commands)
    # last, so that a full disk does not cost the table
    _write(args, compared, common.command("compare", *arguments), more, commands)
    if failed is None:
        return 0
    count = len(compared.models)
    done = f"{count} models that were" if count > 1 else "one model that was"
    kept = "" if args.output is None else "; they are kept, and the same command goes on"
    common.note(f"isoloss compare: {failed}; the numbers are of the {done} measured before{kept}")
    return 2 if isinstance(failed, ComparisonError) else interrupts.status()


def _last(name: str) -> str:
    """Return the last checkpoint of a run, and say which; any other name stands for itself."""
    checkpoint = last_checkpoint(name)
    if checkpoint != name:
        common.note(f"{name}: its last checkpoint, {Path(checkpoint).name}")
    return checkpoint


def _check(args: Any, names: list[str], models: list[str]) -> None:
    """Refuse what needs neither a model nor torch to be seen as wrong."""
    if not models:
        raise IsolossError("no checkpoint is named: give folders, or names on the Hugging Face hub")
    for name in models:
        places.check_reachable(name, args.loading.module)
    refuse_twice(models)
    if len(models) == 1:
        folder = Path(models[0]).expanduser().parent
        others = f"; {folder} names all {count} in it" if (count := len([*folder.glob("step-*")])) > 1 else ""
        raise IsolossError(
            f"{models[0]} alone has nothing to be compared with: name another{others}, or see isoloss measure"
        )
    positive("--loss-margin", args.loss_margin)
    at_least("--min-ratio", args.min_ratio, 1)
    configs.check(args)
    InputConfig(**args.inputs).check()
    task_probes(args.task, {})
    for measure in ("trace", *args.measures):
        flatness_measure(measure, args.measure)
    if args.data is not None:
        hub_datasets.check_data(args.data)
    machine.check_device(args.loading.device)
    # the page of series has charts, which are made of a table
    if args.parquet is not None or (args.html is not None and places.series_of(names)):
        require_package("polars")
    if args.output is not None:
        files.check_writable(args.output)
    common.check_figure(args.figure)
    common.check_outputs(args, models, "html", "csv", "parquet", "figure")


def _next(
    args: Any,
    arguments: list[str],
    models: list[str],
    reasons: Collection[Reason],
    taken: int | None,
    nearest: tuple[str, str, float] | None,
) -> list[str]:
    """Return the commands that may answer what this one left open, built from its own arguments."""
    from isoloss.comparison.models import FARTHEST

    commands = []
    # the folder of --output has a comparison with other settings, and the files have this one's numbers
    for option in ("--output", "--html", "--csv", "--parquet", "--figure"):
        arguments = common.without_option(arguments, option)
    if taken is not None:
        commands.append(common.command_with("compare", arguments, "--num-sequences", taken))
    count = len(args.models)
    first = next((place for place in range(len(arguments)) if arguments[place : place + count] == [*args.models]), None)
    if first is not None and "loss" in reasons and len(models) == 2:
        patterns = [places.siblings_of(model) for model in models]
        # steps of one run have no other run to be paired with
        if None not in patterns and patterns[0] != patterns[1]:
            commands.append(common.command("compare", *arguments[:first], *patterns, *arguments[first + count :]))
    if first is not None and nearest is not None and nearest[-1] <= max(FARTHEST, args.loss_margin):
        *two, margin = nearest
        others = [*arguments[:first], *two, *arguments[first + count :]]
        if margin > args.loss_margin:
            commands.append(common.command_with("compare", others, "--loss-margin", f"{margin:g}"))
        else:
            commands.append(common.command("compare", *others))
    # models of a text have a tokenizer
    is_text = args.data is not None and args.data.suffix.lower() not in (".npy", ".bin")
    if is_text and not args.task and not {"weights", "function"}.issuperset(reasons):
        commands.append(common.command_with("compare", arguments, "--task", "sst2"))
    return commands


def _write(args: Any, compared: ModelComparison, command: str, more: str, next_commands: list[str]) -> None:
    """Write the files that were asked for, and say so."""
    if args.html is not None:
        from isoloss.comparison.page import comparison_page

        files.write_text(args.html, comparison_page(compared, command=command, more=more, next_commands=next_commands))
        common.note(f"page: {args.html}")
    if args.figure is not None:
        from isoloss.comparison.figure import trace_against_loss

        common.save_figure(args.figure, trace_against_loss(compared, compared.short))
    if args.csv is not None:
        files.write_text(args.csv, csv_table(compared.rows()))
        common.note(f"table: {args.csv}")
    if args.parquet is not None:
        parquet = io.BytesIO()
        compared.to_polars().write_parquet(parquet)
        files.write_bytes(args.parquet, parquet.getvalue())
        common.note(f"table: {args.parquet}")
