"""The pre-training loss of a masked language model: entropy plus KL where the truth is known, held-out text elsewhere.

Shapes: n sentences, T positions, V tokens of the language, M ids of the model (M >= V: the special tokens come last).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.api import Language, Sentences
from isoloss.languages.parallel import run_in_threads
from isoloss.model_checks import device_of, refuse_dropout
from isoloss.models.make import predicted_logits
from isoloss.run_config import ObjectiveConfig
from isoloss.statistics import ratio
from isoloss.statistics.estimate import Estimate
from isoloss.text.causal import objective_batch
from isoloss.text.masking import IGNORED, Batch, mask

UNIT = "nats per predicted token"
_IMPOSSIBLE = math.log(torch.finfo(torch.float32).tiny)  # that of float64 is further down still
_SUBSETS = 5  # of the paper's deviation, appendix A.5
_KEPT_BYTES = 1 << 29  # of a truth's conditionals: more are computed anew for each model
_PART_BYTES = 1 << 26  # of conditionals that are held at a time where they are not kept
_PART = 1 << 17  # sentences handed to a language at a time, at most
_ROWS = 512  # predicted tokens whose log-probabilities over the vocabulary are held in float64 at a time


# --- exact languages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Masked sentences of an exact language and what a perfect model would say about them.

    A function of the language, the number of sentences, the objective and the seed alone: made once, it serves every
    checkpoint, and the values of two checkpoints on it are paired.

    Attributes:
        language: Where the sentences are from.
        batch: The masked sentences: `input_ids`, `attention_mask`, `labels`, each (n, T), on the CPU.
        entropy: (n,) float64, the entropies of the conditionals in nats, summed over the masked positions of each
            sentence.
        counts: (n,) masked positions of each sentence, at least 1.
        objective: How they were drawn.
        seed: What the sentences and masks were drawn with.
        kept: All that `log_conditionals` returns, where it has at most 512 MiB; else None.
    """

    language: Language
    batch: Batch
    entropy: torch.Tensor
    counts: torch.Tensor
    objective: ObjectiveConfig
    seed: int
    kept: torch.Tensor | None

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


def why_no_truth(language: Language, *, num_sentences: int, objective: ObjectiveConfig, seed: int) -> str | None:
    """Return why the exact conditionals of `truth` cannot be had, or None where they can; draws no sentence.

    Args:
        language: As for `truth`.
        num_sentences: As for `truth`.
        objective: As for `truth`.
        seed: As for `truth`.
    """
    if not language.is_exact:
        return f"{type(language).__name__} has no exact conditionals: measure its held-out loss instead"
    if objective.kind == "causal":
        return (
            f"{type(language).__name__} gives exact conditionals of hidden tokens, not of next ones: the exact loss is "
            "that of the masked objective, and a causal model's trace can be measured"
        )
    most = language.max_masked
    if objective.masking == "fraction" and most < language.max_length:
        # such a language's sentences are all of one length, without special tokens: masks do not depend on their tokens
        shape = (num_sentences, language.max_length)
        blank = Sentences(torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], shape[1]))
        batch = mask(blank, language, objective, generator=seeds.generator(seed, "evaluation masks"))
        hidden = int((batch["labels"] != IGNORED).sum(dim=1).max())
        if hidden > most:
            return (
                f"{type(language).__name__} gives exact conditionals with up to {most} hidden "
                f"token{'s' if most > 1 else ''} a sentence, and masking a fraction of {objective.fraction:g} hides up "
                f"to {hidden}; the trace can be measured"
            )
    return None


