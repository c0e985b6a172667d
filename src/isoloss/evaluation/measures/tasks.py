"""What the measures on a downstream task share: the task, of the language or of text, and what is kept of a result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.evaluation.measures.base import MeasureResult, SeededMeasure, digest, influences
from isoloss.registry import TASKS
from isoloss.transfer.text_sources import TextTask, registered_name, registered_text_task

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData, WholeTask
    from isoloss.transfer.text_tasks import TextExamples


@dataclass(frozen=True, kw_only=True)
class Trained(SeededMeasure):
    """A measure that takes a number of training sentences."""

    num_train: int | Literal["all"] = setting(4096, minimum=1)
    """Training sentences of a probe or of fine-tuning. Of a task of text: examples, fewer where there are fewer, or all
    of them."""


@dataclass(frozen=True, kw_only=True)
class TaskMeasure(SeededMeasure):
    """A measure on a task of the language, or on one of text."""

    num_test: int | Literal["all"] = setting(4096, minimum=1)
    """Test sentences; all: every labeled sentence of the language, weighted by its probability, for an exact accuracy
    (for languages with at most 65,536 strings of tokens). Of a task of text: examples, as for num_train."""
    task_data: tuple[str, ...] = setting((), omit_default=True)
    """Where the examples of tasks of text are, as NAME=PATH, e.g. sst2=glue/SST-2: a .tsv, .csv, .jsonl or .json file,
    a folder with one for each split, or a dataset hf:NAME. Default: those of GLUE from the Hugging Face hub."""
    task_length: int | None = setting(None, minimum=1, omit_default=True)
    """Of a task of text: the most tokens of an example. Default: 128, or as many as the model reads."""
    task: str

    def __post_init__(self) -> None:
        """Keep what is about this task of `task_data` and `task_length`: the settings of others decide nothing here."""
        given: Any = self.task_data
        entries = (given,) if isinstance(given, str) else given
        own = tuple(entry for entry in entries if _named(entry) == registered_name(self.task))
        if len(own) > 1:
            raise IsolossError(f"task_data has the examples of {self.task} twice: {' and '.join(own)}")
        object.__setattr__(self, "task_data", own)
        if self._source is None:
            object.__setattr__(self, "task_length", None)

    @property
    def _source(self) -> TextTask | None:
        """Where the examples of a task of text are; None for a task of the language."""
        return registered_text_task(self.task, next((own.partition("=")[2] for own in self.task_data), None))

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there is no such task."""
        source = self._source
        if source is None and context.language is None:
            return "tasks are those of a language, and none is given"
        try:
            if source is None:
                self._sentences(context)
            else:
                self._examples(source, context)
        except IsolossError as error:
            return str(error)
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `accuracy`, with the class that each seed's classifier predicts for each test example.

        Tested on all sentences, it comes instead with the influence of each draw, projection or seed.
        """
        from isoloss.transfer.tasks import WholeTask

        if (source := self._source) is not None:
            return self._run_on_text(model, context, self._examples(source, context))
        data = self._sentences(context)
        if isinstance(data, WholeTask):
            whole = data.task
            accuracy = self._exact(model, context, data)
            arrays = influences({"accuracy": accuracy})
        else:
            whole, result = data, self._result(model, context, data)
            accuracy, arrays = result.accuracy, _predictions(result)
        inputs = digest(
            whole.train.tokens, whole.train_labels, whole.test.tokens, whole.test_labels, more=list(whole.classes)
        )
        return MeasureResult(estimates={"accuracy": accuracy}, arrays=arrays, inputs=inputs)

    def _run_on_text(self, model: Any, context: MeasureContext, examples: TextExamples) -> MeasureResult:
        """Return the accuracy on examples of text, which are the inputs: models may read them in different tokens."""
        data = context.text_task(examples, model, max_length=self.task_length)
        assert data.coverage is not None  # as of every task of text
        result = self._result(model, context, data)
        details = {**result.accuracy.details, "text": dataclasses.asdict(data.coverage)}
        accuracy = dataclasses.replace(result.accuracy, details=details)
        texts = dataclasses.asdict(examples)
        for split in ("train", "test"):
            del texts[split]["num_unlabeled"], texts[split]["num_incomplete"]  # the examples alone are the inputs
        inputs = digest(more=texts)
        return MeasureResult(estimates={"accuracy": accuracy}, arrays=_predictions(result), inputs=inputs)

    def _drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return how many training examples a draw has, and how many draws there are; None: one, and it may be less."""
        raise NotImplementedError

    def _sentences(self, context: MeasureContext) -> TaskData | WholeTask:
        number, draws = self._drawn()
        if isinstance(number, str):
            raise IsolossError("num_train is all, but sentences of a language are drawn: give num_train as a number")
        drawn = {"num_train": number * (draws or 1), "seed": self.seed}
        if isinstance(self.num_test, str):
            return context.whole_task(self.task, **drawn)
        return context.task(self.task, **drawn, num_test=self.num_test)

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        context.tokenizer()  # none is an error that is told before any text is read
        number, draws = self._drawn()
        num_train, num_test = (None if isinstance(n, str) else n for n in (number, self.num_test))
        return context.text_examples(source, num_train=num_train, num_test=num_test, draws=draws, seed=self.seed)

    def _takes_start(self, context: MeasureContext) -> bool:
        """Whether the model reads a start that the sentences lack; what stands before a text, its tokenizer has put."""
        return context.is_causal and self._source is None

    def _read(self, data: TaskData, context: MeasureContext) -> TaskData:
        """Return the task as the model reads it."""
        from isoloss.transfer.tasks import read_from_start

        return read_from_start(data, context.language) if self._takes_start(context) else data

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result on sampled test sentences."""
        raise NotImplementedError

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        """Return the accuracy over all sentences."""
        raise NotImplementedError


def _named(entry: Any) -> str:
    """Return the task that an entry of `task_data` is about."""
    name, has_path, path = str(entry).partition("=")
    if not (has_path and path) or registered_text_task(name) is None:
        tasks = ", ".join(other for other, task in TASKS.loaded().items() if isinstance(task, TextTask))
        raise IsolossError(f"task_data has {entry!r}; an entry is NAME=PATH with a task of text ({tasks}) as its name")
    return registered_name(name)


def _predictions(result: TransferResult) -> dict[str, Any]:
    """Return what each classifier says of each test example, and the labels, in as few bytes as the classes need."""
    import numpy as np

    small = np.min_scalar_type(len(result.classes) - 1)
    return {
        "accuracy.predictions": result.predictions.numpy().astype(small),
        "accuracy.labels": result.labels.numpy().astype(small),
    }
