"""What `isoloss transfer` works on: models and where they come from, and the task that they share."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import files
from isoloss.cli import common
from isoloss.cli.options import option_name
from isoloss.cli.transfer_options import TransferArgs
from isoloss.errors import IsolossError, warn
from isoloss.registry import TASKS
from isoloss.runs import Run, checkpoint_of
from isoloss.transfer.text_sources import TextTask, registered_text_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from isoloss.loading import Loaded
    from isoloss.transfer.tasks import TaskData

_MOST_TOKENS = 128  # of an example of real text, where the model reads as many


@dataclass(frozen=True)
class Subject:
    """A model, or the look-up table of a language.

    Attributes:
        name: What it is called.
        checkpoint: What is loaded; None of a look-up table.
        run: The run that it is of, if it is of one.
    """

    name: str
    checkpoint: str | None
    run: Run | None

    @property
    def file_name(self) -> str:
        """A name for its files."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "model"


def subjects(args: TransferArgs) -> list[Subject]:
    """Return what the command line names.

    Raises:
        IsolossError: It names nothing, something twice, or a run without a checkpoint.
    """
    if not args.models:
        if args.method == "lookup" and args.sentences.language is not None:
            return [Subject(args.sentences.language, None, None)]
        raise IsolossError("no model is named: give a run, a checkpoint folder or a name on the Hugging Face hub")
    if twice := next((name for i, name in enumerate(args.models) if name in args.models[:i]), None):
        raise IsolossError(f"{twice} is named twice; a model is compared with others")
    models = []
    for name in args.models:
        run = Run(Path(name))
        if run.exists:
            if not run.steps():
                raise IsolossError(f"{name} has no checkpoint yet: {common.command('train', name)} goes on with it")
            step = run.steps()[-1]
            models.append(Subject(f"{name} at step {step}", str(run.checkpoint(step)), run))
        else:
            own = checkpoint_of(Path(name))
            models.append(Subject(name, name, None if own is None else own[0]))
    return models


class Tasks:
    """The task of the command line, as each model reads it, and the language that it is about, if it is about one."""

    def __init__(self, args: TransferArgs, models: list[Subject]) -> None:
        self.args = args
        registered = registered_text_task(args.task, args.labeled_text.data)
        self.is_text = args.labeled_text.data is not None or registered is not None
        if given := _given(args.sentences if self.is_text else args.labeled_text):
            text_tasks = [name for name in TASKS if isinstance(TASKS.load(name), TextTask)]
            kind = f"a synthetic language (tasks of text: {', '.join(text_tasks)}, or --data)"
            raise IsolossError(
                f"{args.task} is a task of {'real text' if self.is_text else kind}: leave out {', '.join(given)}"
            )
        if self.is_text and args.method == "lookup":
            raise IsolossError(
                f"the true conditionals of the text of {args.task} are not known, so it has no look-up table"
            )
        self._source = _source(args, registered) if self.is_text else None
        self.language: Any = None if self.is_text else _language(args, models)
        self._synthetic = None if self.is_text else self._make_synthetic()

    def of(self, subject: Subject, loaded: Loaded | None) -> TaskData:
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
        numbers = {"num_train": args.num_train, "num_test": args.num_test}
        other = None
        if own.test_redraw is not None:
            other = self.language.redrawn(fraction=own.test_redraw, seed=args.seed)
        return make_task(
            self.language,
            args.task,
            **{name: number for name, number in numbers.items() if number is not None},
            seed=args.seed,
            train_lengths=own.train_lengths,
            test_lengths=own.test_lengths,
            test_language=other,
        )

    def _make_text(self, subject: Subject, loaded: Loaded) -> TaskData:
        from isoloss.loading import max_length
        from isoloss.transfer.text_tasks import make_text_task

        assert self._source is not None
        config, max_tokens = loaded.model.config.get_text_config(), self.args.labeled_text.max_length
        tokenizer = self._tokenizer(subject)
        if len(tokenizer) > config.vocab_size:
            raise IsolossError(
                f"the tokenizer has {len(tokenizer):,} tokens, and {subject.name} knows {config.vocab_size:,} ids: it "
                "is that of another model"
            )
        most = min(_MOST_TOKENS, max_length(config) or _MOST_TOKENS, tokenizer.model_max_length)
        task = make_text_task(
            self._source,
            tokenizer,
            num_train=self.args.num_train,
            num_test=self.args.num_test,
            max_length=max_tokens or most,
            token_types=getattr(config, "type_vocab_size", 1),
            seed=self.args.seed,
        )
        text = task.coverage
        if text is not None and text.num_cut and max_tokens is None:
            warn(
                f"{text.num_cut:,} of the {text.num_examples:,} examples of {self.args.task} are longer than the "
                f"{most} tokens that {subject.name} reads here (special tokens included) and are truncated"
            )
        return task

    def _tokenizer(self, subject: Subject) -> PreTrainedTokenizerFast:
        from isoloss.text.tokenizers import load_tokenizer

        if self.args.labeled_text.tokenizer is not None:
            return load_tokenizer(self.args.labeled_text.tokenizer, needs=["pad"])
        config = None if subject.run is None else subject.run.config.language
        named: str | None = getattr(config, "tokenizer", None)  # in the config of text
        try:
            return load_tokenizer(named or str(subject.checkpoint), needs=["pad"])
        except IsolossError as error:
            found: PreTrainedTokenizerFast | None = None if config is None or named else config.build().tokenizer
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
                f"--language, or --data with labelled text{files.nearest(subject.name)}"
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
        label=given.label,
        train_split=given.train_split,
        test_split=given.test_split or (base.test_split if given.test_data is None else None),
    )
