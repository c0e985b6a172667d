"""The loss of a language model: entropy plus KL where the true conditionals are known, cross-entropy of text elsewhere.

Shapes: n sentences, T positions, m predicted positions, V tokens of the language, M ids of the model (M >= V: the
special tokens come last).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.languages.batches import run_in_threads
from isoloss.lab.languages.exact import all_sentences, masked_sentences, why_not_enumerable
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.lab.models.make import predicted_logits
from isoloss.model_checks import device_of, refuse_dropout
from isoloss.run_config import ObjectiveConfig
from isoloss.statistics import ratio
from isoloss.statistics.estimate import Estimate
from isoloss.text.clusters import SequenceClusters
from isoloss.text.masking import IGNORED, Batch, mask, mask_at, objective_batch

UNIT = "nats per predicted token"
SUBSETS = 5  # of the paper's deviation, appendix A.5
ROWS = 512  # predicted tokens whose log-probabilities over the vocabulary are held in float64 at a time

_IMPOSSIBLE = math.log(torch.finfo(torch.float32).tiny)  # that of float64 is further down still
_KEPT_BYTES = 1 << 29  # of the conditionals: more are computed anew for each model
_PART_BYTES = 1 << 26  # of conditionals that are held at a time where they are not kept
_PART = 1 << 17  # sentences handed to a language at a time, at most


# --- what a perfect model would predict ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExactTargets:
    """Sentences of an exact language, sampled or all of them, and what a perfect model would predict.

    A function of the language, the number of sentences, the objective and the seed alone: made once, it serves every
    checkpoint, and the values of two checkpoints on it are paired.
    """

    language: Language  # the language of the sentences
    batch: Batch  # what a model reads: `input_ids`, `attention_mask`, `labels`, each (n, T), on the CPU
    # (n,) float64, the entropies of the conditionals in nats, summed over the predicted tokens of each sentence
    entropy: torch.Tensor
    counts: torch.Tensor  # (n,) predicted tokens of each sentence, at least 1
    objective: ObjectiveConfig  # how they were drawn
    seed: int  # of the draw of sentences and masks; no effect if these are all
    kept: torch.Tensor | None  # all that `log_conditionals` returns, where it has at most 512 MiB; else None
    weights: torch.Tensor | None = None  # (n,) float64, probabilities, if these are all sentences; None if sampled

    def __len__(self) -> int:
        return len(self.counts)

    def log_conditionals(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return (m, V) float64: the log-conditionals of the m predicted tokens, given what the model reads, in nats.

        Of the sentences `first` to `last` - 1, sentence by sentence. What is not kept is computed.
        """
        part = slice(first, last)
        if self.kept is not None:
            before = int(self.counts[:first].sum())
            return self.kept[before : before + int(self.counts[part].sum())]
        return _conditionals(self.language, {name: each[part] for name, each in self.batch.items()}, self.objective)

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
    if num_sentences == "all":
        if objective.kind == "masked" and objective.masking != "one":
            return (
                "the loss over all sentences needs one masked token per sentence, but this objective masks a fraction "
                f"of {objective.fraction:g}: give a number of sentences to draw"
            )
        reason = why_not_enumerable(language)
        return reason and f"{reason}: give a number of sentences to draw or, for a grammar file, a smaller length"
    most = language.max_masked
    if objective.kind == "masked" and objective.masking == "fraction" and most < language.max_length:
        # such a language's sentences are all of one length: masks do not depend on the tokens between special ones
        inner = language.inner if isinstance(language, WithSpecialTokens) else language
        shape = (num_sentences, inner.max_length)
        blank = Sentences(torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], shape[1]))
        blank = language.frame(blank) if isinstance(language, WithSpecialTokens) else blank
        # by the stream of `exact_targets`: whether a sentence has too many masks is decided by the draw
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

    Under the causal objective every token is predicted, given those before it: a model does not know how many follow
    (`Language.log_next`). With `num_sentences="all"` nothing is drawn: it takes every sentence, or every distinct one
    with one masked token (`isoloss.lab.languages.exact.masked_sentences`), weighted by its probability. Each
    conditional is given the visible tokens, as the model's prediction is.

    Raises:
        IsolossError: Fewer than ten sentences; no exact conditionals under this objective; with `all`, more than 65,536
            strings, or an objective that masks a fraction.

    Example:
        >>> from isoloss.lab.evaluation.loss import exact_targets
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.run_config import ObjectiveConfig
        >>> targets = exact_targets(Brackets(4), num_sentences="all", objective=ObjectiveConfig(), seed=0)
        >>> len(targets), abs(targets.entropy).max().item() < 1e-12  # the other brackets tell which one is masked
        (24, True)
    """
    if isinstance(num_sentences, str) and num_sentences != "all":
        raise IsolossError(f"num_sentences is {num_sentences!r}; it must be a whole number or all")
    if num_sentences != "all" and num_sentences < 2 * SUBSETS:
        raise IsolossError(f"num_sentences is {num_sentences}; an error bar needs at least {2 * SUBSETS}")
    if reason := why_no_exact_targets(language, num_sentences=num_sentences, objective=objective, seed=seed):
        raise IsolossError(reason)
    weights = None
    masks = seeds.generator(seed, "evaluation masks")
    if num_sentences != "all":
        tokens, lengths = language.sample(num_sentences, generator=seeds.generator(seed, "evaluation sentences"))[:2]
        sentences = Sentences(tokens.cpu(), lengths.cpu())
        batch = objective_batch(sentences, language, objective, generator=masks)
        del tokens
    elif objective.kind == "causal":
        sentences, weights = all_sentences(language)
        batch = objective_batch(sentences, language, objective, generator=masks)
    else:
        sentences, positions, weights = masked_sentences(language)
        batch = mask_at(sentences, torch.arange(sentences.tokens.shape[1]) == positions[:, None], language)
    # the batch has them, and both may be large
    del sentences
    chosen = _predicted_at(batch, objective)
    counts = chosen.sum(dim=1)
    total = int(counts.sum())
    targets = ExactTargets(
        language=language,
        batch=batch,
        entropy=torch.empty(len(counts), dtype=torch.float64),
        counts=counts,
        objective=objective,
        seed=seed,
        kept=_conditionals(language, batch, objective) if 8 * total * language.vocab_size <= _KEPT_BYTES else None,
        weights=weights,
    )
    entropy, done = torch.empty(total, dtype=torch.float64), 0
    for start in range(0, len(counts), size := targets.held_at_once(1)):
        log_p = targets.log_conditionals(start, start + size)
        part = entropy[done : done + len(log_p)]

        def compute(first: int, log_p: torch.Tensor = log_p, part: torch.Tensor = part) -> None:
            rows = log_p[first : first + ROWS]
            part[first : first + ROWS] = (probabilities(rows) * -rows).sum(dim=1)

        run_in_threads(compute, ((first,) for first in range(0, len(log_p), ROWS)), log_p.device)
        done += len(log_p)
    return dataclasses.replace(targets, entropy=by_sentence(entropy, chosen))


def _predicted_at(batch: Batch, objective: ObjectiveConfig) -> torch.Tensor:
    """Return (n, T) bool: the tokens that are predicted."""
    chosen: torch.Tensor = batch["labels"] != IGNORED
    if objective.kind == "causal":
        chosen[:, 0] = False  # nothing comes before it
    return chosen


def _conditionals(language: Language, batch: Batch, objective: ObjectiveConfig) -> torch.Tensor:
    """Return (m, V) float64: the log-conditionals of the predicted tokens."""
    chosen = _predicted_at(batch, objective)
    counts = chosen.sum(dim=1)
    out = torch.empty(int(counts.sum()), language.vocab_size, dtype=torch.float64)
    lengths = batch["attention_mask"].sum(dim=1)
    if objective.kind == "causal":
        # a start that is not a token of the sentences is put before them
        begin = 0 if language.start.is_in_sentences else 1
        tokens = batch["input_ids"][:, begin:]
        size = max(1, _PART_BYTES // (8 * tokens.shape[1] * language.vocab_size))
        done = 0
        for first in range(0, len(tokens), size):
            rows = slice(first, first + size)
            logs = language.log_next(tokens[rows], lengths[rows] - begin, without_special=True)
            logs = logs.cpu().double()[chosen[rows, begin:]]
            out[done : done + len(logs)] = logs
            done += len(logs)
        return out
    firsts = counts.cumsum(dim=0) - counts
    # sentences with as many masked positions go together
    for count in sorted(set(counts.tolist())):
        size = min(_PART, max(1, _PART_BYTES // (count * 8 * language.vocab_size)))
        for rows in (counts == count).nonzero()[:, 0].split(size):
            masked = chosen[rows]
            # the sentence before the masking: a language is told the tokens and which of them it may not look at
            tokens = torch.where(masked, batch["labels"][rows], batch["input_ids"][rows])
            positions = masked.nonzero()[:, 1].view(-1, count)
            # one masked token needs no mask, as a conditional never looks at the token that it is of
            unknown = None if objective.masking == "one" else masked
            values = language.log_conditionals(tokens, lengths[rows], mask=unknown, positions=positions)
            # in `out`, the positions of a sentence follow each other
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


# --- exact languages -------------------------------------------------------------------------------------------------


def kl_values(
    model: nn.Module, targets: ExactTargets, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Return (n,) float64: KL(p || q) = sum_c p_c (log p_c - log q_c) in nats, summed over a sentence's masked tokens.

    p is the true conditional over the V tokens, q the model's softmax over all its M ids. Mass that q gives to special
    tokens is therefore part of the KL, as it is part of the cross-entropy that training minimizes.

    Raises:
        IsolossError: Dropout is on, the model knows fewer ids than the language, or its logits are not finite.
    """
    chosen = _predicted_at(targets.batch, targets.objective)
    ends = targets.counts.cumsum(dim=0)
    values = torch.empty(int(ends[-1]), dtype=torch.float64)
    done = 0
    size = targets.held_at_once(max(1, batch_size))
    for first in range(0, len(targets), size):
        log_conditionals = targets.log_conditionals(first, first + size)
        start = done
        rows = {name: value[first : first + size] for name, value in targets.batch.items()}
        for log_q in _log_predictions(model, rows, batch_size=batch_size, objective=targets.objective, first=first):
            log_p = log_conditionals[done - start :][: len(log_q)]
            if log_q.shape[1] < log_p.shape[1]:
                raise IsolossError(f"the model knows {log_q.shape[1]} ids and the language has {log_p.shape[1]} tokens")
            difference = log_p - log_q[:, : log_p.shape[1]].cpu()
            values[done : done + len(log_q)] = (probabilities(log_p) * difference).sum(dim=1)
            done += len(log_q)
            if progress is not None:
                progress(int(torch.searchsorted(ends, done, right=True)))
    return by_sentence(values, chosen)


