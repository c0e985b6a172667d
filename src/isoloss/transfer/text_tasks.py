"""Tasks of real text as token ids: GLUE's, and any file or dataset with one or two texts and a label."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoloss import seeds
from isoloss.errors import IsolossError, warn
from isoloss.text import hub_datasets
from isoloss.text.masking import Sentences
from isoloss.text.text_classification import (
    LabeledText,
    coverage,
    encode_labeled_text,
    missing_labels,
    read_labeled_text,
    split_files,
)
from isoloss.transfer.results import majority_rate
from isoloss.transfer.tasks import TaskData, overlap
from isoloss.transfer.text_sources import TextTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TEST_SPLITS = ("dev", "validation", "dev_matched", "validation_matched", "test")  # GLUE's test sets have no labels
_HELD_OUT = 5  # one example of so many is kept for testing, where one file is all there is
_MOST_TOKENS = 128  # of an example, where the model reads as many


@dataclass(frozen=True, kw_only=True, eq=False)
class TextExamples:
    """The examples of a task of text, before a tokenizer has read them.

    Attributes:
        name: The task.
        train: The training examples.
        test: The test examples, with the same names of labels.
    """

    name: str
    train: LabeledText
    test: LabeledText


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
        The task; its classes are the labels' names, and `bayes` is None, as it is unknown.

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
    examples = read_examples(source, num_train=num_train, num_test=num_test, seed=seed)
    return _encoded(examples, tokenizer, max_length=max_length, token_types=token_types)


def read_examples(
    source: TextTask,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> TextExamples:
    """Return the examples of `source`; arguments and errors are those of `make_text_task`.

    With `draws`, the training examples are as many disjoint draws of `num_train`, one after another. The first is the
    one that is drawn without it.

    Raises:
        IsolossError: There are fewer examples than the draws take.
    """
    for split, number in (("train", num_train), ("test", num_test)):
        if number is not None and number < 1:
            raise IsolossError(f"num_{split} is {number}; a task needs at least 1 {split} example")
    train, test = _read(source, seed)
    if draws is not None and (num_train is None or draws * num_train > len(train)):
        wanted = "all" if num_train is None else f"{num_train:,}"
        raise IsolossError(
            f"task {source.name} has {len(train):,} training examples, too few for {draws} disjoint "
            f"draw{'s' * (draws > 1)} of {wanted}"
        )
    train = _some(train, num_train, seeds.generator(seed, "examples", source.name, "train"), draws or 1)
    test = _some(test, num_test, seeds.generator(seed, "examples", source.name, "test"))
    if len({*train.labels, *test.labels}) < 2:
        only = train.label_names[train.labels[0]]
        number = len(train) + len(test)
        raise IsolossError(f"{source.train}: all {number:,} examples have the label {only}; a task needs two labels")
    return TextExamples(name=source.name, train=train, test=test)


def as_read_by(
    config: Any,
    positions: int | None,
    examples: TextExamples,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int | None = None,
    model: str = "the model",
) -> TaskData:
    """Return examples as token ids, in the form that a model takes.

    Args:
        config: The model's transformers config.
        positions: The most tokens that the model takes (`isoloss.model_checks.max_length`); None: any number.
        examples: The examples.
        tokenizer: The model's.
        max_length: The most tokens of an example; None: 128, or as many as the model or its tokenizer takes.
        model: What messages call the model.

    Raises:
        IsolossError: The tokenizer gives an id that the model does not know; or as for `make_text_task`.

    Warns:
        IsolossWarning: Examples are truncated, and no `max_length` is given.
    """
    config = config.get_text_config()
    # (transformers sets the last one to 1e30 where a tokenizer does not say)
    most = min(_MOST_TOKENS, positions or _MOST_TOKENS, tokenizer.model_max_length)
    types = getattr(config, "type_vocab_size", 1)
    task = _encoded(examples, tokenizer, max_length=max_length or most, token_types=types)
    train, test = (
        _checked_ids(sentences, config.vocab_size, task.name, model) for sentences in (task.train, task.test)
    )
    task = dataclasses.replace(task, train=train, test=test)
    text = task.coverage
    if text is not None and text.num_cut and max_length is None:
        warn(
            f"{text.num_cut:,} of the {text.num_examples:,} examples of {task.name} are longer than the {most} tokens "
            f"that {model} reads here (special tokens included) and are truncated"
        )
    return task


def _checked_ids(sentences: Sentences, vocab_size: int, task: str, model: str) -> Sentences:
    """Return the sentences; refuse an id that the model does not know, except at padding."""
    unknown = sentences.tokens >= vocab_size
    if bool((unknown & sentences.present()).any()):
        raise IsolossError(
            f"the examples of {task} hold the token id {int(sentences.tokens[sentences.present()].max())}, and {model} "
            f"knows {vocab_size:,} ids: the tokenizer belongs to another model"
        )
    return Sentences(sentences.tokens.masked_fill(unknown, 0), sentences.lengths)


def _encoded(
    examples: TextExamples, tokenizer: PreTrainedTokenizerFast, *, max_length: int, token_types: int
) -> TaskData:
    train, test = examples.train, examples.test
    encoded = [
        encode_labeled_text(tokenizer, part, max_length=max_length, token_types=token_types) for part in (train, test)
    ]
    width = max(part["input_ids"].shape[1] for part in encoded)
    pad = tokenizer.pad_token_id or 0
    splits = [Sentences(_padded(part["input_ids"], width, pad), part["attention_mask"].sum(dim=1)) for part in encoded]
    types = [_padded(part["token_type_ids"], width, 0) if "token_type_ids" in part else None for part in encoded]
    test_labels = encoded[1]["labels"]
    return TaskData(
        name=examples.name,
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
    columns: dict[str, Any] = {
        name: getattr(source, name) for name in ("text", "pair", "label", "other_columns", "header", "label_names")
    }
    train = read_labeled_text(source.train, **columns, split=source.train_split)
    where = source.test or source.train
    if source.test is None and Path(source.train).expanduser().is_file():
        # by the file alone and the seed, so that a test example stays one whatever `num_train` and `num_test` are
        order = torch.randperm(len(train), generator=seeds.generator(seed, "held-out", source.name)).tolist()
        held_out = len(train) // _HELD_OUT
        if held_out == 0:
            raise IsolossError(f"{source.train} has {len(train)} examples, too few to keep one in five for testing")
        # what is left out is counted once, with the training examples
        test = dataclasses.replace(train, num_unlabeled=0, num_incomplete=0)
        return _rows(train, sorted(order[held_out:])), _rows(test, sorted(order[:held_out]))
    split = source.test_split or _test_split(where)
    if source.test is None and split == source.train_split:
        raise IsolossError(f"the split {split!r} of {where} would be used for training and for testing")
    test = read_labeled_text(where, **columns, split=split)
    if (train.pairs is None) != (test.pairs is None):
        raise IsolossError(f"{source.train} and {where} do not match: one has two texts per row, and the other has one")
    missing = missing_labels({*train.label_names, *test.label_names}, source.label_names or ())
    train, test = (_without(data, missing) for data in (train, test))
    # a split has numbered only the labels that it has
    names = tuple(dict.fromkeys([*train.label_names, *test.label_names]))
    return _renamed(train, names), _renamed(test, names)


def _without(data: LabeledText, missing: set[str]) -> LabeledText:
    """Return the examples without labels that stand for a missing one; one split alone may not show that they do."""
    rows = [row for row, label in enumerate(data.labels) if data.label_names[label] not in missing]
    left_out = len(data) - len(rows)
    if not left_out:
        return data
    warn(f"{left_out:,} rows with the label {' or '.join(sorted(missing))}, read as a missing label, are left out")
    if not rows:
        raise IsolossError("no example of one of the splits has a label")
    return _renamed(
        dataclasses.replace(_rows(data, rows), num_unlabeled=data.num_unlabeled + left_out),
        tuple(name for name in data.label_names if name not in missing),
    )


def _renamed(data: LabeledText, names: tuple[str, ...]) -> LabeledText:
    """Return the same examples with labels that are indices into `names`."""
    labels = tuple(names.index(data.label_names[label]) for label in data.labels)
    return dataclasses.replace(data, labels=labels, label_names=names)


def _test_split(where: str) -> str:
    if hub_datasets.is_dataset(where):
        return "validation"
    folder = Path(where).expanduser()
    if not folder.is_dir():
        # a file has one split, whatever its name
        return "test"
    names = split_files(folder)
    split = next((split for split in _TEST_SPLITS if split in names), None)
    if split is None:
        raise IsolossError(
            f"the folder {where} has none of the test splits {', '.join(_TEST_SPLITS)}; it has "
            f"{', '.join(sorted(names)) or 'no labeled text'}: name one, or the test data"
        )
    return split


def _some(data: LabeledText, number: int | None, generator: torch.Generator, draws: int = 1) -> LabeledText:
    """Return `draws` times `number` examples, each draw in the order of `data`."""
    if number is None or (draws == 1 and number >= len(data)):
        return data
    order = torch.randperm(len(data), generator=generator).tolist()
    parts = [order[draw * number : (draw + 1) * number] for draw in range(draws)]
    return _rows(data, [row for part in parts for row in sorted(part)])


def _rows(data: LabeledText, rows: list[int]) -> LabeledText:
    return dataclasses.replace(
        data,
        texts=tuple(data.texts[row] for row in rows),
        pairs=None if data.pairs is None else tuple(data.pairs[row] for row in rows),
        labels=tuple(data.labels[row] for row in rows),
    )


def _padded(ids: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=value)
