"""The language of a probabilistic context-free grammar: sentences, and the exact probability of every token in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages import batches
from isoloss.languages.api import Sentences
from isoloss.languages.batches import Rows
from isoloss.languages.config import DyckConfig, GrammarConfig, PCFGConfig
from isoloss.languages.parallel import spread
from isoloss.languages.pcfg.chart_plan import FoldedRules
from isoloss.languages.pcfg.grammar import Format, Grammar, parse_grammar
from isoloss.languages.pcfg.inside_outside import InsideOutside
from isoloss.languages.pcfg.random_grammar import random_grammar
from isoloss.languages.pcfg.sampler import Sampler, longest_yields
from isoloss.languages.synthetic import Synthetic

MAX_LENGTH = 1024  # tokens; the exact algorithms take time cubic in the length
_OUTPUT_BYTES = {"cpu": 1 << 19, "cuda": 1 << 28}  # of probabilities at a time: half a second-level cache, on a CPU
_FEW = 128  # sentences that are not cut further: the compiled kernels take so many at once


class PCFG(Synthetic):
    r"""A probabilistic context-free grammar as a language: immutable, with exact probabilities in nats.

    The language is the grammar's distribution over sentences given that they have at most `max_length` tokens. Exact
    computations take right-padded batches of mixed lengths on any device, and return tensors of the language's dtype on
    its device.

    Attributes:
        grammar: The rules.
        symbols: Names of the nonterminal symbols, by id.
        start: Name of the start symbol, which is `symbols[0]`.
        vocabulary: The token strings, by id, in natural order.
        vocab_size: Number of tokens.
        max_length: The longest sentence, in tokens.
        length_probs: (max_length + 1,) probability of each length.
        pad_id: `vocab_size`.
        mask_id: `vocab_size + 1`.
        special_ids: None: ().
        model_vocab_size: `vocab_size + 2`.
        config: The `PCFGConfig`, `DyckConfig` or `GrammarConfig` that rebuilds exactly this language.
        device: Where exact computations run.
        dtype: What they run in: float64 or float32.

    Example:
        >>> language = PCFG.from_text("S -> A B [0.5] | 'a' [0.5]\nA -> 'a' [1.0]\nB -> 'a' [0.25] | 'b' [0.75]")
        >>> tokens, lengths = torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 1])
        >>> language.log_prob(tokens, lengths).exp()
        tensor([0.3750, 0.5000], dtype=torch.float64)
        >>> language.log_conditionals(tokens, lengths)[0, 1].exp()
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        max_length: int,
        config: PCFGConfig | DyckConfig | None = None,
        source: str = "grammar",
    ) -> None:
        """Make the language of `grammar`, cut at `max_length` tokens.

        Args:
            grammar: The rules.
            max_length: Longer sentences are left out.
            config: What the grammar was drawn from, where it was.
            source: What errors call the grammar.

        Raises:
            IsolossError: `max_length` is not within 1 to 1024, or no sentence is as short.
        """
        if not 1 <= max_length <= MAX_LENGTH:
            raise IsolossError(f"max_length is {max_length}; it must be from 1 to {MAX_LENGTH} tokens")
        max_length = min(max_length, int(longest_yields(grammar, max_length)[0]))
        rules = FoldedRules(grammar, max_length)
        possible = np.flatnonzero(rules.length_probs[0])
        if not len(possible):
            raise IsolossError(
                f"{source}: the grammar has no sentence of at most {max_length} tokens; raise max_length"
            )
        self.max_length = int(possible[-1])
        if self.max_length < max_length:  # the same order of sums whatever length was asked for
            rules = FoldedRules(grammar, self.max_length)
        lengths = rules.length_probs[0, : self.max_length + 1]
        self._acceptance = math.fsum(lengths)
        self._length_probs = torch.from_numpy(lengths / self._acceptance)
        self._rules = rules
        self._sampler = Sampler(grammar, self.max_length)
        self.grammar, self.symbols, self.start = grammar, grammar.symbols, grammar.symbols[0]
        self.vocabulary: tuple[str, ...] = grammar.vocabulary
        self.vocab_size = len(grammar.vocabulary)
        self.pad_id, self.mask_id = self.vocab_size, self.vocab_size + 1
        self.special_ids: tuple[int, ...] = ()
        self.model_vocab_size = self.vocab_size + 2
        text = "" if config else grammar.to_text("nltk" if grammar.rules_obstacle() else "rules")
        rules_config = GrammarConfig(rules=text, max_length=self.max_length)
        self.config: PCFGConfig | DyckConfig | GrammarConfig = config or rules_config
        self._place(torch.device("cpu"), torch.float64)

    @classmethod
    def random(
        cls,
        *,
        levels: int = PCFGConfig.levels,
        symbols_per_level: int = PCFGConfig.symbols_per_level,
        rules_per_symbol: int = PCFGConfig.rules_per_symbol,
        vocab_size: int = PCFGConfig.vocab_size,
        stop_probability: float = PCFGConfig.stop_probability,
        seed: int = PCFGConfig.seed,
    ) -> PCFG:
        """Return a random levelled grammar, of the paper's kind (appendix A.1); a sentence has at most 2^levels tokens.

        The start symbol S is rewritten to a symbol of level 0 (`L0.0`, `L0.1`, ...). A symbol of level l < `levels` is
        rewritten to one of `rules_per_symbol` pairs of symbols of level l + 1; with probability `stop_probability` it
        emits one of `rules_per_symbol` tokens instead. A symbol of the lowest level emits one of
        max(rules_per_symbol, ceil(2 vocab_size / symbols_per_level)) tokens. Rules are drawn without replacement, their
        probabilities from the flat Dirichlet distribution. Every symbol and every token can occur.

        Raises:
            IsolossError: A number allows no such grammar.

        Example:
            >>> language = PCFG.random(levels=2, symbols_per_level=2, rules_per_symbol=3, vocab_size=5)
            >>> language.symbols, language.vocabulary, language.max_length
            (('S', 'L0.0', 'L0.1', 'L1.0', 'L1.1', 'L2.0', 'L2.1'), ('w0', 'w1', 'w2', 'w3', 'w4'), 4)
        """
        return cls.from_config(
            PCFGConfig(
                levels=levels,
                symbols_per_level=symbols_per_level,
                rules_per_symbol=rules_per_symbol,
                vocab_size=vocab_size,
                stop_probability=stop_probability,
                seed=seed,
            )
        )

    @classmethod
    def from_config(cls, config: PCFGConfig | GrammarConfig) -> PCFG:
        """Return the language that `config` describes; errors as for `random` and `from_text`."""
        if isinstance(config, PCFGConfig):
            return cls(random_grammar(config), max_length=2**config.levels, config=config)
        return cls.from_text(config.rules, source="the config's rules", max_length=config.max_length)

    @classmethod
    def from_text(cls, text: str, *, source: str = "<text>", max_length: int = GrammarConfig.max_length) -> PCFG:
        """Return the language of the rules in `text` (see `isoloss.languages.pcfg.grammar.parse_grammar`).

        Args:
            text: NLTK's format (`S -> NP VP [0.8] | 'tok' [0.2]`) or plain rule lines (`LHS RHS [RHS] weight`).
            source: What errors call the text.
            max_length: Longer sentences are left out of the language; less where the grammar has none as long.

        Raises:
            IsolossError: The text holds no valid grammar (the message names the line), or none with a sentence of at
                most `max_length` tokens.
        """
        return cls(parse_grammar(text, source=source), max_length=max_length, source=source)

    @classmethod
    def from_file(cls, path: Path | str, *, max_length: int = GrammarConfig.max_length) -> PCFG:
        """Return the language of the rules in a UTF-8 file; arguments and errors as for `from_text`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise IsolossError(f"{path} does not exist") from error
        except (OSError, UnicodeDecodeError) as error:
            raise IsolossError(f"{path} is not a readable UTF-8 text file: {error}") from error
        return cls.from_text(text, source=str(path), max_length=max_length)

    def to_text(self, format: Format = "rules") -> str:  # noqa: A002
        """Return the rules as text that `from_text` reads back (see `Grammar.to_text`)."""
        return self.grammar.to_text(format)

    def to_file(self, path: Path | str, format: Format = "rules") -> None:  # noqa: A002
        """Write the rules to `path`, as `to_text` gives them."""
        files.write_text(Path(path), self.to_text(format))

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._place(device, dtype)
        self._engine = InsideOutside(self._rules, device, dtype)
        self._emission = torch.as_tensor(self._rules.emission[self._engine.emitting]).to(device, dtype)
        self.length_probs = self._length_probs.to(device, dtype)

    def __repr__(self) -> str:
        return (
            f"PCFG({len(self.symbols)} symbols, {self.vocab_size} tokens, at most {self.max_length} tokens a sentence, "
            f"{self.dtype} on {self.device})"
        )

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        n: int,
        *,
        generator: torch.Generator | None = None,
        latent: bool = False,
        length: int | None = None,
    ) -> Sentences:
        """Return `n` independent sentences, padded to the longest of them, on the language's device.

        The generator gives one number, the seed; sentence i is a function of it and of i, so that the sentences of a
        smaller n are the first of a larger one's, for every device and any number of threads. They are drawn on the CPU
        or, for a language on a CUDA device, there. Nothing is rejected: where sentences are cut at `max_length`, or all
        have one length, symbols are rewritten by their probabilities given the number of tokens that they must yield.

        Args:
            n: Number of sentences.
            generator: CPU generator of the seed; None: a fresh one, seeded by the system.
            latent: Whether to return the trees: (n, M, 3) int64 rows (start, stop, symbol id) of all nodes in preorder,
                each over the tokens start to stop - 1, padded with -1.
            length: The number of tokens of every sentence, drawn given it; None: any length of the language.

        Raises:
            IsolossError: `n` is negative, the generator is not on the CPU, no sentence has `length` tokens, or all
                sentences together have a probability under 1e-250 before the language is cut at `max_length`.

        Example:
            >>> language = PCFG.from_text("S -> S S [0.9] | 'a' [0.05] | 'b' [0.05]", max_length=8)
            >>> language.sample(1000, length=5).tokens.shape
            torch.Size([1000, 5])
        """
        seed = self._seed(n, generator)
        place = self.device if self.device.type == "cuda" else torch.device("cpu")
        derived = self._sampler(n, seed, length=length, trees=latent, device=place)
        return Sentences(*(None if part is None else part.to(self.device) for part in derived))  # type: ignore[arg-type]

    # --- exact probabilities -----------------------------------------------------------------------------------------

    def log_prob(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (n,): the log-probability of each sentence in the language, its length included, in nats.

        Args:
            tokens: (n, T) ids, padded on the right with anything.
            lengths: (n,) from 1 to `max_length`.
            mask: (n, T) bool, true where the token is unknown, whatever id stands there. The result is then the
                log-probability of the visible tokens and the length: a sum over all tokens at the unknown positions.

        Raises:
            IsolossError: A token or a length is out of range, or a sentence is impossible; the message names the row.
        """
        tokens, lengths = self._checked(tokens, lengths, mask)
        out = torch.zeros(len(tokens), dtype=self.dtype, device=self.device)

        def compute(rows: Rows, length: int) -> None:
            log_z = self._engine.log_partition(tokens[rows, :length])
            self._check_possible(rows, log_z)
            out[rows] = (log_z - math.log(self._acceptance)).to(self.dtype)

        spread(compute, self._buckets(lengths), self.device)
        return out

    def log_conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        r"""Return (n, T, vocab_size): log Pr(x_t = c | all other visible tokens, the length), in nats.

        `Pr(x_t = c | x_-t)` is proportional to `sum_A outside(A, t) Pr(A =>* c)`: one inside and one outside pass give
        all positions and tokens (the true conditionals of the paper's section 2.1). An unknown token's leaf is the sum
        over all tokens. An impossible token has the log of the dtype's smallest normal number; padded positions hold 0.

        Args:
            tokens: As for `log_prob`.
            lengths: As for `log_prob`.
            mask: (n, T) bool, true where the token is unknown; None: nowhere.
            positions: (n,) or (n, k) positions of each sentence: the result is (n, vocab_size) or (n, k, vocab_size).

        Raises:
            IsolossError: As for `log_prob`, or a position is beyond its sentence.

        Example:
            >>> language = PCFG.from_text("S A B 1\nA a 0.5\nA b 0.5\nB a 0.25\nB b 0.75")
            >>> hidden = torch.tensor([[True, True]])
            >>> given = {"mask": hidden, "positions": torch.tensor([1])}
            >>> language.log_conditionals(torch.tensor([[0, 0]]), torch.tensor([2]), **given).exp()
            tensor([[0.2500, 0.7500]], dtype=torch.float64)
        """
        tokens, lengths = self._checked(tokens, lengths, mask)
        chosen = batches.checked_positions(positions, lengths)
        shape = tokens.shape if chosen is None else chosen.shape
        out = batches.large_zeros((*shape, self.vocab_size), self.dtype, self.device)

        def write(rows: Rows, part: torch.Tensor) -> None:
            batches.put(out, rows, batches.clamped_log_(part))

        self._conditionals(tokens, lengths, chosen, write)
        return out if positions is None else out.view(*positions.shape, self.vocab_size)

    def conditional_entropy(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (n, T): the entropy of each conditional of `log_conditionals` in nats, 0 at padded positions.

        The (n, T, vocab_size) conditionals exist a chunk at a time. Arguments and errors as for `log_conditionals`;
        with `positions` the result has their shape.
        """
        tokens, lengths = self._checked(tokens, lengths, mask)
        chosen = batches.checked_positions(positions, lengths)
        out = torch.zeros(tokens.shape if chosen is None else chosen.shape, dtype=self.dtype, device=self.device)

        def write(rows: Rows, part: torch.Tensor) -> None:
            logs = batches.clamped_log_(part.clone())
            batches.put(out, rows, logs.mul_(part).sum(dim=-1).neg_().clamp_(min=0).abs_())  # no -0.0

        self._conditionals(tokens, lengths, chosen, write)
        return out if positions is None else out.view(positions.shape)

    def inside(self, tokens: torch.Tensor, lengths: torch.Tensor, *, start: int = 0, stop: int) -> torch.Tensor:
        """Return (n, symbols): log Pr(symbol =>* x_start .. x_{stop-1}), the inside scores of one span, in nats.

        A symbol that cannot yield these tokens has a finite value, at most the log of float64's smallest normal number
        and no larger than the value of any symbol that can. The scores are computed in float64 whatever the language's
        dtype. The sentence itself may be impossible.

        Args:
            tokens: (n, T) ids, padded on the right with anything.
            lengths: (n,) from `stop` to `max_length`.
            start: First position of the span.
            stop: The position after its last.

        Raises:
            IsolossError: A token or a length is out of range, or a sentence is shorter than `stop`.
        """
        tokens, lengths = self._checked(tokens, lengths)
        batches.check_span(lengths, start, stop)
        out = torch.zeros(len(tokens), len(self.symbols), dtype=self.dtype, device=self.device)

        def compute(rows: Rows, length: int) -> None:
            out[rows] = self._engine.inside(tokens[rows, start : start + length])[0].to(self.dtype)

        same = torch.full_like(lengths, stop - start)
        spread(compute, self._buckets(same, self._engine.chunk_of_spans), self.device)
        return out

    def span_posterior(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Return (n, symbols): Pr(a node of each symbol covers exactly x_start .. x_{stop-1} | sentence).

        It is outside(A) inside(A) / Pr(sentence). A span need not be covered by any node, and a chain of unary rules
        puts several symbols on one span, so that a row's sum is between 0 and the longest chain.

        Args:
            tokens: (n, T) ids, padded on the right with anything.
            lengths: (n,) from `stop` to `max_length`.
            start: First position of the span.
            stop: The position after its last; None: each sentence's length.

        Raises:
            IsolossError: As for `log_prob`, or a sentence is too short for the span.
        """
        tokens, lengths = self._checked(tokens, lengths)
        batches.check_span(lengths, start, stop)
        out = torch.zeros(len(tokens), len(self.symbols), dtype=self.dtype, device=self.device)

        def compute(rows: Rows, length: int) -> None:
            end = length if stop is None else stop
            posterior, log_z = self._engine.span_posterior(tokens[rows, :length], start, end)
            self._check_possible(rows, log_z)
            out[rows] = posterior

        spread(compute, self._buckets(lengths, self._engine.chunk_of_spans), self.device)
        return out

    def _conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        positions: torch.Tensor | None,
        write: Callable[[Rows, torch.Tensor], None],
    ) -> None:
        """Call `write` with rows and their (rows, length or k, V) conditionals, each row once, from several threads."""

        def compute(rows: Rows, length: int) -> None:
            scores, log_z = self._engine.leaf_outside(tokens[rows, :length])
            self._check_possible(rows, log_z)
            if positions is not None:
                scores = scores[torch.arange(len(scores), device=self.device)[:, None], positions[rows]]
            row_bytes = max(1, scores.shape[1]) * self.vocab_size * self.dtype.itemsize
            size = max(1, _OUTPUT_BYTES.get(self.device.type, _OUTPUT_BYTES["cpu"]) // row_bytes)
            for first in range(0, len(scores), size):
                part = scores[first : first + size]
                if isinstance(rows, slice):
                    write(slice(rows.start + first, rows.start + first + len(part)), part @ self._emission)
                else:
                    write(rows[first : first + size], part @ self._emission)

        spread(compute, self._buckets(lengths), self.device)

    def _buckets(self, lengths: torch.Tensor, chunk: Callable[[int], int] | None = None) -> Iterator[tuple[Rows, int]]:
        """Yield rows of one length and the length, at most `chunk(length)` at once; a slice where all rows have it.

        On a CPU, rows of one length are enough pieces for all threads, unless they are few.
        """
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        for length in np.unique(lengths.cpu().numpy()).tolist():
            rows = torch.nonzero(lengths == length).flatten()
            size = min((chunk or self._engine.chunk)(length), max(_FEW, math.ceil(len(rows) / threads)))
            for first in range(0, len(rows), size):
                if len(rows) == len(lengths):
                    yield slice(first, min(first + size, len(rows))), length
                else:
                    yield rows[first : first + size], length

    # --- checking ----------------------------------------------------------------------------------------------------

    def _checked(
        self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return batches.checked(
            tokens, lengths, mask, vocab_size=self.vocab_size, max_length=self.max_length, device=self.device
        )

    def _check_possible(self, rows: Rows, log_z: torch.Tensor) -> None:
        if (index := batches.first(log_z == -math.inf)) is not None:
            row = rows.start + index if isinstance(rows, slice) else int(rows[index])
            raise IsolossError(f"sentence {row} has probability 0: the grammar does not derive it")
