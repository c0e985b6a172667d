"""The paper's pre-training inputs as a language: balanced brackets, one of them hidden; the last token says which.

Shapes: n sentences of T + 1 tokens: a context of T, then the answer.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch

from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages.base import ExactLanguage, Sentences, Stored, cpu_generator
from isoloss.lab.languages.config import HiddenBracketConfig

IS_OPEN, IS_CLOSE, OPEN, CLOSE, PLUS, MINUS = range(6)
_VOCABULARY = ("=<", "=>", "<", ">", "+", "-")


class HiddenBracket(ExactLanguage):
    r"""Balanced brackets of which one is hidden, and then that bracket, told wrongly now and then.

    A sentence is a context of T tokens and an answer. The context is a string of T/2 brackets `<` and T/2 brackets `>`,
    all strings equally likely, of which one, at a uniform position, is hidden: `+` or `-` stands there, equally likely
    (the paper, section 5, encodes a hidden token as e_{t+T} or -e_{t+T}). The answer, `=<` or `=>`, is the hidden
    bracket with probability 1 - q and the other one with probability q, the flip probability. A perfect model's loss
    is therefore H(q) and not 0, so that the noise of sampled labels does not die out. Context tokens are special
    (`special_token_ids`): they are never masked, so that masking one token hides the answer.

    A context with o visible `<`, c visible `>`, b visible blanks and u = T - o - c - b unknown tokens is completed in
    `C(u - 1 + b, T/2 - o - 1) u^(1 - b) 2^(1 - b)` ways where the hidden bracket is `<`, b being 0 or 1; all
    probabilities are sums of these over 2 T C(T, T/2).

    The attributes are those of `ExactLanguage`.

    Args:
        length: T, even, from 2 to 12.
        flip: q, from 0 and below 1/2.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.hidden_bracket import HiddenBracket
        >>> language = HiddenBracket(2, flip=0.1)
        >>> tokens, lengths = torch.tensor([[2, 4, 1]]), torch.tensor([3])  # < + =>
        >>> language.log_prob(tokens, lengths).exp()  # one of 2 strings, 2 positions and 2 signs; and not flipped
        tensor([0.1125], dtype=torch.float64)
        >>> language.log_conditionals(tokens, lengths)[0, 2, :2].exp()
        tensor([0.1000, 0.9000], dtype=torch.float64)
    """

    special_token_ids = (OPEN, CLOSE, PLUS, MINUS)

    def __init__(self, length: int, *, flip: float = 0.1):
        """Make the language of `length` brackets; see the class."""
        self._config = HiddenBracketConfig(length=length, flip=flip)
        check(self._config)
        self.length, self.flip, self.max_length = length, flip, length + 1
        self.set_vocabulary(_VOCABULARY)
        self._contexts = _contexts(length)
        self._move(torch.device("cpu"), torch.float64)

    @classmethod
    def from_config(cls, config: HiddenBracketConfig) -> HiddenBracket:
        """Return the language that `config` describes."""
        return cls(config.length, flip=config.flip)

    @staticmethod
    def from_tables(stored: Stored, path: Path) -> HiddenBracket:
        """Return the language in a file; see `LanguageConfig.from_tables`."""
        stored.check_names(("flip",), path)
        if stored.vocabulary != _VOCABULARY:
            raise IsolossError(f"{path}: the vocabulary must be {' '.join(_VOCABULARY)}, and is {stored.vocabulary}")
        return HiddenBracket(stored.max_length - 1, flip=float(stored.tables["flip"]))

    def tables(self) -> Stored:
        """Return length and flip probability, which decide the language."""
        import numpy as np

        flip = {"flip": np.array(self.flip)}
        return Stored(kind="hidden-bracket", max_length=self.max_length, vocabulary=self.vocabulary, tables=flip)

    def describe(self) -> str:
        """Return what the sentences are, and their length."""
        wrong = f", told wrongly with probability {self.flip:g}" if self.flip else ""
        return f"{self.length} balanced brackets, one hidden, and which one it was{wrong}; {self._describe_lengths()}"

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        # at [o, c, b, a]: the probability of a sentence in which so many `<`, `>` and blanks are visible, somewhere
        # given, and the answer is a, 2 where it is unknown
        self._table = _table(self.length, self.flip).to(device, dtype)

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences; arguments and errors as for `Language.sample`.

        Nothing stands behind a sentence: its latent is None even where `latent` is set.
        """
        generator = cpu_generator(n, generator)
        contexts, hidden = self._contexts
        rows = torch.randint(len(contexts), (n,), generator=generator)
        flipped = torch.rand(n, generator=generator, dtype=torch.float64) < self.flip
        tokens = torch.cat([contexts[rows], (hidden[rows] ^ flipped)[:, None]], dim=1)
        return Sentences(tokens.to(self.device), torch.full((n,), self.max_length, device=self.device))

    def listed(self) -> torch.Tensor:
        """Return (4 T C(T, T/2), T + 1): every sentence; with a flip probability of 0, half of them."""
        contexts, hidden = self._contexts
        both = [torch.cat([contexts, (hidden ^ flip)[:, None]], dim=1) for flip in (0, 1)[: 1 + (self.flip > 0)]]
        sentences: torch.Tensor = torch.unique(torch.cat(both), dim=0)  # sorted
        return sentences

    def contexts(self) -> torch.Tensor:
        """Return (2 T C(T, T/2), T + 1): every context, with the answer masked."""
        return torch.nn.functional.pad(self._contexts[0], (0, 1), value=self.mask_id)

    def strings(self) -> Sentences:
        """Return the inputs of downstream tasks: all 2^T strings of brackets, none hidden, with the answer masked."""
        strings = torch.cartesian_prod(*[torch.tensor([OPEN, CLOSE])] * self.length)
        tokens = torch.nn.functional.pad(strings, (0, 1), value=self.mask_id)
        return Sentences(tokens, torch.full((len(tokens),), self.max_length))

    def signs(self) -> torch.Tensor:
        """Return (2^T, T) float64: `strings` as 1 for `<` and -1 for `>`."""
        return 1 - 2 * (self.strings().tokens[:, :-1] - OPEN).double()

    def _checked(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, lengths = super()._checked(tokens, lengths, mask)
        if (row := batches.first(lengths != self.max_length)) is not None:
            raise IsolossError(
                f"sentence {row} has length {int(lengths[row])}; every sentence here has {self.max_length} tokens"
            )
        if (row := batches.first(self._at(ids[:, : self.max_length]) == 0)) is not None:
            raise IsolossError(f"sentence {row} has probability 0: a context is balanced, with one bracket hidden")
        return ids, lengths

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self._at(tokens[:, : self.max_length]) > 0

    def _at(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (...): the probability of what is visible of strings (..., T + 1); 0 where it cannot be."""
        answer = ids[..., -1]
        values = self._by_answer(ids[..., :-1]).gather(-1, answer.clamp(max=2)[..., None])[..., 0]
        # a token of the context as the answer
        return values.masked_fill((answer >= OPEN) & (answer < self.vocab_size), 0)

    def _by_answer(self, context: torch.Tensor) -> torch.Tensor:
        """Return (..., 3): the probability of what is visible of contexts (..., T) with each answer, or with any."""
        opened, closed = (context == OPEN).sum(dim=-1), (context == CLOSE).sum(dim=-1)
        blanks = ((context == PLUS) | (context == MINUS)).sum(dim=-1).clamp(max=2)
        # an answer within the context is impossible
        return self._table[opened, closed, blanks].masked_fill((context < OPEN).any(dim=-1, keepdim=True), 0)

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self._at(ids).log()

    def _probabilities(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if bool((positions == self.length).all()):
            # the answer alone, which is what training asks for at every step
            answers = self._by_answer(ids[:, None, : self.length].expand(-1, positions.shape[1], -1))
            return torch.nn.functional.pad(answers[..., :2] / answers[..., 2:], (0, self.vocab_size - 2))
        # (n, k, V, T + 1): the string with each token in turn at the position
        shape = (*positions.shape, self.vocab_size, self.max_length)
        tried = ids[:, None, None].expand(shape)
        tokens = torch.arange(self.vocab_size, device=ids.device)[:, None].expand(*shape[:-1], 1)
        joint = self._at(tried.scatter(-1, positions[:, :, None, None].expand(*shape[:-1], 1), tokens))
        return joint / joint.sum(dim=-1, keepdim=True)

    def closed_form_entropies(self) -> tuple[float, float]:
        """Return log(2 T C(T, T/2)) + H(q) of a sentence, and H(q) of the answer."""
        q = self.flip
        noise = -sum(p * math.log(p) for p in (q, 1 - q) if p)
        return math.log(len(self._contexts[0])) + noise, noise


def _contexts(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (2 T C(T, T/2), T) all contexts and, of each, what is hidden: `IS_OPEN` or `IS_CLOSE`."""
    rows, hidden = [], []
    for opened in itertools.combinations(range(length), length // 2):
        string = [OPEN if place in opened else CLOSE for place in range(length)]
        for place, sign in itertools.product(range(length), (PLUS, MINUS)):
            rows.append([*string[:place], sign, *string[place + 1 :]])
            hidden.append(string[place] - OPEN)
    return torch.tensor(rows), torch.tensor(hidden)


def _table(length: int, flip: float) -> torch.Tensor:
    """Return (T + 1, T + 1, 3, 3) float64, as `HiddenBracket._table`."""
    table = torch.zeros(length + 1, length + 1, 3, 3, dtype=torch.float64)
    all_contexts = 2 * length * math.comb(length, length // 2)
    answers = {IS_OPEN: (1 - flip, flip, 1.0), IS_CLOSE: (flip, 1 - flip, 1.0)}
    for opened, closed, blanks in itertools.product(range(length + 1), range(length + 1), (0, 1)):
        unknown = length - opened - closed - blanks
        # an unknown token is the blank, if none is visible, under either sign; the others are brackets
        places, free = (1, unknown) if blanks else (2 * unknown, unknown - 1)
        for hidden, of_answer in answers.items():
            missing = length // 2 - opened - (hidden == IS_OPEN)
            if places > 0 and 0 <= missing <= free:
                ways = places * math.comb(free, missing) / all_contexts
                table[opened, closed, blanks] += ways * torch.tensor(of_answer, dtype=torch.float64)
    return table
