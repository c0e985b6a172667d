"""What a language is: where sentences come from and, where it is known, the exact probability of every token.

Shapes: n sentences padded to T tokens, V tokens of the language, C classes of a task.
"""

from __future__ import annotations

import abc
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from isoloss import seeds
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.text.masking import Sentences, Start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["UNDEFINED", "ExactLanguage", "Labeling", "Language", "Sentences", "Start", "Stored"]

UNDEFINED = -1  # the label of a sentence that a task does not cover


@dataclass(frozen=True, kw_only=True)
class Labeling:
    """A task's classes and labels.

    Attributes:
        classes: What a label can stand for.
        label: Sentences to (n,) int64 indices into `classes`, `UNDEFINED` where a sentence has no label.
        scores: Sentences to (n, C) probabilities that the sentence has a label and that it is each class; their sum is
            below 1 where it may have none. None where the label is a function of the sentence.
        needs_latent: Whether `label` reads what produced the sentences.
        name: The task's one name, where it has several; empty: the name that was asked for.
        draw: Returns n sentences of a CPU generator, for a task about other sentences than the language's own; None:
            the language draws them.
    """

    classes: tuple[str, ...]
    label: Callable[[Sentences], torch.Tensor]
    scores: Callable[[Sentences], torch.Tensor] | None = None
    needs_latent: bool = False
    name: str = ""
    draw: Callable[[int, torch.Generator], Sentences] | None = None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """All that decides a language, as a file keeps it (see `isoloss.lab.languages.save`).

    Attributes:
        kind: The name of the config in `isoloss.registry.LANGUAGES` whose `from_tables` reads it back.
        max_length: The longest sentence, in tokens.
        vocabulary: The token strings, by id.
        symbols: Names of what produces a sentence, by id, where the tables refer to them.
        tables: The arrays by name.
    """

    kind: str
    max_length: int
    vocabulary: tuple[str, ...]
    symbols: tuple[str, ...] = ()
    tables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def check_names(self, names: Iterable[str], path: Path) -> None:
        """Raise an `IsolossError` unless the tables, read from `path`, have exactly these names."""
        wanted = list(names)
        if set(self.tables) != set(wanted):
            has = ", ".join(self.tables) or "none"
            raise IsolossError(f"{path} must hold the tensors {', '.join(wanted) or '(none)'}, and holds {has}")

    def equals(self, other: Stored) -> bool:
        """Return whether the other has the same names and, to the last bit, the same tables."""
        names, others = ((s.kind, s.max_length, s.vocabulary, s.symbols) for s in (self, other))
        return names == others and all(np.array_equal(table, other.tables[name]) for name, table in self.tables.items())


