"""`isoloss transfer`: the accuracy of models on a downstream task, by a probe or fine-tuning, and their differences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import files, interrupts
from isoloss.cli import common
from isoloss.cli.transfer_inputs import Args, Subject, Tasks, TransferArgs, check_args, method_config, subjects
from isoloss.statistics.tables import short_names

if TYPE_CHECKING:
    from isoloss.transfer.compare import AccuracyComparison
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData

EXAMPLES = [
    ("isoloss transfer runs/first --task root", "a linear probe of the last checkpoint of a run"),
    ("isoloss transfer runs/first/checkpoints/step-500 --task prefix-4", "of another one"),
    ("isoloss transfer runs/first runs/second --task root", "two models, compared on the same sentences"),
    ("isoloss transfer runs/first --task root --method lookup", "a probe on the true conditionals"),
    ("isoloss transfer runs/first --task prefix-4 --test-lengths 5 8", "tested on sentences of other lengths"),
    ("isoloss transfer runs/first --task B --preset paper", "the paper's probe, on 100,000 sentences"),
    ("isoloss transfer CHECKPOINT --task sst2 --data glue/SST-2", "GLUE, from a folder with train.tsv and dev.tsv"),
    ("isoloss transfer CHECKPOINT --task spam --data mails.csv --text body --method finetune", "your labeled text"),
]


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: TransferArgs = common.parse(Args, "transfer", arguments, examples=EXAMPLES)
    config = method_config(args)
    models = subjects(args)
    check_args(args, models)
    if args.output is not None:
        files.check_writable(args.output)
    common.use_threads(args.threads)
    tasks = Tasks(args, models)
    from isoloss.training.trainer import Interrupted
    from isoloss.transfer.compare import compare_accuracy

    results: dict[str, tuple[TaskData, TransferResult]] = {}
    for subject in models:
        try:
            results[subject.name] = _measure(args, config, subject, tasks)
        except Interrupted as stop:
            common.note(f"stopped after {stop.step} steps of {subject.name}; progress is saved. To resume:")
            common.note("  " + common.command("transfer", *arguments))
            return interrupts.status()
        if args.output is not None:
            _save(args, args.output, subject, *results[subject.name])
    compared = None
    if len(results) > 1:
        compared = compare_accuracy({name: result for name, (_, result) in results.items()}, seed=args.seed)
    if args.json:
        common.emit_json(
            {
                "task": next(iter(results.values()))[0].name,
                "method": args.method,
                "models": {name: _document(*result) for name, result in results.items()},
                "comparisons": [dataclasses.asdict(pair) for pair in compared.pairs] if compared else [],
            }
        )
        return 0
    for index, (name, (task, result)) in enumerate(results.items()):
        if index:
            common.say("")
        _print(args, name, task, result)
    if compared:
        common.say("")
        _print_differences(compared)
    return 0


def _measure(args: TransferArgs, config: Any, subject: Subject, tasks: Tasks) -> tuple[TaskData, TransferResult]:
    from isoloss.loading import load_model

    label = f"{args.task}: {subject.name}"
    if args.method == "lookup":
        from isoloss.transfer.probe import lookup_probe

        task = tasks.of(subject, None)
        with common.Progress(label, 1, "probes"):
            return task, lookup_probe(tasks.language, task, config)
    assert subject.checkpoint is not None  # it is no look-up table
    loaded = load_model(
        subject.checkpoint,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        ignore_unexpected_weights=args.ignore_unexpected_weights,
    )
    task = tasks.of(subject, loaded)
    if args.method == "probe":
        from isoloss.transfer.probe import linear_probe

        with common.Progress(label, 1, "probes"):
            return task, linear_probe(loaded.model, task, config)
    from isoloss.transfer.finetuning import finetune, num_steps

    folder = None if args.output is None else args.output / f"{_stem(args, subject)}.state"
    with common.Progress(label, config.seeds * num_steps(config, len(task.train_labels)), "steps") as progress:
        return task, finetune(loaded.model, task, config, output=folder, progress=progress)


# --- tables ----------------------------------------------------------------------------------------------------------


def _print_differences(compared: AccuracyComparison) -> None:
    from isoloss.transfer.compare import DIFFERENCE_COLUMNS

    short = short_names(list(compared.results))
    rows = [pair.row(short[pair.first], short[pair.second]) for pair in compared.pairs]
    common.print_table("differences in accuracy on the same examples, percentage points", DIFFERENCE_COLUMNS, rows)
    common.say_wrapped(
        "± is the standard error over examples and seeds; the interval is from "
        f"{compared.pairs[0].resamples:,} bootstrap resamples of both; McNemar's exact test compares the majority "
        "votes of the seeds"
    )


def _print(args: TransferArgs, name: str, task: TaskData, result: TransferResult) -> None:
    from isoloss.transfer.results import CLASS_COLUMNS, MOST_CLASSES, below_majority, bounds

    accuracy = result.accuracy
    details = accuracy.details
    common.say(f"{task.name}, {args.method} of {name}: accuracy {accuracy}")
    common.say_wrapped(bounds(details), indent=2)
    if (problem := below_majority(details)) is not None:
        common.say_wrapped(problem, indent=2)
    common.say_wrapped(
        f"{details['num_test']:,} test and {details['num_train']:,} training examples, "
        f"{100 * task.overlap:.1f} % of the former among the latter",
        indent=2,
    )
    if (text := task.coverage) is not None:
        unknown = 100 * text.num_unknown / max(1, text.num_tokens)
        counts = {"without a label": text.num_unlabeled, "incomplete": text.num_incomplete}
        left_out = [f"{number:,} {kind}" for kind, number in counts.items() if number]
        common.say_wrapped(
            f"{text.num_cut:,} of these {text.num_examples:,} examples are truncated; {unknown:.1f} % of the "
            f"{text.num_tokens:,} tokens of their texts are unknown to the tokenizer"
            + (f"; rows left out: {', '.join(left_out)}" if left_out else ""),
            indent=2,
        )
    common.say_wrapped(f"{accuracy.method}, {details['device']}; {_seeds(details)}", indent=2)
    common.say("")
    rows = result.class_rows()
    common.print_table("scores by class", CLASS_COLUMNS, rows[:MOST_CLASSES])
    if len(rows) > MOST_CLASSES:
        common.say(f"and {len(rows) - MOST_CLASSES} rarer classes (--json has all)")
    common.say("± is the standard error over the test examples")


def _seeds(details: Mapping[str, Any]) -> str:
    if details.get("solver") == "convex":
        return f"independent of the seed; regularization strength {details['regularization']:g}"
    if details["seed_std"] is None:
        return "one seed"
    return f"{details['seeds']} seeds, standard deviation {100 * details['seed_std']:.2f} percentage points"


# --- files -----------------------------------------------------------------------------------------------------------


def _document(task: TaskData, result: TransferResult) -> dict[str, Any]:
    document = result.to_dict()
    document["accuracy"]["seconds"] = None  # so that the document is a function of model and settings
    text = {} if task.coverage is None else {"text": dataclasses.asdict(task.coverage)}
    return {"majority_rate": task.majority_rate, "overlap": task.overlap, **text, **document}


def _stem(args: TransferArgs, subject: Subject) -> str:
    name = re.sub(r"[^\w.-]+", "-", subject.name).strip("-.") or "model"
    return f"{name}@{args.task}-{args.method}"


def _save(args: TransferArgs, folder: Path, subject: Subject, task: TaskData, result: TransferResult) -> None:
    from isoloss.transfer.results import write_predictions

    stem = _stem(args, subject)
    write_predictions(folder / f"{stem}.jsonl", result, task.inputs())
    document = {"model": subject.name, "task": task.name, "method": args.method, **_document(task, result)}
    files.write_json(folder / f"{stem}.json", document)
