"""The paper's language of brackets, with equal numbers of both in any order.

Shapes: n sentences of T brackets; token 0 is the opening bracket and token 1 the closing one.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages.base import ExactLanguage, Labeling, Sentences, Stored, cpu_generator
from isoloss.lab.languages.config import BRACKET_TASKS, BracketsConfig

OPEN, CLOSE = 0, 1
_VOCABULARY = ("<", ">")
_MASKED = 2  # as `batches.checked` writes it: the id after the vocabulary's
_CHUNK = 16384  # sentences drawn together; part of what a seed stands for


class Brackets(ExactLanguage):
    r"""The paper's language (section 5): sentences of even length T with as many `<` as `>`, all equally likely.

    The order is free: `><` is a sentence. With a masked set H of tokens, which contains t, and d opening brackets
    missing from the others, `Pr(x_t = '<' | x outside H) = C(|H| - 1, d - 1) / C(|H|, d) = d / |H|`. With one masked
    token the answer is therefore implied, and the pre-training loss of a perfect model is 0.

    The attributes are those of `ExactLanguage`.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> language = Brackets(4)
        >>> tokens, lengths = torch.tensor([[0, 0, 1, 1]]), torch.tensor([4])
        >>> language.log_prob(tokens, lengths).exp()  # one of 6 sentences
        tensor([0.1667], dtype=torch.float64)
        >>> masked = torch.tensor([[False, True, True, True]])
        >>> language.log_conditionals(tokens, lengths, mask=masked)[0, 1].exp()  # one of three is '<'
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """

    task_patterns = BRACKET_TASKS

    def __init__(self, length: int):
        """Make the language of sentences of `length` brackets, an even number from 2 to 4096."""
        self._config = BracketsConfig(length=length)
        check(self._config)
        self.length = self.max_length = length
        self.set_vocabulary(_VOCABULARY)
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self._log_ways = math.log(math.comb(length, length // 2))

    @classmethod
    def from_config(cls, config: BracketsConfig) -> Brackets:
        """Return the language that `config` describes."""
        return cls(config.length)

    @staticmethod
    def from_tables(stored: Stored, path: Path) -> Brackets:
        """Return the language in a file; see `LanguageConfig.from_tables`."""
        stored.check_names((), path)
        if stored.vocabulary != _VOCABULARY:
            raise IsolossError(f"{path}: the vocabulary of brackets is < and >, not {', '.join(stored.vocabulary)}")
        return Brackets(stored.max_length)

    def tables(self) -> Stored:
        """Return the length, which decides the language."""
        return Stored(kind="brackets", max_length=self.length, vocabulary=self.vocabulary)

    def describe(self) -> str:
        """Return what the sentences are, and their length."""
        return f"as many < as >, in any order; {self._describe_lengths()}"

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences, uniform over all C(T, T/2); arguments and errors as for `Language.sample`.

        A position is an opening bracket with probability (openings left) / (positions left). Nothing stands behind
        a sentence: its latent is None even where `latent` is set.
        """
        generator = cpu_generator(n, generator)
        tokens = torch.empty(n, self.length, dtype=torch.int64)
        for first in range(0, n, _CHUNK):
            size = min(_CHUNK, n - first)
            draws = torch.rand(self.length, size, generator=generator, dtype=torch.float64)
            openings = torch.full((size,), self.length // 2)
            columns = torch.empty(self.length, size, dtype=torch.int64)
            for position, draw in enumerate(draws):
                # Multiplied, not divided: at no opening left this is never true, and where all that is left is
                # openings, always. So every row is balanced, without rejection.
                opens = draw * (self.length - position) < openings
                openings -= opens.long()
                columns[position] = torch.where(opens, OPEN, CLOSE)
            tokens[first : first + size] = columns.T
        lengths = torch.full((n,), self.length, device=self.device)
        return Sentences(tokens.to(self.device), lengths)

    def downstream(self, n: int, *, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T) tokens and (n,) g*: the paper's downstream task; arguments and errors as for `sample`.

        Each token is drawn uniformly and independently, so that g* takes every even value from -T to T and a string
        belongs to the language only where it is 0.
        """
        tokens = torch.randint(2, (n, self.length), generator=cpu_generator(n, generator)).to(self.device)
        return tokens, self.mismatch(tokens)

    def mismatch(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return (n,) int64: g*(x), the number of `>` minus the number of `<` (the paper's equation 2).

        In a sentence of the language with one masked token, g* is 1 where that token is `<` and -1 where it is `>`. The
        (n, T) tokens need not belong to the language; those where the mask is true are not counted.
        """
        cases = self._checked_strings(tokens, mask)
        return (cases == CLOSE).sum(dim=1) - (cases == OPEN).sum(dim=1)

    def encode(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        summed: bool = True,
    ) -> torch.Tensor:
        """Return the paper's encoding (section 5): a signed basis vector of dimension 2T for each position.

        With e_t the t-th basis vector, `x_t` is e_t for `<`, -e_t for `>`, and for a masked token e_{t+T} or -e_{t+T}
        with equal probability. The sum z over the positions has `g*(x) = -sum(z[:T])`.

        Args:
            tokens: (n, T) ids; they need not belong to the language.
            mask: (n, T) bool, true at masked tokens, whose ids are not looked at.
            generator: CPU generator of the masked tokens' signs; None: a fresh one, seeded by the system.
            summed: Whether to return z, (n, 2T), or the single vectors, (n, T, 2T).

        Example:
            >>> import torch
            >>> from isoloss.lab.languages.brackets import Brackets
            >>> language, tokens = Brackets(2), torch.tensor([[0, 1]])
            >>> language.encode(tokens)
            tensor([[ 1., -1.,  0.,  0.]], dtype=torch.float64)
            >>> language.encode(tokens, tokens == 0, generator=torch.Generator().manual_seed(0)).abs()
            tensor([[0., 1., 1., 0.]], dtype=torch.float64)
        """
        cases = self._checked_strings(tokens, mask)
        signs = torch.randint(2, cases.shape, generator=cpu_generator(len(cases), generator)).to(self.device) * 2 - 1
        brackets = (cases == OPEN).long() - (cases == CLOSE).long()
        z = torch.cat([brackets, signs.masked_fill(cases != _MASKED, 0)], dim=1).to(self.dtype)
        if summed:
            return z
        identity = torch.eye(self.length, dtype=torch.bool, device=self.device).repeat(1, 2)
        return torch.where(identity, z[:, None, :], 0)

    def labeling(self, name: str) -> Labeling:
        """Return the task `mismatch`: g* of the strings that `downstream` draws."""
        if name != "mismatch":
            raise IsolossError(f"no task {name!r}: choose mismatch, the one task of brackets")

        def label(sentences: Sentences) -> torch.Tensor:
            return (self.mismatch(sentences.tokens) + self.length) // 2

        def draw(n: int, generator: torch.Generator) -> Sentences:
            tokens, _ = self.downstream(n, generator=generator)
            return Sentences(tokens, torch.full((n,), self.length, device=tokens.device))

        classes = tuple(str(count) for count in range(-self.length, self.length + 1, 2))
        return Labeling(name=name, classes=classes, label=label, draw=draw)

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.mismatch(tokens[:, : self.length]) == 0

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        masked, missing = (ids == _MASKED).sum(dim=1), self.length // 2 - (ids == OPEN).sum(dim=1)
        # C(h, d) of up to 4,096 brackets overflows a float: exact integers, one for each pair (h, d) that occurs.
        codes, index = torch.unique(masked * (self.length + 1) + missing, return_inverse=True)
        pairs = [divmod(code, self.length + 1) for code in codes.tolist()]
        ways = [math.log(math.comb(h, d)) - self._log_ways for h, d in pairs]
        return torch.tensor(ways, dtype=self.dtype, device=self.device)[index]

    def closed_form_entropies(self) -> tuple[float, float]:
        """Return log C(T, T/2), and 0: the others imply one masked bracket."""
        return self._log_ways, 0.0

    def _probabilities(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        masked, missing = (ids == _MASKED).sum(dim=1), self.length // 2 - (ids == OPEN).sum(dim=1)
        # The conditional of a visible bracket does not read it: there it counts as one more masked token and, if it is
        # an opening one, as one more that is missing. So a sentence has three distributions, not one for each position.
        missing = torch.stack([missing + 1, missing, missing], dim=1)
        # Where nothing is masked the third is not read; 1 only avoids dividing by 0.
        masked = torch.stack([masked + 1, masked + 1, masked.clamp(min=1)], dim=1)
        of_kind = torch.stack([missing, masked - missing], dim=-1).to(self.dtype) / masked[..., None]
        return of_kind.gather(1, ids.gather(1, positions)[..., None].expand(-1, -1, 2))

    def _checked(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, lengths = super()._checked(tokens, lengths, mask)
        if (row := batches.first(lengths != self.length)) is not None:
            raise IsolossError(
                f"sentence {row} has length {int(lengths[row])}; every sentence here has {self.length} brackets"
            )
        for bracket, name in enumerate(self.vocabulary):
            count = (ids == bracket).sum(dim=1)
            if (row := batches.first(count > self.length // 2)) is not None:
                raise IsolossError(
                    f"sentence {row} has probability 0: it has {int(count[row])} {name!r}, and a sentence of "
                    f"{self.length} brackets has {self.length // 2}"
                )
        return ids, lengths

    def _checked_strings(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return strings of brackets, which need not be sentences, as (n, T) ids, masked tokens as id 2."""
        if tokens.dim() != 2 or tokens.shape[1] != self.length:
            raise IsolossError(f"tokens must be (n, {self.length}), not {tuple(tokens.shape)}")
        return super()._checked(tokens, torch.full((len(tokens),), self.length), mask)[0]
