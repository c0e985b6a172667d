"""`isoloss transfer`: the accuracy of models on a downstream task, by a probe or fine-tuning, and their differences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import files, interrupts, machine
from isoloss.checkpoints import places
from isoloss.cli import common, options
from isoloss.cli.options import GivenOptions, Loading, option_name, sources_of
from isoloss.config import check, setting
from isoloss.errors import IsolossError
from isoloss.lab.finetune_config import FinetuneConfig
from isoloss.lab.languages.config import LATENT
from isoloss.lab.presets import load_preset
from isoloss.registry import TASKS
from isoloss.runs import Run, checkpoint_of, refuse_twice
from isoloss.statistics.estimate import accuracy_bounds
from isoloss.statistics.tables import short_names
from isoloss.text import hub_datasets, tokenizers
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig
from isoloss.transfer.text_sources import TextTask, registered_text_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from isoloss.checkpoints.loading import LoadedModel
    from isoloss.transfer.compare import AccuracyComparison
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData
    from isoloss.transfer.text_tasks import TextExamples

EXAMPLES = [
    ("isoloss transfer runs/first --task root", "a linear probe of the last checkpoint of a run"),
    ("isoloss transfer runs/first/checkpoints/step-500 --task prefix-4", "of another one"),
    ("isoloss transfer runs/first runs/second --task root", "two models, compared on the same sentences"),
    ("isoloss transfer runs/first --task root --method lookup", "a probe on the true conditionals"),
    ("isoloss transfer runs/first --task B --preset paper", "the paper's probe, on 100,000 sentences"),
    ("isoloss transfer CHECKPOINT --task sst2 --data glue/SST-2", "GLUE, from a folder with train.tsv and dev.tsv"),
    ("isoloss transfer CHECKPOINT --task spam --data mails.csv --text body --method finetune", "your labeled text"),
]
# what `--help` shows; `--help-all` shows the rest
COMMON = "models task method preset num_train num_test seed device language data text label tokenizer output json"

METHODS: dict[str, type] = {"probe": LinearProbeConfig, "lookup": ClassifierConfig, "finetune": FinetuneConfig}
_NO_OPTIONS = ("name", "betas", "momentum", "seed")  # only the library sets these; seed is in `Args`


class _Method(GivenOptions):
    """Settings of the methods."""

    sources = sources_of(METHODS, exclude=_NO_OPTIONS)
    names_configs = True


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """For a task of text."""

    data: str | None = None
    """Labeled text: a .tsv, .csv, .jsonl or .json file, a folder with one for each split, or a dataset hf:NAME."""
    test_data: str | None = None
    """The same for the test examples; default: another split of --data or, of a single file, one example in five."""
    text: str | None = None
    """Column of the text; default: that of the task, or text."""
    pair: str | None = None
    """Column of the second text, where an example is two."""
    label: str | None = None
    """Column of the label; default: that of the task, or label."""
    train_split: str | None = None
    """Split of a folder or dataset; default: that of the task, or train."""
    test_split: str | None = None
    """Split of the test examples; default: dev or validation."""
    tokenizer: str | None = None
    """A Hugging Face folder or name, or a vocab.txt; default: the model's own."""
    max_length: int | None = setting(None, minimum=1)
    """The most tokens of an example; default: 128, or as many as the model reads."""