def truth(language: Language, *, num_sentences: int, objective: ObjectiveConfig, seed: int) -> Truth:
    """Draw sentences, mask tokens of each and compute the exact conditionals there (paper, A.5 and A.7).

    Each conditional is given the visible tokens, as the model's prediction is: with several tokens of a sentence masked
    it is a sum over all tokens at the other masked positions. Where the conditionals take more than 512 MiB, their
    entropies are computed here, and they themselves a part at a time whenever a model is measured.

    Args:
        language: An exact language.
        num_sentences: How many; the paper takes 1e6.
        objective: Which tokens are masked.
        seed: Decides the sentences and the masked positions.

    Raises:
        IsolossError: The language is not exact, or not under masks as the objective draws them, or there are fewer
            than ten sentences.
    """
    if num_sentences < 2 * _SUBSETS:
        raise IsolossError(f"num_sentences is {num_sentences}; an error bar needs at least {2 * _SUBSETS}")
    if reason := why_no_truth(language, num_sentences=num_sentences, objective=objective, seed=seed):
        raise IsolossError(reason)
    tokens, lengths = language.sample(num_sentences, generator=seeds.generator(seed, "evaluation sentences"))[:2]
    sentences = Sentences(tokens.cpu(), lengths.cpu())
    batch = mask(sentences, language, objective, generator=seeds.generator(seed, "evaluation masks"))
    del tokens, sentences  # the batch has them
    chosen = batch["labels"] != IGNORED
    counts = chosen.sum(dim=1)
    total = int(counts.sum())
    kept, entropy = None, torch.empty(total, dtype=torch.float64)
    if 8 * total * language.vocab_size <= _KEPT_BYTES:
        kept = torch.empty(total, language.vocab_size, dtype=torch.float64)
        _fill(kept, language.log_conditionals, batch, objective)
        log_p = kept

        def compute(first: int) -> None:
            rows = log_p[first : first + _ROWS]
            entropy[first : first + _ROWS] = (_probabilities(rows) * -rows).sum(dim=1)

        run_in_threads(compute, ((first,) for first in range(0, total, _ROWS)), kept.device)
    else:
        _fill(entropy, language.conditional_entropy, batch, objective)
    return Truth(
        language=language,
        batch=batch,
        entropy=_by_sentence(entropy, chosen),
        counts=counts,
        objective=objective,
        seed=seed,
        kept=kept,
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
            hidden = chosen[rows]
            tokens = torch.where(hidden, batch["labels"][rows], batch["input_ids"][rows])
            positions = hidden.nonzero()[:, 1].view(-1, count)
            unknown = None if objective.masking == "one" else hidden
            values = compute(tokens, lengths[rows], mask=unknown, positions=positions)
            places = firsts[rows, None] + torch.arange(count)
            out.numpy()[places.flatten().numpy()] = values.flatten(0, 1).cpu().numpy()
    return out


def _by_sentence(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return (n,): the sums of (m,) values over the chosen positions of each sentence."""
    rows = chosen.nonzero()[:, 0]
    return torch.zeros(len(chosen), dtype=values.dtype, device=values.device).index_add_(0, rows, values)


def _probabilities(log_p: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of log-conditionals: 0 where these stand for impossible tokens, as protocols have it."""
    return log_p.exp().masked_fill(log_p <= _IMPOSSIBLE, 0.0)


def kl_values(
    model: nn.Module, truth: Truth, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Return (n,) float64: KL(p || q) = sum_c p_c (log p_c - log q_c) in nats, summed over a sentence's masked tokens.

    p is the true conditional over the V tokens, q the model's softmax over all its M ids. Mass that q gives to special
    tokens is therefore part of the KL, as it is part of the cross-entropy that training minimises.

    Args:
        model: A masked language model, a module whose output has `logits` (n, T, M).
        truth: The sentences and their conditionals.
        batch_size: Sentences in a forward pass.
        progress: Called with the number of sentences done after each.

    Raises:
        IsolossError: Dropout is on, the model knows fewer ids than the language, or its logits are not finite.
    """
    ends = truth.counts.cumsum(dim=0)
    values = torch.empty(int(ends[-1]), dtype=torch.float64)
    done, upto = 0, 0
    held = values[:0]  # conditionals of the masked positions up to `upto`
    at_once = truth.held_at_once(max(1, batch_size))
    for log_q in _predictions(model, truth.batch, batch_size=batch_size):
        if done == upto:
            first = int(torch.searchsorted(ends, done, right=True))
            held = truth.log_conditionals(first, first + at_once)
            upto += len(held)
        log_p = held[len(held) - (upto - done) :][: len(log_q)]
        if log_q.shape[1] < log_p.shape[1]:
            raise IsolossError(f"the model knows {log_q.shape[1]} ids and the language has {log_p.shape[1]} tokens")
        difference = log_p - log_q[:, : log_p.shape[1]].cpu()
        values[done : done + len(log_q)] = (_probabilities(log_p) * difference).sum(dim=1)
        done += len(log_q)
        if progress is not None:
            progress(int(torch.searchsorted(ends, done, right=True)))
    return _by_sentence(values, truth.batch["labels"] != IGNORED)


def pretraining_loss(
    model: nn.Module,
    truth: Truth,
    *,
    batch_size: int = 256,
    kl: torch.Tensor | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Return `entropy`, `kl` and `loss` = entropy + KL: the model's cross-entropy against the truth (paper, A.5, A.7).

    In nats per predicted token; all predicted tokens weigh the same, and errors are over sentences. `details` holds
    `subset_std`, the standard deviation over five subsets as the paper prints it, and their `subset_size`. The error of
    a difference between two models on the same sentences is `paired_difference` of their `kl_values` (with
    `predicted=truth.counts`), which is far smaller than these errors combined.

    Args:
        model: As for `kl_values`.
        truth: As for `kl_values`.
        batch_size: As for `kl_values`.
        kl: What `kl_values` returned, where that was asked already.
        progress: As for `kl_values`.

    Raises:
        IsolossError: As for `kl_values`.
    """
    started = time.perf_counter()
    if kl is None:
        kl = kl_values(model, truth, batch_size=batch_size, progress=progress)
    details = {**_details(model), **_predicted(truth.objective), "seed": truth.seed}
    named = {"entropy": truth.entropy, "kl": kl, "loss": truth.entropy + kl}
    seconds = time.perf_counter() - started
    return {
        name: _estimate(values, truth.counts, method=f"exact conditionals, {name}", details=details, seconds=seconds)
        for name, values in named.items()
    }


def paired_difference(a: torch.Tensor, b: torch.Tensor, *, predicted: torch.Tensor | None = None) -> Estimate:
    """Return the mean of a - b over the same sentences, with the error of the difference.

    Args:
        a: (n,) values of one model, e.g. its `kl_values`, in nats.
        b: (n,) values of the other on the same sentences.
        predicted: (n,) predicted tokens of each sentence, where `a` and `b` are sums over them (`held_out_values`);
            None: one.

    Raises:
        IsolossError: The two do not have the same sentences, or there are fewer than two.

    Example:
        >>> print(paired_difference(torch.tensor([1.5, 2.5, 4.0]), torch.tensor([1.0, 2.0, 3.0])))
        0.67 ± 0.17 nats per predicted token
    """
    if a.shape != b.shape or a.ndim != 1:
        raise IsolossError(f"values of shapes {tuple(a.shape)} and {tuple(b.shape)} are not of the same sentences")
    counts = torch.ones_like(a) if predicted is None else predicted
    value, stderr = ratio.ratio(a.double() - b.double(), counts)
    return Estimate(
        value=value,
        stderr=stderr,
        samples=len(a),
        unit=UNIT,
        num_inputs=int(counts.sum()),
        method="paired difference",
    )


# --- corpora ---------------------------------------------------------------------------------------------------------


def held_out_values(
    model: nn.Module,
    language: Language,
    *,
    num_sequences: int,
    objective: ObjectiveConfig,
    seed: int,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) float64 nats of each held-out sequence, summed over its predicted tokens, and (n,) their number.

    Args:
        model: A language model, a module whose output has `logits` (n, T, M).
        language: Where the held-out sequences come from.
        num_sequences: How many at most.
        objective: Which tokens are predicted, and from what.
        seed: Decides the masks; models measured with the same seed are paired.
        batch_size: Sequences in a forward pass.
        progress: Called with the number of sequences done after each.

    Raises:
        IsolossError: Dropout is on, the model does not know a label, or its logits are not finite.
    """
    sentences = language.held_out(num_sequences)
    batch = objective_batch(sentences, language, objective, generator=seeds.generator(seed, "evaluation masks"))
    chosen = batch["labels"] != IGNORED
    counts = chosen.sum(dim=1)
    row_of = chosen.nonzero()[:, 0]
    labels = batch["labels"][chosen]
    causal = objective.kind == "causal"
    nats = torch.zeros(len(counts), dtype=torch.float64)
    ends = counts.cumsum(dim=0)
    done = 0
    for log_q in _predictions(model, batch, batch_size=batch_size, causal=causal):
        part = slice(done, done + len(log_q))
        if int(labels[part].max()) >= log_q.shape[1]:
            raise IsolossError(f"token {int(labels[part].max())} is not among the {log_q.shape[1]} ids of the model")
        surprise = -log_q.gather(1, labels[part, None].to(log_q.device))[:, 0]
        nats.index_add_(0, row_of[part], surprise.cpu())
        done += len(log_q)
        if progress is not None:
            progress(int((ends <= done).sum()))
    return nats, counts


def held_out_loss(
    model: nn.Module,
    language: Language,
    *,
    num_sequences: int,
    objective: ObjectiveConfig,
    seed: int,
    batch_size: int = 32,
    values: tuple[torch.Tensor, torch.Tensor] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Return `loss`: the cross-entropy of held-out text in nats per predicted token.

    All predicted tokens weigh the same. The error is clustered: it counts sequences, not tokens, as independent.
    `details` holds `subset_std` and `subset_size` as for `pretraining_loss`.

    Args:
        model: As for `held_out_values`.
        language: As for `held_out_values`.
        num_sequences: As for `held_out_values`; at least ten must be there.
        objective: As for `held_out_values`.
        seed: As for `held_out_values`.
        batch_size: As for `held_out_values`.
        values: What `held_out_values` returned, where that was asked already.
        progress: As for `held_out_values`.

    Raises:
        IsolossError: As for `held_out_values`, or fewer than ten sequences.
    """
    started = time.perf_counter()
    if values is None:
        values = held_out_values(
            model,
            language,
            num_sequences=num_sequences,
            objective=objective,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
        )
    nats, counts = values
    if len(nats) < 2 * _SUBSETS:
        raise IsolossError(f"there are {len(nats)} held-out sequences; an error bar needs at least {2 * _SUBSETS}")
    details = {**_details(model), **_predicted(objective), "seed": seed}
    seconds = time.perf_counter() - started
    return {"loss": _estimate(nats, counts, method="held-out text", details=details, seconds=seconds)}


# --- both: the forward passes and the result -------------------------------------------------------------------------


def _predictions(model: nn.Module, batch: Batch, *, batch_size: int, causal: bool = False) -> Iterator[torch.Tensor]:
    """Yield (rows, M) float64 log-probabilities of the predicted tokens, in order, a bounded number at a time."""
    if batch_size < 1:
        raise IsolossError(f"batch_size is {batch_size}; it must be at least 1")
    refuse_dropout(model)
    device = device_of(model)
    wide = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    for start in range(0, len(batch["labels"]), batch_size):
        part = {name: value[start : start + batch_size].to(device) for name, value in batch.items()}
        with torch.no_grad():
            logits = predicted_logits(model, part, causal=causal)
        if not bool(logits.isfinite().all()):
            raise IsolossError(
                f"the model's logits are NaN or infinite in sentences {start} to {start + len(part['labels']) - 1}"
            )
        for first in range(0, len(logits), _ROWS):
            yield logits[first : first + _ROWS].to(wide).double().log_softmax(dim=1)


def _estimate(
    sums: torch.Tensor, counts: torch.Tensor, *, method: str, details: dict[str, Any], seconds: float
) -> Estimate:
    value, stderr = ratio.ratio(sums, counts)
    subset_std, subset_size = ratio.subset_deviation(sums, counts, subsets=_SUBSETS)
    return Estimate(
        value=value,
        stderr=stderr,
        samples=len(sums),
        unit=UNIT,
        num_inputs=int(counts.sum()),
        method=method,
        seconds=seconds,
        details={"subset_std": subset_std, "subset_size": subset_size, **details},
    )


def _predicted(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return which tokens are predicted, as details of an estimate."""
    if objective.kind == "causal":
        return {"predicts": "next token"}
    fraction = {"fraction": objective.fraction} if objective.masking == "fraction" else {}
    return {"masking": objective.masking, **fraction}


def _details(model: nn.Module) -> dict[str, Any]:
    parameter = next(model.parameters())
    return {"device": str(parameter.device), "dtype": str(parameter.dtype).removeprefix("torch.")}
