"""What a perfect model would predict for masked sentences: their true conditionals, and the entropies of these.

Shapes: n sentences, T positions, m masked positions, V tokens of the language.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.api import Language, Sentences
from isoloss.languages.batches import run_in_threads
from isoloss.languages.enumeration import masked_sentences, why_not_enumerable
from isoloss.languages.framed import Framed
from isoloss.run_config import ObjectiveConfig
from isoloss.text.masking import IGNORED, Batch, mask, mask_at

SUBSETS = 5  # of the paper's deviation, appendix A.5
ROWS = 512  # predicted tokens whose log-probabilities over the vocabulary are held in float64 at a time

_IMPOSSIBLE = math.log(torch.finfo(torch.float32).tiny)  # that of float64 is further down still
_KEPT_BYTES = 1 << 29  # of the conditionals: more are computed anew for each model
_PART_BYTES = 1 << 26  # of conditionals that are held at a time where they are not kept
_PART = 1 << 17  # sentences handed to a language at a time, at most


@dataclass(frozen=True)
class ExactTargets:
    """Masked sentences of an exact language, sampled or all of them, and what a perfect model would predict.

    A function of the language, the number of sentences, the objective and the seed alone: made once, it serves every
    checkpoint, and the values of two checkpoints on it are paired.
    """

    language: Language  # the language of the sentences
    batch: Batch  # the masked sentences: `input_ids`, `attention_mask`, `labels`, each (n, T), on the CPU
    # (n,) float64, the entropies of the conditionals in nats, summed over the masked positions of each sentence
    entropy: torch.Tensor
    counts: torch.Tensor  # (n,) masked positions of each sentence, at least 1
    objective: ObjectiveConfig  # how they were drawn
    seed: int  # of the draw of sentences and masks; no effect if these are all
    kept: torch.Tensor | None  # all that `log_conditionals` returns, where it has at most 512 MiB; else None
    weights: torch.Tensor | None = None  # (n,) float64, probabilities, if these are all sentences; None if sampled

    def __len__(self) -> int:
        return len(self.entropy)

    def log_conditionals(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return (m, V) float64: log Pr(x_t = c | all other visible tokens, the length), in nats.

        At the m masked positions of the sentences `first` to `last` - 1, sentence by sentence. What is not kept is
        computed.
        """
        part = slice(first, last)
        if self.kept is not None:
            before = int(self.counts[:first].sum())
            return self.kept[before : before + int(self.counts[part].sum())]
        batch = {name: value[part] for name, value in self.batch.items()}
        out = torch.empty(int(self.counts[part].sum()), self.language.vocab_size, dtype=torch.float64)
        return _fill(out, self.language.log_conditionals, batch, self.objective)

    def held_at_once(self, batch_size: int) -> int:
        """Return how many sentences' conditionals take a bounded memory: some batches of `batch_size`, at least one."""
        batch_bytes = 8 * self.language.vocab_size * int(self.counts.sum()) * batch_size / len(self)
        return batch_size * max(1, int(_PART_BYTES / batch_bytes))


def why_no_exact_targets(
    language: Language, *, num_sentences: int | Literal["all"], objective: ObjectiveConfig, seed: int
) -> str | None:
    """Return why what `exact_targets` returns cannot be had, or None where it can; draws no sentence."""
    if not language.is_exact:
        return f"{type(language).__name__} has no exact conditionals: the measure loss is a cross-entropy of it"
    if objective.kind == "causal":
        return (
            f"{type(language).__name__} gives exact conditionals of masked tokens, not of next ones: the exact loss is "
            "that of the masked objective, and a causal model's trace can be measured"
        )
    if num_sentences == "all":
        if objective.masking != "one":
            return (
                "the loss over all sentences needs one masked token per sentence, but this objective masks a fraction "
                f"of {objective.fraction:g}: give a number of sentences to draw"
            )
        reason = why_not_enumerable(language)
        return reason and f"{reason}: give a number of sentences to draw"
    most = language.max_masked
    if objective.masking == "fraction" and most < language.max_length:
        # such a language's sentences are all of one length: masks do not depend on the tokens between special ones
        inner = language.inner if isinstance(language, Framed) else language
        shape = (num_sentences, inner.max_length)
        blank = Sentences(torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], shape[1]))
        blank = language.frame(blank) if isinstance(language, Framed) else blank
        batch = mask(blank, language, objective, generator=seeds.generator(seed, "evaluation masks"))
        masked = int((batch["labels"] != IGNORED).sum(dim=1).max())
        if masked > most:
            return (
                f"{type(language).__name__} gives exact conditionals with up to {most} masked "
                f"token{'s' if most > 1 else ''} per sentence, and masking a fraction of {objective.fraction:g} masks "
                f"up to {masked}; the trace can be measured"
            )
    return None


