"""`isoloss transfer`: what models reach on a downstream task, by a probe or by fine-tuning, and how they compare."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import files, interrupts
from isoloss.cli import common, comparison
from isoloss.cli.transfer_inputs import Subject, Tasks, subjects
from isoloss.errors import IsolossError
from isoloss.evaluation.results import bounds
from isoloss.statistics.estimate import rounded

if TYPE_CHECKING:
    from isoloss.loading import Loaded
    from isoloss.text.text_classification import Coverage
    from isoloss.transfer.compare import TransferComparison
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData

EXAMPLES = [
    ("isoloss transfer runs/first --task root", "a linear probe of the last checkpoint of a run"),
    ("isoloss transfer runs/first/checkpoints/step-500 --task prefix-4", "of another one"),
    ("isoloss transfer runs/first runs/second --task root", "two models, compared on the same sentences"),
    ("isoloss transfer runs/first --task root --how lookup", "what the true conditionals reach as features"),
    ("isoloss transfer runs/first --task prefix-4 --test-lengths 5 8", "tested on sentences of other lengths"),
    ("isoloss transfer CHECKPOINT --task sst2 --data glue/SST-2", "GLUE, from a folder with train.tsv and dev.tsv"),
    ("isoloss transfer CHECKPOINT --task spam --data mails.csv --text body --how finetune", "your own labelled text"),
]


@dataclass(frozen=True)
class Args:
    """Accuracy on a downstream task: a linear probe (the paper's), fine-tuning, or the look-up table.

    Beside each accuracy stand that of the commonest class and, where the truth is known, the highest that any
    classifier can have. Several models are compared on the same examples.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """Runs (their last checkpoints), checkpoint folders, or names on the Hugging Face hub."""
    task: str
    """A task of the language (root, prefix-L, ...), of GLUE (sst2, rte, ...), or a name of your own for --data; see
    isoloss ls tasks."""
    how: Literal["probe", "lookup", "finetune"] = "probe"
    """A probe on the model's token states, one on the true conditionals, or training all weights."""
    language: str | None = None
    """For models that are not of a run: the language of the task; default: the run's own."""
    data: str | None = None
    """Labelled text: a .tsv, .csv, .jsonl or .json file, a folder with one for each split, or a dataset hf:NAME."""
    test_data: str | None = None
    """The same of the test examples; default: another split of --data or, of a single file, a fifth of it."""
    text: str | None = None
    """Column of the text."""
    pair: str | None = None
    """Column of the second text, where an example is two."""
    label: str = "label"
    """Column of the label."""
    train_split: str = "train"
    """Split of a folder or dataset."""
    test_split: str | None = None
    """Split of the test examples; default: dev or validation."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt; default: the model's own."""
    max_length: int | None = None
    """For text: the most tokens of an example; default: 128, or what the model reads at most."""
    num_train: int | None = None
    """Training examples; default: 4096 sentences of a language, all of a text."""
    num_test: int | None = None
    """Test examples; default: the same."""
    train_lengths: tuple[int, int] | None = None
    """Least and most tokens of the training sentences, for a synthetic language."""
    test_lengths: tuple[int, int] | None = None
    """Least and most tokens of the test sentences."""
    test_redraw: float | None = None
    """Test on a language with the same rules, of which this share of the symbols or states has new probabilities."""
    seeds: int = 5
    """Classifiers, each with its own initial weights and order."""
    solver: Literal["adamw", "convex"] = "adamw"
    """How a probe is fitted: the paper's 100 epochs, or the minimum of the penalised loss."""
    regularisation: tuple[float, ...] = (1e-3,)
    """The convex probe's strength; of several the best on held-out training examples."""
    pooling: Literal["auto", "concatenate", "mean", "first", "last"] = "auto"
    """Which states are read: all side by side (probes), their mean, or one token's ([CLS] is the first); auto: all for
    a probe, the first for fine-tuning, the last of a causal model."""
    layer: int = -1
    """Which hidden states a probe reads: 0 the embeddings, -1 the last."""
    projection: int | None = None
    """Project a probe's features at random to so many; the paper's 512."""
    epochs: int | None = None
    """Passes over the training examples; default: 100 of a probe, 10 of fine-tuning."""
    batch_size: int | None = None
    """Examples in a step; default: 256 of a probe, 32 of fine-tuning."""
    learning_rate: float | None = None
    """AdamW's; default: 1e-3 of a probe, 1e-4 of fine-tuning."""
    warmup_steps: int = 200
    """Steps in which the learning rate of fine-tuning rises from 0."""
    seed: int = 0
    """Decides the examples and the classifiers."""
    out: Path | None = None
    """Folder for each model's result (.json), predictions (.jsonl) and, of fine-tuning, the state to resume from."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    json: bool = False
    """Print one JSON document."""


# options of one way only
_OF_PROBES = ("solver", "layer", "projection", "regularisation")
_OF_STATES = ("pooling", "layer", "projection")
_OF_ADAMW = ("epochs", "batch_size", "learning_rate")


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "transfer", arguments, examples=EXAMPLES)
    _check(args)
    found = subjects(args)
    if args.out is not None:
        files.check_writable(args.out)
    common.use_threads(args.threads)
    tasks = Tasks(args, found)
    from isoloss.training import Interrupted

    results: dict[str, tuple[TaskData, TransferResult]] = {}
    for subject in found:
        try:
            results[subject.name] = _measure(args, subject, tasks)
        except Interrupted as stop:
            common.note(f"stopped after {stop.step} steps of {subject.name}, saved. To go on:")
            common.note("  " + common.command("transfer", *arguments))
            return interrupts.status()
        if args.out is not None:
            _save(args, args.out, subject, *results[subject.name])
    pairs = _pairs(args, {name: result for name, (_, result) in results.items()})
    if args.json:
        common.emit_json(
            {
                "task": next(iter(results.values()))[0].name,
                "how": args.how,
                "models": {name: _document(*found) for name, found in results.items()},
                "comparisons": [
                    {"first": first, "second": second, **dataclasses.asdict(pair)} for first, second, pair in pairs
                ],
            }
        )
        return 0
    for place, (name, (task, result)) in enumerate(results.items()):
        if place:
            common.say("")
        _print(args, name, task, result)
    if pairs:
        common.say("")
        _print_pairs(list(results), pairs)
    return 0


def _check(args: Args) -> None:
    """Refuse what needs no model to be seen as wrong."""
    unused = {"finetune": _OF_PROBES, "lookup": (*_OF_STATES, "warmup_steps"), "probe": ("warmup_steps",)}[args.how]
    if args.how != "finetune":
        unused = (*unused, *(_OF_ADAMW if args.solver == "convex" else ("regularisation",)))
    given = [f"--{name.replace('_', '-')}" for name in unused if getattr(args, name) != getattr(Args, name)]
    if given:
        way = f"--how {args.how}" + ("" if args.how == "finetune" else f" and --solver {args.solver}")
        raise IsolossError(f"{', '.join(dict.fromkeys(given))}: without effect with {way}")
    if args.how == "finetune" and args.pooling == "concatenate":
        raise IsolossError("--pooling is concatenate; fine-tuning reads one state: first, last or mean")


def _measure(args: Args, subject: Subject, tasks: Tasks) -> tuple[TaskData, TransferResult]:
    if args.how == "lookup":
        from isoloss.transfer.lookup import lookup_task

        task = tasks.of(subject, None)
        with common.Progress(f"{args.task}: {subject.name}", 1, "probes"):
            return task, lookup_task(tasks.language, task, **_probe_settings(args))
    loaded = _load(args, subject)
    task = tasks.of(subject, loaded)
    if args.how == "finetune":
        return task, _finetune(args, subject, task, loaded)
    from isoloss.transfer.linear_probe import probe_task

    with common.Progress(f"{args.task}: {subject.name}", 1, "probes"):
        pooling = "concatenate" if args.pooling == "auto" else args.pooling
        states = {"pooling": pooling, "layer": args.layer, "projection": args.projection}
        return task, probe_task(loaded.model, task, **states, **_probe_settings(args))  # type: ignore[arg-type]


def _load(args: Args, subject: Subject) -> Loaded:
    from isoloss.loading import load_model

    assert subject.checkpoint is not None  # it is no look-up table
    return load_model(subject.checkpoint, device=args.device, trust_remote_code=args.trust_remote_code)


def _probe_settings(args: Args) -> dict[str, Any]:
    """Return the settings of a linear probe that the command line gives, the others being the library's."""
    given = {name: getattr(args, name) for name in _OF_ADAMW if getattr(args, name) is not None}
    strengths = {"regularisation": args.regularisation} if args.solver == "convex" else {}
    return {"seeds": args.seeds, "seed": args.seed, "solver": args.solver, **strengths, **given}


def _finetune(args: Args, subject: Subject, task: TaskData, loaded: Loaded) -> TransferResult:
    from isoloss.transfer.finetune import finetune, num_steps
    from isoloss.transfer.finetune_config import FinetuneConfig

    default = FinetuneConfig()
    config = dataclasses.replace(
        default,
        epochs=default.epochs if args.epochs is None else args.epochs,
        batch_size=default.batch_size if args.batch_size is None else args.batch_size,
        optimizer=dataclasses.replace(
            default.optimizer,
            learning_rate=default.optimizer.learning_rate if args.learning_rate is None else args.learning_rate,
            warmup_steps=args.warmup_steps,
        ),
        pooling=args.pooling,  # type: ignore[arg-type]  # concatenate was refused
        seed=args.seed,
        seeds=args.seeds,
    )
    folder = None if args.out is None else args.out / f"{_stem(args, subject)}.state"
    total = config.seeds * num_steps(config, len(task.train_labels))
    with common.Progress(f"{args.task}: {subject.name}", total, "steps") as progress:
        return finetune(loaded.model, task, config, folder=folder, progress=progress)


# --- several models --------------------------------------------------------------------------------------------------


def _pairs(args: Args, results: Mapping[str, TransferResult]) -> list[tuple[str, str, TransferComparison]]:
    from isoloss.transfer.compare import compare

    return [
        (first, second, compare(results[first], results[second], seed=args.seed))
        for first, second in itertools.combinations(results, 2)
    ]


def _print_pairs(names: list[str], pairs: list[tuple[str, str, TransferComparison]]) -> None:
    short = comparison.short_names(names)
    rows = [
        (
            f"{short[first]} less {short[second]}",
            rounded(100 * pair.difference.value, 100 * pair.difference.stderr),
            "{:.2f} to {:.2f}".format(*(100 * end for end in pair.bootstrap95)),
            f"{pair.mcnemar.only_first} : {pair.mcnemar.only_second}",
            f"{pair.mcnemar.p_value:.2g}",
        )
        for first, second, pair in pairs
    ]
    columns = ("", "difference", "95 % interval (bootstrap)", "only one is right", "p (McNemar)")
    common.print_table("differences in accuracy on the same examples, percentage points", columns, rows)
    common.say_wrapped(
        f"± is the standard error over examples and seeds; the interval is that of {pairs[0][2].resamples:,} resamples "
        "of both; McNemar's exact test is of the votes of the seeds"
    )


# --- one model -------------------------------------------------------------------------------------------------------


def _print(args: Args, name: str, task: TaskData, result: TransferResult) -> None:
    accuracy = result.accuracy
    details = accuracy.details
    common.say(f"{task.name}, {args.how} of {name}: accuracy {accuracy}")
    common.say_wrapped(bounds(details), indent=2)
    common.say_wrapped(
        f"{details['num_test']:,} test and {details['num_train']:,} training examples, "
        f"{100 * task.overlap:.1f} % of the former among the latter",
        indent=2,
    )
    if (text := task.coverage) is not None:
        common.say_wrapped(
            f"{text.num_cut:,} of these {text.num_examples:,} examples are truncated; "
            f"{100 * _unknown_rate(text):.1f} % of the {text.num_tokens:,} tokens of their texts are unknown to the "
            "tokenizer",
            indent=2,
        )
    common.say_wrapped(f"{accuracy.method}, {details['device']}; {_seeds(details)}", indent=2)
    _print_classes(result)


def _unknown_rate(text: Coverage) -> float:
    return text.num_unknown / max(1, text.num_tokens)


def _seeds(details: Mapping[str, Any]) -> str:
    if details.get("solver") == "convex":
        return f"no seed has a part; strength {details['regularisation']:g}"
    if details["seed_std"] is None:
        return "one seed"
    deviation = f"{100 * details['seed_std']:.2f} percentage points"
    return f"{details['seeds']} seeds, whose accuracies deviate by {deviation}"


_MOST_CLASSES = 12  # whose scores are printed; all are in --json and --out


def _print_classes(result: TransferResult) -> None:
    scores = [own for own in result.by_class() if own.examples or own.precision is not None]
    scores.sort(key=lambda own: -own.examples)
    rows = [
        (own.name, f"{own.examples:,}", *("" if e is None else str(e) for e in (own.precision, own.recall, own.f1)))
        for own in scores[:_MOST_CLASSES]
    ]
    rest = len(scores) - len(rows)
    common.say("")
    title = "scores by class"
    common.print_table(title, ("class", "examples", "precision", "recall", "F1"), rows)
    if rest > 0:
        common.say(f"and {rest} rarer classes (--json has all)")
    common.say("± is the standard error over the test examples")


def _document(task: TaskData, result: TransferResult) -> dict[str, Any]:
    document = result.to_dict()
    document["accuracy"]["seconds"] = None  # the clock's: the document is a function of model and settings
    text = {} if task.coverage is None else {"text": dataclasses.asdict(task.coverage)}
    return {"majority_rate": task.majority_rate, "overlap": task.overlap, **text, **document}


def _stem(args: Args, subject: Subject) -> str:
    return f"{subject.file_name}@{args.task}-{args.how}"


def _save(args: Args, folder: Path, subject: Subject, task: TaskData, result: TransferResult) -> None:
    from isoloss.transfer.results import write_predictions

    stem = _stem(args, subject)
    write_predictions(folder / f"{stem}.jsonl", result, task.inputs())
    document = {"model": subject.name, "task": task.name, "how": args.how, **_document(task, result)}
    files.write_json(folder / f"{stem}.json", document)