class Language(abc.ABC):
    """A source of sentences: the base class of every language.

    A subclass sets the attributes without a default (`set_vocabulary` sets all but `max_length`) and has `sample`;
    whatever else it does not define raises an `IsolossError` that says so. Where probabilities are known, derive from
    `ExactLanguage`.

    Attributes:
        vocab_size: Number of token ids that a sentence can hold: 0 to vocab_size - 1.
        max_length: The longest sentence, in tokens.
        vocabulary: The token strings, by id.
        pad_id: The id that fills the space after a sentence.
        mask_id: The id that stands for a masked token.
        model_vocab_size: Number of ids that a model of the language must know, the special ones included.
        special_token_ids: Ids inside a sentence that are never masked nor predicted, e.g. [CLS] and [SEP].
        tokenizer: What makes ids of text, to be kept with checkpoints; None where the language has none.
        is_exact: Whether `log_prob`, `log_conditionals` and `conditional_entropy` are known.
        num_held_out: Sentences that are kept out of training; 0 where fresh ones can be drawn.
        num_training: Sentences that there are to train on; 0 where any number can be drawn.
        has_numbered_sentences: Whether `sentences_at` is known.
        latent_name: What the latent of a sentence is called, e.g. `tree`; None where there is none.
        task_patterns: Patterns of the names of its downstream tasks, each with one line about it, where they are the
            same for all languages of the class.
    """

    vocab_size: int
    max_length: int
    vocabulary: tuple[str, ...]
    pad_id: int
    mask_id: int
    model_vocab_size: int
    special_token_ids: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerFast | None = None
    is_exact: ClassVar[bool] = False
    num_held_out: int = 0
    num_training: int = 0
    has_numbered_sentences: bool = False
    latent_name: str | None = None
    task_patterns: ClassVar[Mapping[str, str]] = {}
    _config: LanguageConfig | None = None

    def set_vocabulary(self, vocabulary: tuple[str, ...], *, size: int | None = None, source: str = "") -> None:
        """Set the token strings by id, and the ids after them: the padding, then the mask.

        With a `size`, they must be that many different strings; None: any. Error messages name their `source`.
        """
        if size is not None and not len(set(vocabulary)) == len(vocabulary) == size:
            raise IsolossError(f"{source}: the vocabulary must be {size} different strings, one per token")
        self.vocabulary, self.vocab_size = vocabulary, len(vocabulary)
        self.pad_id, self.mask_id = self.vocab_size, self.vocab_size + 1
        self.model_vocab_size = self.vocab_size + 2

    @property
    def config(self) -> Any:
        """The config whose `build()` makes exactly this language.

        Raises:
            IsolossError: The language was made in memory, and no config describes it.
        """
        if self._config is None:
            raise IsolossError(
                f"{self!r} is only in memory, and no config describes it: write it with isoloss.lab.languages.save "
                "(of a teacher, the model with save_pretrained) and load it from there"
            )
        return self._config

    @property
    def start(self) -> Start:
        """What sentences start from when they are read left to right.

        A start is put before them: the id of the mask, which a causal model has no other use for, so that masked and
        causal models of a language know the same ids.
        """
        return Start(self.mask_id, None, is_in_sentences=False)

    @abc.abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences on the language's device, padded to the longest of them.

        Args:
            n: Number of sentences.
            generator: CPU generator that decides them; None: a fresh one, seeded by the system.
            latent: Whether to return what produced them, where the language knows it.

        Raises:
            IsolossError: `n` is negative, or the generator is not on the CPU.
        """

    def batch(self, step: int, n: int, *, seed: int) -> Sentences:
        """Return the `n` sentences of training step `step`: a pure function of the arguments."""
        return self.sample(n, generator=seeds.generator(seed, "sentences", step))

    def sentences_at(self, numbers: torch.Tensor, *, seed: int) -> Sentences:
        """Return the sentences that have these numbers in an endless row of independent ones.

        Args:
            numbers: (n,) int64, at least 0, in any order.
            seed: Decides the row, from 0 to 2^63 - 1; of no effect for text, whose sentences are given.

        Raises:
            IsolossError: The language draws its sentences one after the other (`has_numbered_sentences` is false).

        Example:
            >>> import torch
            >>> from isoloss import load_language
            >>> language, numbers = load_language("pcfg-laptop"), torch.tensor([19_999_999, 3])
            >>> language.sentences_at(numbers, seed=0).tokens[1].equal(
            ...     language.sentences_at(torch.arange(4), seed=0).tokens[3]
            ... )
            True
        """
        raise IsolossError(f"{self!r} draws its sentences one after the other: they have no numbers")

    def held_out(self, n: int | None = None) -> Sentences:
        """Return `n` sentences that training never sees; all, where there are no more or n is None."""
        raise IsolossError(f"{self!r} holds no sentences out: sample draws any number of fresh ones")

    def exact(self) -> ExactLanguage:
        """Return the language itself where `is_exact`, with all that is known then; else raise an `IsolossError`."""
        raise IsolossError(f"the probabilities of {self!r} are not known")

    def log_prob(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (n,): the log-probability of each sentence in nats; of a grammar's, its length included.

        Args:
            tokens: (n, T) ids, padded on the right with anything.
            lengths: (n,) from 1 to `max_length`; fewer tokens than a hidden Markov model or a teacher writes stand for
                its first ones.
            mask: (n, T) bool, true where the token is unknown, whatever id stands there; None: nowhere. The
                probability is then the visible tokens' alone: a sum over all tokens at the unknown positions.

        Raises:
            IsolossError: The probabilities are not known; a shape or dtype is wrong; a visible token or a length is out
                of range; a sentence has probability 0, or more unknown tokens than there is an exact answer for (see
                `max_masked`). The message names the row.
        """
        exact = self.exact()
        ids, lengths = exact._checked(tokens, lengths, mask)
        return exact._log_prob(batches.cropped(ids, lengths), lengths)

    def log_conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T, V): log Pr(x_t = c | all other visible tokens, the length), the full conditionals, in nats.

        An impossible token has the log of the dtype's smallest normal number, so that nothing is -inf and p log p is 0.
        Padded positions hold 0 throughout, which is no distribution: mask them by the lengths.

        Args:
            tokens: As for `log_prob`.
            lengths: As for `log_prob`.
            mask: As for `log_prob`; unknown tokens are not among the others, at any position.
            positions: (n,) or (n, k) positions of each sentence: only these are answered, in this order, and the result
                is (n, V) or (n, k, V); None: all T.

        Raises:
            IsolossError: As for `log_prob`, or a position is beyond its sentence.
        """
        exact = self.exact()
        ids, lengths = exact._checked(tokens, lengths, mask)
        return batches.at_positions(exact._log_conditionals, ids, lengths, positions, (self.vocab_size,), exact.dtype)

    def log_next(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        given_length: bool = False,
        without_special: bool = False,
    ) -> torch.Tensor:
        """Return (n, T, V): log Pr(x_t = c | x_1 .. x_{t-1}), the next-token conditionals, in nats.

        They are what a perfect causal model predicts. It does not know how long a sentence will be, only that it has a
        t-th token, and so it is here: a row is a function of the tokens before it. Where sentences end with a special
        token, such as [SEP], that token has the probability that the sentence ends there, and the sum at a
        sentence's own tokens is its log-probability with its length.

        With `given_length`, the length is known too, as it is to a masked model. Then their sum at a sentence's own
        tokens is its log-probability given its length, as it is in any case where all sentences have one length.

        Impossible tokens and padded positions are as in `log_conditionals`. A possible token that is rarer than the
        dtype's smallest normal number, 1e-38 in float32 and 1e-308 in float64, has the log of that number, too.

        Args:
            tokens: As for `log_prob`.
            lengths: As for `log_prob`.
            given_length: Whether the length is known.
            without_special: Whether special tokens (`special_token_ids`) are excluded. No model here is trained to
                predict them, so a model learns the conditional given that x_t is none of them.

        Raises:
            IsolossError: As for `log_prob`.
        """
        exact = self.exact()
        compute = exact._log_next_without_special if without_special else exact._log_next
        return compute(*exact._checked(tokens, lengths), given_length)

    def conditional_entropy(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T): the entropy of each conditional in nats, 0 at padded positions.

        The (n, T, V) conditionals exist a part at a time. Arguments and errors as for `log_conditionals`; with
        `positions` the result has their shape.
        """
        exact = self.exact()
        ids, lengths = exact._checked(tokens, lengths, mask)
        return batches.at_positions(exact._entropies, ids, lengths, positions, (), exact.dtype)

    @property
    def max_masked(self) -> int:
        """The most masked tokens of a sentence for which conditionals are exact."""
        return self.max_length

    def tasks(self) -> Mapping[str, str]:
        """Return the patterns of the downstream tasks' names, e.g. `prefix-L`, each with one line about it."""
        return self.task_patterns

    def labeling(self, name: str) -> Labeling:
        """Return what the task `name` asks of the sentences.

        Raises:
            IsolossError: There is no such task; those that there are are named.
        """
        choices = f"choose {', '.join(self.tasks())}" if self.tasks() else f"{self!r} has no tasks of its own"
        raise IsolossError(f"no task {name!r}: {choices}")

    def tables(self) -> Stored:
        """Return all that decides the language, for `isoloss.lab.languages.save`."""
        raise IsolossError(f"{self!r} is not stored as one file: its class has no `tables`; keep what it is made from")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def describe(self) -> str:
        """Return one line: what the language is, its number of tokens, and its lengths."""
        return f"{self.vocab_size:,} tokens; {self._describe_lengths()}"

    def _describe_lengths(self) -> str:
        return f"sentences of {self.max_length} tokens"

    def describe_latent(self, sentences: Sentences) -> Sequence[Any]:
        """Return what produced each of the sentences, drawn with their latent: a string or a list of names."""
        raise IsolossError(f"nothing is known of what produced the sentences of {self!r}")