def pretraining_loss(
    model: nn.Module, targets: ExactTargets, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
) -> dict[str, Estimate]:
    """Return `entropy`, `kl` and `loss` = entropy + KL: the model's cross-entropy against the truth (paper, A.5, A.7).

    In nats per predicted token; all predicted tokens weigh the same, and errors are over sentences. `details` holds
    `subset_std`, the standard deviation over five subsets as the paper prints it, and their `subset_size`. `kl` and
    `loss` have influences, for the paired difference of two models; `entropy` says nothing of the model. If the targets
    are all masked sentences, the three are exact sums: their error is 0, and they have no subsets and no influences.

    Arguments and errors are as for `kl_values`.

    Example:
        >>> from isoloss.lab.evaluation.loss import exact_targets, pretraining_loss
        >>> from isoloss.lab.languages.config import BracketsConfig
        >>> from isoloss.lab.models.make import make_model
        >>> from isoloss.run_config import ModelConfig, ObjectiveConfig
        >>> language = BracketsConfig(length=4).build()
        >>> targets = exact_targets(language, num_sentences="all", objective=ObjectiveConfig(), seed=0)
        >>> loss = pretraining_loss(make_model(ModelConfig(size="d16"), language, seed=0).eval(), targets)
        >>> round(loss["loss"].value - loss["entropy"].value - loss["kl"].value, 12)
        0.0
    """
    started = time.perf_counter()
    kl = kl_values(model, targets, batch_size=batch_size, progress=progress)
    details = {**_details(model), **_predicted(targets.objective)}
    sums = {"entropy": targets.entropy, "kl": kl, "loss": targets.entropy + kl}
    seconds = time.perf_counter() - started
    if targets.weights is not None:
        # all predicted tokens weigh the same, however many a sentence has; of a masked one there is one
        per_token = targets.weights / float(targets.weights @ targets.counts.double())
        what = "sentences" if targets.objective.kind == "causal" else "masked sentences"
        known: dict[str, Any] = {"stderr": 0.0, "samples": 0, "unit": UNIT, "seconds": seconds, "details": details}
        known["num_predictions"] = int(targets.counts.sum())
        method = f"a sum over all {len(targets):,} {what}"
        return {
            name: Estimate(value=float(per_token @ values), method=f"exact conditionals, {name}: {method}", **known)
            for name, values in sums.items()
        }
    details["seed"] = targets.seed
    estimates = {
        name: _estimate(values, targets.counts, method=f"exact conditionals, {name}", details=details, seconds=seconds)
        for name, values in sums.items()
    }
    return {**estimates, "entropy": dataclasses.replace(estimates["entropy"], influence=None)}


