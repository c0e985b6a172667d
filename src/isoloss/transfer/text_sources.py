"""Where the examples of a task of real text are: the tasks of GLUE, and your own. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from isoloss.errors import IsolossError
from isoloss.registry import TASKS
from isoloss.text.hub_datasets import is_dataset

_HUB = "hf:nyu-mll/glue:"
_REGRESSION = "stsb"  # the task of GLUE that has no classes


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """Where the examples of a task are.

    Attributes:
        name: What the task is called.
        train: File, folder or dataset (`hf:NAME`) of the training examples.
        test: The same of the test examples; None: also in `train`, another split of it or, of a single file, one
            example in five.
        text: Column of the text.
        pair: Column of the second text, or None where an example is one text.
        label: Column of the label.
        train_split: Split of a folder or dataset.
        test_split: The same for the test examples; None: of a folder the first of `dev`, `validation`, `dev_matched`,
            `validation_matched` and `test` that it has, of a dataset `validation`.
        other_columns: What other files of the task call `text`, `pair` and `label`; a file's are the first that it has.
        header: Columns of a file whose first line is an example.
        label_names: All labels, which may then include `NA` or `None`; None: the labels in the data.
    """

    name: str
    train: str
    test: str | None = None
    text: str
    pair: str | None = None
    label: str = "label"
    train_split: str = "train"
    test_split: str | None = None
    other_columns: tuple[tuple[str, str | None, str], ...] = ()
    header: tuple[str, ...] = ()
    label_names: tuple[str, ...] | None = None


def _glue(name: str, text: str, pair: str | None = None, **more: Any) -> TextTask:
    return TextTask(name=name, train=f"{_HUB}{name}", text=text, pair=pair, **more)


# GLUE (Wang et al., 2018), with the columns of nyu-mll/glue, and of GLUE's own files where these are others
COLA = _glue("cola", "sentence", header=("source", "label", "star", "sentence"))
MNLI = _glue(
    "mnli",
    "premise",
    "hypothesis",
    test_split="validation_matched",
    other_columns=(("sentence1", "sentence2", "gold_label"),),
)
MRPC = _glue("mrpc", "sentence1", "sentence2", other_columns=(("#1 String", "#2 String", "Quality"),))
QNLI = _glue("qnli", "question", "sentence", other_columns=(("text_a", "text_b", "label"),))
QQP = _glue("qqp", "question1", "question2", other_columns=(("question1", "question2", "is_duplicate"),))
RTE = _glue("rte", "sentence1", "sentence2")
SST2 = _glue("sst2", "sentence")
WNLI = _glue("wnli", "sentence1", "sentence2")

# of the text that comes with Python
DOCSTRING_KIND = TextTask(name="docstring-kind", train="python:docstring-kind", text="text")
DOCSTRING_MODULE = TextTask(name="docstring-module", train="python:docstring-module", text="text")
SENTENCE_SOURCE = TextTask(name="sentence-source", train="python:sentence-source", text="text")
SENTENCE_ORDER = TextTask(name="sentence-order", train="python:sentence-order", text="text", pair="pair")


def registered_name(name: str) -> str:
    """Return the name under which the task `name` is registered, whatever its case and hyphens: of SST-2, sst2."""
    return name if name in TASKS else next((task for task in TASKS if _plain(task) == _plain(name)), name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def registered_text_task(name: str, data: str | None = None) -> TextTask | None:
    """Return the task of text that is registered under `name`, e.g. `rte` or `SST-2`, or None; STS-B is refused.

    Its examples are in `data`, e.g. a folder with `train.tsv` and `dev.tsv`; None: where the task says, which is
    `hf:nyu-mll/glue:NAME` for those of GLUE.

    Example:
        >>> from isoloss.transfer.text_sources import registered_text_task
        >>> task = registered_text_task("SST-2", "data/SST-2")
        >>> task.name, task.train, task.text, task.label
        ('sst2', 'data/SST-2', 'sentence', 'label')
    """
    if _plain(name) == _REGRESSION:
        raise IsolossError(f"{name} is no classification task (it is a regression); the tasks are {', '.join(TASKS)}")
    name = registered_name(name)
    task = TASKS.load(name) if name in TASKS else None
    if not isinstance(task, TextTask):
        return None
    return task if data is None else dataclasses.replace(task, train=data, test_split=None)


def own_text_task(name: str, data: str) -> TextTask:
    """Return your own task, with examples in the columns `text` and `label`, and `pair` if they are two texts.

    `data` is a file, a folder with a file for each split, or a dataset.
    """
    if is_dataset(data):
        return TextTask(name=name, train=data, text="text")
    return TextTask(name=name, train=data, text="text", pair="pair", other_columns=(("text", None, "label"),))
