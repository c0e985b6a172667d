"""The language of a hidden Markov model: sentences, and the exact probability of every token and state in them.

Shapes: n sentences, T positions, S states, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss import seeds
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages._hmm.forward_backward import Components, ForwardBackward, Index
from isoloss.lab.languages.base import UNDEFINED, ExactLanguage, Labeling, Sentences, Stored
from isoloss.lab.languages.config import LATENT, MAX_LENGTH, STATE_TASKS, HMMConfig, canonical, task_number
from isoloss.lab.languages.serialization import FileConfig

if TYPE_CHECKING:
    from isoloss.lab.languages.alias_sampling import AliasTables

TABLES = ("initial", "transition", "emission")
_TOLERANCE = 1e-6  # of a row's sum, so that matrices kept in float32 pass
_ROUNDING = 1e-12  # of a row's sum; a row that is nearer to 1 stays as it is

Matrix = npt.ArrayLike | torch.Tensor
Float = npt.NDArray[np.float64]
_CHARTS = 128  # sentences of a chunk are a multiple of this, so that the charts of the compiled kernels are full
_CHUNK_BYTES = 5 << 20  # of a chunk's (n, T, S + V) probabilities


class HMM(ExactLanguage):
    """A hidden Markov model as a language: immutable, with exact probabilities in nats.

    Every sentence that is drawn has `max_length` tokens. Exact computations also take shorter ones, which stand for the
    model's first tokens.

    Attributes:
        initial: (S,) float64 NumPy array, probabilities of the first state.
        transition: (S, S) likewise; row: state, column: next state.
        emission: (S, V) likewise; row: state, column: token.
        states: Names of the states, by id: s0, s1, ...

    The other attributes are those of `ExactLanguage`.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages.hmm import HMM
        >>> language = HMM([0.5, 0.5], [[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], length=2)
        >>> tokens, lengths = torch.tensor([[1, 1], [0, 1]]), torch.tensor([2, 2])
        >>> language.log_prob(tokens, lengths).exp()
        tensor([0.2500, 0.1250], dtype=torch.float64)
        >>> language.log_conditionals(tokens, lengths)[0, 0].exp()
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
        >>> language.posterior(tokens, lengths)[1, 1]
        tensor([1., 0.], dtype=torch.float64)
    """

    latent_name = "states"
    has_numbered_sentences = True
    task_patterns = STATE_TASKS

    def __init__(
        self,
        initial: Matrix,
        transition: Matrix,
        emission: Matrix,
        length: int,
        *,
        vocabulary: tuple[str, ...] | None = None,
        config: LanguageConfig | None = None,
        source: str = "the HMM",
    ) -> None:
        """Make the language of explicit matrices.

        Args:
            initial: (S,) probabilities.
            transition: (S, S), each row probabilities.
            emission: (S, V), each row probabilities. Sums may differ from 1 by 1e-6 and are then made 1.
            length: Tokens of a sentence, 1 to 1024.
            vocabulary: V distinct token strings; default: w0, w1, ...
            config: What the model was drawn or read from, where it was.
            source: What errors call the model.
        """
        if not 1 <= length <= MAX_LENGTH:
            raise IsolossError(f"{source}: the length is {length}; it must be from 1 to {MAX_LENGTH} tokens")
        self.initial, self.transition, self.emission = _checked_tables(initial, transition, emission, source)
        size, vocab_size = self.emission.shape
        self.states = tuple(f"s{index}" for index in range(size))
        words = vocabulary or tuple(f"w{index}" for index in range(vocab_size))
        self.set_vocabulary(words, size=vocab_size, source=source)
        self.max_length = length
        self._config = config
        # A list, so that copies on other devices share it: tables are made when a sentence is first drawn, once for
        # all.
        self._alias: list[AliasTables] = []
        self._move(torch.device("cpu"), torch.float64)

    @classmethod
    def from_config(cls, config: HMMConfig) -> HMM:
        """Return the random model that `config` describes."""
        return cls(*_random_tables(config), config.length, config=config)

    @staticmethod
    def from_tables(stored: Stored, path: Path) -> HMM:
        """Return the language in a file; see `LanguageConfig.from_tables`."""
        stored.check_names(TABLES, path)
        initial, transition, emission = (stored.tables[name] for name in TABLES)
        return HMM(
            initial,
            transition,
            emission,
            stored.max_length,
            vocabulary=stored.vocabulary,
            config=FileConfig.of(path),
            source=str(path),
        )

    def tables(self) -> Stored:
        """Return the matrices."""
        tables = {name: getattr(self, name) for name in TABLES}
        return Stored(kind="hmm", max_length=self.max_length, vocabulary=self.vocabulary, tables=tables)

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        self._engine = Components(self.initial, self.transition, self.emission, device, dtype)

    def describe(self) -> str:
        """Return the numbers of states and tokens, and the length."""
        return f"a hidden Markov model of {len(self.states)} states over {super().describe()}"

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences of `max_length` tokens; the latent is the states, (n, T) int64.

        As for a grammar, sentence i is a function of i and of one number of the generator, on every device; arguments
        and errors as for `Language.sample`.
        """
        seed = self._seed(n, generator)
        drawn = self._drawn(torch.arange(n), seed)
        return drawn if latent else drawn._replace(latent=None)

    def sentences_at(self, numbers: torch.Tensor, *, seed: int) -> Sentences:
        """Return the sentences with these numbers; see `Language.sentences_at`."""
        return self._drawn(numbers, seed)._replace(latent=None)

    def _drawn(self, numbers: torch.Tensor, seed: int) -> Sentences:
        from isoloss.lab.languages import alias_sampling

        if not self._alias:
            self._alias += map(alias_sampling.alias_tables, (self.initial[None], self.transition, self.emission))
        tokens, states = alias_sampling.draw_chains(
            *self._alias, numbers=numbers.cpu().numpy(), length=self.max_length, seed=seed
        )
        lengths = torch.full((len(tokens),), self.max_length, device=self.device)
        return Sentences(tokens.to(self.device), lengths, states.to(self.device))

    def describe_latent(self, sentences: Sentences) -> list[list[str]]:
        """Return the names of the states that each sentence was drawn through."""
        return [[self.states[state] for state in states] for states in sentences.latent.tolist()]

    def labeling(self, name: str) -> Labeling:
        """Return what the task `name` asks (see `isoloss.lab.tasks.make_task`).

        Scores are in float64 whatever the language computes in, so that the labels are the same.
        """
        asked = canonical(name)
        k = task_number(asked.removesuffix(LATENT), "state", 1, self.max_length)
        if k is None:
            last = self.max_length
            raise IsolossError(f"no task {name!r}: choose state-K with k from 1 to {last}, or state-K-latent")
        exact = self.to(dtype=torch.float64)

        def scores(sentences: Sentences) -> torch.Tensor:
            return exact.posterior(sentences.tokens, sentences.lengths)[:, k - 1]

        def likely(sentences: Sentences) -> torch.Tensor:
            return scores(sentences).argmax(dim=1).masked_fill(sentences.lengths < k, UNDEFINED)

        def drawn(sentences: Sentences) -> torch.Tensor:
            states: torch.Tensor = sentences.latent[:, k - 1]
            return states.masked_fill(sentences.lengths < k, UNDEFINED)

        if asked.endswith(LATENT):
            return Labeling(name=asked, classes=self.states, label=drawn, scores=scores, needs_latent=True)
        return Labeling(name=asked, classes=self.states, label=likely)

    def _is_possible(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # Only whether it is possible, not how probable it is: no product can underflow.
        initial, transition, emission = (
            torch.from_numpy(table > 0).double() for table in (self.initial, self.transition, self.emission)
        )
        reached = initial * emission.T[tokens[:, 0]]
        for position in range(1, int(lengths.max())):
            further = ((reached @ transition) > 0) * emission.T[tokens[:, position]]
            reached = torch.where(lengths[:, None] > position, further, reached)
        return reached.any(dim=1)

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # The sum over all state sequences. The Viterbi algorithm, which the paper names, gives the likeliest of them.
        out = torch.zeros(len(ids), dtype=self.dtype, device=self.device)

        def compute(rows: Index, model: ForwardBackward) -> None:
            out[rows] = model.log_prob(ids[rows])

        # No token is asked for, so that all of them decide which part of the model a sentence is in.
        batches.run_in_threads(compute, self._chunks(ids, spare=0), self.device)
        _check_possible(out != -math.inf)
        return out

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        out = self._room_for_logs(ids if positions is None else positions)

        def use(rows: Index, model: ForwardBackward, probs: torch.Tensor) -> None:
            _put(out, rows, model.tokens, probs)

        self._conditionals(ids, positions, use, out, log=True)
        return _zero_padding(out, lengths) if positions is None else out

    def _log_next(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        # The length tells nothing of the tokens before its end. The first token decides which part of the model a
        # sentence is in; only the first one itself is predicted by all of them.
        out = self._room_for_logs(ids)
        possible = torch.zeros(len(ids), dtype=torch.bool, device=self.device)

        def compute(rows: Index, model: ForwardBackward) -> None:
            logs = _room(out, rows, model.emission.shape[1])
            possible[rows] = model.log_next(ids[rows], logs)
            _put(out, rows, model.tokens, logs)

        batches.run_in_threads(compute, self._chunks(ids, spare=0, deciding=1), self.device)
        _check_possible(possible)
        first = torch.as_tensor(self.initial @ self.emission).to(self.device, self.dtype)
        out[:, :1] = batches.clamped_log_(first)
        return _zero_padding(out, lengths)

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        out = torch.zeros((ids if positions is None else positions).shape, dtype=self.dtype, device=self.device)

        def use(rows: Index, _: ForwardBackward, probs: torch.Tensor) -> None:
            out[rows] = batches.entropies(probs)

        self._conditionals(ids, positions, use, out[..., None], log=False)
        return _zero_padding(out, lengths) if positions is None else out

    def posterior(
        self, tokens: torch.Tensor, lengths: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (n, T, S): Pr(z_t = z | all tokens), the states given the whole sentence; 0 at padded positions.

        Arguments and errors as for `log_prob`.
        """
        ids, lengths = self._checked(tokens, lengths, mask)
        out = batches.large_zeros((*ids.shape, len(self.states)), self.dtype, self.device)
        possible = torch.zeros(len(ids), dtype=torch.bool, device=self.device)

        def compute(rows: Index, model: ForwardBackward) -> None:
            states = _room(out, rows, model.emission.shape[0])
            possible[rows] = model.states_given(ids[rows], states, own=True)
            _put(out, rows, model.states, states)

        batches.run_in_threads(compute, self._chunks(ids, spare=0), self.device)
        _check_possible(possible)
        return _zero_padding(out, lengths)

    def _conditionals(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        use: Callable[[Index, ForwardBackward, torch.Tensor], None],
        out: torch.Tensor,
        *,
        log: bool,
    ) -> None:
        """Compute (rows, T or k, tokens) conditionals, or their logs, for `use`; complain of impossible rows.

        `Pr(x_t = c | x_-t)` is proportional to `sum_z Pr(z_t = z | x_<t) Pr(x_>t | z_t = z) Pr(c | z)`: one forward and
        one backward pass give all positions and tokens (the paper's section 2.1 and appendix A.3). They are written to
        the `_room` in `out`.
        """
        possible = torch.zeros(len(ids), dtype=torch.bool, device=self.device)

        def compute(rows: Index, model: ForwardBackward) -> None:
            chunk, probs = ids[rows], _room(out, rows, model.emission.shape[1])
            if positions is None:
                possible[rows] = model.conditionals(chunk, probs, log=log)
            else:
                states = probs.new_empty(*chunk.shape, model.emission.shape[0])
                possible[rows] = model.states_given(chunk, states, own=False)
                asked = states[torch.arange(len(chunk), device=self.device)[:, None], positions[rows]]
                torch.matmul(asked, model.emission, out=probs)
                if log:
                    batches.clamped_log_(probs)
            use(rows, model, probs)

        # One token is asked for at each position. A part is decided only where the others leave no second one.
        batches.run_in_threads(compute, self._chunks(ids, spare=1), self.device)
        _check_possible(possible)

    def _room_for_logs(self, like: torch.Tensor) -> torch.Tensor:
        """Return (n, T, V) for logs: that of 0 where parts of the model leave tokens out."""
        out = batches.large_zeros((*like.shape, self.vocab_size), self.dtype, self.device)
        return out.fill_(math.log(torch.finfo(self.dtype).tiny)) if self._engine.parts else out

    def _chunks(
        self, ids: torch.Tensor, *, spare: int, deciding: int | None = None
    ) -> Iterator[tuple[Index, ForwardBackward]]:
        """Yield rows and the model of them, by their first `deciding` tokens: see `Components.assign`."""
        for chosen, model in self._engine.assign(ids[:, :deciding], spare=spare):
            states, tokens = model.emission.shape
            size = max(16, _CHUNK_BYTES // (max(1, ids.shape[1]) * (states + tokens) * self.dtype.itemsize))
            size -= size % _CHARTS if size > _CHARTS else 0
            total = len(ids) if chosen is None else len(chosen)
            for first in range(0, total, size):
                part = slice(first, min(first + size, total))
                yield (part if chosen is None else chosen[part]), model


def _room(out: torch.Tensor, rows: Index, columns: int) -> torch.Tensor:
    """Return where (rows, T, columns) are computed: rows of `out` where it has as many columns, else new memory."""
    if isinstance(rows, slice) and columns == out.shape[2]:
        return out[rows]
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    return out.new_empty(count, out.shape[1], columns)


def _put(out: torch.Tensor, rows: Index, columns: Index, values: torch.Tensor) -> None:
    """Write values in their `_room` into rows and columns of (n, T, all columns)."""
    if isinstance(rows, slice):
        return  # they are there
    if isinstance(columns, slice):
        batches.put(out[:, :, columns], rows, values)
    else:
        out[rows[:, None, None], torch.arange(out.shape[1], device=out.device)[:, None], columns] = values


def _zero_padding(out: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Put 0 behind the ends of the sentences, in place."""
    if out.numel() and bool((lengths < out.shape[1]).any()):
        out[torch.arange(out.shape[1], device=out.device) >= lengths[:, None]] = 0
    return out


def _check_possible(possible: torch.Tensor) -> None:
    if (row := batches.first(~possible)) is not None:
        raise IsolossError(f"sentence {row} has probability 0: the HMM cannot produce it")


def _checked_tables(initial: Matrix, transition: Matrix, emission: Matrix, source: str) -> tuple[Float, Float, Float]:
    """Return the tables as read-only float64 arrays whose rows add up to 1, or say what is wrong."""
    tables = []
    for name, matrix in zip(TABLES, (initial, transition, emission), strict=True):
        try:
            raw: Any = matrix.detach().cpu().numpy() if isinstance(matrix, torch.Tensor) else matrix
            tables.append(np.array(raw, dtype=np.float64))
        except (ValueError, TypeError) as error:
            raise IsolossError(f"{source}: {name} must be numbers: {error}") from error
    size = len(tables[0]) if tables[0].ndim == 1 else 0
    wanted = [("(states,)", tables[0].ndim == 1 and size > 0), (f"({size}, {size})", tables[1].shape == (size, size))]
    wanted.append((f"({size}, tokens)", tables[2].ndim == 2 and len(tables[2]) == size and tables[2].shape[1] > 0))
    for name, table, (shape, fits) in zip(TABLES, tables, wanted, strict=True):
        if not fits:
            raise IsolossError(f"{source}: {name} must be of shape {shape}, not {table.shape}")
        for row, entries in enumerate(np.atleast_2d(table)):
            where = f"{source}: {name}" if table.ndim == 1 else f"{source}: row {row} of {name}"
            if (bad := ~(np.isfinite(entries) & (entries >= 0))).any():
                raise IsolossError(f"{where} holds {entries[bad][0]}; a probability is from 0 to 1")
            if abs(total := math.fsum(entries) - 1) > _TOLERANCE:
                raise IsolossError(f"{where} adds up to {total + 1:.9g}; it must add up to 1")
            # Rows that were normalized once keep their bits, in a file and back.
            if abs(total) > _ROUNDING:
                entries /= entries.sum()
        table += 0.0  # no -0.0
        table.flags.writeable = False
    return tables[0], tables[1], tables[2]


def _random_tables(config: HMMConfig) -> tuple[Float, Float, Float]:
    rng = np.random.default_rng(seeds.derive(config.seed, "hmm"))
    blocks = np.array_split(np.arange(config.states), config.blocks)
    tables = []
    for width in (config.states, config.vocab_size):
        table = np.zeros((config.states, width))
        for rows, columns in zip(blocks, np.array_split(np.arange(width), config.blocks), strict=True):
            drawn = rng.dirichlet(np.full(len(columns), config.concentration), size=len(rows))
            table[np.ix_(rows, columns)] = (1 - config.mixing_weight) * drawn
        if config.mixing_weight:
            mixed = rng.dirichlet(np.full(width, config.concentration), size=config.states)
            table += config.mixing_weight * mixed
        tables.append(table)
    return np.full(config.states, 1 / config.states), tables[0], tables[1]
