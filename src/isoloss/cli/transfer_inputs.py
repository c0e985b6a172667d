"""The options of `isoloss transfer`, those of a method made from its config, and what they name: models and a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import early_checks, files
from isoloss.cli import options
from isoloss.cli.options import option_name
from isoloss.config import check, setting
from isoloss.errors import IsolossError
from isoloss.languages.config import LATENT
from isoloss.presets import load_preset
from isoloss.registry import TASKS
from isoloss.runs import Run, checkpoint_of, refuse_twice
from isoloss.text import hub_datasets, tokenizers
from isoloss.transfer.config import ClassifierConfig, FinetuneConfig, LinearProbeConfig
from isoloss.transfer.text_sources import TextTask, registered_text_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from isoloss.loading import LoadedModel
    from isoloss.transfer.tasks import TaskData
    from isoloss.transfer.text_tasks import TextExamples

METHODS: dict[str, type] = {"probe": LinearProbeConfig, "lookup": ClassifierConfig, "finetune": FinetuneConfig}
_NO_OPTIONS = ("name", "betas", "momentum", "seed")  # only the library sets these; seed is in `Args`


def _groups() -> Iterator[tuple[str, Any, Any]]:
    """Yield a group of options for each set of methods that share them."""
    names = dict.fromkeys(own.name for config in METHODS.values() for own in dataclasses.fields(config))
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for name in names:
        if name not in _NO_OPTIONS:
            configs = {method: config for method, config in METHODS.items() if hasattr(config, name)}
            groups.setdefault(tuple(configs), {})[name] = options.unset(name, configs)
    for methods, members in groups.items():
        *others, last = methods
        listed = f"{', '.join(others)} or {last}" if others else last
        yield options.group("_or_".join(methods), members, f"--method {listed}")


@options.as_told
@dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """For a task of a synthetic language."""

    language: str | None = None
    """The language; default: that of the models' runs."""
    train_lengths: tuple[int, int] | None = setting(None, minimum=1)
    """Least and most tokens of the training sentences."""
    test_lengths: tuple[int, int] | None = setting(None, minimum=1)
    """Least and most tokens of the test sentences."""
    test_redraw: float | None = setting(None, above=0, maximum=1)
    """Test on a language with the same rules, with new probabilities for this fraction of the symbols or states."""