# --- text ------------------------------------------------------------------------------------------------------------


def held_out_batch(language: Language, *, num_sequences: int, objective: ObjectiveConfig, seed: int) -> Batch:
    """Return held-out sequences of a language and what is predicted in them."""
    sentences = language.held_out(num_sequences)
    return objective_batch(sentences, language, objective, generator=seeds.generator(seed, "evaluation masks"))


def text_loss(
    model: nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    objective: ObjectiveConfig,
    seed: int,
    method: str,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Return `loss`: the cross-entropy of sequences in nats per predicted token; `method` says of which.

    All predicted tokens weigh the same. The error counts sequences as independent, or documents, or blocks of packed
    sequences (`isoloss.text.clusters.SequenceClusters`). `details` is as for `pretraining_loss`.

    Raises:
        IsolossError: Dropout is on, the model does not know a label, its logits are not finite, or there are fewer
            than ten independent sequences or documents.
    """
    started = time.perf_counter()
    batches = list(batches)
    batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    nats, counts = _cross_entropy(model, batch, objective, batch_size=batch_size, progress=progress)
    clusters = SequenceClusters(getattr(model, "config", None))
    numbers = clusters.add(batch)
    # copies of a sequence, or the sequences of a document, become one: the error is over what is independent
    nats, counts = (x.new_zeros(len(clusters)).index_add_(0, numbers, x) for x in (nats, counts))
    # `_estimate` takes the deviation of five subsets, with two clusters or more in each
    if len(nats) < 2 * SUBSETS:
        raise IsolossError(f"there are {len(nats)} {clusters.name}; an error bar needs at least {2 * SUBSETS}")
    details = {**_details(model), **_predicted(objective), "clusters": clusters.name, "seed": seed}
    seconds = time.perf_counter() - started
    loss = _estimate(nats, counts, method=method, details=details, seconds=seconds)
    if (blocks := clusters.blocks()) is not None:
        by_block = ratio.estimate_in_blocks(nats, counts, blocks.labels, unit=UNIT, method=method)
        loss = dataclasses.replace(
            loss,
            stderr=by_block.stderr,
            samples=by_block.samples,
            effective_samples=by_block.effective_samples,
            influence=by_block.influence,
            details={**loss.details, "clusters": blocks.name},
        )
    return {"loss": loss}


def _cross_entropy(
    model: nn.Module,
    batch: Batch,
    objective: ObjectiveConfig,
    *,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) float64 nats of each sequence, summed over its predicted tokens, and (n,) the number of these."""
    chosen = _predicted_at(batch, objective)
    counts = chosen.sum(dim=1)
    row_of = chosen.nonzero()[:, 0]
    labels = batch["labels"][chosen]
    ends = counts.cumsum(dim=0)
    nats = torch.zeros(len(counts), dtype=torch.float64)
    done = 0
    for log_q in _log_predictions(model, batch, batch_size=batch_size, objective=objective):
        part = slice(done, done + len(log_q))
        if int(labels[part].max()) >= log_q.shape[1]:
            raise IsolossError(f"token {int(labels[part].max())} is not among the {log_q.shape[1]} ids of the model")
        surprise = -log_q.gather(1, labels[part, None].to(log_q.device))[:, 0]
        nats.index_add_(0, row_of[part], surprise.cpu())
        done += len(log_q)
        if progress is not None:
            progress(int((ends <= done).sum()))
    return nats, counts


# --- both: the forward passes and the result -------------------------------------------------------------------------


def _log_predictions(
    model: nn.Module, batch: Batch, *, batch_size: int, objective: ObjectiveConfig, first: int = 0
) -> Iterator[torch.Tensor]:
    """Yield (rows, M) float64 log-probabilities of the predicted tokens, in order, a bounded number at a time.

    The first sentence of the batch has the number `first` in messages.
    """
    if batch_size < 1:
        raise IsolossError(f"batch_size is {batch_size}; it must be at least 1")
    refuse_dropout(model)
    device = device_of(model)
    wide = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    inputs = {name: value for name, value in batch.items() if name != "documents"}
    for start in range(0, len(batch["labels"]), batch_size):
        part = {name: value[start : start + batch_size].to(device) for name, value in inputs.items()}
        with torch.no_grad():
            logits = predicted_logits(model, part, causal=objective.kind == "causal")
        if not bool(logits.isfinite().all()):
            low, high = first + start, first + start + len(part["labels"]) - 1
            raise IsolossError(f"the model's logits are NaN or infinite in sentences {low} to {high}")
        # in float64, so that the only rounding is the logits' own: a KL near 0 is a sum of terms that cancel
        for row in range(0, len(logits), ROWS):
            yield logits[row : row + ROWS].to(wide).double().log_softmax(dim=1)


def _estimate(
    sums: torch.Tensor, counts: torch.Tensor, *, method: str, details: dict[str, Any], seconds: float
) -> Estimate:
    """Return a ratio of sums over independent clusters."""
    subset_std, subset_size = ratio.subset_deviation(sums, counts, subsets=SUBSETS)
    return dataclasses.replace(
        ratio.ratio_estimate(sums, counts, unit=UNIT, method=method),
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
