"""Languages of brackets: the paper's, with equal numbers of both, and Dyck-k with a depth limit as a grammar.

Shapes: n sentences of T brackets. In `Brackets`, token 0 is the opening bracket and token 1 the closing one.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages import batches
from isoloss.languages.api import Sentences
from isoloss.languages.config import BracketsConfig, DyckConfig
from isoloss.languages.pcfg.grammar import Grammar, Rule, build_grammar
from isoloss.languages.synthetic import Synthetic

MAX_LENGTH = 4096  # brackets in a sentence
OPEN, CLOSE = 0, 1
_HIDDEN = 2  # as `batches.checked` writes it: the id after the vocabulary's
_CHUNK = 16384  # sentences drawn together; part of what a seed stands for
_PAIRS = ("()", "[]", "{}", "<>")  # the first kinds of bracket; further ones are numbered


class Brackets(Synthetic):
    r"""The paper's language (section 5): sentences of even length T with as many `<` as `>`, all equally likely.

    The order is free: `><` is a sentence. With a hidden set H of tokens, which contains t, and d opening brackets
    missing from the others, `Pr(x_t = '<' | x outside H) = C(|H| - 1, d - 1) / C(|H|, d) = d / |H|`. With one hidden
    token the answer is therefore implied, and the pre-training loss of a perfect model is 0.

    Attributes:
        length: T, the length of every sentence.
        vocabulary: `("<", ">")`, by id.
        vocab_size: 2.
        max_length: T.
        pad_id: 2; it occurs in no sentence that `sample` gives.
        mask_id: 3.
        special_ids: None: ().
        model_vocab_size: 4.
        config: The config that rebuilds this language.
        device: Where exact computations run.
        dtype: What they run in: float64 or float32.

    Example:
        >>> language = Brackets(4)
        >>> tokens, lengths = torch.tensor([[0, 0, 1, 1]]), torch.tensor([4])
        >>> language.log_prob(tokens, lengths).exp()  # one of 6 sentences
        tensor([0.1667], dtype=torch.float64)
        >>> hidden = torch.tensor([[False, True, True, True]])
        >>> language.log_conditionals(tokens, lengths, mask=hidden)[0, 1].exp()  # one of three is '<'
        tensor([0.3333, 0.6667], dtype=torch.float64)
    """

    vocabulary: tuple[str, ...] = ("<", ">")
    vocab_size = 2
    pad_id, mask_id = 2, 3
    special_ids: tuple[int, ...] = ()
    model_vocab_size = 4

    def __init__(self, length: int):
        """Make the language of sentences of `length` brackets.

        Raises:
            IsolossError: `length` is odd, or not from 2 to 4096.
        """
        if length % 2 or not 2 <= length <= MAX_LENGTH:
            raise IsolossError(f"length is {length}; it must be even, from 2 to {MAX_LENGTH} brackets")
        self.length = self.max_length = length
        self.config = BracketsConfig(length=length)
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self._log_ways = math.log(math.comb(length, length // 2))

    @classmethod
    def from_config(cls, config: BracketsConfig) -> Brackets:
        """Return the language that `config` describes; errors as for the constructor."""
        return cls(config.length)

    def __repr__(self) -> str:
        return f"Brackets({self.length}, {self.dtype} on {self.device})"

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences on the language's device, uniform over all C(T, T/2).

        A position is an opening bracket with probability (openings left) / (positions left). Nothing is hidden behind
        a sentence: its latent is None even where `latent` is set.

        Args:
            n: Number of sentences.
            generator: CPU generator of the draws; None: a fresh one, seeded by the system.
            latent: Has no effect.

        Raises:
            IsolossError: `n` is negative, or the generator is not on the CPU.
        """
        _check_count(n)
        generator = _on_cpu(generator)
        tokens = torch.empty(n, self.length, dtype=torch.int64)
        for first in range(0, n, _CHUNK):
            size = min(_CHUNK, n - first)
            draws = torch.rand(self.length, size, generator=generator, dtype=torch.float64)
            openings = torch.full((size,), self.length // 2)
            columns = torch.empty(self.length, size, dtype=torch.int64)
            for position, draw in enumerate(draws):
                opens = draw * (self.length - position) < openings
                openings -= opens.long()
                columns[position] = torch.where(opens, OPEN, CLOSE)
            tokens[first : first + size] = columns.T
        lengths = torch.full((n,), self.length, device=self.device)
        return Sentences(tokens.to(self.device), lengths)

    def downstream(self, n: int, *, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, T) tokens and (n,) g*: the paper's downstream task.

        Each token is drawn uniformly and independently, so that g* takes every even value from -T to T and a string
        belongs to the language only where it is 0. Arguments and errors as for `sample`.
        """
        _check_count(n)
        tokens = torch.randint(2, (n, self.length), generator=_on_cpu(generator)).to(self.device)
        return tokens, self.mismatch(tokens)

    def mismatch(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return (n,) int64: g*(x), the number of `>` minus the number of `<` (the paper's equation 2).

        In a sentence of the language with one hidden token, g* is 1 where that token is `<` and -1 where it is `>`.

        Args:
            tokens: (n, T) ids; they need not belong to the language.
            mask: (n, T) bool, true at tokens that are not counted.

        Raises:
            IsolossError: The shapes are wrong, or a token that counts is out of range.
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

        With e_t the t-th basis vector, `x_t` is e_t for `<`, -e_t for `>`, and for a hidden token e_{t+T} or -e_{t+T}
        with equal probability. The sum z over the positions has `g*(x) = -sum(z[:T])`.

        Args:
            tokens: (n, T) ids; they need not belong to the language.
            mask: (n, T) bool, true at hidden tokens, whose ids are not looked at.
            generator: CPU generator of the hidden tokens' signs; None: a fresh one, seeded by the system.
            summed: Whether to return z, (n, 2T), or the single vectors, (n, T, 2T).

        Raises:
            IsolossError: The shapes are wrong, a visible token is out of range, or the generator is not on the CPU.

        Example:
            >>> language, tokens = Brackets(2), torch.tensor([[0, 1]])
            >>> language.encode(tokens)
            tensor([[ 1., -1.,  0.,  0.]], dtype=torch.float64)
            >>> language.encode(tokens, tokens == 0, generator=torch.Generator().manual_seed(0)).abs()
            tensor([[0., 1., 1., 0.]], dtype=torch.float64)
        """
        cases = self._checked_strings(tokens, mask)
        signs = torch.randint(2, cases.shape, generator=_on_cpu(generator)).to(self.device) * 2 - 1
        brackets = (cases == OPEN).long() - (cases == CLOSE).long()
        z = torch.cat([brackets, signs.masked_fill(cases != _HIDDEN, 0)], dim=1).to(self.dtype)
        if summed:
            return z
        identity = torch.eye(self.length, dtype=torch.bool, device=self.device).repeat(1, 2)
        return torch.where(identity, z[:, None, :], 0)

    # --- exact probabilities -----------------------------------------------------------------------------------------

    def log_prob(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (n,): the log-probability of each sentence in nats, -log C(T, T/2).

        Args:
            tokens: (n, T or more) ids, padded on the right with anything.
            lengths: (n,), all T.
            mask: As `tokens`, bool: true at hidden tokens, whose ids are not looked at. The result is then the
                log-probability of the others, `log C(|H|, d) - log C(T, T/2)`.

        Raises:
            IsolossError: A token or a length is out of range, the mask has another shape or dtype, or a sentence is
                impossible; the message names the row.
        """
        cases = self._checked(tokens, lengths, mask)
        hidden, missing = (cases == _HIDDEN).sum(dim=1), self.length // 2 - (cases == OPEN).sum(dim=1)
        codes, index = torch.unique(hidden * (self.length + 1) + missing, return_inverse=True)
        pairs = [divmod(code, self.length + 1) for code in codes.tolist()]
        ways = [math.log(math.comb(h, d)) - self._log_ways for h, d in pairs]
        return torch.tensor(ways, dtype=self.dtype, device=self.device)[index]

    def log_conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T, 2): log Pr(x_t = c | the visible tokens but x_t) in nats, by the formula above.

        An impossible token has the log of the dtype's smallest normal number; padded positions hold 0.

        Args:
            tokens: As for `log_prob`.
            lengths: As for `log_prob`.
            mask: As for `log_prob`; None: none is hidden but x_t.
            positions: (n,) or (n, k) positions of each sentence: the result is (n, 2) or (n, k, 2).

        Raises:
            IsolossError: As for `log_prob`, or a position is beyond its sentence.
        """
        probs, cases = self._conditionals(tokens, lengths, mask)
        logs = probs.clamp_(min=torch.finfo(self.dtype).tiny).log_()
        chosen = batches.checked_positions(positions, lengths.to(self.device))
        cases = cases if chosen is None else cases.gather(1, chosen)
        found = logs.gather(1, cases[..., None].expand(-1, -1, 2))
        if positions is not None:
            return found.view(*positions.shape, 2)
        return torch.nn.functional.pad(found, (0, 0, 0, tokens.shape[1] - self.length))

    def conditional_entropy(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T): the entropy of each conditional in nats, 0 at padded positions.

        Arguments and errors as for `log_conditionals`; with `positions` the result has their shape.
        """
        probs, cases = self._conditionals(tokens, lengths, mask)
        logs = probs.clamp(min=torch.finfo(self.dtype).tiny).log_()
        entropies = logs.mul_(probs).sum(dim=-1).neg_().abs_()  # no -0.0
        chosen = batches.checked_positions(positions, lengths.to(self.device))
        found = entropies.gather(1, cases if chosen is None else cases.gather(1, chosen))
        if positions is not None:
            return found.view(positions.shape)
        return torch.nn.functional.pad(found, (0, tokens.shape[1] - self.length))

    def _conditionals(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, 3, 2) probabilities and (n, T): which row of three holds at a position.

        A sentence has three kinds of position: a visible `<`, a visible `>` and a hidden one.
        """
        cases = self._checked(tokens, lengths, mask)
        others_hidden = (cases == _HIDDEN).sum(dim=1)
        missing = self.length // 2 - (cases == OPEN).sum(dim=1)
        missing = torch.stack([missing + 1, missing, missing], dim=1)
        hidden = torch.stack([others_hidden + 1, others_hidden + 1, others_hidden.clamp(min=1)], dim=1)
        return torch.stack([missing, hidden - missing], dim=-1).to(self.dtype) / hidden[..., None], cases

    # --- checking ----------------------------------------------------------------------------------------------------

    def _checked(self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return possible sentences as (n, T) ids, hidden tokens as id 2."""
        cases, lengths = batches.checked(
            tokens, lengths, mask, vocab_size=self.vocab_size, max_length=self.length, device=self.device
        )
        if (row := batches.first(lengths != self.length)) is not None:
            raise IsolossError(
                f"sentence {row} has length {int(lengths[row])}; every sentence here has {self.length} brackets"
            )
        cases = cases[:, : self.length]
        for bracket, name in enumerate(self.vocabulary):
            count = (cases == bracket).sum(dim=1)
            if (row := batches.first(count > self.length // 2)) is not None:
                raise IsolossError(
                    f"sentence {row} has probability 0: it has {int(count[row])} {name!r}, and a sentence of "
                    f"{self.length} brackets has {self.length // 2}"
                )
        return cases

    def _checked_strings(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return strings of brackets, which need not be sentences, as (n, T) ids, hidden tokens as id 2."""
        if tokens.dim() != 2 or tokens.shape[1] != self.length:
            raise IsolossError(f"tokens must be (n, {self.length}), not {tuple(tokens.shape)}")
        lengths = torch.full((len(tokens),), self.length)
        return batches.checked(
            tokens, lengths, mask, vocab_size=self.vocab_size, max_length=self.length, device=self.device
        )[0]


def dyck_grammar(config: DyckConfig) -> Grammar:
    r"""Return Dyck-k with a depth limit as a grammar: groups of nested brackets of k kinds, at most `max_depth` deep.

    With D symbols for a row of groups and B symbols for one group, each with the depth that they may still reach::

        D_d -> B_d          1 - continue_probability       B_d -> O_i C_i    (1 - nest_probability) / k
        D_d -> B_d D_d      continue_probability           B_d -> O_i R_d,i  nest_probability / k
                                                           R_d,i -> D_(d-1) C_i

    A group of depth 1 is always `O_i C_i`, so that the limit holds exactly and the rules need no empty string: the
    language has none. Each sentence has one derivation. Where one bracket is hidden, the others imply it (its kind is
    that of its partner, and which of the two it is follows from the number of each), so with `tokens_per_bracket` 1
    every full conditional has entropy 0. With more, O_i and C_i each emit one of so many tokens of their own, by
    probabilities from the flat Dirichlet distribution, and the full conditional of a bracket is that distribution.

    Args:
        config: The numbers. Its `max_length` cuts the language and leaves the rules as they are: make the language by
            `PCFG(dyck_grammar(config), max_length=config.max_length)`.

    Raises:
        IsolossError: A number allows no such language.

    Example:
        >>> from isoloss.languages.pcfg.language import PCFG
        >>> language = PCFG(dyck_grammar(DyckConfig(kinds=1, max_depth=2, max_length=4)), max_length=4)
        >>> language.vocabulary
        ('(', ')')
        >>> language.log_prob(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), torch.tensor([4, 4])).exp()
        tensor([0.2857, 0.1429], dtype=torch.float64)
    """
    _check_dyck(config)
    rules: list[Rule] = []

    def add(lhs: str, *rhs: str, weight: float, token: bool = False) -> None:
        rules.append(Rule(0, lhs, tuple((name, token) for name in rhs), weight))

    kinds = range(config.kinds)
    for depth in range(config.max_depth, 0, -1):
        row, group = f"D{depth}", f"B{depth}"
        add(row, group, weight=1 - config.continue_probability)
        add(row, group, row, weight=config.continue_probability)
        nest = config.nest_probability if depth > 1 else 0.0
        for kind in kinds:
            add(group, f"O{kind}", f"C{kind}", weight=(1 - nest) / config.kinds)
            if nest > 0:
                rest = f"R{depth}_{kind}"
                add(group, f"O{kind}", rest, weight=nest / config.kinds)
                add(rest, f"D{depth - 1}", f"C{kind}", weight=1.0)
    rng = np.random.default_rng(seeds.derive(config.seed, "dyck"))
    for kind in kinds:
        pair = _PAIRS[kind] if kind < len(_PAIRS) else (f"({kind}", f"){kind}")
        for symbol, bracket in zip((f"O{kind}", f"C{kind}"), pair, strict=True):
            if config.tokens_per_bracket == 1:
                add(symbol, bracket, weight=1.0, token=True)
                continue
            for index, weight in enumerate(rng.dirichlet(np.ones(config.tokens_per_bracket))):
                add(symbol, f"{bracket}.{index}", weight=float(weight), token=True)
    return build_grammar(rules, start=f"D{config.max_depth}", source="Dyck grammar")


def _check_dyck(config: DyckConfig) -> None:
    for field in ("kinds", "max_depth", "tokens_per_bracket"):
        if getattr(config, field) < 1:
            raise IsolossError(f"{field} is {getattr(config, field)}; it must be at least 1")
    if config.max_length % 2 or config.max_length < 2:
        raise IsolossError(f"max_length is {config.max_length}; it must be even and at least 2, for brackets are pairs")
    if config.max_depth > config.max_length // 2:
        raise IsolossError(
            f"max_depth is {config.max_depth}, but {config.max_length} brackets nest at most "
            f"{config.max_length // 2} deep; take a smaller max_depth or a larger max_length"
        )
    if not 0 <= config.continue_probability < 1:
        raise IsolossError(f"continue_probability is {config.continue_probability}; it must be at least 0 and below 1")
    if not 0 < config.nest_probability <= 1:
        raise IsolossError(f"nest_probability is {config.nest_probability}; it must be above 0 and at most 1")


def _check_count(n: int) -> None:
    if n < 0:
        raise IsolossError(f"cannot draw {n} sentences: it must be at least 0")


def _on_cpu(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    if generator.device.type != "cpu":
        raise IsolossError(f"sentences are drawn on the CPU, but the generator is on {generator.device}")
    return generator
