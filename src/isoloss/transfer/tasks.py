"""A downstream task: labeled sentences to learn from and to be tested on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import Sentences


@dataclass(frozen=True)
class Coverage:
    """How much of some examples a tokenizer and a length let through."""

    num_examples: int
    num_cut: int  # examples that are longer than the length and lose tokens at the end
    num_tokens: int  # of their texts, before anything is cut, without special tokens
    num_unknown: int  # tokens that the tokenizer does not know
    num_unlabeled: int = 0  # rows without a label, which are none of the examples
    num_incomplete: int = 0  # rows without all texts, or with other fields than the header, which are none either


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskData:
    """Labeled sentences of one downstream task.

    Attributes:
        name: The task, e.g. `root`, `prefix-4`, `state-6`, `sst2`.
        train: Sentences padded on the right, to the same length as those of `test`.
        train_labels: (n_train,) int64, indices into `classes`.
        test: Sentences, drawn independently of the training sentences.
        test_labels: (n_test,) int64.
        classes: The symbols, states or names that a label can stand for, whether or not one of these sentences bears
            it.
        majority_rate: Fraction of the most common test label: the accuracy without looking.
        overlap: Fraction of the test sentences that are training sentences too; they are kept, since the test sentences
            would otherwise not follow their distribution.
        bayes: The most that any classifier of the test sentences can reach; None where the truth is unknown.
        vocabulary: The token strings, by id; none where the sentences are text.
        train_types: (n_train, T) int64, 1 at the second text of a pair and 0 elsewhere, or None.
        test_types: The same of the test sentences.
        texts: The test examples as text, one or two strings each; None for a synthetic language.
        coverage: Of examples of text, training and test together: how many are cut, and how many of their tokens are
            unknown; None for a synthetic language.
    """

    name: str
    train: Sentences
    train_labels: torch.Tensor
    test: Sentences
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    majority_rate: float
    overlap: float
    bayes: Estimate | None = None
    vocabulary: tuple[str, ...] = ()
    train_types: torch.Tensor | None = None
    test_types: torch.Tensor | None = None
    texts: tuple[tuple[str, ...], ...] | None = None
    coverage: Coverage | None = None

    def __repr__(self) -> str:
        train, test = len(self.train_labels), len(self.test_labels)
        return f"TaskData({self.name}: {len(self.classes)} classes, {train:,} training and {test:,} test examples)"

    def batch(self, split: str, rows: slice | torch.Tensor = slice(None)) -> dict[str, torch.Tensor]:
        """Return what a model takes of the sentences `rows` of `train` or `test`.

        Returns:
            `input_ids` and `attention_mask` (n, T), and `token_type_ids` where the task has them; int64.

        Raises:
            IsolossError: There is no such split.
        """
        if split not in ("train", "test"):
            raise IsolossError(f"a task has the splits train and test, not {split!r}")
        sentences, types = (self.train, self.train_types) if split == "train" else (self.test, self.test_types)
        chosen = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        inputs = {"input_ids": chosen.tokens, "attention_mask": chosen.present().long()}
        return inputs if types is None else {**inputs, "token_type_ids": types[rows]}

    def inputs(self) -> list[tuple[str, ...]]:
        """Return the test examples as a person reads them: one text each, or two."""
        if self.texts is not None:
            return list(self.texts)
        rows = zip(self.test.tokens.tolist(), self.test.lengths.tolist(), strict=True)
        return [(" ".join(self.vocabulary[token] for token in tokens[:length]),) for tokens, length in rows]


def overlap(train: torch.Tensor, test: torch.Tensor) -> float:
    """Return the fraction of the rows of `test` (n, T) that are rows of `train` (m, T).

    Example:
        >>> import torch
        >>> from isoloss.transfer.tasks import overlap
        >>> overlap(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 4], [4, 3]]))
        0.5
    """
    seen = {row.tobytes() for row in train.cpu().numpy()}
    return sum(row.tobytes() in seen for row in test.cpu().numpy()) / len(test)