def exact_targets(
    language: Language, *, num_sentences: int | Literal["all"], objective: ObjectiveConfig, seed: int
) -> ExactTargets:
    """Draw sentences, mask tokens of each and compute the exact conditionals there (paper, A.5 and A.7).

    With `num_sentences="all"` nothing is drawn: it takes every distinct sentence with one masked token, weighted by its
    probability (`isoloss.languages.enumeration.masked_sentences`).

    Each conditional is given the visible tokens, as the model's prediction is: with several tokens of a sentence masked
    it is a sum over all tokens at the other masked positions. Where the conditionals take more than 512 MiB, their
    entropies are computed here, and they themselves a part at a time whenever a model is measured.

    Raises:
        IsolossError: Fewer than ten sentences; no exact conditionals under this objective; with `all`, more than 65,536
            strings, or an objective that masks a fraction.
    """
    if isinstance(num_sentences, str) and num_sentences != "all":
        raise IsolossError(f"num_sentences is {num_sentences!r}; it must be a whole number or all")
    if num_sentences != "all" and num_sentences < 2 * SUBSETS:
        raise IsolossError(f"num_sentences is {num_sentences}; an error bar needs at least {2 * SUBSETS}")
    if reason := why_no_exact_targets(language, num_sentences=num_sentences, objective=objective, seed=seed):
        raise IsolossError(reason)
    weights = None
    if num_sentences == "all":
        sentences, positions, weights = masked_sentences(language)
        batch = mask_at(sentences, torch.arange(sentences.tokens.shape[1]) == positions[:, None], language)
    else:
        tokens, lengths = language.sample(num_sentences, generator=seeds.generator(seed, "evaluation sentences"))[:2]
        sentences = Sentences(tokens.cpu(), lengths.cpu())
        batch = mask(sentences, language, objective, generator=seeds.generator(seed, "evaluation masks"))
        del tokens
    del sentences  # the batch has them
    chosen = batch["labels"] != IGNORED
    counts = chosen.sum(dim=1)
    total = int(counts.sum())
    kept, entropy = None, torch.empty(total, dtype=torch.float64)
    if 8 * total * language.vocab_size <= _KEPT_BYTES:
        kept = torch.empty(total, language.vocab_size, dtype=torch.float64)
        _fill(kept, language.log_conditionals, batch, objective)
        log_p = kept

        def compute(first: int) -> None:
            rows = log_p[first : first + ROWS]
            entropy[first : first + ROWS] = (probabilities(rows) * -rows).sum(dim=1)

        run_in_threads(compute, ((first,) for first in range(0, total, ROWS)), kept.device)
    else:
        _fill(entropy, language.conditional_entropy, batch, objective)
    return ExactTargets(
        language=language,
        batch=batch,
        entropy=by_sentence(entropy, chosen),
        counts=counts,
        objective=objective,
        seed=seed,
        kept=kept,
        weights=weights,
    )


def _fill(
    out: torch.Tensor, compute: Callable[..., torch.Tensor], batch: Batch, objective: ObjectiveConfig
) -> torch.Tensor:
    """Set `out`, (m,) or (m, V), to what `compute` says of the m masked positions, and return it.

    Sentences with as many masked positions go together.
    """
    chosen = batch["labels"] != IGNORED
    counts = chosen.sum(dim=1)
    firsts = counts.cumsum(dim=0) - counts
    lengths = batch["attention_mask"].sum(dim=1)
    row_bytes = out.element_size() * math.prod(out.shape[1:])
    for count in sorted(set(counts.tolist())):
        size = min(_PART, max(1, _PART_BYTES // (count * row_bytes)))
        for rows in (counts == count).nonzero()[:, 0].split(size):
            masked = chosen[rows]
            tokens = torch.where(masked, batch["labels"][rows], batch["input_ids"][rows])
            positions = masked.nonzero()[:, 1].view(-1, count)
            unknown = None if objective.masking == "one" else masked
            values = compute(tokens, lengths[rows], mask=unknown, positions=positions)
            indices = firsts[rows, None] + torch.arange(count)
            out.numpy()[indices.flatten().numpy()] = values.flatten(0, 1).cpu().numpy()
    return out


def by_sentence(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return (n,): the sums of (m,) values over the chosen positions of each sentence."""
    rows = chosen.nonzero()[:, 0]
    return torch.zeros(len(chosen), dtype=values.dtype, device=values.device).index_add_(0, rows, values)


def probabilities(log_p: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of log-conditionals: 0 where these stand for impossible tokens, as protocols have it."""
    return log_p.exp().masked_fill(log_p <= _IMPOSSIBLE, 0.0)
