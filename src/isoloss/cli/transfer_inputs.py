"""What `isoloss transfer` works on: models and where they come from, and the task that they share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import files
from isoloss.cli import common
from isoloss.errors import IsolossError, warn
from isoloss.runs import Run, checkpoint_of
from isoloss.transfer.task_names import GLUE, REGRESSION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from isoloss.cli.transfer import Args
    from isoloss.loading import Loaded
    from isoloss.transfer.tasks import TaskData

_EXAMPLES = 4096  # sentences of a synthetic language, for training and for testing
_MOST_TOKENS = 128  # of an example of real text, where the model reads as many
_FOR_TEXT = ("test_data", "text", "pair", "label", "train_split", "test_split", "max_length", "tokenizer")
_FOR_LANGUAGES = ("language", "train_lengths", "test_lengths", "test_redraw")


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


def subjects(args: Args) -> list[Subject]:
    """Return what the command line names.

    Raises:
        IsolossError: It names nothing, something twice, or a run without a checkpoint.
    """
    if not args.models:
        if args.how == "lookup" and args.language is not None:
            return [Subject(args.language, None, None)]
        raise IsolossError("no model is named: give a run, a checkpoint folder or a name on the Hugging Face hub")
    if twice := next((name for i, name in enumerate(args.models) if name in args.models[:i]), None):
        raise IsolossError(f"{twice} is named twice; a model is compared with others")
    found = []
    for name in args.models:
        run = Run(Path(name))
        if run.exists:
            if not run.steps():
                raise IsolossError(f"{name} has no checkpoint yet: {common.command('train', name)} goes on with it")
            step = run.steps()[-1]
            found.append(Subject(f"{name} at step {step}", str(run.checkpoint(step)), run))
        else:
            own = checkpoint_of(Path(name))
            found.append(Subject(name, name, None if own is None else own[0]))
    return found


class Tasks:
    """The task of the command line, as each model reads it, and the language that it is about, if it is about one."""

    def __init__(self, args: Args, subjects: list[Subject]) -> None:
        self.args = args
        self.is_text = args.data is not None or args.task in (*GLUE, REGRESSION)
        given = [
            f"--{name.replace('_', '-')}"
            for name in (_FOR_LANGUAGES if self.is_text else _FOR_TEXT)
            if _is_given(args, name)
        ]
        if given:
            of = "real text" if self.is_text else f"a synthetic language (tasks of text: {', '.join(GLUE)}, or --data)"
            raise IsolossError(f"{args.task} is a task of {of}: leave out {', '.join(given)}")
        if self.is_text and args.how == "lookup":
            raise IsolossError(
                f"the true conditionals of the text of {args.task} are not known, so it has no look-up table"
            )
        self._source: Any = _source(args) if self.is_text else None
        self.language: Any = None if self.is_text else _language(args, subjects)
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

        args = self.args
        other = None
        if args.test_redraw is not None:
            other = self.language.redrawn(fraction=args.test_redraw, seed=args.seed)
        return make_task(
            self.language,
            args.task,
            num_train=_EXAMPLES if args.num_train is None else args.num_train,
            num_test=_EXAMPLES if args.num_test is None else args.num_test,
            seed=args.seed,
            train_lengths=args.train_lengths,
            test_lengths=args.test_lengths,
            test_language=other,
        )

    def _make_text(self, subject: Subject, loaded: Loaded) -> TaskData:
        from isoloss.loading import max_length
        from isoloss.transfer.labelled import make_text_task

        config = loaded.model.config.get_text_config()
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
            max_length=self.args.max_length or most,
            token_types=getattr(config, "type_vocab_size", 1),
            seed=self.args.seed,
        )
        text = task.coverage
        if text is not None and text.num_cut and self.args.max_length is None:
            warn(
                f"{text.num_cut:,} of the {text.num_examples:,} examples of {self.args.task} are longer than the "
                f"{most} tokens that {subject.name} reads here (special tokens included) and are truncated"
            )
        return task

    def _tokenizer(self, subject: Subject) -> PreTrainedTokenizerFast:
        from isoloss.text.tokenizers import load_tokenizer

        if self.args.tokenizer is not None:
            return load_tokenizer(self.args.tokenizer, needs=["pad"])
        config = None if subject.run is None else subject.run.config.language
        named: str | None = getattr(config, "tokenizer", None)  # in the config of text
        try:
            return load_tokenizer(named or str(subject.checkpoint), needs=["pad"])
        except IsolossError as error:
            found: PreTrainedTokenizerFast | None = None if config is None or named else config.build().tokenizer
            if found is None:
                raise IsolossError(f"{subject.name} has no tokenizer that suits ({error}): give --tokenizer") from error
            return found  # of a checkpoint that was written without it


def _is_given(args: Args, name: str) -> bool:
    return bool(getattr(args, name) != getattr(type(args), name))


def _language(args: Args, subjects: list[Subject]) -> Any:
    from isoloss import languages

    if args.language is not None:
        return languages.resolve(args.language).build()
    known: tuple[str, Any] | None = None
    for subject in subjects:
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


def _source(args: Args) -> Any:
    from isoloss.transfer.labelled import TextTask, glue_task

    if args.task in (*GLUE, REGRESSION):
        base = glue_task(args.task, args.data)
    else:
        if args.text is None:
            raise IsolossError(f"task {args.task} is your own: name the column of the text with --text")
        base = TextTask(name=args.task, train=str(args.data), text=args.text)
    return TextTask(
        name=base.name,
        train=base.train,
        test=args.test_data,
        text=args.text or base.text,
        pair=args.pair if args.text else args.pair or base.pair,
        label=args.label,
        train_split=args.train_split,
        test_split=args.test_split,
    )
