"""A language whose sentences stand between [CLS] and [SEP], and are otherwise those of another.

Shapes: n sentences of T tokens, the two included, V tokens of the other language.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages.base import ExactLanguage, Labeling, Language, Sentences, Stored
from isoloss.lab.languages.config import WithSpecialTokensConfig
from isoloss.lab.languages.serialization import FileConfig
from isoloss.registry import LANGUAGES
from isoloss.text.masking import Start

CLS, SEP = "[CLS]", "[SEP]"


class WithSpecialTokens(ExactLanguage):
    """An exact language with [CLS] before and [SEP] after every sentence.

    The two have the ids V and V + 1, and the padding and the mask come after them. They are never masked nor predicted.
    Conditionals, entropies, labels and tasks are those of the inner language; lengths count the two. Among the
    conditionals of next tokens, [SEP] has the probability that the sentence ends there. A tokenizer of the inner
    language is not passed on, as it has other ids.

    Attributes:
        inner: The language of the tokens between the two.

    The other attributes are those of `ExactLanguage`.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.lab.languages.special_tokens import WithSpecialTokens
        >>> language = WithSpecialTokens(Brackets(2))
        >>> tokens, lengths = torch.tensor([[2, 0, 1, 3]]), torch.tensor([4])
        >>> " ".join(language.vocabulary[token] for token in tokens[0])
        '[CLS] < > [SEP]'
        >>> masked = torch.tensor([[False, True, True, False]])
        >>> language.log_conditionals(tokens, lengths, mask=masked)[0].exp().round(decimals=1)
        tensor([[0.0000, 0.0000, 1.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """

    def __init__(self, inner: Language, *, config: LanguageConfig | None = None) -> None:
        """Put the sentences of `inner` between [CLS] and [SEP].

        Args:
            inner: A language whose probabilities are known and whose sentences have no special tokens of their own.
            config: What describes the framed language; None: the inner language's config, framed, where it has one.
        """
        if not inner.is_exact or inner.special_token_ids:
            raise IsolossError(
                f"{inner!r} cannot be framed: that needs a language whose probabilities are known and whose sentences "
                "have no special tokens of their own"
            )
        self.inner = inner.exact()
        self.set_vocabulary(
            (*inner.vocabulary, CLS, SEP), size=inner.vocab_size + 2, source="a language between [CLS] and [SEP]"
        )
        self.cls_id, self.sep_id = inner.vocab_size, inner.vocab_size + 1
        self.special_token_ids = (self.cls_id, self.sep_id)
        self.max_length = inner.max_length + 2
        self.has_numbered_sentences, self.latent_name = inner.has_numbered_sentences, inner.latent_name
        self.costs_forward_passes = self.inner.costs_forward_passes
        self.device, self.dtype = self.inner.device, self.inner.dtype
        inner_config = inner._config
        self._config = config or (None if inner_config is None else WithSpecialTokensConfig(language=inner_config))

    @property
    def has_slow_entropy(self) -> bool:
        """Whether an estimate of the entropy takes minutes; see `ExactLanguage`."""
        return self.inner.has_slow_entropy

    @classmethod
    def from_config(cls, config: WithSpecialTokensConfig) -> WithSpecialTokens:
        """Return the language that `config` describes."""
        return cls(config.language.build(), config=config)

    @staticmethod
    def from_tables(stored: Stored, path: Path) -> WithSpecialTokens:
        """Return the language in a file; see `LanguageConfig.from_tables`."""
        kind, *symbols = stored.symbols or ("",)
        if kind not in LANGUAGES:
            raise IsolossError(f"{path}: the first symbol of a framed language is its inner kind, not {kind!r}")
        own = dataclasses.replace(stored, kind=kind, symbols=tuple(symbols))
        return WithSpecialTokens(LANGUAGES.load(kind).from_tables(own, path), config=FileConfig.of(path))

    def tables(self) -> Stored:
        """Return all that decides the inner language, its kind as the first symbol."""
        own = self.inner.tables()
        return dataclasses.replace(own, kind="framed", symbols=(own.kind, *own.symbols))

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        self.inner = self.inner.to(device, dtype)

    @property
    def start(self) -> Start:
        """[CLS], with which sentences begin."""
        return Start(self.cls_id, self.sep_id, is_in_sentences=True)

    @property
    def max_masked(self) -> int:
        """As many as the inner language's; the two special tokens are no obstacle."""
        most = self.inner.max_masked
        # an unknown [CLS] or [SEP] is certain and adds nothing to sum over
        return self.max_length if most >= self.inner.max_length else most

    @property
    def length_probs(self) -> torch.Tensor:
        """(max_length + 1,) the probability of each length."""
        return torch.nn.functional.pad(self.inner.length_probs, (2, 0))

    def tasks(self) -> Mapping[str, str]:
        """Return the inner language's tasks."""
        return self.inner.tasks()

    def describe(self) -> str:
        """Return what the inner language is."""
        return f"between [CLS] and [SEP]: {self.inner.describe()}"

    # --- sentences

    def frame(self, sentences: Sentences) -> Sentences:
        """Return sentences of the inner language between [CLS] and [SEP], (n, T - 2) tokens as (n, T)."""
        tokens = torch.nn.functional.pad(sentences.tokens, (1, 1))
        framed = sentences._replace(tokens=tokens, lengths=sentences.lengths + 2)
        # The inner language's padding has the id of [CLS] here: all padding is written anew.
        tokens.masked_fill_(~framed.present(), self.pad_id)
        tokens[:, 0] = self.cls_id
        tokens.scatter_(1, sentences.lengths[:, None] + 1, self.sep_id)
        return framed

    def bare(self, sentences: Sentences) -> Sentences:
        """Return sentences without their [CLS] and [SEP], (n, T) tokens as (n, T - 2)."""
        # A copy, because [SEP] is then overwritten where it is not in the last column.
        inside = sentences._replace(tokens=sentences.tokens[:, 1:-1].clone(), lengths=sentences.lengths - 2)
        inside.tokens.masked_fill_(~inside.present(), self.inner.pad_id)
        return inside

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences; the latent is the inner language's, its positions counted from 0."""
        return self.frame(self.inner.sample(n, generator=generator, latent=latent))

    def batch(self, step: int, n: int, *, seed: int) -> Sentences:
        """Return the inner language's sentences of training step `step`."""
        return self.frame(self.inner.batch(step, n, seed=seed))

    def sentences_at(self, numbers: torch.Tensor, *, seed: int) -> Sentences:
        """Return the inner language's sentences with these numbers."""
        return self.frame(self.inner.sentences_at(numbers, seed=seed))

    def describe_latent(self, sentences: Sentences) -> Sequence[Any]:
        """Return what produced each of the sentences; see `Language.describe_latent`."""
        return self.inner.describe_latent(self.bare(sentences))

    def labeling(self, name: str) -> Labeling:
        """Return the inner language's task `name`, asked of the tokens between [CLS] and [SEP]."""
        inner = self.inner.labeling(name)
        scores, draw = inner.scores, inner.draw
        return dataclasses.replace(
            inner,
            label=lambda sentences: inner.label(self.bare(sentences)),
            scores=None if scores is None else lambda sentences: scores(self.bare(sentences)),
            draw=None if draw is None else lambda n, generator: self.frame(draw(n, generator)),
        )

    # --- exact computations

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ends = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        inside = self.bare(Sentences(tokens, lengths))
        framed = (tokens[:, 0] == self.cls_id) & (ends == self.sep_id)
        framed &= ((inside.tokens < self.cls_id) | ~inside.present()).all(dim=1)
        out = torch.zeros(len(tokens), dtype=torch.bool)
        rows = framed.nonzero()[:, 0]
        if len(rows):
            out[rows] = self.inner.is_possible(inside.tokens[rows], inside.lengths[rows])
        return out

    def closed_form_entropies(self) -> tuple[float, float] | None:
        """Return the inner language's: [CLS] and [SEP] are certain, and never masked."""
        return self.inner.closed_form_entropies()

    def _checked(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, lengths = super()._checked(tokens, lengths, mask)
        unknown = self.vocab_size
        if (row := batches.first(lengths < 3)) is not None:
            raise IsolossError(f"sentence {row} has {int(lengths[row])} tokens; [CLS], [SEP] and one token are 3")
        ends = ids.gather(1, lengths[:, None] - 1)[:, 0]
        wrong = (ids[:, 0] != self.cls_id) & (ids[:, 0] != unknown) | (ends != self.sep_id) & (ends != unknown)
        # The first token is cut off and the last one blanked: between them neither of the two ids may stand.
        inside = ids[:, 1:].scatter(1, lengths[:, None] - 2, unknown)
        wrong |= ((inside == self.cls_id) | (inside == self.sep_id)).any(dim=1)
        if (row := batches.first(wrong)) is not None:
            raise IsolossError(
                f"sentence {row} must have [CLS] as its first token, [SEP] as its last, and none between"
            )
        return ids, lengths

    def _inner_arguments(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inner language's arguments for the results of `_checked`."""
        # [SEP] may stand in the last column that is kept, behind the inner sentence's end, where no id is read.
        inside = Sentences(ids[:, 1:-1], lengths - 2)
        unknown = (inside.tokens >= self.cls_id) & inside.present()
        return {"tokens": inside.tokens, "lengths": inside.lengths, "mask": unknown}

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.inner.log_prob(**self._inner_arguments(ids, lengths))

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        inside, asked, specials = self._positions(ids, lengths, positions)
        logs = self.inner.log_conditionals(**self._inner_arguments(ids, lengths), positions=inside)
        return self._framed(logs, specials, asked >= lengths[:, None])

    def _log_next(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        if given_length:
            return self._log_next_without_special(ids, lengths, given_length)
        arguments = self._inner_arguments(ids, lengths)
        logs = self.inner._log_next_or_end(*self.inner._checked(arguments["tokens"], arguments["lengths"]))
        # [CLS] comes first, before the tokens, and nowhere else; [SEP] where the inner sentence ends
        impossible = math.log(torch.finfo(logs.dtype).tiny)
        logs = torch.nn.functional.pad(logs, (0, 0, 1, 0), value=impossible)
        tokens, ends = logs[..., :-1], logs[..., -1:]
        starts = torch.full_like(ends, impossible)
        starts[:, 0] = 0
        padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]
        return torch.cat([tokens, starts, ends], dim=2).masked_fill(padding[..., None], 0)

    def _log_next_without_special(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        arguments = self._inner_arguments(ids, lengths)
        logs = self.inner.log_next(arguments["tokens"], arguments["lengths"], given_length=given_length)
        _, asked, specials = self._positions(ids, lengths, None)
        # as in `_log_conditionals`, the two special tokens are certain where they stand
        return self._framed(torch.nn.functional.pad(logs, (0, 0, 1, 1)), specials, asked >= lengths[:, None])

    def _framed(
        self, logs: torch.Tensor, specials: tuple[torch.Tensor, torch.Tensor], padding: torch.Tensor
    ) -> torch.Tensor:
        """Return (n, k, V + 2) of the inner language's (n, k, V), with [CLS] and [SEP] where they are certain."""
        impossible = math.log(torch.finfo(logs.dtype).tiny)
        # No inner position can hold [CLS] or [SEP], and theirs can hold nothing else.
        logs = torch.nn.functional.pad(logs, (0, 2), value=impossible)
        for special, here in zip(self.special_token_ids, specials, strict=True):
            logs[here] = impossible
            logs[..., special][here] = 0
        return logs.masked_fill_(padding[..., None], 0)

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        inside, asked, specials = self._positions(ids, lengths, positions)
        values = self.inner.conditional_entropy(**self._inner_arguments(ids, lengths), positions=inside)
        return values.masked_fill_(specials[0] | specials[1] | (asked >= lengths[:, None]), 0)

    def _positions(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return positions of the inner sentences, those asked for, and where these are [CLS] and [SEP], each (n, k).

        A position outside the inner sentence is replaced by some position in it.
        """
        asked = positions
        if asked is None:
            asked = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        # A position of the inner sentence is one less than here; its last one is the length without the two, less 1.
        last = lengths[:, None] - 3
        return torch.minimum(asked - 1, last).clamp(min=0), asked, (asked == 0, asked == last + 2)