@dataclass(frozen=True)
class Args:
    """Accuracy on a downstream task: a linear probe (the paper's), fine-tuning, or the look-up table.

    The accuracy of the majority class and, where it is known, that of the Bayes classifier are printed beside it.
    Several models are compared on the same examples.
    """

    models: options.Positional[tuple[str, ...]]
    """Runs (their last checkpoints), checkpoint folders, or names on the Hugging Face hub."""
    task: str
    """A task of the language (root, prefix-L, ...), of GLUE (SST-2, RTE, ...), or a name of your own for --data; see
    isoloss ls tasks."""
    language: str | None = None
    """Of a task of a synthetic language; default: that of the models' runs."""
    method: Literal["probe", "lookup", "finetune"] = "probe"
    """A probe on the model's token states, one on the true conditionals, or training all weights."""
    preset: str | None = None
    """The paper's settings (paper or authors); options override them. They are of its probe and fine-tuning, the number
    of training sentences, and what the tasks A, B and C stand for."""
    num_train: int | None = setting(None, minimum=1)
    """Training examples; default: 4096 sentences of a language, all of a text."""
    num_test: int | None = setting(None, minimum=1)
    """Test examples; default: as for training."""
    seed: int = 0
    """Decides the examples and the classifiers."""
    output: Path | None = None
    """Folder for each model's result (.json), predictions (.jsonl) and, for fine-tuning, the state to resume from."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """Print one JSON document."""
    loading: Loading = field(default_factory=Loading)
    labeled_text: TextOptions = field(default_factory=TextOptions)
    classifier: _Method = field(default_factory=_Method)


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "transfer", arguments, examples=EXAMPLES, common=COMMON)
    config = method_config(args)
    models = subjects(args)
    check_args(args, models)
    if args.output is not None:
        files.check_writable(args.output)
    common.use_threads(args.threads)
    # before any model is loaded: a mistake in the task is told at once
    tasks = Tasks(args, models)
    from isoloss.lab.training.train import Interrupted
    from isoloss.transfer.compare import compare_accuracy

    results: dict[str, tuple[TaskData, TransferResult]] = {}
    for subject in models:
        try:
            results[subject.name] = _measure(args, config, subject, tasks)
        except Interrupted as stop:
            common.note(f"stopped after {stop.step} steps of {subject.name}; progress is saved. To resume:")
            common.note("  " + common.command("transfer", *arguments))
            return interrupts.status()
        # at once: measuring the next model may fail
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


def _measure(args: Args, config: Any, subject: Subject, tasks: Tasks) -> tuple[TaskData, TransferResult]:
    from isoloss.checkpoints.loading import load_model

    label = f"{args.task}: {subject.name}"
    if args.method == "lookup":
        from isoloss.lab.lookup import lookup_probe

        task = tasks.of(subject, None)
        with common.Progress(label, 1, "probes"):
            return task, lookup_probe(tasks.language, task, config)
    assert subject.checkpoint is not None  # it is no look-up table
    loaded = load_model(subject.checkpoint, **vars(args.loading))
    task = tasks.of(subject, loaded)
    if args.method == "probe":
        from isoloss.transfer.probe import linear_probe

        with common.Progress(label, 1, "probes"):
            return task, linear_probe(loaded.model, task, config)
    from isoloss.lab.finetuning import finetune, num_steps

    folder = None if args.output is None else args.output / f"{_stem(args, subject)}.state"
    with common.Progress(label, config.seeds * num_steps(config, len(task.train_labels)), "steps") as progress:
        return task, finetune(loaded.model, task, config, output=folder, progress=progress)


# --- what the command line names -------------------------------------------------------------------------------------


def method_config(args: Args) -> Any:
    """Return the config of the method with what the command line gives of it."""
    config = METHODS[args.method]
    preset = None if args.preset is None else load_preset(args.preset).method(args.method)
    settings: dict[str, Any] = dict(args.classifier)
    # the defaults of a dataclass are attributes of the class, so `hasattr` knows its fields
    if unknown := [option_name(name) for name in settings if not hasattr(config, name)]:
        raise IsolossError(f"{', '.join(unknown)}: no effect with --method {args.method}")
    if "warmup_proportion" in settings:
        # in the place of the preset's steps: a config states one of the two
        settings = {"warmup_steps": None} | settings
    chosen = dataclasses.replace(preset or config(), **settings, seed=args.seed)
    check(chosen)
    return chosen


@dataclass(frozen=True)
class Subject:
    """A model, or the look-up table of a language, and the run that it is of, if it is of one."""

    name: str
    checkpoint: str | None  # of a look-up table, None
    run: Run | None


def subjects(args: Args) -> list[Subject]:
    """Return what the command line names."""
    if not args.models:
        if args.method == "lookup" and args.language is not None:
            return [Subject(args.language, None, None)]
        raise IsolossError("no model is named: give a run, a checkpoint folder or a name on the Hugging Face hub")
    refuse_twice(args.models)
    models = []
    for name in args.models:
        run = Run(Path(name))
        if run.exists:
            step = run.last_step()
            models.append(Subject(f"{name} at step {step}", str(run.checkpoint(step)), run))
        else:
            place = checkpoint_of(Path(name))
            models.append(Subject(name, name, None if place is None else place[0]))
    return models


def check_args(args: Args, models: list[Subject]) -> None:
    """Refuse what needs no torch to be seen as wrong."""
    check(args.labeled_text)
    check(args)
    machine.check_device(args.loading.device)
    for subject in models:
        if subject.checkpoint is not None:
            places.check_reachable(subject.checkpoint)
    for path in (args.labeled_text.data, args.labeled_text.test_data):
        if path is not None and not hub_datasets.is_dataset(path) and not Path(path).expanduser().exists():
            raise IsolossError(f"there is no file or folder {path}{files.nearest(path)}")
    if args.labeled_text.tokenizer is not None:
        tokenizers.check_name(args.labeled_text.tokenizer)


class Tasks:
    """The task of the command line, as each model reads it, and the language that it is about, if it is about one."""

    def __init__(self, args: Args, models: list[Subject]) -> None:
        self.args = args
        registered = registered_text_task(args.task, args.labeled_text.data)
        self.is_text = args.labeled_text.data is not None or registered is not None
        given = {"language": args.language} if self.is_text else vars(args.labeled_text)
        if useless := [option_name(name) for name, value in given.items() if value is not None]:
            text_tasks = [name for name, task in TASKS.loaded().items() if isinstance(task, TextTask)]
            kind = f"a synthetic language (tasks of text: {', '.join(text_tasks)}, or --data)"
            raise IsolossError(
                f"{args.task} is a task of {'real text' if self.is_text else kind}: leave out {', '.join(useless)}"
            )
        if self.is_text and args.method == "lookup":
            raise IsolossError(
                f"the true conditionals of the text of {args.task} are not known, so it has no look-up table"
            )
        self._source = _source(args, registered) if self.is_text else None
        self._examples: TextExamples | None = None
        self.language: Any = None if self.is_text else _language(args, models)
        self._synthetic = None if self.is_text else self._make_synthetic()

    def of(self, subject: Subject, loaded: LoadedModel | None) -> TaskData:
        """Return the task as `subject` reads it."""
        from isoloss.lab.tasks import read_from_start

        if self._synthetic is None:
            assert loaded is not None  # a look-up table of text was refused
            return self._make_text(subject, loaded)
        if loaded is None:
            return self._synthetic
        known, needed = int(loaded.model.config.get_text_config().vocab_size), self.language.model_vocab_size
        if known != needed:
            raise IsolossError(
                f"{subject.name} has {known:,} token ids, but a model of the language of task {self.args.task} has "
                f"{needed:,}: {subject.name} is a model of another language"
            )
        return read_from_start(self._synthetic, self.language) if loaded.kind == "causal" else self._synthetic

    def _make_synthetic(self) -> TaskData:
        from isoloss.lab.tasks import make_task

        args = self.args
        preset, task = None if args.preset is None else load_preset(args.preset), args.task
        num_train = preset.num_train if preset and args.num_train is None else args.num_train
        if preset:
            base = task.removesuffix(LATENT)
            # the paper's name stands for one of ours, and what follows it, such as -latent, is kept
            task = preset.tasks.get(base, base) + task[len(base) :]
        numbers = {"num_train": num_train, "num_test": args.num_test}
        return make_task(
            self.language,
            task,
            **{name: number for name, number in numbers.items() if number is not None},
            seed=args.seed,
        )

    def _make_text(self, subject: Subject, loaded: LoadedModel) -> TaskData:
        from isoloss.model_checks import max_length
        from isoloss.transfer.text_tasks import as_read_by, read_examples

        assert self._source is not None
        args, tokenizer = self.args, self._tokenizer(subject)
        # read once: the examples are the same for all models, only their tokens differ
        if self._examples is None:
            self._examples = read_examples(
                self._source, num_train=args.num_train, num_test=args.num_test, seed=args.seed
            )
        return as_read_by(
            loaded.model.config,
            max_length(loaded.model),
            self._examples,
            tokenizer,
            max_length=args.labeled_text.max_length,
            model=subject.name,
        )

    def _tokenizer(self, subject: Subject) -> PreTrainedTokenizerFast:
        from isoloss.text.tokenizers import load_tokenizer

        if self.args.labeled_text.tokenizer is not None:
            return load_tokenizer(self.args.labeled_text.tokenizer)
        try:
            return load_tokenizer(str(subject.checkpoint))
        except IsolossError as error:
            config = None if subject.run is None else subject.run.absolute_config.language
            # a run's checkpoint that was written without its tokenizer
            of_language: PreTrainedTokenizerFast | None = None if config is None else config.build().tokenizer
            if of_language is None:
                raise IsolossError(f"{subject.name} has no usable tokenizer ({error}): give --tokenizer") from error
            return of_language


def _language(args: Args, models: list[Subject]) -> Any:
    from isoloss.lab import languages

    if args.language is not None:
        return languages.resolve(args.language).build()
    known: tuple[str, Any] | None = None
    for subject in models:
        if subject.run is None:
            raise IsolossError(
                f"{subject.name} is neither a run directory nor a checkpoint in one, so its language is not known: add "
                f"--language, or --data with labeled text{files.nearest(subject.name)}"
            )
        config = subject.run.absolute_config.language
        if known is not None and known[1] != config:
            raise IsolossError(f"{known[0]} and {subject.name} are models of different languages: add --language")
        known = known or (subject.name, config)
    assert known is not None
    return known[1].build()


def _source(args: Args, registered: TextTask | None) -> TextTask:
    """Return where the examples are: a registered task with what the command line changes, or one of its own."""
    given = args.labeled_text
    base = registered or TextTask(name=args.task, train=str(given.data), text="text")
    return dataclasses.replace(
        base,
        test=given.test_data,
        text=given.text or base.text,
        # with a column of one's own, the pair and the other columns of a registered task would be of other data
        pair=given.pair if given.text else given.pair or base.pair,
        label=given.label or base.label,
        train_split=given.train_split or base.train_split,
        # test data of one's own need not have the split of the registered task
        test_split=given.test_split or (base.test_split if given.test_data is None else None),
        other_columns=() if given.text or given.pair or given.label else base.other_columns,
    )


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


def _print(args: Args, name: str, task: TaskData, result: TransferResult) -> None:
    from isoloss.transfer.results import CLASS_COLUMNS, MOST_CLASSES, below_majority

    accuracy = result.accuracy
    details = accuracy.details
    common.say(f"{task.name}, {args.method} of {name}: accuracy {accuracy}")
    common.say_wrapped(accuracy_bounds(details), indent=2)
    if (problem := below_majority(details)) is not None:
        common.say_wrapped(problem, indent=2)
    common.say_wrapped(
        f"{details['num_test']:,} test and {details['num_train']:,} training examples, "
        f"{100 * task.overlap:.1f} % of the test examples are also training examples",
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
    # the document is to be a function of model and settings alone
    document["accuracy"]["seconds"] = None
    text = {} if task.coverage is None else {"text": dataclasses.asdict(task.coverage)}
    return {"majority_rate": task.majority_rate, "overlap": task.overlap, **text, **document}


def _stem(args: Args, subject: Subject) -> str:
    name = re.sub(r"[^\w.-]+", "-", subject.name).strip("-.") or "model"
    return f"{name}@{args.task}-{args.method}"


def _save(args: Args, folder: Path, subject: Subject, task: TaskData, result: TransferResult) -> None:
    from isoloss.transfer.results import write_predictions

    stem = _stem(args, subject)
    write_predictions(folder / f"{stem}.jsonl", result, task.inputs())
    document = {"model": subject.name, "task": task.name, "method": args.method, **_document(task, result)}
    files.write_json(folder / f"{stem}.json", document)