@options.as_told
@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """For a task of text."""

    data: str | None = None
    """Labeled text: a .tsv, .csv, .jsonl or .json file, a folder with one for each split, or a dataset hf:NAME."""
    test_data: str | None = None
    """The same for the test examples; default: another split of --data or, of a single file, one example in five."""
    text: str | None = None
    """Column of the text."""
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
class TransferArgs:
    """Accuracy on a downstream task: a linear probe (the paper's), fine-tuning, or the look-up table.

    The accuracy of the majority class and, where it is known, that of the Bayes classifier are printed beside it.
    Several models are compared on the same examples.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """Runs (their last checkpoints), checkpoint folders, or names on the Hugging Face hub."""
    task: str
    """A task of the language (root, prefix-L, ...), of GLUE (SST-2, RTE, ...), or a name of your own for --data; see
    isoloss ls tasks."""
    method: Literal["probe", "lookup", "finetune"] = "probe"
    """A probe on the model's token states, one on the true conditionals, or training all weights."""
    preset: str | None = None
    """Settings of the paper (paper or authors), for what no option gives: its probe or fine-tuning, 100,000 training
    sentences, and what its tasks A, B and C stand for."""
    num_train: int | None = setting(None, minimum=1)
    """Training examples; default: 4096 sentences of a language, all of a text."""
    num_test: int | None = setting(None, minimum=1)
    """Test examples; default: as for training."""
    seed: int = 0
    """Decides the examples and the classifiers."""
    sentences: options.titled(SentenceOptions, "language task") = field(default_factory=SentenceOptions)  # type: ignore[valid-type]
    labeled_text: options.titled(TextOptions, "text task") = field(default_factory=TextOptions)  # type: ignore[valid-type]
    output: Path | None = None
    """Folder for each model's result (.json), predictions (.jsonl) and, of fine-tuning, the state to resume from."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    ignore_unexpected_weights: bool = False
    """Leave out weights that the checkpoint has and the model of its config.json does not, such as biases."""
    json: bool = False
    """Print one JSON document."""


Args: Any = dataclasses.make_dataclass("Args", _groups(), bases=(TransferArgs,), frozen=True)
Args.__doc__ = TransferArgs.__doc__


def method_config(args: TransferArgs) -> Any:
    """Return the config of the method with what the command line gives of it.

    Raises:
        IsolossError: An option that the method does not have, or a value out of its range.
    """
    config = METHODS[args.method]
    preset = None if args.preset is None else load_preset(args.preset).method(args.method)
    own = {member.name for member in dataclasses.fields(TransferArgs)}
    groups = [vars(group) for name, group in vars(args).items() if name not in own]
    given = {name: value for group in groups for name, value in group.items() if value is not None}
    if unknown := [option_name(name) for name in given if not hasattr(config, name)]:
        raise IsolossError(f"{', '.join(unknown)}: no effect with --method {args.method}")
    if "warmup_proportion" in given:
        given = {"warmup_steps": None} | given  # not the preset's
    chosen = dataclasses.replace(preset or config(), **given, seed=args.seed)
    check(chosen)
    return chosen


@dataclass(frozen=True)
class Subject:
    """A model, or the look-up table of a language, and the run that it is of, if it is of one."""

    name: str
    checkpoint: str | None  # of a look-up table, None
    run: Run | None


def subjects(args: TransferArgs) -> list[Subject]:
    """Return what the command line names.

    Raises:
        IsolossError: It names nothing, something twice, or a run without a checkpoint.
    """
    if not args.models:
        if args.method == "lookup" and args.sentences.language is not None:
            return [Subject(args.sentences.language, None, None)]
        raise IsolossError("no model is named: give a run, a checkpoint folder or a name on the Hugging Face hub")
    refuse_twice(args.models)
    models = []
    for name in args.models:
        run = Run(Path(name))
        if run.exists:
            step = run.last_step()
            models.append(Subject(f"{name} at step {step}", str(run.checkpoint(step)), run))
        else:
            own = checkpoint_of(Path(name))
            models.append(Subject(name, name, None if own is None else own[0]))
    return models


def check_args(args: TransferArgs, models: list[Subject]) -> None:
    """Refuse what needs no torch to be seen as wrong.

    Raises:
        IsolossError: A value out of its range, or a device, checkpoint, file or tokenizer that there cannot be.
    """
    check(args.sentences)
    check(args.labeled_text)
    check(args)
    early_checks.check_device(args.device)
    for subject in models:
        if subject.checkpoint is not None:
            early_checks.check_checkpoint(subject.checkpoint)
    for path in (args.labeled_text.data, args.labeled_text.test_data):
        if path is not None and not hub_datasets.is_dataset(path) and not Path(path).expanduser().exists():
            raise IsolossError(f"there is no file or folder {path}{files.nearest(path)}")
    if args.labeled_text.tokenizer is not None:
        tokenizers.check_name(args.labeled_text.tokenizer)


class Tasks:
    """The task of the command line, as each model reads it, and the language that it is about, if it is about one."""

    def __init__(self, args: TransferArgs, models: list[Subject]) -> None:
        self.args = args
        registered = registered_text_task(args.task, args.labeled_text.data)
        self.is_text = args.labeled_text.data is not None or registered is not None
        if given := _given(args.sentences if self.is_text else args.labeled_text):
            text_tasks = [name for name, task in TASKS.loaded().items() if isinstance(task, TextTask)]
            kind = f"a synthetic language (tasks of text: {', '.join(text_tasks)}, or --data)"
            raise IsolossError(
                f"{args.task} is a task of {'real text' if self.is_text else kind}: leave out {', '.join(given)}"
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
        """Return the task as `subject` reads it.

        Raises:
            IsolossError: Its vocabulary is another than that of the language or of the tokenizer.
        """
        from isoloss.transfer.tasks import read_from_start

        if self._synthetic is None:
            assert loaded is not None  # a look-up table of text was refused
            return self._make_text(subject, loaded)
        if loaded is None:
            return self._synthetic
        known, needed = int(loaded.model.config.get_text_config().vocab_size), self.language.model_vocab_size
        if known != needed:
            raise IsolossError(
                f"{subject.name} knows {known:,} ids, and a model of the language of task {self.args.task} knows "
                f"{needed:,}: it is a model of another language"
            )
        return read_from_start(self._synthetic, self.language) if loaded.kind == "causal" else self._synthetic

    def _make_synthetic(self) -> TaskData:
        from isoloss.transfer.tasks import make_task

        args, own = self.args, self.args.sentences
        preset, task = None if args.preset is None else load_preset(args.preset), args.task
        num_train = preset.num_train if preset and args.num_train is None else args.num_train
        if preset:
            base = task.removesuffix(LATENT)
            task = preset.tasks.get(base, base) + task[len(base) :]
        numbers = {"num_train": num_train, "num_test": args.num_test}
        redraw = own.test_redraw
        other = None if redraw is None else self.language.redrawn(fraction=redraw, seed=args.seed)
        return make_task(
            self.language,
            task,
            **{name: number for name, number in numbers.items() if number is not None},
            seed=args.seed,
            train_lengths=own.train_lengths,
            test_lengths=own.test_lengths,
            test_language=other,
        )

    def _make_text(self, subject: Subject, loaded: LoadedModel) -> TaskData:
        from isoloss.model_checks import max_length
        from isoloss.transfer.text_tasks import as_read_by, read_examples

        assert self._source is not None
        args, tokenizer = self.args, self._tokenizer(subject)
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
            return load_tokenizer(self.args.labeled_text.tokenizer, needs=["pad"])
        try:
            return load_tokenizer(str(subject.checkpoint), needs=["pad"])
        except IsolossError as error:
            config = None if subject.run is None else subject.run.config.language
            found: PreTrainedTokenizerFast | None = None if config is None else config.build().tokenizer
            if found is None:
                raise IsolossError(f"{subject.name} has no tokenizer that suits ({error}): give --tokenizer") from error
            return found  # of a checkpoint that was written without it


def _given(group: Any) -> list[str]:
    """Return the options of a group that have been set."""
    return [option_name(name) for name, value in vars(group).items() if value != getattr(type(group), name)]


def _language(args: TransferArgs, models: list[Subject]) -> Any:
    from isoloss import languages

    if args.sentences.language is not None:
        return languages.resolve(args.sentences.language).build()
    known: tuple[str, Any] | None = None
    for subject in models:
        if subject.run is None:
            raise IsolossError(
                f"{subject.name} is neither a run directory nor a checkpoint in one, so its language is not known: add "
                f"--language, or --data with labeled text{files.nearest(subject.name)}"
            )
        config = subject.run.config.language
        if known is not None and known[1] != config:
            raise IsolossError(f"{known[0]} and {subject.name} are models of different languages: add --language")
        known = known or (subject.name, config)
    assert known is not None
    return known[1].build()


def _source(args: TransferArgs, registered: TextTask | None) -> TextTask:
    """Return where the examples are: a registered task with what the command line changes, or one of its own."""
    given = args.labeled_text
    if registered is None and given.text is None:
        raise IsolossError(f"task {args.task} is your own: name the column of the text with --text")
    base = registered or TextTask(name=args.task, train=str(given.data), text=str(given.text))
    return dataclasses.replace(
        base,
        test=given.test_data,
        text=given.text or base.text,
        pair=given.pair if given.text else given.pair or base.pair,
        label=given.label or base.label,
        train_split=given.train_split or base.train_split,
        test_split=given.test_split or (base.test_split if given.test_data is None else None),
        other_columns=() if given.text or given.pair or given.label else base.other_columns,
    )
