"""Tasks of real text as token ids: GLUE's, and any file or dataset with one or two texts and a label."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from isoloss import seeds
from isoloss.errors import IsolossError, warn
from isoloss.text import hub_datasets
from isoloss.text.labeled_text import LabeledText, number_labels, read_rows, split_files
from isoloss.text.masking import Sentences
from isoloss.text.tokenizers import encode
from isoloss.transfer.results import majority_rate
from isoloss.transfer.tasks import Coverage, TaskData, overlap
from isoloss.transfer.text_sources import TextTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TEST_SPLITS = ("dev", "validation", "dev_matched", "validation_matched", "test")  # GLUE's test sets have no labels
_HELD_OUT = 5  # one example of so many is kept for testing, where one file is all there is
_MOST_TOKENS = 128  # of an example, where the model reads as many


@dataclass(frozen=True, kw_only=True, eq=False)
class TextExamples:
    """The examples of a task of text, before a tokenizer has read them; both splits have the same names of labels."""

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
        >>> from pathlib import Path
        >>> from isoloss.text.tokenizers import load_tokenizer
        >>> from isoloss.transfer import make_text_task
        >>> from isoloss.transfer.text_sources import TextTask
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
    """Return examples as token ids, as the model with this transformers config reads them.

    Args:
        config: The model's.
        positions: The most tokens that the model takes (`isoloss.model_checks.max_length`); None: any number.
        examples: The examples.
        tokenizer: The model's.
        max_length: The most tokens of an example; None: 128, or as many as the model or its tokenizer takes. Then a
            warning says how many examples are truncated.
        model: What messages call the model.

    Raises:
        IsolossError: The tokenizer gives an id that the model does not know; or as for `make_text_task`.
    """
    config = config.get_text_config()
    # (transformers sets the last one to 1e30 where a tokenizer does not say)
    most = min(_MOST_TOKENS, positions or _MOST_TOKENS, tokenizer.model_max_length)
    types = getattr(config, "type_vocab_size", 1)
    task = _encoded(examples, tokenizer, max_length=max_length or most, token_types=types)
    known = []
    for sentences in (task.train, task.test):
        unknown = sentences.tokens >= config.vocab_size
        if bool((unknown & sentences.present()).any()):
            raise IsolossError(
                f"the examples of {task.name} hold the token id {int(sentences.tokens[sentences.present()].max())}, "
                f"and {model} knows {config.vocab_size:,} ids: the tokenizer belongs to another model"
            )
        # the id of padding may be one that the model does not know
        known.append(Sentences(sentences.tokens.masked_fill(unknown, 0), sentences.lengths))
    task = dataclasses.replace(task, train=known[0], test=known[1])
    text = task.coverage
    if text is not None and text.num_cut and max_length is None:
        warn(
            f"{text.num_cut:,} of the {text.num_examples:,} examples of {task.name} are longer than the {most} tokens "
            f"that {model} reads here (special tokens included) and are truncated"
        )
    return task


def encode_labeled_text(
    tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int, token_types: int = 2
) -> dict[str, torch.Tensor]:
    """Return what a classifier takes, with the labels: [CLS] a [SEP], or [CLS] a [SEP] b [SEP].

    Special tokens are those that the tokenizer itself puts around one and two texts; GPT-2's puts none. Where it puts
    none between two texts, a newline separates them. An example that is too long loses tokens from the end of the
    longer text, one at a time; while the two are equally long, from the one that was shorter at first (if neither was,
    the first). What a text spells is never a special token. A tokenizer without a padding token pads with id 0, hidden
    by the attention mask. `max_length` counts special tokens; `token_types` is the model's `type_vocab_size`.

    Returns:
        `input_ids` and `attention_mask` (n, T), padded on the right to the longest example; `token_type_ids` (n, T), 1
        at b and the [SEP] after it and 0 elsewhere, where the model has two types and the tokenizer gives them;
        `labels` (n,). All int64.

    Raises:
        IsolossError: `max_length` leaves less than one token for each text, or an example has no token.
    """
    pairs = _second_texts(tokenizer, data)
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    # a newline before the second text takes a token of its own
    least = special + (1 if pairs is None else 2 + (pairs != data.pairs))
    if max_length < least:
        raise IsolossError(f"max_length is {max_length}; with {special} special tokens it must be at least {least}")
    has_types = token_types >= 2 and "token_type_ids" in tokenizer.model_input_names
    # whatever side its config says: models are compared on the same part of a text
    side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
    try:
        encoded = tokenizer(
            list(data.texts),
            None if pairs is None else list(pairs),
            truncation="longest_first",
            max_length=max_length,
            # what a text spells is never a special token
            split_special_tokens=True,
            return_attention_mask=True,
            return_token_type_ids=has_types,
        )
    finally:
        tokenizer.truncation_side = side
    for text, ids in zip(data.texts, encoded["input_ids"], strict=True):
        if not ids:
            raise IsolossError(f"the tokenizer makes no token of the text {text!r}: leave this example out")
    padding = {"input_ids": tokenizer.pad_token_id or 0}
    padded = {
        name: pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding.get(name, 0))
        for name, rows in encoded.items()
    }
    return {**padded, "labels": torch.tensor(data.labels)}


def _second_texts(tokenizer: PreTrainedTokenizerFast, data: LabeledText) -> tuple[str, ...] | None:
    """Return the second texts of pairs, after a newline where the tokenizer does not separate them from the first."""
    if data.pairs is None:
        return None
    one, both = (tokenizer.num_special_tokens_to_add(pair=pair) for pair in (False, True))
    return data.pairs if both > one else tuple(f"\n{text}" for text in data.pairs)


def coverage(tokenizer: PreTrainedTokenizerFast, data: LabeledText, *, max_length: int) -> Coverage:
    """Return how many examples `encode_labeled_text` cuts, and how many of their tokens are unknown."""
    lengths = np.full(len(data), tokenizer.num_special_tokens_to_add(pair=data.pairs is not None))
    num_tokens = num_unknown = 0
    for texts in (data.texts, _second_texts(tokenizer, data) or ()):
        for row, ids in enumerate(encode(tokenizer, texts)):
            lengths[row] += len(ids)
            num_tokens += len(ids)
            num_unknown += int((ids == tokenizer.unk_token_id).sum())
    num_cut = int((lengths > max_length).sum())
    return Coverage(len(data), num_cut, num_tokens, num_unknown, data.num_unlabeled, data.num_incomplete)


def _encoded(
    examples: TextExamples, tokenizer: PreTrainedTokenizerFast, *, max_length: int, token_types: int
) -> TaskData:
    train, test = examples.train, examples.test
    both = LabeledText(
        texts=train.texts + test.texts,
        pairs=None if train.pairs is None or test.pairs is None else train.pairs + test.pairs,
        labels=train.labels + test.labels,
        label_names=train.label_names,
        num_unlabeled=train.num_unlabeled + test.num_unlabeled,
        num_incomplete=train.num_incomplete + test.num_incomplete,
    )
    batch = encode_labeled_text(tokenizer, both, max_length=max_length, token_types=token_types)
    lengths, n = batch["attention_mask"].sum(dim=1), len(train)
    sentences = Sentences(batch["input_ids"][:n], lengths[:n]), Sentences(batch["input_ids"][n:], lengths[n:])
    types, labels = batch.get("token_type_ids"), batch["labels"]
    return TaskData(
        name=examples.name,
        train=sentences[0],
        train_labels=labels[:n],
        test=sentences[1],
        test_labels=labels[n:],
        classes=train.label_names,
        majority_rate=majority_rate(labels[n:]),
        overlap=overlap(sentences[0].tokens, sentences[1].tokens),
        train_types=None if types is None else types[:n],
        test_types=None if types is None else types[n:],
        texts=tuple(zip(test.texts, *([] if test.pairs is None else [test.pairs]), strict=True)),
        coverage=coverage(tokenizer, both, max_length=max_length),
    )


def _read(source: TextTask, seed: int) -> list[LabeledText]:
    """Return the training and the test examples, with the same names of labels."""
    choices = [(source.text, source.pair, source.label), *source.other_columns]
    train = read_rows(source.train, choices, split=source.train_split, header=source.header)
    where = source.test or source.train
    if source.test is None and Path(source.train).expanduser().is_file():
        (data,) = number_labels([train], source.label_names)
        # by the file alone and the seed, so that a test example stays one whatever `num_train` and `num_test` are
        order = torch.randperm(len(data), generator=seeds.generator(seed, "held-out", source.name)).tolist()
        held_out = len(data) // _HELD_OUT
        if held_out == 0:
            raise IsolossError(f"{source.train} has {len(data)} examples, too few to keep one in five for testing")
        # what is left out is counted once, with the training examples
        test = dataclasses.replace(data, num_unlabeled=0, num_incomplete=0)
        return [_rows(data, sorted(order[held_out:])), _rows(test, sorted(order[:held_out]))]
    split = source.test_split or _test_split(where)
    if source.test is None and split == source.train_split:
        raise IsolossError(f"the split {split!r} of {where} would be used for training and for testing")
    test_rows = read_rows(where, choices, split=split, header=source.header)
    both = number_labels([train, test_rows], source.label_names)
    if (both[0].pairs is None) != (both[1].pairs is None):
        raise IsolossError(f"{source.train} and {where} do not match: one has two texts per row, and the other has one")
    return both


def _test_split(where: str) -> str:
    folder = Path(where).expanduser()
    if hub_datasets.is_dataset(where) or not folder.is_dir():
        # a file has one split, whatever its name
        return "validation"
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
