"""Tasks of real text: GLUE's, and any files or datasets with a text or two and a label."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.api import Sentences
from isoloss.text import hub_datasets
from isoloss.text.text_classification import SUFFIXES, LabeledText, coverage, encode_labeled_text, read_labeled_text
from isoloss.transfer.results import majority_rate
from isoloss.transfer.task_names import GLUE, REGRESSION
from isoloss.transfer.tasks import TaskData, overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_HUB = "hf:nyu-mll/glue:"
_TEST_SPLITS = ("dev", "validation", "dev_matched", "validation_matched")  # GLUE's test sets have no labels
_HELD_OUT = 5  # one example of so many is kept for testing, where one file is all there is


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
        test_split: The same for the test examples; None: the first of `dev`, `validation`, `dev_matched` and
            `validation_matched` that a folder has; of a dataset `validation`, of MNLI `validation_matched`.
    """

    name: str
    train: str
    test: str | None = None
    text: str
    pair: str | None = None
    label: str = "label"
    train_split: str = "train"
    test_split: str | None = None


def glue_task(name: str, data: str | None = None) -> TextTask:
    """Return the task of GLUE (Wang et al., 2018) that is called `name`, with the columns of `nyu-mll/glue`.

    STS-B, a regression, is not among them.

    Args:
        name: `cola`, `mnli`, `mrpc`, `qnli`, `qqp`, `rte`, `sst2` or `wnli`.
        data: Where it is, e.g. a folder with `train.tsv` and `dev.tsv`; None: `hf:nyu-mll/glue:NAME`.

    Raises:
        IsolossError: There is no such task.

    Example:
        >>> glue_task("rte", "data/rte").pair
        'sentence2'
    """
    if name not in GLUE:
        why = " (it is a regression)" if name == REGRESSION else ""
        raise IsolossError(f"GLUE has no classification task {name!r}{why}; it has {', '.join(GLUE)}")
    text, pair = GLUE[name]
    return TextTask(name=name, train=data or f"{_HUB}{name}", text=text, pair=pair)


def make_text_task(
    source: TextTask,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    max_length: int = 128,
    token_types: int = 2,
    seed: int = 0,
) -> TaskData:
    r"""Return the examples of `source` as token ids; see `encode_labeled_text`.

    Args:
        source: Where the examples are.
        tokenizer: Of the model that is to read them.
        num_train: Training examples, drawn from all without replacement; None, or more than there are: all, in order.
        num_test: The same of the test examples.
        max_length: The most tokens of an example, the special ones included; longer texts are cut.
        token_types: Token types that the model knows.
        seed: Decides which examples, where not all are taken; the streams are `("examples", name, split)`.

    Returns:
        The task; its classes are the labels' names, and `bayes` is None, as nobody knows it.

    Raises:
        IsolossError: As for `read_labeled_text` (a missing file, split or column, and more); a number of examples is
            below 1; or all examples have one label.

    Example:
        >>> import tempfile
        >>> from isoloss.text.tokenizers import load_tokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nbad\nfilm\n"
        ...     _ = Path(folder, "vocab.txt").write_text(words)
        ...     _ = Path(folder, "train.tsv").write_text("review\tverdict\ngood film\tyes\nbad film\tno\n")
        ...     _ = Path(folder, "dev.tsv").write_text("review\tverdict\nbad\tno\n")
        ...     source = TextTask(name="films", train=folder, text="review", label="verdict")
        ...     task = make_text_task(source, load_tokenizer(f"{folder}/vocab.txt"))
        >>> task.classes, task.train.tokens.tolist(), task.test.tokens.tolist()
        (('no', 'yes'), [[2, 5, 7, 3], [2, 6, 7, 3]], [[2, 6, 3, 0]])
    """
    for split, number in (("train", num_train), ("test", num_test)):
        if number is not None and number < 1:
            raise IsolossError(f"num_{split} is {number}; a task needs at least 1 {split} example")
    train, test = _read(source, seed)
    train = _some(train, num_train, seeds.generator(seed, "examples", source.name, "train"))
    test = _some(test, num_test, seeds.generator(seed, "examples", source.name, "test"))
    if len({*train.labels, *test.labels}) < 2:
        only = train.label_names[train.labels[0]]
        raise IsolossError(f"task {source.name}: all examples have the label {only}; a task needs two")
    encoded = [
        encode_labeled_text(tokenizer, part, max_length=max_length, token_types=token_types) for part in (train, test)
    ]
    width = max(part["input_ids"].shape[1] for part in encoded)
    pad = tokenizer.pad_token_id
    splits = [
        Sentences(_padded(part["input_ids"], width, int(pad)), part["attention_mask"].sum(dim=1)) for part in encoded
    ]
    types = [_padded(part["token_type_ids"], width, 0) if "token_type_ids" in part else None for part in encoded]
    test_labels = encoded[1]["labels"]
    return TaskData(
        name=source.name,
        train=splits[0],
        train_labels=encoded[0]["labels"],
        test=splits[1],
        test_labels=test_labels,
        classes=train.label_names,
        majority_rate=majority_rate(test_labels),
        overlap=overlap(splits[0].tokens, splits[1].tokens),
        train_types=types[0],
        test_types=types[1],
        texts=tuple(zip(test.texts, *([] if test.pairs is None else [test.pairs]), strict=True)),
        coverage=coverage(tokenizer, train, max_length=max_length) + coverage(tokenizer, test, max_length=max_length),
    )


