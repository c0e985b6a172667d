"""A causal language model as a language: its sentences of some length over some of its tokens, with the exact truth.

Shapes: n sentences, T positions, K tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from isoloss import seeds
from isoloss.checkpoints import loading
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages.base import ExactLanguage, Sentences, Stored
from isoloss.lab.languages.config import TeacherConfig, check_unchanged
from isoloss.text import documents, tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROWS = 256  # sentences drawn or read together; part of what a seed stands for
_COMPLETIONS = 1 << 12  # of several masked tokens, at most


class Teacher(ExactLanguage):
    r"""A causal language model restricted to K tokens and T of them per sentence (the paper's OPT-generated data, A.1).

    `Pr(x) = prod_t Pr(x_t | x_<t)`, where the first token follows the model's start token, and the model's softmax is
    renormalized over the K tokens at every step. Shorter sentences stand for the model's first tokens. Exact
    conditionals are by substitution: `Pr(x_t = c | x_-t)` is proportional to `Pr(c | x_<t) Pr(x_>t | x_<t, c)`, K
    endings to be scored for each position.

    Attributes:
        tokens: (K,) the model's id of each token.
        start_id: The model's id that every sentence begins after.
        dtype: What the model runs in: float32, or float64. Some architectures compute parts in float32 all the same,
            such as Llama's norms: conditionals are then right to about six digits in float64, too.

    The other attributes are those of `ExactLanguage`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from isoloss.lab.languages.teacher import Teacher
        >>> config = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=4, bos_token_id=0)
        >>> language = Teacher(GPT2LMHeadModel(config), [4, 2, 7], 3, start_id=0).to(dtype=torch.float64)
        >>> tokens, lengths = language.sample(5, generator=torch.Generator().manual_seed(0))[:2]
        >>> language.log_conditionals(tokens, lengths).exp().sum(dim=2).allclose(torch.tensor(1.0).double())
        True
    """

    costs_forward_passes = True

    def __init__(
        self,
        model: Any,
        tokens: tuple[int, ...] | list[int],
        length: int,
        *,
        start_id: int | None = None,
        vocabulary: tuple[str, ...] | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        config: TeacherConfig | None = None,
        source: str = "the teacher",
    ) -> None:
        """Make the language of a causal model of transformers; of the model a copy is kept.

        Args:
            model: The model, with a language-modeling head.
            tokens: The model's ids of the language's tokens, in the language's order.
            length: Tokens of a sentence.
            start_id: The model's id that sentences begin after; None: its config's bos, eos or decoder start token.
            vocabulary: K distinct token strings; default: the tokenizer's, or t and the model's id.
            tokenizer: The model's, of which the language's is made (see `isoloss.text.kept_tokens`).
            config: What the model was read from, where it was.
            source: What errors call the model.
        """
        most = getattr(model.config, "max_position_embeddings", None)
        if length < 1 or (most is not None and length > most):
            limit = "at least 1 token" if most is None else f"from 1 to {most} tokens"
            raise IsolossError(f"{source}: the length is {length}; it must be {limit}")
        self.start_id = find_start(model, start_id, source)
        self.tokens = _checked_tokens(tuple(tokens), model, source)
        self.tokenizer = None if tokenizer is None else tokenizers.keep(tokenizer, self.tokens, length=length)
        words = (
            [f"t{index}" for index in self.tokens]
            if self.tokenizer is None
            else self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokens))))
        )
        self.set_vocabulary(vocabulary or tuple(words), size=len(self.tokens), source=source)
        self.max_length = length
        self._config = config
        self._source = source
        # A copy: the scorer cuts the output layer of its model.
        self._scorer = Scorer(copy.deepcopy(model), self.start_id, torch.tensor(self.tokens))
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self._move(torch.device(model.device), dtype)

    @classmethod
    def from_config(cls, config: TeacherConfig) -> Teacher:
        """Return the language that `config` describes.

        Where it names no tokens, the most frequent ones are determined first: in the text files of `corpus`, or else in
        samples of the model over all its tokens.
        """
        check(config)
        name, model = _load(config.checkpoint)
        content = checkpoint_content(model, name)
        check_unchanged(config.checkpoint, config.content, content)
        try:
            tokenizer = tokenizers.load_tokenizer(name)
        except IsolossError as error:
            if config.corpus and not config.tokens:
                raise IsolossError(f"the tokens of a corpus cannot be counted: {error}") from error
            tokenizer = None
        start_id = find_start(model, config.start_id, name)
        tokens = config.tokens
        if not tokens:
            if tokenizer is not None and config.corpus:
                counts = count_text(config.corpus, tokenizer, vocab_size(model))
            else:
                counts = count_samples(
                    model, start_id, sequences=config.samples, length=config.length, seed=config.seed
                )
            tokens = most_frequent(counts, special_token_ids(model, tokenizer), config.vocab_size)
        resolved = dataclasses.replace(config, checkpoint=name, tokens=tokens, start_id=start_id, content=content)
        return cls(
            model,
            tokens,
            config.length,
            start_id=start_id,
            tokenizer=tokenizer,
            config=resolved,
            source=config.checkpoint,
        )

    def tables(self) -> Stored:
        """Raise an `IsolossError`: the checkpoint is a folder already."""
        checkpoint = self._source if self._config is None else self.config.checkpoint
        raise IsolossError(f"a teacher is not stored as one file: keep its checkpoint ({checkpoint})")

    def describe(self) -> str:
        """Return what the sentences are, and their length."""
        return f"what {self._source} writes over {super().describe()}"

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        # The language that this one is a copy of keeps its scorer; the two share a model that need not be moved.
        self._scorer = copy.copy(self._scorer)
        if self._scorer.model.dtype != dtype or self._scorer.ids.device != device:
            self._scorer.model = copy.deepcopy(self._scorer.model)
            self._scorer.to(device, dtype)

    def sample(self, n: int, *, generator: torch.Generator | None = None, latent: bool = False) -> Sentences:
        """Return `n` independent sentences of `max_length` tokens; arguments and errors as for `Language.sample`.

        The generator gives one number, the seed; sentence i is drawn by uniform numbers that are a function of the seed
        and of i. The model reads 256 sentences at a time. Another device, dtype or number of threads, or a smaller n,
        may change the last bits of its probabilities, and so a token where a number falls between two of them. Nothing
        stands behind a sentence: `latent` has no effect.
        """
        seed = self._seed(n, generator)
        tokens = torch.empty(n, self.max_length, dtype=torch.int64)
        for first in range(0, n, _ROWS):
            stream = seeds.generator(seed, "teacher sentences", first)
            # All rows' numbers even if fewer are wanted: the sentences of a smaller n are the first of a larger one's.
            uniforms = torch.rand(_ROWS, self.max_length, generator=stream, dtype=torch.float64)
            tokens[first : first + _ROWS] = self._scorer.draw(uniforms[: n - first])
        return Sentences(tokens.to(self.device), torch.full((n,), self.max_length, device=self.device))

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ids, masked = self._masked(ids, lengths)
        self._check_completions(masked.sum(dim=1))
        out = torch.empty(len(ids), dtype=self.dtype, device=self.device)
        for rows, prefix in self._read(ids, lengths):
            steps = prefix.logs.gather(2, prefix.tokens[..., None])[..., 0]
            out[rows] = steps.sum(dim=1)
            for unknown_at, members in by_set(masked[rows]):
                if unknown_at:
                    index = torch.tensor(members, device=self.device)
                    endings = self._scorer.completions(prefix, index, unknown_at).flatten(1).logsumexp(dim=1)
                    out[rows[index]] = steps[index, : unknown_at[0]].sum(dim=1) + endings
        check_possible(out)
        return out

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        positions = batches.or_all(positions, ids)
        out = torch.zeros(*positions.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        for rows, columns, logs in self._conditionals(ids, lengths, positions):
            out[rows, columns] = logs
        return out

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        positions = batches.or_all(positions, ids)
        out = torch.zeros(positions.shape, dtype=self.dtype, device=self.device)
        for rows, columns, logs in self._conditionals(ids, lengths, positions):
            out[rows, columns] = batches.entropies(logs.exp())
        return out

    def _log_next(self, ids: torch.Tensor, lengths: torch.Tensor, given_length: bool) -> torch.Tensor:
        # what the teacher predicts itself; it writes on to the greatest length, so that a length tells nothing
        out = torch.zeros(*ids.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        for rows, prefix in self._read(*self._masked(ids, lengths)[:1], lengths):
            check_possible(prefix.logs.gather(2, prefix.tokens[..., None])[..., 0].sum(dim=1))
            out[rows, : prefix.logs.shape[1]] = self._clamped(prefix.logs)
        return out

    def _clamped(self, logs: torch.Tensor) -> torch.Tensor:
        return logs.clamp(min=math.log(torch.finfo(self.dtype).tiny))

    def _conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, wide: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield rows, columns of `wide` and the (rows, K) log-conditionals at the positions that stand there.

        K endings are scored behind a beginning that is read once: on the average half the work of K passes over whole
        sentences.
        """
        ids, masked = self._masked(ids, lengths)
        inside = wide < lengths[:, None]
        already_masked = masked.gather(1, wide.clamp(max=ids.shape[1] - 1))
        counts = masked.sum(dim=1, keepdim=True) + (~already_masked).long()
        # Before the model reads anything, as scoring may take hours.
        self._check_completions(counts.masked_fill(~inside, 0).amax(dim=1))
        for chunk, prefix in self._read(ids, lengths):
            rows, columns = inside[chunk].nonzero(as_tuple=True)
            at = wide[chunk][rows, columns]
            unknown = masked[chunk][rows].scatter(1, at[:, None], True)
            # Positions with the same unknown tokens share their completions: of several masked tokens of a sentence
            # each one's conditional is a marginal of the same joint distribution.
            for unknown_at, members in by_set(unknown):
                index = torch.tensor(members, device=self.device)
                sentences, which = torch.unique(rows[index], return_inverse=True)
                joint = self._scorer.completions(prefix, sentences, unknown_at)
                check_possible(joint.flatten(1).logsumexp(dim=1))
                for axis, position in enumerate(unknown_at):
                    chosen = at[index] == position
                    if bool(chosen.any()):
                        marginal = (
                            # (r, K, ..., K): log Pr of all unknown tokens, summed over all but one
                            joint.movedim(1 + axis, 1).flatten(2).logsumexp(dim=2) if len(unknown_at) > 1 else joint
                        )
                        logs = self._clamped(marginal.log_softmax(dim=1))[which[chosen]]
                        yield chunk[sentences[which[chosen]]], columns[index[chosen]], logs

    def _read(self, ids: torch.Tensor, lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, Prefix]]:
        """Yield rows of one length, some hundred at most, and the model's view of them."""
        for length in sorted(set(lengths.tolist())):
            for rows in (lengths == length).nonzero()[:, 0].split(_ROWS):
                yield rows, self._scorer.read(ids[rows, :length])

    def _masked(self, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids with 0 where a token is unknown or absent, and (n, T): which tokens are unknown."""
        without = ids == self.vocab_size
        return ids.masked_fill(without, 0), without & Sentences(ids, lengths).present()

    @property
    def max_masked(self) -> int:
        """The most unknown tokens of a sentence that exact answers take: one, or as many as have 4,096 completions."""
        # The quotient of logs may be rounded to below a whole number: log 4096 / log 64 must be 2.
        return max(1, int((math.log(_COMPLETIONS) + 1e-9) / math.log(self.vocab_size)))

    def _check_completions(self, counts: torch.Tensor) -> None:
        wrong = counts > self.max_masked
        if (row := batches.first(wrong)) is not None:
            raise IsolossError(
                f"sentence {row} has {int(counts[row])} unknown tokens, with {self.vocab_size}^{int(counts[row])} "
                f"completions to add up; a teacher adds up {_COMPLETIONS} at most, and always those of one token"
            )


def _load(checkpoint: str) -> tuple[str, Any]:
    """Return the checkpoint's name, a folder's made absolute, and its model in float32 on the CPU."""
    folder = Path(checkpoint).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else checkpoint
    loaded = loading.load_model(name, device="cpu")
    if loaded.kind != "causal":
        raise IsolossError(f"{checkpoint} is a {loaded.architecture}: a teacher is a causal model, which writes text")
    return name, loaded.model


def _checked_tokens(tokens: tuple[int, ...], model: Any, source: str) -> tuple[int, ...]:
    size, special = vocab_size(model), special_token_ids(model)
    if len(tokens) < 2:
        raise IsolossError(f"{source}: a language needs at least 2 tokens, not {len(tokens)}")
    if len(set(tokens)) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if token in tokens[:index])
        raise IsolossError(f"{source}: the token {twice} is named twice")
    for token in tokens:
        if not 0 <= token < size:
            raise IsolossError(f"{source}: there is no token {token}; the model's ids are from 0 to {size - 1}")
        if token in special:
            raise IsolossError(f"{source}: the token {token} is special to the model, and no part of a sentence")
    return tokens


_POSITIONS = 4096  # tokens in one pass through the model, those whose keys and values are kept included
_LOGITS = 1 << 25  # numbers that the model's output of one pass may have
_DRAWN = 256  # sequences drawn together for counting
_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of a config.json: decide no probability


class Prefix(NamedTuple):
    """Sentences of one length that the model has read."""

    tokens: torch.Tensor  # (n, T) ids of the language
    logs: torch.Tensor  # (n, T, K) log Pr(x_t = c | x_<t)
    # keys and values of each layer, (n, heads, T, size); None where the model's cache cannot be shared
    states: list[tuple[torch.Tensor, torch.Tensor]] | None


class Scorer:
    """A causal model whose next token is one of K: its softmax over all tokens, renormalized over these.

    The output layer is cut to the K rows where the logits stay the same by that, and keys and values of a shared
    beginning are kept where the model keeps nothing else and gives the same logits with them; both are tried when the
    scorer is made. The scorer changes the model.
    """

    def __init__(self, model: Any, start_id: int, ids: torch.Tensor) -> None:
        self.model = model.eval().requires_grad_(False)
        self.start_id = start_id
        self.ids = ids.to(model.device)
        self.cut = False
        self.cached = self._keeps_states()
        self._cut_output()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the model."""
        self.model = self.model.to(device=device, dtype=dtype)
        self.ids = self.ids.to(device)

    @torch.inference_mode()
    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Return (n, T) int64 sentences on the CPU, by inverting each distribution function at (n, T) uniforms."""
        n, length = uniforms.shape
        tokens = torch.empty(n, length, dtype=torch.int64)
        inputs, cache = self._inputs(tokens[:, :0]), None
        for position in range(length):
            logs, cache = self._read(inputs, cache)
            # In float64: a float32 sum over thousands of tokens would round away what improbable ones add to it.
            cumulative = logs[:, -1].cpu().double().exp().cumsum(dim=1)
            check_possible(cumulative[:, -1].log())
            targets = (uniforms[:, position, None] * cumulative[:, -1:]).contiguous()
            # right=True: the first token whose sum is above the target, so that one of probability 0 is never drawn.
            # Multiplied by the last sum, a uniform number below 1 may be rounded up to it: that is the last token.
            chosen = torch.searchsorted(cumulative, targets, right=True).clamp_(max=len(self.ids) - 1)
            tokens[:, position] = chosen[:, 0]
            latest = self.ids[chosen.to(self.ids.device)]
            # Without a cache the whole beginning is read again at each token.
            inputs = latest if self.cached else torch.cat([inputs, latest], dim=1)
        return tokens

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> Prefix:
        """Return the model's view of (n, T) sentences."""
        logs, cache = self._read(self._inputs(tokens[:, :-1]), None)
        states = None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]
        return Prefix(tokens, logs, states)

    @torch.inference_mode()
    def ending(self, prefix: Prefix, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return (r,): log Pr(end | beginning), for sentences of the prefix that end in other tokens, (r, L) `ends`."""
        start = prefix.tokens.shape[1] - ends.shape[1]
        total = prefix.logs[rows, start].gather(1, ends[:, :1])[:, 0]
        if ends.shape[1] == 1:
            return total
        if prefix.states is None:
            inputs = self._inputs(torch.cat([prefix.tokens[rows, :start], ends[:, :-1]], dim=1))
            logs = self._read(inputs, None)[0][:, start + 1 :]
        else:
            # One more than the tokens before the end: the start token.
            cache = _cache([(k[rows, :, : start + 1], v[rows, :, : start + 1]) for k, v in prefix.states])
            logs, _ = self._read(self.ids[ends[:, :-1]], cache)
        # The first token of the end is scored by `prefix`, and the last is never an input.
        return total + logs.gather(2, ends[:, 1:, None])[..., 0].sum(dim=1)

    def completions(self, prefix: Prefix, rows: torch.Tensor, masked: tuple[int, ...]) -> torch.Tensor:
        """Return (r, K, ..., K): log Pr(tokens from the first masked one on | those before), for all masked tokens.

        Of the (r,) sentences in `rows`; one dimension for each of the ascending positions `masked`.
        """
        size, start = len(self.ids), masked[0]
        count = size ** len(masked)
        total = torch.empty(len(rows) * count, dtype=prefix.logs.dtype, device=prefix.logs.device)
        # Where the output layer is not cut, logits over all of the model's tokens take more memory than all else.
        width = size if self.cut else vocab_size(self.model)
        step = max(1, min(_POSITIONS, _LOGITS // width) // prefix.tokens.shape[1])
        for index in torch.split(torch.arange(len(total), device=rows.device), step):
            sentences, code = rows[index // count], index % count
            ends = prefix.tokens[sentences, start:]
            # The last masked token varies fastest, as in the view below.
            for position in reversed(masked):
                ends[:, position - start] = code % size
                code //= size
            total[index] = self.ending(prefix, sentences, ends)
        return total.view(len(rows), *[size] * len(masked))

    def _inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's ids of tokens, behind the start."""
        start = torch.full((len(tokens), 1), self.start_id, device=self.ids.device)
        return torch.cat([start, self.ids[tokens.to(self.ids.device)]], dim=1)

    def _read(self, inputs: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Return (n, L, K) log-probabilities after each of the (n, L) inputs, and the cache with these in it."""
        out = self.model(input_ids=inputs, past_key_values=cache, use_cache=self.cached)
        logits = out.logits if self.cut else out.logits[..., self.ids]
        return logits.log_softmax(dim=-1), out.past_key_values if self.cached else None

    @torch.inference_mode()
    def _keeps_states(self) -> bool:
        """Return whether the model's cache is keys and values only, and gives the logits of one pass over all."""
        inputs = self._trial()
        whole = self.model(input_ids=inputs, use_cache=True)
        cache: Any = getattr(whole, "past_key_values", None)
        # Exact types: a subclass (sliding windows, recurrent states) keeps more than keys and values, or not all of
        # them.
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return False
        of_start = _cache([(layer.keys[:, :, :1], layer.values[:, :, :1]) for layer in cache.layers])
        ends = self.model(input_ids=inputs[:, 1:], past_key_values=of_start, use_cache=True)
        return bool(torch.allclose(ends.logits, whole.logits[:, 1:], rtol=1e-3, atol=1e-3))

    @torch.inference_mode()
    def _cut_output(self) -> None:
        head = self.model.get_output_embeddings()
        # A head of another type (quantized, with an adapter) may have no plain rows to copy.
        if type(head) is not torch.nn.Linear or head.out_features == len(self.ids):
            return
        inputs = self._trial()
        expected = self.model(input_ids=inputs).logits[..., self.ids]
        small = torch.nn.Linear(head.in_features, len(self.ids), bias=head.bias is not None)
        small = small.to(head.weight).requires_grad_(False)
        small.weight.copy_(head.weight[self.ids])
        if head.bias is not None:
            small.bias.copy_(head.bias[self.ids])
        self.model.set_output_embeddings(small)
        logits = self.model(input_ids=inputs).logits
        # Some models scale or squash logits by what they find in the whole layer: the cut is kept only if it changes
        # nothing.
        self.cut = logits.shape == expected.shape and bool(torch.allclose(logits, expected, rtol=1e-3, atol=1e-3))
        if not self.cut:
            self.model.set_output_embeddings(head)

    def _trial(self) -> torch.Tensor:
        return torch.cat([torch.tensor([self.start_id], device=self.ids.device), self.ids[:3]])[None]


def _cache(states: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """Return a cache that holds keys and values, without copying them."""
    cache = DynamicCache()
    cache.layers = []
    for keys, values in states:
        layer = DynamicLayer()
        # Without it the layer counts as empty and drops what it is given. Reading appends by concatenation, so the kept
        # keys and values of `Prefix` stay as they are.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def by_set(flags: torch.Tensor) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return the sets of true columns that occur in (r, T) bool, each with its rows."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for row, row_flags in enumerate(flags.tolist()):
        sets.setdefault(tuple(column for column, flag in enumerate(row_flags) if flag), []).append(row)
    return list(sets.items())


def check_possible(totals: torch.Tensor) -> None:
    """Raise an `IsolossError` where a log-probability is not a number, or minus infinity."""
    if bool(totals.isnan().any()):
        raise IsolossError("the teacher's logits are not finite: its weights are damaged, or too large for the dtype")
    if bool((totals == -math.inf).any()):
        raise IsolossError("a sentence has probability 0: the teacher cannot produce it")


def vocab_size(model: Any) -> int:
    """Return the number of token ids that the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def special_token_ids(model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> frozenset[int]:
    """Return the ids that the model's config and the tokenizer call special: begin, end, padding, unknown, ..."""
    ids: list[int] = [] if tokenizer is None else list(tokenizer.all_special_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        ids += _ids(model, name)
    return frozenset(ids)


def find_start(model: Any, start_id: int | None, source: str) -> int:
    """Return the id that sentences begin after: the one given, else the config's bos, eos or decoder start."""
    size = vocab_size(model)
    if start_id is None:
        named = [*_ids(model, "bos_token_id"), *_ids(model, "eos_token_id"), *_ids(model, "decoder_start_token_id")]
        if not named:
            raise IsolossError(
                f"{source} names no token that a text begins with: give its id as start_id, from 0 to {size - 1}"
            )
        start_id = named[0]
    if not 0 <= start_id < size:
        raise IsolossError(f"{source}: start_id is {start_id}; the model's ids are from 0 to {size - 1}")
    return start_id


def count_text(paths: Iterable[str], tokenizer: PreTrainedTokenizerFast, size: int) -> np.ndarray:
    """Return (size,) int64: how often each id occurs in text files, as the tokenizer reads them."""
    counts = np.zeros(size, dtype=np.int64)
    for ids in tokenizers.encode(tokenizer, (text for _, text in documents.read_documents(paths))):
        if len(ids) and ids.max() >= size:
            raise IsolossError(f"the tokenizer gives the id {ids.max()}; the teacher's ids are from 0 to {size - 1}")
        counts += np.bincount(ids, minlength=size)
    return counts


def count_samples(model: Any, start_id: int, *, sequences: int, length: int, seed: int) -> np.ndarray:
    """Return (V,) int64: how often each id occurs in sequences that the unrestricted model draws."""
    size = vocab_size(model)
    scorer = Scorer(model, start_id, torch.arange(size))
    counts = np.zeros(size, dtype=np.int64)
    for first in range(0, sequences, _DRAWN):
        generator = seeds.generator(seed, "teacher tokens", first)
        uniforms = torch.rand(min(_DRAWN, sequences - first), length, generator=generator, dtype=torch.float64)
        counts += np.bincount(scorer.draw(uniforms).flatten().numpy(), minlength=size)
    return counts


def most_frequent(counts: np.ndarray, specials: Iterable[int], most: int) -> tuple[int, ...]:
    """Return the ids of the `most` largest counts, largest first, smaller ids first among equals.

    Special ids and those that do not occur are left out, so that there may be fewer.
    """
    counts = counts.copy()
    counts[[index for index in specials if 0 <= index < len(counts)]] = 0
    order = np.argsort(-counts, kind="stable")[:most]
    return tuple(int(index) for index in order if counts[index] > 0)


def checkpoint_content(model: Any, checkpoint: str) -> str:
    """Return the SHA-256 of a checkpoint that was just loaded: its weights, and what its config.json decides.

    The weights count as loaded, by name, in float32: a checkpoint in one file or in several gives the same.
    """
    from transformers.utils import cached_file

    path = cached_file(checkpoint, "config.json", _raise_exceptions_for_missing_entries=False)
    # An adapter's folder has none: its base model's decides.
    text = model.config.to_json_string() if path is None else Path(path).read_text(encoding="utf-8")
    document = json.loads(text)
    decisive = {key: value for key, value in document.items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        # Names and shapes too, so that the same numbers in another place are other weights.
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _ids(model: Any, name: str) -> list[int]:
    """Return the ids that a config gives under a name: none, one or several."""
    value = getattr(model.config, name, None)
    return [] if value is None else [int(index) for index in value] if isinstance(value, list) else [int(value)]
