"""The language of a probabilistic context-free grammar: sentences, and the exact probability of every token in them.

Shapes: n sentences, S symbols, V tokens, C classes of a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages._pcfg.charts import FoldedRules, check_size
from isoloss.lab.languages._pcfg.grammar import (
    Format,
    Grammar,
    dyck_grammar,
    grammar_tables,
    parse_grammar,
    random_grammar,
    read_grammar,
)
from isoloss.lab.languages._pcfg.inside_outside import InsideOutside
from isoloss.lab.languages._pcfg.sampler import Sampler, derivations, longest_yields
from isoloss.lab.languages.base import UNDEFINED, ExactLanguage, Labeling, Sentences, Stored
from isoloss.lab.languages.batches import Rows, run_in_threads
from isoloss.lab.languages.config import (
    GRAMMAR_TASKS,
    LATENT,
    MAX_LENGTH,
    DyckConfig,
    GrammarConfig,
    canonical,
    task_number,
)
from isoloss.text.documents import reading

_OUTPUT_BYTES = {"cpu": 1 << 19, "cuda": 1 << 28}  # of probabilities at a time: half a second-level cache, on a CPU
_MANY_RULES = 5000  # A -> B C
_FEW = 128  # sentences that are not cut further: the compiled kernels take so many at once


class PCFG(ExactLanguage):
    r"""A probabilistic context-free grammar as a language: immutable, with exact probabilities in nats.

    The language is the grammar's distribution over sentences given that they have at most `max_length` tokens. Exact
    computations take right-padded batches of mixed lengths on any device, and return tensors of the language's dtype on
    its device.

    Attributes:
        grammar: The rules.
        symbols: Names of the nonterminal symbols, by id.
        start_symbol: Name of the start symbol, which is `symbols[0]`.

    The other attributes are those of `ExactLanguage`.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.pcfg import PCFG
        >>> language = PCFG.from_text("S -> A B [0.5] | 'a' [0.5]\nA -> 'a' [1.0]\nB -> 'a' [0.25] | 'b' [0.75]")
        >>> tokens, lengths = torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 1])
        >>> language.log_prob(tokens, lengths).exp()
        tensor([0.3750, 0.5000], dtype=torch.float64)
        >>> language.log_conditionals(tokens, lengths)[0, 1].exp()
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    latent_name = "tree"
    has_numbered_sentences = True
    task_patterns = GRAMMAR_TASKS

    def __init__(
        self,
        grammar: Grammar,
        *,
        max_length: int,
        config: LanguageConfig | None = None,
        source: str = "grammar",
    ) -> None:
        """Make the language of `grammar`, cut at `max_length` tokens.

        Args:
            grammar: The rules.
            max_length: Longer sentences are left out; from 1 to 1024.
            config: What the grammar was drawn from, where it was.
            source: What errors call the grammar.
        """
        if not 1 <= max_length <= MAX_LENGTH:
            raise IsolossError(f"max_length is {max_length}; it must be from 1 to {MAX_LENGTH} tokens")
        check_size(grammar)
        max_length = min(max_length, int(longest_yields(grammar, max_length)[0]))
        rules = FoldedRules(grammar, max_length)
        possible = np.flatnonzero(rules.length_probs[0])
        if not len(possible):
            raise IsolossError(
                f"{source}: the grammar has no sentence of at most {max_length} tokens; raise max_length"
            )
        self.max_length = int(possible[-1])
        # Tables of another width would add up in another order: the language must have the same bits whatever length
        # was asked for.
        if self.max_length < max_length:
            rules = FoldedRules(grammar, self.max_length)
        lengths = rules.length_probs[0, : self.max_length + 1]
        # Pr(at most max_length tokens), by which every probability is divided.
        self._acceptance = math.fsum(lengths)
        self._length_probs = torch.from_numpy(lengths / self._acceptance)
        self._rules = rules
        self._sampler = Sampler(grammar, self.max_length)
        self.grammar, self.symbols, self.start_symbol = grammar, grammar.symbols, grammar.symbols[0]
        self.set_vocabulary(grammar.vocabulary)
        self._config = config or GrammarConfig(rules=grammar.config_text(), max_length=self.max_length)
        self._move(torch.device("cpu"), torch.float64)

    @classmethod
    def from_config(cls, config: Any) -> PCFG:
        """Return the random grammar of a `PCFGConfig`."""
        return PCFG(random_grammar(config), max_length=2**config.levels, config=config)

    @staticmethod
    def from_text(text: str, *, source: str = "<text>", max_length: int = GrammarConfig.max_length) -> PCFG:
        """Return the language of the rules in `text`, with arrows or as plain rule lines.

        See `isoloss.lab.languages._pcfg.grammar.parse_grammar` and the constructor.
        """
        return PCFG(parse_grammar(text, source=source), max_length=max_length, source=source)

    @staticmethod
    def from_file(path: Path | str, *, max_length: int = GrammarConfig.max_length) -> PCFG:
        """Return the language of the rules in a UTF-8 file; arguments and errors as for `from_text`."""
        with reading(Path(path)):
            text = Path(path).read_text(encoding="utf-8")
        return PCFG.from_text(text, source=str(path), max_length=max_length)

    def to_text(self, format: Format = "rules") -> str:  # noqa: A002
        """Return the rules as text that `from_text` reads back (see `Grammar.to_text`)."""
        return self.grammar.to_text(format)

    def to_file(self, path: Path | str, format: Format = "rules") -> None:  # noqa: A002
        """Write the rules to `path`, as `to_text` gives them."""
        files.write_text(Path(path), self.to_text(format))

    @staticmethod
    def from_tables(stored: Stored, path: Path) -> PCFG:
        """Return the language in a file; see `LanguageConfig.from_tables`."""
        return PCFG(read_grammar(stored, path), max_length=stored.max_length, source=str(path))

    def tables(self) -> Stored:
        """Return the rules and their probabilities."""
        return grammar_tables(self.grammar, self.max_length)

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        self._engine = InsideOutside(self._rules, device, dtype)
        # of each symbol that emits, given that it does
        emission = self._rules.emission[self._engine.emitting]
        self._emission = torch.as_tensor(emission / emission.sum(axis=1, keepdims=True)).to(device, dtype)

    @property
    def length_probs(self) -> torch.Tensor:
        """(max_length + 1,) the probability of each length."""
        return self._length_probs.to(self.device, self.dtype)

    @property
    def has_slow_entropy(self) -> bool:
        """Whether an estimate of the entropy takes minutes: a treebank's grammar has thousands of pairs."""
        return len(self._rules.binary) > _MANY_RULES

    def describe(self) -> str:
        """Return the numbers of symbols and tokens, and the lengths."""
        return f"a grammar of {len(self.symbols)} symbols over {super().describe()}"

    def sample(
        self,
        n: int,
        *,
        generator: torch.Generator | None = None,
        latent: bool = False,
        length: int | None = None,
    ) -> Sentences:
        """Return `n` independent sentences; see `Language.sample`.

        The generator gives one number, the seed; sentence i is a function of it and of i, so that the sentences of a
        smaller n are the first of a larger one's, on every device.

        Args:
            n: Number of sentences.
            generator: CPU generator of the seed.
            latent: Whether to return the trees: (n, M, 3) int64 rows (start, stop, symbol id) of all nodes in preorder,
                each over the tokens start to stop - 1, padded with -1.
            length: The number of tokens of every sentence, drawn given it; None: any length of the language.

        Raises:
            IsolossError: As for `Language.sample`; no sentence has `length` tokens, or all sentences together have a
                probability under 1e-250 before the language is cut at `max_length`.
        """
        seed = self._seed(n, generator)
        return self._drawn(torch.arange(n), seed, length=length, trees=latent)

    def sentences_at(self, numbers: torch.Tensor, *, seed: int) -> Sentences:
        """Return the sentences with these numbers; see `Language.sentences_at`."""
        return self._drawn(numbers, seed)

    def _drawn(self, numbers: torch.Tensor, seed: int, *, length: int | None = None, trees: bool = False) -> Sentences:
        tokens, lengths, nodes = self._sampler(numbers, seed, length=length, trees=trees)
        latent = None if nodes is None else nodes.to(self.device)
        return Sentences(tokens.to(self.device), lengths.to(self.device), latent)

    def describe_latent(self, sentences: Sentences) -> list[str]:
        """Return the derivation of each sentence as nested brackets."""
        return derivations(sentences, self.symbols, self.vocabulary)

    def labeling(self, name: str) -> Labeling:
        """Return what the task `name` asks (see `isoloss.lab.tasks.make_task`)."""
        return grammar_labeling(self, name)

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        def compute(rows: Rows, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            log_z = self._engine.log_partition(ids[rows, :length])
            return log_z - math.log(self._acceptance), log_z

        return self._by_length(compute, lengths, (len(ids),))

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        shape = (ids if positions is None else positions).shape
        out = batches.large_zeros((*shape, self.vocab_size), self.dtype, self.device)
        self._conditionals(ids, lengths, positions, out, batches.clamped_log_)
        return out

    def _log_next(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        longest = None if given_length else self.max_length
        out = batches.large_zeros((*ids.shape, self.vocab_size), self.dtype, self.device)

        def compute(rows: Rows, length: int) -> None:
            scores, log_mass = self._engine.prefix_outside(ids[rows, :length], longest=longest)
            self._check_possible(rows, log_mass.amin(dim=1))
            self._emit(rows, scores.to(self.dtype), out, batches.clamped_log_)

        buckets = self._buckets(lengths, lambda length: self._engine.chunk(longest or length))
        run_in_threads(compute, buckets, self.device)
        return out

    def _log_next_or_end(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        emission = self._emission.double()

        def compute(rows: Rows, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            # any token: nothing is given the last one
            tokens = torch.nn.functional.pad(ids[rows, :length], (0, 1))
            scores, goes_on = self._engine.prefix_outside(tokens[:, : self.max_length], longest=self.max_length)
            # no token comes after the greatest length, and no sentence is empty
            room = (0, length + 1 - scores.shape[1])
            scores = torch.nn.functional.pad(scores, (0, 0, *room))
            goes_on = torch.nn.functional.pad(goes_on, room, value=-math.inf)
            whole = [self._engine.log_partition(tokens[:, :width]) for width in range(1, length + 1)]
            ends = torch.stack([torch.full_like(goes_on[:, 0], -math.inf), *whole], dim=1)
            either = torch.logaddexp(goes_on, ends)
            tokens_next = batches.clamped_log_(scores.nan_to_num() @ emission) + (goes_on - either)[..., None]
            logs = torch.cat([tokens_next, (ends - either)[..., None]], dim=2)
            return self._clamped_(logs), either.amin(dim=1)

        shape = (len(ids), ids.shape[1] + 1, self.vocab_size + 1)
        return self._by_length(compute, lengths, shape, lambda _: self._engine.chunk(self.max_length))

    def _clamped_(self, logs: torch.Tensor) -> torch.Tensor:
        return logs.clamp_(min=math.log(torch.finfo(self.dtype).tiny))

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        out = torch.zeros((ids if positions is None else positions).shape, dtype=self.dtype, device=self.device)
        self._conditionals(ids, lengths, positions, out, batches.entropies)
        return out

    def inside(self, tokens: torch.Tensor, lengths: torch.Tensor, *, start: int = 0, stop: int) -> torch.Tensor:
        r"""Return (n, symbols): log Pr(symbol =>* x_start .. x_{stop-1}), the inside scores of one span, in nats.

        A symbol that cannot yield these tokens has a finite value, at most the log of float64's smallest normal number
        and no larger than the value of any symbol that can. The scores are computed in float64 whatever the language's
        dtype. The sentence itself may be impossible.

        The span is from `start` to `stop` - 1; other arguments and errors as for `log_prob`, and a sentence must not be
        shorter.
        """
        tokens, lengths = self._checked(tokens, lengths)
        batches.check_span(lengths, start, stop)

        def compute(rows: Rows, length: int) -> tuple[torch.Tensor, None]:
            return self._engine.inside(tokens[rows, start : start + length])[0], None

        same, shape = torch.full_like(lengths, stop - start), (len(tokens), len(self.symbols))
        return self._by_length(compute, same, shape, self._engine.chunk_of_spans)

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        exact = self.to("cpu", torch.float64)
        out = torch.zeros(len(tokens), dtype=torch.bool)
        for length in sorted(set(lengths.tolist())):
            rows = lengths == length
            out[rows] = exact._engine.possible(exact._checked(tokens[rows, :length], lengths[rows])[0])
        return out

    def span_posterior(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        r"""Return (n, symbols): Pr(a node of each symbol covers exactly x_start .. x_{stop-1} | sentence).

        It is outside(A) inside(A) / Pr(sentence). A span need not be covered by any node, and a chain of unary rules
        puts several symbols on one span, so that a row's sum is between 0 and the longest chain.

        Arguments and errors as for `inside`, or a sentence has probability 0; `stop` None: each sentence's length.

        Example:
            >>> import torch
            >>> from isoloss.lab.languages.pcfg import PCFG
            >>> language = PCFG.from_text("S A A 1\nA a 0.25\nA b 0.75")
            >>> language.span_posterior(torch.tensor([[0, 1]]), torch.tensor([2]), stop=1)  # of S, of A
            tensor([[0., 1.]], dtype=torch.float64)
        """
        tokens, lengths = self._checked(tokens, lengths)
        batches.check_span(lengths, start, stop)

        def compute(rows: Rows, length: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self._engine.span_posterior(tokens[rows, :length], start, length if stop is None else stop)

        shape = len(tokens), len(self.symbols)
        return self._by_length(compute, lengths, shape, self._engine.chunk_of_spans)

    def prefix_span_posterior(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, symbols: Sequence[int], start: int, stop: int
    ) -> torch.Tensor:
        r"""Return (n, C): Pr(symbol | x_0 .. x_{stop-1}, a node of one of C symbols covers x_start .. x_{stop-1}).

        Nothing after the span is known, not even whether the sentence goes on: what a causal model can know at the
        span's last token. It is computed in float64. A row is NaN where no such node can be there.

        Arguments and errors as for `inside`.
        """
        exact = self.to("cpu", torch.float64)
        tokens, lengths = exact._checked(tokens.cpu(), lengths.cpu())
        batches.check_span(lengths, start, stop)
        scores = exact._engine.prefix_span(tokens[:, :stop], start, longest=self.max_length)[:, list(symbols)]
        return scores / scores.sum(dim=1, keepdim=True)

    def _conditionals(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        positions: torch.Tensor | None,
        out: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write a function of the (rows, length or k, V) conditionals to the rows of `out`, from several threads.

        `Pr(x_t = c | x_-t)` is proportional to `sum_A outside(A, t) Pr(A =>* c)`: one inside and one outside pass give
        all positions and tokens (the true conditionals of the paper's section 2.1).
        """

        def compute(rows: Rows, length: int) -> None:
            scores, log_z = self._engine.leaf_outside(ids[rows, :length])
            self._check_possible(rows, log_z)
            if positions is not None:
                scores = scores[torch.arange(len(scores), device=self.device)[:, None], positions[rows]]
            self._emit(rows, scores, out, function)

        run_in_threads(compute, self._buckets(lengths), self.device)

    def _emit(
        self, rows: Rows, scores: torch.Tensor, out: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Write a function of (rows, length or k, V) conditionals to the rows of `out`, of the symbols' scores."""
        # The result does not fit in a cache: its product and its log are taken for a few sentences at a time.
        row_bytes = max(1, scores.shape[1]) * self.vocab_size * self.dtype.itemsize
        size = max(1, _OUTPUT_BYTES.get(self.device.type, _OUTPUT_BYTES["cpu"]) // row_bytes)
        for first in range(0, len(scores), size):
            part = scores[first : first + size]
            chunk = slice(first, first + len(part))
            chosen = slice(rows.start + first, rows.start + chunk.stop) if isinstance(rows, slice) else rows[chunk]
            batches.put(out, chosen, function(part @ self._emission))

    def _by_length(
        self,
        compute: Callable[[Rows, int], tuple[torch.Tensor, torch.Tensor | None]],
        lengths: torch.Tensor,
        shape: tuple[int, ...],
        chunk: Callable[[int], int] | None = None,
    ) -> torch.Tensor:
        """Call `compute` on the rows of each length, in several threads; return all its values in a tensor of `shape`.

        `compute` also returns (rows,) log-probabilities, or None; -inf marks an impossible sentence, which is refused.
        """
        out = batches.large_zeros(shape, self.dtype, self.device)

        def work(rows: Rows, length: int) -> None:
            values, log_z = compute(rows, length)
            if log_z is not None:
                self._check_possible(rows, log_z)
            batches.put(out, rows, values.to(self.dtype))

        run_in_threads(work, self._buckets(lengths, chunk), self.device)
        return out

    def _buckets(self, lengths: torch.Tensor, chunk: Callable[[int], int] | None = None) -> Iterator[tuple[Rows, int]]:
        """Yield rows of one length and the length, at most `chunk(length)` at once; a slice where all rows have it.

        On a CPU, rows of one length are enough pieces for all threads, unless they are few.
        """
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        # By length, not padded: the charts of one length have few items, those of all lengths together 4 times as many.
        for length in np.unique(lengths.cpu().numpy()).tolist():
            rows = torch.nonzero(lengths == length).flatten()
            size = min((chunk or self._engine.chunk)(length), max(_FEW, math.ceil(len(rows) / threads)))
            for first in range(0, len(rows), size):
                # Slices of all rows are views, where an index copies.
                if len(rows) == len(lengths):
                    yield slice(first, min(first + size, len(rows))), length
                else:
                    yield rows[first : first + size], length

    def _check_possible(self, rows: Rows, log_z: torch.Tensor) -> None:
        if (index := batches.first(log_z == -math.inf)) is not None:
            row = rows.start + index if isinstance(rows, slice) else int(rows[index])
            raise IsolossError(f"sentence {row} has probability 0: the grammar does not derive it")


def derivation_sums(grammar: Grammar, max_length: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    r"""Return P and S, each (max_length + 1,): over the derivations d of each length, sum p(d) and -sum p(d) log p(d).

    By length, with r the probability of a rule and the sums over A's rules and the splits u + v = w,

        P(A, w) = sum r P(B, u) P(C, v)
        S(A, w) = sum r (S(B, u) P(C, v) + P(B, u) S(C, v)) - r log r P(B, u) P(C, v)

    and likewise for tokens; rules A -> B make both a linear system over the symbols of one length, which (I - U)^-1
    solves, U the matrix of their probabilities. Given w, a derivation of the start symbol has the entropy
    S(w) / P(w) + log P(w). It is the entropy of the sentences where each has one derivation, and else more.
    """
    size = len(grammar.symbols)
    unary = np.zeros((size, size))
    unary[tuple(grammar.unary.T)] = grammar.unary_probs
    closure = np.linalg.inv(np.eye(size) - unary)
    unary_terms = entropy_terms(unary)
    owner, token_probs = grammar.emission[:, 0], grammar.emission_probs
    a, b, c = grammar.binary.T
    r, binary_terms = grammar.binary_probs, entropy_terms(grammar.binary_probs)
    p, s = np.zeros((size, max_length + 1)), np.zeros((size, max_length + 1))
    for width in range(1, max_length + 1):
        # u from 1 to w - 1 and, beside it, v = w - u
        left, right = slice(1, width), slice(width - 1, 0, -1)
        pairs = np.einsum("ru,ru->r", p[b, left], p[c, right])
        inner = np.einsum("ru,ru->r", s[b, left], p[c, right]) + np.einsum("ru,ru->r", p[b, left], s[c, right])
        # By rules to pairs and tokens; the closure adds derivations that begin with unary rules.
        direct_p = np.bincount(a, weights=r * pairs, minlength=size)
        direct_s = np.bincount(a, weights=r * inner + binary_terms * pairs, minlength=size)
        if width == 1:
            direct_p += np.bincount(owner, weights=token_probs, minlength=size)
            direct_s += np.bincount(owner, weights=entropy_terms(token_probs), minlength=size)
        p[:, width] = closure @ direct_p
        s[:, width] = closure @ (direct_s + unary_terms @ p[:, width])
    return p[0], s[0]


def entropy_terms(probs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return -p log p, 0 at 0."""
    return -probs * np.log(np.where(probs > 0, probs, 1))


class Dyck(PCFG):
    """The language of `dyck_grammar`: a `PCFG` whose entropies have a closed form."""

    @classmethod
    def from_config(cls, config: DyckConfig) -> Dyck:
        """Return the language that `config` describes."""
        return cls(dyck_grammar(config), max_length=config.max_length, config=config)

    def closed_form_entropies(self) -> tuple[float, float]:
        """Return H(sentence | length) and the entropy of one masked bracket.

        Each sentence has one derivation, so that sentences and derivations have the same entropy. A masked bracket has
        the entropy of the tokens that it may be written as, whose mean over the kinds is exact: all are equally likely.
        """
        p, s = derivation_sums(self.grammar, self.max_length)
        possible = p > 0
        # at each length H = S / P + log P, as a sentence is its one derivation
        weights = p[possible] / p.sum()
        given_length = math.fsum(weights * (s[possible] / p[possible] + np.log(p[possible])))
        # two symbols of each kind emit tokens: one opens, one closes
        brackets = len(np.unique(self.grammar.emission[:, 0]))
        return given_length, math.fsum(entropy_terms(self.grammar.emission_probs)) / brackets


def grammar_labeling(language: PCFG, asked: str) -> Labeling:
    """Return what the task `asked` asks of a grammar's sentences (see `isoloss.lab.tasks.make_task`).

    Scores are in float64 whatever the language computes in, so that the labels are the same.
    """
    name = canonical(asked)
    base, is_latent = name.removesuffix(LATENT), name.endswith(LATENT)
    candidates, widths = _node(language, asked, base)
    # A chain A -> B puts both symbols on the same tokens: the label would be two.
    if is_latent or base.startswith("level-"):
        _check_exclusive(language, candidates, asked)
    exact = language.to(dtype=torch.float64)

    def by_inside(sentences: Sentences) -> torch.Tensor:
        labels = torch.full_like(sentences.lengths, UNDEFINED)
        long_enough = sentences.lengths >= widths[0]
        scores = exact.inside(sentences.tokens[long_enough], sentences.lengths[long_enough], stop=widths[0])
        # symbols that cannot yield the tokens share one value, of at most the log of the smallest normal number
        best = scores.amax(dim=1)
        none = (best <= math.log(torch.finfo(torch.float64).tiny)) & (best == scores.amin(dim=1))
        labels[long_enough] = scores[:, candidates].argmax(dim=1).masked_fill(none, UNDEFINED)
        return labels

    def scores(sentences: Sentences) -> torch.Tensor:
        tokens, lengths, _ = sentences
        if not widths:
            return exact.span_posterior(tokens, lengths)[:, candidates]
        out = torch.zeros(len(tokens), len(candidates), dtype=torch.float64, device=exact.device)
        for width in widths:
            rows = torch.nonzero(lengths >= width).flatten()
            if len(rows):
                out[rows] += exact.span_posterior(tokens[rows], lengths[rows], stop=width)[:, candidates]
        return out

    def likely(sentences: Sentences) -> torch.Tensor:
        values = scores(sentences)
        return values.argmax(dim=1).masked_fill(values.amax(dim=1) == 0, UNDEFINED)

    index = torch.full((len(language.symbols) + 1,), UNDEFINED)  # the last is for padding, -1
    index[candidates] = torch.arange(len(candidates))

    def drawn(sentences: Sentences) -> torch.Tensor:
        start, stop, symbol = sentences.latent.unbind(dim=2)
        fits = (
            torch.isin(stop, torch.tensor(widths, device=stop.device)) if widths else stop == sentences.lengths[:, None]
        )
        labels = index.to(symbol.device)[symbol].masked_fill((start != 0) | ~fits, UNDEFINED)
        # At most one node fits, and the labels of all others are -1.
        return labels.amax(dim=1)

    classes = tuple(language.symbols[symbol] for symbol in candidates)
    if is_latent:
        return Labeling(name=name, classes=classes, label=drawn, scores=scores, needs_latent=True)
    return Labeling(name=name, classes=classes, label=by_inside if base.startswith("prefix-") else likely)


def _node(language: PCFG, name: str, base: str) -> tuple[list[int], tuple[int, ...]]:
    """Return the node of a parse that a task asks for: it begins at the first token, and at most one in a tree fits.

    Returns:
        The ids of the symbols that it can have, and how many tokens it can cover; none: all of the sentence.
    """
    grammar = language.grammar
    start = grammar.symbols.index(language.start_symbol)
    if base == "root":
        return grammar.unary[grammar.unary[:, 0] == start, 1].tolist(), ()
    # a start symbol that is only ever rewritten to a single symbol stands for no choice
    passes_on = not (grammar.binary[:, 0] == start).any() and not (grammar.emission[:, 0] == start).any()
    feasible = language._rules.feasible
    width = task_number(base, "prefix", 1, language.max_length)
    if width is not None:
        yields = feasible[:, width].nonzero()[0].tolist()
        return [symbol for symbol in yields if symbol != start or not passes_on], (width,)
    levels = _levels(grammar) if base.startswith("level-") else []
    level = task_number(base, "level", 0, max(levels, default=0))
    if level is None:
        called = f"{name!r}" if name == base else f"{name!r} ({base})"
        raise IsolossError(
            f"no task {called}: choose root or prefix-L with L from 1 to {language.max_length}, or level-D"
            + (f" with D from 0 to {max(levels)}" if levels else "")
            + ", each also with -latent"
        )
    candidates = [a for a, level_of_a in enumerate(levels) if level_of_a == level and (a != start or not passes_on)]
    return candidates, tuple(np.flatnonzero(feasible[candidates].any(axis=0)).tolist())


def symbols_on_level(language: PCFG, level: int) -> list[int]:
    """Return the ids of the symbols that have so many binary rules above them, as the task `level-D` asks."""
    name = f"level-{level}"
    symbols, _ = _node(language, name, name)
    _check_exclusive(language, symbols, name)
    return symbols


def _levels(grammar: Grammar) -> list[int]:
    """Return the number of binary rules above each symbol, which must be the same wherever it occurs."""
    levels = [-1] * len(grammar.symbols)
    # The root symbols are on level 0 with the start symbol, as unary rules do not count.
    levels[0], frontier = 0, [0]
    children: list[list[tuple[int, int]]] = [[] for _ in grammar.symbols]
    for a, b, c in grammar.binary.tolist():
        children[a] += [(b, 1), (c, 1)]
    for a, b in grammar.unary.tolist():
        children[a].append((b, 0))
    while frontier:
        symbol = frontier.pop()
        for child, step in children[symbol]:
            level = levels[symbol] + step
            if levels[child] == -1:
                levels[child] = level
                frontier.append(child)
            elif levels[child] != level:
                raise IsolossError(
                    f"the symbols of this grammar do not lie on levels: {grammar.symbols[child]} occurs on "
                    f"{levels[child]} and {level}; choose root or prefix-L"
                )
    return levels


def _check_exclusive(language: PCFG, candidates: list[int], name: str) -> None:
    """Refuse symbols of which a chain of unary rules can put two on the same tokens."""
    for upper, lower in language._rules.chains.tolist():
        if upper != lower and {upper, lower} <= set(candidates):
            both = " and ".join(language.symbols[symbol] for symbol in (upper, lower))
            raise IsolossError(f"task {name}: {both} can cover the same tokens, so the label would not be one symbol")