def _read(source: TextTask, seed: int) -> tuple[LabeledText, LabeledText]:
    """Return the training and the test examples, with the same names of labels."""
    columns = {"text": source.text, "pair": source.pair, "label": source.label}
    train = read_labeled_text(source.train, **columns, split=source.train_split)  # type: ignore[arg-type]
    where = source.test or source.train
    if source.test is None and Path(source.train).expanduser().is_file():
        order = torch.randperm(len(train), generator=seeds.generator(seed, "held-out", source.name)).tolist()
        held_out = len(train) // _HELD_OUT
        if held_out == 0:
            raise IsolossError(f"{source.train} has {len(train)} examples, too few to keep one in five for testing")
        return _rows(train, sorted(order[held_out:])), _rows(train, sorted(order[:held_out]))
    split = source.test_split or _test_split(where, source)
    if source.test is None and split == source.train_split:
        raise IsolossError(f"the split {split!r} of {where} would be used for training and for testing")
    test = read_labeled_text(where, **columns, split=split)  # type: ignore[arg-type]
    names = tuple(dict.fromkeys([*train.label_names, *test.label_names]))
    return _renamed(train, names), _renamed(test, names)


def _renamed(data: LabeledText, names: tuple[str, ...]) -> LabeledText:
    """Return the same examples with labels that are places in `names`."""
    labels = tuple(names.index(data.label_names[label]) for label in data.labels)
    return dataclasses.replace(data, labels=labels, label_names=names)


def _test_split(where: str, source: TextTask) -> str:
    if hub_datasets.is_dataset(where):
        return "validation_matched" if source.name == "mnli" and where == f"{_HUB}mnli" else "validation"
    folder = Path(where).expanduser()
    if not folder.is_dir():
        return "test"  # a file has one split only, whatever its name
    there = {file.stem for file in folder.iterdir() if file.suffix.lower() in SUFFIXES}
    found = next((split for split in _TEST_SPLITS if split in there), None)
    if found is None:
        raise IsolossError(
            f"the folder {where} has none of the test splits {', '.join(_TEST_SPLITS)}; it has "
            f"{', '.join(sorted(there)) or 'no labeled text'}: name one, or the test data"
        )
    return found


def _some(data: LabeledText, number: int | None, generator: torch.Generator) -> LabeledText:
    if number is None or number >= len(data):
        return data
    return _rows(data, sorted(torch.randperm(len(data), generator=generator)[:number].tolist()))


def _rows(data: LabeledText, rows: list[int]) -> LabeledText:
    return dataclasses.replace(
        data,
        texts=tuple(data.texts[row] for row in rows),
        pairs=None if data.pairs is None else tuple(data.pairs[row] for row in rows),
        labels=tuple(data.labels[row] for row in rows),
    )


def _padded(ids: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=value)
