"""A causal language model as a language: its sentences of some length over some of its tokens, with the exact truth.

Shapes: n sentences, T positions, K tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoloss import loading, seeds
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages import batches
from isoloss.lab.languages.api import ExactLanguage, Sentences, Stored
from isoloss.lab.languages.config import TeacherConfig, check_unchanged
from isoloss.lab.languages.teacher import scores
from isoloss.text import tokenizers

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
        >>> from transformers import GPT2Config, GPT2LMHeadModel
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

        Raises:
            IsolossError: An id is out of range, special or named twice, there are fewer than two, the model knows no
                start token or no so long text, or the vocabulary does not fit.
        """
        most = getattr(model.config, "max_position_embeddings", None)
        if length < 1 or (most is not None and length > most):
            limit = "at least 1 token" if most is None else f"from 1 to {most} tokens"
            raise IsolossError(f"{source}: the length is {length}; it must be {limit}")
        self.start_id = scores.find_start(model, start_id, source)
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
        self._scorer = scores.Scorer(copy.deepcopy(model), self.start_id, torch.tensor(self.tokens))
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
        content = scores.checkpoint_content(model, name)
        check_unchanged(config.checkpoint, config.content, content)
        try:
            tokenizer = tokenizers.load_tokenizer(name)
        except IsolossError as error:
            if config.corpus and not config.tokens:
                raise IsolossError(f"the tokens of a corpus cannot be counted: {error}") from error
            tokenizer = None
        start_id = scores.find_start(model, config.start_id, name)
        tokens = config.tokens or scores.choose_tokens(model, tokenizer, start_id, config)
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
        return f"what a causal language model writes over {super().describe()}"

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        super()._move(device, dtype)
        self._scorer = copy.copy(self._scorer)
        if self._scorer.model.dtype != dtype or self._scorer.ids.device != device:
            self._scorer.model = copy.deepcopy(self._scorer.model)
            self._scorer.to(device, dtype)

    def __repr__(self) -> str:
        sizes = f"{self.vocab_size} tokens, {self.max_length} tokens per sentence"
        return f"Teacher({self._source}, {sizes}, {self.dtype} on {self.device})"

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
            own = seeds.generator(seed, "teacher sentences", first)
            uniforms = torch.rand(_ROWS, self.max_length, generator=own, dtype=torch.float64)
            tokens[first : first + _ROWS] = self._scorer.draw(uniforms[: n - first])
        return Sentences(tokens.to(self.device), torch.full((n,), self.max_length, device=self.device))

    def _log_prob(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ids, masked = self._masked(ids, lengths)
        self._check_completions(masked.sum(dim=1))
        out = torch.empty(len(ids), dtype=self.dtype, device=self.device)
        for rows, prefix in self._read(ids, lengths):
            steps = prefix.logs.gather(2, prefix.tokens[..., None])[..., 0]
            out[rows] = steps.sum(dim=1)
            for unknown_at, members in scores.by_set(masked[rows]):
                if unknown_at:
                    index = torch.tensor(members, device=self.device)
                    endings = self._scorer.completions(prefix, index, unknown_at).flatten(1).logsumexp(dim=1)
                    out[rows[index]] = steps[index, : unknown_at[0]].sum(dim=1) + endings
        scores.check_possible(out)
        return out

    def _log_conditionals(
        self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        positions = _all_positions(ids) if positions is None else positions
        out = torch.zeros(*positions.shape, self.vocab_size, dtype=self.dtype, device=self.device)
        for rows, columns, logs in self._conditionals(ids, lengths, positions):
            out[rows, columns] = logs.clamp(min=math.log(torch.finfo(self.dtype).tiny))
        return out

    def _entropies(self, ids: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        positions = _all_positions(ids) if positions is None else positions
        out = torch.zeros(positions.shape, dtype=self.dtype, device=self.device)
        for rows, columns, logs in self._conditionals(ids, lengths, positions):
            terms = logs.clamp(min=math.log(torch.finfo(self.dtype).tiny)).mul_(logs.exp())
            out[rows, columns] = terms.sum(dim=1).neg_().abs_()  # no -0.0
        return out

    def truncated_log_conditionals(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        positions: torch.Tensor,
        mass: float = 0.999,
        candidates: int | None = None,
    ) -> scores.Truncated:
        r"""Return conditionals over the likeliest tokens by `Pr(c | x_<t)` only, and what that may leave out.

        Write `q(c) = Pr(c | x_<t)`, `s(c) = Pr(x_>t | x_<t, c)`, A for the sum of q s over the kept tokens, B for that
        over the others and R for the sum of q over the others. What is left out is B / (A + B). It grows with B, and B
        <= R as s <= 1, so that it is at most R / (A + R). A model may have s = 1 for every other token: without scoring
        them no smaller bound holds. It is R itself at the last position, and near 1 where A, the chance of the rest of
        the sentence, is small against R. Over sentences that the language draws, however, what is left out has the mean
        of R: both are the chance that x_t is not kept, which x_<t decides. The true conditional of a kept token is at
        most the one returned, and at least (1 - bound) times it.

        Args:
            tokens: As for `log_prob`.
            lengths: As for `log_prob`.
            positions: As for `log_conditionals`; with (n,) the results lack the dimension k.
            mass: Keep the fewest tokens whose q have this sum, above 0 and at most 1.
            candidates: Keep this many instead, from 1 to K.
        """
        if candidates is not None and not 1 <= candidates <= self.vocab_size:
            raise IsolossError(f"candidates is {candidates}; it must be from 1 to {self.vocab_size}")
        if not 0 < mass <= 1:
            raise IsolossError(f"mass is {mass}; it must be above 0 and at most 1")
        ids, lengths = self._checked(tokens, lengths)
        ids, _ = self._masked(ids, lengths)
        wide = batches.checked_positions(positions, lengths)
        assert wide is not None
        parts: list[tuple[torch.Tensor, torch.Tensor, scores.Truncated]] = []
        for chunk, prefix in self._read(ids, lengths):
            for position in sorted(set(wide[chunk].flatten().tolist())):
                rows, columns = (wide[chunk] == position).nonzero(as_tuple=True)
                kept = scores.choose_kept(prefix.logs[rows, position], mass=mass, candidates=candidates)
                parts.append((chunk[rows], columns, scores.truncate(self._scorer, prefix, rows, position, kept)))
        joined = scores.join_parts(parts, wide.shape, self.pad_id, self.dtype, self.device)
        return scores.Truncated(*(field.view(*positions.shape, *field.shape[2:]) for field in joined))

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
        self._check_completions(counts.masked_fill(~inside, 0).amax(dim=1) if wide.shape[1] else counts[:, 0] * 0)
        for chunk, prefix in self._read(ids, lengths):
            rows, columns = inside[chunk].nonzero(as_tuple=True)
            at = wide[chunk][rows, columns]
            unknown = masked[chunk][rows].scatter(1, at[:, None], True)
            for unknown_at, members in scores.by_set(unknown):
                index = torch.tensor(members, device=self.device)
                sentences, which = torch.unique(rows[index], return_inverse=True)
                joint = self._scorer.completions(prefix, sentences, unknown_at)
                scores.check_possible(joint.flatten(1).logsumexp(dim=1))
                for axis, position in enumerate(unknown_at):
                    chosen = at[index] == position
                    if bool(chosen.any()):
                        marginal = (
                            joint.movedim(1 + axis, 1).flatten(2).logsumexp(dim=2) if len(unknown_at) > 1 else joint
                        )
                        logs = marginal.log_softmax(dim=1)[which[chosen]]
                        yield chunk[sentences[which[chosen]]], columns[index[chosen]], logs

    def _read(self, ids: torch.Tensor, lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, scores.Prefix]]:
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
        return max(1, int((math.log(_COMPLETIONS) + 1e-9) / math.log(self.vocab_size)))

    def _check_completions(self, counts: torch.Tensor) -> None:
        wrong = counts > self.max_masked
        if (row := batches.first(wrong)) is not None:
            raise IsolossError(
                f"sentence {row} has {int(counts[row])} unknown tokens, with {self.vocab_size}^{int(counts[row])} "
                f"completions to add up; a teacher adds up {_COMPLETIONS} at most, and always those of one token"
            )


def _all_positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)


def _load(checkpoint: str) -> tuple[str, Any]:
    """Return the checkpoint's name, a folder's made absolute, and its model in float32 on the CPU."""
    folder = Path(checkpoint).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else checkpoint
    loaded = loading.load_model(name, device="cpu")
    if loaded.kind != "causal":
        raise IsolossError(f"{checkpoint} is a {loaded.architecture}: a teacher is a causal model, which writes text")
    return name, loaded.model


def _checked_tokens(tokens: tuple[int, ...], model: Any, source: str) -> tuple[int, ...]:
    size, special = scores.vocab_size(model), scores.special_token_ids(model)
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