class ExactLanguage(Language):
    """A language that is drawn from a model and whose probabilities are known, in nats, given the sentence's length.

    A subclass has `_log_prob` and either `_probabilities` or both `_log_conditionals` and `_entropies`, which are
    called with checked arguments; or `log_prob`, `log_conditionals` and `conditional_entropy` themselves.

    Attributes:
        device: Where exact computations run and sentences are put.
        dtype: What exact computations run in.
        costs_forward_passes: Whether a conditional takes a forward pass of a neural network for each token there is.
    """

    is_exact: ClassVar[bool] = True
    costs_forward_passes: bool = False

    @property
    def has_slow_entropy(self) -> bool:
        """Whether an estimate of the entropy takes minutes, so that it must be asked for."""
        return self.costs_forward_passes

    device: torch.device
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()}; {self.dtype} on {self.device})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the language with its exact computations on `device` and in `dtype`; None leaves one as it is.

        Raises:
            IsolossError: `dtype` is neither float64 nor float32, or there is no such device.
        """
        dtype = dtype or self.dtype
        if dtype not in (torch.float64, torch.float32):
            raise IsolossError(f"exact computations run in torch.float64 or torch.float32, not in {dtype}")
        try:
            target = torch.device(device) if device is not None else self.device
            # torch.device() takes any name: only an allocation shows that the device is there and knows the dtype.
            torch.zeros(1, dtype=dtype, device=target)
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            raise IsolossError(f"cannot compute in {dtype} on device {device!r}: {error}") from error
        # Shallow: tables never change, so that a language and its copies on other devices share them.
        other = copy.copy(self)
        other._move(target, dtype)
        return other

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Put what the exact computations use on `device`, in `dtype`."""
        self.device, self.dtype = device, dtype

    def _checked(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T) ids, `vocab_size` where a token is unknown or absent, and (n,) lengths, both on the device."""
        return batches.checked(
            tokens, lengths, mask, vocab_size=self.vocab_size, max_length=self.max_length, device=self.device
        )

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return (n,), as `log_prob`, for what `_checked` returned."""
        raise NotImplementedError

    def _probabilities(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return (n, k, V): the conditionals at (n, k) positions, as probabilities in a tensor of its own.

        At a position in the padding, any numbers.
        """
        raise NotImplementedError

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Return (n, k, V), as `log_conditionals`, at (n, k) positions; None: (n, T, V) at all."""
        logs = batches.clamped_log_(self._probabilities(ids, batches.or_all(positions, ids)))
        return logs if positions is not None else batches.zero_padding_(logs, lengths)

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return (n, k), as `conditional_entropy`, at (n, k) positions; None: (n, T) at all."""
        values = batches.entropies(self._probabilities(ids, batches.or_all(positions, ids)))
        return values if positions is not None else batches.zero_padding_(values, lengths)

    def _log_next(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        """Return (n, T, V), as `log_next`: here by one pass for each position, with all that follows unknown."""
        if not given_length and len(self.length_probs.nonzero()) > 1:
            raise IsolossError(
                f"{type(self).__name__} has sentences of several lengths, and gives its next tokens with the length "
                "known alone: its class has no `_log_next`"
            )
        out = batches.large_zeros((*ids.shape, self.vocab_size), self.dtype, self.device)
        places = torch.arange(ids.shape[1], device=self.device)
        for position in range(int(lengths.max()) if len(lengths) else 0):
            rows = lengths > position
            at = torch.full((int(rows.sum()),), position, device=self.device)
            unknown = (ids[rows] == self.vocab_size) | (places >= position)
            out[rows, position] = self.log_conditionals(ids[rows], lengths[rows], mask=unknown, positions=at)
        return out

    def _log_next_without_special(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        """Return (n, T, V), as `log_next` with `without_special`."""
        return self._log_next(ids, lengths, given_length)

    def _log_next_or_end(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return (n, T + 1, V + 1), as `log_next`: after each prefix the next token or, last, the sentence's end.

        Here for sentences of one length, which end there and nowhere else.
        """
        if len(self.length_probs.nonzero()) > 1:
            raise IsolossError(
                f"{type(self).__name__} has sentences of several lengths, and does not give the probability that one "
                "ends: its class has no `_log_next_or_end`"
            )
        whole = lengths == self.max_length
        # `_log_next` is given no whole sentence
        wrong = whole.nonzero()[:, 0][~self.is_possible(ids[whole], lengths[whole]).to(ids.device)]
        if len(wrong):
            raise IsolossError(f"sentence {int(wrong[0])} has probability 0")
        # any token: nothing is given the last one
        longer = torch.nn.functional.pad(ids, (0, 1), value=self.vocab_size).scatter(1, lengths[:, None], 0)
        longer[whole, lengths[whole]] = self.vocab_size
        logs = self._log_next(longer, lengths + (~whole).long(), False)
        impossible = math.log(torch.finfo(logs.dtype).tiny)
        logs[whole, lengths[whole]] = impossible
        logs = torch.nn.functional.pad(logs, (0, 1), value=impossible)
        logs[whole, lengths[whole], -1] = 0
        return logs

    def _seed(self, n: int, generator: torch.Generator | None) -> int:
        """Return the seed of `n` sentences, one number of the generator."""
        # One draw whatever n is, so that what the generator gives next does not depend on n; the sentences follow from
        # the seed and their numbers.
        return int(torch.randint(2**63 - 1, (1,), generator=cpu_generator(n, generator)))

    def exact(self) -> Self:
        """Return the language itself."""
        return self

    @property
    def length_probs(self) -> torch.Tensor:
        """(max_length + 1,) the probability of each length."""
        probs = torch.zeros(self.max_length + 1, dtype=torch.float64)
        probs[-1] = 1
        return probs

    def listed(self) -> torch.Tensor | None:
        """Return (n, max_length) every sentence, sorted by its tokens; None: they are found by trying all strings.

        For a language of one length that has few sentences among too many strings.
        """
        return None

    def is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: whether each string of tokens is a sentence of the language.

        A string is not a sentence if no sentence has its length, even where `log_prob` takes it for the first tokens of
        one, or if it has an id that is not a token of the language.
        """
        probs = self.length_probs.to(lengths.device)
        may_be = (lengths > 0) & (lengths <= tokens.shape[1]) & (lengths <= self.max_length)
        may_be &= probs[lengths.long().clamp(0, self.max_length)] > 0
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None].to(tokens.device)
        may_be &= (is_padding | ((tokens >= 0) & (tokens < self.vocab_size))).all(dim=1).to(may_be.device)
        out = torch.zeros(len(tokens), dtype=torch.bool)
        rows = may_be.nonzero()[:, 0]
        if len(rows):
            out[rows.cpu()] = self._is_possible(tokens[rows], lengths[rows]).cpu()
        return out

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool, as `is_possible`, for strings of a length that sentences have."""
        out = torch.zeros(len(tokens), dtype=torch.bool)
        # `log_prob` raises at the first impossible row, so an error says nothing of the others: the rows are halved
        # until each is alone. A batch without impossible rows takes one call.
        parts = [torch.arange(len(tokens))]
        while parts:
            rows = parts.pop()
            try:
                self.log_prob(tokens[rows], lengths[rows])
                out[rows] = True
            except IsolossError:
                parts += rows.tensor_split(2) if len(rows) > 1 else []
        return out

    def closed_form_entropies(self) -> tuple[float, float] | None:
        """Return H(sentence | length) and the mean entropy of one masked token, or None where they are estimated."""
        return None

    def _describe_lengths(self) -> str:
        possible = self.length_probs.nonzero().flatten().tolist()
        if len(possible) == 1:
            return super()._describe_lengths()
        return f"sentences of {possible[0]} to {possible[-1]} tokens"


def cpu_generator(n: int, generator: torch.Generator | None) -> torch.Generator:
    """Return the CPU generator that `n` sentences are drawn with; a fresh one, seeded by the system, for None."""
    if n < 0:
        raise IsolossError(f"cannot draw {n} sentences: it must be at least 0")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    if generator.device.type != "cpu":
        raise IsolossError(f"sentences are drawn on the CPU, but the generator is on {generator.device}")
    return generator
